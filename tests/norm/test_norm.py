"""rms_norm and silu_mul: values, rounding as transformers has it, gradients, layouts, errors."""

import pytest
import torch
from conftest import TOLERANCE, assert_close, prepared, submodule
from interpreter import INTERPRETING, compiled, interpreted, test_in_the_interpreter  # noqa: F401

MODES = [("llama", 0.0), ("gemma", 1.0), ("gemma", 0.0)]
WIDTHS = [1, 7, 200, 20000] if INTERPRETING else [1, 7, 64, 2560, 4096, 5120, 8192, 20000]
# The interpreter rounds to bf16 in its own way
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETING else [torch.bfloat16])
HALF = (torch.float16, torch.bfloat16)
reference, ops, calls = (submodule(f"norm.{x}") for x in ("reference", "api", "call"))
gates, gate_ops = submodule("swiglu.reference"), submodule("swiglu.ops")


def forward(*fields):
    """What the kernel makes of x, weight, residual, eps, mode, offset, after and keep."""
    return prepared("norm.portable.rms_norm", "rms_norm_fwd", calls.RmsNorm, *fields)


def gradients(*fields):
    """dx and dweight by the kernels, of x, rstd, weight, dy, dtotal, offset and needs_weight."""
    return prepared("norm.portable.rms_norm", "rms_norm_bwd", calls.RmsNormGradient, *fields)


