"""The loss of a training step without logits: kernelize(model, loss=True).

The model's own forward runs. Its `lm_head` gives the hidden states back as they are, its loss
function computes the loss from them and the weight of `lm_head`, and the output has None for its
logits. That is right where the forward hands what `lm_head` gives to its loss function and to its
output and does nothing else with it, which is tried once with parts that only record; a step whose
loss function gets anything else raises.
"""

import functools
import inspect
import threading
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.own_code import why_not_own
from ..layers.plain import PLAIN_TENSORS, torch_unpatched, why_hooked
from ..loss.api import linear_cross_entropy
from ..runtime import device
from .loss import by_kernel, is_next_token_loss, language_model
from .report import Row
from .serving import own_class, serve, why_replaced

BY = "linear_cross_entropy: output.logits are None in training steps"
_thread = threading.local()  # .step: the _Step of the model whose forward runs


class _Step:
    """A training step without logits: its lm_head, and the hidden states that this has got."""

    def __init__(self, head: nn.Module):
        self.head, self.hidden = head, None


def _step_of(head: nn.Module) -> Optional[_Step]:
    if torch.compiler.is_compiling():  # which knows no thread's own values
        return head.step_without_logits
    step = getattr(_thread, "step", None)
    return step if step is not None and step.head is head else None


def _project(self, hidden: Tensor):
    """The forward of a served lm_head."""
    step = _step_of(self)
    if step is None:
        return nn.Linear.forward(self, hidden)
    step.hidden = hidden
    return hidden


_project.view = {"step_without_logits": None}


