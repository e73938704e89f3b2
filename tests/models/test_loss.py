"""Losses of models beside their own: serve_loss's, of steps without logits, and calls that are not
for it; the loss by a kernel on logits."""

import copy
import inspect
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, relative_error, submodule

transformers = pytest.importorskip("transformers")
loss = submodule("models.fused_loss")
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
def beside_a_gpu(monkeypatch, device):
    """On a CPU the model's own loss is as good, so that there it is left to the model."""
    if device.type == "cpu":
        everywhere = types.SimpleNamespace(is_gpu=lambda where: True)
        monkeypatch.setattr(loss, "device", everywhere)


def batch(model) -> dict:
    where = next(model.parameters()).device
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(1)).to(where)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def step(model, share=1, **options):
    model.zero_grad()
    out = model(**{**batch(model), **options})
    if out.loss.requires_grad:
        (out.loss / share).backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def served(model, least=False):
    row = loss.serve_loss(model.named_modules(), least)
    assert (row.reason, row.layer) == (None, "loss")
    return model


def compare(model, share=1, least=False, **options):
    """The model's step before and after serve_loss; the output after it."""
    before, gradients = step(model, share, **options)
    after, found = step(served(model, least), share, **options)
    assert after.logits is None and after.keys() == before.keys() - {"logits"}
    assert_close(after.loss, before.loss)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(found[name], gradient) < 1e-5, name
    return after


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}])
def test_step_is_the_models_own(device, options, share):
    compare(tiny().to(device), share, **options)


@pytest.fixture
def by_tokens(monkeypatch):
    """Losses of single tokens, as many tokens have them; returns their calls."""
    made, calls = loss.linear_cross_entropy, []

    def record(*args, reduction, **kwargs):
        calls.append(reduction)
        return made(*args, reduction=reduction, **kwargs)

    monkeypatch.setattr(submodule("loss.checks"), "rows_of_piece", lambda *_: 4)
    monkeypatch.setattr(loss, "linear_cross_entropy", record)
    return calls


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}], ids=str)
def test_least_memory(device, by_tokens, options, name):
    more = {"head_dim": 16, "final_logit_softcapping": 2.0} if name == "Gemma2" else {}
    model = tiny(name, vocab_size=211, **more).to(device)
    compare(model, share=4, least=True, **options)
    served(model)
    step(model, **options)
    model.lm_head.requires_grad_(False)
    compare(model, least=True, **options)  # there is no gradient of the weight to save
    reduction = "sum" if options else "mean"
    assert by_tokens == ["none", reduction, reduction, reduction]


def test_the_argument(kernel):
    for value, said in ((True, ""), ("least memory", ", least memory")):
        (row,) = kernel.kernelize(tiny(), only=["loss"], loss=value).rows
        assert row.note == loss.BY + said
    with pytest.raises(ValueError, match="loss must be True, False or 'least memory', got 'rows'"):
        kernel.kernelize(tiny(), loss="rows")
    with pytest.raises(TypeError, match="loss must be True or False, got float"):
        kernel.kernelize(tiny(), loss=0.5)


def test_where_words_hold_least():
    """By what each way holds, in bytes: of Llama 3's sizes, and of sizes that are unlike them."""
    rule = submodule("loss.checks").words_hold_least
    assert rule(8192, 4096, 128256, True, 2) and not rule(8192, 4096, 128256, False, 2)
    assert not rule(2048, 4096, 128256, True, 2)  # logits are one piece anyway
    assert not rule(8192, 4096, 4096, True, 2)  # logits are as small as hidden states
    assert not rule(2**17, 4096, 32000, True, 2)  # hidden states are larger than the weight


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
    row = loss.serve_loss(peft.get_peft_model(tiny(), config).named_modules())
    assert row.reason == "its lm_head is a peft.tuners.lora.layer.Linear, not an nn.Linear"


def test_outputs(device):
    """None in the place of logits, by name, by index and in a tuple."""
    model = served(tiny().to(device))
    out, _ = step(model)
    assert "logits" not in out and out.logits is None and out[0] is out.loss
    leaves, spec = torch.utils._pytree.tree_flatten(out)
    assert torch.utils._pytree.tree_unflatten(leaves, spec).logits is None
    found = model(**batch(model), return_dict=False)
    assert type(found) is tuple and found[1] is None
    assert_close(found[0], out.loss)


