"""The formula of a gated MLP, read from the source of its forward.

The forward is followed statement by statement with symbols for values, so that names, temporaries
and the order of factors do not matter. Only what a gated MLP needs has a symbol: everything else,
a clamp, a branch, a scale, a further argument, is refused with the line that has it.

Symbols: ("x",); ("part", name) is self.name; ("call", name, v) is self.name(v); ("halves", v) and
("half", v, i); ("act", function, v); ("dropout", name of p, v); ("cast", name, v);
("product", v, w).
"""

import ast
import inspect
from types import CodeType, FunctionType, ModuleType
from typing import Dict, Iterator, List, NamedTuple, NoReturn, Optional, Tuple

import torch
import torch.nn.functional as F


class Refused(Exception):
    """The forward is no known form of a gated MLP; the message says why."""


class Formula(NamedTuple):
    """down(act(gate(x)) * up(x)) with the names of the attributes, and what stands between."""

    argument: str
    gate: str
    up: Optional[str]  # None: gate makes both halves
    act: Optional[str]
    function: Optional[str]  # the activation that the forward names itself, where act is None
    gate_first: bool
    calls: Tuple[str, ...]  # called one after another on the product: down, and dropouts
    rates: Tuple[str, ...]  # attributes that are the p of a call of dropout
    casts: Tuple[str, ...]  # the product is cast to the dtype of this module's weight


# T5 casts the product, since its last projection may be kept in fp32
_CAST = (
    "isinstance(self.{m}.weight, torch.Tensor) and {v}.dtype != self.{m}.weight.dtype"
    " and self.{m}.weight.dtype != torch.int8"
)
_CODE = ("co_code", "co_names", "co_varnames", "co_argcount", "co_kwonlyargcount", "co_freevars")


def formula_of(function: object) -> Formula:
    """The formula of a class's forward; raises Refused."""
    definition = source_of(function)
    arguments = definition.args
    names = [a.arg for a in arguments.args]
    others = (arguments.vararg, arguments.kwarg, *arguments.kwonlyargs, *arguments.posonlyargs)
    defaults = function.__defaults__ or function.__kwdefaults__
    if len(names) != 2 or any(others) or defaults:
        raise Refused("its forward takes other arguments than one tensor")
    reader = _Reader(*names, function.__globals__)
    return _as_formula(names[1], reader.result(definition.body), reader.calls)


def source_of(function: object) -> ast.FunctionDef:
    """The syntax tree of a function, if its code is what that compiles to."""
    if type(function) is not FunctionType:
        raise Refused(f"its forward is a {type(function).__name__}, not a function")
    if function.__code__.co_freevars:
        raise Refused("its forward uses variables of another function, as one that wraps another")
    try:
        source = inspect.getsource(function.__code__)
        tree = ast.parse("if 1:\n" + source if source[:1].isspace() else source)
    except (OSError, TypeError, SyntaxError):
        raise Refused("its forward has no source to read") from None
    definition = tree.body[0].body[0] if isinstance(tree.body[0], ast.If) else tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise Refused("its forward has no source to read")
    definition.decorator_list = []  # decorated or not: it is the code that runs which is compared
    code = function.__code__
    if not any(_same_code(c, code) for c in _compiled(tree, code, function.__globals__)):
        raise Refused("its forward is not what its source says")
    return definition


def spelled(definition: ast.FunctionDef) -> str:
    """The statements of a function in Python's own spelling, without a docstring."""
    statements = definition.body
    if isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant):
        statements = statements[1:]
    return "\n".join(ast.unparse(statement) for statement in statements)


def _compiled(tree: ast.Module, code: CodeType, names: dict) -> Iterator[CodeType]:
    """The code of a function's source, as it is in a module that imports what it uses, or not.

    Python compiles calls on imported names in a way of their own.
    """
    modules = [n for n in code.co_names if isinstance(names.get(n), ModuleType)]
    here = names.get("__name__")
    others = [n for n in code.co_names if n in names and _home(names[n]) != here]
    for imported in {(), tuple(modules), tuple(others)}:
        prefix = f"import {', '.join(imported)}" if imported else ""
        whole = ast.Module([*ast.parse(prefix).body, *tree.body], type_ignores=[])
        compiled = compile(whole, "<forward>", "exec", dont_inherit=True)
        yield from (c for c in compiled.co_consts if isinstance(c, CodeType))


