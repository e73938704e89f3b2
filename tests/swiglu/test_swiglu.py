"""The SwiGLU kernels against the reference in fp64: hopper and portable, and what each promises."""

import functools

import pytest
import torch
from conftest import assert_close, captured, prepared, relative_error, submodule
from interpreter import (  # noqa: F401
    DEVICE,
    INTERPRETING,
    both_ways,
    compiled,
    interpreted,
    test_in_the_interpreter,
)

reference = submodule("swiglu.reference")

ACTIVATIONS = ("silu", "gelu_tanh", "relu")
LAYOUTS = ("separate", "swapped", "packed", "interleaved", "wf")

# one rounding of a result that is right to fp32: half of the spacing of bf16 or fp16 values, as RMS
ROUNDED_ONCE = {torch.bfloat16: 2e-3, torch.float16: 2.5e-4, torch.float32: 2e-6}


def weights(N, K, dtype, layout, device):
    """w_gate, w_up [N, K] of unit variance over sqrt(K), as two views in the layout."""

    def normal(*shape):
        return torch.randn(*shape, device=device, dtype=dtype) * max(K, 1) ** -0.5

    if layout in ("separate", "swapped"):
        pair = sorted((normal(N, K), normal(N, K)), key=torch.Tensor.data_ptr)
        return pair if layout == "separate" else pair[::-1]
    if layout == "packed":
        return normal(2 * N, K).chunk(2)
    if layout == "interleaved":
        return normal(N, 2, K).unbind(1)
    wf = normal(K, 2 * N)
    return wf[:, :N].t(), wf[:, N:].t()


def inputs(M, N, K, dtype, layout="separate", bias=False, device=DEVICE, seed=0):
    """x with a row stride of its own, weights and biases: arguments of swiglu_fwd but the last."""
    torch.manual_seed(seed)
    x = torch.randn(M, K + 8, device=device, dtype=dtype)[:, :K]
    b_gate, b_up = torch.randn(2, N, device=device, dtype=dtype) if bias else (None, None)
    return x, *weights(N, K, dtype, layout, device), b_gate, b_up


def expected(x, w_gate, w_up, b_gate, b_up, activation):
    args = (x, w_gate, w_up, b_gate, b_up)
    wide = (a if a is None else a.double() for a in args)
    return reference.swiglu_fwd(*wide, activation)


