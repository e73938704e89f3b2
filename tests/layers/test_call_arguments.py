"""Served modules take the arguments that their own classes take, and refuse the others as those do:
calls with superfluous, doubled, missing and renamed arguments, of every kind of served module."""

import copy
import inspect

import pytest
import torch
from conftest import submodule
from tiny_models import BASE, random_model, randomise, serving

transformers = pytest.importorskip("transformers")
caches = pytest.importorskip("transformers.cache_utils")
blocks, experts = submodule("models.moe_blocks"), submodule("models.experts")
dispatch = submodule("runtime.dispatch")

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers says which names are deprecated
random = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 32, generator=random)
ANGLE = torch.rand(2, 3, 8, generator=random).repeat(1, 1, 2)
TABLES = ANGLE.cos(), ANGLE.sin()
ROUTED = (X[0], torch.tensor([[0, 1], [1, 2], [3, 0]]), torch.rand(3, 2, generator=random))
LAYER, LINEAR = "model.layers.1", "model.layers.0.linear_attn"
# kind: the model, where the module is, and what a call of it is given
KINDS = {
    "separate MLP": ("llama", LAYER + ".mlp", (X,)),
    "joined MLP": ("phi3", LAYER + ".mlp", (X,)),
    "norm": ("llama", LAYER + ".input_layernorm", (X,)),
    "norm with an offset": ("qwen3_5_text", LAYER + ".input_layernorm", (X,)),
    "GDN of Qwen3.5": ("qwen3_5_text", LINEAR, (X,)),
    "GDN of Qwen3-Next": ("qwen3_next", LINEAR, (X,)),
    "GDN of OLMo": ("olmo_hybrid", LINEAR, (X,)),
    "router": ("qwen3_next", LAYER + ".mlp.gate", (X,)),
    "block": ("qwen3_next", LAYER + ".mlp", (X,)),
    "experts": ("qwen3_next", LAYER + ".mlp.experts", ROUTED),
    "experts by their own loop": ("qwen3_next", LAYER + ".mlp.experts", ROUTED),
    "experts by other names": ("gpt_oss", LAYER + ".mlp.experts", ROUTED),
    "attention": ("llama", LAYER + ".self_attn", (X, TABLES, None)),
    "attention of Qwen3.5": ("qwen3_5_text", LAYER + ".self_attn", (X, TABLES, None)),
    "decoder layer": ("llama", LAYER, (X,)),
    "decoder layer of Qwen3.5": ("qwen3_5_text", LAYER, (X, TABLES)),
}
CACHES = ("cache", "cache_params", "past_key_values")
# names that releases, or other classes, have for an argument
NAMES = ("x", "hidden_states", "hidden_state", "input", "top_k_index", "top_k_weights",
         "router_indices", "routing_weights", "selected_experts")  # fmt: skip
NEW = "a cache"


def strange(x: torch.Tensor) -> dict:
    """What is no hidden states, or hardly any."""
    return {
        "None": None, "a number": 1.5, "a list": x.tolist(), "a word": "x", "a tuple": (x,),
        "an array": x.numpy(), "no tokens": x[..., :0, :], "no rows": x[:0], "one number": x[0, 0],
        "no dimensions": x.sum(), "one dimension more": x[None], "too narrow": x[..., :-1],
        "no width": x[..., :0], "integers": x.long(), "flags": x > 0, "complex numbers": x + 0j,
        "in double": x.double(), "in half": x.half(), "transposed": x.mT,
        "a parameter": torch.nn.Parameter(x), "not contiguous": x.repeat(1, 1, 2)[..., ::2],
        "expanded": x[:1].expand(x.shape),
    }  # fmt: skip


