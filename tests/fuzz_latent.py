"""Random problems of latent attention of a few tokens on the GPU, against plain torch in fp64.

    python tests/fuzz_latent.py [--seconds 150] [--seed 0] [--workers 8]

A variant (heads, widths, tokens, dtype, mask, rotary embedding, implementation) is compiled once,
and called with several batches, lengths, numbers of slots, strides and numbers of parts: the step
over a static cache, and attention alone over a cache that grows or has a length for each row. Slots
that are not filled hold NaN. Prints what is off, and exits with 1 if anything is.
"""

import argparse
import concurrent.futures
import itertools
import multiprocessing
import random
import sys
import time

import torch
from conftest import load_package, relative_error, submodule
from fp8_problems import quantised_weight

TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}  # two roundings, of few elements


def normal(draw: random.Random, *shape, dtype, scale=1.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(draw.randrange(2**40))
    return (scale * torch.randn(*shape, device="cuda", generator=generator)).to(dtype)


def mask_of(draw, kind, B, T, S, dtype):
    if kind is None:
        return None
    rows, tokens = draw.choice([1, B]), draw.choice([1, T])
    seen = normal(draw, rows, 1, tokens, S, dtype=torch.float32) > -0.5
    if kind == "bool":
        return seen
    return normal(draw, rows, 1, tokens, S, dtype=dtype).masked_fill(~seen, -torch.inf)


def spread(draw, x: torch.Tensor) -> torch.Tensor:
    """x, now and then as a part of a larger cache, whose rest is NaN."""
    if draw.random() < 0.7:
        return x
    more = draw.choice([16, 64])
    wide = x.new_full((*x.shape[:2], x.shape[2] + more, x.shape[3]), float("nan"))
    wide[:, :, : x.shape[2]] = x
    return wide[:, :, : x.shape[2]]


def wide(tensors: tuple, *kept: torch.Tensor) -> tuple:
    """In fp64, but for those that are kept."""
    return tuple(
        x if x is None or any(x is other for other in kept)
        else x.double() if x.is_floating_point() else x.clone()
        for x in tensors
    )  # fmt: skip


def variant_of(seed: int, calls: int) -> list:
    """What is off in the calls of one variant."""
    draw, found = random.Random(seed), []
    load_package()
    device = submodule("runtime.device")
    ops, dispatch = submodule("attention.ops"), submodule("runtime.dispatch")
    dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    H, T = draw.choice([1, 3, 5, 16, 20, 32, 40, 64, 128]), draw.choice([1, 1, 1, 2, 3, 5, 8])
    C, R = draw.choice([16, 64, 128, 256, 512, 512]), draw.choice([16, 32, 64, 64, 128])
    N, V = draw.choice([16, 24, 64, 128, 192, 200]), draw.choice([8, 16, 40, 64, 128, 256])
    rotary, kind = (
        draw.choice([None, "halves", "pairs", "pairs_to_halves"]),
        draw.choice([None, "bool", "bool", "float"]),
    )
    folder = "portable" if C < 128 else draw.choice(["hopper", "hopper", "portable"])
    what = f"seed {seed}: {folder} {dtype} H {H} T {T} C {C} R {R} N {N} V {V} {rotary} {kind}"
    count = device.multiprocessor_count
    for i in range(calls):
        B, S = (
            draw.choice([1, 2, 3, 7, 16, 33]),
            T + draw.choice([0, 1, 20, 63, 64, 200, 1000, 3001]),
        )
        filled = draw.choice([0, (S - T) // 2, S - T, draw.randint(0, S - T)])
        sms = draw.choice([1, 7, 132, 132])
        device.multiprocessor_count = lambda *_, n=sms: n
        q, kv = normal(draw, B, T, H, N + R, dtype=dtype, scale=2), None
        kv = normal(draw, B, T, C + R + 8, dtype=dtype)[..., 8:]
        if draw.random() < 0.3:
            q = torch.cat([q.flatten(2), kv], -1)[..., : H * (N + R)].view(B, T, H, -1)
        weight, scales = normal(draw, H * (N + V), C, dtype=dtype, scale=C**-0.5), None
        if N % 16 == V % 16 == 0 and draw.random() < 0.3:
            weight, scales = quantised_weight(weight, draw.random() < 0.5)
        c, r = (spread(draw, normal(draw, B, 1, S, n, dtype=dtype)) for n in (C, R))
        mask, scale = mask_of(draw, kind, B, T, S, dtype), (N + R) ** -0.5
        name = f"{what} B {B} S {S} filled {filled} parts of {sms}"
        try:
            with dispatch.force(folder), dispatch.served() as record:
                if i % 2:
                    c[:, :, filled:] = r[:, :, filled:] = float("nan")
                    P = R if rotary == "halves" else R // 2
                    angle = normal(draw, draw.choice([1, B]), T, P, dtype=torch.float32)
                    turn = (
                        (angle.cos().to(dtype), angle.sin().to(dtype)) if rotary else (None, None)
                    )
                    tensors = (q, kv, normal(draw, C, dtype=dtype), *turn, c, r, weight,
                               scales, torch.tensor(filled, device="cuda"), mask)  # fmt: skip
                    options = (N, scale, 1e-6, rotary or "halves")
                    exact = wide(tensors, weight, scales)
                    got = ops.LATENT_STEP(tensors, options)
                    right = submodule("attention.reference").latent_step(*exact, *options)
                    caches = [(a[:, :, : filled + T], b[:, :, : filled + T]) for a, b in
                              ((tensors[5], exact[5]), (tensors[6], exact[6]))]  # fmt: skip
                    assert int(tensors[9]) == filled + T, "the length"
                    for a, b in caches:
                        assert relative_error(a, b) < TOLERANCE[dtype], "what the cache holds"
                    assert c[:, :, filled + T :].isnan().all(), "slots past the length are written"
                else:
                    lengths = draw.choice([None, "one", "each"])
                    if lengths == "one":
                        lengths = torch.tensor(filled + T, device="cuda")
                    elif lengths == "each":
                        lengths = torch.tensor(
                            [draw.randint(0, S) for _ in range(B)], device="cuda"
                        )
                    if lengths is not None:
                        past = torch.arange(S, device="cuda") >= lengths.view(-1, 1)
                        for x in (c, r):
                            x.masked_fill_(past[:, None, :, None], float("nan"))
                    tensors = (q, c, r, weight, scales, lengths, mask)
                    got = ops.LATENT_ATTENTION(tensors, (N, scale))
                    right = submodule("attention.reference").latent_attention(
                        *wide(tensors, weight, scales), N, scale
                    )
            by = set(itertools.chain(*record.values()))
            assert folder == "hopper" or by == {"portable"}, by
            error = relative_error(got, right) if right.any() else float(got.abs().max())
            if not error < TOLERANCE[dtype]:
                found.append(f"{name}: off by {error}")
        except Exception as reason:
            found.append(f"{name}: {type(reason).__name__}: {str(reason)[:200]}")
    device.multiprocessor_count = count
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--calls", type=int, default=24, help="of a variant")
    options = parser.parse_args()
    start, seeds, missed, done = time.time(), itertools.count(options.seed), [], 0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        running = {
            pool.submit(variant_of, next(seeds), options.calls) for _ in range(options.workers)
        }
        while running:
            ended, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            for each in ended:
                done += 1
                for line in each.result():
                    missed.append(line)
                    print(line, flush=True)
            if time.time() - start < options.seconds:
                running |= {pool.submit(variant_of, next(seeds), options.calls) for _ in ended}
    print(f"{done} variants of {options.calls} calls, {len(missed)} off")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
