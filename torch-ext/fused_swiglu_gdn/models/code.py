"""Reads a forward, and everything that it calls by name, from its source.

A probe runs a forward on stubs and compares numbers: it tells what the forward computes for what
was tried. The reader refuses a forward that could take another way for another input: one that
branches on a value or a size, loops, writes to attributes, or calls an operation that is not in the
lists below. Branches on None and on the module's own attributes are left to the probe; the
attributes are listed in `reads`, since they may change. A condition on shapes that raises where it
does not hold is kept in `checks`: a call that fails there is for the forward itself.
"""

import ast
import functools
import inspect
import linecache
import logging
import sys
import textwrap
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, ModuleType
from typing import Callable, Dict, FrozenSet, Iterable, NamedTuple, NoReturn, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.own_code import codes_in, codes_of, peeled, undispatched
from ..layers.pinned import Pinned, found_at

# of tensors, as methods and as functions of torch: none of them looks at values
OPERATIONS = {
    "add", "bfloat16", "cat", "chunk", "clone", "concat", "contiguous", "dim", "div", "divide",
    "double", "dropout", "exp", "expand", "expand_as", "flatten", "float", "gelu", "half", "matmul",
    "mean", "mul", "multiply", "narrow", "neg", "numel", "permute", "pow", "reciprocal", "relu",
    "repeat_interleave", "reshape", "rsqrt", "select", "sigmoid", "silu", "size",
    "softplus", "split", "sqrt", "square", "squeeze", "stack", "sub", "subtract", "sum", "swapaxes",
    "swapdims", "t", "tanh", "to", "transpose", "true_divide", "type", "type_as", "unbind",
    "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip
# of a cache and of the registry of attention functions
METHODS = OPERATIONS | {"get_interface", "update"}
FUNCTIONS = tuple(
    function for home in (torch, F) for name in sorted(OPERATIONS)
    for function in [getattr(home, name, None)] if function is not None
)  # fmt: skip
ATTRIBUTES = {"device", "dtype", "mT", "ndim", "shape", "T"}
BUILTINS = {
    "bool": bool, "float": float, "getattr": getattr, "hasattr": hasattr, "int": int,
    "isinstance": isinstance, "len": len, "list": list, "tuple": tuple,
}  # fmt: skip
PLAIN_VALUES = (bool, int, float, str)
EXPRESSIONS = (
    ast.Attribute, ast.BinOp, ast.Call, ast.Constant, ast.Dict, ast.IfExp, ast.List, ast.Name,
    ast.Slice, ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp,
)  # fmt: skip
# what a condition on shapes may consist of, beside names and constants
CONDITIONS = (
    ast.And, ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant, ast.Load,
    ast.Name, ast.Not, ast.Or, ast.Slice, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.cmpop,
    ast.operator, ast.unaryop, ast.boolop,
)  # fmt: skip


class Refused(Exception):
    """A forward, or a module, is of no known form; the message says why."""


class Source(NamedTuple):
    """A forward whose source is known, with all that it calls by name."""

    forward: FunctionType  # without decorators
    definition: ast.FunctionDef
    pinned: Pinned  # what a patch could replace
    reads: Tuple[str, ...]  # the module's attributes by their paths: "head_dim", "config.use_rope"
    parts: Tuple[str, ...]  # what it calls of the module
    globals: dict
    renamed: FrozenSet[str]  # keywords with which a call is for the class's own forward
    extra: Tuple[str, ...]  # keywords that it takes out of its **kwargs
    switches: FrozenSet[str]  # arguments that it branches on: known at their defaults alone
    checks: Tuple[Callable, ...]  # (module, arguments by name) -> whether the forward raises not
    rates: Tuple[str, ...]  # attributes that are the rate of a dropout
    by_dtype: bool  # it compares dtypes


_sources: Dict[type, Source] = {}


def read(kind: type, module: nn.Module, *allowed: str) -> Source:
    """The source of the forward of a module of this class; raises Refused. `allowed`: "switches",
    "by_dtype", for a kind that minds them."""
    known = _sources.get(kind)
    if known is None or not known.pinned.unchanged():
        known = _sources[kind] = _read(kind)
    if not known.pinned.unchanged(module):
        raise Refused("it has methods of its own, which its class has not")
    if known.switches and "switches" not in allowed:
        raise Refused(f"its forward branches on {', '.join(sorted(known.switches))}")
    if known.by_dtype and "by_dtype" not in allowed:
        raise Refused("its forward branches on a dtype")
    return known


def _read(kind: type) -> Source:
    reader = _Reader(kind)
    forward, base = reader.method("forward", kind.__mro__)
    plain = reader.bare(forward)
    definition = reader.function(plain, (base.__dict__, "forward", forward), "self", base)
    pinned = Pinned(tuple(reader.names), tuple(reader.codes), tuple(sorted(reader.methods)))
    return Source(
        plain, definition, pinned, tuple(sorted(reader.reads)), tuple(sorted(reader.parts)),
        plain.__globals__, frozenset(reader.renamed), tuple(sorted(reader.extra)),
        frozenset(reader.switches), tuple(reader.checks), tuple(sorted(reader.rates)),
        reader.by_dtype,
    )  # fmt: skip


def only_argument(source: Source) -> str:
    """The name of the one argument that a forward has to be given."""
    known = list(inspect.signature(source.forward).parameters.values())[1:]
    needed = [p for p in known if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(needed) != 1 or needed[0].kind not in positional or needed[0] is not known[0]:
        raise Refused("its forward takes other arguments than one tensor")
    if needed[0].name in source.switches:
        raise Refused(f"its forward branches on {needed[0].name}")
    return needed[0].name


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


def source_of(function: object, free: Tuple[str, ...] = ()) -> ast.FunctionDef:
    """The syntax tree of a function, if its code is what its file compiles to; `free`: the free
    variables that it may have."""
    if type(function) is not FunctionType:
        raise Refused(f"its forward is a {type(function).__name__}, not a function")
    code = function.__code__
    if not set(code.co_freevars) <= set(free):
        where = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
        raise Refused(f"its forward is wrapped by {code.co_name} in {where}")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        raise Refused("its forward has no source to read") from None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise Refused("its forward has no source to read")
    if code not in _codes_around(function):
        raise Refused("its forward is not what its source says")
    definition.decorator_list = []  # decorated or not: it is the code that runs which is compared
    return definition


def _codes_around(function: FunctionType) -> frozenset:
    """Every code object in the file of a function."""
    module, file = function.__globals__.get("__name__"), function.__code__.co_filename
    known = sys.modules.get(module)
    if known is not None and getattr(known, "__file__", None) == file:
        codes = codes_of(module)
        if codes:
            return codes
    return _codes_of_text("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=64)
def _codes_of_text(text: str) -> frozenset:
    try:
        return frozenset(codes_in(compile(text, "<file>", "exec", dont_inherit=True)))
    except SyntaxError:
        return frozenset()


def spelled(definition: ast.FunctionDef) -> str:
    """The statements of a function in Python's own spelling, without a docstring."""
    statements = definition.body
    if isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant):
        statements = statements[1:]
    return "\n".join(ast.unparse(statement) for statement in statements)


class _Reader:
    """All functions that a class's forward consists of."""

    def __init__(self, kind: type):
        self.kind, self.names, self.codes, self.checks = kind, [], [], []
        self.reads, self.parts, self.methods, self.rates = set(), set(), set(), set()
        self.renamed, self.extra, self.switches = set(), set(), set()
        self.seen: set = set()
        self.by_dtype = False

    def method(self, name: str, bases: Iterable[type]) -> Tuple[object, type]:
        """A method as it stands in the first class that has it, and that class."""
        for base in bases:
            if name in base.__dict__:
                return base.__dict__[name], base
            self.names.append((base.__dict__, name, None))
        raise Refused(f"its class has no {name}")

    def bare(self, function: object) -> object:
        """A function without decorators that pass a call on as it is."""
        while True:
            found = peeled(function)
            self.renamed |= found.renamed
            inner = _passed_on(self, found.forward)
            if inner is None:
                return found.forward
            function = inner

    def function(
        self, function: object, place: tuple, me: Optional[str], owner: Optional[type]
    ) -> Optional[ast.FunctionDef]:
        """Reads a function that stands at `place`: (namespace, name, value). `me` is "self" for a
        method, or the name of the argument that is the module; `owner` is the class that has it."""
        self.names.append(place)
        if (function, me) in self.seen:
            return None
        definition = source_of(function, ("__class__",) if owner is not None else ())
        if function.__code__.co_freevars and function.__closure__[0].cell_contents is not owner:
            raise Refused("its forward calls super() of another class")
        main = not self.seen
        self.seen.add((function, me))
        self.codes.append((function, function.__code__))
        if me == "self":
            arguments = [*definition.args.posonlyargs, *definition.args.args]
            me = arguments[0].arg if arguments else None
        _Body(self, function, definition, me, owner, main).look()
        return definition


def _passed_on(reader: _Reader, wrapper: object) -> Optional[FunctionType]:
    """The function that a wrapper calls with all that it is given, if it does no more than that but
    for keywords that it knows by constant names; None if it is no wrapper."""
    code = getattr(wrapper, "__code__", None)
    if type(wrapper) is not FunctionType or set(code.co_freevars) <= {"__class__"}:
        return None
    cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in wrapper.__closure__)))
    functions = [name for name, value in cells.items() if isinstance(value, FunctionType)]
    definition = source_of(wrapper, code.co_freevars)
    where = f"{code.co_name} in {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
    given = definition.args
    own = [argument.arg for argument in given.args]
    if len(functions) != 1 or given.kwonlyargs or given.posonlyargs or not given.vararg:
        raise Refused(f"its forward is wrapped by {where}")
    if own not in ([], ["self"]) or given.defaults or not given.kwarg:
        raise Refused(f"its forward is wrapped by {where}")
    passing = f"{functions[0]}({', '.join([*own, f'*{given.vararg.arg}', f'**{given.kwarg.arg}'])})"
    result = None
    for statement in definition.body:
        if _is_text(statement) or _logs(statement, wrapper.__globals__):
            continue
        if isinstance(statement, ast.If):
            old = _keyword_tested(statement.test, given.kwarg.arg, cells)
            if old is not None and not statement.orelse:
                reader.renamed.add(old)  # such calls are for the forward itself
                continue
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == passing:
            target = statement.targets[0]
            if result is None and isinstance(target, ast.Name) and len(statement.targets) == 1:
                result = target.id
                continue
        if isinstance(statement, ast.Return) and statement.value is not None:
            if ast.unparse(statement.value) in (passing if result is None else result,):
                reader.names.append((_Cell(wrapper, functions[0]), "", cells[functions[0]]))
                reader.codes.append((wrapper, code))
                return cells[functions[0]]
        break
    raise Refused(f"its forward is wrapped by {where}")


