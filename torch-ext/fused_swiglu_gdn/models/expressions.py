"""The expressions of a function that is read."""

import ast
import operator

import torch

from .attributes import Attributes
from .values import (
    ATTENTION,
    CONSTANTS,
    VALUE,
    Closure,
    Given,
    Known,
    Method,
    Own,
    Partial,
    Plain,
    Several,
    Super,
    Words,
    constant,
    joined,
    merged,
    told,
)

OPERATORS = {
    ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub), ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv), ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod), ast.Pow: ("**", operator.pow), ast.MatMult: ("@", None),
}  # fmt: skip
COMPARISONS = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip


class Expressions(Attributes):
    """The part of a Body (body.py) that is about expressions."""

    def expression(self, node: ast.expr) -> object:
        """Returns what is known of an expression's value."""
        if type(node) is ast.Name and node.id in self.env:
            return self.env[node.id]
        if type(node) is ast.Constant:
            return constant(node.value)
        read = getattr(self, f"read_{type(node).__name__}", None)
        if read is None or not isinstance(node, ast.expr):
            self.refuse(node)
        return read(node)

    def data(self, node: ast.expr) -> object:
        """An expression whose value is computed with, or handed on."""
        value = self.expression(node)
        if value is not VALUE:
            self.use(value, node)
        return value

    def use(self, value: object, node: ast.AST) -> None:
        """Refuses a value that nothing may be computed with; notes what is read."""
        if isinstance(value, Own):
            if not value.path:
                self.refuse(node)
            self.reader.source.reads.add(value.path)
        elif isinstance(value, (Several, Words)):
            values = value.values if isinstance(value, Several) else value.values.values()
            self.use_all(values, node)
        elif isinstance(value, Plain):
            if not isinstance(value.value, CONSTANTS):
                self.refuse(node)
            if value.place is not None:
                self.pin(value)
        elif isinstance(value, (Closure, Method, Partial, Super)) or value is ATTENTION:
            self.refuse(node)

    def use_all(self, values, node: ast.AST) -> None:
        for value in values:
            if value is not VALUE and type(value) not in (Given, Known):
                self.use(value, node)

    def pin(self, value: Plain) -> None:
        if value.place is not None and not isinstance(value.value, torch.dtype):
            self.reader.source.names.append((*value.place, value.value))

    def read_Name(self, node: ast.Name) -> object:
        frame, name = self, node.id
        while frame is not None:
            if name in frame.env:
                return frame.env[name]
            if name in frame.local:
                self.refuse(node)
            frame = frame.outer
        return self.found(name, node)

    def found(self, name: str, node: ast.AST) -> Plain:
        """Returns the object that a name stands for which is not local."""
        code, spaces = self.function.__code__, self.function.__globals__
        if name in code.co_freevars:
            cell = self.reader.space(self.function, name)
            return Plain(cell.get(""), (cell, ""))
        if name in spaces:
            return Plain(spaces[name], (spaces, name))
        builtins = spaces.get("__builtins__", {})
        builtins = getattr(builtins, "__dict__", builtins)
        if name not in builtins:
            self.refuse(node)
        return Plain(builtins[name])

    def read_NamedExpr(self, node: ast.NamedExpr) -> object:
        value = self.expression(node.value)
        self.assign(node.target, value, node)
        return value

    def read_Lambda(self, node: ast.Lambda) -> object:
        return self.closure(node)

    def read_IfExp(self, node: ast.IfExp) -> object:
        ways = (lambda: self.expression(node.body)), (lambda: self.expression(node.orelse))
        values = [value for value, _, _ in self.either(node.test, *ways)]
        if len(values) == 1:
            return values[0]
        found = merged(*values)
        if found is VALUE:
            for value, part in zip(values, (node.body, node.orelse)):
                self.use(value, part)
        return found

    def read_Tuple(self, node) -> object:
        values = []
        for element in node.elts:
            if not isinstance(element, ast.Starred):
                values.append(self.expression(element))
                continue
            several = self.expression(element.value)
            if isinstance(several, Words):
                self.refuse(element)
            if not isinstance(several, Several):
                self.use(several, element)
                values = None
                break
            values += several.values
        if values is None:
            for element in node.elts:
                self.data(element.value if isinstance(element, ast.Starred) else element)
            return VALUE
        return Several(tuple(values))

    read_List = read_Tuple

    def read_Dict(self, node: ast.Dict) -> object:
        values, rest = {}, False
        for key, value in zip(node.keys, node.values):
            found = self.expression(value)
            if key is None:
                if not isinstance(found, Words):
                    self.refuse(node)
                values, rest = {**values, **found.values}, rest or found.rest
            elif isinstance(key, ast.Constant) and type(key.value) is str:
                values[key.value] = found
            else:
                self.refuse(node)
        return Words(values, rest)

    def read_ListComp(self, node) -> object:
        if len(node.generators) != 1 or node.generators[0].ifs or node.generators[0].is_async:
            self.refuse(node)
        each = node.generators[0]
        several = self.expression(each.iter)
        if not isinstance(several, Several):
            self.refuse(node)
        before, values = dict(self.env), []
        for value in several.values:
            self.assign(each.target, value, node)
            values.append(self.expression(node.elt))
        self.env = before
        return Several(tuple(values))

    read_GeneratorExp = read_ListComp

    def read_JoinedStr(self, node: ast.JoinedStr) -> object:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.data(part.value)
        return VALUE

    def read_Slice(self, node: ast.Slice) -> object:
        for part in filter(None, (node.lower, node.upper, node.step)):
            self.data(part)
        return VALUE

    # -- operators

    def read_BinOp(self, node: ast.BinOp) -> object:
        left = self.expression(node.left)
        return self.operation(node.op, left, self.expression(node.right), node)

    def operation(self, op: ast.operator, left: object, right: object, node: ast.AST) -> object:
        if type(op) not in OPERATORS:
            self.refuse(node)
        sign, function = OPERATORS[type(op)]
        if isinstance(left, Several) and isinstance(right, Several) and sign == "+":
            return Several(left.values + right.values)
        if left is VALUE and right is VALUE:
            return VALUE
        self.use_all((left, right), node)
        if isinstance(left, Plain) and isinstance(right, Plain) and function is not None:
            try:
                return Plain(function(left.value, right.value))
            except Exception:
                self.refuse(node)
        found = [told(left), told(right)]
        if isinstance(left, Given) or isinstance(right, Given) or None in found:
            self.only_sizes_as_they_are((left, right), node)
            return VALUE
        whole = [known for known in found if known.on & {"size", "derived"}]
        derived = ("derived",) if whole and sign in ("//", "%") else ()
        return joined("({})", f" {sign} ", (left, right), *derived)

    def only_sizes_as_they_are(self, values, node: ast.AST) -> None:
        """A tensor is not computed with a number that is the same for all sizes that were tried."""
        for value in values:
            if isinstance(value, Given):
                self.reader.source.computed_with.add(value.name)
            elif isinstance(value, Known) and "derived" in value.on:
                self.refuse(node)

    def read_UnaryOp(self, node: ast.UnaryOp) -> object:
        value = self.expression(node.operand)
        if isinstance(node.op, ast.Not):
            held = self.truth(value, node.operand)
            if isinstance(held, Plain):
                return Plain(not held.value)
            return held._replace(text=None if held.text is None else f"(not {held.text})")
        self.use(value, node)
        if isinstance(value, Plain) and isinstance(node.op, (ast.USub, ast.UAdd)):
            return Plain(-value.value if isinstance(node.op, ast.USub) else value.value)
        if isinstance(value, (Known, Own)) and isinstance(node.op, ast.USub):
            return joined("(-{})", "", (value,))
        return VALUE

    def read_BoolOp(self, node: ast.BoolOp) -> object:
        stops, parts = isinstance(node.op, ast.Or), []
        for part in node.values:
            value = self.expression(part)
            held = self.truth(value, part)
            if not isinstance(held, Plain):
                parts.append(held)
            elif held.value == stops:
                return Plain(held.value) if parts else value
        if not parts:
            return value
        return joined("({})", " or " if stops else " and ", parts)

    def read_Compare(self, node: ast.Compare) -> object:
        sides = [self.expression(side) for side in (node.left, *node.comparators)]
        ops = [COMPARISONS.get(type(op)) for op in node.ops]
        if len(ops) == 1 and ops[0] in ("in", "not in") and isinstance(sides[1], Words):
            word = sides[0].value if isinstance(sides[0], Plain) else None
            if not isinstance(word, str):
                self.refuse(node)
            if word not in sides[1].values and sides[1].rest:
                self.reader.is_for_itself([word])
            return Plain((word in sides[1].values) == (ops[0] == "in"))
        if len(ops) == 1 and ops[0] in ("is", "is not"):
            return self.is_none(sides, ops[0], node)
        for side in sides:
            self.use(side, node)
        if all(isinstance(side, Plain) for side in sides) and len(ops) == 1:
            return Plain(eval(f"a {ops[0]} b", {"a": sides[0].value, "b": sides[1].value}))
        text, found = told(sides[0]), [told(side) for side in sides]
        if None in found:
            self.refuse(node)
        text = found[0].text
        for op, side in zip(ops, found[1:]):
            text = None if None in (text, side.text) else f"{text} {op} {side.text}"
        known = joined("({})", ", ", sides)
        kinds = known.on | ({"derived"} if "size" in known.on else set())
        return Known(None if text is None else f"({text})", frozenset(kinds), known.paths)

    def is_none(self, sides: list, op: str, node: ast.AST) -> object:
        """x is None"""
        if isinstance(sides[0], Plain) and sides[0].value is None:
            sides = sides[::-1]
        value, other = sides
        constant = isinstance(other, Plain) and isinstance(other.value, (bool, type(None)))
        if not constant:
            self.refuse(node)
        if isinstance(value, Plain):
            return Plain((value.value is other.value) == (op == "is"))
        if other.value is None:
            if isinstance(value, Given) or value is VALUE:
                name = None if value is VALUE else value.name
                self.reader.source.asked.add(name)
                return Known(name and f"({name} {op} None)", frozenset(["none"]))
            if not isinstance(value, Own) or not value.path:
                return Plain(op == "is not")
        known = joined(f"({{}} {op} {other.value})", "", (value,))
        if known is None:
            self.refuse(node)
        if isinstance(value, Own):
            self.reader.source.reads.add(value.path)
            known = known._replace(on=frozenset(["own", "none"]))
        return known

    def truth(self, value: object, node: ast.AST) -> object:
        """Plain(True), Plain(False), or the condition under which a value counts as true."""
        if isinstance(value, Plain) and isinstance(value.value, CONSTANTS):
            self.pin(value)
            return Plain(bool(value.value))
        if isinstance(value, (Closure, Method, Partial)):
            return Plain(True)
        if isinstance(value, Several):
            return Plain(bool(value.values))
        if isinstance(value, Words) and (value.values or not value.rest):
            return Plain(bool(value.values))
        if isinstance(value, (Known, Own, Given)):
            self.use(value, node)
            known = told(value)
            held = self.reader.holds(known)
            if held is None and known.on == {"own"} and known.paths != {"training"}:
                self.refuse(node)  # it may change, and nobody would see
            return known if held is None else Plain(held)
        self.refuse(node)

    def assign(self, target: ast.expr, value: object, node: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = value
            return
        if not isinstance(target, (ast.Tuple, ast.List)):
            self.refuse(node)
        names, n = target.elts, len(target.elts)
        starred = [i for i, name in enumerate(names) if isinstance(name, ast.Starred)]
        names = [name.value if isinstance(name, ast.Starred) else name for name in names]
        if isinstance(value, Several):
            values = list(value.values)
            if starred:
                i, more = starred[0], len(values) - n + 1
                values[i : i + more] = [Several(tuple(values[i : i + more]))]
            if len(values) != n:
                self.refuse(node)
        else:
            self.use(value, node)
            values = [self.element(value, i, n, starred) for i in range(n)]
        for name, each in zip(names, values):
            self.assign(name, each, node)

    @staticmethod
    def element(value: object, i: int, n: int, starred: list) -> object:
        if not isinstance(value, (Known, Own)):
            return VALUE
        after = starred and i > starred[0]
        place = f"{i - n if after else i}"
        if starred and i == starred[0]:
            place = f"{i}:{(i + 1 - n) or ''}"
        return joined(f"{{}}[{place}]", "", (value,))
