"""Objects that a forward of a class finds by name, as identities: from code objects, without text.

All names in the forward's code, in what is around it and in the functions that it calls by name are
looked up where Python would find them: in their globals, in torch's namespaces, in the class and
its bases, in free variables and defaults. Functions of torch and of Python's library are pinned,
and not walked.
"""

import functools
import os
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Iterator, List, Optional, Set, Tuple

import torch
from torch import nn

from .own_code import codes_in, codes_of, is_in_its_file
from .pinned import ABSENT, Pinned

PACKAGES = ("transformers", "torch", "kernels", "accelerate")
# what nn.Module has for calling a module and for finding its parts
MACHINERY = (
    "__getattr__", "__getattribute__", "__dict__", "_call_impl", "_wrapped_call_impl",
    "_slow_forward",
)  # fmt: skip
OWN = ("transformers", "kernels")  # whose functions are walked wherever they are named
OTHERS = ("torch", "accelerate")  # whose are not
GROWS = ("torch", "transformers", "math", "operator")  # modules that are looked into by name
OF_TENSORS = vars(torch.Tensor)
OPERATORS = frozenset(
    f"__{side}{name}__"
    for name in (
        "add and eq floordiv ge getitem gt invert le lt matmul mod mul ne neg or pow setitem sub "
        "truediv xor"
    ).split()
    for side in ("", "r", "i")
)
STDLIB = (os.path.dirname(os.__file__) + os.sep, "<frozen")


@functools.lru_cache(maxsize=16)
def _roots(packages: tuple, known: tuple) -> tuple:
    return tuple([os.path.dirname(file) + os.sep for file in known if file])


def is_of(code: CodeType, *packages: str) -> bool:
    """A code object is of a file of one of these packages, as they are installed."""
    known = tuple([getattr(sys.modules.get(name), "__file__", None) for name in packages])
    return code.co_filename.startswith(_roots(packages, known))


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset:
    return frozenset([name for each in codes_in(code) for name in each.co_names])


@functools.lru_cache(maxsize=4096)
def words_in(code: CodeType) -> frozenset:
    """The strings in it that may be names."""
    found = [c for each in codes_in(code) for c in each.co_consts]
    return frozenset([c for c in found if isinstance(c, str) and c.isidentifier()])


