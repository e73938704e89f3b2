"""What the gated delta rule and Kimi Delta Attention promise alike: gates of any strength and
gates that are NaN, states of any strides. Of the reference, and of every kind of kernels."""

import pytest
import torch
from conftest import TOLERANCE, computed, gdn_inputs, relative_error, submodule
from interpreter import (  # noqa: F401
    DEVICE,
    INTERPRETING,
    both_ways,
    interpreted,
    test_in_the_interpreter,
)

gdn, kda = submodule("gdn.call"), submodule("kda.call")
RULES = ("gdn", "kda")
# in the interpreter, which takes seconds for a chunk, as few as show it
LENGTH, LAST = (96, (0, 40)) if INTERPRETING else (300, (0, 70, 236, 237, 299, 300))
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
ROOMS = ("portable",) if INTERPRETING else ("portable", "hopper")
D, DTYPE = (16, torch.float16) if INTERPRETING else (128, torch.bfloat16)


def inputs(rule, dtype=DTYPE, T=LENGTH, H=2, D=D, device=DEVICE):
    """A call's tensors by name, of one sequence and slow gates."""
    x = gdn_inputs(1, T, H, H, D, D, dtype, device)
    if rule == "kda":
        draw = torch.Generator(device=device).manual_seed(1)
        x["g"] = -0.05 * torch.rand(1, T, H, D, generator=draw, device=device, dtype=x["g"].dtype)
    return x


def forward(rule, x, scale=0.1, l2norm=True, **tensors):
    """The call of the chunked form."""
    kind = gdn.GdnCall if rule == "gdn" else kda.KdaCall
    fields = {**dict.fromkeys(kind._fields), **x, **tensors}
    options = gdn.GdnOptions(scale, use_qk_l2norm=l2norm, output_final_state=True)
    return kind(**{**fields, "options": options})


def backward(call, do, d_final):
    """The call of its gradient."""
    *tensors, _, cu_seqlens, options = call
    kind = kda.KdaBackward if isinstance(call, kda.KdaCall) else gdn.GdnBackward
    options = gdn.GradientOptions(False, *options)
    return kind(*tensors, cu_seqlens, do, d_final, None, None, None, options)


def by_steps(rule, x, scale=0.1):
    """o and the final state, token by token."""
    kind = gdn.RecurrentCall if rule == "gdn" else kda.KdaStepCall
    options = gdn.RecurrentOptions(scale, use_qk_l2norm=True, output_final_state=True)
    run = getattr(submodule(f"{rule}.reference.recurrent"), f"{rule}_recurrent_fwd")
    return run(kind(**{**dict.fromkeys(kind._fields), **x, "options": options}))


def truth(rule, x, do=None, d_final=None, scale=0.1):
    """o, the final state and the gradients of NAMES in fp64, by autograd of the recurrence."""
    leaves = {name: x[name].double().requires_grad_() for name in NAMES}
    o, state = by_steps(rule, leaves, scale)
    if do is None:
        return o.detach(), state.detach(), None
    loss = (o * do.double()).sum() + (state * d_final.double()).sum()
    return o.detach(), state.detach(), torch.autograd.grad(loss, list(leaves.values()))


def gradients(rule, room, call, do, d_final):
    """Those of NAMES, by the kernels of a room or the reference."""
    call = backward(call, do, d_final)
    if room == "reference":
        found = getattr(submodule(f"{rule}.reference.backward"), f"{rule}_chunk_bwd")(call)
    else:
        found = computed(f"{rule}.{room}.backward", f"{rule}_chunk_bwd", call)
    return [*found[:5], found[7]]


def outputs(rule, room, call):
    """o and the final state."""
    if room == "reference":
        found = getattr(submodule(f"{rule}.reference.chunk"), f"{rule}_chunk_fwd")(call)
    else:
        found = computed(f"{rule}.{room}.chunk", f"{rule}_chunk_fwd", call)
    return found[:2]


def ends_of(x, seed=2):
    """Gradients of o and of the final state."""
    draw = torch.Generator(device=x["v"].device).manual_seed(seed)
    like = [x["v"], x["initial_state"]]
    return [
        torch.randn(y.shape, generator=draw, device=y.device, dtype=torch.float32).to(y.dtype)
        for y in like
    ]


