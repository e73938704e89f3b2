"""A run of a class's forward on stand-in parts, against the formula that was read from its source.

The parts tell themselves apart: each product has numbers of its own, and the activation is no
function that torch has, so a forward that takes another one, or another order, gives other numbers.
"""

from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.swiglu import Roles
from ..swiglu.reference import ACTIVATIONS
from .stand_ins import twin_of

# leading sizes of x, model width, hidden width, and the size of the values
CASES = (((2,), 5, 3, 1.0), ((1, 7), 16, 24, 100.0), ((3, 1, 2), 8, 40, 1e-3), ((65,), 96, 64, 1.0))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROUNDINGS = 4  # the same operations in the same order; a library may yet sum in another one


class _Product:
    """Stands for an nn.Linear."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def _mark(x: torch.Tensor) -> torch.Tensor:
    """The activation of stand-ins."""
    return torch.atan(x) + 0.25 * x


def why_another_formula(kind: type, forward: Callable, roles: Roles) -> Optional[str]:
    """The class's forward does not give the formula, in some dtype, size or mode."""
    for dtype in DTYPES:
        for case in CASES:
            for training in (False, True):
                for grad in (False, True):
                    with torch.inference_mode(False), torch.set_grad_enabled(grad):
                        with torch.autocast("cpu", enabled=False):
                            reason = _why_not(kind, forward, roles, dtype, case, training)
                    if reason is not None:
                        return reason
    return None


def _why_not(kind, forward, roles, dtype, case, training) -> Optional[str]:
    (sizes, K, N, scale), random = case, torch.Generator("cpu").manual_seed(0)

    def normal(*shape):
        x = torch.randn(shape, generator=random, dtype=torch.float64, device="cpu")
        return x.to(dtype)

    gate, up, down = (
        _Product(normal(n, k) * k**-0.5, normal(n)) for n, k in ((N, K), (N, K), (K, N))
    )
    act = _mark if roles.act is not None else ACTIVATIONS[roles.function]
    parts = {}
    if roles.up is None:
        pair = (gate, up) if roles.gate_first else (up, gate)
        weight, bias = (torch.cat([getattr(p, name) for p in pair]) for name in ("weight", "bias"))
        parts[roles.gate] = joined = _Product(weight, bias)
    else:
        parts.update({roles.gate: gate, roles.up: up})
    parts[roles.down] = down
    parts.update({name: lambda x: x for name in roles.dropouts})
    if roles.act is not None:
        parts[roles.act] = act
    twin = twin_of(nn.Module(), kind, parts)
    twin.__dict__.update(dict.fromkeys(roles.rates, 0.0), training=training)
    x = (normal(*sizes, K) * scale).requires_grad_(torch.is_grad_enabled())
    if roles.up is None:  # the same product as the forward's: the bits may depend on its size
        halves = joined(x).chunk(2, dim=-1)
        g, u = halves if roles.gate_first else halves[::-1]
    else:
        g, u = gate(x), up(x)
    expected = down(act(g) * u)
    try:
        got = forward(twin, x)
    except Exception as error:
        return f"its forward raises {type(error).__name__} on stand-in parts"
    if type(got) is not torch.Tensor or got.dtype != dtype or got.shape != expected.shape:
        return "its forward is another formula"
    limit = ROUNDINGS * torch.finfo(dtype).eps * expected.abs().max().item()
    same = torch.allclose(got, expected, rtol=0.0, atol=limit)
    return None if same else f"its forward is another formula in {str(dtype)[6:]}"
