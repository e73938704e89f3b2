"""Reads a forward, and everything that it calls by name, from its source.

A probe runs a forward on stubs and compares numbers: it tells what the forward computes for what
was tried. The reader refuses a forward that could take another way for another input: it evaluates
the forward with what is known of each value (values.py), through all functions that it calls, and
refuses branches on values, loops over anything but listed values, writes to attributes, and
operations that are not in the lists of code.py. A branch on the module's own numbers, words and
flags is read the way that they say, and they are guarded: `reads`. Both ways of a branch on None
are read, and left to the probe. What is behind a condition on sizes, dtypes or torch's state is for
the forward itself: `checks` holds what a call of ours must meet.
"""

import ast
from types import FunctionType
from typing import Callable, Dict, FrozenSet, Iterable, List, Optional, Set, Tuple

import torch
from torch import nn

from ..layers.own_code import Pinned, found_at, peeled
from .body import Body
from .code import Refused, Signature, members_of, signature_of, source_of
from .values import (
    ARGUMENTS,
    CONSTANTS,
    PLAIN_VALUES,
    VALUE,
    Closure,
    Given,
    Known,
    Own,
    Passed,
    Plain,
    Several,
    Words,
    condition,
)


class Source:
    """A forward whose source is known, with all that it calls by name."""

    forward: FunctionType  # without decorators
    signature: Signature
    pinned: Pinned  # what a patch could replace
    checks: Tuple[Callable, ...]  # (module, arguments by name) -> whether a call is one of ours

    def __init__(self):
        self.reads: Set[str] = set()  # attributes by their paths: "head_dim", "config.use_rope"
        self.parts: Set[str] = set()  # what it calls of the module
        self.tensors: Set[str] = set()  # attributes whose methods are called
        self.rates: Set[str] = set()  # attributes that are the rate of a dropout
        self.guarded: Set[str] = set()  # attributes that a condition is about, but for "training"
        self.methods: Set[str] = set()  # of the module that it calls
        self.renamed: Set[str] = set()  # keywords with which a call is for the class's own forward
        self.extra: Set[str] = set()  # keywords that it takes out of its **kwargs
        self.switches: Set[str] = set()  # arguments that it branches on: known at their defaults
        self.computed_with: Set[str] = set()  # arguments
        self.asked: Set[Optional[str]] = set()  # those compared with None; None: what is computed
        self.needs: Dict[str, str] = {}  # what not every kind of module may do: the reason
        self.excluded: List[str] = []  # conditions under which a call is not ours
        self.names: List[tuple] = []  # (namespace, name, value)
        self.codes: List[tuple] = []  # (function, code)
        self.done: Set[tuple] = set()  # calls with computed values alone that have been read
        # {condition on attributes: (itself, whether it held)}: the ways that were read
        self.decided: Dict[str, tuple] = {}

    def copied(self) -> "Source":
        """A copy, which shares what was decided."""
        other = Source()
        other.__dict__.update({name: each.copy() for name, each in vars(self).items()})
        other.decided = self.decided
        return other

    def need(self, what: str, why: Optional[str] = None) -> None:
        """Notes what not every kind of module may do."""
        self.needs.setdefault(what, f"its forward {why or what}")

    def ended(self, forward: FunctionType) -> "Source":
        """Returns itself, once all of it has been read."""
        names = {(id(space), name): (space, name, value) for space, name, value in self.names}
        codes = {id(function): (function, code) for function, code in self.codes}
        methods = tuple(sorted(self.methods))
        self.forward = forward
        self.pinned = Pinned(tuple(names.values()), tuple(codes.values()), methods)
        self.signature = signature_of(forward, tuple(sorted(self.extra)))
        defaults = self.signature.defaults
        excluded = dict.fromkeys(self.excluded)
        self.checks = tuple([condition(f"not ({text})", defaults) for text in excluded])
        self.done.clear()
        return self


def hooks_of(part: str) -> str:
    """Returns the need of a forward whose decorator calls hooks of a part."""
    return f"calls hooks of {part}"


_sources: Dict[tuple, List[Source]] = {}


def read(kind: type, module: nn.Module, *allowed: str, body: type = Body) -> Source:
    """The source of the forward of a module of this class; raises Refused. `allowed`: what a kind
    may do of Source.needs; `body`: what its functions may consist of."""
    known = _known(kind, module, body)
    if known is None:
        known = _read(kind, module, body=body)
        sources = _sources.get((kind, body), ())
        _sources[kind, body] = [*(s for s in sources if s.pinned.unchanged()), known]
    if not module.__dict__.keys().isdisjoint(known.methods):
        raise Refused("it has methods of its own, which its class has not")
    for path in known.tensors:
        if not isinstance(found_at(module, path), torch.Tensor):
            raise Refused(f"{path} is no tensor")
    for what, why in known.needs.items():
        if what not in allowed:
            raise Refused(why)
    return known


