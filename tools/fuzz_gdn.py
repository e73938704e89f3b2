"""Random small gated-delta-rule problems on the GPU against the token recurrence in fp64.

    python tools/fuzz_gdn.py --implementation hopper [--problems 10000] [--seed 0]

A problem is one call of gdn_chunk_fwd: lengths (packed or equal), heads, gates, states and pools,
layouts and strides are drawn anew each time; what a kernel is compiled for is drawn once for every
`--per-variant` problems, since each choice costs seconds of compilation. Now and then a problem is
long enough to be cut into segments. Prints the seeds of each miss, for `--repeat`, and exits with 1
if there is one.
"""

import argparse
import dataclasses
import random
import sys
import time
from pathlib import Path
from typing import List, Optional

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from conftest import submodule  # noqa: E402

GATES = ("qwen", "slow", "none", "hard", "mixed", "zero")
# Relative error of o and of the states for one sequence and head, by dtype: bf16 operands are
# rounded to 2^-9, and one head of one short sequence averages over few elements.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4}
# Below this norm a result is compared by absolute error: what is left of it is cancellation.
FLOOR = 1e-2


@dataclasses.dataclass
class Variant:
    """What the kernels are compiled for."""

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


@dataclasses.dataclass
class Problem:
    seeds: tuple  # of the variant and of the problem
    variant: Variant
    lengths: List[int]
    args: tuple  # of gdn_chunk_fwd
    states: Optional[torch.Tensor]  # [N, HV, K, V] fp64: where the sequences start
    every: int
    repeated_key: bool
    indices: Optional[List[int]]
    pool_before: Optional[torch.Tensor]


def draw_variant(rng: random.Random, implementation: str) -> Variant:
    coin = lambda p=0.5: rng.random() < p  # noqa: E731
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float16]
    if implementation != "hopper":
        dtypes.append(torch.float32)
    initial = coin(0.7)
    return Variant(
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
    )


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


def draw_problem(v: Variant, seeds: tuple, is_long: bool, device) -> Problem:
    rng = random.Random(seeds[1])
    generator = torch.Generator(device=device).manual_seed(seeds[1])
    edges = [0, 1, 2, 63, 64, 65, 127, 128, 129]
    length = lambda: rng.choice(edges) if rng.random() < 0.4 else rng.randint(1, 200)  # noqa: E731
    N = rng.randint(1, 6)
    lengths = [length() for _ in range(N)] if v.packed else [max(length(), 1)] * N
    if is_long:
        N = min(N, 2)
        lengths = [rng.randint(4096, 4500), length()][:N] if v.packed else [4096 + length()] * N
    if sum(lengths) == 0:
        lengths[0] = 1
    B, T = (1, sum(lengths)) if v.packed else (N, lengths[0])
    q, k, w, repeated = draw_tokens(v, rng, (B, T), generator, device)
    HV = v.H * v.R
    g = draw_gates(rng.choice(GATES), (B, T, HV), generator, device)
    A_log = dt_bias = None
    if v.raw_gate:
        g = torch.randn(B, T, HV, device=device, generator=generator)
        A_log = torch.rand(HV, device=device, generator=generator) * 4 - 2
        dt_bias = torch.randn(HV, device=device, generator=generator)
    beta = torch.randn(B, T, HV, device=device, generator=generator)
    if not v.sigmoid:
        beta = beta.sigmoid()
        if rng.random() < 0.2:
            beta = beta.round()
    if rng.random() < 0.5:
        beta = beta.to(v.dtype)
    states = start = indices = index_tensor = before = None
    if v.initial:
        start = torch.randn(N, HV, v.D, v.D, device=device, generator=generator).to(v.state_dtype)
        states = (start.mT if v.v_first else start).double()
    if v.pool:
        rows = rng.sample(range(N + 2), N)
        indices = [-1 if rng.random() < 0.2 else row for row in rows]
        pool = torch.randn(N + 2, HV + 1, v.D, v.D, device=device, generator=generator)
        pool = (
            pool.to(v.state_dtype)[:, :HV]
            if rng.random() < 0.3
            else pool[:, :HV].to(v.state_dtype).contiguous()
        )
        for n, row in enumerate(indices):
            if row >= 0:
                pool[row] = start[n]
        before, start = pool.clone(), pool
        index_tensor = torch.tensor(indices, dtype=v.index_dtype, device=device)
    cu = None
    if v.packed:
        cu = torch.tensor([0] + lengths, device=device).cumsum(0).to(v.index_dtype)
    every = rng.choice([64, 128]) if v.checkpoints else 0
    args = (
        q, k, w, g, beta, A_log, dt_bias, start, index_tensor, cu, v.D**-0.5, v.l2norm, v.sigmoid,
        v.neg, v.v_first, v.final, v.state_dtype, every,
    )  # fmt: skip
    return Problem(seeds, v, lengths, args, states, every, repeated, indices, before)


