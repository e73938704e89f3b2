"""The choice of implementation, with kernel modules made up for the purpose."""

import types

import pytest
import torch
from conftest import submodule
from interpreter import compiled


class Module(types.SimpleNamespace):
    """A kernel module that computes every call or none, and names itself."""

    def __init__(self, name, computes=True, backward=False):
        super().__init__()
        self.prepare_swiglu_fwd = lambda call: (lambda: name) if computes else None
        if backward:
            self.prepare_swiglu_bwd = self.prepare_swiglu_fwd


@pytest.fixture
def dispatch(monkeypatch):
    """The dispatch on a machine with one CUDA GPU, and a table of modules to fill."""
    dispatch = submodule("runtime.dispatch")
    modules = {}
    state = {"capability": (9, 0)}
    monkeypatch.setattr(dispatch, "_module", lambda folder, family: modules.get(folder))
    monkeypatch.setattr(dispatch.device, "capability", lambda index: state["capability"])
    dispatch._folders.cache_clear()
    yield types.SimpleNamespace(module=dispatch, modules=modules, state=state)
    dispatch._folders.cache_clear()


class OnGpu:
    """Stub of a call on a GPU, with the attributes that prepare reads."""

    device = torch.device("cuda", 0)


def chosen(dispatch, needs_grad=False):
    dispatch.module._folders.cache_clear()
    family = "swiglu.forward"
    gradient = (family, "swiglu_bwd") if needs_grad else None
    launch = dispatch.module.prepare(family, "swiglu_fwd", OnGpu(), gradient)
    return "reference" if launch is None else launch()


def test_first_that_computes_the_call(dispatch):
    assert chosen(dispatch) == "reference"
    dispatch.modules["portable"] = Module("portable")
    assert chosen(dispatch) == "portable"
    dispatch.modules["hopper"] = Module("hopper")
    assert chosen(dispatch) == "hopper"
    dispatch.modules["hopper"] = Module("hopper", computes=False)
    assert chosen(dispatch) == "portable"


@pytest.mark.parametrize(
    "capability, expected",
    [
        ((7, 5), "reference"),
        ((8, 0), "portable"),
        ((8, 9), "portable"),
        ((9, 0), "hopper"),
        ((10, 0), "tma"),
        ((12, 0), "tma"),
        (None, "portable"),  # AMD
    ],
)
def test_capability(dispatch, capability, expected):
    dispatch.modules.update({name: Module(name) for name in ("hopper", "tma", "portable")})
    dispatch.state["capability"] = capability
    assert chosen(dispatch) == expected


@compiled
@pytest.mark.parametrize(
    "chip, swiglu, rule",
    [
        ("sm_80", "portable", "portable"),
        ("sm_90", "hopper", "hopper"),
        ("sm_100", "tma", "portable"),
        ("sm_120", "tma", "portable"),
    ],
)
def test_names_of_what_serves(kernel, chip, swiglu, rule):
    """Hopper's kernels for SwiGLU serve later chips under a name of their own; others do not."""
    pytest.importorskip("triton.experimental.gluon")
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    dispatch = submodule("runtime.dispatch")
    x, w = (torch.empty(n, 1024, dtype=torch.bfloat16) for n in (512, 3072))
    q, g = torch.empty(1, 64, 2, 128, dtype=torch.bfloat16), torch.empty(1, 64, 2)
    with recording.recorded(device.Chip(*pytest.importorskip("launched").CHIPS[chip])):
        assert kernel.implementation_of(kernel.fused_swiglu, x, w, w.clone()) == swiglu
        given = (kernel.chunk_gated_delta_rule, q, q, q, g, g)
        assert kernel.implementation_of(*given, use_qk_l2norm_in_kernel=True) == rule
        only_hopper = dispatch.has_kernels("gdn.pieces", "gdn_pieces_fwd", "cpu", None)
        assert only_hopper is (chip == "sm_90")


def test_old_gpu_says_so(dispatch, caplog):
    dispatch.state["capability"] = (7, 0)
    assert chosen(dispatch) == "reference"
    assert "7.0 is below 8.0" in caplog.text


def test_gradient_needs_a_backward(dispatch):
    dispatch.modules["portable"] = Module("portable")
    assert chosen(dispatch, needs_grad=True) == "reference"
    dispatch.modules["portable"] = Module("portable", backward=True)
    assert chosen(dispatch, needs_grad=True) == "portable"
    dispatch.modules["hopper"] = Module("hopper")  # the gradient may come from another folder
    assert chosen(dispatch, needs_grad=True) == "hopper"


def test_force_and_record(dispatch):
    dispatch.modules.update(hopper=Module("hopper"), portable=Module("portable"))
    with dispatch.module.served() as record:
        for name in ("portable", "reference", "hopper"):
            with dispatch.module.force(name):
                assert chosen(dispatch) == name
        assert chosen(dispatch) == "hopper"
    assert record == {"swiglu_fwd": ["portable", "reference", "hopper", "hopper"]}
    assert not dispatch.module.records


def test_module_that_does_not_load_is_passed_over(caplog):
    dispatch = submodule("runtime.dispatch")
    assert dispatch._module("portable", "swiglu.no_such_family") is None
    assert not caplog.text


def test_cpu_is_served_by_the_reference(kernel):
    x, w = torch.ones(2, 4), torch.ones(3, 4)
    assert kernel.implementation_of(kernel.fused_swiglu, x, w, w) == "reference"
    with pytest.raises(TypeError, match="function must be a function of this package.*got int"):
        kernel.implementation_of(3)
