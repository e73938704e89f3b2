"""Stubs for the parts and arguments of a module in an equivalence check of its forward.

A probe module has the module's class and plain attributes; its parts are functions with numbers of
their own, and every other argument of a forward is opaque: it may be passed on and compared with
None, and raises if it is read. So a forward that gives the formula's numbers has used nothing else.
"""

import contextlib
import functools
import math
import operator
from types import SimpleNamespace
from typing import Callable, Dict, Optional

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .code import Refused
from .opaque import read_by

F64 = torch.float64
# what tensors are asked for
SIZES = "__len__ device dim dtype is_floating_point ndim numel shape size".split()

# what the process is in rather than what the class computes: no verdict about a class follows
OF_THE_PROCESS = (MemoryError, OSError, RecursionError, SystemError)


class Raises(Refused):
    """Raised when the forward raises an exception of its own; one of OF_THE_PROCESS goes on as it
    is, and so is no verdict that is kept."""

    def __init__(self, error: Exception):
        if isinstance(error, OF_THE_PROCESS):
            raise error
        said = str(error).replace("'Unknown' object", "a part")[:60]
        super().__init__(f"its forward raises {type(error).__name__} when tried: {said}")
        self.error = error


def quiet() -> contextlib.AbstractContextManager:
    """Disables gradients and autocast and selects the CPU, whatever the user's settings are."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    loud = any(modes) or torch.is_autocast_enabled("cpu") or torch._C._len_torch_function_stack()
    return _quietly() if loud else contextlib.nullcontext()


@contextlib.contextmanager
def _quietly():
    # without a mode, tensors are made on the CPU
    on_cpu = not torch._C._len_torch_function_stack()
    device = contextlib.nullcontext() if on_cpu else torch.device("cpu")
    with torch.inference_mode(False), torch.no_grad(), device:
        with torch.autocast("cpu", enabled=False):
            yield
    random.cache_clear()


MANY = 65521  # a prime, so that rows of no width repeat in the longest input


@functools.cache
def _numbers() -> torch.Tensor:
    """Normal numbers, of which every random tensor is made: to draw each of them anew takes a third
    of a first kernelize."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(MANY, generator=generator, dtype=F64, device="cpu")


