"""The gates of prefill and of decode against fp64, and against each other."""

import pytest
import torch
from conftest import submodule
from gdn_problems import blocks_of, on_gpu
from interpreter import interpreted, test_in_the_interpreter  # noqa: F401

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

calls, gates = submodule("gdn.call"), submodule("gdn.portable.gates")
LOG2 = 0.6931471805599453
# Of a log-decay in fp32: a + dt_bias is rounded (5e-7 of its exponential where it is about 12), an
# exponential of a GPU is off by 1e-6 there, that of A_log by 3e-7. log(1 + exp(a)) would be off by
# 1e-2.
LIMIT = 3e-6


@triton.jit
def decode_gates(a_ptr, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, N: tl.constexpr, R: tl.constexpr):
    """Gates that the decode kernels compute from a token's raw gates."""
    n = tl.arange(0, N)
    a = tl.load(a_ptr + n)
    tl.store(g_ptr + n, gates.log_decay(a, A_log_ptr, dt_bias_ptr, n % R))
    tl.store(beta_ptr + n, gates.write_strength(a, 2.0))


def raw_gates(device):
    """a [1024, 4] from -12 to 12, A_log and dt_bias [4]."""
    a = torch.linspace(-12.0, 12.0, 4096, device=device).view(1024, 4)
    A_log = torch.tensor([-3.0, 0.0, 1.0, 2.5], device=device)
    return a, A_log, torch.tensor([0.0, 0.5, -0.25, 1.0], device=device)


def decayed(a, A_log, dt_bias):
    """The log-decay in fp64: F.softplus is x itself above 20, where nothing is lost."""
    softplus = torch.nn.functional.softplus(a.double() + dt_bias.double())
    return -A_log.double().exp() * softplus


def by_decode(a, A_log, dt_bias):
    g, beta = torch.empty_like(a), torch.empty_like(a)
    decode_gates[(1,)](a, A_log, dt_bias, g, beta, N=a.numel(), R=a.shape[1])
    return g.double(), beta.double()


def by_prefill(implementation, a, A_log, dt_bias, dtype, D):
    """The log-decay of one token a sequence: log2 of its chunk's transition, where beta is 0."""
    N, HV = a.shape
    q = torch.nn.functional.normalize(torch.ones(N, 1, 1, D, device=a.device), dim=-1).to(dtype)
    g, v = a.view(N, 1, HV), q.new_zeros(N, 1, HV, D)
    options = calls.GdnOptions(1.0, use_qk_l2norm=True)
    beta = torch.zeros_like(g)
    call = calls.GdnCall(q, q, v, g, beta, A_log, dt_bias, None, None, None, options)
    *_, decay = blocks_of(implementation, call)
    return decay.view(N, HV).double() * LOG2


def check(implementation, device, dtype, D=128, every=1):
    """Decoding at all values of a, prefill at every so many rows of them."""
    a, A_log, dt_bias = raw_gates(device)
    ref, cut = decayed(a, A_log, dt_bias), -200.0 * LOG2  # below it all is forgotten
    decode, beta = by_decode(a, A_log, dt_bias)
    assert ((decode - ref).abs() / ref.abs()).max() < LIMIT
    assert ((beta - 2 * a.double().sigmoid()).abs() / beta).max() < LIMIT
    prefill = by_prefill(implementation, a[::every].contiguous(), A_log, dt_bias, dtype, D)
    ref, decode = ref[::every].clamp(min=cut), decode[::every].clamp(min=cut)
    assert ((prefill - ref).abs() / ref.abs()).max() < LIMIT
    assert ((prefill - decode).abs() / decode.abs()).max() < 1e-6  # log2(e), there and back


@interpreted
def test_one_formula_interpreted():
    check("portable", "cpu", torch.float32, D=16, every=33)


@on_gpu
@pytest.mark.parametrize("folder", ["portable", "hopper"])
def test_one_formula(folder):
    if folder == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    check(folder, "cuda", torch.bfloat16)
