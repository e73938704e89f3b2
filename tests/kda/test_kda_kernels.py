"""The kernels of Kimi Delta Attention against the reference in fp64, and what they promise: under
Triton's interpreter, and on a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, computed, load_package, relative_error, submodule
from interpreter import INTERPRETING, compiled, interpreted, test_in_the_interpreter  # noqa: F401
from kda_problems import GATES, calls, kda_inputs, terms_of_A_log, wide

gdn_calls = submodule("gdn.call")
reference, decoding = submodule("kda.reference.chunk"), submodule("kda.reference.recurrent")
# on the GPU the truth is token by token; in the interpreter by chunks, which is as exact
DTYPES = [torch.float16, torch.float32] if INTERPRETING else [torch.bfloat16, torch.float16]


def prompt(x, **options):
    """The KdaCall of inputs by name; what is not given is off."""
    return call_of(
        calls.KdaCall, gdn_calls.GdnOptions, {"output_final_state": True, **x, **options}
    )


def token(x, **options):
    """The same of a KdaStepCall."""
    return call_of(calls.KdaStepCall, gdn_calls.RecurrentOptions, {**x, **options})


def call_of(kind, kind_of_options, given):
    given = {"scale": given["q"].shape[-1] ** -0.5, **given}
    options = {name: given.pop(name) for name in kind_of_options._fields if name in given}
    tensors = {**dict.fromkeys(kind._fields), **given}
    return kind(**{**tensors, "options": kind_of_options(**options)})


def expected(call, forward):
    """The reference in fp64, which leaves the call as it is."""
    tensors = [x if x is None or not x.is_floating_point() else wide(x).clone() for x in call[:-1]]
    options = call.options
    if hasattr(options, "state_dtype"):
        options = options._replace(state_dtype=torch.float64)
    return forward(type(call)(*tensors, options))


def by(room, name, call):
    """What the kernels of a room compute; a test of what Hopper's leave to others is skipped."""
    if call.q.is_cuda:
        stale = torch.full((2**24,), float("nan"), device="cuda")
        del stale  # the caching allocator hands this memory to what the call allocates
    module = "chunk" if room == "hopper" or name == "kda_chunk_fwd" else "backward"
    found = computed(f"kda.{room}.{module}", name, call)
    if found is None:
        assert room == "hopper" and (not call.options.use_qk_l2norm or call.q.dtype.itemsize > 2)
        pytest.skip("these are for 16 bits, with the norms in the kernel")
    return found


def run(call, room="portable"):
    return by(room, "kda_chunk_fwd", call)[:3]


def coarser(a, b):
    order = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return min(a, b, key=order.index)


def check(call, factor=1.0, room="portable"):
    ref = expected(call, reference.kda_chunk_fwd)
    o, state, checkpoints = run(call, room)
    assert o.dtype == call.q.dtype
    assert_close(o, ref[0], factor=factor)
    if state is not None:
        assert_close(state, ref[1], coarser(o.dtype, state.dtype), factor)
    if checkpoints is not None:
        used = ref[2].flatten(1).abs().sum(1) > 0
        assert_close(checkpoints[used], ref[2][used], coarser(o.dtype, checkpoints.dtype), factor)
    return o, state


