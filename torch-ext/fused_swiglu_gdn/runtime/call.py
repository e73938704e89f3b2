"""What all calls have in common: NamedTuples of tensors, or None, whose last field is `options`."""

import typing


def call(kind: type) -> type:
    """Adds to a kind of call: device, tensors, and of(arguments of an operator), which makes one.

    These are all tensors, then all options. `of` goes past the constructors of the NamedTuples,
    which are Python functions: operators have looked at the arguments.
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
    """All of a call but its options."""
    *tensors, _ = call
    return tuple(tensors)
