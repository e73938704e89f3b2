"""Whose code is served, and what a served module's forward may find changed later."""

import copy
import os
import threading
import time
import types
from time import perf_counter

import pytest
import torch
import torch.nn.functional as F
from conftest import submodule
from torch import nn

transformers = pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama as llama  # noqa: E402
from transformers.models.mixtral import modeling_mixtral as mixtral  # noqa: E402

D = 8
TABLE, SEVERAL = {"scale": [1.0]}, {0: 1.0}


class Switch:
    by = 1.0


SWITCH, OF_FILE = Switch(), types.SimpleNamespace(by=1.0)


def factor(x, by=1.0, several=SEVERAL, *, more=1.0):
    return x * by * more * several[0]


class MyMLP(nn.Module):
    """The formula, with all that may be changed later: it is multiplied by one everywhere."""

    table, one = {"scale": 1.0}, 1.0

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, 12), nn.Linear(D, 12)
        self.down_proj, self.act_fn = nn.Linear(12, D), nn.SiLU()
        self.d, self.l, self.factor = {"s": 1.0}, [1.0], 1
        self.config = transformers.LlamaConfig()
        self.config.p = {"s": {"t": 1.0}}

    def forward(self, x):
        x = factor(x) * self.d["s"] * self.l[0] * self.config.p["s"]["t"] * self.table["scale"]
        x = x * self.one * TABLE["scale"][0] * self.factor * SWITCH.by * OF_FILE.by
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def hide(module):
    other = nn.Linear(D, 12).double()
    module.__dict__["up_proj"] = lambda x: other(x)


def doubled(x, by, several, *, more):
    return x * 2


LATER = {  # what is changed of a module, its class or its file
    "an entry of a dict": lambda m, p: p.setitem(m.d, "s", 2.0),
    "an element of a list": lambda m, p: m.l.__setitem__(0, 2.0),
    "a dict within a configuration's": lambda m, p: p.setitem(m.config.p["s"], "t", 2.0),
    "a table of the class": lambda m, p: p.setitem(MyMLP.table, "scale", 2.0),
    "an attribute of the class": lambda m, p: p.setattr(MyMLP, "one", 2.0),
    "an attribute of the class, on the module": lambda m, p: setattr(m, "one", 2.0),
    "a table of the file": lambda m, p: p.setitem(TABLE, "scale", [2.0]),
    "an object of the file": lambda m, p: p.setattr(OF_FILE, "by", 2.0),
    "an object of the file, of its class": lambda m, p: p.setattr(Switch, "by", 2.0),
    "an object of the file, before its class": lambda m, p: p.setitem(vars(SWITCH), "by", 2.0),
    "a default": lambda m, p: p.setattr(factor, "__defaults__", (2.0, SEVERAL)),
    "what a default holds": lambda m, p: p.setitem(SEVERAL, 0, 2.0),
    "a default by keyword": lambda m, p: p.setitem(factor.__kwdefaults__, "more", 2.0),
    "code": lambda m, p: p.setattr(factor, "__code__", doubled.__code__),
    "True for 1": lambda m, p: setattr(m, "factor", True),
    "a part that is hidden": lambda m, p: hide(m),
    "a method of tensors": lambda m, p: p.setattr(
        torch.Tensor, "__mul__", lambda a, b: torch.mul(a, b) + 1, raising=False),
}  # fmt: skip


@pytest.fixture
def reference():
    with submodule("runtime.dispatch").force("reference"):
        with submodule("runtime.dispatch").served() as record:
            yield record


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("change", LATER)
def test_what_changes_later_counts(kernel, reference, monkeypatch, change, traced):
    """Also where torch.compile traces the module afterwards."""
    torch.manual_seed(0)
    module = MyMLP().double()
    own, x = copy.deepcopy(module), torch.randn(3, D, dtype=torch.float64)
    assert kernel.kernelize(module, trust=[MyMLP]).served
    torch.testing.assert_close(module(x), own(x))
    assert reference
    reference.clear()
    if change == "a part that is hidden":
        torch.manual_seed(1)
        hide(module)
        torch.manual_seed(1)
        hide(own)
    else:
        for each in (module, own):
            LATER[change](each, monkeypatch)
    if traced:
        torch._dynamo.reset()
        module = torch.compile(module, backend="eager")
    with torch.no_grad():
        found, expected = module(x), own(x)
    assert not reference, "ours has computed"
    torch.testing.assert_close(found, expected)


class BySuper(MyMLP):
    def forward(self, x):
        return super().forward(x)