class _Cell:
    """A free variable of a function as a namespace of Pinned."""

    def __init__(self, function: FunctionType, name: str):
        self.cell = function.__closure__[function.__code__.co_freevars.index(name)]

    def get(self, _):
        return self.cell.cell_contents


def _keyword_tested(test: ast.expr, kwargs: str, known: dict) -> Optional[str]:
    """ "old" of `"old" in kwargs`, alone or first of an `and`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        test = test.values[0]
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.In):
        return None
    if len(test.ops) > 1 or ast.unparse(test.comparators[0]) != kwargs:
        return None
    word = test.left.value if isinstance(test.left, ast.Constant) else None
    if isinstance(test.left, ast.Name):
        word = known.get(test.left.id)
    return word if isinstance(word, str) else None


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _logs(statement: ast.stmt, names: dict) -> bool:
    """It calls a method of a logger, or warnings.warn, and no more."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value
    value = names.get(owner.id) if isinstance(owner, ast.Name) else None
    warns = value is sys.modules.get("warnings") and call.func.attr == "warn"
    if not (isinstance(value, logging.Logger) or warns):
        return False
    calls = [node for node in ast.walk(call) if isinstance(node, (ast.Call, ast.NamedExpr))]
    return all(
        node is call or isinstance(node, ast.Call) and ast.unparse(node.func) in ("type", "tuple")
        for node in calls
    )


