"""The loss of language models by a kernel on logits: values, gradients and what counts. The models
that have it: tests/models/test_loss.py."""

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
