"""The chunked gated delta rule's kernels against the reference in fp64, and what they promise."""

import pytest
import torch
from conftest import (
    assert_close,
    captured,
    computed,
    gdn_inputs,
    relative_error,
    submodule,
)
from gdn_problems import arguments, on_gpu
from interpreter import INTERPRETING, interpreted, test_in_the_interpreter  # noqa: F401

call, reference = submodule("gdn.call"), submodule("gdn.reference.chunk")

# RMS error over RMS value against an fp64 recurrence: the limit of aiter's own tests (#2686)
AITER = 0.005


def wide(x):
    return x.double() if torch.is_tensor(x) and x.is_floating_point() else x


def expected(args):
    """The reference in fp64, which leaves the call as it is."""
    options = args.options._replace(state_dtype=torch.float64)
    args = call.GdnCall(*map(wide, args.tensors), options)
    state = None if args.initial_state is None else args.initial_state.clone()
    o, state, checkpoints, _ = reference.gdn_chunk_fwd(args._replace(initial_state=state))
    return o, state, checkpoints


def run(implementation, args):
    """o, the final state and the checkpoints."""
    return computed(f"gdn.{implementation}.chunk", "gdn_chunk_fwd", args)[:3]


def is_computed(implementation, args) -> bool:
    module = submodule(f"gdn.{implementation}.chunk")
    return module.prepare_gdn_chunk_fwd(args) is not None


def check(implementation, args, factor=1.0):
    """Outputs and states, which are right, with the memory they are given full of NaN before."""
    ref = expected(args)
    if args.q.is_cuda:
        stale = torch.full_like(args.v, float("nan"))
        del stale  # the caching allocator hands this block to the next tensor of the size
    o, state, checkpoints = run(implementation, args)
    dtype = args.q.dtype
    assert o.dtype == dtype
    assert_close(o, ref[0], dtype, factor)
    assert (state is None) == (ref[1] is None)
    if state is not None:
        assert_close(state, ref[1], max_dtype(dtype, state.dtype), factor)
    if checkpoints is not None:
        used = ref[2].flatten(1).abs().sum(1) > 0  # rows of no sequence are undefined
        assert_close(checkpoints[used], ref[2][used], max_dtype(dtype, state.dtype), factor)
    return o, state


def max_dtype(a, b):
    """The coarser of two dtypes."""
    order = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return min(a, b, key=order.index)


def cu(*lengths, device="cpu", dtype=torch.int32):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(device=device, dtype=dtype)


# one token; less than a chunk; exactly one; a ragged last one
SMALL_LENGTHS = (1, 63, 64, 130)


