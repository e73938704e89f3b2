"""The source of a function, and what a function that is read may consist of."""

import ast
import functools
import inspect
import linecache
import logging
import sys
from types import FunctionType, GetSetDescriptorType
from typing import Iterable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.own_code import codes_in, codes_of

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
# of tensors too, for kinds of modules that ask for them (read's `more`): choices among values
IN_PLACE = {"div_", "masked_fill_", "mul_", "scatter_"}
CHOICES = IN_PLACE | {
    "argsort", "bool", "einsum", "full_like", "gather", "index_select", "linear", "log_softmax",
    "logsumexp", "long", "masked_fill", "mm", "new_zeros", "ones_like", "scatter", "softmax",
    "sort", "take_along_dim", "topk", "zeros_like",
}  # fmt: skip
CHOSEN = {"indices", "values"}  # attributes of what sort and topk give
# of a cache and of the registry of attention functions
MORE = CHOICES | {"clamp"}
METHODS = OPERATIONS | MORE | {"get_interface", "update"}
FUNCTIONS = tuple(
    function for home in (torch, F) for name in sorted(OPERATIONS | MORE)
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
    ast.NamedExpr, ast.Slice, ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp,
)  # fmt: skip
# what a condition on shapes may consist of, beside names and constants
CONDITIONS = (
    ast.And, ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant, ast.Load,
    ast.Name, ast.Not, ast.Or, ast.Slice, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.cmpop,
    ast.operator, ast.unaryop, ast.boolop,
)  # fmt: skip


def in_short(node: ast.AST) -> str:
    text = ast.unparse(node).split("\n")[0]
    return text if len(text) < 60 else text[:57] + "..."


class Refused(Exception):
    """A forward, or a module, is of no known form; the message says why."""


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
        lines = inspect.getsource(code)
        inner = lines[:1].isspace()  # of a class; a text in it may begin at the margin
        tree = ast.parse(f"if inner:\n{lines}" if inner else lines)
    except (OSError, TypeError, SyntaxError):
        raise Refused("its forward has no source to read") from None
    definition = tree.body[0].body[0] if inner else tree.body[0]
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
        found = static(kind, name)
        plain = name == "__dict__" and type(found) is GetSetDescriptorType  # as any class has it
        if found is not static(nn.Module, name) and not plain:
            return f"its class has a {name} of its own"
    for name in names:
        if static(kind, name) is not None:
            return f"its class has an attribute {name}"
    return None


def keyword_tested(test: ast.expr, kwargs: str, known: dict) -> Optional[str]:
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


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def logs(statement: ast.stmt, names: dict) -> bool:
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


def is_constant(node: ast.expr) -> bool:
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(map(is_constant, node.elts))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant)


def calls(node: ast.AST, method: str) -> bool:
    """`node` is a call of a method of this name."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return called and node.func.attr == method


def root(node: ast.expr) -> Optional[str]:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
