"""CPU implementations used without gradients, compared with the definition.

The definition is what runs where gradients are on: the rule token by token, out of place.
"""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, gdn_inputs, relative_error, submodule


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_autocast_does_not_round_the_state(kernel, name):
    """Autocast rounds q, k and v, once; the products inside stay in fp32."""
    inputs = gdn_inputs(1, 130, 2, 4, 32, 32)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    function = getattr(kernel, name)
    for x in ("q", "k", "v"):
        inputs[x] = inputs[x].bfloat16().float()
    wide = {k: x.double() for k, x in inputs.items()}
    _, ref = function(**wide, **options)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = function(**inputs, **options)
    assert o.dtype == torch.bfloat16
    assert relative_error(state, ref) < 1e-5


def conv1d(x, weight, bias, history):
    """The convolution as torch has it; x [B, D, T], history [B, D, W - 1]."""
    return F.conv1d(torch.cat([history, x], -1), weight.unsqueeze(1), bias, groups=x.shape[1])


@pytest.mark.parametrize("T", [1, 2, 3, 9])
@pytest.mark.parametrize("given", [True, False], ids=["history", "zeros"])
@pytest.mark.parametrize("by_tokens", [True, False], ids=["[B, T, D]", "[B, D, T]"])
def test_convolution_and_gradients(kernel, T, given, by_tokens):
    random = torch.Generator().manual_seed(0)
    shapes = [(2, T, 6) if by_tokens else (2, 6, T), (6, 4), (6,), (2, 6, 3)]
    raw, weight, bias, history = (
        torch.randn(s, generator=random, dtype=torch.float64).requires_grad_() for s in shapes
    )
    x, before = raw.mT if by_tokens else raw, history if given else None
    out = kernel.causal_conv1d_fn(x, weight, bias, "silu", initial_states=before)
    ref = F.silu(conv1d(x, weight, bias, history if given else torch.zeros_like(history)))
    assert_close(out, ref)
    assert out.stride() == x.stride() or T == 1  # no transposition on the way
    inputs = [raw, weight, bias] + [history] * given
    with torch.no_grad():
        assert_close(kernel.causal_conv1d_fn(x, weight, bias, "silu", initial_states=before), ref)
    for got, expected in zip(*(torch.autograd.grad(y.sin().sum(), inputs) for y in (out, ref))):
        assert_close(got, expected)


@pytest.mark.parametrize("columns", [3, 4, 7])
@pytest.mark.parametrize("state_dtype", [torch.float64, torch.float32], ids=str)
def test_convolution_of_a_token(kernel, columns, state_dtype):
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(s, generator=random, dtype=torch.float64) for s in ((2, 6, 1), (6, 4), (6,))
    )
    state = torch.randn(2, 6, columns, generator=random).to(state_dtype)
    expected = torch.cat([state[..., 1:], x.to(state_dtype)], -1)
    ref = F.silu(conv1d(x, weight, bias, state[..., -3:].double()))
    assert_close(kernel.causal_conv1d_update(x, state, weight, bias, "silu"), ref)
    assert torch.equal(state, expected)


@pytest.mark.parametrize("H, HV", [(2, 4), (3, 3)])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dense", [True, False])
def test_token_of_a_layer(kernel, H, HV, allow_neg_eigval, activation, dense):
    """Its parts one after another, by the public functions with gradients on."""
    B, K, V, D = 2, 5, 3, 2 * H * 5 + HV * 3
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    q, k, v, z, a, b = draw(B, 1, H, K), draw(B, 1, H, K), *draw(2, B, 1, HV, V), *draw(2, B, 1, HV)
    conv_state, state, weight, bias = draw(B, D, 4), draw(B, HV, K, V), draw(D, 4), draw(D)
    A_log, dt_bias, norm = draw(HV), draw(HV), draw(V)
    if not dense:
        state = state.mT.contiguous().mT
    own = conv_state.clone(), state.clone()
    x = torch.cat([y.flatten(2) for y in (q, k, v)], -1).mT  # [B, D, 1]
    y = kernel.causal_conv1d_update(x, own[0], weight, bias, activation).mT
    parts = y.split([H * K, H * K, HV * V], -1)
    with torch.enable_grad():
        o, final = kernel.fused_recurrent_gated_delta_rule(
            *(part.view(B, 1, n, -1) for part, n in zip(parts, (H, H, HV))), a, b,
            initial_state=own[1], output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=allow_neg_eigval,
        )  # fmt: skip
    ref = kernel.rms_norm_gated(o, z, norm, eps=0.1)
    with torch.no_grad():
        tensors = (q, k, v, z, a, b, conv_state, state, weight, bias, A_log, dt_bias, norm)
        decode = submodule("gdn_layer.ops_fused").DECODE
        out = decode(tensors, (activation, 0.1, "silu", allow_neg_eigval))
    assert_close(out, ref)
    assert_close(state, final)
    assert torch.equal(conv_state, own[0])
