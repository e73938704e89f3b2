"""GDN layers whose parts, sizes and arguments have other names than transformers' are served, and
what a trial cannot certify is not."""

import copy
import pickle

import pytest
import refactor_cases as cases
import refactor_forms as forms
import refactors
import torch

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trusts_all")]
FAMILIES = ["qwen3_5_text", "qwen3_next", "olmo_hybrid"]


def made(unit):
    """The module of a class, whose file is forgotten when the test is over."""
    return cases.build(cases.load(unit), unit)


def of(subject, text, **values):
    """A unit whose forward begins with statements about values that its modules have."""
    unit = cases.Unit(subject)
    forms.put_first(unit, text)
    for name, value in values.items():
        forms.has_value(unit, name, value)
    return unit


def outputs(module, unit):
    return cases.run(module, unit.subject, torch.float64, unit)


def in_turn(names):
    """(family, name): each in one family, the next one in the next."""
    return pytest.mark.parametrize(
        "family, name", [(FAMILIES[i % 3], name) for i, name in enumerate(names)]
    )


@in_turn(["keyword_only", "arguments_reordered", "super_forward"])
def test_refactors_are_served(kernel, family, name):
    unit, module = refactors.built(name, cases.subject_of(family, "gdn"), False)
    assert refactors.is_case(module, unit)
    assert refactors.examine(module, unit) == ("served", "")


def test_other_names_of_parts_leave_the_module_as_it_is(kernel):
    """Copies, pickles, weights by name, and torch.compile."""
    subject = cases.subject_of("qwen3_next", "gdn")
    unit, module = refactors.built("parts_renamed", subject, False)
    assert refactors.examine(module, unit) == ("served", "")
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        expected, names = module(x), list(module.state_dict())
        assert len(kernel.kernelize(module).served) == 1
        assert list(module.state_dict()) == names
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
        other = copy.deepcopy(module)
        for parameter in other.parameters():
            parameter.mul_(0.5)
        assert (other(x) - module(x)).abs().max() > 1e-3
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x))
        kind = type(module).__mro__[2]
        module.__dict__.pop("_kernel_funcs", None)  # by `kernels`, and in no pickle
        assert type(pickle.loads(pickle.dumps(module))) is kind
        kernel.restore(module)
        assert type(module) is kind and not hasattr(module, "in_proj_qkv")


LATER = {  # an attribute that is set later, and the way that the forward goes with it
    "scaled": (False, True, "if self.scaled:\n    _x_ = _x_ * 2"),
    "factor": (
        None, 0.1,
        "if self.factor is not None:\n    _x_ = _x_.clamp(-self.factor, self.factor)",
    ),
}  # fmt: skip


@in_turn(LATER)
def test_what_is_set_later_counts(kernel, family, name):
    """The class's own forward then goes its way, whether that is read or not."""
    subject = cases.subject_of(family, "gdn")
    first, later, text = LATER[name]
    unit = of(subject, text, **{name: first})
    module = made(unit)
    own = copy.deepcopy(module)
    assert len(kernel.kernelize(module).served) == 1
    before = outputs(module, unit)
    assert cases.difference(before, outputs(own, unit)) < 1e-5
    for each in (module, own):
        setattr(each, name, later)
    expected = outputs(own, unit)
    assert cases.difference(before, expected) > 0.01
    assert cases.difference(outputs(module, unit), expected) < 1e-5


LEFT = {
    "size": "if _x_.shape[1] == 9:\n    _x_ = _x_ * 2",
    "value": "if _x_.sum() > 0:\n    _x_ = _x_ * 2",
    "gradients": "if torch.is_grad_enabled():\n    _x_ = _x_ * 2",
    "random": "_x_ = _x_ + torch.rand_like(_x_)",
    "attribute written": "self.seen = 1",
    "keyword counted": "_x_ = _x_ * (1 + len(kwargs))",
    "keyword written": "kwargs['seq_idx'] = None",
    "16 bits": "if _x_.dtype == torch.float16:\n    _x_ = _x_ * 2",
    "training": "if self.training:\n    _x_ = _x_ * 2",
    "one row": "if _x_.shape[0] == 1:\n    _x_ = _x_ * 2",
    "own size": "if self.head_k_dim > 3:\n    _x_ = _x_ * 2",
    "in place": "_x_ *= 1.5",
    # an argument that is read at its default alone may not be the cache or the mask
    "what the cache counts as": "if attention_mask == 0:\n    _x_ = _x_ * 2",
}


@in_turn(LEFT)
def test_what_a_trial_cannot_certify_is_left_alone(kernel, family, name):
    module = made(of(cases.subject_of(family, "gdn"), LEFT[name]))
    (row,) = kernel.kernelize(module).rows[:1]
    assert row.reason is not None and row.layer.endswith("GatedDeltaNet"), row


FORMULAS = {  # what is done to a fork of transformers' file
    "a switch of the process": lambda functions, forward: functions[
        "torch_chunk_gated_delta_rule"
    ].body.insert(0, forms.statements("if torch.is_grad_enabled():\n    g = g * 2")[0]),
    "another function of the decay": lambda functions, forward: forms.respelled(
        forward, "softplus", "relu"
    ),
}


@in_turn(FORMULAS)
def test_another_formula_is_told_by_the_trial(kernel, family, name):
    unit = cases.Unit(cases.subject_of(family, "gdn"))
    forms.helpers_copied(unit)
    FORMULAS[name]({function.name: function for function in unit.before}, unit.forward)
    (row,) = kernel.kernelize(made(unit)).rows[:1]
    assert "gives other values on a small copy of it" in row.reason


def test_an_index_by_another_name(kernel):
    unit = cases.Unit(cases.subject_of("olmo_hybrid", "gdn"))
    forms.rename_attributes(unit, {"layer_idx": "cache_idx"})
    assert refactors.examine(made(unit), unit) == ("served", "")
