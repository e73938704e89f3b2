"""kernelize(model, loss=True): the loss of a language model without its logits, by Liger.

The logits of a training step are its largest tensors: tokens x vocabulary, in the model's dtype, in
fp32 and as a gradient. Liger's fused linear cross entropy (pip install liger-kernel) makes the loss
and its gradients from what the output projection reads, a piece at a time.

In a training step with labels the model's own forward runs as ever; what its `lm_head` returns
stands in for the logits. It knows how transformers' loss treats them (`float()`, `view(-1, V)`,
`F.cross_entropy`) and goes to Liger there. Whatever else anybody does with it, in the forward (soft
caps, scales), in a loss of another kind or with the model's output, makes the logits and goes on
with them, so nothing is computed otherwise than by the model: it only costs the memory again.
"""

import contextlib
import functools
import inspect
import threading
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..runtime import device
from ..runtime.ops import PLAIN, autocast
from .report import Row
from .serving import own_class, serve, unserve, why_replaced

LAYER = "loss"
# Tokens whose logits Liger makes at once; by itself it takes so few (64 of 4096 for a vocabulary of
# 248,320) that a step takes several times as long
PIECE = 1024
_thread = threading.local()  # .head: the projection whose logits a loss is made of


class Logits:
    """hidden @ weight.T + bias, made where somebody looks at it; cross entropy does not."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], wide: bool = False):
        self._parts, self._wide, self._made = (hidden, weight, bias), wide, None
        self.device, self.dtype = hidden.device, torch.float32 if wide else hidden.dtype

    def made(self) -> Tensor:
        """The logits."""
        if self._made is None:
            logits = F.linear(*self._parts)
            self._made = logits.float() if self._wide else logits
        return self._made

    def float(self) -> "Logits":
        return Logits(*self._parts, True)

    def view(self, *shape):
        hidden, weight, bias = self._parts
        if shape != (-1, weight.shape[0]):
            return self.made().view(*shape)
        return Logits(hidden.reshape(-1, hidden.shape[-1]), weight, bias, self._wide)

    def __getattr__(self, name: str):
        return getattr(self.made(), name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.cross_entropy:
            loss = _fused(*args, **kwargs)
            if loss is not None:
                return loss
        args, kwargs = tree_map(lambda x: x.made() if isinstance(x, cls) else x, (args, kwargs))
        return function(*args, **kwargs)


def _through(name: str) -> Callable:
    def operate(self, *args):
        return getattr(self.made(), name)(*args)

    return operate


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "matmul", "neg",
    "getitem", "setitem", "len", "iter", "eq", "ne", "lt", "le", "gt", "ge",
):  # fmt: skip
    setattr(Logits, f"__{_name}__", _through(f"__{_name}__"))
Logits.__hash__ = object.__hash__


def _fused(
    logits, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean", label_smoothing=0.0,
) -> Optional[Tensor]:  # fmt: skip
    """F.cross_entropy of logits [M, V] and target [M], or None where that is not for Liger.

    Liger gives the weight no gradient where the hidden states need none, and its loss is fp32.
    """
    if not isinstance(logits, Logits) or logits._made is not None:
        return None
    if (weight, size_average, reduce) != (None, None, None) or reduction not in ("mean", "sum"):
        return None
    hidden, head, bias = parts = logits._parts
    if hidden.ndim != 2 or target.shape != hidden.shape[:1] or not hidden.requires_grad:
        return None
    same = all(t is None or (type(t) in PLAIN and t.dtype == hidden.dtype) for t in parts)
    if not same or logits.dtype != torch.float32:
        return None
    # the pieces of the weight's gradient are added in fp32
    args = (hidden, head, target, bias, None, ignore_index, 0.0, label_smoothing, reduction)
    args = (*args, None, False, torch.float32, False, False, False)
    liger = _liger()
    if getattr(liger, "supports_inner_impl_dispatch", False):  # since 0.8.5; the last is a budget
        args = (*args, None, None, max(1, PIECE * head.shape[0] // hidden.numel()))
    return liger.apply(*args)[0]


@functools.cache
def _liger():
    """Liger's function, or None where it is not installed."""
    with contextlib.suppress(ImportError):
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

        return LigerFusedLinearCrossEntropyFunction
    return None


@contextlib.contextmanager
def _without_logits(head: nn.Linear):
    before = getattr(_thread, "head", None)
    _thread.head = head
    try:
        yield
    finally:
        _thread.head = before


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _project(self, hidden: Tensor):
    """The forward of a served lm_head."""
    if getattr(_thread, "head", None) is not self or _hooked(self):
        return own_class(self).forward(self, hidden)
    return Logits(*autocast(hidden, self.weight, self.bias))


@functools.cache
def _model_forward(own: type) -> Callable:
    """The forward of a served model of this class; with the signature that generate looks at."""

    @functools.wraps(own.forward)
    def forward(self, *args, **kwargs):
        head = self._modules.get("lm_head")
        wanted = self.training and torch.is_grad_enabled() and kwargs.get("labels") is not None
        wanted = wanted and head is not None and device.is_gpu(head.weight.device)
        if not wanted or torch.compiler.is_compiling() or hasattr(self, "_is_replica"):
            return own.forward(self, *args, **kwargs)
        with _without_logits(head):
            return own.forward(self, *args, **kwargs)

    return forward


def _language_model(model: nn.Module):
    """(name, module) of the part that has an lm_head and takes labels, or (None, None)."""
    for name, module in model.named_modules():
        if isinstance(module._modules.get("lm_head"), nn.Linear):
            if "labels" in inspect.signature(own_class(module).forward).parameters:
                return name, module
    return None, None


def serve_loss(model: nn.Module) -> Optional[Row]:
    """Makes the model's loss Liger's; a row of the report, or None if it has no lm_head."""
    name, module = _language_model(model)
    if module is None:
        return None
    head, kind = module.lm_head, own_class(module)
    unserve(module), unserve(head)
    reason = why_replaced(module) or why_replaced(head)
    if reason is None and own_class(head) is not nn.Linear:
        reason = f"its lm_head is a {own_class(head).__name__}, not an nn.Linear"
    if reason is None and _liger() is None:
        reason = "needs Liger: pip install liger-kernel"
    if reason is None:
        serve(module, LAYER, _model_forward(kind))
        serve(head, LAYER, _project)
    by = "Liger's fused linear cross entropy" if reason is None else None
    return Row(name, kind.__name__, LAYER, by, reason)


def restore_loss(model: nn.Module) -> int:
    """Undoes serve_loss; returns how many models it was done to."""
    found = 0
    for module in model.modules():
        if getattr(type(module), "served_as", None) == LAYER:
            found += unserve(module) and own_class(module) is not nn.Linear
    return found
