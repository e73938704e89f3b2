"""Time of `fused_topk` against the same in torch's operations, as transformers' routers have it.

python benchmarks/compare_router.py [--cases 256:8 8:2] [--json FILE]   on a GPU
"""

import argparse
from pathlib import Path

import torch
from kernel_time import RESULTS, load_package, microseconds, parse_on_gpu, save

SIZES = ((256, 8), (512, 10), (128, 8), (8, 2))  # experts, chosen ones: as compare_experts.MODELS
TOKENS = (1, 64, 8192)
DEVICE = "cuda"


def by_torch(logits, top_k):
    scores = logits.softmax(-1, dtype=torch.float32)
    weights, ids = scores.topk(top_k, -1)
    weights /= weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


@torch.no_grad()
def measure(package, sizes, path: Path) -> None:
    rows = []
    for E, K in sizes:
        for T in TOKENS:
            logits = torch.randn(T, E, device=DEVICE, dtype=torch.bfloat16)
            calls = {
                "ours": lambda x=logits, K=K: package.fused_topk(x, K),
                "torch": lambda x=logits, K=K: by_torch(x, K),
            }
            plural = "s" if T > 1 else ""
            row = {"what": f"{K} of {E} experts, {T} token{plural}", "us": microseconds(calls)}
            print(row, flush=True)
            rows.append(row)
            save(path, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "router.json")
    cases = [f"{E}:{K}" for E, K in SIZES]
    parser.add_argument("--cases", nargs="+", default=cases, help="experts:chosen ones")
    options = parse_on_gpu(parser)
    sizes = [tuple(map(int, case.split(":"))) for case in options.cases]
    measure(load_package(), sizes, options.json)


if __name__ == "__main__":
    main()
