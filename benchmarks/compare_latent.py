"""Latent attention of one token over a cache of latents, beside what transformers computes.

    python benchmarks/compare_latent.py [--json FILE]      on a GPU

The peer sends the whole cache through kv_b_proj at every token and calls SDPA, as transformers
does. Times are by CUDA graph, over as many caches in turn as L2 does not hold. The floor is the
time that the latents and the weight take at 4.28 TB/s.
"""

import itertools
from functools import partial
from typing import Iterator

import torch
import torch.nn.functional as F
from kernel_time import graph_ms
from runner import SECONDS, relative_error, run

MODELS = {  # heads, C, N, R, V
    "GLM-4.7-Flash": (20, 512, 192, 64, 256),
    "DeepSeek-V2-Lite": (16, 512, 128, 64, 128),
    "Kimi Linear": (32, 512, 128, 64, 128),
    "DeepSeek-V3": (128, 512, 128, 64, 128),
}
SIZES = ((1, 1024), (1, 8192), (1, 32768), (16, 8192), (64, 8192))  # batch, slots
L2, MOST = 200 << 20, 20 << 30  # bytes: of all caches of a call; of the peer's keys and values
SPEED = 4.28e6  # bytes a microsecond


def normal(*shape) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def expanded(q, latents, rotated, weight, N: int, mask) -> torch.Tensor:
    """The whole cache through the projection, keys in a tensor of their own, and SDPA."""
    (B, _, H, D), S = q.shape, latents.shape[2]
    kv = F.linear(latents, weight).view(B, S, H, -1).transpose(1, 2)
    k = kv.new_empty(B, H, S, D)
    k[..., :N].copy_(kv[..., :N])
    k[..., N:].copy_(rotated.expand(-1, H, -1, -1))
    v = kv[..., N:]
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, scale=D**-0.5)
    return o.transpose(1, 2)


def errors(package, sizes: tuple) -> dict:
    """Relative to fp64, of two sequences with padding and slots that are not filled."""
    (H, C, N, R, V), B, S, filled = sizes, 2, 1000, 937
    q, weight = 4 * normal(B, 1, H, N + R), normal(H * (N + V), C) * C**-0.5
    latents, rotated = normal(B, 1, S, C), normal(B, 1, S, R)
    mask = torch.ones(B, 1, 1, S, dtype=torch.bool, device="cuda")
    mask[1, ..., :111] = mask[..., filled:] = False
    call = partial(package.latent_attention_with_kvcache, qk_nope_head_dim=N, attention_mask=mask)
    wide = (x.double() for x in (q, latents, rotated, weight))
    right = call(*wide, torch.tensor(filled, device="cuda"))
    found = {
        "ours": call(q, latents, rotated, weight, torch.tensor(filled, device="cuda")),
        "expanded": expanded(q, latents, rotated, weight, N, mask),
    }
    return {name: relative_error(y, right) for name, y in found.items()}


@torch.no_grad()
def rows(package, options) -> Iterator[dict]:
    for (name, sizes), (B, S) in itertools.product(MODELS.items(), SIZES):
        H, C, N, R, V = sizes
        what = f"{name}, {B} x {S}"
        q, weight = normal(B, 1, H, N + R), normal(H * (N + V), C) * C**-0.5
        mask = torch.ones(B, 1, 1, S, dtype=torch.bool, device="cuda")
        length, bytes_of_one = torch.tensor(S, device="cuda"), B * S * (C + R) * 2
        count = max(1, min(16, -(-L2 // bytes_of_one)))
        caches = [(normal(B, 1, S, C), normal(B, 1, S, R)) for _ in range(count)]
        ours = partial(
            package.latent_attention_with_kvcache, qk_nope_head_dim=N, attention_mask=mask
        )
        us = {"ours": graph_ms([partial(ours, q, *one, weight, length) for one in caches]) * 1e3}
        if B * S * H * (2 * N + V + R) * 2 < MOST:
            calls = [partial(expanded, q, *one, weight, N, mask) for one in caches[:2]]
            us["expanded"] = graph_ms(calls) * 1e3
        floor = (bytes_of_one + weight.numel() * 2) / SPEED
        row = {"what": what, "us": us, "floor_us": floor}
        if (B, S) == SIZES[0]:
            row["error"] = errors(package, sizes)
        yield row


if __name__ == "__main__":
    run(__doc__, "latent_attention", rows, SECONDS)
