"""Checks that a function is the one in its file, and takes off what transformers puts around it.

A patch of a class or of a module changes what a model computes, and a layer of ours that stands in
for the unpatched code would lose it. No list of versions is needed: the code of a function is
compared with what the loader of its module reads from the file.
"""

import functools
import sys
from types import CodeType, FunctionType, MethodType
from typing import FrozenSet, List, NamedTuple, Tuple

from torch import nn

DISPATCHERS = "transformers.integrations.hub_kernels"  # what stands before the torch functions


@functools.lru_cache(maxsize=4096)
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


def is_in_its_file(function, package: str = "") -> bool:
    """A Python function, of `package` if one is given, whose code is that of the file of its
    module."""
    if type(function) is not FunctionType:
        return False
    module = function.__globals__.get("__name__", "")
    if package and module != package and not module.startswith(package + "."):
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
