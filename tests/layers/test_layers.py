"""The layers: the Hub's rules, their flags, and the same values as what they replace."""

import functools
import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICES, assert_close, captured, gdn_inputs, submodule
from tiny_models import GDN, config_of, pair, random_model, serving, tokens
from torch import nn

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
on_every_device = pytest.mark.parametrize("device", DEVICES)


def modeling(name: str):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


# our layers, and the module class or function of transformers that each replaces
REPLACED = {
    "FusedRMSNormGated": ("qwen3_5", "Qwen3_5RMSNormGated"),
    "OlmoHybridGatedDeltaNet": ("olmo_hybrid", "OlmoHybridGatedDeltaNet"),
    "Qwen3NextGatedDeltaNet": ("qwen3_next", "Qwen3NextGatedDeltaNet"),
    "Qwen3_5GatedDeltaNet": ("qwen3_5", "Qwen3_5GatedDeltaNet"),
    "RMSNorm": ("llama", "LlamaRMSNorm"),
    "RMSNormZeroCentered": ("qwen3_5", "Qwen3_5RMSNorm"),
    "SwiGLUGateUp": ("phi3", "Phi3MLP"),
    "SwiGLUMLP": ("llama", "LlamaMLP"),
    "causal_conv1d_fn": ("qwen3_5", "causal_conv1d_fn"),
    "causal_conv1d_update": ("qwen3_5", "causal_conv1d_update"),
    "chunk_gated_delta_rule": ("qwen3_5", "torch_chunk_gated_delta_rule"),
    "chunk_kimi_delta_attention": ("kimi_linear", "chunk_kimi_delta_attention"),
    "recurrent_gated_delta_rule": ("qwen3_5", "torch_recurrent_gated_delta_rule"),
    "recurrent_kimi_delta_attention": ("kimi_linear", "recurrent_kimi_delta_attention"),
    "rotary_pos_emb": ("llama", "apply_rotary_pos_emb"),
    "SoftmaxTopKRouter": ("qwen3_5_moe", "Qwen3_5MoeTopKRouter"),
}
every_layer = pytest.mark.parametrize("name", REPLACED)


def replaced(name: str) -> type:
    model, attribute = REPLACED[name]
    found = getattr(modeling(model), attribute)
    return found if isinstance(found, type) else type(found)


def test_the_list_is_whole(kernel):
    others = "SwiGLUGateUpLayout", "ForCausalLMLoss"  # which replace no class or function
    assert sorted([*REPLACED, *others]) == sorted(kernel.layers.__all__)


@every_layer
def test_rules_of_the_hub(kernel, kernels_of_transformers, name):
    """No constructor, nothing but forward and two flags, the parameters of what is replaced."""
    layer = getattr(kernel.layers, name)
    assert layer.__init__ is nn.Module.__init__
    assert {name for name in dir(layer) if name not in dir(nn.Module)} == {
        "has_backward", "can_torch_compile"
    }  # fmt: skip
    ours, theirs = (inspect.signature(c.forward).parameters for c in (layer, replaced(name)))
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]
    if name != "SwiGLUGateUp":  # transformers has no one name for its argument
        names = ["cache_params" if n == "cache" else n for n in theirs]  # a layer takes both names
        assert list(ours) == names
    validate = pytest.importorskip("kernels.layer.layer")._validate_layer
    validate(check_cls=replaced(name), cls=layer, repo=name)


class MLP(nn.Module):
    def __init__(self, act_fn, bias=False, fused=False):
        super().__init__()
        if fused:
            self.gate_up_proj = nn.Linear(16, 48, bias=bias)
        else:
            self.gate_proj = nn.Linear(16, 24, bias=bias)
            self.up_proj = nn.Linear(16, 24, bias=bias)
        self.down_proj = nn.Linear(24, 16, bias=bias)
        self.act_fn = act_fn

    def forward(self, x):
        if hasattr(self, "gate_up_proj"):
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up)


ACTIVATIONS = {
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "gelu tanh": functools.partial(nn.GELU, approximate="tanh"),
    "gelu": nn.GELU,  # not one of ours: the formula of the modules
    "of transformers": lambda: transformers.activations.ACT2FN["gelu_pytorch_tanh"],
}


