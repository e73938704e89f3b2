"""Norm, rotary embedding, gate and attention over a cache as operations."""

from ..runtime.operation import Operation
from . import call as calls
from . import checks, reference

FAMILY, LATENT = "attention.attention", "attention.latent"
VARYING = {"k_cache": 2, "v_cache": 2, "mask": 3}  # the slots of a cache that grows


def _differentiable(call: calls.QkNormRope) -> bool:
    return not any([x is not None and x.requires_grad for x in (call.cos, call.sin)])


QK_NORM_ROPE = Operation(
    FAMILY, "qk_norm_rope_fwd", calls.QkNormRope, reference, check=checks.fused_qk_norm_rope,
    like=("q", "k"), outputs=2, differentiable=_differentiable,
)  # fmt: skip
WITH_CACHE = Operation(
    FAMILY, "qk_norm_rope_fwd", calls.QkNormRope, reference, check=checks.fused_qk_norm_rope,
    like=("q", "k"), outputs=2, written=("key_cache", "value_cache"), schema="qk_norm_rope_cache",
)  # fmt: skip
QK_GRADIENT = Operation(
    FAMILY, "qk_norm_rope_bwd", calls.QkGradient, reference,
    like=("dq", "dk", "q_weight", "k_weight"), outputs=4,
)  # fmt: skip
SIGMOID_GATE = Operation(
    FAMILY, "sigmoid_gate_fwd", calls.SigmoidGate, reference, check=checks.sigmoid_gate, like=("x",)
)
SIGMOID_GRADIENT = Operation(
    FAMILY, "sigmoid_gate_bwd", calls.SigmoidGradient, reference, like=("x", "gate"), outputs=2
)
KVCACHE_ATTENTION = Operation(
    FAMILY, "kvcache_attention", calls.KvCacheAttention, reference, like=("q",),
    check=checks.attention_with_kvcache, varying=VARYING,
)  # fmt: skip


def _of_latents(call):  # LatentAttention or LatentStep
    B, T, H, _ = call.q.shape
    return call.q.new_empty(B, T, H, call.weight.shape[0] // H - call.options.nope)


def _written_latents(call: calls.LatentNormRope) -> tuple:
    (B, T, width), C = call.kv.shape, call.weight.shape[0]
    return call.kv.new_empty(B, 1, T, C), call.kv.new_empty(B, 1, T, width - C)


LATENT_ATTENTION = Operation(
    LATENT, "latent_attention", calls.LatentAttention, reference,
    check=checks.latent_attention_with_kvcache, fake=_of_latents, aligned=("latents", "rotated"),
    varying={"latents": 2, "rotated": 2, "mask": 3},
)  # fmt: skip
LATENT_NORM_ROPE = Operation(
    LATENT, "latent_norm_rope", calls.LatentNormRope, reference,
    check=checks.fused_latent_norm_rope, outputs=2, fake=_written_latents, written=("q",),
)  # fmt: skip
LATENTS_TO_CACHE = Operation(
    LATENT, "latent_norm_rope", calls.LatentNormRope, reference,
    check=checks.fused_latent_norm_rope, outputs=2, fake=_written_latents,
    written=("q", "latent_cache", "rotated_cache"), schema="latent_norm_rope_cache",
)  # fmt: skip


LATENT_STEP = Operation(  # for layers; not part of the API
    "attention.latent_step", "latent_step", calls.LatentStep, reference, fake=_of_latents,
    check=lambda call: call._replace(options=calls.LatentStepOptions(*call.options)),
    aligned=("latents", "rotated"), written=("latents", "rotated", "length"),
)  # fmt: skip


def _save_qk(ctx, inputs, output) -> None:
    q, k, cos, sin, q_weight, k_weight, _, _, _, _, *ctx.options = inputs
    kept = (None if q_weight is None else q, None if k_weight is None else k)  # only norms read it
    ctx.save_for_backward(*kept, cos, sin, q_weight, k_weight)


def _qk_backward(ctx, dq, dk):
    found = QK_GRADIENT.in_gradient((dq, dk, *ctx.saved_tensors), ctx.options)
    q, k, _, _, q_weight, k_weight, *nothing = ctx.needs_input_grad
    needs = (q, k, q_weight, k_weight)
    dq, dk, *weights = [d if needed else None for d, needed in zip(found, needs)]
    return (dq, dk, None, None, *weights, *(None for _ in nothing))


QK_NORM_ROPE.register_gradient(_save_qk, _qk_backward, QK_GRADIENT, "fused_qk_norm_rope")


def _save_gate(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gate_backward(ctx, dy):
    found = SIGMOID_GRADIENT.in_gradient((*ctx.saved_tensors, dy))
    return tuple([d if needed else None for d, needed in zip(found, ctx.needs_input_grad)])


SIGMOID_GATE.register_gradient(_save_gate, _gate_backward, SIGMOID_GRADIENT, "sigmoid_gate")
