"""Runs of a forward on stubs in an equivalence check, and what follows of its arguments."""

from typing import FrozenSet, Iterable, Optional, Tuple

from torch import nn

from ..layers.forward import PLAIN_VALUES, Arguments
from ..layers.words import Word
from .code import Refused
from .stand_ins import Opaque, Opaques, Raises, name_of

WORD = "a_word_that_nobody_knows"  # a keyword that a forward can only hand on


class Trial:
    """A forward whose arguments are known by what it does with them.

    A kind of module runs it by `again(absent)`, where some arguments are left at their defaults,
    and has the keywords that parts got in a run by `keywords_in(run)`.
    """

    def __init__(self, module: nn.Module, kind: type, source):
        self.module, self.kind, self.source = module, kind, source
        self.signature = source.signature
        self.hidden: Optional[str] = None
        self.fixed = set(source.switches)  # arguments that are left at their defaults
        self.travelling: FrozenSet[str] = frozenset()
        self.opaque, self.log = Opaques(), []

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
        return arguments_of(self.source, self.hidden, self.fixed, self.travelling)


def called(source, twin: nn.Module, given: dict, words: dict) -> object:
    """The output of a forward on stubs."""
    signature = source.signature
    args = list(map(given.pop, signature.positional_only))
    try:
        return source.forward(twin, *args, **given, **(words if signature.more else {}))
    except Refused:
        raise
    except Exception as error:
        raise Raises(error) from None


def arguments_of(source, hidden: str, fixed: set, travelling) -> Arguments:
    """The Arguments of a replaced forward, some of which must stay at their defaults."""
    signature, extra = source.signature, set(source.extra)
    names = signature.names
    return Arguments(
        signature.positional,
        frozenset(names) - travelling,
        tuple(n for n in names if n not in signature.defaults and n != hidden),
        signature.more,
        hidden,
        tuple((n, signature.defaults[n]) for n in sorted(fixed - extra)),
        source.renamed | (fixed & extra) | frozenset(signature.positional_only),
    )


def toggles(names: Tuple[str, ...], asked: FrozenSet[str]) -> Iterable[frozenset]:
    """Sets of arguments to leave at their defaults: all, and of those that the forward compares
    with None, as far as that is known, each alone and all but one."""
    asked = names if None in asked else [n for n in names if n in asked]
    ones = list(map(frozenset, zip(asked)))
    return dict.fromkeys([frozenset(names), *ones, *map(frozenset(names).difference, ones)])
