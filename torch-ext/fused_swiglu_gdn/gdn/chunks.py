"""The chunks of the gated delta rule: their size, and the rows of what is made for each of them."""

from typing import Optional

import torch

CHUNK = 64  # tokens


def chunk_rows(T: int, B: int, cu_seqlens: Optional[torch.Tensor]) -> int:
    """Rows of the prepared blocks: no prefix sum, no device value is needed; gaps are harmless."""
    if cu_seqlens is None:
        return B * -(-T // CHUNK)
    return T // CHUNK + cu_seqlens.shape[0] - 1
