"""Call objects: NamedTuples of tensors (or None) whose last field is `options`."""

import typing


class NoOptions(typing.NamedTuple):
    """The options of a call that has none."""


def call(kind: type) -> type:
    """Adds `device`, `tensors` and `of` to a call type.

    `of` makes a call from the arguments of an operator, which are all tensors and then all options.
    It bypasses the constructors of the NamedTuples, which are Python functions: operators have
    already checked the arguments.
    """
    options, count = typing.get_type_hints(kind)["options"], len(kind._fields) - 1
    new = tuple.__new__

    def of(given: tuple):
        return new(kind, (*given[:count], new(options, given[count:])))

    kind.device = property(lambda call: call[0].device)
    kind.tensors = property(_tensors)
    kind.of = staticmethod(of)
    return kind


def _tensors(call) -> tuple:
    """All fields of a call except its options."""
    *tensors, _ = call
    return tuple(tensors)
