"""Several projections of one tensor, side by side."""

import pytest
import torch
from conftest import submodule
from torch import nn

layers = submodule("layers.projections")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(device="cpu", dtype=torch.float32, bias=False):
    torch.manual_seed(0)
    linears = [nn.Linear(32, n, bias=bias, device=device, dtype=dtype) for n in (16, 48, 8)]
    return torch.randn(3, 50, 32, device=device, dtype=dtype), linears


def called(x, linears):
    return torch.cat([linear(x) for linear in linears], -1)


@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_joined(device, bias, tokens):
    for dtype in (torch.float32, torch.bfloat16):
        x, linears = made(device, dtype, bias)
        x = x[:, :tokens]
        with torch.no_grad():
            found, wanted = layers.joined(x, *linears), called(x.double(), wide(linears))
        assert found.shape == (3, tokens, 72) and found.dtype == dtype and found.is_contiguous()
        assert (found - wanted).abs().max() < 8 * torch.finfo(dtype).eps * wanted.abs().max()


def wide(linears):
    return [lambda x, y=y: nn.functional.linear(x, y.weight.double(), doubled(y)) for y in linears]


def doubled(linear):
    return None if linear.bias is None else linear.bias.double()


def test_without_a_copy(monkeypatch):
    """Modules are called where that may do more than multiply, and where a gradient is wanted."""
    x, linears = made()
    wanted, calls = called(x, linears).detach(), []
    monkeypatch.setattr(layers.torch, "cat", lambda *args: calls.append(1) or cat(*args))
    with torch.no_grad():
        assert torch.allclose(layers.joined(x, *linears), wanted, atol=1e-5) and not calls
        linears[1].register_forward_hook(lambda module, given, y: 2 * y)
        changed = layers.joined(x, *linears)[..., 16:64]
        assert torch.allclose(changed, 2 * wanted[..., 16:64], atol=1e-5)
    assert len(calls) == 1
    x, linears = made()
    assert layers.joined(x, *linears).requires_grad and len(calls) == 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layers.joined(x, *linears).dtype == torch.bfloat16


cat = torch.cat
