"""The loss of a training step without logits: kernelize(model, loss=True).

The model's own forward runs. Its `lm_head` gives the hidden states back as they are, its loss
function computes the loss from them and the weight of `lm_head`, and the output has None for its
logits. That is right where the forward hands what `lm_head` gives to its loss function and to its
output and does nothing else with it, which is tried once with parts that only record; a step whose
loss function gets anything else raises.

Models that scale or cap their logits first have a few known numbers in the place of logits, on the
CPU: what the forward makes of them says by which factor and which cap, in every step.
"""

import functools
import inspect
import math
import sys
import threading
from types import CodeType
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor, nn

from ..layers.hub import divided, is_next_token_loss, next_tokens
from ..layers.plain import PLAIN_TENSORS, Named, torch_unpatched, why_hooked
from ..layers.projections import linear
from ..loss.api import linear_cross_entropy
from ..loss.checks import words_hold_least
from ..runtime import device
from .code import Refused, signature_of
from .loss import by_kernel, language_model, why_not_next_token
from .report import Row
from .serving import own_class, serve, why_replaced
from .trust import code_of

BY = "linear_cross_entropy: output.logits are None in training steps"
LEAST = "least memory"  # kernelize's argument
_thread = threading.local()  # .step: the _Step of the model whose forward runs


# Numbers in the place of logits: the last are beyond any cap
PROBE = (0.0, 1e-3, -1e-3, 0.5, 1.0, -1.0, 7.0, -1e30, 1e30)


def _probe() -> Tensor:
    return torch.tensor(PROBE, dtype=torch.float64).view(1, 1, -1)


def _form_of(logits) -> Optional[Tuple[float, Optional[float]]]:
    """The factor and the cap, or None, by which _probe() has become these logits; None if they are
    another function of it."""
    if type(logits) is not Tensor or logits.shape != (1, 1, len(PROBE)) or logits.is_cuda:
        return None
    found, given = logits.double().flatten(), _probe().flatten()
    one, cap = found[4].item(), found[-1].item()
    if 0 < one < cap < 1e20:
        scale = cap * math.atanh(one / cap)
        right = cap * torch.tanh(given * scale / cap)
    elif one > 0:
        scale, cap = one, None
        right = given * scale
    else:
        return None
    same = ((found - right).abs() <= 1e-6 * right.abs()).all()
    return (scale, cap) if same else None


class _Step:
    """A training step without logits: its lm_head, the hidden states that this has got, and what it
    has given. plain: those themselves. least: memory before time. code: the model's forward, which
    alone is given hidden states for logits."""

    def __init__(self, head: nn.Module, plain: bool, least: bool, code: CodeType):
        self.head, self.plain, self.least, self.code = head, plain, least, code
        self.hidden, self.given = None, None


def _during(step: Optional[_Step], call: Callable, *args, **kwargs):
    """call(*args, **kwargs) as this step of the thread, or as none."""
    before, _thread.step = getattr(_thread, "step", None), step
    try:
        return call(*args, **kwargs)
    finally:
        _thread.step = before


def _caller() -> CodeType:
    """The code that calls a module, seen from the module's forward."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == nn.Module.__call__.__code__.co_filename:
        frame = frame.f_back
    return frame.f_code


def _step_of(head: nn.Module) -> Optional[_Step]:
    if torch.compiler.is_compiling():  # which knows no thread's own values
        return head.step_without_logits
    step = getattr(_thread, "step", None)
    return step if step is not None and step.head is head else None


def _project(self, hidden: Tensor):
    """The forward of a served lm_head."""
    step = _step_of(self)
    if step is None or not torch.compiler.is_compiling() and _caller() is not step.code:
        return linear(self, hidden)  # also for a hook that looks at hidden layers
    if step.hidden is not None:
        raise RuntimeError(
            "kernelize(model, loss=True): lm_head is called twice in a training step, which "
            "torch.compile cannot tell apart: train without torch.compile, or without loss=True"
        )
    step.hidden = hidden
    step.given = hidden if step.plain else _probe()
    return step.given


_project.view = {"step_without_logits": None}


def _loss(step: _Step, kind: str) -> Callable:
    """transformers' ForCausalLMLoss of what lm_head has got."""

    def loss_function(
        logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
        **_,
    ):  # fmt: skip
        hidden, head = step.hidden, step.head
        form = (1.0, None) if logits is step.given else None if step.plain else _form_of(logits)
        if form is None:
            raise RuntimeError(
                f"kernelize(model, loss=True): the forward of {kind} has changed its logits before "
                "its loss, which it did not when the model was kernelized: call kernelize again"
            )
        if vocab_size != head.weight.shape[0]:
            V = head.weight.shape[0]
            raise ValueError(f"vocab_size must be {V}, as lm_head has it, got {vocab_size}")
        rows = hidden.reshape(-1, hidden.shape[-1])
        target = next_tokens(labels, shift_labels, ignore_index, hidden.device)
        count = num_items_in_batch
        reduction = "mean" if count is None else "sum"
        each = step.least and words_hold_least(
            *rows.shape, len(head.weight), head.weight.requires_grad, rows.element_size()
        )
        loss = linear_cross_entropy(
            rows, head.weight, target, head.bias, ignore_index=ignore_index,
            reduction="none" if each else reduction, temperature=1.0 / form[0], softcap=form[1],
        )  # fmt: skip
        if each:
            loss, count = loss.sum(), (target != ignore_index).sum() if count is None else count
        return divided(loss, count)

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
    if not all([type(x) in (*PLAIN_TENSORS, type(None)) for x in (head.weight, head.bias)]):
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
def _forward(own: type, known: Callable, plain: bool, least: bool) -> Callable:
    """The forward of a served model of this class, and its loss function. plain: logits are passed
    on as they are; least: memory before time."""
    get, kind, code = own.loss_function.fget, own.__name__, inspect.unwrap(own.forward).__code__

    @functools.wraps(own.forward)
    def forward(self, *args, **kwargs):
        compiling = torch.compiler.is_compiling()
        step = _is_step(self, kwargs.get("labels"), get(self), known)
        if compiling and not (step and plain):
            return own.forward(self, *args, **kwargs)
        if not step:  # though within one, where a hook calls the model
            return _during(None, own.forward, self, *args, **kwargs)
        whole = kwargs.pop("return_dict", None)
        if whole is None:
            whole = getattr(self.config, "return_dict", True)
        head = self._modules["lm_head"]
        step = _Step(head, plain, least, code)
        if compiling:
            head.step_without_logits = step
            out = own.forward(self, *args, return_dict=True, **kwargs)
            head.step_without_logits = None
        else:
            out = _during(step, own.forward, self, *args, return_dict=True, **kwargs)
            step.hidden, step.given = None, None
        # entries are attributes and items: a new output has none of either
        found = {name: x for name, x in out.items() if name != "logits"}
        if whole:
            return type(out)(**found)
        return tuple([None if name == "logits" else x for name, x in out.items()])

    def loss_function(self):
        step = _step_of(self._modules["lm_head"])
        if step is None or step.hidden is None:  # or asked for before lm_head, by a hook
            return by_kernel(get(self))
        return _loss(step, kind)

    forward.view = {"loss_function": property(loss_function, own.loss_function.fset)}
    return forward


