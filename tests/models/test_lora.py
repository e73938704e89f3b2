"""Adapters of the peft package: kernelized models with them give what they gave."""

import copy
import importlib
import sys
import types

import pytest
import torch
from conftest import load_example, relative_error
from test_model_layers import SOME, kinds_of
from tiny_models import assert_same, logits, random_model, serving, tokens

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
PLACES = {
    "mlp": ["gate_proj", "up_proj", "gate_up_proj", "down_proj"],
    "attention": ["q_proj", "v_proj", "qkv_proj", "o_proj"],
    "all": "all-linear",
}


def test_the_example(kernel, capsys):
    before, after = load_example("finetune_lora").run(kernel, "cpu", steps=3)
    assert before == pytest.approx(after, rel=1e-4) and before[-1] < before[0]
    assert "seconds a step" in capsys.readouterr().out


# --- adapters by kernels


def step(model, ids):
    """(the loss, gradients of adapters, groups of projections that were served) of a step."""
    model.train().zero_grad()
    with serving() as record:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
    named = model.named_parameters()
    return (
        loss,
        {n: p.grad for n, p in named if p.grad is not None},
        len(record.get("lora_fwd", ())),
    )


def same_step(model, served, ids, groups):
    """Both give the same, and the kernels compute so many groups of projections."""
    loss, gradients, _ = step(model, ids)
    ours, found, count = step(served, ids)
    assert count == groups
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-6)
    assert found.keys() == gradients.keys()
    for n, gradient in gradients.items():
        torch.testing.assert_close(found[n], gradient, rtol=1e-3, atol=1e-6)


def both(kernel, name="llama", **options):
    options = {"target_modules": "all-linear", **options}
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(random_model(name), config)
    for n, p in model.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(p, std=0.05)
    served = copy.deepcopy(model)
    report = kernel.kernelize(served)
    return model, served, report


GROUPS = {"mlp": (4, 4, 4), "attention": (4, 2, 4), "all": (8, 8, 8)}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", [*SOME, "phi3"])
def test_groups(kernel, name, places):
    """Of a Llama's layer: q, k, v; o; gate, up; down. All around adapters is served."""
    model, served, report = both(kernel, name, target_modules=PLACES[places])
    mlp, ids = "SwiGLUGateUp" if name == "phi3" else "SwiGLUMLP", tokens(2, 19)
    layers = {"LoraLinear", "RMSNorm", "Attention", "DecoderLayer", mlp}
    assert layers <= kinds_of(report) and not report.left
    same_step(model, served, ids, GROUPS[places][[*SOME, "phi3"].index(name)])
    with serving() as record:
        out = logits(served.eval(), ids)
    assert ("silu_mul_fwd" in record) == (places != "attention")
    assert_same(out, logits(model.eval(), ids))


def test_latent_attention(kernel):
    """Its projections are served, the attention is its own."""
    model, served, report = both(kernel, "deepseek_v3")
    reasons = {row.reason for row in report.left if row.kind == "DeepseekV3Attention"}
    assert reasons == {"its part q_a_proj is wrapped by adapters"}
    same_step(model, served, tokens(2, 19), 10)


def test_some_of_a_group(kernel):
    """Adapters of q and v alone, as they are by default."""
    model, served, _ = both(kernel, target_modules=["q_proj", "v_proj"])
    same_step(model, served, tokens(2, 9), 2)


def test_lora_is_skipped(kernel):
    model = both(kernel)[0]
    served = copy.deepcopy(model)
    report = kernel.kernelize(served, skip=["lora"])
    assert "LoraLinear" not in kinds_of(report)
    same_step(model, served, tokens(2, 9), 0)
    assert kernel.restore(served) and type(served) is type(model)


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"lora_bias": True}, {"use_rslora": True}, {"r": 4}], ids=str
)
def test_variants(kernel, options):
    """What is another formula is PEFT's own."""
    model, served, _ = both(kernel, **{k: v for k, v in options.items() if k != "r"})
    known = "use_dora" not in options and "lora_bias" not in options
    same_step(model, served, tokens(2, 9), 8 if known else 0)


