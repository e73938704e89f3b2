"""Kernel time of decoding against FLA, FlashInfer and a copy of the state.

    python benchmarks/compare_gdn_recurrent.py [--json FILE]     on a GPU

Three states take turns, so that what one call wrote is no longer in the cache when it is read.
`copy` is a Triton kernel that reads and writes as many bytes as the state has: the wall. FLA keeps
its state as [K, V] and writes a new one; FlashInfer writes in place, as ours do, [V, K] or (fp32
alone) [K, V].
FLA_FLASH_QLA=0 and FLA_TILELANG=0 keep FLA to its own kernels.
"""

import argparse
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
from kernel_time import RESULTS, load_package, microseconds, parse_on_gpu, save

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


def ours(package, x, v_first):
    q, k, v, a, b, A_log, dt_bias = x
    return lambda state: package.fused_recurrent_gated_delta_rule(
        q, k, v, a, b, initial_state=state, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, state_v_first=v_first,
        inplace_final_state=True,
    )  # fmt: skip


def fla(x):
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, k, v, a, b, A_log, dt_bias = x
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    beta = b.float().sigmoid()
    return lambda state: fused_recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def flashinfer(x, by_index):
    """by_index: states out of a pool, which spares FlashInfer a launch for its bf16 states."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    q, k, v, a, b, A_log, dt_bias = x
    out = torch.empty_like(v)
    rows = torch.arange(q.shape[0], device="cuda", dtype=torch.int32)

    def call(state):
        pool = {"initial_state": state, "initial_state_indices": rows} if by_index else {}
        return gated_delta_rule_decode_pretranspose(
            q, k, v, None if by_index else state, A_log, a, dt_bias, b, scale=128**-0.5,
            output=out, use_qk_l2norm=True, **pool,
        )  # fmt: skip

    return call


def flashinfer_kv(x):
    """Its kernel for states kept as [K, V], fp32."""
    from flashinfer.gdn_decode import gated_delta_rule_decode

    q, k, v, a, b, A_log, dt_bias = x
    out = torch.empty_like(v)
    return lambda state: gated_delta_rule_decode(
        q, k, v, state, A_log, a, dt_bias, b, scale=128**-0.5, output=out, use_qk_l2norm=True
    )


def copy(state):
    block = 4096 if state.numel() >= 2**22 else 2048
    _copy_kernel[(state.numel() // block,)](state, state, BLOCK=block)


def host(call, state) -> float:
    """Microseconds until an eager call returns."""
    for _ in range(20):
        call(state)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call(state)
        times.append((time.perf_counter() - start) / 20 * 1e6)
    return sorted(times)[len(times) // 2]


def compare(package, B, H, HV, dtype, peers) -> dict:
    x = tensors(B, H, HV)
    states = [torch.randn(B, HV, 128, 128, device="cuda").to(dtype) * 0.1 for _ in range(STATES)]
    calls = {"copy": copy, "ours": ours(package, x, True), "ours_kv": ours(package, x, False)}
    if "flashinfer" in peers:
        calls["flashinfer"] = flashinfer(x, by_index=False)
        if dtype == torch.bfloat16:
            calls["flashinfer_pool"] = flashinfer(x, by_index=True)
        else:
            calls["flashinfer_kv"] = flashinfer_kv(x)
    if "fla" in peers and dtype == torch.float32 and B <= FLA_BATCH:
        calls["fla"] = fla(x)
    with torch.no_grad():
        times = microseconds({name: rounds(call, states) for name, call in calls.items()})
        eager = {f"{name}_host": host(call, states[0]) for name, call in calls.items()}
    times = {name: t / STATES for name, t in times.items()}
    row = {"B": B, "heads": [H, HV], "state": str(dtype)[6:], "us": times, "host_us": eager}
    print(row, flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "gdn_recurrent.json")
    options = parse_on_gpu(parser)
    peers = []
    for name in ("fla", "flashinfer"):
        try:
            __import__(name)
            peers.append(name)
        except ImportError:
            pass
    package = load_package()
    rows = []
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            rows.append(compare(package, *case, dtype, peers))
            save(options.json, rows, peers=peers)


if __name__ == "__main__":
    main()