@functools.lru_cache(maxsize=256)  # of one check
def random(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    """The same tensor at each call with the same arguments: writing to it is not allowed."""
    numbers, start, count = _numbers(), seed * 7919 % MANY, math.prod(shape)
    if start + count > MANY:
        numbers = numbers.repeat(1 + (start + count) // MANY)
    return numbers[start : start + count].reshape(shape).to(dtype, copy=True)


# relative to the largest value: the order of sums in fp64, and roundings on the way in the others
TOLERANCES = {F64: 1e-11, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def same(a: object, b: torch.Tensor, limit: Optional[float] = None) -> bool:
    """True if a and b are of one dtype and shape, and equal up to this part of the largest value,
    TOLERANCES by default; what has no roundings is equal."""
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    limit = TOLERANCES.get(b.dtype) if limit is None else limit
    if limit is None or torch.equal(a, b):
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    largest = b.abs().max()  # every number is within a part of infinity
    return bool((a - b).abs().max() <= limit * largest < torch.inf)


def mixed(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    """Rows of all kinds of values: usual ones, zeros, equal ones, large and small ones,
    those of one sign."""
    x = random(*shape, seed=seed).clone()
    rows = x.view(-1, shape[-1])
    rows[1::7] = 0.0
    rows[2::7] = rows[:1, :1]
    rows[3::7] *= 1e4 if dtype is not torch.float16 else 1e2
    rows[4::7] *= 1e-4
    rows[5::7] = rows[5::7].abs()
    rows[6::7] = -rows[6::7].abs()
    return x.to(dtype)


VALUES = ("mixed", "+", "-", "", "0")  # rows of all kinds, large of one sign, usual ones, zeros


def numbers(*shape: int, values: str, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    """A tensor with one of VALUES."""
    if values == "mixed":
        return mixed(*shape, seed=seed, dtype=dtype)
    x = random(*shape, seed=seed, dtype=dtype)
    if values in ("+", "-"):
        size = 1.0 if dtype is torch.float16 else 1e3
        return x.abs() * (size if values == "+" else -size)
    return x if values == "" else 0 * x


def run(forward: Callable, probe: nn.Module, *args: object, **words: object) -> object:
    """The result of a forward on stubs; raises Refused if it raises, or sets attributes of its
    module, which another call may read."""
    before, attributes = dict(probe.__dict__), probe.__dict__
    try:
        found = forward(probe, *args, **words)
    except Refused:
        raise
    except Exception as error:
        raise Raises(error) from None
    same_names = list(attributes) == list(before)
    if not same_names or not all(map(operator.is_, attributes.values(), before.values())):
        raise Refused("its forward sets attributes")
    return found


def result_of(forward: Callable, probe: nn.Module, x: torch.Tensor) -> object:
    """The output of a forward for x; raises Refused if it raises or writes to x."""
    given = x.clone().requires_grad_(torch.is_grad_enabled())
    found = run(forward, probe, given)
    if not torch.equal(given.detach(), x):
        raise Refused("its forward writes to its input")
    return found


def probe_of(
    module: nn.Module, kind: type, parts=None, parameters=None, **attributes: object
) -> nn.Module:
    """A probe module of this class with the plain attributes of `module`, but for these, and other
    parts."""
    probe, own = object.__new__(kind), module.__dict__
    probe.__dict__.update(own, **_bare())
    probe.__dict__.pop("forward", None)
    inner = {"_modules": dict(parts or {}), "_parameters": dict(parameters or {}), "_buffers": {}}
    probe.__dict__.update(inner, training=own["training"])
    for name, value in (*inner["_modules"].items(), *inner["_parameters"].items()):
        probe.__dict__.setdefault(name, value)  # found without nn.Module.__getattr__
    probe.__dict__.update(attributes)
    return probe


@functools.cache
def _bare() -> dict:
    """The attributes of a module without parts and hooks."""
    return vars(nn.Module())


def features(part: Optional[nn.Module]) -> tuple:
    """The sizes of a projection, wrapped or not; () of any other part."""
    kind = type(part)
    plain = kind is nn.Module or getattr(kind, "__getattr__", None) is nn.Module.__getattr__
    if plain and "in_features" not in part.__dict__ and not hasattr(kind, "in_features"):
        return ()  # without nn.Module's search
    size = getattr(part, "in_features", None)
    if isinstance(size, int):
        other = getattr(part, "out_features", None)
        if isinstance(other, int):
            return size, other
    return ()


def is_identity(module: Optional[nn.Module]) -> bool:
    return type(module) is nn.Identity or type(module) is nn.Dropout and module.p == 0


def rms(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class KeepsFp64(TorchFunctionMode):
    """Makes float() keep fp64: a formula with a part in fp32 is the same formula."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float and args[0].dtype is F64:
            return args[0]
        return function(*args, **(kwargs or {}))


FREE = SimpleNamespace(unchanged=lambda *known: True)  # nothing is pinned: in a trial


class Part:
    """A stub of a projection, of rank 3, so that the module's own sizes cost nothing, with a bias;
    or, with one size, of an RMS norm with a weight; with none, of another norm. It logs its calls
    in its trial's log."""

    def __init__(self, name: str, sizes: tuple, seed: int, trial=None):
        self.name, self.sizes, self.trial = name, sizes, trial
        if not sizes:
            return
        if len(sizes) == 1:
            self.weight = random(*sizes, seed=seed) + 1.5
        else:
            self.a = random(sizes[0], 3, seed=seed) * sizes[0] ** -0.5  # 16 bits hold the product
            self.b = random(sizes[1], 3, seed=seed + 1)
            self.bias = random(sizes[1], seed=seed + 2)

    def __call__(self, *args, **words):
        if len(args) + len(words) != 1:
            raise Refused(f"it calls {self.name} in a way that is not known")
        (x,) = (*args, *words.values())
        if type(x) is not torch.Tensor:
            read_by(x, self.name)
        dtype = x.dtype
        if not self.sizes:
            y = torch.tanh(x * 0.7) + x.abs().amax(-1, keepdim=True)
        elif len(self.sizes) > 1:
            y = F.linear(x @ self.a.to(dtype), self.b.to(dtype), self.bias.to(dtype))
        elif x.shape[-1:] != self.sizes:
            raise Refused("it norms over another width than its weight's")
        else:
            y = rms(x if dtype is F64 else x.float()).to(dtype) * self.weight.to(dtype)
        if self.trial is not None:
            self.trial.log.append((self.name, x, y))
        return y


MOST_OUTPUTS = 3  # of a part of a layer


class Block:
    """A part of a layer that logs its calls in the trial's current log.

    It has one output if it is a norm, else as many as trial.counts says next. The trial's `flat`:
    the part in whose outputs rows and tokens are one dimension.
    """

    _modules: Dict[str, nn.Module] = {}

    def __init__(self, name: str, seed: int, trial, is_norm: bool):
        self.name, self.seed, self.trial, self.is_norm = name, seed, trial, is_norm
        # further outputs, which may be given to another part alone
        self.rest = tuple([object() for _ in range(MOST_OUTPUTS - 1)])

    def __call__(self, *args, **kwargs):
        places = []
        for name in kwargs:
            if type(kwargs[name]) is torch.Tensor:
                places.append(name)
        if args and type(args[0]) is torch.Tensor and not places:
            x, place, more = args[0], None, args[1:]
        elif len(places) == 1 and not args:
            (place,), more = places, ()
            x = kwargs[place]
        elif args or places or not kwargs:
            read_by(args[0] if args else None, self.name)
        else:  # nobody knows yet which of the arguments is the input
            place, more, x = None, (), random(5, 4, 16)
        a, b = random(2, x.shape[-1], seed=self.seed, dtype=x.dtype)
        y = torch.tanh(x * a + b)
        y = y.flatten(0, -2) if self.name == self.trial.flat else y
        count = 1 if self.is_norm else next(self.trial.counts)
        kwargs.pop(place, None)
        place = None if self.is_norm else place  # ours calls norms by position
        # as they are now: what follows may write to them
        self.trial.log.append((self.name, x.clone(), place, more, kwargs))
        return y if count == 1 else (y, *self.rest[: count - 1])


class Unknown:
    """A part that the formula does not use."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args, **kwargs):
        raise Refused(f"its forward also calls {self.name}")