def calls(names: list, values: tuple) -> dict:
    """(positional, keywords) of each call; `names` are those of the class's own forward."""
    given = dict(zip(names, values))
    (first, *others), first_value = names[: len(values)], values[0]
    by_keyword = {name: given[name] for name in others}
    unknown = [None] * (len(names) - len(values))
    table = {
        "by position": (values, {}),
        "by keyword": ((), given),
        "by both": (values[:1], by_keyword),
        "all that there is": ((*values, *unknown), {}),
        "one too many": ((*values, *unknown, X), {}),
        "an unknown keyword": (values, {"word": 7}),
        "an unknown keyword beside keywords": ((), {**given, "word": 7}),
        "the first doubled": (values, {first: values[0]}),
        "the last doubled": (values, {[first, *others][-1]: values[-1]}),
        "nothing": ((), {}),
        "no first": ((), by_keyword),
        "no last": (values[:-1], {}),
    }
    for name in NAMES:
        table[f"{name} beside"] = (values, {name: values[0]})
        table[f"{name} for the first"] = ((), {name: values[0], **by_keyword})
        if others:
            fewer = {n: v for n, v in by_keyword.items() if n != others[-1]}
            table[f"{name} for the last"] = ((values[0],), {**fewer, name: values[-1]})
    for name, x in strange(first_value).items():
        table[name] = ((x, *values[1:]), {})
    place = next((i for i, name in enumerate(names) if name in CACHES), None)
    if place is not None:
        before = (*values, *[None] * (place - len(values)))
        table["a cache by position"] = ((*before, NEW), {})
        for name in CACHES:
            table[f"a cache by position and as {name}"] = ((*before, NEW), {name: NEW})
            table[f"None by position, a cache as {name}"] = ((*before, None), {name: NEW})
    for name in CACHES:
        table[f"a cache as {name}"] = (values, {name: NEW})
        table[f"{name} is None"] = (values, {name: None})
        for other in CACHES:
            if other != name:
                table[f"caches as {name} and {other}"] = (values, {name: NEW, other: NEW})
                table[f"{name} is None, {other} not"] = (values, {name: None, other: NEW})
    return table


def tensors(value) -> list:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for part in value for x in tensors(part)] if isinstance(value, tuple) else []


def outcome(module, positional: tuple, keywords: dict, config) -> tuple:
    """The type of what a call raises, or what it gives; and what then lies in its caches."""
    new = {n: caches.DynamicCache(config=config) for n, v in keywords.items() if v is NEW}
    if positional and positional[-1] is NEW:
        new[""] = caches.DynamicCache(config=config)
        positional = (*positional[:-1], new[""])
    by_name = {n: cache for n, cache in new.items() if n}
    try:
        with torch.no_grad():
            found = tensors(module(*positional, **{**keywords, **by_name}))
    except Exception as error:
        return type(error), str(error)[:90], []
    for cache in new.values():
        states = [x for layer in cache.layers for x in held(layer)]
        found += [torch.tensor(float(len(states))), *states]
    return None, "", found


def held(layer) -> list:
    values = [getattr(layer, name, None) for name in ("keys", "values")]
    for name in ("conv_states", "recurrent_states"):
        values += getattr(layer, name, {}).values()
    return [x for x in values if isinstance(x, torch.Tensor)]


def close(found: list, expected: list) -> bool:
    """In number, and in values up to fp32's roundings."""
    same = [
        a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(found, expected)
    ]
    return len(found) == len(expected) and all(same)


def model_of(name: str):
    if name != "gpt_oss":
        return random_model(name)
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**BASE, head_dim=16, num_local_experts=4)
    return randomise(transformers.GptOssForCausalLM(config)).eval()


@pytest.fixture
def everywhere(monkeypatch):
    """Kernels are said to be there for any device and dtype: the reference stands in for them."""
    monkeypatch.setattr(blocks, "_why_not_dtype", lambda *args: None)
    monkeypatch.setattr(experts, "why_not_here", lambda module: None)


def own_names(module) -> list:
    """The arguments of the class's own forward that may be given by position."""
    forward = inspect.unwrap(type(module).forward)
    if forward.__closure__ and "original_forward" in forward.__code__.co_freevars:
        forward = inspect.getclosurevars(forward).nonlocals["original_forward"]
    parameters = inspect.signature(forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments(kernel, everywhere, kind):
    name, path, values = KINDS[kind]
    model = model_of(name)
    if kind.startswith("experts by"):
        model.set_experts_implementation("eager")
    served = copy.deepcopy(model)
    module = model.get_submodule(path)
    different, count = [], 0
    with serving() as record:
        kernel.kernelize(served)
        mine = served.get_submodule(path)
        for call, (positional, keywords) in calls(own_names(module), values).items():
            expected = outcome(module, positional, keywords, model.config)
            record.clear()
            found = outcome(mine, positional, keywords, model.config)
            count += bool(record)
            if found[0] is not expected[0] or not close(found[2], expected[2]):
                different.append((call, found[:2], expected[:2]))
    assert not different and count
    assert inspect.signature(mine.forward) == inspect.signature(module.forward)