def units(problem: Problem):
    """The problem's sequences and value heads one under the other, in fp64:
    q, k, v [U, L, D], a, beta [U, L], S [U, D, D]; U = N HV."""
    q, k, w, g, beta, A_log, dt_bias = problem.args[:7]
    v, lengths = problem.variant, problem.lengths
    scale = problem.args[10]
    q, k, w, g, beta = (x.double() for x in (q, k, w, g, beta))
    if v.raw_gate:
        g = -A_log.double().exp() * torch.nn.functional.softplus(g + dt_bias.double())
    if v.sigmoid:
        beta = beta.sigmoid() * (2 if v.neg else 1)
    if v.l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = ((x).repeat_interleave(v.R, 2) for x in (q * scale, k))
    rows = []
    for x in (q, k, w, g.exp(), beta):
        parts = x[0].split(lengths) if v.packed else x.unbind(0)
        rows.append([part.transpose(0, 1) for part in parts])  # [HV, L, ..]
    HV = v.H * v.R
    S = problem.states
    if S is None:
        S = q.new_zeros(len(lengths), HV, v.D, v.D)
    return rows, S.flatten(0, 1)


def recurrence(problems: List[Problem]):
    """Token by token, all units of all problems side by side: o per problem and sequence
    [HV, L, D], the state after every 64 tokens and after the last, [HV, D, D]."""
    all_rows, all_states = zip(*(units(p) for p in problems))
    longest = max(max(p.lengths) for p in problems)

    def stack(i):
        parts = [part for rows in all_rows for part in rows[i]]
        out = parts[0].new_zeros(sum(p.shape[0] for p in parts), longest, *parts[0].shape[2:])
        at = 0
        for part in parts:
            out[at : at + part.shape[0], : part.shape[1]] = part
            at += part.shape[0]
        return out

    q, k, v, a, beta = (stack(i) for i in range(5))
    past = torch.cat([
        torch.full((p.variant.H * p.variant.R,), n, device=q.device)
        for p in problems for n in p.lengths
    ])  # fmt: skip
    a = torch.where(torch.arange(longest, device=q.device) < past[:, None], a, 1.0)  # then hold
    S = torch.cat(all_states)  # [U, D, D]
    o = torch.zeros_like(v)
    kept = []
    for t in range(longest):
        S = S * a[:, t, None, None]
        d = beta[:, t, None] * (v[:, t] - (k[:, t, None] @ S)[:, 0])
        S = torch.baddbmm(S, k[:, t, :, None], d[:, None])
        o[:, t] = (q[:, t, None] @ S)[:, 0]
        if (t + 1) % 64 == 0:
            kept.append(S)
    return o, S, kept


def misses(x: torch.Tensor, ref: torch.Tensor, tolerance: float) -> bool:
    """x, ref [HV, ...]: whether a head is off, a NaN included."""
    x, ref = x.double().flatten(1), ref.flatten(1)
    limit = tolerance * ref.norm(dim=1).clamp(min=FLOOR * ref.shape[1] ** 0.5)
    return not bool(((x - ref).norm(dim=1) <= limit).all())