class ByItsClass(MyMLP):
    def forward(self, x):
        return MyMLP.forward(self, x)


class ByAnotherName(MyMLP):
    run = MyMLP.forward

    def forward(self, x):
        return self.run(x)


@pytest.mark.parametrize("kind", [BySuper, ByItsClass, ByAnotherName])
def test_a_forward_of_a_base_counts_where_it_runs(kernel, reference, kind):
    module = kind().double()
    own, x = copy.deepcopy(module), torch.randn(3, D, dtype=torch.float64)
    assert kernel.kernelize(module, trust=[kind]).served
    torch.testing.assert_close(module(x), own(x))
    assert reference
    reference.clear()
    module.d["s"] = own.d["s"] = 2.0
    torch.testing.assert_close(module(x), own(x))
    assert not reference, "ours has computed"


def test_a_class_of_somebody_is_named_or_left_alone(kernel):
    module = MyMLP()
    (row,) = kernel.kernelize(module).rows
    assert "MyMLP is no class of transformers" in row.reason and "trust=[MyMLP]" in row.reason
    assert "docs/models.md" in str(kernel.kernelize(module))
    assert not kernel.kernelize(module, trust=[llama.LlamaMLP]).served
    with submodule("runtime.dispatch").force("reference"):
        assert kernel.kernelize(module, trust=[MyMLP]).served
        assert not kernel.kernelize(MyMLP()).served, "it is named for one call"


UNSTEADY = {  # what no trial sees in the next call, as a condition of the formula
    "time": lambda self: time.time() < 1e12 and perf_counter() < 1e12,
    "os": lambda self: os.environ.get("SWITCH") is None,
    "threading": lambda self: threading.current_thread().name != "other",
    "vars": lambda self: not vars(self).get("rate"),
}


@pytest.mark.parametrize("asks", UNSTEADY)
def test_what_changes_by_itself_is_left_alone(kernel, asks):
    usual, formula = UNSTEADY[asks], MyMLP.forward

    def forward(self, x):
        return formula(self, x) if usual(self) else x

    kind = type("Unsteady", (MyMLP,), {"forward": forward})
    with submodule("runtime.dispatch").force("reference"):
        (row,) = kernel.kernelize(kind(), trust=[kind]).rows
    assert row.reason.startswith("its forward") and f" {asks}" in row.reason


@pytest.mark.parametrize("how", ["__copy__", "__deepcopy__", "__getstate__", "__reduce__"])
def test_a_class_with_copies_or_pickles_of_its_own_is_left_alone(kernel, how):
    """A served module's copies and pickles are made without these methods."""
    kind = type("MyMLP", (MyMLP,), {how: lambda self, *memo: {}})
    with kernel.use_reference():
        (row,) = kernel.kernelize(kind(), trust=[kind]).rows
    assert how in row.reason


def test_a_dtype_that_autocast_alone_shows(kernel):
    """Products are in its dtype, and so is what kernels return."""

    def forward(self, x):
        return MyMLP.forward(self, x).to(x.dtype)

    kind = type("Casts", (MyMLP,), {"forward": forward})
    with submodule("runtime.dispatch").force("reference"):
        assert not kernel.kernelize(kind(), trust=[kind]).served


class MyRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6

    def formula(self, x):
        scale = x.float().pow(2).mean(-1, keepdim=True).add(self.eps).rsqrt()
        return self.weight * (x.float() * scale).to(x.dtype)


BY_SIZES = {  # what no trial with other widths than the module's own sees
    "a product of sizes": lambda x, hidden: x.shape[0] * hidden < 60_000,
    "one shape": lambda x, hidden: x.shape != torch.Size([1024, D]),
    "one shape of three sizes": lambda x, hidden: x.shape != torch.Size([1, 1024, D]),
    "how many numbers": lambda x, hidden: x.numel() != 4100 * D,
}


@pytest.mark.parametrize("by", [None, *BY_SIZES])
@pytest.mark.parametrize("kind", [MyMLP, MyRMSNorm])
def test_sizes_beside_the_modules_own_widths(kernel, kind, by):
    """A forward that goes by them is left alone; without the condition it is served."""
    formula = kind.formula if kind is MyRMSNorm else kind.forward
    usual = BY_SIZES.get(by, lambda *sizes: True)

    def forward(self, x):
        wide = x if kind is MyRMSNorm else self.gate_proj(x)
        return formula(self, x) if usual(x, wide.shape[-1]) else x

    other = type("Other" + kind.__name__, (kind,), {"forward": forward})
    with submodule("runtime.dispatch").force("reference"):
        rows = kernel.kernelize(nn.Sequential(other()), trust=[other])
    assert bool(rows.served) == (by is None), rows


