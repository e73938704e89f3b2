"""Bad input: the message names the argument, what was expected and what came."""

import re
from pathlib import Path

import pytest
import torch
from conftest import assert_close, gdn_inputs, relative_error

pytestmark = pytest.mark.kernels_ci

VALID = object()


def wanted(*shape):
    return torch.ones(shape, requires_grad=True)


def rule_call(name, **changes):
    x = gdn_inputs(2, 8, 2, 4, 6, 5)
    if "cu_seqlens" in changes or changes.pop("packed", False):
        x = {key: y[:1] for key, y in x.items()}
    x.update(changes)
    return lambda kernel: getattr(kernel, name)(**x)


def chunk(**changes):
    return rule_call("chunk_gated_delta_rule", **changes)


def recurrent(**changes):
    return rule_call("fused_recurrent_gated_delta_rule", **changes)


def vk(**changes):
    return rule_call("chunk_gated_delta_rule_opt_vk", **{"initial_state": None, **changes})


def opt(**changes):
    return rule_call("chunk_gated_delta_rule_opt", **changes)


def swiglu(**changes):
    x = {"x": torch.ones(2, 4), "w_gate": torch.ones(3, 4), "w_up": torch.ones(3, 4), **changes}
    return lambda kernel: kernel.fused_swiglu(**x)


def mlp(**changes):
    x = {"x": torch.ones(2, 4), "w_gate": torch.ones(3, 4), "w_up": torch.ones(3, 4)}
    x = {**x, "w_down": torch.ones(4, 3), **changes}
    return lambda kernel: kernel.fused_swiglu_mlp(**x)


def multiplied(**changes):
    x = {"gate": torch.ones(2, 4), "up": torch.ones(2, 4), **changes}
    return lambda kernel: kernel.silu_mul(**x)


def experts(**changes):
    x = {"x": torch.ones(2, 4), "w_gate_up": torch.ones(3, 10, 4), "w_down": torch.ones(3, 4, 5)}
    x.update(top_k_index=ints(0, 1, 2, 0).view(2, 2), top_k_weights=torch.ones(2, 2))
    return lambda kernel: kernel.fused_experts(**{**x, **changes})


def conv(**changes):
    x = {"x": torch.ones(1, 3, 8), "weight": torch.ones(3, 4), **changes}
    return lambda kernel: kernel.causal_conv1d_fn(**x)


def update(**changes):
    x = {"x": torch.ones(1, 3), "conv_state": torch.ones(1, 3, 4), "weight": torch.ones(3, 4)}
    return lambda kernel: kernel.causal_conv1d_update(**{**x, **changes})


def norm(**changes):
    x = {"x": torch.ones(2, 4), "gate": torch.full((2, 4), 2.0), "weight": torch.ones(4), **changes}
    return lambda kernel: kernel.rms_norm_gated(**x)


def gate(**changes):
    x = {"a": torch.ones(2, 4), "A_log": torch.ones(4), "dt_bias": torch.ones(4), **changes}
    return lambda kernel: kernel.gated_delta_gate(**x)


def module(*args, **kwargs):
    return lambda kernel: kernel.FusedSwiGLU(*args, **kwargs)


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


