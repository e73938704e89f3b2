"""Kimi Delta Attention in plain torch: two forms and a recurrence written here are one function;
gradients; arguments."""

import pytest
import torch
from conftest import assert_close
from kda_problems import GATES, kda_inputs

RULES = ("chunk_kda", "fused_recurrent_kda")


def recurrence(q, k, v, g, beta, state, scale):
    """The definition, a token at a time, for [B, T, H, *] with as many heads everywhere."""
    S, o = state, []
    for t in range(q.shape[1]):
        S = g[:, t].exp().unsqueeze(-1) * S
        seen = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        write = beta[:, t].unsqueeze(-1) * (v[:, t] - seen)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * scale)
    return torch.stack(o, 1), S


def doubles(*args, **options):
    return {name: x.double() for name, x in kda_inputs(*args, **options).items()}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("rule", RULES)
def test_the_definition(kernel, rule, gates):
    x = doubles(2, 150, 2, 2, 16, 24, gates=gates)
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    state = torch.randn(2, 2, 16, 24, dtype=torch.float64)
    o, final = getattr(kernel, rule)(**x, initial_state=state, output_final_state=True)
    want, S = recurrence(**x, state=state, scale=16**-0.5)
    assert_close(o, want)
    assert_close(final, S)


@pytest.mark.parametrize("rule", RULES)
def test_groups_and_norms(kernel, rule):
    """Value heads share key heads; lengths go first, in the kernel or before."""
    x = doubles(1, 70, 2, 4, 16, 8)
    o, _ = getattr(kernel, rule)(**x, use_qk_l2norm_in_kernel=True)
    for name in ("q", "k"):
        y = x[name].repeat_interleave(2, 2)
        x[name] = y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)
    want, _ = recurrence(**x, state=torch.zeros(1, 4, 16, 8).double(), scale=0.25)
    assert_close(o, want)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bound, rate", [(None, True), (-5.0, True), (-2.0, False)])
@pytest.mark.parametrize("shapes", ["flat", "as transformers has them"])
def test_raw_gates(kernel, rule, bound, rate, shapes):
    x = doubles(1, 70, 2, 2, 8, 8)
    a, b = 5 * torch.randn_like(x["g"]), torch.randn_like(x["beta"])
    A_log, bias = torch.tensor([-1.0, 2.0]).double(), torch.linspace(-3, 30, 16).double()
    factor = A_log.exp().unsqueeze(-1) if rate else 1.0
    shifted = a + bias.view(2, 8)
    g = -factor * torch.nn.functional.softplus(shifted)
    if bound is not None:
        g = bound * torch.sigmoid(factor * shifted)
    if shapes != "flat":
        A_log, bias = A_log.view(1, 1, 2, 1), bias.view(2, 8)
    function = getattr(kernel, rule)
    o, _ = function(
        **{**x, "g": a, "beta": b}, use_gate_in_kernel=True, A_log=A_log if rate else None,
        dt_bias=bias, lower_bound=bound, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    given = {**x, "g": g, "beta": 2 * b.sigmoid()}
    want, _ = function(**given, use_qk_l2norm_in_kernel=True)
    assert_close(o, want)
    if bound is not None:  # a bound is of raw gates alone, as FLA has it
        again, _ = function(**given, use_qk_l2norm_in_kernel=True, lower_bound=bound)
        assert torch.equal(again, want)


def test_packed_pool_and_layouts(kernel):
    x = doubles(1, 147, 1, 2, 16, 24)
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    cu, rows = torch.tensor([0, 0, 66, 147]), torch.tensor([3, 0, -1])
    pool = torch.randn(4, 2, 24, 16, dtype=torch.float64)
    before = pool.clone()
    o, after = kernel.chunk_kda(
        **x, initial_state=pool, state_indices=rows, cu_seqlens=cu, cu_seqlens_cpu=cu,
        state_v_first=True, safe_gate=True, disable_recompute=True,
    )  # fmt: skip
    assert after is pool and not o[:, 66:].any()
    assert torch.equal(pool[[1, 2, 3]], before[[1, 2, 3]])
    part = {name: y[:, :66] for name, y in x.items()}
    want, S = kernel.fused_recurrent_kda(
        **part, initial_state=before[:1].mT, output_final_state=True
    )
    assert_close(o[:, :66], want)
    assert_close(pool[:1].mT, S)


def test_states_on_the_way_and_a_prefix_that_is_shared(kernel):
    x = doubles(1, 200, 1, 1, 8, 8)
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    o, final, states = kernel.chunk_kda(**x, checkpoint_every=64, output_final_state=True)
    for j in range(3):
        part = {name: y[:, : 64 * (j + 1)] for name, y in x.items()}
        _, S = kernel.fused_recurrent_kda(**part, output_final_state=True)
        assert_close(states[j], S[0])
    rest = {name: y[:, 128:] for name, y in x.items()}
    again, S = kernel.chunk_kda(
        **rest, initial_state=states, state_indices=torch.tensor([1]), inplace_final_state=False,
        output_final_state=True,
    )  # fmt: skip
    assert_close(again, o[:, 128:])
    assert_close(S, final)
    fresh, _ = kernel.chunk_kda(
        **rest, initial_state=states, state_indices=torch.tensor([1]),
        has_initial_state=torch.tensor([False]),
    )  # fmt: skip
    want, _ = kernel.chunk_kda(**rest)
    assert_close(fresh, want)


def test_steps_in_a_pool(kernel):
    x = kda_inputs(3, 1, 1, 2, 16, 8)
    pool, out = torch.randn(4, 2, 16, 8), torch.empty(3, 1, 2, 8)
    before = pool.clone()
    o, after = kernel.fused_recurrent_kda(
        **x, initial_state=pool, state_indices=torch.tensor([2, 0, 1]), inplace_final_state=True,
        null_index=0, out=out, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert o is out and after is pool and not o[1].any()
    want, S = kernel.fused_recurrent_kda(
        **x, initial_state=before[[2, 0, 1]], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert_close(o[[0, 2]], want[[0, 2]])
    assert_close(pool[[2, 1]], S[[0, 2]])
    assert torch.equal(pool[[0, 3]], before[[0, 3]])
