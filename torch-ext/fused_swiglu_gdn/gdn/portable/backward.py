"""The gradient of the chunked gated delta rule (docs/gdn_backward.md).

Prepare (unless the forward saved its blocks); both passes over the states in one launch; then all
chunks in parallel: queries, keys, gates, and dbeta for beta close to zero. There are no atomics, so
results are deterministic.
"""

import functools
from typing import Optional

import torch
import triton

from ...runtime import device, tuning
from ...runtime.dtypes import SERVED
from ...runtime.launch import steps
from ..call import GdnCall, GdnGradient
from .backward_beta import SmallBetas
from .backward_gates import Gates
from .backward_key import gdn_backward_key
from .backward_query import gdn_backward_query
from .backward_states import gdn_backward_states
from .prepare import gdn_prepare


def supports_gdn_chunk_bwd(call: GdnCall, gradient: Optional[GdnGradient] = None) -> bool:
    """True for head dims up to 256 and fp16, bf16 or fp32.

    Without value heads no program would write dq and dk.
    """
    return call.q.dtype in SERVED and max(call.K, call.V) <= 256 and call.HV > 0


@functools.lru_cache(maxsize=256)
def configuration(units: int, K: int, V: int, size: int, where: torch.device) -> dict:
    """Launch configurations of the phases for `units` sequences and value heads."""
    if K > 128 or size > 2:
        table = tuning.lookup("portable_gdn_chunk_bwd_wide", where, K=K, bytes=size)
    else:
        table = tuning.lookup("portable_gdn_chunk_bwd", where, units=units)
    if torch.version.hip is not None:
        table = {phase: for_waves(config) for phase, config in table.items()}
    elif size > 2 and device.has_tensor_memory(where):
        table = {phase: for_registers(phase, config, K) for phase, config in table.items()}
    return {
        phase: {**config, "BLOCK_V": min(config["BLOCK_V"], V)} if "BLOCK_V" in config else config
        for phase, config in table.items()
    }


def for_waves(config: dict) -> dict:
    """A phase's configuration on AMD GPUs, so that its loops do not spill.

    It has half as many waves, which have twice a warp's threads, and no loads ahead, which take
    registers there.
    """
    if "STAGES" not in config:
        return config
    return {**config, "STAGES": 1, "num_warps": config["num_warps"] // 2}


def for_registers(phase: str, config: dict, K: int) -> dict:
    """A phase's configuration in fp32 on GPUs with tensor memory.

    A phase whose products overflow tensor memory gets 16 warps, with which Triton does not use it.
    That is slow, and has only been compiled.
    """
    overflows = phase == "key" or K > 128
    return {**config, "num_warps": 16} if "STAGES" in config and overflows else config


def _query_and_key(call: GdnCall, f, do, h, dh, vt, dv, config: dict) -> tuple:
    """Returns dq, dk, cumsum(g) in log2 [rows, HV, C] and operands of the gates' gradient.

    These are the vectors by_query and by_key [rows, HV, NV, 8, C] and <S, dS> [rows, HV, NV].
    """
    rows, HV = f.shape[:2]
    NQ, NK = (vt.shape[3] // config[side]["BLOCK_V"] for side in ("query", "key"))
    cumulative = f.new_empty(rows, HV, 64)
    by_query = f.new_empty(rows, HV, NQ, 8, 64)
    by_key, ends = f.new_empty(rows, HV, NK, 8, 64), f.new_empty(rows, HV, NK)
    dp = vt.new_empty(rows, call.H, 2, 64, 64)  # dP and N of a key head
    dq = gdn_backward_query(call, f, do, vt, h, dp, cumulative, by_query, config["query"])
    dk = gdn_backward_key(call, f, cumulative, dp, vt, dv, h, dh, by_key, ends, config["key"])
    return dq, dk, cumulative, by_query, by_key, ends


def gdn_chunk_bwd(call: GdnCall, gradient: GdnGradient) -> tuple:
    """dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial_state; None for arguments that were not
    given.

    With values_only, only dv and d_initial_state.
    """
    K, V, initial_state = call.K, call.V, call.initial_state
    do, d_final = near(padded(gradient.do, 0)), gradient.d_final_state
    d_final = None if d_final is None else padded(d_final, 1)
    q, k, v = (near(padded(x, 0)) for x in (call.q, call.k, call.v))
    start = None if initial_state is None else padded(initial_state, 1)
    call = call._replace(q=q, k=k, v=v, initial_state=start)  # K and V are now powers of two
    config = configuration(call.N * call.HV, call.K, call.V, q.element_size(), q.device)
    with device.on(q.device):
        if gradient.prepared is None:
            tb, p, f, _ = gdn_prepare(call)
        else:
            tb, p, f = gradient.prepared
        h, dh, vt, dv, d_initial = gdn_backward_states(
            call, do, d_final, tb, p, f, config["states"]
        )
        if initial_state is not None:
            d_initial = cut(d_initial, *initial_state.shape[2:])
        if gradient.values_only:
            return None, None, cut(dv, V), None, None, None, None, d_initial
        dq, dk, cumulative, *parts = _query_and_key(call, f, do, h, dh, vt, dv, config)
        blocks = (call.V // config[side]["BLOCK_V"] for side in ("query", "key"))
        gates = Gates(call, *blocks, config["gates"])(call, f, *parts)
        _, dbeta, _, _ = gates
        betas = SmallBetas(call, do, config["beta"])
        betas(call, p, f, cumulative, do, vt, dv, h, dh, dbeta)
    return (cut(dq, K), cut(dk, K), cut(dv, V), *gates, d_initial)


def padded(x: torch.Tensor, more: int) -> torch.Tensor:
    """x with its last 1 + more dimensions zero-padded to powers of two, which does not change
    results.

    Every row is then copied in units of 16 bytes, and every loop over chunks is pipelined: the
    ptxas of Triton 3.4 to 3.6 loses descriptors of products in loops that are not
    (docs/gdn_backward.md).
    """
    missing = [max(triton.next_power_of_2(n), 32) - n for n in x.shape[-1 - more :]]
    if not any(missing):
        return x
    return torch.nn.functional.pad(x, [y for n in reversed(missing) for y in (0, n)])


def cut(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The leading elements of x's last dimensions, contiguous."""
    for dim, size in enumerate(sizes, -len(sizes)):
        x = x.narrow(dim, 0, size)
    return x.contiguous()


def near(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if 32-bit offsets do not span a chunk of it or its rows are not aligned to 16
    bytes."""
    reached = x.stride(-1) == 1 and x.stride(1) < 2**25
    aligned = x.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in steps(x))
    return x if reached and aligned else x.clone(memory_format=torch.contiguous_format)
