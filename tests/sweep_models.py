"""Tiny random models of every type that transformers knows, before and after kernelize:
tests/model_table.py --run tries them all.

A model is made from its type's default configuration with small sizes. With the package's reference
standing in for a kernel (no kernel serves a CPU), its logits, greedy tokens, the gradients of its
parameters and every served MLP by itself are compared with the model's before, and after `restore`
its logits are the same bits.
"""

import copy
import signal
import warnings
from typing import Iterator, NamedTuple

import torch
from conftest import load_package, submodule

SECONDS = 60  # of the CPU that a type may take, however busy the machine is
# Largest difference, relative to the largest value. fp32: the same sums in another order, through
# a few layers and back. A module by itself: one rounding of bf16, or of fp64.
LOGITS, GRADIENTS = 1e-4, 5e-3
MODULE = {torch.float64: 1e-12, torch.bfloat16: 2e-2}

SIZES = {
    "vocab_size": 120, "vocab_size_per_layer_input": 120, "max_position_embeddings": 128,
    "n_positions": 128, "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32,
    "embedding_size": 32, "word_embed_proj_dim": 32, "projection_dim": 32, "out_hidden_size": 32,
    "audio_hidden_size": 32, "adapter_in_dim": 32, "adapter_input_size": 32,
    "adapter_out_dim": 32, "text_hidden_size": 32,
    "hidden_dim": 32, "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "n_inner": 48, "ffn_hidden_size": 48,
    "mlp_dim": 48, "dense_intermediate_size": 48, "intermediate_size_mlp": 48, "block_ff_dim": 48,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "expert_ffn_dim": 24,
    "shared_intermediate_size": 24, "expert_ffn_hidden_size": 24, "num_hidden_layers": 2,
    "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "depth": 2, "num_attention_heads": 4,
    "num_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "attention_heads": 4, "num_key_value_heads": 2,
    "num_kv_heads": 2, "head_dim": 8, "d_kv": 8, "attention_head_size": 8, "global_head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8, "image_size": 32, "patch_size": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "state_size": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "time_step_rank": 4, "mamba_dt_rank": 4,
    "hidden_size_per_layer_input": 8, "sliding_window": 16, "num_codebooks": 2, "lru_width": 32,
    "emb_dim": 32, "mamba_expand": 2, "expert_layer_period": 1,
}  # fmt: skip
LARGEST = 1e8  # parameters of a model
LAYERED = ("layer_types", "mlp_layer_types", "no_rope_layers", "moe_layers")
FEW = {name: size for name, size in SIZES.items() if "layer" in name or "vocab" in name}
# What is tried in turn: the small sizes, and what is left out: lists by layer and sizes that the
# class works out, and stages, which go by the number of layers. Then all sizes but these are kept.
TRIES = (
    (SIZES, ()),
    (SIZES, ("stage_names", "out_features", "out_indices")),
    (SIZES, LAYERED),
    (SIZES, ("head_dim", "layer_types")),
    (SIZES, ("head_dim", "num_key_value_heads", "layer_types", "mlp_layer_types")),
    (FEW, LAYERED),
    ({}, ()),
)
# As published checkpoints of a type have it, where the class's defaults are other or none; of a
# whole configuration and of a part of one.
RESNET = {  # in place of one of the package timm
    "backbone_config": {
        "model_type": "resnet", "out_features": ["stage4"], "hidden_sizes": [8, 8, 8, 16],
        "depths": [1, 1, 1, 1], "embedding_size": 8,
    },
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SHARED_KV = {  # the last two layers attend to keys and values of the first two
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
OF_TYPE = {
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "qwen3_next": HYBRID,
    "olmo_hybrid": HYBRID,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "deepseek_v3": {"num_key_value_heads": 4},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "kimi_linear": {"num_key_value_heads": 4, "num_experts_per_token": 2},
    "bailing_hybrid": {
        "num_key_value_heads": 4, "num_experts_per_token": 2, "num_expert_group": 2,
        "topk_group": 1,
    },
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "gemma3n_text": {
        **SHARED_KV, "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {**SHARED_KV, "use_double_wide_mlp": True},
    "nemotron": {"num_key_value_heads": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "hy_v4_vl_text": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1],
        },
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 16},
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
             "num_hidden_layers": 3},
    "emu3": {"vocabulary_map": {"<image>": 3, "<|extra_200|>": 4}},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "chameleon_vqgan": {"base_channels": 32},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"],
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "mimi": {"upsample_groups": 32},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 1280},
    "emu3_vqgan": {"base_channels": 32},
    "ernie4_5_vl_moe_text": {"head_dim": 128},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
            **SHARED_KV, "use_double_wide_mlp": False, "num_kv_shared_layers": 4,
        },
    },
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 2}},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "luke": {"entity_vocab_size": 99},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "perceiver": {"d_latents": 32, "num_latents": 4, "d_model": 32},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "vibevoice_acoustic_tokenizer": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "wavtokenizer": {"codebook_dim": 32},
    **dict.fromkeys(
        ("conditional_detr", "dab-detr", "deformable_detr", "detr", "table-transformer"), RESNET
    ),
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
}  # fmt: skip


