"""The kernels around attention against plain torch in fp64: errors no larger than transformers'."""

import itertools

import fp8_problems
import pytest
import torch
from conftest import assert_close, captured, prepared, relative_error, submodule
from interpreter import INTERPRETING, compiled, interpreted, test_in_the_interpreter  # noqa: F401
from test_attention import SHAPES, normal, problem, wide

reference, calls = submodule("attention.reference"), submodule("attention.call")
HALF = torch.float16 if INTERPRETING else torch.bfloat16
DTYPES = [torch.float32, HALF]
# more heads than a program takes, more tokens than a program of the gradient, odd everywhere
LARGER = (1, 5, 9, 3, 200, 20) if INTERPRETING else (3, 21, 33, 9, 80, 20)
# shape, norm, dtype and angles, which are interleaved in 1 and 2. The interpreter, in which every
# value is wide, takes few of them in fp16 and few of the larger shape
NORMS = ("head", "all", None)
ROTARIES = [*itertools.product([*SHAPES, LARGER], NORMS, DTYPES, (0, 1, 2))]
if INTERPRETING:
    ROTARIES = [
        *itertools.product(SHAPES, NORMS, DTYPES, (0,)),
        *itertools.product(SHAPES[:3], NORMS, DTYPES[:1], (1, 2)),
        *itertools.product([LARGER], NORMS, DTYPES[:1], (0,)),
        (LARGER, None, torch.float32, 1),
    ]
# B, HQ, HK, S, D: groups of one, of a few, and of more than a tile; D 80 and 96 are padded
ATTENTIONS = [(2, 4, 2, 100, 64), (1, 3, 1, 70, 80), (2, 40, 2, 130, 16), (3, 5, 5, 65, 96),
              (2, 8, 2, 200, 128), (1, 16, 4, 90, 256)]  # fmt: skip
ATTENTIONS = ATTENTIONS[:3] if INTERPRETING else ATTENTIONS


KINDS = {
    "qk_norm_rope_fwd": calls.QkNormRope, "qk_norm_rope_bwd": calls.QkGradient,
    "sigmoid_gate_fwd": calls.SigmoidGate, "sigmoid_gate_bwd": calls.SigmoidGradient,
    "kvcache_attention": calls.KvCacheAttention,
    "kvcache_attention_quantise": calls.KvCacheAttention,
}  # fmt: skip


def by_kernels(name, *fields):
    return prepared("attention.portable.attention", name, KINDS[name], *fields)


def flat(call) -> tuple:
    return *call.tensors, *call.options


def call_of(x, offset=0.5, eps=1e-6, cache=(None, None, None, None)):
    tensors = [x[name] for name in ("q", "k", "cos", "sin", "q_weight", "k_weight")]
    options = calls.QkOptions(eps, offset, x["norm"] == "all", x["interleaved"])
    return calls.QkNormRope(*tensors, *cache, options)


def wide_call(call):
    return calls.QkNormRope(*map(wide, call.tensors), call.options)


def poison(*tensors):
    """Leaves freed memory full of NaN behind, for the allocator to hand out again."""
    stale = [torch.full_like(x, float("nan")) for x in tensors]
    del stale


