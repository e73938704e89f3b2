"""Every use of every subject has the outcome that docs/crossings.md says: transformers' own, or a
refusal. The commits of a day run every third use with one subject, those of the next day the next
uses, and of fifteen days all pairs; `--all-pairs` runs all at once."""

import functools
import subprocess

import pytest
import table
from conftest import DEVICES, ROOT
from interpreter import compiled, interpreted, test_in_the_interpreter  # noqa: F401
from pairs import FUNCTION_USES, function_pairs, outcome, pairs, why_not_here

pytestmark = pytest.mark.filterwarnings("ignore")
USES = 3
# of pairs that take seconds, and of functions in Triton's interpreter; primes
SLOW_SHARES, INTERPRETED = 83, 61


@functools.cache
def share() -> int:
    """The day of the latest commit, counted from 1970: which share of the pairs is run. It is the
    same for a commit whenever and wherever its tests run, in a clone of one commit too."""
    command = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout or 0) // 86400


def some(everything: list, count: int) -> list:
    """One of `count`, another one for the next day."""
    return everything[share() % count :: count]


def chosen() -> list:
    """The share of the pairs; tests/functions/test_properties.py has all those of functions that
    take less than seconds."""
    uses: dict = {}
    for pair in pairs():
        if not pair.slow:
            uses.setdefault(pair.use, []).append(pair)
    turn = share() // USES
    quick = [of[(turn + n) % len(of)] for n, of in enumerate(some([*uses.values()], USES))]
    slow = [pair for pair in [*pairs(), *function_pairs()] if pair.slow]
    return quick + some(slow, SLOW_SHARES)


def by_kernels() -> list:
    uses = {name: use for name, use in FUNCTION_USES.items() if use.interpreted and not use.slow}
    return some([pair for pair in function_pairs() if pair.use in uses], INTERPRETED)


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-pairs", default=False)
        found = [*pairs(), *function_pairs()] if everything else chosen()
        metafunc.parametrize("pair", found, ids=str)
        metafunc.parametrize("device", DEVICES)


@compiled
def test_a_pair(pair, device, tmp_path):
    why = why_not_here(pair, device)
    if why:
        pytest.skip(why)
    found, expected = outcome(pair, device, tmp_path), table.expected(pair)
    assert table.may_be(found, expected, device), f"{pair}: {found}; the page says: {expected}"


@interpreted
@pytest.mark.parametrize("function", by_kernels(), ids=str)
def test_a_function_by_kernels(function, by_portable, tmp_path):
    found = outcome(function, "cpu", tmp_path)
    if "not compiled with CUDA" in found:
        pytest.skip("its launch asks a GPU for its size")
    assert table.may_be(found, table.expected(function), "cuda"), f"{function}: {found}"


@compiled
def test_the_page():
    """docs/crossings.md is what tests/crossings/table.py makes of outcomes.json."""
    assert (ROOT / "docs" / "crossings.md").read_text() == table.text()
    assert set(table.outcomes()) <= set(map(str, [*pairs(), *function_pairs()]))