def test_changes_after_a_served_step(kernel):
    """Merged, disabled, other adapters, frozen ones, and hooks: what PEFT computes."""
    model, served, _ = both(kernel)
    ids = tokens(2, 9)
    same_step(model, served, ids, 8)
    for each in (model, served):
        each.merge_adapter()
    with serving() as record:
        assert_same(logits(served, ids), logits(model, ids))
    assert "lora_fwd" not in record
    for each in (model, served):
        each.unmerge_adapter()
    with model.disable_adapter(), served.disable_adapter(), serving() as record:
        assert_same(logits(served, ids), logits(model, ids))
    assert "lora_fwd" not in record
    other = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], lora_alpha=5)
    for each in (model, served):
        torch.manual_seed(1)
        each.add_adapter("other", other)
        each.set_adapter("other")
    same_step(model, served, ids, 4)
    for each in (model, served):
        each.set_adapter("default")
        for n, p in each.named_parameters():
            if "q_proj.lora_A" in n:
                p.requires_grad_(False)
    same_step(model, served, ids, 8)
    handle = served.get_submodule("base_model.model.model.layers.0.mlp.up_proj.lora_A.default")
    handle = handle.register_forward_hook(lambda *_: None)
    same_step(model, served, ids, 8)  # without up_proj
    handle.remove()
    same_step(model, served, ids, 8)


def test_autocast_checkpoints_and_no_gradient(kernel):
    model, served, _ = both(kernel)
    ids = tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16), serving() as record:
        served(ids, labels=ids).loss.backward()
    assert "lora_fwd" not in record
    with serving() as record:
        assert_same(logits(served.eval(), ids), logits(model.eval(), ids))
    assert "lora_fwd" not in record
    with serving() as record:  # as in the forward of a checkpoint
        assert_same(logits(served.train(), ids), logits(model.train(), ids))
    assert len(record["lora_fwd"]) == 8
    for each in (model, served):
        each.enable_input_require_grads()
        each.base_model.model.gradient_checkpointing_enable()
    same_step(model, served, ids, 16)


def test_autocast_over_bf16(kernel):
    """Adapters stay in fp32, so gradients are nearer to those in fp32 than PEFT's."""
    model, served, _ = both(kernel)
    exact, ids = copy.deepcopy(model), tokens(2, 9)
    right = step(exact, ids)[1]
    for each in (model, served):
        for n, p in each.named_parameters():
            if "lora" not in n:
                p.data = p.data.bfloat16()
    errors = []
    for each, groups in ((model, 0), (served, 8)):
        with torch.autocast("cpu", torch.bfloat16):
            _, found, count = step(each, ids)
        assert count == groups
        errors.append(sum([(found[n] - g).norm() / g.norm() for n, g in right.items()]))
    assert errors[1] < 1.1 * errors[0]


def test_adapters_in_bf16(kernel):
    """As with autocast_adapter_dtype=False: gradients are nearer to those in fp32 than PEFT's."""
    model, served, _ = both(kernel)
    exact, ids = copy.deepcopy(model), tokens(2, 9)
    right = step(exact, ids)[1]
    errors = []
    for each, groups in ((model.bfloat16(), 0), (served.bfloat16(), 8)):
        _, found, count = step(each, ids)
        assert count == groups and {g.dtype for g in found.values()} == {torch.bfloat16}
        errors.append(sum([(found[n] - g).norm() / g.norm() for n, g in right.items()]))
    assert errors[1] < 1.1 * errors[0]


class Called(torch.nn.Linear):
    """Stands for a quantised linear: its product is its own, and its weight gets no gradient."""

    def count(self):
        """One more call."""

    def forward(self, x):
        self.count()
        with torch.autocast(x.device.type, enabled=False):  # results are in the dtype of x
            weight = self.weight.detach().to(x.dtype)
            return torch.nn.functional.linear(x, weight, self.bias) * 2


