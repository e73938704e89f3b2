"""Norms, rotary embedding, router and loss under the names by which transformers asks `kernels`.

A class or function of that name which computes something else keeps its own code.
"""

import itertools
from types import FunctionType
from typing import Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..attention.api import fused_qk_norm_rope
from ..attention.ops import FAMILY as ATTENTION
from ..experts.api_topk import fused_topk
from ..experts.ops_topk import FAMILY as EXPERTS
from ..loss.ops import CROSS_ENTROPY
from ..loss.ops import FAMILY as LOSS
from ..norm.api import rms_norm
from ..runtime import dispatch
from .forward import Layer
from .norm import NormForm, forward_of, serves
from .own_classes import Answers, Code, code_of_class, code_of_function
from .own_code import cells_of, peeled
from .plain import PLAIN_TENSORS, torch_unpatched


class RMSNorm(Layer):
    """weight * hidden_states / rms(hidden_states), rounded where the module's own class rounds.

    transformers' classes of this name are of two kinds: Llama's rounds before it multiplies by the
    weight, Olmo-Hybrid's after. A class that computes something else keeps its own forward.

    Shapes:
        hidden_states: [..., D] -> [..., D]
    """

    def forward(self, hidden_states):
        return normed(self, hidden_states)


class RMSNormZeroCentered(Layer):
    """(1 + weight) * x / rms(x), as Qwen3.5's norms compute it.

    Shapes:
        x: [..., D] -> [..., D]
    """

    def forward(self, x):
        return normed(self, x)


class rotary_pos_emb(Layer):
    """q * cos + rotate_half(q) * sin, and the same of k: fused_qk_norm_rope without a norm.

    Computed in fp32 and rounded once, where transformers rounds three times in bf16.

    Shapes:
        q: [B, H, T, D] and k: [B, HK, T, D] with unsqueeze_dim 1, [B, T, H, D] with 2;
        cos, sin: [B or 1, T, D] -> as q and k
    """

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        turned = None
        if unsqueeze_dim in (1, 2) and _serves(ATTENTION, "qk_norm_rope_fwd", q, k, cos, sin):
            turned = _turned(self, q, k, cos, sin, unsqueeze_dim)
        return type(self).forward(self, q, k, cos, sin, unsqueeze_dim) if turned is None else turned


class SoftmaxTopKRouter(Layer):
    """The logits of a router, the weights of the experts chosen and their numbers: fused_topk.

        logits = hidden_states @ weight.T;  weights = topk(softmax(logits)), divided by their sum

    Among equal logits the expert with the lower number comes first.

    Shapes:
        hidden_states: [..., H] -> [T, E], [T, K], [T, K] int64
    """

    def forward(self, hidden_states):
        routed = None
        if _serves(EXPERTS, "topk_fwd", hidden_states):
            routed = _routed(self, hidden_states)
        return type(self).forward(self, hidden_states) if routed is None else routed


class ForCausalLMLoss(Layer):
    """The mean cross entropy of the next token, by a kernel that needs no copy of logits in fp32.

    With num_items_in_batch the sum, divided by it. transformers 5.24 has a mapping for the name and
    no class or function that bears it.

    Shapes:
        logits: [B, T, V]; labels: [B, T], or shift_labels: [B, T], shifted already -> []
    """

    def forward(
        self,
        logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
        **kwargs,
    ):  # fmt: skip
        kernel = _serves(LOSS, "cross_entropy_fwd", logits)
        words = {"ignore_index": ignore_index, "shift_labels": shift_labels, "kernel": kernel}
        return next_token_loss(logits, labels, vocab_size, num_items_in_batch, **words)


def next_token_loss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, *,
    kernel: bool = True, **_,
):  # fmt: skip
    """transformers' ForCausalLMLoss, by our operation, or without a kernel by torch's."""
    logits, mean = logits.view(-1, vocab_size), num_items_in_batch is None
    target = next_tokens(labels, shift_labels, ignore_index, logits.device)
    if kernel:
        loss = CROSS_ENTROPY((logits, target), (ignore_index, mean))[0]
    else:
        how = "mean" if mean else "sum"
        loss = F.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction=how)
    return divided(loss, num_items_in_batch)


def next_tokens(labels, shift_labels, ignore_index: int, where: torch.device) -> torch.Tensor:
    """The targets [B * T] of all tokens; shift_labels: those already, [B, T]."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1).to(where)


def divided(loss: torch.Tensor, count) -> torch.Tensor:
    """The loss, divided by a number that the caller may have given, perhaps as a tensor."""
    count = count.to(loss.device) if torch.is_tensor(count) else count
    return loss if count is None else loss / count


def is_next_token_loss(function: object) -> bool:
    """True for transformers' own next-token loss."""
    named = getattr(function, "__name__", None) == "ForCausalLMLoss"
    return named and isinstance(function, FunctionType) and bool(LOSSES.of(function))


def _serves(family: str, operation: str, *tensors) -> bool:
    """True if a kernel may compute the operation on plain tensors, outside torch.compile."""
    if torch.compiler.is_compiling() or not torch_unpatched(False):
        return False
    plain = all(type(x) in PLAIN_TENSORS for x in tensors)
    return plain and dispatch.serves(family, operation, tensors[0])


def normed(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output of a norm of transformers, by rms_norm or by its class's own forward."""
    forward = FORWARDS.of(type(norm)) if serves(x) else None
    return (forward or type(norm).forward)(norm, x)


def _turned(module, q, k, cos, sin, unsqueeze_dim: int) -> Optional[Tuple]:
    """q and k turned, or None if the function of transformers must do it."""
    if not cos.dtype is sin.dtype is k.dtype is q.dtype or q.ndim != 4 or k.ndim != 4:
        return None
    if cos.ndim != 3 or sin.shape != cos.shape or cos.shape[-1] != q.shape[-1]:
        return None
    if not TURNING.of(type(module)):
        return None
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if k.shape[:2] != q.shape[:2] or cos.shape[1] != q.shape[1]:
        return None
    q, k = fused_qk_norm_rope(q, k, cos, sin)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)


