"""Attributes and elements of what is known in a function that is read."""

import ast
from types import FunctionType, ModuleType
from typing import Optional

from torch import nn

from .callees import Callees
from .code import ATTRIBUTES, CHOSEN, CONDITIONAL, Refused, members_of
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
)


class Attributes(Callees):
    """The part of a Body (body.py) that is about attributes and elements."""

    def read_Attribute(self, node: ast.Attribute) -> object:
        return self.attribute(self.expression(node.value), node.attr, node)

    def attribute(self, base: object, name: str, node: ast.AST) -> object:
        if isinstance(base, Own):
            return self.own_attribute(base, name, node)
        if isinstance(base, Plain):
            return self.plain_attribute(base, name, node)
        if base is VALUE and name in CHOSEN:
            self.needs("topk", node)
            return VALUE
        if name == "type" and isinstance(base, Known):  # of a device
            return base._replace(text=base.text and f"{base.text}.type")
        if name not in ATTRIBUTES or isinstance(base, (Words, Closure, Method, Partial, Super)):
            self.refuse(node)
        kind = CONDITIONAL.get(name)
        if kind is None:
            return VALUE
        text = f"{base.name}.{name}" if isinstance(base, Given) else None
        return Known(text, frozenset([kind]))

    def own_attribute(self, base: Own, name: str, node: ast.AST) -> object:
        path = f"{base.path}.{name}".lstrip(".")
        if not base.path:
            if name == "__class__":
                return Plain(self.reader.kind)
            found = self.reader.members.get(name)
            if isinstance(found, (property, staticmethod, classmethod, FunctionType)):
                return self.of_a_class(self.reader.kind, name, base)
        if name in ATTRIBUTES and base.path:
            if name in CONDITIONAL:
                return Known(None, frozenset([CONDITIONAL[name]]))
            self.reader.source.reads.add(base.path)
            return VALUE
        return Own(path, f"{base.text}.{name}")

    def of_a_class(self, kind: type, name: str, me: Optional[object]) -> object:
        """A method or property as it stands in a class, bound to `me`."""
        found, owner = self.reader.method(name, kind.__mro__)
        if owner is nn.Module:
            raise Refused(f"its forward asks for its {name}")
        if me is not None:
            self.reader.source.methods.add(name)
        if isinstance(found, staticmethod):
            inner = found.__func__
            return Method(inner, owner) if isinstance(inner, FunctionType) else Plain(inner)
        if isinstance(found, classmethod):
            return Method(found.__func__, owner, (Plain(kind),))
        if isinstance(found, property):
            if me is None:
                raise Refused(f"its forward asks for the property {name} of a class")
            self.reader.source.methods.discard(name)
            value = self.reader.interpreted(found.fget, owner, [me], Words({}))
            if isinstance(value, (Closure, Method, Partial)):
                raise Refused(f"its class has an attribute {name}")
            return value
        return Method(found, owner, () if me is None else (me,))

    def plain_attribute(self, base: Plain, name: str, node: ast.AST) -> object:
        home = base.value
        if isinstance(home, ModuleType) and hasattr(home, name):
            place = (home.__dict__, name) if name in home.__dict__ else None
            return Plain(getattr(home, name), place)
        if isinstance(home, type) and issubclass(home, nn.Module):
            found = members_of(home).get(name)
            if isinstance(found, (staticmethod, classmethod, FunctionType)):
                return self.of_a_class(home, name, None)
            if isinstance(found, CONSTANTS) and found is not None:
                _, owner = self.reader.method(name, home.__mro__)
                return Plain(found, (self.reader.space(owner), name))
        if isinstance(home, type) and name in ("__name__", "__qualname__"):
            return VALUE
        return Plain(NotImplemented)  # which nobody can use or call

    def read_Subscript(self, node: ast.Subscript) -> object:
        base = self.expression(node.value)
        index = node.slice
        if isinstance(base, Words):
            word = index.value if isinstance(index, ast.Constant) else None
            return base.values[word] if word in base.values else self.refuse(node)
        if isinstance(base, Plain) and self.is_registry(base):
            self.pin(base)
            self.data(index)
            return ATTENTION
        constant = _constant(index)
        if constant is not None and isinstance(base, Several):
            try:
                found = base.values[constant]
            except IndexError:
                self.refuse(node)
            return Several(found) if isinstance(constant, slice) else found
        if isinstance(base, (Several, Plain, Closure, Method, Partial, Super)):
            self.refuse(node)
        self.use(base, node)
        position = self.data(index)
        if isinstance(base, Known):
            text = None if constant is None else base.text
            return base._replace(text=text and f"{text}[{_spelled(constant)}]")
        self.only_sizes_as_they_are((position,), node)
        return VALUE


def _constant(index: ast.expr) -> object:
    """A number, or a slice between numbers."""
    try:
        if not isinstance(index, ast.Slice):
            return _literal(index)
        return slice(*map(_literal, (index.lower, index.upper, index.step)))
    except ValueError:
        return None


def _spelled(index: object) -> str:
    if not isinstance(index, slice):
        return str(index)
    start, stop, step = ["" if i is None else i for i in (index.start, index.stop, index.step)]
    return f"{start}:{stop}:{step}"


def _literal(node: Optional[ast.expr]) -> Optional[int]:
    value = None if node is None else ast.literal_eval(node)
    if value is not None and not isinstance(value, int):
        raise ValueError(node)
    return value
