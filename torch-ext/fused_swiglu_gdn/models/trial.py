"""Equivalence checks: what identifies a form, and runs of a forward on stubs, from which the roles
of its arguments follow."""

from typing import Callable, Dict, FrozenSet, Iterable, Optional, Tuple

import torch
from torch import nn

from ..layers.forward import PLAIN_VALUES, Arguments, Word
from ..layers.own_code import found_at
from .code import Refused, Signature, members_of, why_odd_class
from .reader import Source
from .stand_ins import Opaque, Opaques, Raises, Read, name_of, same

WORD = "a_word_that_nobody_knows"  # a keyword that a forward can only hand on


def only_argument(source: Source) -> str:
    """The name of the one argument that a forward has to be given."""
    known = source.signature
    needed = [name for name in known.names if name not in known.defaults]
    if len(needed) != 1 or list(known.positional[:1]) != needed:
        raise Refused("its forward takes other arguments than one tensor")
    if needed[0] in source.switches:
        raise Refused(f"its forward branches on {needed[0]}")
    return needed[0]


def plain_values(module: nn.Module, reads: Iterable[str]) -> dict:
    """The values of those attributes that are numbers, words, flags or None, by their paths."""
    values, known = {}, {**module._parameters, **module.__dict__}
    for path in sorted(reads):
        value = known[path] if path in known else found_at(module, path)
        if value is None or isinstance(value, PLAIN_VALUES):
            values[path] = value
    return values


def form_key(module: nn.Module, kind: type, source: Source, values: dict) -> tuple:
    """Returns the key of a remembered form, beside a module's parts."""
    hidden = frozenset(module.__dict__).intersection(source.parts)
    return kind, source.pinned.codes, *values.items(), *map(type, values.values()), hidden


def remembered(forms: dict, key: tuple, find: Callable, *given: object) -> object:
    """forms[key], which is find(*given) or the reason why that raises Refused, which is raised."""
    if key not in forms:
        try:
            forms[key] = find(*given)
        except Refused as why:
            forms[key] = str(why)
    if isinstance(forms[key], str):
        raise Refused(forms[key])
    return forms[key]


def while_unchanged(forms: dict, kind: type, functions: tuple, find: Callable) -> object:
    """find(kind)[0], or the reason why that raises Refused; it is asked again once these functions,
    or the Pinned in find(kind)[1], are others."""
    known = forms.get(kind)
    if known is None or known[0] != functions or not all([pin.unchanged() for pin in known[2]]):
        try:
            found = find(kind)
        except Refused as why:
            found = str(why), ()
        known = forms[kind] = (functions, *found)
    return known[1]


def refuse_odd_module(*given: object) -> None:
    """Raises Refused with the reason of why_odd_module."""
    reason = why_odd_module(*given)
    if reason is not None:
        raise Refused(reason)


def why_odd_module(module: nn.Module, kind: type, source: Source, names, *more) -> Optional[str]:
    """The class is odd, or the forward calls what is no part."""
    own = {*module._modules, *module._parameters, *module._buffers, "training"}
    members, kept = members_of(kind), []
    for name in names:
        if name in own or not isinstance(members.get(name), PLAIN_VALUES):
            kept.append(name)
    reason = why_odd_class(kind, kept, *more)
    if reason is not None:
        return reason
    for name in source.parts:
        if name in module.__dict__:
            return f"{name} is no module of its own"
    return None


