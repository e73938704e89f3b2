"""Time of `fused_topk` against the same in torch's operations, as transformers' routers have it.

python benchmarks/compare_router.py [--cases 256:8 8:2] [--json FILE]   on a GPU
"""

from functools import partial

import torch
from kernel_time import microseconds
from runner import DEVICE, run

SIZES = ("256:8", "512:10", "128:8", "8:2")  # experts, chosen ones: as compare_experts.MODELS
TOKENS = (1, 64, 8192)
CASES = {"--cases": {"nargs": "+", "default": SIZES, "help": "experts:chosen ones"}}


def by_torch(logits, top_k):
    scores = logits.softmax(-1, dtype=torch.float32)
    weights, ids = scores.topk(top_k, -1)
    weights /= weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


@torch.no_grad()
def rows(package, options):
    for E, K in (map(int, case.split(":")) for case in options.cases):
        for T in TOKENS:
            logits = torch.randn(T, E, device=DEVICE, dtype=torch.bfloat16)
            ways = {"ours": package.fused_topk, "torch": by_torch}
            us = microseconds({name: partial(call, logits, K) for name, call in ways.items()})
            yield {"what": f"{K} of {E} experts, {T} token{'s' * (T > 1)}", "us": us}


main = partial(run, __doc__, "router", rows, CASES)

if __name__ == "__main__":
    main()
