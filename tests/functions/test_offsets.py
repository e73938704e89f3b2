"""cu_seqlens on a GPU is not read on the host: wrong values give results without a meaning, but no
kernel may read or write out of bounds, or hang."""

import random

import pytest
import torch
from conftest import submodule
from interpreter import compiled, interpreted, test_in_the_interpreter  # noqa: F401

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

locate = submodule("gdn.portable.primitives").locate
conv_rows = submodule("gdn_layer.portable.causal_conv1d_rows")
sequence_at, advance = conv_rows.sequence_at, conv_rows.advance
T, N = 300, 3
WRONG = ([0, 500, 300, 300], [-70, 100, 90, 300], [200, 100, 0, 10**6], [300, -200, 250, 9])


@triton.jit
def _place_kernel(cu_ptr, out_ptr, T, N, SPAN: tl.constexpr):
    """What locate finds for a row; where the walk over sequences is, of a row's first token on."""
    row = tl.program_id(0)
    n, span, start, length = locate(row, cu_ptr, T, N, 0, SPAN)
    at = out_ptr + row * 8
    tl.store(at, n)
    tl.store(at + 1, span)
    tl.store(at + 2, start)
    tl.store(at + 3, length)
    token = tl.minimum(row * SPAN, T - 1)
    n, start, stop = sequence_at(row * 0, token, T, cu_ptr, N)
    n, start, stop = advance(n, start, stop, tl.minimum(token + 40, T - 1), T, cu_ptr, N)
    tl.store(at + 4, n)
    tl.store(at + 5, start)
    tl.store(at + 6, stop)


@interpreted
@pytest.mark.parametrize("span", [64, 128])
def test_places_lie_within(span):
    draw = random.Random(0)
    wrong = [[draw.randint(-200, 500) for _ in range(N + 1)] for _ in range(40)]
    for ends in (*WRONG, *wrong):
        rows = T // span + N
        out = torch.empty(rows, 8, dtype=torch.int64)
        _place_kernel[(rows,)](torch.tensor(ends, dtype=torch.int32), out, T, N, span)
        for row, (n, at, start, length, n1, start1, stop1, _) in enumerate(out.tolist()):
            assert 0 <= n < N and 0 <= at and 0 <= start and 0 <= length and start + length <= T
            if at * span < length:  # its block has a row of its own
                assert 0 <= start // span + n + at < rows, (ends, row)
            token = min(row * span, T - 1)
            assert 0 <= n1 < N and 0 <= start1 <= min(token + 40, T - 1) and stop1 <= T


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("ends", WRONG)
def test_no_kernel_faults(kernel, ends):
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device="cuda")

    def leaf(*shape):
        return torch.randn(*shape, device="cuda").bfloat16().requires_grad_()

    q, k, v = leaf(1, T, 2, 128), leaf(1, T, 2, 128), leaf(1, T, 4, 128)
    g, beta = -torch.rand(1, T, 4, device="cuda"), torch.rand(1, T, 4, device="cuda")
    state = torch.randn(N, 4, 128, 128, device="cuda")
    options = {"initial_state": state, "cu_seqlens": cu_seqlens, "output_final_state": True}
    o, _ = kernel.chunk_gated_delta_rule(q, k, v, g, beta, **options)
    o.sum().backward()
    with submodule("runtime.dispatch").force("portable"):
        kernel.chunk_gated_delta_rule(q, k, v, g, beta, **options)[0].sum().backward()
    with torch.no_grad():
        kernel.fused_recurrent_gated_delta_rule(q, k, v, g, beta, **options)
    weight = leaf(256, 4)
    for x in (leaf(1, T, 256).transpose(1, 2), leaf(1, 256, T)):
        y = kernel.causal_conv1d_fn(x, weight, activation="silu", cu_seqlens=cu_seqlens)
        y.sum().backward()
    torch.cuda.synchronize()
