"""Scratch memory that the launches of a call share."""

from typing import List, Tuple

import torch

from .maps import RawPointer

STEP = 256  # bytes: where each array begins


class Workspace:
    """Arrays, given as (elements, dtype), packed into one tensor.

    One allocation, and likewise one view, costs the host as much as half a launch.
    """

    __slots__ = ("size", "starts")

    def __init__(self, *arrays: Tuple[int, torch.dtype]):
        self.size, self.starts = 0, []
        for count, dtype in arrays:
            self.starts.append((self.size, dtype))
            self.size += -(-count * dtype.itemsize // STEP) * STEP

    def __call__(self, like: torch.Tensor) -> Tuple[torch.Tensor, List[RawPointer]]:
        """Returns the tensor, which must live until all is launched, and the address of each
        array."""
        memory = like.new_empty(self.size, dtype=torch.uint8)
        at = memory.data_ptr()
        return memory, [RawPointer(at + start, dtype) for start, dtype in self.starts]
