"""Objects that a module was recognised by, by identity, so that each call sees later changes."""

import operator
from types import FunctionType
from typing import Callable, Dict, FrozenSet, List, Optional, Tuple

import torch
from torch import nn

PLAIN_VALUES = (bool, int, float, str)
CONTAINERS = (dict, list, tuple, set, frozenset)
MACHINERY = ("transformers.integrations.", "transformers.utils.", "kernels.")
MOST = 64  # entries of a container that is looked into in each call, in 1 to 2 us each
ABSENT = object()
SPACES = ("_parameters", "_modules", "_buffers")
_content = operator.attrgetter("cell_contents")
_function = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


def found_at(module: nn.Module, path: str) -> object:
    """The attribute of a module at a path such as "config.use_rope", or None."""
    value = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


class Frozen:
    """The contents of a container at one time, with all that is in it."""

    def __init__(self, value: object):
        self.contents = _contents(value)

    def __eq__(self, other: object) -> bool:
        return self.contents == (other.contents if type(other) is Frozen else _contents(other))

    def __hash__(self) -> int:
        return hash(self.contents)


class _Same:
    """An object, whatever it is equal to."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _contents(value: object) -> tuple:
    kind = type(value)
    if kind is dict:
        return kind, tuple([(_contents(k), _contents(v)) for k, v in value.items()])
    if kind in (list, tuple):
        return kind, tuple(map(_contents, value))
    if kind in (set, frozenset):
        return kind, frozenset(map(_contents, value))
    return kind, (value if kind in PLAIN_VALUES else _Same(value))


class Given:
    """Stands for any value but None."""


GIVEN = Given()


def holds(module: nn.Module, guards: Tuple[Tuple[str, object], ...]) -> bool:
    """True if the attributes at these paths still have these values, of the same types."""
    attributes = module.__dict__
    for path, value in guards:
        if value is ABSENT:
            if any([path in attributes[s] for s in SPACES]) or path in attributes:
                return False
            continue
        found = attributes[path] if path in attributes else found_at(module, path)
        if found is value:
            continue
        kind = type(value)
        if kind is Given:
            if found is None:
                return False
        elif kind is not Frozen and kind is not type(found) or found != value:
            return False
    return True


def _is_machinery(space: dict) -> bool:
    """The globals of a file that transformers' models have in common."""
    return str(space.get("__name__")).startswith(MACHINERY)


class Pinned:
    """The functions of which a class's forward consists, and all that they find by name, looked at
    together (pins.py)."""

    def __init__(
        self,
        kind: type,
        names: Tuple[Tuple[dict, str, object], ...],
        functions: Tuple[FunctionType, ...],
        cells: tuple,  # free variables of the functions
        methods: FrozenSet[str],
        looked_for: FrozenSet[str],  # names that the class, its bases and tensors are asked for
    ):
        self.kind, self.mro, self.names, self.methods = kind, kind.__mro__, names, methods
        self.functions, self.looked_for = functions, looked_for
        self.codes = tuple([(f, f.__code__) for f in functions])
        self.states = list(map(_function, functions))
        self.cells, self.contents = cells, list(map(_content, cells))
        self.groups: List[tuple] = []  # (getter of several names, namespace, values)
        self.plain: List[tuple] = []  # what might be equal to something else
        self.deep: List[tuple] = []  # what can be changed as it is
        by_space: Dict[int, list] = {}
        for space, name, value in names:
            if value is ABSENT or isinstance(value, (*PLAIN_VALUES, type(None), torch.Tensor)):
                self.plain.append((space, name, value))
            else:
                by_space.setdefault(id(space), []).append((space, name, value))
            if type(value) in CONTAINERS and not _is_machinery(space):
                self.look_into(value)
        for entries in by_space.values():
            asked = [name for _, name, _ in entries]
            values = tuple([value for _, _, value in entries])
            if len(asked) == 1:  # a getter of one name gives no tuple
                asked, values = asked * 2, values * 2
            self.groups.append((operator.itemgetter(*asked), entries[0][0], values))
        for function in functions:
            if not _is_machinery(function.__globals__):
                for cell in function.__closure__ or ():
                    self.look_into(cell.cell_contents if cell in cells else None)
                words = (function.__kwdefaults__ or {}).values()
                for value in (*(function.__defaults__ or ()), *words):
                    self.look_into(value if type(value) in (dict, list, set) else None)
        spaces = [vars(base) for base in (*self.mro[: self.mro.index(nn.Module) + 1], torch.Tensor)]
        self.sizes = [(space, len(space), self.known_in(space)) for space in spaces]

    def look_into(self, value: object) -> None:
        if type(value) in CONTAINERS and len(value) <= MOST:
            self.deep.append((value, Frozen(value)))

    def known_in(self, space: dict) -> frozenset:
        return self.looked_for.intersection(space)

    def unchanged_of(self, module: nn.Module, guards: Tuple[Tuple[str, object], ...]) -> bool:
        """True if the module itself is unchanged, which is as much as torch.compile can trace."""
        names, attributes = (*self.methods, *module._modules), module.__dict__
        if any([name in attributes for name in names]):  # torch 2.11 traces no other question
            return False
        return not guards or holds(module, guards)

    def unchanged(  # noqa: C901  one function: each module of each token calls it
        self, module: Optional[nn.Module] = None, guards: Tuple[Tuple[str, object], ...] = ()
    ) -> bool:
        """True if none has been patched since, the module hides no attribute of its class, and its
        attributes at these paths still have the values by which it was recognised."""
        if module is not None:
            attributes = module.__dict__
            if not self.methods.isdisjoint(attributes):
                return False
            if attributes.keys() & attributes["_modules"].keys():
                return False  # an entry hides a part
            if guards and not holds(module, guards):
                return False
        if self.kind.__mro__ is not self.mro:
            return False
        try:
            for get, space, values in self.groups:
                if get(space) != values:
                    return False
            if list(map(_function, self.functions)) != self.states:
                return False
            if list(map(_content, self.cells)) != self.contents:
                return False
        except (KeyError, RuntimeError, ValueError):  # it is gone, or compares as arrays do
            return False
        for space, name, value in self.plain:
            if space.get(name, ABSENT) is not value:
                return False
        for value, frozen in self.deep:
            if frozen != value:
                return False
        for i, (space, size, known) in enumerate(self.sizes):
            if len(space) != size:  # a name that is set later hides one behind it
                if self.known_in(space) != known:
                    return False
                self.sizes[i] = space, len(space), known
        return True


def call_check(pinned: Pinned, guards: Tuple[Tuple[str, object], ...]) -> Callable:
    """A function (module, compiling) of each call: Pinned.unchanged, also where torch compiles,
    which looks at the class when it traces, and at the module itself in every call."""

    @torch.compiler.assume_constant_result
    def of_class() -> bool:
        return pinned.unchanged()

    def unchanged(module: nn.Module, compiling: bool) -> bool:
        if compiling:
            return of_class() and pinned.unchanged_of(module, guards)
        return pinned.unchanged(module, guards)

    return unchanged
