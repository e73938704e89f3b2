"""Convolution, gated norm and the fused layer kernels against plain torch in fp64."""

import functools

import pytest
import torch
from conftest import assert_close, computed, prepared, relative_error, submodule
from interpreter import INTERPRETING, compiled, interpreted, test_in_the_interpreter  # noqa: F401

reference = submodule("gdn_layer.reference.layer")
fused, calls = submodule("gdn_layer.reference.fused"), submodule("gdn_layer.call")

DTYPES = [torch.float32, torch.float16] if INTERPRETING else [torch.float32, torch.bfloat16]


def wide(*args):
    """The arguments in fp64, in memory of their own."""
    return [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in args]


by_kernel = functools.partial(prepared, "gdn_layer.portable.layer")
convolve = functools.partial(by_kernel, "causal_conv1d_fwd", calls.Convolution)
norm = functools.partial(by_kernel, "rms_norm_gated_fwd", calls.GatedNorm)
decode = functools.partial(computed, "gdn_layer.portable.layer", "gdn_layer_decode")
definition = reference.causal_conv1d_update


def update(*tensors, activation="silu", null=-1, out=None, by=None):
    """By the kernel, or by another function of the same tensors and options."""
    tensors += (None,) * (7 - len(tensors))
    if by is not None:
        return by(*tensors, activation, null)
    fields = (*tensors, out, activation, null)
    y = by_kernel("causal_conv1d_update", calls.ConvolutionUpdate, *fields)
    return y if out is None else out


def poison(*tensors):
    """Leaves freed memory full of NaN behind, for the allocator to hand out again."""
    stale = [torch.full_like(x, float("nan")) for x in tensors]
    del stale


def check_convolution(*args):
    """y of a call, which is the reference's in fp64, with the same last inputs."""
    poison(args[0])
    y, final = convolve(*args)
    ref_y, ref_final = reference.causal_conv1d_fwd(*wide(*args))
    assert_close(y, ref_y)
    assert final is ref_final is None or torch.equal(final.double(), ref_final)
    return y


def check_update(x, states, *rest, out=None, **options):
    """y of a call, which is the reference's in fp64, with the same states; NaN of x is of none."""
    ref_states = states.double()
    ref = update(*wide(x.nan_to_num()), ref_states, *wide(*rest), by=definition, **options)
    y = update(x, states, *rest, out=out, **options)
    assert_close(y, ref)
    assert torch.equal(states.double().nan_to_num(), ref_states.nan_to_num())
    return y


