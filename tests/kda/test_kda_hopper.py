"""The prepare kernel of Kimi Delta Attention on Hopper: which calls it takes and, on a GPU, what it
makes of them beside the reference in fp64."""

import pytest
import torch
from conftest import assert_close, computed, load_package, relative_error, submodule
from interpreter import compiled
from kda_problems import GATES, kda_inputs
from test_kda_kernels import (
    check_gradients,
    coarser,
    ends,
    expected,
    gradient_of,
    prompt,
    raw_gates,
)

pytest.importorskip("triton")
hopper = pytest.importorskip("triton.experimental.gluon") and submodule("kda.hopper.chunk")
device = submodule("runtime.device")
reference = submodule("kda.reference.chunk")
BF16, FP16 = torch.bfloat16, torch.float16


def served(monkeypatch, x, **options):
    """Whether the prompt is; its gradient is where it is."""
    monkeypatch.setattr(device, "has_wgmma", lambda where: True)
    call = prompt(x, **{"use_qk_l2norm": True, **options})
    found = hopper.prepare_kda_chunk_fwd(call) is not None
    gradient = gradient_of(call, torch.zeros_like(call.v))
    assert (hopper.prepare_kda_chunk_bwd(gradient) is not None) == found
    return found


def test_takes_views(monkeypatch):
    x = kda_inputs(2, 64, 2, 4, 128, 128, BF16)
    assert served(monkeypatch, x)
    x["q"] = torch.zeros(2, 64, 2, 256, dtype=BF16)[..., 128:]
    x["k"] = torch.zeros(2, 2, 64, 128, dtype=BF16).transpose(1, 2)
    assert served(monkeypatch, x)


@pytest.mark.parametrize("what", ["fp32", "head dim", "no token", "l2norm", "odd stride"])
def test_leaves_the_rest(monkeypatch, what):
    T = 0 if what == "no token" else 64
    dtype, K = torch.float32 if what == "fp32" else BF16, 64 if what == "head dim" else 128
    x = kda_inputs(1, T, 2, 4, K, 128, dtype)
    if what == "odd stride":
        x["k"] = torch.zeros(1, 64, 2, 132, dtype=BF16)[..., :128]
    assert not served(monkeypatch, x, use_qk_l2norm=what != "l2norm")


def test_softplus_of_raw_gates():
    """The polynomial for log(1 + x) in fp32, as the kernel has it, is exact to a few roundings."""
    powers = submodule("kda.hopper.gates").LOG1P.value
    x = torch.cat([torch.linspace(0.001, 1, 4001), 10.0 ** -torch.linspace(3, 35, 999)])
    y = torch.full_like(x, powers[-1])
    for coefficient in powers[-2::-1]:
        y = y * x + coefficient
    wanted = torch.log1p(x.double())
    assert ((y * x - wanted).abs() < 3e-7 * wanted).all()


def run(call):
    stale = torch.full((2**24,), float("nan"), device="cuda")
    del stale  # the caching allocator hands this memory to what the call allocates
    return hopper.prepare_kda_chunk_fwd(call)(*call.tensors)


def check(x, factor=1.0, **options):
    call = prompt(x, **{"use_qk_l2norm": True, **options})
    wanted, found = expected(call, reference.kda_chunk_fwd), run(call)
    assert_close(found[0], wanted[0], factor=factor)
    assert_close(found[1], wanted[1], coarser(found[0].dtype, found[1].dtype), factor)
    return found, wanted


def inputs(T, H=2, HV=4, dtype=BF16, gates="bounded", V=128, **more):
    return kda_inputs(1, T, H, HV, 128, V, dtype, gates, device="cuda", **more)


class Problems:
    """What `check` of a class is called with."""

    @pytest.mark.parametrize("gates", GATES)
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_gates(self, gates, dtype):
        x = kda_inputs(2, 300, 2, 4, 128, 128, dtype, gates, device="cuda")
        x["initial_state"] = torch.randn(2, 4, 128, 128, device="cuda")
        self.check(x)

    @pytest.mark.parametrize("H, HV, V", [(3, 3, 128), (1, 6, 128), (2, 2, 64), (1, 1, 256)])
    def test_heads(self, H, HV, V):
        self.check(inputs(200, H, HV, V=V))


