"""Conditions that are told of the module and of a call's arguments."""

from typing import Callable, Mapping

import torch
from torch import nn

NAMES = {"torch": torch}


def defaults_of(parameters: Mapping) -> dict:
    """The arguments that have a default, with it."""
    return {n: p.default for n, p in parameters.items() if p.default is not p.empty}


def condition(text: str, defaults: dict) -> Callable:
    """(module, arguments by name) -> whether a condition is met, which cannot be told of some."""
    code = compile(text, "<condition>", "eval")

    def met(module: nn.Module, given: dict) -> bool:
        try:
            return bool(eval(code, NAMES, {**defaults, **given, "self": module}))
        except Exception:
            return False

    return met