def ends(*lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def raw_gates(x, HV, K, bound):
    """Raw inputs in place of g, with what makes decays of them."""
    device = x["q"].device
    return {
        **x, "g": torch.randn_like(x["g"]).to(x["q"].dtype) * 3,
        "A_log": torch.linspace(-1.0, 2.0, HV, device=device),
        "dt_bias": torch.linspace(-2.0, 25.0, HV * K, device=device), "lower_bound": bound,
    }  # fmt: skip


# what does not depend on one another, in the interpreter in one pair for each value
TYPED_GATES = list(itertools.product(DTYPES, GATES))
TYPED_STATES = list(itertools.product(DTYPES, [False, True]))
HEADS = [(3, 3), (2, 4), (5, 5), (1, 6)]
POOLS = [(16, DTYPES[0]), (80, DTYPES[0]), (80, torch.float32)]
RAW = [(16, None), (16, -5.0), (40, None), (40, -5.0)]
SHORT = 70  # tokens where several chunks are not what is asked about
REST = 81  # tokens of the last of several sequences
if INTERPRETING:
    SHORT, REST = 40, 9
    HEADS = HEADS[:2]
    # other tests are of bounded and slow ones
    TYPED_GATES = [(DTYPES[0], gates) for gates in GATES if gates not in ("bounded", "slow")]
    TYPED_GATES += [(DTYPES[1], "wild")]
    TYPED_STATES = list(zip(DTYPES, [False, True]))
    POOLS, RAW = [POOLS[0], POOLS[2]], RAW[:3]


class Problems:
    """Of a kind of kernels: under the interpreter on the CPU, and compiled on a GPU."""

    device, room = "cpu", "portable"
    shape = (1, 100, 1, 1, 32, 16)

    def inputs(self, B, T, H, HV, K, V, *more, **options):
        """Of these sizes, or of the head dims that the room has kernels for."""
        K, V = (128, 128) if self.room == "hopper" else (K, V)
        return kda_inputs(B, T, H, HV, K, V, *more, device=self.device, **options)

    def state(self, x, *rows, turned=False):
        """Random states of a call's head dims, for one head of one sequence or so many."""
        sizes = x["k"].shape[3], x["v"].shape[3]
        sizes = sizes[::-1] if turned else sizes
        return torch.randn(*(rows or (1, 1)), *sizes, device=self.device)

    @pytest.mark.parametrize("dtype, gates", TYPED_GATES, ids=str)
    def test_gates(self, gates, dtype):
        x = self.inputs(*self.shape, dtype, gates)
        x["initial_state"] = self.state(x, self.shape[0], self.shape[3])
        self.check(prompt(x, use_qk_l2norm=True))

    @pytest.mark.parametrize("T", [1, 64, 130] if INTERPRETING else [1, 7, 63, 64, 130])
    def test_lengths(self, T):
        x = self.inputs(2, T, 1, 1, 16, 24, DTYPES[0], "slow")
        self.check(prompt(x, use_qk_l2norm=True))

    @pytest.mark.parametrize("H, HV", HEADS)
    def test_heads(self, H, HV):
        x = self.inputs(1, SHORT, H, HV, 16, 16, DTYPES[0])
        self.check(prompt(x, use_qk_l2norm=True, output_final_state=False))

    @pytest.mark.parametrize("K, bound", RAW)
    def test_raw_gates(self, bound, K):
        x = self.inputs(1, SHORT, 2, 2, K, 16, DTYPES[0])
        x = raw_gates(x, 2, x["g"].shape[-1], bound)
        options = {"use_qk_l2norm": True, "use_beta_sigmoid": True}
        if K == 40 or not INTERPRETING:
            self.check(prompt(x, allow_neg_eigval=True, **options))
        if K == 40:
            return
        x["beta"] = torch.randn_like(x["beta"]).to(DTYPES[0])
        if bound is not None:
            self.check(prompt({n: y for n, y in x.items() if n != "A_log"}, **options))
            self.check(prompt({n: y for n, y in x.items() if n != "dt_bias"}, **options))
            del x["A_log"]
        del x["dt_bias"]
        self.check(prompt(x, **options))

    def test_keys_of_any_length(self):
        """Without l2norm, keys that write with up to twice their own projection."""
        x = self.inputs(1, 130, 1, 1, 40, 16, DTYPES[0], "slow")
        unit = torch.nn.functional.normalize(x["k"].float(), dim=-1)
        x["k"] = (1.4 * unit).to(DTYPES[0])
        self.check(prompt(x))


class Prompts(Problems):
    def check(self, call, factor=1.0):
        return check(call, factor, self.room)

    def run(self, call):
        return run(call, self.room)

    @pytest.mark.parametrize("gates", ["slow", "softplus", "zero"])
    def test_keys_alike(self, gates):
        x = self.inputs(1, 130, 1, 1, 32, 16, DTYPES[0], gates, alike=3.0)
        self.check(prompt(x, use_qk_l2norm=True), factor=2)

    @pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
    def test_betas(self, beta):
        gates = "bounded" if beta else "slow"  # fp16 has no number for what strong ones leave
        x = self.inputs(1, SHORT, 1, 1, 16, 16, DTYPES[0], gates)
        x["beta"].fill_(beta)
        x["initial_state"] = self.state(x)
        self.check(prompt(x, use_qk_l2norm=True))

    @pytest.mark.parametrize("K, dtype", POOLS)
    def test_packed_pool_checkpoints(self, K, dtype):
        x = self.inputs(1, 66 + REST, 1, 2, K, 16, dtype)
        x["initial_state"] = self.state(x, 5, 2, turned=True)
        call = prompt(
            x, cu_seqlens=ends(0, 66, 0, REST, device=self.device),
            state_indices=torch.tensor([2, 4, 0, -1], device=self.device), checkpoint_every=64,
            state_v_first=True, use_qk_l2norm=True,
        )  # fmt: skip
        before = x["initial_state"].clone()
        ref = expected(call, reference.kda_chunk_fwd)
        o, pool, checkpoints = self.run(call)
        assert pool is x["initial_state"]
        assert_close(o, ref[0])
        assert_close(pool, ref[1], dtype)
        assert torch.equal(pool[[0, 1, 2, 3]], before[[0, 1, 2, 3]])  # empty, unnamed or skipped
        assert_close(checkpoints[:1], ref[2][:1], dtype)
        assert not o[:, 66:].any()

    def test_causal_and_alone_to_the_bit(self):
        """Later tokens and other sequences change no bit, gates of -inf among them."""
        x = self.inputs(1, 150, 1, 2, 32, 16, DTYPES[0], "bounded")
        lengths = {"cu_seqlens": ends(100, 50, device=self.device)}
        options = {"use_qk_l2norm": True}
        whole = self.run(prompt(x, **lengths, **options))
        changed = {name: y.clone() for name, y in x.items()}
        for name, y in self.inputs(1, 150, 1, 2, 32, 16, DTYPES[0], "reset", seed=7).items():
            changed[name][:, 37:100] = y[:, 37:100]
        other = self.run(prompt(changed, **lengths, **options))
        assert torch.equal(whole[0][:, :37], other[0][:, :37])
        assert torch.equal(whole[0][:, 100:], other[0][:, 100:])
        assert not torch.equal(whole[0][:, 37:100], other[0][:, 37:100])
        alone = self.run(prompt({name: y[:, 100:] for name, y in x.items()}, **options))
        assert torch.equal(alone[0], whole[0][:, 100:]) and torch.equal(alone[1][0], whole[1][1])

    def test_one_preparation_is_for_all_calls_alike(self):
        first, second = (
            prompt(
                self.inputs(2, SHORT, 1, 1, 16, 16, DTYPES[0], seed=seed),
                use_qk_l2norm=True,
            )
            for seed in (0, 1)
        )
        prepared = submodule(f"kda.{self.room}.chunk").prepare_kda_chunk_fwd(first)
        for call in (first, second):
            (o, state, *_), (ref, ref_state, _) = prepared(*call.tensors), self.run(call)
            assert torch.equal(o, ref) and torch.equal(state, ref_state)

    def test_tokens_that_are_far_from_one_another(self):
        """Their offsets in a chunk have more than 32 bits, also in the gradient."""
        x = self.inputs(1, 34, 1, 1, 16, 16, DTYPES[0], "slow")
        memory = torch.empty(34 * 2**26, dtype=DTYPES[0], device=self.device)  # little is touched
        far = {}
        for i, (name, y) in enumerate(x.items()):
            strides = (0, 2**26, y[0, 0].numel(), 1)[: y.ndim]
            far[name] = memory.as_strided(y.shape, strides, 16 * i).copy_(y)
        x = {name: y.to(DTYPES[0]) for name, y in x.items()}
        calls_of = [prompt(y, use_qk_l2norm=True) for y in (x, far)]
        (o, state, _), (same, again, _) = map(self.run, calls_of)
        assert torch.equal(o, same) and torch.equal(state, again)
        gradients = [gradient_of(call, torch.ones_like(o)) for call in calls_of]
        found = [computed("kda.portable.backward", "kda_chunk_bwd", call) for call in gradients]
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*found))


