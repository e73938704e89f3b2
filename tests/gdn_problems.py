"""Calls of gdn_chunk_fwd and of kda_chunk_fwd: of given inputs, and random ones as
tests/fuzz_gdn.py draws them."""

import dataclasses
import random
from typing import List, Optional

import kda_problems
import pytest
import torch
from conftest import submodule
from interpreter import compiled

calls = submodule("gdn.call")

RULES = ("gdn", "kda")
GATES = ("qwen", "slow", "none", "hard", "mixed", "zero")


def on_gpu(test):
    """Marks a test of compiled kernels."""
    return pytest.mark.gpu(compiled(test))


@dataclasses.dataclass
class Variant:
    """Parameters for which the kernels are compiled."""

    dtype: torch.dtype
    state_dtype: torch.dtype
    index_dtype: torch.dtype
    H: int
    R: int
    D: int
    packed: bool
    initial: bool
    pool: bool
    v_first: bool
    final: bool
    l2norm: bool
    sigmoid: bool
    neg: bool
    raw_gate: bool
    checkpoints: bool
    many: bool  # sequences enough for two state warpgroups a CTA
    channels: bool = False  # a gate for each channel of the keys: Kimi Delta Attention
    lower_bound: Optional[float] = None  # of raw gates of channels


@dataclasses.dataclass
class Problem:
    variant: Variant
    lengths: List[int]
    call: tuple  # a GdnCall
    states: Optional[torch.Tensor]  # [N, HV, K, V] fp64: where the sequences start
    every: int
    repeated_key: bool
    whole: bool  # beta is 0 or 1
    poisoned: int  # the sequence whose inputs are NaN, or -1
    rows: List[int]  # where the final states go; -1: a skipped sequence
    pool_before: Optional[torch.Tensor]


def draw_variant(rng: random.Random, implementation: str, rule: str = "gdn") -> Variant:
    coin = lambda p=0.5: rng.random() < p  # noqa: E731
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float16]
    if implementation != "hopper":
        dtypes.append(torch.float32)
    initial = coin(0.7)
    variant = Variant(
        dtype=rng.choice(dtypes),
        state_dtype=torch.bfloat16 if coin(0.3) else torch.float32,
        index_dtype=torch.int64 if coin(0.3) else torch.int32,
        H=rng.choice([1, 2, 3]),
        R=rng.choice([1, 2, 3, 4]),
        D=128 if implementation == "hopper" else rng.choice([128, 64, 100]),
        packed=coin(0.7),
        initial=initial,
        pool=initial and coin(),
        v_first=coin(),
        final=coin(0.9),
        l2norm=coin(0.8),
        sigmoid=coin(),
        neg=coin(0.2),
        raw_gate=coin(0.4),
        checkpoints=coin(0.3),
        many=coin(0.3),
    )
    if rule == "kda":
        variant.channels, variant.lower_bound = True, rng.choice([None, -5.0, -0.5])
    return variant


def draw_gates(kind: str, shape, generator, device) -> torch.Tensor:
    """g: natural-log decay [B, T, HV]."""
    n = torch.randn(shape, device=device, generator=generator)
    if kind == "qwen":
        return -torch.linspace(0.01, 16, shape[2], device=device) * torch.nn.functional.softplus(n)
    if kind == "hard":
        return torch.full(shape, -30.0, device=device)
    if kind == "zero":
        return torch.zeros(shape, device=device)
    g = torch.nn.functional.logsigmoid(n + 4.0)
    if kind == "none":
        return g * 0.01
    if kind == "mixed":
        g[..., ::2] *= 0.001
    return g


def draw_tokens(v: Variant, rng, shape, generator, device):
    """q, k, v: dense, views of one packed tensor, or views with padded heads."""
    B, T = shape
    HV = v.H * v.R
    rn = lambda *s: torch.randn(*s, device=device, generator=generator).to(v.dtype)  # noqa: E731
    form = rng.choice(["dense", "packed", "padded"])
    if form == "packed":
        x = rn(B, T, (2 * v.H + HV) * v.D).split([v.H * v.D, v.H * v.D, HV * v.D], -1)
        q, k, w = (y.unflatten(2, (-1, v.D)) for y in x)
    elif form == "padded":
        q, k, w = (rn(B, T, h, v.D + 8)[..., : v.D] for h in (v.H, v.H, HV))
    else:
        q, k, w = (rn(B, T, h, v.D) for h in (v.H, v.H, HV))
    if not v.l2norm:  # unit keys in place, so that the strides stay
        k.div_(k.float().norm(dim=-1, keepdim=True).clamp(min=1e-3).to(v.dtype))
    repeated = rng.random() < 0.2
    if repeated:
        k[:] = k[:, :1].clone()
    return q, k, w, repeated


