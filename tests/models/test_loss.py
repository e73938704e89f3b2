"""Tests of serve_loss: the model's loss by a stub of Liger's function, and calls that are not for
it."""

import copy
import inspect
import operator

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, relative_error, submodule

transformers = pytest.importorskip("transformers")
loss = submodule("models.loss")
fused = []  # of each call that Liger's stand-in got: the reduction


class Liger(torch.autograd.Function):
    """Computes what Liger's function computes in plain torch: its backward scales saved tensors in
    place."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, options):
        with torch.enable_grad():
            given = (hidden, weight) if bias is None else (hidden, weight, bias)
            leaves = [t.detach().requires_grad_() for t in given]
            total = F.cross_entropy(F.linear(*leaves).float(), target, **options)
            ctx.kept = torch.autograd.grad(total, leaves)
        return total.detach().nan_to_num(0.0)  # 0 where all labels are ignored

    @staticmethod
    def backward(ctx, d):
        for x in ctx.kept:
            x.mul_(d)
        return (*ctx.kept, *(None,) * (5 - len(ctx.kept)))


def liger(hidden, weight, target, bias, accum_dtype, chunk_mem_const, **options):
    assert accum_dtype == torch.float32 and chunk_mem_const >= 1
    fused.append(options["reduction"])
    return Liger.apply(hidden, weight, bias, target, options)


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
def stand_in(monkeypatch, device):
    """On a GPU Liger itself, where it is installed."""
    loss._liger.cache_clear()
    if device.type != "cuda" or loss._liger() is None:
        monkeypatch.setattr(loss, "_liger", lambda: liger)
    monkeypatch.setattr(loss.device, "is_gpu", lambda where: True)
    fused.clear()


def batch(model) -> dict:
    where = next(model.parameters()).device
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(1)).to(where)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def step(model, share=1, **options):
    model.zero_grad()
    out = model(**{**batch(model), **options})
    (out.loss / share).backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def served(model):
    row = loss.serve_loss(model)
    assert (row.reason, row.layer) == (None, "loss")
    return model


def compare(model, share=1, **options):
    """The model's step before and after serve_loss; the output after it."""
    before, gradients = step(model, share, **options)
    after, found = step(served(model), share, **options)
    assert type(after.logits) is loss.NoLogits
    assert_close(after.loss, before.loss)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(found[name], gradient) < 1e-5, name
    return after


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}])
def test_step_is_the_models_own(device, options, share):
    compare(tiny().to(device), share, **options)
    assert loss._liger() is not liger or fused == ["sum" if options else "mean"]


@pytest.mark.parametrize("name", ["Qwen3", "Mistral", "Qwen3_5"])
def test_families(device, name):
    options = {"layer_types": ["full_attention"]} if name == "Qwen3_5" else {}
    compare(tiny(name, tie_word_embeddings=name == "Qwen3", head_dim=16, **options).to(device))


def test_labels_that_are_shifted_already(device):
    model = tiny().to(device)
    labels = batch(model)["input_ids"].roll(-1, 1)
    labels[:, :3] = 7
    compare(model, shift_labels=labels, ignore_index=7)


def test_lm_head_with_a_bias(device):
    model = tiny().to(device)
    model.lm_head = torch.nn.Linear(32, 61, device=device)
    compare(model, share=4)


def test_adapters(device):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    compare(peft.get_peft_model(tiny(), config).to(device), share=4)
    config = peft.LoraConfig(target_modules=["lm_head"])
    row = loss.serve_loss(peft.get_peft_model(tiny(), config))
    assert row.reason == "its lm_head is a Linear, not an nn.Linear"