META = dict(device="meta")
POOL = dict(initial_state=torch.zeros(3, 4, 6, 5))
SLOTS = torch.arange(16).view(2, 8)
SHORT_DRAFTS = dict(
    x=torch.ones(2, 3, 3), conv_state=torch.ones(5, 3, 5), conv_state_indices=ints(4, 0),
    num_accepted_tokens=ints(1, 3),
)  # fmt: skip
DRAFTS = dict(
    initial_state=torch.zeros(16, 4, 6, 5), state_indices=SLOTS, inplace_final_state=True,
    num_accepted_tokens=ints(1, 8),
)  # fmt: skip
# (call, error, the words that must stand in its message, in this order)
BAD = [
    # shapes
    (chunk(q=torch.ones(2, 8, 2)), ValueError, ["q", "[B, T, H, K]", "[2, 8, 2]"]),
    (chunk(v=torch.ones(2, 8, 3, 5)), ValueError, ["v", "multiple of the 2 heads", "3 heads"]),
    (chunk(q=torch.ones(2, 8, 2, 300), k=torch.ones(2, 8, 2, 300)), ValueError,
     ["q and k", "1 to 256", "300"]),
    (chunk(v=torch.ones(2, 8, 4, 0)), ValueError, ["v", "1 to 256", "0"]),
    # types, dtypes, devices
    (chunk(q=[1.0]), TypeError, ["q", "torch.Tensor", "list"]),
    (chunk(q=torch.ones(2, 8, 2, 6).long()), TypeError, ["q", "float32", "int64"]),
    (chunk(k=torch.ones(2, 8, 2, 6).half()), TypeError, ["k", "dtype of q", "float16"]),
    (chunk(k=torch.ones(2, 8, 2, 6, **META)), ValueError, ["k", "device of q", "meta"]),
    # scale, chunk size, options
    (chunk(scale=-0.5), ValueError, ["scale", "positive", "-0.5"]),
    (chunk(scale=float("nan")), ValueError, ["scale", "finite", "nan"]),
    (chunk(scale="1"), TypeError, ["scale", "float", "str"]),
    (chunk(output_final_state=[1.0]), TypeError, ["output_final_state", "True or False", "list"]),
    *[
        (call(allow_neg_eigval=True), ValueError, ["allow_neg_eigval", "False unless", "sigmoid"])
        for call in (chunk, recurrent)
    ],
    (chunk(chunk_size=32), ValueError, ["chunk_size", "64", "32"]),
    (chunk(checkpoint_every=100), ValueError, ["checkpoint_every", "multiple of 64", "100"]),
    (chunk(state_dtype=torch.int8), TypeError,
     ["state_dtype", "float32, bfloat16, float16, float64, or None", "int8"]),
    (chunk(use_gate_in_kernel=True), ValueError, ["A_log", "use_gate_in_kernel", "None"]),
    (chunk(A_log=torch.ones(4)), ValueError, ["A_log", "None unless use_gate_in_kernel"]),
    (chunk(use_gate_in_kernel=True, A_log=torch.ones(2)), ValueError,
     ["A_log", "[HV] = [4]", "[2]"]),
    (recurrent(use_gate_in_kernel=True, A_log=torch.ones(4), dt_bias=torch.ones(3)), ValueError,
     ["dt_bias", "[4]", "[3]"]),
    # packed sequences
    (chunk(cu_seqlens=ints(1, 8)), ValueError, ["cu_seqlens", "start with 0", "1"]),
    (chunk(cu_seqlens=ints(0, 5, 3, 8), initial_state=None), ValueError,
     ["cu_seqlens", "not decrease", "3", "5"]),
    (chunk(cu_seqlens=ints(0, 9)), ValueError, ["cu_seqlens", "end with at most", "8", "9"]),
    (chunk(cu_seqlens=ints(0, 8).view(1, 2)), ValueError, ["cu_seqlens", "[N + 1]", "[1, 2]"]),
    (chunk(cu_seqlens=ints()), ValueError, ["cu_seqlens", "cumulative", "[0]"]),
    (chunk(cu_seqlens=ints(0, 4, 8)), ValueError, ["initial_state", "[2, 4, 6, 5]", "[1, 4"]),
    (chunk(cu_seqlens=ints(0, 8), q=torch.ones(2, 8, 2, 6), k=torch.ones(2, 8, 2, 6),
     v=torch.ones(2, 8, 4, 5), g=torch.ones(2, 8, 4), beta=torch.ones(2, 8, 4)), ValueError, ["q",
     "[1, T, H, K]", "cu_seqlens", "batch 2"]),
    # states
    (chunk(initial_state=torch.ones(2, 4, 5, 6)), ValueError,
     ["initial_state", "[N, HV, K, V]", "[2, 4, 6, 5]", "[2, 4, 5, 6]"]),
    (chunk(state_v_first=True), ValueError,
     ["initial_state", "[N, HV, V, K]", "[2, 4, 5, 6]", "[2, 4, 6, 5]"]),
    (chunk(**POOL, state_indices=ints(0, 3)), ValueError, ["state_indices", "3 rows", "3"]),
    (chunk(**POOL, state_indices=ints(1, 1)), ValueError, ["state_indices", "twice", "1, 1"]),
    (chunk(**POOL, state_indices=ints(0)), ValueError, ["state_indices", "[N] = [2]", "[1]"]),
    (chunk(initial_state=None, state_indices=ints(0, 1)), ValueError,
     ["initial_state", "pool", "state_indices"]),
    (recurrent(initial_state=None, inplace_final_state=True), ValueError,
     ["initial_state", "inplace_final_state", "None"]),
    (recurrent(inplace_final_state=True, output_all_states=True), ValueError,
     ["output_all_states", "False"]),
    (recurrent(output_state_indices=ints(0, 1), inplace_final_state=True), ValueError,
     ["state_indices", "output_state_indices"]),
    (recurrent(**POOL, state_indices=ints(0, 1)), ValueError,
     ["inplace_final_state", "True", "state_indices"]),
    *[
        (chunk(**{**POOL, "state_indices": ints(0, 2), **changes}), error, words)
        for changes, error, words in (
            (dict(has_initial_state=torch.ones(3).bool()), ValueError,
             ["has_initial_state", "[N] = [2]", "[3]"]),
            (dict(state_indices=None, initial_state=None, inplace_final_state=False), ValueError,
             ["state_indices", "inplace_final_state=False"]),
        )
    ],
    (recurrent(null_index=1), ValueError, ["null_index", "-1 or 0", "1"]),
    (recurrent(null_index=False), ValueError, ["null_index", "-1 or 0", "False"]),
    (recurrent(**POOL, state_indices=ints(1, 1), inplace_final_state=True, null_index=0),
     ValueError, ["state_indices", "twice", "1, 1"]),
    *[
        (recurrent(**{**DRAFTS, **changes}), error, words)
        for changes, error, words in (
            (dict(state_indices=None, initial_state=torch.zeros(2, 4, 6, 5)), ValueError,
             ["state_indices", "num_accepted_tokens", "None"]),
            (dict(state_indices=ints(0, 1)), ValueError, ["state_indices", "[2, 1+S]", "[2]"]),
            (dict(state_indices=SLOTS[:, :7]), ValueError, ["state_indices", "token", "8", "7"]),
            (dict(state_indices=SLOTS % 15), ValueError, ["state_indices", "twice"]),
            (dict(num_accepted_tokens=ints(1)), ValueError, ["num_accepted_tokens", "[2]", "[1]"]),
            (dict(num_accepted_tokens=ints(0, 1)), ValueError, ["num_accepted_tokens", "1 to 8"]),
            (dict(num_accepted_tokens=ints(1, 9)), ValueError, ["num_accepted_tokens", "[1, 9]"]),
            (dict(output_state_indices=ints(0, 1)), ValueError, ["output_state_indices", "None"]),
            (dict(inplace_final_state=False), ValueError, ["inplace_final_state", "True"]),
            (dict(cu_seqlens=ints(0, 8), state_indices=SLOTS[:1, :7], num_accepted_tokens=ints(1)),
             ValueError, ["state_indices", "a column for each token", "8", "7"]),
        )
    ],
    *[
        (update(**{**SHORT_DRAFTS, **changes}), error, words)
        for changes, error, words in (
            (dict(null_index=2), ValueError, ["null_index", "-1 or 0", "2"]),
            (dict(conv_state_indices=ints(0)), ValueError, ["conv_state_indices", "[2]", "[1]"]),
            (dict(conv_state_indices=ints(0, 5)), ValueError, ["conv_state_indices", "5 rows"]),
            (dict(conv_state_indices=ints(3, 3)), ValueError, ["conv_state_indices", "twice"]),
            (dict(conv_state_indices=None), ValueError, ["conv_state", "[2, 3, S]", "[5, 3, 5]"]),
            (dict(num_accepted_tokens=ints(0, 1)), ValueError, ["num_accepted_tokens", "1 to 3"]),
            (dict(num_accepted_tokens=ints(4, 1)), ValueError, ["num_accepted_tokens", "1 to 3"]),
            (dict(x=torch.ones(2, 3, 4)), ValueError, ["conv_state", "6 columns", "4 tokens", "5"]),
            (dict(cu_seqlens=ints(0, 3)), ValueError, ["x", "[1, D, T]", "cu_seqlens", "2"]),
        )
    ],
    (recurrent(out=torch.ones(1, 8, 4, 5).expand(2, -1, -1, -1)), ValueError,
     ["out", "memory for each element", "[0, 20, 5, 1]"]),
    # forward only
    (opt(q=torch.ones(2, 8, 2, 6, requires_grad=True)), ValueError,
     ["q", "gradient", "chunk_gated_delta_rule_opt is forward only"]),
    (vk(v=torch.ones(2, 8, 4, 5, requires_grad=True)), ValueError,
     ["v", "gradient", "chunk_gated_delta_rule_opt_vk is forward only"]),
    *[
        (vk(initial_state=torch.ones(3, 4, 5, 6), initial_state_indices=rows), error, words)
        for rows, error, words in (
            (ints(0), ValueError, ["initial_state_indices must have shape [N] = [2]", "[1]"]),
            (ints(0, 3), ValueError, ["initial_state_indices must be below the 3 rows", "3"]),
            (ints(1, 1), ValueError, ["initial_state_indices must not name", "twice", "[1, 1]"]),
        )
    ],
    (vk(initial_state_indices=ints(0, 1)), ValueError,
     ["initial_state must be the state pool when initial_state_indices is given", "None"]),
    (chunk(state_indices=ints(0, 1), initial_state=wanted(2, 4, 6, 5)), ValueError,
     ["initial_state", "gradient", "in place"]),
    (recurrent(inplace_final_state=True, initial_state=wanted(2, 4, 6, 5)), ValueError,
     ["initial_state", "gradient", "in place"]),
    (recurrent(out=wanted(2, 8, 4, 5)), ValueError, ["out", "gradient", "in place"]),
    (update(conv_state=wanted(1, 3, 4)), ValueError, ["conv_state", "gradient", "in place"]),
    (update(out=wanted(1, 3)), ValueError, ["out", "gradient", "in place"]),
    (vk(o=wanted(2, 8, 4, 5)), ValueError, ["o", "gradient", "in place"]),
    (vk(initial_state_indices=ints(0, 1), inplace_final_state=False), ValueError,
     ["initial_state", "pool"]),
    (vk(cu_seqlens=[0, 8], num_decodes=1), TypeError, ["cu_seqlens", "torch.Tensor", "list"]),
    (vk(use_chunk_hip=True), ValueError, ["use_chunk_hip", "False", "True"]),
    (vk(num_decodes=-1), ValueError, ["num_decodes", "0, where cu_seqlens is not", "-1"]),
    (vk(num_decode_tokens=2), ValueError, ["num_decode_tokens", "0, where cu_seqlens", "2"]),
    *[
        (vk(cu_seqlens=ints(0, 1, 9), **changes), error, words)
        for changes, error, words in (
            (dict(num_decodes=3), ValueError, ["num_decodes", "0 to 2", "3"]),
            (dict(num_decodes=1, num_decode_tokens=2), ValueError,
             ["num_decode_tokens", "cu_seqlens[num_decodes], 1", "2"]),
        )
    ],
    (vk(inplace_final_state=True), ValueError, ["initial_state_indices", "inplace_final_state"]),
    # SwiGLU
    (swiglu(x=torch.tensor(1.0)), ValueError, ["x", "[..., K]", "[]"]),
    (swiglu(w_gate=torch.ones(3, 5)), ValueError, ["w_gate", "[N, 4]", "[3, 5]"]),
    (swiglu(activation="gelu_new"), ValueError, ["activation", "'silu'", "'gelu_new'"]),
    (mlp(w_down=torch.ones(4, 4)), ValueError, ["w_down", "[O, 3]", "[4, 4]"]),
    (module(0, 4), ValueError, ["in_features", "at least 1", "0"]),
    (module(4, 4.0), TypeError, ["hidden_dim", "int", "float"]),
    (module(4, 4, block=-64), ValueError, ["block", "at least 1", "-64"]),
    (lambda kernel: kernel.FusedSwiGLU(4, 6)(torch.ones(2, 5)), ValueError,
     ["x", "[..., 4]", "[2, 5]"]),
    (lambda kernel: kernel.FusedSwiGLU.from_linears(torch.nn.Linear(4, 6), torch.nn.ReLU()),
     ValueError, ["gate", "no bias"]),
    # the layer's surroundings
    (conv(weight=torch.ones(3, 9)), ValueError, ["weight", "2 to 8", "9"]),
    (conv(activation="relu"), ValueError, ["activation", "'silu'", "'relu'"]),
    (conv(seq_idx=torch.ones(1, 8).int(), cu_seqlens=ints(0, 8)), ValueError,
     ["seq_idx", "None", "cu_seqlens"]),
    (conv(initial_states=torch.ones(1, 3, 4)), ValueError, ["initial_states", "[1, 3, 3]"]),
    (update(conv_state=torch.ones(1, 3, 2)), ValueError, ["conv_state", "at least the 3", "2"]),
    (norm(eps=-1.0), ValueError, ["eps", "non-negative", "-1.0"]),
    (norm(activation="gelu"), ValueError, ["activation", "'sigmoid'", "'gelu'"]),
]  # fmt: skip


