"""Call objects: NamedTuples of tensors (or None) whose last field is `options`."""

import typing

import torch


class NoOptions(typing.NamedTuple):
    """The options of a call that has none."""


def call(kind: type) -> type:
    """Adds `device`, `tensors` and `of` to a call type.

    `of` makes a call from the arguments of an operator, which are all tensors and then all options.
    It bypasses the constructors of the NamedTuples, which are Python functions: operators have
    already checked the arguments. Code that torch compiles asks tensors_in() and device_of(), since
    torch.compile of torch 2.9 knows no property of a NamedTuple.
    """
    options, count = typing.get_type_hints(kind)["options"], len(kind._fields) - 1
    new = tuple.__new__

    def of(given: tuple):
        return new(kind, (*given[:count], new(options, given[count:])))

    kind.device = property(device_of)
    kind.tensors = property(tensors_in)
    kind.of = staticmethod(of)
    return kind


def tensors_in(call) -> tuple:
    """All fields of a call except its options."""
    *tensors, _ = call
    return tuple(tensors)


def device_of(x) -> torch.device:
    """The device of a tensor, or of a call's first one."""
    return x.device if isinstance(x, torch.Tensor) else x[0].device
