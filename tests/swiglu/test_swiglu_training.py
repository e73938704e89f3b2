"""The products of a training step that bring the gate with them (swiglu/hopper/training.py)."""

import pytest
import torch
from conftest import relative_error, submodule

pytestmark = pytest.mark.gpu
# dz is handed on with the 11 bits of fp16: beside bf16's 8 it is not rounded at all
LIMIT = {torch.bfloat16: 2e-3, torch.float16: 4e-4}
DTYPES = [torch.bfloat16, torch.float16]
# less than a tile; ragged in every dimension; several tiles to a program
SIZES = [(16, 8, 8), (130, 264, 136), (1000, 1096, 264), (2100, 4104, 520)]


@pytest.fixture
def tailed():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is Hopper's own")
    return submodule("swiglu.hopper.training")


def normal(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def check(out, ref):
    # of few values the worst may stand alone: twice the RMS
    assert relative_error(out, ref) < LIMIT[out.dtype] * (1 if out.numel() > 1000 else 2)


def halves(gate_up):
    return gate_up.double().chunk(2, dim=1)


@pytest.mark.parametrize("M, N, K", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swapped", [False, True])
def test_forward(tailed, M, N, K, dtype, swapped):
    torch.manual_seed(0)
    x = normal(M, K + 8, dtype=dtype)[:, :K]
    pair = sorted(
        (normal(N, K, dtype=dtype, scale=K**-0.5) for _ in range(2)), key=torch.Tensor.data_ptr
    )
    w_gate, w_up = pair[::-1] if swapped else pair
    z, gate_up = tailed.saving_fwd(x, w_gate, w_up, "silu")
    for out, weight in zip(gate_up.chunk(2, 1), (w_gate, w_up)):
        check(out, x.double() @ weight.double().t())
    gate, up = halves(gate_up)
    check(z, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("M, N, D", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
def test_gradients(tailed, M, N, D, dtype, activation):
    torch.manual_seed(0)
    dy, w_down = normal(M, D + 8, dtype=dtype)[:, :D], normal(D, N, dtype=dtype, scale=D**-0.5)
    gate_up = normal(M, 2 * N, dtype=dtype)
    gate, up = (h.requires_grad_() for h in halves(gate_up))
    ref = submodule("swiglu.reference").ACTIVATIONS[activation](gate) * up
    wanted = torch.autograd.grad(ref, (gate, up), dy.double() @ w_down.double())
    other = gate_up.clone()
    z = tailed.gate_gradient(dy, w_down, gate_up, activation, True)
    assert tailed.gate_gradient(dy, w_down, other, activation, False) is None
    assert torch.equal(other, gate_up)
    check(z, ref)
    for out, expected in zip(gate_up.chunk(2, 1), wanted):
        check(out, expected)


def test_gradients_of_rows_of_any_size(tailed):
    """dZ is handed on as fp16, scaled row by row: tiny and huge rows keep their precision."""
    torch.manual_seed(0)
    M, N, D = 256, 512, 128
    size = torch.logspace(-30, 30, M, dtype=torch.float64, device="cuda")
    dy = (torch.randn(M, D, device="cuda", dtype=torch.float64) * size[:, None]).bfloat16()
    dy[7] = 0
    w_down, gate_up = normal(D, N, dtype=torch.bfloat16), normal(M, 2 * N, dtype=torch.bfloat16)
    gate, up = (h.requires_grad_() for h in halves(gate_up))
    ref = torch.nn.functional.silu(gate) * up
    wanted = torch.autograd.grad(ref, (gate, up), dy.double() @ w_down.double())
    tailed.gate_gradient(dy, w_down, gate_up, "silu", False)
    for out, expected in zip(gate_up.chunk(2, 1), wanted):
        assert not out[7].any()
        error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert error[torch.arange(M) != 7].max() < 3e-3


def test_the_mlp_takes_them(kernel, tailed, monkeypatch):
    """And a training step with them equals one without, to rounding; it repeats, bit for bit."""
    tuning = submodule("runtime.tuning")
    torch.manual_seed(0)
    M, N, K = 300, 520, 264
    shapes = ((M, K, 1.0), (N, K, K**-0.5), (N, K, K**-0.5), (K, N, N**-0.5))
    leaves = [normal(m, n, dtype=torch.bfloat16, scale=s).requires_grad_() for m, n, s in shapes]
    dy = normal(M, K, dtype=torch.bfloat16)
    lookup, calls = tuning.lookup, []

    def step(least):
        def patched(operation, *args, **sizes):
            found = lookup(operation, *args, **sizes)
            if operation == "hopper_swiglu_training":
                calls.append(least)
                return {**found, "forward_rows": least, "gradient_rows": least}
            return found

        monkeypatch.setattr(tuning, "lookup", patched)
        y = kernel.fused_swiglu_mlp(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    first, again, without = step(1), step(1), step(10**9)
    assert calls.count(1) >= 4
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert all(relative_error(a, b) < 6e-3 for a, b in zip(first, without))
    assert not all(torch.equal(a, b) for a, b in zip(first, without))


@pytest.mark.parametrize("M", [144, 2100])
def test_bits_do_not_depend_on_where_weights_lie(kernel, tailed, monkeypatch, M):
    """Beside one another, up first, by several strides of a map, so far apart that none lead there.

    At odd addresses cuBLAS's own products, those of the forward, have other bits.
    """
    torch.manual_seed(0)
    N, K, forward = 512, 256, submodule("swiglu.hopper.forward")
    spare = torch.empty(2**22, device="cuda", dtype=torch.bfloat16)
    x, dy = [normal(M, n, dtype=torch.bfloat16) for n in (K, K)]
    w_gate, w_up = [normal(N, K, dtype=torch.bfloat16, scale=K**-0.5) for _ in range(2)]
    w_down = normal(K, N, dtype=torch.bfloat16, scale=N**-0.5)

    def step(first, second, longest=2**40):
        monkeypatch.setattr(forward, "LONGEST", longest)
        placed = []
        for place, w in ((first, w_gate), (second, w_up)):
            placed.append(spare[place:][: N * K].view(N, K).copy_(w))
        leaves = [t.detach().requires_grad_() for t in (x, *placed, w_down)]
        y = kernel.fused_swiglu_mlp(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    far = 2**21
    want = step(0, N * K)
    for place in [
        (N * K, 0), (0, far), (0, far, 2**18), (far, 0, 2**18), (0, far + 256, 2**16),
        (0, far, 2**12),
    ]:  # fmt: skip
        assert all(map(torch.equal, step(*place), want)), place
    for place in ((1, N * K + 1), (far + 3, 8)):
        assert all([relative_error(a, b) < 1e-2 for a, b in zip(step(*place), want)]), place
