"""The loss of a language model by a kernel, in training and evaluation.

transformers' loss function copies the logits to fp32 before its cross entropy. A served model's
runs unchanged, on a placeholder for that copy, which is made where anything other than the cross
entropy reads it. The output's logits are the model's own.
"""

import functools
import inspect
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.plain import PLAIN_TENSORS
from ..layers.untouched import is_torchs_own, torch_unpatched
from ..loss.ops import CROSS_ENTROPY, FAMILY
from ..runtime import dispatch
from .loss import WITHOUT, is_next_token_loss
from .report import WAITS, Row
from .serving import named_modules, own_class, serve, why_not_on, why_nowhere, why_replaced
from .sharded import why_partitioned

_CROSS_ENTROPY = F.cross_entropy
_OPERATION = (FAMILY, "cross_entropy_fwd")


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
def _model_forward(own: type) -> Callable:
    """The forward of a served model of this class, and its loss function."""

    @functools.wraps(own.forward)
    def forward(self, *args, **kwargs):
        return own.forward(self, *args, **kwargs)

    def loss_function(self):
        found = own.loss_function.fget(self)
        if torch.compiler.is_compiling() or not is_next_token_loss(found):
            return found
        return _by_kernel(found)

    forward.view = {"loss_function": property(loss_function, own.loss_function.fset)}
    return forward


@functools.cache
def _takes_labels(own: type) -> bool:
    return "labels" in inspect.signature(own.forward).parameters


def _why_not(module: nn.Module, where: torch.device) -> Optional[str]:
    own = own_class(module)
    if not isinstance(getattr(own, "loss_function", None), property):
        return "its class has no loss_function of transformers"
    if not is_next_token_loss(module.loss_function):
        return "its loss function is not transformers' ForCausalLMLoss"
    if not is_torchs_own(_CROSS_ENTROPY, F.__file__):
        return "torch.nn.functional.cross_entropy is patched"
    return why_replaced(module) or why_partitioned(module) or why_nowhere(where, *_OPERATION)


def serve_cross_entropy(model: nn.Module, where: torch.device) -> Optional[Row]:
    """Serves the loss of a language model; a row of the report, or None where it is left alone."""
    for name, module in named_modules(model):
        own = own_class(module)
        if module._modules.get("lm_head") is not None and _takes_labels(own):
            if _why_not(module, where) is not None:
                return None
            serve(module, "loss", _model_forward(own))
            waits = dispatch.forced is None and why_not_on(where, *_OPERATION) is not None
            return Row(name, own.__name__, "loss", WAITS if waits else None, None)
    return None