# Kernels beside the gradient written out, in fp64. The decays' and beta's are not rounded to q's
# dtype, but are of values that are.
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "d_initial_state")
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def gradient_of(call, do, d_final=None, values_only=False):
    """The KdaBackward of a KdaCall."""
    *tensors, _, cu_seqlens, options = call
    options = gdn_calls.GradientOptions(values_only, *options)
    return calls.KdaBackward(*tensors, cu_seqlens, do, d_final, None, None, None, options)


def gradients(call, seed=3, room="portable", values_only=False):
    """The call's gradients by the kernels of a room, and in fp64."""
    by_hand = submodule("kda.reference.backward")
    rng = torch.Generator().manual_seed(seed)
    device, d_final = call.q.device, None
    do = torch.randn(call.v.shape, generator=rng).to(call.v.dtype).to(device)
    if call.options.output_final_state:
        d_final = torch.randn(call.N, *call.state_shape, generator=rng).to(device)
    call = gradient_of(call, do, d_final, values_only)
    found = by(room, "kda_chunk_bwd", call)
    exact = type(call)(*map(wide, call[:-1]), call.options)
    return found, by_hand.kda_chunk_bwd(exact)


def sizes_of(call, wanted) -> dict:
    """What the error of a gradient is relative to: its norm. Those of A_log and dt_bias are sums of
    terms of either sign, each with an error of its own, which may cancel to any small number: the
    root of the sum of the terms' squares, which is the norm of such a sum if signs are random."""
    sizes = {name: x.norm() for name, x in zip(GRADIENTS, wanted) if x is not None}
    terms = wanted[3]
    if call.dt_bias is not None:
        sizes["ddt_bias"] = terms.norm()
    if call.A_log is not None:
        bounded = call.options.lower_bound is not None
        sizes["dA_log"] = terms_of_A_log(terms, call.g, call.dt_bias, bounded).norm()
    return sizes


