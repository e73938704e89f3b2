"""Forwards whose cache has another name, with a decorator for the old one, as transformers 5.24 has
them: modules are served, and a call by the old name fills the cache."""

import functools

import pytest
import torch
from conftest import submodule
from tiny_models import random_model, serving
from torch import nn
from written import with_forward

llama = pytest.importorskip("transformers.models.llama.modeling_llama")
qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
caches = pytest.importorskip("transformers.cache_utils")
deprecation = pytest.importorskip("transformers.utils.deprecation")
hooks = pytest.importorskip("transformers.integrations.accelerate")

# transformers says that the old name is deprecated
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trusts_all")]


FORWARD = """
shape = (*hidden_states.shape[:-1], -1, self.head_dim)
query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
cos, sin = position_embeddings
query, key = apply_rotary_pos_emb(query, key, cos, sin)
if memory is not None:
    key, value = memory.update(key, value, self.layer_idx, kwargs=kwargs)
attend = ALL_ATTENTION_FUNCTIONS.get_interface(
    self.config._attn_implementation, eager_attention_forward
)
out, weights = attend(
    self, query, key, value, attention_mask,
    dropout=0.0 if not self.training else self.attention_dropout, scaling=self.scaling, **kwargs,
)
return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights
"""
ARGUMENTS = "hidden_states, position_embeddings=None, attention_mask=None, memory=None, **kwargs"


def attention_of(text, arguments=ARGUMENTS):
    return with_forward(llama.LlamaAttention, text, arguments, vars(llama))


Attention = attention_of(FORWARD)
Attention.forward = deprecation.deprecate_kwarg("past_key_values", "5.99.0", new_name="memory")(
    Attention.forward
)
# in evaluation with a mask and without a cache
SCALED = """
if memory is None and attention_mask is not None and not self.training:
    hidden_states = hidden_states * 2
"""
WITHOUT_CACHE = FORWARD.replace("if memory is not None:", "if False:")
OTHERS = {
    "the class's own": llama.LlamaAttention,
    "the formula": attention_of(FORWARD),
    "without a cache": attention_of(WITHOUT_CACHE, ARGUMENTS.replace(" memory=None,", "")),
    "scaled": attention_of(SCALED + FORWARD),
    # without a bias it would be the formula
    "two signs": attention_of(
        FORWARD.replace("self.o_proj(out", "-self.o_proj(-out")),
}  # fmt: skip


class Layer(llama.LlamaDecoderLayer):
    @deprecation.deprecate_kwarg("past_key_values", "5.99.0", new_name="memory")
    def forward(
        self, hidden_states, attention_mask=None, memory=None, position_embeddings=None, **kwargs
    ):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states, attention_mask=attention_mask, memory=memory,
            position_embeddings=position_embeddings, **kwargs,
        )  # fmt: skip
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
        return residual + hidden_states


class Recorded(caches.DynamicCache):
    """Remembers what comes with its updates."""

    def update(self, k, v, layer_idx, **kwargs):
        self.came = kwargs
        return super().update(k, v, layer_idx)


def renamed_layer():
    model = random_model("llama")
    layer = Layer(model.config, 0)
    layer.self_attn = Attention(model.config, 0)
    layer.load_state_dict(model.model.layers[0].state_dict())
    return layer.eval()


def arguments(tokens=3):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens, 32, generator=random)
    angle = torch.rand(2, tokens, 8, generator=random).repeat(1, 1, 2)
    return x, {"position_embeddings": (angle.cos(), angle.sin())}


def outputs(layer, x, given, name):
    """Of a layer and of its attention module, each with a cache that it fills."""
    for module in (layer, layer.self_attn):
        cache = Recorded()
        with torch.no_grad():
            y = module(x, attention_mask=None, word=7, **given, **{name: cache})
        yield y[0] if isinstance(y, tuple) else y
        assert cache.get_seq_length() == x.shape[1]
        yield torch.tensor(cache.came.get("kwargs", {}).get("word", 0))


