"""Gated DeltaNet and Kimi Delta Attention in plain torch, by chunks and by tokens, in every form of
a call: what the recurrence of the papers gives, which is written here once more."""

import pytest
import torch
import torch.nn.functional as F
from conftest import gdn_inputs, relative_error
from kda_problems import GATES, kda_inputs

pytestmark = pytest.mark.kernels_ci
F64 = torch.float64
CHUNKS, STEPS = ("chunk_gated_delta_rule", "chunk_kda"), (
    "fused_recurrent_gated_delta_rule", "fused_recurrent_kda",
)  # fmt: skip
RULES = (*CHUNKS, *STEPS)


def gates_of(g, beta, A_log, dt_bias, bound, raw, sigmoid, negative):
    """Log decays [.., HV, K] or [.., HV, 1], and write strengths."""
    channels = g.ndim == 4
    if raw:
        shape = (-1, g.shape[-1]) if channels else (-1,)
        g = g if dt_bias is None else g + dt_bias.reshape(shape)
        rate = 1.0 if A_log is None else A_log.reshape(-1, *[1] * channels).exp()
        g = -rate * F.softplus(g) if bound is None else bound * torch.sigmoid(rate * g)
    if sigmoid:
        beta = beta.sigmoid() * (2 if negative else 1)
    return (g if channels else g.unsqueeze(-1)), beta


def recurrence(q, k, v, g, beta, S, scale):
    """o [T, HV, V], and the state [HV, K, V] before each token and after the last."""
    o, states = torch.zeros_like(v), [S]
    eye = torch.eye(k.shape[-1], dtype=F64)
    for t in range(len(v)):
        forget = eye - beta[t, :, None, None] * k[t].unsqueeze(-1) * k[t].unsqueeze(-2)
        write = beta[t, :, None, None] * k[t].unsqueeze(-1) * v[t].unsqueeze(-2)
        S = forget @ (g[t].exp().unsqueeze(-1) * S) + write
        o[t] = scale * (S.mT @ q[t].unsqueeze(-1)).squeeze(-1)
        states.append(S)
    return o, torch.stack(states)


