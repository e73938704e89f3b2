"""Uses of models that public reports have found broken with other losses without logits: each gives
with kernelize(loss=True) what it gives without."""

import copy
import gc
import io
import pickle
import types

import pytest
import torch
from conftest import relative_error, submodule
from test_loss import batch, loss, served, tiny, transformers
from torch import nn
from torch.nn.utils import prune

USES = []
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Models are on the CPU, where their own loss is as good."""
    monkeypatch.setattr(loss, "device", types.SimpleNamespace(is_gpu=lambda where: True))


def use(steps=1, name="Llama", **options):
    """A use of a tiny model, and how many of its losses are made without logits."""

    def add(function):
        USES.append(pytest.param(function, steps, name, options, id=function.__name__))
        return function

    return add


def again(model):
    """kernelize once more, if it was called before."""
    if submodule("models.serving").is_served(model):
        served(model)


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def backward(model, **more):
    found = model(**{**batch(model), **more}).loss
    found.backward()
    return [found, *gradients(model)]


# -- counts of tokens, accumulated gradients


@use(3)
def counts_of_any_kind(model):
    return [
        backward(model, num_items_in_batch=n) for n in (5, torch.tensor(5), torch.tensor([5.0]))
    ]


@use(3)
def accumulated_over_lengths(model):
    given = batch(model)
    for length in (3, 11, 6):
        part = {k: x[:, :length] for k, x in given.items()}
        model(**part, num_items_in_batch=torch.tensor(16)).loss.backward()
    return gradients(model)


@use(2)
def two_forwards_before_a_backward(model):
    first, second = [model(**batch(model)).loss for _ in range(2)]
    (first - 0.5 * second).backward()
    return gradients(model)


@use(1)
def changed_in_place(model):
    found = model(**batch(model)).loss
    found *= 0.5
    found += 1
    found.backward()
    return [found, *gradients(model)]


@use(1)
def autograd_grad(model):
    return torch.autograd.grad(model(**batch(model)).loss, list(model.parameters()))


@use(1)
def backward_of_some(model):
    model(**batch(model)).loss.backward(inputs=[model.lm_head.weight])
    return gradients(model)


@use(1)
def scaled_by_a_grad_scaler(model):
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(**batch(model)).loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    return [norm, *model.parameters()]


# -- what is handed in


@use(1)
def one_token_has_no_next(model):
    ids = torch.ones(3, 1, dtype=torch.long)
    return [model(input_ids=ids, labels=ids, num_items_in_batch=2).loss]


@use(1)
def padded_on_both_sides(model):
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4], mask[1, 8:] = 0, 0
    return backward(model, attention_mask=mask)


@use(1)
def packed_sequences(model):
    places = torch.tensor([[*range(5), *range(6)], [*range(11)]])
    return backward(model, position_ids=places)


@use(1)
def embeddings_alone(model):
    """With a frozen model: adversarial inputs and soft prompts."""
    model.requires_grad_(False)
    given = batch(model)
    x = model.get_input_embeddings()(given["input_ids"]).requires_grad_()
    model(inputs_embeds=x, labels=given["labels"]).loss.backward()
    return [x.grad]


@use(1)
def nothing_to_train(model):
    model.requires_grad_(False)
    found = model(**batch(model)).loss
    assert not found.requires_grad
    return [found]


@use(0)
def labels_by_place(model):
    given = batch(model)
    found = model(given["input_ids"], None, None, None, None, given["labels"])
    found.loss.backward()
    return [found.logits, *gradients(model)]


@use(1)
def some_logits_to_keep(model):
    given = batch(model)
    return backward(model, logits_to_keep=5, shift_labels=given["labels"][:, -5:].contiguous())


@use(1)
def other_outputs(model):
    out = model(**batch(model), output_hidden_states=True, use_cache=True)
    assert len(out.hidden_states) == 2 and out.past_key_values.get_seq_length() == 11
    return [out.loss, *out.hidden_states]


@use(1)
def words_for_liger(model):
    """Arguments of other fused losses are swallowed, as by the model."""
    return backward(model, accum_dtype=torch.float32)


# -- outputs that are sent, kept and changed


@use(1)
def outputs_are_pickled(model):
    out = model(**batch(model), use_cache=False)
    sent = pickle.dumps(type(out)(**{k: x.detach() for k, x in out.items()}))
    found = copy.copy(out), pickle.loads(sent)
    assert all([each.keys() == out.keys() for each in found])
    return [each.to_tuple()[0] for each in found]


@use(1)
def outputs_by_accelerate(model):
    operations = pytest.importorskip("accelerate.utils.operations")
    out = operations.convert_to_fp32(operations.send_to_device(model(**batch(model)), "cpu"))
    assert type(out).__name__ == "CausalLMOutputWithPast"
    return [out.loss]


@use(1)
def nothing_is_kept_alive(model):
    """No hidden states, and no logits, live on after a step."""
    gc.collect()
    backward(model)
    kept = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.grad_fn is not None]
    assert not [x for x in kept if x.shape in ((2, 11, 32), (22, 32), (22, 61), (2, 11, 61))]
    return gradients(model)


# -- hooks


@use(1)
def hooks_of_the_model(model):
    """Of the whole, of its decoder and of its parameters, as optimizers in the backward have."""
    seen, head = [], model.lm_head.weight
    model.register_forward_hook(lambda module, args, out: seen.append(out.loss.detach()))
    model.model.norm.register_full_backward_hook(lambda *_: seen.append(torch.ones(())))
    head.register_hook(lambda gradient: gradient * 2)

    def update(p):
        seen.append(p.grad.clone())
        p.grad = None

    head.register_post_accumulate_grad_hook(update)
    backward(model)
    assert len(seen) == 3 and head.grad is None
    return [*seen, *gradients(model)]


@use(1)
def a_lens_in_a_hook(model):
    """Logits of hidden layers, in the midst of a step: of a lens, of early exits."""
    seen = []
    model.model.layers[0].register_forward_hook(lambda _, args, x: seen.append(model.lm_head(x)))
    found = model(**batch(model)).loss
    assert seen[0].shape == (2, 11, 61)
    (found + 0.1 * seen[0].logsumexp(-1).mean()).backward()
    return [seen[0], found, *gradients(model)]


@use(1)
def the_model_inside_its_own_step(model):
    """A reference without gradients, asked for in a hook."""
    seen, given = [], batch(model)

    def look(*_):
        if torch.is_grad_enabled():
            with torch.no_grad():
                seen.append(model(**given).logits)

    model.model.norm.register_forward_pre_hook(look)
    return [*backward(model), *seen]


# -- weights


@use(3)
def weights_that_are_replaced(model):
    found = backward(model)
    model.lm_head.weight.data = model.lm_head.weight.data * 2
    found += backward(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() / 3)
    return found + backward(model)


@use(1)
def weights_that_change_before_the_backward(model):
    """An error, as of the model's own."""
    found = model(**batch(model)).loss
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()
    return [found]


