"""Sequences and chunks of the gated delta rule: how many there are, and the rows of the chunks."""

from typing import Optional

import torch

CHUNK = 64  # tokens


def count_sequences(B: int, cu_seqlens: Optional[torch.Tensor]) -> int:
    """Packed sequences by their cumulative lengths [N + 1], or one for each row of the batch."""
    return B if cu_seqlens is None else cu_seqlens.shape[0] - 1


def chunk_rows(T: int, B: int, cu_seqlens: Optional[torch.Tensor]) -> int:
    """Rows of the prepared blocks: no prefix sum, no device value is needed; gaps are harmless."""
    if cu_seqlens is None:
        return B * -(-T // CHUNK)
    return T // CHUNK + cu_seqlens.shape[0] - 1
