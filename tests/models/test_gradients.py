"""Gradients that are asked of autograd's graph are those of its engine, which is not started."""

from types import SimpleNamespace

import pytest
import torch
from conftest import submodule
from tiny_models import random_model
from written import found_of_changed

gradients = submodule("models.gradients")


class Several(torch.autograd.Function):
    """Three outputs, of which a sum may leave one out."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b, a + b, a.exp()

    @staticmethod
    def backward(ctx, product, total, power):
        a, b = ctx.saved_tensors
        return product * b + total + power * a.exp(), (product * a + total).sum(0)


def written(x, w):
    y = x.clone()
    y[:, 1] = w[0]
    gate, up = y.chunk(2, -1)
    return [(torch.nn.functional.silu(gate) * up).sin().sum()]


def in_other_dtypes(x, w):
    y = torch.nn.functional.rms_norm(x.half(), (4,), w.half())
    return [y.sin().sum().float(), x.bfloat16().sum().double()]


def by_function(x, w):
    a, b, _ = Several.apply(x, w)
    return [(a * b).sum(), (a * a.detach()).sum()]


CASES = {
    "broadcast": lambda x, w: [(x * w).sin().sum()],
    "written": written,
    "other dtypes": in_other_dtypes,
    "a function of one's own": by_function,
    "chosen": lambda x, w: [x.topk(2, -1)[0].softmax(-1).sin().sum(), (w * w.detach()).sum()],
    "one of several outputs": lambda x, w: [x.unbind(-1)[2].exp().sum()],
    "a product": lambda x, w: [(x @ w).sin().sum(), torch.einsum("ij,j->i", x, w).sum()],
}


@pytest.mark.parametrize("name", CASES)
def test_as_the_engine(name):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=random).requires_grad_()
    w = torch.randn(4, generator=random).requires_grad_()
    found = gradients.gradients(CASES[name](x, w), [x, w])
    expected = torch.autograd.grad(CASES[name](x, w), [x, w], allow_unused=True)
    for mine, theirs in zip(found, expected):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)


def compared(change, names=()) -> bool:
    """names: those in the code of a forward."""

    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    facts = SimpleNamespace(names={*names})
    return gradients.same_gradients(facts, [x], lambda x: [x.sin()], lambda x: [change(x)])


def hooked(x):
    y = x.sin()
    y.register_hook(lambda gradient: 2 * gradient)
    return y


def without(x):
    with torch.no_grad():
        y = x.sin()
    return y


def test_what_differs(monkeypatch):
    """The same numbers with other gradients, with none, and with a hook; no engine is asked."""

    def refuse(*args, **kwargs):
        raise AssertionError("autograd's engine is started")

    for home in (torch.autograd, torch.autograd.graph):
        monkeypatch.setattr(home, "_engine_run_backward", refuse)
    assert compared(torch.sin)
    assert not compared(lambda x: x.sin() + 0 * x.detach() + x - x.detach())
    assert not compared(without) and not compared(lambda x: x.detach().sin())
    with pytest.raises(submodule("models.code").Refused, match="hook"):
        compared(hooked, hooked.__code__.co_names)


@pytest.mark.parametrize("name", ["self.weight", "variance"])
def test_a_norm_with_other_gradients(monkeypatch, name):
    """The same numbers, of the weight or of the mean square without a gradient."""
    pytest.importorskip("transformers")
    norm = random_model("llama").model.norm
    assert found_of_changed(monkeypatch, norm, "", "").reason is None
    monkeypatch.undo()
    old = {"self.weight": "self.weight *", "variance": "variance +"}[name]
    finding = found_of_changed(monkeypatch, norm, old, old.replace(name, f"{name}.detach()"))
    assert finding.reason == "its forward is another formula"