@pytest.mark.gpu
@compiled
class TestPrompts(Problems):
    check = staticmethod(check)

    @pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 130])
    def test_lengths(self, T):
        check(inputs(T))

    @pytest.mark.parametrize("bound", [None, -5.0])
    def test_raw_gates(self, bound):
        x = raw_gates(inputs(200), 4, 128, bound)
        check(x, use_beta_sigmoid=True, allow_neg_eigval=True)
        x["beta"] = torch.randn_like(x["beta"]).to(BF16)
        del x["dt_bias"]
        check(x, use_beta_sigmoid=True)
        if bound is not None:
            del x["A_log"]
            check(x)

    @pytest.mark.parametrize("gates", ["slow", "softplus", "zero"])
    def test_keys_alike(self, gates):
        check(inputs(300, gates=gates, alike=3.0), factor=2)

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    def test_scales(self, scale):
        check(inputs(200), scale=scale)

    def test_packed_pool_checkpoints(self):
        x = inputs(280)
        x["initial_state"] = torch.randn(6, 4, 128, 128, device="cuda")
        lengths = ends(0, 66, 1, 132, 81, device="cuda")
        rows = torch.tensor([2, 4, 0, 5, -1], device="cuda")
        options = {"checkpoint_every": 64, "state_v_first": True}
        found, wanted = check(x, cu_seqlens=lengths, state_indices=rows, **options)
        assert found[1] is x["initial_state"] and not found[0][:, 199:].any()
        assert_close(found[2][:3], wanted[2][:3], BF16)  # the last sequence is skipped

    @pytest.mark.parametrize("v_first", [False, True])
    @pytest.mark.parametrize("state", [torch.float32, BF16])
    def test_states_and_checkpoints(self, state, v_first):
        x = inputs(450)
        x["initial_state"] = torch.randn(1, 4, 128, 128, device="cuda").to(state)
        options = {"state_v_first": v_first, "state_dtype": state, "checkpoint_every": 128}
        found, wanted = check(x, **options)
        assert found[1].dtype == state
        assert_close(found[2], wanted[2], BF16)

    @pytest.mark.parametrize("V, kernel", [(128, "gdn_scan_fwd_kernel"), (64, "_scan_kernel")])
    def test_launches(self, V, kernel):
        names, call = [], prompt(inputs(200, V=V), use_qk_l2norm=True)
        launches = submodule("runtime.launch")
        with launches.watched(lambda launch, tensors: names.append(launch.kernel.__name__)):
            run(call)
        assert names == ["kda_prepare_fwd_kernel", kernel]

    def test_values_at_any_address(self):
        x = inputs(200)
        x["v"] = torch.cat([x["v"].new_zeros(1), x["v"].flatten()])[1:].view_as(x["v"])
        check(x)
        x["v"] = torch.randn(1, 200, 4, 132, device="cuda").to(BF16)[..., :128]
        check(x)

    def test_views(self):
        x = inputs(200)
        wider = torch.randn(1, 200, 2, 256, device="cuda").to(BF16)
        x["q"], x["k"] = wider[..., :128], wider[..., 128:]
        x["g"] = torch.cat([x["g"], x["g"]], 2)[:, :, :4]
        check(x)

    def test_causal_and_alone_to_the_bit(self):
        """Later tokens, other sequences and other heads change no bit."""
        x, options = inputs(350), {"use_qk_l2norm": True}
        lengths = {"cu_seqlens": ends(200, 150, device="cuda")}
        whole = run(prompt(x, **lengths, **options))
        changed = {name: y.clone() for name, y in x.items()}
        for name, y in inputs(350, gates="reset", seed=7).items():
            changed[name][:, 37:200] = y[:, 37:200]
        other = run(prompt(changed, **lengths, **options))
        assert torch.equal(whole[0][:, :37], other[0][:, :37])
        assert torch.equal(whole[0][:, 200:], other[0][:, 200:])
        assert not torch.equal(whole[0][:, 37:200], other[0][:, 37:200])
        alone = run(prompt({name: y[:, 200:].clone() for name, y in x.items()}, **options))
        assert torch.equal(alone[0], whole[0][:, 200:]) and torch.equal(alone[1][0], whole[1][1])
        half = {n: y[:, :, : y.shape[2] // 2].contiguous() for n, y in x.items()}
        assert torch.equal(run(prompt(half, **lengths, **options))[0], whole[0][:, :, :2])

    def test_repeatable(self):
        x = inputs(3000, 8, 8)
        first, again = (run(prompt(x, use_qk_l2norm=True)) for _ in "ab")
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])

    def test_served(self):
        """By the public function, as exact as the portable kernels."""
        x, dispatch = inputs(1000, 4, 4), submodule("runtime.dispatch")
        call = prompt(x, use_qk_l2norm=True)
        wanted = expected(call, reference.kda_chunk_fwd)
        with dispatch.served() as record:
            o, _ = load_package().chunk_kda(**x, use_qk_l2norm_in_kernel=True)
        assert record["kda_chunk_fwd"] == ["hopper"]
        portable = computed("kda.portable.chunk", "kda_chunk_fwd", call)[0]
        assert relative_error(o, wanted[0]) < 1.05 * relative_error(portable, wanted[0])


