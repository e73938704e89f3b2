"""The adapters of docs/engines.md, as they stand there, against the engines' calls in plain torch.

The torch forms say what a call of vLLM or SGLang does to its arguments, token by token, in fp64.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, relative_error

H, HV, K, V, W = 2, 4, 16, 24, 4
D = 2 * H * K + HV * V


@pytest.fixture
def adapters(kernel):
    names = {"torch": torch, "ours": kernel}
    for block in re.findall(
        r"```python\n(def .*?)```", (ROOT / "docs/engines.md").read_text(), re.S
    ):
        exec(block, names)
    return names


@pytest.fixture
def draw(device):
    random = torch.Generator(device=device).manual_seed(3)
    return lambda *shape: torch.randn(*shape, generator=random, device=device)


def ints(values, device):
    return torch.tensor(values, device=device, dtype=torch.int32)


def rule_token(S, q, k, v, a, b, A_log, dt_bias):
    """One token: S [HV, V, K], fp64, is changed; o [HV, V]."""
    q, k = (F.normalize(x.double(), dim=-1).repeat_interleave(HV // H, 0) for x in (q, k))
    S *= (-A_log.double().exp() * F.softplus(a.double() + dt_bias.double())).exp().view(-1, 1, 1)
    delta = (v.double() - torch.einsum("hvk,hk->hv", S, k)) * b.double().sigmoid().unsqueeze(-1)
    S += delta.unsqueeze(-1) * k.unsqueeze(1)
    return torch.einsum("hvk,hk->hv", S, q) * K**-0.5


def rule_inputs(draw, tokens):
    x = {"q": draw(tokens, H, K), "k": draw(tokens, H, K), "v": draw(tokens, HV, V)}
    return {**x, "a": draw(tokens, HV), "b": draw(tokens, HV)}, (draw(HV), draw(HV))


def at(x, token):
    return [y[token] for y in x.values()]


def close(x, y):
    assert relative_error(x, y) < 1e-5


@pytest.mark.parametrize("null_index, slots", [(0, [4, 0, 2, 6]), (-1, [4, -1, 0, 6])])
def test_packed_decode(adapters, draw, device, null_index, slots):
    x, gate = rule_inputs(draw, 4)
    pool, out = draw(7, HV, V, K), draw(4, 1, HV, V)
    expected, o = pool.double(), torch.zeros_like(out, dtype=torch.float64)
    for n, slot in enumerate(slots):
        if slot > null_index:
            o[n, 0] = rule_token(expected[slot], *at(x, n), *gate)
    mixed = torch.cat([x[name].flatten(1) for name in "qkv"], 1)
    got, states = adapters["packed_decode"](
        mixed, x["a"], x["b"], *gate, K**-0.5, pool, out, ints(slots, device), True, null_index
    )
    assert got is out and states is pool
    close(out, o)
    close(pool, expected)


def test_vllm_decode(adapters, draw, device):
    x, gate = rule_inputs(draw, 3)
    pool, slots = draw(7, HV, V, K), [5, 0, 1]
    expected = pool.double()
    o = [
        rule_token(expected[s], *at(x, n), *gate) if s else 0 * o_like(x)
        for n, s in enumerate(slots)
    ]
    rows = {name: x[name].unsqueeze(0) for name in "qkv"}
    got, _ = adapters["sigmoid_gating_update"](
        gate[0], x["a"], x["b"], gate[1], **rows, initial_state=pool, use_qk_l2norm_in_kernel=True,
        cu_seqlens=ints([0, 1, 2, 3], device), ssm_state_indices=ints(slots, device),
    )  # fmt: skip
    assert got.shape == (1, 3, HV, V)
    close(got[0], torch.stack(o))
    close(pool, expected)


def o_like(x):
    return torch.zeros(HV, V, dtype=torch.float64, device=x["v"].device)


def test_vllm_verification(adapters, draw, device):
    slots, accepted, cu = (
        [[3, 8, 2], [5, 1, 4], [0, 0, 0], [6, 7, 0]],
        [2, 1, 1, 1],
        [0, 3, 5, 6, 9],
    )
    x, gate = rule_inputs(draw, 9)
    pool = draw(9, HV, V, K)
    expected, o = pool.double(), torch.zeros(9, HV, V, dtype=torch.float64, device=device)
    for n, own in enumerate(slots):
        start = own[accepted[n] - 1]
        S = expected[start].clone()
        for t, token in enumerate(range(cu[n], cu[n + 1])):
            if start > 0:
                o[token] = rule_token(S, *at(x, token), *gate)
                if own[t] > 0:
                    expected[own[t]] = S
    rows = {name: x[name].unsqueeze(0) for name in "qkv"}
    got, _ = adapters["sigmoid_gating_update"](
        gate[0], x["a"], x["b"], gate[1], **rows, initial_state=pool, use_qk_l2norm_in_kernel=True,
        cu_seqlens=ints(cu, device), ssm_state_indices=ints(slots, device),
        num_accepted_tokens=ints(accepted, device),
    )  # fmt: skip
    close(got[0], o)
    close(pool, expected)


def conv_token(history, x, weight, bias):
    """(y [D], the W - 1 inputs before the next token) after `history` [D, W - 1]."""
    seen = torch.cat([history.double(), x.double().unsqueeze(-1)], -1)
    return F.silu((seen * weight.double()).sum(-1) + bias.double()), seen[:, 1:]


def test_vllm_convolution_decode(adapters, draw, device):
    x, weight, bias = draw(3, D), draw(D, W), draw(D)
    pool, slots, out = draw(6, W + 1, D).mT, [4, 0, 2], draw(3, D)
    expected, y = pool.double(), torch.zeros(3, D, dtype=torch.float64, device=device)
    for n, slot in enumerate(slots):
        if slot:
            y[n], expected[slot, :, : W - 1] = conv_token(
                expected[slot, :, : W - 1], x[n], weight, bias
            )
    args = (x, pool, weight, bias, True, ints(slots, device))
    assert adapters["conv_update"](*args, out=out) is out
    close(out, y)
    close(pool, expected)


def test_vllm_convolution_verification(adapters, draw, device):
    """The state rolls by one column and takes the tokens behind its first W - 2."""
    cu, slots, accepted = [0, 3, 5, 6, 9], [4, 2, 0, 1], [3, 1, 1, 2]
    x, weight, bias, pool = draw(9, D), draw(D, W), draw(D), draw(6, W + 1, D).mT
    expected, y = pool.double(), torch.zeros(9, D, dtype=torch.float64, device=device)
    for n, slot in enumerate(slots):
        if slot == 0:
            continue
        first = accepted[n] - 1
        history = expected[slot, :, first : first + W - 1].clone()
        tokens = x[cu[n] : cu[n + 1]]
        rolled = torch.cat([history[:, 1:], tokens.T.double()], -1)
        for t, token in enumerate(tokens):
            y[cu[n] + t], history = conv_token(history, token, weight, bias)
        expected[slot, :, : rolled.shape[1]] = rolled
    got = adapters["conv_update"](
        x, pool, weight, bias, "silu", ints(slots, device), ints(accepted, device),
        ints(cu, device), 3,
    )  # fmt: skip
    close(got, y)
    close(pool, expected)


def test_vllm_prompts(adapters, draw, device):
    x, _ = rule_inputs(draw, 9)
    g, beta, cu = -draw(9, HV).exp(), draw(9, HV).sigmoid(), [0, 4, 9]
    pool, slots, kept = draw(5, HV, V, K), [3, 1], torch.tensor([True, False], device=device)
    pool[1] = float("nan")
    expected, o = pool.double(), torch.zeros(9, HV, V, dtype=torch.float64, device=device)
    expected[1] = 0.0
    for n, slot in enumerate(slots):
        for token in range(cu[n], cu[n + 1]):
            o[token] = decayed_token(expected[slot], x, g, beta, token)
    rows = [y.unsqueeze(0) for y in (x["q"], x["k"], x["v"], g, beta)]
    got = adapters["prompts"](*rows, pool, ints(slots, device), kept, ints(cu, device))
    close(got[0], o)
    close(pool, expected)


def decayed_token(S, x, g, beta, token):
    """rule_token with the decay's logarithm and the write strength as they are used."""
    wanted, b = g[token].double(), beta[token].double().logit()
    # -exp(0) softplus(a) is the logarithm for a = log(expm1(-g))
    a, zero = (-wanted).expm1().log(), torch.zeros_like(wanted)
    return rule_token(S, x["q"][token], x["k"][token], x["v"][token], a, b, zero, zero)


