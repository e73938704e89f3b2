"""What a forward is made of, read from its source, so that a trial of it says all there is to say.

A trial runs a forward on stand-ins and compares numbers: it tells what the forward computes for
what was tried. Here the source is read, with the functions and methods that it calls by name, and
refused where another input could take another way: a branch on a value or a size, a loop, an
operation that is not in the lists below. Branches on None and on the module's own attributes are
left to the trial; the attributes are listed in `reads`, since they may change.
"""

import ast
import sys
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, ModuleType
from typing import Dict, FrozenSet, Iterable, NamedTuple, NoReturn, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.own_code import peeled, undispatched
from ..layers.pinned import Pinned, found_at
from .forms import Refused, source_of

# of tensors; those of a cache and of the registry of attention functions
METHODS = {
    "chunk", "contiguous", "expand", "flatten", "float", "mean", "mul", "permute", "pow",
    "repeat_interleave", "reshape", "rsqrt", "sigmoid", "size", "split", "sqrt", "square",
    "squeeze", "to", "transpose", "type_as", "unflatten", "unsqueeze", "view",
} | {"get_interface", "update"}  # fmt: skip
FUNCTIONS = (
    torch.cat, torch.chunk, torch.mean, torch.mul, torch.pow, torch.rsqrt, torch.sigmoid,
    torch.split, torch.sqrt, torch.square, torch.stack, F.sigmoid,
)  # fmt: skip
ATTRIBUTES = {"device", "dtype", "ndim", "shape"}
BUILTINS = {"getattr": getattr, "hasattr": hasattr, "int": int, "isinstance": isinstance}
PLAIN_VALUES = (bool, int, float, str)
STATEMENTS = (ast.AnnAssign, ast.Assign, ast.Expr, ast.If, ast.Pass, ast.Return)
EXPRESSIONS = (
    ast.Attribute, ast.BinOp, ast.Call, ast.Constant, ast.Dict, ast.IfExp, ast.Name, ast.Slice,
    ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.List,
)  # fmt: skip


class Source(NamedTuple):
    """A forward whose source is known, with all that it calls by name."""

    forward: FunctionType
    definition: ast.FunctionDef
    pinned: Pinned  # what a patch could replace
    reads: Tuple[str, ...]  # the module's attributes by their paths: "head_dim", "config.use_rope"
    parts: Tuple[str, ...]  # what it calls of the module
    globals: dict
    renamed: FrozenSet[str]  # keywords that a decorator takes for others


_sources: Dict[type, Source] = {}


def read(kind: type, module: nn.Module) -> Source:
    """The source of the forward of a module of this class; raises Refused."""
    known = _sources.get(kind)
    if known is None or not known.pinned.unchanged():
        known = _sources[kind] = _read(kind)
    if not known.pinned.unchanged(module):
        raise Refused("it has methods of its own, which its class has not")
    return known


def _read(kind: type) -> Source:
    reader = _Reader(kind)
    forward, namespace = reader.method("forward")
    plain, _, renamed = peeled(forward)
    definition = reader.function(plain, (namespace, "forward", forward))
    pinned = Pinned(tuple(reader.names), tuple(reader.codes), tuple(sorted(reader.methods)))
    reads, parts = tuple(sorted(reader.reads)), tuple(sorted(reader.parts))
    return Source(plain, definition, pinned, reads, parts, plain.__globals__, renamed)


def plain_values(module: nn.Module, reads: Iterable[str]) -> dict:
    """The values of those attributes that are numbers, words, flags or None, by their paths."""
    values = {}
    for path in sorted(reads):
        value = found_at(module, path)
        if value is None or isinstance(value, PLAIN_VALUES):
            values[path] = value
    return values


def form_key(module: nn.Module, kind: type, source: Source, values: dict) -> tuple:
    """What the forms that are remembered are told apart by, beside a module's parts."""
    hidden = tuple(name for name in source.parts if name in module.__dict__)
    return kind, source.pinned.codes, tuple((n, type(v), v) for n, v in values.items()), hidden


# what nn.Module has for calling a module and for finding its parts
MACHINERY = (
    "__getattr__", "__getattribute__", "__dict__", "_call_impl", "_wrapped_call_impl",
    "_slow_forward",
)  # fmt: skip


def static(kind: type, name: str) -> object:
    """A class's attribute as it stands there, found without running any code of the class."""
    return next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), None)