def test_a_second_backward(device):
    model = served(tiny().to(device))
    kept, found = model(**batch(model)).loss / 4, []
    for _ in range(2):
        model.zero_grad()
        kept.backward(retain_graph=True)
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, gradient in found[0].items():
        assert relative_error(found[1][name], gradient) < 1e-5


def test_traced():
    """A step without logits is one graph, and the same step."""
    model = tiny()
    before, gradients = step(model)
    traced = torch.compile(served(model), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        out = traced(**batch(model))
        out.loss.backward()
        assert out.logits is None
        assert_close(out.loss, before.loss)
        for name, parameter in model.named_parameters():
            assert relative_error(parameter.grad, gradients[name]) < 1e-5, name
    assert model(input_ids=batch(model)["input_ids"]).logits.shape == (2, 11, 61)
    torch.compiler.reset()


def test_threads(device):
    """A thread that evaluates has its logits while another one trains the same model."""
    import threading

    model, seen = served(tiny().to(device)), []
    inner = type(model.model).forward

    def evaluate():
        with torch.no_grad():
            seen.append(model(**batch(model)).logits)

    def forward(self, *args, **kwargs):
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=evaluate)
            other.start()
            other.join()
        return inner(self, *args, **kwargs)

    model.model.forward = types.MethodType(forward, model.model)
    assert model(**batch(model)).logits is None and seen[0].shape == (2, 11, 61)


@pytest.mark.parametrize("least", [False, True])
def test_all_labels_are_ignored(device, by_tokens, least):
    """The mean of nothing is nan; its gradients are zeros, and so are those of the sum."""
    model = tiny(vocab_size=211).to(device)
    labels = torch.full_like(batch(model)["labels"], -100)
    before, gradients = step(model, labels=labels)
    after, found = step(served(model, least), labels=labels)
    assert by_tokens == ["none" if least else "mean"]
    assert before.loss.isnan() and after.loss.isnan()
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name
    assert step(model, labels=labels, num_items_in_batch=3)[0].loss == 0


def test_labels_that_are_none(device):
    model = served(tiny().to(device))
    given = batch(model)
    for labels in (given["labels"][:, :4], given["labels"].float()):
        with pytest.raises(ValueError, match="target must be int64 of shape"):
            model(input_ids=given["input_ids"], labels=labels)
    if device.type == "cpu":  # on a GPU the assertion ends the process's use of it
        with pytest.raises(ValueError, match="target must be -100 or 0 to 60"):
            model(input_ids=given["input_ids"], labels=given["labels"] + 1000)


def test_a_model_that_changes(device):
    """What would be another loss is an error."""
    model = served(tiny().to(device))
    model.config.vocab_size = 30
    with pytest.raises(ValueError, match="vocab_size must be 61, as lm_head has it, got 30"):
        model(**batch(model))
    model = tiny("Gemma2", head_dim=16, final_logit_softcapping=None).to(device)
    compare(model)
    model.config.final_logit_softcapping = 2.0
    with pytest.raises(RuntimeError, match="has changed its logits before its loss"):
        model(**batch(model))
    assert plain(model.eval())


def test_another_head(device):
    """A vocabulary that is resized, and adapters that are added, after kernelize: logits again, and
    none once more after another call."""
    model = served(tiny().to(device))
    model.resize_token_embeddings(70)
    assert plain(model)
    compare(model)
    peft = pytest.importorskip("peft")
    model = served(tiny().to(device))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
    assert plain(adapted)


def _parallel_steps(rank: int, where) -> list:
    """The loss and the norms of gradients under DDP, of another batch in each process, without and
    with logits; gradients are accumulated over two parts, and summed over processes once."""
    loss.device = types.SimpleNamespace(is_gpu=lambda where: True)
    found = []
    for ours in (False, True):
        model = tiny().to(where)
        whole = torch.nn.parallel.DistributedDataParallel(served(model) if ours else model)
        given = {k: x.roll(rank, 1) for k, x in batch(model).items()}
        with whole.no_sync():
            (whole(**{k: x[:1] for k, x in given.items()}).loss / 2).backward()
        out = whole(**{k: x[1:] for k, x in given.items()})
        (out.loss / 2).backward()
        assert (out.logits is None) == ours
        norms = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
        found.append([out.loss.item(), *norms])
    return found