def defined(x, starts, use_qk_l2norm_in_kernel=False, scale=None, **given):
    """(o, the states of `recurrence`) of each sequence, whose starts [N, HV, K, V] are given."""
    names = ("A_log", "dt_bias", "lower_bound", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
             "allow_neg_eigval")  # fmt: skip
    g, beta = gates_of(x["g"], x["beta"], *(given.get(name) for name in names))
    q, k, v = x["q"], x["k"], x["v"]
    if use_qk_l2norm_in_kernel:
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    q, k = (y.repeat_interleave(v.shape[2] // q.shape[2], 2) for y in (q, k))
    rows = [(0, a, b) for a, b in zip(ends, ends[1:])] if (ends := given.get("ends")) else [
        (n, 0, v.shape[1]) for n in range(len(v))
    ]  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return [
        recurrence(*(y[n, a:b] for y in (q, k, v, g, beta)), start, scale)
        for (n, a, b), start in zip(rows, starts)
    ]


def inputs(rule, B, T, H=2, HV=4, K=12, V=20, gates="slow"):
    """Of a call in fp64; keys of length one."""
    if "kda" not in rule:
        return gdn_inputs(B, T, H, HV, K, V, F64, gates=gates)
    x = {name: y.double() for name, y in kda_inputs(B, T, H, HV, K, V, gates=gates).items()}
    x["k"] = F.normalize(x["k"], dim=-1)
    return {**x, "initial_state": torch.randn(B, HV, K, V, dtype=F64) * 0.2}


def raw(x, bound=None, rate=True, bias=True, like_transformers=False):
    """Inputs of the gates within the kernel, and its options."""
    HV = x["v"].shape[2]
    random = torch.Generator().manual_seed(4)
    x["g"] = 5 * torch.randn(x["g"].shape, generator=random, dtype=F64)
    x["beta"] = torch.randn(x["beta"].shape, generator=random, dtype=F64)
    A_log, dt_bias = torch.linspace(-1, 2, HV, dtype=F64), torch.linspace(-3, 30, HV, dtype=F64)
    if x["g"].ndim == 4:
        K = x["g"].shape[-1]
        dt_bias = torch.linspace(-3, 30, HV * K, dtype=F64)
        if like_transformers:
            A_log, dt_bias = A_log.view(1, 1, HV, 1), dt_bias.view(HV, K)
    options = {"A_log": A_log if rate else None, "dt_bias": dt_bias if bias else None}
    if bound is not None:
        options["lower_bound"] = bound
    return {**options, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def check(o, ref, states=None, ref_states=None):
    assert relative_error(o, ref) < 1e-12
    if states is not None:
        assert relative_error(states, ref_states) < 1e-12


# 63, 64 and 65 are round a chunk; 1 and 0 are the ends; 200 is several chunks with a ragged tail
@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("rule", RULES)
def test_lengths(kernel, rule, T):
    x = inputs(rule, 2, T)
    o, state = getattr(kernel, rule)(**x, output_final_state=True, use_qk_l2norm_in_kernel=True)
    pairs = defined(x, x["initial_state"], use_qk_l2norm_in_kernel=True)
    check(o, torch.stack([y for y, _ in pairs]), state, torch.stack([s[-1] for _, s in pairs]))


@pytest.mark.parametrize(
    "rule, gates",
    [(rule, gates) for rule in RULES
     for gates in (GATES if "kda" in rule else ("slow", "qwen", "none", "extreme"))],
)  # fmt: skip
def test_gates(kernel, rule, gates):
    x = inputs(rule, 2, 150, 2, 2, 16, 24, gates=gates)
    o, state = getattr(kernel, rule)(**x, output_final_state=True)
    pairs = defined(x, x["initial_state"])
    check(o, torch.stack([y for y, _ in pairs]), state, torch.stack([s[-1] for _, s in pairs]))


OPTIONS = {
    "a scale": ("", {"scale": 0.3}),
    "raw gates": ("", {}),
    "raw gates, negative": ("", {"allow_neg_eigval": True}),
    "bounded": ("kda", {"bound": -5.0}),
    "bounded, without a rate": ("kda", {"bound": -2.0, "rate": False}),
    "without a bias": ("kda", {"bias": False}),
    "as transformers has them": ("kda", {"bound": -5.0, "like_transformers": True}),
}


@pytest.mark.parametrize(
    "rule, name", [(r, n) for r in RULES for n, (of, _) in OPTIONS.items() if of in r]
)
def test_options(kernel, rule, name):
    """States lie values first."""
    options, x = dict(OPTIONS[name][1]), inputs(rule, 1, 70)
    if "scale" not in options:
        negative = options.pop("allow_neg_eigval", False)
        options = {**raw(x, **options), "allow_neg_eigval": negative}
    options["use_qk_l2norm_in_kernel"] = True
    given = {**x, "initial_state": x["initial_state"].mT.contiguous()}
    o, state = getattr(kernel, rule)(
        **given, **options, state_v_first=True, output_final_state=True
    )
    ((ref, states),) = defined(x, x["initial_state"], **options)
    check(o[0], ref, state[0].mT, states[-1])
    if "bound" in OPTIONS[name][1]:  # a bound is of raw gates alone, as FLA has it
        found = [
            getattr(kernel, rule)(*list(inputs(rule, 1, 9).values())[:5], lower_bound=bound)[0]
            for bound in (None, -2.0)
        ]
        assert torch.equal(*found)


# empty ones at the start and inside, one of a token
@pytest.mark.parametrize("rule", RULES)
def test_packed(kernel, rule):
    ends = [0, 0, 70, 70, 71, 150]
    x = inputs(rule, 1, 150)
    x["initial_state"] = torch.randn(5, 4, 12, 20, dtype=F64)
    ignored = {"safe_gate": True, "disable_recompute": True} if rule == "chunk_kda" else {}
    for dtype in (torch.int32, torch.int64):
        cu = torch.tensor(ends, dtype=dtype)
        if ignored:
            ignored["cu_seqlens_cpu"] = cu
        o, final = getattr(kernel, rule)(**x, cu_seqlens=cu, output_final_state=True, **ignored)
        pairs = defined(x, x["initial_state"], ends=ends)
        check(o[0], torch.cat([y for y, _ in pairs]), final, torch.stack([s[-1] for _, s in pairs]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", CHUNKS)
def test_checkpoints(kernel, rule, packed):
    """States on the way; one of them, in the middle of a prompt, is where another goes on."""
    x, ends = inputs(rule, 1 if packed else 2, 200), [0, 70, 200] if packed else None
    x["initial_state"] = torch.randn(2, 4, 12, 20, dtype=F64)
    cu = torch.tensor(ends) if packed else None
    o, final, rows = getattr(kernel, rule)(
        **x, cu_seqlens=cu, checkpoint_every=64, output_final_state=True
    )
    pairs = defined(x, x["initial_state"], ends=ends)
    check(o.flatten(0, 1), torch.cat([y for y, _ in pairs]), final,
          torch.stack([s[-1] for _, s in pairs]))  # fmt: skip
    for n, (_, states) in enumerate(pairs):
        first = ends[n] // 64 if packed else n * (200 // 64)
        for j in range((len(states) - 1) // 64):
            check(rows[first + j], states[64 * (j + 1)])


@pytest.mark.parametrize("layout", ["dense", "turned", "V first"])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_pools(kernel, rule, inplace, layout):
    """Rows of nobody and rows that are not named stay as they are; rows that are read alone may be
    of several sequences; those without an initial state are not read."""
    steps = rule in STEPS
    x = inputs(rule, 4, 3 if steps else 70)
    pool = torch.randn(6, 4, 12, 20, dtype=F64)
    rows, options = [4, 2, -1, 0], {"state_v_first": layout == "V first"}
    if not inplace:
        rows = [4, 2, 4, 0]
        options["output_all_states" if steps else "output_final_state"] = True
    kept = [True] * 4
    if not steps:
        kept[1], pool[2] = False, float("nan")
        options["has_initial_state"] = torch.tensor(kept)
    starts = [pool[row] if row >= 0 and of else torch.zeros_like(pool[0])
              for row, of in zip(rows, kept)]  # fmt: skip
    turned = (lambda y: y.mT) if layout == "V first" else lambda y: y
    states = pool.mT.contiguous().mT if layout == "turned" else turned(pool.clone()).contiguous()
    o, final = getattr(kernel, rule)(
        **{**x, "initial_state": states}, state_indices=torch.tensor(rows),
        inplace_final_state=inplace, **options,
    )  # fmt: skip
    for n, (ref, after) in enumerate(defined(x, starts)):
        if rows[n] < 0:
            assert not o[n].any()
        else:
            found = turned(final[rows[n]] if inplace else final[n])
            check(o[n], ref, found, after[-1] if inplace or not steps else after[1:])
    others = [r for r in range(6) if r not in rows or not inplace]
    assert (final is states) is inplace
    states = turned(states)
    assert torch.equal(states[others].nan_to_num(), pool[others].nan_to_num())


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", STEPS)
def test_tokens_in_a_pool(kernel, rule, dtype):
    """A null slot, an output of the caller's, and rows of their own for what comes out, of two
    sequences with one start."""
    x, limit = inputs(rule, 3, 2), 1e-12 if dtype is F64 else 4e-3
    pool, out = torch.randn(6, 4, 12, 20).to(dtype), torch.empty(3, 2, 4, 20, dtype=F64)
    before = pool.clone()
    for read, write, more in (
        ([2, 0, 1], None, {"null_index": 0, "out": out}), ([2, -1, 2], [4, 5, 0], {}),
    ):  # fmt: skip
        states = before.clone()
        given = {**x, "initial_state": states, "state_indices": torch.tensor(read)}
        if write:
            more["output_state_indices"] = torch.tensor(write)
        o, after = getattr(kernel, rule)(**given, inplace_final_state=True, **more)
        assert after is states and not o[1].any() and (o is out or write)
        pairs = defined(x, before[[2, 0, read[2]]].double())
        for n in (0, 2):
            check(o[n], pairs[n][0])
            assert relative_error(states[(write or read)[n]], pairs[n][1][-1]) < limit
        others = [row for row in range(6) if row not in ((write or read)[0], (write or read)[2])]
        assert torch.equal(states[others], before[others])
