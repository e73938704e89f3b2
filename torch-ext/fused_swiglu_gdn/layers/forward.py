"""The forward of replaced modules that take hidden states among other arguments; the arguments of
the calls that it makes, with the source of each; the attention function that a config names."""

import operator
import sys
from typing import Callable, FrozenSet, Iterable, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .norm import serves
from .pinned import PLAIN_VALUES


class Layer(nn.Module):
    """The base class of layers that `kernels` looks up: they have gradients and can be compiled."""

    has_backward = True
    can_torch_compile = True


class Arguments(NamedTuple):
    """The arguments of a class's forward, with the role of the hidden states."""

    positional: Tuple[str, ...]  # in their order
    names: FrozenSet[str]  # all that the forward has a name for
    required: Tuple[str, ...]  # of those, besides the hidden states
    more: bool  # it takes others, too
    hidden: str
    fixed: Tuple[Tuple[str, object], ...] = ()  # (name, default): served where it has no other
    own: FrozenSet[str] = frozenset()  # keywords that the class's own forward has to take


def forward_by(
    form, serve: Callable, name: str, compiled: Optional[bool] = None, exchanges: bool = False
) -> Callable:
    """serve(module, hidden states, arguments by name, those that have none), or the class's own
    forward where no kernel may serve, for calls that no trial has made, and where that is None.
    `compiled`: serve finds out itself who may, also where torch compiles, or only where not.
    exchanges: ours takes a cp_context, which the class's own forward does not know."""
    kind, own_forward = form.kind, _own_forward(form.kind, exchanges)
    positional, names, required, more, hidden, fixed, own = form.arguments
    place = positional.index(hidden) if hidden in positional else len(positional)
    count = len(positional)

    def forward(self, *args, **kwargs):
        shared = exchanges and kwargs.get("cp_context") is not None
        if shared and not compiled and torch.compiler.is_compiling():
            return in_eager_mode(self, *args, **kwargs)
        x = args[place] if place < len(args) <= count else kwargs.get(hidden)
        able = compiled or shared or serves(x, compiled is False)
        if not able or not own.isdisjoint(kwargs):
            return own_forward(self, *args, **kwargs)
        given = kwargs
        if args:
            given = {**kwargs, **dict(zip(positional, args))}
            if len(given) != len(args) + len(kwargs):
                return own_forward(self, *args, **kwargs)
        for argument in required:
            if argument not in given:
                return own_forward(self, *args, **kwargs)
        for argument, default in fixed:
            if argument in given and not is_same(given[argument], default):
                return own_forward(self, *args, **kwargs)
        rest = {}
        for argument in given:
            if argument not in names:
                rest[argument] = given[argument]
        if more or not rest:
            found = serve(self, x, given, rest)
            if found is not None:
                return found
        return own_forward(self, *args, **kwargs)

    in_eager_mode = torch.compiler.disable(forward) if exchanges and not compiled else forward
    forward.__wrapped__ = kind.forward  # whose arguments inspect and torch.fx then find
    forward.__qualname__ = f"{name}.forward"
    return forward


def _own_forward(kind: type, exchanges: bool) -> Callable:
    """The forward that a class has when it is called."""

    def own_forward(self, *args, **kwargs):
        if exchanges:
            refuse_context(kind, kwargs)
        return kind.forward(self, *args, **kwargs)

    return own_forward


def refuse_context(kind: type, kwargs: dict) -> None:
    """For a layer whose class's own forward is called, which would ignore a context."""
    if kwargs.get("cp_context") is not None:
        raise ValueError(
            "cp_context must not be given to a layer that is patched, sharded or left to its own "
            f"forward, got one for a {kind.__name__}"
        )


def is_same(value: object, default: object) -> bool:
    """True for the same object, or for equal numbers, flags or strings of the same type."""
    if value is default:
        return True
    return type(value) is type(default) and type(value) in PLAIN_VALUES and value == default


# -- calls of parts


