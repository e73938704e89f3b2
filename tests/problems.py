"""A problem of each public function: tensors in fp64, from which a call is made in any dtype, on
any device, of any number of tokens; and which of its tensors have gradients or are written.

The reference of a call is the function itself in fp64 on the CPU: plain torch, its definition.
"""

from typing import Callable, Dict, NamedTuple, Tuple

import torch
import torch.distributed as dist
from conftest import load_package
from torch import Tensor

F64 = torch.float64


class Draw:
    """Random tensors in fp64, by a seed."""

    def __init__(self, seed: int):
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=F64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.random, dtype=F64)


class Problem(NamedTuple):
    """make(draw, B, T) gives the arguments of a call of B rows of T tokens; tensors in fp64."""

    function: str
    make: Callable
    grads: Tuple[str, ...] = ()  # arguments that have a gradient
    written: Tuple[str, ...] = ()  # arguments that the call writes
    wide: Tuple[str, ...] = ()  # arguments that stay in fp32 in a call of 16 bits
    tokens: int = 5
    rows: Tuple[str, ...] = ()  # arguments whose first dimension is the result's
    factor: float = 1.0  # of the tolerance


def cast(x, dtype, device):
    """Arguments in a dtype, on a device; what is no floating tensor stays as it is."""
    if isinstance(x, Tensor):
        return x.to(device, dtype if x.is_floating_point() else x.dtype)
    if hasattr(x, "_fields"):  # a ring, whose gates are in fp32
        of = {"g": torch.promote_types(dtype, torch.float32)}
        return x._replace(**{n: cast(y, of.get(n, dtype), device) for n, y in x._asdict().items()})
    return x


def arguments(problem: Problem, dtype=F64, device="cpu", seed=0, B=2, T=None, round_to=None):
    """Arguments of a call. round_to: the dtype whose values they have, whatever their own."""
    made = problem.make(Draw(seed), B, problem.tokens if T is None else T)
    found = {}
    for name, x in made.items():
        narrow = torch.float32 if name in problem.wide else None
        if round_to is not None:
            x = cast(x, narrow or round_to, "cpu")
        given = dtype if dtype is F64 else (narrow or dtype)
        found[name] = cast(x, given, device)
    return found


# ---- the calls


def swiglu(draw, B, T):
    w = [draw(24, 16) * 0.25 for _ in range(2)]
    return {"x": draw(B, T, 16), "w_gate": w[0], "w_up": w[1], "b_gate": draw(24), "b_up": draw(24)}


def mlp(draw, B, T):
    return {**swiglu(draw, B, T), "w_down": draw(16, 24) * 0.2, "b_down": draw(16)}


def gated(draw, B, T):
    return {"x": draw(B, T, 3, 16), "gate": draw(B, T, 3, 16), "weight": draw(16)}


def convolution(draw, B, T):
    return {"x": draw(B, 8, T), "weight": draw(8, 4), "bias": draw(8), "activation": "silu",
            "initial_states": draw(B, 8, 3), "return_final_states": True}  # fmt: skip


def rotary(draw, B, T):
    return {"q": draw(B, T, 4, 16), "k": draw(B, T, 2, 16), "cos": draw(B, T, 16),
            "sin": draw(B, T, 16), "q_weight": draw(16), "k_weight": draw(16)}  # fmt: skip


def over_cache(draw, B, T):
    k, v = draw(2, B, 2, 16, 16)
    return {"q": draw(B, 1, 4, 16), "k_cache": k, "v_cache": v,
            "cache_seqlens": torch.tensor(min(T + 2, 16))}  # fmt: skip


def experts(draw, B, T):
    ids = draw.uniform(B * T, 4).argsort(-1)[:, :2]
    return {"x": draw(B * T, 16), "w_gate_up": draw(4, 32, 16) * 0.25,
            "w_down": draw(4, 16, 16) * 0.25, "top_k_index": ids,
            "top_k_weights": draw.uniform(B * T, 2)}  # fmt: skip


def topk(draw, B, T):
    return {"logits": draw(B * T, 8), "top_k": 2}


