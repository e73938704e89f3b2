"""Few tokens in FP8: products of several weights in one launch, and MLPs."""

import fp8_problems
import pytest
import torch
from conftest import prepared, submodule
from interpreter import compiled, interpreted, test_in_the_interpreter  # noqa: F401

reference, product = submodule("fp8.reference"), submodule("fp8.product")
calls = submodule("fp8.call")
ROWS = ((128,), (272, 128, 64), (1040, 16), (64,) * 6)


def error(found, exact) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def weights_of(rows, K, device="cpu", seed=0) -> tuple:
    """(weights, scales)."""
    random = torch.Generator().manual_seed(seed)
    made = [
        fp8_problems.quantised_weight(torch.randn(n, K, generator=random).mul(K**-0.5))
        for n in rows
    ]
    weights, scales = zip(*made)
    return tuple(w.to(device) for w in weights), tuple(s.to(device) for s in scales)


def tokens(M, K, device="cpu", seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=random) * torch.randn(K, generator=random).exp()
    return x.bfloat16().to(device)


def products(codes, M, weights, scales, plain=(), x=None):
    """By the kernels, or None. plain: weights in bf16, by which x is multiplied."""
    absent = (None,) * (6 - len(weights))
    tensors = (*codes, *weights, *absent, *scales, *absent, x, *plain, *(None,) * (2 - len(plain)))
    return prepared("fp8.hopper.few", "few_fwd", calls.Few, *tensors, M)


def few(x, weights, scales):
    return products(reference.quantise_fwd(x), len(x), weights, scales)


# --- the kernels


def check_products(device):
    """Against fp64 of their operands, and each token's bits beside any others."""
    for rows, K in zip(ROWS, (640, 512, 1152, 256)):
        weights, scales = weights_of(rows, K, device)
        x = tokens(64, K, device)
        codes = reference.quantise_fwd(x)
        exact = [fp8_problems.exact(codes, w, s) for w, s in zip(weights, scales)]
        whole = few(x, weights, scales)
        assert whole.shape == (64, sum(rows)) and error(whole, torch.cat(exact, 1)) < 4e-3
        for M in (1, 15, 17, 33):
            part = few(x[:M].contiguous(), weights, scales)
            assert torch.equal(part, whole[:M]), (rows, M)
    codes = reference.quantise_fwd(tokens(3, 512, device))
    weights, scales = weights_of((128,), 512, device)
    assert products(codes, 3, weights, scales) is not None
    assert products(codes, 65, weights, scales) is None
    assert products(codes, 3, (weights[0][:, :256],), scales) is None
    assert products(codes, 3, weights, (scales[0].double(),)) is None
    assert products(codes, 3, (weights[0].view(torch.int8),), scales) is None
    assert product.few(codes, 3, weights * 7, scales * 7) is None


def check_plain(device, dtype=torch.bfloat16):
    """Weights in bf16 behind those in FP8, in the same launch: each as by itself, whatever stands
    beside. dtype: another one for the interpreter, which multiplies bf16 wrongly."""
    hopper, whole = submodule("fp8.hopper.few"), None
    for rows, others, K in (((272, 64), (32, 48), 640), ((128,), (3,), 1152)):
        weights, scales = weights_of(rows, K, device)
        plain = [tokens(n, K, device, seed=n).mul(K**-0.5).to(dtype) for n in others]
        x = tokens(64, K, device)
        exact = torch.cat([x.double() @ p.double().t() for p in plain], 1)
        for M in (64, 1, 17, 33):
            some = x[:M].contiguous().to(dtype)
            product = hopper._Few(x.device, M, K, rows, plain=others)
            absent = (None,) * (6 - len(rows))
            tensors = (*weights, *absent, *scales, *absent, some, *plain)
            y = product(*reference.quantise_fwd(x[:M]), *tensors)
            whole = y if M == 64 else whole
            assert y.shape == (M, sum(rows) + sum(others)) and torch.equal(y, whole[:M]), (rows, M)
        assert torch.equal(whole[:, : sum(rows)], few(x, weights, scales))
        assert error(whole[:, sum(rows) :], exact) < 4e-3


@interpreted
def test_plain_weights_that_are_served():
    weights, scales = weights_of((128,), 256)
    x, plain = tokens(3, 256), (tokens(32, 256), tokens(8, 256))
    codes = reference.quantise_fwd(x)
    whole = products(codes, 3, weights, scales, plain, x)
    assert whole.shape == (3, 168)
    for bad in ((plain[0].half(),), (plain[0][:, 1:],), (plain[0][0],), (plain[0][:0],)):
        assert products(codes, 3, weights, scales, bad, x) is None
    assert products(codes, 3, weights, scales, plain, tokens(4, 256)) is None
    assert product.few(codes, 3, weights, scales, plain[:1] * 3, x) is None


