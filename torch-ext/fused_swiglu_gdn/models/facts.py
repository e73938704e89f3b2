"""Attributes that a forward may read of its module, without its text: the names in its code among
the module's attributes, and what a first run on stubs asks for."""

import inspect
from types import FunctionType, MethodType
from typing import Dict, List, Optional, Set

import torch
from torch import nn

from ..layers.own_code import codes_in, peeled
from ..layers.pinned import PLAIN_VALUES, SPACES
from .code import Refused, signature_of
from .pins import names_in, words_in, wrapped_in
from .stand_ins import features, quiet, twin_of
from .trust import Code, code_of

CHOOSE = frozenset(("argsort", "sort", "topk"))
BY_DTYPE = "dtype"  # its code asks for one
ASK = frozenset(("getattr", "hasattr", "__dict__", "vars"))
DEEPEST = 3  # "config.text_config.width"


class Known:
    """Facts of the code of a class, whatever its module: remembered with the code."""

    def __init__(self, code: Code):
        walk = code.walk
        self.forward = peeled(code.walk.kind.forward).forward
        self.signature = signature_of(code.inner)
        self.names: Set[str] = set()
        self.asked: Set[str] = set()  # which a module need not have
        arguments: Set[str] = set()
        around = wrapped_in(walk.kind.forward)
        around = around[: around.index(self.forward)] if self.forward in around else []
        for function in walk.walked:
            if function in around:  # which is not run
                continue
            self.names |= names_in(function.__code__)
            # what gets **kwargs and has a name for one of them; of other code, whatever it calls
            for inner in codes_in(function.__code__)[function is code.inner :]:
                if walk.named or inner.co_flags & inspect.CO_VARKEYWORDS:
                    count = inner.co_argcount + inner.co_kwonlyargcount
                    arguments.update(inner.co_varnames[:count])
            if ASK & names_in(function.__code__):  # by strings
                self.asked |= words_in(function.__code__)
        self.names |= self.asked
        self.own = (walk.words | arguments) - {*self.signature.names, "self"}
        self.runs: Dict[tuple, Optional[_Seen]] = {}  # first runs of its modules


class Facts:
    """A forward, and the attributes of a module that it may read."""

    def __init__(self, code: Code, known: Known, module: nn.Module):
        self.pinned, self.forward, self.signature = code.pins, known.forward, known.signature
        self.functions, self.named = code.walk.walked, code.walk.named
        self.names, self.own = known.names, known.own  # keywords that are for the class's forward
        self.methods = code.pins.methods
        found = dict(_paths(module, known.names))
        found.update(dict.fromkeys([n for n in known.asked if is_absent(module, n)]))
        parts, tensors = module._modules, {*module._parameters, *module._buffers}
        self.reads: Set[str] = {*found, *known.names.intersection(tensors)}
        self.parts = known.names.intersection(parts)
        self.parts |= {n for n, v in module.__dict__.items() if n in known.names and _calls(n, v)}
        numbers = [n for n, v in found.items() if type(v) is float and "." not in n]
        self.numbers = self.reads.intersection(numbers)
        self.direct: Set[str] = set()  # weights and biases of parts
        for name in self.parts.intersection(parts):
            for one in known.names.intersection(("weight", "bias")):
                if parts[name] is not None and one in parts[name]._parameters:
                    self.direct.add(f"{name}.{one}")
        if len(self.signature.names) == 1 and not self.signature.defaults:
            plain = [(n, v) for n, v in found.items() if v is None or type(v) in (bool, int, str)]
            key = tuple(parts), tuple(tensors), tuple(sorted(plain, key=lambda pair: pair[0]))
            if key not in known.runs:
                known.runs[key] = _first_run(module, code.walk.kind, self.forward)
            self.asked_for(known.runs[key], module)

    def asked_for(self, seen: Optional["_Seen"], module: nn.Module) -> None:
        """Leaves what a first run asks for, if it came to its end."""
        if seen is not None:
            absent = {n for n in self.reads if "." not in n and is_absent(module, n)}
            self.reads = absent | {n for n in self.reads if n.split(".")[0] in seen.attributes}
            self.parts, self.direct = seen.called, self.direct & seen.direct
            self.numbers = self.numbers & self.reads

    @property
    def rates(self) -> frozenset:
        """Numbers that may be the rate of a dropout."""
        return self.numbers if "dropout" in self.names else frozenset()


def is_absent(module: nn.Module, name: str) -> bool:
    """The module has no attribute of this name, found without its __getattr__."""
    attributes = module.__dict__
    if name in attributes or any([name in attributes[space] for space in SPACES]):
        return False
    return not hasattr(type(module), name)


