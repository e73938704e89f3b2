"""Models with Kimi Delta Attention layers, kernelized, and transformers' own."""

import copy

import pytest
import torch
from conftest import relative_error, submodule
from tiny_models import KDA, LOGITS, assert_same_gradients, random_model, tokens

NAMES = list(KDA)


def served(kernel, model, **options):
    """A copy, kernelized in its Kimi Delta Attention layers alone."""
    other = copy.deepcopy(model)
    report = kernel.kernelize(other, **{"only": ["kda"], **options})
    rows = [row for row in report.rows if row.layer == "KimiDeltaAttention"]
    assert [row.reason for row in rows] == [None], report
    return other


@pytest.fixture(autouse=True)
def by_reference():
    """On a CPU no kernel serves, and served modules call their own forward; not in here."""
    with submodule("runtime.dispatch").force("reference"):
        yield


def values(model, *args, **kwargs):
    out = model(*args, **kwargs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def assert_same(a, b):
    assert (a - b).abs().max() <= LOGITS["cpu"] * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_prompts_with_padding(kernel, name):
    model = random_model(name)
    other, ids = served(kernel, model), tokens(2, 70)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad(), submodule("runtime.dispatch").served() as record:
        assert_same(
            values(other, ids, attention_mask=mask), values(model, ids, attention_mask=mask)
        )
    assert record["kda_chunk_fwd"] == ["reference"]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_a_prompt_and_tokens(kernel, monkeypatch, name):
    """Each part from the cache that the parts before have left; states in the cache are alike. All
    projections of a layer's input are one product, as kernels make it."""
    counts = []

    def project(x, weights, apart=True, fp32=False):
        counts.append(len(weights))
        y = torch.cat([x @ w.T for w in weights], -1)
        return [*y.split([len(w) for w in weights], -1)] if apart else [y]

    monkeypatch.setattr(submodule("layers.projections"), "project", project)
    model = random_model(name)
    other, caches, ids = served(kernel, model), [None, None], tokens(2, 20)
    for part in ids.split([7, 1, 1, 8, 1, 2], 1):
        with torch.no_grad():
            outs = [
                m(part, past_key_values=cache, use_cache=True)
                for m, cache in zip((other, model), caches)
            ]
        assert_same(*[out.logits if hasattr(out, "logits") else out[0] for out in outs])
        caches = [out.past_key_values for out in outs]
        ours, theirs = (cache.layers[0] for cache in caches)
        assert relative_error(ours.recurrent_states[0], theirs.recurrent_states[0]) < 1e-5
        assert relative_error(ours.conv_states[0], theirs.conv_states[0]) < 1e-5
    assert max(counts) > 3


@pytest.mark.parametrize("name", NAMES)
def test_gradients(kernel, name):
    model = random_model(name).train()
    other, ids = served(kernel, model), tokens(2, 70)
    for m in (model, other):
        values(m, ids).square().mean().backward()
    grads = [
        {n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (other, model)
    ]
    assert_same_gradients(*grads, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gradients_on_a_gpu(kernel, name):
    """By the kernels, from a layer; those of transformers are of the same layer in fp64."""
    model = random_model(name).train()
    layer, dispatch = layer_of(model), submodule("runtime.dispatch")
    other = layer_of(served(kernel, copy.deepcopy(model).cuda()))
    x, do = (torch.randn(2, 200, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    with dispatch.force(None), dispatch.served() as record:
        other(x.cuda()).backward(do.cuda())
    assert record["kda_chunk_bwd"] == ["portable"]
    layer.double()(x.double()).backward(do.double())
    grads = [
        {n: p.grad.double().cpu() for n, p in m.named_parameters() if p.grad is not None}
        for m in (other, layer)
    ]
    assert_same_gradients(*grads, "cuda")


@pytest.mark.parametrize("name", ["bailing_hybrid", "glm5_next_text"])
def test_gates_without_a_bound(kernel, name):
    """The bound is read from the module at each call."""
    change = {"kda_safe_gate": False} if name == "bailing_hybrid" else {"linear_lower_bound": None}
    model = random_model(name, **change)
    other, ids = served(kernel, model), tokens(1, 40)
    with torch.no_grad():
        assert_same(values(other, ids), values(model, ids))
        for m in (model, other):
            for part in m.modules():
                if hasattr(part, "forget_gate"):
                    gate = part.forget_gate
                    gate.safe_gate_lower_bound, gate.safe_gate, gate.lower_bound = -2.0, True, -2.0
        assert_same(values(other, ids), values(model, ids))


def test_everything_that_can_be_served_beside_it(kernel):
    model = random_model("kimi_linear")
    other, ids = copy.deepcopy(model), tokens(2, 30)
    report = kernel.kernelize(other, only=list(submodule("models.recognise").KINDS))
    kinds = {row.layer for row in report.rows if row.reason is None}
    assert {"KimiDeltaAttention", "SwiGLUMLP", "RMSNorm"} <= kinds, report
    with torch.no_grad():
        assert_same(values(other, ids), values(model, ids))
    assert kernel.restore(other) > 0
    assert type(other.model.layers[0].self_attn) is type(model.model.layers[0].self_attn)


# ---- what is left alone


def layer_of(model):
    return next(m for m in model.modules() if hasattr(m, "forget_gate"))


def reason(kernel, model):
    report = kernel.kernelize(model, only=["kda"])
    return next(row.reason for row in report.rows if row.layer == "KimiDeltaAttention")


def other_gate(self, x):
    return -self.f_b_proj(self.f_a_proj(x)).float().exp().unflatten(-1, (2, 16))


def test_other_code_is_left_alone(kernel, monkeypatch):
    model = random_model("kimi_linear")
    layer = layer_of(model)
    gate, kind = type(layer.forget_gate), type(layer)
    with monkeypatch.context() as patch:
        patch.setattr(gate, "forward", other_gate)
        assert "is patched" in reason(kernel, model)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, hidden_states, **more: hidden_states)
        assert "is patched" in reason(kernel, model)
    layer.extra = torch.nn.Identity()
    assert "parts are not those" in reason(kernel, model)
    del layer.extra
    layer.forget_gate.A_log = torch.nn.Parameter(torch.zeros(5))
    assert "do not match" in reason(kernel, model)


def test_sequences_are_not_shared_among_processes(kernel, monkeypatch):
    """The states of layers that are left alone are not exchanged: that is said."""
    model = random_model("kimi_linear")
    monkeypatch.setattr(submodule("models.apply"), "is_group", lambda group, name: None)
    kind = type(layer_of(model))
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, hidden_states, **more: hidden_states)
        with pytest.raises(ValueError, match="left alone: .* patched"):
            kernel.kernelize(model, cp_group=object())
    layer = layer_of(served(kernel, model))
    with pytest.raises(TypeError, match="cp_context must come from build_cp_context"):
        layer(torch.zeros(1, 4, 32), cp_context=object())
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, **more: hidden_states)
    with pytest.raises(ValueError, match="cp_context must not be given to a layer that is patched"):
        layer(torch.zeros(1, 4, 32), cp_context=object())


def test_a_patch_counts_later_too(kernel, monkeypatch):
    """A class that is patched after kernelize, and hooks of parts that are read, not called."""
    model = random_model("kimi_linear")
    other, ids = served(kernel, model), tokens(1, 9)
    dispatch, gate = submodule("runtime.dispatch"), type(layer_of(model).forget_gate)
    before = values(model, ids)
    with monkeypatch.context() as patch:
        patch.setattr(gate, "forward", other_gate)
        with dispatch.served() as record, torch.no_grad():
            assert_same(values(other, ids), values(model, ids))
        assert not record and (values(model, ids) - before).abs().max() > 1e-3
    called = []
    hook = layer_of(other).forget_gate.register_forward_hook(lambda *args: called.append(1))
    assert_same(values(other, ids), before)
    assert called
    hook.remove()
    with dispatch.served() as record, torch.no_grad():
        assert_same(values(other, ids), before)
    assert record["kda_chunk_fwd"] == ["reference"]
