"""Seconds of first calls in a fresh process with an empty Triton cache, imports apart.

    python benchmarks/first_call.py [--fp8] [--json FILE]     on a GPU

With --fp8 the cases are modules of FP8 checkpoints, kernelized before the clock starts, and the
record is another one. Each case runs in a process of its own: a call, a repeat of it, and a call of
another shape of the same model, which should compile nothing.
"""

import contextlib
import json
import sys

import torch
from compare_gdn import tensors
from kernel_time import seconds
from runner import in_fresh_process, load_package, run, submodule


def swiglu(package, M):
    x, *weights = (
        torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (M, 14336, 14336)
    )
    return lambda: package.fused_swiglu(x, *weights)


def prefill(package, T, packed=False):
    q, k, v, g, beta, *_ = tensors(1, T, 16, 32, "slow")
    cu_seqlens = torch.tensor([0, T // 3, T], device="cuda") if packed else None
    return lambda: package.chunk_gated_delta_rule(
        q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def training(package, T):
    *qkv, g, beta, _, _ = tensors(1, T, 16, 32, "slow")
    leaves = [x.clone().requires_grad_() for x in qkv]

    def step():
        o, _ = package.chunk_gated_delta_rule(*leaves, g, beta, use_qk_l2norm_in_kernel=True)
        o.sum().backward()

    return step


def fp8_mlp(package, M):
    from compare_fp8 import in_fp8
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    with torch.device("cuda"):
        config = LlamaConfig(hidden_size=4096, intermediate_size=14336)
        mlp = LlamaMLP(config).to(torch.bfloat16).requires_grad_(False)
        x = torch.randn(M, 4096, dtype=torch.bfloat16)
    for name, part in list(mlp.named_children()):
        if name.endswith("_proj"):
            setattr(mlp, name, in_fp8(part))
    if package.kernelize(mlp).left:
        raise SystemExit("an FP8Linear is left alone")
    return lambda: mlp(x)


def fp8_experts(package, T):
    from compare_experts import inputs
    from compare_fp8_experts import problem

    _, weights = problem("35B")
    x, ids, top = inputs("35B", T, 0)
    return lambda: submodule("experts.ops_fp8").fp8_experts(x, *weights, ids, top)


CASES_OF_FP8 = {  # as below
    "MLP of 8B in FP8, 1 token": (None, fp8_mlp, (1, 8)),
    "MLP of 8B in FP8, 4096 tokens": (None, fp8_mlp, (4096, 8192)),
    "experts of 35B-A3B in FP8, 16 tokens": (None, fp8_experts, (16, 24)),
    "experts of 35B-A3B in FP8, 8192 tokens": (None, fp8_experts, (8192, 4096)),
}
CASES = {  # name -> (implementation, maker, sizes of the first call and of another)
    "swiglu, 1 token": (None, swiglu, (1, 8)),
    "swiglu, 4096 tokens": (None, swiglu, (4096, 8192)),
    "prefill, hopper": ("hopper", prefill, (2048, 3000)),
    "prefill, portable": ("portable", prefill, (2048, 3000)),
    "prefill, packed": (None, lambda p, T: prefill(p, T, True), (2048, 3000)),
    "prefill and gradient": (None, training, (2048, 3000)),
}


ALONE = "--alone"


def alone(name: str) -> dict:
    implementation, make, (first, other) = {**CASES, **CASES_OF_FP8}[name]
    package, dispatch = load_package(), submodule("runtime.dispatch")
    torch.randn(8, 8, device="cuda").bfloat16() @ torch.randn(8, 8, device="cuda").bfloat16()
    calls = make(package, first), make(package, other)
    with dispatch.force(implementation) if implementation else contextlib.nullcontext():
        times = [seconds(calls[0]), seconds(calls[0]), seconds(calls[1])]
    return dict(zip(("first", "again", "another shape"), (round(t, 4) for t in times)))


def rows(package, options):
    for name in CASES_OF_FP8 if options.fp8 else CASES:
        try:
            yield {"what": name, "seconds": in_fresh_process(ALONE, name)}
        except RuntimeError as error:
            print(f"{name} is left out: {error}", flush=True)


ARGUMENTS = {"--fp8": {"action": "store_true", "help": "modules of FP8 checkpoints"}}

if __name__ == "__main__":
    if ALONE in sys.argv:
        print(json.dumps(alone(sys.argv[-1])))
    else:
        run(__doc__, lambda options: f"first_call{'_fp8' * options.fp8}", rows, ARGUMENTS)
