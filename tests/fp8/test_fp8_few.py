"""Few tokens in FP8: products of several weights in one launch, and MLPs."""

import fp8_problems
import pytest
import torch
from conftest import prepared, relative_error, submodule
from fp8_problems import needs_hopper, quantised, tokens
from interpreter import (
    compiled,
    interpreted,
    test_in_the_interpreter,  # noqa: F401
    wherever_kernels_run,
)

reference, ops, calls = submodule("fp8.reference"), submodule("fp8.ops"), submodule("fp8.call")
hopper, few_module = "fp8.hopper.products", "fp8.hopper.few"
ABSENT, E8M0 = (None,) * 6, getattr(torch, "float8_e8m0fnu", None)
SHAPES = (((128,), 640), ((272, 128, 64), 512), ((1040, 16), 1152), ((64,) * 6, 256))
SHAPES += (((96,), 1344), ((256, 64), 144), ((128,), 16))  # whose last columns are no whole block


def weights_of(rows, K, device="cpu", seed=0) -> tuple:
    """(weights, scales)."""
    random = torch.Generator().manual_seed(seed)
    dense = [torch.randn(n, K, generator=random).mul(K**-0.5) for n in rows]
    made = zip(*map(fp8_problems.quantised_weight, dense))
    return tuple(tuple(x.to(device) for x in part) for part in made)


def products(codes, lead, weights, scales, plain=(), x=None):
    """By the kernels, side by side, or None. plain: weights in bf16, by which x is multiplied."""
    absent, codes = ABSENT[len(weights) :], (None, None) if codes is None else codes
    tensors = (*weights, *absent, *scales, *absent, x, *codes, *plain, *ABSENT[: 2 - len(plain)])
    lead = (lead,) if isinstance(lead, int) else lead
    found = prepared(hopper, "products_fwd", calls.Products, *tensors, lead)
    return found if found is None else torch.cat(found, -1)


def few(x, weights, scales):
    return products(reference.quantise_fwd(x), len(x), weights, scales)


def mlp_of(K, N, device="cpu") -> tuple:
    """(weights, scales) of gate, up and down."""
    (gate, up), of_gates = weights_of((N, N), K, device)
    (down,), of_down = weights_of((K,), N, device, seed=1)
    return (gate, up, down), (*of_gates, *of_down)


def mlp(codes, M, weights, scales, residual=None):
    """By the kernels, or None."""
    fields = (*weights, *scales, *ABSENT[:3], None, *codes, residual, (M,), True)
    return prepared(hopper, "mlp_fwd", calls.Mlp, *fields)


# --- the kernels


@wherever_kernels_run
def test_products(device):
    """Against fp64 of their operands, and each token's bits beside any others."""
    needs_hopper(device)
    for rows, K in SHAPES:
        weights, scales = weights_of(rows, K, device)
        x = tokens(64, K, device=device)
        codes = reference.quantise_fwd(x)
        exact = [fp8_problems.exact(codes, w, s) for w, s in zip(weights, scales)]
        whole = few(x, weights, scales)
        assert whole.shape == (64, sum(rows))
        assert relative_error(whole, torch.cat(exact, 1)) < 4e-3
        for M in (1, 17, 33):
            assert torch.equal(few(x[:M].contiguous(), weights, scales), whole[:M]), (rows, M)


@interpreted
def test_products_that_are_refused():
    codes = reference.quantise_fwd(tokens(3, 512))
    weights, scales = weights_of((128,), 512)
    assert products(codes, 3, weights, scales) is not None
    assert products(codes, 65, weights, scales) is None  # on a CPU
    assert products(codes, 3, (weights[0][:, :256],), scales) is None
    assert products(codes, 3, weights, (scales[0].double(),)) is None
    assert products(codes, 3, (weights[0].view(torch.int8),), scales) is None
    assert ops.products((3,), [*zip(weights, scales, ABSENT)] * 7, None, codes) is None


@compiled
def test_a_first_call_compiles_in_threads():
    """Where kernels alone read what kernels write: not where torch adds the residual, nor where
    cuBLAS multiplies."""
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    codes = reference.quantise_fwd(tokens(1, 512))
    with recording.recorded(device.Chip("NVIDIA_H200", (9, 0), 132)):
        for (H, N), added, together in (
            ((512, 14336), False, True), ((512, 14336), True, True),
            ((8448, 512), False, True), ((8448, 512), True, False),
        ):  # fmt: skip
            weights, scales = weights_of((N, N), 512)
            (down,), (down_scale,) = weights_of((H,), N)
            residual = tokens(1, H) if added else None
            fields = (*weights, down, *scales, down_scale, *ABSENT[:3], None, *codes, residual)
            assert ops.MLP.serving(fields, ((1,), True)).together is together, (H, added)
        fields = (*weights, *ABSENT[2:], *scales, *ABSENT[2:], None, *codes, None, None)
        assert ops.PRODUCTS.serving(fields, ((1,),)).together


