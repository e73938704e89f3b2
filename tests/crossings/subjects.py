"""The models of the crossings' table: tiny, random, of each kind that kernelize serves."""

import functools
from typing import Callable, Dict

import fp8_problems
import pytest
import torch
from conftest import submodule
from tiny_models import BASE, HEAD, MOE, random_model, randomise


def qwen3_moe(**changes) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {**BASE, **HEAD, **MOE, **changes}
    config = transformers.AutoConfig.for_model("qwen3_moe", **sizes)
    torch.manual_seed(0)
    return randomise(transformers.AutoModelForCausalLM.from_config(config)).eval()


def fp8_llama(**changes) -> torch.nn.Module:
    """In bf16, with linears in FP8 blocks."""
    sizes = dict(hidden_size=256, intermediate_size=256, num_attention_heads=2)
    return fp8_problems._tiny(
        "LlamaForCausalLM", "LlamaConfig", ("lm_head",), **{**sizes, **changes}
    )


MODELS: Dict[str, Callable] = {
    "Llama": functools.partial(random_model, "llama"),
    "Qwen3.5": functools.partial(random_model, "qwen3_5_text"),
    "Qwen3-MoE": qwen3_moe,
    "Kimi Linear": functools.partial(random_model, "kimi_linear"),
    "DeepSeek-V3": functools.partial(
        random_model, "deepseek_v3", kv_lora_rank=128, qk_rope_head_dim=16
    ),
    "FP8 Llama": fp8_llama,
}
WITH_EXPERTS = ("Qwen3-MoE", "Kimi Linear", "DeepSeek-V3")
WITH_RING = ("Qwen3.5",)  # Gated DeltaNet, whose states may be written back later


def stand_ins(patch: pytest.MonkeyPatch) -> None:
    """torch in place of the kernels that transformers loads for FP8, and experts that are served
    wherever they are."""
    fp8_problems.stand_in(patch)
    patch.setattr(submodule("models.experts"), "why_not_here", lambda module: None)
