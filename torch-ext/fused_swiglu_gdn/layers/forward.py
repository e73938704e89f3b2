"""The forward of replaced modules that take hidden states among other arguments."""

from typing import Callable, FrozenSet, NamedTuple, Optional, Tuple

from .norm import serves

PLAIN_VALUES = (bool, int, float, str)


class Arguments(NamedTuple):
    """The arguments of a class's forward, with the role of the hidden states."""

    positional: Tuple[str, ...]  # in their order
    names: FrozenSet[str]  # all that the forward has a name for
    required: Tuple[str, ...]  # of those, besides the hidden states
    more: bool  # it takes others, too
    hidden: str
    fixed: Tuple[Tuple[str, object], ...] = ()  # (name, default): served where it has no other
    own: FrozenSet[str] = frozenset()  # keywords that the class's own forward has to take


def forward_by(form, serve: Callable, name: str, compiled: Optional[bool] = None) -> Callable:
    """serve(module, hidden states, arguments by name, those that have none), or the class's own
    forward where no kernel may serve, for calls that no trial has made, and where that is None.
    `compiled`: serve finds out itself who may, also where torch compiles, or only where not."""
    kind, checks = form.kind, form.checks
    positional, names, required, more, hidden, fixed, own = form.arguments
    place = positional.index(hidden) if hidden in positional else len(positional)
    count = len(positional)

    def forward(self, *args, **kwargs):
        x = args[place] if place < len(args) <= count else kwargs.get(hidden)
        able = compiled or serves(x, compiled is False)
        if not able or not own.isdisjoint(kwargs):
            return kind.forward(self, *args, **kwargs)
        given = kwargs
        if args:
            given = {**kwargs, **dict(zip(positional, args))}
            if len(given) != len(args) + len(kwargs):
                return kind.forward(self, *args, **kwargs)
        for argument in required:
            if argument not in given:
                return kind.forward(self, *args, **kwargs)
        for argument, default in fixed:
            if argument in given and not is_same(given[argument], default):
                return kind.forward(self, *args, **kwargs)
        for check in checks:
            if not check(self, given):
                return kind.forward(self, *args, **kwargs)
        rest = {}
        for argument in given:
            if argument not in names:
                rest[argument] = given[argument]
        if more or not rest:
            found = serve(self, x, given, rest)
            if found is not None:
                return found
        return kind.forward(self, *args, **kwargs)

    forward.__wrapped__ = kind.forward  # whose arguments inspect and torch.fx then find
    forward.__qualname__ = f"{name}.forward"
    return forward


def is_same(value: object, default: object) -> bool:
    """True for the same object, or for equal numbers, flags or strings of the same type."""
    if value is default:
        return True
    return type(value) is type(default) and type(value) in PLAIN_VALUES and value == default