@pytest.mark.parametrize("call, error, words", BAD, ids=lambda value: None)
def test_bad_input(kernel, call, error, words):
    with pytest.raises(error) as caught:
        call(kernel)
    assert type(caught.value) is error
    message = str(caught.value)
    pattern = ".*".join(re.escape(word) for word in words)
    assert re.search(pattern, message, re.DOTALL), message


def shared(*shape):
    return torch.zeros(shape).expand(3, *shape[1:])


def written(kernel, what):
    """Calls that write states or caches of three rows where these lie; one memory for all rows."""
    q, k = torch.ones(2, 3, 1, 2, 8).unbind(0)
    v, gate, state = torch.ones(3, 1, 4, 16), torch.zeros(3, 1, 4), shared(1, 4, 8, 16)
    if what == "recurrent":
        kernel.fused_recurrent_gated_delta_rule(
            q, k, v, gate, gate, initial_state=state, inplace_final_state=True
        )
    elif what == "chunk":
        kernel.chunk_gated_delta_rule(
            q, k, v, gate, gate, initial_state=state, state_indices=ints(0, 1, 2)
        )
    elif what == "update":
        kernel.causal_conv1d_update(torch.ones(3, 8, 1), shared(1, 8, 4), torch.ones(8, 4))
    elif what == "rope":
        caches = {"key_cache": shared(1, 2, 5, 8), "value_cache": torch.zeros(3, 2, 5, 8)}
        kernel.fused_qk_norm_rope(q, k, v=k, cache_position=torch.tensor(1), **caches)
    else:
        state, cursor = shared(1, 4, 16, 8), torch.zeros(3, 2, dtype=torch.int32)
        ring = kernel.make_ring(state.clone(), 2, q.dtype)
        if what == "replay":
            kernel.replay_gated_delta_rule(q, k, v, gate, gate, state, ring, cursor)
        else:
            kernel.materialise_ring(state, ring, cursor, inplace=True)


