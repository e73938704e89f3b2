"""FP8: the quantiser to the bit, products against fp64, and what FP8Linear modules do with them."""

import copy
import io

import fp8_problems
import numpy as np
import pytest
import torch
from conftest import assert_close, prepared, relative_error, submodule
from fp8_problems import E4M3, quantised
from interpreter import (
    compiled,
    interpreted,
    test_in_the_interpreter,  # noqa: F401
    wherever_kernels_run,
)

call, ops, reference = (submodule(f"fp8.{name}") for name in ("call", "ops", "reference"))
dispatch = submodule("runtime.dispatch")
given = submodule("layers.fp8.weights")
weights_of = given.weights_of
projections = submodule("layers.projections").projections


def values(M, K, device="cpu", seed=0):
    """Tokens whose columns differ much; of zeros, tiny and huge ones, with NaN and infinity."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(seed))
    x *= torch.randn(K, generator=torch.Generator().manual_seed(1)).exp()
    x[:, 128:256] *= 1e4
    x[0, :128] = 0.0
    x[-1, :128] *= 1e-30
    if M > 2:
        x[1, 5], x[2, 150] = float("nan"), float("inf")
    return x.bfloat16().to(device)


def same_bits(found, expected, codes=True):
    """Scales to the bit, NaN with NaN; and codes."""
    assert found.scales.stride() == expected.scales.stride() == (1, len(found.codes))
    assert torch.equal(found.scales.isnan(), expected.scales.isnan())
    assert torch.equal(found.scales.nan_to_num(7.0), expected.scales.nan_to_num(7.0))
    if codes:
        mine, theirs = found.codes.float(), expected.codes.float()
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


# --- the definition


def nearest_codes(x: torch.Tensor) -> torch.Tensor:
    """Values of e4m3 nearest to x in fp64, ties to the even code."""
    table = torch.arange(127, dtype=torch.uint8).view(E4M3).double()  # 0 to 448
    distance = (x.abs().unsqueeze(-1) - table).abs()
    even = torch.arange(127) % 2 * 1e-12
    return table[(distance + even).argmin(-1)].copysign(x)


def test_the_quantiser_is_the_formula():
    x = values(3, 512)[:1].repeat(5, 1)
    x[2, 130], x[3, 7] = float("nan"), float("-inf")
    found = reference.quantise_fwd(x)
    assert found.codes.dtype is E4M3 and found.codes.shape == (16, 512)
    assert found.scales.shape == (16, 4) and found.scales.stride() == (1, 16)
    amax = x[:2].float().unflatten(1, (4, 128)).abs().amax(2)
    scales = amax.clamp(1e-4) * torch.tensor(1 / 448)
    assert torch.equal(found.scales[:2], scales) and (scales[0, 0] == 1e-4 / 448).item()
    wide = (1.0 / scales).repeat_interleave(128, 1)
    assert torch.equal(found.codes[:2].double(), nearest_codes((x[:2].float() * wide).double()))
    assert found.codes[2, 128:256].float().isnan().all() and found.scales[2, 1].isnan()
    assert found.scales[3, 0] == float("inf") and found.codes[3, 7].float().isnan()
    assert not found.codes[[2, 3]][:, 256:].float().isnan().any()
    assert not found.codes[5:].float().any() and (found.scales[5:] == scales[0, 0]).all()


def test_the_product_is_of_dequantised_operands():
    weight, scale = fp8_problems.quantised_weight(torch.randn(272, 512))
    assert weight.shape == (272, 512) and scale.shape == (3, 4)
    x = reference.quantise_fwd(values(1, 512))
    y = reference.multiply_fwd(weight, scale, x)
    assert_close(y, fp8_problems.exact(x, weight, scale))


def test_the_gate_rounds_where_torch_does():
    gate, up = values(16, 256, seed=3)[:, :256].nan_to_num(1.0), values(16, 256, seed=4)
    z = (gate.float() / (1 + (-gate.float()).exp())).bfloat16() * up
    found, expected = reference.silu_mul_quantise_fwd(gate, up), reference.quantise_fwd(z)
    share = (found.codes.float() == expected.codes.float()).float().mean()
    assert share > 0.9  # NaN, and exp of another library


# --- the kernels


def silu_mul_quantise(gate, up):
    quantise, strides = submodule("fp8.portable.quantise"), (gate.stride(0), up.stride(0))
    launch = quantise.gate_launch(gate.device, gate.shape, strides)
    found = quantise.quantising(launch, gate.device, gate.shape)(gate, up)
    return fp8_problems.apart(found, len(gate))


def norm_quantise(*fields):
    return prepared("fp8.portable.norm", "norm_quantise_fwd", call.NormQuantise, *fields)


@wherever_kernels_run
def test_quantisers(device):
    """Scales to the bit, and codes where Triton's interpreter does not round to e4m3 in a way of
    its own."""
    bits = device == "cuda"
    for M, K in ((1, 256), (3, 512), (15, 640), (16, 5120), (17, 4352), (65, 384), (5, 272)):
        wide = values(M, K + 128, device, M)
        for x in (wide[:, :K], wide[:, :K].contiguous()):
            same_bits(quantised(x), reference.quantise_fwd(x), bits)
    taken = submodule("fp8.portable.quantise").is_quantised_here
    assert taken(x) and not taken(values(4, 200, device))
    assert not taken(values(4, 256, device).half())
    gate, up = values(32, 2 * 1280, device).chunk(2, 1)
    found = silu_mul_quantise(gate, up)
    expected = reference.silu_mul_quantise_fwd(gate, up)
    assert found.scales.stride() == (1, 32)
    # exp2 is another than exp, and the interpreter cuts bf16 off: neighbours, twice
    assert torch.equal(found.scales.isnan(), expected.scales.isnan())
    assert torch.isclose(found.scales, expected.scales, rtol=2**-6, equal_nan=True).all()
    z = [(q.codes.float() * q.scales.repeat_interleave(128, 1))[3:] for q in (found, expected)]
    assert relative_error(z[0].nan_to_num(), z[1].nan_to_num()) < (0.02 if bits else 0.1)
    for M in (1, 17):  # rows of zeros behind them
        part = silu_mul_quantise(gate[3 : 3 + M], up[3 : 3 + M])
        assert torch.equal(part.scales[:M], found.scales[3 : 3 + M])
        assert part.codes.shape == (call.padded(M), 1280) and not part.codes[M:].float().any()


@interpreted
@pytest.mark.parametrize("N, K", [(200, 300), (32, 128), (1, 5)])
def test_weights_in_bf16(N, K):
    """Scales are powers of two, so that no product is rounded, which the interpreter does in a way
    of its own; tests/fp8/test_fp8_gradient.py has others on a GPU."""
    random = torch.Generator().manual_seed(N)
    weight = torch.randn(N, K, generator=random).to(E4M3)
    blocks = -(-N // 128), -(-K // 128)
    scale = 2.0 ** torch.randint(-9, 9, blocks, generator=random)
    found = prepared("fp8.portable.dequantise", "dequantise_fwd", call.Dequantise, weight, scale)
    assert torch.equal(found, reference.dequantised(weight, scale).bfloat16())


@wherever_kernels_run
def test_norms(device):
    """The norm's result, the sum, and codes and scales of the result as the quantiser has them."""
    most, most_of_sums = (4e-3, 1e-6) if device == "cuda" else (2e-2, 1e-2)
    for M, D, mode, added in (
        (3, 512, "llama", True), (17, 640, "gemma", False), (1, 400, "llama", False),
    ):  # fmt: skip
        x, weight = values(M, D, device).nan_to_num(1.0, 1.0), torch.randn(D).bfloat16().to(device)
        residual = values(M, D, device, 5).nan_to_num(1.0, 1.0) if added else None
        options = (1e-6, mode, float(mode == "gemma"))
        y, total, codes = norm_quantise(x, weight, residual, *options)
        expected, sums, _ = reference.norm_quantise_fwd(x, weight, residual, *options)
        assert relative_error(y, expected) < most
        assert (total is None) == (residual is None)
        assert total is None or relative_error(total, sums) < most_of_sums
        same_bits(fp8_problems.apart(codes, M), quantised(y))
    assert norm_quantise(x.half(), weight, None, *options) is None
    columns = x.repeat(4, 1).t().contiguous().t()
    assert norm_quantise(columns, weight, None, *options) is None
    assert norm_quantise(x, weight.float(), None, *options) is None  # y would be fp32


