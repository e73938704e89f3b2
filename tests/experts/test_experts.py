"""fused_experts: the reference, the checks, the operators and what autograd does with them."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, submodule
from experts_problems import (
    LAYOUTS,
    ROUTINGS,
    answer,
    doubled,
    gradients,
    of_gradient,
    options_of,
    problem,
    reference,
    with_leaves,
)

ops, api = submodule("experts.ops"), submodule("experts.api")
FORMS = [
    {"activation": "relu"}, {"activation": "silu"}, {"activation": "gelu_tanh", "limit": 0.7},
    {"activation": "swigluoai", "limit": 0.9}, {"activation": "relu", "limit": 0.2}, *LAYOUTS[::3],
]  # fmt: skip
ACTS = {"silu": F.silu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def by_entry(p):
    """The definition, one entry at a time."""
    activation, limit, *_, interleaved = p.options
    out = torch.zeros_like(p.x)
    for t, k in torch.cartesian_prod(*map(torch.arange, p.ids.shape)).tolist():
        e = int(p.ids[t, k])
        if not 0 <= e < p.w_down.shape[0]:
            continue
        b_gate_up, b_down = (0.0 if b is None else b[e] for b in (p.b_gate_up, p.b_down))
        both = p.w_gate_up[e] @ p.x[t] + b_gate_up
        gate, up = (both[::2], both[1::2]) if interleaved else both.chunk(2)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if activation == "swigluoai":
            z = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            z = ACTS[activation](gate) * up
        out[t] += p.weights[t, k] * (p.w_down[e] @ z + b_down)
    return out


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_reference(routing, form):
    p = doubled(problem(9, 3, 5, 6, 4, routing=routing, **form))
    assert_close(reference.experts_fwd(p), by_entry(p))
    call = of_gradient(p, torch.randn_like(p.x))
    found = reference.experts_bwd(call)
    assert [g is not None for g in found] == list(call.options.needs)
    for mine, torchs in zip(found, gradients(p, call.dout)):
        assert_close(mine, torchs)
    nothing = call._replace(options=call.options._replace(needs=[False] * 6))
    assert reference.experts_bwd(nothing) == (None,) * 6


def test_held_elsewhere_adds_nothing(kernel):
    p, (weights,) = with_leaves(problem(6, 2, 4, 8, 8, routing="held elsewhere"), "weights")
    out = kernel.fused_experts(*p[:5])
    assert out[3].abs().max() == 0  # all of this token's experts are elsewhere
    out.sum().backward()
    here = (p.ids >= 0) & (p.ids < 4)
    assert torch.equal(weights.grad != 0, here)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_of_absent_experts_are_not_read(kernel, weight):
    """Nor are gradients spoiled: 0 times NaN is NaN."""
    p, found = problem(6, 2, 4, 8, 8, routing="held elsewhere"), []
    absent = (p.ids < 0) | (p.ids >= 4)
    assert absent.any() and not absent.all()
    for value in (1.0, weight):
        q, leaves = with_leaves(p._replace(weights=p.weights.masked_fill(absent, value)))
        out = kernel.fused_experts(*q[:5])
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for mine, want in zip(found[1], found[0]):
        assert want.isfinite().all() and torch.equal(mine, want)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(kernel, dtype, index):
    p = problem(5, 2, 4, 16, 8, dtype=dtype, index=index)
    for weights in (p.weights, p.weights.to(dtype)):
        out = kernel.fused_experts(*p[:4], weights)
        assert out.dtype == dtype
        assert_close(out, answer(p._replace(weights=weights)))


def operator_arguments(p, **options):
    return (*p.tensors, *p.options._replace(**options))


def operator_call(recompute=False, main_grad=False):
    """The operator in eager mode with gradients: out, its leaves, and what was kept for them."""
    p, leaves = with_leaves(problem(9, 2, 4, 16, 8))
    kept = []
    for w in leaves[1:3] if main_grad else ():
        w.main_grad = torch.ones_like(w)
    options = {"keeps": True, "recompute": recompute, "main_grad": main_grad}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = ops.EXPERTS.op(*operator_arguments(p, **options))[0]
    return p, out, leaves, kept


def test_what_is_kept():
    """x, the weights and the routing; and gate and up, [T K, 2 I], unless they are made again."""
    for recompute in (False, True):
        p, _, _, kept = operator_call(recompute)
        routing = torch.Size([submodule("experts.call").routing_size(18, 4)])
        own = [] if recompute else [torch.Size([18, 16])]
        assert [t.shape for t in kept] == [*(t.shape for t in p[:5]), *own, routing]


@pytest.mark.parametrize("by_operator", [False, True])
def test_main_grads(kernel, by_operator):
    p, out, leaves, _ = operator_call(main_grad=True)
    if not by_operator:
        out = kernel.fused_experts(*p[:5], main_grad=True)
    leaves[2].grad_added_to_main_grad = False
    out.sum().backward()
    exact = gradients(p, torch.ones_like(p.x))
    assert leaves[1].grad is None and not leaves[2].grad.any()
    assert leaves[2].grad_added_to_main_grad
    for found, right in zip((leaves[0].grad, *(w.main_grad - 1 for w in leaves[1:3])), exact):
        assert_close(found, right)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_layout_of_gpt_oss(kernel, device, recompute):
    """Weights that are transposed views, with gate and up interleaved, and biases; eager and
    compiled."""
    p = problem(9, 2, 4, 16, 8, device=device, **LAYOUTS[0])
    stored = [w.mT.contiguous() for w in p[1:3]]
    leaves = [t.requires_grad_() for t in (p.x, *stored, p.weights, p.b_gate_up, p.b_down)]

    def function(x, w_gate_up, w_down, weights, b_gate_up, b_down):
        options = {**options_of(p), "b_gate_up": b_gate_up, "b_down": b_down}
        return kernel.fused_experts(
            x, w_gate_up.mT, w_down.mT, p.ids, weights, recompute=recompute, **options
        )

    exact = gradients(p, torch.ones_like(p.x))
    exact = (exact[0], exact[1].mT, exact[2].mT, *exact[3:])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for f in (function, function, compiled):
        out = f(*leaves)
        assert_close(out, answer(p))
        for leaf, mine, right in zip(leaves, torch.autograd.grad(out.sum(), leaves), exact):
            assert mine.shape == leaf.shape
            assert_close(mine, right)


def test_compile_sees_no_shapes_from_data(kernel):
    """Other ids, and another number of tokens, do not compile anew."""
    testing = importlib.import_module("torch._dynamo.testing")
    counter = testing.CompileCounter()
    p = problem(6, 2, 4, 16, 8)
    function = torch.compile(
        lambda x, ids, w: kernel.fused_experts(x, p.w_gate_up, p.w_down, ids, w),
        fullgraph=True, dynamic=True, backend=counter,
    )  # fmt: skip
    for T in (6, 9, 14):
        q = problem(T, 2, 4, 16, 8, routing="held elsewhere", seed=T)
        q = q._replace(w_gate_up=p.w_gate_up, w_down=p.w_down)
        assert_close(function(q.x, q.ids, q.weights), answer(q))
    assert counter.frame_count == 1


def test_main_grad_is_for_eager_mode(kernel):
    p = problem(3, 2, 4, 16, 8)
    weight = p.w_down.requires_grad_()
    function = torch.compile(
        lambda x: kernel.fused_experts(x, p.w_gate_up, weight, p.ids, p.weights, main_grad=True),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    with pytest.raises(Exception, match="main_grad=True is for eager mode"):
        function(p.x)


def test_weights_at_any_address(kernel):
    """TMA reads at multiples of 16 bytes alone: elsewhere the reference computes a known call."""
    pytest.importorskip("triton.experimental.gluon")
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    p, spare = problem(9, 2, 4, 16, 8, dtype=torch.bfloat16), torch.empty(4 * 16 * 16 + 1)
    spare = spare.bfloat16()
    with recording.recorded(device.Chip("NVIDIA_H200", (9, 0), 132)) as records:
        found = []
        for first in (0, 0, 1, 0):
            w = spare[first:][: p.w_gate_up.numel()].view(p.w_gate_up.shape).copy_(p.w_gate_up)
            out = kernel.fused_experts(p.x, w, p.w_down, p.ids, p.weights)
            found.append(len(records))
            records.clear()
            if first:
                assert_close(out, reference.experts_fwd(p))
    assert found[0] == found[1] == found[3] > 0 == found[2]
