"""Calls as objects: what follows from them, the operators' schemas, and who decides how often."""

import pytest
import torch
from conftest import gdn_inputs, submodule

calls = submodule("gdn.call")
layer_calls = submodule("gdn_layer.call")


def empty_call(B=2, T=130, H=2, HV=4, K=16, V=24, N=None, **options):
    """A GdnCall of meta tensors; of N packed sequences."""
    q = torch.empty(B, T, H, K, device="meta")
    v, g = torch.empty(B, T, HV, V, device="meta"), torch.empty(B, T, HV, device="meta")
    cu = None if N is None else torch.empty(N + 1, dtype=torch.int32, device="meta")
    options = calls.GdnOptions(0.25, **options)
    return calls.GdnCall(q, q, v, g, g, None, None, None, None, cu, options)


def test_sizes_of_a_call():
    call = empty_call()
    assert (call.B, call.T, call.H, call.HV, call.K, call.V) == (2, 130, 2, 4, 16, 24)
    assert (call.N, call.rows) == (2, 6)  # three chunks a sequence
    assert call.state_shape == (4, 16, 24)
    assert empty_call(state_v_first=True).state_shape == (4, 24, 16)
    packed = empty_call(B=1, N=5)
    assert (packed.N, packed.rows) == (5, 2 + 5)
    assert len(call.tensors) == 10 and call.tensors[0] is call.q
    assert call.device == torch.device("meta")


def test_options():
    options = calls.GdnOptions(0.25)
    assert hash(options) == hash(calls.GdnOptions(0.25)) and not any(options[1:])
    assert options.beta_max == 0.0
    assert options._replace(allow_neg_eigval=True).beta_max == 0.0
    assert options._replace(use_beta_sigmoid=True).beta_max == 1.0
    assert options._replace(use_beta_sigmoid=True, allow_neg_eigval=True).beta_max == 2.0


@pytest.mark.parametrize(
    "module, operator, options",
    [
        ("gdn.ops_train", "CHUNK_IN_POOL", calls.GdnOptions),
        ("gdn.ops_train", "CHUNK", calls.GdnOptions),
        ("gdn.ops_train", "GRADIENT", calls.GdnOptions),
        ("gdn.ops", "RECURRENT", calls.RecurrentOptions),
        ("gdn.ops_replay", "REPLAY", calls.ReplayOptions),
        ("gdn_layer.ops_fused", "DECODE", layer_calls.DecodeOptions),
    ],
)
def test_operators_end_with_the_options(module, operator, options):
    """In their order: `*options` of a call are the last arguments."""
    found = getattr(submodule(module), operator)
    schema = found.op._opoverload._schema
    names = tuple(argument.name for argument in schema.arguments)
    assert names[-len(options._fields) :] == options._fields
    assert "options" not in names


@pytest.mark.parametrize("kind", [calls.GdnCall, calls.RecurrentCall, calls.ReplayCall])
def test_call_of_the_arguments_of_an_operator(kind):
    options = kind.__annotations__["options"](0.25, True)
    q = torch.empty(1, 2, 3, 4, device="meta")
    call = kind(q, *[None] * (len(kind._fields) - 2), options)
    found = kind.of((*call.tensors, *call.options))
    assert type(found) is kind and type(found.options) is type(options)
    assert found.q is q and found == call and found.K == 4


@pytest.fixture
def on_an_h200():
    """All tensors are taken to be on an H200; nothing is launched."""
    pytest.importorskip("triton")
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    with recording.recorded(device.Chip("NVIDIA_H200", (9, 0), 132)) as records:
        yield records


@pytest.mark.parametrize("recompute", [True, False])
def test_one_decision_for_a_forward_and_one_for_its_gradient(kernel, on_an_h200, recompute):
    x = gdn_inputs(1, 130, 1, 2, 128, 128, torch.bfloat16)
    x = {name: t.requires_grad_() for name, t in x.items()}
    dispatch = submodule("runtime.dispatch")
    with dispatch.served() as record:
        o, state = kernel.chunk_gated_delta_rule(
            **x, output_final_state=True, use_qk_l2norm_in_kernel=True, recompute=recompute
        )
        assert record == {"gdn_chunk_fwd": ["hopper"]}
        (o.float().sum() + state.sum()).backward()
    assert record == {"gdn_chunk_fwd": ["hopper"], "gdn_chunk_bwd": ["hopper"]}
    prepared = [r.name for r in on_an_h200 if "prepare" in r.name]
    assert len(prepared) == (2 if recompute else 1), prepared


def test_kernels_have_no_gradient_through_a_pool(kernel, on_an_h200):
    """Nor of checkpoints: the reference serves, which nobody records but the one who chooses."""
    x = gdn_inputs(1, 130, 1, 2, 16, 16, torch.float32)
    x = {name: t.requires_grad_() for name, t in x.items()}
    o, _, checkpoints = kernel.chunk_gated_delta_rule(**x, checkpoint_every=64)
    (o.sum() + checkpoints.sum()).backward()
    assert all(t.grad is not None for t in x.values()) and not on_an_h200
