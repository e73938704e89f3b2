"""Kimi Delta Attention as operations: in chunks, with a gradient, and token by token."""

import torch
from torch import Tensor

from ..gdn.ops import step_operations
from ..gdn.ops_context import add_rule
from ..gdn.ops_train import chunk_operations
from . import checks
from .call import KdaBackward, KdaCall, KdaStepCall
from .reference.backward import kda_chunk_bwd
from .reference.chunk import kda_chunk_fwd
from .reference.recurrent import kda_recurrent_fwd

CHUNK, CHUNK_IN_POOL, GRADIENT = chunk_operations(
    "kda", KdaCall, KdaBackward, (kda_chunk_fwd, kda_chunk_bwd), "chunk_kda",
    check=checks.chunk, cast=checks.flat,
)  # fmt: skip
add_rule(CHUNK, GRADIENT)


def _with_strength(q, k, v, g, beta, *more) -> tuple:
    """The tensors as checks.flat has them, with a write strength of 1 by default."""
    if beta is None and isinstance(v, Tensor):
        beta = v.new_ones(v.shape[:3], dtype=torch.float32)
    return checks.flat(q, k, v, g, beta, *more)


RECURRENT, RECURRENT_IN_PLACE = step_operations(
    "kda", KdaStepCall, kda_recurrent_fwd, checks.recurrent, _with_strength
)