def check_backward(x, factor=1.0, **options):
    call = prompt(x, **{"use_qk_l2norm": True, **options})
    return check_gradients(call, factor, module="kda.hopper.chunk")


@pytest.mark.gpu
@compiled
class TestGradients(Problems):
    check = staticmethod(check_backward)

    @pytest.mark.parametrize("T", [1, 15, 17, 63, 64, 65, 130])
    def test_lengths(self, T):
        check_backward(inputs(T, gates="slow"))

    @pytest.mark.parametrize("bound", [None, -5.0])
    def test_raw_gates(self, bound):
        x = raw_gates(inputs(200), 4, 128, bound)
        check_backward(x, use_beta_sigmoid=True, allow_neg_eigval=True)
        x["beta"] = torch.randn_like(x["beta"]).to(BF16)
        del x["dt_bias"]
        check_backward(x, use_beta_sigmoid=True)

    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_betas(self, dtype):
        """Of nothing and next to it, for which A is kept."""
        x = inputs(150, dtype=dtype, gates="slow")
        x["beta"][:, ::3], x["beta"][:, 1::3] = 0, 1e-14
        check_backward(x)

    @pytest.mark.parametrize("v_first", [False, True])
    @pytest.mark.parametrize("state", [torch.float32, BF16])
    def test_packed_from_states(self, state, v_first):
        x = inputs(280, gates="slow")
        x["initial_state"] = torch.randn(5, 4, 128, 128, device="cuda").to(state)
        check_backward(x, cu_seqlens=ends(0, 66, 1, 132, 81, device="cuda"), state_v_first=v_first)

    @pytest.mark.parametrize("V, name", [(128, "kda_states_kernel"), (64, "_states_bwd_kernel")])
    def test_launches(self, V, name):
        names, call = [], prompt(inputs(200, V=V), use_qk_l2norm=True)
        call = gradient_of(call, torch.zeros_like(call.v))
        launches = submodule("runtime.launch")
        with launches.watched(lambda launch, tensors: names.append(launch.kernel.__name__)):
            hopper.prepare_kda_chunk_bwd(call)(*call.tensors)
        assert name in names

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    def test_scales(self, scale):
        check_backward(inputs(200), scale=scale)

    def test_views_at_any_address(self):
        x = inputs(200)
        wider = torch.randn(1, 200, 2, 256, device="cuda").to(BF16)
        x["q"], x["k"] = wider[..., :128], wider[..., 128:]
        check_backward(x)
        x["g"] = torch.cat([x["g"].new_zeros(1), x["g"].flatten()])[1:].view_as(x["g"])
        check_backward(x)

    def test_repeatable_and_alone(self):
        """The same bits again, and whatever else is in the batch."""
        x, do = inputs(350), torch.randn(1, 350, 4, 128, device="cuda").to(BF16)

        def run(x, do):
            call = gradient_of(prompt(x, use_qk_l2norm=True, output_final_state=False), do)
            return computed("kda.hopper.chunk", "kda_chunk_bwd", call)[:5]

        part = {name: y[:, 200:] for name, y in x.items()}
        x["cu_seqlens"] = ends(200, 150, device="cuda")
        whole, again = run(x, do), run(x, do)
        for a, b, c in zip(whole, again, run(part, do[:, 200:])):
            assert torch.equal(a, b) and torch.equal(a[:, 200:], c)
