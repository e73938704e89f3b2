"""Every use of every subject has the outcome that docs/crossings.md says: transformers' own, or a
refusal. A commit runs a share of the pairs, another the next; `--all-pairs` runs all."""

import functools
import subprocess

import pytest
import table
from conftest import DEVICES, ROOT
from interpreter import compiled, interpreted, test_in_the_interpreter  # noqa: F401
from pairs import FUNCTION_USES, OWNED, Pair, function_pairs, outcome, pairs, why_not_here

pytestmark = pytest.mark.filterwarnings("ignore")
# of pairs, of those that take seconds, and of functions in Triton's interpreter; primes
SHARES, SLOW_SHARES, INTERPRETED = 11, 83, 61

# the gradient's kernels write over what the forward has saved, and autograd refuses a second one
REFUSED = ("fused_swiglu: a backward twice", "fused_swiglu_mlp: a backward twice")


@functools.cache
def share() -> int:
    """The number of commits before this one: which share of the pairs is run."""
    command = ["git", "rev-list", "--count", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout or 0)


def some(everything: list, count: int) -> list:
    """One of `count`, another one for the next commit."""
    return everything[share() % count :: count]


def chosen() -> list:
    """The pairs of this commit's share."""
    everything = [*pairs(), *function_pairs()]
    quick = [pair for pair in everything if not pair.slow]
    slow = [pair for pair in everything if pair.slow]
    return some(quick, SHARES) + some(slow, SLOW_SHARES)


def by_kernels() -> list:
    uses = {name: use for name, use in FUNCTION_USES.items() if use.interpreted and not use.slow}
    found = [pair for pair in function_pairs() if pair.use in uses]
    return some([pair for pair in found if str(pair) not in REFUSED], INTERPRETED)


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-pairs", default=False)
        found = [*pairs(), *function_pairs()] if everything else chosen()
        metafunc.parametrize("pair", [marked(pair) for pair in found], ids=str)
        metafunc.parametrize("device", DEVICES)


def marked(pair: Pair):
    owner = OWNED.get(pair.use) or OWNED.get(str(pair))
    marks = [pytest.mark.xfail(reason=owner, strict=True)] if owner else []
    return pytest.param(pair, marks=marks)


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
