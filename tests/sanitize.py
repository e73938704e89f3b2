"""NVIDIA's compute-sanitizer over kernels of small calls, in every form that sizes choose.

    python tests/sanitize.py memcheck|racecheck|synccheck [CASE ...]

The Hopper path of GDN prefill and Kimi Delta Attention: packed sequences with ragged tails and
empty ones, pools with skipped rows, checkpoints, one and two state warpgroups, segments
(docs/gdn_hopper.md has the findings). The routed experts and the router: sizes that no tile
divides, entries held elsewhere, experts without rows. Latent attention of a few tokens and the
cache write before it: caches in memory of their own, so that a slot read past the end is one past
an allocation; lengths that end within a block, at one and at nothing.
"""

import argparse
import functools
import shutil
import subprocess
import sys

import torch
from conftest import load_package, submodule
from fp8_problems import quantised_weight
from in_tree import parse_on_gpu

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck", "run")

PROCESSORS = {1: 10**9, 2: 0}  # by state warpgroups: what the launcher must believe


def inputs(lengths, H, HV, pool, packed, channels=False):
    """Tensors of a chunked call by name, and of its states."""
    count, device = len(lengths), "cuda"
    B, T = (1, sum(lengths)) if packed else (count, lengths[0])
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device) if packed else None
    q, k, v = (torch.randn(B, T, n, 128, device=device).bfloat16() for n in (H, H, HV))
    g = -torch.rand(B, T, HV, *[128] * channels, device=device)
    beta = torch.rand(B, T, HV, device=device)
    rows = [count, -1, *range(count)][:count]
    state = torch.randn(count + 1 if pool else count, HV, 128, 128, device=device)
    indices = torch.tensor(rows, device=device) if pool else None
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}
    return {**x, "state_indices": indices, "cu_seqlens": cu}


def call(lengths, W=1, H=1, HV=2, pool=False, every=0, v_first=False, cut=False, packed=True):
    gdn, gdn_plan = submodule("gdn.hopper.chunk"), submodule("gdn.hopper.plan")
    x = inputs(lengths, H, HV, pool, packed)
    chip = gdn_plan.device
    segments, processors = gdn_plan.count_slots, chip.multiprocessor_count
    if not cut:
        gdn_plan.count_slots = lambda N, *_: (1, N)
    chip.multiprocessor_count = lambda index: processors(index) if cut else PROCESSORS[W]
    calls = submodule("gdn.call")
    options = calls.GdnOptions(
        128**-0.5, use_qk_l2norm=True, state_v_first=v_first, output_final_state=True,
        checkpoint_every=every,
    )  # fmt: skip
    made = calls.GdnCall(**x, A_log=None, dt_bias=None, options=options)
    o, final, *_ = gdn.prepare_gdn_chunk_fwd(made)(*made.tensors)
    torch.cuda.synchronize()
    gdn_plan.count_slots, chip.multiprocessor_count = segments, processors
    assert torch.isfinite(o).all() and torch.isfinite(final).all()


def channels(lengths, H=2, HV=2, pool=False, every=0, v_first=False, packed=True, grad=False):
    """Kimi Delta Attention by its public function, and its gradient."""
    x = inputs(lengths, H, HV, pool, packed, True)
    leaves = [x[name].requires_grad_(grad) for name in ("q", "k", "v", "g", "beta")]
    o, final, *_ = load_package().chunk_kda(
        **x, use_qk_l2norm_in_kernel=True, output_final_state=True, checkpoint_every=every,
        state_v_first=v_first,
    )  # fmt: skip
    found = (o, final)
    if grad:
        found += torch.autograd.grad(o.float().square().sum(), leaves)
    torch.cuda.synchronize()
    assert all(torch.isfinite(y).all() for y in found)


def channel_tokens(T=1, v_first=False):
    """Tokens of three sequences in a pool, whose second row is a null slot."""
    x = inputs([T] * 3, 2, 2, True, False, True)
    x["state_indices"] = torch.tensor([2, -1, 0], device="cuda")
    o, pool = load_package().fused_recurrent_kda(
        **x, use_qk_l2norm_in_kernel=True, inplace_final_state=True, state_v_first=v_first
    )
    torch.cuda.synchronize()
    assert torch.isfinite(o).all() and torch.isfinite(pool).all() and not o[1].any()


def experts(T, K, E, H=136, I=72, training=True, gpt_oss=False, **options):  # noqa: E741
    kernel, make = load_package(), functools.partial(torch.randn, device="cuda")
    x, weights = make(T, H).bfloat16(), torch.rand(T, K, device="cuda")
    w_gate_up, w_down = make(E, 2 * I, H).bfloat16() * 0.1, make(E, H, I).bfloat16() * 0.1
    ids = torch.randint(1, E, (T, K), device="cuda")  # nothing goes to expert 0
    ids[::3, 0] = E
    ids[T // 2] = -1
    if gpt_oss:
        w_gate_up, w_down = (w.mT.contiguous().mT.detach() for w in (w_gate_up, w_down))
        options |= {"interleaved": True, "activation": "swigluoai", "limit": 7.0}
        biases = [make(E, n).bfloat16().requires_grad_(training) for n in (2 * I, H)]
        options |= dict(zip(("b_gate_up", "b_down"), biases))
    leaves = [t.requires_grad_(training) for t in (x, w_gate_up, w_down, weights)]
    out = kernel.fused_experts(x, w_gate_up, w_down, ids, weights, **options)
    if training:
        out.sum().backward()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)
    torch.cuda.synchronize()
    assert out.isfinite().all()


