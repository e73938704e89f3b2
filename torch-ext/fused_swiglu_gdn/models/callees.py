"""Reads the calls of a function: parts of the module, listed operations, functions to read."""

import ast
import functools
import math
import operator
import sys
import typing
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.own_code import undispatched
from .code import (
    ARITHMETIC,
    BY_WORDS,
    CONTEXTS,
    FUNCTIONS,
    IN_PLACE,
    METHODS,
    MODES,
    MORE,
    SIZES,
    Refused,
)  # fmt: skip
from .values import (
    ARGUMENTS,
    ATTENTION,
    NO_WORDS,
    SIZE,
    VALUE,
    Closure,
    Given,
    Known,
    Method,
    Own,
    Partial,
    Passed,
    Plain,
    Several,
    Super,
    Words,
    joined,
    told,
)

ACTIVATIONS = {nn.SiLU: F.silu, nn.ReLU: F.relu, nn.Sigmoid: torch.sigmoid}
SIGNS = {
    id(operator.add): ast.Add, id(operator.sub): ast.Sub, id(operator.mul): ast.Mult,
    id(operator.pow): ast.Pow, id(operator.truediv): ast.Div, id(operator.matmul): ast.MatMult,
}  # fmt: skip
SPECIAL = {*FUNCTIONS, *MODES, id(typing.cast)}  # functions that are not read