def compare(problem: Problem, out, o_ref, S_ref, kept, at: int) -> Optional[str]:
    """What is wrong with one result, or None. at: first unit of the problem."""
    o, final, checkpoints = out
    v, HV = problem.variant, problem.variant.H * problem.variant.R
    # With one key the state is one row, the sum of a chunk's 64 writes, which all but cancel: the
    # roundings of 64 terms remain in it.
    tolerance = TOLERANCE[v.dtype] * (4 if problem.repeated_key else 1)
    state_tolerance = max(tolerance, TOLERANCE[v.state_dtype])
    start = 0
    for n, length in enumerate(problem.lengths):
        mine = slice(at + n * HV, at + (n + 1) * HV)
        mine_o = o[0, start : start + length] if v.packed else o[n]
        mine_o = mine_o.transpose(0, 1)
        index = problem.indices[n] if problem.indices else n
        if index < 0:
            if length and bool((mine_o != 0).any()):
                return f"o of skipped sequence {n}"
        else:
            if length and misses(mine_o, o_ref[mine, :length], tolerance):
                return f"o of sequence {n}"
            if final is not None:
                S = final[index].mT if v.v_first else final[index]
                if misses(S, S_ref[mine], state_tolerance):
                    return f"final state of sequence {n}"
            for j in range(length // problem.every if problem.every else 0):
                first = start // problem.every if v.packed else n * (length // problem.every)
                S = checkpoints[first + j].mT if v.v_first else checkpoints[first + j]
                if misses(S, kept[(j + 1) * problem.every // 64 - 1][mine], state_tolerance):
                    return f"checkpoint {j} of sequence {n}"
        start += length
    if problem.indices:
        others = [i for i in range(final.shape[0]) if i not in problem.indices]
        if not torch.equal(final[others], problem.pool_before[others]):
            return "a pool row that is not in use"
    return None


def run_group(module, problems: List[Problem]) -> int:
    results, bad = [], 0
    for p in problems:
        poison = torch.full_like(p.args[2], float("nan"))
        del poison  # the allocator hands its memory to o
        results.append(module.gdn_chunk_fwd(*p.args))
    o_ref, S_ref, kept = recurrence(problems)
    at = 0
    for p, out in zip(problems, results):
        wrong = compare(p, out, o_ref, S_ref, kept, at)
        if wrong:
            bad += 1
            seeds = " ".join(map(str, p.seeds))
            print(f"MISS --repeat {seeds}: {wrong}; {p.lengths} {p.variant}", flush=True)
        at += len(p.lengths) * p.variant.H * p.variant.R
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementation", choices=["hopper", "portable"], required=True)
    parser.add_argument("--problems", type=int, default=10000)
    parser.add_argument("--per-variant", type=int, default=500)
    parser.add_argument("--group", type=int, default=50, help="problems referenced side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--long",
        type=int,
        default=20,
        help="four long problems every so many groups; --long 1 with --repeat: it was one of these",
    )
    parser.add_argument("--repeat", type=int, nargs=2, help="the two seeds of a miss")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    module = submodule(f"{options.implementation}.gdn")
    begin, done, bad, refused = time.time(), 0, 0, 0

    def group(variant_seed, seeds, is_long):
        variant = draw_variant(random.Random(variant_seed), options.implementation)
        problems = [
            draw_problem(variant, (variant_seed, s), is_long, options.device) for s in seeds
        ]
        taken = [p for p in problems if module.supports_gdn_chunk_fwd(*p.args)]
        return run_group(module, taken) if taken else 0, len(problems) - len(taken)

    if options.repeat:
        return group(options.repeat[0], options.repeat[1:], options.long == 1)[0]
    while done < options.problems:
        variant_seed = options.seed + done // options.per_variant
        is_long = options.long > 0 and done % (options.group * options.long) == 0
        size = 4 if is_long else options.group - done % options.group
        size = min(size, options.problems - done)
        first = (options.seed << 32) + done
        missed, skipped = group(variant_seed, range(first, first + size), is_long)
        bad, refused, done = bad + missed, refused + skipped, done + size
        if done % options.per_variant == 0:
            print(f"{done} problems, {bad} misses, {time.time() - begin:.0f} s", flush=True)
    print(
        f"{options.implementation}, seed {options.seed}: {done} problems ({refused} refused), "
        f"{bad} misses, {time.time() - begin:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