class Result(NamedTuple):
    kind: str
    state: str  # ok, WRONG, CRASH, not made
    served: int = 0
    left: int = 0
    compared: str = ""
    note: str = ""
    rows: tuple = ()  # of the report: (kind of module, why it is left alone or None)


class NotMade(Exception):
    """A model that this tool cannot make."""


class Wrong(Exception):
    """A kernelized model gives something else."""


def smaller(values: dict, dropped: tuple, sizes: dict = SIZES, nested: bool = False) -> dict:
    """A configuration's dictionary with small sizes and its type's flags, in its parts too."""
    cut = "num_hidden_layers" in sizes
    out, layers = {}, values.get("num_hidden_layers")
    for name, value in values.items():
        if name in (*dropped, "id2label", "label2id") or not isinstance(name, str):
            continue
        if cut and name == "per_layer_config" and value:
            out[name] = {i: smaller(v, dropped, sizes) for i, v in value.items() if int(i) < 2}
        elif isinstance(value, dict) and "rope" not in name:
            out[name] = smaller(value, dropped, sizes, nested=True)
        elif name in sizes and (type(value) is int or name == "head_dim" and value is None):
            out[name] = sizes[name]
        elif cut and name.endswith("layer_types") and isinstance(value, list):
            out[name] = (list(dict.fromkeys(value)) * 2)[:2]
        elif cut and isinstance(value, list) and len(value) == layers and layers > 2:
            out[name] = [sizes.get(name, v) if type(v) is int else v for v in value[:2]]
        elif name.endswith("token_id") and type(value) is int:
            out[name] = value % 8
        elif name != "transformers_version" and (nested or name != "model_type"):
            out[name] = value
    return _with(out, OF_TYPE.get(values.get("model_type"), {}))


def _with(values: dict, more: dict) -> dict:
    """The values with others, in their parts too."""
    out = dict(values)
    for name, value in more.items():
        inside = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = _with(out[name], value) if inside else value
    return out


def classes(kind: str) -> list:
    """The classes of a type's models, one that generates first."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    names = []
    mappings = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "")
    for mapping in (*mappings, "TEXT_TO_WAVEFORM"):
        of = f"MODEL_FOR_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES"
        name = getattr(auto, of).get(kind)
        names += [name] if isinstance(name, str) else list(name or ())
    return [getattr(transformers, name) for name in dict.fromkeys(names)]


def types() -> list:
    from transformers.models.auto import modeling_auto as auto

    mappings = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL")
    mappings += ("MODEL_FOR_MASKED_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT")
    return sorted({kind for m in mappings for kind in getattr(auto, f"{m}_MAPPING_NAMES")})


def models(kind: str, sizes: dict = SIZES) -> Iterator[torch.nn.Module]:
    """Small random models of a type, in evaluation mode, the best first."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        values = CONFIG_MAPPING[kind]().to_dict()
    except Exception:  # its defaults are none that it takes
        values = CONFIG_MAPPING[kind](**OF_TYPE.get(kind, {})).to_dict()
    error = made = None
    for own, dropped in TRIES:
        small = smaller(values, dropped, sizes if own is SIZES else own)
        for model in classes(kind):
            try:
                config = CONFIG_MAPPING[kind](**small)
                size = sum(p.numel() for p in _on_meta(model, config).parameters())
                if size > LARGEST:
                    raise NotMade(f"{size / 1e6:.0f} million parameters")
                torch.manual_seed(0)
                made = _with_mild_gates(model._from_config(config).float().eval())
            except TimeoutError:
                raise
            except Exception as failure:
                error = failure
                continue
            yield made
    if made is None:
        raise NotMade(_short(error))


def _with_mild_gates(model):
    """The model with log decays -exp(A_log) softplus(..) of tokens near -1.

    Its own are down to -16. The gradient of a gate is then about 1e-9, and transformers' chunk rule
    takes it from differences of fp32 sums that are 1e6 as large: it is off by up to 3e-2 there,
    and by 1e-11 with its fp32 casts made fp64, where ours in fp32 is off by 2e-7.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.clamp_(max=0.0)
    return model


def _on_meta(model, config):
    with torch.device("meta"):
        return model._from_config(copy.deepcopy(config))


def _short(error) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0][:90]


def inputs(model) -> Iterator[dict]:
    """Yields arguments with which the model may be called."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(8, 100, (2, 9), generator=random)
    yield (
        {"input_ids": ids, "decoder_input_ids": ids}
        if model.config.is_encoder_decoder
        else {"input_ids": ids}
    )
    size = getattr(model.config, "image_size", 32)
    size = size if isinstance(size, int) else 32
    yield {"pixel_values": torch.randn(2, 3, size, size, generator=random)}


