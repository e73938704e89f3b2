"""A call of each public function that is right, in which test_every_argument.py replaces one
argument after the other; and what of that is no mistake."""

from typing import Callable, Dict, NamedTuple

import pytest
import torch
from conftest import gdn_inputs
from torch import nn

PACKED = {"cu_seqlens": torch.tensor([0, 3, 8])}
ones = torch.ones


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def rule(B: int = 2, T: int = 8, **more) -> dict:
    return {**gdn_inputs(B, T, 2, 4, 6, 5), **more}


def gate() -> dict:
    return {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(4)}


def channels(B: int = 2, T: int = 8, raw: bool = False, **more) -> dict:
    """Of Kimi Delta Attention."""
    x = rule(B, T)
    x["g"] = x["g"].unsqueeze(-1).expand(B, T, 4, 6).contiguous()
    bias = {"dt_bias": torch.zeros(24), "lower_bound": -5.0}
    return {**x, **({**gate(), **bias} if raw else {}), **more}


def decoding(kernel, *names: str, max_tokens: int = 1) -> dict:
    """Arguments of replay_gated_delta_rule, or those with the given names."""
    x = rule(T=1)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    ring = kernel.make_ring(x["initial_state"], 2, torch.float32, max_tokens=max_tokens)
    x.update(ring=ring, cursor=torch.zeros(2, 2, dtype=torch.int32))
    return {name: x[name] for name in names or x}


def batch() -> dict:
    """Two rows of tokens, of which the second is shorter."""
    ids = torch.tensor([[3, 1, 4, 1], [5, 9, 0, 0]])
    mask, positions = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), torch.arange(4).expand(2, 4)
    labels = ids.masked_fill(mask == 0, -100)
    return {
        "input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions,
    }  # fmt: skip


def static_cache():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.StaticCache(config, max_cache_len=4)


class Case(NamedTuple):
    function: str
    make: Callable  # arguments, from the package
    taken: Dict[str, str] = {}  # by argument: what is no mistake
    values: bool = True  # whether what is returned has values


