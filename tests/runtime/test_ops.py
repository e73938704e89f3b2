"""The registered operators: opcheck, and functions compiled without a graph break."""

import re
import sys

import pytest
import torch
from conftest import NAME, PACKAGE, gdn_inputs, relative_error, submodule

swiglu, gdn, layer = (submodule(f"{room}.ops") for room in ("swiglu", "gdn", "gdn_layer"))
calls, train = submodule("gdn.call"), submodule("gdn.ops_train")
# gradients are the reference's own (or a kernel's, tested with that kernel), not the operator's
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def rule_args(device, pool=False, packed=False):
    x = gdn_inputs(1 if packed else 2, 70, 2, 4, 16, 16, device=device)
    q, k, v, g, beta, state = x.values()
    state = torch.cat([state] * 2)[:2] if packed else state
    indices = torch.tensor([1, 0], device=device) if pool else None
    cu = torch.tensor([0, 30, 70], device=device) if packed else None
    return (q, k, v, g, beta, None, None), state, indices, cu


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_rule(device, pool, packed):
    first, state, indices, cu = rule_args(device, pool, packed)
    options = {"scale": 0.25, "use_qk_l2norm": True, "output_final_state": True}
    chunk = calls.GdnOptions(**options)
    operation = train.CHUNK_IN_POOL if pool else train.CHUNK
    args = (*first, state, indices, cu, *chunk)
    torch.library.opcheck(operation.op, args, test_utils=CHECKS)
    recurrent = calls.RecurrentOptions(**options, inplace=pool)
    out = torch.empty_like(first[2]) if pool else None
    operation = gdn.RECURRENT_IN_PLACE if pool else gdn.RECURRENT
    torch.library.opcheck(
        operation.op, (*first, state, indices, None, None, cu, out, *recurrent), test_utils=CHECKS
    )


def test_opcheck_checkpoints_and_all_states(device):
    first, state, _, _ = rule_args(device)
    options = {
        "scale": 0.25, "use_qk_l2norm": True, "state_v_first": True, "output_final_state": True,
    }  # fmt: skip
    state = state.mT.contiguous()
    chunk = calls.GdnOptions(**options, state_dtype=torch.bfloat16, checkpoint_every=64)
    args = (*first, state, None, None, *chunk)
    torch.library.opcheck(train.CHUNK.op, args, test_utils=CHECKS)
    recurrent = calls.RecurrentOptions(**options, all_states=True)
    torch.library.opcheck(
        gdn.RECURRENT.op, (*first, state, *[None] * 5, *recurrent), test_utils=CHECKS
    )


def test_opcheck_swiglu_and_layer(device):
    def normal(*shape):
        return torch.randn(*shape, device=device)

    x, weight, rows = normal(2, 6, 9), normal(6, 4), torch.tensor([3, 0], device=device)
    one = rows - rows + 1
    updates = (
        (x, normal(2, 6, 4), weight, *[None] * 5, "silu", -1),
        (x, normal(4, 6, 12), weight, None, rows, one, None, normal(2, 6, 9), "silu", 0),
    )
    cases = [(layer.CONVOLUTION_UPDATE, args) for args in updates]
    cases += [(layer.GATED_NORM, (normal(5, 16), normal(5, 16), normal(16), 1e-6, "silu"))]
    gated = (normal(5, 16), normal(24, 16), normal(24, 16), None, normal(24), "silu")
    cases += [(swiglu.SWIGLU, gated)]
    cases += [(layer.CONVOLUTION, (x, weight, *[None] * 4, "silu", True))]
    for operation, args in cases:
        torch.library.opcheck(operation.op, args, test_utils=CHECKS)


def test_no_membership_in_a_map():
    """torch.compile of torch 2.9 cannot trace `x in map(...)`; in a tuple of it, it can."""
    inside = re.compile(r"\bif\b.*\bin map\(.*:$", re.M)
    traced = [
        path for path in PACKAGE.rglob("*.py") if path.parent.name not in ("portable", "hopper")
    ]
    found = {str(path): inside.findall(path.read_text()) for path in traced}
    assert len(found) > 100 and not any(found.values()), found


@pytest.fixture
def traced_without_properties(monkeypatch):
    """Fails where what torch compiles asks for a property of a call: torch.compile of torch 2.9
    knows none of a NamedTuple's."""
    homes = [m for name, m in sys.modules.items() if name.endswith(".call") and NAME in name]
    kinds = {x for home in homes for x in vars(home).values() if hasattr(x, "tensors")}
    assert len(kinds) > 10
    for kind in kinds:
        for name in ("device", "tensors"):
            monkeypatch.setattr(kind, name, property(eagerly(getattr(kind, name).fget)))


def eagerly(get):
    def found(call):
        assert not torch.compiler.is_compiling(), f"{get.__name__} by a property"
        return get(call)

    return found


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_functions_have_one_graph(kernel, device, grad, traced_without_properties):
    x = gdn_inputs(1, 70, 1, 2, 16, 16, device=device)
    if grad:
        for y in x.values():
            y.requires_grad_()

    def step(q, k, v, g, beta, initial_state):
        o, state = kernel.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=True
        )
        y, state = kernel.fused_recurrent_gated_delta_rule(
            q[:, :1], k[:, :1], v[:, :1], g[:, :1], beta[:, :1],
            initial_state=state, output_final_state=True,
        )  # fmt: skip
        if not grad:
            out, pool = torch.zeros_like(y), torch.stack([state[0]] * 3)
            kernel.fused_recurrent_gated_delta_rule(
                q[:, :1], k[:, :1], v[:, :1], g[:, :1], beta[:, :1], initial_state=pool, out=out,
                state_indices=torch.tensor([2, 0], device=device)[: len(q)], null_index=0,
                inplace_final_state=True,
            )  # fmt: skip
            y = y + out * pool[2, 0, 0, 0]
        z = kernel.fused_swiglu(o, v[0, :16, 0], v[0, 16:32, 0])
        return kernel.rms_norm_gated(z, o, v[0, 0, 0]), y, state

    eager = step(**x)
    # the reference asks for rows of a pool, which torch 2.9 traces only if it is told to
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(**x)
    for a, b in zip(compiled, eager):
        assert relative_error(a, b) < 1e-5
    if grad:
        for a, b in zip(*(torch.autograd.grad(y[0].sum(), x["k"]) for y in (compiled, eager))):
            assert relative_error(a, b) < 1e-5
