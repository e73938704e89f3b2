"""Reads a forward, and everything that it calls by name, from its source.

A probe runs a forward on stubs and compares numbers: it tells what the forward computes for what
was tried. The reader refuses a forward that could take another way for another input: one that
branches on a value or a size, loops, writes to attributes, or calls an operation that is not in the
lists below. Branches on None and on the module's own attributes are left to the probe; the
attributes are listed in `reads`, since they may change. A condition on shapes that raises where it
does not hold is kept in `checks`: a call that fails there is for the forward itself.
"""

import ast
import inspect
from types import FunctionType
from typing import Callable, Dict, FrozenSet, Iterable, NamedTuple, Optional, Tuple

from torch import nn

from ..layers.own_code import peeled
from ..layers.pinned import Pinned, found_at
from .body import Body
from .code import PLAIN_VALUES, Refused, is_text, keyword_tested, logs, source_of, why_odd_class


class Source(NamedTuple):
    """A forward whose source is known, with all that it calls by name."""

    forward: FunctionType  # without decorators
    definition: ast.FunctionDef
    pinned: Pinned  # what a patch could replace
    reads: Tuple[str, ...]  # the module's attributes by their paths: "head_dim", "config.use_rope"
    parts: Tuple[str, ...]  # what it calls of the module
    globals: dict
    renamed: FrozenSet[str]  # keywords with which a call is for the class's own forward
    extra: Tuple[str, ...]  # keywords that it takes out of its **kwargs
    switches: FrozenSet[str]  # arguments that it branches on: known at their defaults alone
    checks: Tuple[Callable, ...]  # (module, arguments by name) -> whether the forward raises not
    rates: Tuple[str, ...]  # attributes that are the rate of a dropout
    by_dtype: bool  # it compares dtypes
    hooked: FrozenSet[str]  # parts whose hooks a decorator calls


_sources: Dict[tuple, Source] = {}


def read(kind: type, module: nn.Module, *allowed: str, body: type = Body) -> Source:
    """The source of the forward of a module of this class; raises Refused. `allowed`: "switches",
    "by_dtype", "hooked", for a kind that minds them; `body`: what it may consist of."""
    known = _sources.get((kind, body))
    if known is None or not known.pinned.unchanged():
        known = _sources[kind, body] = _read(kind, body)
    if not known.pinned.unchanged(module):
        raise Refused("it has methods of its own, which its class has not")
    if known.switches and "switches" not in allowed:
        raise Refused(f"its forward branches on {', '.join(sorted(known.switches))}")
    if known.by_dtype and "by_dtype" not in allowed:
        raise Refused("its forward branches on a dtype")
    if known.hooked and "hooked" not in allowed:
        raise Refused(f"its forward calls hooks of {', '.join(sorted(known.hooked))}")
    return known


def _read(kind: type, body: type) -> Source:
    reader = Reader(kind, body)
    forward, base = reader.method("forward", kind.__mro__)
    plain = reader.bare(forward)
    definition = reader.function(plain, (base.__dict__, "forward", forward), "self", base)
    pinned = Pinned(tuple(reader.names), tuple(reader.codes), tuple(sorted(reader.methods)))
    return Source(
        plain, definition, pinned, tuple(sorted(reader.reads)), tuple(sorted(reader.parts)),
        plain.__globals__, frozenset(reader.renamed), tuple(sorted(reader.extra)),
        frozenset(reader.switches), tuple(reader.checks), tuple(sorted(reader.rates)),
        reader.by_dtype, frozenset(reader.hooked),
    )  # fmt: skip