def _calls(name: str, value: object) -> bool:
    kinds = (FunctionType, MethodType)
    return not name.startswith("_") and (isinstance(value, kinds) or callable(value))


def _paths(owner: object, names: Set[str], prefix: str = "", depth: int = 1) -> List[tuple]:
    """(path, value) of the attributes with these names that a guard can compare; of an object with
    attributes of its own, such as a configuration, those."""
    found = []
    of_class = () if depth == 1 else _properties(type(owner))
    for name in names.intersection((*owner.__dict__, *of_class)):
        if name.startswith("_") and depth == 1:
            continue
        try:
            value = getattr(owner, name) if depth > 1 else owner.__dict__[name]
        except Exception:
            continue
        if isinstance(value, (nn.Module, torch.Tensor)) or callable(value):
            continue
        plain = value is None or isinstance(value, PLAIN_VALUES) or not _has_attributes(value)
        if plain or depth == DEEPEST:
            found.append((prefix + name, value))
        else:
            found += _paths(value, names, f"{prefix}{name}.", depth + 1)
    return found


def _has_attributes(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (dict, list, tuple, set))


_found_properties: Dict[type, tuple] = {}


def _properties(kind: type) -> tuple:
    """Names that objects of a class find elsewhere than among their own attributes."""
    if kind not in _found_properties:
        names = list(getattr(kind, "attribute_map", ()))
        for base in kind.__mro__:
            for name, value in vars(base).items():
                plain = value is None or isinstance(value, PLAIN_VALUES)
                if isinstance(value, property) or plain and not name.startswith("__"):
                    names.append(name)
        _found_properties[kind] = tuple(dict.fromkeys(names))
    return _found_properties[kind]


# -- a first run


SEEN = "what was asked for"  # in the twin's __dict__: no module has an attribute of this name


class _Seen:
    def __init__(self):
        self.attributes: Set[str] = set()
        self.called: Set[str] = set()
        self.direct: Set[str] = set()


class Recording:
    """The base of a class whose modules note what they are asked for."""

    def __init_subclass__(cls, **kwargs):
        """Skips what the own class does for its subclasses."""

    def __getattribute__(self, name: str):
        attributes = object.__getattribute__(self, "__dict__")
        if SEEN in attributes:
            attributes[SEEN].attributes.add(name)
        return super().__getattribute__(name)


class _Spy:
    """A part, or a function that is an attribute, in the first run."""

    def __init__(self, name: str, part: object, seen: _Seen):
        self.__dict__["spy"] = name, part, seen

    def __call__(self, x, *more, **words):
        name, part, seen = self.__dict__["spy"]
        seen.called.add(name)
        size = features(part) if isinstance(part, nn.Module) else ()
        return x.new_ones(*x.shape[:-1], size[1]) * x.sum() if size else x

    def __getattr__(self, name: str):
        own, part, seen = self.__dict__["spy"]
        seen.direct.add(f"{own}.{name}")
        found = getattr(part, name)
        if isinstance(found, torch.Tensor):
            return torch.ones(found.shape, dtype=torch.float64)
        return found


def _first_run(module: nn.Module, kind: type, forward) -> Optional[_Seen]:
    """Attributes that a run of a forward of one argument asks for; None if it did not end."""
    seen = _Seen()
    try:
        recording = type(kind)(kind.__name__, (Recording, kind), {"__module__": kind.__module__})
    except Exception:
        return None
    parts = {n: _Spy(n, p, seen) for n, p in module._modules.items() if p is not None}
    own = {**module._parameters, **module._buffers}
    shapes = {n: p.shape for n, p in own.items() if p is not None}
    tensors = {n: torch.ones(shape, dtype=torch.float64) for n, shape in shapes.items()}
    twin = twin_of(module, kind, parts, tensors)
    object.__setattr__(twin, "__class__", recording)
    for name, value in list(twin.__dict__.items()):
        if name not in parts and name in module.__dict__ and _calls(name, value):
            if not isinstance(value, type):
                twin.__dict__[name] = _Spy(name, value, seen)
    widths = [features(p)[0] for p in module._modules.values() if features(p)]
    widths += [shape[-1] for shape in shapes.values() if shape]
    twin.__dict__[SEEN] = seen
    try:
        with quiet():
            forward(twin, torch.ones(2, 3, max(widths, default=4), dtype=torch.float64))
    except Exception:
        return None
    return seen


def read(kind: type, module: nn.Module) -> Facts:
    """Facts of a module of this class; raises Refused with the reason why not."""
    code = code_of(kind)
    known = code.known = code.known or Known(code)
    if not code.pins.methods.isdisjoint(module.__dict__):
        raise Refused("it has methods of its own, which its class has not")
    return Facts(code, known, module)