def rule(draw, B, T, K=16, V=16, **more):
    k = torch.nn.functional.normalize(draw(B, T, 2, K), dim=-1)
    return {"q": draw(B, T, 2, K), "k": k, "v": draw(B, T, 4, V),
            "g": torch.nn.functional.logsigmoid(draw(B, T, 4) + 2), "beta": draw(B, T, 4).sigmoid(),
            "initial_state": draw(B, 4, K, V) * 0.2, "output_final_state": True,
            **more}  # fmt: skip


def ends(B, T):
    """cu_seqlens of B sequences; of an odd number of tokens the first has none."""
    found = torch.arange(B + 1) * T
    found[1:2] *= (T + 1) % 2 if B > 1 else 1
    return found


def fragments(draw, B, T, make=rule, states=(4, 16, 16)):
    """Rows whose halves, the second one first, are fragments of one process: they are chained as
    those of several are. A state for each; the first one's is read."""
    found, half = make(draw, B, T), T // 2
    if not dist.is_initialized():  # tests/conftest.py ends it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found["cp_context"] = cp = load_package().build_cp_context(
        [T * n for n in range(B + 1)], batch_size=B, layout=[[(half, T), (0, half)]]
    )
    name = next(x for x in ("initial_state", "initial_states") if x in found)
    found[name] = draw(len(cp.pieces), *states) * 0.2
    return found


def packed(draw, B, T, make=rule):
    """Its sequences in one row, and a state for each."""
    found = make(draw, 1, B * T)
    found["initial_state"] = draw(B, *found["initial_state"].shape[1:]) * 0.2
    found["cu_seqlens"] = ends(B, T)
    return found