def check_gradients(call, factor=1.0, **options):
    found, wanted = gradients(call, **options)
    sizes = sizes_of(call, wanted)
    for name, x, a, b in zip(GRADIENTS, call, found, wanted):
        assert (a is None) == (b is None) == (x is None), name
        if a is not None:
            assert a.shape == x.shape and a.dtype == x.dtype and torch.isfinite(a).all(), name
            bound = factor * BOUNDS[coarser(call.q.dtype, x.dtype)]
            if name in ("dA_log", "ddt_bias"):  # docs/notes/kda.md: of few numbers, one is unlucky
                bound *= 2
            error = (a.double() - b).norm()  # a single token's decay changes nothing: fp64 leaves
            assert error < bound * sizes[name] + 1e-12, (name, error / sizes[name], bound)  # 1e-17
    return found


SCALES = [(which, scale) for which in ("q", "k", "scale") for scale in (1e-6, 1e6)]


class Gradients(Problems):
    def check(self, call):
        return check_gradients(call, room=self.room)

    @pytest.mark.parametrize("dtype, v_first", TYPED_STATES, ids=str)
    def test_packed_with_states(self, v_first, dtype):
        x = self.inputs(1, 66 + REST, 1, 2, 16, 24, dtype, "softplus")
        x["cu_seqlens"] = ends(0, 66, 0, REST, device=self.device)
        x["initial_state"] = self.state(x, 4, 2, turned=v_first)
        call = prompt(x, use_qk_l2norm=True, state_v_first=v_first)
        _, _, dv, *_, d_initial = self.check(call)
        # where only v and the initial state need one: the same bits, and no other
        (_, _, own_dv, *_, own), _ = found = gradients(call, room=self.room, values_only=True)
        assert torch.equal(own_dv, dv) and torch.equal(own, d_initial)
        for grads in found:
            assert [x is None for x in grads] == [i not in (2, 7) for i in range(8)]

    @pytest.mark.parametrize("gates", ["wild"] if INTERPRETING else ["softplus", "wild", "zero"])
    @pytest.mark.parametrize("which, scale", SCALES)
    def test_scales(self, which, scale, gates):
        """Without l2norm queries, keys or the scale far from 1, in dtypes of fp32's range."""
        dtype = torch.float32 if INTERPRETING else torch.bfloat16
        x = self.inputs(1, SHORT, 1, 1, 32, 16, dtype, gates)
        x["k"] = F.normalize(x["k"].float(), dim=-1).to(dtype)
        x["initial_state"] = self.state(x)
        if which == "scale":
            self.check(prompt(x, scale=scale))
            self.check(prompt(x, scale=scale, use_qk_l2norm=True))
            return
        x[which] = x[which] * scale
        if which == "k" and scale > 1:  # or the rule diverges
            x["beta"] = (x["beta"] * scale**-2).to(dtype).float()
        self.check(prompt(x))

    @pytest.mark.parametrize("l2norm", [True, False])
    def test_betas(self, l2norm):
        """Of nothing, and next to it, among others."""
        x = self.inputs(1, SHORT, 1, 1, 16, 16, DTYPES[0], "slow")
        x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).to(DTYPES[0])
        x["beta"][:, ::3], x["beta"][:, 1::3] = 0, 1e-14
        self.check(prompt(x, use_qk_l2norm=l2norm))

    def test_dbeta_is_rounded_once(self):
        """From fp32, to the dtype of beta: as if beta were in fp32."""
        x = self.inputs(1, SHORT, 1, 1, 32, 16, DTYPES[0], "bounded")
        x["beta"] = x["beta"].to(DTYPES[0])
        found, _ = gradients(prompt(x, use_qk_l2norm=True), room=self.room)
        x["beta"] = x["beta"].float()
        wide_found, _ = gradients(prompt(x, use_qk_l2norm=True), room=self.room)
        assert found[4].dtype == DTYPES[0] and wide_found[4].dtype == torch.float32
        assert torch.equal(found[4], wide_found[4].to(DTYPES[0]))

    def test_decayed_to_nothing(self):
        """What is next to nothing is not what is left of larger terms."""
        x = self.inputs(1, 70, 1, 1, 16, 16, torch.float32, "zero")
        x["g"] -= 9.0
        found, wanted = gradients(prompt(x, use_qk_l2norm=True), room=self.room)
        assert relative_error(found[3], wanted[3]) < 2e-3 and wanted[3].abs().max() < 1e-3

    def test_repeatable_and_alone(self):
        """The same bits again, and whatever else is in the batch."""
        x = self.inputs(1, 150, 1, 2, 32, 16, DTYPES[0], "bounded")
        do = torch.randn_like(x["v"])

        def run(x, do):
            options = {"use_qk_l2norm": True, "output_final_state": False}
            call = gradient_of(prompt(x, **options), do)
            return by(self.room, "kda_chunk_bwd", call)[:5]

        x["cu_seqlens"] = ends(100, 50, device=self.device)
        whole = run(x, do)
        again = whole if INTERPRETING else run(x, do)  # one program after the other
        part = {name: y[:, 100:] for name, y in x.items() if name != "cu_seqlens"}
        for a, b, c in zip(whole, again, run(part, do[:, 100:])):
            assert torch.equal(a, b) and torch.equal(a[:, 100:], c)


