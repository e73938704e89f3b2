"""Conditions that are told of the module and of a call's arguments."""

import inspect
from types import FunctionType
from typing import Callable

import torch
from torch import nn

NAMES = {"torch": torch}


def defaults_of(function: FunctionType) -> dict:
    """The arguments of a function that have a default, with it."""
    known = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in known if p.default is not p.empty}


def condition(text: str, defaults: dict) -> Callable:
    """(module, arguments by name) -> whether a condition is met, which nobody can tell of some."""
    code = compile(text, "<condition>", "eval")

    def met(module: nn.Module, given: dict) -> bool:
        try:
            return bool(eval(code, NAMES, {**defaults, **given, "self": module}))
        except Exception:
            return False

    return met
