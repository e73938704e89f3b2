"""Decoding over a cache that grows: attention of one token is a kernel of ours where SDPA would
compute it on Hopper, and the model's own function elsewhere."""

import pytest
import torch
from conftest import submodule
from test_model_layers import on_every_device, pair
from tiny_models import serving, tokens

transformers = pytest.importorskip("transformers")
attention, device = submodule("layers.few_tokens"), submodule("runtime.device")
pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ["llama", "qwen3", "qwen3_5_text", "gemma2"]


def decoded(model, new=1, mask=None):
    """Logits of tokens after a prompt of six."""
    cache, ids = transformers.DynamicCache(config=model.config), tokens(2, 6 + new)
    prompt = None if mask is None else mask[:, :6]
    model(ids[:, :6], past_key_values=cache, attention_mask=prompt)
    return model(ids[:, 6:], past_key_values=cache, attention_mask=mask).logits.detach()


def padded():
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    return mask


@pytest.mark.parametrize("mask", [None, padded()], ids=["whole", "padded"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_token(kernel, name, mask):
    model, served = pair(kernel, name)
    exact = decoded(model, mask=mask)
    model, served = model.bfloat16(), served.bfloat16()
    own = decoded(model, mask=mask)
    with serving() as record:
        found = decoded(served, mask=mask)
    softcap = name == "gemma2"  # which is eager
    assert ("kvcache_attention" in record) is not softcap
    error, theirs = ((x.float() - exact).norm() / exact.norm() for x in (found, own))
    assert error < 1.5 * theirs


@pytest.mark.parametrize("batch, few", [(1, 4), (1, 8), (1, 9), (2, 4)])
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@on_every_device
@torch.no_grad()
def test_a_few_tokens_over_the_slots_of_a_static_cache(kernel, name, batch, few, device):
    """Of one sequence, up to a round of drafts: each attends to the slots up to its own."""
    model, served = pair(kernel, name, device)
    ids, mask = tokens(batch, 7 + few, device=device), torch.ones(batch, 7 + few, device=device)
    mask[:, :2] = 0

    def logits(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        model(ids[:, :7], past_key_values=cache, attention_mask=mask[:, :7])
        for layer in cache.layers:
            if hasattr(layer, "keys"):  # slots that are not filled count for nothing
                layer.keys[:, :, 7:] = layer.values[:, :, 7:] = 100
        return model(ids[:, 7:], past_key_values=cache, attention_mask=mask).logits.double()

    exact = logits(model)
    model, served = model.bfloat16(), served.bfloat16()
    own = logits(model)
    with serving(device) as record:
        found = logits(served)
    assert ("kvcache_attention" in record) == (batch == 1 and few <= 8)
    error, theirs = ((x - exact).norm() / exact.norm() for x in (found, own))
    assert error < 1.5 * theirs


def one_after_another(model, ids, mask, new):
    """Logits [B, new, V] of the last tokens, each over what those before it have left."""
    cache, found = transformers.DynamicCache(config=model.config), []
    model(ids[:, :-new], past_key_values=cache, attention_mask=mask[:, :-new])
    for at in range(ids.shape[1] - new, ids.shape[1]):
        words = {"past_key_values": cache, "attention_mask": mask[:, : at + 1]}
        found.append(model(ids[:, at : at + 1], **words).logits.double())
    return torch.cat(found, 1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_5_text"])
@on_every_device
@torch.no_grad()
def test_tokens_one_after_another(kernel, name, batch, device):
    """Padded rows, through a sliding window that becomes full where there is one."""
    window = {"sliding_window": 8} if name == "mistral" else {}
    model, served = pair(kernel, name, device, **window)
    ids, new = tokens(batch, 12, device=device), 6
    mask = torch.ones_like(ids)
    mask[: batch // 2, :2] = 0
    exact = one_after_another(model, ids, mask, new)
    model, served = model.bfloat16(), served.bfloat16()
    own = one_after_another(model, ids, mask, new)
    with serving(device) as record:
        found = one_after_another(served, ids, mask, new)
    if device == "cpu" or torch.cuda.get_device_capability() == (9, 0):
        layers = [layer for layer in served.model.layers if hasattr(layer, "self_attn")]
        assert len(record["kvcache_attention"]) == new * len(layers)
    error, theirs = ((x - exact).norm() / exact.norm() for x in (found, own))
    assert error < 1.5 * theirs
    margin = exact.topk(2, -1).values.diff(dim=-1).abs().squeeze(-1)
    sure = margin > 4 * (own - exact).abs().amax(-1)
    assert sure.any() and torch.equal(found.argmax(-1)[sure], exact.argmax(-1)[sure])


LEFT = {
    "two tokens": {"new": 2},
    "a gradient": {"grad": True},
    "fp32": {"dtype": torch.float32},
    "eager": {"attention": "eager"},
}


@pytest.mark.parametrize("why", LEFT)
def test_other_calls_are_the_models_own(kernel, why):
    how = LEFT[why]
    model, served = (m.to(how.get("dtype", torch.bfloat16)) for m in pair(kernel, "qwen3"))
    for m in (model, served):
        m.set_attn_implementation(how.get("attention", "sdpa"))
    with torch.set_grad_enabled("grad" in how):
        own = decoded(model, how.get("new", 1))
        with serving() as record:
            found = decoded(served, how.get("new", 1))
    assert "kvcache_attention" not in record and record["qk_norm_rope_fwd"]
    assert (found - own).abs().max() < 0.1 * own.abs().max()


@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (10, 0), None])
def test_where_cudnn_makes_plans(capability, cudnn, monkeypatch):
    """Elsewhere nobody has measured that a kernel is faster than SDPA."""
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: cudnn)
    monkeypatch.setattr(device, "pretended", device.Chip("chip", capability, 132))
    for cached in (device.capability, submodule("runtime.dispatch")._folders):
        monkeypatch.setattr(cached, "cache_clear", cached.cache_clear, raising=False)
        cached.cache_clear()
    monkeypatch.setattr(attention.dispatch, "has_kernels_at", lambda *where: True)
    attention._on_hopper.cache_clear()
    try:
        found = attention._makes_plans(torch.device("cuda", 0))
        assert found is (capability == (9, 0) and cudnn)
        assert not attention._makes_plans(torch.device("cpu"))
    finally:
        device.capability.cache_clear()
        attention._on_hopper.cache_clear()


def cached(B=2, HQ=4, HK=2, S=5, D=16, wide=16, dtype=torch.bfloat16):
    q = torch.zeros(B, 1, HQ, D, dtype=dtype)
    return q, torch.zeros(B, HK, S, D, dtype=dtype), torch.zeros(B, HK, S, wide, dtype=dtype)


def seen(S=5, B=2):
    return torch.ones(B, 1, 1, S, dtype=torch.bool)


class Quantized(torch.Tensor):
    """A tensor of a class of its own."""


q, k, v = cached()
CACHED = {
    "plain": (q, k, v, None, True),
    "a mask": (q, k, v, seen(), True),
    "a mask of one row": (q, k, v, seen(B=1), True),
    "steps between slots": (q, k[:, :, ::2], v[:, :, ::2], None, True),
    "a mask of more rows": (q, k, v, seen(B=3), False),
    "a mask of fewer slots": (q, k, v, seen(4), False),
    "values of another width": (*cached(wide=8), None, False),
    "keys of another dtype": (q, k.half(), v.half(), None, False),
    "heads that do not divide": (*cached(HQ=3), None, False),
    "no slot": (*cached(S=0), None, False),
    "fewer rows": (q, k[:1], v[:1], None, False),
    "steps between channels": (*cached(D=8)[:1], k[..., ::2], v[..., ::2], None, False),
    "a class of its own": (q, k.as_subclass(Quantized), v, None, False),
}


@pytest.mark.parametrize("what", CACHED)
def test_keys_and_values_that_fit(what):
    *call, fits = CACHED[what]
    with torch.no_grad():
        assert attention._fits(*call) is fits
    assert not attention._fits(*call)  # with gradients on