def raw(draw, B, T, make=rule):
    """The gate and beta are computed in the kernel."""
    found = make(draw, B, T)
    found.update(g=draw(*found["g"].shape), beta=draw(B, T, 4), A_log=draw(4) * 0.3)
    found.update(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    found.update(dt_bias=draw(4 * 16 if found["g"].ndim == 4 else 4), use_qk_l2norm_in_kernel=True)
    return found


def channels(draw, B, T):
    found = rule(draw, B, T)
    found["g"] = -5 * draw(B, T, 4, 16).sigmoid() / 4
    return found


def pool(draw, B, T, make=rule):
    """States of a pool, written in place."""
    found = make(draw, B, T)
    found["initial_state"] = draw(B + 2, 4, 16, 16) * 0.2
    found.update(state_indices=torch.arange(B) + 1, inplace_final_state=True)
    del found["output_final_state"]
    return found


def update(draw, B, T):
    return {"x": draw(B, 8, 1), "conv_state": draw(B, 8, 4), "weight": draw(8, 4), "bias": draw(8),
            "activation": "silu"}  # fmt: skip


def ring(draw, B, T):
    """A token on a ring that holds two."""
    found = rule(draw, B, 1)
    del found["output_final_state"]
    state = found["initial_state"]
    found["ring"] = load_package().make_ring(state, 2, F64, rows=4)
    for x in found["ring"]:
        if isinstance(x, Tensor) and x.is_floating_point():
            x.copy_(draw(*x.shape) * 0.2)
    found["cursor"] = torch.tensor([[0, 2]], dtype=torch.int32).repeat(B, 1)
    return found


def materialised(draw, B, T):
    found = ring(draw, B, T)
    return {"state": found["initial_state"], "ring": found["ring"], "cursor": found["cursor"]}


def with_more(make, *names, **more):
    """Another call's arguments, without those that are named; more: those beside, or functions
    (draw, B, T, arguments) of them."""

    def made(draw, B, T):
        found = {n: x for n, x in make(draw, B, T).items() if n not in names}
        for name, x in more.items():
            found[name] = x(draw, B, T, found) if callable(x) else x
        return found

    return made


def v_first(make):
    turned = lambda draw, B, T, x: x["initial_state"].mT.contiguous()  # noqa: E731
    return with_more(make, initial_state=turned, state_v_first=True, scale=0.3)


def slots(draw, B, T, x):
    return torch.arange(B) + 1


def latent(draw, B, T):
    return {"q": draw(B, T, 3, 24), "latents": draw(B, 1, 16, 12), "rotated": draw(B, 1, 16, 8),
            "weight": draw(3 * 26, 12) * 0.3, "qk_nope_head_dim": 16,
            "cache_seqlens": torch.tensor(12)}  # fmt: skip


def latent_rope(draw, B, T):
    return {"q": draw(B, T, 3, 24), "kv": draw(B, T, 20), "weight": draw(12),
            "cos": draw(B, T, 8), "sin": draw(B, T, 8)}  # fmt: skip


def loss(draw, B, T):
    return {"hidden": draw(B * T, 16), "weight": draw(23, 16), "bias": draw(23),
            "target": (draw.uniform(B * T) * 23).long()}  # fmt: skip


def packed_rows(make, **state):
    """Of a convolution: its sequences in one row."""

    def made(draw, B, T):
        found = make(draw, 1, B * T)
        found["cu_seqlens"] = ends(B, T)
        for name, shape in state.items():
            found[name] = draw(B, *shape)
        return found

    return made


RULE = ("q", "k", "v", "g", "beta", "initial_state")
RAW = (*RULE, "A_log", "dt_bias")
WIDE = ("g", "beta", "initial_state", "A_log", "dt_bias")
LOSS = ("hidden", "weight", "bias")
LINEAR = ("x", "w_gate", "w_up", "b_gate", "b_up")
PROBLEMS: Dict[str, Problem] = {
    "fused_swiglu": Problem("fused_swiglu", swiglu, LINEAR, rows=("x",)),
    "fused_swiglu_mlp": Problem(
        "fused_swiglu_mlp", mlp, (*LINEAR, "w_down", "b_down"), rows=("x",), factor=2
    ),
    "fused_swiglu_mlp, recompute": Problem(
        "fused_swiglu_mlp", lambda *a: {**mlp(*a), "recompute": True},
        (*LINEAR, "w_down", "b_down"), rows=("x",), factor=2,
    ),
    "silu_mul": Problem(
        "silu_mul", lambda draw, B, T: {"gate": draw(B, T, 24), "up": draw(B, T, 24)},
        ("gate", "up"), rows=("gate", "up"),
    ),
    "fused_experts": Problem(
        "fused_experts", experts, ("x", "w_gate_up", "w_down", "top_k_weights"), factor=2,
        wide=("top_k_weights",),
    ),
    "fused_topk": Problem("fused_topk", topk),
    "rms_norm": Problem(
        "rms_norm", lambda draw, B, T: {"x": draw(B, T, 32), "weight": draw(32)}, ("x", "weight"),
        rows=("x",),
    ),
    "rms_norm, residual": Problem(
        "rms_norm",
        lambda draw, B, T: {"x": draw(B, T, 32), "weight": draw(32), "residual": draw(B, T, 32)},
        ("x", "weight", "residual"), rows=("x", "residual"),
    ),
    "rms_norm_gated": Problem(
        "rms_norm_gated", gated, ("x", "gate", "weight"), rows=("x", "gate")
    ),
    "gated_delta_gate": Problem(
        "gated_delta_gate",
        lambda draw, B, T: {"a": draw(B, T, 4), "A_log": draw(4) * 0.3, "dt_bias": draw(4)},
        ("a", "A_log", "dt_bias"), rows=("a",), wide=("A_log", "dt_bias"),
    ),
    "sigmoid_gate": Problem(
        "sigmoid_gate", lambda draw, B, T: {"x": draw(B, T, 32), "gate": draw(B, T, 32)},
        ("x", "gate"), rows=("x", "gate"),
    ),
    "causal_conv1d_fn": Problem(
        "causal_conv1d_fn", convolution, ("x", "weight", "bias", "initial_states"),
        rows=("x", "initial_states"),
    ),
    "causal_conv1d_update": Problem(
        "causal_conv1d_update", update, written=("conv_state",), rows=("x", "conv_state")
    ),
    "fused_qk_norm_rope": Problem(
        "fused_qk_norm_rope", rotary, ("q", "k", "q_weight", "k_weight"),
        rows=("q", "k", "cos", "sin"),
    ),
    "attention_with_kvcache": Problem(
        "attention_with_kvcache", over_cache, rows=("q", "k_cache", "v_cache")
    ),
    "chunk_gated_delta_rule": Problem(
        "chunk_gated_delta_rule", rule, RULE, wide=WIDE, rows=RULE, factor=4
    ),
    "chunk_gated_delta_rule, gates inside": Problem(
        "chunk_gated_delta_rule", raw, RAW, wide=WIDE, rows=RULE, factor=4
    ),
    "chunk_gated_delta_rule, packed": Problem(
        "chunk_gated_delta_rule", packed, RULE, wide=WIDE, factor=4
    ),
    "chunk_gated_delta_rule, pool": Problem(
        "chunk_gated_delta_rule", pool, written=("initial_state",), wide=WIDE, factor=4
    ),
    "chunk_gated_delta_rule_opt": Problem(
        "chunk_gated_delta_rule_opt", rule, wide=WIDE, rows=RULE, factor=4
    ),
    "chunk_gated_delta_rule_opt_vk": Problem(
        "chunk_gated_delta_rule_opt_vk", rule, wide=WIDE, rows=RULE, factor=4
    ),
    "fused_recurrent_gated_delta_rule": Problem(
        "fused_recurrent_gated_delta_rule", rule, RULE, wide=WIDE, rows=RULE, factor=4
    ),
    "fused_recurrent_gated_delta_rule, gates inside": Problem(
        "fused_recurrent_gated_delta_rule", raw, RAW, wide=WIDE, rows=RULE, factor=4
    ),
    "fused_recurrent_gated_delta_rule, pool": Problem(
        "fused_recurrent_gated_delta_rule", pool, written=("initial_state",), wide=WIDE, factor=4
    ),
    "replay_gated_delta_rule": Problem(
        "replay_gated_delta_rule", ring, wide=WIDE, factor=4
    ),
    "materialise_ring": Problem("materialise_ring", materialised, wide=("state",)),
    "chunk_kda": Problem("chunk_kda", channels, RULE, wide=WIDE, rows=RULE, factor=4),
    "chunk_kda, gates inside": Problem(
        "chunk_kda", lambda *a: raw(*a, make=channels), RAW, wide=WIDE, rows=RULE, factor=4
    ),
    "chunk_kda, packed": Problem(
        "chunk_kda", lambda *a: packed(*a, make=channels), RULE, wide=WIDE, factor=4
    ),
    "fused_recurrent_kda": Problem(
        "fused_recurrent_kda", channels, RULE, wide=WIDE, rows=RULE, factor=4
    ),
    "fused_recurrent_kda, pool": Problem(
        "fused_recurrent_kda", lambda *a: pool(*a, make=channels), written=("initial_state",),
        wide=WIDE, factor=4,
    ),
}  # fmt: skip

# Further forms of the same functions, of which tests/functions/test_properties.py asks the same.
FORMS: Dict[str, Problem] = {
    "latent_attention_with_kvcache": Problem(
        "latent_attention_with_kvcache", latent, rows=("q", "latents", "rotated"), factor=2
    ),
    "fused_latent_norm_rope": Problem("fused_latent_norm_rope", latent_rope, written=("q",)),
    "linear_cross_entropy": Problem("linear_cross_entropy", loss, LOSS, factor=4),
    "token_log_probs": Problem(
        "token_log_probs", with_more(loss, entropy=True), LOSS, factor=4
    ),
}  # fmt: skip


def form(name: str, called: str, make, **more) -> None:
    FORMS[f"{name}, {called}"] = {**PROBLEMS, **FORMS}[name]._replace(make=make, **more)


CHUNK, STEPS = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
for name, make in ((CHUNK, rule), (STEPS, rule), ("chunk_kda", channels),
                   ("fused_recurrent_kda", channels)):  # fmt: skip
    form(name, "V first", v_first(make))
    form(name, "no state", with_more(make, "initial_state"), grads=RULE[:5], rows=RULE[:5])
for name, make in ((CHUNK, rule), ("chunk_kda", channels)):
    form(name, "checkpoints", with_more(make, checkpoint_every=64), tokens=67, rows=())
    form(
        name, "pool that is read", with_more(
            lambda *a, make=make: pool(*a, make=make), inplace_final_state=False,
            output_final_state=True, has_initial_state=lambda draw, B, T, x: torch.arange(B) != 1,
        ), rows=(), grads=(),
    )  # fmt: skip
for name, make in ((STEPS, rule), ("fused_recurrent_kda", channels)):
    form(name, "packed", lambda *a, make=make: packed(*a, make=make), rows=())
    form(
        name, "all states", with_more(make, "output_final_state", output_all_states=True),
        grads=(),
    )  # fmt: skip
    form(
        name, "out", with_more(make, out=lambda draw, B, T, x: torch.zeros_like(x["v"])),
        grads=(), rows=(), written=("out",),
    )  # fmt: skip
    form(
        name, "drafts", with_more(
            make, "output_final_state", inplace_final_state=True,
            initial_state=lambda draw, B, T, x: draw(B * T + 1, 4, 16, 16) * 0.2,
            state_indices=lambda draw, B, T, x: torch.arange(B * T).view(B, T) + 1,
            num_accepted_tokens=lambda draw, B, T, x: torch.full((B,), max(T - 1, 1)),
        ), grads=(), rows=(), written=("initial_state",),
    )  # fmt: skip
form("chunk_kda", "bounded", with_more(
    lambda *a: raw(*a, make=channels), lower_bound=-5.0,
), grads=RAW)  # fmt: skip
form(CHUNK, "kept", with_more(raw, recompute=False, allow_neg_eigval=True), grads=RAW)
form(CHUNK, "fragments", fragments, tokens=11, rows=())
form("chunk_kda", "fragments", lambda *a: fragments(*a, channels), tokens=11, rows=())
form("causal_conv1d_fn", "fragments", lambda *a: fragments(*a, convolution, (8, 3)), tokens=11,
     rows=())  # fmt: skip
form("causal_conv1d_fn", "plain", with_more(
    convolution, "initial_states", "return_final_states", "bias", "activation",
), grads=("x", "weight"), rows=("x",))  # fmt: skip
form("causal_conv1d_fn", "packed", packed_rows(convolution, initial_states=(8, 3)), rows=())
form("causal_conv1d_fn", "seq_idx", with_more(
    convolution, "initial_states", "return_final_states",
    seq_idx=lambda draw, B, T, x: (torch.arange(T) > T // 2).int().expand(B, T),
), grads=("x", "weight", "bias"), rows=("x", "seq_idx"))  # fmt: skip
form("causal_conv1d_update", "drafts", with_more(
    update, x=lambda draw, B, T, x: draw(B, 8, 3), conv_state_indices=slots,
    conv_state=lambda draw, B, T, x: draw(B + 2, 8, 6),
    num_accepted_tokens=lambda draw, B, T, x: torch.full((B,), 2),
), rows=())  # fmt: skip
form("causal_conv1d_update", "packed", packed_rows(
    with_more(update, x=lambda draw, B, T, x: draw(B, 8, T)), conv_state=(8, 9),
), rows=())  # fmt: skip
form("rms_norm", "gemma", with_more(
    PROBLEMS["rms_norm"].make, casting_mode="gemma", offset=1.0, eps=1e-3,
))  # fmt: skip
form("rms_norm", "added after", with_more(PROBLEMS["rms_norm, residual"].make, after=True),
     grads=("x", "weight", "residual"), rows=("x", "residual"))  # fmt: skip
form("rms_norm", "no weight", with_more(PROBLEMS["rms_norm"].make, "weight"), grads=("x",))
form("rms_norm_gated", "sigmoid", with_more(gated, activation="sigmoid"))
for activation in ("gelu", "gelu_tanh", "relu"):
    form("silu_mul", activation, with_more(PROBLEMS["silu_mul"].make, activation=activation))
    form("fused_swiglu", activation, with_more(swiglu, activation=activation))
form("fused_experts", "as gpt-oss", with_more(
    experts, w_gate_up=lambda draw, B, T, x: draw(4, 16, 24).mT * 0.25,
    w_down=lambda draw, B, T, x: draw(4, 12, 16).mT * 0.25, b_gate_up=lambda d, B, T, x: d(4, 24),
    b_down=lambda draw, B, T, x: draw(4, 16), activation="swigluoai", limit=0.9, interleaved=True,
), grads=("x", "w_gate_up", "w_down", "top_k_weights", "b_gate_up", "b_down"))  # fmt: skip
form("fused_experts", "held elsewhere", with_more(
    experts, top_k_index=lambda draw, B, T, x: x["top_k_index"] * 0 - 1,
), grads=("x",))  # fmt: skip
form("fused_experts", "recompute", with_more(experts, recompute=True, activation="relu"))
form("fused_topk", "sigmoid", with_more(
    topk, scoring="sigmoid", renormalize=False, scale=2.5, bias=lambda draw, B, T, x: draw(8),
), grads=("logits",), wide=("bias",))  # fmt: skip
form("fused_topk", "rounded", with_more(
    topk, scoring="sigmoid", eps=1e-6, rounds=True, bias=lambda draw, B, T, x: draw(8),
), wide=("bias",))  # fmt: skip
# the gradient of weights that add up to 1 is of differences
form("fused_topk", "gradients", topk, grads=("logits",), factor=2)
form("fused_topk", "groups", with_more(
    topk, n_group=4, topk_group=2, bias=lambda draw, B, T, x: draw(8),
), grads=("logits",), wide=("bias",))  # fmt: skip
form("fused_qk_norm_rope", "interleaved", with_more(
    rotary, cos=lambda draw, B, T, x: draw(B, T, 6), sin=lambda draw, B, T, x: draw(B, T, 6),
    interleaved=True, offset=0.5, norm="all", q_weight=lambda draw, B, T, x: draw(64),
    k_weight=lambda draw, B, T, x: draw(32),
))  # fmt: skip
form("fused_qk_norm_rope", "pairs", with_more(
    rotary, cos=lambda draw, B, T, x: draw(B, T, 3, 2), sin=lambda draw, B, T, x: draw(B, T, 3, 2),
    interleaved=True, offset=0.5,
))  # fmt: skip
form("fused_qk_norm_rope", "norms", with_more(rotary, "cos", "sin"), rows=("q", "k"))
form("fused_qk_norm_rope", "plain", with_more(rotary, "cos", "sin", "q_weight", "k_weight"),
     grads=("q", "k"), rows=("q", "k"))  # fmt: skip
form("fused_qk_norm_rope", "caches", with_more(
    rotary, v=lambda draw, B, T, x: draw(B, T, 2, 8), cache_position=torch.tensor(3),
    key_cache=lambda draw, B, T, x: draw(B, 2, 80, 16),
    value_cache=lambda draw, B, T, x: draw(B, 2, 80, 8),
), grads=(), rows=(), written=("key_cache", "value_cache"))  # fmt: skip
form("attention_with_kvcache", "mask", with_more(
    over_cache, attention_mask=lambda draw, B, T, x: draw(B, 1, 1, 16) > -0.5,
    softmax_scale=0.3, cache_seqlens=lambda draw, B, T, x: torch.arange(B) + 9,
), rows=())  # fmt: skip
form("linear_cross_entropy", "of each", with_more(
    loss, reduction="none", label_smoothing=0.1, z_loss=0.01, softcap=3.0, temperature=0.7,
))  # fmt: skip

# What calls write, by problem, and what makes those of rings do it.
WRITTEN = {name: x.written for name, x in {**PROBLEMS, **FORMS}.items() if x.written}
WRITTEN["replay_gated_delta_rule"], WRITTEN["materialise_ring"] = ("initial_state",), ("state",)
WRITE = {
    "replay_gated_delta_rule": {"force_flush": torch.tensor([True, True])},
    "materialise_ring": {"inplace": True},
}


def writing(kernel, name: str, **sizes) -> tuple:
    """(function, arguments in fp32) of a call of two rows that writes."""
    problem = {**PROBLEMS, **FORMS}[name]
    given = {**arguments(problem, torch.float32, **sizes), **WRITE.get(name, {})}
    return getattr(kernel, problem.function), given
