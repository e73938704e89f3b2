"""The prepare kernel of Kimi Delta Attention on Hopper: which calls it takes and, on a GPU, what it
makes of them beside the reference in fp64."""

import pytest
import test_kda_kernels as kernels
import torch
from conftest import computed, load_package, relative_error, submodule
from interpreter import compiled
from kda_problems import kda_inputs
from test_kda_kernels import check_gradients, ends, expected, gradient_of, prompt, run

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


@pytest.mark.parametrize("version, ours", [((3, 5), False), ((3, 6), True)])
def test_channels_gradient_by_triton(monkeypatch, version, ours):
    backward = submodule("kda.hopper.backward")
    monkeypatch.setattr(backward, "TRITON_VERSION", version)
    call = prompt(kda_inputs(1, 64, 2, 4, 128, 128, BF16), use_qk_l2norm=True)
    call = gradient_of(call, torch.zeros_like(call.v))
    assert (backward._channels_kind(call, call.do) is backward.channels_gradient) == ours


def test_softplus_of_raw_gates():
    """The polynomial for log(1 + x) in fp32, as the kernel has it, is exact to a few roundings."""
    powers = submodule("kda.hopper.gates").LOG1P.value
    x = torch.cat([torch.linspace(0.001, 1, 4001), 10.0 ** -torch.linspace(3, 35, 999)])
    y = torch.full_like(x, powers[-1])
    for coefficient in powers[-2::-1]:
        y = y * x + coefficient
    wanted = torch.log1p(x.double())
    assert ((y * x - wanted).abs() < 3e-7 * wanted).all()


def check(x, factor=1.0, **options):
    return kernels.check(prompt(x, **{"use_qk_l2norm": True, **options}), factor, "hopper")


def inputs(T, H=2, HV=4, dtype=BF16, gates="bounded", V=128, **more):
    return kda_inputs(1, T, H, HV, 128, V, dtype, gates, device="cuda", **more)


class OnHopper:
    """Of the tests of test_kda_kernels.py those whose calls these kernels take."""

    device, room, shape = "cuda", "hopper", (2, 300, 2, 4, 128, 128)

    @pytest.mark.parametrize("H, HV, V", [(1, 6, 128), (2, 2, 64), (1, 1, 256)])
    def test_heads_of_values(self, H, HV, V):
        x = kda_inputs(1, 200, H, HV, 128, V, BF16, "bounded", device="cuda")
        self.check(prompt(x, use_qk_l2norm=True))


@pytest.mark.gpu
@compiled
class TestPrompts(OnHopper, kernels.Prompts):
    test_tokens_that_are_far_from_one_another = None  # by copies

    @pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 130])
    def test_lengths(self, T):
        check(inputs(T))

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    def test_scales(self, scale):
        check(inputs(200), scale=scale)

    @pytest.mark.parametrize("v_first", [False, True])
    @pytest.mark.parametrize("state", [torch.float32, BF16])
    def test_states_and_checkpoints(self, state, v_first):
        x = inputs(450)
        x["initial_state"] = torch.randn(1, 4, 128, 128, device="cuda").to(state)
        options = {"state_v_first": v_first, "state_dtype": state, "checkpoint_every": 128}
        assert check(x, **options)[1].dtype == state

    @pytest.mark.parametrize("V, kernel", [(128, "gdn_scan_fwd_kernel"), (64, "_scan_kernel")])
    def test_launches(self, V, kernel):
        names, call = [], prompt(inputs(200, V=V), use_qk_l2norm=True)
        launches = submodule("runtime.launch")
        with launches.watched(lambda launch, tensors: names.append(launch.kernel.__name__)):
            run(call, "hopper")
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

    def test_repeatable(self):
        x = inputs(3000, 8, 8)
        first, again = (self.run(prompt(x, use_qk_l2norm=True)) for _ in "ab")
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
    return check_gradients(call, factor, room="hopper")


@pytest.mark.gpu
@compiled
class TestGradients(OnHopper, kernels.Gradients):
    @pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 130])
    def test_lengths(self, T):
        check_backward(inputs(T, gates="slow"))

    @pytest.mark.parametrize("v_first", [False, True])
    @pytest.mark.parametrize("state", [torch.float32, BF16])
    def test_packed_from_states(self, state, v_first):
        x = inputs(280, gates="slow")
        x["initial_state"] = torch.randn(5, 4, 128, 128, device="cuda").to(state)
        check_backward(x, cu_seqlens=ends(0, 66, 1, 132, 81, device="cuda"), state_v_first=v_first)

    @pytest.mark.parametrize(
        "V, some",
        [
            (128, {"kda_states_kernel", "kda_channels_bwd_kernel"}),
            (64, {"_states_bwd_kernel", "_channels_bwd_kernel"}),
        ],
    )
    def test_launches(self, V, some):
        names, call = [], prompt(inputs(200, V=V), use_qk_l2norm=True)
        call = gradient_of(call, torch.zeros_like(call.v))
        launches = submodule("runtime.launch")
        with launches.watched(lambda launch, tensors: names.append(launch.kernel.__name__)):
            hopper.prepare_kda_chunk_bwd(call)(*call.tensors)
        assert some <= set(names)

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    def test_scales_of_gradients(self, scale):
        check_backward(inputs(200), scale=scale)

    def test_views_at_any_address(self):
        x = inputs(200)
        wider = torch.randn(1, 200, 2, 256, device="cuda").to(BF16)
        x["q"], x["k"] = wider[..., :128], wider[..., 128:]
        check_backward(x)
        x["g"] = torch.cat([x["g"].new_zeros(1), x["g"].flatten()])[1:].view_as(x["g"])
        check_backward(x)
