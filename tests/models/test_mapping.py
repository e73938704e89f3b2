"""kernelize: what it serves, what it leaves alone and says why; and the ways through `kernels`."""

import copy
import importlib
import warnings

import pytest
import torch
from adversarial_forms import Named, SiluInTheCode, UpFirst
from conftest import DEVICES, REPOSITORY
from tiny_models import WITH_GDN, assert_same, logits, mlps_and_gdn, pair, random_model, tokens
from torch import nn

transformers = pytest.importorskip("transformers")
kernels = pytest.importorskip("kernels")
pytestmark = pytest.mark.filterwarnings("ignore")
Mode = kernels.Mode
DEVICE = DEVICES[-1]


@pytest.fixture
def own_mapping():
    """Registrations of a test end with it, also those on functions, which models share."""
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        yield
        for name in WITH_GDN:
            kernels.kernelize(random_model(name), mode=Mode.INFERENCE, device="cpu")


def reasons(report):
    return {row.module: row.reason for row in report.left}


class Peft(nn.Module):
    """A layer with an adapter beside it, as PEFT replaces nn.Linear."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora = nn.Linear(base_layer.in_features, base_layer.out_features)

    def forward(self, x):
        return self.base_layer(x) + self.lora(x)


def replace(mlp):
    mlp.forward = lambda x: x


LEFT_ALONE = {
    "meta device": (lambda m: m.to("meta"), "on the meta device"),
    "gelu": (lambda m: setattr(m, "act_fn", nn.GELU()), "its activation is GELU"),
    "other forward": (replace, "replaced already"),
    "mixed dtypes": (lambda m: m.up_proj.double(), "several dtypes"),
}


def test_every_layer_has_a_mode_of_training(kernel):
    for name, entry in kernel.layer_mapping().items():
        (modes,) = {tuple(x) for x in entry.values()}
        assert {Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE} <= set(modes), name


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone_with_a_reason(built, case):
    change, reason = LEFT_ALONE[case]
    model = random_model("llama")
    change(model.model.layers[1].mlp)
    own = model.model.layers[1].mlp.__dict__.get("forward")
    report = built.kernelize(model, only=["mlp"])
    assert [row.module for row in report.served] == ["model.layers.0.mlp"]
    assert reason in reasons(report)["model.layers.1.mlp"]
    assert model.model.layers[1].mlp.__dict__.get("forward") is own
    assert reason in str(report)


def test_models_without_a_gate_and_other_state_spaces(built):
    assert built.kernelize(nn.Sequential(nn.Linear(4, 4))).rows == []
    assert "nothing to serve" in str(built.kernelize(nn.Linear(4, 4)))
    config = transformers.Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, state_size=8, n_groups=1, num_hidden_layers=1,
        vocab_size=97,
    )  # fmt: skip
    report = built.kernelize(transformers.Mamba2ForCausalLM(config))
    assert {row.layer for row in report.served} == {"RMSNorm", "loss"}
    assert "not those of a Gated DeltaNet layer" in report.left[0].reason


def test_a_changed_gdn_layer_is_left_alone(built):
    model = random_model("qwen3_5_text")
    layer = model.model.layers[0].linear_attn
    subclass = type("Mine", (type(layer),), {"forward": lambda self, hidden_states: hidden_states})
    layer.__class__ = subclass
    assert "trust=[Mine]" in reasons(built.kernelize(model)).popitem()[1]


def test_adapters_and_hooks_round_a_gdn_layer_count(built):
    """Its projections and norm are called, so whatever was done to them is done."""
    model = random_model("qwen3_5_text")
    layer = model.model.layers[0].linear_attn
    layer.in_proj_qkv, layer.out_proj = Peft(layer.in_proj_qkv), Peft(layer.out_proj)
    layer.norm.register_forward_hook(lambda module, args, out: out * 2)
    ids = tokens(2, 9)
    ref = logits(model, ids)
    assert mlps_and_gdn(built.kernelize(model)) == 3
    assert_same(logits(model, ids), ref)


def test_the_report(built):
    model = random_model("qwen3_5_moe_text")
    text = str(built.kernelize(model, only=["mlp", "gdn", "experts"]))
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("3 modules served, 6 left alone; 2 of the served wait for")
    assert lines[1] == ["module", "class", "layer", "note"]
    row = next(line for line in lines if line[0] == "model.layers.*.linear_attn")
    assert row[1:4] == ["x1", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5GatedDeltaNet"]
    assert " ".join(row[4:]) == "in plain torch"
    assert "left alone: there are no kernels for cpu" in text


@pytest.mark.parametrize("mode", ["inference", "training", Mode.TRAINING | Mode.TORCH_COMPILE])
def test_modes(built, mode):
    assert mlps_and_gdn(built.kernelize(random_model("llama"), mode=mode)) == 2
    with pytest.raises(ValueError, match="mode must be"):
        built.kernelize(random_model("llama"), mode="fast")


SOURCES = {
    "this kernel": lambda kernel, root: {},
    "loaded kernel": lambda kernel, root: {"source": kernel},
    "local path": lambda kernel, root: {"source": str(root)},
    "Hub": lambda kernel, root: {"source": REPOSITORY, "revision": "v1", "trust_remote_code": True},
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "olmo_hybrid"])
def test_through_kernels_kernelize(built, repository, own_mapping, source, name):
    model, _ = pair(built, name, DEVICE)
    model = copy.deepcopy(model)
    built.decorate(model)
    mapping = built.layer_mapping(**SOURCES[source](built, repository))
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE)
    served = [m for m in model.modules() if "SwiGLUMLP" in str(m.__dict__.get("forward"))]
    assert len(served) == 2
    ids = tokens(2, 70, device=DEVICE)
    assert_same(logits(model, ids), logits(pair(built, name, DEVICE)[0], ids))


@pytest.mark.parametrize("make", [Named, UpFirst, SiluInTheCode])
def test_parts_by_other_names_through_kernels(built, own_mapping, make):
    """A layer that `kernels` binds knows the parts of every class that kernelize recognises."""
    dispatch = importlib.import_module(f"{built.__name__}.runtime.dispatch")
    model, x = nn.Sequential(make()), torch.randn(3, 16)
    ref = model(x)
    with importlib.import_module(f"{built.__name__}.models.trust").trusting((make,)):
        built.decorate(model)
        with kernels.use_kernel_mapping(built.layer_mapping(), inherit_mapping=False):
            kernels.kernelize(model, mode=Mode.INFERENCE, device="cpu")
    assert "SwiGLU" in str(model[0].__dict__["forward"])
    assert_same(model(x), ref)
    with dispatch.force("reference"), dispatch.served() as record:
        assert_same(model(x), ref)
    assert record


@pytest.mark.parametrize("name", WITH_GDN)
def test_functions_and_norm_alone(built, kernels_of_transformers, own_mapping, name):
    """The layers stay transformers' own; what they call is ours."""
    names = [
        "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "RMSNormGated",
    ]
    model, _ = pair(built, name, "cpu")
    ids, other = tokens(2, 20), copy.deepcopy(model)
    ref = model.generate(ids, max_new_tokens=8, do_sample=False)
    with kernels.use_kernel_mapping(built.layer_mapping(names=names), inherit_mapping=False):
        kernels.kernelize(other, mode=Mode.INFERENCE, device="cpu")
    gdn = next(m for m in other.modules() if hasattr(m, "_kernel_funcs"))
    for function in gdn._kernel_funcs.values():
        assert function.forward.__func__.__module__.startswith(built.__name__)
    assert torch.equal(other.generate(ids, max_new_tokens=8, do_sample=False), ref)


