"""Long prompts of few heads, which Hopper's scan computes in segments, beside the same prompt in
one piece and beside fp64."""

import pytest
import torch
from conftest import relative_error, submodule
from interpreter import compiled
from kda_problems import kda_inputs
from test_kda_kernels import expected, prompt

pytest.importorskip("triton")
hopper = pytest.importorskip("triton.experimental.gluon") and submodule("kda.hopper.chunk")
device = submodule("runtime.device")
reference = submodule("kda.reference.chunk")
BF16 = torch.bfloat16
SPAN = 1024  # tokens of the shortest segment


def whole(N, *facts, **more):
    """count_slots where no sequence is cut."""
    return 1, N


@pytest.mark.parametrize(
    "T, HV, more, split, found",
    [(8192, 8, "", 8, True), (8192, 32, "", 2, False), (8192, 32, "pool", 1, False),
     (8192, 8, "pool", 8, True), (4095, 8, "", 1, False), (4095, 8, "raw", 1, False),
     (4095, 8, "raw, bounded", 8, False), (4095, 8, "raw, bounded, pool", 1, False),
     (2048, 12, "raw, bounded", 5, False), (1024, 8, "raw, bounded", 4, False),
     (8192, 8, "raw, bounded", 8, True), (2048, 32, "", 2, False), (2047, 32, "", 1, False),
     (2047, 32, "raw, bounded", 1, False), (512, 22, "raw, bounded", 2, False),
     (8192, 64, "", 1, False),
     (4096, 16, "", 4, True), (8192, 32, "raw", 1, False), (8192, 32, "raw, bounded", 2, False)],
)  # fmt: skip
def test_which_prompts_are_cut(monkeypatch, T, HV, more, split, found):
    """On 132 multiprocessors. In two, and if short, only where the gates let it be: nothing looks
    for states."""
    monkeypatch.setattr(device, "multiprocessor_count", lambda index: 132)
    like = {
        "q": (1, T, HV, 128), "k": (1, T, HV, 128), "v": (1, T, HV, 128), "g": (1, T, HV, 128),
        "beta": (1, T, HV),
    }  # fmt: skip
    x = {name: torch.empty(shape, dtype=BF16, device="meta") for name, shape in like.items()}
    options = {"use_qk_l2norm": True}
    if "raw" in more:
        x["A_log"] = torch.empty(HV, device="meta")
        options["lower_bound"] = -5.0 if "bounded" in more else None
    if "pool" in more:
        x["initial_state"] = torch.empty(4, HV, 128, 128, device="meta")
        x["state_indices"] = torch.zeros(1, dtype=torch.int32, device="meta")
    scan = hopper.Scan(prompt(x, **options))
    assert (scan.cuts[0], scan.transition is not None) == (split, found)


BOUND = {"lower_bound": -5.0}  # of raw gates: those of few heads are cut below 4096 tokens, too