def functions_in(value: object) -> List[FunctionType]:
    """The Python functions of which a value consists that is found by name."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, functools.partial):
        return functions_in(value.func)
    if type(value).__name__ == "_lru_cache_wrapper":
        return functions_in(value.__wrapped__)
    if isinstance(value, nn.Module):  # a function that `kernels` wraps
        bound = vars(value).get("forward")
        return functions_in(type(value).forward) + functions_in(bound)
    if isinstance(value, (list, tuple)):
        return [function for each in value for function in functions_in(each)]
    return []


class Walk:
    """All that the forward, or another method, of a class consists of. named: the user has named
    the class, whose functions are walked wherever they are. ends: names of functions that are
    pinned, and not walked."""

    def __init__(
        self, kind: type, method: str = "forward", named: bool = False,
        ends: frozenset = frozenset(),
    ):  # fmt: skip
        self.kind, self.named, self.ends = kind, named, ends
        self.bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
        self.names: dict = {}
        self.cells: dict = {}
        self.functions: List[FunctionType] = []  # which are pinned
        self.walked: List[FunctionType] = []
        self.asked: Set[str] = set()  # names that the class is asked for
        self.words: Set[str] = set()
        self.members: Set[str] = set()  # attributes of the class among them
        self.foreign: Optional[str] = None  # a function that is nobody's whom we trust
        self.patched: Optional[str] = None
        self.spaces = [vars(base) for base in self.bases]
        self.method = method
        # of bases, which run by super() or by their name alone
        self.hidden = [space[method] for space in self.spaces if method in space][1:]
        self.of_class({method})

    def pins(self) -> Pinned:
        looked_for = self.asked | OPERATORS | {*MACHINERY, "__call__"}
        methods = (self.asked | OPERATORS).intersection(OF_TENSORS)
        self.names.update({(id(OF_TENSORS), n): (OF_TENSORS, n, OF_TENSORS[n]) for n in methods})
        return Pinned(
            self.kind, tuple(self.names.values()), tuple(self.functions),
            tuple(self.cells.values()), frozenset(self.members - {"forward"}),
            frozenset(looked_for),
        )  # fmt: skip

    def pin(self, space: dict, name: str, value: object) -> bool:
        """Returns True if it was not known."""
        if (id(space), name) in self.names:
            return False
        self.names[id(space), name] = (space, name, value)
        return True

    def of_class(self, names: Set[str]) -> None:
        """Class attributes of these names, of every base: super() may ask for any of them."""
        if self.hidden and {"super", self.method} & names and self.asked:
            hidden, self.hidden = self.hidden, []
            for function in hidden:
                self.value(self.method, function)
        new, self.asked = names - self.asked, self.asked | names
        for space in self.spaces:
            for name in new.intersection(space):
                self.members.add(name)
                value = space[name]
                hidden = name == self.method and any([value is x for x in self.hidden])
                if self.pin(space, name, value) and not hidden:
                    self.value(name, value)

    def value(self, name: str, value: object, by: Optional[dict] = None) -> None:
        for function in functions_in(value):
            if function not in self.functions:
                self.function(name, function, by)

    @staticmethod
    def is_imported(function: FunctionType, by: Optional[dict]) -> bool:
        """A file of transformers whose namespace this is imports the package of a function, or
        names it, as for a decorator that imports it; what says that it is of a package of OWN, and
        is in no file of it, is not."""
        home, package = (by or {}).get("__name__", ""), (function.__module__ or "").split(".")[0]
        if not home.startswith("transformers.") or package in OWN or not is_in_its_file(function):
            return False
        codes = codes_of(home)
        names = {name for code in codes for name in code.co_names}
        words = {word for code in codes for word in code.co_consts if isinstance(word, str)}
        return package in words | {name.split(".")[0] for name in names}

    def function(self, name: str, function: FunctionType, by: Optional[dict] = None) -> None:
        """name: by which it is found; by: the globals of the function that names it."""
        self.functions.append(function)
        code, words = function.__code__, function.__kwdefaults__ or {}
        for word, value in words.items():
            self.pin(words, word, value)
        if is_of(code, *OTHERS):
            if self.patched is None and not is_in_its_file(function):
                self.patched = name
            return
        if not is_of(code, *OWN):
            if code.co_filename.startswith(STDLIB) and "site-packages" not in code.co_filename:
                return
            if self.is_imported(function, by):
                return
            self.foreign = self.foreign or name
            if not self.named:
                return
        elif self.patched is None and not is_in_its_file(function):
            self.patched = name
        if name in self.ends:
            return
        self.walked.append(function)
        self.words |= words_in(code)
        for variable, cell in zip(code.co_freevars, function.__closure__ or ()):
            self.free_variable(variable, name, cell)
        self.named_in(code, function.__globals__)

    def free_variable(self, variable: str, name: str, cell) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # it is empty
            return
        self.cells[id(cell)] = cell
        if isinstance(value, str):
            self.words.add(value)
        if variable != "__class__":  # a decorator's are what the class's file has asked it for
            self.value(name, value, vars(sys.modules.get(self.kind.__module__, sys)))

    def named_in(self, code: CodeType, space: dict) -> None:
        """Objects that names in a code object stand for, whose function has these globals."""
        names, modules = names_in(code), []
        if "getattr" in names or "hasattr" in names:
            names = names | words_in(code)
        self.of_class(set(names))
        for name in sorted(names.intersection(space)):
            value = space[name]
            new = self.pin(space, name, value)
            if isinstance(value, ModuleType):
                modules.append(value)
            elif new:
                self.value(name, value, space)
        for module in modules:  # appended to while iterating: torch.nn.functional.silu
            inside = vars(module)
            for name in sorted(names.intersection(inside)):
                value = inside[name]
                if isinstance(value, ModuleType):
                    if value not in modules and value.__name__.split(".")[0] in GROWS:
                        self.pin(inside, name, value)
                        modules.append(value)
                elif self.pin(inside, name, value):
                    self.value(name, value, space)
                    if module.__name__.split(".")[0] == "torch" and not _is_torchs(value):
                        self.patched = self.patched or f"{module.__name__}.{name}"


PLAIN = (BuiltinFunctionType, type, str, int, float, tuple, list, dict, set, type(None))


def _is_torchs(value: object) -> bool:
    """True for what torch's own namespaces hold: functions in C or of its files, classes, numbers,
    objects of its own."""
    if type(value) is FunctionType:
        return is_of(value.__code__, "torch")
    return isinstance(value, PLAIN) or type(value).__module__.startswith("torch")


# -- of code that the user has named: state that it reads besides its arguments and its module

# modules whose answers change by themselves, or with what other threads do
CHANGE = {"datetime", "gc", "inspect", "os", "random", "sys", "threading", "time"}
KNOWN = (ModuleType, FunctionType, nn.Module, torch.Tensor)
LOOK_UP = {"__dict__", "eval", "exec", "globals", "locals", "vars"}


def _named_in(walk: Walk) -> Iterator[Tuple[CodeType, dict]]:
    """Code objects that are not of transformers or torch, each with the globals of its function."""
    for function in walk.walked:
        if not is_of(function.__code__, *OWN, *OTHERS):
            yield function.__code__, function.__globals__


def why_unsteady(walk: Walk) -> Optional[str]:
    """A reason why no trial says what the next call computes, or None."""
    for code, space in _named_in(walk):
        names = names_in(code)
        for name in sorted(names & LOOK_UP):
            return f"its forward looks names up by {name}"
        for name in sorted(names.intersection(space)):
            home = _home(space[name])
            if home in CHANGE:
                return f"its forward asks {home}, whose answers may change from call to call"
    return None


def _home(value: object) -> str:
    """The module that a value is, or of which it is."""
    if isinstance(value, ModuleType):
        return value.__name__
    return str(getattr(value, "__module__", None) or type(value).__module__)


def pin_objects(walk: Walk) -> None:
    """Pins attributes of classes and other objects among the globals, also those that only their
    class has."""
    for code, space in _named_in(walk):
        names, seen = names_in(code), set()
        left = [space[name] for name in sorted(names.intersection(space))]
        for value in left:  # appended to while iterating
            if id(value) in seen or isinstance(value, KNOWN):
                continue
            seen.add(id(value))
            kind = value if isinstance(value, type) else type(value)
            if kind.__module__.split(".")[0] in (*OWN, *OTHERS, "builtins"):
                continue
            spaces = list(map(vars, kind.__mro__[:-1]))
            if kind is not value and hasattr(value, "__dict__"):
                spaces.insert(0, vars(value))
            for name in sorted(names.intersection(set().union(*spaces))):
                for inside in spaces:  # what is set later in one hides those behind it
                    walk.pin(inside, name, inside.get(name, ABSENT))
                    left.append(inside.get(name))
