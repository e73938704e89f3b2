"""What functions of a Gated DeltaNet layer may have besides what those of every module may.

They branch on whether there is one token, and on what the cache answers: the trial (gdn_trial.py)
goes all of these ways. Its rule and its convolution have loops, and so are not read; but they are
transformers' own, as all that the forward calls has to be.
"""

import ast
from types import FunctionType
from typing import Optional

from ..layers.own_code import NotOwn, look_at_torch, names_in, own_names, undispatched, why_not_own
from .body import Body
from .callees import Callees
from .code import Refused, is_constant
from .conditions import is_condition

OF_CACHES = {
    "conv_states", "get_conv_state", "get_recurrent_state", "has_previous_state",
    "is_recording_past", "layers", "record_past", "recurrent_states", "update_conv_state",
    "update_recurrent_state",
}  # fmt: skip
OF_PARTS = {"bias", "weight"}
PACKED = ("cu_seq_lens_q", "seq_idx")  # keywords that the trial gives
# what a function that is not read has no business with
FOREIGN = {
    "dropout", "environ", "get_default_dtype", "getenv", "is_autocast_enabled", "is_cuda",
    "is_grad_enabled", "item", "rand", "rand_like", "randint", "randn", "randn_like", "time",
    "tolist", "training",
}  # fmt: skip


