"""Conditions on shapes without which a forward raises."""

import ast
import inspect
from types import FunctionType
from typing import Callable, Optional

import torch
from torch import nn

from .code import ATTRIBUTES, CONDITIONS

OF_TENSORS = {"dim", "is_floating_point", "size"}
NAMES = {"isinstance": isinstance, "len": len, "torch": torch, "tuple": tuple, "int": int}


class Inlined(ast.NodeTransformer):
    """Puts what names of sizes stand for in their place."""

    def __init__(self, body):
        self.body = body

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = self.body.shapes.get(node.id)
        return node if known is None else self.visit(copy(known))


def copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def defaults_of(function: FunctionType) -> dict:
    """The arguments of a function that have a default, with it."""
    known = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in known if p.default is not p.empty}


def compiled(test: ast.expr, me: Optional[str], defaults: dict) -> Callable:
    """(module, arguments by name) -> whether the condition holds; it does not where it cannot be
    told."""
    code = compile(ast.fix_missing_locations(ast.Expression(test)), "<check>", "eval")

    def holds(module: nn.Module, given: dict) -> bool:
        try:
            return bool(eval(code, dict(NAMES), {**defaults, **given, me or "self": module}))
        except Exception:
            return False

    return holds


def is_condition(body, node: ast.expr) -> bool:
    """Made of sizes, dtypes, constants, None and the module's own attributes alone."""
    for each in ast.walk(node):
        if not isinstance(each, CONDITIONS):
            return False
        if isinstance(each, ast.Name):
            known = each.id in body.constant or each.id in body.shapes or each.id == body.me
            if not known and each.id not in ("isinstance", "len", "torch", "tuple", "int"):
                return False
            if not known and body.found(each.id) is not NAMES[each.id]:
                return False
        if isinstance(each, ast.Attribute) and body.path(each) is None:
            dtype = ast.unparse(each.value) == "torch"
            if each.attr not in ATTRIBUTES | OF_TENSORS and not dtype:
                return False
        if isinstance(each, ast.Call):
            name = ast.unparse(each.func).rsplit(".", 1)[-1]
            if name not in (*OF_TENSORS, "isinstance", "len", "tuple", "int"):
                return False
    for each in ast.walk(node):
        path = body.path(each) if isinstance(each, ast.Attribute) else None
        if path is not None:
            body.reader.reads.add(path)
    return True