def inputs(T, HV, gates, state=True):
    """`mixed`: one head in two never forgets. Gates as BOUND makes them of raw ones."""
    x = kda_inputs(1, T, HV, HV, 128, 128, BF16, "bounded", device="cuda")
    if gates == "mixed":
        x["g"][:, :, ::2] *= 1e-3
    elif gates == "turns":  # all channels forget, never two of a kind at once: no bound sees it
        turn = torch.arange(T, device="cuda")[:, None] // 16 + torch.arange(128, device="cuda")
        x["g"] = torch.where(turn % 2 == 0, -4.0, 0.0)[None, :, None].repeat(1, 1, HV, 1)
    elif gates == "later":  # the first half never forgets
        x["g"][:, : T // 2] *= 1e-3
    x["g"] = torch.logit((x["g"] / -5.0).clamp(1e-9, 1 - 1e-6))
    if state:
        x["initial_state"] = torch.randn(1, HV, 128, 128, device="cuda")
    return x


def run(x, **options):
    stale = torch.full((2**25,), float("nan"), device="cuda")
    del stale  # the caching allocator hands this memory to what the call allocates
    call = prompt(x, use_qk_l2norm=True, **{**BOUND, **options})
    return hopper.prepare_kda_chunk_fwd(call)(*call.tensors)


def check(monkeypatch, x, limit=5e-3, **options):
    found = run(x, **options)
    again = run(x, **options)
    monkeypatch.setattr(hopper, "count_slots", whole)
    wanted = run(x, **options)
    for a, b, c in zip(*(results[:2] for results in (found, again, wanted))):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()
        assert relative_error(a, c) < limit
    return found, wanted


@pytest.mark.gpu
@compiled
class TestCuts:
    @pytest.mark.parametrize("gates", ["bounded", "mixed", "turns", "later"])
    @pytest.mark.parametrize(
        "T, HV", [(8192, 8), (4096 + 37, 16), (8192, 32), (2048 + 1, 24), (2048, 12), (519, 1)]
    )
    def test_equal_to_one_piece(self, monkeypatch, T, HV, gates):
        check(monkeypatch, inputs(T, HV, gates))

    @pytest.mark.parametrize("gates", ["bounded", "mixed"])
    @pytest.mark.parametrize("HV", [4, 32])
    def test_error(self, HV, gates):
        x = inputs(4500, HV, gates)
        call = prompt(x, use_qk_l2norm=True, **BOUND)
        for a, b in zip(run(x)[:2], expected(call, reference.kda_chunk_fwd)[:2]):
            assert relative_error(a, b) < 6e-3

    @pytest.mark.parametrize("HV", [8, 32])
    @pytest.mark.parametrize("v_first", [False, True])
    def test_packed_and_checkpoints(self, monkeypatch, HV, v_first):
        lengths = [0, 5000, 100, 2100, 9000, 1, 600, 6000]
        x = inputs(sum(lengths), HV, "mixed", state=False)
        x["initial_state"] = torch.randn(len(lengths), HV, 128, 128, device="cuda")
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        options = {"cu_seqlens": ends, "state_v_first": v_first, "checkpoint_every": SPAN}
        found, wanted = (results[2] for results in check(monkeypatch, x, **options))
        for start, length in zip(ends.tolist(), lengths):
            rows = slice(start // SPAN, start // SPAN + length // SPAN)  # others are not written
            if length >= SPAN:
                assert relative_error(found[rows], wanted[rows]) < 5e-3

    @pytest.mark.parametrize("v_first", [False, True])
    def test_pool(self, monkeypatch, v_first):
        x = inputs(8192, 8, "mixed", state=False)
        pool = torch.randn(5, 8, 128, 128, device="cuda")
        rows = torch.tensor([3], device="cuda")
        results = []
        for slots in (hopper.count_slots, whole):
            monkeypatch.setattr(hopper, "count_slots", slots)
            x["initial_state"] = pool.clone()
            results.append(
                (run(x, state_indices=rows, state_v_first=v_first)[0], x["initial_state"])
            )
        (o, states), (wanted, after) = results
        assert relative_error(o, wanted) < 5e-3
        assert relative_error(states, after) < 5e-3
        assert torch.equal(states[:3], pool[:3]) and torch.equal(states[4:], pool[4:])

    @pytest.mark.parametrize("T", [600, 2300, 6000])
    @pytest.mark.parametrize("HV", [16, 32])
    def test_not_by_the_batch(self, HV, T):
        """A sequence's bits are the same alone and beside others."""
        x = inputs(T, HV, "mixed", state=False)
        alone = run(x)
        more = inputs(7000, HV, "bounded", state=False)
        both = {name: torch.cat([y, more[name]], 1) for name, y in x.items()}
        ends = torch.tensor([0, T, T + 7000], device="cuda")
        o, states, *_ = run(both, cu_seqlens=ends)
        assert torch.equal(o[:, :T], alone[0]) and torch.equal(states[:1], alone[1])
