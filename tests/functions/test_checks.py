"""Bad input: the message names the argument, what was expected and what came."""

from pathlib import Path

import pytest
import torch
from argument_cases import CASES
from conftest import assert_close, gdn_inputs, relative_error
from problems import PROBLEMS, WRITTEN, arguments, writing

pytestmark = pytest.mark.kernels_ci


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


def module(x):
    return lambda kernel: kernel.FusedSwiGLU(4, 6)(x)


def of_case(function, place=0, **more):
    """A call of argument_cases.py, with changes."""
    cases = [case for case in CASES if case.function == function]
    return lambda **changes: (
        lambda kernel: getattr(kernel, function)(**{**cases[place].make(kernel), **more, **changes})
    )


def replay(**changes):
    """Three rows that decode a token on a ring."""

    def call(kernel):
        x = gdn_inputs(3, 1, 2, 4, 16, 8)
        x["initial_state"] = x["initial_state"].mT.contiguous()
        ring = kernel.make_ring(x["initial_state"], 2, torch.float32, rows=6)
        x.update(ring=ring, cursor=torch.zeros(3, 2, dtype=torch.int32))
        return kernel.replay_gated_delta_rule(**{**x, **changes})

    return call


def GRADIENT(name):
    return f"{name}.* must not require a gradient.*in place"


CHANNELS = dict(use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None)
kda = of_case("chunk_kda", **CHANNELS)
kda_steps = of_case("fused_recurrent_kda", **CHANNELS, out=None, initial_state=None)
NO_BIAS = dict(b_gate=None, b_up=None)
swiglu, multiplied = of_case("fused_swiglu", **NO_BIAS), of_case("silu_mul")
mlp = of_case("fused_swiglu_mlp", **NO_BIAS, b_down=None)
experts = of_case("fused_experts", b_gate_up=None, b_down=None, limit=None)
conv = of_case("causal_conv1d_fn", bias=None, seq_idx=None)
update = of_case("causal_conv1d_update", bias=None, out=None)
norm = of_case("rms_norm_gated", gate=torch.full((2, 4), 2.0))
decode, latent = of_case("attention_with_kvcache"), of_case("latent_attention_with_kvcache")
turned, rms, topk = map(of_case, ("fused_latent_norm_rope", "rms_norm", "fused_topk"))
loss, materialise = map(of_case, ("linear_cross_entropy", "materialise_ring"))


def rotary(**changes):
    x = arguments(PROBLEMS["fused_qk_norm_rope"], torch.float32, T=3)
    return lambda kernel: kernel.fused_qk_norm_rope(**{**x, **changes})


def cached(**changes):
    cache = torch.ones(2, 2, 9, 16)
    given = {"v": torch.ones(2, 3, 2, 16), "key_cache": cache, "value_cache": cache.clone()}
    return rotary(**{**given, "cache_position": torch.tensor(0), **changes})


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


