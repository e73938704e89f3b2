"""Attributes that a forward may read of its module, without its text: the names in its code among
the module's attributes."""

import inspect
from typing import Dict, List, Set

import torch
from torch import nn

from ..layers.own_classes import Code, wrapped_in
from ..layers.own_code import codes_in, peeled
from ..layers.pinned import ABSENT, CONTAINERS, PLAIN_VALUES, SPACES, Frozen
from ..layers.pins import names_in, words_in
from .code import Refused, signature_of
from .trust import code_of

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
        # training and evaluation, where the code names them, or drops values out in one of them
        self.modes = {"training", "dropout"} & self.names
        self.own = (walk.words | arguments) - {*self.signature.names, "self"}


class Facts:
    """A forward, and the attributes of a module that it may read."""

    def __init__(self, code: Code, known: Known, module: nn.Module):
        self.pinned, self.forward, self.signature = code.pins, known.forward, known.signature
        self.functions, self.named = code.walk.walked, code.walk.named
        self.names, self.own = known.names, known.own  # keywords that are for the class's forward
        # what a call can compare: numbers, words, flags and None, the contents of containers, and
        # other objects but tensors and parts
        values: Dict[str, object] = {}
        for path, value in _paths(module, known.names):
            values[path] = Frozen(value) if type(value) in CONTAINERS else value
        own = known.names.intersection((*module._parameters, *module._buffers))
        for name in own:
            if module._parameters.get(name, module._buffers.get(name)) is None:
                values[name] = None
        for name in known.asked:
            if is_absent(module, name):
                values[name] = ABSENT
        self.values = {path: values[path] for path in sorted(values)}
        self.reads: Set[str] = {*values, *own}
        attributes = module.__dict__
        calls = [n for n in known.names.intersection(attributes) if callable(attributes[n])]
        self.parts = known.names.intersection(module._modules)
        self.parts.update([name for name in calls if not name.startswith("_")])
        # numbers that may be the rate of a dropout
        self.rates: Set[str] = set()
        if "dropout" in known.names:
            self.rates = {n for n, v in values.items() if type(v) is float and "." not in n}
        self.modes = (False, True) if known.modes else (module.training,)

    def values_but(self, *names: str) -> dict:
        """`values` of other paths than these."""
        return {path: value for path, value in self.values.items() if path not in names}

    def only_argument(self) -> str:
        """The name of the one argument that the forward has to be given."""
        known = self.signature
        needed = [name for name in known.names if name not in known.defaults]
        if len(needed) != 1 or list(known.positional[:1]) != needed:
            raise Refused("its forward takes other arguments than one tensor")
        return needed[0]


def is_absent(module: nn.Module, name: str) -> bool:
    """The module has no attribute of this name, found without its __getattr__."""
    attributes = module.__dict__
    if name in attributes or any([name in attributes[space] for space in SPACES]):
        return False
    return not hasattr(type(module), name)


def _paths(owner: object, names: Set[str], prefix: str = "", depth: int = 1) -> List[tuple]:
    """(path, value) of the attributes with these names that a guard can compare; of an object with
    attributes of its own, such as a configuration, those."""
    found = []
    every = owner.__dict__ if depth == 1 else (*owner.__dict__, *_properties(type(owner)))
    for name in names.intersection(every):
        if name.startswith("_") and depth == 1:
            continue
        try:
            value = getattr(owner, name) if depth > 1 else owner.__dict__[name]
        except Exception:
            continue
        kind = type(value)  # a configuration runs code of its own where isinstance asks it
        if issubclass(kind, torch.Tensor) or callable(value):
            continue
        plain = issubclass(kind, (*PLAIN_VALUES, type(None))) or not _has_attributes(kind)
        if plain or depth == DEEPEST:
            found.append((prefix + name, value))
        else:
            found += _paths(value, names, f"{prefix}{name}.", depth + 1)
    return found


def _has_attributes(kind: type) -> bool:
    """A class gives its objects a __dict__."""
    return kind.__dictoffset__ != 0 and not issubclass(kind, (dict, list, tuple, set))


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


def read(kind: type, module: nn.Module) -> Facts:
    """Facts of a module of this class; raises Refused with the reason why not."""
    code = code_of(kind)
    known = code.known = code.known or Known(code)
    if not code.pins.methods.isdisjoint(module.__dict__):
        raise Refused("it has methods of its own, which its class has not")
    return Facts(code, known, module)
