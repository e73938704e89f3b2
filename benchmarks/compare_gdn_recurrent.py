"""Kernel time of decoding against FLA, FlashInfer and a copy of the state.

    python benchmarks/compare_gdn_recurrent.py [--json FILE]     on a GPU

Three states take turns, so that what one call wrote is no longer in the cache when it is read.
`copy` is a Triton kernel that reads and writes as many bytes as the state has: the wall. FLA keeps
its state as [K, V] and writes a new one; FlashInfer writes in place, as ours do, [V, K] or (fp32
alone) [K, V].
FLA_FLASH_QLA=0 and FLA_TILELANG=0 keep FLA to its own kernels.
"""

import itertools
import statistics
from functools import partial

import torch
import triton
import triton.language as tl
from kernel_time import host_us, microseconds
from peers import peer
from runner import run

STATES = 3
CASES = [(B, 16, HV) for HV in (32, 64) for B in (64, 256, 1)]
FLA_BATCH = 64  # FLA 0.6.0 ends in an illegal memory access with 256 sequences, and takes all along


@triton.jit
def _copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def tensors(B, H, HV, T=1):
    def normal(*shape):
        return torch.randn(*shape, device="cuda")

    q, k = normal(2, B, T, H, 128).bfloat16().unbind(0)
    v = normal(B, T, HV, 128).bfloat16()
    a, b = normal(2, B, T, HV).bfloat16().unbind(0)
    return q, k, v, a, b, normal(HV), normal(HV)


def rounds(call, states):
    """call(state) for each state: what is timed is all of them."""
    return lambda: [call(state) for state in states]


RAW = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
       "use_beta_sigmoid_in_kernel": True}  # fmt: skip


def ours(package, x, v_first, **options):
    """The call of a state, which it writes in place unless other options say so."""
    *given, A_log, dt_bias = x
    options = options or {"inplace_final_state": True}
    return lambda state: package.fused_recurrent_gated_delta_rule(
        *given, initial_state=state, A_log=A_log, dt_bias=dt_bias, state_v_first=v_first, **RAW,
        **options,
    )  # fmt: skip


def fla(function, x):
    q, k, v, a, b, A_log, dt_bias = x
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    beta = b.float().sigmoid()
    return lambda state: function(
        q, k, v, g, beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def flashinfer(function, x, kept: str):
    """kept "[V, K]"; "by index": states out of a pool, which spares FlashInfer a launch for its
    bf16 states; "[K, V]": its kernel for fp32 states that are kept so."""
    q, k, v, a, b, A_log, dt_bias = x
    out = torch.empty_like(v)
    rows = torch.arange(q.shape[0], device="cuda", dtype=torch.int32)

    def call(state):
        by_index = kept == "by index"
        pool = {"initial_state": state, "initial_state_indices": rows} if by_index else {}
        return function(
            q, k, v, None if by_index else state, A_log, a, dt_bias, b, scale=128**-0.5,
            output=out, use_qk_l2norm=True, **pool,
        )  # fmt: skip

    return call


def copy(state):
    block = 4096 if state.numel() >= 2**22 else 2048
    _copy_kernel[(state.numel() // block,)](state, state, BLOCK=block)


def states_of(B, HV, dtype) -> list:
    return [torch.randn(B, HV, 128, 128, device="cuda").to(dtype) * 0.1 for _ in range(STATES)]


@torch.no_grad()
def compare(package, B, H, HV, dtype, by_fla, by_flashinfer, by_flashinfer_kv) -> dict:
    x, states = tensors(B, H, HV), states_of(B, HV, dtype)
    calls = {"copy": copy, "ours": ours(package, x, True), "ours_kv": ours(package, x, False)}
    if by_flashinfer:
        calls["flashinfer"] = flashinfer(by_flashinfer, x, "[V, K]")
        if dtype == torch.bfloat16:
            calls["flashinfer_pool"] = flashinfer(by_flashinfer, x, "by index")
        else:
            calls["flashinfer_kv"] = flashinfer(by_flashinfer_kv, x, "[K, V]")
    if by_fla and dtype == torch.float32 and B <= FLA_BATCH:
        calls["fla"] = fla(by_fla, x)
    times = microseconds({name: rounds(call, states) for name, call in calls.items()})
    host = partial(host_us, calls=20, runs=20, warm=20, of=statistics.median)
    return {
        "B": B, "heads": [H, HV], "state": str(dtype)[6:],
        "us": {name: t / STATES for name, t in times.items()},
        "host_us": {f"{n}_host": host(partial(call, states[0])) for n, call in calls.items()},
    }  # fmt: skip


def rows(package, options):
    peers = [
        peer("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        peer("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose"),
        peer("flashinfer.gdn_decode", "gated_delta_rule_decode"),
    ]
    for case, dtype in itertools.product(CASES, (torch.float32, torch.bfloat16)):
        yield compare(package, *case, dtype, *peers)


if __name__ == "__main__":
    run(__doc__, "gdn_recurrent", rows)
