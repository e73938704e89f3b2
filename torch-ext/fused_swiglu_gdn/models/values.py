"""The reader's knowledge of a value while it reads a forward: where it comes from."""

import ast
import functools
from typing import Callable, FrozenSet, Iterable, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

PLAIN_VALUES = (bool, int, float, str)
CONSTANTS = (*PLAIN_VALUES, type(None), type(...), torch.dtype)


class Own(NamedTuple):
    """An attribute of the module by its path; the path of the module itself is empty."""

    path: str
    text: str = "self"


class Given(NamedTuple):
    """An argument of the forward as it came."""

    name: str


class Known(NamedTuple):
    """A size, a dtype or a condition: an expression of the module and the arguments that can be
    told in each call; no text where it is of what the forward computes."""

    text: Optional[str]
    # "own": attributes; "none": whether arguments are None; "size": shapes; "dtype"; "call": the
    # state of torch; "derived": more than one size as it is; "=x": the value of the argument x
    on: FrozenSet[str]
    paths: FrozenSet[str] = frozenset()  # of attributes


class Plain(NamedTuple):
    """A constant, function, class or module of Python, and the (namespace, name) that has it."""

    value: object
    place: Optional[tuple] = None


class Several(NamedTuple):
    """A tuple or list of so many values."""

    values: tuple


class Words(NamedTuple):
    """A dictionary of keywords, with those that the forward has no name for or without; `main`: it
    is the forward's own **kwargs."""

    values: dict
    rest: bool = False
    main: bool = False


class Closure(NamedTuple):
    """A function or lambda inside of a function."""

    definition: Union[ast.FunctionDef, ast.Lambda]
    frame: object
    defaults: dict


class Method(NamedTuple):
    """A function of a class, and the argument that it is bound to."""

    function: object
    owner: type
    first: Tuple[object, ...] = ()


class Partial(NamedTuple):
    function: object
    args: tuple
    words: dict


class Super(NamedTuple):
    owner: type


class Passed(NamedTuple):
    """The result of a function that a wrapper calls with all that it is given."""

    function: object


class Computed(NamedTuple):
    what: str


constant = functools.lru_cache(maxsize=256, typed=True)(Plain)  # the same for the same
NO_WORDS = Words({})
VALUE = Computed("a tensor, or whatever is computed")
ATTENTION = Computed("an attention function of transformers' registry")
ARGUMENTS = Computed("a wrapper's *args")
SIZE = Known(None, frozenset(["size"]))


def told(value: object) -> Optional[Known]:
    """A value as an expression; None if it is none of the module, the arguments and constants."""
    if isinstance(value, Known):
        return value
    if isinstance(value, Own):
        return Known(value.text, frozenset(["own"]), frozenset([value.path]))
    if isinstance(value, Given):
        return Known(value.name, frozenset([f"={value.name}"]))
    if isinstance(value, Plain) and isinstance(value.value, CONSTANTS):
        return Known(repr(value.value), frozenset())
    if isinstance(value, Several):
        return joined("({},)" if value.values else "()", ", ", value.values)
    return None


def joined(form: str, between: str, values: Iterable, *on: str) -> Optional[Known]:
    """An expression of several: `form` has its place between brackets."""
    parts = [told(value) for value in values]
    if None in parts:
        return None
    texts = [part.text for part in parts]
    text = None if None in texts else form.format(between.join(texts))
    kinds = frozenset(on).union(*(part.on for part in parts))
    return Known(text, kinds, frozenset().union(*(part.paths for part in parts)))


def condition(text: str, defaults: dict) -> Callable:
    """(module, arguments by name) -> whether a condition is met, which cannot be told of some."""
    code = compile(text, "<condition>", "eval")

    def met(module: nn.Module, given: dict) -> bool:
        try:
            return bool(eval(code, {"torch": torch}, {**defaults, **given, "self": module}))
        except Exception:
            return False

    return met


def merged(a: object, b: object) -> object:
    """Returns what is known of a value that is one of two."""
    if a is b or type(a) is type(b) and _equal(a, b):
        return a
    if isinstance(a, Several) and isinstance(b, Several) and len(a.values) == len(b.values):
        return Several(tuple(map(merged, a.values, b.values)))
    kinds = [v.on if isinstance(v, Known) else frozenset() for v in (a, b)]
    if "derived" in kinds[0] | kinds[1]:
        return Known(None, kinds[0] | kinds[1])
    return VALUE


def _equal(a: tuple, b: tuple) -> bool:
    if isinstance(a, Plain):
        same = type(a.value) is type(b.value) and isinstance(a.value, CONSTANTS)
        return a.value is b.value or same and a.value == b.value
    if isinstance(a, (Several, Words)):
        mine, other = a[0], b[0]
        pairs = zip(mine, other) if isinstance(a, Several) else (
            (mine[n], other.get(n)) for n in mine
        )  # fmt: skip
        return len(mine) == len(other) and a[1:] == b[1:] and all(
            x is y or type(x) is type(y) and _equal(x, y) for x, y in pairs
        )  # fmt: skip
    return not isinstance(a, (Partial, Method)) and a == b
