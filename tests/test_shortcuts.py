"""Calls like one that has passed: when they are taken to be, and that they are served as right."""

import pytest
import torch
from conftest import assert_close, gdn_inputs, submodule

NAMES = ("q", "k", "v", "g", "beta")


def key(*args):
    return submodule("functional.common").shortcut(*args)


def test_what_makes_calls_alike(kernel):
    x = torch.randn(2, 4, 8)
    assert key((x, None), 1) == key((x.clone(), None), 1)
    others = [
        ((x[:1], None), 1), ((x.transpose(0, 1).contiguous().transpose(0, 1), None), 1),
        ((x.double(), None), 1), ((x.clone().requires_grad_(), None), 1), ((x, x), 1),
        ((torch.nn.Parameter(x, requires_grad=False), None), 1), ((x.to("meta"), None), 1),
        ((x, None), 2),
    ]  # fmt: skip
    keys = [key((x, None), 1), *(key(*other) for other in others)]
    assert len(set(keys)) == len(keys)
    with torch.no_grad():
        assert key((x, None), 1) not in keys


def test_where_there_is_no_shortcut(kernel):
    x = torch.randn(2)
    assert key(([1.0],)) is None and key((x,), []) is None
    with submodule("dispatch").served():
        assert key((x,)) is None
    with submodule("dispatch").force("reference"):
        assert key((x,)) is None
    if torch.cuda.is_available():
        with torch.autocast("cuda", torch.bfloat16):
            assert key((x,)) is None
    shortcut = submodule("functional.common").shortcut

    @torch.compile(backend="eager", fullgraph=True)
    def traced(x):
        return x + (1 if shortcut((x,)) is None else 2)

    assert torch.equal(traced(x), x + 1)


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
    plans = submodule("functional.gdn")._plans
    plans.clear()
    with torch.no_grad():
        first = decode(kernel, x)
        assert [plan is not None for plan in plans.values()] == [True]
        for _ in range(2):
            assert all(map(torch.equal, decode(kernel, x), first))
        with submodule("dispatch").force("reference"):
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