@interpreted
@pytest.mark.parametrize("T", SMALL_LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_interpreted(T, dtype):
    x = gdn_inputs(1, T, 1, 2, 20, 36, dtype)
    check("portable", arguments(x, use_qk_l2norm=True))


# a program's value heads are those of several key heads, of one, or a part of one's
@interpreted
@pytest.mark.parametrize("H, HV", [(4, 4), (3, 3), (2, 4), (1, 3), (1, 6), (1, 8)])
def test_heads_interpreted(H, HV):
    x = gdn_inputs(1, 70, H, HV, 16, 16, torch.float16)
    check("portable", arguments(x, use_qk_l2norm=H != HV))


@interpreted
@pytest.mark.parametrize(
    "K, dtype",  # a state in one block of rows; in two; in memory, in three
    [(16, torch.float16), (80, torch.float16), (80, torch.float32)],
)
def test_packed_pool_checkpoints_interpreted(K, dtype):
    x = gdn_inputs(1, 147, 1, 2, K, 16, dtype)
    x["initial_state"] = torch.randn(5, 2, 16, K)
    args = arguments(
        x, cu_seqlens=cu(0, 66, 0, 81), state_indices=torch.tensor([2, 4, 0, -1]),
        checkpoint_every=64, state_v_first=True,
    )  # fmt: skip
    before = x["initial_state"].clone()
    ref = expected(args)
    o, pool, checkpoints = run("portable", args)
    assert pool is x["initial_state"]
    assert_close(o, ref[0])
    assert_close(pool, ref[1], torch.float16)
    assert torch.equal(pool[[0, 1, 2, 3]], before[[0, 1, 2, 3]])  # empty, unnamed or skipped
    assert_close(checkpoints[:1], ref[2][:1], torch.float16)


def cut_in_segments_of_two_chunks(monkeypatch):
    """From the second full chunk on, however short the sequence."""
    step = {"BLOCK_K": 16, "BLOCK_V": 16, "STAGES": 1, "num_warps": 4}
    context = {"shortest": 2, "longest": 2, "heads": 16}
    context.update(dict.fromkeys(("transition", "transition_fp32", "carry"), step))
    monkeypatch.setattr(submodule("gdn.portable.chunk"), "lookup", lambda name, device: context)
    monkeypatch.setattr(submodule("gdn.portable.chunk"), "FEWEST", 1)
    monkeypatch.setattr(submodule("gdn.portable.cuts"), "FEWEST", 1)
    monkeypatch.setattr(submodule("gdn.portable.cuts"), "_FEWEST", 1)


@interpreted
@pytest.mark.parametrize("gates", ["slow", "extreme"])
@pytest.mark.parametrize("lengths", [None, (0, 300, 10, 64)])
def test_segments_interpreted(monkeypatch, lengths, gates):
    cut_in_segments_of_two_chunks(monkeypatch)
    x = gdn_inputs(1, sum(lengths or (374,)), 1, 2, 16, 32, torch.float16, gates=gates)
    if lengths is not None:
        x["initial_state"] = torch.randn(len(lengths), 2, 16, 32)
        x["cu_seqlens"] = cu(*lengths)
    check("portable", arguments(x, use_qk_l2norm=True))


# fp16: 64 tokens must lie behind a cut, 128 where K = V; fp32: 32 and 64
@interpreted
@pytest.mark.parametrize(
    "dtype, K", [(torch.float16, 16), (torch.float16, 32), (torch.float32, 32)]
)
@pytest.mark.parametrize("lengths", [None, (129, 191, 192, 257)])
def test_short_rests_of_segments_interpreted(monkeypatch, lengths, dtype, K):
    """A rest of a token, or one around what a cut needs behind it."""
    cut_in_segments_of_two_chunks(monkeypatch)
    x = gdn_inputs(1, sum(lengths or (257,)), 1, 2, K, 32, dtype)
    if lengths is not None:
        x["initial_state"] = torch.randn(len(lengths), 2, K, 32)
        x["cu_seqlens"] = cu(*lengths)
    args = arguments(x, use_qk_l2norm=True)
    whole, states = check("portable", args)
    if lengths is None or K > 16:
        return
    for n in (0, 3):  # alone as in a batch
        own = slice(*x["cu_seqlens"][n : n + 2].tolist())
        alone = {name: x[name][:, own] for name in ("q", "k", "v", "g", "beta")}
        alone["initial_state"] = x["initial_state"][n : n + 1]
        o, state, _ = run("portable", arguments(alone, use_qk_l2norm=True))
        assert torch.equal(o, whole[:, own]) and torch.equal(state[0], states[n])


@interpreted
def test_segments_of_a_pool_interpreted(monkeypatch):
    """Two programs share the columns of a segment; the rows of a skipped sequence are zero, though
    a cut is in them."""
    cut_in_segments_of_two_chunks(monkeypatch)
    x = gdn_inputs(1, 620, 1, 2, 16, 64, torch.float16)
    x["initial_state"] = torch.randn(4, 2, 16, 64)
    indices = torch.tensor([3, -1, 0])
    args = arguments(x, cu_seqlens=cu(300, 220, 100), state_indices=indices, use_qk_l2norm=True)
    ref = expected(args)
    o, pool, _ = run("portable", args)
    assert_close(o, ref[0])
    assert not o[:, 300:520].any()
    assert_close(pool, ref[1], torch.float16)


@interpreted
def test_a_plan_serves_calls_alike_interpreted():
    module = submodule("gdn.portable.chunk")
    first, second = (
        arguments(gdn_inputs(2, 40, 1, 2, 16, 16, torch.float16, seed=seed)) for seed in (0, 1)
    )
    off = torch.cat([second.q.new_zeros(1), second.q.flatten()])[1:].view_as(second.q)
    plan = module.prepare_gdn_chunk_fwd(first)
    for args in (first, second, second._replace(q=off), first):  # off 16 bytes as well
        (o, state, *_), (ref, ref_state, _) = plan(*args.tensors), run("portable", args)
        assert torch.equal(o, ref) and torch.equal(state, ref_state)


@interpreted
def test_tokens_far_from_one_another_interpreted():
    """Their offsets in a chunk have more than 32 bits, also in the gradient."""
    x = gdn_inputs(1, 34, 1, 1, 16, 16, torch.float16)
    state = x.pop("initial_state")
    memory = torch.empty(34 * 2**26, dtype=torch.float16)  # little of it is touched
    near = {name: y.half() for name, y in x.items()}
    far = {
        name: memory.as_strided(y.shape, (0, 2**26, 16, 1)[: y.ndim], 16 * i).copy_(y)
        for i, (name, y) in enumerate(near.items())
    }
    found = []
    for tokens in (near, far):
        args = arguments({**tokens, "initial_state": state})
        options = call.GradientOptions(False, *args.options)
        tensors = (*args.tensors[:8], None, near["v"], state, None, None, None)
        gradient = call.GdnBackward(*tensors, options)
        grads = computed("gdn.portable.backward", "gdn_chunk_bwd", gradient)
        found.append([*run("portable", args)[:2], *[y for y in grads if y is not None]])
    assert all(map(torch.equal, *found)) and len(found[0]) == 8


@interpreted
def test_gate_and_beta_in_the_kernel_interpreted():
    x = gdn_inputs(1, 70, 2, 2, 16, 16, torch.float16)
    gate = {"A_log": torch.tensor([-1.0, 2.0]), "dt_bias": torch.tensor([30.0, -1.0])}
    check("portable", arguments(x, **gate, use_beta_sigmoid=True, allow_neg_eigval=True))


# ---- on a GPU


@pytest.fixture(params=["portable", "hopper"])
def implementation(request):
    """Each implementation that stands in the tree and is for this GPU."""
    if request.param == "hopper":
        pytest.importorskip("triton")
        try:
            submodule("gdn.hopper.chunk")
        except ImportError as error:
            pytest.skip(f"no Hopper kernels here: {error}")
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("not a Hopper GPU")
    return request.param


def skip_unless_computed(implementation, args):
    if not is_computed(implementation, args):
        assert implementation != "portable"
        pytest.skip("another implementation serves this call")


def check_where_supported(implementation, args, factor=1.0):
    skip_unless_computed(implementation, args)
    check(implementation, args, factor)


# of segments: of the shortest ones, none, with a rest, one token, just not cut, of the longest
CUT = (2049, 0, 4500, 1, 2047, 2048 * 5)


def assert_cut(x):
    """The portable kernels cut the sequences of such a call, as Hopper's do those of 4096 tokens
    and more."""
    context = submodule("gdn.portable.chunk").lookup("portable_gdn_context", x["v"].device)
    _, T, HV, _ = x["v"].shape
    assert HV <= context["heads"] and T >= 4 * context["shortest"] * 64


# aiter's grid (B, T, H, D, scale, gate norm, share of g = 0, l2norm): odd head dims among them
AITER_GRID = [
    (1, 63, 1, 64, 1.0, 1.0, 0.0, False),
    (2, 500, 3, 60, 1.0, 1.0, 0.0, False),
    (2, 1000, 3, 64, 0.1, 1.0, 0.5, False),
    (3, 1024, 4, 100, 1.0, 0.1, 0.0, False),
    (4, 1024, 4, 128, 0.1, 1.0, 0.0, False),
    (4, 1024, 4, 128, 0.1, 1.0, 0.0, True),
    (2, 1500, 4, 128, 0.1, 10.0, 0.0, False),
    (4, 2048, 8, 64, 0.1, 1.0, 0.0, False),
]
AITER_PACKED = [
    (60, (0, 15)),
    (64, (0, 256, 500, 1000)),
    (100, (0, 15, 100, 300, 1200, 2000)),
]


def aiter_inputs(B, T, H, D, norm, zeros, dtype, rows):
    torch.manual_seed(42)
    q, k, v = torch.randn(3, B, T, H, D, device="cuda").to(dtype)
    g = torch.nn.functional.logsigmoid(torch.rand(B, T, H, device="cuda")) / norm
    return {
        "q": q,
        "k": torch.nn.functional.normalize(k.float(), dim=-1).to(dtype),
        "v": v,
        "g": g * (torch.rand(B, T, H, device="cuda") >= zeros),
        "beta": torch.rand(B, T, H, device="cuda").to(dtype).float(),
        "initial_state": torch.randn(rows, H, D, D, device="cuda"),
    }


def assert_aiter(implementation, args):
    skip_unless_computed(implementation, args)
    ref = expected(args)
    o, state, _ = run(implementation, args)
    assert relative_error(o, ref[0]) < AITER
    assert relative_error(state, ref[1]) < AITER


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("B, T, H, D, scale, norm, zeros, l2norm", AITER_GRID)
def test_aiter_grid(implementation, B, T, H, D, scale, norm, zeros, l2norm, dtype):
    x = aiter_inputs(B, T, H, D, norm, zeros, dtype, B)
    assert_aiter(implementation, arguments(x, scale=scale, use_qk_l2norm=l2norm))


@on_gpu
@pytest.mark.parametrize("D, ends", AITER_PACKED)
def test_aiter_grid_packed(implementation, D, ends):
    x = aiter_inputs(1, ends[-1], 4, D, 1.0, 0.0, torch.float16, len(ends) - 1)
    cu_seqlens = torch.tensor(ends, device="cuda")
    assert_aiter(implementation, arguments(x, cu_seqlens=cu_seqlens))


@pytest.mark.kernels_ci
@on_gpu
@pytest.mark.parametrize("gates", ["qwen", "slow", "none", "extreme"])
@pytest.mark.parametrize("beta", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_regimes(implementation, gates, beta, dtype):
    if (dtype, gates, beta) == (torch.float16, "extreme", 0.0):
        pytest.skip("o is exp(-30) of the initial state and less: fp16 holds nothing so small")
    x = gdn_inputs(2, 300, 2, 8, 128, 128, dtype, "cuda", gates=gates)
    if beta is not None:
        x["beta"].fill_(beta)
    check_where_supported(implementation, arguments(x, use_qk_l2norm=True))


@on_gpu
@pytest.mark.parametrize("gates", ["qwen", "slow", "none", "extreme"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_regimes_of_segments(implementation, gates, dtype):
    x = gdn_inputs(1, 5000, 2, 4, 128, 128, dtype, "cuda", gates=gates)
    assert_cut(x)
    factor = 3 if dtype == torch.float32 else 1
    check_where_supported(implementation, arguments(x, use_qk_l2norm=True), factor)


@on_gpu
@pytest.mark.parametrize("gates", ["slow", "none"])
def test_a_million_tokens(gates):
    x = gdn_inputs(1, 2**20, 2, 2, 64, 64, torch.bfloat16, "cuda", gates=gates)
    check("portable", arguments(x, use_qk_l2norm=True), factor=2)  # of roundings never forgotten


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_repeated_keys(implementation, dtype):
    x = gdn_inputs(1, 256, 1, 2, 128, 128, dtype, "cuda", gates="none")
    x["k"][:] = x["k"][:, :1]
    x["beta"].fill_(1.0)
    check_where_supported(implementation, arguments(x, use_qk_l2norm=True))


HEAD_DIMS = [
    (96, 96),
    (60, 60),
    (96, 100),
    (128, 64),
    (256, 256),
    (16, 200),
    (200, 16),
    (192, 256),
    (36, 8),
]
CUT_HEAD_DIMS = [(64, 64), (100, 100), (256, 256)]


@on_gpu
@pytest.mark.parametrize("K, V", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("HV", [2, 6, 16])
def test_head_dims_and_groups(implementation, K, V, HV, dtype):
    x = gdn_inputs(2, 200, 2, HV, K, V, dtype, "cuda")
    check_where_supported(implementation, arguments(x, use_qk_l2norm=True))
    if (HV, dtype) == (2, torch.bfloat16) and (K, V) in CUT_HEAD_DIMS:
        long = gdn_inputs(1, 5000, 2, 4, K, V, dtype, "cuda")
        check_where_supported(implementation, arguments(long, use_qk_l2norm=True))


@pytest.mark.kernels_ci
@on_gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("lengths", [(0, 1, 63, 64, 65, 0, 200), (0,), (1,), CUT])
def test_packed_states(implementation, lengths, v_first, state_dtype):
    x = gdn_inputs(1, sum(lengths), 2, 4, 128, 128, torch.bfloat16, "cuda")
    x["initial_state"] = torch.randn(len(lengths), 4, 128, 128, device="cuda").to(state_dtype)
    args = arguments(
        x, cu_seqlens=cu(*lengths, device="cuda"), state_v_first=v_first, state_dtype=state_dtype,
        checkpoint_every=64, use_qk_l2norm=True,
    )  # fmt: skip
    check_where_supported(implementation, args)


@on_gpu
def test_no_token_leaks_into_a_neighbour(implementation):
    x = gdn_inputs(1, 300, 2, 4, 128, 128, torch.bfloat16, "cuda")
    x["initial_state"] = torch.randn(3, 4, 128, 128, device="cuda")
    lengths = (100, 70, 130)
    args = arguments(x, cu_seqlens=cu(*lengths, device="cuda"), use_qk_l2norm=True)
    o, state, _ = run(implementation, args)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, :100] = float("nan")
        x[name][:, 170:] = float("nan")
    poisoned = arguments(x, cu_seqlens=cu(*lengths, device="cuda"), use_qk_l2norm=True)
    o2, state2, _ = run(implementation, poisoned)
    assert torch.equal(o[:, 100:170], o2[:, 100:170])
    assert torch.equal(state[1], state2[1])


@pytest.mark.kernels_ci
@on_gpu
@pytest.mark.parametrize("B, T", [(4, 1100), (3, 5000)])
def test_bitwise_repeatable_and_batch_invariant(implementation, B, T):
    x = gdn_inputs(B, T, 4, 8, 128, 128, torch.bfloat16, "cuda")
    o, state, _ = run(implementation, arguments(x, use_qk_l2norm=True))
    again, state2, _ = run(implementation, arguments(x, use_qk_l2norm=True))
    assert torch.equal(o, again) and torch.equal(state, state2)
    alone = {name: value[1:2] for name, value in x.items()}
    o1, state1, _ = run(implementation, arguments(alone, use_qk_l2norm=True))
    assert torch.equal(o[1:2], o1) and torch.equal(state[1:2], state1)
    if implementation == "portable":
        packed = {n: y.flatten(0, 1)[None] if n != "initial_state" else y for n, y in x.items()}
        ends = cu(*[T] * B, device="cuda")
        o2, state2, _ = run("portable", arguments(packed, cu_seqlens=ends, use_qk_l2norm=True))
        assert torch.equal(o.flatten(0, 1)[None], o2) and torch.equal(state, state2)


@on_gpu
@pytest.mark.parametrize(
    "lengths, rows", [((80, 50, 70), [5, -1, 1]), (CUT, [5, 0, 1, 8, -1, 3])], ids=["short", "cut"]
)
def test_pool_in_place(implementation, lengths, rows):
    x = gdn_inputs(1, sum(lengths), 2, 4, 128, 128, torch.bfloat16, "cuda")
    padded = torch.randn(9, 5, 128, 128, device="cuda")  # slots further apart than a state
    x["initial_state"] = padded[:, :4]
    before = padded.clone()
    args = arguments(
        x, cu_seqlens=cu(*lengths, device="cuda"), use_qk_l2norm=True,
        state_indices=torch.tensor(rows, device="cuda"),
    )  # fmt: skip
    ref = expected(args)
    o, pool, _ = run(implementation, args)
    assert pool.data_ptr() == padded.data_ptr()
    assert_close(o, ref[0])
    start = sum(lengths[: rows.index(-1)])
    assert not o[:, start : start + lengths[rows.index(-1)]].any()
    assert_close(pool, ref[1], torch.bfloat16)
    written = {row for row, length in zip(rows, lengths) if length}
    untouched = [row for row in range(9) if row not in written]
    assert torch.equal(padded[untouched], before[untouched])
    assert torch.equal(padded[:, 4:], before[:, 4:])


@on_gpu
def test_views_need_no_copy(implementation):
    T, H, HV, D = 130, 2, 4, 128
    x = gdn_inputs(1, T, H, HV, D, D, torch.bfloat16, "cuda")
    packed = torch.cat([x["q"].flatten(2), x["k"].flatten(2), x["v"].flatten(2)], -1)
    y = dict(x)
    y["q"], y["k"], y["v"] = (
        part.unflatten(-1, (-1, D)) for part in packed.split([H * D, H * D, HV * D], -1)
    )
    y["g"] = torch.stack([x["g"], x["beta"]], -1)[..., 0]
    y["beta"] = x["beta"].transpose(1, 2).contiguous().transpose(1, 2)
    # not bit for bit as from dense tensors: how g lies decides the layout of its cumulative sum,
    # and so the order of the additions (they differed on an H200, 2026-11-21)
    check(implementation, arguments(y, use_qk_l2norm=True))


@on_gpu
@pytest.mark.parametrize("lengths", [
    ((100, 200, 212), (0, 511, 1), (64, 0, 448)),
    ((2000, 2500, 1500), (0, 5999, 1), (6000, 0, 0), (1, 2048, 3951)),
], ids=["short", "cut"])  # fmt: skip
def test_graph_with_changing_cu_seqlens(implementation, lengths):
    x = gdn_inputs(1, sum(lengths[0]), 2, 4, 128, 128, torch.bfloat16, "cuda")
    x["initial_state"] = torch.randn(3, 4, 128, 128, device="cuda")
    cu_seqlens = cu(*lengths[0], device="cuda")
    args = arguments(x, cu_seqlens=cu_seqlens, use_qk_l2norm=True)
    run(implementation, args)
    graph, (o, state, _) = captured(run, implementation, args)
    for each in lengths:
        cu_seqlens.copy_(cu(*each, device="cuda"))
        graph.replay()
        eager = run(implementation, args)
        assert torch.equal(o, eager[0]) and torch.equal(state, eager[1])


@on_gpu
def test_more_elements_than_32_bits_count(implementation):
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB")
    T, HV = 2**17 + 100, 130  # T * HV * 128 is beyond 2^31
    q, k = torch.randn(2, 1, T, 1, 128, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(1, T, HV, 128, device="cuda", dtype=torch.bfloat16)
    g = torch.full((1, T, HV), -1.0, device="cuda")  # 64 tokens forget all there was
    beta = torch.rand(1, T, HV, device="cuda")
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    o, state, _ = run(implementation, arguments(x, use_qk_l2norm=True))
    tail = {name: value[:, -1124:, -1:] for name, value in x.items() if name not in "qk"}
    tail.update(q=q[:, -1124:], k=k[:, -1124:])
    ref = expected(arguments(tail, use_qk_l2norm=True))
    assert_close(o[:, -1000:, -1:], ref[0][:, -1000:])
    assert_close(state[:, -1:], ref[1], torch.bfloat16)


def test_supports():
    if INTERPRETING:
        pytest.skip("nothing to interpret")
    x = gdn_inputs(1, 4, 1, 1, 8, 8)
    assert is_computed("portable", arguments(x))
    assert not is_computed("portable", arguments({n: y.double() for n, y in x.items()}))
    rows_first = torch.empty(8, 2**29, 1, 8, device="meta").permute(1, 2, 0, 3)
    assert not is_computed("portable", arguments({**x, "initial_state": rows_first}))
