"""Room for what the launches of a call leave for each other."""

from typing import List, Tuple

import torch

from .maps import Place

STEP = 256  # bytes: where each array begins


class Workspace:
    """Arrays one behind the other in one tensor, given as (elements, dtype).

    An allocation costs the host as much as half a launch, and so does each view.
    """

    __slots__ = ("size", "starts")

    def __init__(self, *arrays: Tuple[int, torch.dtype]):
        self.size, self.starts = 0, []
        for count, dtype in arrays:
            self.starts.append((self.size, dtype))
            self.size += -(-count * dtype.itemsize // STEP) * STEP

    def __call__(self, like: torch.Tensor) -> Tuple[torch.Tensor, List[Place]]:
        """The tensor, to be kept till all is launched, and where each array lies."""
        memory = like.new_empty(self.size, dtype=torch.uint8)
        at = memory.data_ptr()
        return memory, [Place(at + start, dtype) for start, dtype in self.starts]
