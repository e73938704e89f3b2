"""What stands in for the parts of a module in a trial of its forward.

A twin has the module's class and plain attributes; its parts are functions with numbers of their
own, and all else that a forward is given is opaque: it may be handed on and compared with None, and
raises where it is read. So a forward that gives the formula's numbers has used nothing else.
"""

import collections
import contextlib
from typing import Callable, Optional

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .code import Refused

F64 = torch.float64
WORD = "a_word_that_nobody_knows"  # a keyword that a forward can only hand on
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def quiet():
    """No gradients, no autocast, on the CPU: whatever the user's own settings are."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        with torch.autocast("cpu", enabled=False):
            yield


def random(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64, device="cpu").to(dtype)


def same(a: object, b: torch.Tensor) -> bool:
    """Equal but for the order of sums in fp64."""
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def twin_of(module: nn.Module, kind: type, parts=None, parameters=None) -> nn.Module:
    """A module of this class with the plain attributes of `module`, and other parts."""
    twin = object.__new__(kind)
    nn.Module.__init__(twin)
    for name, value in module.__dict__.items():
        if name not in ("_modules", "_parameters", "_buffers", "forward", *HOOKS):
            twin.__dict__[name] = value
    twin.__dict__["_modules"] = dict(parts or {})
    twin.__dict__["_parameters"] = dict(parameters or {})
    twin.__dict__["_buffers"] = {}
    twin.__dict__.update({name: collections.OrderedDict() for name in HOOKS})
    return twin


def features(part: Optional[nn.Module]) -> tuple:
    """The sizes of a projection, wrapped or not; () of any other part."""
    sizes = getattr(part, "in_features", None), getattr(part, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else ()


def rms(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class KeepsFp64(TorchFunctionMode):
    """float() leaves fp64 as it is: a part of a formula in fp32 is the same formula."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float and args[0].dtype is F64:
            return args[0]
        return function(*args, **(kwargs or {}))


class Norm:
    """An RMS norm with a weight of the length of the norm that it stands for."""

    def __init__(self, size: Optional[int], seed: int):
        self.weight = None if size is None else random(size, seed=seed) + 1.5

    def __call__(self, x):
        if self.weight is None:
            return rms(x)
        if x.shape[-1] != len(self.weight):
            raise Refused("it norms over another width than its weight's")
        return rms(x) * self.weight.to(x.dtype)


class Product:
    """A projection of rank 3, so that the module's own sizes cost nothing."""

    def __init__(self, features_in: int, features_out: int, seed: int):
        self.a = random(features_in, 3, seed=seed)
        self.b = random(3, features_out, seed=seed + 1)

    def __call__(self, x):
        return (x @ self.a.to(x.dtype)) @ self.b.to(x.dtype)


class Block:
    """A part of a layer, which remembers its calls: outputs(name) says how many it gives, `flat`
    that rows and tokens are one dimension in them."""

    def __init__(self, name: str, seed: int, log: list, outputs: Callable, flat: bool):
        self.name, self.seed, self.log = name, seed, log
        self.outputs, self.flat = outputs, flat

    def __call__(self, *args, **kwargs):
        places = [n for n, v in kwargs.items() if isinstance(v, torch.Tensor)]
        tensors = [v for v in args if isinstance(v, torch.Tensor)] + [kwargs[n] for n in places]
        if len(tensors) != 1 or len(args) > 1:
            raise Refused(f"it calls {self.name} in a way that is not known")
        x = tensors[0]
        y = torch.tanh(
            x * random(x.shape[-1], seed=self.seed) + random(x.shape[-1], seed=self.seed + 1)
        )
        place = places[0] if places else None
        rest = {n: v for n, v in kwargs.items() if n != place}
        y = y.flatten(0, -2) if self.flat else y
        count = self.outputs(self.name)
        self.log.append((self.name, x, y, place, rest))
        return y if count == 1 else (y, *["rest"] * (count - 1))


class Unknown:
    """A part that the formula has no use for."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args, **kwargs):
        raise Refused(f"its forward also calls {self.name}")


class Opaque:
    """An argument that the formula has no use for."""

    def __init__(self, name: str):
        self.__dict__["name"] = name

    def _read(self, *_, **__):
        raise Refused(f"its forward reads {self.name}")

    __getattr__ = __setattr__ = __getitem__ = __setitem__ = __call__ = _read
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = _read
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __iter__ = __contains__ = _read
    __neg__ = __invert__ = __and__ = __or__ = __eq__ = __ne__ = _read
    __hash__ = object.__hash__


class Cache(Opaque):
    """An argument that answers update, with other tensors of twice the length."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__dict__["calls"] = []

    def update(self, k, v, layer_idx, **more):
        self.calls.append((k, v, layer_idx, more))
        return torch.cat([k * 0.5, k], -2), torch.cat([v * 0.25, v], -2)


class Interface:
    """Stands for the registry of attention functions, and for the function that it finds."""

    def __init__(self):
        self.calls, self.asked = [], []

    def get_interface(self, name, default):
        self.asked.append((name, default))
        return self

    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        B, H, T, _ = query.shape
        out = random(B, T, H, value.shape[-1], seed=11, dtype=query.dtype)
        self.calls.append((query, key, value, attention_mask, kwargs, out))
        return out, "weights"