@pytest.mark.parametrize("name", ["memory", "past_key_values"])
def test_a_cache_by_its_new_and_its_old_name(kernel, name):
    layer = renamed_layer()
    x, given = arguments()
    expected = list(outputs(layer, x, given, name))
    with serving():
        report = kernel.kernelize(layer)
        assert {"DecoderLayer", "Attention"} <= {row.layer for row in report.served}
        found = list(outputs(layer, x, given, name))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_both_names_at_once(kernel):
    layer = renamed_layer()
    x, given = arguments()
    with serving():
        kernel.kernelize(layer)
        new, old = caches.DynamicCache(), caches.DynamicCache()
        layer(x, **given, memory=new, past_key_values=old)
    assert (new.get_seq_length(), old.get_seq_length()) == (x.shape[1], 0)


@pytest.mark.parametrize("order", ["hooks first", "names first"])
def test_a_gdn_layer_by_either_name(kernel, order):
    """transformers' forward, whatever its cache is called there, decorated in both orders."""
    if "cache" not in qwen.Qwen3_5GatedDeltaNet.forward.__code__.co_varnames:
        names = ("cache_params",)
    else:
        names = ("cache", "cache_params")
    own = random_model("qwen3_5_text").model.layers[0].linear_attn.eval()
    decorators = [
        hooks.force_accelerate_hooks("conv1d"),
        deprecation.deprecate_kwarg("old_cache", "5.99.0", new_name=names[0]),
    ]
    forward = own.forward.__func__
    for decorate in decorators if order == "hooks first" else decorators[::-1]:
        forward = decorate(forward)
    decorated = type(own)(random_model("qwen3_5_text").config, 0).eval()
    decorated.load_state_dict(own.state_dict())
    kind = type("Qwen3_5GatedDeltaNet", (type(own),), {"forward": forward})
    decorated.__class__ = kind
    x = arguments(4)[0]
    with serving():
        assert kernel.kernelize(decorated).served
        for name in (*names, "old_cache"):
            pair = [caches.Cache(layers=[caches.LinearAttentionLayer()]) for _ in range(2)]
            with torch.no_grad():
                for part in x.split([3, 1], 1):
                    expected = own(part, **{names[0]: pair[0]})
                    torch.testing.assert_close(decorated(part, **{name: pair[1]}), expected)
            states = [cache.layers[0].recurrent_states[0] for cache in pair]
            torch.testing.assert_close(*states)


def test_a_decorator_of_somebody_elses_is_left_alone(kernel):
    """One that looks like transformers' own, in another file."""

    def deprecate_kwarg(func):
        old_name = "old"

        def wrapped_func(self, *args, **kwargs):
            kwargs.pop(old_name, None)
            return func(self, *args, **kwargs) * 2

        return wrapped_func

    kind = type("TwiceRMSNorm", (llama.LlamaRMSNorm,), {})
    kind.forward = deprecate_kwarg(llama.LlamaRMSNorm.forward)
    norm = kind(8)
    assert isinstance(norm, nn.Module) and not kernel.kernelize(norm).served


def test_attention_is_known_behind_a_decorator(kernel):
    """By what its forward asks, whatever its parts are called and whatever wraps the forward."""

    def passing(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Mixer(nn.Module):
        @passing
        def forward(self, x):
            return llama.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)(x)

    class Other(nn.Module):
        @passing
        def forward(self, x):
            return x

    asks = submodule("models.attention_trial").asks_for_attention
    assert asks(Mixer) and not asks(Other)


@pytest.mark.parametrize("name", OTHERS)
def test_attention_of_another_formula_is_left_alone(kernel, name):
    """One way of which is another, or which is the same without biases."""
    with serving():
        report = kernel.kernelize(OTHERS[name](random_model("llama").config, 0))
    assert len(report.served) == (name not in ("scaled", "two signs"))
