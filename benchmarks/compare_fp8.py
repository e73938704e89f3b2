"""Kernel time, host time and error of MLPs in FP8 with block scales, kernelized, on Hopper.

    python benchmarks/compare_fp8.py [--json FILE]     on a GPU, within a minute

The MLPs are transformers' LlamaMLP with the widths of Llama 8B and 7B and Qwen 27B, each after its
LlamaRMSNorm, which a served decoder layer calls so that it gives x in FP8 besides. `ours` has three
FP8Linears and is kernelized; `transformers_fp8` is the same module, untouched, where a stand-in is
the kernel that it loads from the Hub: DeepGEMM's quantiser, which is Python (its steps, in torch),
and cuBLAS's product of FP8 blocks. `eager` is the MLP in bf16, `ours, bf16` that one kernelized.
The stand-in has no row for one token, because cuBLAS takes tokens by 16, and none for Llama 7B,
because torch._scaled_mm takes no weight of 11008 columns, which are no multiple of 512. Errors are
of y against fp64 on dequantised weights and the norm's result in bf16.
"""

import copy
import functools
import os

import torch
from kernel_time import host_us, microseconds
from runner import relative_error, run

SIZES = {"8B": (4096, 14336), "27B": (5120, 17408), "7B": (4096, 11008)}
TOKENS, FEW = (1, 16, 64, 512, 4096, 8192), 64
E4M3, PEER = torch.float8_e4m3fn, "transformers_fp8"


def quantised_weight(weight: torch.Tensor) -> tuple:
    """As transformers quantises [N, K]: codes and 1 / scale of 128 x 128 values."""
    blocks = weight.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = 448.0 / blocks.abs().amax((1, 3), keepdim=True)
    codes = (blocks * scale).clamp(-448, 448).to(E4M3)
    return codes.flatten(2).flatten(0, 1), (1.0 / scale)[:, 0, :, 0].contiguous()


def dequantised(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def stand_in(x, weight, scale, block_size, output_dtype, activation_scale=None):
    """x [..., K] quantised by DeepGEMM's per_token_cast_to_fp8, times the weight."""
    groups = x.view(-1, x.shape[-1] // 128, 128)
    scales = groups.abs().float().amax(2).clamp(1e-4) / 448.0
    codes = (groups * (1.0 / scales.unsqueeze(2))).to(E4M3).flatten(1)
    y = torch._scaled_mm(
        codes, weight.t(), scale_a=scales.t().contiguous().t(), scale_b=scale.t(),
        out_dtype=output_dtype,
    )  # fmt: skip
    return y.view(*x.shape[:-1], -1)


def stand_in_for_hub() -> None:
    """In the place of the kernels that transformers loads from the Hub."""
    from transformers.integrations import finegrained_fp8

    os.environ["TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR"] = "1"
    finegrained_fp8._FINEGRAINED_FP8 = finegrained_fp8.FineGrainedFP8(stand_in, None, None)


def in_fp8(linear: torch.nn.Linear) -> torch.nn.Module:
    """transformers' FP8Linear of the same weight."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    with torch.device("meta"):
        part = FP8Linear(linear.in_features, linear.out_features, (128, 128))
    codes, scale = quantised_weight(linear.weight.detach())
    part.weight, part.weight_scale_inv = map(torch.nn.Parameter, (codes, scale))
    return part


def in_a_layer(norm, mlp, x: torch.Tensor) -> torch.Tensor:
    """mlp(norm(x)), as a served decoder layer calls them."""
    from in_tree import submodule

    layers = submodule("layers.decoder")
    y, _, codes = layers._normed(norm, x, None, mlp)
    if codes is None:
        return mlp(y)
    return layers.fp8.with_codes(y, codes, None, mlp, y)[0]


def mlps(package, K: int, N: int) -> dict:
    """The same MLP four times, each after the same norm."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    stand_in_for_hub()
    with torch.device("cuda"):
        config = LlamaConfig(hidden_size=K, intermediate_size=N, num_attention_heads=K // 128)
        eager = LlamaMLP(config).to(torch.bfloat16)
    theirs = copy.copy(eager)
    theirs._modules = dict(eager._modules)
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(eager, name).weight
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        part = in_fp8(getattr(eager, name))
        theirs._modules[name] = part
    ours, bf16 = (copy.deepcopy(mlp) for mlp in (theirs, eager))
    for mlp in (ours, bf16):
        report = package.kernelize(mlp)
        if report.left:
            raise SystemExit(str(report))
    plain, served = (LlamaRMSNorm(K).to("cuda", torch.bfloat16) for _ in range(2))
    package.kernelize(served)
    return {
        "ours": functools.partial(in_a_layer, served, ours),
        "ours, bf16": functools.partial(in_a_layer, served, bf16),
        "eager": torch.nn.Sequential(plain, eager),
        PEER: torch.nn.Sequential(plain, theirs),
    }


def exact(both, x: torch.Tensor) -> torch.Tensor:
    """y in fp64 on dequantised weights."""

    def times(part, x):
        return x @ dequantised(part.weight, part.weight_scale_inv).t()

    norm, mlp = both
    x = norm(x).double()
    z = torch.nn.functional.silu(times(mlp.gate_proj, x)) * times(mlp.up_proj, x)
    return times(mlp.down_proj, z)


@torch.no_grad()
def rows(package, options):
    for title, (K, N) in SIZES.items():
        parts = mlps(package, K, N)
        for M in TOKENS:
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            taken = M % 16 == 0 and N % 512 == 0
            names = [name for name in parts if taken or name != PEER]
            timed = {name: functools.partial(parts[name], x) for name in names}
            row = {"what": f"MLP of {title} with its norm in FP8, {M} token" + "s" * (M > 1)}
            if M == FEW:
                y = exact(parts[PEER], x)
                both = [name for name in ("ours", PEER) if name in timed]
                row["error"] = {name: relative_error(timed[name](), y) for name in both}
                del y
            if M <= FEW:
                row["host_us"] = {name: host_us(f) for name, f in timed.items()}
            row["us"] = microseconds(timed, rounds=2, rep_ms=5)
            yield row
        del parts, timed
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__doc__, "fp8_mlp", rows)