def _home(value: object) -> object:
    """The module that a value, or its class, is of."""
    return getattr(value, "__module__", None) or type(value).__module__


def _same_code(a: CodeType, b: CodeType) -> bool:
    def constants(code):
        return [(type(c), c) for c in code.co_consts]

    return constants(a) == constants(b) and all(getattr(a, n) == getattr(b, n) for n in _CODE)


class _Reader:
    """Follows the statements of a forward."""

    def __init__(self, me: str, x: str, names: dict):
        self.me, self.globals = me, names
        self.values: Dict[str, tuple] = {x: ("x",)}
        self.calls: List[tuple] = []

    def refuse(self, node: ast.AST) -> NoReturn:
        text = ast.unparse(node).split("\n")[0]
        raise Refused(f"its forward has `{text if len(text) < 60 else text[:57] + '...'}`")

    def result(self, body: List[ast.stmt]) -> tuple:
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self.value(statement.value)
            self.step(statement)
        raise Refused("its forward returns nothing")

    def step(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self.assign(statement.targets[0], self.value(statement.value))
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self.assign(statement.target, self.value(statement.value))
        elif isinstance(statement, ast.If):
            self.cast(statement)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            self.refuse(statement)  # no docstring either

    def assign(self, target: ast.expr, value: tuple) -> None:
        if isinstance(target, ast.Name) and target.id != self.me:
            self.values[target.id] = value
        elif isinstance(target, ast.Tuple) and value[0] == "halves" and len(target.elts) == 2:
            for i, name in enumerate(target.elts):
                self.assign(name, ("half", value[1], i))
        else:
            self.refuse(target)

    def cast(self, statement: ast.If) -> None:
        """`if the weight of down is of another dtype: v = v.to(its dtype)`, as T5 writes it."""
        parts = {n.attr for n in ast.walk(statement.test) if self.part(n) is not None}
        names = {n.id for n in ast.walk(statement.test) if isinstance(n, ast.Name)}
        for v in names & set(self.values) if len(statement.body) == 1 else ():
            for m in parts if not statement.orelse else ():
                done = f"if {_CAST.format(m=m, v=v)}:\n    {v} = {v}.to(self.{m}.weight.dtype)"
                if ast.dump(statement) == ast.dump(ast.parse(done).body[0]) and self.me == "self":
                    if self.found("isinstance") is isinstance and self.found("torch") is torch:
                        self.values[v] = ("cast", m, self.values[v])
                        return
        self.refuse(statement.test)

    def part(self, node: ast.AST) -> Optional[str]:
        """The name of an attribute of the module itself."""
        mine = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return node.attr if mine and node.value.id == self.me else None

    def value(self, node: ast.expr) -> tuple:
        if isinstance(node, ast.Name) and node.id in self.values:
            return self.values[node.id]
        if self.part(node) is not None:
            return ("part", self.part(node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            factors = self.value(node.left), self.value(node.right)
            if any(factor[0] in ("part", "halves", "x") for factor in factors):
                self.refuse(node)
            return ("product", *factors)
        if isinstance(node, ast.Subscript):
            pair, i = self.value(node.value), getattr(node.slice, "value", None)
            if pair[0] == "halves" and type(i) is int and i in (0, 1):
                return ("half", pair[1], i)
        if isinstance(node, ast.Call):
            return self.call(node)
        self.refuse(node)

    def call(self, node: ast.Call) -> tuple:
        function, known = node.func, self.found(_root(node.func))
        if any(k.arg is None for k in node.keywords):
            self.refuse(node)
        if known is None:
            if isinstance(function, ast.Attribute) and function.attr == "chunk":
                if self.part(function) is None:
                    return self.chunk(node, self.value(function.value), node.args)
            part = self.value(function)
            if part[0] != "part" or len(node.args) != 1 or node.keywords:
                self.refuse(node)
            self.calls.append(("call", part[1], self.value(node.args[0])))
            return self.calls[-1]
        for name in _path(function)[1:]:
            known = known.__dict__.get(name) if isinstance(known, ModuleType) else None
        if known is torch.chunk and node.args:
            return self.chunk(node, self.value(node.args[0]), node.args[1:])
        if known is F.dropout:
            return self.dropout(node)
        return ("act", self.function(known, node), self.value(node.args[0]))

    def found(self, name: Optional[str]) -> object:
        """What a global name stands for; None for the forward's own names."""
        if name is None or name == self.me or name in self.values:
            return None
        builtins = self.globals.get("__builtins__", {})
        builtins = getattr(builtins, "__dict__", builtins)
        return self.globals.get(name, builtins.get(name, NotImplemented))

    def function(self, known: object, node: ast.Call) -> str:
        keywords = [(k.arg, getattr(k.value, "value", None)) for k in node.keywords]
        if len(node.args) == 1 and known is F.gelu and keywords == [("approximate", "tanh")]:
            return "gelu_tanh"
        if len(node.args) != 1 or keywords:
            self.refuse(node)
        for name, functions in (("silu", (F.silu,)), ("relu", (F.relu, torch.relu))):
            if any(known is function for function in functions):
                return name
        self.refuse(node)

    def chunk(self, node: ast.Call, value: tuple, sizes: List[ast.expr]) -> tuple:
        """chunk(2, dim=-1) of a value."""
        given = dict(zip(("chunks", "dim"), sizes))
        given.update({k.arg: k.value for k in node.keywords})
        try:
            literal = {name: ast.literal_eval(size) for name, size in given.items()}
        except ValueError:
            self.refuse(node)
        if literal != {"chunks": 2, "dim": -1} or len(sizes) + len(node.keywords) != 2:
            self.refuse(node)
        return ("halves", value)

    def dropout(self, node: ast.Call) -> tuple:
        """F.dropout(value, p=self.rate, training=self.training)."""
        given = dict(zip(("input", "p", "training"), node.args))
        given.update({k.arg: k.value for k in node.keywords})
        rate = self.part(given.get("p"))
        if set(given) != {"input", "p", "training"} or len(node.args) + len(node.keywords) != 3:
            self.refuse(node)
        if rate is None or self.part(given["training"]) != "training":
            self.refuse(node)
        return ("dropout", rate, self.value(given["input"]))


def _path(node: ast.expr) -> List[str]:
    """["torch", "nn", "functional", "silu"] of that expression; [] of any other."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = _path(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if before else []


def _root(node: ast.expr) -> Optional[str]:
    return next(iter(_path(node)), None)


def _as_formula(argument: str, value: tuple, calls: List[tuple]) -> Formula:
    """The formula that a returned value is; `calls` are all that were made on the way."""
    after, rates, casts = [], [], []
    while value[0] in ("call", "dropout", "cast"):
        {"call": after, "dropout": rates, "cast": casts}[value[0]].insert(0, value[1])
        value = value[2]
    if value[0] != "product" or not after:
        raise Refused("its forward is another formula")
    gated = [_gated(side) for side in value[1:]]
    if (gated[0] is None) == (gated[1] is None):
        raise Refused("its forward is another formula")
    (act, function, gate), up = (gated[0], value[2]) if gated[0] else (gated[1], value[1])
    made = len(after) + (act is not None)
    if gate[0] == up[0] == "half" and gate[1] == up[1] and gate[2] != up[2]:
        linears, gate_first, made = (gate[1], None), gate[2] == 0, made + 1
    else:
        linears, gate_first, made = (gate, up), True, made + 2
    for linear in linears:
        if linear is not None and (linear[0] != "call" or linear[2] != ("x",)):
            raise Refused("its forward is another formula")
    names = [linear and linear[1] for linear in linears]
    used = [*after, *filter(None, names), *([act] if act else [])]
    if len(calls) != made or len(set(used)) != len(used) or not set(casts) <= set(after):
        raise Refused("its forward calls a part twice, or one more")
    return Formula(
        argument, *names, act, function, gate_first, tuple(after), tuple(rates), tuple(casts)
    )


def _gated(value: tuple) -> Optional[Tuple[Optional[str], Optional[str], tuple]]:
    """(act, function, the value inside) of act(linear(x)); None of linear(x)."""
    if value[0] == "act":
        return None, value[1], value[2]
    if value[0] == "call" and value[2] != ("x",) and value[2][0] in ("call", "half"):
        return value[1], None, value[2]
    return None