def _sharded_step(rank: int, where) -> list:
    """The loss and the norms of gradients of a model, sharded by FSDP2 without and with logits."""
    from torch.distributed.fsdp import fully_shard

    # FSDP2's own mesh is one of GPUs where there is one, which the group, of gloo, does not serve
    mesh = torch.distributed.init_device_mesh(where.type, (2,))
    loss.device = types.SimpleNamespace(is_gpu=lambda where: True)
    found = []
    for ours in (False, True):
        model = tiny().to(where)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if ours:
            served(model)
        out, gradients = step(model)
        assert (out.logits is None) == ours
        found.append(
            [out.loss.item(), *[g.full_tensor().norm().item() for g in gradients.values()]]
        )
    return found


@pytest.mark.parametrize("steps", [_parallel_steps, _sharded_step], ids=["ddp", "fsdp2"])
def test_two_processes(tmp_path, steps):
    two = pytest.importorskip("two_processes")
    for own, ours in two.found_by(steps, "cpu", tmp_path):
        assert len(own) > 5 and ours == pytest.approx(own, rel=1e-5)


def plain(model, **options) -> bool:
    """The model's own loss is made of its own logits."""
    return torch.is_tensor(model(**{**batch(model), **options}).logits)


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
    empty = model(**{**batch(model), "logits_to_keep": nothing, "shift_labels": nothing})
    assert empty.loss.isnan()
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
    with torch.autograd.forward_ad.dual_level():
        assert plain(model)


@pytest.mark.parametrize("part", ["model", "lm_head"])
def test_frozen(device, part):
    model = tiny().to(device)
    getattr(model, part).requires_grad_(False)
    compare(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(device, dtype):
    model = tiny().to(device).to(dtype)
    before, gradients = step(model)
    after, found = step(served(model))
    assert after.logits is None
    assert_close(after.loss, before.loss, dtype)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, dtype, factor=2)


def test_autocast(device):
    model = tiny().to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        before, gradients = step(model, share=4)
        after, found = step(served(model), share=4)
    assert after.logits is None
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
    moved = weights["own"] - model.lm_head.weight
    assert relative_error(weights["served"] - model.lm_head.weight, moved) < 0.05


def test_copies_signatures_and_undoing(device):
    model = tiny().to(device)
    kind, signature = type(model), inspect.signature(model.forward)
    served(model)
    assert isinstance(model, kind) and inspect.signature(model.forward) == signature
    out, _ = step(copy.deepcopy(model))
    assert out.logits is None
    ids = torch.ones(1, 3, dtype=torch.long, device=device)
    assert model.generate(ids, max_new_tokens=2).shape == (1, 5)
    assert submodule("models.apply").restore(model) == 2
    assert type(model) is kind and type(model.lm_head) is torch.nn.Linear and plain(model)


@pytest.mark.parametrize(
    "name, options",
    [
        ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 2.0}),
        ("Granite", {"logits_scaling": 3.0}), ("Cohere", {"logit_scale": 0.25}),
    ],
)  # fmt: skip
def test_models_that_scale_or_cap_their_logits(device, name, options):
    model = tiny(name, **options).to(device)
    compare(model)
    if name == "Gemma2":
        model.config.final_logit_softcapping = 5.0  # as the model has it at each step
        loss_of = [step(each)[0].loss for each in (model, copy.deepcopy(model))]
        submodule("models.apply").restore(model)
        assert_close(loss_of[0], step(model)[0].loss)


def test_models_that_do_more_with_their_logits():
    model = tiny()

    own = type(model)
    assert loss._is_plain(model, own) is True
    for change in (lambda x: x + 1, lambda x: x.abs(), lambda x: x * -1.0, lambda x: x[:, -1]):

        class Other(own):
            def forward(self, input_ids=None, labels=None, change=change, **kwargs):
                hidden = self.model(input_ids=input_ids).last_hidden_state
                logits = change(self.lm_head(hidden))
                found = self.loss_function(logits=logits, labels=labels, vocab_size=61)
                return transformers.modeling_outputs.CausalLMOutput(loss=found, logits=logits)

        assert loss._is_plain(model, Other) is None


