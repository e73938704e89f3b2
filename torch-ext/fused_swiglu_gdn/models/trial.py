"""Equivalence checks, which have one shape for all kinds of modules.

The forward of a module's class runs on a probe module with the module's own attributes, whose parts
are stubs with numbers of their own (stand_ins.py). The roles of its arguments follow from what it
does with them (Trial.learned). Then ours runs on the same stubs, for each form that the parts can
have: the first that does the same in all cases is the module's. What was found for a class is
remembered with all that it depends on (form_key).
"""

import itertools
from typing import Callable, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import nn

from ..layers.forward import Arguments, Word
from ..layers.pinned import PLAIN_VALUES, Frozen
from .code import Refused, members_of, refuse_odd_class
from .facts import Facts
from .handed import Interface
from .opaque import Opaque, Opaques, Read, name_of
from .stand_ins import VALUES, numbers, quiet, result_of, run, same

LONG, MOST_TOKENS, MOST_NUMBERS = 4100, 8192, 1 << 18  # of an input
MORE_TOKENS = (3, 4, 8, 9, 16, 17, 32, 64, 128, 256, 512, 1000, 1024, 2049, 8192)  # of other code
WORD = "a_word_that_nobody_knows"  # a keyword that a forward can only hand on
ANOTHER = "its forward is another formula"


# ------------------------------------------------------------------ what is tried


def sizes_of(facts: Facts, width: int = 1) -> List[int]:
    """Numbers of tokens of this width to try: usual ones, and those at and above each whole number
    that is read, as far as memory allows."""
    values = [v for v in facts.values.values() if type(v) is int]
    usual = {1, 2, 7, 65, LONG, *(MORE_TOKENS if facts.named else ())}
    near = {n for v in values if 1 < v <= MOST_TOKENS for n in (v, v + 1)}
    return sorted([n for n in usual | near if n < 10 or n * width <= MOST_NUMBERS])


def inputs_of(
    facts: Facts, dtypes: tuple, width: int, ranks: Tuple[int, ...]
) -> Iterator[torch.Tensor]:
    """Inputs of this width, of all sizes, each with another rank, dtype and kind of values; long
    ones have the first dtype. Other people's code gets every size with every rank."""
    sizes = [(1, n) for n in sizes_of(facts, width)] + [(9, 2), (2, 3)]
    for i, (B, T) in enumerate(sizes):
        for rank in ranks if facts.named else (ranks[i % len(ranks)],):
            shape = {2: (B * T,), 3: (B, T), 4: (B, T, 1)}[rank]
            dtype = dtypes[0 if T > 66 else i % len(dtypes)]
            values = VALUES[i % len(VALUES)]
            yield numbers(*shape, width, values=values, seed=5, dtype=dtype)


def why_another(
    forward: Callable, probe: nn.Module, x: torch.Tensor, expected: torch.Tensor, roundings: int
) -> Optional[str]:
    """Why a forward on stubs does not give a formula's numbers but for so many roundings of the
    largest, or None."""
    try:
        found = result_of(forward, probe, x)
    except Refused as why:
        return str(why)
    limit = roundings * torch.finfo(expected.dtype).eps
    return None if type(found) is torch.Tensor and same(found, expected, limit) else ANOTHER


# ------------------------------------------------------------------ what is remembered


def form_key(module: nn.Module, kind: type, facts: Facts, values: dict) -> tuple:
    """Returns the key of a remembered form, beside a module's parts."""
    hidden = frozenset(module.__dict__).intersection(facts.parts)
    known = [v if v is None or isinstance(v, (*PLAIN_VALUES, Frozen)) else id(v)
             for v in values.values()]  # fmt: skip
    return kind, facts.pinned, *values, *known, *map(type, values.values()), hidden


_found: Dict[tuple, object] = {}  # or the reason why that is refused