@wherever_kernels_run
def test_plain_weights(device):
    """Weights in bf16 behind those in FP8, in the same launch: each as by itself, whatever stands
    beside; in fp32 for the interpreter, which multiplies bf16 wrongly."""
    needs_hopper(device)
    dtype, whole = torch.bfloat16 if device == "cuda" else torch.float32, None
    for rows, others, K in (((272, 64), (32, 48), 640), ((128,), (3,), 1152)):
        weights, scales = weights_of(rows, K, device)
        plain = [tokens(n, K, device=device, seed=n).mul(K**-0.5).to(dtype) for n in others]
        x = tokens(64, K, device=device)
        exact = torch.cat([x.double() @ p.double().t() for p in plain], 1)
        for M in (64, 1, 17, 33):
            product = submodule(few_module).Few(x.device, (M,), K, rows, plain=others)
            some = x[:M].contiguous().to(dtype)
            more = some, plain[0], plain[-1]
            found = product(*reference.quantise_fwd(x[:M]), weights, scales, more)
            y = torch.cat(found, 1)
            whole = y if M == 64 else whole
            assert y.shape == (M, sum(rows) + sum(others)) and torch.equal(y, whole[:M]), (rows, M)
        assert torch.equal(whole[:, : sum(rows)], few(x, weights, scales))
        assert relative_error(whole[:, sum(rows) :], exact) < 4e-3


@interpreted
def test_plain_weights_that_are_served():
    weights, scales = weights_of((128,), 256)
    x, plain = tokens(3, 256), (tokens(32, 256), tokens(8, 256))
    codes = reference.quantise_fwd(x)
    assert products(codes, 3, weights, scales, plain, x).shape == (3, 168)
    for bad in ((plain[0].half(),), (plain[0][:, 1:],), (plain[0][0],), (plain[0][:0],)):
        assert products(codes, 3, weights, scales, bad, x) is None
    assert products(codes, 3, weights, scales, plain, tokens(4, 256)) is None
    assert ops.products((3,), [*zip(weights, scales, ABSENT)], x, codes, plain[:1] * 3) is None


@interpreted
def test_parts_of_k(monkeypatch):
    """Parts of any number of steps, the last of which may be shorter."""
    module, config = submodule(few_module), {"ROWS": 64, "num_warps": 4, "num_stages": 3}
    weights, scales = weights_of((128, 64), 9 * 128)
    x = tokens(5, 9 * 128)
    codes = reference.quantise_fwd(x)
    exact = torch.cat([fp8_problems.exact(codes, w, s) for w, s in zip(weights, scales)], 1)[:5]
    for steps, parts in ((1, 2), (1, 4), (2, 3), (2, 1)):
        config["STEPS"] = steps
        monkeypatch.setattr(module.tuning, "lookup", lambda *_, **__: config)
        monkeypatch.setattr(module, "parts_of_k", lambda *_, parts=parts: parts)
        assert relative_error(few(x, weights, scales), exact) < 4e-3, (steps, parts)


@wherever_kernels_run
def test_scales_in_e8m0(device):
    """Powers of two in a byte, the ends of their range and NaN, have the bits of those in fp32."""
    needs_hopper(device)
    weights, scales = weights_of((272, 128), 640, device)
    powers = [2.0 ** s.log2().round() for s in scales]
    powers[0][0, :3] = torch.tensor([2.0**-127, 2.0**100, 2.0**-126])
    x = reference.quantise_fwd(tokens(5, 640, device=device))
    eight = [s.to(E8M0) for s in powers]
    assert all(torch.equal(a.float(), b) for a, b in zip(eight, powers))
    expected = products(x, 5, weights, powers)
    assert torch.equal(products(x, 5, weights, eight), expected) and expected.isfinite().all()
    eight[0].view(torch.uint8)[2, 4] = 255
    assert products(x, 5, weights, eight).isnan().nonzero()[:, 1].unique().tolist() == [
        *range(256, 272)
    ]  # the rows of its block
    weights, scales = mlp_of(256, 384, device)
    x, powers = x._replace(codes=x.codes[:, :256].contiguous(), scales=x.scales[:, :2]), [
        2.0 ** s.log2().round() for s in scales
    ]  # fmt: skip
    eight = [s.to(E8M0) for s in powers]
    assert torch.equal(mlp(x, 5, weights, eight), mlp(x, 5, weights, powers))


@wherever_kernels_run
def test_quantised_products(device):
    """One operation: the codes of the quantiser, and the bits of a product with them; of x of any
    shape."""
    needs_hopper(device)
    (weight,), (scale,) = weights_of((272,), 640, device)

    def both(x):
        return products(None, x.shape[:-1], (weight,), (scale,), x=x)

    for M in (1, 17, 64):
        x = tokens(M, 640, device=device)
        expected = products(quantised(x), M, (weight,), (scale,))
        assert torch.equal(both(x), expected)
        assert torch.equal(both(x.view(M, 1, 640)), expected.view(M, 1, 272))
        assert torch.equal(both(torch.cat((x, x), 1)[:, :640]), expected)
    for bad in (x[:0], x.half(), x[:, :512], x.t()):
        assert both(bad) is None