def test_left_alone():
    assert loss.serve_loss(torch.nn.Linear(2, 2).named_modules()) is None
    model = tiny()
    model.loss_function = lambda *_, **__: None
    left = "its loss function is not transformers' ForCausalLMLoss"
    assert loss.serve_loss(model.named_modules()).reason == left
    model = tiny()
    model.forward = lambda **_: None
    assert "its forward is replaced already" in loss.serve_loss(model.named_modules()).reason
    model = tiny()

    class Other(torch.nn.Linear):
        pass

    model.lm_head.__class__ = Other
    left = f"its lm_head is a {__name__}.Other, not an nn.Linear"
    assert loss.serve_loss(model.named_modules()).reason == left
    model = tiny()

    class Other(type(model)):
        def forward(self, input_ids=None, labels=None):
            return super().forward(input_ids, labels=labels)

    model.__class__ = Other
    assert "trust=[Other]" in loss.serve_loss(model.named_modules()).reason
    with submodule("models.trust").trusting((Other,)):  # lm_head is called by another forward
        assert "does more with its logits" in loss.serve_loss(model.named_modules()).reason


def test_a_class_that_is_named():
    class Mine(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            found = self.loss_function(logits=logits, labels=labels, vocab_size=61)
            return transformers.modeling_outputs.CausalLMOutput(loss=found, logits=logits)

    model = tiny()
    model.__class__ = Mine
    for trust, served in (([], False), ([Mine], True)):
        report = submodule("models.apply").kernelize(model, loss=True, trust=trust, only=["loss"])
        (row,) = report.rows
        assert row.note.startswith("linear_cross_entropy") if served else "Mine" in row.reason


# -- by a kernel on the model's logits


@pytest.fixture
def by_kernel(monkeypatch):
    """The calls of the operation, which kernels or the reference compute."""
    operation, found = submodule("loss.ops").CROSS_ENTROPY, []

    def spy(tensors, options):
        found.append(options)
        return operation(tensors, options)

    monkeypatch.setattr(submodule("layers.hub"), "CROSS_ENTROPY", spy)
    monkeypatch.setattr(submodule("models.loss").dispatch, "serves", lambda *call: True)
    return found


SHIFTED = {"shift_labels": torch.arange(22).view(2, 11)}


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}, SHIFTED])
@pytest.mark.parametrize("grad", [True, False])
def test_by_a_kernel(kernel, device, by_kernel, options, grad):
    """Of a copy, too."""
    model, options = (
        tiny().to(device),
        {k: torch.as_tensor(x).to(device) for k, x in options.items()},
    )
    with torch.set_grad_enabled(grad):
        before, gradients = step(model, **options)
        report = kernel.kernelize(model, only=["loss"])
        assert [(row.kind, row.layer) for row in report.served] == [("LlamaForCausalLM", "loss")]
        for each in (model, copy.deepcopy(model)):
            after, found = step(each, **options)
            assert by_kernel.pop() == (-100, "num_items_in_batch" not in options) and not by_kernel
            assert_close(after.loss, before.loss)
            assert torch.equal(after.logits, before.logits)
            assert gradients.keys() == found.keys()
            for name, gradient in gradients.items():
                assert relative_error(found[name], gradient) < 1e-5, name
        assert kernel.restore(model) == 1 and type(model) is transformers.LlamaForCausalLM
        assert torch.equal(step(model, **options)[0].loss, before.loss) and not by_kernel


def test_where_another_loss_is_computed(kernel, device, by_kernel, monkeypatch):
    model = tiny().to(device)
    kernel.kernelize(model, only=["loss"])

    def half(logits, labels, **options):
        return logits.float().mean() / 2

    model.loss_function = half
    out = step(model)[0]
    assert torch.equal(out.loss, out.logits.mean() / 2) and not by_kernel
    del model._loss_function
    with monkeypatch.context() as patch:
        patch.setattr(submodule("models.loss").dispatch, "serves", lambda *call: False)
        assert step(model)[0].loss > 0 and not by_kernel
    monkeypatch.setattr(F, "cross_entropy", lambda x, *args, **kwargs: x.sum() * 0 + 5)
    assert step(model)[0].loss == 5 and not by_kernel
    monkeypatch.undo()
    other = tiny().to(device)
    other.loss_function = half
    assert not kernel.kernelize(other, only=["loss"]).rows