@pytest.mark.parametrize("what, name", [
    ("recurrent", "initial_state"), ("chunk", "initial_state"), ("update", "conv_state"),
    ("rope", "key_cache"), ("replay", "initial_state"), ("materialise", "state"),
])  # fmt: skip
def test_what_is_written_has_memory_for_each_element(kernel, what, name):
    with torch.no_grad(), pytest.raises(ValueError, match=f"^{name} must have memory for each"):
        written(kernel, what)


NESTED = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(3, 4)])


@pytest.mark.parametrize("call, name, x, kind", [
    (swiglu, "x", torch.ones(2, 4).to_sparse(), "torch.sparse_coo"),
    (swiglu, "w_gate", torch.ones(3, 4).to_sparse(), "torch.sparse_coo"),
    (mlp, "w_up", torch.ones(3, 4).to_sparse_csr(), "torch.sparse_csr"),
    (norm, "weight", torch.ones(4).to_sparse(), "torch.sparse_coo"),
    (gate, "a", torch.ones(2, 4).to_sparse(), "torch.sparse_coo"),
    (swiglu, "x", NESTED, "a nested one"), (norm, "x", NESTED, "a nested one"),
])  # fmt: skip
def test_tensors_without_strides(kernel, call, name, x, kind):
    """Also where a dense one of the same shape has passed."""
    call()(kernel)
    with pytest.raises(TypeError, match=f"^{name} must be a dense torch.Tensor, got {kind}"):
        call(**{name: x})(kernel)


