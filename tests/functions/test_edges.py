"""Lanes that are not there, and values at the edge: kernels whose masked lanes divide by zero or
take its root, and NaN that must stay in its row, head or sequence."""

import functools

import pytest
import torch
from conftest import TOLERANCE, assert_close, computed, prepared, relative_error, submodule
from gdn_gradients import Case
from interpreter import (  # noqa: F401
    DEVICE,
    INTERPRETING,
    both_ways,
    interpreted,
    test_in_the_interpreter,
)
from problems import PROBLEMS, WRITTEN, arguments, writing

layer, layer_calls = submodule("gdn_layer.reference.layer"), submodule("gdn_layer.call")
NAN = float("nan")


def by_layer_kernel(name, kind):
    """What the kernels of a GDN layer compute of the fields of a call."""
    return functools.partial(prepared, "gdn_layer.portable.layer", name, kind)


def norm_inputs(rows, D, dtype=torch.float32):
    random = torch.Generator(device=DEVICE).manual_seed(0)
    x, gate, dy = (torch.randn(rows, D, generator=random, device=DEVICE) for _ in range(3))
    weight = torch.randn(D, generator=random, device=DEVICE)
    return [t.to(dtype) for t in (x, gate, weight, dy)]


ROWS = [(1, 5), (5, 100), (17, 128), (9, 1024)]  # blocks have 1, 1, 16 and 2 rows
DTYPES = [torch.float32]
if not INTERPRETING:
    ROWS, DTYPES = [*ROWS, (1000, 128), (1001, 8192)], [*DTYPES, torch.float16, torch.bfloat16]


