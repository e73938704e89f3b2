"""The source of a function, and what a function that is read may consist of."""

import ast
import functools
import inspect
import linecache
import logging
import operator
import sys
import time
from types import FunctionType, GetSetDescriptorType
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.own_code import codes_in, codes_of

# of tensors, as methods and as functions of torch: none of them looks at values
OPERATIONS = {
    "add", "addcmul", "bfloat16", "bmm", "cat", "chunk", "clone", "concat", "concatenate",
    "contiguous", "dim", "div", "divide", "double", "dropout", "einsum", "exp", "expand",
    "expand_as", "flatten", "float", "gelu", "half", "linear", "matmul", "mean", "movedim", "mul",
    "multiply", "narrow", "neg", "negative", "norm", "numel", "ones_like", "permute", "pow",
    "reciprocal", "relu", "repeat", "repeat_interleave", "reshape", "rms_norm", "rsqrt", "rsub",
    "select", "sigmoid", "silu", "size", "softplus", "split", "split_with_sizes", "sqrt", "square",
    "squeeze", "stack", "sub", "subtract", "sum", "swapaxes", "swapdims", "t", "tanh",
    "tensor_split", "to", "transpose", "true_divide", "type", "type_as", "unbind", "unflatten",
    "unsqueeze", "view", "view_as", "zeros_like",
}  # fmt: skip
# of tensors too, for kinds of modules that may have them (read's `allowed`): choices among values
IN_PLACE = {"div_", "masked_fill_", "mul_", "scatter_"}
CHOICES = IN_PLACE | {
    "argsort", "bool", "einsum", "full_like", "gather", "index_select", "linear", "log_softmax",
    "logsumexp", "long", "masked_fill", "mm", "new_zeros", "ones_like", "scatter", "softmax",
    "sort", "take_along_dim", "topk", "zeros_like",
}  # fmt: skip
CHOSEN = {"indices", "values"}  # attributes of what sort and topk give
GATES = {"log", "log1p", "where"}
MORE = (CHOICES | GATES | {"clamp"}) - OPERATIONS
# and what else not every kind of module may do
BY_DTYPE, BY_WORDS = "branches on a dtype", "counts its keywords"
METHODS = OPERATIONS | MORE | {"update"}  # of a cache
ARITHMETIC = {
    "add", "div", "divide", "mul", "multiply", "pow", "sub", "subtract", "true_divide",
}  # fmt: skip
# what a tensor says of itself, and what that depends on
SIZES = {"dim": "size", "is_floating_point": "dtype", "numel": "size", "size": "size"}
FUNCTIONS = {
    id(getattr(home, name)): name for home in (torch, F)
    for name in {*OPERATIONS, *MORE, *SIZES}
    if hasattr(home, name)
}  # fmt: skip
FUNCTIONS.update((id(clock), "time") for clock in (time.time, time.perf_counter, time.monotonic))
CONDITIONAL = {"device": "size", "dtype": "dtype", "ndim": "size", "shape": "size"}
ATTRIBUTES = {*CONDITIONAL, "mT", "T"}
# the state of torch, and what that is about
MODES = {
    id(operator.attrgetter(name)(torch)): (f"torch.{name}()", kind)
    for kind, names in (
        ("call", ("jit.is_scripting", "jit.is_tracing", "compiler.is_compiling")),
        ("size", ("is_grad_enabled", "is_inference_mode_enabled")),
    )
    for name in names
}  # fmt: skip
# contexts that change nothing, and those that do so where autocast is off already
CONTEXTS = {
    "contextlib.nullcontext": False, "torch.autograd.profiler.record_function": False,
    "torch.amp.autocast_mode.autocast": True,
}  # fmt: skip


# what the arguments of a log may call
IN_LOGS = ("len", "round", "str", "time.perf_counter", "time.time", "tuple", "type")


def in_short(node: ast.AST) -> str:
    text = ast.unparse(node).split("\n")[0]
    return text if len(text) < 60 else text[:57] + "..."


BY_NAME = {"__dict__", "getattr", "hasattr", "vars"}  # which may find another answer later