def test_convolution_prompts(adapters, draw, device):
    x, weight, bias, cu = draw(D, 9), draw(D, W), draw(D), [0, 2, 9]
    pool, slots, kept = draw(5, W + 1, D).mT, [3, 1], torch.tensor([True, False], device=device)
    expected, y = pool.double(), torch.zeros(D, 9, dtype=torch.float64, device=device)
    for n, slot in enumerate(slots):
        history = expected[slot, :, : W - 1] * float(kept[n])
        for token in range(cu[n], cu[n + 1]):
            y[:, token], history = conv_token(history, x[:, token], weight, bias)
        expected[slot, :, : W - 1] = history
    got = adapters["conv_prompts"](
        x, weight, bias, pool, ints(cu, device), ints(slots, device), kept, "silu"
    )
    close(got, y)
    close(pool, expected)


@pytest.mark.parametrize("verifies", [False, True])
def test_sglang_update(adapters, draw, device, verifies):
    T, slots, places = 3 if verifies else 1, [4, -1, 0], [2, 1, 0]
    x, gate = rule_inputs(draw, 3 * T)
    pool, buffer = draw(6, HV, V, K), draw(4, 5, HV, V, K).bfloat16()
    expected, filled = pool.double(), buffer.clone()
    o = torch.zeros(3 * T, HV, V, dtype=torch.float64, device=device)
    for n, slot in enumerate(slots):
        if slot < 0:
            continue
        S = expected[slot].clone() if verifies else expected[slot]
        for t in range(T):
            o[n * T + t] = rule_token(S, *at(x, n * T + t), *gate)
            filled[places[n], t] = S.to(filled.dtype)
    options = {}
    if verifies:
        options = {
            "disable_state_update": True, "intermediate_states_buffer": buffer,
            "intermediate_state_indices": ints(places, device), "cache_steps": 5,
        }  # fmt: skip
    rows = [x[name].unsqueeze(0) for name in "qkv"]
    got = adapters["sglang_update"](
        gate[0], x["a"], gate[1], 1.0, 20.0, *rows, x["b"], pool, ints(slots, device),
        use_qk_l2norm_in_kernel=True, cu_seqlens=ints([0, T, 2 * T, 3 * T], device), **options,
    )  # fmt: skip
    close(got[0], o)
    close(pool, expected)
    if verifies:
        live = [2, 0]
        assert relative_error(buffer[live], filled[live].double()) < 4e-3
        assert torch.equal(buffer[3], filled[3]) and torch.equal(buffer[:, 3:], filled[:, 3:])


@pytest.mark.parametrize("inplace", [False, True])
def test_sglang_prompts(adapters, draw, device, inplace):
    x, _ = rule_inputs(draw, 9)
    g, beta, cu = -draw(9, HV).exp(), draw(9, HV).sigmoid(), [0, 4, 9]
    pool, slots = draw(5, HV, V, K), [3, -1]
    expected, o = pool.double(), torch.zeros(9, HV, V, dtype=torch.float64, device=device)
    for token in range(cu[1]):
        o[token] = decayed_token(expected[3], x, g, beta, token)
    rows = [y.unsqueeze(0) for y in (x["q"], x["k"], x["v"], g, beta)]
    before = pool.clone()
    got, *_ = adapters["sglang_prompts"](
        *rows, initial_state=pool, initial_state_indices=ints(slots, device),
        cu_seqlens=ints(cu, device), use_qk_l2norm_in_kernel=True, inplace_update=inplace,
    )  # fmt: skip
    close(got[0], o)
    close(pool, expected if inplace else before.double())
