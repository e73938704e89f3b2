"""The models that are timed, by their sizes and with random weights, and a token of one of them."""

from typing import Callable, Dict

import torch

PROMPT = 8192  # tokens


def gdn_heads(keys: int, values: int) -> dict:
    """A Gated DeltaNet layer's heads, of 128 each."""
    return {
        "linear_num_key_heads": keys, "linear_num_value_heads": values,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip


def hybrid(layers: int) -> dict:
    """Every fourth layer has attention."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    return {"num_hidden_layers": layers, "layer_types": kinds}


LAYER = {  # of Qwen3.5-4B
    "hidden_size": 2560, "num_hidden_layers": 1, "layer_types": ["linear_attention"],
    **gdn_heads(16, 32),
}  # fmt: skip
SMALL = {  # of 24 layers
    "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "tie_word_embeddings": True, **gdn_heads(16, 16),
    **hybrid(24),
}  # fmt: skip
LLAMA = {  # Llama 8B's, of 8 layers
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 16384,
}  # fmt: skip
QWEN = {  # Qwen3.5-4B's, of 16 layers
    "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 32768,
    "max_position_embeddings": 16384, **gdn_heads(16, 32), **hybrid(16),
}  # fmt: skip
QWEN_MOE = {  # Qwen3.5-35B-A3B's, of 8 layers, without the vision tower and further predictions
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, **gdn_heads(16, 32), **hybrid(8),
}  # fmt: skip
QWEN3_MOE = {  # Qwen3-30B-A3B's, of 8 layers
    "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}  # fmt: skip
QWEN3_MOE_48 = {**QWEN3_MOE, "num_hidden_layers": 48}  # all
QWEN_9B = {  # Qwen3.5-9B's, all layers, without the vision tower and further predictions
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, **gdn_heads(16, 32),
    **hybrid(32),
}  # fmt: skip
KIMI = {  # of 8 layers; the defaults are the 48B-A3B model's
    "vocab_size": 32768, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **hybrid(8),
}  # fmt: skip
GLM_LITE = {  # GLM-4.7-Flash's, of 8 layers
    "num_hidden_layers": 8, "pad_token_id": 0, "max_position_embeddings": 65536,
}  # fmt: skip
V2_LITE = {  # DeepSeek-V2-Lite's, of 8 layers
    "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "vocab_size": 102400,
    "max_position_embeddings": 65536,
}  # fmt: skip
FAMILIES = {  # names of transformers' configurations and of its models, and the sizes
    "layer": ("Qwen3_5TextConfig", None, LAYER),
    "model": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", SMALL),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3_MOE),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", KIMI),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", GLM_LITE),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", V2_LITE),
    "Qwen3.5-35B-A3B": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN_MOE),
    "Qwen3-30B-A3B": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3_MOE),
    "whole Qwen3-30B-A3B": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3_MOE_48),
    "whole Qwen3.5-9B": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN_9B),
}


def randomize(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02)
            elif name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(0.01, 16).log())
    return module


def model_of(name: str, cast: bool = False, device: str = "cuda", **more) -> torch.nn.Module:
    """A model of FAMILIES in bf16, or its layer of Gated DeltaNet; more: other sizes. cast: it is
    made in fp32 and cast, buffers and all."""
    import transformers
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config, kind, sizes = FAMILIES[name]
    config = getattr(transformers, config)(**{**sizes, **more})
    if any("expert" in key for key in config.to_dict()):
        config._experts_implementation = "grouped_mm"
    with torch.device(device):
        if kind is None:
            model = Qwen3_5GatedDeltaNet(config, 0)
        elif cast:
            model = getattr(transformers, kind)(config)
        else:
            model = getattr(transformers, kind)._from_config(config, dtype=torch.bfloat16)
        return randomize(model).bfloat16().eval() if cast or not kind else randomize(model).eval()


def prompts(models: Dict[str, torch.nn.Module]) -> Dict[str, Callable]:
    """Calls that give the last logits of a prompt, by the model's name."""
    words = next(iter(models.values())).config.vocab_size
    ids = torch.randint(5, words, (1, PROMPT), device="cuda")
    return {
        n: lambda m=m: m(ids, use_cache=True, logits_to_keep=1).logits for n, m in models.items()
    }


def tokens(models: Dict[str, torch.nn.Module], first: str, batch: int) -> Dict[str, Callable]:
    """greedy_step of each model for so many sequences; first: the name of the one that reads the
    prompts."""
    ids = torch.randint(5, models[first].config.vocab_size, (batch, 128), device="cuda")
    return {n: greedy_step(m, models[first], ids) for n, m in models.items()}


def greedy_step(model, first, ids: torch.Tensor) -> Callable:
    """A step that writes its token always on the same place of the cache, at the same cost.

    `first` is the model that reads the prompt.
    """
    import transformers

    cache = transformers.StaticCache(config=first.config, max_cache_len=512)
    token = first(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)  # [B, 1]
    lengths = [layer.cumulative_length for layer in cache.layers if hasattr(layer, "keys")]
    place = torch.full_like(token, ids.shape[1])

    def step():
        for length in lengths:
            length.fill_(ids.shape[1])
        logits = model(token, past_key_values=cache, position_ids=place).logits
        token.copy_(logits.argmax(-1))
        return logits

    return step