@both_ways
@pytest.mark.parametrize("rows, D", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_without_eps(rows, D, dtype):
    """Rows that are no multiple of the block, too: nothing is NaN, everything is right."""
    x, gate, weight, dy = norm_inputs(rows, D, dtype)
    leaves = [t.double().requires_grad_() for t in (x, gate, weight)]
    y = layer.rms_norm_gated_fwd(*leaves, 0.0, "silu")
    want = [y, *torch.autograd.grad(y, leaves, dy.double())]
    forward = by_layer_kernel("rms_norm_gated_fwd", layer_calls.GatedNorm)
    backward = by_layer_kernel("rms_norm_gated_bwd", layer_calls.GatedNormGradient)
    out = forward(x, gate, weight, 0.0, "silu")
    for a, b in zip([out, *backward(x, gate, weight, dy, 0.0, "silu")], want):
        assert relative_error(a, b) <= 2 * TOLERANCE[dtype]


@both_ways
def test_norm_keeps_nan_in_its_row():
    """A row of zeros without eps and a row with NaN spoil themselves and dweight alone."""
    x, gate, weight, dy = norm_inputs(17, 128)
    clean = x.clone()
    x[0], x[16, 1] = 0.0, NAN
    backward = by_layer_kernel("rms_norm_gated_bwd", layer_calls.GatedNormGradient)
    got, want = (backward(t, gate, weight, dy, 0.0, "silu") for t in (x, clean))
    for a, b in zip(got[:2], want[:2]):
        assert torch.equal(a[1:-1], b[1:-1]) and a[-1].isnan().any()
    assert got[2].isnan().all()  # the sum over all rows, as torch has it


@interpreted
def test_convolutions_gradient_keeps_nan_in_its_sequence():
    backward = by_layer_kernel("causal_conv1d_bwd", layer_calls.ConvolutionGradient)
    x, dy, weight = torch.randn(1, 24, 20), torch.randn(1, 24, 20), torch.randn(24, 3)
    states, d_final = torch.randn(3, 24, 2), torch.randn(3, 24, 2)
    spoiled = x.clone()
    spoiled[..., 5:12] = NAN
    seq_idx = torch.tensor([[0] * 5 + [1] * 7 + [2] * 8])
    cu = torch.tensor([0, 5, 12, 20])
    for where in ((seq_idx, None, None), (None, cu, states), (None, cu, None)):
        last = None if where[2] is None else d_final
        for order in (lambda t: t, lambda t: t.mT.contiguous().mT):  # both layouts' kernels
            got, want = (
                backward(order(t), weight, None, *where, order(dy), last, "silu")
                for t in (spoiled, x)
            )
            assert torch.equal(got[0][..., :5], want[0][..., :5])
            assert torch.equal(got[0][..., 12:], want[0][..., 12:])
            if where[2] is not None:
                assert torch.equal(got[3][[0, 2]], want[3][[0, 2]])


def zeroed(case):
    """Keys, queries and beta of zero among others and in the last token."""
    q, k, _, _, beta, *_ = case.inputs
    for x in (q, k, beta):
        x[:, ::7] = 0.0
        x[:, -1] = 0.0
    return case


# ragged chunks, among them one token; raw gates of masked tokens are not those of zeros
GDN = {
    "plain": {},
    "norm, gate": {"l2norm": True, "gate": True},
    "packed": {"lengths": (3, 65, 0, 1), "gate": True, "l2norm": True},
}


@interpreted
@pytest.mark.parametrize("options", GDN.values(), ids=GDN)
def test_zeros_in_the_rule(options):
    case = zeroed(Case(1, 70, 1, 2, 16, 16, torch.float32, **options))
    wanted, got = case.expected(), case.gradients(submodule("gdn.portable.backward"))
    for a, b in zip(got, wanted):
        assert a is None or not a.isnan().any()
        assert a is None or relative_error(a, b) < 3e-4  # of sums that cancel, test_gdn_backward.py


@interpreted
def test_nan_stays_in_its_sequence_of_the_rule():
    """Packed sequences, forward and gradients: NaN in every input of one leaves the others' bits.

    What is summed over sequences, A_log's and dt_bias' gradients, has it.
    """
    spoiled, clean = (
        Case(1, 0, 1, 2, 16, 16, torch.float32, lengths=(66, 3, 20), gate=True) for _ in range(2)
    )
    for x in (*spoiled.inputs[:5], spoiled.do):
        x[:, 66:69] = NAN
    spoiled.inputs[7][1] = NAN
    results = []
    for case in (spoiled, clean):
        call = case.call()
        options = call.options._replace(output_final_state=True)
        call = call._replace(options=options)
        o, final, *_ = computed("gdn.portable.chunk", "gdn_chunk_fwd", call)
        grads = case.gradients(submodule("gdn.portable.backward"))
        results.append(([o, *grads[:5]], [final, grads[7]]))
    for a, b in zip(*(tokens for tokens, _ in results)):
        assert torch.equal(a[:, :66], b[:, :66]) and torch.equal(a[:, 69:], b[:, 69:])
    for a, b in zip(*(states for _, states in results)):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


@interpreted
@pytest.mark.parametrize("V", [16, 24])
def test_decoding_without_eps(V):
    """A layer's step with eps = 0 where V is no power of two: masked lanes of the norm."""
    B, H, HV, K, W = 2, 1, 2, 16, 4
    D = 2 * H * K + HV * V
    rows, gates = torch.randn(B, 1, D + HV * V), torch.randn(B, 1, 2 * HV)
    q, k, v, z = rows.split([H * K, H * K, HV * V, HV * V], -1)
    q, k = (x.unflatten(-1, (H, K)) for x in (q, k))
    v, z = (x.unflatten(-1, (HV, V)) for x in (v, z))
    tensors = (q, k, v, z, *gates.split(HV, -1))
    weight, norm = torch.randn(D, W), torch.randn(V)
    vectors = torch.randn(2, HV).unbind(0)
    kind, rest = layer_calls.LayerDecode, (weight, None, *vectors, norm)
    options = layer_calls.DecodeOptions("silu", 0.0, "silu", False)
    tensors += (torch.randn(B, D, W), torch.randn(B, HV, K, V), *rest)
    wide = [t if t is None else t.double() for t in tensors]
    out = by_layer_kernel("gdn_layer_decode", kind)(*tensors, *options)
    if out is None:
        pytest.skip("no kernel for this head dim")
    ref = submodule("gdn_layer.reference.fused").gdn_layer_decode(kind(*wide, options))
    assert_close(out, ref)


def test_sizes_of_zero(kernel):
    """Sums over nothing are zero, and nothing has as many dimensions as something."""
    for lead in ((), (3,), (2, 3), (2, 0)):
        x, nothing = torch.ones(*lead, 5), torch.ones(*lead, 0)
        w, empty = torch.ones(4, 5), torch.ones(4, 0)
        assert torch.equal(kernel.fused_swiglu(nothing, empty, empty), torch.zeros(*lead, 4))
        assert kernel.silu_mul(nothing, nothing).shape == nothing.shape
        assert kernel.fused_swiglu_mlp(nothing, empty, empty, empty.T).shape == nothing.shape
        y = kernel.fused_swiglu_mlp(x, w[:0], w[:0], w[:0].T)
        assert torch.equal(y, torch.zeros(*lead, 5))
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="at least one expert, got 0"):
        kernel.fused_experts(w, torch.ones(0, 6, 5), torch.ones(0, 5, 3), ids, torch.ones(2, 1))
    q, cache = torch.ones(1, 1, 2, 8), torch.ones(1, 2, 0, 8)
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        kernel.attention_with_kvcache(q, cache, cache, torch.tensor(0))