def test_conditions_hold_for_kernels_too(built, own_mapping):
    """A gelu MLP of a decorated class keeps its forward."""
    model = random_model("llama")
    built.decorate(model)
    model.model.layers[0].mlp.act_fn = nn.GELU()
    with kernels.use_kernel_mapping(built.layer_mapping(), inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.INFERENCE, device="cpu")
    served = ["forward" in layer.mlp.__dict__ for layer in model.model.layers]
    assert served == [False, True]


@pytest.mark.parametrize("how", ["use_kernels", "set_use_kernels"])
def test_through_transformers(built, kernels_of_transformers, own_mapping, how):
    """A registered mapping survives that transformers registers its own each time."""
    model, _ = pair(built, "qwen3_5_text", DEVICE)
    ids, other = tokens(2, 9, device=DEVICE), copy.deepcopy(model)
    built.decorate(other)
    kernels.register_kernel_mapping(built.layer_mapping())
    if how == "use_kernels":
        other.use_kernels = True
    else:
        other.set_use_kernels(True)
    for module in (other.model.layers[0].linear_attn, other.model.layers[0].mlp):
        assert module.forward.__func__.__module__.startswith(built.__name__)
    assert_same(logits(other, ids), logits(model, ids))
    other.train()
    assert other.model.layers[0].mlp.forward.__func__.__module__.startswith(built.__name__)


