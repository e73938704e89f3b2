"""What a function that is read calls: parts of the module, listed operations, functions to read."""

import ast
import sys
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, ModuleType
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.own_code import undispatched
from .code import BUILTINS, FUNCTIONS, METHODS, MORE, Refused, calls, in_short, root


class Callees:
    """The half of a Body (body.py) that is about calls."""

    def call(self, node: ast.Call) -> None:
        if self.is_getattr(node) or self.taken_out(node):
            return
        takes_me = self.callee(node)
        attends = isinstance(node.func, ast.Name) and node.func.id in self.interfaces
        for i, argument in enumerate([*node.args, *(k.value for k in node.keywords)]):
            name = argument.id if isinstance(argument, ast.Name) else None
            if name is not None and name == self.me and (takes_me or attends and i == 0):
                continue  # attention functions get the module, and helpers may
            if calls(node, "get_interface") and isinstance(self.found(name), FunctionType):
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
        elif root(function) in self.local or not isinstance(
            function.value, (ast.Name, ast.Attribute)
        ):
            if name not in METHODS:
                self.refuse(node)
            if name in MORE:
                self.reader.more[name] = in_short(node)
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
            if getattr(value, "__name__", name) in MORE:
                self.reader.more[value.__name__] = in_short(node)
            return False
        for home in (torch, F):
            if namespace is vars(home) and name in METHODS:
                raise Refused(f"its forward calls {home.__name__}.{name}, which is patched")
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
