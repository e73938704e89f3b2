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
by_kernel = functools.partial(prepared, "gdn_layer.portable.layer")
convolution_bwd = functools.partial(by_kernel, "causal_conv1d_bwd", calls.ConvolutionGradient)
norm_bwd = functools.partial(by_kernel, "rms_norm_gated_bwd", calls.GatedNormGradient)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])

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
IN_FP16 = ("states", "packed, no states")  # each kernel once: it computes in fp32 in any case
LARGE = {
    "qwen": {"D": 8192, "T": 300},
    "long, packed": {"D": 300, "lengths": (0, 3, 0, 170, 1, 200)},
    "odd": {"D": 333, "T": 1001, "wider": 7, "initial": True, "final": True},
    "odd, channels first": {"D": 70, "T": 333, "channels_first": True, "wider": 3},
    "packed view": {"D": 256, "wider": 64, "lengths": (1, 0, 130, 2, 300), "initial": True},
}
NORMS = [((3, 5, 4, 16), "silu"), ((7, 20), "sigmoid"), ((300, 64), "silu")]
LARGE_NORMS = [((2, 500, 32, 128), "silu"), ((3, 8192), "silu"), ((5, 3, 100), "sigmoid")]


def convolution(
    dtype, device="cpu", T=35, W=4, activation="silu", bias=True, initial=False, final=False,
    seq_idx=False, lengths=None, channels_first=False, D=6, wider=0,
) -> tuple:  # fmt: skip
    """The fields of a call of the gradient. With `wider`, views as layers have of projections."""
    random = torch.Generator(device=device).manual_seed(0)

    def normal(*shape):
        x = torch.randn(*shape, generator=random, device=device, dtype=torch.float64)
        return x.to(dtype)

    def tokens_by_channels():
        x = normal(B, D + wider, T)
        return (x if channels_first else x.mT.contiguous().mT)[:, :D]

    B = N = 1 if lengths else 2
    cu = seq = None
    if lengths:
        T, N = sum(lengths), len(lengths)
        cu = torch.tensor((0, *lengths), device=device).cumsum(0).to(torch.int32)
    if seq_idx:
        seq = (torch.arange(T, device=device) > T // 3).int().expand(B, T)
    x, dy = tokens_by_channels(), tokens_by_channels()
    states = [normal(N, D, W - 1) if given else None for given in (initial, final)]
    bias = normal(D) if bias else None
    return x, normal(D, W), bias, seq, cu, states[0], dy, states[1], activation


def check_convolution(gradients, fields):
    *args, dy, d_final, activation = fields
    places = [i for i in (0, 1, 2, 5) if args[i] is not None]
    leaves = [args[i].double().requires_grad_() for i in places]
    for i, leaf in zip(places, leaves):
        args[i] = leaf
    y, final = reference.causal_conv1d_fwd(*args, activation, d_final is not None)
    loss = (y * dy.double()).sum()
    if d_final is not None:
        loss = loss + (final * d_final.double()).sum()
    got = gradients(*fields)
    assert [d is not None for d in got] == [i in places for i in (0, 1, 2, 5)]
    for a, b in zip([d for d in got if d is not None], torch.autograd.grad(loss, leaves)):
        assert relative_error(a, b) <= 2 * TOLERANCE[fields[0].dtype]


def norm(shape, activation, dtype, device="cpu") -> tuple:
    """The fields of a call of the gradient; gate is a view, as layers have it."""
    random = torch.Generator(device=device).manual_seed(0)
    shapes = (shape, (*shape[:-1], 2 * shape[-1]), shape[-1:], shape)
    made = [torch.randn(s, generator=random, device=device).to(dtype) for s in shapes]
    x, gate, weight, dy = made
    return x, gate[..., : shape[-1]], weight, dy, 1e-6, activation


def check_norm(gradients, fields):
    *tensors, dy, eps, activation = fields
    leaves = [t.double().requires_grad_() for t in tensors]
    y = reference.rms_norm_gated_fwd(*leaves, eps, activation)
    for a, b in zip(gradients(*fields), torch.autograd.grad(y, leaves, dy.double())):
        assert relative_error(a, b) <= 2 * TOLERANCE[dy.dtype]


@compiled
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_written_out_convolution(name):
    check_convolution(backward.causal_conv1d_bwd, convolution(torch.float64, **CONVOLUTIONS[name]))


@compiled
@pytest.mark.parametrize("shape, activation", NORMS)
def test_written_out_norm(shape, activation):
    check_norm(backward.rms_norm_gated_bwd, norm(shape, activation, torch.float64))


@interpreted
@pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.float32) for name in CONVOLUTIONS] + [(name, torch.float16) for name in IN_FP16],
)
def test_convolution(name, dtype):
    check_convolution(convolution_bwd, convolution(dtype, **CONVOLUTIONS[name]))


@interpreted
@pytest.mark.parametrize("shape, activation", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm(shape, activation, dtype):
    check_norm(norm_bwd, norm(shape, activation, dtype))


@compiled
def test_operator_of_the_prologue():
    heads, weight = torch.randn(3, 1, 6, 2, 2).double().unbind(0), torch.randn(12, 3).double()
    torch.library.opcheck(fused.PROLOGUE.op, (*heads, weight, None, None, None, "silu", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("options", {**CONVOLUTIONS, **LARGE}.values(), ids=[*CONVOLUTIONS, *LARGE])
@every_dtype
def test_gpu_convolution(options, dtype):
    fields = convolution(dtype, "cuda", **options)
    check_convolution(convolution_bwd, fields)
    twice = [convolution_bwd(*fields) for _ in range(2)]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*twice))


@pytest.mark.gpu
@pytest.mark.parametrize("shape, activation", NORMS + LARGE_NORMS)
@every_dtype
def test_gpu_norm(shape, activation, dtype):
    fields = norm(shape, activation, dtype, "cuda")
    check_norm(norm_bwd, fields)
    assert all(map(torch.equal, norm_bwd(*fields), norm_bwd(*fields)))
