"""Rotary embedding, router and loss under transformers' names: its values, its own code for other
formulas."""

import importlib

import pytest
import torch
from conftest import assert_close, submodule
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("kernels")
pytestmark = pytest.mark.filterwarnings("ignore")
HALF, WIDE = torch.bfloat16, torch.float32


def modeling(name: str):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@pytest.fixture
def by_reference():
    """Yields what has computed, by operation, with the reference for a kernel."""
    dispatch = submodule("runtime.dispatch")
    with dispatch.force("reference"), dispatch.served() as record:
        yield record


def function_of(name: str):
    """The module that `kernels` has made of a model's function of rotary embedding."""
    found = modeling(name).apply_rotary_pos_emb
    if not isinstance(found, nn.Module):
        pytest.skip("this transformers does not make modules of functions")
    return found


def rotary_inputs(dtype, dim):
    q, k = (torch.randn(2, heads, 5, 8, dtype=dtype) for heads in (4, 2))
    cos, sin = torch.rand(2, 2, 5, 8, dtype=dtype)  # no angle's: all numbers count
    if dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return q.requires_grad_(), k.requires_grad_(), cos, sin


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
@pytest.mark.parametrize("name", ["llama", "olmo2", "modernbert"])
def test_rotary(kernel, by_reference, name, dtype, dim):
    own, (q, k, cos, sin) = function_of(name), rotary_inputs(dtype, dim)
    got = kernel.layers.rotary_pos_emb.forward(own, q, k, cos, sin, unsqueeze_dim=dim)
    assert set(by_reference) == {"qk_norm_rope_fwd"}
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    function = submodule("layers.own_code").cells_of(type(own).forward)["func"]
    exact = modeling("llama").apply_rotary_pos_emb(
        *wide, cos.double(), sin.double(), unsqueeze_dim=dim
    )
    for found, theirs, right, x, y in zip(
        got, function(q, k, cos, sin, unsqueeze_dim=dim), exact, (q, k), wide
    ):
        assert found.dtype is theirs.dtype and found.shape == theirs.shape
        # at most transformers' own error
        assert (found - right).norm() <= (theirs - right).norm() + 1e-6 * right.norm()
        (dx,) = torch.autograd.grad(found.float().sin().sum(), x, retain_graph=True)
        (dy,) = torch.autograd.grad(right.sin().sum(), y, retain_graph=True)
        assert_close(dx, dy)


@pytest.mark.parametrize("name", ["nanochat", "gpt_oss"])
def test_other_rotary_embeddings_are_the_models_own(kernel, by_reference, name):
    own, (q, k, cos, sin) = function_of(name), rotary_inputs(WIDE, 1)
    if name == "gpt_oss":
        cos, sin = cos[..., :4], sin[..., :4]
    got = kernel.layers.rotary_pos_emb.forward(own, q, k, cos, sin)
    assert all(map(torch.equal, got, own(q, k, cos, sin))) and not by_reference


def test_rotary_calls_that_no_kernel_knows(kernel, by_reference):
    own, (q, k, cos, sin) = function_of("llama"), rotary_inputs(WIDE, 1)
    forward = kernel.layers.rotary_pos_emb.forward
    for tables in ((cos.double(), sin.double()), (cos[:1, None], sin[:1, None])):
        dim = 1 if tables[0].ndim == 3 else 0
        tables = tables if dim else (tables[0][0], tables[1][0])
        got, expected = forward(own, q, k, *tables, dim), own(q, k, *tables, dim)
        assert all(map(torch.equal, got, expected))
    assert not by_reference


def router(dtype, model="qwen3_5_moe", name="Qwen3_5MoeTopKRouter", **more):
    sizes = {"num_experts_per_tok": 3, "num_experts": 12, "hidden_size": 24}
    found = getattr(modeling(model), name)(type("Config", (), {**sizes, **more}))
    nn.init.normal_(found.weight)
    return found.to(dtype)


@pytest.mark.parametrize("dtype", [WIDE, HALF])
def test_router(kernel, by_reference, dtype):
    own, x = router(dtype), torch.randn(2, 7, 24, dtype=dtype, requires_grad=True)
    got, expected = kernel.layers.SoftmaxTopKRouter.forward(own, x), own(x)
    assert set(by_reference) == {"topk_fwd"}
    assert torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[2])
    assert got[1].dtype is expected[1].dtype
    assert_close(got[1], expected[1].double())
    found, wanted = (torch.autograd.grad(y[1].sin().sum(), x)[0] for y in (got, expected))
    assert_close(found, wanted.double(), factor=2)


def test_a_router_with_another_formula_keeps_its_forward(kernel, by_reference, monkeypatch):
    forward, x = kernel.layers.SoftmaxTopKRouter.forward, torch.randn(5, 24)
    other = router(WIDE, "laguna", "LagunaTopKRouter", moe_router_logit_softcapping=2.0)
    assert all(map(torch.equal, forward(other, x), other(x)))
    assert not by_reference
    own = router(WIDE)
    forward(own, x)
    assert len(by_reference.pop("topk_fwd")) == 1
    monkeypatch.setattr(type(own), "forward", lambda self, hidden_states: 2 * hidden_states)
    assert torch.equal(forward(own, x), 2 * x) and not by_reference


@pytest.mark.parametrize("items", [None, 7, torch.tensor(5)])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
def test_loss(kernel, by_reference, dtype, shifted, items):
    from transformers.loss.loss_utils import ForCausalLMLoss as own

    logits = torch.randn(2, 6, 11, dtype=dtype, requires_grad=True)
    labels = torch.randint(11, (2, 6))
    labels[0, 2:4] = -100
    words = {"labels": labels, "shift_labels": labels if shifted else None}
    words.update(vocab_size=11, num_items_in_batch=items, num_logits=3)  # one that nobody knows
    layer = kernel.layers.ForCausalLMLoss()
    got, expected = layer(logits, **words), own(logits.double(), **words)
    assert set(by_reference) == {"cross_entropy_fwd"} and got.dtype is WIDE
    assert_close(got, expected, dtype=WIDE)
    (found,) = torch.autograd.grad(got, logits)
    (wanted,) = torch.autograd.grad(own(logits, **words), logits)
    assert_close(found, wanted.double())


def test_loss_without_kernels_is_torchs(kernel):
    from transformers.loss.loss_utils import ForCausalLMLoss as own

    logits, labels = torch.randn(2, 6, 11, dtype=HALF), torch.randint(11, (2, 6))
    for items in (None, 7):
        found = kernel.layers.ForCausalLMLoss()(logits, labels, 11, items)
        assert torch.equal(found, own(logits, labels, 11, items))