def draw_lengths(v: Variant, rng, is_long: bool) -> List[int]:
    edges = [0, 1, 2, 63, 64, 65, 127, 128, 129]
    length = lambda: rng.choice(edges) if rng.random() < 0.4 else rng.randint(1, 200)  # noqa: E731
    N = rng.randint(1, 6) + (66 // (v.H * v.R) if v.many else 0)
    lengths = [length() for _ in range(N)] if v.packed else [max(length(), 1)] * N
    if is_long:
        N = min(N, 3)
        lengths = [rng.randint(4096, 9000), length(), 4096 + length()][:N]
        lengths = lengths if v.packed else [4096 + length()] * min(N, 2)
    if sum(lengths) == 0:
        lengths[0] = 1
    return lengths


def draw_states(v: Variant, rng, N: int, generator, device):
    """(initial_state, state_indices) of the call, rows of the final states, states as [N, HV, K, V]
    fp64, and the pool as it was."""
    HV = v.H * v.R
    if not v.initial:
        return None, None, list(range(N)), None, None
    start = torch.randn(N, HV, v.D, v.D, device=device, generator=generator).to(v.state_dtype)
    states = (start.mT if v.v_first else start).double()
    if not v.pool:
        return start, None, list(range(N)), states, None
    rows = [-1 if rng.random() < 0.2 else row for row in rng.sample(range(N + 2), N)]
    pool = torch.randn(N + 2, HV + 1, v.D, v.D, device=device, generator=generator)
    pool = pool.to(v.state_dtype)[:, :HV]
    if rng.random() < 0.7:
        pool = pool.contiguous()
    for n, row in enumerate(rows):
        if row >= 0:
            pool[row] = start[n]
    indices = torch.tensor(rows, dtype=v.index_dtype, device=device)
    return pool, indices, rows, states, pool.clone()


def draw_problem(v: Variant, seed: int, is_long: bool, device) -> Problem:
    rng = random.Random(seed)
    generator = torch.Generator(device=device).manual_seed(seed)
    lengths = draw_lengths(v, rng, is_long)
    N, HV = len(lengths), v.H * v.R
    B, T = (1, sum(lengths)) if v.packed else (N, lengths[0])
    q, k, w, repeated = draw_tokens(v, rng, (B, T), generator, device)
    if v.channels:
        kind = rng.choice(kda_problems.GATES)
        g = kda_problems.draw_gates(kind, (B, T, HV, v.D), generator, device)
    else:
        g = draw_gates(rng.choice(GATES), (B, T, HV), generator, device)
    A_log = dt_bias = None
    if v.raw_gate:
        g = torch.randn(g.shape, device=device, generator=generator)
        A_log = torch.rand(HV, device=device, generator=generator) * 4 - 2
        dt_bias = torch.randn(HV * g[0, 0, 0].numel(), device=device, generator=generator)
    beta = torch.randn(B, T, HV, device=device, generator=generator)
    whole = False
    if not v.sigmoid:
        beta = beta.sigmoid()
        whole = rng.random() < 0.2
        beta = beta.round() if whole else beta
    if rng.random() < 0.5:
        beta = beta.to(v.dtype)
    initial, indices, rows, states, before = draw_states(v, rng, N, generator, device)
    cu = torch.tensor([0] + lengths).cumsum(0).to(device, v.index_dtype) if v.packed else None
    poisoned = rng.randrange(N) if N > 1 and rng.random() < 0.2 else -1
    if poisoned >= 0:
        start = sum(lengths[:poisoned])
        for x in (q, k, w, g, beta):
            mine = x[0, start : start + lengths[poisoned]] if v.packed else x[poisoned]
            mine.fill_(float("nan"))
    every = rng.choice([64, 128]) if v.checkpoints else 0
    given = (v.D**-0.5, v.l2norm, v.sigmoid, v.neg, v.v_first, v.final, v.state_dtype, every)
    tensors = (q, k, w, g, beta, A_log, dt_bias, initial, indices, cu)
    if v.channels:
        bound = v.lower_bound if v.raw_gate else None
        call = kda_problems.calls.KdaCall(*tensors, calls.GdnOptions(*given, bound))
    else:
        call = calls.GdnCall(*tensors, calls.GdnOptions(*given))
    return Problem(v, lengths, call, states, every, repeated, whole, poisoned, rows, before)


def blocks_of(implementation: str, call) -> tuple:
    """Tb, P, F and decay by the prepare kernel of an implementation."""
    module = submodule("gdn.hopper.plan" if implementation == "hopper" else "gdn.portable.prepare")
    tensors = (call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias, call.cu_seqlens)
    return module.Prepare(call)(*tensors)


def arguments(x, **options):
    """The call of gdn_chunk_fwd for inputs x by name; what is not given is off."""
    values = {"scale": x["q"].shape[-1] ** -0.5, "output_final_state": True, **x, **options}
    given = {name: values.pop(name) for name in calls.GdnOptions._fields if name in values}
    tensors = dict.fromkeys(calls.GdnCall._fields)
    return calls.GdnCall(**{**tensors, **values, "options": calls.GdnOptions(**given)})