def only_argument(source: Source) -> str:
    """The name of the one argument that a forward has to be given."""
    known = list(inspect.signature(source.forward).parameters.values())[1:]
    needed = [p for p in known if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(needed) != 1 or needed[0].kind not in positional or needed[0] is not known[0]:
        raise Refused("its forward takes other arguments than one tensor")
    if needed[0].name in source.switches:
        raise Refused(f"its forward branches on {needed[0].name}")
    return needed[0].name


def plain_values(module: nn.Module, reads: Iterable[str]) -> dict:
    """The values of those attributes that are numbers, words, flags or None, by their paths."""
    values = {}
    for path in sorted(reads):
        value = found_at(module, path)
        if value is None or isinstance(value, PLAIN_VALUES):
            values[path] = value
    return values


def form_key(module: nn.Module, kind: type, source: Source, values: dict) -> tuple:
    """What the forms that are remembered are told apart by, beside a module's parts."""
    hidden = tuple(name for name in source.parts if name in module.__dict__)
    return kind, source.pinned.codes, tuple((n, type(v), v) for n, v in values.items()), hidden


def why_odd_module(module: nn.Module, kind: type, source: Source, names, *more) -> Optional[str]:
    """The class is odd, or the forward calls what is no part."""
    reason = why_odd_class(kind, names, *more)
    if reason is not None:
        return reason
    for name in source.parts:
        if name in module.__dict__:
            return f"{name} is no module of its own"
    return None


class Reader:
    """All functions that a class's forward consists of."""

    def __init__(self, kind: type, body: type = Body):
        self.kind, self.names, self.codes, self.checks = kind, [], [], []
        self.body, self.hooked = body, set()
        self.reads, self.parts, self.methods, self.rates = set(), set(), set(), set()
        self.renamed, self.extra, self.switches = set(), set(), set()
        self.seen: set = set()
        self.by_dtype = False

    def method(self, name: str, bases: Iterable[type]) -> Tuple[object, type]:
        """A method as it stands in the first class that has it, and that class."""
        for base in bases:
            if name in base.__dict__:
                return base.__dict__[name], base
            self.names.append((base.__dict__, name, None))
        raise Refused(f"its class has no {name}")

    def bare(self, function: object) -> object:
        """A function without decorators that pass a call on as it is."""
        while True:
            found = peeled(function)
            self.renamed |= found.renamed
            self.hooked |= found.hooked
            inner = passed_on(self, found.forward)
            if inner is None:
                return found.forward
            function = inner

    def function(
        self, function: object, place: tuple, me: Optional[str], owner: Optional[type]
    ) -> Optional[ast.FunctionDef]:
        """Reads a function that stands at `place`: (namespace, name, value). `me` is "self" for a
        method, or the name of the argument that is the module; `owner` is the class that has it."""
        self.names.append(place)
        if (function, me) in self.seen:
            return None
        definition = source_of(function, ("__class__",) if owner is not None else ())
        if function.__code__.co_freevars and function.__closure__[0].cell_contents is not owner:
            raise Refused("its forward calls super() of another class")
        main = not self.seen
        self.seen.add((function, me))
        self.codes.append((function, function.__code__))
        if me == "self":
            arguments = [*definition.args.posonlyargs, *definition.args.args]
            me = arguments[0].arg if arguments else None
        self.body(self, function, definition, me, owner, main).look()
        return definition


def passed_on(reader: Reader, wrapper: object) -> Optional[FunctionType]:
    """The function that a wrapper calls with all that it is given, if it does no more than that but
    for keywords that it knows by constant names; None if it is no wrapper."""
    code = getattr(wrapper, "__code__", None)
    if type(wrapper) is not FunctionType or set(code.co_freevars) <= {"__class__"}:
        return None
    cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in wrapper.__closure__)))
    functions = [name for name, value in cells.items() if isinstance(value, FunctionType)]
    where = f"{code.co_name} in {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
    try:
        definition = source_of(wrapper, code.co_freevars)
    except Refused:
        raise Refused(f"its forward is wrapped by {where}") from None
    given = definition.args
    own = [argument.arg for argument in given.args]
    if len(functions) != 1 or given.kwonlyargs or given.posonlyargs or not given.vararg:
        raise Refused(f"its forward is wrapped by {where}")
    if own not in ([], ["self"]) or given.defaults or not given.kwarg:
        raise Refused(f"its forward is wrapped by {where}")
    passing = f"{functions[0]}({', '.join([*own, f'*{given.vararg.arg}', f'**{given.kwarg.arg}'])})"
    result = None
    for statement in definition.body:
        if is_text(statement) or logs(statement, wrapper.__globals__):
            continue
        if isinstance(statement, ast.If):
            old = keyword_tested(statement.test, given.kwarg.arg, cells)
            if old is not None and not statement.orelse:
                reader.renamed.add(old)  # such calls are for the forward itself
                continue
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == passing:
            target = statement.targets[0]
            if result is None and isinstance(target, ast.Name) and len(statement.targets) == 1:
                result = target.id
                continue
        if isinstance(statement, ast.Return) and statement.value is not None:
            if ast.unparse(statement.value) in (passing if result is None else result,):
                reader.names.append((_Cell(wrapper, functions[0]), "", cells[functions[0]]))
                reader.codes.append((wrapper, code))
                return cells[functions[0]]
        break
    raise Refused(f"its forward is wrapped by {where}")


class _Cell:
    """A free variable of a function as a namespace of Pinned."""

    def __init__(self, function: FunctionType, name: str):
        self.cell = function.__closure__[function.__code__.co_freevars.index(name)]

    def get(self, _):
        return self.cell.cell_contents
