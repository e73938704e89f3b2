"""Sequences that the portable path cuts into segments (gdn/portable/context.py), on a GPU."""

import pytest
import torch
from conftest import assert_close, gdn_inputs, load_package, relative_error, submodule
from gdn_problems import arguments
from interpreter import compiled
from test_gdn_chunk import check, cu, expected, run

pytestmark = [pytest.mark.gpu, compiled]
# of the shortest segments, none, with a rest, one token, just not cut, of the longest
LENGTHS = (2049, 0, 4500, 1, 2047, 2048 * 5)


def inputs(T, HV=4, D=128, dtype=torch.bfloat16, gates="slow", B=1):
    return gdn_inputs(B, T, 2, HV, D, D, dtype, "cuda", gates=gates)


def assert_cut(x):
    """The call is one whose sequences are cut."""
    module = submodule("gdn.portable.chunk")
    context = module.lookup("portable_gdn_context", x["v"].device)
    assert x["v"].shape[2] <= context["heads"] and x["v"].shape[1] >= 4 * context["shortest"] * 64


@pytest.mark.parametrize("gates", ["qwen", "slow", "none", "extreme"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_regimes(gates, dtype):
    x = inputs(5000, gates=gates, dtype=dtype)
    assert_cut(x)
    check("portable", arguments(x, use_qk_l2norm=True), factor=3 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("D", [64, 100, 128, 256])
def test_head_dims(D):
    check("portable", arguments(inputs(5000, D=D), use_qk_l2norm=True))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_packed_states(v_first, state_dtype):
    x = inputs(sum(LENGTHS))
    x["initial_state"] = torch.randn(len(LENGTHS), 4, 128, 128, device="cuda").to(state_dtype)
    args = arguments(
        x, cu_seqlens=cu(*LENGTHS, device="cuda"), state_v_first=v_first, state_dtype=state_dtype,
        checkpoint_every=128, use_qk_l2norm=True,
    )  # fmt: skip
    check("portable", args)


def test_pool_in_place():
    x = inputs(sum(LENGTHS))
    padded = torch.randn(9, 5, 128, 128, device="cuda")  # slots further apart than a state
    x["initial_state"] = padded[:, :4]
    indices = torch.tensor([5, 0, 1, 8, -1, 3], device="cuda")
    before = padded.clone()
    args = arguments(
        x, cu_seqlens=cu(*LENGTHS, device="cuda"), state_indices=indices, use_qk_l2norm=True
    )
    ref = expected(args)
    o, pool, _ = run("portable", args)
    assert pool.data_ptr() == padded.data_ptr()
    assert_close(o, ref[0])
    start = sum(LENGTHS[:4])
    assert not o[:, start : start + LENGTHS[4]].any()
    assert_close(pool, ref[1], torch.bfloat16)
    untouched = [0, 2, 4, 6, 7]  # row 0 belongs to an empty sequence
    assert torch.equal(padded[untouched], before[untouched])
    assert torch.equal(padded[:, 4:], before[:, 4:])


def test_bitwise_repeatable_and_batch_invariant():
    x = inputs(5000, HV=8, B=3)
    o, state, _ = run("portable", arguments(x, use_qk_l2norm=True))
    again, state2, _ = run("portable", arguments(x, use_qk_l2norm=True))
    assert torch.equal(o, again) and torch.equal(state, state2)
    alone = {name: value[1:2] for name, value in x.items()}
    o1, state1, _ = run("portable", arguments(alone, use_qk_l2norm=True))
    assert torch.equal(o[1:2], o1) and torch.equal(state[1:2], state1)
    packed = {n: y.flatten(0, 1)[None] if n != "initial_state" else y for n, y in x.items()}
    ends = cu(5000, 5000, 5000, device="cuda")
    o2, state2, _ = run("portable", arguments(packed, cu_seqlens=ends, use_qk_l2norm=True))
    assert torch.equal(o.flatten(0, 1)[None], o2) and torch.equal(state, state2)


def test_graph_with_changing_cu_seqlens():
    x = inputs(6000)
    x["initial_state"] = torch.randn(3, 4, 128, 128, device="cuda")
    cu_seqlens = cu(2000, 2500, 1500, device="cuda")
    args = arguments(x, cu_seqlens=cu_seqlens, use_qk_l2norm=True)
    run("portable", args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state, _ = run("portable", args)
    for lengths in ((2000, 2500, 1500), (0, 5999, 1), (6000, 0, 0), (1, 2048, 3951)):
        cu_seqlens.copy_(cu(*lengths, device="cuda"))
        graph.replay()
        eager = run("portable", args)
        assert torch.equal(o, eager[0]) and torch.equal(state, eager[1])


@pytest.mark.parametrize("gates", ["slow", "none"])
def test_a_million_tokens(gates):
    x = inputs(2**20, HV=2, D=64, gates=gates)
    args = arguments(x, use_qk_l2norm=True)
    ref = expected(args)
    o, state, _ = run("portable", args)
    assert_close(o, ref[0], factor=2)  # roundings of a million tokens that forget nothing
    assert_close(state, ref[1], torch.bfloat16, factor=2)


def test_operator_and_compiled_function():
    """opcheck of the operator, and one graph, where the portable kernels serve."""
    dispatch, ops = submodule("runtime.dispatch"), submodule("gdn.ops_train")
    kernel = load_package()
    x = inputs(2200, HV=2, D=64)
    state = x.pop("initial_state")
    first = (*x.values(), None, None)
    options = submodule("gdn.call").GdnOptions(0.125, use_qk_l2norm=True, output_final_state=True)

    def call(q, k, v, g, beta):
        return kernel.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    with torch.no_grad(), dispatch.force("portable"):
        checks = ("test_schema", "test_faketensor")
        for found, rows in ((ops.CHUNK, None), (ops.CHUNK_IN_POOL, torch.tensor([0]).cuda())):
            args = (*first, state, rows, None, *options)
            torch.library.opcheck(found.op, args, test_utils=checks)
        eager = call(*first[:5])
        compiled_ = torch.compile(call, fullgraph=True, backend="aot_eager")(*first[:5])
    assert all(relative_error(a, b) == 0 for a, b in zip(compiled_, eager))