def check_quantised_products(device):
    """One operation: the codes of the quantiser, and the bits of a product with them; of x of any
    shape."""
    (weight,), (scale,) = weights_of((272,), 640, device)

    def both(x):
        return prepared("fp8.hopper.few", "quantise_few_fwd", calls.QuantiseFew, x, weight, scale)

    for M in (1, 17, 64):
        x = tokens(M, 640, device)
        codes = prepared("fp8.portable.quantise", "quantise_fwd", calls.Quantise, x)
        expected = products(codes, M, (weight,), (scale,))
        assert torch.equal(both(x), expected)
        assert torch.equal(both(x.view(M, 1, 640)), expected.view(M, 1, 272))
        wide = torch.cat((x, x), 1)[:, :640]
        assert torch.equal(both(wide), expected)
    for bad in (tokens(65, 640, device), x[:0], x.half(), x[:, :512], x.t()):
        assert both(bad) is None


@interpreted
def test_quantised_products_interpreted():
    check_quantised_products("cpu")


def mlp_of(K, N, device="cpu"):
    (gate, up), (s_gate, s_up) = weights_of((N, N), K, device)
    (down,), (s_down,) = weights_of((K,), N, device, seed=1)
    return (gate, up, down), (s_gate, s_up, s_down)


def mlp(x, weights, scales, residual=None):
    """By the kernels."""
    return mlp_products(reference.quantise_fwd(x), len(x), weights, scales, residual)


def mlp_products(codes, M, weights, scales, residual=None):
    fields = (*codes, *weights, *scales, residual, M)
    return prepared("fp8.hopper.few", "few_mlp_fwd", calls.FewMlp, *fields)


def check_mlp(device, most):
    for K, N in ((256, 384), (640, 128)):
        weights, scales = mlp_of(K, N, device)
        x = tokens(64, K, device)
        codes = reference.quantise_fwd(x)
        whole = mlp(x, weights, scales)
        expected = reference.few_mlp_fwd(*codes, *weights, *scales, None, 64)
        assert whole.shape == (64, K) and error(whole, expected) < most, (K, N)
        for M in (1, 64):
            assert torch.equal(mlp(x[:M], weights, scales, x[:M]), x[:M] + whole[:M])
        for M in (1, 16, 31, 50):
            assert torch.equal(mlp(x[:M], weights, scales), whole[:M]), M
    assert mlp_products(codes, 65, weights, scales) is None
    assert mlp_products(codes, 64, weights, scales, x.float()) is None
    assert mlp_products(codes, 64, weights, scales, x[:1]) is None
    narrow = (*(w[:64] for w in weights[:2]), weights[2][:, :64].contiguous())
    assert mlp_products(codes, 64, narrow, scales) is None


@interpreted
def test_products_interpreted():
    check_products("cpu")


@interpreted
def test_plain_weights_interpreted():
    check_plain("cpu", torch.float32)


@interpreted
def test_parts_of_k_interpreted(monkeypatch):
    """Parts of any number of steps, the last of which may be shorter."""
    hopper = submodule("fp8.hopper.few")
    weights, scales = weights_of((128, 64), 9 * 128)
    x = tokens(5, 9 * 128)
    codes = reference.quantise_fwd(x)
    exact = torch.cat([fp8_problems.exact(codes, w, s) for w, s in zip(weights, scales)], 1)[:5]
    for steps, parts in ((1, 2), (1, 4), (2, 3), (2, 1)):
        config = {
            "ROWS": 64,
            "STEPS": steps,
            "per_processor": 1,
            "num_warps": 4,
            "num_stages": 3,
            "AHEAD": 0,
        }
        monkeypatch.setattr(hopper.tuning, "lookup", lambda *_, config=config, **__: config)
        monkeypatch.setattr(hopper, "parts_of_k", lambda *_, parts=parts: parts)
        assert error(few(x, weights, scales), exact) < 4e-3, (steps, parts)


@interpreted
def test_mlps_interpreted():
    """Triton's interpreter rounds to e4m3 and bf16 in ways of its own."""
    check_mlp("cpu", 0.12)