WIDE = "float16 float64"  # beside fp32: the dtypes may differ
RULE = {"g": WIDE, "beta": WIDE, "initial_state": WIDE}
GATED = {**RULE, "A_log": WIDE, "dt_bias": WIDE}
CHANNELS = {**RULE, "A_log": WIDE + " rank+1", "dt_bias": WIDE + " rank+1"}
UNUSED = {  # aiter's, taken for its callers
    "seq_lens_cpu": "tensor", "snapshot_dtype": "int8 float8 complex",
    "prefill_metadata": "word number list tensor",
}  # fmt: skip
CASES = [
    Case(
        "fused_swiglu",
        lambda kernel: {
            "x": ones(2, 4), "w_gate": ones(3, 4), "w_up": ones(3, 4), "b_gate": ones(3),
            "b_up": ones(3),
        },
        {"x": "rank+1 rank-1 less0 more0 none0"},
    ),
    Case(
        "fused_swiglu_mlp",
        lambda kernel: {
            "x": ones(2, 4), "w_gate": ones(3, 4), "w_up": ones(3, 4), "w_down": ones(4, 3),
            "b_gate": ones(3), "b_up": ones(3), "b_down": ones(4),
        },
        {"x": "rank+1 rank-1 less0 more0 none0"},
    ),
    Case("silu_mul", lambda kernel: {"gate": ones(2, 4), "up": ones(2, 4)}),
    Case(
        "fused_experts",
        lambda kernel: {
            "x": ones(2, 4), "w_gate_up": ones(3, 10, 4), "w_down": ones(3, 4, 5),
            "top_k_index": ints(0, 1, 2, 0).view(2, 2), "top_k_weights": ones(2, 2),
            "b_gate_up": ones(3, 10), "b_down": ones(3, 4), "limit": 1.0,
        },
        {"top_k_index": "high low", "top_k_weights": WIDE},
    ),
    Case(
        "fused_topk",
        lambda kernel: {
            "logits": ones(3, 6), "top_k": 2, "bias": ones(6), "n_group": 3, "topk_group": 2,
            "eps": 0.5,
        },
        {"logits": "float16 float64 less0 more0 none0", "bias": WIDE, "eps": "zero"},
    ),
    Case(
        "rms_norm",
        lambda kernel: {"x": ones(2, 4), "weight": ones(4), "residual": ones(2, 4), "after": True},
        {"weight": WIDE, "eps": "zero", "offset": "zero"},
    ),
    Case(
        "linear_cross_entropy",
        lambda kernel: {
            "hidden": ones(2, 4), "weight": ones(3, 4), "target": ints(0, 2), "bias": ones(3),
            "softcap": 2.0,
        },
        {"label_smoothing": "zero", "z_loss": "zero", "ignore_index": "minus zero"},
    ),
    Case(
        "token_log_probs",
        lambda kernel: {
            "hidden": ones(2, 4), "weight": ones(3, 4), "target": ints(0, 2), "bias": ones(3),
            "softcap": 2.0,
        },
        {"ignore_index": "minus zero"},
    ),
    Case(
        "rms_norm_gated",
        lambda kernel: {"x": ones(2, 4), "gate": ones(2, 4), "weight": ones(4)},
        {"x": WIDE, "gate": WIDE, "weight": WIDE, "eps": "zero"},
    ),
    Case(
        "gated_delta_gate",
        lambda kernel: {"a": ones(2, 4), "A_log": ones(4), "dt_bias": ones(4)},
        {"a": "float16 float64 rank+1 rank-1 less0 more0 none0", "A_log": WIDE, "dt_bias": WIDE},
    ),
    Case(
        "sigmoid_gate",
        lambda kernel: {"x": ones(2, 4), "gate": ones(2, 4)},
        {"x": WIDE, "gate": WIDE},
    ),
    Case(
        "causal_conv1d_fn",
        lambda kernel: {
            "x": ones(1, 3, 8), "weight": ones(3, 4), "bias": ones(3),
            "seq_idx": torch.zeros(1, 8).int(),
        },
        {
            "x": WIDE, "weight": "float16 float64 less1 more1", "bias": WIDE,
            "seq_idx": "int64 high low",
        },
    ),
    Case(
        "causal_conv1d_fn",
        lambda kernel: {
            "x": ones(1, 3, 8), "weight": ones(3, 4), "initial_states": ones(2, 3, 3), **PACKED,
        },
        {"x": WIDE, "weight": WIDE, "initial_states": WIDE},
    ),
    Case(
        "causal_conv1d_update",
        lambda kernel: {
            "x": ones(2, 3), "conv_state": ones(2, 3, 4), "weight": ones(3, 4), "bias": ones(3),
            "out": ones(2, 3),
        },
        {
            "conv_state": "float16 float64 less2 more2", "weight": "float16 float64 less1 more1",
            "bias": WIDE, "null_index": "zero",
        },
    ),
    Case(
        "causal_conv1d_update",
        lambda kernel: {
            "x": ones(2, 3, 3), "conv_state": ones(5, 3, 5), "weight": ones(3, 4),
            "conv_state_indices": ints(4, 0), "num_accepted_tokens": ints(1, 3),
        },
        {
            "x": "float16 float64 less2 none2", "conv_state": "float16 float64 more0 more2",
            "weight": "float16 float64 less1", "conv_state_indices": "low", "null_index": "zero",
        },
    ),
    Case(
        "causal_conv1d_update",
        lambda kernel: {
            "x": ones(1, 3, 8), "conv_state": ones(2, 3, 5), "weight": ones(3, 4), **PACKED,
        },
        {
            "x": WIDE, "conv_state": "float16 float64 less2 more2",
            "weight": "float16 float64 less1 more1", "null_index": "zero",
        },
    ),
    Case(
        "fused_qk_norm_rope",
        lambda kernel: {
            "q": ones(2, 3, 4, 8), "k": ones(2, 3, 2, 8),
            "cos": ones(2, 3, 6), "sin": ones(2, 3, 6),
            "q_weight": ones(8), "k_weight": ones(8), "v": ones(2, 3, 2, 5),
            "key_cache": ones(2, 2, 7, 8), "value_cache": ones(2, 2, 7, 5),
            "cache_position": torch.tensor(1),
        },
        {
            "q": "less2 more2 none2", "q_weight": WIDE, "k_weight": WIDE, "eps": "zero",
            "offset": "minus zero", "v": WIDE, "key_cache": WIDE, "value_cache": WIDE,
        },
    ),
    Case(
        "fused_qk_norm_rope",
        lambda kernel: {
            "q": ones(2, 3, 4, 8), "k": ones(2, 3, 2, 8), "cos": ones(2, 3, 3, 2),
            "sin": ones(2, 3, 3, 2), "interleaved": True, "norm": "all", "q_weight": ones(32),
            "k_weight": ones(16),
        },
        {"q_weight": WIDE, "k_weight": WIDE, "eps": "zero", "offset": "minus zero"},
    ),
    Case(
        "attention_with_kvcache",
        lambda kernel: {
            "q": ones(2, 1, 4, 8), "k_cache": ones(2, 2, 7, 8), "v_cache": ones(2, 2, 7, 8),
            "cache_seqlens": ints(3, 4), "attention_mask": ones(2, 1, 1, 7).bool(),
        },
        {
            "q": "none2", "cache_seqlens": "rank-1 scalar",
            "attention_mask": "float16 float32 float64 less0", "softmax_scale": "minus zero",
        },
    ),
    Case(
        "latent_attention_with_kvcache",
        lambda kernel: {
            "q": ones(2, 3, 4, 12), "latents": ones(2, 1, 7, 6), "rotated": ones(2, 1, 7, 4),
            "weight": ones(4 * 13, 6), "qk_nope_head_dim": 8, "cache_seqlens": ints(3, 4),
            "attention_mask": ones(2, 1, 3, 7).bool(),
        },
        {
            "cache_seqlens": "rank-1 scalar", "softmax_scale": "minus zero",
            "attention_mask": "float16 float32 float64 less0",
        },
    ),
    Case(
        "fused_latent_norm_rope",
        lambda kernel: {
            "q": ones(2, 3, 4, 12), "kv": ones(2, 3, 10), "weight": ones(6), "cos": ones(2, 3, 4),
            "sin": ones(2, 3, 4), "latent_cache": ones(2, 1, 7, 6),
            "rotated_cache": ones(2, 1, 7, 4), "cache_position": torch.tensor(2),
        },
        {
            "q": "less2 more2 none2 less3 more3", "weight": WIDE, "eps": "zero",
            "latent_cache": WIDE, "rotated_cache": WIDE,
        },
    ),
    Case(
        "chunk_gated_delta_rule",
        lambda kernel: rule(**gate()),
        {**GATED, "checkpoint_every": "zero"},
    ),
    Case(
        "chunk_gated_delta_rule",
        lambda kernel: rule(1, initial_state=ones(2, 4, 6, 5), checkpoint_every=64, **PACKED),
        {**RULE, "checkpoint_every": "zero"},
    ),
    Case(
        "chunk_gated_delta_rule",
        lambda kernel: rule(
            initial_state=ones(3, 4, 6, 5), state_indices=ints(0, 2), inplace_final_state=False,
            has_initial_state=ones(2).bool(),
        ),
        {
            **RULE, "initial_state": "float16 float64 more0", "state_indices": "low",
            "checkpoint_every": "zero",
        },
    ),
    Case(
        "fused_recurrent_gated_delta_rule",
        lambda kernel: rule(out=ones(2, 8, 4, 5), **gate()),
        {**GATED, "null_index": "zero"},
    ),
    Case(
        "fused_recurrent_gated_delta_rule",
        lambda kernel: rule(1, initial_state=ones(2, 4, 6, 5), **PACKED),
        {**RULE, "null_index": "zero"},
    ),
    Case(
        "fused_recurrent_gated_delta_rule",
        lambda kernel: rule(
            initial_state=ones(3, 4, 6, 5), state_indices=ints(0, 0), inplace_final_state=True,
            output_state_indices=ints(1, 2),
        ),
        {
            **RULE, "initial_state": "float16 float64 more0", "state_indices": "low",
            "output_state_indices": "low", "null_index": "zero",
        },
    ),
    Case(
        "fused_recurrent_gated_delta_rule",
        lambda kernel: rule(
            initial_state=ones(16, 4, 6, 5), state_indices=torch.arange(16).view(2, 8),
            inplace_final_state=True, num_accepted_tokens=ints(1, 8),
        ),
        {
            **RULE, "initial_state": "float16 float64 more0", "state_indices": "low",
            "null_index": "zero",
        },
    ),
    Case(
        "chunk_kda",
        lambda kernel: channels(raw=True),
        {
            **CHANNELS, "lower_bound": "minus", "checkpoint_every": "zero",
            "cu_seqlens_cpu": "tensor", "max_num_seqs": "zero",
        },
    ),
    Case(
        "chunk_kda",
        lambda kernel: channels(
            1, initial_state=ones(2, 4, 6, 5), checkpoint_every=64, **PACKED,
        ),
        {
            **RULE, "checkpoint_every": "zero", "lower_bound": "minus",
            "cu_seqlens_cpu": "tensor", "max_num_seqs": "zero",
        },
    ),
    Case(
        "fused_recurrent_kda",
        lambda kernel: channels(raw=True, out=ones(2, 8, 4, 5)),
        {**CHANNELS, "lower_bound": "minus", "null_index": "zero"},
    ),
    Case(
        "fused_recurrent_kda",
        lambda kernel: channels(
            initial_state=ones(3, 4, 6, 5), state_indices=ints(0, 0), inplace_final_state=True,
            output_state_indices=ints(1, 2),
        ),
        {**RULE, "initial_state": "float16 float64 more0", "state_indices": "low",
            "output_state_indices": "low",
            "lower_bound": "minus", "null_index": "zero"},
    ),
    Case(
        "chunk_gated_delta_rule_opt",
        lambda kernel: rule(1, initial_state=ones(2, 4, 6, 5), **PACKED),
        {**RULE},
    ),
    Case(
        "chunk_gated_delta_rule_opt_vk",
        lambda kernel: rule(o=ones(2, 8, 4, 5), initial_state=ones(2, 4, 5, 6)),
        {**RULE, **UNUSED, "num_decodes": "zero", "num_decode_tokens": "zero"},
    ),
    Case(
        "chunk_gated_delta_rule_opt_vk",
        lambda kernel: rule(
            1, initial_state=ones(3, 4, 5, 6), initial_state_indices=ints(0, 2), **PACKED
        ),
        {
            **RULE, **UNUSED, "initial_state": "float16 float64 more0", "num_decodes": "zero",
            "num_decode_tokens": "zero", "initial_state_indices": "low",
        },
    ),
    Case(
        "chunk_gated_delta_rule_opt_vk",
        lambda kernel: rule(
            1, initial_state=ones(2, 4, 5, 6), cu_seqlens=ints(0, 1, 2, 5, 10), num_decodes=2,
            num_decode_tokens=2,
        ),
        {**RULE, **UNUSED},
    ),
    Case(
        "make_ring",
        lambda kernel: {"state": ones(2, 4, 5, 6), "heads": 2, "dtype": torch.half},
        {"state": "meta float16 float64 less0 more0 none0 less2 more2 none2 less3 more3 none3"},
        values=False,
    ),
    Case(
        "replay_gated_delta_rule",
        lambda kernel: {
            **decoding(kernel), **gate(), "force_flush": ones(2).bool(), "out": ones(2, 1, 4, 5),
        },
        {**GATED, "ring": "float16:u float64:u float64:g", "null_index": "zero"},
    ),
    Case(
        "replay_gated_delta_rule",
        lambda kernel: {**decoding(kernel), "state_indices": ints(1, 0)},
        {
            **RULE, "ring": "float16:u float64:u float64:g", "state_indices": "low",
            "null_index": "zero",
        },
    ),
    Case(
        "advance_ring",
        lambda kernel: {
            **decoding(kernel, "ring", "cursor", max_tokens=2), "num_accepted_tokens": ints(1, 2),
            "force_flush": ones(2).bool(), "state_indices": ints(1, 0),
        },
        {
            "ring": (
                "float16:k float64:k less1:k less3:k more3:k none3:k float16:u float64:u less3:u "
                "more3:u none3:u float64:g"
            ),
            "state_indices": "low", "null_index": "zero",
        },
    ),
    Case(
        "materialise_ring",
        lambda kernel: {
            **decoding(kernel, "ring", "cursor"), "state": ones(2, 4, 5, 6),
            "state_indices": ints(1, 0),
        },
        {
            "state": WIDE, "ring": "float16:k float64:k less1:k float16:u float64:u float64:g",
            "state_indices": "low", "null_index": "zero",
        },
    ),
    Case("FusedSwiGLU", lambda kernel: {"in_features": 4, "hidden_dim": 6}),
    Case(
        "build_cp_context",
        lambda kernel: {"cu_seqlens": ints(0, 4, 12), "cu_seqlens_cpu": ints(0, 4, 12)},
        {"cu_seqlens": "int8", "cu_seqlens_cpu": "int8"},
    ),
    Case("build_cp_context", lambda kernel: {"cu_seqlens": [0, 4, 8, 12], "batch_size": 3}),
    Case(
        "shard_batch",
        lambda kernel: {"batch": batch()},
        {
            "batch": (
                "int8:input_ids high:input_ids low:input_ids int8:labels high:labels low:labels "
                "int8:attention_mask bool:attention_mask float16:attention_mask "
                "float32:attention_mask float64:attention_mask high:attention_mask "
                "low:attention_mask int8:position_ids"
            ),
        },
    ),
    Case(
        "kernelize",
        lambda kernel: {"model": nn.Linear(4, 4)},
        {"replay": "zero"},
    ),
    Case("restore", lambda kernel: {"model": nn.Linear(4, 4)}),
    Case("decorate", lambda kernel: {"model": nn.Linear(4, 4)}),
    Case(
        "graphed_step",
        lambda kernel: {"model": nn.Linear(4, 4), "cache": static_cache(), "batch_size": 2},
    ),
    Case(
        "layer_mapping",
        lambda kernel: {"source": "org/name", "version": 1},
        {"version": "zero"},
    ),
    Case("layer_mapping", lambda kernel: {}),
    Case("implementation_of", lambda kernel: {"function": lambda: None}),
]  # fmt: skip

EXCUSED = {  # public names without a case
    "layers": "a module",
    "load_mtp": "it needs a model with such a layer: tests/decoding/test_mtp.py",
    "register_experts": "it has no arguments",
    "use_reference": "it has no arguments",
    "verify": "it needs what tools/build.py built: tests/repository/test_build.py",
}