@pytest.mark.parametrize("call, name, good, bad", [
    (chunk, "scale", [1, 1.0], True), (recurrent, "scale", [1, 1.0], True),
    (norm, "eps", [1, 1.0, 0], True), (norm, "eps", [0, 0.0], False),
])  # fmt: skip
def test_a_value_that_passed_lets_no_equal_of_another_type_pass(kernel, call, name, good, bad):
    for value in good:
        call(**{name: value})(kernel)
    with pytest.raises(TypeError, match=f"{name} must be a float"):
        call(**{name: bad})(kernel)


def test_state_dtypes_are_served_as_documented(kernel):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    x = gdn_inputs(2, 70, 2, 4, 6, 5)
    _, ref = kernel.chunk_gated_delta_rule(**x, output_final_state=True)
    for dtype in dtypes:
        options = dict(output_final_state=True, state_dtype=dtype, checkpoint_every=64)
        _, state, checkpoints = kernel.chunk_gated_delta_rule(**x, **options)
        assert state.dtype == checkpoints.dtype == dtype
        assert torch.equal(state, ref.to(dtype))  # rounded once
        given = {**x, "initial_state": x["initial_state"].to(dtype)}
        o, _ = kernel.chunk_gated_delta_rule(**given)
        again, _ = kernel.fused_recurrent_gated_delta_rule(**given)
        assert relative_error(o, again) < 1e-5


