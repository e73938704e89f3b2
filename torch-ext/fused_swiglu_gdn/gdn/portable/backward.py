"""The gradient of the chunked gated delta rule (docs/gdn_backward.md).

Prepare (unless the forward saved its blocks); both passes over the states in one launch; then all
chunks in parallel: queries, keys, gates, and dbeta for beta close to zero. There are no atomics, so
results are deterministic.
"""

import functools
from typing import Callable, Optional

import torch

from ...runtime import device, tuning
from ...runtime.copies import on_copies, on_dense
from ...runtime.launch import steps
from ...runtime.sizes import next_power_of_2
from ..call import GdnBackward
from .backward_beta import small_betas
from .backward_gates import Gates
from .backward_key import key_launch
from .backward_query import query_launch
from .backward_states import States
from .padding import Padded, padding_launch
from .prepare import Prepare
from .primitives import FAR, are_served, on_read

# fields of a GdnBackward that kernels take with any strides
APART = ("g", "beta", "initial_state", "do", "d_final_state", "tb", "p", "f")
TOKENS = (0, 1, 2, 9)  # q, k, v and do in a GdnBackward


def prepare_gdn_chunk_bwd(call: GdnBackward) -> Optional[Callable]:
    """The call's tensors -> dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial_state; None for
    arguments that were not given. With values_only, only dv and d_initial_state.

    For the calls that are_served.
    """
    return on_dense(_prepare, call, *APART) if are_served(call) else None


def _prepare(call: GdnBackward) -> Callable:
    K, V = call.K, call.V
    if (K, V) == (_filled(K), _filled(V)):
        return _read(call)
    run = on_copies(_read, call, _padded)

    def by_padded(*tensors) -> tuple:
        dq, dk, dv, *gates, d_initial = run(*tensors)
        dq, dk = [None if x is None else cut(x, K) for x in (dq, dk)]
        d_initial = None if d_initial is None else cut(d_initial, *tensors[7].shape[2:])
        return dq, dk, cut(dv, V), *gates, d_initial

    return by_padded


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


class _Gradient(Padded):
    """The launches for all calls with the same shapes, strides, dtypes and options; K and V are
    powers of two."""

    __slots__ = (
        "where", "prepare", "states", "shapes", "query", "key", "gates", "betas", "padding",
    )  # fmt: skip

    def __init__(self, call: GdnBackward):
        do, size, rows, HV = call.do, call.q.element_size(), call.rows, call.HV
        config = configuration(call.N * HV, call.K, call.V, size, call.device)
        self.where, self.padding = call.device, padding_launch(call)
        self.prepare = None if call.prepared else Prepare(call)
        self.states = States(call, do, call.d_final_state, config["states"])
        self.query = None
        if call.options.values_only:
            return
        NQ, NK = (call.V // config[side]["BLOCK_V"] for side in ("query", "key"))
        # cumsum(g) in log2, the vectors of queries and of keys, <S, dS>; dP and N of a key head
        fp32 = ((64,), (NQ, 8, 64), (NK, 8, 64), (NK,))
        self.shapes = [(rows, HV, *shape) for shape in fp32], (rows, call.H, 2, 64, 64)
        self.query = query_launch(call, config["query"])
        self.key = key_launch(call, config["key"])
        self.gates = Gates(call, NQ, NK, config["gates"])
        self.betas = small_betas(call, do, config["beta"])

    def launched(
        self, q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, do, d_final, tb, p, f
    ) -> tuple:
        if self.prepare is not None:
            tb, p, f, _ = self.prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens)
        blocks = (tb, p, f, cu_seqlens, None)
        h, dh, vt, dv, d_initial = self.states(q, k, v, do, *blocks, initial, d_final)
        d_initial = None if initial is None else d_initial.contiguous()
        if self.query is None:
            return None, None, dv, None, None, None, None, d_initial
        fp32, square = self.shapes
        cumulative, by_query, by_key, ends = [f.new_empty(shape) for shape in fp32]
        dp, dq, dk = vt.new_empty(square), q.new_empty(q.shape), k.new_empty(k.shape)
        own = (g, A_log, dt_bias, cu_seqlens)
        self.query(q, k, *own, f, do, vt, h, dq, dp, cumulative, by_query)
        self.key(q, k, cu_seqlens, f, cumulative, dp, vt, dv, h, dh, dk, by_key, ends)
        own = (g, beta, A_log, dt_bias, cu_seqlens)
        gates = self.gates(*own, f, by_query, by_key, ends)  # dg, dbeta, dA_log, ddt_bias
        of_chunks = (p, f, cumulative, None, None)
        self.betas(k, v, beta, cu_seqlens, *of_chunks, do, vt, dv, h, dh, gates[1])
        return (dq, dk, dv, *gates, d_initial)


def _read(call: GdnBackward) -> Callable:
    return on_read(_Gradient, call, *TOKENS, lies=lies_near)


def _padded(*tensors) -> list:
    """The tensors of a call, with head dims filled up to powers of two."""
    filled = [padded(x, 0) if i in TOKENS else x for i, x in enumerate(tensors)]
    for i in (7, 10):  # initial_state, d_final_state
        filled[i] = None if filled[i] is None else padded(filled[i], 1)
    return filled


def _filled(n: int) -> int:
    """The head dim that kernels compute in place of n."""
    return max(next_power_of_2(n), 32)


def padded(x: torch.Tensor, more: int) -> torch.Tensor:
    """x with its last 1 + more dimensions zero-padded to powers of two, which does not change
    results.

    Every row is then copied in units of 16 bytes, and every loop over chunks is pipelined: the
    ptxas of Triton 3.4 to 3.6 loses descriptors of products in loops that are not
    (docs/gdn_backward.md).
    """
    missing = [_filled(n) - n for n in x.shape[-1 - more :]]
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
    reached = x.stride(-1) == 1 and x.stride(1) < FAR
    return reached and all(step % 16 == 0 for step in steps(x))


def near(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy unless it lies_near and begins at a multiple of 16 bytes."""
    if lies_near(x) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
