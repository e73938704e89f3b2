"""The loss of language models by a kernel: values, gradients, what counts, and the models that have
it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, relative_error, submodule
from interpreter import (  # noqa: F401
    INTERPRETING,
    compiled,
    interpreted,
    test_in_the_interpreter,
)

calls, ops, reference = (submodule(f"loss.{x}") for x in ("call", "ops", "reference"))
kernels = submodule("loss.portable.cross_entropy")
SIZES = [(1, 1), (3, 7), (5, 4096), (2, 10001)] + ([] if INTERPRETING else [(300, 151936)])

# The interpreter rounds to bf16 in its own way
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETING else [torch.bfloat16])


def problem(M, V, dtype, device, ignored=True):
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(M, V, generator=random) * 4).to(dtype)
    target = torch.randint(V, (M,), generator=random)
    if ignored and M > 1:
        target[1] = -100
    return logits.to(device), target.to(device)


def by_kernel(logits, target, mean, dloss=1.0, ignore_index=-100):
    """(loss, gradient) by the kernels."""
    options = calls.CrossEntropyOptions(ignore_index, mean)
    call = calls.CrossEntropy(logits, target, options)
    kept = kernels.prepare_cross_entropy_fwd(call)(logits, target)
    tensors = (logits, target, *kept[1:], kept[0].new_tensor(dloss))
    call = calls.CrossEntropyGradient(*tensors, options)
    return kept[0], kernels.prepare_cross_entropy_bwd(call)(*tensors)


def exact(logits, target, mean, dloss=1.0, ignore_index=-100):
    leaf = logits.double().requires_grad_()
    reduction = "mean" if mean else "sum"
    loss = F.cross_entropy(leaf, target, ignore_index=ignore_index, reduction=reduction)
    (loss * dloss).backward()
    return loss.detach(), leaf.grad


def in_fp32(logits, target, mean, dloss=1.0):
    """The same as transformers has torch compute it."""
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf.float(), target, reduction="mean" if mean else "sum")
    return loss.detach(), torch.autograd.grad(loss, leaf, loss.new_tensor(dloss))[0]


@pytest.fixture
def where(device):
    if not (INTERPRETING or device.type == "cuda"):
        pytest.skip("needs a GPU or Triton's interpreter")
    return device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mean", [True, False])
def test_kernels(where, size, mean, dtype):
    logits, target = problem(*size, dtype, where)
    for dloss in (1.0, -3.0):
        loss, gradient = by_kernel(logits, target, mean, dloss)
        expected, right = exact(logits, target, mean, dloss)
        assert loss.dtype == torch.float32 and gradient.dtype == dtype
        assert_close(loss, expected)
        by_torch = in_fp32(logits, target, mean, dloss)[1]
        assert relative_error(gradient, right) <= 1.1 * relative_error(by_torch, right) + 1e-6


def test_small_losses_keep_their_digits(where):
    logits = torch.full((2, 300), -12.0, device=where)
    logits[:, 5] = 300.0
    logits[1, 6] = 290.0
    target = torch.tensor([5, 5], device=where)
    found, right = by_kernel(logits, target, False), exact(logits, target, False)
    for ours, torchs, true in zip(found, in_fp32(logits, target, False), right):
        assert relative_error(ours, true) <= 2 * relative_error(torchs, true) + 1e-6


def test_infinite_logits(where):
    logits, target = problem(4, 5000, torch.float32, where, ignored=False)
    logits[0, target[0] - 1] = float("-inf")
    logits[1, :4500] = float("-inf")
    target[1] = 4700
    loss, gradient = by_kernel(logits, target, True)
    expected, right = exact(logits, target, True)
    assert_close(loss, expected)
    assert_close(gradient, right)
    logits[2] = float("-inf")
    assert by_kernel(logits, target, True)[0].isnan()
    logits[2], logits[3, 7] = 0.0, float("inf")
    assert by_kernel(logits, target, True)[0].isnan()


def test_what_does_not_count(where):
    logits, target = problem(6, 40, torch.float16, where, ignored=False)
    target[1] = target[3] = 7
    logits[3] = float("nan")  # ignored, so without a trace
    loss, gradient = by_kernel(logits, target, True, ignore_index=7)
    rest = torch.tensor([0, 2, 4, 5], device=where)
    target = target[rest]
    assert_close(loss, exact(logits[rest], target, True, ignore_index=7)[0], dtype=torch.float32)
    assert gradient[3].eq(0).all()


def test_no_target_counts(where):
    logits, target = problem(3, 40, torch.float32, where)
    target[:] = -100
    loss, gradient = by_kernel(logits, target, True)
    assert loss.isnan() and gradient.eq(0).all()
    assert by_kernel(logits, target, False)[0] == 0


@interpreted
def test_a_target_that_is_no_word_is_an_error(where):
    logits, target = problem(3, 40, torch.float32, where)
    for wrong in (40, -1):
        target[2] = wrong
        with pytest.raises(RuntimeError, match="targets must be -100 or 0 to 39"):
            by_kernel(logits, target, True)


@compiled
@pytest.mark.parametrize("mean", [True, False])
def test_gradient_of_the_operation(device, mean):
    logits, target = problem(5, 9, torch.float64, device)

    def loss(logits):
        return ops.CROSS_ENTROPY((logits, target), (-100, mean))[0]

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())
    assert_close(loss(logits), exact(logits.detach(), target, mean)[0])
    kept = reference.cross_entropy_fwd(logits.detach(), target, -100, mean)[1:]
    dloss = torch.tensor(2.0, device=device, dtype=torch.float64)
    found = reference.cross_entropy_bwd(logits.detach(), target, *kept, dloss, -100, mean)
    assert_close(found, exact(logits.detach(), target, mean, 2.0)[1])


# --- models

transformers = pytest.importorskip("transformers")
models = submodule("models.loss")
hub_functions = submodule("layers.hub_functions")
LLAMA = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def served(monkeypatch):
    """The calls of the operation, which kernels or the reference compute."""
    found = []

    def spy(tensors, options):
        found.append(options)
        return ops.CROSS_ENTROPY(tensors, options)

    monkeypatch.setattr(hub_functions, "CROSS_ENTROPY", spy)
    monkeypatch.setattr(models.dispatch, "serves", lambda *call: True)
    return found


def tiny(device):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(device)


def step(model, **options):
    random = torch.Generator().manual_seed(1)
    where = next(model.parameters()).device
    ids = torch.randint(61, (2, 11), generator=random).to(where)
    labels = ids.clone()
    labels[:, :3] = -100
    model.zero_grad()
    out = model(ids, labels=labels, **options)
    if out.loss.requires_grad:
        out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@compiled
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}])
@pytest.mark.parametrize("grad", [True, False])
def test_the_loss_of_a_model(kernel, device, served, options, grad):
    model = tiny(device)
    with torch.set_grad_enabled(grad):
        before, gradients = step(model, **options)
        report = kernel.kernelize(model, only=["loss"])
        assert [(row.kind, row.layer) for row in report.served] == [("LlamaForCausalLM", "loss")]
        after, found = step(model, **options)
        assert served == [(-100, "num_items_in_batch" not in options)]
        assert_close(after.loss, before.loss)
        assert torch.equal(after.logits, before.logits)
        assert gradients.keys() == found.keys()
        for name, gradient in gradients.items():
            assert relative_error(found[name], gradient) < 1e-5, name
        assert kernel.restore(model) == 1 and type(model) is transformers.LlamaForCausalLM
        assert torch.equal(step(model, **options)[0].loss, before.loss) and len(served) == 1


@compiled
def test_labels_that_are_shifted_already(kernel, device, served):
    model, labels = tiny(device), torch.randint(61, (2, 11), device=device)
    before = step(model, shift_labels=labels)[0].loss
    kernel.kernelize(model, only=["loss"])
    assert_close(step(model, shift_labels=labels)[0].loss, before)
    assert len(served) == 1


@compiled
def test_where_another_loss_is_computed(kernel, device, served, monkeypatch):
    model = tiny(device)
    kernel.kernelize(model, only=["loss"])

    def half(logits, labels, **options):
        return logits.float().mean() / 2

    model.loss_function = half
    out = step(model)[0]
    assert torch.equal(out.loss, out.logits.mean() / 2) and not served
    del model._loss_function
    monkeypatch.setattr(F, "cross_entropy", lambda x, *args, **kwargs: x.sum() * 0 + 5)
    assert step(model)[0].loss == 5 and not served
    monkeypatch.undo()
    other = tiny(device)
    other.loss_function = half
    assert not kernel.kernelize(other, only=["loss"]).rows


@compiled
def test_copies_are_served(kernel, device, served):
    model = tiny(device)
    before = step(model)[0].loss
    kernel.kernelize(model, only=["loss"])
    assert_close(step(copy.deepcopy(model))[0].loss, before)
    assert len(served) == 1