def test_empty_inputs_have_documented_results(kernel):
    x = gdn_inputs(2, 0, 2, 4, 6, 5)
    o, state = kernel.chunk_gated_delta_rule(**x, output_final_state=True)
    assert o.shape == (2, 0, 4, 5) and torch.equal(state, x["initial_state"])
    x = gdn_inputs(0, 8, 2, 4, 6, 5)
    o, state = kernel.chunk_gated_delta_rule(**x, output_final_state=True)
    assert o.shape == (0, 8, 4, 5) and state.shape == (0, 4, 6, 5)
    x = gdn_inputs(1, 0, 2, 4, 6, 5)
    x["initial_state"] = torch.ones(0, 4, 6, 5)
    o, state = kernel.chunk_gated_delta_rule(**x, cu_seqlens=ints(0), output_final_state=True)
    assert o.shape == (1, 0, 4, 5) and state.shape == (0, 4, 6, 5)
    z = kernel.fused_swiglu(torch.ones(0, 4), torch.ones(3, 4), torch.ones(3, 4))
    assert z.shape == (0, 3)
    assert kernel.causal_conv1d_fn(torch.ones(2, 3, 0), torch.ones(3, 4)).shape == (2, 3, 0)


RULES = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")


@pytest.mark.parametrize("name", RULES)
def test_shapes_alone(kernel, name):
    """Tensors on the meta device, which has no autocast to ask for."""
    x = {key: y.to("meta") for key, y in gdn_inputs(2, 8, 2, 4, 6, 5).items()}
    o, state = getattr(kernel, name)(**x, output_final_state=True)
    assert o.device.type == "meta" and o.shape == (2, 8, 4, 5) and state.shape == (2, 4, 6, 5)


def test_sequences_that_share_a_start(kernel):
    """Rows of a pool that are read alone may be of several sequences, as a prefix is."""
    x = gdn_inputs(3, 2, 2, 4, 6, 5)
    pool, rows, apart = torch.randn(7, 4, 6, 5), ints(1, 4, 1), ints(2, 3, 5)
    x["initial_state"] = pool[rows.long()]
    want, states = kernel.fused_recurrent_gated_delta_rule(**x, output_final_state=True)
    x.update(initial_state=pool, state_indices=rows)
    o, final = kernel.chunk_gated_delta_rule(
        **x, inplace_final_state=False, output_final_state=True
    )
    assert_close(o, want)
    assert_close(final, states)
    q, k, v, *gates = (x[name] for name in ("q", "k", "v", "g", "beta"))
    options = {"initial_state_indices": rows, "inplace_final_state": False}
    _, final = kernel.chunk_gated_delta_rule_opt_vk(
        q, k, v, None, *gates, initial_state=pool.mT, output_final_state=True, **options
    )
    assert_close(final.mT, states)
    o, every = kernel.fused_recurrent_gated_delta_rule(**x, output_all_states=True)
    assert_close(o, want)
    assert_close(every[:, -1], states)
    x.update(output_state_indices=apart, inplace_final_state=True)
    o, pool = kernel.fused_recurrent_gated_delta_rule(**x)
    assert_close(o, want)
    assert_close(pool[apart.long()], states)


