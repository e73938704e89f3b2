"""Calls like one that has passed: when they are taken to be, and that they are served as right."""

import pytest
import torch
from conftest import assert_close, gdn_inputs, submodule

NAMES = ("q", "k", "v", "g", "beta")


@pytest.fixture
def shortcuts(kernel):
    return submodule("runtime.shortcuts").Shortcuts()


def test_what_makes_calls_alike(shortcuts):
    x, p = torch.randn(2, 4, 8), torch.nn.Parameter(torch.randn(4))
    with torch.no_grad():
        shortcuts.keep((x, p, None), (1,), "the plan")
        assert shortcuts.find((x.clone(), p, None), (1,)) == "the plan"
        others = [
            (x[:1], p, None), (x.transpose(1, 2).contiguous().transpose(1, 2), p, None),
            (x.double(), p, None), (x.clone().requires_grad_(), p, None), (x, p.detach(), None),
            (x, p, x), (x, None, None), (x.to("meta"), p, None), ([1.0], p, None), (x, 1.0, None),
        ]  # fmt: skip
        assert [shortcuts.find(other, (1,)) for other in others] == [None] * len(others)
        assert shortcuts.find((x, p, None), (2,)) is shortcuts.find((x, p, None), ([],)) is None
    assert shortcuts.find((x, p, None), (1,)) is None  # p asks for a gradient


def test_equal_options_of_other_types_are_other_calls(shortcuts):
    x = torch.randn(2)
    shortcuts.keep((x,), (1, False), "the plan")
    assert shortcuts.find((x,), (1, False)) == "the plan"
    others = [(True, False), (1.0, False), (1, 0), (1, 0.0)]
    assert [shortcuts.find((x,), options) for options in others] == [None] * 4


def test_where_there_is_no_shortcut(shortcuts):
    x = torch.randn(2)
    shortcuts.keep((x,), (), "the plan")
    found = []
    with submodule("runtime.dispatch").served():
        found.append(shortcuts.find((x,), ()))
    with submodule("runtime.dispatch").force("reference"):
        found.append(shortcuts.find((x,), ()))
    with torch.autocast("cpu", torch.bfloat16):
        found.append(shortcuts.find((x,), ()))
    other = torch.randn(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):  # whose dtype may be another the next time
        shortcuts.keep((other,), (), "the plan")
        found.append(shortcuts.find((other,), ()))
    torch.vmap(lambda y: found.append(shortcuts.find((y,), ())) or y)(torch.randn(3, 2))
    assert found == [None] * 5

    @torch.compile(backend="eager", fullgraph=True)
    def traced(x):
        return x + (1 if shortcuts.find((x,), ()) is None else 2)

    assert torch.equal(traced(x), x + 1)
    assert shortcuts.find((x,), ()) == "the plan"


def far_apart(x):
    """The same values with the last dimension's elements two apart."""
    return torch.stack([x, x], -1)[..., 0]


def decode(kernel, x, **options):
    return kernel.fused_recurrent_gated_delta_rule(
        *(x[name] for name in NAMES), initial_state=x["initial_state"], output_final_state=True,
        use_qk_l2norm_in_kernel=True, **options,
    )  # fmt: skip


@pytest.mark.gpu
def test_decoding_again(kernel):
    """The second call takes the shortcut: the same bits; one that only looks alike is checked."""
    x = gdn_inputs(3, 1, 2, 4, 64, 64, torch.bfloat16, "cuda")
    known = submodule("gdn.api")._decoding._known
    known.clear()
    with torch.no_grad():
        first = decode(kernel, x)
        assert len(known) == 1
        for _ in range(2):
            assert all(map(torch.equal, decode(kernel, x), first))
        with submodule("runtime.dispatch").force("reference"):
            ref = decode(kernel, x)
        for out, expected in zip(first, ref):
            assert_close(out, expected, torch.bfloat16)
        for name in NAMES:  # strides that kernels do not know are no longer the same call
            assert_close(decode(kernel, {**x, name: far_apart(x[name])})[0], first[0])
        with pytest.raises(ValueError, match="must have shape"):
            decode(kernel, {**x, "k": x["k"][:2]})
        with pytest.raises(TypeError, match="dtype"):
            decode(kernel, {**x, "k": x["k"].float()})
        other = {**x, "initial_state": x["initial_state"].clone()}
        _, state = decode(kernel, other, inplace_final_state=True)
        assert state is other["initial_state"] and torch.equal(state, first[1])


@pytest.mark.gpu
def test_decoding_with_gradients(kernel):
    """No plan where a gradient is needed, also after one was made for the same sizes."""
    x = gdn_inputs(1, 1, 1, 2, 32, 32, torch.float32, "cuda")
    decode(kernel, x)
    x["v"].requires_grad_()
    o, _ = decode(kernel, x)
    o.sum().backward()
    assert x["v"].grad.abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 5])
def test_vectors_of_any_stride(kernel, T):
    """Gates, biases and indices that are columns of something else."""
    x = gdn_inputs(2, T, 2, 4, 32, 32, torch.float32, "cuda")
    options = {"A_log": torch.rand(4, device="cuda"), "dt_bias": torch.rand(4, device="cuda")}
    rows = torch.tensor([1, 0], device="cuda")

    def run(change):
        y = {**x, "g": change(x["g"]), "beta": change(x["beta"])}
        vectors = {name: change(value) for name, value in options.items()}
        y["initial_state"] = x["initial_state"].clone()
        return decode(
            kernel, y, use_gate_in_kernel=True, state_indices=change(rows),
            inplace_final_state=True, **vectors,
        )  # fmt: skip

    with torch.no_grad():
        for out, expected in zip(run(far_apart), run(lambda y: y)):
            assert torch.equal(out, expected)