USES = {
    "add": lambda x: x + 1, "radd": lambda x: 1 + x, "tensor": lambda x: torch.ones(2) * x,
    "index": lambda x: x[0], "tanh": torch.tanh, "softmax": lambda x: torch.softmax(x, -1),
    "stack": lambda x: torch.stack([x]), "equal": lambda x: x == x, "truth": bool, "len": len,
    "list": list, "in": lambda x: 1 in x, "abs": abs, "floordiv": lambda x: x // 2,
    "mod": lambda x: x % 2, "loss": lambda x: F.cross_entropy(x, torch.zeros(2).long()),
    "matmul": lambda x: x @ x, "array": lambda x: __import__("numpy").asarray(x),
    "float": lambda x: x.float(), "view": lambda x: x.view(-1, 61), "device": lambda x: x.device,
    "shape": lambda x: x.shape, "argmax": lambda x: x.argmax(-1), "detach": lambda x: x.detach(),
    "setitem": lambda x: operator.setitem(x, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_logits_have_no_use(device, use, grad):
    """Neither those of other weights nor such without a graph: none at all."""
    out, _ = step(served(tiny().to(device)))
    with torch.set_grad_enabled(grad), pytest.raises((RuntimeError, AttributeError)) as error:
        use(out.logits)
    assert loss.NO_LOGITS in str(error.value)


OPERATORS = [n for n in dir(operator) if n.startswith("__") and n in dir(torch.Tensor)]
OPERATORS = [n for n in OPERATORS if type(getattr(operator, n)) is type(operator.add)]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_tensors(name):
    function, logits = getattr(operator, name), loss.NoLogits()
    more = (2,) * (len(inspect.signature(function).parameters) - 1)
    with pytest.raises(RuntimeError, match="without logits"):
        function(logits, *more)
    if hasattr(torch.Tensor, f"__r{name[2:]}"):
        with pytest.raises(RuntimeError, match="without logits"):
            function(2, logits)


def test_the_stand_in_is_carried_along(device):
    out, _ = step(served(tiny().to(device)))
    assert out.logits is not None and not hasattr(out.logits, "dtype") and out[1] is out.logits
    assert "without logits" in repr(out) and len({out.logits}) == 1
    for other in (copy.copy(out.logits), copy.deepcopy(out.logits)):
        with pytest.raises(RuntimeError, match="without logits"):
            other + 1
    leaves, spec = torch.utils._pytree.tree_flatten(out)
    assert torch.utils._pytree.tree_unflatten(leaves, spec).logits is out.logits


def test_one_backward(device):
    """Liger's gradients are scaled in place: a second backward over them would scale them again."""
    model = served(tiny().to(device))
    kept = model(**batch(model)).loss / 4
    kept.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has one backward"):
        kept.backward()
    with pytest.raises(RuntimeError, match="without create_graph"):
        torch.autograd.grad(model(**batch(model)).loss, model.parameters(), create_graph=True)


def test_all_labels_are_ignored(device):
    """The mean of nothing is nan; its gradients are zeros, and so are those of the sum."""
    model = tiny().to(device)
    labels = torch.full_like(batch(model)["labels"], -100)
    before, gradients = step(model, labels=labels)
    after, found = step(served(model), labels=labels)
    assert before.loss.isnan() and after.loss.isnan()
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name
    assert step(model, labels=labels, num_items_in_batch=3)[0].loss == 0


def test_labels_that_are_none(device):
    model = served(tiny().to(device))
    given = batch(model)
    for labels in (given["labels"][:, :4], given["labels"].float()):
        with pytest.raises(ValueError, match="labels must be int64, one a token"):
            model(input_ids=given["input_ids"], labels=labels)
    if device.type == "cpu":  # on a GPU the assertion ends the process's use of it
        with pytest.raises(RuntimeError, match="labels must be -100 or 0 to 60"):
            model(input_ids=given["input_ids"], labels=given["labels"] + 1000)


def test_options_that_are_none_of_the_models(device):
    """An option that Liger would not get is an error, not another loss."""
    model = served(tiny().to(device))
    model.config.vocab_size = 30
    with pytest.raises(ValueError, match="vocab_size must be 61, as lm_head has it, got 30"):
        model(**batch(model))
    for more in ({"label_smoothing": 0.1}, {"weight": torch.ones(61, device=device)}):
        logits = loss.NoLogits()
        logits._parts = model.lm_head.weight, model.lm_head.weight, None
        with pytest.raises(RuntimeError, match="without logits"):
            F.cross_entropy(logits, torch.zeros(61, device=device).long(), **more)


def plain(model, **options) -> bool:
    """The model's own loss is made of its own logits."""
    before = len(fused)
    out = model(**{**batch(model), **options})
    return torch.is_tensor(out.logits) and len(fused) == before


HOOKS = [
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook",
]  # fmt: skip


def test_not_where_it_would_change_something(device, monkeypatch):
    model = served(tiny().to(device))
    assert not plain(model) and plain(model, labels=None)
    assert plain(model.eval()) and not plain(model.train())
    with torch.no_grad():
        assert plain(model)
    for register in HOOKS:
        handle = getattr(model.lm_head, register)(lambda *_: None)
        assert plain(model), register
        handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert plain(model)
    handle.remove()
    nothing = torch.empty(0, dtype=torch.long, device=device)
    assert plain(model, logits_to_keep=nothing, shift_labels=nothing)
    model._is_replica = True  # DataParallel's, which gathers outputs
    assert plain(model)
    del model._is_replica
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().mean()
    assert plain(model)
    del model._loss_function
    assert not plain(model)
    with monkeypatch.context() as patch:
        own = F.cross_entropy
        patch.setattr(F, "cross_entropy", lambda *args, **kwargs: 2 * own(*args, **kwargs))
        assert plain(model)
    assert not plain(model)
    model.model.requires_grad_(False)  # Liger would make no gradient of the weight
    assert plain(model)
    _, gradients = step(model)
    assert list(gradients) == ["lm_head.weight"] and gradients["lm_head.weight"].norm() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(device, dtype):
    """A loss in fp16 wants the scaler's factor before its gradients are made."""
    model = served(tiny().to(device))
    with torch.autocast(device.type, dtype=dtype):
        assert plain(model) == (dtype == torch.float16)
    assert plain(model.to(dtype)) == (dtype == torch.float16)
    assert plain(tiny().to(device).double())


def test_autocast(device):
    model = tiny().to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        before, gradients = step(model, share=4)
        after, found = step(served(model), share=4)
    assert type(after.logits) is loss.NoLogits
    assert_close(after.loss, before.loss, torch.bfloat16)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, torch.bfloat16, factor=2)


def test_trainer(device, tmp_path):
    """With autocast, accumulated gradients and an evaluation, which wants the logits."""
    pytest.importorskip("accelerate")
    model = tiny().to(device)
    data = [{"input_ids": x, "labels": x} for x in batch(model)["input_ids"].cpu()] * 4
    steps = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    args = transformers.TrainingArguments(
        tmp_path, bf16=True, use_cpu=device.type == "cpu", report_to=[], save_strategy="no",
        eval_strategy="steps", eval_steps=1, disable_tqdm=True, logging_steps=1, **steps,
    )  # fmt: skip
    weights = {}
    for kind in ("own", "served"):
        tried = copy.deepcopy(model) if kind == "own" else served(copy.deepcopy(model))
        seen = []

        def metrics(found, seen=seen):
            seen.append(found.predictions.shape)
            return {}

        trainer = transformers.Trainer(
            tried, args, train_dataset=data, eval_dataset=data, compute_metrics=metrics
        )
        trainer.train()
        assert seen and set(seen) == {(8, 11, 61)}
        weights[kind] = tried.lm_head.weight.detach().clone()
        assert not torch.equal(weights[kind], model.lm_head.weight)
        assert bool(fused) == (kind == "served" and loss._liger() is liger)
    moved = weights["own"] - model.lm_head.weight
    assert relative_error(weights["served"] - model.lm_head.weight, moved) < 0.05


def test_copies_signatures_and_undoing(device):
    model = tiny().to(device)
    kind, signature = type(model), inspect.signature(model.forward)
    served(model)
    assert isinstance(model, kind) and inspect.signature(model.forward) == signature
    out, _ = step(copy.deepcopy(model))
    assert type(out.logits) is loss.NoLogits
    ids = torch.ones(1, 3, dtype=torch.long, device=device)
    assert model.generate(ids, max_new_tokens=2).shape == (1, 5)
    assert submodule("models.apply").restore(model) == 2
    assert type(model) is kind and type(model.lm_head) is torch.nn.Linear and plain(model)


@pytest.mark.parametrize(
    "name, options",
    [("Gemma2", {"head_dim": 16, "final_logit_softcapping": 2.0}), ("Granite", {})],
)
def test_models_that_do_more_with_their_logits(name, options):
    row = loss.serve_loss(tiny(name, **options))
    assert row.reason == "its forward does more with its logits than to make one loss"


def test_left_alone(monkeypatch):
    assert loss.serve_loss(torch.nn.Linear(2, 2)) is None
    model = tiny()
    model.loss_function = lambda *_, **__: None
    assert loss.serve_loss(model).reason == "its loss function is not transformers' ForCausalLMLoss"
    model = tiny()
    model.forward = lambda **_: None
    assert "its forward is replaced already" in loss.serve_loss(model).reason
    model = tiny()

    class Other(torch.nn.Linear):
        pass

    model.lm_head.__class__ = Other
    assert loss.serve_loss(model).reason == "its lm_head is a Other, not an nn.Linear"
    monkeypatch.setattr(loss, "_liger", lambda: None)
    assert loss.serve_loss(tiny()).reason == "needs Liger 0.8.5: pip install liger-kernel"