def _loss(step: _Step, kind: str) -> Callable:
    """transformers' ForCausalLMLoss of what lm_head has got."""

    def loss_function(
        logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
        **_,
    ):  # fmt: skip
        hidden, head = step.hidden, step.head
        if logits is not hidden:
            raise RuntimeError(
                f"kernelize(model, loss=True): the forward of {kind} has changed its logits before "
                "its loss, which it did not when the model was kernelized: call kernelize again"
            )
        if vocab_size != head.weight.shape[0]:
            V = head.weight.shape[0]
            raise ValueError(f"vocab_size must be {V}, as lm_head has it, got {vocab_size}")
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        rows = hidden.reshape(-1, hidden.shape[-1])
        target = shift_labels.reshape(-1).to(hidden.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = linear_cross_entropy(
            rows, head.weight, target, head.bias, ignore_index=ignore_index, reduction=reduction
        )
        if num_items_in_batch is None:
            return loss
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch

    return loss_function


def _is_step(model: nn.Module, labels, found: Callable, known: Callable) -> bool:
    """True if this call is a training step whose loss is made without logits.

    found: the model's loss function now; known: the one that it had.
    """
    head, compiling = model._modules.get("lm_head"), torch.compiler.is_compiling()
    if not model.training or not torch.is_grad_enabled() or found is not known:
        return False
    if not isinstance(labels, Tensor) or not torch_unpatched(compiling):
        return False
    if not hasattr(type(head), "step_without_logits"):  # another head than the one that is served
        return False
    if type(head.weight) not in PLAIN_TENSORS or type(head.bias) not in (
        *PLAIN_TENSORS,
        type(None),
    ):
        return False
    if compiling:
        return True
    if type(labels) not in PLAIN_TENSORS or hasattr(model, "_is_replica"):  # of DataParallel
        return False
    if not device.is_gpu(head.weight.device) or why_hooked(head) is not None:
        return False
    return not any(map(head.__dict__.__contains__, ("forward", "weight", "bias"))) and (
        is_next_token_loss(found)
    )


@functools.cache
def _forward(own: type, known: Callable) -> Callable:
    """The forward of a served model of this class, and its loss function."""
    get, kind = own.loss_function.fget, own.__name__

    @functools.wraps(own.forward)
    def forward(self, *args, **kwargs):
        if not _is_step(self, kwargs.get("labels"), get(self), known):
            return own.forward(self, *args, **kwargs)
        whole = kwargs.pop("return_dict", None)
        if whole is None:
            whole = getattr(self.config, "return_dict", True)
        head = self._modules["lm_head"]
        step = _Step(head)
        if torch.compiler.is_compiling():
            head.step_without_logits = step
            out = own.forward(self, *args, return_dict=True, **kwargs)
            head.step_without_logits = None
        else:
            before, _thread.step = getattr(_thread, "step", None), step
            try:
                out = own.forward(self, *args, return_dict=True, **kwargs)
            finally:
                _thread.step, step.hidden = before, None
        # entries are attributes and items: a new output has none of either
        found = {name: x for name, x in out.items() if name != "logits"}
        if whole:
            return type(out)(**found)
        return tuple([None if name == "logits" else x for name, x in out.items()])

    def loss_function(self):
        step = _step_of(self._modules["lm_head"])
        return by_kernel(get(self)) if step is None else _loss(step, kind)

    forward.view = {"loss_function": property(loss_function, own.loss_function.fset)}
    return forward


# -- which models


class _Part:
    """In the place of a model's parts: a call gives hidden states, and an output without more."""

    def __init__(self, given):
        self.given = given

    def __call__(self, *args, **kwargs):
        return self.given


class _Output(dict):
    """An output of a decoder: hidden states by name and place, all else None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, place):
        return self.last_hidden_state if place == 0 else ()


def _logits_are_only_passed_on(module: nn.Module, own: type) -> bool:
    """True if the module's forward gives what lm_head returns to its loss function and its output,
    each once and unchanged, tried with parts that record."""
    hidden, logits = torch.zeros(1, 2, 4), torch.zeros(1, 2, 3, dtype=torch.bfloat16)
    ids, loss, got = torch.zeros(1, 2, dtype=torch.long), torch.zeros(()), []
    labels = ids.clone()

    def record(logits=None, labels=None, vocab_size=None, **_):
        got.append((logits, labels))
        return loss

    me = object.__new__(own)
    me.__dict__.update(module.__dict__)
    me.__dict__["_modules"] = {
        name: _Part(logits if name == "lm_head" else _Output(hidden)) for name in module._modules
    }
    me.__dict__["_loss_function"] = record
    more = {}
    if "output_router_logits" in _names(own):  # a second loss is added to this one
        more["output_router_logits"] = False
    try:
        with torch.no_grad():
            out = own.forward(me, input_ids=ids, labels=labels, return_dict=True, **more)
        same = out.logits is logits and out.loss is loss
    except Exception:
        return False
    return same and len(got) == 1 and got[0][0] is logits and got[0][1] is labels


def _names(own: type) -> tuple:
    plain = inspect.unwrap(own.forward)
    return plain.__code__.co_varnames[: plain.__code__.co_argcount]


def _why_not(module: nn.Module) -> Optional[str]:
    head, own = module.lm_head, own_class(module)
    if own_class(head) is not nn.Linear:
        return f"its lm_head is a {own_class(head).__name__}, not an nn.Linear"
    replaced = why_replaced(module) or why_replaced(head)
    if replaced is not None:
        return replaced
    if not isinstance(getattr(own, "loss_function", None), property):
        return "its loss function is not transformers' ForCausalLMLoss"
    if not is_next_token_loss(own.loss_function.fget(module)):
        return "its loss function is not transformers' ForCausalLMLoss"
    function = own.forward
    while function is not None:  # and what it is wrapped by
        reason = why_not_own(function)
        if reason is not None:
            return f"its forward {reason}"
        function = getattr(function, "__wrapped__", None)
    if not _logits_are_only_passed_on(module, own):
        return "its forward does more with its logits than to make one loss"
    return None


def serve_loss(model: nn.Module) -> Optional[Row]:
    """Makes the model's loss without logits; returns a row of the report, or None without an
    lm_head."""
    found = language_model(model)
    if found is None:
        return None
    name, module = found
    own, reason = own_class(module), _why_not(module)
    if reason is None:
        serve(module, "loss", _forward(own, own.loss_function.fget(module)))
        serve(module.lm_head, "loss", _project)
    return Row(name, own.__name__, "loss", BY if reason is None else None, reason)
