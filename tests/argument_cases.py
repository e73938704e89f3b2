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


def case(function: str, taken: Dict[str, str], /, *made: Callable, **given) -> Case:
    """A tuple of sizes is a tensor of ones; made: functions of the package that give further
    arguments."""

    def make(kernel) -> dict:
        found = {}
        for more in made:
            found.update(more(kernel))
        for name, x in given.items():
            found[name] = ones(x) if isinstance(x, tuple) else x
        return found

    return Case(function, make, taken)


def on_a_ring(*names: str, max_tokens: int = 1) -> Callable:
    return lambda kernel: decoding(kernel, *names, max_tokens=max_tokens)


WIDE = "float16 float64"  # beside fp32: the dtypes may differ
ROWS = "rank+1 rank-1 less0 more0 none0"  # any dimensions before the last
RULE = {"g": WIDE, "beta": WIDE, "initial_state": WIDE}
GATED = {**RULE, "A_log": WIDE, "dt_bias": WIDE}
CHANNELS = {**RULE, "A_log": WIDE + " rank+1", "dt_bias": WIDE + " rank+1", "lower_bound": "minus"}
PAIRED = {**RULE, "initial_state": WIDE + " more0", "state_indices": "low"}  # rows of a pool
PROMPT, TOKEN = {"checkpoint_every": "zero"}, {"null_index": "zero"}
OF_FLA = {"cu_seqlens_cpu": "tensor", "max_num_seqs": "zero"}
OF_AITER = {  # taken for its callers
    "seq_lens_cpu": "tensor", "snapshot_dtype": "int8 float8 complex",
    "prefill_metadata": "word number list tensor",
}  # fmt: skip
COUNTS = {"num_decodes": "zero", "num_decode_tokens": "zero"}
LOSS = dict(hidden=(2, 4), weight=(3, 4), target=ints(0, 2), bias=(3,), softcap=2.0)
WEIGHTS = dict(x=(2, 4), w_gate=(3, 4), w_up=(3, 4), b_gate=(3,), b_up=(3,))
K_FIRST, V_FIRST = (2, 4, 6, 5), (2, 4, 5, 6)  # states with keys first, and with values first
CHUNK = "chunk_gated_delta_rule"
STEPS, BY_AITER = "fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule_opt_vk"
CASES = [
    case("fused_swiglu", {"x": ROWS}, **WEIGHTS),
    case("fused_swiglu_mlp", {"x": ROWS}, **WEIGHTS, w_down=(4, 3), b_down=(4,)),
    case("silu_mul", {}, gate=(2, 4), up=(2, 4)),
    case(
        "fused_experts", {"top_k_index": "high low", "top_k_weights": WIDE},
        x=(2, 4), w_gate_up=(3, 10, 4), w_down=(3, 4, 5), limit=1.0,
        top_k_index=ints(0, 1, 2, 0).view(2, 2), top_k_weights=(2, 2), b_gate_up=(3, 10),
        b_down=(3, 4),
    ),
    case(
        "fused_topk", {"logits": WIDE + " less0 more0 none0", "bias": WIDE, "eps": "zero"},
        logits=(3, 6), top_k=2, bias=(6,), n_group=3, topk_group=2, eps=0.5,
    ),
    case(
        "rms_norm", {"weight": WIDE, "eps": "zero", "offset": "zero"},
        x=(2, 4), weight=(4,), residual=(2, 4), after=True,
    ),
    case(
        "linear_cross_entropy",
        {"label_smoothing": "zero", "z_loss": "zero", "ignore_index": "minus zero"}, **LOSS,
    ),
    case("token_log_probs", {"ignore_index": "minus zero"}, **LOSS),
    case(
        "rms_norm_gated", {"x": WIDE, "gate": WIDE, "weight": WIDE, "eps": "zero"},
        x=(2, 4), gate=(2, 4), weight=(4,),
    ),
    case(
        "gated_delta_gate", {"a": f"{WIDE} {ROWS}", "A_log": WIDE, "dt_bias": WIDE},
        a=(2, 4), A_log=(4,), dt_bias=(4,),
    ),
    case("sigmoid_gate", {"x": WIDE, "gate": WIDE}, x=(2, 4), gate=(2, 4)),
    case(
        "causal_conv1d_fn",
        {"x": WIDE, "weight": WIDE + " less1 more1", "bias": WIDE, "seq_idx": "int64 high low"},
        x=(1, 3, 8), weight=(3, 4), bias=(3,), seq_idx=torch.zeros(1, 8).int(),
    ),
    case(
        "causal_conv1d_fn", {"x": WIDE, "weight": WIDE, "initial_states": WIDE},
        x=(1, 3, 8), weight=(3, 4), initial_states=(2, 3, 3), **PACKED,
    ),
    case(
        "causal_conv1d_update",
        {"conv_state": WIDE + " less2 more2", "weight": WIDE + " less1 more1", "bias": WIDE,
         **TOKEN},
        x=(2, 3), conv_state=(2, 3, 4), weight=(3, 4), bias=(3,), out=(2, 3),
    ),
    case(
        "causal_conv1d_update",
        {"x": WIDE + " less2 none2", "conv_state": WIDE + " more0 more2",
         "weight": WIDE + " less1", "conv_state_indices": "low", **TOKEN},
        x=(2, 3, 3), conv_state=(5, 3, 5), weight=(3, 4), conv_state_indices=ints(4, 0),
        num_accepted_tokens=ints(1, 3),
    ),
    case(
        "causal_conv1d_update",
        {"x": WIDE, "conv_state": WIDE + " less2 more2", "weight": WIDE + " less1 more1", **TOKEN},
        x=(1, 3, 8), conv_state=(2, 3, 5), weight=(3, 4), **PACKED,
    ),
    case(
        "fused_qk_norm_rope",
        {"q": "less2 more2 none2", "q_weight": WIDE, "k_weight": WIDE, "eps": "zero",
         "offset": "minus zero", "v": WIDE, "key_cache": WIDE, "value_cache": WIDE},
        q=(2, 3, 4, 8), k=(2, 3, 2, 8), cos=(2, 3, 6), sin=(2, 3, 6), q_weight=(8,), k_weight=(8,),
        v=(2, 3, 2, 5), key_cache=(2, 2, 7, 8), value_cache=(2, 2, 7, 5),
        cache_position=torch.tensor(1),
    ),
    case(
        "fused_qk_norm_rope",
        {"q_weight": WIDE, "k_weight": WIDE, "eps": "zero", "offset": "minus zero"},
        q=(2, 3, 4, 8), k=(2, 3, 2, 8), cos=(2, 3, 3, 2), sin=(2, 3, 3, 2), interleaved=True,
        norm="all", q_weight=(32,), k_weight=(16,),
    ),
    case(
        "attention_with_kvcache",
        {"q": "none2", "cache_seqlens": "rank-1 scalar", "softmax_scale": "minus zero",
         "attention_mask": "float16 float32 float64 less0"},
        q=(2, 1, 4, 8), k_cache=(2, 2, 7, 8), v_cache=(2, 2, 7, 8), cache_seqlens=ints(3, 4),
        attention_mask=ones(2, 1, 1, 7).bool(),
    ),
    case(
        "latent_attention_with_kvcache",
        {"cache_seqlens": "rank-1 scalar", "softmax_scale": "minus zero",
         "attention_mask": "float16 float32 float64 less0"},
        q=(2, 3, 4, 12), latents=(2, 1, 7, 6), rotated=(2, 1, 7, 4), weight=(4 * 13, 6),
        qk_nope_head_dim=8, cache_seqlens=ints(3, 4), attention_mask=ones(2, 1, 3, 7).bool(),
    ),
    case(
        "fused_latent_norm_rope",
        {"q": "less2 more2 none2 less3 more3", "weight": WIDE, "eps": "zero",
         "latent_cache": WIDE, "rotated_cache": WIDE},
        q=(2, 3, 4, 12), kv=(2, 3, 10), weight=(6,), cos=(2, 3, 4), sin=(2, 3, 4),
        latent_cache=(2, 1, 7, 6), rotated_cache=(2, 1, 7, 4), cache_position=torch.tensor(2),
    ),
    case(CHUNK, {**GATED, **PROMPT}, **rule(**gate())),
    case(
        CHUNK, {**RULE, **PROMPT},
        **rule(1, initial_state=K_FIRST, checkpoint_every=64, **PACKED),
    ),
    case(
        CHUNK, {**PAIRED, **PROMPT},
        **rule(
            initial_state=(3, 4, 6, 5), state_indices=ints(0, 2), inplace_final_state=False,
            has_initial_state=ones(2).bool(),
        ),
    ),
    case(STEPS, {**GATED, **TOKEN}, **rule(out=(2, 8, 4, 5), **gate())),
    case(STEPS, {**RULE, **TOKEN}, **rule(1, initial_state=K_FIRST, **PACKED)),
    case(
        STEPS, {**PAIRED, "output_state_indices": "low", **TOKEN},
        **rule(
            initial_state=(3, 4, 6, 5), state_indices=ints(0, 0), inplace_final_state=True,
            output_state_indices=ints(1, 2),
        ),
    ),
    case(
        STEPS, {**PAIRED, **TOKEN},
        **rule(
            initial_state=(16, 4, 6, 5), state_indices=torch.arange(16).view(2, 8),
            inplace_final_state=True, num_accepted_tokens=ints(1, 8),
        ),
    ),
    case("chunk_kda", {**CHANNELS, **PROMPT, **OF_FLA}, **channels(raw=True)),
    case(
        "chunk_kda", {**RULE, "lower_bound": "minus", **PROMPT, **OF_FLA},
        **channels(1, initial_state=K_FIRST, checkpoint_every=64, **PACKED),
    ),
    case("fused_recurrent_kda", {**CHANNELS, **TOKEN}, **channels(raw=True, out=(2, 8, 4, 5))),
    case(
        "fused_recurrent_kda",
        {**PAIRED, "output_state_indices": "low", "lower_bound": "minus", **TOKEN},
        **channels(
            initial_state=(3, 4, 6, 5), state_indices=ints(0, 0), inplace_final_state=True,
            output_state_indices=ints(1, 2),
        ),
    ),
    case("chunk_gated_delta_rule_opt", RULE, **rule(1, initial_state=K_FIRST, **PACKED)),
    case(
        BY_AITER, {**RULE, **OF_AITER, **COUNTS}, **rule(o=(2, 8, 4, 5), initial_state=V_FIRST),
    ),
    case(
        BY_AITER,
        {**RULE, "initial_state": WIDE + " more0", "initial_state_indices": "low", **OF_AITER,
         **COUNTS},
        **rule(1, initial_state=(3, 4, 5, 6), initial_state_indices=ints(0, 2), **PACKED),
    ),
    case(
        BY_AITER, {**RULE, **OF_AITER},
        **rule(1, initial_state=V_FIRST, cu_seqlens=ints(0, 1, 2, 5, 10), num_decodes=2,
               num_decode_tokens=2),
    ),
    case(
        "make_ring",
        {"state": f"meta {WIDE} less0 more0 none0 less2 more2 none2 less3 more3 none3"},
        state=V_FIRST, heads=2, dtype=torch.half,
    )._replace(values=False),
    case(
        "replay_gated_delta_rule",
        {**GATED, "ring": "float16:u float64:u float64:g", **TOKEN},
        on_a_ring(), **gate(), force_flush=ones(2).bool(), out=(2, 1, 4, 5),
    ),
    case(
        "replay_gated_delta_rule",
        {**RULE, "ring": "float16:u float64:u float64:g", "state_indices": "low", **TOKEN},
        on_a_ring(), state_indices=ints(1, 0),
    ),
    case(
        "advance_ring",
        {
            "ring": (
                "float16:k float64:k less1:k less3:k more3:k none3:k float16:u float64:u less3:u "
                "more3:u none3:u float64:g"
            ),
            "state_indices": "low", **TOKEN,
        },
        on_a_ring("ring", "cursor", max_tokens=2), num_accepted_tokens=ints(1, 2),
        force_flush=ones(2).bool(), state_indices=ints(1, 0),
    ),
    case(
        "materialise_ring",
        {"state": WIDE, "ring": "float16:k float64:k less1:k float16:u float64:u float64:g",
         "state_indices": "low", **TOKEN},
        on_a_ring("ring", "cursor"), state=V_FIRST, state_indices=ints(1, 0),
    ),
    case("FusedSwiGLU", {}, in_features=4, hidden_dim=6),
    case(
        "build_cp_context", {"cu_seqlens": "int8", "cu_seqlens_cpu": "int8"},
        cu_seqlens=ints(0, 4, 12), cu_seqlens_cpu=ints(0, 4, 12),
    ),
    case("build_cp_context", {}, cu_seqlens=[0, 4, 8, 12], batch_size=3),
    case(
        "shard_batch",
        {
            "batch": (
                "int8:input_ids high:input_ids low:input_ids int8:labels high:labels low:labels "
                "int8:attention_mask bool:attention_mask float16:attention_mask "
                "float32:attention_mask float64:attention_mask high:attention_mask "
                "low:attention_mask int8:position_ids"
            ),
        },
        batch=batch(),
    ),
    *[
        case(name, taken, lambda kernel: {"model": nn.Linear(4, 4)})
        for name, taken in (("kernelize", {"replay": "zero"}), ("restore", {}), ("decorate", {}))
    ],
    case(
        "graphed_step", {},
        lambda kernel: {"model": nn.Linear(4, 4), "cache": static_cache(), "batch_size": 2},
    ),
    case("layer_mapping", {"version": "zero"}, source="org/name", version=1),
    case("layer_mapping", {}),
    case("implementation_of", {}, function=lambda: None),
]  # fmt: skip

EXCUSED = {  # public names without a case
    "layers": "a module",
    "load_mtp": "it needs a model with such a layer: tests/decoding/test_mtp.py",
    "register_experts": "it has no arguments",
    "use_reference": "it has no arguments",
    "verify": "it needs what tools/build.py built: tests/repository/test_build.py",
}
