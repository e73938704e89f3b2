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


def joined(x, *linears):
    """linear(x) of each, of which the last is called if need be."""
    first, *others = layers.joined(x, linears[:2], linears[2:])
    return torch.cat([first, *(others or [linears[2](x)])], -1)


@pytest.mark.parametrize("tokens", [0, 1, 50])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_joined(device, bias, tokens):
    for dtype in (torch.float32, torch.bfloat16):
        x, linears = made(device, dtype, bias)
        x = x[:, :tokens]
        with torch.no_grad():
            found, wanted = joined(x, *linears), called(x, linears)
        assert found.shape == (3, tokens, 72) and found.dtype == dtype and found.is_contiguous()
        assert_close(found, wanted)


def test_without_a_copy(monkeypatch):
    """Modules are called where that may do more than multiply, and where a gradient is wanted."""
    (x, (*linears, last)), calls, cat = made(), [], torch.cat
    wanted = called(x, linears).detach()
    monkeypatch.setattr(layers.torch, "cat", lambda *args: calls.append(1) or cat(*args))

    def joined(x):
        return layers.joined(x, linears, [last])[0]

    with torch.no_grad():
        assert_close(joined(x), wanted)
        assert not calls
        handle = linears[1].register_forward_hook(lambda module, given, y: 2 * y)
        assert_close(joined(x)[..., 16:], 2 * wanted[..., 16:])
        handle.remove()
    assert len(calls) == 1
    assert joined(x).requires_grad and len(calls) == 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert joined(x).dtype == torch.bfloat16


def test_others_beside_them(monkeypatch):
    """One launch for a few tokens of plain modules; else the others are to be called."""
    x, linears = made()
    wanted, launches = called(x, linears), []

    def project(x, weights, apart=True):
        if apart or x.numel() > 64 * 32:
            return None
        launches.append(len(weights))
        return [torch.cat([x @ w.T for w in weights], -1)]

    monkeypatch.setattr(layers, "project", project)
    with torch.no_grad():
        first, *others = layers.joined(x[:1], linears[:2], linears[2:])
        assert launches == [3] and [y.shape[-1] for y in (first, *others)] == [64, 8]
        assert_close(torch.cat([first, *others], -1), wanted[:1])
        assert len(layers.joined(x, linears[:2], linears[2:])) == 1  # 150 tokens
        linears[2].register_forward_hook(lambda module, given, y: 2 * y)
        assert len(layers.joined(x[:1], linears[:2], linears[2:])) == 1 and launches == [3]


def test_one_token_by_a_large_weight(monkeypatch):
    """By our kernel where launches overlap; other calls are the class's own."""
    (x, (head, *_)), launches = made(), []

    def project(x, weights):
        launches.append(x.shape)
        return [x @ weights[0].T] if len(launches) < 3 else None

    monkeypatch.setattr(layers, "project", project)
    one, few = x[:1, :1], x[:1, :2]
    with torch.no_grad():
        wanted = nn.functional.linear(one.double(), head.weight.double())
        assert_close(layers.linear(head, one), wanted)
        assert not launches
        monkeypatch.setattr(layers, "LARGE", 1)
        monkeypatch.setattr(layers.device, "overlaps_launches", lambda where: True)
        for given in (one, one[0, 0], one, few):
            found = layers.linear(head, given)
            assert found.shape == (*given.shape[:-1], 16)
            assert_close(found.flatten()[:16], wanted.flatten())
        biased = nn.Linear(32, 16)
        assert_close(layers.linear(biased, one), biased(one).double())
    assert launches == [one.shape, (32,), one.shape]