def remembered(find: Callable, key: tuple, *given: object) -> object:
    """find(*given), or the reason why that raises Refused, which is raised: found once for a key,
    which has all that it depends on."""
    key = find, *key
    if key not in _found:
        try:
            with quiet():
                _found[key] = find(*given)
        except Refused as why:
            _found[key] = str(why)
    if isinstance(_found[key], str):
        raise Refused(_found[key])
    return _found[key]


_of_classes: Dict[tuple, tuple] = {}  # with the functions and the Pinned by which it was found


def while_unchanged(find: Callable, kind: type, functions: tuple) -> object:
    """find(kind)[0], or the reason why that raises Refused; it is asked again once these functions,
    or the Pinned in find(kind)[1] or in Refused, are others."""
    known = _of_classes.get((find, kind))
    if known is None or known[0] != functions or not all([pin.unchanged() for pin in known[2]]):
        try:
            with quiet():
                found = find(kind)
        except Refused as why:
            found = str(why), why.pins
        known = _of_classes[find, kind] = (functions, *found)
    return known[1]


def refuse_odd_module(module: nn.Module, kind: type, facts: Facts, names, *more: str) -> None:
    """Raises Refused if the class is odd, or the forward calls what is no part."""
    own = {*module._modules, *module._parameters, *module._buffers, "training"}
    members = members_of(kind)
    known = [n for n in names if n in own or not isinstance(members.get(n), PLAIN_VALUES)]
    refuse_odd_class(kind, known, *more)
    for name in facts.parts:
        if name in module.__dict__ and name in module._modules:
            raise Refused(f"{name} is no module of its own")


# ------------------------------------------------------------------ runs


class Run(NamedTuple):
    """The record of a run of a forward: what it was given, what its parts were given, and what it
    gave."""

    probe: nn.Module
    x: torch.Tensor
    given: dict
    rest: dict  # keywords for which the forward has no name
    log: list  # calls of parts; None where the attention function was called
    result: object
    tables: Optional[tuple] = None  # cos and sin, and the registry of attention functions
    interface: Optional[Interface] = None


class Trial:
    """A forward whose arguments are known by what it does with them.

    A kind of module runs it, with some arguments left at their defaults.
    """

    # the attributes that have the names of arguments with a role: what the forward reads of such a
    # one, in the order in which they are looked for: (how, whether it has a default) -> whether
    READS: Dict[str, Callable[[str, bool], bool]] = {}

    def __init__(self, module: nn.Module, kind: type, facts: Facts):
        self.module, self.kind, self.facts = module, kind, facts
        self.signature = facts.signature
        self.hidden: Optional[str] = None
        self.fixed: Set[str] = set()  # arguments that are left at their defaults
        self.opaque, self.log = Opaques(), []
        self.seen: Set[str] = set()  # paths of what the forward asks its configuration for

    def guards(self, values: dict) -> dict:
        """Values by their paths that the forward may have read."""
        return {p: value for p, value in values.items() if "." not in p or p in self.seen}

    def learned(self, run: Callable) -> object:
        """The result of a run, once the role of every argument that it reads is known."""
        for _ in range(4 * len(self.signature.names) + len(self.facts.reads) + 8):
            try:
                return run()
            except Read as what:
                self.learn(what)
        raise Refused("its arguments are not known")

    def learn(self, what: Read) -> None:
        """Finds the role of an argument that was read; one without a role is to stay at its
        default."""
        name, optional = what.name, what.name in self.signature.defaults
        if name in [getattr(self, role) for role in self.READS]:
            raise what
        for role, is_read in self.READS.items():
            if getattr(self, role) is None and is_read(what.how, optional):
                setattr(self, role, name)
                return
        if not optional or name in self.fixed:
            raise what
        self.fixed.add(name)

    def given(self, roles: dict, absent: FrozenSet[str]) -> dict:
        """The arguments of a run by their names; `roles`: those that are not opaque."""
        given, signature = {}, self.signature
        for name in signature.names:
            if name in roles:
                given[name] = roles[name]
            elif name not in self.fixed and name not in absent:
                given[name] = self.opaque[name]
            elif name in signature.positional_only:
                given[name] = signature.defaults[name]
        return given

    def others(self, *roles: Optional[str]) -> tuple:
        """The arguments that are passed on, or ignored: those without one of the roles."""
        known = {self.hidden, *roles, *self.fixed}
        defaults = self.signature.defaults
        return tuple([n for n in self.signature.names if n not in known and n in defaults])

    def unknown_words(self, count: int) -> dict:
        """So many unknown keywords, if the forward takes any."""
        count = count if self.signature.more else 0
        return {f"{WORD}_{i}": self.opaque[f"{WORD}_{i}"] for i in range(count)}

    def passed(self, keywords: dict, run: Run) -> Tuple[bool, dict]:
        """Returns True if a part got the rest of a run, and the other keywords that it got."""
        others = dict(keywords)
        for name, value in run.rest.items():
            if others.pop(name, None) is not value:
                return False, keywords
        return bool(run.rest), others

    def words(self, values: dict, run: Run) -> Tuple[Word, ...]:
        """The sources of values, by their names."""
        return tuple(self.word(name, value, run) for name, value in values.items())

    def word(self, name: str, value: object, run: Run) -> Word:
        """The source of a value that a part gets: here an argument or a constant."""
        if type(value) is Opaque:
            source = name_of(value)
            if run.given.get(source) is value:
                return Word(name, "argument", source, self.signature.defaults.get(source))
        elif value is None or type(value) in PLAIN_VALUES:
            return Word(name, "constant", value, type(value))
        raise Refused(f"it hands on {name or 'a value'}, and nobody knows where it comes from")

    def arguments(self) -> Arguments:
        """The arguments of a replaced forward, some of which must stay at their defaults."""
        signature, names = self.facts.signature, self.facts.signature.names
        return Arguments(
            signature.positional,
            frozenset(names),
            tuple(n for n in names if n not in signature.defaults and n != self.hidden),
            signature.more,
            self.hidden,
            tuple((n, signature.defaults[n]) for n in sorted(self.fixed)),
            frozenset(self.facts.own).union(signature.positional_only),
        )