def test_base_layers_that_are_called(kernel):
    """Adapters over other modules than a plain nn.Linear, all of them or one in a group."""
    for some in (False, True):
        model, served, _ = both(kernel)
        for each in (model, served):
            for name, module in list(each.named_modules()):
                if hasattr(module, "lora_A") and not (some and "k_proj" not in name):
                    module.base_layer.__class__ = Called
        # those that are called are not in a group with weights
        same_step(model, served, tokens(2, 9), 10 if some else 8)
        assert "base layer" not in str(kernel.kernelize(served))
        same_step(model, served, tokens(2, 9), 10 if some else 8)


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_bases_of_bitsandbytes(kernel, monkeypatch, kind):
    """PEFT's own classes over those of a stand-in for the package. Under autocast, base layers of
    an fp32 input give fp32: they are called once, and adapters are PEFT's."""
    stand_in = types.ModuleType("bitsandbytes")
    stand_in.nn, stand_in.__spec__ = (
        types.SimpleNamespace(**{kind: Called}),
        types.SimpleNamespace(),
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes", stand_in)
    imports = importlib.import_module("peft.import_utils")
    for name in ("is_bnb_available", "is_bnb_4bit_available"):
        monkeypatch.setattr(imports, name, lambda: True)
    home, parent = "peft.tuners.lora.bnb", importlib.import_module("peft.tuners.lora")
    importlib.import_module(home)
    monkeypatch.setattr(parent, "bnb", None, raising=False)
    monkeypatch.delitem(sys.modules, home)
    kinds = importlib.import_module(home)
    model = both(kernel)[0]
    for module in list(model.modules()):
        if hasattr(module, "lora_A"):
            module.__class__, module.base_layer.__class__ = getattr(kinds, kind), Called
    served, calls = copy.deepcopy(model), []
    assert "LoraLinear" in kinds_of(kernel.kernelize(served))
    same_step(model, served, tokens(2, 9), 8)
    monkeypatch.setattr(Called, "count", lambda base: calls.append(base))
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients, _ = step(model, tokens(2, 9))
        before = len(calls)
        found = step(served, tokens(2, 9))
    assert found[2] == 2 and len(calls) == 2 * before == 2 * 14  # those of o, whose x is bf16
    assert relative_error(found[0], loss) < 1e-2 and found[1].keys() == gradients.keys()


def test_dropout(kernel):
    """By masks of our own: off in evaluation, repeated by a seed, and PEFT's mean."""
    model, served, report = both(kernel, lora_dropout=0.3)
    ids = tokens(2, 9)
    assert_same(logits(served.eval(), ids), logits(model.eval(), ids))
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        loss, gradients, count = step(served, ids)
        found.append((loss, gradients))
        assert count == 8
    assert torch.equal(found[0][0], found[1][0]) and not torch.equal(found[0][0], found[2][0])
    for n, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][n])
    means = []
    for each in (model, served):
        losses = torch.stack([step(each, ids)[0].detach() for _ in range(40)])
        means.append((losses.mean(), losses.std() / 40**0.5))
    (a, s), (b, t) = means
    assert (a - b).abs() < 5 * (s**2 + t**2).sqrt()
    served.enable_input_require_grads()
    for reentrant in (False, True):
        served.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(0)
        loss, gradients, count = step(served, ids)
        assert torch.equal(loss, found[0][0]) and count == 16
        for n, gradient in found[0][1].items():  # the same masks again
            torch.testing.assert_close(gradients[n], gradient)


def test_a_class_that_is_set_afterwards(kernel):
    """Its forward runs, though it inherits what the projection is served as."""
    model, served, _ = both(kernel, target_modules=["q_proj", "v_proj"])
    for each in (model, served):
        part = each.model.model.layers[0].self_attn.q_proj
        kind = type(part)
        forward = lambda self, x, kind=kind: kind.forward(self, x) * 2  # noqa: E731
        part.__class__ = type("Louder", (kind,), {"forward": forward})
    same_step(model, served, tokens(2, 9), 2)
