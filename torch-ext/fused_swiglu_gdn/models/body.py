"""One function of a forward, statement by statement and expression by expression."""

import ast
from typing import Dict, NoReturn, Optional

import torch

from .callees import Callees
from .code import (
    ATTRIBUTES,
    BUILTINS,
    CHOSEN,
    EXPRESSIONS,
    IN_PLACE,
    PLAIN_VALUES,
    Refused,
    calls,
    in_short,
    is_constant,
    is_text,
    keyword_tested,
    logs,
)
from .conditions import Inlined, compiled, copy, defaults_of, is_condition


class Body(Callees):
    """One function's body."""

    def __init__(self, reader, function, definition, me, owner, main):
        self.reader, self.function, self.definition = reader, function, definition
        self.me, self.owner, self.main = me, owner, main
        arguments = definition.args
        taken = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names = [argument.arg for argument in taken]
        self.kwargs = arguments.kwarg.arg if arguments.kwarg is not None else None
        rest = [arguments.vararg, arguments.kwarg]
        self.local = {*names, *(argument.arg for argument in rest if argument is not None)}
        self.given = {name for name in names if name != me}
        stored = [
            node.id for node in ast.walk(definition)
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))
        ]  # fmt: skip
        self.local |= set(stored)
        self.once = {name for name in stored if stored.count(name) == 1 and name not in names}
        self.constant = set(self.given)  # arguments that have the value that they came with
        self.interfaces = set()  # local names that hold an attention function
        self.aliases: Dict[str, str] = {}  # local names of the module's attributes, by their paths
        self.shapes: Dict[str, ast.expr] = {}  # local names of sizes, by what they are

    def refuse(self, node: ast.AST) -> NoReturn:
        raise Refused(f"its forward has `{in_short(node)}`")

    def look(self) -> None:
        for default in [*self.definition.args.defaults, *self.definition.args.kw_defaults]:
            if default is not None and not is_constant(default):
                self.refuse(default)
        for statement in self.definition.body:
            self.statement(statement)

    # -- statements

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            self.branch(node)
        elif isinstance(node, ast.Assert):
            self.check(node.test, node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            self.assign(node)
        elif isinstance(node, ast.AugAssign):
            if not isinstance(node.target, ast.Name) or node.target.id == self.me:
                self.refuse(node)
            self.aliases.pop(node.target.id, None)
            self.constant.discard(node.target.id)
            self.expression(node.value)
        elif isinstance(node, ast.Return):
            if node.value is not None:
                self.expression(node.value)
        elif isinstance(node, ast.Delete):
            if not all(isinstance(t, ast.Name) and t.id != self.me for t in node.targets):
                self.refuse(node)
            self.constant -= {target.id for target in node.targets}
        elif isinstance(node, ast.Expr):
            if self.taken_out(node.value):
                return
            if any(calls(node.value, name) for name in IN_PLACE):
                return self.expression(node.value)
            if not (is_text(node) or logs(node, self.function.__globals__)):
                self.refuse(node)
        elif not isinstance(node, ast.Pass):
            self.refuse(node)

    def branch(self, node: ast.If) -> None:
        old = self.kwargs and keyword_tested(node.test, self.kwargs, {})
        if old:  # a call with this keyword is for the forward itself
            self.reader.renamed.add(old)
        elif len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
            self.check(ast.UnaryOp(ast.Not(), node.test), node)
        else:
            self.test(node.test)
            for inner in node.body:
                self.statement(inner)
        for inner in node.orelse:
            self.statement(inner)

    def assign(self, node) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not all(self.is_target(target) for target in targets):
            self.refuse(node)
        value = node.value
        if value is None:
            return
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            self.aliases.pop(name, None)
        nodes = [node for target in targets for node in ast.walk(target)]
        self.constant -= {node.id for node in nodes if isinstance(node, ast.Name)}
        if calls(value, "get_interface"):
            self.interfaces |= set(names)
        path = self.path(value)
        if path is not None and len(targets) == len(names) and set(names) <= self.once:
            self.aliases.update(dict.fromkeys(names, path))
            self.own(value)
            return
        for target in targets:
            self.remember_sizes(target, value)
        self.expression(value)

    def remember_sizes(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            if target.id in self.once and is_condition(self, value):
                self.shapes[target.id] = value
        elif isinstance(target, ast.Tuple) and is_condition(self, value):
            for i, each in enumerate(target.elts):
                if isinstance(each, ast.Name) and each.id in self.once:
                    self.shapes[each.id] = ast.Subscript(value, ast.Constant(i), ast.Load())
                elif not isinstance(each, ast.Name):
                    break

    def is_target(self, node: ast.expr) -> bool:
        if isinstance(node, (ast.Tuple, ast.List)):
            return all(self.is_target(element) for element in node.elts)
        if isinstance(node, ast.Starred):
            return self.is_target(node.value)
        return isinstance(node, ast.Name) and node.id != self.me

    def taken_out(self, node: ast.expr) -> bool:
        """kwargs.get("name") or kwargs.pop("name", None): an argument by another way."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        mine = isinstance(node.func.value, ast.Name) and node.func.value.id == self.kwargs
        if not mine or self.kwargs is None or node.func.attr not in ("get", "pop"):
            return False
        words = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if len(words) != len(node.args) or node.keywords or not isinstance(words[0], str):
            self.refuse(node)
        if words[1:] not in ([], [None]) or node.func.attr == "pop" and not words[1:]:
            self.refuse(node)
        if self.main:
            self.reader.extra.add(words[0])
        else:  # whose keywords they are is not known: calls with one are for the forward itself
            self.reader.renamed.add(words[0])
        return True

    # -- conditions on shapes

    def check(self, test: ast.expr, node: ast.stmt) -> None:
        """A condition without which the forward raises."""
        if not self.main or not is_condition(self, test):
            self.refuse(node)
        test = Inlined(self).visit(copy(test))
        self.reader.checks.append(compiled(test, self.me, defaults_of(self.function)))

    # -- expressions

    def path(self, node: ast.expr) -> Optional[str]:
        """ "config.use_rope" of self.config.use_rope, and of names that stand for it."""
        names = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        if node.id in self.aliases:
            names.insert(0, self.aliases[node.id])
        elif node.id != self.me or self.me is None:
            return None
        return ".".join(names) or None

    def test(self, node: ast.expr) -> None:
        """A condition: on None, on the type of an argument, or on the module's own attributes."""
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self.test(value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.test(node.operand)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            if len(node.ops) > 1 or not isinstance(node.comparators[0], ast.Constant):
                self.refuse(node)
            if not isinstance(node.left, ast.Name):
                self.own(node.left)
        elif isinstance(node, ast.Compare):
            for side in [node.left, *node.comparators]:
                path = self.path(side) or ""
                if path.endswith(".dtype") or self.is_dtype_of_a_tensor(side):
                    self.reader.by_dtype = True
                else:
                    self.own(side)
        elif isinstance(node, ast.Call) and self.is_builtin(node.func, "isinstance"):
            if not isinstance(node.args[0], ast.Name):
                self.own(node.args[0])
        elif isinstance(node, ast.Name) and self.main and node.id in self.constant:
            self.reader.switches.add(node.id)
        else:
            self.own(node)

    def is_dtype_of_a_tensor(self, node: ast.expr) -> bool:
        if self.is_dtype(node):
            return True
        if not isinstance(node, ast.Attribute) or node.attr != "dtype":
            return False
        return isinstance(node.value, ast.Name) and node.value.id in self.local

    def own(self, node: ast.expr) -> None:
        """A constant, an attribute of the module, or getattr(self, "name", constant)."""
        if isinstance(node, (ast.Tuple, ast.List)):
            for element in node.elts:
                self.own(element)
        elif self.path(node) is not None:
            self.reader.reads.add(self.path(node))
        elif isinstance(node, ast.Name) and self.is_plain_global(node.id):
            pass
        elif not (is_constant(node) or self.is_getattr(node) or self.is_dtype(node)):
            self.refuse(node)

    def is_builtin(self, node: ast.expr, name: str) -> bool:
        if not (isinstance(node, ast.Name) and node.id == name and name not in self.local):
            return False
        return self.found(name) is BUILTINS[name]

    def is_getattr(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call) or node.keywords or len(node.args) < 2:
            return False
        if not (self.is_builtin(node.func, "getattr") or self.is_builtin(node.func, "hasattr")):
            return False
        owner, name, *default = node.args
        mine = self.path(owner)
        if isinstance(owner, ast.Name) and owner.id == self.me:
            mine = ""
        if mine is None or not isinstance(name, ast.Constant):
            return False
        if not all(is_constant(d) or self.path(d) for d in default):
            return False
        self.reader.reads.add(f"{mine}.{name.value}".lstrip("."))
        self.reader.reads |= {self.path(d) for d in default if self.path(d)}
        return True

    def found(self, name: Optional[str]) -> object:
        """What a global name stands for."""
        names = self.function.__globals__
        builtins = names.get("__builtins__", {})
        builtins = getattr(builtins, "__dict__", builtins)
        return names.get(name, builtins.get(name, NotImplemented))

    def is_plain_global(self, name: str) -> bool:
        """A number, a word, a flag or a dtype of the function's module, which is pinned."""
        if name in self.local:
            return False
        value = self.found(name)
        if not isinstance(value, (*PLAIN_VALUES, torch.dtype)):
            return False
        self.reader.names.append((self.function.__globals__, name, value))
        return True

    def expression(self, node: ast.expr) -> None:
        if not isinstance(node, EXPRESSIONS):
            self.refuse(node)
        if isinstance(node, ast.Attribute):
            self.attribute(node)
        elif isinstance(node, ast.Call):
            self.call(node)
        elif isinstance(node, ast.NamedExpr):
            self.assign(ast.Assign([node.target], node.value))
        elif isinstance(node, ast.IfExp):
            self.test(node.test)
            self.expression(node.body)
            self.expression(node.orelse)
        elif isinstance(node, ast.Name):
            if node.id in self.aliases:
                self.own(node)
            elif node.id == self.me or node.id not in self.local:
                if node.id == self.me or not self.is_plain_global(node.id):
                    self.refuse(node)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.expression(child)

    def attribute(self, node: ast.Attribute) -> None:
        path = self.path(node)
        if path is not None and path.rsplit(".", 1)[-1] not in ATTRIBUTES:
            self.reader.reads.add(path)
        elif path is None and not self.is_dtype(node):
            if node.attr in CHOSEN:
                self.reader.more["topk"] = in_short(node)
            elif node.attr not in ATTRIBUTES:
                self.refuse(node)
            self.expression(node.value)

    def is_dtype(self, node: ast.expr) -> bool:
        """torch.float32"""
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            return False
        if node.value.id in self.local:
            return False
        value = getattr(torch, node.attr, None)
        return self.found(node.value.id) is torch and isinstance(value, torch.dtype)