@pytest.mark.gpu
@compiled
def test_codes_of_deepgemm_on_a_gpu():
    """As DeepGEMM's Python has them."""
    x = values(513, 4096, "cuda").nan_to_num(1.0)
    groups = x.float().view(513, 32, 128)
    scales = groups.abs().amax(2).clamp(1e-4) / 448.0
    codes = (groups * (1.0 / scales.unsqueeze(2))).to(E4M3).view(513, 4096)
    found = quantised(x)
    assert torch.equal(found.scales[:513], scales)
    assert torch.equal(found.codes[:513].view(torch.uint8), codes.view(torch.uint8))


def products_work() -> None:
    """Skips a test where torch has no product of FP8 blocks; CUDA 12.9 has it on Hopper."""
    fp8_problems.needs_hopper("cuda")
    works = submodule("fp8.hopper.multiply")._has_product(torch.device("cuda", 0))
    assert works or tuple(map(int, torch.version.cuda.split("."))) < (12, 9)
    if not works:
        pytest.skip("CUDA is older than 12.9")


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("N, K", [
    (512, 512), (1040, 1024), (128, 512), (4096, 4608), (272, 5120), (64, 640), (272, 1360),
])  # fmt: skip
def test_products_on_a_gpu(N, K):
    """Against fp64 of their operands, with a last block of the weight that has fewer rows."""
    products_work()
    part = fp8_problems.linear(N, K, device="cuda").requires_grad_(False)
    weight, scale = part.weight, part.weight_scale_inv
    for M in (1, 15, 16, 17, 63, 65, 129, 1024):
        codes = quantised(values(M, K, "cuda").nan_to_num(1.0, 1.0))
        y = ops.PRODUCT.serving((weight, scale))(weight, scale, codes)
        assert y.shape == (call.padded(M), N) and y.dtype is torch.bfloat16
        exact = fp8_problems.exact(codes, weight, scale)
        assert relative_error(y[:M], exact[:M]) < 4e-3
        if hasattr(torch.nn.functional, "scaled_mm") and K % 512 == 0:
            public = submodule("fp8.hopper.multiply")._multiply_publicly
            assert torch.equal(public(weight, scale, codes), y)