# -- which models


class _Part:
    """In the place of a model's parts: a call gives hidden states, and an output without more."""

    def __init__(self, given):
        self.given = given

    def __call__(self, *args, **kwargs):
        return self.given


class _Head(_Part):
    """In the place of lm_head."""

    def __call__(self, hidden):
        self.caller = sys._getframe(1).f_code
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


def _logits_that_arrive(module: nn.Module, own: type, logits: Tensor) -> Optional[Tensor]:
    """Logits that the module's forward makes of what lm_head returns, if it gives that to its loss
    function once and to its output, tried with parts that record; else None."""
    hidden = torch.zeros(1, 2, 4)
    ids, loss, got = torch.zeros(1, 2, dtype=torch.long), torch.zeros(()), []
    labels = ids.clone()

    def record(logits=None, labels=None, vocab_size=None, **_):
        got.append((logits, labels))
        return loss

    me = object.__new__(own)
    me.__dict__.update(module.__dict__)
    me.__dict__["_modules"] = {name: _Part(_Output(hidden)) for name in module._modules}
    head = me.__dict__["_modules"]["lm_head"] = _Head(logits)
    me.__dict__["_loss_function"] = record
    more = {}
    if "output_router_logits" in signature_of(inspect.unwrap(own.forward)).names:
        more["output_router_logits"] = False  # a second loss would be added to this one
    try:
        with torch.no_grad():
            out = own.forward(me, input_ids=ids, labels=labels, return_dict=True, **more)
        once = len(got) == 1 and out.loss is loss
        once = once and head.caller is inspect.unwrap(own.forward).__code__
    except Exception:
        return None
    found = got[0] if once else (None, None)
    return found[0] if found[1] is labels and out.logits is found[0] else None


def _is_plain(module: nn.Module, own: type) -> Optional[bool]:
    """True if the module passes its logits on as they are; None if it does more with them than to
    scale and to cap them."""
    logits = torch.zeros(1, 2, 3, dtype=torch.bfloat16)  # a copy in fp32 is another tensor
    if _logits_that_arrive(module, own, logits) is logits:
        return True
    return None if _form_of(_logits_that_arrive(module, own, _probe())) is None else False


def _why_not(module: nn.Module) -> Optional[str]:
    kind = own_class(module.lm_head)
    if kind is not nn.Linear:
        return f"its lm_head is a {kind.__module__}.{kind.__name__}, not an nn.Linear"
    reason = why_not_next_token(module) or why_replaced(module.lm_head)
    if reason is not None:
        return reason
    try:
        code_of(own_class(module))
    except Refused as why:
        return str(why)
    return None


def serve_loss(modules: Named, least: bool = False) -> Optional[Row]:
    """Makes the model's loss without logits; returns a row of the report, or None without an
    lm_head. least: in the least memory, where that is not the fastest."""
    found = language_model(modules)
    if found is None:
        return None
    name, module = found
    own, reason = own_class(module), _why_not(module)
    plain = _is_plain(module, own) if reason is None else None
    if plain is not None:
        serve(module, "loss", _forward(own, own.loss_function.fget(module), plain, least))
        serve(module.lm_head, "loss", _project)
        return Row(name, own.__name__, "loss", f"{BY}, {LEAST}" if least else BY, None)
    reason = reason or "its forward does more with its logits than to make one loss"
    return Row(name, own.__name__, "loss", None, reason)