class Kernel:
    """Run twice: under the interpreter on the CPU, and compiled on a GPU."""

    device = "cpu"

    @pytest.fixture(autouse=True)
    def processors(self, monkeypatch):
        """Reports as many SMs as an H200 has if there is no GPU."""
        if self.device == "cpu":
            monkeypatch.setattr(submodule("runtime.device"), "multiprocessor_count", lambda _: 132)

    @pytest.fixture(params=[1, 132])
    def multiprocessors(self, request, monkeypatch):
        """One part of the slots, and many."""
        where = submodule("runtime.device")
        monkeypatch.setattr(where, "multiprocessor_count", lambda _: request.param)

    def repeats(self, call, found):
        """The same bits again; the interpreter runs one program after the other."""
        for a, b in zip(found, found if self.device == "cpu" else call()):
            assert a is b is None or torch.equal(a, b)

    def normal(self, *shape, seed=0, dtype=torch.float32):
        return normal(*shape, seed=seed, dtype=dtype, device=self.device)

    @pytest.mark.parametrize("shape, norm, dtype, angles", ROTARIES, ids=str)
    def test_rotary(self, shape, norm, dtype, angles):
        x = problem(
            *shape, dtype=dtype, device=self.device, norm=norm, rows=shape[0], gate=True,
            angles=angles,
        )  # fmt: skip
        call = call_of(x)
        poison(x["q"], x["k"])
        found = by_kernels("qk_norm_rope_fwd", *flat(call))
        for a, b in zip(found, reference.qk_norm_rope_fwd(*flat(wide_call(call)))):
            assert a.is_contiguous()
            assert_close(a, b, factor=0.3)  # rounded once
        self.repeats(lambda: by_kernels("qk_norm_rope_fwd", *flat(call)), found)

    @pytest.mark.parametrize("shape, norm, dtype, angles", ROTARIES, ids=str)
    def test_rotary_gradient(self, shape, norm, dtype, angles):
        x = problem(*shape, dtype=dtype, device=self.device, norm=norm, gate=True, angles=angles)
        call = call_of(x)
        B, T, HQ, HK, D, _ = shape
        dq = self.normal(B, HQ, T, D, seed=8, dtype=dtype).transpose(1, 2)
        dk = self.normal(B, T, HK, D, seed=9, dtype=dtype)
        rows = (None, None) if norm is None else (call.q, call.k)
        args = (dq, dk, *rows, *call.tensors[2:6])
        poison(dq, dk, *(dq.float(),) * 2)
        found = by_kernels("qk_norm_rope_bwd", *args, *call.options)
        want = reference.qk_norm_rope_bwd(*map(wide, args), *call.options)
        self.repeats(lambda: by_kernels("qk_norm_rope_bwd", *args, *call.options), found)
        for a, b in zip(found, want):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == dtype
                assert_close(a, b, factor=0.5)

    @pytest.mark.parametrize("angles", [0, 1, 2])
    def test_only_one_norm_and_views(self, angles):
        """A norm of q alone; last dimensions that are not dense; a token's table for all rows."""
        x = problem(2, 5, 4, 2, 16, 8, device=self.device, rows=1, angles=angles)
        x.update(k_weight=None, norm="head", q_weight=self.normal(32)[::2])
        for name in ("q", "k", "cos", "sin"):
            x[name] = x[name].mT.contiguous().mT
        call = call_of(x, eps=0.0)
        found = by_kernels("qk_norm_rope_fwd", *flat(call))
        for a, b in zip(found, reference.qk_norm_rope_fwd(*flat(wide_call(call)))):
            assert_close(a, b)
        args = (call.q, call.k, call.q, None, *call.tensors[2:6])
        found = by_kernels("qk_norm_rope_bwd", *args, *call.options)
        want = reference.qk_norm_rope_bwd(*map(wide, args), *call.options)
        for a, b in zip(found[:3], want[:3]):
            assert_close(a, b)
        assert found[3] is None and want[3] is None

    @pytest.mark.parametrize("T, at", [(1, 0), (1, 8), (3, 2), (1, 9), (3, -1), (3, 8)])
    @pytest.mark.parametrize("angles", [0, 1])
    def test_cache(self, T, at, angles):
        """Slots at cache_position + t, of those there are; others stay as they were. Tokens
        without a slot are NaN."""
        x = problem(2, T, 6, 3, 80, 20, dtype=HALF, device=self.device, angles=angles)
        v = self.normal(2, T, 3, 48, seed=6, dtype=HALF)
        keys, values = (
            self.normal(2, 9, 3, D, seed=7, dtype=dtype).transpose(1, 2)
            for D, dtype in ((80, HALF), (48, torch.float32))
        )
        held = keys.clone(), values.clone()
        position = torch.tensor(at, device=self.device)
        call = call_of(x, cache=(v, keys, values, position))
        found = by_kernels("qk_norm_rope_fwd", *flat(call))
        has_slot = [0 <= at + t < 9 for t in range(T)]
        for a, b in zip(found, by_kernels("qk_norm_rope_fwd", *flat(call_of(x)))):
            assert torch.equal(a[:, has_slot], b[:, has_slot])
            assert a.isnan().all((0, 2, 3)).tolist() == [not there for there in has_slot]
        for cache, before, new in ((keys, held[0], found[1]), (values, held[1], v)):
            for t in range(T):
                if 0 <= at + t < 9:
                    before[:, :, at + t] = new[:, t]
            assert torch.equal(cache, before)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_gate(self, dtype):
        gates = self.normal(2, 7, 5, 48, seed=1, dtype=dtype)
        for shape, x in (
            ("attention's", self.normal(2, 5, 7, 24, dtype=dtype).transpose(1, 2)),
            ("dense", self.normal(2, 7, 5, 24, dtype=dtype)),
            ("columns", self.normal(24, 2, 7, 5, dtype=dtype).permute(1, 2, 3, 0)),
        ):
            gate = gates[..., 24:]
            poison(x)
            y = by_kernels("sigmoid_gate_fwd", x, gate)
            assert y.is_contiguous(), shape
            assert_close(y, reference.sigmoid_gate_fwd(wide(x), wide(gate)), factor=0.3)
            dy = self.normal(2, 7, 5, 24, seed=2, dtype=dtype)
            found = by_kernels("sigmoid_gate_bwd", x, gate, dy)
            for a, b in zip(found, reference.sigmoid_gate_bwd(*map(wide, (x, gate, dy)))):
                assert_close(a, b, factor=0.3)

    @pytest.mark.parametrize("shape", [(7,), (1,), (3, 1), (0, 4), (2, 1, 3000), (1, 1, 1, 5000)])
    def test_gate_of_other_shapes(self, shape):
        x, gate = self.normal(*shape), self.normal(*shape, seed=1)
        y = by_kernels("sigmoid_gate_fwd", x, gate)
        assert_close(y, reference.sigmoid_gate_fwd(wide(x), wide(gate)))

    def test_gate_of_nothing_with_gaps(self):
        """contiguous() leaves the strides of a tensor without elements as they are."""
        x, gate = self.normal(0, 2, 15)[..., 1::2], self.normal(0, 2, 7)
        assert by_kernels("sigmoid_gate_fwd", x, gate).shape == (0, 2, 7)
        for dx in by_kernels("sigmoid_gate_bwd", x, gate, x):
            assert dx.shape == (0, 2, 7)

    @pytest.mark.parametrize("kind", [None, torch.bool, torch.float32, HALF], ids=str)
    @pytest.mark.parametrize("B, HQ, HK, S, D", ATTENTIONS)
    def test_attention(self, B, HQ, HK, S, D, kind, multiprocessors):
        """Lengths of a row each; slots that are not attended hold NaN."""
        q = self.normal(B, 1, HQ, 2 * D, dtype=HALF)[..., D:]
        k, v = (self.normal(B, HK, S, D, seed=seed, dtype=HALF) for seed in (1, 2))
        length = torch.tensor([S - 9, 3, 0][:B], device=self.device, dtype=torch.int32)
        mask = None if kind is None else self.normal(B, 1, 1, S, seed=4)
        seen = torch.arange(S, device=self.device) < length[:, None]
        if kind is torch.bool:
            mask = mask > 0
            seen = seen & mask[:, 0, 0]
        elif kind is not None:
            mask = mask.masked_fill(mask > 1, -torch.inf).to(kind)
            seen = seen & (mask[:, 0, 0] > -torch.inf)
        for cache in (k, v):
            cache.masked_fill_(~seen[:, None, :, None], torch.nan)
        args = (q, k, v, length, mask, D**-0.5)
        poison(q, *(q.float().repeat(1, 1, 1, 4),) * 4)
        found = by_kernels("kvcache_attention", *args)
        want = reference.kvcache_attention(*map(wide, args))
        assert_close(found, want, factor=0.3)
        self.repeats(lambda: [by_kernels("kvcache_attention", *args)], [found])
        if B == 3:  # whose last row attends to nothing
            assert not found[2].any()

    @pytest.mark.parametrize("B, HQ, HK, S", [(3, 4, 2, 200), (17, 2, 1, 40)])
    def test_attention_in_fp8(self, B, HQ, HK, S, multiprocessors):
        """To the bit what the quantiser makes of attention."""
        q = self.normal(B, 1, HQ, 128, dtype=torch.bfloat16)
        k, v = (self.normal(B, HK, S, 128, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
        args = (q, k, v, torch.tensor(S - 9, device=self.device), None, 0.1)
        codes, scales = fp8_problems.apart(by_kernels("kvcache_attention_quantise", *args), B)
        y = by_kernels("kvcache_attention", *args).flatten(1)
        want = fp8_problems.quantised(y)
        assert codes.shape == want.codes.shape and scales.stride() == want.scales.stride()
        assert torch.equal(codes[:B].view(torch.uint8), want.codes[:B].view(torch.uint8))
        assert torch.equal(scales[:B], want.scales[:B]) and scales[:B].isfinite().all()

    @pytest.mark.parametrize(
        "B, D, dtype", [(1, 128, "float16"), (65, 128, "bfloat16"), (1, 64, "bfloat16")]
    )
    def test_what_attention_in_fp8_leaves(self, B, D, dtype):
        dtype = getattr(torch, dtype)
        q, k = (self.normal(B, n, 2, D, dtype=dtype) for n in (1, 2))
        assert by_kernels("kvcache_attention_quantise", q, k, k, None, None, 1.0) is None

    @pytest.mark.parametrize("S", [1, 33, 200])
    def test_attention_over_all_slots(self, S, multiprocessors):
        """Without a length it is that of all slots, bit for bit."""
        q = self.normal(2, 1, 6, 16, dtype=HALF)
        k, v = (self.normal(2, 2, S, 16, seed=seed, dtype=HALF) for seed in (1, 2))
        mask = self.normal(1, 1, 1, S, seed=4) > -1
        for kept in (None, mask):
            args = (q, k, v, None, kept, 0.25)
            found = by_kernels("kvcache_attention", *args)
            length = torch.tensor(S, device=self.device)
            assert torch.equal(found, by_kernels("kvcache_attention", q, k, v, length, *args[4:]))
            assert_close(found, reference.kvcache_attention(*map(wide, args)), factor=0.3)

    def test_attention_without_a_slot_or_with_the_least_of_floats(self):
        q, k, v = (
            self.normal(1, *n, 16, seed=len(n), dtype=HALF) for n in ((1, 4), (2, 0), (2, 0))
        )
        length = torch.tensor(5, device=self.device)
        assert not by_kernels("kvcache_attention", q, k, v, length, None, 0.25).any()
        k, v = (self.normal(1, 2, 40, 16, seed=seed, dtype=HALF) for seed in (1, 2))
        mask = torch.full((1, 1, 1, 40), torch.finfo(torch.float32).min, device=self.device)
        args = (q, k, v, length, mask, 0.25)
        found = by_kernels("kvcache_attention", *args)
        mean = v[:, :, :5].double().mean(2).repeat_interleave(2, 1).view(1, 1, 4, 16)
        assert_close(found, mean)

    def test_attention_of_a_query_without_a_slot(self, multiprocessors):
        """Its output is NaN (test_cache), and so is that of attention."""
        q = self.normal(2, 1, 4, 16, dtype=HALF)
        q[1] = torch.nan
        k, v = (self.normal(2, 2, 200, 16, seed=seed, dtype=HALF) for seed in (1, 2))
        length = torch.tensor(201, device=self.device)
        mask = torch.ones(1, 1, 1, 200, dtype=torch.bool, device=self.device)
        for kept in (None, mask, torch.zeros_like(mask, dtype=HALF)):
            args = (q, k, v, length, kept, 0.25)
            for found in (
                by_kernels("kvcache_attention", *args),
                reference.kvcache_attention(*args),
            ):
                assert found[0].isfinite().all() and found[1].isnan().all()


@interpreted
class TestInterpreted(Kernel):
    pass


@compiled
def test_caches_of_other_lengths_have_the_same_kernels(monkeypatch):
    """Up to a power of two of blocks: each number of parts is a kernel of its own."""
    decode = submodule("attention.portable.decode")
    monkeypatch.setattr(decode.device, "multiprocessor_count", lambda index: 132)

    def parts(programs, blocks):
        return decode.count_parts(torch.device("cpu"), programs, blocks)

    assert {parts(4, blocks) for blocks in range(17, 33)} == {32}
    assert [parts(4, blocks) for blocks in (0, 1, 2, 33, 1000)] == [1, 1, 2, 64, 64]
    assert [parts(programs, 32) for programs in (1, 12, 24, 256, 10**6)] == [32, 22, 11, 1, 1]


@compiled
@pytest.mark.gpu
class TestCompiled(Kernel):
    device = "cuda"

    @pytest.mark.parametrize("T", [1, 37])
    @pytest.mark.parametrize(
        "name, norm_class, norm, D, R, offset",
        [
            ("llama", None, None, 128, 128, 0.0),
            ("qwen3", "Qwen3RMSNorm", "head", 128, 128, 0.0),
            ("qwen3_5", "Qwen3_5RMSNorm", "head", 256, 64, 1.0),
            ("olmo_hybrid", "OlmoHybridRMSNorm", "all", 128, 128, 0.0),
        ],
    )
    def test_errors_at_most_those_of_transformers(
        self, kernel, name, norm_class, norm, D, R, offset, T
    ):
        module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
        x = problem(2, T, 8, 4, D, R, dtype=torch.bfloat16, device="cuda", norm=norm or "head")
        if norm is None:
            x["q_weight"] = x["k_weight"] = None
        own = []
        for part in "qk":
            y, weight = x[part], x[f"{part}_weight"]
            if norm is not None:
                layer = getattr(module, norm_class)(weight.numel(), eps=1e-6)
                layer.weight.data = weight
                y = layer.to("cuda")(y.flatten(2) if norm == "all" else y).view_as(y)
            own.append(y.transpose(1, 2))
        own = [y.transpose(1, 2) for y in module.apply_rotary_pos_emb(*own, x["cos"], x["sin"])]
        found = kernel.fused_qk_norm_rope(**x, offset=offset)
        want = reference.qk_norm_rope_fwd(*flat(wide_call(call_of(x, offset=offset))))
        for ours, theirs, right in zip(found, own, want):
            assert relative_error(ours, right) <= relative_error(theirs, right)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_attention_no_worse_than_sdpa(self, kernel, dtype):
        B, HQ, HK, S, D = 4, 32, 8, 1000, 128
        q = self.normal(B, 1, HQ, D, dtype=dtype)
        k, v = (self.normal(B, HK, S, D, seed=seed, dtype=dtype) for seed in (1, 2))
        length = torch.tensor(777, device="cuda")
        mask = (torch.arange(S, device="cuda") < length).view(1, 1, 1, S).repeat(B, 1, 1, 1)
        mask[1, ..., :100] = False  # left padding
        repeated = [x.repeat_interleave(HQ // HK, 1) for x in (k, v)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        theirs = sdpa(q.transpose(1, 2), *repeated, attn_mask=mask).transpose(1, 2)
        found = kernel.attention_with_kvcache(q, k, v, length, attention_mask=mask)
        want = reference.kvcache_attention(*map(wide, (q, k, v, length, mask, D**-0.5)))
        assert relative_error(found, want) <= relative_error(theirs, want)

    def test_captured_in_a_graph(self, kernel):
        """What a graph holds follows the position and the length that lie on the device."""
        x = problem(2, 1, 8, 2, 64, 64, dtype=HALF, device="cuda")
        v = self.normal(2, 1, 2, 64, dtype=HALF)
        keys, values = torch.zeros(2, 2, 2, 300, 64, dtype=HALF, device="cuda")
        position, length = (torch.tensor(n, device="cuda") for n in (0, 1))

        def step():
            q, _ = kernel.fused_qk_norm_rope(
                **x, v=v, key_cache=keys, value_cache=values, cache_position=position
            )
            return kernel.attention_with_kvcache(q, keys, values, length)

        with torch.no_grad():
            for _ in range(2):
                step()
            torch.cuda.synchronize()
            graph, y = captured(step)
            for n in range(280):
                position.fill_(n)
                length.fill_(n + 1)
                x["k"].normal_()
                v.normal_()
                graph.replay()
            torch.cuda.synchronize()
            want = kernel.fused_qk_norm_rope(**x)[1].transpose(1, 2)[:, :, 0]
            assert torch.equal(keys[:, :, 279], want)
            assert not keys[:, :, 280:].any() and keys[:, :, :280].any(-1).all()
            q, _ = kernel.fused_qk_norm_rope(**x)
            args = (q, keys, values, length, None, 64**-0.5)
            assert_close(y, reference.kvcache_attention(*map(wide, args)), factor=0.3)

    def test_large(self, kernel):
        """More than 2^31 elements."""
        B, T, H, D = 1, 2**31 // 8192 + 64, 64, 128
        q = torch.zeros(B, T, H, D, dtype=HALF, device="cuda")
        q[:, -40:] = self.normal(B, 40, H, D)
        k = self.normal(B, T, 1, 16, dtype=HALF).repeat(1, 1, 1, 8)
        angle = self.normal(1, T, 64).repeat(1, 1, 2)
        x = {"q": q, "k": k, "cos": angle.cos(), "sin": angle.sin()}
        weight = self.normal(D, dtype=HALF)
        x.update(q_weight=weight, k_weight=weight, norm="head", interleaved=False)
        y, _ = kernel.fused_qk_norm_rope(**x)
        x.update({name: x[name][:, -40:] for name in ("q", "k", "cos", "sin")})
        want, _ = reference.qk_norm_rope_fwd(*flat(wide_call(call_of(x, offset=0.0))))
        assert_close(y[:, -40:], want, factor=0.3)
        z = kernel.sigmoid_gate(y, q)[:, -40:]
        assert_close(
            z, reference.sigmoid_gate_fwd(*map(wide, (y[:, -40:], q[:, -40:]))), factor=0.3
        )