class Kernel:
    """Run twice: under the interpreter on the CPU, and compiled on a GPU."""

    device = "cpu"

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, device=self.device).to(dtype)

    def x(self, order, B, D, T, dtype):
        """x [B, D, T] as its callers have it: rows of tokens, as transformers, or of channels."""
        if order == "tokens":
            return self.normal(B, T, D + 8, dtype=dtype)[..., :D].transpose(1, 2)
        return self.normal(B, D, T, dtype=dtype)

    @pytest.fixture(autouse=True)
    def seed(self):
        torch.manual_seed(0)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("order", ["tokens", "channels"])
    @pytest.mark.parametrize("W", [2, 4, 8])  # the least, the models', the most
    def test_convolution(self, W, order, dtype):
        x = self.x(order, 2, 24, 37, dtype)
        weight, bias = self.normal(24, W, dtype=dtype), self.normal(24, dtype=dtype)
        before = self.normal(2, W - 1, 24, dtype=dtype).mT
        for initial, b, activation in ((None, None, None), (before, bias, "silu")):
            args = (x, weight, b, None, None, initial, activation, True)
            y = check_convolution(*args)
            assert y.stride() == torch.empty_like(x).stride()
            if self.device != "cpu":  # the interpreter runs one program after the other
                assert torch.equal(y, convolve(*args)[0])

    @pytest.mark.parametrize("T", [4, 36, 300])
    @pytest.mark.parametrize("W", [2, 4, 5, 6, 8])
    def test_convolution_by_quads(self, W, T):
        """16-bit tokens side by side, a multiple of four: four at a time."""
        x = self.normal(2, 12, T + 4, dtype=DTYPES[1])[..., 4:]
        weight, bias = self.normal(12, W, dtype=DTYPES[1]), self.normal(12)
        assert submodule("gdn_layer.portable.causal_conv1d_quads").takes_quads(
            x, torch.empty_like(x)
        )
        check_convolution(x, weight, bias, None, None, None, "silu", True)

    # a sequence shorter than the taps, empty ones, the last one empty too
    @pytest.mark.parametrize("cu", [[0, 0, 2, 3, 21, 37, 37], [0, 37]], ids=str)
    @pytest.mark.parametrize("order", ["tokens", "channels"])
    def test_packed_convolution(self, order, cu):
        N, x, weight = len(cu) - 1, self.x(order, 1, 24, 37, DTYPES[1]), self.normal(24, 4)
        initial = self.normal(N, 24, 3, dtype=DTYPES[1])
        lengths = torch.tensor(cu, device=self.device, dtype=torch.int32)
        for start in (None, initial):
            y = check_convolution(x, weight, None, None, lengths, start, "silu", True)
            for n, (a, b) in enumerate(zip(cu, cu[1:])):  # alone it gives the same bits
                one = None if start is None else start[n : n + 1]
                alone, _ = convolve(x[..., a:b], weight, None, None, None, one, "silu", False)
                assert torch.equal(alone, y[..., a:b])

    def test_nothing_leaks(self):
        """NaN of another sequence, by seq_idx or lengths, reaches no other."""
        x, weight = self.x("tokens", 1, 24, 20, torch.float32), self.normal(24, 4)
        x[..., 5:12] = float("nan")
        seq_idx = torch.tensor([[0] * 5 + [1] * 7 + [2] * 8], device=self.device)
        lengths = torch.tensor([0, 5, 12, 20], device=self.device)
        for args in ((seq_idx, None), (None, lengths)):
            y, _ = convolve(x, weight, None, *args, None, "silu", False)
            assert not y[..., :5].isnan().any() and not y[..., 12:].isnan().any()

    def test_convolution_by_seq_idx(self):
        x, weight = self.x("tokens", 2, 24, 20, DTYPES[1]), self.normal(24, 4, dtype=DTYPES[1])
        seq_idx = torch.tensor([[0] * 5 + [1] * 15, [3] * 20], device=self.device)
        check_convolution(x, weight, None, seq_idx, None, None, None, False)

    def test_no_tokens(self):
        x, weight, initial = self.normal(2, 24, 0), self.normal(24, 4), self.normal(2, 24, 3)
        y, final = convolve(x, weight, None, None, None, initial, None, True)
        assert y.shape == x.shape and torch.equal(final, initial)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("S", [3, 4, 6])  # the least; transformers'; more
    @pytest.mark.parametrize("T", [1, 3])
    def test_update(self, T, S, dtype):
        weight, bias = self.normal(24, 4, dtype=dtype), self.normal(24, dtype=dtype)
        state = self.normal(2, 24, S, dtype=dtype)
        for order in ("tokens", "channels"):
            check_update(self.x(order, 2, 24, T, dtype), state, weight, bias)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("S", [3, 4, 6])
    @pytest.mark.parametrize("T", [1, 3])
    def test_update_of_slots(self, T, S, dtype):
        """Null slots and slots of other sequences stay unchanged, whatever they hold."""
        weight, bias = self.normal(24, 4, dtype=dtype), self.normal(24, dtype=dtype)
        for null, slots in ((-1, [4, -1, 0, 2]), (0, [4, 0, 3, -1])):
            pool = self.normal(6, S, 24, dtype=dtype).mT if S == 6 else self.normal(6, 24, S)
            pool = pool.to(dtype)
            if null == 0:
                pool[0] = float("nan")
            indices = torch.tensor(slots, device=self.device)
            x, room = self.x("tokens", 4, 24, T, dtype), self.normal(4, T + 1, 24, dtype=dtype)
            x[1] = float("nan")
            before, out = room.clone(), room[:, 1:].mT
            y = check_update(x, pool, weight, bias, indices, null=null, out=out)
            assert y is out and torch.equal(room[:, :1], before[:, :1])
            assert not y[1].any() and torch.isfinite(pool[slots[0]]).all()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("W", [2, 4])
    @pytest.mark.parametrize("cu", [None, [0, 2, 2, 5, 6]], ids=str)
    def test_update_with_drafts(self, cu, W, dtype):
        weight, S = self.normal(24, W, dtype=dtype), W + 2  # a column more than 3 tokens need
        x = self.x("tokens", 4 if cu is None else 1, 24, 3 if cu is None else 6, dtype)
        lengths = None if cu is None else torch.tensor(cu, device=self.device)
        pool = self.normal(7, 24, S, dtype=dtype)
        rows = torch.tensor([5, 2, 0, 6], device=self.device)
        for null, counts in ((-1, [1, 2, 3, 4]), (0, [3, 1, 1, 2])):
            accepted = torch.tensor(counts, device=self.device)
            args = (x, pool, weight, None, rows, accepted, lengths)
            check_update(*args, activation=None, null=null)

    def test_rejected_drafts_leave_no_trace(self):
        """Rounds of drafts of which some are accepted give what those tokens alone give."""
        x, weight = self.x("tokens", 2, 24, 12, torch.float32), self.normal(24, 4)
        counts = [[3, 1, 2, 2], [1, 2, 3, 1]]  # accepted of each round, of two sequences
        pool, outputs, last = self.normal(2, 24, 5), [[], []], [1, 1]
        history = pool[..., :3].clone()
        for i in range(4):
            accepted = torch.tensor(last, device=self.device)
            y = update(x[..., 3 * i : 3 * i + 3], pool, weight, None, None, accepted)
            last = [counts[n][i] for n in range(2)]
            for n in range(2):
                outputs[n].append(y[n, :, : last[n]])
        for n in range(2):
            at = [3 * i + t for i in range(4) for t in range(counts[n][i])]
            args = (x[n : n + 1, :, at], weight, None, None, None, history[n : n + 1], "silu", True)
            ref, final = reference.causal_conv1d_fwd(*wide(*args))
            assert_close(torch.cat(outputs[n], -1), ref[0])
            assert torch.equal(pool[n, :, last[n] - 1 : last[n] + 2].double(), final[0])

    def test_update_of_packed_sequences(self):
        weight, pool = self.normal(24, 4), self.normal(4, 24, 4)
        x, cu = self.x("tokens", 1, 24, 6, torch.float32), [0, 2, 2, 5, 6]
        alone, lengths = pool.clone(), torch.tensor(cu, device=self.device)
        y = check_update(x, pool, weight, None, None, None, lengths)
        for n, (a, b) in enumerate(zip(cu, cu[1:])):
            mine = update(x[..., a:b], alone[n : n + 1], weight)
            assert_close(y[..., a:b], mine.double())
        assert torch.equal(alone, pool)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(7,), (5, 128), (3, 4, 100), (2, 1, 4, 24)], ids=str)
    def test_norm(self, shape, dtype):
        x, weight = self.normal(*shape, dtype=dtype), self.normal(shape[-1])
        gate = self.normal(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]]
        for activation in ("silu", "sigmoid"):
            args = (x, gate, weight, 1e-6, activation)
            poison(x)
            y = norm(*args)
            assert_close(y, reference.rms_norm_gated_fwd(*wide(*args)))
            assert torch.equal(y, norm(*args))

    # (B, T, H, HV, K, V, W, S, lengths): a head dim of 48 is no power of two
    @pytest.mark.parametrize(
        "sizes",
        [
            (2, 19, 2, 4, 16, 32, 4, 4, None),
            (1, 20, 1, 2, 32, 16, 4, 3, [0, 0, 3, 15, 20, 20]),
            (1, 5, 1, 1, 48, 16, 2, 8, [0, 2, 5]),
        ],
        ids=str,
    )
    def test_prologue(self, sizes):
        """q, k, v by key head, as Qwen3-Next has them: what put side by side, convolution gives."""
        B, T, H, HV, K, V, W, S, cu = sizes
        R = HV // H
        packed = self.normal(B, T, H, 2 * K + R * V, dtype=DTYPES[1])
        q, k, v = packed.split([K, K, R * V], -1)
        v = v.unflatten(-1, (R, V)).flatten(2, 3)
        weight = self.normal(2 * H * K + HV * V, W, dtype=DTYPES[1])
        lengths = None if cu is None else torch.tensor(cu, device=self.device)
        N = B if cu is None else len(cu) - 1
        cached = self.normal(N, weight.shape[0], W, dtype=DTYPES[1])
        for initial in (None, cached[..., 1:]):
            args = (q, k, v, weight, None, lengths, initial, "silu", S)
            y, final = by_kernel("gdn_layer_prologue", calls.Prologue, *args)
            ref_y, ref_final = fused.gdn_layer_prologue(*wide(*args))
            assert_close(y, ref_y)
            assert torch.equal(final.double(), ref_final)

    # (B, H, HV, K, V, W, S): rows of one projection; grouped heads; a state wider than needed
    @pytest.mark.parametrize(
        "sizes, dtype",
        [
            ((2, 2, 4, 16, 32, 4, 4), DTYPES[1]),
            ((1, 1, 1, 32, 16, 4, 3), DTYPES[0]),
            ((3, 1, 2, 48, 16, 2, 5), DTYPES[0]),
        ],
        ids=str,
    )
    def test_decode(self, sizes, dtype):
        """Two steps of a layer: both states and both outputs."""
        B, H, HV, K, V, W, S = sizes
        D = 2 * H * K + HV * V
        conv_state, state = self.normal(B, D, S, dtype=dtype), self.normal(B, HV, K, V) * 0.2
        ref_conv, ref_state = wide(conv_state, state)
        weight = self.normal(D, W, dtype=dtype)
        vectors = self.normal(2, HV).unbind(0)
        norm = self.normal(V)
        for neg in (False, True):
            rows = self.normal(B, 1, D + HV * V, dtype=dtype)
            gates = self.normal(B, 1, 2 * HV, dtype=dtype)
            if neg:  # heads of v by those of q and k, as Qwen3-Next has them
                by_key, R = rows.unflatten(-1, (H, -1)), HV // H
                q, k, v, z = by_key.split([K, K, R * V, R * V], -1)
                v, z = (x.unflatten(-1, (R, V)) for x in (v, z))
                a, b = gates.unflatten(-1, (H, -1)).split(R, -1)
            else:
                q, k, v, z = rows.split([H * K, H * K, HV * V, HV * V], -1)
                q, k = (x.unflatten(-1, (H, K)) for x in (q, k))
                v, z = (x.unflatten(-1, (HV, V)) for x in (v, z))
                a, b = gates.split(HV, -1)
            options = calls.DecodeOptions("silu", 1e-6, "silu", neg)
            given, rest = (q, k, v, z, a, b), (weight, None, *vectors, norm)
            call = calls.LayerDecode(*given, conv_state, state, *rest, options)
            poison(v)
            y = decode(call)
            states = (ref_conv, ref_state)
            ref = fused.gdn_layer_decode(
                calls.LayerDecode(*wide(*given), *states, *wide(*rest), options)
            )
            assert_close(y, ref)
            assert torch.equal(conv_state.double(), ref_conv)
            assert relative_error(state, ref_state) < 1e-5
        if V > HV > 1:  # vectors that do not lie densely are the reference's
            for name in ("A_log", "dt_bias", "norm_weight"):
                apart = getattr(call, name).repeat_interleave(2)[::2]
                assert decode(call._replace(**{name: apart})) is None


