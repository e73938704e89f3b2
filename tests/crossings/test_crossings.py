"""Every use of every subject has the outcome that docs/crossings.md says: transformers' own, or a
refusal. A commit runs a share of the pairs, another the next; `--all-pairs` runs all."""

import functools
import itertools
import subprocess

import page
import pytest
from conftest import DEVICES, ROOT
from interpreter import compiled
from pairs import OWNED, Pair, function_pairs, outcome, pairs, why_not_here

pytestmark = [pytest.mark.filterwarnings("ignore"), compiled]
SHARES, SLOW_SHARES = 11, 83  # of pairs, and of those that take seconds; primes


@functools.cache
def share() -> int:
    """The number of commits before this one: which share of the pairs is run."""
    command = ["git", "rev-list", "--count", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout or 0)


def chosen() -> list:
    """The pairs of this commit's share."""
    everything = [*pairs(), *function_pairs()]
    quick = [pair for pair in everything if not pair.slow]
    slow = [pair for pair in everything if pair.slow]
    return [
        pair
        for some, count in ((quick, SHARES), (slow, SLOW_SHARES))
        for pair in itertools.islice(some, share() % count, None, count)
    ]


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-pairs", default=False)
        some = [*pairs(), *function_pairs()] if everything else chosen()
        metafunc.parametrize("pair", [marked(pair) for pair in some], ids=str)
        metafunc.parametrize("device", DEVICES)


def marked(pair: Pair):
    owner = OWNED.get(pair.use) or OWNED.get(str(pair))
    marks = [pytest.mark.xfail(reason=owner, strict=True)] if owner else []
    return pytest.param(pair, marks=marks)


def test_a_pair(pair, device, tmp_path):
    why = why_not_here(pair, device)
    if why:
        pytest.skip(why)
    found, expected = outcome(pair, device, tmp_path), page.expected(pair)
    assert page.may_be(found, expected, device), f"{pair}: {found}; the page says: {expected}"


def test_the_page():
    """docs/crossings.md is what tests/crossings/page.py makes of outcomes.json."""
    assert (ROOT / "docs" / "crossings.md").read_text() == page.text()
    assert set(page.outcomes()) <= set(map(str, [*pairs(), *function_pairs()]))