def check(run, args, activation):
    """run(*args, activation) is right everywhere, with its output's memory full of NaN before."""
    x, w_gate = args[:2]
    stale = torch.full((x.shape[0], w_gate.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    del stale  # the caching allocator hands this block to the next tensor of the size
    z = run(*args, activation)
    assert z.dtype == x.dtype
    ref = expected(*args, activation)
    assert_close(z, ref)
    # of few values the worst may stand alone: twice the RMS
    assert relative_error(z, ref) < ROUNDED_ONCE[x.dtype] * (1 if z.numel() > 1000 else 2)


def serve(implementation):
    """swiglu_fwd of an implementation."""
    kind = submodule("swiglu.call").Swiglu
    return functools.partial(prepared, f"swiglu.{implementation}.forward", "swiglu_fwd", kind)


# one row; less than a tile; one tile; several tiles with ragged edges, K below and above a block
SIZES = [(1, 3072, 1024), (3, 77, 133), (17, 100, 70), (64, 1024, 512), (130, 129, 131)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
if INTERPRETING:
    SIZES, DTYPES = [(1, 5, 7), (3, 40, 33), (16, 32, 64), (70, 100, 72)], DTYPES[1:]


@pytest.mark.kernels_ci
@both_ways
@pytest.mark.parametrize("M, N, K", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_portable_values(M, N, K, layout, dtype):
    check(serve("portable"), inputs(M, N, K, dtype, layout), "silu")


@interpreted
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_portable_activations_and_bias(activation):
    check(serve("portable"), inputs(5, 40, 24, torch.float32, bias=True), activation)


@both_ways
def test_portable_unequal_and_far_strides():
    x, w_gate, w_up, _, _ = inputs(3, 6, 10, DTYPES[-1] if INTERPRETING else DTYPES[0])
    far = x.new_zeros(1).as_strided((1, 10), (2**24, 0))  # a row stride beyond 32-bit offsets
    run = serve("portable")
    check(run, (x, w_gate, w_up.t().contiguous().t(), None, None), "silu")
    check(run, (far, w_gate, w_up, None, None), "relu")


# hopper serves more rows than portable's small tiles; whole tiles, ragged M, N and K, many waves
LARGE_SIZES = [(512, 4352, 256), (200, 136, 72), (77, 264, 1000), (65, 8, 8), (1000, 2240, 136)]


@pytest.mark.gpu
@pytest.mark.parametrize("M, N, K", LARGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["hopper", "portable"])
def test_values(implementation, M, N, K, layout, dtype):
    check(serve(implementation), inputs(M, N, K, dtype, layout), "silu")


@pytest.mark.kernels_ci
@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("M", [16, 200])
@pytest.mark.parametrize("implementation", ["hopper", "portable"])
def test_activations_and_bias(implementation, M, activation):
    if implementation == "hopper" and M < 65:
        pytest.skip("portable serves few rows")
    for dtype in (torch.bfloat16, torch.float16):
        check(serve(implementation), inputs(M, 264, 128, dtype, bias=True), activation)


@pytest.mark.gpu
def test_fp32_follows_torch():
    args = inputs(200, 128, 512, torch.float32)
    ref = expected(*args, "silu")
    errors, before = {}, torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            errors[allowed] = relative_error(serve("portable")(*args, "silu"), ref)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert errors[False] < 2e-6 < errors[True] < 2e-3


@pytest.mark.kernels_ci
@pytest.mark.gpu
@pytest.mark.parametrize("implementation, M", [("hopper", 300), ("portable", 300), ("portable", 7)])
def test_bits_repeat(implementation, M):
    args = inputs(M, 1024, 1024, torch.bfloat16)
    run = serve(implementation)
    first = run(*args, "silu")
    for _ in range(5):
        assert torch.equal(run(*args, "silu"), first)


@pytest.mark.gpu
def test_weights_gigabytes_apart():
    """The stride of the joined weights passes 2^31 elements."""
    N, K = 256, 128
    memory = torch.empty(2**31 + 4 * N * K, dtype=torch.bfloat16, device="cuda")
    pair = [part.view(N, K).normal_() for part in (memory[: N * K], memory[-N * K :])]
    x = torch.randn(200, K, dtype=torch.bfloat16, device="cuda")
    for weights in (pair, pair[::-1]):
        check(serve("hopper"), (x, *weights, None, None), "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("N, K", [(3072, 1024), (1096, 520), (77, 133)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_does_not_depend_on_its_batch(kernel, N, K, dtype):
    """A row's bits are equal in every tile: few rows, half and three-quarter tiles, whole ones."""
    x, w_gate, w_up, _, _ = inputs(1100, N, K, dtype)
    everything = kernel.fused_swiglu(x, w_gate, w_up)
    for M in (1, 3, 16, 17, 33, 64, 65, 128, 256, 512, 1000):
        assert torch.equal(kernel.fused_swiglu(x[-M:], w_gate, w_up), everything[-M:])


@pytest.mark.gpu
def test_graph_replays():
    for M in (4, 300):
        args = inputs(M, 512, 256, torch.bfloat16)
        run = serve("hopper" if M > 64 else "portable")
        run(*args, "silu")
        graph, z = captured(run, *args, "silu")
        args[0].copy_(torch.randn_like(args[0]))
        graph.replay()
        assert torch.equal(z, run(*args, "silu"))


@pytest.mark.gpu
def test_streams():
    cases = [inputs(300, 512, 256, torch.bfloat16, seed=seed) for seed in range(4)]
    run = serve("hopper")
    ref = [run(*args, "silu") for args in cases]
    torch.cuda.synchronize()
    out = []
    for args in cases:
        with torch.cuda.stream(torch.cuda.Stream()):
            out.append(run(*args, "silu"))
    torch.cuda.synchronize()
    assert all(torch.equal(z, r) for z, r in zip(out, ref))


@compiled
def test_hopper_chooses_by_waves(monkeypatch):
    """132 SMs and Hopper's table: the case of M = 512 in docs/swiglu.md."""
    hopper, facts = submodule("swiglu.hopper.forward"), submodule("runtime.device")
    monkeypatch.setattr(facts, "multiprocessor_count", lambda index: 132)
    monkeypatch.setattr(submodule("runtime.tuning"), "chip", lambda device: ("capability=9.0",))
    choose = hopper.choose.__wrapped__  # nothing of this is remembered
    where = torch.device("cuda", 0)
    tile, whole, halves = choose(where, 512, 14336, 4096)
    assert (dict(tile)["columns"], whole, halves) == (128, 396, True)
    tile, whole, halves = choose(where, 512, 3072, 1024)
    assert (dict(tile)["columns"], whole, halves) == (96, 128, False)
    tile, _, halves = choose(where, 512, 3072, 1024, wf=True)
    assert dict(tile)["columns"] == dict(tile)["BLOCK_N"] and not halves


@compiled
def test_hopper_declines_what_the_copy_engine_cannot_read():
    hopper, kind = submodule("swiglu.hopper.forward"), submodule("swiglu.call").Swiglu

    def served(*args):
        return hopper.prepare_swiglu_fwd(kind.of((*args, None, None, "silu"))) is not None

    def pair(N, K, layout="separate"):
        return weights(N, K, torch.bfloat16, layout, "cpu")

    x = torch.randn(128, 64).bfloat16()
    assert served(x, *pair(64, 64)) and served(x, *pair(64, 64, "wf"))
    assert not served(x[:8], *pair(64, 64))  # few rows
    assert not served(x, *pair(60, 64))  # rows of z off 16 bytes
    assert not served(x[:, :63], *pair(64, 63))  # rows of the weights off 16 bytes
    assert not served(x.float(), *(w.float() for w in pair(64, 64)))
    assert not served(x[:, :0], *pair(64, 0))  # nothing to sum
    w = pair(64, 64)[0]
    assert not served(x, w, pair(64, 64, "interleaved")[1])  # strides differ


@compiled
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("order", [(0, 0, 1, 2, 3, 4, 0), (1, 0), (2, 0), (3, 0), (4, 0)])
def test_other_addresses_of_a_known_call(kernel, grad, order, monkeypatch):
    """TMA reads at multiples of 16 bytes alone, and weights less than 2**40 bytes apart: elsewhere
    a call is portable's, whose bits are the same. Gradients copy such weights: their bits would be
    others."""
    pytest.importorskip("triton.experimental.gluon")
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    spare = torch.empty(3 * 128 * 64 + 8).bfloat16()
    hopper = submodule("swiglu.hopper.forward")

    def at(*places):
        return [spare[i:][: 64 * 64].view(64, 64) for i in places]

    places = [at(0, 4096), at(0, 4096), at(1, 4097), at(0, 20480), at(0, 0)]
    gates = ["_gate_fwd_kernel", "_gate_bwd_kernel"]
    with recording.recorded(device.Chip("NVIDIA_H200", (9, 0), 132)) as records:
        for kind in order:
            x = spare[kind == 1 :][: 128 * 64].view(128, 64).detach().requires_grad_(grad)
            w = [x.detach().requires_grad_(grad) for x in places[kind]]
            monkeypatch.setattr(hopper, "LONGEST", 2**8 if kind == 3 else 2**40)
            z = kernel.fused_swiglu(x, *w)
            if grad:
                torch.autograd.grad(z, (x, *w), torch.ones_like(z))
            names = [record.name for record in records]
            records.clear()
            alone = "swiglu_fwd_kernel" if kind == 0 else "_swiglu_fwd_kernel"
            assert names == ([*gates, "_swiglu_dx_kernel"] if grad else [alone]), kind


@compiled
def test_strides_between_weights_that_are_far_apart():
    """127.5 * 2**40 bytes, as the driver places memory after NCCL has begun."""
    forward, backward = submodule("swiglu.hopper.forward"), submodule("swiglu.hopper.backward")

    class At(int):
        data_ptr = int.__int__

    far = 0x7F8752F30000
    for gate, up, most, want in [
        (512, 1024, 1, 1), (1024, 512, 1, 1), (512, 512, 1, 0), (512, 520, 1, 0), (4, 516, 1, 0),
        (far, 0x319800000, 128, 128), (0x319800000, far, 128, 128), (far, 0x319800000, 1, 0),
        (far, 0x319800200, 128, 0), (0, 2**40, 128, 2), (0, 2**40 - 16, 1, 1), (16, 2**41, 128, 0),
    ]:  # fmt: skip
        assert forward.strides_between(At(gate), At(up), most) == want, (hex(gate), hex(up))
    device = submodule("runtime.device")
    with device.pretending(device.Chip("NVIDIA_H200", (9, 0), 132)):
        apart, where = (0x319800000 - far) // 2, torch.device("cpu")
        plan = backward._dx_plan(where, 144, 512, 256, (256, 1), apart, 128)
        weights = plan.maps[1]
        assert weights.shape == [129, 512, 256] and weights.strides[1:] == [256, 1]
        assert weights.strides[0] * 128 == -apart and weights.strides[0] * 2 < 2**40
        assert plan.numbers[-1] == 128


if INTERPRETING:
    submodule("swiglu.portable.forward")
