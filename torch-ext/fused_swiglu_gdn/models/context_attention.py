"""Softmax attention over sequences that are split among ranks: K and V are gathered.

It is an attention function in transformers' own registry, so that nothing of a model is patched.
Every rank computes the outputs of its own tokens, segment by segment, from the keys of their
sequences.
"""

import contextlib
import contextvars
from typing import Callable, Iterator, List, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.plain import Named, named_modules
from ..parallel import checks
from ..parallel.context import CpContext
from .report import Row

NAME = "fused_swiglu_gdn_cp"
BEFORE = "_attn_implementation_before"  # attribute of a model whose attention gathers
OTHER = torch.zeros(1, 1, 1, 1, dtype=torch.bool)  # in place of a mask that is not computed here
_judging = contextvars.ContextVar("judging", default=False)
UNKNOWN = ("sliding_window", "softcap", "s_aux")  # of attention functions: not computed here


def gathered_attention(
    module: nn.Module,
    query: Tensor,  # [B, HQ, T, D]
    key: Tensor,  # [B, HK, T, D]
    value: Tensor,  # [B, HK, T, D]
    attention_mask: Optional[Tensor] = None,
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    cp_context: Optional[CpContext] = None,
    **kwargs,
):
    """Causal attention inside each sequence, [B, T, HQ, D], and None for the weights."""
    if cp_context is None:
        raise ValueError(
            "cp_context must be given to a model of kernelize(cp_group=...): shard_batch makes it, "
            "and restore(model) goes back to one process"
        )
    checks.is_context(cp_context)
    checks.holds_tokens(cp_context, "query", query.shape[0], query.shape[2])
    _has_positions(cp_context, kwargs.get("position_ids"))
    if attention_mask is OTHER:
        raise ValueError(
            "attention must be causal and to all tokens of a sequence with cp_context, but a "
            f"{type(module).__name__} has a window, chunks or tokens that see later ones"
        )
    given = {"attention_mask": attention_mask, "dropout": dropout}
    for name, x in {**given, **{name: kwargs.get(name) for name in UNKNOWN}}.items():
        checks.is_absent(name, x)
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ValueError("cp_context must not be given for attention that is not causal")
    both = cp_context.unshard(torch.cat([key, value], -1), 2)  # one message for both
    both = both.split([key.shape[-1], value.shape[-1]], -1)
    return _attention(query, *both, scaling, cp_context), None


def _has_positions(cp: CpContext, given: Optional[Tensor]) -> None:
    """Checks once for a context that its positions have been given to the model, which else counts
    from 0 in every process. The host waits only where they lie elsewhere."""
    own = cp.position_ids
    if given is None or given is own or given.shape != own.shape:
        return
    if (
        given.data_ptr() == own.data_ptr()
        or given.is_cuda
        and torch.cuda.is_current_stream_capturing()
    ):
        return

    def check() -> bool:
        if not torch.equal(given, own.to(given.device, given.dtype)):
            raise ValueError(
                "position_ids must be cp_context.position_ids, as shard_batch has them: this "
                "model has counted others"
            )
        return True

    cp.once("positions of the model", check)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: Optional[float], cp: CpContext) -> Tensor:
    T = q.shape[2]
    rows: List[List[Tensor]] = [[] for _ in range(q.shape[0])]
    for piece, at in zip(cp.pieces, cp.bounds):
        row, a = divmod(at, T)
        before = row * cp.row
        keys = slice(cp.lengths[piece.sequence] - before, piece.stop - before)
        where = slice(row, row + 1)
        parts = q[where, :, a : a + piece.length], k[where, :, keys], v[where, :, keys]
        rows[row].append(_causal(*parts, scale))
    outputs = [torch.cat(parts, 2) for parts in rows if parts]
    if not outputs:  # no tokens here: yet the backward is to reach the gather, as in the others
        empty = q.new_empty(*q.shape[:3], v.shape[-1])
        return (empty + sum(x.flatten()[:0].sum() for x in (q, k, v))).transpose(1, 2)
    return torch.cat(outputs).transpose(1, 2).contiguous()


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: Optional[float]) -> Tensor:
    """Attention of the last tokens of a sequence to all of it; no mask is allocated on GPUs."""
    from torch.nn.attention.bias import causal_lower_right

    alone = q.shape[2] == k.shape[2]
    mask = None if alone else causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=alone, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _no_mask(
    *args, attention_mask=None, local_size=None, mask_function=None, **kwargs
) -> Optional[Tensor]:
    """The mask function of this implementation: segments determine the mask.

    Models make masks of all kinds, whether or not a layer has such attention; only that refuses.
    """
    if attention_mask is not None:
        raise ValueError("attention_mask must not be given with cp_context: sequences are packed")
    if local_size is not None or _judging.get() and not _is_causal(mask_function):
        return OTHER
    return None


@contextlib.contextmanager
def judging_masks() -> Iterator[None]:
    """Inside, masks of one sequence a row are tried: any that is not causal and to all tokens
    refuses."""
    token = _judging.set(True)
    try:
        yield
    finally:
        _judging.reset(token)


def _is_causal(function: Callable) -> bool:
    """True if a mask function of transformers has token `far` see those up to itself."""
    far = 1 << 30
    kv = [torch.tensor(x) for x in (0, 1, far // 3, far, far + 1)]
    q, first = kv[3], kv[0]
    try:
        return [bool(function(first, first, q, x)) for x in kv] == [True] * 4 + [False]
    except IndexError:  # it looks up what these tokens are
        return False


def serve_attention(model: nn.Module) -> List[Row]:
    """Makes all attention of a model gather; restore_attention undoes it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, gathered_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    found = []
    for name, module in named_modules(model):
        if not hasattr(module, "set_attn_implementation"):
            continue
        if module.config._attn_implementation != NAME:
            module.__dict__[BEFORE] = module.config._attn_implementation
            module.set_attn_implementation(NAME)
        reason = None
        if module.config._attn_implementation != NAME:
            reason = "its attention is not by transformers' AttentionInterface"
        found.append(Row(name, type(module).__name__, "attention", "gathered keys", reason))
    return found


def restore_attention(modules: Named) -> None:
    for _, module in modules:
        before = module.__dict__.pop(BEFORE, None)
        if before is not None:
            module.set_attn_implementation(before)