def why_odd_class(kind: type, names: Iterable[str], *more: str) -> Optional[str]:
    """The class has some of MACHINERY, or `more` of it, of its own, or attributes that would hide
    those of a module by these names."""
    for name in (*more, *MACHINERY):
        if static(kind, name) is not static(nn.Module, name):
            return f"its class has a {name} of its own"
    for name in names:
        if static(kind, name) is not None:
            return f"its class has an attribute {name}"
    return None


def why_odd_module(module: nn.Module, kind: type, source: Source, names, *more) -> Optional[str]:
    """The class is odd, or the forward calls what is no part."""
    reason = why_odd_class(kind, names, *more)
    if reason is not None:
        return reason
    for name in source.parts:
        if name in module.__dict__:
            return f"{name} is no module of its own"
    return None


class _Reader:
    def __init__(self, kind: type):
        self.kind, self.names, self.codes = kind, [], []
        self.reads, self.parts, self.methods = set(), set(), set()

    def method(self, name: str):
        for base in self.kind.__mro__:
            if name in base.__dict__:
                return base.__dict__[name], base.__dict__
            self.names.append((base.__dict__, name, None))
        raise Refused(f"its class has no {name}")

    def function(self, function, place: tuple) -> ast.FunctionDef:
        """Reads a function that stands at `place`: (namespace, name, value)."""
        self.names.append(place)
        if any(function is known for known, _ in self.codes):
            return None
        definition = source_of(function)
        self.codes.append((function, function.__code__))
        _Body(self, function, definition).look()
        return definition


