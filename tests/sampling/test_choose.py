"""The choice of a token by kernels, by the reference and by transformers' processors."""

from functools import partial

import pytest
import torch
from conftest import computed, submodule
from interpreter import (
    DEVICE,
    INTERPRETING,
    both_ways,
    compiled,
    interpreted,
    test_in_the_interpreter,  # noqa: F401
)

reference = submodule("sampling.reference")
call = submodule("sampling.call")

CASES = {
    "greedy": {"top_k": 0},
    "greedy, penalty, least": {"top_k": 0, "penalty": 1.3, "least": 9},
    "top-k": {"top_k": 20},
    "temperature, top-k, top-p": {"top_k": 50, "temperature": 0.8, "top_p": 0.9},
    "one word": {"top_k": 1},
    "top-p of nothing": {"top_k": 9, "top_p": 0.0},
    "min-p": {"top_k": 50, "min_p": 0.1},
    "all": {
        "top_k": 40, "penalty": 1.2, "least": 9, "temperature": 0.6, "top_p": 0.95, "min_p": 0.02,
    },
    "more than there are": {"top_k": 200, "top_p": 0.7},
}  # fmt: skip
ROWS = {
    "random": lambda g, V: torch.randn(1, V, generator=g) * 2.5,
    "many equal": lambda g, V: torch.randn(1, V, generator=g).bfloat16().float(),
    "all equal": lambda g, V: torch.zeros(1, V),
    "two values": lambda g, V: (torch.rand(1, V, generator=g) < 0.3).float(),
    "far apart": lambda g, V: torch.randn(1, V, generator=g) * 1e4,
    "all but one -inf": lambda g, V: torch.full((1, V), float("-inf")).index_fill(
        1, torch.tensor([V // 2]), 1.0),
}  # fmt: skip


SIZE = 150 if INTERPRETING else 40_007  # the last part is not full; on a GPU keys are merged twice


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    """The interpreter takes a second to sort a part of 1024."""
    if INTERPRETING:
        monkeypatch.setattr(submodule("sampling.portable.choose"), "PART", 128)


def problem(options, V=SIZE, seed=0, dtype=torch.float32):
    """A row of each kind."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.cat([make(g, V) for make in ROWS.values()]).to(dtype)
    B, given = len(logits), call.ChooseOptions(**options)
    q = torch.empty(B, V).exponential_(generator=g) if given.top_k else None
    seen = ends = None
    if given.penalty != 1.0:
        seen = torch.rand(B, V + 1, generator=g) < 0.1
    if given.least:
        ends = torch.tensor([V - 1, int(logits[0].argmax()), 5])
    length = torch.tensor(8)
    tensors = [x if x is None else x.to(DEVICE) for x in (logits, q, seen, ends, length)]
    return call.Choose(*tensors, given)


def differ(one, two, p) -> int:
    """Rows whose tokens differ, but for races within 1e-6 of each other."""
    found = 0
    for row in (one != two).nonzero().flatten().tolist():
        x = reference.scores_of(
            p.logits, p.seen, p.ends, p.length, p.options.temperature, p.options.penalty,
            p.options.least,
        )[row]  # fmt: skip
        a, b = one[row], two[row]
        races = [(x[i] - x.max()).double().exp() / p.q[row, i].double() for i in (a, b)]
        found += not abs(races[0] / races[1] - 1) < 1e-6
    return found


FEW = ("greedy, penalty, least", "temperature, top-k, top-p", "all")


@pytest.mark.parametrize("case", FEW if INTERPRETING else CASES)
@both_ways
def test_kernels_choose_as_the_reference(case):
    p = problem(CASES[case])
    tokens, right = computed("sampling.portable.choose", "choose_fwd", p)
    expected, right_too = reference.choose_fwd(*p.tensors, *p.options)
    assert torch.equal(right, right_too) and right[:4].all()
    assert differ(torch.where(right, tokens, expected), expected, p) == 0
    if not INTERPRETING:
        again, _ = computed("sampling.portable.choose", "choose_fwd", p)
        assert torch.equal(tokens, again)


@interpreted
def test_lists_of_parts_are_merged():
    """Three parts keep more keys than one part has."""
    p = problem(CASES["temperature, top-k, top-p"], V=300)
    p = p._replace(logits=p.logits[:2], q=p.q[:2])
    tokens, right = computed("sampling.portable.choose", "choose_fwd", p)
    expected, _ = reference.choose_fwd(*p.tensors, *p.options)
    assert right.all() and differ(tokens, expected, p) == 0


@both_ways
def test_rows_that_are_no_distribution():
    for case in ("top-k",) if INTERPRETING else ("greedy", "top-k"):
        p = problem(CASES[case])
        p.logits[1, 77], p.logits[3, 7] = float("nan"), float("inf")
        tokens, right = computed("sampling.portable.choose", "choose_fwd", p)
        assert right[:5].tolist() == [True, False, True, False, True]
        if case == "greedy":
            assert torch.equal(tokens, p.logits.argmax(1))


@both_ways
def test_a_stride_beside_poisoned_memory():
    p = problem({"top_k": 9, "top_p": 0.9}, dtype=torch.bfloat16)
    p = p._replace(logits=p.logits[:2], q=p.q[:2])
    B, V = p.logits.shape
    wide = torch.full((B, 2, V), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    wide[:, -1] = p.logits
    strided = p._replace(logits=wide[:, -1])
    one, two = (computed("sampling.portable.choose", "choose_fwd", x)[0] for x in (p, strided))
    assert torch.equal(one, two)


@both_ways
def test_what_is_left_to_torch():
    prepare = submodule("sampling.portable.choose").prepare_choose_fwd
    p = problem({"top_k": 50})
    assert prepare(p) is not None
    assert prepare(p._replace(options=p.options._replace(top_k=257))) is None
    assert prepare(p._replace(logits=p.logits.double())) is None
    assert prepare(p._replace(logits=p.logits.t().contiguous().t())) is None


@compiled
@pytest.mark.parametrize("ties", [False, True])
def test_the_reference_keeps_what_transformers_keeps(monkeypatch, ties):
    """Tokens of the same numbers. Which of equal scores top-p drops is what torch's sort puts
    first: on a GPU that of a vocabulary is stable, on a CPU it may be any of them."""
    lp = pytest.importorskip("transformers").generation.logits_process
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    V, B, T, prompt = 300, 500, 14, 12
    g = torch.Generator().manual_seed(0)
    for options in CASES.values():
        options = call.ChooseOptions(**{**options, "least": 5 * bool(options.get("least"))})
        if not options.top_k:
            continue
        row = torch.randn(1, V, generator=g) * 2.5
        row = row.div(1.25).round() / 2 if ties else row  # also where top-p cuts
        ids, ends = torch.randint(0, V, (1, T), generator=g), row[0].topk(2).indices
        processors = [
            lp.RepetitionPenaltyLogitsProcessor(options.penalty),
            lp.MinNewTokensLengthLogitsProcessor(prompt, options.least, ends),
            lp.TemperatureLogitsWarper(options.temperature), lp.TopKLogitsWarper(options.top_k),
            lp.TopPLogitsWarper(options.top_p), lp.MinPLogitsWarper(options.min_p),
        ]  # fmt: skip
        scores = row.clone()
        for each in processors:
            scores = each(ids, scores)
        probs = scores.softmax(-1)
        seen = torch.zeros(1, V + 1, dtype=torch.bool)
        seen[0, ids[0]] = True
        one, two = (torch.Generator().manual_seed(3) for _ in range(2))
        want = torch.multinomial(probs.repeat(B, 1), 1, generator=one)[:, 0]
        q = torch.empty(B, V).exponential_(generator=two)
        tokens, _ = reference.choose_fwd(
            row.repeat(B, 1), q, seen.repeat(B, 1), ends, torch.tensor(T),
            *options._replace(least=prompt + options.least),
        )  # fmt: skip
        assert (tokens == want).all() and torch.equal(one.get_state(), two.get_state())