@pytest.mark.parametrize("backend", ["cuda", "rocm"])
def test_the_mapping_survives_that_of_transformers(
    built, kernels_of_transformers, own_mapping, backend
):
    from kernels.layer.globals import _KERNEL_MAPPING
    from transformers.integrations.hub_kernels import register_kernel_mapping_transformers

    kernels.register_kernel_mapping(built.layer_mapping())
    register_kernel_mapping_transformers()
    for name in ("SwiGLUMLP", "chunk_gated_delta_rule", "RMSNormGated", "Qwen3_5GatedDeltaNet"):
        repos = _KERNEL_MAPPING.get()[name][backend].repos_by_capability.find_smallest_interval(90)
        assert len(repos) == 4
        for repo in repos.values():
            assert repo.load().__module__.startswith(built.__name__)


@pytest.fixture
def kernel_config_anywhere(monkeypatch):
    """KernelConfig refuses CPU models by a list; what it does is the same there."""
    from transformers.utils import kernel_config

    if not hasattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES"):
        pytest.skip("this transformers has no such list, and refuses CPU models")
    devices = [*kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"]
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", devices)


def ours(module):
    return getattr(module.forward, "__func__", module.forward).__module__


NAMES = {  # of a model, those that we have a layer for
    "llama": {"SwiGLUMLP", "RMSNorm", "rotary_pos_emb"},
    "qwen3_5_moe_text": {
        "SwiGLUMLP", "SoftmaxTopKRouter", "RMSNormZeroCentered", "RMSNormGated",
        "Qwen3_5GatedDeltaNet",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_all_names_by_a_kernel_config_with_a_local_path(kernels_of_transformers,
    built, repository, own_mapping, kernel_config_anywhere, kind
):  # fmt: skip
    model, ids = random_model(kind), tokens(2, 9)
    expected = logits(model, ids)
    built.decorate(model)
    config = transformers.KernelConfig()
    config.store_registered_layer_names(model)
    names = set(config.registered_layer_names.values()) & set(built.layer_mapping())
    assert names >= NAMES[kind]
    layers = importlib.import_module(f"{built.__name__}.models.hub").NAMES
    config = transformers.KernelConfig(
        {name: f"{repository}:{layers[name]}" for name in names}, use_local_kernel=True
    )
    model.set_use_kernels(True, config)
    for module in model.modules():
        if getattr(module, "kernel_layer_name", None) in names:
            assert ours(module).startswith(built.__name__)
        for name, function in (getattr(module, "_kernel_funcs", None) or {}).items():
            assert name not in names or ours(function).startswith(built.__name__)
    assert_same(logits(model, ids), expected)


def hub_layer(name):
    return f"{REPOSITORY}:{name}", {"revision": "v1", "trust_remote_code": True}


def test_through_from_pretrained(kernels_of_transformers, 
    built, repository, own_mapping, kernel_config_anywhere, tmp_path
):  # fmt: skip
    model, _ = pair(built, "qwen3_5_text", "cpu")
    model.save_pretrained(tmp_path)
    built.decorate(model)
    names = ("SwiGLUMLP", "Qwen3_5GatedDeltaNet")
    config = transformers.KernelConfig({name: hub_layer(name) for name in names})
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, use_kernels=True, kernel_config=config
    )
    for module in (other.model.layers[0].linear_attn, other.model.layers[0].mlp):
        assert ours(module).startswith(built.__name__)
    ids = tokens(2, 9)
    assert_same(logits(other, ids), logits(model, ids))


@pytest.mark.parametrize("bias", [False, True])
def test_layout_of_one_weight(kernels_of_transformers, 
    built, repository, own_mapping, kernel_config_anywhere, tmp_path, bias
):  # fmt: skip
    """gate_proj and up_proj are read into one weight, and saved apart again."""
    from transformers.monkey_patching import clear_patch_mapping

    model = random_model("llama", mlp_bias=bias)
    model.save_pretrained(tmp_path / "before")
    config = transformers.KernelConfig({"LlamaMLP": hub_layer("SwiGLUGateUp")})
    try:
        other = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "before", use_kernels=True, kernel_config=config
        )
        mlp = other.model.layers[0].mlp
        assert type(mlp).__name__ == "SwiGLUGateUpLayout" and hasattr(mlp, "gate_up_proj")
        assert ours(mlp).startswith(built.__name__)
        ids = tokens(2, 9)
        ref = logits(model, ids)
        assert_same(logits(other, ids), ref)
        other.train()  # transformers puts the layout's own forward back
        assert_same(logits(other.eval(), ids), ref)
        other.save_pretrained(tmp_path / "after")
    finally:
        clear_patch_mapping()
        from transformers.conversion_mapping import _checkpoint_conversion_mapping_cache as cache

        if cache is not None:
            cache.pop("llama", None)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert back.state_dict().keys() == model.state_dict().keys()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(logits(back.eval(), ids), ref)