def router(T, E, K):
    logits = torch.randn(T, E, device="cuda").bfloat16().requires_grad_()
    weights, _ = load_package().fused_topk(logits, K)
    weights.sum().backward()
    torch.cuda.synchronize()
    assert logits.grad.isfinite().all()


def latent(
    B, T, S, filled, H=20, N=192, R=64, C=512, V=256, mask=torch.bool, cached=True, fp8=False
):
    kernel = load_package()

    def make(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, kv, weight = make(B, T, H, N + R), make(B, T, C + R), make(H * (N + V), C) * C**-0.5
    weight, scales = quantised_weight(weight) if fp8 else (weight, None)
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
        q, latents, rotated, weight, length, qk_nope_head_dim=N, attention_mask=mask,
        weight_scale=scales,
    )  # fmt: skip
    if cached:  # the same by the operation of layers
        step = submodule("attention.ops").LATENT_STEP
        tensors = (q, kv, torch.ones_like(kv[0, 0, :C]), angle.cos(), angle.sin(), latents, rotated,
                   weight, scales, length - T, mask)  # fmt: skip
        assert step(tensors, (N, (N + R) ** -0.5, 1e-6, "pairs_to_halves")).isfinite().all()
    torch.cuda.synchronize()
    assert out.isfinite().all()


SMALL = {"H": 40, "N": 64, "R": 32, "C": 256, "V": 64}  # MiniCPM3's heads
CASES = {
    "gdn, packed, pool": lambda: call([70, 0, 1, 130], pool=True),
    "gdn, packed, pool, W=2": lambda: call([70, 0, 1, 130], 2, pool=True, v_first=True),
    "gdn, checkpoints": lambda: call([70, 0, 1, 130], every=64),
    "gdn, checkpoints, W=2": lambda: call([70, 0, 1, 130], 2, every=64, v_first=True),
    "gdn, equal": lambda: call([100, 100], packed=False, v_first=True),
    "gdn, equal, W=2": lambda: call([200, 200], 2, packed=False),
    "gdn, segments": lambda: call([4200], packed=False, HV=1, cut=True),
    "gdn, segments, packed, pool": lambda: call([4200, 70, 4100], HV=1, cut=True, pool=True),
    "kda, packed, pool": lambda: channels([70, 0, 1, 130], pool=True, v_first=True),
    "kda, checkpoints": lambda: channels([70, 0, 1, 130], H=1, every=64),
    "kda, gradient": lambda: channels([70, 0, 1, 130], H=1, grad=True),
    "kda, gradient, equal": lambda: channels([100, 100], packed=False, v_first=True, grad=True),
    "kda, tokens": channel_tokens,
    "kda, tokens, three": lambda: channel_tokens(3, v_first=True),
    "experts, few": lambda: experts(3, 2, 5, training=False),
    "experts, tiles of 16": lambda: experts(10, 2, 9),
    "experts, tiles of 32": lambda: experts(50, 2, 9),
    "experts, tiles of 64": lambda: experts(80, 2, 5),
    "experts, tiles of 128": lambda: experts(300, 2, 4),
    "experts, whole tiles, one expert": lambda: experts(700, 1, 2, H=256, I=128),
    "experts, recompute": lambda: experts(300, 2, 4, recompute=True),
    "experts, clamped gates": lambda: experts(300, 2, 4, activation="swigluoai", limit=7.0),
    "gpt-oss, few": lambda: experts(3, 2, 5, gpt_oss=True, training=False),
    "gpt-oss, tiles of 16": lambda: experts(10, 2, 9, gpt_oss=True),
    "gpt-oss, tiles of 128": lambda: experts(300, 2, 4, gpt_oss=True),
    "router": lambda: router(33, 100, 6),
    "latent, 32 rows": lambda: latent(2, 1, 300, 237),
    "latent, 32 rows, each its length": lambda: latent(
        3, 1, 300, [64, 0, 299], cached=False, mask=None
    ),
    "latent, 16 rows": lambda: latent(1, 1, 1000, 999, H=16, N=128, V=128),
    "latent, 64 rows, a mask that is added": lambda: latent(1, 3, 500, 450, mask=torch.float32),
    "latent, 64 rows, none": lambda: latent(2, 2, 700, 641, **SMALL, mask=None),
    "latent, 64 rows of 256 channels": lambda: latent(1, 3, 300, 237, C=256),
    "latent, 64 rows, weight in FP8": lambda: latent(2, 3, 300, 237, fp8=True),
    "latent, 128 heads, weight in FP8": lambda: latent(
        1, 1, 300, 237, H=128, N=128, V=128, fp8=True
    ),
    "latent, one slot": lambda: latent(2, 1, 1, 1),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tool", choices=TOOLS, help="of compute-sanitizer; run: without it")
    parser.add_argument("cases", nargs="*", default=[], help=f"all, or some of: {', '.join(CASES)}")
    options = parse_on_gpu(parser)
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"no such case: {unknown[0]!r}")
    chosen = options.cases or list(CASES)
    if options.tool != "run":
        if shutil.which("compute-sanitizer") is None:
            parser.error("compute-sanitizer, which comes with the CUDA toolkit, is not on PATH")
        command = ["compute-sanitizer", "--tool", options.tool, sys.executable, __file__, "run"]
        return subprocess.run([*command, *chosen]).returncode
    torch.manual_seed(0)
    for name in chosen:
        print(f"case: {name}", flush=True)
        CASES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