def spaced(x):
    """x as a view of which each second element is another's."""
    wide = torch.stack([x, torch.zeros_like(x)], -1)
    return wide[..., 0]


@interpreted
def test_lists_of_any_strides(kernel, by_portable):
    """Lengths and flags that are columns of a table."""
    x, weight, cu = torch.randn(1, 8, 9), torch.randn(8, 4), torch.tensor([0, 4, 9])
    q, k = torch.randn(2, 2, 3, 2, 16).unbind(0)
    tensors = (q, k, torch.randn(2, 3, 2, 16), -torch.rand(2, 3, 2), torch.rand(2, 3, 2))
    pool, rows, kept = torch.randn(4, 2, 16, 16), torch.tensor([2, 0]), torch.tensor([False, True])

    def prompts(kept):
        return kernel.chunk_gated_delta_rule(
            *tensors, initial_state=pool.clone(), state_indices=rows, has_initial_state=kept
        )

    calls = [
        (cu, lambda cu: kernel.causal_conv1d_fn(x, weight, cu_seqlens=cu)),
        (cu, lambda cu: kernel.causal_conv1d_update(x, state.clone(), weight, cu_seqlens=cu)),
        (kept, lambda kept: prompts(kept)[0]),
        (kept, lambda kept: prompts(kept)[1]),
    ]
    state = torch.randn(2, 8, 4)
    for values, call in calls:
        assert torch.equal(call(spaced(values)), call(values))


def step_of_a_layer():
    """The states of a GDN layer, and a token of it."""
    q, k, v, z = torch.randn(4, 2, 1, 2, 16).unbind(0)
    gates, states = torch.randn(2, 2, 1, 2).unbind(0), [torch.zeros(2, 96, 4)]
    states.append(torch.zeros(2, 2, 16, 16))
    rest = [torch.randn(96, 4), None, *torch.zeros(2, 2).unbind(0), torch.ones(16)]
    tensors = (q, k, v, z, *gates, *states, *rest)
    decode = submodule("gdn_layer.ops_fused").DECODE
    return states, lambda: decode(tensors, ("silu", 1e-6, "silu", False))


@interpreted
@pytest.mark.parametrize("name", [*WRITTEN, "a step of a layer"])
def test_autograd_notices_what_kernels_write(kernel, by_portable, name):
    """A loss that was computed from states, caches or outputs before they were written has no
    gradient after it; also of a call that is known."""
    if name in WRITTEN:
        function, given = writing(kernel, name, T=1)
        states, call = [given[n] for n in WRITTEN[name]], lambda: function(**given)
    else:
        states, call = step_of_a_layer()
    first = [state.clone() for state in states]
    for _ in range(2):
        for state, before in zip(states, first):
            scale = torch.ones(state.shape, requires_grad=True)
            loss = (scale * state.copy_(before)).sum()
            with torch.no_grad():
                call()
            assert not torch.equal(state, before)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@interpreted
def test_a_state_that_a_gradient_needs_is_decoded_on(kernel, by_portable):
    given = arguments(PROBLEMS["fused_recurrent_gated_delta_rule"], torch.float32, T=1)
    o, _ = kernel.chunk_gated_delta_rule(**{**given, "v": given["v"].clone().requires_grad_()})
    with torch.no_grad():
        kernel.fused_recurrent_gated_delta_rule(
            **{**given, "output_final_state": False}, inplace_final_state=True
        )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