def alike(mine: object, theirs: object) -> bool:
    """The same tensors up to roundings, equal plain values of one type, else the same objects; and
    so for what is in tuples, lists and dicts."""
    pairs = [(mine, theirs)]
    for a, b in pairs:  # appended to while iterating
        kind = type(a)
        if a is b:
            continue
        if issubclass(kind, torch.Tensor):
            bits = type(b) is kind and a.dtype is b.dtype and torch.equal(a, b)
            if not bits and not (issubclass(type(b), torch.Tensor) and same(a, b)):
                return False
        elif kind is not type(b):
            return False
        elif kind is dict:
            if a.keys() != b.keys():
                return False
            pairs += zip(a.values(), map(b.get, a))
        elif issubclass(kind, (tuple, list)):
            if len(a) != len(b):
                return False
            pairs += zip(a, b)
        elif kind not in PLAIN_VALUES or a != b:
            return False
    return True


def called(
    facts: Facts, probe: nn.Module, given: dict, rest: dict, by_position: bool = False,
    forward: Optional[Callable] = None,
) -> object:  # fmt: skip
    """The output of a forward, or a copy of it, on stubs; all of its arguments may be given by
    position."""
    known, words = facts.signature, dict(given)
    names = known.positional_only
    if by_position:
        names = tuple(itertools.takewhile(words.__contains__, known.positional))
    args = list(map(words.pop, names))
    return run(forward or facts.forward, probe, *args, **words, **rest)


def toggles(names: Tuple[str, ...]) -> List[frozenset]:
    """Sets of arguments to leave at their defaults: none, all, each alone, and all but one."""
    ones = list(map(frozenset, zip(names)))
    every = [frozenset(), frozenset(names), *ones, *map(frozenset(names).difference, ones)]
    return list(dict.fromkeys(every))


def together(*lists: list) -> Iterator[tuple]:
    """Tuples of one of each list, as many as it takes until each has come up."""
    return itertools.islice(zip(*map(itertools.cycle, lists)), max(map(len, lists)))
