"""Several projections of one tensor, side by side."""

import pytest
import torch
from conftest import DEVICES, assert_close, submodule
from torch import nn

layers = submodule("layers.projections")


def made(device="cpu", dtype=torch.float32, bias=False):
    torch.manual_seed(0)
    linears = [nn.Linear(32, n, bias=bias, device=device, dtype=dtype) for n in (16, 48, 8)]
    return torch.randn(3, 50, 32, device=device, dtype=dtype), linears


def called(x, linears):
    """In fp64."""
    parts = [(part.weight.double(), part.bias) for part in linears]
    parts = [(weight, bias if bias is None else bias.double()) for weight, bias in parts]
    return torch.cat([nn.functional.linear(x.double(), *part) for part in parts], -1)


@pytest.mark.parametrize("tokens", [0, 1, 50])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_joined(device, bias, tokens):
    for dtype in (torch.float32, torch.bfloat16):
        x, linears = made(device, dtype, bias)
        x = x[:, :tokens]
        with torch.no_grad():
            found, wanted = layers.joined(x, *linears), called(x, linears)
        assert found.shape == (3, tokens, 72) and found.dtype == dtype and found.is_contiguous()
        assert_close(found, wanted)


def test_without_a_copy(monkeypatch):
    """Modules are called where that may do more than multiply, and where a gradient is wanted."""
    (x, linears), calls, cat = made(), [], torch.cat
    wanted = called(x, linears).detach()
    monkeypatch.setattr(layers.torch, "cat", lambda *args: calls.append(1) or cat(*args))
    with torch.no_grad():
        assert_close(layers.joined(x, *linears), wanted)
        assert not calls
        linears[1].register_forward_hook(lambda module, given, y: 2 * y)
        assert_close(layers.joined(x, *linears)[..., 16:64], 2 * wanted[..., 16:64])
    assert len(calls) == 1
    x, linears = made()
    assert layers.joined(x, *linears).requires_grad and len(calls) == 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layers.joined(x, *linears).dtype == torch.bfloat16
