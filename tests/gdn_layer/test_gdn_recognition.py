"""A GDN layer is served only if that changes nothing, whatever was patched."""

import importlib
import pickle
import types
import warnings

import pytest
import torch
from conftest import submodule
from tiny_models import in_use, random_model
from torch import nn

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trusts_all")]
FAMILIES = ["qwen3_5_text", "qwen3_next", "olmo_hybrid"]


def gdn_of(model):
    return next(m for m in model.modules() if hasattr(m, "conv1d"))


def difference(a, b):
    return (a - b).abs().max().item()


def reason_of(report, model):
    name = next(name for name, m in model.named_modules() if hasattr(m, "conv1d"))
    return next(row.reason for row in report.rows if row.module == name)


def served(kernel, name):
    model = random_model(name)
    assert reason_of(kernel.kernelize(model), model) is None
    return model


def test_a_class_that_gets_our_forward(kernel, monkeypatch):
    """As other packages patch transformers' classes, here also after kernelize."""
    model = served(kernel, "qwen3_next")
    before, kind = in_use(model), type(gdn_of(model)).__mro__[2]
    ours = getattr(submodule("layers"), kind.__name__).forward
    monkeypatch.setattr(kind, "forward", ours)
    for each in (model, random_model("qwen3_next")):
        assert difference(in_use(each), before) < 1e-4


class Sharded(nn.Parameter):
    """As a weight is that is sharded in a call."""


@pytest.mark.parametrize("part", ["A_log", "conv1d"])
def test_weights_that_are_sharded_in_a_call(kernel, part):
    """The class's own forward gathers them; it exchanges no states."""
    model, dispatch = served(kernel, "qwen3_5_text"), submodule("runtime.dispatch")
    before, layer = in_use(model), gdn_of(model)
    owner, name = (layer, "A_log") if part == "A_log" else (layer.conv1d, "weight")
    owner._parameters[name] = Sharded(owner._parameters[name].data)
    with dispatch.served() as record:
        assert difference(in_use(model), before) < 1e-4
    assert not [operation for operation in record if operation.startswith("gdn")]
    with pytest.raises(ValueError, match="cp_context must not be given"):
        layer(torch.zeros(1, 4, 32), cp_context=object())


def reordered(layer):
    """By a method that Qwen3-Next's forward calls."""
    own = layer.fix_query_key_value_ordering
    layer.fix_query_key_value_ordering = lambda *args: [x * 2 for x in own(*args)]


@pytest.mark.parametrize("what", ["a function", "a method of the layer"])
def test_a_patch_before_torch_compile_counts(kernel, monkeypatch, what):
    """What is traced is the class, and the layer, as it is at the trace."""
    model = served(kernel, "qwen3_5_text" if what == "a function" else "qwen3_next")
    layer = gdn_of(model)
    if what == "a function":
        module = importlib.import_module(layer.__module__)
        own = module.l2norm
        monkeypatch.setattr(module, "l2norm", lambda *args, **kwargs: own(*args, **kwargs) * 3)
    else:
        reordered(layer)
    x = torch.randn(1, 5, model.config.hidden_size)
    with submodule("runtime.dispatch").force("reference"), torch.no_grad():
        eager = layer(x)
        compiled = torch.compile(layer, backend="eager")(x)
    assert torch.equal(compiled, eager)
    torch.compiler.reset()


def other_decay(monkeypatch, kind):
    """A copy of the forward with another formula, as a fork of transformers' file would have it."""
    own = submodule("layers.own_code").peeled(kind.forward).forward
    code = own.__code__.replace(
        co_names=tuple("relu" if n == "softplus" else n for n in own.__code__.co_names)
    )
    return types.FunctionType(code, own.__globals__, "forward", own.__defaults__)


def test_code_that_is_not_in_the_file_is_left_alone(kernel, monkeypatch):
    """Its code is that of no file."""
    model = random_model("qwen3_5_text")
    kind = type(gdn_of(model))
    forward = other_decay(monkeypatch, kind)
    monkeypatch.setattr(kind, "forward", forward)
    assert "is patched" in reason_of(kernel.kernelize(model), model)


def test_the_trial_leaves_no_trace(kernel):
    """No random number is drawn, and hooks for all modules see activation functions at most."""
    model = random_model("qwen3_5_text")
    submodule("models.trial")._found.clear()
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda m, *args: seen.append(m))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    try:
        kernel.kernelize(model)
    finally:
        hook.remove()
    assert {type(m).__name__ for m in seen} <= {"SiLUActivation"}
    assert torch.equal(torch.rand(3), expected)


class Conv(nn.Conv1d):
    pass


def test_another_convolution_is_left_alone(kernel):
    model = random_model("qwen3_5_text")
    gdn_of(model).conv1d.__class__ = Conv
    assert "not a depthwise nn.Conv1d" in reason_of(kernel.kernelize(model), model)


@pytest.mark.parametrize("name", ["qwen3_5_text", "llama"])
def test_a_pickle_holds_the_module_itself(kernel, name):
    model = random_model(name)
    kernel.kernelize(model)
    module = gdn_of(model) if name != "llama" else model.model.layers[0].mlp
    # `kernels`, where it is installed, puts functions there that cannot be pickled
    module.__dict__.pop("_kernel_funcs", None)
    x = torch.randn(2, 5, 32)
    with pytest.warns(UserWarning, match="call kernelize again where it is loaded"):
        data = pickle.dumps(module)
    back = pickle.loads(data)
    assert type(back) is type(random_model(name).get_submodule(path_of(model, module)))
    assert len(kernel.kernelize(back).served) == 1
    with torch.no_grad():
        assert difference(back(x), module(x)) == 0
    kernel.restore(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.dumps(module)


def path_of(model, module):
    return next(name for name, m in model.named_modules() if m is module)


def test_training_after_use_kernels_and_kernelize(kernel, kernels_of_transformers, monkeypatch):
    """`kernels` binds the class's forward again where it has no kernel: that is still ours."""
    kernels = pytest.importorskip("kernels")
    model = random_model("qwen3_5_text")
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        model.use_kernels = True
        assert reason_of(kernel.kernelize(model), model) is None
        layer = gdn_of(model)
        served = type(layer).forward
        model.train()
        assert layer.forward.__func__ is served
        assert type(layer).served_as == "Qwen3_5GatedDeltaNet"
        model.eval()
        assert layer.forward.__func__ is served
        report = kernel.kernelize(model)
        assert reason_of(report, model) is None
        assert kernel.restore(model) == len(report.served)
        assert "forward" not in layer.__dict__