class Callees:
    """The part of a Body (body.py) that is about calls."""

    def read_Call(self, node: ast.Call, idle: bool = False) -> object:
        """Returns the result of a call; `idle`: one that is not read."""
        function = node.func
        if isinstance(function, ast.Name) and self.is_builtin(function, "super"):
            return self.super(node)
        if not isinstance(function, ast.Attribute):
            return self.called(self.expression(function), node, idle)
        base, name = self.expression(function.value), function.attr
        if isinstance(base, Super):
            order = self.reader.kind.__mro__
            method, owner = self.reader.method(name, order[order.index(base.owner) + 1 :])
            return self.called(Method(method, owner, (Own(""),)), node, idle)
        if isinstance(base, Words):
            return self.word(base, name, node)
        if isinstance(base, Plain) and self.is_registry(base):
            return self.asked(name, node)
        if isinstance(base, Plain) or isinstance(base, Own) and not base.path:
            return self.called(self.attribute(base, name, node), node, idle)
        if base is not VALUE if name in IN_PLACE else idle:
            self.refuse(node)
        return self.method_of_a_tensor(base, name, node)

    def super(self, node: ast.Call) -> Super:
        args = [self.expression(argument) for argument in node.args]
        owner = args[0].value if args and isinstance(args[0], Plain) else self.owner
        if args and (len(args) != 2 or args[1] != Own("")) or node.keywords:
            self.refuse(node)
        if owner not in self.reader.kind.__mro__:
            self.refuse(node)
        return Super(owner)

    def is_builtin(self, node: ast.Name, name: str) -> bool:
        if node.id != name or name in self.local:
            return False
        return self.found(name, node).value is vars(sys.modules["builtins"])[name]

    def arguments(self, node: ast.Call) -> typing.Tuple[list, Words, bool]:
        """Returns the arguments of a call, and whether all of that is told."""
        args, words, rest, whole = [], {}, False, True
        for argument in node.args:
            starred = isinstance(argument, ast.Starred)
            value = self.expression(argument.value if starred else argument)
            if starred and isinstance(value, Several):
                args += value.values
            else:
                args.append(VALUE if value is ARGUMENTS and not starred else value)
                whole = whole and not starred
        for keyword in node.keywords:
            value = self.expression(keyword.value)
            if keyword.arg is not None:
                words[keyword.arg] = value
            elif isinstance(value, Words):
                words.update(value.values)
                rest = rest or value.rest
            else:
                self.refuse(node)
        return args, Words(words, rest) if node.keywords else NO_WORDS, whole

    def called(self, function: object, node: ast.Call, idle: bool = False) -> object:
        if isinstance(function, Plain):
            self.is_listed(function, node)
        args, words, whole = self.arguments(node)
        while isinstance(function, Partial):
            args = [*function.args, *args]
            words = words._replace(values={**function.words, **words.values})
            function = function.function
        if isinstance(function, Plain):
            plain = undispatched(function.value)
            if isinstance(plain, FunctionType) and id(plain) not in SPECIAL:
                self.pin(function)
                self.is_no_patch(function, node)
                if self.passing == (args, words):
                    return Passed(plain)
                function = Method(plain, None)
        if isinstance(function, (Method, Closure)):
            if not whole:
                self.refuse(node)
            return self.of_a_function(function, args, words)
        if idle:
            self.refuse(node)
        if isinstance(function, Plain):
            return self.of_python(function, args, words, node)
        if isinstance(function, Own) and function.path and "." not in function.path:
            self.reader.source.parts.add(function.path)
        elif function is not ATTENTION:
            self.refuse(node)
        elif args and args[0] == Own(""):
            args = args[1:]  # attention functions get the module
        self.use_all((*args, *words.values.values()), node)
        return VALUE

    def is_listed(self, function: Plain, node: ast.Call) -> None:
        """Refuses a function of torch that is not listed."""
        name = getattr(function.value, "__name__", None)
        if id(function.value) not in SPECIAL and vars(torch).get(name, "") is function.value:
            self.refuse(node)

    def is_no_patch(self, function: Plain, node: ast.Call) -> None:
        """Refuses what a patch has put in place of a function of torch, and what is not listed."""
        space, name = function.place or (None, "")
        for home in (torch, F):
            if space is vars(home):
                if self.is_torchs(function.value):
                    self.refuse(node)
                raise Refused(f"its forward calls {home.__name__}.{name}, which is patched")

    def of_a_function(self, function, args: list, words: Words) -> object:
        if isinstance(function, Closure):
            return self.reader.inner(function, args, words)
        return self.reader.interpreted(
            function.function, function.owner, [*function.first, *args], words
        )

    def of_python(self, function: Plain, args: list, words: Words, node: ast.Call) -> object:
        """A function of torch or Python."""
        value = undispatched(function.value)
        known = FUNCTIONS.get(id(value)) if self.is_torchs(value) else None
        if known is not None:
            self.pin(function)
            if value is F.dropout:
                return self.dropout(args, words, node)
            return self.operated(known, args, words, node)
        if value is functools.partial and args and not words.rest:
            return Partial(args[0], tuple(args[1:]), words.values)
        if isinstance(value, type) and value in ACTIVATIONS:
            if args or set(words.values) - {"inplace"} or words.rest:
                self.refuse(node)
            self.reader.method("forward", value.__mro__)
            return Plain(ACTIVATIONS[value])
        if value is typing.cast and len(args) == 2:
            return args[1]
        if id(value) in MODES and not args and not words.values:
            self.pin(function)
            return Known(MODES[id(value)][0], frozenset([MODES[id(value)][1]]))
        if id(value) in SIGNS and len(args) == 2:
            return self.operation(SIGNS[id(value)](), *args, node)
        if getattr(math, getattr(value, "__name__", ""), None) is value:
            return self.counted("math", value, args, words, node)
        if vars(sys.modules["builtins"]).get(getattr(value, "__name__", "")) is value:
            return self.of_builtins(value, args, words, node)
        self.refuse(node)

    @staticmethod
    def is_torchs(value: object) -> bool:
        if isinstance(value, (BuiltinFunctionType, BuiltinMethodType)):
            return True
        return getattr(value, "__module__", "").split(".")[0] == "torch"

    def counted(self, home: str, function, args: list, words: Words, node: ast.Call) -> object:
        """A function of numbers."""
        known = None if words.values or words.rest else joined("({},)", ", ", args)
        if known is None:
            self.refuse(node)
        if all(isinstance(value, Plain) for value in args):
            try:
                return Plain(function(*(value.value for value in args)))
            except Exception:
                self.refuse(node)
        self.use_all(args, node)
        kinds = known.on | ({"derived"} if "size" in known.on else set())
        text = known.text and f"{function.__name__}(*{known.text})"
        return Known(text if home == "builtins" else None, frozenset(kinds), known.paths)

    def of_builtins(self, function, args: list, words: Words, node: ast.Call) -> object:
        several = [value.values if isinstance(value, Several) else None for value in args]
        if function is type and args == [Own("")]:
            return Plain(self.reader.kind)
        if function in (getattr, hasattr) and len(args) > 1:
            return self.attribute_by_name(function, args, node)
        if function is isinstance and len(args) == 2:
            return self.is_instance(*args, node)
        if function is dict and not args:
            return words
        if function is range and all(isinstance(value, Plain) for value in args):
            return Several(tuple(map(Plain, range(*(value.value for value in args)))))
        if function in (tuple, list, zip, enumerate, reversed, len) and None not in several:
            found = function(*several)
            if function is len:
                return Plain(found)
            if function in (zip, enumerate):
                each = found if function is zip else ((Plain(i), v) for i, v in found)
                return Several(tuple(map(Several, each)))
            return Several(tuple(found))
        if function in (len, tuple, list) and len(args) == 1:
            self.use(args[0], node)
            if isinstance(args[0], Words):
                self.reader.source.need(BY_WORDS)
            known = told(args[0]) if isinstance(args[0], Known) else None
            if known is None:
                return SIZE if function is len else VALUE
            return joined(f"{function.__name__}({{}})", "", (known,))
        if function in (int, float, bool, min, max, abs, round):
            return self.counted("builtins", function, args, words, node)
        self.refuse(node)

    def attribute_by_name(self, function, args: list, node: ast.Call) -> object:
        """getattr(self, "name", default), hasattr(self, "name")"""
        base, name = args[0], args[1].value if isinstance(args[1], Plain) else None
        if not isinstance(name, str):
            self.refuse(node)
        if not isinstance(base, Own):
            return self.attribute(base, name, node) if function is getattr else self.refuse(node)
        path = f"{base.path}.{name}".lstrip(".")
        self.reader.source.reads.add(path)
        if function is hasattr:
            text = f"hasattr({base.text}, {name!r})"
            return Known(text, frozenset(["own"]), frozenset([path]))
        found = self.attribute(base, name, node)
        if len(args) == 2 or not isinstance(found, Own):
            return found
        self.use(args[2], node)
        default = told(args[2])
        text = default and default.text and f"getattr({base.text}, {name!r}, {default.text})"
        return Own(path, text or "unknown")

    def is_instance(self, value: object, types: object, node: ast.Call) -> Known:
        classes = types.values if isinstance(types, Several) else (types,)
        if not all(isinstance(c, Plain) and isinstance(c.value, type) for c in classes):
            self.refuse(node)
        if isinstance(value, Plain):
            return Plain(isinstance(value.value, tuple(c.value for c in classes)))
        if value is VALUE:
            self.reader.source.asked.add(None)
            return Known(None, frozenset(["none"]))
        if isinstance(value, Given):
            self.reader.source.asked.add(value.name)
        elif isinstance(value, Own) and value.path:
            self.reader.source.reads.add(value.path)
        names = ["torch.Tensor" if c.value is torch.Tensor else c.value.__name__ for c in classes]
        fits = all(c.value in (torch.Tensor, tuple, list, int, float, bool) for c in classes)
        known = told(value)
        if known is None:
            self.refuse(node)
        text = f"isinstance({known.text}, ({', '.join(names)},))" if known.text and fits else None
        on = frozenset(["none"]) | (frozenset() if isinstance(value, Given) else known.on)
        return Known(text, on, known.paths)

    def dropout(self, args: list, words: Words, node: ast.Call) -> object:
        """F.dropout(value, p=self.rate, training=self.training)"""
        given = {**dict(zip(("input", "p", "training"), args)), **words.values}
        rate, training = given.get("p"), given.get("training")
        if words.rest or set(given) != {"input", "p", "training"}:
            self.refuse(node)
        self.use(given["input"], node)
        if any(isinstance(v, Plain) and not v.value for v in (rate, training)):
            return given["input"]
        if not isinstance(rate, Own) or training != Own("training", "self.training"):
            self.refuse(node)
        self.use(rate, node)
        self.use(training, node)
        self.reader.source.rates.add(rate.path)
        return VALUE

    def method_of_a_tensor(self, base: object, name: str, node: ast.Call) -> object:
        if isinstance(base, Own) and name == "get":  # of a dictionary, which nobody guards
            return Plain(NotImplemented)
        if name not in METHODS and name not in SIZES:
            self.refuse(node)
        if isinstance(base, (Several, Closure, Method, Partial)):
            self.refuse(node)
        args, words, _ = self.arguments(node)
        if isinstance(base, Own):
            self.reader.source.tensors.add(base.path)
        return self.operated(name, [base, *args], words, node)

    def operated(self, name: str, args: list, words: Words, node: ast.Call) -> object:
        """An operation of the lists, as a method or a function."""
        if name in MORE:
            self.needs(name, node)
        if "out" in words.values:
            self.refuse(node)
        self.use_all((*args, *words.values.values()), node)
        if name in ARITHMETIC:
            self.only_sizes_as_they_are((*args, *words.values.values()), node)
        kind = SIZES.get(name)
        if kind is None:
            return VALUE
        known = joined(f"{{}}.{name}()", "", args[:1]) if len(args) == 1 else None
        if len(args) == 2 and isinstance(args[1], Plain):
            known = joined(f"{{}}.{name}({args[1].value!r})", "", args[:1])
        if not isinstance(args[0], Given) or known is None or words.values:
            return Known(None, frozenset([kind]))
        return Known(known.text, frozenset([kind]))

    def word(self, words: Words, name: str, node: ast.Call) -> object:
        """kwargs.get("name"), kwargs.pop("name", None): an argument by another way."""
        args, more, _ = self.arguments(node)
        if name == "copy" and not args:
            return words._replace(main=False)
        word = args[0].value if args and isinstance(args[0], Plain) else None
        if name not in ("get", "pop") or not isinstance(word, str) or more.values or len(args) > 2:
            self.refuse(node)
        if word in words.values and name == "get":
            return words.values[word]
        if name == "pop" and (word in words.values or len(args) == 1):
            self.refuse(node)
        default = args[1] if len(args) == 2 else Plain(None)
        if not words.rest:
            return default
        if words.main and default == Plain(None):
            self.reader.source.extra.add(word)
            return Given(word)
        self.reader.is_for_itself([word])
        return default

    @staticmethod
    def is_registry(base: Plain) -> bool:
        library = sys.modules.get("transformers.modeling_utils")
        return base.value is getattr(library, "ALL_ATTENTION_FUNCTIONS", NotImplemented)

    def asked(self, name: str, node: ast.Call) -> object:
        """ALL_ATTENTION_FUNCTIONS.get_interface(name, default)"""
        if name != "get_interface":
            self.refuse(node)
        self.pin(self.expression(node.func.value))
        args, words, _ = self.arguments(node)
        for value in (*args, *words.values.values()):
            if isinstance(value, Plain) and isinstance(value.value, FunctionType):
                self.pin(value)
            else:
                self.use(value, node)
        return ATTENTION

    def is_context(self, node: ast.Call) -> bool:
        """A context that changes nothing, or in calls that are not for the forward itself."""
        found = self.expression(node.func)
        kind = found.value if isinstance(found, Plain) else None
        name = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        inner = [each for argument in given for each in ast.walk(argument)]
        if name not in CONTEXTS or any(isinstance(n, (ast.Call, ast.NamedExpr)) for n in inner):
            return False
        if not CONTEXTS[name]:
            return True
        enabled = [k.value for k in node.keywords if k.arg == "enabled"]
        off = len(enabled) == 1 and isinstance(enabled[0], ast.Constant) and not enabled[0].value
        if off:
            condition = Known("torch._C._is_any_autocast_enabled()", frozenset(["call"]))
            self.exclude(condition, None, node)
        return off
