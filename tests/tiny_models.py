"""Small random models of every family that the layers serve; how far a served one may differ."""

import contextlib
import copy
import functools
import inspect

import pytest
import torch
from conftest import load_package, relative_error, submodule

# Largest difference of logits, which are of the order of one, between a model and its kernelized
# self in fp32: the same sums in another order, through two layers. On a GPU the products of
# transformers' own forward are in true fp32 too (no TF32 by default), but summed by other tiles.
LOGITS = {"cpu": 1e-5, "cuda": 5e-5}
# Relative error of a parameter's gradient after one step, ||g - g'|| / ||g||: as above, through the
# backward pass.
GRADIENTS = {"cpu": 1e-4, "cuda": 2e-4}

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
HEAD = {"head_dim": 16}
INDEXER = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 256,
    "indexer_compress_ratio": 8,
    "output_gate_type": "sigmoid",
}
CONFIGS = {
    "llama": {"mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": HEAD,
    "qwen3_5_text": {**HEAD, **GDN},
    "qwen3_5_moe_text": {**HEAD, **GDN, **MOE},
    "qwen3_next": {**HEAD, **GDN, **MOE},
    "olmo_hybrid": {**GDN, "linear_allow_neg_eigval": True},
    "qwen4_exp_text": {**HEAD, **GDN, **MOE, **INDEXER},
}
# beside those: other roundings, orders of norms, and projections
MORE = {"gemma2": HEAD, "phi3": {}, "olmo2": {}, "granite": {"residual_multiplier": 0.5}}
# and rotary embeddings of neighbouring channels, of a part of the head and in fp32
MORE.update(glm=HEAD, ernie4_5=HEAD)
# without a language model's head: neighbouring channels by tables of their own, and tables that all
# rows share
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
PARTS = {"glm4v_text": ROPE, "pixtral": {}}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "intermediate_size": 48}
_MLA = {
    "num_key_value_heads": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
_MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
_LATENT_MOE = {**_LATENT, **_MOE, "n_routed_experts": 4, "n_shared_experts": 1}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LATENT = {  # models with latent attention, beside those of KDA
    "deepseek_v2": {**_LATENT_MOE, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {**_LATENT_MOE, "first_k_dense_replace": 1, "attention_bias": True},
    "glm4_moe_lite": {**_LATENT_MOE, "first_k_dense_replace": 1},
    "youtu": _LATENT,
    "axk1": {**_LATENT_MOE, "first_k_dense_replace": 1},
    "minicpm3": _LATENT,
    "mistral4": {**_LATENT_MOE, "first_k_dense_replace": 1, "rope_parameters": _YARN},
}
# and with an indexer before it
INDEXED = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2")
LATENT.update({name: {**_LATENT_MOE, "first_k_dense_replace": 1} for name in INDEXED})
KDA = {  # models with Kimi Delta Attention
    "kimi_linear": {
        **_MLA, **_MOE, **_LINEAR, "num_local_experts": 4, "linear_head_dim": 16,
        "linear_num_heads": 2, "q_lora_rank": None,
    },
    "bailing_hybrid": {
        **_MLA, **_MOE, **_LINEAR, "num_local_experts": 4, "head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "glm5_next_text": {
        **_MLA, **_MOE, **_LINEAR, "n_routed_experts": 4, "linear_head_dim": 16,
        "linear_num_heads": 2, "q_lora_rank": 8, "qk_rope_head_dim": 0, "index_topk": 64,
        "index_head_dim": 8, "index_n_heads": 2, "index_kpool": 4, "hc_mult": 2,
        "indexer_types": ["full", "full"], "mlp_layer_types": ["dense", "sparse"],
    },
}  # fmt: skip
WITH_GDN = [name for name in CONFIGS if "linear_key_head_dim" in CONFIGS[name]]
SERVED = {  # MLPs and GDN layers that are served in each, of two decoder layers
    "qwen3_5_moe_text": 3,
    "qwen3_next": 3,
    "qwen3_5_text": 3,
    "olmo_hybrid": 3,
    "qwen4_exp_text": 3,
}


def config_of(name: str, **changes):
    transformers = pytest.importorskip("transformers")
    try:
        return transformers.AutoConfig.for_model(
            name, **{**BASE, **{**CONFIGS, **MORE, **PARTS, **KDA, **LATENT}[name], **changes}
        )
    except ValueError:
        pytest.skip(f"this transformers has no {name}")


def cache_name() -> str:
    """The argument of models and layers that takes a cache; release 5.24 renamed it."""
    import transformers

    parameters = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def random_model(name: str, device="cpu", **changes):
    """A model in evaluation mode; norms, gates and biases are random too."""
    from transformers import AutoModel, AutoModelForCausalLM

    config = config_of(name, **changes)
    torch.manual_seed(0)
    if name == "mistral4":  # a part of a model of images, which has no class of its own
        from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

        return randomise(Mistral4ForCausalLM(config)).to(device).eval()
    generates = type(config) in AutoModelForCausalLM._model_mapping
    model = (AutoModelForCausalLM if generates else AutoModel).from_config(config)
    return randomise(model).to(device).eval()


def randomise(model):
    """The model, with norms, gates and biases that are random too."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@contextlib.contextmanager
def serving(device="cpu"):
    """The kernels serve, or on a CPU the reference; gives the record of who served."""
    dispatch, on_gpu = submodule("runtime.dispatch"), torch.device(device).type == "cuda"
    force = contextlib.nullcontext() if on_gpu else dispatch.force("reference")
    with force, dispatch.served() as record:
        yield record


def logits(model, ids, **arguments):
    with torch.no_grad():
        return model(ids, **arguments).logits


def in_parts(model, ids, lengths):
    """The logits of a prompt that is handed over in parts, with a cache between them."""
    outputs, cache = [], None
    with torch.no_grad():
        for part in ids.split(lengths, dim=1):
            output = model(part, past_key_values=cache, use_cache=True)
            outputs.append(output.logits)
            cache = output.past_key_values
    return torch.cat(outputs, 1)


def in_use(model):
    """The logits of a prompt and of two tokens after it."""
    return in_parts(model, tokens(2, 12), [10, 1, 1])


def assert_same(out, ref):
    """Logits, within what sums in another order make of them."""
    difference = (out - ref).abs().max().item()
    assert difference <= LOGITS[out.device.type], f"differs by {difference:.1e}"


def assert_same_gradients(out, ref, device: str):
    """By name. Those of the gates, A_log and dt_bias, are sums over tokens that cancel, and
    transformers makes them in fp32 in models of any dtype: its own are 3e-4 off fp64, and up to
    1e-3 if each of its sums is half a unit in the last place off, as another processor's order of
    sums has them. tests/gdn/test_gdn_backward.py and tests/parallel/test_distributed.py hold ours
    in fp64."""
    assert out.keys() == ref.keys()
    for name, gradient in ref.items():
        if gradient.norm() < 1e-7:  # an expert that no token went to
            continue
        limit = (30 if name.endswith(("A_log", "dt_bias")) else 1) * GRADIENTS[device]
        error = relative_error(out[name], gradient)
        assert error <= limit, f"{name}: {error:.1e}"


def assert_same_tokens(served, model, cache: str = None) -> None:
    """Greedy tokens of generate behind padded prompts; cache: the implementation that is asked
    for."""
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0  # padding
    words = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    if cache:
        words.update(cache_implementation=cache, disable_compile=True)
    assert torch.equal(served.generate(ids, **words), model.generate(ids, **words))


def assert_same_padded_step(served, model):
    """Logits with and without padding at the left, and gradients of a training step, on a CPU."""
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    found, gradients = [], []
    for m in (served, model):
        with torch.no_grad():
            padded = m(ids, attention_mask=mask).logits[mask.bool()]
            found.append((m(ids).logits, padded))
        torch.manual_seed(7)  # of dropouts
        m.train()(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in m.named_parameters() if p.grad is not None})
        m.eval()
    for mine, theirs in zip(*found):
        assert (mine - theirs).abs().max() <= LOGITS["cpu"] * theirs.abs().max()
    assert_same_gradients(*gradients, "cpu")


def check_the_same(served, model):
    """Gradients of a step and logits in evaluation mode are equal, up to rounding in fp32."""
    for m in (model, served):
        m.train()(tokens(2, 9), labels=tokens(2, 9, seed=1)).loss.backward()
    for (name, mine), (_, theirs) in zip(served.named_parameters(), model.named_parameters()):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6), name
    with torch.no_grad():
        found, expected = (m.eval()(tokens(2, 9)).logits for m in (served, model))
    assert torch.allclose(found, expected, atol=1e-5)


def mlps_and_gdn(report) -> int:
    """Number of MLPs and GDN layers that are served."""
    layers = [row.layer for row in report.served]
    return sum(layer.startswith("SwiGLU") or layer.endswith("GatedDeltaNet") for layer in layers)


@functools.cache
def pair(kernel, name: str, device: str):
    """A model and the same one kernelized. Shared by tests: leave both as they are."""
    model = random_model(name, device)
    served = copy.deepcopy(model)
    report = kernel.kernelize(served)
    assert mlps_and_gdn(report) == SERVED.get(name, 2), report
    return model, served


def tokens(*shape, seed=0, device="cpu"):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(2, BASE["vocab_size"], shape, generator=random).to(device)


def serve_blocks(model):
    """Replaces routers and blocks with a shared expert; their rows of the report."""
    rows = load_package().kernelize(model, only=["experts"]).rows
    return [row for row in rows if row.layer in ("fused_topk", "add_shared")]