@interpreted
class TestInterpreted(Kernel):
    pass


@compiled
@pytest.mark.parametrize("name, flag", [("fn", "QUADS"), ("update", "PACKED")])
def test_a_known_call_at_another_address(kernel, name, flag):
    """Kernels that read integers of 64 bits are for multiples of 8 bytes, known call or not."""
    pytest.importorskip("triton")
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    weight, room = torch.zeros(12, 4).bfloat16(), torch.zeros(1000).bfloat16()
    with recording.recorded(device.Chip("NVIDIA_H200", (9, 0), 132)) as records:
        for shift in (0, 1, 4, 0):
            if name == "fn":
                kernel.causal_conv1d_fn(room[shift : shift + 960].view(2, 12, 40), weight)
            else:
                state = room[shift : shift + 96].view(2, 12, 4)
                kernel.causal_conv1d_update(room[:24].view(2, 12), state, weight)
    flags = [r.constexprs[r.kernel.arg_names.index(flag),] for r in records]
    assert flags == [True, False, True, True]


@compiled
@pytest.mark.gpu
class TestCompiled(Kernel):
    device = "cuda"

    def test_update_many_times(self):
        """A race between threads that move the state would show in some of many tries."""
        state, weight = self.normal(64, 4096, 4), self.normal(4096, 4)
        expected = state.clone()
        for _ in range(50):
            x = self.normal(64, 4096, 1)
            update(x, state, weight, activation=None)
            expected = torch.cat([expected, x], -1)[..., 1:]
            assert torch.equal(state, expected)

    def test_large(self):
        """More than 2^31 elements, and rows that are read past them."""
        x = torch.zeros(1, 2**31 // 8192 + 64, 8192, dtype=torch.bfloat16, device="cuda")
        x[0, -40:] = self.normal(40, 8192)
        weight = self.normal(8192, 4, dtype=torch.bfloat16)
        y, final = convolve(x.transpose(1, 2), weight, None, None, None, None, "silu", True)
        tail = x[:, -43:].transpose(1, 2)
        ref = reference.causal_conv1d_fwd(*wide(tail, weight), None, None, None, None, "silu", True)
        assert_close(y[..., -40:], ref[0][..., -40:])
        assert torch.equal(final.double(), ref[1])

    def test_decode_batch_invariant(self):
        """A row of a batch gives the bits that it gives alone, every time."""
        n = 33
        rows = self.normal(n, 1, 3 * 4 * 128, dtype=torch.bfloat16)
        q, k, v = (x.unflatten(-1, (4, 128)) for x in rows.chunk(3, -1))
        z, (a, b) = self.normal(n, 1, 4, 128), self.normal(2, n, 1, 4).unbind(0)
        conv, state = self.normal(n, 1536, 4, dtype=torch.bfloat16), self.normal(n, 4, 128, 128)
        rest = (self.normal(1536, 4), None, *self.normal(2, 4).unbind(0), self.normal(128))
        options = calls.DecodeOptions("silu", 1e-6, "silu", False)

        def run(part):
            own = [x[part].clone() for x in (conv, state)]
            args = [x[part] for x in (q, k, v, z, a, b)]
            return decode(calls.LayerDecode(*args, *own, *rest, options)), own[1]

        y, after = run(slice(None))
        again = run(slice(None))
        one = run(slice(7, 8))
        assert torch.equal(y, again[0]) and torch.equal(after, again[1])
        assert torch.equal(one[0][0], y[7]) and torch.equal(one[1][0], after[7])
