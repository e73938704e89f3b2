"""Gradients of the convolution and the gated norm: written out in torch, and by the kernels,
against automatic differentiation of the reference in fp64."""

import functools

import pytest
import torch
from conftest import TOLERANCE, prepared, relative_error, submodule
from interpreter import compiled, interpreted, test_in_the_interpreter  # noqa: F401

reference = submodule("gdn_layer.reference.layer")
backward, calls = submodule("gdn_layer.reference.backward"), submodule("gdn_layer.call")
ops, fused = submodule("gdn_layer.ops"), submodule("gdn_layer.ops_fused")


def by_kernel(name, kind):
    """What the kernels compute of the fields of a call."""
    return functools.partial(prepared, "gdn_layer.portable.layer", name, kind)


convolution_bwd = by_kernel("causal_conv1d_bwd", calls.ConvolutionGradient)
norm_bwd = by_kernel("rms_norm_gated_bwd", calls.GatedNormGradient)

CONVOLUTIONS = {
    "plain": {},
    "no activation": {"activation": None, "bias": False},
    "states": {"initial": True, "final": True},
    "shorter than the taps": {"T": 2, "initial": True, "final": True},
    "seq_idx": {"seq_idx": True},
    "packed": {"lengths": (0, 3, 0, 17, 2, 13), "initial": True, "final": True},
    "packed, no states": {"lengths": (0, 3, 0, 17, 2, 20), "D": 7},
    "packed, initial states": {"lengths": (1, 3, 0, 17, 2, 20), "initial": True, "D": 7},
    "shorter than the taps, initial states": {"T": 2, "initial": True},
    "eight taps, no states": {"W": 8, "T": 20},
    "two taps, channels first": {"W": 2, "channels_first": True},
    "eight taps": {"W": 8, "T": 20, "initial": True},
}


class Convolution:
    """Arguments of one call, the gradients of its outputs, and those of its inputs."""

    def __init__(
        self, dtype, device="cpu", T=35, W=4, activation="silu", bias=True, initial=False,
        final=False, seq_idx=False, lengths=None, channels_first=False, D=6, wider=0,
    ):  # fmt: skip
        random = torch.Generator(device=device).manual_seed(0)

        def normal(*shape):
            x = torch.randn(*shape, generator=random, device=device, dtype=torch.float64)
            return x.to(dtype)

        def tokens_by_channels(B, D, T):
            x = normal(B, D + wider, T)
            x = x if channels_first else x.mT.contiguous().mT
            return x[:, :D]  # with `wider`, a view as layers have of their projections

        B = 1 if lengths else 2
        cu = seq = None
        N = B
        if lengths:
            T, N = sum(lengths), len(lengths)
            cu = torch.tensor((0, *lengths), device=device).cumsum(0).to(torch.int32)
        if seq_idx:
            seq = (torch.arange(T, device=device) > T // 3).int().expand(B, T)
        self.x, self.dy = tokens_by_channels(B, D, T), tokens_by_channels(B, D, T)
        weight, bias = normal(D, W), normal(D) if bias else None
        state = normal(N, D, W - 1) if initial else None
        self.args, self.activation = (self.x, weight, bias, seq, cu, state), activation
        self.d_final = normal(N, D, W - 1) if final else None

    def expected(self):
        leaves = {i: self.args[i].double().requires_grad_() for i in self.given()}
        args = [leaves.get(i, x) for i, x in enumerate(self.args)]
        final = self.d_final is not None
        y, state = reference.causal_conv1d_fwd(*args, self.activation, final)
        loss = (y * self.dy.double()).sum()
        if self.d_final is not None:
            loss = loss + (state * self.d_final.double()).sum()
        return torch.autograd.grad(loss, list(leaves.values()))

    def given(self):
        return [i for i in (0, 1, 2, 5) if self.args[i] is not None]

    def check(self, gradients):
        got = gradients(*self.args, self.dy, self.d_final, self.activation)
        assert [d is None for d in got] == [i not in self.given() for i in (0, 1, 2, 5)]
        for a, b in zip([d for d in got if d is not None], self.expected()):
            assert relative_error(a, b) <= 2 * TOLERANCE[self.x.dtype]


def check_norm(gradients, shape, activation, dtype, device="cpu"):
    random = torch.Generator(device=device).manual_seed(0)
    x, gate, dy = (torch.randn(shape, generator=random, device=device).to(dtype) for _ in range(3))
    weight = torch.randn(shape[-1], generator=random, device=device).to(dtype)
    gate = gate.repeat(*[1] * (len(shape) - 1), 2)[..., : shape[-1]]  # a view, as layers have it
    leaves = [t.double().requires_grad_() for t in (x, gate, weight)]
    y = reference.rms_norm_gated_fwd(*leaves, 1e-6, activation)
    want = torch.autograd.grad(y, leaves, dy.double())
    for a, b in zip(gradients(x, gate, weight, dy, 1e-6, activation), want):
        assert relative_error(a, b) <= 2 * TOLERANCE[dtype]


NORMS = [((3, 5, 4, 16), "silu"), ((7, 20), "sigmoid"), ((300, 64), "silu")]


LARGE_NORMS = [((2, 500, 32, 128), "silu"), ((3, 8192), "silu"), ((5, 3, 100), "sigmoid")]


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_written_out_convolution(options):
    Convolution(torch.float64, **options).check(backward.causal_conv1d_bwd)


@pytest.mark.parametrize("shape, activation", NORMS)
def test_written_out_norm(shape, activation):
    check_norm(backward.rms_norm_gated_bwd, shape, activation, torch.float64)


# each kernel once: what it computes is fp32 in any case
IN_FP16 = ("states", "packed, no states")


@interpreted
@pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.float32) for name in CONVOLUTIONS] + [(name, torch.float16) for name in IN_FP16],
)
def test_convolution(name, dtype):
    Convolution(dtype, **CONVOLUTIONS[name]).check(convolution_bwd)


