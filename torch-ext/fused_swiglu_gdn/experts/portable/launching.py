"""Launches of experts/, cached by everything but addresses."""

import functools
from typing import NamedTuple, Optional

import torch

from ...runtime.launch import Launch
from ...runtime.maps import Map


class Box(NamedTuple):
    """A contiguous tensor that a kernel moves in blocks; reads outside of it give zeros."""

    tensor: torch.Tensor
    shape: tuple
    block: tuple


def box(tensor: torch.Tensor, *block: int, shape: Optional[tuple] = None) -> Box:
    """Returns the Box of a tensor; shape: a shape other than the tensor's."""
    return Box(tensor, tuple(tensor.shape) if shape is None else shape, block)


def _map(shape: tuple, block: tuple) -> Map:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return Map(shape, strides[::-1], block)


@functools.lru_cache(maxsize=4096)
def launch_of(
    kernel, size: int, where, boxes: tuple, numbers, constexprs, options, pdl: bool
) -> Launch:
    """boxes: (shape, block), or None, for each tensor map."""
    return Launch(
        kernel, size, where, maps=tuple([each and _map(*each) for each in boxes]), numbers=numbers,
        constexprs=constexprs, options=options, early=pdl,
    )  # fmt: skip


def launch(
    kernel, size: int, boxes: tuple, pointers: tuple, numbers: tuple, constexprs: tuple,
    num_warps: int, num_stages: Optional[int] = None, pdl: bool = False,
) -> None:  # fmt: skip
    """The kernel with `size` programs. Its parameters in their order: boxes or None, pointers or
    None, of which the last is there, numbers, constexprs. pdl: it may begin before what it follows
    has ended."""
    options: tuple = (("num_warps", num_warps),)
    if num_stages is not None:
        options += (("num_stages", num_stages),)
    described = tuple([b and b[1:] for b in boxes])
    where = pointers[-1].device
    start = launch_of(kernel, size, where, described, numbers, constexprs, options, pdl)
    start(*[b and b.tensor for b in boxes], *pointers)