@use(1)
def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.lm_head.weight.data.zero_()
    model.load_state_dict(torch.load(file), assign=True)
    return backward(model)


@use(1)
def padded_vocabulary(model):
    model.resize_token_embeddings(61, pad_to_multiple_of=64)
    assert len(model.lm_head.weight) == 64
    again(model)
    return backward(model)


@use(1, tie_word_embeddings=True)
def tied_after_a_resize(model):
    model.resize_token_embeddings(70)
    again(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return backward(model)


@use(0)
def pruned_head(model):
    prune.l1_unstructured(model.lm_head, "weight", 0.5)
    return backward(model)


@use(1)
def parametrized_head(model):
    nn.utils.parametrizations.weight_norm(model.lm_head)
    return backward(model)


# -- checkpoints, offloading, transforms


@use(2)
def whole_model_in_a_checkpoint(model):
    def run(ids, labels):
        return model(input_ids=ids, labels=labels).loss

    given = batch(model)
    found = torch.utils.checkpoint.checkpoint(run, *given.values(), use_reentrant=False)
    found.backward()
    return [found, *gradients(model)]


@use(1)
def whole_model_in_a_reentrant_checkpoint(model):
    def run(x, labels):
        return model(inputs_embeds=x, labels=labels).loss

    given = batch(model)
    x = model.get_input_embeddings()(given["input_ids"])
    found = torch.utils.checkpoint.checkpoint(run, x, given["labels"], use_reentrant=True)
    found.backward()
    return [found, *gradients(model)]


@use(1)
def layers_in_checkpoints(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return backward(model)


@use(1)
def saved_tensors_go_elsewhere(model):
    with torch.autograd.graph.save_on_cpu():
        found = model(**batch(model)).loss
    found.backward()
    return [found, *gradients(model)]


@use(1)
def anomalies_are_detected(model):
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return backward(model)


@use(1)
def functional_call(model):
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    found = torch.func.functional_call(model, weights, (), batch(model)).loss
    return [found, *torch.autograd.grad(found, list(weights.values()))]


@use(None)
def transforms_of_gradients(model):
    """torch.func.grad, by which some optimizers and influence functions take theirs."""
    weights = {n: p.detach() for n, p in model.named_parameters()}
    given = batch(model)

    def of(weights):
        return torch.func.functional_call(model, weights, (), given).loss

    return list(torch.func.grad(of)(weights).values())


@use(0)
def inference_mode(model):
    with torch.inference_mode():
        return [model(**batch(model)).logits]


# -- other modes


@use(1)
def evaluated_between_steps(model):
    found = backward(model)
    model.eval()
    ids = model.generate(batch(model)["input_ids"], max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        out = model(**batch(model))
    return [*found, out.loss, out.logits, ids.double()]


@use(1)
def generated_in_training_mode(model):
    ids = model.generate(batch(model)["input_ids"], max_new_tokens=3, do_sample=False)
    return [ids.double(), *backward(model)]


@use(0)
def evaluated_with_gradients(model):
    return backward(model.eval())


# -- adapters


def adapted(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    kind = options.pop("kind", "LoraConfig")
    return peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))


@use(0)
def a_head_among_modules_to_save(model):
    return backward(adapted(model, target_modules=["q_proj"], modules_to_save=["lm_head"]))


@use(1)
def embeddings_among_modules_to_save(model):
    return backward(adapted(model, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))


@use(0, tie_word_embeddings=True)
def tokens_of_a_tied_head_are_trained(model):
    return backward(adapted(model, target_modules=["q_proj"], trainable_token_indices=[3, 5]))


@use(1)
def prompt_tuning(model):
    return backward(adapted(model, kind="PromptTuningConfig", num_virtual_tokens=3))


@use(1)
def adapters_and_their_absence(model):
    """As a policy and its reference have them."""
    model = adapted(model, target_modules=["v_proj"], init_lora_weights=False)
    found = backward(model)
    with model.disable_adapter(), torch.no_grad():
        reference = model(**batch(model))
    return [*found, reference.loss, reference.logits]


# -- other models


@use(1, "Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
def a_second_loss_of_routers(model):
    out = model(**batch(model))
    out.loss.backward()
    assert out.aux_loss > 0
    return [out.loss, out.aux_loss, *out.router_logits, *gradients(model)]


@use(1)
def a_teacher_and_a_student(model):
    """The teacher in training mode, without gradients."""
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        logits = teacher(**batch(model)).logits
    student = model(input_ids=batch(model)["input_ids"]).logits
    found = model(**batch(model)).loss + nn.functional.mse_loss(student, logits + 1)
    found.backward()
    return [found, *gradients(model)]


@use(0)
def another_loss_by_name(model):
    model.loss_type = "ForMaskedLM"  # labels are not shifted
    return backward(model)


@pytest.mark.parametrize("function, steps, name, options", USES)
def test_uses(monkeypatch, function, steps, name, options):
    made, calls = loss.linear_cross_entropy, []

    def record(*args, **kwargs):
        calls.append(kwargs)
        return made(*args, **kwargs)

    monkeypatch.setattr(loss, "linear_cross_entropy", record)
    found = []
    for ours in (False, True):
        model = tiny(name, **options)
        if ours:
            served(model)
        found.append(function(model))
        if not ours:
            assert not calls
    own, ours = [[y for x in each for y in (x if isinstance(x, list) else [x])] for each in found]
    assert len(own) == len(ours)
    for a, b in zip(own, ours):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    assert steps is None or len(calls) == steps


def test_a_trainer_with_label_smoothing_and_a_loss_of_its_own(tmp_path):
    """Both make their loss of logits, which they have: they ask without labels."""
    pytest.importorskip("accelerate")
    data = [{"input_ids": x, "labels": x} for x in batch(tiny())["input_ids"]]

    def mean(outputs, labels, num_items_in_batch=None):
        return outputs.logits.float().square().mean()

    for options, more in (({"label_smoothing_factor": 0.1}, {}), ({}, {"compute_loss_func": mean})):
        weights = []
        for ours in (False, True):
            model = served(tiny()) if ours else tiny()
            args = transformers.TrainingArguments(
                tmp_path, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
                max_steps=1, **options,
            )  # fmt: skip
            transformers.Trainer(model, args, train_dataset=data, **more).train()
            weights.append(model.lm_head.weight)
        assert relative_error(*weights) < 1e-5