@on_every_device
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_mlp_activations_and_gradients(kernel, device, name, bias):
    torch.manual_seed(0)
    mlp = MLP(ACTIVATIONS[name](), bias).to(device)
    x = torch.randn(2, 3, 16, device=device, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    with serving(device):
        out, ref = kernel.layers.SwiGLUMLP.forward(mlp, x), mlp(x)
    assert_close(out, ref)
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (out, ref)]
    for got, expected in zip(*grads):
        assert_close(got, expected)


@on_every_device
def test_mlp_under_autocast(kernel, device):
    mlp = MLP(nn.SiLU()).to(device)
    x = torch.randn(4, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16), serving(device):
        out, ref = kernel.layers.SwiGLUMLP.forward(mlp, x), mlp(x)
    assert out.dtype == ref.dtype == torch.bfloat16
    assert_close(out, ref)


def test_mlp_raises_what_the_modules_raise(kernel):
    """Dtypes that do not fit: the error of nn.Linear, as before."""
    mlp = MLP(nn.SiLU()).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="same dtype"):
        kernel.layers.SwiGLUMLP.forward(mlp, torch.randn(4, 16))


@on_every_device
@pytest.mark.parametrize("repeated", [False, True], ids=["5.23", "5.22"])
@pytest.mark.parametrize("name, T", [("chunk", 70), ("recurrent", 3)])
def test_rules_take_what_transformers_sends(kernel, device, name, T, repeated):
    """Heads repeated by the caller (5.22) or not (5.23); keyword arguments of the whole model."""
    x = gdn_inputs(2, T, 2, 4, 16, 8, device=device)
    q, k = (y.repeat_interleave(2, 2) for y in (x["q"], x["k"]))
    rest = x["v"], x["g"], x["beta"]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    reference = kernel.chunk_gated_delta_rule  # checked against transformers in test_reference.py
    ref = reference(q, k, *rest, initial_state=x["initial_state"], **options)
    if not repeated:
        q, k = x["q"], x["k"]
    layer = getattr(kernel.layers, f"{name}_gated_delta_rule")()
    out = layer(
        q, k, *rest, initial_state=x["initial_state"], cu_seqlens=None, use_cache=True,
        output_router_logits=False, max_length_q=None, **options,
    )  # fmt: skip
    for got, expected in zip(out, ref):
        assert_close(got, expected)


@on_every_device
def test_packed_functions(kernel, device):
    lengths = torch.tensor([0, 5, 5, 30], dtype=torch.int32, device=device)
    index = torch.tensor([[0] * 5 + [2] * 25], device=device)
    x = gdn_inputs(1, 30, 2, 4, 16, 8, device=device)
    args = [x[n] for n in ("q", "k", "v", "g", "beta")]
    rule = kernel.layers.chunk_gated_delta_rule()
    out, _ = rule(*args, cu_seqlens=lengths, seq_idx=index)
    parts = [rule(*(y[:, a:b] for y in args))[0] for a, b in ((0, 5), (5, 30))]
    assert_close(out, torch.cat(parts, 1))
    conv = kernel.layers.causal_conv1d_fn()
    u, w = torch.randn(1, 6, 30, device=device), torch.randn(6, 4, device=device)
    ref = torch.cat([conv(u[..., :5], w), conv(u[..., 5:], w)], -1)
    for packing in ({"seq_idx": index}, {"cu_seq_lens_q": lengths}):
        assert_close(conv(u, w, None, None, use_cache=False, **packing), ref)
    # tokens that a cache puts in front belong to the first sequence
    before = torch.randn(1, 6, 4, device=device)
    out = conv(torch.cat([before, u], -1), w, seq_idx=index)[..., -30:]
    first = conv(torch.cat([before, u[..., :5]], -1), w)[..., 4:]
    assert_close(out, torch.cat([first, conv(u[..., 5:], w)], -1))