@interpreted
@pytest.mark.parametrize("shape, activation", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm(shape, activation, dtype):
    check_norm(norm_bwd, shape, activation, dtype)


@compiled
def test_operators():
    x = torch.randn(2, 4, 10, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    args = (x, weight, None, None, None, None, "silu", False)
    torch.library.opcheck(ops.CONVOLUTION.op, args)
    gate, scale = torch.randn_like(x, requires_grad=True), torch.ones(10, dtype=torch.float64)
    torch.library.opcheck(ops.GATED_NORM.op, (x, gate, scale.requires_grad_(), 1e-6, "silu"))
    heads, weight = torch.randn(3, 1, 6, 2, 2).double().unbind(0), torch.randn(12, 3).double()
    torch.library.opcheck(fused.PROLOGUE.op, (*heads, weight, None, None, None, "silu", 0))
    y = ops.CONVOLUTION.op(*args)[0]
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dx.sum().backward()


LARGE = {
    "qwen": {"D": 8192, "T": 300},
    "long, packed": {"D": 300, "lengths": (0, 3, 0, 170, 1, 200)},
    "odd": {"D": 333, "T": 1001, "wider": 7, "initial": True, "final": True},
    "odd, channels first": {"D": 70, "T": 333, "channels_first": True, "wider": 3},
    "packed view": {"D": 256, "wider": 64, "lengths": (1, 0, 130, 2, 300), "initial": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", {**CONVOLUTIONS, **LARGE}.values(), ids=[*CONVOLUTIONS, *LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_convolution(options, dtype):
    case = Convolution(dtype, "cuda", **options)
    case.check(convolution_bwd)
    fields = (*case.args, case.dy, case.d_final, case.activation)
    twice = [convolution_bwd(*fields) for _ in range(2)]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*twice))


@pytest.mark.gpu
@pytest.mark.parametrize("shape, activation", NORMS + LARGE_NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_norm(shape, activation, dtype):
    check_norm(norm_bwd, shape, activation, dtype, "cuda")
    x, gate, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
    weight = torch.randn(shape[-1], device="cuda").to(dtype)
    twice = [norm_bwd(x, gate, weight, dy, 1e-6, activation) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*twice))
