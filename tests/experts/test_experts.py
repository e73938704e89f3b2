"""fused_experts: the reference, the checks, the operators and what autograd does with them."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, relative_error, submodule
from experts_problems import doubled, gradients, options_of, problem

reference, ops, api = (submodule(f"experts.{name}") for name in ("reference", "ops", "api"))
ROUTINGS = ("random", "held elsewhere", "one expert", "twice")
GATES = [("relu", None), ("silu", None), ("gelu_tanh", 0.7), ("swigluoai", 0.9), ("relu", 0.2)]
ACTS = {"silu": F.silu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def by_entry(p):
    """The definition, one entry at a time."""
    out = torch.zeros_like(p.x)
    for t, k in torch.cartesian_prod(*map(torch.arange, p.ids.shape)).tolist():
        e = int(p.ids[t, k])
        if not 0 <= e < p.w_down.shape[0]:
            continue
        b_gate_up, b_down = (0.0 if b is None else b[e] for b in p.biases)
        both = p.w_gate_up[e] @ p.x[t] + b_gate_up
        gate, up = (both[::2], both[1::2]) if p.interleaved else both.chunk(2)
        if p.limit is not None:
            gate, up = gate.clamp(max=p.limit), up.clamp(-p.limit, p.limit)
        if p.activation == "swigluoai":
            z = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            z = ACTS[p.activation](gate) * up
        out[t] += p.weights[t, k] * (p.w_down[e] @ z + b_down)
    return out


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("activation, limit", GATES[:4])
def test_reference_is_the_definition(routing, activation, limit):
    p = doubled(problem(9, 3, 5, 6, 4, routing=routing, activation=activation, limit=limit))
    assert_close(reference.experts_fwd(*p), by_entry(p))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("activation, limit", GATES[1:])
def test_reference_gradients(routing, activation, limit):
    p = doubled(problem(9, 3, 5, 6, 4, routing=routing, activation=activation, limit=limit))
    dout = torch.randn_like(p.x)
    check_reference_gradients(p, dout)


def check_reference_gradients(p, dout):
    there = p.biases.are_there()
    needs = [True] * 4 + [there] * 2
    found = reference.experts_bwd(dout, *p[:7], needs, *p[7:])
    assert [g is not None for g in found] == needs
    for mine, torchs in zip(found, gradients(p, dout)):
        assert_close(mine, torchs)
    assert reference.experts_bwd(dout, *p[:7], [False] * 6, *p[7:]) == (None,) * 6


@pytest.mark.parametrize("interleaved", [False, True])
def test_reference_with_biases(interleaved):
    p = doubled(problem(9, 3, 5, 6, 4, routing="held elsewhere", activation="swigluoai", limit=0.9,
                        interleaved=interleaved, biased=True))  # fmt: skip
    assert_close(reference.experts_fwd(*p), by_entry(p))
    check_reference_gradients(p, torch.randn_like(p.x))


def test_gradcheck():
    p = doubled(problem(4, 2, 3, 5, 3, routing="held elsewhere"))
    leaves = [t.requires_grad_() for t in (p.x, p.w_gate_up, p.w_down, p.weights)]

    def function(x, w_gate_up, w_down, weights):
        return api.fused_experts(x, w_gate_up, w_down, p.ids, weights)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_held_elsewhere_adds_nothing(kernel):
    p = problem(6, 2, 4, 8, 8, routing="held elsewhere")
    weights = p.weights.clone().requires_grad_()
    out = kernel.fused_experts(*p[:4], weights)
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
    for weights in (p.weights.masked_fill(absent, 1.0), p.weights.masked_fill(absent, weight)):
        leaves = [t.detach().clone().requires_grad_() for t in (p.x, p.w_gate_up, p.w_down)]
        leaves.append(weights.requires_grad_())
        out = kernel.fused_experts(*leaves[:3], p.ids, leaves[3])
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
        assert_close(out, reference.experts_fwd(*doubled(p._replace(weights=weights))))


@pytest.mark.parametrize("T, K, E", [(0, 2, 3), (1, 1, 1), (3, 2, 1)])
def test_few_of_everything(kernel, T, K, E):
    p = problem(T, K, E, 8, 8)
    leaves = [t.requires_grad_() for t in (p.x, p.w_gate_up, p.w_down)]
    out = kernel.fused_experts(*p[:5])
    assert out.shape == (T, 8)
    out.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)


def test_autocast(kernel):
    p = problem(5, 2, 4, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = kernel.fused_experts(*p[:5])
    assert out.dtype == torch.bfloat16
    assert_close(out, reference.experts_fwd(*doubled(p)))


BAD = [
    ({"x": torch.zeros(5)}, ValueError, "x must have shape [T, H]"),
    ({"x": "x"}, TypeError, "x must be a torch.Tensor"),
    ({"w_gate_up": torch.zeros(4, 8, 16)}, ValueError, "w_gate_up must have shape [E, 2*I, H]"),
    ({"w_down": torch.zeros(4, 15, 8)}, ValueError, "w_down must have shape [E, H, I]"),
    ({"w_down": torch.zeros(4, 16, 8).double()}, TypeError, "w_down must have the dtype of x"),
    ({"ids": torch.zeros(5, 3).long()}, ValueError, "top_k_weights must have shape"),
    ({"ids": torch.zeros(5, 2)}, TypeError, "top_k_index must be of dtype int32, int64"),
    ({"weights": torch.zeros(5, 2).long()}, TypeError, "top_k_weights must be of dtype"),
    ({"weights": torch.zeros(5, 2, device="meta")}, ValueError, "on the device of x"),
    ({"activation": "swiglu"}, ValueError, "activation must be one of 'silu'"),
    ({"limit": 0}, ValueError, "limit must be positive and finite, got 0"),
    ({"limit": "7"}, TypeError, "limit must be a float or None"),
    ({"biases": (torch.zeros(4, 8), None)}, ValueError, "b_gate_up must have shape [E, 2*I]"),
    ({"biases": (None, torch.zeros(3, 16))}, ValueError, "b_down must have shape [E, H]"),
    ({"biases": (None, torch.zeros(4, 16).double())}, TypeError, "b_down must have the dtype of x"),
    ({"interleaved": "no"}, TypeError, "interleaved must be True or False, got str"),
]


@pytest.mark.parametrize("change, error, says", BAD, ids=[row[2][:32] for row in BAD])
def test_bad_input(kernel, change, error, says):
    p = problem(5, 2, 4, 16, 8)._replace(**change)
    with pytest.raises(error) as raised:
        kernel.fused_experts(*p[:5], **options_of(p))
    assert says in str(raised.value)


def op_arguments(device, routing="held elsewhere"):
    return problem(5, 2, 4, 16, 8, device=device, routing=routing, limit=0.5)


def test_opcheck(device):
    p = op_arguments(device)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        ops.EXPERTS.op,
        (*p[:5], None, None, *p[5:7], False, False, False, False),
        test_utils=checks,
    )
    p = p._replace(x=p.x.requires_grad_(), w_down=p.w_down.requires_grad_())
    for recompute in (False, True):
        args = (*p[:5], None, None, *p[5:7], True, recompute, False, False)
        torch.library.opcheck(ops.EXPERTS.op, args, test_utils=checks[:2])


def operator_call(recompute=False, main_grad=False):
    """The operator in eager mode with gradients: out, its leaves, and what was kept for them."""
    p, kept = problem(9, 2, 4, 16, 8), []
    leaves = [t.requires_grad_() for t in (p.x, p.w_gate_up, p.w_down, p.weights)]
    for w in leaves[1:3] if main_grad else ():
        w.main_grad = torch.ones_like(w)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        options = ("silu", None, True, recompute, main_grad, False)
        out = ops.EXPERTS.op(*p[:5], None, None, *options)[0]
    return p, out, leaves, kept


def test_what_is_kept():
    """x, the weights and the routing; and gate and up, [T K, 2 I], unless they are made again."""
    for recompute in (False, True):
        p, _, _, kept = operator_call(recompute)
        routing = torch.Size([submodule("experts.call").routing_size(18, 4)])
        own = [] if recompute else [torch.Size([18, 16])]
        assert [t.shape for t in kept] == [*(t.shape for t in p[:5]), *own, routing]


def test_the_gradient_has_none():
    _, out, leaves, _ = operator_call()
    first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="fused_experts has no second derivative"):
        first[0].sum().backward()


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
def test_compiled_equals_eager(kernel, device, recompute):
    p = op_arguments(device)
    leaves = [t.requires_grad_() for t in (p.x, p.w_gate_up, p.w_down, p.weights)]

    def function(x, w_gate_up, w_down, weights):
        y = kernel.fused_experts(
            x * 2, w_gate_up, w_down, p.ids, weights, limit=0.5, recompute=recompute
        )
        return y * y

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert relative_error(compiled(*leaves), function(*leaves)) < 1e-6
    found = [torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, function)]
    for mine, eager in zip(*found):
        assert relative_error(mine, eager) < 1e-5


@pytest.mark.parametrize("recompute", [False, True])
def test_the_layout_of_gpt_oss(kernel, device, recompute):
    """Weights that are transposed views, with gate and up interleaved, and biases; eager and
    compiled."""
    p = problem(9, 2, 4, 16, 8, activation="swigluoai", limit=0.9, turned=True, interleaved=True,
                biased=True, device=device)  # fmt: skip
    stored = [w.mT.contiguous() for w in p[1:3]]
    leaves = [t.requires_grad_() for t in (p.x, *stored, p.weights, *p.biases)]

    def function(x, w_gate_up, w_down, weights, b_gate_up, b_down):
        return kernel.fused_experts(
            x, w_gate_up.mT, w_down.mT, p.ids, weights, b_gate_up=b_gate_up, b_down=b_down,
            activation="swigluoai", limit=0.9, interleaved=True, recompute=recompute,
        )  # fmt: skip

    exact = gradients(p, torch.ones_like(p.x))
    exact = (exact[0], exact[1].mT, exact[2].mT, *exact[3:])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for f in (function, function, compiled):
        out = f(*leaves)
        assert_close(out, reference.experts_fwd(*doubled(p)))
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
        out = function(q.x, q.ids, q.weights)
        assert_close(out, reference.experts_fwd(q.x, p.w_gate_up, p.w_down, q.ids, q.weights,
                                                "silu", None).double())  # fmt: skip
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
                assert_close(out, reference.experts_fwd(*p))
    assert found[0] == found[1] == found[3] > 0 == found[2]
