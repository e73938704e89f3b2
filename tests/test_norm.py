"""rms_norm and silu_mul: values, gradients, rounding as transformers has it, errors."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, relative_error, submodule

MODES = [("llama", 0.0), ("gemma", 1.0), ("gemma", 0.0)]


def norms(width: int):
    """(casting mode, offset, a module of transformers that rounds so), with random weights."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    for (mode, offset), kind in zip(MODES, (LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm)):
        module = kind(width, eps=1e-5)
        torch.nn.init.normal_(module.weight)
        yield mode, offset, module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_reference_is_transformers_code_to_the_bit(kernel, dtype, weight_dtype):
    pytest.importorskip("transformers")
    for mode, offset, module in norms(96):
        module = module.to(weight_dtype)
        x, residual = torch.randn(2, 3, 5, 96).to(dtype).unbind(0)
        options = {"eps": 1e-5, "casting_mode": mode, "offset": offset}
        y = kernel.rms_norm(x, module.weight, **options)
        assert y.dtype == module(x).dtype and torch.equal(y, module(x))
        y, total = kernel.rms_norm(x, module.weight, residual=residual, **options)
        assert torch.equal(total, x + residual) and torch.equal(y, module(x + residual))


@pytest.mark.parametrize("mode, offset", MODES)
def test_gradients_of_the_reference(kernel, mode, offset):
    x, weight, residual = (torch.randn(*s, 7, dtype=torch.float64) for s in ((2, 3), (), (2, 3)))
    leaves = [x.requires_grad_() for x in (x, weight, residual)]

    def norm(x, weight, residual):
        return kernel.rms_norm(x, weight, 1e-3, casting_mode=mode, offset=offset, residual=residual)

    assert torch.autograd.gradcheck(norm, leaves)
    y, total = norm(*leaves)
    dy, dtotal = torch.randn(2, *y.shape, dtype=torch.float64)
    expected = torch.autograd.grad((y, total), leaves, (dy, dtotal))
    rms = submodule("norm.reference")
    args = (x, weight, residual, 1e-3, mode, offset, True)
    _, total, rstd = rms.rms_norm_fwd(*args)
    dx, dweight = rms.rms_norm_bwd(total, rstd, weight, dy, dtotal, offset, True)
    for found, d in zip((dx, dweight, dx), expected):
        assert_close(found, d)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "gelu_pytorch_tanh", "relu"])
def test_silu_mul(kernel, activation):
    gate, up = torch.randn(2, 5, 96, dtype=torch.float64, requires_grad=True).chunk(2, -1)
    expected = (
        submodule("swiglu.reference").ACTIVATIONS[
            {"gelu_pytorch_tanh": "gelu_tanh"}.get(activation, activation)
        ](gate)
        * up
    )
    assert relative_error(kernel.silu_mul(gate, up, activation=activation), expected) < 1e-12
    assert torch.equal(kernel.silu_mul(gate, up), F.silu(gate) * up)
