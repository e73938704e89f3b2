"""serve_loss: the model's loss by a stand-in for Liger's function, and whatever is not for it."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, relative_error, submodule

transformers = pytest.importorskip("transformers")
loss, serving = submodule("models.loss"), submodule("models.serving")
fused = []  # of each call that Liger's stand-in got: the reduction


class Liger(torch.autograd.Function):
    """What Liger's function promises, by plain torch."""

    @staticmethod
    def forward(
        ctx, hidden, weight, target, bias, classes, ignore_index, z, smoothing, reduction, *_
    ):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
            logits = F.linear(*leaves, bias).float()
            options = {"ignore_index": ignore_index, "label_smoothing": smoothing}
            total = F.cross_entropy(logits, target, reduction=reduction, **options)
            ctx.save_for_backward(*torch.autograd.grad(total, leaves))
        fused.append(reduction)
        return total.detach(), None, None, None

    @staticmethod
    def backward(ctx, d, *_):
        return (*(d * x for x in ctx.saved_tensors), *(None,) * 13)


SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def tiny(name="Llama", **options):
    torch.manual_seed(0)
    kind = "Qwen3_5TextConfig" if name == "Qwen3_5" else f"{name}Config"
    config = getattr(transformers, kind)(**{**SIZES, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


@pytest.fixture(autouse=True)
def liger(monkeypatch, device):
    """On a GPU Liger itself, where it is installed."""
    loss._liger.cache_clear()
    if device.type != "cuda" or loss._liger() is None:
        monkeypatch.setattr(loss, "_liger", lambda: Liger)
    monkeypatch.setattr(loss.device, "is_gpu", lambda where: True)
    fused.clear()


def step(model, **options):
    where = model.lm_head.weight.device
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(1)).to(where)
    labels = ids.clone()
    labels[:, :3] = -100
    model.zero_grad()
    out = model(input_ids=ids, labels=labels, **options)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(model, stands_in=True, **options):
    """The model's step before and after serve_loss; the output after it. stands_in: for logits."""
    before, gradients = step(model, **options)
    row = loss.serve_loss(model)
    assert row.reason is None and row.layer == "loss"
    after, found = step(model, **options)
    assert isinstance(after.logits, loss.Logits) == stands_in
    assert_close(after.loss, before.loss)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(found[name], gradient) < 1e-5, name
    assert_close(after.logits.argmax(-1).float(), before.logits.argmax(-1).float())
    assert_close(torch.softmax(after.logits / 2.0, -1), torch.softmax(before.logits / 2.0, -1))
    return after


def was_fused(device) -> bool:
    return bool(fused) or device.type == "cuda"


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}])
def test_step_is_the_models_own(device, options):
    out = compare(tiny().to(device), **options)
    assert was_fused(device) and out.logits._made is not None  # compare() looked at them
    assert device.type == "cuda" or fused == ["sum" if options else "mean"]


@pytest.mark.parametrize("name", ["Qwen3", "Mistral", "Qwen3_5"])
def test_families(device, name):
    options = {"layer_types": ["full_attention"]} if name == "Qwen3_5" else {}
    config = {"tie_word_embeddings": name == "Qwen3", "head_dim": 16, **options}
    compare(tiny(name, **config).to(device))
    assert was_fused(device)


def test_what_is_done_to_logits_is_done(device):
    """Gemma2 caps its logits, Granite scales them: they are made, and all is as it was."""
    compare(tiny("Gemma2", head_dim=16, final_logit_softcapping=2.0).to(device), False)
    compare(tiny("Granite", logits_scaling=3.0).to(device), False)
    assert not fused


def test_shapes_and_operations_of_the_stand_in(device):
    hidden, weight = torch.randn(2, 3, 8, device=device), torch.randn(5, 8, device=device)
    plain = F.linear(hidden, weight)

    def stand_in():
        return loss.Logits(hidden, weight, None)

    assert stand_in().shape == (2, 3, 5) and stand_in().float().view(-1, 5).shape == (6, 5)
    for operate in (
        lambda x: x[..., :-1, :], lambda x: x * 2, lambda x: 2 * x, lambda x: x / 3, lambda x: -x,
        lambda x: 1 - x, torch.tanh, lambda x: x.log_softmax(-1), lambda x: torch.cat([x, x]),
        lambda x: x.view(2, 15), lambda x: x.view(-1, 5),
        lambda x: x.double() @ x.double().mT,
        lambda x: F.cross_entropy(x.view(-1, 5), torch.zeros(6, dtype=torch.long, device=device)),
        lambda x: x > 0, lambda x: torch.stack(list(x)),
    ):  # fmt: skip
        made = operate(stand_in())
        made = made.made() if isinstance(made, loss.Logits) else made
        assert torch.equal(made, operate(plain))


def test_not_where_it_would_change_something(device):
    model = tiny().to(device)
    loss.serve_loss(model)
    ids = torch.arange(8, device=device)[None]
    assert torch.is_tensor(model(input_ids=ids).logits)  # no labels
    assert torch.is_tensor(model.eval()(input_ids=ids, labels=ids).logits)
    model.train()
    with torch.no_grad():
        assert torch.is_tensor(model(input_ids=ids, labels=ids).logits)
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert torch.is_tensor(model(input_ids=ids, labels=ids).logits)
    handle.remove()
    fused.clear()
    model.model.requires_grad_(False)  # the decoder is frozen: Liger would make no gradient
    _, gradients = step(model)
    assert list(gradients) == ["lm_head.weight"] and gradients["lm_head.weight"].norm() > 0
    assert not fused


def test_autocast(device):
    model = tiny().to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        before, gradients = step(model)
        loss.serve_loss(model)
        after, found = step(model)
    assert isinstance(after.logits, loss.Logits) and was_fused(device)
    assert after.logits.dtype == before.logits.dtype
    assert_close(after.loss, before.loss, torch.bfloat16)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, torch.bfloat16, factor=2)


def test_copies_signatures_and_undoing(device):
    model = tiny().to(device)
    kind, signature = type(model), inspect.signature(model.forward)
    loss.serve_loss(model)
    assert isinstance(model, kind) and inspect.signature(model.forward) == signature
    out, _ = step(copy.deepcopy(model))
    assert isinstance(out.logits, loss.Logits)
    assert model.generate(
        torch.ones(1, 3, dtype=torch.long, device=device), max_new_tokens=2
    ).shape == (1, 5)
    assert loss.restore_loss(model) == 1
    assert type(model) is kind and type(model.lm_head) is torch.nn.Linear
    assert torch.is_tensor(step(model)[0].logits) and loss.restore_loss(model) == 0


def test_left_alone(monkeypatch):
    assert loss.serve_loss(torch.nn.Linear(2, 2)) is None
    model = tiny()
    model.forward = lambda **_: None
    assert "its forward is replaced already" in loss.serve_loss(model).reason
    model = tiny()

    class Other(torch.nn.Linear):
        pass

    model.lm_head.__class__ = Other
    assert loss.serve_loss(model).reason == "its lm_head is a Other, not an nn.Linear"
    monkeypatch.setattr(loss, "_liger", lambda: None)
    assert loss.serve_loss(tiny()).reason == "needs Liger: pip install liger-kernel"