def _known(kind: type, module: nn.Module, body: type) -> Optional[Source]:
    """The source that was read of a module of this class before, with its flags."""
    for source in _sources.get((kind, body), ()):
        if source.pinned.unchanged():
            if all(held(module, {}) is value for held, value in source.decided.values()):
                return source
    return None


def read_method(kind: type, name: str) -> Source:
    """The source of another method of a class; raises Refused."""
    return _read(kind, None, name)


def _read(kind: type, module: Optional[nn.Module], name: str = "forward", body=Body) -> Source:
    reader = Reader(kind, module, body=body)
    try:
        return reader.main(name)
    except Refused as why:  # where optional arguments are left at their defaults, it may be read
        first = reader.source
        fixed = first.computed_with | first.switches
        if not fixed:
            raise
        reader = Reader(kind, module, fixed, body)
        reader.source.decided, reader.source.guarded = first.decided, first.guarded
        try:
            return reader.main(name)
        except Refused:
            raise why from None


class Reader:
    """All functions that a class's forward consists of."""

    def __init__(self, kind: type, module: Optional[nn.Module], fixed=frozenset(), body=Body):
        self.kind, self.module, self.body = kind, module, body
        self.members = members_of(kind)
        self.source = Source()  # which grows
        self.fixed = fixed  # arguments
        self.named: FrozenSet[str] = frozenset()  # those of the forward
        self.path: list = []  # conditions under which the statement is reached that is read
        self.depth = self.steps = 0
        self.definitions, self.spaces = {}, {}

    def mark(self) -> tuple:
        return self.source.copied(), self.depth

    def back_to(self, mark: tuple) -> None:
        """Forgets what was read since; `path` is as it was, which its callers restore."""
        self.source, self.depth = mark

    def holds(self, known: Known) -> Optional[bool]:
        """Returns whether a condition on guarded attributes holds for the module; None if that may
        change."""
        self.source.guarded |= known.paths - {"training"}
        if self.module is None or not known.text or not {"own"} <= known.on <= {"own", "none"}:
            return None
        values = [found_at(self.module, path) for path in known.paths]
        plain = all(value is None or isinstance(value, PLAIN_VALUES) for value in values)
        if not plain or "training" in known.paths:
            return None
        held, not_held = condition(known.text, {}), condition(f"not ({known.text})", {})
        found = held(self.module, {})
        if found is not_held(self.module, {}):  # nobody can tell
            return None
        self.source.decided[known.text] = held, found
        return found

    def space(self, owner: object, name: str = "") -> object:
        """The namespace of a class, or of a free variable of a function."""
        if (owner, name) not in self.spaces:
            made = owner.__dict__ if isinstance(owner, type) else _Cell(owner, name)
            self.spaces[owner, name] = made
        return self.spaces[owner, name]

    def method(self, name: str, bases: Iterable[type]) -> Tuple[object, type]:
        """A method as it stands in the first class that has it, and that class."""
        for base in bases:
            found = base.__dict__.get(name)
            self.source.names.append((self.space(base), name, found))
            if name in base.__dict__:
                return found, base
        raise Refused(f"its class has no {name}")

    def bare(self, function: object) -> object:
        """The forward without decorators that pass a call on as it is."""
        while True:
            plain = self.peeled(function)
            inner = self.passed_on(plain)
            if inner is None:
                return plain
            function = inner

    def peeled(self, function: object) -> object:
        """The function without transformers' own decorators."""
        found = peeled(function)
        self.is_for_itself(found.renamed)
        for part in sorted(found.hooked):
            self.source.need(hooks_of(part))
        return found.forward

    def is_for_itself(self, words: Iterable[str]) -> None:
        """A call with such a keyword, for which the forward has no name, is for the forward."""
        self.source.renamed |= set(words) - self.named

    def passed_on(self, wrapper: object) -> Optional[FunctionType]:
        """The function that a wrapper calls with all that it is given, if it gives what that gives
        and does no more; None if it is no such wrapper."""
        free = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
        if type(wrapper) is not FunctionType or not set(free) - {"__class__"}:
            return None
        mark = self.mark()
        try:
            definition = source_of(wrapper, free)
            a = definition.args
            names = [arg.arg for arg in (*a.posonlyargs, *a.args)]
            if a.defaults or a.kwonlyargs or (a.vararg is None) != (a.kwarg is None):
                return None
            given = [Own(""), *map(Given, names[1:])][: len(names)]
            env = dict(zip(names, given))
            if a.vararg is not None:
                given.append(ARGUMENTS)
                env.update({a.vararg.arg: ARGUMENTS, a.kwarg.arg: Words({}, True)})
            body = Body(self, wrapper, definition, env, None)
            body.passing = given, Words({}, a.kwarg is not None)
            found = self.run(body)
        except Refused:
            found = None
        if not isinstance(found, Passed):
            self.back_to(mark)
            return None
        inner = signature_of(found.function)
        count = 1 + len(inner.names) + inner.several + inner.more
        whole = a.vararg is not None or count == len(names)
        if not whole or tuple(names[1:]) != inner.positional[: len(names[1:])]:
            self.back_to(mark)
            return None
        self.source.codes.append((wrapper, wrapper.__code__))
        return found.function

    def main(self, name: str) -> Source:
        """Reads the forward, or another method."""
        forward, owner = self.method(name, self.kind.__mro__)
        plain = self.bare(forward)
        code = getattr(plain, "__code__", None)
        if code is not None and set(code.co_freevars) - {"__class__"}:
            where = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
            raise Refused(f"its forward is wrapped by {code.co_name} in {where}")
        definition = self.definition(plain, owner)
        args = definition.args
        first, *others = [a.arg for a in (*args.posonlyargs, *args.args)] or [None]
        if first is None:
            raise Refused("its forward takes no self")
        env = {name: Given(name) for name in others + [a.arg for a in args.kwonlyargs]}
        self.named = frozenset(env)
        for name, value in signature_of(plain).defaults.items():
            if name in self.fixed and isinstance(value, CONSTANTS):
                env[name] = Plain(value)
                self.source.switches.add(name)
        env[first] = Own("")
        if args.vararg is not None:
            env[args.vararg.arg] = Several(())  # a call with more is for the forward itself
        if args.kwarg is not None:
            env[args.kwarg.arg] = Words({}, True, True)
        self.run(self.body(self, plain, definition, env, owner))
        return self.source.ended(plain)

    def definition(self, function: FunctionType, owner: Optional[type]) -> ast.FunctionDef:
        """The syntax tree of a function that is read."""
        if function not in self.definitions:
            free = getattr(getattr(function, "__code__", None), "co_freevars", ())
            if owner is None and "__class__" in free:
                raise Refused("its forward calls super() of another class")
            self.definitions[function] = source_of(function, free)
        if "__class__" in function.__code__.co_freevars:
            if self.space(function, "__class__").get("") is not owner:
                raise Refused("its forward calls super() of another class")
        self.source.codes.append((function, function.__code__))
        return self.definitions[function]

    def interpreted(self, function, owner: Optional[type], args: list, words: Words) -> object:
        """Returns a function's result for these arguments."""
        call = function, owner, len(args), tuple(words.values), tuple(self.path)
        computed = {*map(id, args), *map(id, words.values.values())} <= {id(VALUE)}
        computed = computed and not words.rest
        if computed and call in self.source.done:
            return VALUE
        plain = self.peeled(function)
        definition = self.definition(plain, owner)
        defaults = {name: Plain(value) for name, value in signature_of(plain).defaults.items()}
        env = self.bound(definition.args, args, words, defaults)
        value = self.run(self.body(self, plain, definition, env, owner))
        if computed and value is VALUE:
            self.source.done.add(call)
        return value

    def inner(self, closure: Closure, args: list, words: Words) -> object:
        """Returns the result of a function inside of a function."""
        definition, frame, defaults = closure
        env = self.bound(definition.args, args, words, defaults)
        return self.run(self.body(self, frame.function, definition, env, frame.owner, frame))

    def bound(self, given: ast.arguments, args: list, words: Words, defaults: dict) -> dict:
        """The arguments of a call by their names."""
        first = [a.arg for a in given.posonlyargs]
        names = first + [a.arg for a in given.args]
        keywords = names[len(first) :] + [a.arg for a in given.kwonlyargs]
        env, more = dict(zip(names, args)), {}
        if len(args) > len(names) and given.vararg is None:
            raise Refused("its forward calls a function with too many arguments")
        if given.vararg is not None:
            env[given.vararg.arg] = Several(tuple(args[len(names) :]))
        for name, value in words.values.items():
            if name in keywords and name not in env:
                env[name] = value
            elif given.kwarg is not None and name not in keywords:
                more[name] = value
            else:
                raise Refused(f"its forward calls a function that takes no {name}")
        for name in (*names, *keywords):
            if name not in env:
                if name not in defaults:
                    raise Refused(f"its forward calls a function without {name}")
                env[name] = defaults[name]
        if words.rest:  # a call with such a keyword is for the forward itself
            self.is_for_itself(keywords)
        if given.kwarg is not None:
            env[given.kwarg.arg] = Words(more, words.rest)
        return env

    def run(self, body: Body) -> object:
        self.depth += 1
        self.steps += 1
        if self.depth > 30:
            raise Refused("its forward calls itself")
        found = body.run()
        self.depth -= 1
        return found


class _Cell:
    """A free variable of a function as a namespace of Pinned."""

    def __init__(self, function: FunctionType, name: str):
        self.cell = function.__closure__[function.__code__.co_freevars.index(name)]

    def get(self, _):
        return self.cell.cell_contents
