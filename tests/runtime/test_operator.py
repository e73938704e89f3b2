"""Tests of operators of runtime/ops.py: eager calls skip torch's dispatcher and use the operator's
own gradient; modes, transforms and tracing see the operator."""

from typing import Optional, Tuple

import pytest
import torch
from conftest import gdn_inputs, submodule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ops = submodule("runtime.ops")
bodies = []  # a name for each time that the body of an operator ran


@ops.operator("test_product")
def product(x: Tensor, y: Optional[Tensor], factor: float) -> Tuple[Tensor, Tensor]:
    """factor x y, and y squared where y is given."""
    bodies.append("product")
    return factor * x * (1 if y is None else y), None if y is None else y * y


@product.register_fake
def _(x, y, factor):
    return x.new_empty(x.shape), x.new_empty(0) if y is None else y.new_empty(y.shape)


@ops.operator("test_product_bwd")
def product_bwd(d: Tensor, x: Tensor, y: Optional[Tensor], factor: float) -> Tuple[Tensor, Tensor]:
    bodies.append("product_bwd")
    return factor * d * (1 if y is None else y), None if y is None else factor * d * x


@product_bwd.register_fake
def _(d, x, y, factor):
    return x.new_empty(x.shape), x.new_empty(0) if y is None else y.new_empty(y.shape)


def save(ctx, inputs, output):
    x, y, ctx.factor = inputs
    ctx.save_for_backward(x, y)
    ctx.set_materialize_grads(False)


def gradients(ctx, d, _):
    x, y = ctx.saved_tensors
    dx, dy = product_bwd(d, x, y, ctx.factor)
    need = ctx.needs_input_grad
    return dx if need[0] else None, dy if need[1] else None, None


product.register_autograd(gradients, setup_context=save)
ops.no_second_derivative(product_bwd, "product")


class Watch(TorchDispatchMode):
    """Writes down the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


def leaves():
    return [torch.randn(5, dtype=torch.float64).requires_grad_() for _ in "xy"]


def names_of(graph) -> str:
    return type(graph).__name__


def test_eager_calls_go_past_torch():
    x, y = leaves()
    out, square = product(x, y, 2.0)
    assert names_of(out.grad_fn) == "test_productBackward" and torch.equal(square, y * y)
    alone, nothing = product(x, None, 2.0)
    assert nothing is None and torch.equal(alone, 2 * x)
    bodies.clear()
    dx, dy = torch.autograd.grad(out.sum(), (x, y))
    assert torch.equal(dx, 2 * y) and torch.equal(dy, 2 * x)
    assert bodies == ["product_bwd"]


def test_watchers_meet_the_operator_and_its_gradient():
    x, y = leaves()
    with Watch() as watch:
        out, square = product(x, y, 2.0)
        found = torch.autograd.grad(out.square().sum(), (x, y))
        _, nothing = product(x, None, 2.0)
    assert {"test_product", "test_product_bwd"} <= set(watch.seen)
    assert nothing.shape == (0,)  # an operator returns tensors only
    want = torch.autograd.grad(product(x, y, 2.0)[0].square().sum(), (x, y))
    assert all(map(torch.equal, found, want))


def test_transforms_meet_the_operator():
    """vmap calls it row by row; torch's other transforms have no rule for it and say so."""
    x, y = (t.detach() for t in leaves())
    rows = torch.stack([x, y])
    assert torch.equal(torch.func.vmap(lambda x: product(x, y, 2.0)[0])(rows), 2 * rows * y)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: product(x, y, 2.0)[0].sum())(x)