class _Body:
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
        self.constant = self.given - set(stored)  # arguments that keep their value
        self.interfaces = set()  # local names that hold an attention function
        self.aliases: Dict[str, str] = {}  # local names of the module's attributes, by their paths
        self.shapes: Dict[str, ast.expr] = {}  # local names of sizes, by what they are

    def refuse(self, node: ast.AST) -> NoReturn:
        text = ast.unparse(node).split("\n")[0]
        raise Refused(f"its forward has `{text if len(text) < 60 else text[:57] + '...'}`")

    def look(self) -> None:
        for default in [*self.definition.args.defaults, *self.definition.args.kw_defaults]:
            if default is not None and not _is_constant(default):
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
            self.expression(node.value)
        elif isinstance(node, ast.Return):
            if node.value is not None:
                self.expression(node.value)
        elif isinstance(node, ast.Delete):
            if not all(isinstance(t, ast.Name) and t.id != self.me for t in node.targets):
                self.refuse(node)
        elif isinstance(node, ast.Expr):
            if self.taken_out(node.value):
                return
            if not (_is_text(node) or _logs(node, self.function.__globals__)):
                self.refuse(node)
        elif not isinstance(node, ast.Pass):
            self.refuse(node)

    def branch(self, node: ast.If) -> None:
        old = self.kwargs and _keyword_tested(node.test, self.kwargs, {})
        if old:  # a call with this keyword is for the forward itself
            self.reader.renamed.add(old)
        elif len(node.body) == 1 and isinstance(node.body[0], ast.Raise) and not node.orelse:
            self.check(ast.UnaryOp(ast.Not(), node.test), node)
            return
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
        if _calls(value, "get_interface"):
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
            if target.id in self.once and self.is_condition(value):
                self.shapes[target.id] = value
        elif isinstance(target, ast.Tuple) and self.is_condition(value):
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
        if not self.main or not self.is_condition(test):
            self.refuse(node)
        test = _Inlined(self).visit(_copy(test))
        self.reader.checks.append(_compiled(test, self.me, defaults_of(self.function)))

    def is_condition(self, node: ast.expr) -> bool:
        """Made of sizes, dtypes, constants, None and the module's own attributes alone."""
        for each in ast.walk(node):
            if not isinstance(each, CONDITIONS):
                return False
            if isinstance(each, ast.Name):
                known = each.id in self.constant or each.id in self.shapes or each.id == self.me
                if not known and each.id not in ("isinstance", "len", "torch", "tuple", "int"):
                    return False
                if not known and self.found(each.id) is not _NAMES[each.id]:
                    return False
            if isinstance(each, ast.Attribute) and self.path(each) is None:
                dtype = ast.unparse(each.value) == "torch"
                if each.attr not in ATTRIBUTES | {"dim", "size"} and not dtype:
                    return False
            if isinstance(each, ast.Call):
                name = ast.unparse(each.func).rsplit(".", 1)[-1]
                if name not in ("dim", "size", "isinstance", "len", "tuple", "int"):
                    return False
        for each in ast.walk(node):
            path = self.path(each) if isinstance(each, ast.Attribute) else None
            if path is not None:
                self.reader.reads.add(path)
        return True

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
        elif not (_is_constant(node) or self.is_getattr(node) or self.is_dtype(node)):
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
        if not all(_is_constant(d) or self.path(d) for d in default):
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
            if node.attr not in ATTRIBUTES:
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

    # -- calls

    def call(self, node: ast.Call) -> None:
        if self.is_getattr(node) or self.taken_out(node):
            return
        takes_me = self.callee(node)
        attends = isinstance(node.func, ast.Name) and node.func.id in self.interfaces
        for i, argument in enumerate([*node.args, *(k.value for k in node.keywords)]):
            name = argument.id if isinstance(argument, ast.Name) else None
            if name is not None and name == self.me and (takes_me or attends and i == 0):
                continue  # attention functions get the module, and helpers may
            if _calls(node, "get_interface") and isinstance(self.found(name), FunctionType):
                place = (self.function.__globals__, name, self.found(name))
                self.reader.names.append(place)
                continue
            self.expression(argument)

    def callee(self, node: ast.Call) -> bool:
        """What is called is known: a part, a listed method or function, or one that is read too.
        Returns whether it takes the module."""
        function = node.func
        if isinstance(function, ast.Name):
            return self.by_name(node, function.id)
        if not isinstance(function, ast.Attribute):
            self.refuse(node)
        path, name = self.path(function), function.attr
        if path is not None and path == name:
            self.of_the_module(node, name)
        elif self.is_super(function.value):
            self.of_the_bases(name)
        elif _root(function) in self.local or not isinstance(
            function.value, (ast.Name, ast.Attribute)
        ):
            if name not in METHODS:
                self.refuse(node)
            self.expression(function.value)
        elif not self.is_registry(function):
            return self.in_a_module(node)
        return False

    def is_super(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call) or node.args or node.keywords or self.owner is None:
            return False
        called = isinstance(node.func, ast.Name) and node.func.id == "super"
        return called and "super" not in self.local and self.found("super") is super

    def of_the_bases(self, name: str) -> None:
        """super().name(...)"""
        order = self.reader.kind.__mro__
        method, base = self.reader.method(name, order[order.index(self.owner) + 1 :])
        self.reader.function(self.reader.bare(method), (base.__dict__, name, method), "self", base)

    def by_name(self, node: ast.Call, name: str) -> bool:
        if name in self.aliases:
            path = self.aliases[name]
            if "." in path:
                self.refuse(node)
            self.of_the_module(node, path)
            return False
        if name in self.local:
            if name not in self.interfaces:
                self.refuse(node)
            return False
        if name in BUILTINS and self.is_builtin(node.func, name):
            return False
        return self.known_function(node, self.function.__globals__, name, self.found(name))

    def known_function(self, node: ast.Call, namespace: dict, name: str, value: object) -> bool:
        """A listed function of torch, or one that is read; returns whether it takes the module."""
        if any(value is function for function in FUNCTIONS) and self.is_torchs(value):
            self.reader.names.append((namespace, name, value))
            if value is F.dropout:
                self.dropout(node)
            return False
        plain = self.reader.bare(undispatched(value))
        if not isinstance(plain, FunctionType):
            self.refuse(node)
        me = self.module_among(node, plain)
        self.reader.function(plain, (namespace, name, value), me, None)
        return me is not None

    @staticmethod
    def is_torchs(value: object) -> bool:
        if isinstance(value, (BuiltinFunctionType, BuiltinMethodType)):
            return True
        return getattr(value, "__module__", "").split(".")[0] == "torch"

    def module_among(self, node: ast.Call, function: FunctionType) -> Optional[str]:
        """The name of the function's argument that is the module."""
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        for name, argument in zip(names, node.args):
            if isinstance(argument, ast.Name) and argument.id == self.me and self.me is not None:
                return name
        for keyword in node.keywords:
            value = keyword.value
            if isinstance(value, ast.Name) and value.id == self.me and self.me is not None:
                return keyword.arg
        return None

    def dropout(self, node: ast.Call) -> None:
        """F.dropout(value, p=self.rate, training=self.training)"""
        given = dict(zip(("input", "p", "training"), node.args))
        given.update({keyword.arg: keyword.value for keyword in node.keywords})
        rate = self.path(given.get("p")) if "p" in given else None
        if set(given) != {"input", "p", "training"} or rate is None:
            self.refuse(node)
        if self.path(given["training"]) != "training":
            self.refuse(node)
        self.reader.rates.add(rate)

    def of_the_module(self, node: ast.Call, name: str) -> None:
        """self.name(...): a method of the class, or a part."""
        if not any(name in base.__dict__ for base in self.reader.kind.__mro__):
            self.reader.parts.add(name)
            return
        self.reader.methods.add(name)
        method, base = self.reader.method(name, self.reader.kind.__mro__)
        if base is nn.Module:
            self.refuse(node)
        if not isinstance(method, (FunctionType, staticmethod)):
            raise Refused(f"its class has an attribute {name}")
        place, me = (base.__dict__, name, method), "self"
        if isinstance(method, staticmethod):
            method = method.__func__
            me = self.module_among(node, method) if isinstance(method, FunctionType) else None
        self.reader.function(self.reader.bare(method), place, me, base)

    def is_registry(self, function: ast.Attribute) -> bool:
        """ALL_ATTENTION_FUNCTIONS.get_interface"""
        if function.attr != "get_interface" or not isinstance(function.value, ast.Name):
            return False
        registry = self.found(function.value.id)
        place = (self.function.__globals__, function.value.id, registry)
        self.reader.names.append(place)
        library = sys.modules.get("transformers.modeling_utils")
        return registry is getattr(library, "ALL_ATTENTION_FUNCTIONS", NotImplemented)

    def in_a_module(self, node: ast.Call) -> bool:
        """torch.nn.functional.silu(...), helpers.rotate(...)"""
        root, *names = ast.unparse(node.func).split(".")
        known, namespace = self.found(root), {}
        for name in names:
            namespace = known.__dict__ if isinstance(known, ModuleType) else {}
            known = namespace.get(name)
        if known is None:
            self.refuse(node)
        return self.known_function(node, namespace, names[-1], known)


_NAMES = {"isinstance": isinstance, "len": len, "torch": torch, "tuple": tuple, "int": int}


class _Inlined(ast.NodeTransformer):
    """Puts what names of sizes stand for in their place."""

    def __init__(self, body: _Body):
        self.body = body

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = self.body.shapes.get(node.id)
        return node if known is None else self.visit(_copy(known))


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def defaults_of(function: FunctionType) -> dict:
    """The arguments of a function that have a default, with it."""
    known = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in known if p.default is not p.empty}


def _compiled(test: ast.expr, me: Optional[str], defaults: dict) -> Callable:
    """(module, arguments by name) -> whether the condition holds; it does not where it cannot be
    told."""
    code = compile(ast.fix_missing_locations(ast.Expression(test)), "<check>", "eval")

    def holds(module: nn.Module, given: dict) -> bool:
        try:
            return bool(eval(code, dict(_NAMES), {**defaults, **given, me or "self": module}))
        except Exception:
            return False

    return holds


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(map(_is_constant, node.elts))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant)


def _calls(node: ast.AST, method: str) -> bool:
    """`node` is a call of a method of this name."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return called and node.func.attr == method


def _root(node: ast.expr) -> Optional[str]:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
