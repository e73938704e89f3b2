"""Projections of a few tokens against the reference, and when they are used."""

import pytest
import torch
from conftest import assert_close, submodule
from interpreter import compiled, interpreted, rerun

reference = submodule("projection.reference")

# weights of Qwen3.5 (qkv, z, b, a), Qwen3-Next (two) and OLMo-Hybrid (six); rows past a tile
ROWS = [(96, 64, 4, 4), (130, 8), (64, 64, 96, 96, 4, 4), (1,)]


def inputs(M, K, rows, dtype, device):
    torch.manual_seed(M)
    x = torch.randn(M, K + 16, device=device, dtype=dtype)[:, :K]
    return x, [torch.randn(n, K, device=device, dtype=dtype) * K**-0.5 for n in rows]


def check(dtype, device):
    portable = submodule("projection.portable.project")
    for rows in ROWS:
        for M in (1, 5, 16, 33, 64):
            x, weights = inputs(M, 192 if M < 16 else 128, rows, dtype, device)
            assert portable.supports_project_fwd(x, weights, None)
            y = portable.project_fwd(x, weights, None)
            assert_close(y, reference.project_fwd(x.double(), [w.double() for w in weights], None))
    for K, rows in ((64, 3), (192, 40), (1600, 70)):  # less than a tile, several, and a rest
        x, weights = inputs(1, K, (rows, rows), dtype, device)
        for activation in ("silu", "gelu_tanh", "relu"):
            z = portable.project_fwd(x, weights, activation)
            ref = reference.project_fwd(x.double(), [w.double() for w in weights], activation)
            assert_close(z, ref)


@interpreted
def test_values_interpreted():
    check(torch.float16, "cpu")


@compiled
def test_in_the_interpreter():
    rerun(__file__)


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    check(dtype, "cuda")


@compiled
def test_what_is_refused():
    """More tokens than a decoding batch, other dtypes, odd widths, weights that are not dense."""
    supports = submodule("projection.portable.project").supports_project_fwd
    x, weights = inputs(4, 128, (96, 8), torch.bfloat16, "cpu")
    assert supports(x, weights, None)
    assert not supports(x.repeat(17, 1), weights, None)
    assert not supports(x.float(), [w.float() for w in weights], None)
    assert not supports(x[:, :100], [w[:, :100] for w in weights], None)
    assert not supports(x, [w.t().contiguous().t() for w in weights], None)
    assert not supports(x, weights * 4, None)
    pair = [weights[0], weights[0]]
    assert supports(x[:1], pair, "silu")
    assert not supports(x, pair, "silu")  # a gate: of one token alone
    assert not supports(x[:1], pair, "gelu")


@compiled
def test_without_a_kernel_the_modules_are_called(kernel):
    """On a CPU, with gradients and under autocast there is nothing to gain."""
    project = submodule("projection.project").project
    x, weights = inputs(4, 128, (96, 8), torch.bfloat16, "cpu")
    with torch.no_grad():
        assert project(x[None], weights) is None
