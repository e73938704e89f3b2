"""The loss of a language model by a kernel on its logits.

transformers' loss function copies the logits to fp32 before its cross entropy. In training and
evaluation the same formula is computed without that copy, where a trial has shown that the function
is it. The model's forward and its logits are its own.
"""

import functools
import inspect
from typing import Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.hub import is_next_token_loss, next_token_loss
from ..layers.plain import PLAIN_TENSORS, Named, is_torchs_own, torch_unpatched
from ..loss.ops import FAMILY
from ..runtime import dispatch
from .code import signature_of
from .report import WAITS, Row
from .serving import (
    may_move,
    own_class,
    serve,
    why_not_on,
    why_partitioned,
    why_replaced,
)

_CROSS_ENTROPY = F.cross_entropy
_OPERATION = (FAMILY, "cross_entropy_fwd")


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
        serves = _serves(logits, labels)
        return (next_token_loss if serves else loss)(logits, labels, *args, **kwargs)

    return loss_function


def by_kernel(loss: Callable) -> Callable:
    """The loss function of a model, by a kernel if it is transformers' next-token loss."""
    if torch.compiler.is_compiling() or not is_next_token_loss(loss):
        return loss
    return _by_kernel(loss)


@functools.cache
def _forward_by_kernel(own: type) -> Callable:
    """The forward of a served model of this class, and its loss function."""
    get = own.loss_function.fget  # torch.compile cannot trace this attribute of a property

    @functools.wraps(own.forward)
    def forward(self, *args, **kwargs):
        return own.forward(self, *args, **kwargs)

    def loss_function(self):
        return by_kernel(get(self))

    forward.view = {"loss_function": property(loss_function, own.loss_function.fset)}
    return forward


# -- which models


@functools.cache
def _takes_labels(own: type) -> bool:
    return "labels" in signature_of(inspect.unwrap(own.forward)).names


def language_model(modules: Named) -> Optional[Tuple[str, nn.Module]]:
    """The first module with an lm_head that takes labels, and its name."""
    for name, module in modules:
        if module._modules.get("lm_head") is not None and _takes_labels(own_class(module)):
            return name, module
    return None


def why_not_next_token(module: nn.Module) -> Optional[str]:
    """Why a model does not make its loss by transformers' next-token cross entropy, or None."""
    found = getattr(own_class(module), "loss_function", None)
    if not isinstance(found, property) or not is_next_token_loss(found.fget(module)):
        return "its loss function is not transformers' ForCausalLMLoss"
    return why_replaced(module)


def serve_cross_entropy(modules: Named, where: torch.device) -> Optional[Row]:
    """Uses a kernel for the model's loss; returns a row of the report, or None where the model is
    left alone."""
    found = language_model(modules)
    if found is None or not is_torchs_own(_CROSS_ENTROPY, F.__file__):
        return None
    name, module = found
    if why_not_next_token(module) or why_partitioned(module):
        return None
    waits = why_not_on(where, *_OPERATION) is not None
    if waits and not may_move(where):
        return None
    serve(module, "loss", _forward_by_kernel(own_class(module)))
    return Row(name, own_class(module).__name__, "loss", WAITS if waits else None, None)