def modules(width: int):
    """(casting mode, offset, a module of transformers that rounds so), with random weights."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    for (mode, offset), kind in zip(MODES, (LlamaRMSNorm, Qwen3_5RMSNorm, Olmo2RMSNorm)):
        module = kind(width, eps=1e-5)
        torch.nn.init.normal_(module.weight)
        yield mode, offset, module


def assert_same_bits(y, expected, rounded=None, term=0.0):
    """Up to the order of a sum in fp32: few elements differ, by a unit in the last place or two.

    rounded: the dtype that values were rounded to, y's if None; before a weight of more bits
    multiplied them, or `term`, the largest of the terms, was added."""
    assert y.dtype == expected.dtype and y.shape == expected.shape
    rounded = rounded or y.dtype
    if rounded not in HALF:
        return assert_close(y, expected, factor=0.1)
    y, expected = y.double(), expected.double()
    away, size = (y - expected).abs(), expected.abs() + abs(term)
    assert (away > 1e-6 * size).float().mean() <= 1e-3
    unit = 2.0 ** (-7 if rounded == torch.bfloat16 else -10)
    assert (away <= 2 * unit * size + 1e-7).all()


def poison(like, count=3):
    """Leaves freed memory full of NaN behind, for the allocator to hand out again."""
    stale = [torch.full_like(like, float("nan")) for _ in range(count)]
    del stale


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_transformers_code_to_the_bit(kernel, device, dtype, weight_dtype):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    for width in (96, 4096):
        for mode, offset, module in modules(width):
            module = module.to(device, weight_dtype).requires_grad_(False)
            x, residual = torch.randn(2, 3, 50, width, device=device).to(dtype).unbind(0)
            options = {"eps": 1e-5, "casting_mode": mode, "offset": offset}

            def same(y, expected, term=0.0):
                if device.type == "cpu":
                    return torch.testing.assert_close(y, expected, rtol=0, atol=0)
                assert_same_bits(y, expected, dtype, term)

            same(kernel.rms_norm(x, module.weight, **options), module(x))
            y, total = kernel.rms_norm(x, module.weight, residual=residual, **options)
            assert torch.equal(total, x + residual)
            same(y, module(x + residual))
            y = kernel.rms_norm(x, module.weight, residual=residual, after=True, **options)
            same(y, residual + module(x), module(x).double())


@compiled
@pytest.mark.parametrize("after", [None, False, True], ids=["alone", "before", "after"])
def test_what_is_kept_is_read_once(after):
    """Gradient checkpointing gives a kept tensor out no second time."""
    kept, read = [], []

    def keep(tensor):
        kept.append(tensor)
        return len(kept) - 1

    def give(place):
        read.append(place)
        return kept[place]

    x, residual = torch.randn(2, 3, 8).unbind(0)
    x, weight = x.requires_grad_(), torch.randn(8).requires_grad_()
    added = None if after is None else residual
    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        y, *_ = ops.RMS_NORM.op(x, weight, added, 1e-6, "llama", 0.0, bool(after), True)
        y.sum().backward()
    assert x.grad is not None and sorted(read) == list(range(len(kept)))


class Kernel:
    """Run twice: under the interpreter on the CPU, and compiled on a GPU."""

    device = "cpu"

    @pytest.fixture(autouse=True)
    def seed(self):
        torch.manual_seed(0)

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, device=self.device).to(dtype)

    def check(self, x, weight, residual, mode, offset, eps=1e-6):
        """Forward and backward against the reference; returns what the forward made."""
        args = (x, weight, residual, eps, mode, offset)
        poison(x)
        y, total, rstd = forward(*args, False, True)
        ref_y, ref_total, ref_rstd = reference.rms_norm_fwd(*args, False, True)
        assert_same_bits(y, ref_y)
        assert (total is None) == (residual is None)
        assert total is None or torch.equal(total, ref_total)
        assert_close(rstd, ref_rstd)
        dy = self.normal(*y.shape, dtype=y.dtype)
        dtotal = None if residual is None else self.normal(*x.shape, dtype=x.dtype)
        normed = x if total is None else total
        self.check_backward(normed, rstd, weight, dy, dtotal, offset, mode, eps)
        if residual is not None:
            poison(x)
            found, none, rstd = forward(*args, True, True)
            ref, _, ref_rstd = reference.rms_norm_fwd(*args, True, True)
            assert none is None
            # where the sum cancels, an ulp of the norm is many of the sum
            assert found.dtype == ref.dtype and found.shape == ref.shape
            assert_close(found, ref, factor=0.3)
            assert_close(rstd, ref_rstd)
        return y, total

    def check_backward(self, x, rstd, weight, dy, dtotal, offset, mode, eps):
        args = (x, rstd, weight, dy, dtotal, offset, weight is not None)
        poison(x)
        dx, dweight = gradients(*args)
        wide = [None if t is None else t.detach().double() for t in (x, weight)]
        leaves = [t.requires_grad_() for t in wide if t is not None]
        y, *_ = reference.rms_norm_fwd(*wide, None, eps, mode, offset)
        right, *more = torch.autograd.grad(y, leaves, dy.double())
        right = right if dtotal is None else right + dtotal.double()
        assert dx.dtype == x.dtype
        if x.shape[-1] > 1 or dtotal is not None:  # of one column dx is a rounding error
            assert_close(dx, right, factor=0.5)
        if weight is not None:
            assert dweight.dtype == weight.dtype
            assert_close(dweight, more[0], dtype=max(x.dtype, weight.dtype, key=TOLERANCE.get))
        # the interpreter runs one program after the other
        again = (dx, dweight) if self.device == "cpu" else gradients(*args)
        assert torch.equal(again[0], dx) and (weight is None or torch.equal(again[1], dweight))

    @pytest.mark.parametrize("D", WIDTHS)
    def test_widths(self, D):
        M = 3 if INTERPRETING else 300
        for dtype, mode, offset in zip((torch.float32, DTYPES[-1]), *zip(*MODES[:2])):
            x, residual = self.normal(2, M, D, dtype=dtype).unbind(0)
            self.check(x, self.normal(D, dtype=dtype), None, mode, offset)
            self.check(x, self.normal(D, dtype=dtype), residual, mode, offset)

    def test_what_is_not_wanted_changes_nothing(self):
        """rstd, and the gradient of the weight."""
        x, weight = self.normal(9, 136), self.normal(136)
        args = (x, weight, None, 1e-6, "llama", 0.0)
        y, _, rstd = forward(*args, False, True)
        again, _, absent = forward(*args, False, False)
        assert absent is None and torch.equal(again, y)
        dx, _ = gradients(x, rstd, weight, x, None, 0.0, True)
        again, absent = gradients(x, rstd, weight, x, None, 0.0, False)
        assert absent is None and torch.equal(again, dx)

    @pytest.mark.parametrize("weight_dtype", [*DTYPES, None])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_dtypes(self, dtype, weight_dtype):
        x, residual = self.normal(2, 9, 136, dtype=dtype).unbind(0)
        weight = None if weight_dtype is None else self.normal(136, dtype=weight_dtype)
        for mode, offset in MODES[:2]:
            self.check(x, weight, residual, mode, offset)

    def test_strided_rows(self):
        D, weight = 64, self.normal(64)
        wide = self.normal(2, 6, 4, 2 * D)
        whole, _ = self.check(wide[..., :D].contiguous(), weight, None, "llama", 0.0)
        for x in (wide[..., :D], wide.transpose(0, 1)[..., :D], wide.transpose(1, 2)[..., :D]):
            y, _ = self.check(x, weight, None, "llama", 0.0)
            residual = self.normal(*x.shape[::-1]).permute(3, 2, 1, 0)  # its columns lie apart
            self.check(x, weight, residual, "gemma", 1.0)
            if x.shape == whole.shape:
                assert torch.equal(y, whole)
        self.check(wide[:1, :1, :1, :D], weight, None, "llama", 0.0)
        self.check(wide[0, 0, 0, :D], weight[::1], None, "llama", 0.0)
        self.check(wide[..., :D], self.normal(D, 2)[:, 0], None, "llama", 0.0)

    def test_many_rows_and_none(self):
        M = 70 if INTERPRETING else 70000
        x, weight = self.normal(M, 24), self.normal(24)
        self.check(x, weight, x.flip(0), "gemma", 1.0)
        y, total, rstd = forward(x[:0], weight, x[:0], 1e-6, "llama", 0.0, False, True)
        assert y.shape == total.shape == (0, 24) and rstd.shape == (0,)
        dx, dweight = gradients(x[:0], rstd, weight, y, None, 0.0, True)
        assert dx.shape == (0, 24) and torch.equal(dweight, torch.zeros_like(weight))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_extremes(self, dtype):
        """Zeros, tiny and large rows, an infinity and a NaN give what the reference gives."""
        x = self.normal(7, 160, dtype=dtype)
        scales = (0.0, 1e-4, 1e-7, 200.0, 1.0)
        x[:5] *= torch.tensor(scales, device=self.device, dtype=dtype)[:, None]
        x[5, 3], x[6, 4] = float("inf"), float("nan")
        weight = self.normal(160, dtype=dtype)
        for mode, offset in MODES:
            args = (x, weight, None, 1e-6, mode, offset, False, True)
            y, ref = forward(*args)[0], reference.rms_norm_fwd(*args)[0]
            assert_same_bits(y[:5], ref[:5])
            assert torch.equal(y[5:].isnan(), ref[5:].isnan())

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_silu_mul(self, dtype, activation):
        kinds, gate_module = submodule("swiglu.call"), "swiglu.portable.gate"
        joined = self.normal(9, 2 * 1100, dtype=dtype)
        for gate, up in (joined.chunk(2, 1), joined[:, :14].chunk(2, 1), (joined, joined.flip(0))):
            dz = self.normal(*gate.shape, dtype=dtype)
            poison(dz)
            args = (gate_module, "silu_mul_fwd", kinds.SiluMul, gate, up, activation)
            z = prepared(*args)
            args = (gate_module, "silu_mul_bwd", kinds.SiluMulGradient, gate, up, dz, activation)
            found = (z, *prepared(*args))
            wide = gate.double(), up.double()
            right = gates.silu_mul_fwd(*wide, activation)
            for a, b in zip(found, (right, *gates.silu_mul_bwd(*wide, dz.double(), activation))):
                assert_close(a, b, factor=0.5)


@interpreted
class TestInterpreted(Kernel):
    pass


@compiled
@pytest.mark.gpu
class TestGpu(Kernel):
    device = "cuda"

    @pytest.mark.parametrize("grad", [False, True])
    def test_more_than_31_bits_of_elements(self, grad):
        if torch.cuda.mem_get_info()[0] < 40 * 2**30:
            pytest.skip("needs 40 GiB")
        x = torch.randn(2**19 + 3, 4096, device="cuda", dtype=torch.bfloat16)
        weight = self.normal(4096, dtype=torch.bfloat16)
        y, _, rstd = forward(x, weight, None, 1e-6, "llama", 0.0, False, True)
        last = x[-5:].clone()
        right, _, rstd_last = reference.rms_norm_fwd(
            last, weight, None, 1e-6, "llama", 0.0, False, True
        )
        assert_same_bits(y[-5:], right)
        dx, _ = gradients(x, rstd, weight, y, None, 0.0, True)
        right, _ = reference.rms_norm_bwd(last, rstd_last, weight, y[-5:], None, 0.0, True)
        assert_close(dx[-5:], right)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode, offset", MODES)
def test_training(kernel, device, dtype, mode, offset):
    """Gradients of all three, of few of them, and where one of the results is not used."""
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 70, 264, device=device).to(dtype).unbind(0)
    leaves = [x, torch.randn(264, device=device).to(dtype), residual]

    def step(norm, wide, needed, used):
        own = [t.detach().double() if wide else t.detach() for t in leaves]
        own = [t.requires_grad_(n) for t, n in zip(own, needed)]
        outputs = norm(own[0], own[1], casting_mode=mode, offset=offset, residual=own[2])
        total = sum((y.to(own[0].dtype) * (i + 1)).sum() + (y * y).sum().to(own[0].dtype)
                    for i, y in enumerate(outputs) if used[i])  # fmt: skip
        wanted = [t for t in own if t.requires_grad]
        return torch.autograd.grad(total, wanted, allow_unused=True)

    for needed in ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)):
        for used in ((1, 1), (1, 0), (0, 1)):
            needed, used = tuple(map(bool, needed)), tuple(map(bool, used))
            if needed == (False, True, False) and not used[0]:
                continue  # nothing of it needs a gradient
            found = step(kernel.rms_norm, False, needed, used)
            right = step(kernel.rms_norm, True, needed, used)
            for a, b in zip(found, right):
                if b is None:
                    assert a is None
                else:
                    assert_close(a, b)

        def after(*args, **options):
            return (kernel.rms_norm(*args, after=True, **options),)

        for a, b in zip(*(step(after, wide, needed, (True,)) for wide in (False, True))):
            assert_close(a, b)


@compiled
def test_a_call_repeats_and_follows_its_arguments(kernel, device):
    """Remembered calls: other values, dtypes, options and modes of torch are told apart."""
    x, residual = torch.randn(2, 4, 64, device=device).unbind(0)
    weight = torch.randn(64, device=device)
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            for mode, offset in MODES:
                args = (x.to(dtype), weight, residual.to(dtype), 1e-6, mode, offset)
                options = {"casting_mode": mode, "offset": offset}
                with torch.no_grad():
                    y = kernel.rms_norm(*args[:2], **options)
                    pair = kernel.rms_norm(*args[:2], residual=args[2], **options)
                ref = reference.rms_norm_fwd(*args[:2], None, *args[3:])
                assert_same_bits(y, ref[0])
                ref = reference.rms_norm_fwd(*args)
                assert_same_bits(pair[0], ref[0])
                assert torch.equal(pair[1], ref[1])
                with torch.no_grad():
                    y = kernel.rms_norm(*args[:2], residual=args[2], after=True, **options)
                assert_close(y, reference.rms_norm_fwd(*args, True)[0])
        x = torch.randn_like(x)
    parameter = torch.nn.Parameter(weight)
    assert kernel.rms_norm(x, parameter).requires_grad
    with torch.no_grad():
        assert not kernel.rms_norm(x, parameter).requires_grad
