"""Checks that a function of transformers is the one in its file, with all that it calls.

A patch of a class or of a module changes what a model computes, and a layer of ours that stands in
for the unpatched code would lose it. No list of versions is needed: the code of a function is
compared with what the loader of its module reads from the file.
"""

import functools
import logging
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import FrozenSet, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from .pinned import Pinned

HARMLESS = (str, int, float, tuple, type(None), logging.Logger, ModuleType)
DISPATCHERS = "transformers.integrations.hub_kernels"  # what stands before the torch functions


class NotOwn(Exception):
    """Says what is not as transformers has it."""


def codes_in(code: CodeType) -> List[CodeType]:
    """A code object, and all that are inside of it."""
    found = [code]
    for each in found:  # appended to while iterating
        for constant in each.co_consts:
            if isinstance(constant, CodeType):
                found.append(constant)
    return found


@functools.cache
def codes_of(module: str) -> frozenset:
    """Every code object in a module's file, as its loader reads it."""
    loader = getattr(sys.modules[module].__spec__, "loader", None)
    code = loader.get_code(module) if hasattr(loader, "get_code") else None
    return frozenset() if code is None else frozenset(codes_in(code))


def is_in_its_file(function, package: str) -> bool:
    """A Python function of `package` whose code is that of the file of its module."""
    if type(function) is not FunctionType:
        return False
    module = function.__globals__.get("__name__", "")
    if module != package and not module.startswith(package + "."):
        return False
    known = sys.modules.get(module)
    same = known is not None and known.__dict__ is function.__globals__
    return same and function.__code__ in codes_of(module)


def cells_of(function) -> dict:
    """The variables of a closure by name."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells)))


# transformers' decorators of forwards that pass a call on as it is: the module and the name of the
# function around a forward, and the variable that holds the forward
CHECKPOINTS = ("transformers.modeling_layers", "forward_with_checkpointing")
HOOKS = ("transformers.integrations.accelerate", "wrapped")
RENAMES = ("transformers.utils.deprecation", "wrapped_func")
WRAPPERS = {CHECKPOINTS: "forward", HOOKS: "forward_func", RENAMES: "func"}


class Peeled(NamedTuple):
    """A forward without the decorators around it."""

    forward: object
    wrappers: Tuple[tuple, ...] = ()  # keys of WRAPPERS
    hooked: FrozenSet[str] = frozenset()  # parts whose hooks a decorator calls


def peeled(forward) -> Peeled:
    """Takes transformers' own decorators off a forward, in whatever order they are."""
    wrappers, hooked = [], set()
    while getattr(forward, "__closure__", None):
        key = forward.__globals__.get("__name__"), forward.__code__.co_name
        if key not in WRAPPERS or not is_in_its_file(forward, key[0]):
            break
        cells = cells_of(forward)
        if key == HOOKS:
            hooked.update(cells.get("child_module_names"))
        wrappers.append(key)
        forward = cells.get(WRAPPERS[key])
    return Peeled(forward, tuple(wrappers), frozenset(hooked))


def undispatched(value):
    """The torch function in the dispatcher that transformers puts before it, or the value."""
    if isinstance(value, nn.Module) and type(value).__module__ == "kernels.layer.layer":
        bound = value.__dict__.get("forward")
        if bound is None or _is_put_by_kernels(value, bound):
            value = cells_of(type(value).forward).get("func")
    if getattr(value, "__closure__", None) and is_in_its_file(value, DISPATCHERS):
        return cells_of(value).get("torch_function")
    return value


def _is_put_by_kernels(module, bound) -> bool:
    """The forward on a function's module is its own, or of a layer that `kernels` has loaded."""
    function = bound.__func__ if isinstance(bound, MethodType) else bound
    loaded = getattr(sys.modules["kernels.layer.layer"], "_CACHED_LAYER", {})
    return any(function is kind.forward for kind in (type(module), *loaded.values()))


def names_in(function: FunctionType) -> set:
    return {name for code in codes_in(function.__code__) for name in code.co_names}


def why_not_own(function) -> Optional[str]:
    """Returns the reason why a function is not transformers' own, as its file has it, or None."""
    if is_in_its_file(function, "transformers"):
        return None
    where = getattr(function, "__module__", None) or type(function).__module__
    return f"is not that of transformers but of {where}"


def _look_into(function, names: list) -> None:
    """Raises NotOwn unless the function, and all that it calls by name, are transformers' own."""
    why = why_not_own(function)
    if why is None and function.__closure__:
        why = f"is wrapped by {function.__name__} of {function.__module__}"
    if why is not None:
        raise NotOwn(why)
    for name in sorted(names_in(function)):
        look_at_torch(name)
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        plain = undispatched(value)
        if isinstance(plain, FunctionType):
            place = (function.__globals__, name, value)
            if not any(s is place[0] and n == name for s, n, _ in names):
                names.append(place)
                try:
                    _look_into(plain, names)
                except NotOwn as error:
                    raise NotOwn(f"calls {name}, which {error}") from None
        elif isinstance(plain, type) or name in ("ACT2FN", "ALL_ATTENTION_FUNCTIONS"):
            if not plain.__module__.startswith(("transformers.", "torch.")):
                raise NotOwn(f"uses {name}, which is not that of transformers")
        elif not isinstance(plain, HARMLESS):
            raise NotOwn(f"uses {name}, which is a {type(plain).__name__}")
        elif not isinstance(plain, (logging.Logger, ModuleType)):
            names.append((function.__globals__, name, value))  # a number or word may be another


def own_names(function: FunctionType) -> List[tuple]:
    """(namespace, name, value) of all functions that a function of transformers calls, and they
    call. Raises NotOwn, which says why it is not transformers' own, or which of them."""
    names: List[tuple] = []
    _look_into(function, names)
    return names


def is_own_function(function) -> bool:
    """A function is transformers' own, and so is all that it calls by name."""
    try:
        own_names(function)
    except NotOwn:
        return False
    return True


def look_at_torch(name: str) -> None:
    """Raises NotOwn if torch's function of this name is patched."""
    for module in (torch, F):
        value = module.__dict__.get(name)
        if type(value) is FunctionType and not is_in_its_file(value, "torch"):
            raise NotOwn(f"calls {module.__name__}.{name}, which is patched")
        if not isinstance(value, (FunctionType, BuiltinFunctionType, type, *HARMLESS)):
            if not type(value).__module__.startswith("torch"):
                raise NotOwn(f"calls {module.__name__}.{name}, which is patched")


def own_code(kind: type) -> Tuple[FunctionType, Pinned]:
    """The forward of a class of transformers' models, without decorators, and what a patch could
    replace. Raises NotOwn, which says why it is not transformers' own."""
    namespace = next(vars(base) for base in kind.__mro__ if "forward" in vars(base))
    plain = peeled(namespace["forward"]).forward
    names = own_names(plain)
    if not plain.__globals__["__name__"].startswith("transformers.models."):
        raise NotOwn("is not that of a model of transformers")
    return plain, Pinned(((namespace, "forward", namespace["forward"]), *names), ())