class _Body:
    """One function's body."""

    def __init__(self, reader: _Reader, function: FunctionType, definition: ast.FunctionDef):
        self.reader, self.function, self.definition = reader, function, definition
        taken = [*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs]
        names = [argument.arg for argument in taken]
        rest = [definition.args.vararg, definition.args.kwarg]
        self.me = names[0] if names[:1] == ["self"] else None
        self.local = {*names, *(argument.arg for argument in rest if argument is not None)}
        for node in ast.walk(definition):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.local.add(node.id)
        self.interfaces = set()  # local names that hold an attention function

    def refuse(self, node: ast.AST) -> NoReturn:
        text = ast.unparse(node).split("\n")[0]
        raise Refused(f"its forward has `{text if len(text) < 60 else text[:57] + '...'}`")

    def look(self) -> None:
        for default in [*self.definition.args.defaults, *self.definition.args.kw_defaults]:
            if default is not None and not isinstance(default, ast.Constant):
                self.refuse(default)
        for statement in self.definition.body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if not isinstance(node, STATEMENTS):
            self.refuse(node)
        if isinstance(node, ast.If):
            self.test(node.test)
            for inner in [*node.body, *node.orelse]:
                self.statement(inner)
            return
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not all(self.is_target(target) for target in targets):
                self.refuse(node)
            if _calls(node.value, "get_interface"):
                self.interfaces |= {t.id for t in targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            self.refuse(node)
        if getattr(node, "value", None) is not None:
            self.expression(node.value)

    def is_target(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple):
            return all(self.is_target(element) for element in node.elts)
        return isinstance(node, ast.Name) and node.id != self.me

    def path(self, node: ast.expr) -> Optional[str]:
        """ "config.use_rope" of self.config.use_rope."""
        names = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        mine = isinstance(node, ast.Name) and node.id == self.me and self.me is not None
        return ".".join(names) if mine and names else None

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
                self.own(side)
        elif isinstance(node, ast.Call) and self.is_builtin(node.func, "isinstance"):
            if not isinstance(node.args[0], ast.Name):
                self.refuse(node)
        else:
            self.own(node)

    def own(self, node: ast.expr) -> None:
        """A constant, an attribute of the module, or getattr(self, "name", constant)."""
        if isinstance(node, (ast.Tuple, ast.List)):
            for element in node.elts:
                self.own(element)
        elif self.path(node) is not None:
            self.reader.reads.add(self.path(node))
        elif not isinstance(node, ast.Constant) and not self.is_getattr(node):
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
        if not all(isinstance(d, ast.Constant) or self.path(d) for d in default):
            return False
        self.reader.reads.add(f"{mine}.{name.value}".lstrip("."))
        self.reader.reads |= {self.path(d) for d in default if self.path(d)}
        return True

    def found(self, name: str) -> object:
        names = self.function.__globals__
        builtins = names.get("__builtins__", {})
        builtins = getattr(builtins, "__dict__", builtins)
        return names.get(name, builtins.get(name, NotImplemented))

    def expression(self, node: ast.expr) -> None:
        if not isinstance(node, EXPRESSIONS):
            self.refuse(node)
        if isinstance(node, ast.Attribute):
            self.attribute(node)
        elif isinstance(node, ast.Call):
            self.call(node)
        elif isinstance(node, ast.IfExp):
            self.test(node.test)
            self.expression(node.body)
            self.expression(node.orelse)
        elif isinstance(node, ast.Name):
            if node.id not in self.local or node.id == self.me:
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
            if node.attr not in ATTRIBUTES:
                self.refuse(node)
            self.expression(node.value)

    def is_dtype(self, node: ast.Attribute) -> bool:
        """torch.float32"""
        if not (isinstance(node.value, ast.Name) and node.value.id not in self.local):
            return False
        value = getattr(torch, node.attr, None)
        return self.found(node.value.id) is torch and isinstance(value, torch.dtype)

    def call(self, node: ast.Call) -> None:
        if self.is_getattr(node):
            return
        self.callee(node)
        attends = isinstance(node.func, ast.Name) and node.func.id in self.interfaces
        for i, argument in enumerate([*node.args, *(k.value for k in node.keywords)]):
            name = argument.id if isinstance(argument, ast.Name) else None
            if attends and i == 0 and name == self.me:
                continue  # attention functions get the module
            if _calls(node, "get_interface") and isinstance(self.found(name), FunctionType):
                place = (self.function.__globals__, name, self.found(name))
                self.reader.names.append(place)
                continue
            self.expression(argument)

    def callee(self, node: ast.Call) -> None:
        """What is called is known: a part, a listed method or function, or one that is read too."""
        function = node.func
        if isinstance(function, ast.Name):
            self.by_name(node, function.id)
            return
        if not isinstance(function, ast.Attribute):
            self.refuse(node)
        path, name = self.path(function), function.attr
        if path == name:
            self.of_the_module(name)
        elif _root(function) in self.local or not isinstance(
            function.value, (ast.Name, ast.Attribute)
        ):
            if name not in METHODS:
                self.refuse(node)
            self.expression(function.value)
        elif not self.is_registry(function):
            self.torch_function(node)

    def by_name(self, node: ast.Call, name: str) -> None:
        if name in self.local:
            if name not in self.interfaces:
                self.refuse(node)
        elif not (name in BUILTINS and self.is_builtin(node.func, name)):
            value = self.found(name)
            plain = undispatched(value)
            if not isinstance(plain, FunctionType):
                self.refuse(node)
            self.reader.function(plain, (self.function.__globals__, name, value))

    def of_the_module(self, name: str) -> None:
        """self.name(...): a method of the class, or a part."""
        if any(name in base.__dict__ for base in self.reader.kind.__mro__):
            self.reader.methods.add(name)
            method, namespace = self.reader.method(name)
            self.reader.function(method, (namespace, name, method))
        else:
            self.reader.parts.add(name)

    def is_registry(self, function: ast.Attribute) -> bool:
        """ALL_ATTENTION_FUNCTIONS.get_interface"""
        if function.attr != "get_interface" or not isinstance(function.value, ast.Name):
            return False
        registry = self.found(function.value.id)
        place = (self.function.__globals__, function.value.id, registry)
        self.reader.names.append(place)
        library = sys.modules.get("transformers.modeling_utils")
        return registry is getattr(library, "ALL_ATTENTION_FUNCTIONS", NotImplemented)

    def torch_function(self, node: ast.Call) -> None:
        root, *names = ast.unparse(node.func).split(".")
        known = self.found(root)
        for name in names:
            known = known.__dict__.get(name) if isinstance(known, ModuleType) else None
        if not any(known is function for function in FUNCTIONS):
            self.refuse(node)
        if not isinstance(known, (BuiltinFunctionType, BuiltinMethodType)):
            if getattr(known, "__module__", "").split(".")[0] != "torch":
                self.refuse(node)


def _calls(node: ast.AST, method: str) -> bool:
    """`node` is a call of a method of this name."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return called and node.func.attr == method


def _root(node: ast.expr) -> Optional[str]:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
