"""Reads the functions of a layer of a delta rule (Gated DeltaNet, Kimi Delta Attention), which may
have more than those of every module.

They branch on whether there is one token, and on what the cache answers: the trial (delta_trial.py)
goes all of these ways. A gate compares tensors with numbers, where that is allowed ("compare"), and
a layer may call parts of its parts. Its rule and its convolution have loops, and so are not read;
but they are transformers' own, as all that the forward calls has to be.
"""

import ast
from types import FunctionType
from typing import NamedTuple

from torch import nn

from ..layers.own_code import (
    NotOwn,
    found_at,
    look_at_torch,
    names_in,
    own_names,
    undispatched,
    why_not_own,
)  # fmt: skip
from .body import Body
from .callees import SPECIAL
from .code import Refused
from .values import VALUE, Computed, Given, Known, Own, Plain, Words, merged

ANSWERS = {"has_previous_state", "is_recording_past", "record_past"}  # of caches, to branch on
OF_CACHES = ANSWERS | {
    "conv_states", "get_conv_state", "get_recurrent_state", "layers", "recurrent_states",
    "update_conv_state", "update_recurrent_state",
}  # fmt: skip
PACKED = ("cu_seq_lens_q", "seq_idx")  # keywords that the trial gives
# what a function that is not read has no business with
FOREIGN = {
    "dropout", "environ", "get_default_dtype", "getenv", "is_autocast_enabled", "is_cuda",
    "is_grad_enabled", "item", "rand", "rand_like", "randint", "randn", "randn_like", "time",
    "tolist", "training",
}  # fmt: skip
ANSWER = Known(None, frozenset(["cache"]))
ACTIVATION = Computed("an activation of transformers by its name")


def _is_function(value: object) -> bool:
    return isinstance(undispatched(value), FunctionType)


class OneOf(NamedTuple):
    """One of two functions."""

    functions: tuple


class GdnBody(Body):
    """The call of a function of such a layer."""

    def __init__(self, reader, function, *more):
        super().__init__(reader, function, *more)
        self.is_of_transformers(function, function.__name__)
        try:
            for word in sorted(names_in(function)):
                look_at_torch(word)
        except NotOwn as error:
            raise Refused(f"its forward {error}") from None

    @staticmethod
    def is_of_transformers(function: FunctionType, name: str) -> None:
        """Refuses a function that is called by this name and is not in a file of transformers."""
        reason = why_not_own(function)
        if reason is not None:
            raise Refused(f"its forward calls {name}, which {reason}")

    # -- expressions

    def use(self, value: object, node: ast.AST) -> None:
        if isinstance(value, OneOf) or value is ACTIVATION:
            self.refuse(node)
        super().use(value, node)

    def read_Compare(self, node: ast.Compare) -> object:
        """Reads "is there one of something" as a condition of a kind of its own."""
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Gt, ast.GtE, ast.Lt, ast.LtE)):
            sides = [self.expression(side) for side in (node.left, node.comparators[0])]
            others = [side for side in sides if side is not VALUE]
            if len(others) == 1 and isinstance(others[0], (Plain, Own)):
                self.use(others[0], node)
                self.needs("compare", node)
                return VALUE
        found = super().read_Compare(node)
        if not isinstance(found, Known) or len(node.ops) != 1:
            return found
        sides = [self.expression(side) for side in (node.left, node.comparators[0])]
        ones = [s for s in sides if isinstance(s, Plain) and type(s.value) is int and s.value == 1]
        counts = [s for s in sides if isinstance(s, Known) and s.on == {"size"}]
        if len(ones) == len(counts) == 1:
            return found._replace(on=frozenset(["one"]))
        return found

    def read_IfExp(self, node: ast.IfExp) -> object:
        """A name may stand for one of several functions."""
        leaves = [node.body, node.orelse]
        names = [n for n in leaves if isinstance(n, ast.Name) and n.id not in self.local]
        found = [self.found(n.id, node) for n in names]
        if len(found) != 2 or not all(_is_function(f.value) for f in found):
            return super().read_IfExp(node)
        ways = [(lambda value=value: value) for value in found]
        values = [value for value, _, _ in self.either(node.test, *ways)]
        return values[0] if len(values) == 1 else OneOf(tuple(values))

    def attribute(self, base: object, name: str, node: ast.AST) -> object:
        if name in OF_CACHES and (isinstance(base, Given) or base is VALUE):
            return ANSWER if name in ANSWERS else VALUE
        return super().attribute(base, name, node)

    def read_Subscript(self, node: ast.Subscript) -> object:
        """ACT2FN[self.activation]"""
        if not isinstance(node.value, ast.Name) or node.value.id != "ACT2FN":
            return super().read_Subscript(node)
        known = self.expression(node.value)
        home = type(getattr(known, "value", None)).__module__
        if not isinstance(known, Plain) or not home.startswith("transformers."):
            self.refuse(node)
        self.pin(known)
        self.data(node.slice)
        return ACTIVATION

    # -- calls

    def read_Call(self, node: ast.Call, idle: bool = False) -> object:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in OF_CACHES:
            base = self.expression(function.value)
            if isinstance(base, Given) or base is VALUE:
                self.use_arguments(node)
                return self.attribute(base, function.attr, node)
        if isinstance(function, ast.Attribute) and not idle:
            base = self.expression(function.value)
            path = f"{base.path}.{function.attr}" if isinstance(base, Own) and base.path else ""
            if path and isinstance(found_at(self.reader.module, path), nn.Module):
                self.reader.source.parts.add(path)
                return self.use_arguments(node)
        return super().read_Call(node, idle)

    def use_arguments(self, node: ast.Call) -> object:
        args, words, _ = self.arguments(node)
        self.use_all((*args, *words.values.values()), node)
        return VALUE

    def word(self, words: Words, name: str, node: ast.Call) -> object:
        """Returns an option of packed sequences, whatever helper takes them out."""
        word = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        more = [self.expression(argument) for argument in node.args[1:]]
        if name in ("get", "pop") and word in PACKED and word not in words.values and words.rest:
            if more in ([], [Plain(None)]) and not node.keywords:
                return VALUE
        return super().word(words, name, node)

    def called(self, function: object, node: ast.Call, idle: bool = False) -> object:
        if isinstance(function, OneOf):
            found = [self.called(each, node, idle) for each in function.functions]
            return merged(*found)
        if function is ACTIVATION:
            return self.use_arguments(node)
        value = function.value if isinstance(function, Plain) else None
        plain = undispatched(value)
        name = function.place[1] if value is not None and function.place else ""
        read = isinstance(plain, FunctionType) and id(plain) not in SPECIAL
        if name and read and not self.is_torchs(plain):
            self.is_of_transformers(plain, name)
        if plain is value or not isinstance(plain, FunctionType):
            return super().called(function, node, idle)
        self.calls_transformers(plain, name)
        self.pin(function)
        args, words, _ = self.arguments(node)
        if any(isinstance(each, Own) and not each.path for each in (*args, *words.values.values())):
            self.refuse(node)
        return self.use_arguments(node)

    def calls_transformers(self, plain: FunctionType, name: str) -> None:
        """Refuses a function, which is not read, if it or what it calls is not transformers' own or
        goes by what the trial does not set."""
        try:
            known = own_names(plain)
        except NotOwn as error:
            raise Refused(f"its forward calls {name}, which {error}") from None
        for function in (plain, *[value for _, _, value in known]):
            foreign = FOREIGN & names_in(undispatched(function))
            if foreign:
                raise Refused(f"its forward calls {name}, which uses {', '.join(sorted(foreign))}")
        self.reader.source.names += known