STATE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


class Tokens:
    device = "cpu"

    def check(self, call):
        ref_o, ref_state = expected(call, decoding.kda_recurrent_fwd)
        o, state = computed("kda.portable.recurrent", "kda_recurrent_fwd", call)
        assert_close(o, ref_o)
        if state is not None:
            assert relative_error(state, ref_state) < STATE[state.dtype]
        return o, state

    @pytest.mark.parametrize("v_first", [False, True])
    @pytest.mark.parametrize("T", [1, 3])
    @pytest.mark.parametrize("bound", ["given", None, -5.0])
    def test_right(self, T, v_first, bound):
        x = kda_inputs(2, T, 1, 2, 24, 40, torch.float32, "wild", device=self.device)
        if bound != "given":
            x = raw_gates(x, 2, 24, bound)
        x["initial_state"] = torch.randn(2, 2, 24, 40, device=self.device)
        if v_first:
            x["initial_state"] = x["initial_state"].mT.contiguous()
        options = {"state_v_first": v_first, "output_final_state": True, "use_qk_l2norm": True}
        self.check(token(x, **options, use_beta_sigmoid=bound != "given"))

    @pytest.mark.parametrize("gates", GATES)
    def test_gates(self, gates):
        for B, T in ((2, 1), (1, 4)):
            x = kda_inputs(B, T, 1, 2, 16, 16, torch.float32, gates, device=self.device)
            x["initial_state"] = torch.randn(B, 2, 16, 16, device=self.device)
            self.check(token(x, output_final_state=True, use_qk_l2norm=True))

    @pytest.mark.parametrize("T", [1, 2])
    def test_pool_in_place(self, T):
        x = kda_inputs(3, T, 1, 2, 16, 32, DTYPES[0], device=self.device)
        pool = torch.randn(4, 2, 16, 32, device=self.device)
        out = torch.full((3, T, 2, 32), 9.0, dtype=DTYPES[0], device=self.device)
        rows = torch.tensor([2, 0, 1], device=self.device)
        x.update(initial_state=pool, state_indices=rows, out=out)
        before = pool.clone()
        o, after = self.check(token(x, inplace=True, null_index=0, use_qk_l2norm=True))
        assert after is pool and o is out and not o[1].any()
        assert torch.equal(pool[[0, 3]], before[[0, 3]]) and not torch.equal(pool[1], before[1])

    def test_all_states_and_drafts(self):
        x = kda_inputs(2, 3, 1, 1, 16, 16, torch.float32, "bounded", device=self.device)
        state = torch.randn(2, 1, 16, 16, device=self.device)
        _, states = self.check(token({**x, "initial_state": state}, all_states=True))
        pool = torch.zeros(6, 1, 16, 16, device=self.device)
        rows = torch.tensor([[0, 1, 2], [3, 4, 5]], device=self.device)
        pool[[0, 4]] = state
        accepted = torch.tensor([1, 2], device=self.device)
        x.update(initial_state=pool, state_indices=rows, num_accepted_tokens=accepted)
        self.check(token(x, inplace=True))
        assert torch.equal(pool.view(2, 3, 1, 16, 16), states)