def check(rule, room, x, dtype, scale=0.1):
    """Values and gradients beside fp64."""
    do, d_final = ends_of(x)
    *want, want_gradients = truth(rule, x, do, d_final, scale)
    call = forward(rule, x, scale)
    for a, b in zip(outputs(rule, room, call), want):
        assert relative_error(a, b) <= TOLERANCE[dtype]
    found = gradients(rule, room, call, do, d_final)
    for name, a, b in zip(NAMES, found, want_gradients):
        assert torch.isfinite(a).all(), name
        assert relative_error(a, b) <= 4 * TOLERANCE[dtype], name


RESETS = (-1e6, -torch.inf) if INTERPRETING else (-1e3, -1e6, -1e8, -torch.inf)


def with_resets(x, strength):
    """Resets of all channels and of a few, in the middle, beside one another, at a chunk's ends."""
    for token in (0, 5, 6, 63, 64, 90):
        x["g"][:, token] = strength
    if x["g"].ndim == 4:
        x["g"][:, ::7, :, ::3] = strength
    return x


@pytest.mark.parametrize("strength", RESETS)
@pytest.mark.parametrize("rule", RULES)
def test_strong_gates_of_the_reference(rule, strength):
    x = with_resets(inputs(rule, torch.float32, D=32, device="cpu"), strength)
    check(rule, "reference", x, torch.float32)


@pytest.mark.parametrize("rule", RULES)
def test_a_reset_starts_anew(kernel, rule):
    """Two documents of one row, parted by a gate of -inf, are two sequences, gradients too."""
    run = kernel.chunk_gated_delta_rule if rule == "gdn" else kernel.chunk_kda
    x = inputs(rule, torch.float32, D=32, device="cpu")
    x.pop("initial_state")
    x["g"][:, 70] = -torch.inf
    leaves = [y.clone().requires_grad_() for y in x.values()]
    o = run(*leaves)[0]
    spans = (slice(70), slice(70, None))
    apart = [[y[:, span].detach().requires_grad_() for y in leaves] for span in spans]
    parts = torch.cat([run(*tensors)[0] for tensors in apart], 1)
    assert relative_error(o, parts) <= 1e-5
    do = torch.randn_like(o)
    whole = torch.autograd.grad(o, leaves, do)
    both = torch.autograd.grad(parts, [*apart[0], *apart[1]], do)
    for a, first, second in zip(whole, both[:5], both[5:]):
        assert relative_error(a, torch.cat([first, second], 1)) <= 1e-5