class Signature(NamedTuple):
    """The arguments of a function beside its first one, in the order of its definition."""

    names: Tuple[str, ...]  # with the keywords that it takes out of **kwargs
    positional: Tuple[str, ...]
    positional_only: Tuple[str, ...]
    defaults: Dict[str, object]  # of those that have one
    several: bool  # it takes *args
    more: bool  # it takes **kwargs


def signature_of(function: FunctionType, extra: Tuple[str, ...] = ()) -> Signature:
    """The signature of the function itself, whatever it wraps; `extra`: further keywords."""
    code, values = function.__code__, function.__defaults__ or ()
    count, known = code.co_argcount, code.co_varnames
    defaults = dict(zip(known[count - len(values) : count], values))
    defaults.update(function.__kwdefaults__ or {})
    defaults.update(dict.fromkeys(extra))
    return Signature(
        (*known[1 : count + code.co_kwonlyargcount], *extra),
        known[1:count],
        known[1 : code.co_posonlyargcount],
        defaults,
        bool(code.co_flags & inspect.CO_VARARGS),
        bool(code.co_flags & inspect.CO_VARKEYWORDS),
    )


class Refused(Exception):
    """A forward, or a module, is of no known form; the message says why."""


class Raised(Refused):
    """Raised where the code that is read raises an error."""


def source_of(function: object, free: Tuple[str, ...] = ()) -> ast.FunctionDef:
    """The syntax tree of a function, if its code is what its file compiles to; `free`: the free
    variables that it may have."""
    if type(function) is not FunctionType:
        raise Refused(f"its forward is a {type(function).__name__}, not a function")
    code = function.__code__
    if not set(code.co_freevars) <= set(free):
        where = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
        raise Refused(f"its forward is wrapped by {code.co_name} in {where}")
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    definition = _definitions(text).get((code.co_name, code.co_firstlineno))
    if definition is None:
        raise Refused("its forward has no source to read")
    if code not in _codes_around(function):
        raise Refused("its forward is not what its source says")
    return definition


@functools.lru_cache(maxsize=64)
def _definitions(text: str) -> Dict[Tuple[str, int], ast.FunctionDef]:
    """The functions of a file by name and first line, as code objects have them."""
    found: Dict[Tuple[str, int], ast.FunctionDef] = {}
    try:
        statements = list(ast.parse(text).body)
    except SyntaxError:
        return found
    for node in statements:  # which grows
        if isinstance(node, ast.FunctionDef):
            found[node.name, (node.decorator_list or [node])[0].lineno] = node
        for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(node, inside, ())
    return found


def nodes_of(tree: ast.AST) -> List[ast.AST]:
    """A tree and all nodes in it, as ast.walk, which calls three generators for each."""
    found = [tree]
    for node in found:  # which grows
        for name in node._fields:
            value = getattr(node, name, None)
            for each in value if isinstance(value, list) else (value,):
                if isinstance(each, ast.AST):
                    found.append(each)
    return found


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


def members_of(kind: type) -> dict:
    """A class's attributes as they stand there, found without running any code of the class."""
    found: dict = {}
    for base in reversed(kind.__mro__):
        found.update(base.__dict__)
    return found


def why_odd_class(kind: type, names: Iterable[str], *more: str) -> Optional[str]:
    """The class has some of MACHINERY, or `more` of it, of its own, or attributes that would hide
    those of a module by these names."""
    members, usual = members_of(kind), members_of(nn.Module)
    for name in (*more, *MACHINERY):
        found = members.get(name)
        of_python = name == "__dict__" and isinstance(found, GetSetDescriptorType)  # of a mixin
        if found is not usual.get(name) and not of_python:
            return f"its class has a {name} of its own"
    for name in names:
        if members.get(name) is not None:
            return f"its class has an attribute {name}"
    return None


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def logs(statement: ast.stmt, names: dict) -> bool:
    """Returns True if it calls a method of a logger, or warnings.warn, and no more."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value
    value = names.get(owner.id) if isinstance(owner, ast.Name) else None
    warns = value is sys.modules.get("warnings") and call.func.attr == "warn"
    if not (isinstance(value, logging.Logger) or warns):
        return False
    calls = [node for node in nodes_of(call) if isinstance(node, (ast.Call, ast.NamedExpr))]
    return all(
        node is call or isinstance(node, ast.Call) and ast.unparse(node.func) in IN_LOGS
        for node in calls
    )
