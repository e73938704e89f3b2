"""Numbers of sequences and chunks of the gated delta rule, and of the rows that chunks take."""

from typing import Optional

import torch

CHUNK = 64  # tokens


def count_sequences(B: int, cu_seqlens: Optional[torch.Tensor]) -> int:
    """Number of packed sequences with cumulative lengths [N + 1], or of rows of the batch."""
    return B if cu_seqlens is None else cu_seqlens.shape[0] - 1


def chunk_rows(T: int, B: int, cu_seqlens: Optional[torch.Tensor]) -> int:
    """Rows of the prepared blocks, without a prefix sum or a device value; gaps are harmless."""
    if cu_seqlens is None:
        return B * -(-T // CHUNK)
    return T // CHUNK + cu_seqlens.shape[0] - 1