@interpreted
class TestPromptsInterpreted(Prompts):
    pass


@interpreted
class TestTokensInterpreted(Tokens):
    pass


@interpreted
class TestGradientsInterpreted(Gradients):
    pass


# ---- on a GPU


@pytest.mark.gpu
@compiled
class TestPrompts(Prompts):
    device = "cuda"
    shape = (2, 300, 2, 4, 128, 128)

    @pytest.mark.parametrize("K, V", [(128, 64), (60, 60), (192, 256), (256, 256), (36, 8)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_head_dims(self, K, V, dtype):
        x = kda_inputs(1, 200, 1, 2, K, V, dtype, device="cuda")
        check(prompt(x, use_qk_l2norm=True))

    @pytest.mark.parametrize("gates", GATES)
    def test_as_exact_as_the_recurrence(self, gates):
        """Beside it in fp32, with bf16 inputs: the bars of the rule in chunks."""
        kernel = load_package()
        x = kda_inputs(1, 1000, 4, 4, 128, 128, torch.bfloat16, gates, device="cuda")
        o, state = kernel.chunk_kda(**x, output_final_state=True, use_qk_l2norm_in_kernel=True)
        want = {name: y.double() for name, y in x.items()}
        ref, ref_state = kernel.fused_recurrent_kda(
            **want, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert relative_error(o, ref) < 1e-2 and relative_error(state, ref_state) < 1e-2

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    def test_scales(self, scale):
        """Of inputs in bf16, which has their range: A and P are products of fp16, which has not."""
        x = kda_inputs(1, 200, 1, 2, 128, 128, torch.bfloat16, "bounded", device="cuda")
        self.check(prompt(x, use_qk_l2norm=True, scale=scale))

    def test_repeatable(self):
        x = kda_inputs(1, 2000, 8, 8, 128, 128, torch.bfloat16, device="cuda")
        first, again = (self.run(prompt(x, use_qk_l2norm=True)) for _ in "ab")
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.gpu
@compiled
class TestGradients(Gradients):
    device = "cuda"
    shape = (2, 300, 2, 4, 128, 128)

    @pytest.mark.parametrize("K, V", [(128, 64), (60, 60), (100, 256), (64, 128), (36, 8)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_head_dims(self, K, V, dtype):
        x = kda_inputs(1, 200, 1, 2, K, V, dtype, device="cuda")
        check_gradients(prompt(x, use_qk_l2norm=True))

    @pytest.mark.parametrize("gates", GATES)
    def test_autograd(self, gates):
        """Through the public function, beside autograd through the recurrence in fp64."""
        kernel = load_package()
        x = kda_inputs(1, 500, 2, 4, 128, 128, torch.bfloat16, gates, device="cuda")
        options, leaves = {"use_qk_l2norm_in_kernel": True}, list(x.values())
        x["initial_state"] = torch.randn(1, 4, 128, 128, device="cuda")
        leaves = {name: y.requires_grad_() for name, y in x.items()}
        with submodule("runtime.dispatch").served() as record:
            o, state = kernel.chunk_kda(**leaves, **options, output_final_state=True)
            do, dS = torch.randn_like(o), torch.randn_like(state)
            found = torch.autograd.grad((o, state), tuple(leaves.values()), (do, dS))
        chip = submodule("runtime.device")
        room = "hopper" if chip.has_wgmma(x["q"].device) else "portable"
        assert record["kda_chunk_bwd"] == [room]
        doubles = {name: y.detach().double().requires_grad_() for name, y in x.items()}
        ref = kernel.fused_recurrent_kda(**doubles, **options, output_final_state=True)
        wanted = torch.autograd.grad(ref, tuple(doubles.values()), (do.double(), dS.double()))
        for name, a, b in zip(GRADIENTS, found, wanted):
            assert relative_error(a, b) < 1.5e-2, name

    def test_many_rows(self):
        """As repeatable where all multiprocessors work."""
        x = kda_inputs(1, 2000, 8, 8, 128, 128, torch.bfloat16, device="cuda")
        first, again = (gradients(prompt(x, use_qk_l2norm=True))[0] for _ in "ab")
        for a, b in zip(first, again):
            assert a is None or torch.equal(a, b)


@pytest.mark.gpu
@compiled
class TestTokens(Tokens):
    device = "cuda"

    @pytest.mark.parametrize("B", [1, 64])
    @pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("v_first", [False, True])
    def test_a_models_size(self, B, state, v_first):
        x = raw_gates(
            kda_inputs(B, 1, 32, 32, 128, 128, torch.bfloat16, device="cuda"), 32, 128, -5.0
        )
        x["initial_state"] = torch.randn(B, 32, 128, 128, device="cuda").to(state)
        options = {"inplace": True, "state_v_first": v_first, "use_beta_sigmoid": True}
        self.check(token(x, **options, use_qk_l2norm=True))
