"""The attention function that a module's config names, remembered with all that it follows from."""

import pytest
import torch
from conftest import submodule

transformers = pytest.importorskip("transformers")
from transformers import modeling_utils  # noqa: E402

SDPA = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]


def eager():
    """The function that a model's file has for "eager"."""


def own():
    """Another attention function."""


@pytest.fixture
def module(kernel):
    """A module with a config, and what looks its function up, which has done so twice."""
    config = transformers.LlamaConfig(attn_implementation="sdpa")
    module = torch.nn.Module()
    module.config = config
    word = submodule("layers.forward").Word("", "attribute", "config._attn_implementation")
    interface = submodule("layers.forward").Interface(word, eager)
    assert interface.of(module, {}) is interface.of(module, {}) is SDPA
    return module, interface


def test_is_remembered(module, monkeypatch):
    """A patch of the registry's class is called once, and what it answers is kept."""
    (module, interface), registry = module, type(modeling_utils.ALL_ATTENTION_FUNCTIONS)
    asked, before = [], registry.get_interface
    monkeypatch.setattr(
        registry, "get_interface", lambda self, *args: asked.append(args[0]) or before(self, *args)
    )
    assert [interface.of(module, {}) for _ in range(3)] == [SDPA] * 3
    assert asked == ["sdpa"]


def test_another_name(module):
    module, interface = module
    for name, function in (("eager", eager), ("sdpa", SDPA)) * 2:
        module.config._attn_implementation = name
        assert interface.of(module, {}) is function
    module.config._attn_implementation_internal = "of nobody"
    with pytest.raises(KeyError, match="of nobody"):
        interface.of(module, {})


def test_another_entry(module, monkeypatch):
    """A function that is registered for the name, for all models or by one registry alone."""
    module, interface = module
    registry = modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(registry._local_mapping, "sdpa", own)
    assert interface.of(module, {}) is own
    monkeypatch.delitem(registry._local_mapping, "sdpa")
    assert interface.of(module, {}) is SDPA
    monkeypatch.setitem(type(registry)._global_mapping, "sdpa", own)
    assert interface.of(module, {}) is own


def test_another_config(module):
    module, interface = module
    module.config = transformers.LlamaConfig(attn_implementation="eager")
    assert interface.of(module, {}) is eager


def answers_attributes(patch, registry, kind):
    before = kind.__getattribute__

    def answer(self, name):
        return "eager" if name == "_attn_implementation" else before(self, name)

    patch.setattr(kind, "__getattribute__", answer)


def answers_as_property(patch, registry, kind):
    patch.setattr(kind, "_attn_implementation", property(lambda self: "eager"))


def answers_as_registry(patch, registry, kind):
    patch.setattr(type(registry), "__getitem__", lambda self, name: eager)


def answers_on_the_instance(patch, registry, kind):
    patch.setitem(registry.__dict__, "get_interface", lambda name, default: default)


@pytest.mark.parametrize(
    "change",
    [answers_attributes, answers_as_property, answers_as_registry, answers_on_the_instance],
    ids=lambda change: change.__name__,
)
def test_another_way(module, monkeypatch, change):
    """Whatever answers in place of transformers' own code is asked."""
    module, interface = module
    change(monkeypatch, modeling_utils.ALL_ATTENTION_FUNCTIONS, type(module.config))
    assert [interface.of(module, {}) for _ in range(2)] == [eager] * 2


def test_another_registry(module, monkeypatch):
    """An error as from the module's own forward."""
    module, interface = module
    monkeypatch.setattr(modeling_utils, "ALL_ATTENTION_FUNCTIONS", {})
    with pytest.raises(AttributeError):
        interface.of(module, {})


def test_what_says_that_torch_compiles():
    """torch.compiler.is_compiling() is these two: the first is true for Dynamo alone."""

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x):
        return x + 1 if torch.compiler.is_dynamo_compiling() else x

    assert compiled(torch.zeros(())) == 1 and not torch.compiler.is_dynamo_compiling()
    assert torch.compiler._is_compiling_flag is False

    class Exported(torch.nn.Module):
        def forward(self, x):
            assert torch.compiler._is_compiling_flag == torch.compiler.is_compiling()
            return x + torch.compiler._is_compiling_flag

    exported = torch.export.export(Exported(), (torch.zeros(()),), strict=False)
    assert exported.module()(torch.zeros(())) == 1
