"""Argument checks that rooms share. A message says which argument, what was expected and what
came."""

import sys
from typing import Dict, Iterable, Optional, Sequence

import torch

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int32, torch.int64)
LARGEST = sys.float_info.max


def is_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested one" if x.is_nested else x.layout
        raise TypeError(f"{name} must be a dense torch.Tensor, got {kind}")


def is_model(function: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{function}: model must be an instance of torch.nn.Module, got {kind}")


def has_shape(name: str, x: object, dims: str, sizes: Dict[str, int]) -> None:
    """Checks that x is a tensor of shape `dims`, e.g. "B T H K".

    A size met for the first time is added to `sizes`; a known one must agree.
    """
    is_tensor(name, x)
    names = dims.split()
    shape = x.shape
    if len(shape) == len(names) and all(
        sizes.get(dim, size) == size for dim, size in zip(names, shape)
    ):
        sizes.update(zip(names, shape))
        return
    expected = [str(sizes.get(dim, dim)) for dim in names]
    known = "" if expected == names else f" = [{', '.join(expected)}]"
    raise ValueError(f"{name} must have shape [{', '.join(names)}]{known}, got {list(shape)}")


def has_last(name: str, x: object, dim: str) -> None:
    """Checks that x is a tensor with at least one dimension."""
    is_tensor(name, x)
    if x.ndim < 1:
        raise ValueError(f"{name} must have shape [..., {dim}], got []")


def has_shape_of(name: str, x: object, first: str, y: torch.Tensor) -> None:
    """Checks that x is a tensor with the shape of y."""
    is_tensor(name, x)
    if x.shape != y.shape:
        raise ValueError(
            f"{name} must have the shape of {first}, {list(y.shape)}, got {list(x.shape)}"
        )


def has_dtype(name: str, x: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    if x.dtype not in allowed:
        names = ", ".join(str(dtype).replace("torch.", "") for dtype in allowed)
        raise TypeError(f"{name} must be of dtype {names}, got {x.dtype}")


def is_floating(name: str, x: torch.Tensor) -> None:
    has_dtype(name, x, FLOATING)


def is_floating_dtype(name: str, dtype: object, or_none: str = "") -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATING:
        names = ", ".join(str(one).replace("torch.", "") for one in FLOATING)
        raise TypeError(f"{name} must be one of {names}{or_none}, got {dtype!r}")


def agrees(name: str, x: Optional[torch.Tensor], first: str, y: torch.Tensor) -> None:
    """Checks that x, if given, has the dtype and device of y."""
    if x is None:
        return
    if x.dtype != y.dtype:
        raise TypeError(f"{name} must have the dtype of {first}, {y.dtype}, got {x.dtype}")
    same_device(name, x, first, y)


def same_device(name: str, x: Optional[torch.Tensor], first: str, y: torch.Tensor) -> None:
    if x is not None and x.device != y.device:
        raise ValueError(f"{name} must be on the device of {first}, {y.device}, got {x.device}")


def has_form(
    name: str, x: object, dims: str, sizes: Dict[str, int], first: str, y: torch.Tensor,
    dtypes: Sequence[torch.dtype] = FLOATING,
) -> None:  # fmt: skip
    """Checks shape (as has_shape does), dtype, and that x is on the device of y."""
    has_shape(name, x, dims, sizes)
    has_dtype(name, x, dtypes)
    same_device(name, x, first, y)


def is_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Checks that value is one of the strings in `allowed`, or None if `allowed` contains it."""
    if (value is not None and not isinstance(value, str)) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def are_words(name: str, words: object, known: Iterable[str]) -> None:
    """Checks that words is a list, tuple or set of known words."""
    listed = isinstance(words, (list, tuple, set, frozenset))
    if not listed or not all(isinstance(word, str) and word in known for word in words):
        raise ValueError(f"{name} must be a list of {', '.join(map(repr, known))}, got {words!r}")


def are_flags(**values: object) -> None:
    """Checks that values are True or False; 0, 1 and None pass, too.

    Any other value is likely an argument in the wrong position.
    """
    for name, value in values.items():
        if value is not None and not isinstance(value, int):
            raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
        if value not in (0, 1, None):
            raise ValueError(f"{name} must be True or False, got {value}")


def is_number(name: str, value: object, least: str = "", or_none: str = "") -> None:
    """Checks for a finite float or int. least: "positive", "non-negative" or "" for any sign."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a float{or_none}, got {type(value).__name__}")
    enough = {"positive": value > 0, "non-negative": value >= 0}
    if not enough.get(least, True) or not -LARGEST <= value <= LARGEST:  # as torch.compile traces
        raise ValueError(f"{name} must be {least + ' and ' if least else ''}finite, got {value}")


def is_int(name: str, value: object, least: int, most: Optional[int] = None, why: str = "") -> None:
    """Checks for an int of at least `least` and at most `most`; why: the reason for the range."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least or most is not None and value > most:
        needed = f"at least {least}" if most is None else between(least, most)
        raise ValueError(f"{name} must be {needed}{why}, got {value}")


def between(least: int, most: int) -> str:
    """A range in words, or its one number."""
    return f"{least} to {most}" if least != most else str(least)


def is_cu_seqlens(name: str, cu_seqlens: object, first: str, y: torch.Tensor) -> None:
    """Checks dtype and shape [N + 1] of cumulative lengths; holds_cu_seqlens checks their
    values."""
    is_tensor(name, cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        raise ValueError(
            f"{name} must be the cumulative lengths of N sequences, a tensor of shape [N + 1] that "
            f"starts with 0, got one of shape {list(cu_seqlens.shape)}"
        )
    has_dtype(name, cu_seqlens, INDICES)
    same_device(name, cu_seqlens, first, y)


def is_packed(cu_seqlens: object, first: str, y: torch.Tensor, dims: str) -> None:
    """Checks the form of cumulative lengths of sequences packed into a batch y of one, whose shape
    is [1, dims]."""
    is_cu_seqlens("cu_seqlens", cu_seqlens, first, y)
    if y.shape[0] != 1:
        raise ValueError(
            f"{first} must have shape [1, {dims}] when cu_seqlens is given, got batch {y.shape[0]}"
        )


def longest(cu_seqlens: Optional[torch.Tensor], T: int) -> int:
    """The most tokens of a sequence; 0 where the host does not know."""
    if cu_seqlens is None:
        return T
    return max(cu_seqlens.diff().tolist(), default=0) if readable(cu_seqlens) else 0


def are_accepted(counts: torch.Tensor, most: int) -> None:
    """Checks numbers of accepted tokens, from 1 to the places that a state has for them."""
    if readable(counts) and not all(1 <= count <= most for count in counts.tolist()):
        raise ValueError(f"num_accepted_tokens must be {between(1, most)}, got {counts.tolist()}")


def share_heads(name: str, heads: int, first: str, shared: int) -> None:
    """Checks that each of `shared` heads is for as many of `heads`."""
    if shared < 1 or heads % shared:
        raise ValueError(
            f"{name} must have a multiple of the {shared} heads of {first}, got {heads} heads"
        )


def is_eager(main_grad: object) -> None:
    """Checks that torch.compile traces no call with main_grad."""
    if main_grad and torch.compiler.is_compiling():
        raise NotImplementedError("main_grad=True is for eager mode, not torch.compile")


def readable(x: Optional[torch.Tensor]) -> bool:
    """True if values of x may be read: on the CPU only.

    Reading on a GPU would block the host, so kernels clamp such values instead.
    """
    return x is not None and x.device.type == "cpu" and not torch.compiler.is_compiling()


def holds_cu_seqlens(
    name: str, cu_seqlens: Optional[torch.Tensor], total: int, padded: bool = False
) -> None:
    """Checks that cumulative lengths start with 0, end with `total` and never decrease.

    padded: they may end before, and what is behind is padding.
    """
    if not readable(cu_seqlens):
        return
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start with 0, got {values[0]}")
    if padded and values[-1] > total:
        raise ValueError(f"{name} must end with at most {total}, the tokens, got {values[-1]}")
    if not padded and values[-1] != total:
        raise ValueError(f"{name} must end with the number of tokens, {total}, got {values[-1]}")
    for n, (a, b) in enumerate(zip(values, values[1:])):
        if b < a:
            raise ValueError(f"{name} must not decrease, got {b} after {a} at place {n + 1}")


def is_null_index(value: object) -> None:
    """Checks the largest row index that names a null slot: -1 or 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value not in (-1, 0):
        raise ValueError(
            f"null_index must be -1 or 0, the largest index of a null slot, got {value!r}"
        )


def may_be_written(**tensors: Optional[torch.Tensor]) -> None:
    """Checks that no tensor is a leaf that requires a gradient, or a view of one.

    Results of other operations pass. The check depends on grad mode.
    """
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            continue
        if x.is_leaf or x._is_view() and x._base.is_leaf:
            raise ValueError(
                f"{name} must not require a gradient, for it is written in place: detach it, or "
                "call under torch.no_grad()"
            )


def is_written(name: str, out: object, first: str, y: torch.Tensor) -> None:
    """Checks a tensor `out` that receives an output like y."""
    has_shape_of(name, out, first, y)
    agrees(name, out, first, y)
    has_memory(name, out)


def has_memory(name: str, x: Optional[torch.Tensor]) -> None:
    """Checks that each element of x has memory of its own, unlike those of x.expand(...)."""
    if x is not None and any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape)):
        raise ValueError(
            f"{name} must have memory for each element, got strides {list(x.stride())}"
        )


def names_rows(
    name: str, indices: torch.Tensor, rows: int, null: int, written: bool = True
) -> None:
    """Checks that indices are rows of a pool, and distinct ones if the rows are written.

    Indices up to `null` name no row.
    """
    if not readable(indices):
        return
    values = [row for row in indices.flatten().tolist() if row > null]
    if any(row >= rows for row in values):
        raise ValueError(f"{name} must be below the {rows} rows of the pool, got {max(values)}")
    if written and len(set(values)) != len(values):
        raise ValueError(f"{name} must not name a row of the pool twice, got {values}")
