"""tests/refactors.py on a sample of classes and refactors: none is served with other values, and
how many of each kind are served at least."""

import collections

import pytest
import refactors
import torch

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# kind: (the family of the class, every n-th refactor, the least share of them that is served)
SAMPLE = {
    "mlp": ("phi3", 16, 0.9),
    "norm": ("gemma2", 17, 0.9),
    "attention": ("qwen3", 21, 0.85),
    "layer": ("llama", 13, 0.85),
    "gdn": ("qwen3_next", 19, 0.8),
    "kda": ("kimi_linear", 19, 0.9),
    "experts": ("mixtral", 9, 0.3),
    "router": ("qwen3_moe", 9, 0.7),
    "block": ("qwen2_moe", 9, 0.7),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", SAMPLE)
def test_refactors(kernel, kind):
    family, every, least = SAMPLE[kind]
    results = refactors.sample(family, kind, every)
    wrong = [result for result in results if result.state == "WRONG"]
    assert not wrong
    assert all(result.reason for result in results if result.state == "left")
    counts = collections.Counter(r.state for r in results if not r.mutant)
    assert len(counts) and sum(counts.values()) >= 6, "hardly a refactor is a case"
    assert counts["served"] / sum(counts.values()) >= least, refactors.table(results)
    assert sum(result.mutant for result in results) >= 4


@pytest.mark.parametrize("family, kind", [("llama", "layer"), ("qwen3", "attention")])
def test_words_of_functions_inside_of_a_forward(kernel, family, kind):
    """A keyword that only an inner function has a name for is for the class's own forward."""
    subject = next(iter(refactors.cases.Model(family).subjects((kind,))))
    names, tried = list(refactors.refactor_mutants.WORDS), 0
    for name, unit, module in refactors.refactor_mutants.traps(subject, False, names):
        try:
            state, reason = refactors.examine(module, unit)
            assert state != "WRONG", (name, reason)
            tried += 1
        finally:
            refactors.cases.forget(type(module))
    assert tried == len(names)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
@pytest.mark.parametrize(
    "trap, expected",
    [
        ("dtype_check_that_scales", ("left", "its forward gives other values on a small twin")),
        ("old_keyword_without_decorator", ("served", "")),
    ],
)
def test_traps_of_gated_delta_nets(kernel, family, trap, expected):
    """Another scale in 16 bits alone; a cache that a call by its old name leaves empty."""
    subject = next(iter(refactors.cases.Model(family).subjects(("gdn",))))
    found = list(refactors.refactor_mutants.traps(subject, False, [trap]))
    assert len(found) == 1
    _, unit, module = found[0]
    try:
        assert refactors.examine(module, unit) == expected
    finally:
        refactors.cases.forget(type(module))


KDA = [  # (family, refactor of a layer with its gate)
    ("kimi_linear", "everything_renamed"), ("bailing_hybrid", "everything_renamed"),
    ("glm5_next_text", "everything_renamed"), ("glm5_next_text", "gate_inlined"),
    ("kimi_linear", "gate_read_from_outside"), ("bailing_hybrid", "gate_of_raw_values"),
    ("kimi_linear", "qkv_fused"), ("bailing_hybrid", "qk_fused"),
    ("kimi_linear", "output_gate_and_strength_fused"), ("bailing_hybrid", "formula_for_softplus"),
]  # fmt: skip


@pytest.mark.parametrize("family, refactor", KDA)
def test_roles_of_kimi_delta_attention(kernel, family, refactor):
    """Whatever names, classes and projections its parts have."""
    subject = next(iter(refactors.cases.Model(family).subjects(("kda",))))
    unit, module = refactors.built(refactor, subject, False)
    try:
        assert refactors.is_case(module, unit)
        assert refactors.examine(module, unit) == ("served", "")
    finally:
        refactors.cases.forget(type(module))


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid", "glm5_next_text"])
def test_traps_of_kimi_delta_attention(kernel, family):
    """A layer or a gate that computes something else is left alone, or is another known form."""
    subject = next(iter(refactors.cases.Model(family).subjects(("kda",))))
    mutants, left = refactors.refactor_mutants, 0
    names = [name for name in mutants.TRAPS if name.startswith("kda_")]
    for name, unit, module in mutants.traps(subject, False, names):
        try:
            state, reason = refactors.examine(module, unit)
            assert state != "WRONG", (name, reason)
            left += state == "left"
        finally:
            refactors.cases.forget(type(module))
    assert left > 14


@pytest.mark.parametrize("user", [False, True])
def test_a_function_of_torch_that_is_not_listed(kernel, user):
    """It is called, as any is, once the user names the class; unasked, other people's is not."""
    subject = next(iter(refactors.cases.Model("llama").subjects(("mlp",))))
    unit = refactors.cases.Unit(subject)
    refactors.refactor_mutants.put_first(unit, "_x_ = torch.nn.functional.pad(_x_, (0, 0))")
    module = refactors.cases.build(refactors.cases.load(unit, user=user), unit)
    (row,) = kernel.kernelize(module).rows[:1]
    assert row.reason == (
        "LlamaMLP is no class of transformers: if you know what it computes, name it, "
        "kernelize(model, trust=[LlamaMLP])"
        if user
        else "its forward is patched: it is not transformers' own"
    )
    assert refactors.is_case(module, unit)
    assert refactors.examine(module, unit) == ("served", "")
    refactors.cases.forget(type(module))


def test_sees_a_wrong_one(kernel, monkeypatch):
    """An activation that gives something else is WRONG, and a refactor that is none is no case."""
    subject = next(iter(refactors.cases.Model("llama").subjects(("mlp",))))
    unit, module = refactors.built("copied", subject, False)
    assert refactors.is_case(module, unit)
    assert refactors.examine(module, unit) == ("served", "")
    swiglu = refactors.submodule("layers.swiglu")
    plain = swiglu.fused_swiglu  # which serves calls without gradients
    monkeypatch.setattr(swiglu, "fused_swiglu", lambda *a, **k: plain(*a, **k) * 1.1)
    state, reason = refactors.examine(module, unit)
    assert state == "WRONG" and "differs by" in reason
    for parameter in module.parameters():
        parameter.data.mul_(1.1)
    assert not refactors.is_case(module, unit)
