"""Operators of norm, rotary embedding, gate and attention over a cache."""

from typing import Optional, Tuple

from torch import Tensor

from ..runtime.ops import no_second_derivative, operator, plan, run, serve
from . import reference
from .call import QkNormRope, QkOptions

FAMILY = "attention.attention"


@operator("qk_norm_rope_fwd", like=("q", "k"))
def _qk_norm_rope_fwd(*fields: QkNormRope) -> Tuple[Tensor, Tensor]:
    args = (QkNormRope.of(fields),)
    return serve(FAMILY, "qk_norm_rope_fwd", reference.qk_norm_rope_fwd, args)


@operator("qk_norm_rope_bwd", like=("dq", "dk", "q_weight", "k_weight"))
def _qk_norm_rope_bwd(
    dq: Tensor,  # [B, T, HQ, D]
    dk: Tensor,  # [B, T, HK, D]
    q: Optional[Tensor],  # [B, T, HQ, D], where q_weight is given; likewise k
    k: Optional[Tensor],
    cos: Optional[Tensor],  # as QkNormRope has it
    sin: Optional[Tensor],
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    *options: QkOptions,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    args = (dq, dk, q, k, cos, sin, q_weight, k_weight, QkOptions(*options))
    return serve(FAMILY, "qk_norm_rope_bwd", reference.qk_norm_rope_bwd, args)


def _save_qk(ctx, inputs, output) -> None:
    q, k, cos, sin, q_weight, k_weight, _, _, _, _, *ctx.options = inputs
    kept = (None if q_weight is None else q, None if k_weight is None else k)  # only norms read it
    ctx.save_for_backward(*kept, cos, sin, q_weight, k_weight)


def _qk_gradients(ctx, dq, dk):
    found = _qk_norm_rope_bwd(dq, dk, *ctx.saved_tensors, *ctx.options)
    q, k, _, _, q_weight, k_weight, *nothing = ctx.needs_input_grad
    needs = (q, k, q_weight, k_weight)
    dq, dk, *weights = [d if needed else None for d, needed in zip(found, needs)]
    return (dq, dk, None, None, *weights, *(None for _ in nothing))


_qk_norm_rope_fwd.register_autograd(_qk_gradients, setup_context=_save_qk)
no_second_derivative(_qk_norm_rope_bwd, "fused_qk_norm_rope")


@operator("qk_norm_rope_cache", mutates_args=("key_cache", "value_cache"), like=("q", "k"))
def _qk_norm_rope_cache(*fields: QkNormRope) -> Tuple[Tensor, Tensor]:
    return _qk_norm_rope_fwd.body(*fields)


def qk_norm_rope(call: QkNormRope) -> Tuple[Tensor, Tensor]:
    def op(call):
        chosen = _qk_norm_rope_fwd if call.key_cache is None else _qk_norm_rope_cache
        return chosen(*call.tensors, *call.options)

    return run(
        FAMILY, "qk_norm_rope_fwd", op, reference.qk_norm_rope_fwd, (call,),
        differentiable=not any(x is not None and x.requires_grad for x in (call.cos, call.sin)),
        written=_caches_of(call),
    )  # fmt: skip


def plan_qk_norm_rope(call: QkNormRope):
    """Returns a function of the tensors for eager calls that match this one, or None."""
    return plan(FAMILY, "qk_norm_rope_fwd", (call,), written=_caches_of(call))


def _caches_of(call: QkNormRope) -> tuple:
    """The tensors that the call writes in place."""
    return () if call.key_cache is None else (call.key_cache, call.value_cache)


@operator("sigmoid_gate_fwd", like=("x",))
def _sigmoid_gate_fwd(x: Tensor, gate: Tensor) -> Tensor:
    return serve(FAMILY, "sigmoid_gate_fwd", reference.sigmoid_gate_fwd, (x, gate))


@operator("sigmoid_gate_bwd", like=("x", "gate"))
def _sigmoid_gate_bwd(x: Tensor, gate: Tensor, dy: Tensor) -> Tuple[Tensor, Tensor]:
    return serve(FAMILY, "sigmoid_gate_bwd", reference.sigmoid_gate_bwd, (x, gate, dy))


def _save_gate(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gate_gradients(ctx, dy):
    found = _sigmoid_gate_bwd(*ctx.saved_tensors, dy)
    return tuple([d if needed else None for d, needed in zip(found, ctx.needs_input_grad)])


_sigmoid_gate_fwd.register_autograd(_gate_gradients, setup_context=_save_gate)
no_second_derivative(_sigmoid_gate_bwd, "sigmoid_gate")


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return run(FAMILY, "sigmoid_gate_fwd", _sigmoid_gate_fwd, reference.sigmoid_gate_fwd, (x, gate))


def plan_sigmoid_gate(x: Tensor, gate: Tensor):
    """Returns a function of the tensors for eager calls that match this one, or None."""
    return plan(FAMILY, "sigmoid_gate_fwd", (x, gate))


@operator("kvcache_attention", like=("q",))
def _kvcache_attention(
    q: Tensor,  # [B, 1, HQ, D]
    k_cache: Tensor,  # [B, HK, S, D]
    v_cache: Tensor,  # [B, HK, S, D]
    cache_seqlens: Tensor,  # [] or [B]
    mask: Optional[Tensor],  # [B or 1, 1, 1, S]
    scale: float,
) -> Tensor:
    args = (q, k_cache, v_cache, cache_seqlens, mask, scale)
    return serve(FAMILY, "kvcache_attention", reference.kvcache_attention, args)


def kvcache_attention(*args) -> Tensor:
    """Attention over the cache; args are those of the operator."""
    return run(
        FAMILY, "kvcache_attention", _kvcache_attention, reference.kvcache_attention, args,
        differentiable=False,
    )  # fmt: skip


def plan_kvcache_attention(*args):
    """Returns a function of the tensors for eager calls that match this one, or None."""
    return plan(FAMILY, "kvcache_attention", args)