def test_forward_derivatives_are_the_references(monkeypatch):
    """A kernel reads memory, where torch keeps no tangent: it must not serve."""
    api, reference = submodule("norm.api"), submodule("norm.reference")

    def launch(x, weight, residual):
        return reference.rms_norm_fwd(torch.tensor(x.tolist()), None, None, 1e-6, "llama", 0.0)

    monkeypatch.setattr(submodule("runtime.dispatch"), "prepare", lambda *args: launch)
    x, direction = torch.randn(2, 3, 8, dtype=torch.float64).unbind(0)
    _, want = torch.func.jvp(
        lambda x: reference.rms_norm_fwd(x, None, None, 1e-6, "llama", 0.0)[0],
        (x,),
        (direction,),
    )
    with torch.autograd.forward_ad.dual_level():
        y = api.rms_norm(torch.autograd.forward_ad.make_dual(x, direction))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(y).tangent, want)
    assert torch.equal(torch.func.jvp(api.rms_norm, (x,), (direction,))[1], want)


def test_tensors_that_a_transform_has_left(monkeypatch):
    """They have no memory, where torch does not unwrap them."""
    api, reference = submodule("norm.api"), submodule("norm.reference")
    kept, met = [], []

    def launch(x, weight, residual):
        met.append(x.data_ptr())
        return reference.rms_norm_fwd(x, weight, residual, 1e-6, "llama", 0.0, keep=True)

    monkeypatch.setattr(submodule("runtime.dispatch"), "prepare", lambda *args: launch)
    torch.func.grad(lambda x: (kept.append(2 * x), x.sum())[1])(torch.randn(3, 8))
    weight = torch.ones(8, requires_grad=True)
    y = api.rms_norm(kept[0], weight)
    assert met and y.requires_grad
    torch.testing.assert_close(y, api.rms_norm(torch.tensor(kept[0].tolist()), weight))


def test_opcheck_and_one_graph():
    x, y = leaves()
    torch.library.opcheck(product, (x, y, 2.0))
    torch.library.opcheck(product, (x, None, 2.0))
    step = torch.compile(lambda *t: product(*t, 2.0)[0].sum(), backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(step(x, y), (x, y)), (2 * y, 2 * x)):
        assert torch.equal(a, b)


def test_second_derivatives_are_refused():
    x, y = leaves()
    (dx,) = torch.autograd.grad(product(x, y, 2.0)[0].sum(), x, create_graph=True)
    assert torch.equal(dx, 2 * y)
    with pytest.raises(NotImplementedError, match="product has no second derivative"):
        dx.sum().backward()


def test_saved_inputs_are_watched():
    x, y = leaves()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        product(x, y, 2.0)
    assert len(kept) == 2
    out, _ = product(x, y, 2.0)
    with torch.no_grad():
        y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpoint():
    x, y = leaves()
    out = torch.utils.checkpoint.checkpoint(
        lambda *t: product(*t, 2.0)[0], x, y, use_reentrant=False
    )
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], 2 * y)


def test_gradients_that_are_not_in_memory():
    zeros = torch._efficientzerotensor((3,))
    assert ops._in_memory(zeros).tolist() == [0, 0, 0] and ops._in_memory(None) is None
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    assert negative.is_neg() and not ops._in_memory(negative).is_neg()
    assert torch.equal(ops._in_memory(negative), negative)


def test_the_rule_by_the_operator_and_past_it(monkeypatch):
    """Both paths give the same bits with every implementation."""
    train, calls = submodule("gdn.ops_train"), submodule("gdn.call")
    x = gdn_inputs(1, 70, 1, 2, 8, 8, torch.float32)
    tensors = [t.requires_grad_() for t in x.values()]
    options = calls.GdnOptions(0.3, use_qk_l2norm=True, output_final_state=True, save_blocks=True)

    def gradients():
        args = (*tensors[:5], None, None, tensors[5], None, None, *options)
        o, state, _, *blocks = train.CHUNK.op(*args)
        assert not any(block.requires_grad for block in blocks)
        return torch.autograd.grad(o.sum() + state.square().sum(), tensors)

    past = gradients()
    with Watch():
        by_torch = gradients()
    assert all(map(torch.equal, past, by_torch))
