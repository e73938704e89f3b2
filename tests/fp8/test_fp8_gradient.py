"""Gradients of x through weights in FP8, and adapters of peft that learn on top of them."""

import contextlib
import copy

import fp8_problems
import pytest
import torch
from conftest import relative_error, submodule

dispatch, reference = submodule("runtime.dispatch"), submodule("fp8.reference")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def serving(device: str):
    """By kernels of a Hopper GPU, or by the reference on a CPU."""
    if device == "cpu":
        return dispatch.force("reference")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch's product of FP8 blocks is of Hopper")
    return contextlib.nullcontext()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("N, K", [(128, 512), (400, 1024)])
def test_a_weight_in_bf16(device, N, K):
    """What codes and scales stand for, rounded once; rows of a last block that is not whole too."""
    part = fp8_problems.linear(N, K, device=device)
    weight, scale = part.weight.detach(), part.weight_scale_inv.detach()
    with serving(device), dispatch.served() as record:
        found = submodule("fp8.ops").DEQUANTISE((weight, scale))
    assert "dequantise_fwd" in record and found.dtype is torch.bfloat16
    assert torch.equal(found, reference.dequantised(weight, scale).bfloat16())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (130,)])
def test_a_linear(kernel, monkeypatch, device, bias, shape):
    """y is that of a call without gradients, the gradient of x that of fp64 to a rounding of the
    weight and one of the result; weight, scale and bias get none."""
    calls = fp8_problems.stand_in(monkeypatch)
    part = fp8_problems.linear(400, 512, bias, device).requires_grad_(False)
    part.weight.requires_grad_()
    assert not kernel.kernelize(part).left
    random = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, 512, generator=random).bfloat16().to(device).requires_grad_()
    gradient = torch.randn(*shape, 400, generator=random).bfloat16().to(device)
    with serving(device):
        with torch.no_grad():
            expected = part(x)
        y = part(x)
        again = part(x)
        again += 1  # as PEFT's AdaLoRA does
        assert torch.equal(again, y + 1)
        y.backward(gradient)
    wide = reference.dequantised(part.weight, part.weight_scale_inv).double()
    assert not calls and torch.equal(y, expected) and x.grad.dtype is torch.bfloat16
    assert relative_error(x.grad, gradient.double() @ wide) < 2**-8
    assert part.weight.grad is None and part.weight_scale_inv.grad is None


def adapted(monkeypatch, device: str):
    """A model with adapters in some of its FP8Linears, and its kernelized copy."""
    peft = pytest.importorskip("peft")
    calls = fp8_problems.stand_in(monkeypatch)
    places = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=places, task_type="CAUSAL_LM")
    model = peft.get_peft_model(fp8_problems.tiny_qwen3().to(device), config).train()
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model, copy.deepcopy(model), calls


def gradients(model, ids) -> dict:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_adapters(kernel, monkeypatch, device, checkpoints):
    """Gradients of adapters are as near to fp64's, of a model of dequantised weights, as those of
    transformers' own modules, if these have any; of them none runs."""
    model, ours, calls = adapted(monkeypatch, device)
    report = kernel.kernelize(ours)
    assert not report.left and "LoraLinear" in {row.layer for row in report.served}
    assert [row.kind for row in report.rows].count("FP8Linear") == 14
    if checkpoints:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(5, 90, (2, 70), generator=torch.Generator().manual_seed(0)).to(device)
    truth = fp8_problems.dequantised(model).double()
    for name, parameter in truth.named_parameters():
        parameter.requires_grad_("lora" in name)
    exact = gradients(truth, ids)
    theirs = gradients(model, ids) if fp8_problems.has_gradients() else None
    calls.clear()
    with serving(device), dispatch.served() as record:
        found = gradients(ours, ids)
    assert not calls and set(found) == set(exact)
    assert {"products_fwd", "dequantise_fwd", "lora_fwd"} <= set(record)

    def error(gradient) -> float:
        return sum(relative_error(gradient[n], exact[n]) ** 2 for n in exact)

    assert error(found) < 0.2 * len(exact)
    if theirs is not None:
        assert set(theirs) == set(exact) and error(found) <= 1.2 * error(theirs)
