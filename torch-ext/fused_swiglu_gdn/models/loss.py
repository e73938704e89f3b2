"""The loss of a language model: by a kernel on its logits, or without logits by Liger.

In both cases the model's forward and transformers' loss function run unchanged, with a placeholder
between `lm_head` and `F.cross_entropy`.

transformers' loss function copies the logits to fp32 before its cross entropy. In training and
evaluation it runs on a placeholder for that copy (`Logits`), which is made where anything other
than the cross entropy reads it. The output's logits are the model's own.

The logits of a training step are its largest tensors: tokens x vocabulary, in the model's dtype, in
fp32 and as a gradient. With kernelize(model, loss=True) there are none in training: Liger's fused
linear cross entropy computes the loss and its gradients from the input of the output projection, in
chunks. Any other use of the placeholder (`NoLogits`) is an error; models that do more with their
logits are left alone.
"""

import functools
import inspect
import itertools
import math
import re
import threading
from typing import Callable, NoReturn, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.own_code import is_own_function
from ..layers.plain import PLAIN_TENSORS, is_torchs_own, torch_unpatched, why_hooked
from ..loss.ops import CROSS_ENTROPY, FAMILY
from ..runtime import device, dispatch
from ..runtime.ops import autocast
from .code import Refused, signature_of, source_of, spelled
from .report import WAITS, Row
from .serving import (
    may_move,
    named_modules,
    own_class,
    serve,
    why_not_on,
    why_partitioned,
    why_replaced,
)

_CROSS_ENTROPY = F.cross_entropy
_OPERATION = (FAMILY, "cross_entropy_fwd")
# Tokens whose logits Liger makes at once; by itself it takes so few (64 of 4096 for a vocabulary of
# 248,320) that a step takes several times as long
PIECE = 1024
# What a forward may do with its logits
USES = r"logits = self\.lm_head\([^()]*\)\n|self\.loss_function\(logits[,)]|\blogits=logits[,)]"
NO_LOGITS = (
    "kernelize(model, loss=True) makes the loss of a training step without logits: to have them, "
    "call the model without labels or under torch.no_grad(), or restore(model)"
)
ONE_BACKWARD = (
    "a loss of kernelize(model, loss=True) has one backward, without create_graph: make it again "
    "for another one, or restore(model)"
)
# Further arguments of a cross entropy, as torch hands them on: none may be given
WITHOUT = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
_thread = threading.local()  # .step: (lm_head, its stand-in) of the model whose forward runs