class Trial:
    """A forward whose arguments are known by what it does with them.

    A kind of module runs it by `again(absent)`, where some arguments are left at their defaults,
    and has the keywords that parts got in a run by `keywords_in(run)`.
    """

    # the attributes that have the names of arguments with a role: what the forward reads of such a
    # one, in the order in which they are looked for: (how, whether it has a default) -> whether
    READS: Dict[str, Callable[[str, bool], bool]] = {}

    def __init__(self, module: nn.Module, kind: type, source):
        self.module, self.kind, self.source = module, kind, source
        self.signature = source.signature
        self.hidden: Optional[str] = None
        self.fixed = set(source.switches)  # arguments that are left at their defaults
        self.travelling: FrozenSet[str] = frozenset()
        self.opaque, self.log = Opaques(), []

    def learned(self, run: Callable) -> object:
        """The result of a run, once the role of every argument that it reads is known."""
        for _ in range(4 * len(self.signature.names) + len(self.source.reads) + 8):
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

    def those_travelling(self, run) -> frozenset:
        """Keywords that the forward reads from **kwargs, and leaves there."""
        extra = frozenset(self.source.extra).intersection(self.others())
        if not extra:
            return extra
        met, without = self.keywords_in(run), self.keywords_in(self.again(extra))
        return frozenset(
            n for n in extra
            if any(words.get(n) is run.given[n] for words in met)
            and not any(n in words for words in without)
        )  # fmt: skip

    def rest(self, run) -> dict:
        """The keywords of a run for which the forward has no name."""
        rest = {WORD: run.word} if self.signature.more else {}
        for name in self.travelling:
            if name in run.given:
                rest[name] = run.given[name]
        return rest

    def passed(self, keywords: dict, run) -> Tuple[bool, dict]:
        """Returns True if a part got the rest of a run, and the other keywords that it got."""
        rest, others = self.rest(run), dict(keywords)
        for name in rest:
            if others.pop(name, None) is not rest[name]:
                return False, keywords
        return bool(rest), others

    def known_word(self, name: str, value: object, run) -> Optional[Word]:
        """The source of a value that is an argument or a constant."""
        if type(value) is Opaque:
            source = name_of(value)
            if run.given.get(source) is value:
                return Word(name, "argument", source, self.signature.defaults.get(source))
        elif value is None or type(value) in PLAIN_VALUES:
            return Word(name, "constant", value, type(value))
        return None

    def arguments(self) -> Arguments:
        """The arguments of a replaced forward, some of which must stay at their defaults."""
        signature, extra = self.source.signature, self.source.extra
        names = signature.names
        return Arguments(
            signature.positional,
            frozenset(names) - self.travelling,
            tuple(n for n in names if n not in signature.defaults and n != self.hidden),
            signature.more,
            self.hidden,
            tuple((n, signature.defaults[n]) for n in sorted(self.fixed - extra)),
            frozenset(self.source.renamed | (self.fixed & extra)).union(signature.positional_only),
        )


def alike(a: object, b: object) -> bool:
    """The same tensors up to the order of sums, equal plain values of one type, else the same
    objects; and so for what is in tuples, lists and dicts."""
    kind = type(a)
    if a is b:
        return True
    if issubclass(kind, torch.Tensor):
        return same(a, b) if issubclass(type(b), torch.Tensor) else False
    if kind is not type(b):
        return False
    if kind is dict:
        if a.keys() != b.keys():
            return False
        a, b = list(a.values()), list(map(b.get, a))
    elif not issubclass(kind, (tuple, list)):
        return kind in PLAIN_VALUES and a == b
    return len(a) == len(b) and all([x is y or alike(x, y) for x, y in zip(a, b)])


def called(
    forward: Callable, signature: Signature, twin: nn.Module, given: dict, words: dict
) -> object:
    """The output of a forward on stubs."""
    args = list(map(given.pop, signature.positional_only))
    try:
        return forward(twin, *args, **given, **(words if signature.more else {}))
    except Refused:
        raise
    except Exception as error:
        raise Raises(error) from None


def toggles(names: Tuple[str, ...], asked: FrozenSet[str]) -> Iterable[frozenset]:
    """Sets of arguments to leave at their defaults: all, and of those that the forward compares
    with None, as far as that is known, each alone and all but one."""
    asked = names if None in asked else [n for n in names if n in asked]
    ones = list(map(frozenset, zip(asked)))
    every = dict.fromkeys([frozenset(names), *ones, *map(frozenset(names).difference, ones)])
    return filter(None, every)