def test_numbers_that_torch_compile_leaves_open(kernel):
    """With dynamic=True a float is a symbol, defaults among them."""
    x, weight = torch.randn(2, 8), torch.randn(8)
    for call in (
        lambda eps: kernel.rms_norm(x, weight, eps),
        lambda eps: kernel.rms_norm_gated(x, x, weight, eps),
        lambda scale: kernel.fused_topk(x, 2, scale=scale)[0],
    ):
        step = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
        for value in (0.5, 0.25):
            assert_close(step(value), call(value))


def test_nan_passes_through_and_stays_in_its_row(kernel):
    x = torch.ones(3, 4)
    x[1, 2] = float("nan")
    z = kernel.fused_swiglu(x, torch.ones(3, 4), torch.ones(3, 4))
    assert z[1].isnan().all() and not z[[0, 2]].isnan().any()
    inputs = gdn_inputs(2, 80, 2, 4, 6, 5)
    inputs["v"][0, 70, 1, 2] = float("nan")
    o, state = kernel.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert o[0, 70:, 1, 2].isnan().all() and not o[1].isnan().any()
    assert state[0, 1, :, 2].isnan().all() and not state[1].isnan().any()


def test_cu_seqlens_of_both_integer_types(kernel):
    inputs = {name: y[:1] for name, y in gdn_inputs(2, 8, 2, 4, 6, 5).items()}
    results = [
        kernel.chunk_gated_delta_rule(**inputs, cu_seqlens=ints(0, 8, dtype=dtype))[0]
        for dtype in (torch.int32, torch.int64)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("wide", ["g", "beta", "A_log", "dt_bias"])
def test_one_argument_in_fp64(kernel, name, wide):
    """All is computed in fp64 then, and results have the dtypes that they have without it."""
    exact = gdn_inputs(2, 70, 2, 4, 6, 5, torch.float64)
    exact.update(A_log=torch.zeros(4).double(), dt_bias=torch.ones(4).double())
    given = {key: x.to(torch.float64 if key == wide else torch.float32) for key, x in exact.items()}
    for x in (exact, given):
        x.update({key: x[key].detach().requires_grad_() for key in x})
    results = []
    for x in (exact, given):
        o, state = getattr(kernel, name)(**x, output_final_state=True, use_gate_in_kernel=True)
        (o.square().sum() + state.square().sum()).backward()
        results.append((o, state, *[y.grad for y in x.values()]))
    for out, ref in zip(results[1], results[0]):
        assert relative_error(out, ref) < 1e-5
    assert {y.dtype for y in results[1][:2]} == {torch.float32}


@pytest.mark.parametrize("wide", ["g", "beta"])
def test_one_argument_of_replay_in_fp64(kernel, wide):
    exact = gdn_inputs(2, 1, 2, 4, 6, 5, torch.float64)
    exact["initial_state"] = exact["initial_state"].mT.contiguous()
    given = {key: x.to(torch.float64 if key == wide else torch.float32) for key, x in exact.items()}
    results = []
    for x in (exact, given):
        ring = kernel.make_ring(x["initial_state"], 2, x["k"].dtype)
        results.append(
            kernel.replay_gated_delta_rule(
                **x, ring=ring, cursor=torch.zeros(2, 2, dtype=torch.int32)
            )
        )
    assert relative_error(results[1], results[0]) < 1e-5 and results[1].dtype == torch.float32


@pytest.mark.parametrize("wide", ["x", "conv_state", "weight", "bias"])
@pytest.mark.parametrize("T", [1, 3])
def test_one_argument_of_the_convolution_in_fp64(kernel, wide, T):
    torch.manual_seed(0)
    x = {"x": torch.randn(2, 3, T), "conv_state": torch.randn(2, 3, 5)}
    x.update(weight=torch.randn(3, 4), bias=torch.randn(3))
    exact = {key: y.double() for key, y in x.items()}
    given = {key: exact[key].clone() if key == wide else y for key, y in x.items()}
    out = kernel.causal_conv1d_update(**given)
    assert relative_error(out, kernel.causal_conv1d_update(**exact)) < 1e-6
    assert out.dtype == given["x"].dtype
    assert relative_error(given["conv_state"], exact["conv_state"]) < 1e-6


@pytest.mark.parametrize("model", [None, [], "x", torch.nn.Linear])
def test_models_that_are_none(kernel, model):
    for function in (kernel.kernelize, kernel.restore, kernel.decorate):
        with pytest.raises(TypeError, match="model must be .*torch.nn.Module, got"):
            function(model)


@pytest.mark.parametrize("name", ["loss", "cuda_graphs", "cp_attention"])
def test_flags_of_kernelize(kernel, name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got str"):
        kernel.kernelize(torch.nn.Linear(2, 2), **{name: "x"})


@pytest.mark.parametrize("call", [swiglu, mlp, multiplied, experts, conv, update, norm])
def test_second_names_of_activations(kernel, call):
    gated = call in (swiglu, mlp, multiplied, experts)
    names = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"} if gated else {"swish": "silu"}
    another = "relu" if gated else "sigmoid" if call is norm else None
    for second, name in names.items():
        found, same, different = (call(activation=x)(kernel) for x in (second, name, another))
        assert torch.equal(found, same) and not torch.equal(found, different)


def test_words_that_are_no_list(kernel):
    with pytest.raises(ValueError, match="only must be a list of 'mlp', .*, got 3"):
        kernel.kernelize(torch.nn.Linear(2, 2), only=3)
    pytest.importorskip("kernels")
    for names in (["nope"], "SwiGLUMLP"):
        with pytest.raises(ValueError, match="names must be a list of 'SwiGLUMLP', .*, got"):
            kernel.layer_mapping(names=names)
    for devices in (["gpu"], "cuda", None):
        with pytest.raises(ValueError, match="devices must be a list of 'cpu', 'cuda', .*, got"):
            kernel.layer_mapping(devices=devices)


HUB = "org/fused-swiglu-gdn"


@pytest.mark.parametrize("given, error, words", [
    (dict(source="/no/such/folder"), ValueError, "source must be .*a folder.*'/no/such"),
    (dict(source="no-such-folder"), ValueError, "source must be .*a folder.*'no-such"),
    (dict(source=Path("no/folder")), ValueError, "source must be .*a folder.*'no/folder'"),
    (dict(source=3), TypeError, "source must be .*got int"),
    (dict(source=HUB), ValueError, f"version or revision must be given for {HUB}.*neither"),
    (dict(source=HUB, version=1, revision="v1"), ValueError, "one of the two, got both"),
    (dict(source=HUB, version="1"), TypeError, "version must be of type int, got str"),
    (dict(source=HUB, version=True), TypeError, "version must be of type int, got bool"),
    (dict(source=HUB, revision=1), TypeError, "revision must be of type str, got int"),
    (dict(version=1), ValueError, "version must be None unless source is .*Hub, .*source None"),
    (dict(source=".", revision="v1"), ValueError, "revision must be None unless .*source '.'"),
    (dict(trust_remote_code="yes"), TypeError, "trust_remote_code .*repositories.*got 'yes'"),
])  # fmt: skip
def test_sources_of_a_mapping(kernel, given, error, words):
    with pytest.raises(error, match=words):
        kernel.layer_mapping(**given)


def test_a_mapping_names_what_it_knows(kernel):
    pytest.importorskip("kernels")
    names = list(kernel.layer_mapping())
    assert all(f'"{name}"' in kernel.layer_mapping.__doc__ for name in names)
    mapping = kernel.layer_mapping(names=("SwiGLUMLP",), devices={"cpu"})
    assert [str(device.type) for device in mapping["SwiGLUMLP"]] == ["cpu"]