POOL = dict(initial_state=torch.zeros(3, 4, 6, 5))
PAIR = dict(**POOL, state_indices=ints(0, 2))
SLOTS = torch.arange(16).view(2, 8)
SHORT_DRAFTS = dict(
    x=torch.ones(2, 3, 3), conv_state=torch.ones(5, 3, 5), conv_state_indices=ints(4, 0),
    num_accepted_tokens=ints(1, 3),
)  # fmt: skip
DRAFTS = dict(
    initial_state=torch.zeros(16, 4, 6, 5), state_indices=SLOTS, inplace_final_state=True,
    num_accepted_tokens=ints(1, 8),
)  # fmt: skip
WIDE = {name: torch.ones(2, 8, 2, 300) for name in "qk"}
ONES = torch.ones
# (call, what is changed, its message): rules between arguments, and ends of ranges; what one
# argument may be of itself is tests/functions/test_every_argument.py's
BAD = [
    (chunk, WIDE, "q and k .* 1 to 256, got 300"),
    *[(call, dict(allow_neg_eigval=True), "allow_neg_eigval must be False unless .*sigmoid")
      for call in (chunk, recurrent, kda, kda_steps, replay)],
    (recurrent, dict(null_index=1), "null_index must be -1 or 0, .* got 1"),
    (chunk, dict(chunk_size=32), "chunk_size must be 64, .* got 32"),
    (kda, dict(chunk_size=16), "chunk_size must be 32 or 64, got 16"),
    (chunk, dict(checkpoint_every=100), "checkpoint_every .* multiple of 64, got 100"),
    (chunk, dict(use_gate_in_kernel=True), "A_log must be given when use_gate_in_kernel .* None"),
    *[(call, dict(use_gate_in_kernel=True), "A_log must be given .* without lower_bound")
      for call in (kda, kda_steps)],
    (chunk, dict(cu_seqlens=ints(0, 5, 3, 8), initial_state=None),
     "cu_seqlens must not decrease, got 3 after 5"),
    (chunk, dict(cu_seqlens=ints(0, 9)), "cu_seqlens must end with at most 8, the tokens, got 9"),
    (chunk, dict(cu_seqlens=ints(0, 8), **{n: ONES(2, 8, 2, 6) for n in "qk"}, v=ONES(2, 8, 4, 5),
     g=ONES(2, 8, 4), beta=ONES(2, 8, 4)), r"q must have shape \[1, T, .* cu_seqlens .* batch 2"),
    (chunk, {**PAIR, "state_indices": ints(0, 3)}, "state_indices must be below the 3 rows .* 3"),
    (chunk, {**PAIR, "state_indices": ints(1, 1)}, r"state_indices must not .* twice, got \[1, 1"),
    (chunk, dict(initial_state=None, state_indices=ints(0, 1)), "initial_state .* the state pool"),
    (recurrent, dict(initial_state=None, inplace_final_state=True),
     "initial_state must be given when inplace_final_state is True, got None"),
    (kda_steps, dict(inplace_final_state=True), "initial_state must be given"),
    (recurrent, dict(inplace_final_state=True, output_all_states=True),
     "output_all_states must be False"),
    (recurrent, dict(output_state_indices=ints(0, 1), inplace_final_state=True),
     "state_indices must be given when output_state_indices is"),
    (recurrent, {**POOL, "state_indices": ints(0, 1)}, "inplace_final_state must be True when"),
    *[(recurrent, {**DRAFTS, **changes}, says) for changes, says in (
        (dict(num_accepted_tokens=ints(0, 1)), r"num_accepted_tokens must be 1 to 8, got \[0, 1"),
        (dict(num_accepted_tokens=ints(1, 9)), r"num_accepted_tokens must be 1 to 8, got \[1, 9"),
        (dict(output_state_indices=ints(0, 1)), "output_state_indices must be None when num_acc"),
        (dict(inplace_final_state=False), "inplace_final_state must be True when num_accepted"),
        (dict(cu_seqlens=ints(0, 8), state_indices=SLOTS[:1, :7], num_accepted_tokens=ints(1)),
         "state_indices must have a column for each token of a sequence, 8, got 7"),
    )],
    *[(update, {**SHORT_DRAFTS, **changes}, says) for changes, says in (
        (dict(conv_state_indices=ints(0, 5)), "conv_state_indices must be below the 5 rows .* 5"),
        (dict(conv_state_indices=ints(3, 3)), "conv_state_indices must not name .* twice"),
        (dict(num_accepted_tokens=ints(0, 1)), "num_accepted_tokens must be 1 to 3"),
        (dict(num_accepted_tokens=ints(4, 1)), "num_accepted_tokens must be 1 to 3"),
        (dict(x=ONES(2, 3, 4)), "conv_state must hold 6 columns for 4 tokens .* got 5"),
    )],
    (recurrent, dict(out=ONES(1, 8, 4, 5).expand(2, -1, -1, -1)),
     r"out must have memory for each element, got strides \[0, 20"),
    # forward only, and what is written in place
    (opt, dict(q=wanted(2, 8, 2, 6)), "q must not .*: chunk_gated_delta_rule_opt is forward"),
    (vk, dict(v=wanted(2, 8, 4, 5)), "v must not .*: chunk_gated_delta_rule_opt_vk is forward"),
    (replay, dict(g=wanted(3, 1, 4)), "g must not require a gradient"),
    (update, dict(out=wanted(2, 3)), GRADIENT("out")),
    (vk, dict(o=wanted(2, 8, 4, 5)), GRADIENT("o")),
    (cached, dict(q=wanted(2, 3, 4, 16)), "q must not require a gradient where caches are given"),
    (materialise, dict(state=wanted(2, 4, 5, 6)),
     "materialise_ring is forward only; call it under torch.no_grad"),
    (turned, dict(q=wanted(2, 3, 4, 12)), "q must not require a gradient as q is written"),
    # the functions of aiter
    (vk, dict(initial_state=ONES(3, 4, 5, 6), initial_state_indices=ints(0, 3)),
     "initial_state_indices must be below the 3 rows"),
    (vk, dict(initial_state=ONES(3, 4, 5, 6), initial_state_indices=ints(1, 1)),
     "initial_state_indices must not name .* twice"),
    (vk, dict(initial_state_indices=ints(0, 1)), "initial_state must be the state pool when"),
    (vk, dict(initial_state_indices=ints(0, 1), inplace_final_state=False), "initial_state .*pool"),
    (vk, dict(use_chunk_hip=True), "use_chunk_hip must be False.*got True"),
    (vk, dict(cu_seqlens=ints(0, 1, 9), num_decodes=3), "num_decodes must be 0 to 2, .* got 3"),
    (vk, dict(inplace_final_state=True), "initial_state_indices must be given when inplace"),
    (kda, dict(return_intermediate_states=True), "return_intermediate_states must be False"),
    # the layer's surroundings, attention, norms
    (conv, dict(weight=ONES(3, 9)), "weight must have 2 to 8 taps, got 9"),
    (update, dict(conv_state=ONES(2, 3, 2)), "conv_state must hold at least the 3 inputs .* 2"),
    (rotary, dict(sin=None), "sin must be given where cos is, got None"),
    (rotary, dict(cos=ONES(3, 3, 8), sin=ONES(3, 3, 8)), "cos must have batch 2, .* or 1, got 3"),
    (rotary, dict(cos=ONES(1, 3, 7), sin=ONES(1, 3, 7)), "cos .* even .* up to 16, got 7"),
    (rotary, dict(cos=ONES(1, 3, 18), sin=ONES(1, 3, 18)), "cos .* even .* up to 16, got 18"),
    (rotary, dict(interleaved=True, cos=ONES(1, 3, 9), sin=ONES(1, 3, 9)), "cos .* 8 pairs .* 9"),
    (cached, dict(cache_position=torch.tensor(7)), "cache_position must be 0 to 6, .* got 7"),
    (cached, dict(cache_position=torch.tensor(-1)), "cache_position must be 0 to 6, .* got -1"),
    (cached, dict(key_cache=ONES(2, 2, 2, 16), value_cache=ONES(2, 2, 2, 16)),
     "key_cache must have at least 3 slots, .* got 2"),
    (decode, dict(cache_seqlens=torch.tensor(8)), "cache_seqlens must be 0 to 7, .* got 8"),
    (latent, dict(cache_seqlens=torch.tensor(8)), "cache_seqlens must be 0 to 7, .* got 8"),
    (latent, dict(latents=ONES(2, 1, 0, 6), rotated=ONES(2, 1, 0, 4)), "at least one slot, got 0"),
    (turned, dict(sin=None), "sin must be given where cos is"),
    (latent, dict(weight_scale=ONES(1, 2)), r"columns/128\] = \[1, 1\], got \[1, 2\]"),
    (turned, dict(cache_position=None), "cache_position must be given where latent_cache is"),
    (turned, dict(cache_position=torch.tensor(5)), "cache_position must be 0 to 4"),
    (rms, dict(after=True, residual=None), "residual must be given with after=True, got None"),
    (rms, dict(offset=1.0), 'offset must be 0 with casting_mode "llama", got 1.0'),
    (loss, dict(target=ints(0, 3)), "target must be -100 or 0 to 2"),
    (loss, dict(label_smoothing=1.5), "label_smoothing must be 0 to 1"),
    (topk, dict(top_k=6), "top_k must be 1 to ., the number of experts.* got 6"),
    # rings
    (replay, dict(cursor=torch.zeros(2, 3).int().T), "cursor must be contiguous"),
    (replay, dict(cursor=torch.full((3, 2), 6).int()), "first rows of 0 and counts of 0 to 5, as"),
    (replay, {"q": ONES(3, 2, 2, 16), "k": ONES(3, 2, 2, 16), "v": ONES(3, 2, 4, 8),
              "g": -ONES(3, 2, 4), "beta": ONES(3, 2, 4)},
     "q must have a number of tokens T of 1, the ring's max_tokens, got 2"),
    (replay, dict(state_indices=ints(0, 1, 3)), "state_indices must be below"),
    (replay, dict(state_indices=ints(0, 1, 1)), "state_indices must not name"),
    # modules
    (module, dict(x=ONES(2, 5)), r"x must have shape \[..., 4\], got \[2, 5\]"),
]  # fmt: skip