def output_of(model, arguments) -> torch.Tensor:
    torch.manual_seed(0)
    out = model(**arguments)
    for name in ("logits", "last_hidden_state"):
        if isinstance(out.get(name), torch.Tensor):
            return out[name]
    raise ValueError("gives no logits")


def gradients(model, arguments) -> dict:
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        # not squares: the mean square of what a norm gives hardly depends on what is before it
        output_of(model, arguments).float().sin().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative to the largest value; infinite where only one has a NaN."""
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item() if a.numel() else 0.0


def callable_model(kind: str, sizes: dict = SIZES):
    """(model, arguments, output): the first that runs; arguments are None where none does."""
    first = None
    for model in models(kind, sizes):
        first = model if first is None else first
        for arguments in inputs(model):
            try:
                with torch.no_grad():
                    return model, arguments, output_of(model, arguments)
            except TimeoutError:
                raise
            except Exception:
                continue
    return first, None, None


def tokens_of(model, arguments, new: int = 5):
    """Greedy tokens, or None where the model does not generate."""
    if "input_ids" not in arguments or not model.can_generate():
        return None
    try:
        ids = arguments["input_ids"]
        mask = torch.ones_like(ids)
        found = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
        return getattr(found, "sequences", found)
    except TimeoutError:
        raise
    except Exception:
        return None


def check_modules(model, served) -> None:
    """Every served MLP by itself, in fp64 and bf16."""
    names = {row.module for row in served if row.layer.startswith("SwiGLU")}
    seen = set()
    for name, module in model.named_modules():
        widths = [getattr(m, "in_features", None) for m in module.children()]
        width = next((width for width in widths if isinstance(width, int)), None)
        if width is None or name not in names or (type(module), width) in seen:
            continue
        seen.add((type(module), width))
        for dtype, limit in MODULE.items():
            twin = copy.deepcopy(module).to(dtype)
            x = torch.randn(3, width, dtype=torch.float64).to(dtype)
            with torch.no_grad():
                got = twin(x)
                load_package().restore(twin)
                worst = difference(got, twin(x))
            if worst > limit:
                raise Wrong(f"{name} in {str(dtype)[6:]} differs by {worst:.1e}")


def state_of(model) -> dict:
    return {name: (type(m), set(m.__dict__)) for name, m in model.named_modules()}


def compare(kind: str, kinds=None) -> Result:
    """Compares a type's model before and after kernelize(model, only=kinds)."""
    package, dispatch = load_package(), submodule("runtime.dispatch")
    try:
        model, arguments, before = callable_model(kind)
    except TimeoutError:
        raise
    except Exception as error:
        return Result(kind, "not made", note=_short(error))
    if arguments is not None:
        try:
            grads = gradients(model, arguments)
        except AssertionError as error:  # it learns from other inputs alone
            return Result(kind, "not made", note=_short(error))
        tokens = tokens_of(model, arguments)
    done, state = [], state_of(model)  # `generate` of some sets attributes
    with dispatch.force("reference"):
        report = package.kernelize(model, only=kinds)
        rows = [row for row in report.rows if row.layer != "loss"]  # which is no module's forward
        check_modules(model, [row for row in rows if row.reason is None])
        done.append("modules")
        if arguments is not None:
            with torch.no_grad():
                worst = difference(output_of(model, arguments), before)
            if worst > LOGITS:
                raise Wrong(f"logits differ by {worst:.1e}")
            done.append("logits")
            if tokens is not None:
                if not torch.equal(tokens_of(model, arguments), tokens):
                    raise Wrong("other tokens")
                done.append("tokens")
            after = gradients(model, arguments)
            worst = max([difference(after[n], grads[n]) for n in grads], default=0.0)
            if worst > GRADIENTS or after.keys() != grads.keys():
                raise Wrong(f"gradients differ by {worst:.1e}")
            done.append("gradients")
    package.restore(model)
    if state_of(model) != state:
        raise Wrong("restore leaves something behind")
    if arguments is not None:
        with torch.no_grad():
            if difference(output_of(model, arguments), before) > 0:
                raise Wrong("restore gives other logits")
    reasons = sorted({f"{row.kind}: {row.reason}" for row in report.left})
    compared = ", ".join(done + ["restore"])
    counts = len(rows) - len(report.left), len(report.left)
    rows = tuple((submodule("models.report").kind_of(row), row.reason) for row in rows)
    return Result(kind, "ok", *counts, compared, "; ".join(reasons), rows)


def look_at(kind: str, look=compare) -> Result:
    """look(kind) with a limit of time; a fault is a Result, too."""

    def stop(*_):
        raise TimeoutError(f"took more than {SECONDS} s")

    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return look(kind)
    except Wrong as error:
        return Result(kind, "WRONG", note=str(error))
    except Exception as error:
        state = "not made" if isinstance(error, TimeoutError) else "CRASH"
        return Result(kind, state, note=_short(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