@pytest.mark.parametrize("trust", [MyMLP, "MyMLP", [1], ["MyMLP"], [int]])
def test_what_is_no_class_of_modules(kernel, trust):
    with pytest.raises(TypeError, match="trust must be a list of classes of modules"):
        kernel.kernelize(nn.Linear(2, 2), trust=trust)


class Inherits(llama.LlamaMLP):
    pass


class Overrides(llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x)


CONFIG = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}


def test_an_inherited_forward_is_transformers_own(kernel, reference):
    config = transformers.LlamaConfig(**CONFIG)
    assert kernel.kernelize(Inherits(config)).served
    assert kernel.kernelize(Overrides(config)).left
    assert kernel.kernelize(Overrides(config), trust=[Overrides]).served


def patched(*args, **kwargs):
    raise AssertionError("it is not called by a trial")


PATCHES = {
    "a method of the class": (llama.LlamaMLP, llama.LlamaMLP, "forward"),
    "a helper": (llama.LlamaAttention, llama, "apply_rotary_pos_emb"),
    "a helper of the helper": (llama.LlamaAttention, llama, "rotate_half"),
    "a function of torch": (mixtral.MixtralTopKRouter, torch, "topk"),
    "another": (llama.LlamaRMSNorm, torch, "rsqrt"),
    "a function of its namespaces": (mixtral.MixtralTopKRouter, F, "linear"),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_patches_before_and_after(kernel, monkeypatch, patch):
    """By a function of somebody's, in transformers or in torch."""
    kind, home, name = PATCHES[patch]
    trust = submodule("models.trust")
    pins = trust.code_of(kind).pins
    assert pins.unchanged()
    monkeypatch.setattr(home, name, patched)
    assert not pins.unchanged()
    with pytest.raises(submodule("models.code").Refused, match="patched"):
        trust.code_of(kind)
    monkeypatch.undo()
    assert trust.code_of(kind).pins.unchanged() and pins.unchanged()


def test_a_layer_gives_the_dtype_of_its_class(kernel):
    """In the dtypes that no model is made with, too: ours is compared in all of them."""
    from tiny_models import random_model

    model = random_model("llama").bfloat16()
    own = copy.deepcopy(model).model.layers[0]
    with submodule("runtime.dispatch").force("reference"):
        kernel.kernelize(model)
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(1, 3, 32, dtype=dtype)
            tables = torch.randn(2, 1, 3, 16, dtype=torch.bfloat16).unbind()
            outs = []
            for layer in (model.model.layers[0], own):
                try:
                    outs.append(layer(x, position_embeddings=tables).dtype)
                except RuntimeError:
                    outs.append(RuntimeError)
            assert outs[0] is outs[1]


class KeepsOrder(mixtral.MixtralTopKRouter):
    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights.flip(-1), ids.flip(-1)


def test_a_router_keeps_the_order_of_its_experts(kernel, monkeypatch):
    config = transformers.MixtralConfig(**CONFIG, num_local_experts=6, num_experts_per_tok=3)
    monkeypatch.setattr(submodule("models.moe_blocks"), "_why_not_dtype", lambda *args: None)
    form_of = submodule("models.moe_blocks").form_of
    assert form_of(mixtral.MixtralTopKRouter(config)) is not None
    with submodule("models.trust").trusting((KeepsOrder,)):
        with pytest.raises(submodule("models.code").Refused, match="fused_topk"):
            form_of(KeepsOrder(config))


def test_experts_are_traced_in_one_graph(kernel, monkeypatch):
    """Whether a class was named is asked by kernelize alone: torch.compile traces no ContextVar."""
    from subjects import qwen3_moe

    monkeypatch.setattr(submodule("models.experts"), "why_not_here", lambda module: None)
    model = qwen3_moe()
    module = model.model.layers[0].mlp.experts
    given = torch.randn(6, 32), torch.tensor([[0, 2], [1, 3], [3, 1]] * 2), torch.rand(6, 2)
    with torch.no_grad(), submodule("runtime.dispatch").force("reference"):
        expected = module(*given)
        assert kernel.kernelize(model, only=["experts"]).served
        found = torch.compile(module, backend="eager", fullgraph=True)(*given)
    assert torch.allclose(found, expected, atol=1e-5)