def _routed(router: nn.Module, x: torch.Tensor) -> Optional[tuple]:
    """logits, weights and ids, or None if the class's own forward must run."""
    weight, top_k = router._parameters.get("weight"), router.__dict__.get("top_k")
    if type(weight) not in PLAIN_TENSORS or weight.dtype is not x.dtype or type(top_k) is not int:
        return None
    if torch.is_autocast_enabled(x.device.type) or not CHOOSING.of(type(router)):
        return None
    return _by_fused_topk(x, weight, top_k)


def _by_fused_topk(x, weight, top_k: int) -> tuple:
    logits = F.linear(x.reshape(-1, weight.shape[1]), weight)
    return (logits, *fused_topk(logits, top_k))


# -- which classes and functions compute these formulas


def _code_of(kind: type) -> Code:
    function = _function_of(kind)
    return code_of_class(kind) if function is None else code_of_function(function)


def _function_of(kind: type) -> Optional[FunctionType]:
    """The function for which `kernels` has made this class."""
    return cells_of(kind.forward).get("func") if kind.__module__ == "kernels.layer.layer" else None


def _forward_for(kind: type, code: Code) -> Optional[Callable]:
    """Ours for a class of transformers, found by small inputs, or None for another formula."""
    if kind.__call__ is not nn.Module.__call__:
        return None
    roundings = (("llama", 0.0), ("gemma", 0.0), ("gemma", 1.0))
    for name, (mode, offset) in itertools.product(("variance_epsilon", "eps"), roundings):
        form = NormForm(kind, code.pins, (), "", "weight", name, mode, offset)
        try:
            if _agrees(peeled(kind.forward).forward, form):
                return forward_of(form)
        except Exception:  # whatever a class raises for such a module
            continue
    return None


def _agrees(forward, form: NormForm) -> bool:
    """True if the forward gives the same bits as rms_norm in several dtypes."""
    random = torch.Generator(device="cpu").manual_seed(1)
    x, weight = (torch.randn(*shape, generator=random, device="cpu") for shape in ((8, 33), (33,)))
    bf16, fp32 = torch.bfloat16, torch.float32
    for (dtype, other), eps in itertools.product(
        ((bf16, bf16), (bf16, fp32), (fp32, fp32)), (1e-6, 0.5)
    ):
        norm = form.kind.__new__(form.kind)
        nn.Module.__init__(norm)
        norm.weight = nn.Parameter(weight.to(other), requires_grad=False)
        setattr(norm, form.eps, eps)
        got = forward(norm, x.to(dtype))
        expected = rms_norm(
            x.to(dtype), norm.weight, eps, casting_mode=form.casting_mode, offset=form.offset
        )
        if got.dtype is not expected.dtype or not torch.equal(got, expected):
            return False
    return True


def _turns_halves(kind: type, _) -> bool:
    function = _function_of(kind)
    if function is None:
        return False
    random = torch.Generator().manual_seed(1)
    for shape in ((2, 3, 5, 8), (1, 1, 2, 6)):
        q, k, cos, sin = torch.randn(4, *shape, generator=random, dtype=torch.float64)
        found = function(q, k, cos[:, 0], sin[:, 0])
        for x, y in zip((q, k), found):
            half = torch.cat(torch.chunk(x, 2, -1)[::-1], -1)
            half[..., : x.shape[-1] // 2] *= -1
            # some compute in fp32 whatever they are given
            if not torch.allclose(y, x * cos[:, :1] + half * sin[:, :1], rtol=1e-5, atol=1e-6):
                return False
    return True


def _is_softmax_top_k(kind: type, _) -> bool:
    random = torch.Generator().manual_seed(1)
    for rows, E, H, K in ((7, 6, 8, 2), (3, 9, 5, 4), (1, 4, 4, 1)):
        router = kind.__new__(kind)
        nn.Module.__init__(router)
        weight = torch.randn(E, H, generator=random)
        router.weight = nn.Parameter(weight, requires_grad=False)
        router.top_k, router.num_experts, router.hidden_dim = K, E, H
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(rows, H, generator=random).to(dtype)
            router.weight.data = weight.to(dtype)
            found = kind.forward(router, x)  # which raises where it has further attributes
            expected = _by_fused_topk(x, router.weight, K)
            for a, b in zip(found, expected):
                if a.dtype is not b.dtype or not torch.allclose(a, b, rtol=1e-2, atol=1e-6):
                    return False
    return True


def _is_next_token_loss(function: FunctionType, _) -> bool:
    logits = torch.linspace(-3, 2, 24, device="cpu", dtype=torch.float32).sin().view(2, 3, 4)
    labels = torch.tensor([[1, 2, -100], [3, 0, 2]], device="cpu")
    shifted = {"num_items_in_batch": 7, "shift_labels": labels.abs() % 4, "ignore_index": 2}
    for words in ({}, shifted):
        found = function(logits, labels, 4, **words)
        expected = next_token_loss(logits, labels, 4, kernel=False, **words)
        if not torch.allclose(found, expected, rtol=1e-5):
            return False
    return True


FORWARDS = Answers(_forward_for)
TURNING, CHOOSING = Answers(_turns_halves, _code_of), Answers(_is_softmax_top_k, _code_of)
LOSSES = Answers(_is_next_token_loss, code_of_function)
