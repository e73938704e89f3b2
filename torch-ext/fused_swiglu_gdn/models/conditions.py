"""Conditions that are told of the module and of a call's arguments."""

from typing import Callable

import torch
from torch import nn

NAMES = {"torch": torch}


def condition(text: str, defaults: dict) -> Callable:
    """(module, arguments by name) -> whether a condition is met, which cannot be told of some."""
    code = compile(text, "<condition>", "eval")

    def met(module: nn.Module, given: dict) -> bool:
        try:
            return bool(eval(code, NAMES, {**defaults, **given, "self": module}))
        except Exception:
            return False

    return met