@pytest.mark.parametrize("call, changes, says", BAD, ids=lambda value: None)
def test_bad_input(kernel, call, changes, says):
    with pytest.raises(ValueError, match=f"(?s){says}") as caught:
        call(**changes)(kernel)
    assert type(caught.value) is ValueError


def test_linears_with_a_bias(kernel):
    with pytest.raises(ValueError, match="gate must have no bias"):
        kernel.FusedSwiGLU.from_linears(torch.nn.Linear(4, 6), torch.nn.ReLU())


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_has_memory_for_each_element(kernel, name):
    """States, caches and outputs whose rows share one memory."""
    for argument in WRITTEN[name]:
        function, given = writing(kernel, name)
        given[argument] = given[argument][:1].expand_as(given[argument])
        with torch.no_grad():
            with pytest.raises(ValueError, match=f"^{argument} must have memory for each"):
                function(**given)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_may_not_require_a_gradient(kernel, name):
    for argument in WRITTEN[name]:
        function, given = writing(kernel, name)
        given[argument].requires_grad_()
        with pytest.raises(ValueError, match=f"^{argument} must not require a gradient"):
            function(**given)


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


RULES = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")


@pytest.mark.parametrize("name", RULES)
def test_shapes_alone(kernel, name):
    """Tensors on the meta device, which has no autocast to ask for."""
    x = {key: y.to("meta") for key, y in gdn_inputs(2, 8, 2, 4, 6, 5).items()}
    o, state = getattr(kernel, name)(**x, output_final_state=True)
    assert o.device.type == "meta" and o.shape == (2, 8, 4, 5) and state.shape == (2, 4, 6, 5)


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


@pytest.mark.parametrize("model", [None, [], "x", torch.nn.Linear])
def test_models_that_are_none(kernel, model):
    for function in (kernel.kernelize, kernel.restore, kernel.decorate):
        with pytest.raises(TypeError, match="model must be .*torch.nn.Module, got"):
            function(model)


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
        with pytest.raises(ValueError, match="names must be a list of '.*'SwiGLUMLP'.*, got"):
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