class Logits:
    """Logits as fp32, for a loss function."""

    def __init__(self, logits: Tensor):
        self.logits = logits
        self.device = logits.device

    def float(self) -> "Logits":
        return self

    def view(self, *shape: int) -> "Logits":
        return Logits(self.logits.view(*shape))

    def __getattr__(self, name: str):
        return getattr(self.logits.float(), name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is _CROSS_ENTROPY and len(args) == 2 and type(args[0]) is cls:
            logits, target = args[0].logits, args[1]
            index, reduction = kwargs.get("ignore_index", -100), kwargs.get("reduction", "mean")
            rest = {k: v for k, v in kwargs.items() if k not in ("ignore_index", "reduction")}
            known = WITHOUT.items() >= rest.items() and reduction in ("mean", "sum")
            if known and logits.ndim == 2 and target.shape == logits.shape[:1]:
                return CROSS_ENTROPY((logits, target), (index, reduction == "mean"))[0]
        args = [x.logits.float() if type(x) is cls else x for x in args]
        kwargs = {k: x.logits.float() if type(x) is cls else x for k, x in kwargs.items()}
        return function(*args, **kwargs)


def _serves(logits, labels) -> bool:
    return (
        type(logits) in PLAIN_TENSORS
        and type(labels) in (*PLAIN_TENSORS, type(None))
        and not torch.compiler.is_compiling()
        and F.cross_entropy is _CROSS_ENTROPY
        and torch_unpatched(False)
        and dispatch.serves(*_OPERATION, logits)
    )


@functools.cache
def _by_kernel(loss: Callable) -> Callable:
    @functools.wraps(loss)
    def loss_function(logits, labels, *args, **kwargs):
        if _serves(logits, labels):
            logits = Logits(logits)
        return loss(logits, labels, *args, **kwargs)

    return loss_function


@functools.cache
def _forward_by_kernel(own: type) -> Callable:
    """The forward of a served model of this class, and its loss function."""
    get = own.loss_function.fget  # torch.compile cannot trace this attribute of a property

    @functools.wraps(own.forward)
    def forward(self, *args, **kwargs):
        return own.forward(self, *args, **kwargs)

    def loss_function(self):
        found = get(self)
        if torch.compiler.is_compiling() or not is_next_token_loss(found):
            return found
        return _by_kernel(found)

    forward.view = {"loss_function": property(loss_function, own.loss_function.fset)}
    return forward


# -- without logits, by Liger


class NoLogits:
    """The placeholder for the logits of a training step, which ForCausalLMLoss can handle."""

    _parts = None  # hidden, weight, bias, while the forward runs

    def __getattr__(self, name: str):
        if self._parts is None or name not in ("device", "float", "view"):
            raise AttributeError(f"{name} of the logits: {NO_LOGITS}")
        return self._parts[0].device if name == "device" else self._in_fp32

    def _in_fp32(self, *shape: int) -> "NoLogits":
        """Returns itself, for float() and view(-1, V)."""
        V = len(self._parts[1])
        if shape not in ((), (-1, V)):
            raise ValueError(f"vocab_size must be {V}, as lm_head has it, got {shape[-1]}")
        return self

    def __repr__(self) -> str:
        return f"<{NO_LOGITS}>"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        parts = getattr(args[0], "_parts", None) if args else None
        if function is not F.cross_entropy or parts is None or not torch.is_grad_enabled():
            _refuse()
        ignore_index, reduction = kwargs.pop("ignore_index"), kwargs.pop("reduction")
        if kwargs != WITHOUT:
            _refuse()
        return _loss(*parts, args[1], ignore_index, reduction)


def _refuse(*_) -> NoReturn:
    raise RuntimeError(NO_LOGITS)


for _name in (
    "abs add and array bool contains delitem divmod eq float floordiv ge getitem gt index int "
    "invert le len lshift lt matmul mod mul ne neg or pos pow radd rand rdivmod rfloordiv rlshift "
    "rmatmul rmod rmul ror rpow rrshift rshift rsub rtruediv rxor setitem sub truediv xor"
).split():
    setattr(NoLogits, f"__{_name}__", _refuse)
NoLogits.__hash__ = object.__hash__


def _loss(hidden, weight, bias, target, ignore_index: int, reduction: str) -> Tensor:
    """F.cross_entropy of the logits [..., V] as fp32 [M, V], with target [M]."""
    hidden, V = hidden.reshape(-1, hidden.shape[-1]), weight.shape[0]
    if target.dtype != torch.long or len(target) != len(hidden):
        raise ValueError(f"labels must be int64, one a token, got {len(target)} {target.dtype}")
    ignored, known = target == ignore_index, (target >= 0) & (target < V)
    torch._assert_async((known | ignored).all(), f"labels must be {ignore_index} or 0 to {V - 1}")
    with device.on(hidden.device):
        loss = _liger()(
            hidden, weight, target, bias, ignore_index=ignore_index, reduction=reduction,
            accum_dtype=torch.float32, chunk_mem_const=max(1, PIECE * V // hidden.numel()),
        )  # fmt: skip
    backwards = itertools.count()

    def once(gradient: Tensor) -> Tensor:
        # Liger scales the gradients that it keeps in place, and they have no derivative
        if next(backwards) or torch.is_grad_enabled():
            raise RuntimeError(ONE_BACKWARD)
        return gradient.clone()  # in memory, which Liger's kernel reads

    loss.register_hook(once)
    return loss.masked_fill(ignored.all(), math.nan) if reduction == "mean" else loss


@functools.cache
def _liger() -> Optional[Callable]:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as found
    except ImportError:
        return None
    return found if "chunk_mem_const" in inspect.signature(found).parameters else None


def _project(self, hidden: Tensor):
    """The forward of a replaced lm_head.

    Gradients in fp16 would be computed before the loss scaler's factor, and Liger computes none of
    the weight if the hidden states need none; both use nn.Linear's forward.
    """
    head, logits = getattr(_thread, "step", None) or (None, None)
    if head is self and hidden.requires_grad and hidden.numel() and why_hooked(self) is None:
        parts = autocast(hidden, self.weight, self.bias)
        found = {(type(x) in PLAIN_TENSORS, x.device, x.dtype) for x in parts if x is not None}
        if found in [{(True, hidden.device, x)} for x in (torch.bfloat16, torch.float32)]:
            logits._parts = parts
            return logits
    return nn.Linear.forward(self, hidden)


@functools.cache
def _forward_by_liger(own: type) -> Callable:
    """The forward of a replaced model of this class, with the signature that generate inspects."""

    @functools.wraps(own.forward)
    def forward(self, *args, **kwargs):
        labels, head = kwargs.get("labels"), self._modules.get("lm_head")
        step = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        replica = hasattr(self, "_is_replica")  # DataParallel gathers tensors
        known = step and type(labels) is Tensor and is_next_token_loss(self.loss_function)
        if not known or replica:
            return own.forward(self, *args, **kwargs)
        before, logits = getattr(_thread, "step", None), NoLogits()
        if torch_unpatched() and device.is_gpu(labels.device):
            _thread.step = head, logits
        try:
            return own.forward(self, *args, **kwargs)
        finally:
            _thread.step, logits._parts = before, None

    return forward


def is_next_token_loss(loss: Callable) -> bool:
    """True if a model's loss function is transformers' next-token cross entropy."""
    return getattr(loss, "__name__", None) == "ForCausalLMLoss" and is_own_function(loss)


def _why_not_liger(module: nn.Module) -> Optional[str]:
    head, kind = module.lm_head, own_class(module)
    if own_class(head) is not nn.Linear:
        return f"its lm_head is a {own_class(head).__name__}, not an nn.Linear"
    replaced = why_replaced(module) or why_replaced(head)
    if replaced is not None:
        return replaced
    try:
        body = spelled(source_of(inspect.unwrap(kind.forward)))
    except Refused as error:
        return str(error)
    once = body.count("self.lm_head") == body.count("self.loss_function") == 1
    if not once or re.search(r"\blogits\b", re.sub(USES, "", body)):
        return "its forward does more with its logits than to make one loss"
    if not is_next_token_loss(getattr(module, "loss_function", None)):
        return "its loss function is not transformers' ForCausalLMLoss"
    return None if _liger() is not None else "needs Liger 0.8.5: pip install liger-kernel"


# -- which models


@functools.cache
def _takes_labels(own: type) -> bool:
    return "labels" in signature_of(inspect.unwrap(own.forward)).names


def _language_model(model: nn.Module) -> Optional[Tuple[str, nn.Module]]:
    """The first module with an lm_head that takes labels, and its name."""
    for name, module in named_modules(model):
        if module._modules.get("lm_head") is not None and _takes_labels(own_class(module)):
            return name, module
    return None


def serve_loss(model: nn.Module) -> Optional[Row]:
    """Uses Liger for the model's loss; returns a row of the report, or None without an lm_head."""
    found = _language_model(model)
    if found is None:
        return None
    name, module = found
    kind, reason = own_class(module), _why_not_liger(module)
    if reason is None:
        serve(module, "loss", _forward_by_liger(kind))
        serve(module.lm_head, "loss", _project)
    by = "Liger's fused linear cross entropy" if reason is None else None
    return Row(name, kind.__name__, "loss", by, reason)


def serve_cross_entropy(model: nn.Module, where: torch.device) -> Optional[Row]:
    """Uses a kernel for the model's loss; returns a row of the report, or None where the model is
    left alone."""
    found = _language_model(model)
    if found is None or not _is_for_a_kernel(found[1]):
        return None
    name, module = found
    waits = why_not_on(where, *_OPERATION) is not None
    if waits and not may_move(where):
        return None
    serve(module, "loss", _forward_by_kernel(own_class(module)))
    return Row(name, own_class(module).__name__, "loss", WAITS if waits else None, None)


def _is_for_a_kernel(module: nn.Module) -> bool:
    """True if the model makes its loss by transformers' next-token cross entropy, and is plain."""
    if not isinstance(getattr(own_class(module), "loss_function", None), property):
        return False
    if not is_next_token_loss(module.loss_function) or why_replaced(module):
        return False
    return is_torchs_own(_CROSS_ENTROPY, F.__file__) and not why_partitioned(module)
