"""Functions compiled without a graph break."""

import re
import sys

import pytest
import torch
from conftest import NAME, PACKAGE, gdn_inputs, relative_error


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
        z, total = kernel.rms_norm(z, v[0, 0, 0], residual=o)
        z = kernel.silu_mul(kernel.rms_norm(z, casting_mode="gemma", offset=1.0), total)
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
