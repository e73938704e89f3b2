"""The norms that classes of transformers ask `kernels` for by name."""

import itertools
from typing import Callable, Optional

import torch
from torch import nn

from ..norm.api import rms_norm
from .norm import NormForm, forward_of, serves
from .own_classes import Answers, Code
from .own_code import peeled


class RMSNorm(nn.Module):
    """weight * hidden_states / rms(hidden_states), rounded where the module's own class rounds.

    transformers' classes of this name are of two kinds: Llama's rounds before it multiplies by the
    weight, Olmo-Hybrid's after. A class that computes something else keeps its own forward.

    Shapes:
        hidden_states: [..., D] -> [..., D]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states):
        return normed(self, hidden_states)


class RMSNormZeroCentered(nn.Module):
    """(1 + weight) * x / rms(x), as Qwen3.5's norms compute it.

    Shapes:
        x: [..., D] -> [..., D]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x):
        return normed(self, x)


def normed(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output of a norm of transformers, by rms_norm or by its class's own forward."""
    forward = FORWARDS.of(type(norm)) if serves(x) else None
    return (forward or type(norm).forward)(norm, x)


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


FORWARDS = Answers(_forward_for)
