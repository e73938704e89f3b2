"""The gradient of the chunked gated delta rule (docs/gdn_backward.md).

Prepare (unless the forward saved its blocks); both passes over the states in one launch; then all
chunks in parallel: queries, keys, gates, and dbeta for beta close to zero. There are no atomics, so
results are deterministic.
"""

import functools
from typing import Callable, Optional

import torch

from ...runtime import device, tuning
from ...runtime.dtypes import SERVED
from ...runtime.launch import steps
from ...runtime.operation import on_dense
from ...runtime.sizes import next_power_of_2
from ..call import GdnBackward, GdnCall
from .backward_beta import small_betas
from .backward_gates import Gates
from .backward_key import gdn_backward_key
from .backward_query import gdn_backward_query
from .backward_states import gdn_backward_states
from .prepare import gdn_prepare

# fields of a GdnBackward that kernels take with any strides
APART = ("g", "beta", "initial_state", "do", "d_final_state", "tb", "p", "f")


def prepare_gdn_chunk_bwd(call: GdnBackward) -> Optional[Callable]:
    """The call's tensors -> dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial_state; None for
    arguments that were not given. With values_only, only dv and d_initial_state.

    For head dims up to 256 and fp16, bf16 or fp32. Without value heads no program would write dq
    and dk.
    """
    if call.q.dtype not in SERVED or max(call.K, call.V) > 256 or call.HV == 0:
        return None
    return on_dense(_prepare, call, *APART)


def _prepare(call: GdnBackward) -> Callable:
    options = call.options
    return lambda *tensors: _gradients(GdnBackward(*tensors, options))


@functools.lru_cache(maxsize=256)
def configuration(units: int, K: int, V: int, size: int, where: torch.device) -> dict:
    """Launch configurations of the phases for `units` sequences and value heads."""
    if K > 128 or size > 2:
        table = tuning.lookup("portable_gdn_chunk_bwd_wide", where, K=K, bytes=size)
    else:
        table = tuning.lookup("portable_gdn_chunk_bwd", where, units=units)
    return fitted(table, K, V, size, where)


def fitted(table: dict, K: int, V: int, size: int, where: torch.device) -> dict:
    """The configurations of a table by phase, as this GPU and these head dims can have them."""
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


def _gradients(call: GdnBackward) -> tuple:
    K, V, initial_state = call.K, call.V, call.initial_state
    do, d_final = near(padded(call.do, 0)), call.d_final_state
    d_final = None if d_final is None else padded(d_final, 1)
    q, k, v = (near(padded(x, 0)) for x in (call.q, call.k, call.v))
    start = None if initial_state is None else padded(initial_state, 1)
    call = call._replace(q=q, k=k, v=v, initial_state=start)  # K and V are now powers of two
    config = configuration(call.N * call.HV, call.K, call.V, q.element_size(), q.device)
    with device.on(q.device):
        if call.prepared is None:
            tb, p, f, _ = gdn_prepare(call)
        else:
            tb, p, f = call.prepared
        h, dh, vt, dv, d_initial = gdn_backward_states(
            call, do, d_final, tb, p, f, config["states"]
        )
        if initial_state is not None:
            d_initial = cut(d_initial, *initial_state.shape[2:])
        if call.options.values_only:
            return None, None, cut(dv, V), None, None, None, None, d_initial
        dq, dk, cumulative, *parts = _query_and_key(call, f, do, h, dh, vt, dv, config)
        blocks = (call.V // config[side]["BLOCK_V"] for side in ("query", "key"))
        own = (call.g, call.beta, call.A_log, call.dt_bias, call.cu_seqlens)
        gates = Gates(call, *blocks, config["gates"])(*own, f, *parts)
        _, dbeta, _, _ = gates
        own = (call.k, call.v, call.beta, call.cu_seqlens, p, f, cumulative, None, None)
        small_betas(call, do, config["beta"])(*own, do, vt, dv, h, dh, dbeta)
    return (cut(dq, K), cut(dk, K), cut(dv, V), *gates, d_initial)


def padded(x: torch.Tensor, more: int) -> torch.Tensor:
    """x with its last 1 + more dimensions zero-padded to powers of two, which does not change
    results.

    Every row is then copied in units of 16 bytes, and every loop over chunks is pipelined: the
    ptxas of Triton 3.4 to 3.6 loses descriptors of products in loops that are not
    (docs/gdn_backward.md).
    """
    missing = [max(next_power_of_2(n), 32) - n for n in x.shape[-1 - more :]]
    if not any(missing):
        return x
    return torch.nn.functional.pad(x, [y for n in reversed(missing) for y in (0, n)])


def cut(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The leading elements of x's last dimensions, contiguous."""
    for dim, size in enumerate(sizes, -len(sizes)):
        x = x.narrow(dim, 0, size)
    return x.contiguous()


def lies_near(x: torch.Tensor) -> bool:
    """True if 32-bit offsets span a chunk of x and its rows are whole multiples of 16 elements."""
    reached = x.stride(-1) == 1 and x.stride(1) < 2**25
    return reached and all(step % 16 == 0 for step in steps(x))


def near(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy unless it lies_near and begins at a multiple of 16 bytes."""
    if lies_near(x) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