class Word(NamedTuple):
    """An argument of a call, and the source of its value."""

    name: str  # "" of one by position
    # "argument": one of the module's own call, or its default; "attribute", "parameter": the
    # module's, read in each call; "table": the n-th of the rotary tables; "rest": the keywords that
    # the module's forward has no name for; "dict": of such words; "constant"
    how: str
    what: object = None
    default: object = None  # of an argument; the type of a constant


ALONE = ("argument", "attribute", "constant")  # sources of a value that stands by itself


class Value:
    """Reads one argument of an inner call: a constant, an argument or an attribute."""

    def __init__(self, word: Word):
        is_argument = word.how == "argument"
        self.attribute = operator.attrgetter(word.what) if word.how == "attribute" else None
        self.argument = (word.what, word.default) if is_argument else ("", word.what)

    def of(self, module: nn.Module, given: dict) -> object:
        """For a call of the module with `given`."""
        return given.get(*self.argument) if self.attribute is None else self.attribute(module)


class Words:
    """The arguments that a table describes."""

    def __init__(self, table: Iterable[Word]):
        self.constants, self.arguments, self.attributes = {}, [], []
        self.parameters, self.tables, self.rest, self.dicts = [], [], [], []
        self.empty = True
        for name, how, what, default in table:
            self.empty = False
            if how == "constant":
                self.constants[name] = what
            elif how == "argument":
                self.arguments.append((name, what, default))
            elif how == "attribute":
                self.attributes.append((name, operator.attrgetter(what)))
            elif how == "parameter":
                self.parameters.append((name, what))
            elif how == "table":
                self.tables.append((name, what))
            elif how == "rest":
                self.rest.append(name)
            else:
                self.dicts.append((name, Words(what)))

    def made(self, module: nn.Module, given: dict, rest: dict, tables: Optional[Tuple]) -> dict:
        """The arguments by their names, for a call of the module with `given`."""
        made = dict(self.constants)
        for name, get in self.attributes:
            made[name] = get(module)
        for name, argument, default in self.arguments:
            made[name] = given.get(argument, default)
        for name, parameter in self.parameters:
            made[name] = module.__dict__["_parameters"][parameter]
        for name, n in self.tables:
            made[name] = tables[n]
        for name in self.rest:
            made[name] = rest
        for name, words in self.dicts:
            made[name] = words.made(module, given, rest, tables)
        return made


NAME = "config._attn_implementation"
# a PreTrainedConfig finds its attributes by Python code, seven calls for this one; here they lie
OWN, LAYERS = "_attn_implementation_internal", "_heterogeneity_spec"
_attributes = object.__getattribute__


class Interface:
    """Looks a function up in transformers' registry, as a module of one class does.

    The answer is remembered with all that it follows from: the config's class, its way to an
    attribute and its property, the name, and the registry's class and entry.
    """

    def __init__(self, name: Word, eager: Callable):
        self.name, self.eager = Value(name), eager
        self.plain = (name.how, name.what) == ("attribute", NAME)
        self.known: tuple = (None, None)  # facts and the function, which threads read together

    def of(self, module: nn.Module, given: dict) -> Callable:
        """The function that the module calls, which was called with `given`; an error as from
        transformers if there is none."""
        registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        facts, (known, function) = None, self.known
        if self.plain:
            try:
                config, kind = module.__dict__["config"], type(registry)
                own, at = type(config), _attributes(config, "__dict__")
                name = at[OWN]
                entry = registry._local_mapping.get(name) or registry._global_mapping.get(name)
                if at.get(LAYERS) is None and "get_interface" not in registry.__dict__:
                    facts = (
                        own, own.__getattribute__, own._attn_implementation, name,
                        kind, kind.get_interface, kind.__getitem__, entry,
                    )  # fmt: skip
            except (AttributeError, KeyError, TypeError):
                pass  # of a release that keeps them elsewhere
            if facts is not None and facts == known:
                return function
        function = registry.get_interface(self.name.of(module, given), self.eager)
        self.known = facts, function
        return function