class GdnBody(Body):
    """A function of a Gated DeltaNet layer."""

    def __init__(self, reader, function, *more):
        super().__init__(reader, function, *more)
        self.constant = set(self.given)  # until they are stored
        name = function.__name__
        try:
            if why_not_own(function):
                raise NotOwn(f"calls {name}, which {why_not_own(function)}")
            for word in sorted(names_in(function)):
                look_at_torch(word)
        except NotOwn as error:
            raise Refused(f"its forward {error}") from None

    # -- statements

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            self.inner(node)
        elif isinstance(node, ast.Expr) and self.is_of_caches(node.value):
            self.expression(node.value)
        else:
            super().statement(node)
        self.constant -= {
            each.id for each in ast.walk(node)
            if isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del))
        }  # fmt: skip

    def inner(self, node: ast.FunctionDef) -> None:
        """A function within the forward."""
        names = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        given = node.args
        if self.me in names or node.decorator_list or given.defaults or any(given.kw_defaults):
            self.refuse(node)
        self.local |= {node.name, *names}
        self.interfaces.add(node.name)
        main, self.main = self.main, False
        for statement in node.body:
            self.statement(statement)
        self.main = main

    def branch(self, node: ast.If) -> None:
        """A way that cannot be read is for the forward itself, if the module says who goes it."""
        turned = ast.UnaryOp(ast.Not(), node.test)
        if node.orelse and len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
            self.check(turned, node)
            for statement in node.orelse:
                self.statement(statement)
            return
        names = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
        known = self.main and not node.orelse and names == {self.me}
        known = known and is_condition(self, node.test)
        try:
            super().branch(node)
        except Refused:
            if not known:
                raise
            self.check(turned, node)

    def assign(self, node) -> None:
        """A name may stand for one of several functions."""
        value = node.value
        leaves = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        names = [leaf.id for leaf in leaves if isinstance(leaf, ast.Name)]
        found = [self.found(name) for name in names if name not in self.local]
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(found) != len(leaves) or not all(map(callable, found)):
            return super().assign(node)
        if not all(isinstance(target, ast.Name) and self.is_target(target) for target in targets):
            self.refuse(node)
        if isinstance(value, ast.IfExp):
            self.test(value.test)
        for leaf, function in zip(leaves, found):
            call = ast.Call(leaf, [], [])
            self.known_function(call, self.function.__globals__, leaf.id, function)
        self.interfaces |= {target.id for target in targets}

    # -- conditions

    def test(self, node: ast.expr) -> None:
        if isinstance(node, ast.Name) and node.id in self.local and node.id not in self.aliases:
            if self.main and node.id in self.constant:
                self.reader.switches.add(node.id)
        elif isinstance(node, (ast.Attribute, ast.Call)) and self.path(node) is None:
            self.expression(node)
        elif not (isinstance(node, ast.Compare) and self.counts(node)):
            super().test(node)

    def counts(self, node: ast.Compare) -> bool:
        """It asks whether there is one of something, as in seq_len == 1."""
        sides = [node.left, *node.comparators]
        one = [x for x in sides if isinstance(x, ast.Constant) and type(x.value) is int]
        other = [x for x in sides if x not in one]
        if len(sides) != 2 or [x.value for x in one] != [1] or self.path(other[0]) is not None:
            return False
        if isinstance(other[0], ast.BinOp):
            return False
        self.expression(other[0])
        return True

    def own(self, node: ast.expr) -> None:
        if isinstance(node, ast.BinOp):
            self.own(node.left)
            self.own(node.right)
        else:
            super().own(node)

    # -- expressions

    def expression(self, node: ast.expr) -> None:
        turned = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        if isinstance(node, (ast.Compare, ast.BoolOp)) or turned:
            self.test(node)
        elif isinstance(node, ast.NamedExpr) and self.is_target(node.target):
            self.expression(node.value)
        elif isinstance(node, (ast.GeneratorExp, ast.ListComp)):
            loop, *more = node.generators
            if more or loop.ifs or loop.is_async or not self.is_target(loop.target):
                self.refuse(node)
            self.expression(loop.iter)
            self.expression(node.elt)
        else:
            super().expression(node)

    def attribute(self, node: ast.Attribute) -> None:
        if self.path(node) is None and node.attr in OF_CACHES | OF_PARTS:
            self.expression(node.value)
        else:
            super().attribute(node)

    def taken_out(self, node: ast.expr) -> bool:
        """Of any dict: helpers get the keywords of the forward as one."""
        function = node.func if isinstance(node, ast.Call) else None
        if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
            return False
        if function.attr not in ("get", "pop") or function.value.id not in self.local:
            return False
        word, *default = node.args
        if node.keywords or not all(map(is_constant, node.args)):
            self.refuse(node)
        none = [x for x in default if isinstance(x, ast.Constant) and x.value is None]
        if none != default or not (self.main and function.value.id == self.kwargs):
            if word.value not in PACKED or none != default:
                self.reader.renamed.add(word.value)
            return True
        return word.value in PACKED or super().taken_out(node)

    # -- calls

    def is_of_caches(self, node: ast.expr) -> bool:
        function = node.func if isinstance(node, ast.Call) else None
        if not isinstance(function, ast.Attribute) or self.path(function) is not None:
            return False
        return function.attr in OF_CACHES

    def callee(self, node: ast.Call) -> bool:
        function = node.func
        if self.is_of_caches(node):
            self.expression(function.value)
            return False
        if isinstance(function, ast.Subscript) and ast.unparse(function.value) == "ACT2FN":
            self.named_activation(function)
            return False
        return super().callee(node)

    def named_activation(self, node: ast.Subscript) -> None:
        """ACT2FN[self.activation]"""
        known = self.found("ACT2FN")
        if not type(known).__module__.startswith("transformers.") or "ACT2FN" in self.local:
            self.refuse(node)
        self.reader.names.append((self.function.__globals__, "ACT2FN", known))
        self.expression(node.slice)

    def known_function(self, node: ast.Call, namespace: dict, name: str, value: object) -> bool:
        plain = undispatched(value)
        if plain is value or not isinstance(plain, FunctionType):
            if isinstance(value, FunctionType) and not Callees.is_torchs(value):
                self.needs_own(name, value)
            return super().known_function(node, namespace, name, value)
        self.needs_own(name, plain)
        if self.module_among(node, plain) is not None:
            self.refuse(node)
        try:
            known = own_names(plain)
        except NotOwn as error:
            raise Refused(f"its forward calls {name}, which {error}") from None
        for function in (plain, *[value for _, _, value in known]):
            foreign = FOREIGN & names_in(undispatched(function))
            if foreign:
                raise Refused(f"its forward calls {name}, which uses {', '.join(sorted(foreign))}")
        self.reader.names += [(namespace, name, value), *known]
        return False

    @staticmethod
    def needs_own(name: str, function: object) -> None:
        why: Optional[str] = why_not_own(function)
        if why is not None:
            raise Refused(f"its forward calls {name}, which {why}")