@both_ways
@pytest.mark.parametrize("strength", RESETS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("room", ROOMS)
def test_strong_gates(room, rule, strength):
    check(rule, room, with_resets(inputs(rule, H=1), strength), DTYPE)


@both_ways
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("room", ("reference", *ROOMS))
def test_nan_gates_stay_nan(room, rule):
    """From their token on, in their head and sequence alone: values and gradients."""
    x = inputs(rule, T=96)
    do, d_final = ends_of(x)
    ends = torch.tensor([0, 10, 60, 96], dtype=torch.int32, device=DEVICE)
    states = x["initial_state"].repeat(3, 1, 1, 1)
    d_final = d_final.repeat(3, 1, 1, 1)
    found = []
    for value in (-0.01, float("nan")):
        x["g"][0, 30, 1] = value
        call = forward(rule, x, cu_seqlens=ends, initial_state=states)
        *five, d_state = gradients(rule, room, call, do, d_final)
        found.append((outputs(rule, room, call), five, d_state))
    ((o, state), grads, d_state), ((o_nan, state_nan), grads_nan, d_state_nan) = found
    assert o_nan[0, 30:60, 1].isnan().all() and state_nan[1, 1].isnan().all()
    assert d_state_nan[1, 1].isnan().all()
    o_nan[0, 10:60, 1] = o[0, 10:60, 1]  # products of its chunk have 0 * NaN before it
    state_nan[1, 1], d_state_nan[1, 1] = state[1, 1], d_state[1, 1]
    assert torch.equal(o_nan, o) and torch.equal(state_nan, state)
    assert torch.equal(d_state_nan, d_state)
    for a, b in zip(grads_nan, grads):
        assert a[0, 10:30, 1].isnan().any()
        assert torch.equal(a[0, :, 0], b[0, :, 0]) and torch.equal(a[0, 60:], b[0, 60:])
        assert torch.equal(a[0, :10], b[0, :10])


@pytest.mark.parametrize("which", ("initial_state", "d_final_state"))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("room", ("portable", "hopper"))
def test_states_whose_rows_are_far_apart(room, rule, which):
    """Offsets in a state have 32 bits: no kernel takes one that they do not span."""
    x = inputs(rule, torch.bfloat16, D=128, device="cpu")
    far = torch.empty_strided((1, 2, 128, 128), (0, 128, 2**25, 1), device="meta")
    do, d_final = ends_of(x)
    on = submodule("runtime.recording").pretending
    chip = submodule("runtime.device").Chip("NVIDIA_H200", (9, 0), 132)
    with on(chip):
        for given, served in ((x["initial_state"], True), (far, False)):
            state = given if which == "initial_state" else x["initial_state"]
            last = given if which == "d_final_state" else d_final
            call = forward(rule, x, initial_state=state)
            prepare = submodule(f"{rule}.{room}.backward")
            run = getattr(prepare, f"prepare_{rule}_chunk_bwd")(backward(call, do, last))
            assert (run is not None) == served
            if which == "initial_state":
                prepare = submodule(f"{rule}.{room}.chunk")
                run = getattr(prepare, f"prepare_{rule}_chunk_fwd")(call)
                assert (run is not None) == served


@both_ways
@pytest.mark.parametrize("scale", [2**-10, 2**5])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("room", ROOMS)
def test_scales_in_fp16(room, rule, scale):
    check(rule, room, inputs(rule, torch.float16, H=1), torch.float16, scale)


@both_ways
@pytest.mark.parametrize("scale", [1e-5, 3e5])
@pytest.mark.parametrize("rule", RULES)
def test_scales_beyond_fp16(rule, scale):
    """No kernel would be exact, nor even finite; the reference is."""
    x = inputs(rule, torch.float16)
    call, room = forward(rule, x, scale), ROOMS[-1]
    prepare = submodule(f"{rule}.{room}.chunk")
    assert getattr(prepare, f"prepare_{rule}_chunk_fwd")(call) is None
    prepare = submodule(f"{rule}.{room}.backward")
    gradient = backward(call, *ends_of(x))
    assert getattr(prepare, f"prepare_{rule}_chunk_bwd")(gradient) is None
    x["v"], x["initial_state"] = (
        y * 1e-4 if scale > 1 else y for y in (x["v"], x["initial_state"])
    )
    o, state, _ = truth(rule, x, scale=scale)
    found = outputs(rule, "reference", forward(rule, x, scale))
    assert relative_error(found[1], state) <= TOLERANCE[torch.float16]
    assert (found[0].double() - o).abs().max() <= o.abs().max() * 1e-3 + 2**-24


@pytest.mark.parametrize("l2norm", [True] if INTERPRETING else [True, False])
@pytest.mark.parametrize("room", ("reference", *ROOMS))
@pytest.mark.parametrize("rule", RULES)
def test_padding_is_zero(rule, room, l2norm):
    """Tokens behind the last sequence: outputs and gradients are zero, and nothing else changes."""
    if room != "reference" and DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("kernels run on a GPU, or in the interpreter")
    device = DEVICE if room != "reference" else "cpu"
    x = inputs(rule, DTYPE, H=1 if INTERPRETING else 2, device=device)
    states = x.pop("initial_state").repeat(3, 1, 1, 1)
    poison = float("nan")
    for last in LAST:
        ends = torch.tensor([0, last // 3, last // 3, last], dtype=torch.int32, device=device)
        padded = {name: y.clone() for name, y in x.items()}
        for y in padded.values():
            y[:, last:] = poison
        found = []
        for given in (padded, {name: y[:, :last] for name, y in x.items()}):
            call = forward(rule, given, initial_state=states, cu_seqlens=ends, l2norm=l2norm)
            do, d_final = ends_of({"v": x["v"], "initial_state": states})
            do = do[:, : given["v"].shape[1]]
            stale = [torch.full_like(call.v, poison) for _ in range(8)]
            del stale  # the allocator gives their memory away again
            if not last and given is not padded:
                continue
            found.append((*outputs(rule, room, call), *gradients(rule, room, call, do, d_final)))
        for i, a in enumerate(found[0]):
            tokens = i not in (1, 7)
            assert not tokens or not a[:, last:].any()
            if len(found) > 1:
                assert torch.equal(a[:, :last] if tokens else a, found[1][i])