@on_every_device
@pytest.mark.parametrize("activation", ["silu", "gelu", None])
def test_convolutions(kernel, device, activation):
    """Any activation that a config can name; the state is written in place."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 6, 9, device=device), torch.randn(6, 4, device=device)
    bias, state = torch.randn(6, device=device), torch.zeros(2, 6, 4, device=device)
    act = transformers.activations.ACT2FN[activation] if activation else (lambda y: y)
    ref = act(F.conv1d(x, w[:, None], bias, padding=3, groups=6)[..., :9])
    layers = kernel.layers
    assert_close(layers.causal_conv1d_fn()(x, w, bias, activation=activation), ref)
    update = layers.causal_conv1d_update()
    out = [update(x[..., t : t + 1], state, w, bias, activation) for t in range(9)]
    assert_close(torch.cat(out, -1), ref)
    assert torch.equal(state, x[..., -4:])


@on_every_device
@pytest.mark.parametrize("activation", ["silu", "sigmoid", "gelu"])
def test_norm(kernel, device, activation):
    norm = modeling("qwen4_exp").Qwen4ExpTextRMSNormGated(8, activation=activation).to(device)
    nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 5, 8, device=device), torch.randn(2, 5, 8, device=device)
    forward = inspect.unwrap(type(norm).forward)
    assert_close(kernel.layers.FusedRMSNormGated.forward(norm, x, gate), forward(norm, x, gate))


def test_a_norm_is_known_in_any_default_dtype(kernel):
    """Whatever stands there when a class is first met."""
    is_gated_norm, own = submodule("layers.delta").is_gated_norm, torch.get_default_dtype()
    for dtype in (torch.bfloat16, torch.float64):
        kind = type("Mine", (modeling("qwen3_5").Qwen3_5RMSNormGated,), {})
        torch.set_default_dtype(dtype)
        try:
            assert is_gated_norm(kind(16))
        finally:
            torch.set_default_dtype(own)


def test_recording_the_past(kernel):
    """Assisted decoding keeps whole convolution states until it crops them."""
    model, served = pair(kernel, "qwen3_5_text", "cpu")
    ids = tokens(1, 12)
    outs = []
    for m in (model, served):
        with torch.no_grad():
            cache = transformers.DynamicCache(config=m.config)
            cache.activate_past_recording()
            parts = [m(part, past_key_values=cache).logits for part in ids.split([5, 1, 6], 1)]
            outs.append((torch.cat(parts, 1), cache.layers[0].conv_states[0]))
    for got, expected in zip(*outs[::-1]):
        assert_close(got, expected)


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear"])
def test_gradients_of_a_token(kernel, monkeypatch, name):
    """Over a cache: by chunks, of which kernels have the gradient; a frozen model has none."""
    model, ids, delta, found = random_model(name), tokens(2, 9), submodule("layers.delta"), []
    kernel.kernelize(model, only=["gdn", "kda"])

    def step():
        with torch.no_grad(), serving():
            cache = model(ids[:, :8], use_cache=True).past_key_values
        with serving() as record:
            loss = model(ids[:, 8:], past_key_values=cache).logits.square().sum()
        return loss, {kind for kind in record if "chunk" in kind or "recurrent" in kind}

    for form in ("chunk", "recurrent"):
        loss, kinds = step()
        assert len(kinds) == 1 and all(form in kind for kind in kinds), kinds
        found.append(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))
        monkeypatch.setattr(delta, "needs_grad", lambda tensors: False)
    for a, b in zip(*found):
        assert (a - b).norm() <= 1e-4 * b.norm()
    monkeypatch.undo()
    model.requires_grad_(False)
    assert "recurrent" in step()[1].pop()


def compiled(module, backend="aot_eager_decomp_partition"):
    """In one graph. The backend traces, splits and decomposes as Inductor, but compiles nothing."""
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend)


@on_every_device
def test_decoding_compiles_in_one_graph(kernel, device):
    """A step with states in a static cache, written in place."""
    _, served = pair(kernel, "qwen3_5_text", device)
    layer = next(m for m in served.modules() if hasattr(m, "conv1d"))
    backend = "inductor" if device == "cuda" else "aot_eager"  # minutes on a small CPU
    config = config_of("qwen3_5_text")
    x = torch.randn(2, 12, GDN["linear_key_head_dim"] * 2, device=device)
    results = []
    for step in (layer, compiled(layer, backend)):
        cache = transformers.StaticCache(config=config, max_cache_len=32)
        with torch.no_grad():
            parts = [layer(x[:, :10], cache_params=cache)]
            parts += [step(x[:, t : t + 1], cache_params=cache) for t in (10, 11)]
        results.append(torch.cat(parts, 1))
    assert_close(*results)


class Decoding:
    """A served GDN layer on the GPU; tokens that a prompt of 10 of them begins."""

    def __init__(self, kernel, name):
        self.model = random_model(name, "cuda", hidden_size=64).bfloat16()
        assert kernel.kernelize(self.model).served
        self.layer = next(m for m in self.model.modules() if hasattr(m, "conv1d"))
        self.x = torch.randn(2, 20, 64, device="cuda", dtype=torch.bfloat16)

    def started(self, kind=transformers.DynamicCache, **options):
        cache = kind(config=self.model.config, **options)
        self.layer(self.x[:, :10], cache_params=cache)
        return cache

    def tokens(self):
        return self.x[:, 10:].split(1, 1)


on_every_gdn = pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "olmo_hybrid"])


@pytest.mark.gpu
@on_every_gdn
def test_decoding_with_less_overhead(kernel, name):
    """torch.compile captures the step in CUDA graphs of its own, and skips none."""
    counters, case, results = torch._dynamo.utils.counters, Decoding(kernel, name), []
    torch._dynamo.reset()
    counters.clear()
    compiled_step = torch.compile(case.layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for step in (case.layer, compiled_step):
            cache = case.started(transformers.StaticCache, max_cache_len=32)
            outs = [step(token, cache_params=cache).clone() for token in case.tokens()]
            results.append(torch.cat(outs, 1))
    assert_close(*results)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
@on_every_gdn
def test_decoding_in_a_cuda_graph(kernel, name):
    """A captured step replays as the step runs: nothing waits for the host, states stay put."""
    case, outs = Decoding(kernel, name), []
    with torch.no_grad():
        cache = case.started()
        ref = torch.cat([case.layer(token, cache_params=cache) for token in case.tokens()], 1)
        given, cache = case.tokens()[0].clone(), case.started()
        states = cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]
        before = [state.clone() for state in states]
        case.layer(given, cache_params=cache)
        graph, y = captured(case.layer, given, cache_params=cache)
        for state, first in zip(states, before):
            state.copy_(first)
        for token in case.tokens():
            given.copy_(token)
            graph.replay()
            outs.append(y.clone())
    assert torch.equal(torch.cat(outs, 1), ref)


NORMS = {  # the classes that round in each way, and the layer that they ask for
    "LlamaRMSNorm": ("llama", "RMSNorm"),
    "OlmoHybridRMSNorm": ("olmo_hybrid", "RMSNorm"),
    "NemotronHRMSNorm": ("nemotron_h", "RMSNorm"),
    "DeepseekV4RMSNorm": ("deepseek_v4", "RMSNorm"),
    "Qwen3_5RMSNorm": ("qwen3_5", "RMSNormZeroCentered"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_has_the_bits_of_its_class(kernel, kind, dtype):
    model, layer = NORMS[kind]
    own = getattr(modeling(model), kind)
    if getattr(own, "kernel_layer_name", layer) != layer:
        pytest.skip("this transformers has another name for it")
    norm, x = own(24, eps=0.01).to(dtype), torch.randn(2, 5, 24, dtype=dtype)
    with torch.no_grad():
        norm.weight.normal_()
    x.requires_grad_()
    expected = norm(x)
    dispatch = submodule("runtime.dispatch")
    with dispatch.force("reference"), dispatch.served() as record:
        got = getattr(kernel.layers, layer).forward(norm, x)
    assert set(record) == {"rms_norm_fwd"}
    assert got.dtype is expected.dtype and torch.equal(got, expected)
    wanted = torch.autograd.grad(expected.float().square().sum(), x)[0]
    assert_close(torch.autograd.grad(got.float().square().sum(), x)[0], wanted)


def test_a_norm_with_another_formula_keeps_its_forward(kernel, monkeypatch):
    own, dispatch = modeling("llama").LlamaRMSNorm, submodule("runtime.dispatch")
    norm, x = own(8), torch.randn(3, 8)
    other = type("Other", (own,), {"forward": lambda self, hidden_states: 3 * hidden_states})(8)
    forward = kernel.layers.RMSNorm.forward
    with dispatch.force("reference"), dispatch.served() as record:
        assert torch.equal(forward(other, x), 3 * x)
        forward(norm, x)
        assert len(record.pop("rms_norm_fwd")) == 1
        monkeypatch.setattr(own, "forward", lambda self, hidden_states: 2 * hidden_states)
        assert torch.equal(forward(norm, x), 2 * x)
    assert not record
