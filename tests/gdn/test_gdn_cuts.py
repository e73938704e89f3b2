"""The states at the cuts of long sequences, which lie where o will (gdn/portable/cuts.py): where
that is, the kernel of hopper/ that chains them, and that a call takes no other memory."""

import json

import pytest
import torch
from conftest import PACKAGE, assert_close, gdn_inputs, submodule
from gdn_problems import arguments, on_gpu
from interpreter import interpreted, test_in_the_interpreter  # noqa: F401
from test_gdn_chunk import cu, implementation, run  # noqa: F401

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

cuts = submodule("gdn.portable.cuts")
chunk_rows = submodule("gdn.chunks").chunk_rows
SPAN, D = 1024, 128  # tokens of the shortest segment on Hopper; its head dims
LIMIT = 300  # bytes of extra memory for a token of a value head


def words_at_cut(step, K=D, V=D, W=64, size=2):
    """[V + K, K]: word_at_cut of N^T, then of M^T."""
    x, k = torch.arange(V + K)[:, None], torch.arange(K)[None, :]
    return cuts.word_at_cut.fn(x, k, step, K, V, W, cuts.words(W, size))


@pytest.mark.parametrize("W", [16, 32, 64])
@pytest.mark.parametrize("K, V, size", [(128, 128, 2), (128, 128, 4), (64, 96, 2), (128, 64, 2)])
def test_every_word_has_a_place_in_its_slice(K, V, size, W):
    if V % W:
        pytest.skip("no slice")
    row = V * size // 4
    step = 3 * row  # three heads
    at = words_at_cut(step, K, V, W, size)
    rows, words = at // step, at % step
    assert at.unique().numel() == at.numel()
    assert words.max() < row and rows.max() + 1 == cuts.tokens_at_cut(K, V, size)
    columns = torch.arange(V)[:, None]  # of N: no other program of the scan writes their bytes
    assert torch.equal(words[:V] * 4 // (W * size), (columns // W).expand(-1, K))


def test_other_head_dims_are_not_cut():
    for K, V, size in ((128, 48, 2), (100, 128, 2), (24, 32, 2), (16, 32, 4)):
        assert cuts.tokens_at_cut(K, V, size) == 0
    for V in range(cuts.WIDEST, D + 1, cuts.WIDEST):  # others fit into the longest segment
        assert all(0 < cuts.tokens_at_cut(D, V, size) <= 32 * 64 for size in (2, 4))
    assert cuts.tokens_at_cut(D, D, 2) <= SPAN


def test_no_program_of_the_scan_is_wider_than_a_slice():
    paths = sorted((PACKAGE / "configs").glob("portable_gdn_scan*.json"))
    assert len(paths) > 2
    for path in paths:
        table = json.loads(path.read_text())
        for config in (table["default"], *(entry["config"] for entry in table.get("tuned", []))):
            assert cuts.WIDEST % config["BLOCK_V"] == 0


def test_segments_of_hopper_are_alike():
    """Each, the last too, has the rows that N and M of the cut before it need."""
    first = cuts.chunk_at_cut.fn
    for tokens in (4096, 4097, 6143, 6144, 6145, 8191, 33000, 2**30 - 1):
        total = -(-tokens // 64)
        for segments in range(2, min(tokens // SPAN, 66) + 1):
            ends = [first(i, total, segments) for i in range(segments + 1)]
            sizes = [b - a for a, b in zip(ends, ends[1:])]
            assert ends[0] == 0 and ends[-1] == total and max(sizes) - min(sizes) <= 1
            assert min(sizes) * 64 >= SPAN and max(ends) * segments < 2**31
            assert tokens - ends[-2] * 64 >= cuts.tokens_at_cut(D, D, 2)


@triton.jit
def _segments_kernel(out_ptr, lengths_ptr, N, SHORTEST):
    for n in range(N):
        tl.store(out_ptr + n, cuts.segment_of(tl.load(lengths_ptr + n), SHORTEST, 32))


@interpreted
@pytest.mark.parametrize("shortest", [8, 20])
def test_host_and_device_cut_alike_interpreted(shortest):
    lengths = [0, 1, 2047, 2048, 2111, 5000, 5119, 5120, 8191, 8192, 2**20]
    out = torch.full((len(lengths),), -1)
    _segments_kernel[(1,)](out, torch.tensor(lengths), len(lengths), shortest)
    assert out.tolist() == [cuts.chunks_in_segment(n // 64, shortest, 32) for n in lengths]


def count_segments(length, most):
    return min(most, length // SPAN) if length >= cuts.FEWEST * SPAN else 1


def chain(lengths, packed, split, device, pool=None, indices=None, slot_span=SPAN):
    """gdn_carry_kernel on random N and M; what must lie at the cuts is in fp64 beside it."""
    kernel, HV, N = submodule("gdn.hopper.carry").gdn_carry_kernel, 2, len(lengths)
    T = sum(lengths) if packed else lengths[0]
    slots = min(N * split, N + T // slot_span) if packed else N * split
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    o = torch.full((starts[-1], HV, D), float("nan"), dtype=torch.float16)
    memory = o.view(torch.float32).view(-1)
    warm = torch.full((slots, HV), 7.0)
    where, expected = [], []
    for n, (start, length) in enumerate(zip(starts, lengths)):
        slot = start // slot_span + n if packed and slots != N * split else n * split
        total, segments = -(-length // 64), count_segments(length, split)
        for h in range(HV):
            state, known = None, True
            if pool is not None and segments > 1 and indices[n] >= 0:
                where.append((start * HV + h) * 64 + words_at_cut(HV * 64)[:D])
                expected.append(pool[indices[n], h].double().mT)
            for j in range(1, segments):
                asked = (n + h + j) % 3 > 0
                warm[slot + j, h] = -1.0 if asked else 3.0
                if asked:
                    token = start + cuts.chunk_at_cut.fn(j, total, segments) * 64
                    at = (token * HV + h) * 64 + words_at_cut(HV * 64)
                    memory[at] = torch.randn(2 * D, D) * 0.1
                    both = memory[at].double()
                    state = both[:D] if known else both[:D] + state @ both[D:]
                    where.append(at[:D])
                    expected.append(state)
                known = not asked
    offsets = cu(*lengths, device=device) if packed else None
    o, warm = o.to(device), warm.to(device)
    step = 0 if pool is None else pool.stride(0)
    pool, indices = (None if x is None else x.to(device) for x in (pool, indices))
    longest = min(N, T // (cuts.FEWEST * SPAN)) if packed else N
    kernel[(HV * D // 16, longest)](
        pool, indices, offsets, warm, o, T, HV, N, split, slots, step, False, SPAN, slot_span,
        4, 16, 32, "tf32x3", num_warps=4,
    )  # fmt: skip
    memory = o.cpu().view(torch.float32).view(-1)
    assert len(where) > 3
    assert_close(torch.stack([memory[at] for at in where]), torch.stack(expected))


CHAINS = [((9000, 100, 6000, 4096), True), ((8300, 8300), False)]
SHORT = (300, *[100] * 8, 6000)  # each has a slot for 256 tokens


@interpreted
@pytest.mark.parametrize("lengths, packed", CHAINS)
def test_chain_at_cuts_interpreted(monkeypatch, lengths, packed):
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(tl.extra.cuda, name, lambda: None)
    chain(lengths, packed, 4, "cpu")
    if packed:
        chain(SHORT, packed, 4, "cpu", slot_span=256)
    pool = torch.randn(6, 2, D, D).half()
    chain(lengths, packed, 4, "cpu", pool, torch.tensor([5, 1, -1, 0][: len(lengths)]))


@on_gpu
@pytest.mark.parametrize("lengths, packed", CHAINS)
def test_chain_at_cuts(lengths, packed):
    chain(lengths, packed, 4, "cuda")
    pool = torch.randn(6, 2, D, D).bfloat16()
    chain(lengths, packed, 4, "cuda", pool, torch.tensor([5, 1, -1, 0][: len(lengths)]))


@on_gpu
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(
    "lengths", [None, (8192,), (1,) * 100 + (8192,), (100,) * 50 + (4500, 2048), (2048,) * 8]
)
def test_extra_memory_of_a_call_that_is_cut(implementation, lengths, pool):  # noqa: F811
    """Memory that a call requests beside its results, per token for which scratch rows have space.

    Requested, since the allocator may count up to 1 MiB more for a block.
    """
    B, T = (2, 8192) if lengths is None else (1, sum(lengths))
    x = gdn_inputs(B, T, 2, 8, D, D, torch.bfloat16, "cuda", gates="none")
    N = B if lengths is None else len(lengths)
    x["initial_state"] = torch.randn(N, 8, D, D, device="cuda")
    offsets = None if lengths is None else cu(*lengths, device="cuda")
    rows = torch.arange(N, device="cuda") if pool else None
    args = arguments(x, cu_seqlens=offsets, state_indices=rows, use_qk_l2norm=True)
    run(implementation, args)

    def requested(what):
        return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]

    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    o, state, _ = run(implementation, args)
    results = o.nbytes + (0 if pool else state.nbytes)
    extra = requested("peak") - before - results
    assert extra <= LIMIT * 8 * 64 * chunk_rows(T, B, offsets)