@pytest.mark.gpu
@compiled
def test_a_product_that_is_first_met_in_a_capture(monkeypatch):
    """It cannot be tried there, which is no answer for later calls."""
    products_work()
    part = fp8_problems.linear(384, 1536, device="cuda").requires_grad_(False)
    tensors, x = (part.weight, part.weight_scale_inv), torch.zeros(1, device="cuda")
    monkeypatch.setattr(submodule("fp8.hopper.multiply"), "_works", {})
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        assert ops.PRODUCT.serving(tensors) is None
    assert ops.PRODUCT.serving(tensors) is not None


@compiled
def test_the_public_product(monkeypatch):
    """It is told which scale is whose."""
    kinds = pytest.importorskip("torch.nn.functional").ScalingType
    multiply, given = submodule("fp8.hopper.multiply"), []
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda *a, **b: given.append((a, b)))
    part = fp8_problems.linear(256, 512)
    weight, scale = part.weight, part.weight_scale_inv
    codes = reference.quantise_fwd(values(3, 512))
    multiply._multiply_publicly(weight, scale, codes)
    (((x, w, *scales), more),) = given
    assert x is codes.codes and w.shape == (512, 256) and more == {"output_dtype": torch.bfloat16}
    assert scales[1::2] == [kinds.BlockWise1x128, kinds.BlockWise128x128]
    assert scales[0] is codes.scales and torch.equal(scales[2], scale.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_product_is_tried_in_any_default_dtype(monkeypatch, dtype):
    """With scales in fp32, as checkpoints have them."""
    multiply, seen = submodule("fp8.hopper.multiply"), []

    def product(weight, scale, x):
        seen.extend((scale.dtype, x.scales.dtype))
        return reference.multiply_fwd(weight, scale, x)

    monkeypatch.setattr(multiply, "_multiply", product)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert multiply._is_right(torch.device("cpu")) and seen == [torch.float32] * 2
    finally:
        torch.set_default_dtype(before)


# --- FP8Linear: served, refused, restored


def served(kernel, module):
    report = kernel.kernelize(torch.nn.ModuleList([module]), only=["linear"])
    assert [row.reason for row in report.rows] == [None], report
    return module


def refused(kernel, module, unknown=False):
    (row,) = kernel.kernelize(torch.nn.ModuleList([module]), only=["linear"]).rows
    assert row.reason is not None and row.unknown is unknown
    return row.reason


@compiled
def test_a_module_is_served_and_restored(kernel, monkeypatch):
    calls = fp8_problems.stand_in(monkeypatch)
    module = fp8_problems.linear(272, 512, bias=True)
    x = values(5, 512).nan_to_num(1.0, 1.0).view(1, 5, 512)
    expected, kind, state = module(x), type(module), module.state_dict()
    served(kernel, module)
    assert type(module) is not kind and isinstance(module, kind)
    assert module.state_dict().keys() == state.keys()
    assert torch.equal(module(x), expected) and len(calls) == 2  # a CPU is its own forward's
    with dispatch.force("reference"):
        assert module(x).requires_grad and len(calls) == 3  # by the bias, so its own forward's
        module.bias.requires_grad_(False)
        for one in (module, copy.deepcopy(module), copy.copy(module)):
            y = one(x)
            assert torch.equal(y, expected) and not y.requires_grad and len(calls) == 3
            assert y.is_contiguous() and y._base is None
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="without the kernels"):
        torch.save(module, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is kind
    assert kernel.restore(torch.nn.ModuleList([module])) == 1 and type(module) is kind


@compiled
def test_calls_that_are_the_modules_own(kernel, monkeypatch):
    """Other dtypes, no tokens, hooks on all modules, a compiler."""
    calls = fp8_problems.stand_in(monkeypatch)
    module, x = served(kernel, fp8_problems.linear(128, 512)), values(1, 512)

    def own(x):
        calls.clear()
        with dispatch.force("reference"):
            module(x)
        return bool(calls)

    assert not own(x) and not own(x.clone().requires_grad_())
    assert own(x.half()) and own(x.float())
    with torch.no_grad():
        assert not own(x.clone().requires_grad_())
    with torch.inference_mode():
        assert not own(x.clone())
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert own(x)
    handle.remove()
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    assert own(x)


@compiled
def test_changes_of_a_served_module(kernel):
    """Its scheme, a weight that hides the parameter, one that was turned into another dtype."""
    module, x = served(kernel, fp8_problems.linear(128, 512)), values(1, 512)
    assert weights_of([module], x, True) != [None]
    module.activation_scheme = "static"
    assert weights_of([module], x, True) == [None]
    module.activation_scheme = "dynamic"
    module.__dict__["weight"] = module._parameters["weight"].detach()
    assert weights_of([module], x, True) == [None]
    del module.__dict__["weight"]
    assert weights_of([module], x, True) != [None]
    module.to(torch.float32)
    assert weights_of([module], x, True) == [None]


def parameter(*shape, dtype):
    return torch.nn.Parameter(torch.ones(shape).to(dtype), requires_grad=False)


SCALE, FP32 = "weight_scale_inv", torch.float32
REASONS = [  # a part of it, and what is another of a module [128, 512]
    ("static activations", {"activation_scheme": "static"}),
    ("static activations", {"activation_scale": parameter(dtype=FP32)}),
    ("one scale for its whole weight", {"block_size": None}),
    ("blocks of 64 x 128", {"block_size": [64, 128]}),
    ("scale is of dtype float64", {SCALE: parameter(1, 4, dtype=torch.float64)}),
    ("weight is of dtype bfloat16", {"weight": parameter(128, 512, dtype=torch.bfloat16)}),
    ("bias is of dtype float32", {"bias": parameter(128, dtype=FP32)}),
    ("scales are of shape [1, 3]", {SCALE: parameter(1, 3, dtype=FP32)}),
    ("parameter of its own", {SCALE: None}),
]
SIZES = {"520 input or 128 output features": (128, 520), "152 output features": (152, 512)}


@compiled
def test_reasons(kernel):
    from transformers.integrations.finegrained_fp8 import FP8GroupedLinear, FP8Linear

    for reason, changes in REASONS:
        module = fp8_problems.linear(128, 512)
        for name, value in changes.items():
            setattr(module, name, value)
        assert reason in refused(kernel, module)
    for reason, sizes in SIZES.items():
        assert reason in refused(kernel, fp8_problems.linear(*sizes))
    with torch.device("meta"):
        grouped = FP8GroupedLinear(512, 128, 2, (128, 128))
        assert "on the meta device" in refused(kernel, FP8Linear(512, 128, (128, 128)))
    (row,) = kernel.kernelize(torch.nn.ModuleList([grouped])).rows
    assert "is a FP8GroupedLinear" in row.reason


@compiled
def test_another_forward_of_the_class_is_left_alone(kernel, monkeypatch):
    from transformers.integrations import finegrained_fp8

    module, own = fp8_problems.linear(128, 512), finegrained_fp8.fp8_linear
    with monkeypatch.context() as patch:
        patch.setattr(finegrained_fp8, "fp8_linear", lambda *args, **more: own(*args, **more))
        assert "fp8_linear, which is patched" in refused(kernel, module, unknown=True)
    served(kernel, module)
    x = values(1, 512)
    assert weights_of([module], x, True) != [None]
    with monkeypatch.context() as patch:
        patch.setattr(finegrained_fp8, "fp8_linear", lambda *args, **more: own(*args, **more))
        assert weights_of([module], x, True) == [None]
    monkeypatch.setattr(finegrained_fp8.FP8Linear, "forward", lambda self, input: input)
    refused(kernel, fp8_problems.linear(128, 512), unknown=True)


@compiled
def test_kernels_that_transformers_loads_change_nothing(kernel, monkeypatch):
    """A module that is left alone loads them at its first call: those that are served stay so. What
    fp8_linear calls is looked at by name alone, which takes a token's host 3 us and not 26."""
    deepgemm = pytest.importorskip("transformers.integrations.deepgemm")
    from transformers.integrations import finegrained_fp8

    module, x = served(kernel, fp8_problems.linear(128, 512)), values(1, 512)
    assert len(submodule("layers.fp8.weights").FORMS[type(module)].pinned.functions) <= 24
    monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", object())
    monkeypatch.setattr(deepgemm, "_DEEPGEMM", object())
    assert weights_of([module], x, True) != [None]
    monkeypatch.setattr(finegrained_fp8, "finegrained_fp8_linear", lambda *args: args[0])
    assert weights_of([module], x, True) == [None]


# --- the hand-over


@pytest.fixture
def counted(monkeypatch):
    """How often x was quantised, by the reference."""
    made, own = [], reference.quantise_fwd
    monkeypatch.setattr(reference, "quantise_fwd", lambda x: made.append(x) or own(x))
    with dispatch.force("reference"):
        yield made


WRITES = {  # that torch's version of x does not count
    "data": lambda x: x.data.mul_(2),
    "numpy": lambda x: np.multiply(x.view(torch.int16).numpy(), 0, out=x.view(torch.int16).numpy()),
    "another library": lambda x: torch.from_dlpack(x).fill_(3),
}


@compiled
def test_a_module_multiplies_what_x_is(kernel, counted):
    """Whatever has written it, and whoever has multiplied the same tensor before."""
    q, k = (served(kernel, fp8_problems.linear(128, 512, seed=n)) for n in range(2))
    for name, write in WRITES.items():
        x = values(4, 512).nan_to_num(1.0, 1.0)
        before, version = k(x.clone()), x._version
        q(x)
        write(x)
        found = k(x)
        assert x._version == version and not torch.equal(found, before), name
        assert torch.equal(found, k(x.clone())), name
    counted.clear()
    projections(x, q, k)
    assert len(counted) == 1  # those that are asked together


@compiled
def test_a_module_that_does_more_is_called(kernel, counted):
    """Of several in one call; it quantises x by itself."""
    parts, seen = [served(kernel, fp8_problems.linear(128, 512, seed=n)) for n in range(2)], []
    parts[1].register_forward_hook(lambda *_: seen.append(1))
    projections(values(4, 512), *parts, torch.nn.Linear(512, 16, dtype=torch.bfloat16))
    assert seen and len(counted) == 2


@compiled
def test_one_projection(kernel, monkeypatch):
    """By itself: of few tokens it is read and not called, but where a call does more; with the same
    bits, and a bias."""
    calls = fp8_problems.stand_in(monkeypatch)
    part = served(kernel, fp8_problems.linear(128, 512, bias=True)).requires_grad_(False)
    x, few = values(4, 512).nan_to_num(1.0, 1.0).view(2, 2, 512), "products_fwd"
    with torch.no_grad(), dispatch.force("reference"):
        expected = part(x)
        with dispatch.served() as record:
            (found,) = projections(x, part)
        assert list(record) == [few] and torch.equal(found, expected)
        with dispatch.served() as record:
            (found,) = given.with_codes(
                x,
                given.Coded(reference.quantise_fwd(x.view(4, 512)), None),
                None,
                projections,
                x,
                part,
            )[0]
        assert list(record) == [few] and torch.equal(found, expected)
        with dispatch.served() as record:
            (found,) = projections(x.repeat(17, 1, 1), part)  # too many
        assert record == {few: ["reference"]}
        assert relative_error(found[:2], expected.double()) < 4e-3
        seen = []
        part.register_forward_hook(lambda *_: seen.append(1))
        with dispatch.served() as record:
            (found,) = projections(x, part)
        assert torch.equal(found, expected) and seen
    with dispatch.force("reference"), dispatch.served() as record:
        y = projections(x.clone().requires_grad_(), part)[0]
    assert y.requires_grad and not calls


@compiled
def test_what_a_norm_gives(kernel, counted):
    """Its codes serve the first products of its result, for which they were made, and no others."""
    q, k = (served(kernel, fp8_problems.linear(128, 512, seed=n)) for n in range(2))
    x = values(4, 512).nan_to_num(1.0, 1.0)
    expected, codes = [q(x), k(x)], given.Coded(reference.quantise_fwd(x), None)
    counted.clear()

    def inside():
        assert not torch.equal(projections(x.clone() * 2, q, k)[0], expected[0])
        assert len(counted) == 1  # of another tensor
        assert all(map(torch.equal, projections(x, q, k), expected)) and len(counted) == 1
        x.data.mul_(2)
        assert not torch.equal(projections(x, q, k)[0], expected[0]) and len(counted) == 2
        return q

    assert given.with_codes(x, codes, None, inside) == (q, False)
    with pytest.raises(ZeroDivisionError):
        given.with_codes(x, codes, None, lambda: 1 / 0)
    assert given.taken(x) == (None, None)


@compiled
def test_who_takes_what_a_norm_gives(kernel, counted):
    """A module of ours whose call does no more than its forward: nothing comes between."""
    x = values(4, 512)
    mlp = fp8_problems.tiny_qwen3().model.layers[0].mlp
    assert not given.quantises(mlp, x)  # transformers' own forward
    kernel.kernelize(mlp)
    assert given.quantises(mlp, x)
    assert not given.quantises(mlp.down_proj, x)
    assert not given.quantises(mlp, x.float()) and not given.quantises(mlp, x[:0])
    with torch.inference_mode():
        assert given.quantises(mlp, x.clone())
    handle = mlp.register_forward_pre_hook(lambda module, args: args[0].data.mul_(2) and None)
    assert not given.quantises(mlp, x)
    handle.remove()
    assert given.quantises(mlp, x)


# --- one launch to quantise, one to multiply


@compiled
def test_launches(kernel, monkeypatch):
    """On a pretended H200: the quantiser is one launch of a program for each row and 4096 columns,
    and q, k and v share it."""
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    multiply = submodule("fp8.hopper.multiply")
    monkeypatch.setattr(multiply, "_has_product", lambda *where: True)
    products = []
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, **rest: products.append(rest) or a.new_zeros(
            (a.shape[0], b.shape[1]), dtype=rest["out_dtype"])
    )  # fmt: skip
    parts = [served(kernel, fp8_problems.linear(128, 5120, seed=n)) for n in range(3)]
    hopper = device.Chip("NVIDIA_H200", (9, 0), 132)
    x = torch.ones(70, 5120, dtype=torch.bfloat16)
    with recording.recorded(hopper) as records:
        ys = projections(x, *parts)
    assert [y.shape for y in ys] == [(70, 128)] * 3
    assert [(one.name, one.grid) for one in records] == [("_quantise_kernel", (80, 2, 1))]
    assert records[0].options["launch_pdl"]
    assert len(products) == 3 and all(p["scale_a"].stride() == (1, 80) for p in products)
    assert all(p["scale_b"].shape == (40, 1) for p in products)
    weights = [(part.weight, part.weight_scale_inv, None) for part in parts]
    with recording.recorded(hopper) as records:  # whose sign is kept aside
        assert ops.products((70,), weights, torch._neg_view(x)) is None and not records
    with recording.recorded(device.Chip("NVIDIA_A100", (8, 0), 108)) as records:
        assert ops.products((70,), weights, x) is None and not records


@pytest.mark.parametrize("K, eight", [(640, False), (1344, True), (512, True), (16, False)])
def test_products_of_any_number_of_columns(monkeypatch, K, eight):
    """Scales in rows of a multiple of four, and in fp32; the weight is never copied."""
    multiply, found = submodule("fp8.hopper.multiply"), []

    def product(weight, scale, x):
        found.append((weight, tuple(scale.shape), scale.dtype))
        return reference.multiply_fwd(weight, scale[:, : -(-K // 128)], x)

    monkeypatch.setattr(multiply, "_has_product", lambda *where: True)
    for way in ("_multiply", "_multiply_publicly"):
        monkeypatch.setattr(multiply, way, product)
    weight, scale = fp8_problems.quantised_weight(torch.randn(272, K), eight)
    x = reference.quantise_fwd(values(70, max(K, 256))[:, :K].nan_to_num(1.0, 1.0).contiguous())
    made = call.Product(weight, scale, submodule("runtime.call").NoOptions())
    y = multiply.prepare_multiply_fwd(made)(weight, scale, x)
    ((given, shape, dtype),) = found
    assert given is weight and shape == (3, -(-K // 512) * 4) and dtype is torch.float32
    assert torch.equal(y, reference.multiply_fwd(weight, scale, x))
