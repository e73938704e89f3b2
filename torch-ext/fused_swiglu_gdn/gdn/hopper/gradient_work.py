"""State that the warps of gradient.py share, and the chunk and head of a number.

Sizes are those of gradient.py.
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record
from .primitives import locate


@record
class Work:
    """State that the warps of a CTA share."""

    q_desc: hw.tma.tensor_descriptor  # [.., .., tokens, H, K] box [1, 1, C, 1, K]
    k_desc: hw.tma.tensor_descriptor  # likewise
    do_desc: hw.tma.tensor_descriptor  # [.., .., tokens, HV, V] box [1, 1, C, 1, HALF]
    vt_desc: hw.tma.tensor_descriptor  # likewise
    dv_desc: hw.tma.tensor_descriptor  # likewise
    s_desc: hw.tma.tensor_descriptor  # [rows * HV * K, V] box [K, HALF]
    ds_desc: hw.tma.tensor_descriptor  # likewise
    q_smem: gl.shared_memory_descriptor  # [C, K]
    k_smem: gl.shared_memory_descriptor  # [C, K]
    do_smem: gl.shared_memory_descriptor  # [STAGES, C, HALF]
    vt_smem: gl.shared_memory_descriptor  # [STAGES, C, HALF]
    dv_smem: gl.shared_memory_descriptor  # [STAGES, C, HALF]
    s_smem: gl.shared_memory_descriptor  # [STAGES, K, HALF]
    ds_smem: gl.shared_memory_descriptor  # [STAGES, K, HALF]
    dp_smem: gl.shared_memory_descriptor  # [C, C] dP of the chunk
    n_smem: gl.shared_memory_descriptor  # [C, C] N
    full: gl.shared_memory_descriptor  # [STAGES] mbarriers: a slot's loads are complete
    empty: gl.shared_memory_descriptor  # [STAGES] mbarriers: all have read it
    pair_full: gl.shared_memory_descriptor  # [1] mbarrier: q and k are there
    pair_empty: gl.shared_memory_descriptor  # [1] mbarrier: both warpgroups are done with them
    dp_full: gl.shared_memory_descriptor  # [1] mbarrier: dP is written
    dp_empty: gl.shared_memory_descriptor  # [1] mbarrier: and read
    T: gl.tensor
    N: gl.tensor
    NT: gl.tensor  # ceil(T / C), equal length
    count: gl.tensor  # chunk rows times H
    H: gl.constexpr
    R: gl.constexpr
    NORM: gl.constexpr


@gluon.jit
def place(w, number, cu_ptr):
    """(chunk row, key head) of a number, and the results of `locate` for the row."""
    row = number // w.H
    batch, end, first, c, length = locate(row, cu_ptr, w.T, w.N, w.NT)
    return row, number % w.H, batch, end, first, c, length