def test_the_references():
    weights, scales = mlp_of(256, 384)
    x = tokens(17, 256)
    codes = reference.quantise_fwd(x)
    ys = [reference.multiply_fwd(w, s, codes)[:17] for w, s in zip(weights[:2], scales[:2])]
    few = (*codes, *weights[:2], *scales[:2])
    assert torch.equal(reference.few_fwd(*few, None, None, None, 17), torch.cat(ys, 1))
    expected = torch.cat(ys, 1)[:, : ys[0].shape[1]].view(17, 1, -1)
    mine = reference.quantise_few_fwd(x.view(17, 1, 256), weights[0], scales[0])
    assert torch.equal(mine, expected)
    plain = tokens(32, 256)
    ys.append(torch.nn.functional.linear(x, plain))
    assert torch.equal(reference.few_fwd(*few, x, plain, None, 17), torch.cat(ys, 1))
    ys.pop()
    z = reference.quantise_fwd(torch.nn.functional.silu(ys[0]) * ys[1])
    y = reference.multiply_fwd(weights[2], scales[2], z)[:17]
    assert torch.equal(reference.few_mlp_fwd(*codes, *weights, *scales, None, 17), y)
    assert torch.equal(reference.few_mlp_fwd(*codes, *weights, *scales, x, 17), x + y)


@compiled
def test_launches():
    """On a pretended H200: a program for 64 rows of a weight, or for a part of K besides."""
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    hopper = device.Chip("NVIDIA_H200", (9, 0), 132)
    weights, scales = mlp_of(512, 14336)
    codes = reference.quantise_fwd(tokens(1, 512))
    with recording.recorded(hopper) as records:
        assert product.few_mlp(codes, 1, weights, scales).shape == (1, 512)
        assert product.few_mlp(codes, 65, weights, scales) is None
    wide, of_wide = mlp_of(256, 17408)
    with recording.recorded(hopper) as others:  # 136 blocks of scales for 132 processors
        assert product.few_mlp(reference.quantise_fwd(tokens(1, 256)), 1, wide, of_wide) is not None
    assert [record.name for record in others] == [
        "few_kernel", "_silu_mul_quantise_kernel", "few_kernel", "add_parts_kernel"]  # fmt: skip
    names = [(record.name, record.grid) for record in records]
    assert names[0] == ("few_gate_kernel", (112, 1, 1))
    assert [name for name, _ in names[1:]] == ["few_kernel", "add_parts_kernel"]
    tiles, parts, _ = names[1][1]
    assert tiles == 8 and parts == 14
    assert all(record.options["launch_pdl"] for record in records)
    codes = reference.quantise_fwd(tokens(3, 512))
    weights, scales = weights_of((8192, 512, 512), 512)
    with recording.recorded(hopper) as records:
        assert product.few(codes, 3, weights, scales).shape == (3, 9216)
        assert product.few(codes, 3, weights, scales) is not None
        assert product.few(codes, 65, weights, scales) is None
    assert [record.name for record in records] == ["few_kernel"] * 2
    with recording.recorded(device.Chip("NVIDIA_B200", (10, 0), 148)) as records:
        assert product.few(codes, 3, weights, scales) is None and not records


# --- on a GPU


@pytest.fixture
def on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("products of FP8 blocks are of Hopper")


@pytest.mark.gpu
@compiled
def test_products_on_a_gpu(on_hopper):
    check_products("cuda")


@pytest.mark.gpu
@compiled
def test_plain_weights_on_a_gpu(on_hopper):
    check_plain("cuda")


@pytest.mark.gpu
@compiled
def test_quantised_products_on_a_gpu(on_hopper):
    check_quantised_products("cuda")


@pytest.mark.gpu
@compiled
def test_mlps_on_a_gpu(on_hopper):
    check_mlp("cuda", 0.012)  # codes of z beside those of sums in another order


@pytest.mark.gpu
@compiled
def test_codes_of_z_on_a_gpu(on_hopper):
    """Gate, up, silu and their product are rounded where transformers rounds: nearly all codes are
    those of torch, from products that torch makes."""
    hopper = submodule("fp8.hopper.few")
    weights, scales = mlp_of(1024, 1024, "cuda")
    x = tokens(64, 1024, "cuda")
    codes = reference.quantise_fwd(x)
    gate, up = (reference.multiply_fwd(w, s, codes) for w, s in zip(weights[:2], scales[:2]))
    expected = reference.silu_mul_quantise_fwd(gate, up)
    z = torch.empty(64, 1024, device="cuda", dtype=torch.float8_e4m3fn)
    z_scales = torch.empty(8, 64, device="cuda")
    config = submodule("runtime.tuning").lookup("hopper_fp8_few_gate", x.device, M=64)
    launch = hopper._gate(x.device, 64, 1024, 1024, config)
    launch(*weights[:2], *codes, *scales[:2], z, z_scales)
    same = (z.view(torch.uint8) == expected.codes.view(torch.uint8)).float().mean()
    assert same > 0.97, same
    assert torch.isclose(z_scales.t(), expected.scales, rtol=2**-6).all()  # two roundings to bf16
