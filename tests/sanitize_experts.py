"""NVIDIA's compute-sanitizer over the routed experts, forward and backward, and the router.

    python tests/sanitize_experts.py memcheck|racecheck|synccheck [CASE ...]

Small sizes that no tile divides, entries held elsewhere and experts without rows, in every form
that the number of tokens chooses.
"""

import functools
import sys

import torch
from conftest import load_package
from sanitize_gdn import main


def call(T, K, E, H=136, I=72, training=True, gpt_oss=False, **options):
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


CASES = {
    "few": lambda: call(3, 2, 5, training=False),
    "tiles of 16": lambda: call(10, 2, 9),
    "tiles of 32": lambda: call(50, 2, 9),
    "tiles of 64": lambda: call(80, 2, 5),
    "tiles of 128": lambda: call(300, 2, 4),
    "whole tiles, one expert": lambda: call(700, 1, 2, H=256, I=128),
    "recompute": lambda: call(300, 2, 4, recompute=True),
    "clamped gates": lambda: call(300, 2, 4, activation="swigluoai", limit=7.0),
    "gpt-oss, few": lambda: call(3, 2, 5, gpt_oss=True, training=False),
    "gpt-oss, tiles of 16": lambda: call(10, 2, 9, gpt_oss=True),
    "gpt-oss, tiles of 128": lambda: call(300, 2, 4, gpt_oss=True),
    "router": lambda: router(33, 100, 6),
}


if __name__ == "__main__":
    sys.exit(main(__file__, CASES))