@wherever_kernels_run
def test_mlps(device):
    """On a GPU codes of z stand beside those of sums in another order; Triton's interpreter rounds
    to e4m3 and bf16 in ways of its own."""
    needs_hopper(device)
    most = 0.012 if device == "cuda" else 0.12
    for K, N in ((256, 384), (640, 128), (144, 208)):
        weights, scales = mlp_of(K, N, device)
        x = tokens(64, K, device=device)
        codes = reference.quantise_fwd(x)
        whole = mlp(codes, 64, weights, scales)
        fields = (*weights, *scales, *ABSENT[:3], None, *codes, None, (64,), True)
        expected = reference.mlp_fwd(*fields)
        assert whole.shape == (64, K) and relative_error(whole, expected) < most, (K, N)
        for M in (1, 16, 31, 50, 64):
            part = reference.quantise_fwd(x[:M])
            assert torch.equal(mlp(part, M, weights, scales), whole[:M]), M
            if M in (1, 64):
                assert torch.equal(mlp(part, M, weights, scales, x[:M]), x[:M] + whole[:M])
    assert mlp(codes, 64, weights, scales, x[:1]) is None
    narrow = (*(w[:72] for w in weights[:2]), weights[2][:, :72].contiguous())
    assert mlp(codes, 64, narrow, scales) is None


@pytest.mark.gpu
@compiled
def test_codes_of_z_on_a_gpu():
    """Gate, up, silu and their product are rounded where transformers rounds: nearly all codes are
    those of torch, from products that torch makes."""
    needs_hopper("cuda")
    weights, scales = mlp_of(1024, 1024, "cuda")
    x = tokens(64, 1024, device="cuda")
    codes = reference.quantise_fwd(x)
    gate, up = (reference.multiply_fwd(w, s, codes) for w, s in zip(weights[:2], scales[:2]))
    expected = reference.silu_mul_quantise_fwd(gate, up)
    z = torch.empty(64, 1024, device="cuda", dtype=torch.float8_e4m3fn)
    z_scales = torch.empty(8, 64, device="cuda")
    config = submodule("runtime.tuning").lookup("hopper_fp8_few_gate", x.device, M=64, N=1024)
    launch = submodule(few_module)._gate(x.device, 64, 1024, 1024, config)
    launch(*weights[:2], *codes, *scales[:2], z, z_scales)
    same = (z.view(torch.uint8) == expected.codes.view(torch.uint8)).float().mean()
    assert same > 0.97, same
    assert torch.isclose(z_scales.t(), expected.scales, rtol=2**-6).all()  # two roundings to bf16


@compiled
def test_launches():
    """On a pretended H200: a program for 64 rows of a weight, or for a part of K besides."""
    recording, device = submodule("runtime.recording"), submodule("runtime.device")

    def launched(call, M, K, weights, scales, chip=("NVIDIA_H200", (9, 0), 132)):
        """(the result's shape or None, the launches)."""
        codes = reference.quantise_fwd(tokens(M, K))
        with recording.recorded(device.Chip(*chip)) as records:
            y = call(codes, M, weights, scales)
        assert all(record.options["launch_pdl"] for record in records)
        return y if y is None else tuple(y.shape), [(one.name, one.grid) for one in records]

    def few_mlp(codes, M, weights, scales):
        fields = (*weights, *scales, *ABSENT[:3], None, *codes, None)
        return ops.MLP(fields, ((M,), True))

    def several(codes, M, weights, scales):
        found = ops.products((M,), [*zip(weights, scales, ABSENT)], None, codes)
        return found if found is None else torch.cat(found, 1)

    weights = mlp_of(512, 14336)
    assert launched(few_mlp, 1, 512, *weights) == ((1, 512), [
        ("few_gate_kernel", (112, 1, 1)), ("few_kernel", (8, 14, 1)),
        ("add_parts_kernel", (1, 1, 1))])  # fmt: skip
    assert launched(few_mlp, 65, 512, *weights) == (None, [])
    # 136 blocks of scales for 132 processors
    _, found = launched(few_mlp, 1, 256, *mlp_of(256, 17408))
    assert [name for name, _ in found] == [
        "few_kernel", "_silu_mul_quantise_kernel", "few_kernel", "add_parts_kernel"]  # fmt: skip
    weights = weights_of((8192, 512, 512), 512)
    for _ in range(2):  # the second call is a known one
        shape, found = launched(several, 3, 512, *weights)
        assert shape == (3, 9216) and [name for name, _ in found] == ["few_kernel"]
    assert launched(several, 65, 512, *weights) == (None, [])
    assert launched(several, 3, 512, *weights, ("NVIDIA_B200", (10, 0), 148)) == (None, [])
