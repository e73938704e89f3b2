"""NVIDIA's compute-sanitizer over latent attention of a few tokens, and the cache write before it.

    python tests/sanitize_latent.py memcheck|racecheck|synccheck [CASE ...]

Small caches in memory of their own, so that a slot read past the end is one past an allocation;
lengths that end within a block, at one and at nothing; 16, 32 and 64 rows of queries a program.
"""

import sys

import torch
from conftest import load_package
from sanitize_gdn import main


def call(B, T, S, filled, H=20, N=192, R=64, C=512, V=256, mask=torch.bool, cached=True):
    kernel = load_package()

    def make(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, kv, weight = make(B, T, H, N + R), make(B, T, C + R), make(H * (N + V), C) * C**-0.5
    angle = torch.rand(1, T, R // 2, device="cuda").bfloat16()
    latents, rotated = make(B, 1, S, C), make(B, 1, S, R)
    length = torch.tensor(filled, device="cuda")
    caches = {"latent_cache": latents, "rotated_cache": rotated}
    kernel.fused_latent_norm_rope(
        q, kv, torch.ones_like(kv[0, 0, :C]), angle.cos(), angle.sin(), rotary="pairs_to_halves",
        **({**caches, "cache_position": length.reshape(-1)[0] - T} if cached else {}),
    )  # fmt: skip
    if mask is not None:
        mask = torch.rand(B, 1, T, S, device="cuda").round().to(mask)
    out = kernel.latent_attention_with_kvcache(
        q, latents, rotated, weight, length, qk_nope_head_dim=N, attention_mask=mask
    )
    torch.cuda.synchronize()
    assert out.isfinite().all()


SMALL = {"H": 40, "N": 64, "R": 32, "C": 256, "V": 64}  # MiniCPM3's heads
CASES = {
    "32 rows": lambda: call(2, 1, 300, 237),
    "32 rows, each its length": lambda: call(3, 1, 300, [64, 0, 299], cached=False, mask=None),
    "16 rows": lambda: call(1, 1, 1000, 999, H=16, N=128, V=128),
    "64 rows, a mask that is added": lambda: call(1, 3, 500, 450, mask=torch.float32),
    "64 rows, none": lambda: call(2, 2, 700, 641, **SMALL, mask=None),
    "one slot": lambda: call(2, 1, 1, 1),
}


if __name__ == "__main__":
    sys.exit(main(__file__, CASES))
