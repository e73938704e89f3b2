"""tests/refactors.py on a sample of classes: all refactors are served, and no trap or mutant with
other values than its own."""

import contextlib

import pytest
import refactors
import torch

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

FAMILY = {  # of a kind's class, and every n-th refactor, trap and mutant
    "mlp": ("phi3", 8), "norm": ("gemma2", 7), "attention": ("qwen3", 11), "layer": ("llama", 11),
    "gdn": ("qwen3_next", 17), "kda": ("kimi_linear", 61), "experts": ("mixtral", 8),
    "router": ("qwen3_moe", 8), "block": ("qwen2_moe", 12),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", FAMILY)
def test_refactors(kernel, kind):
    results = refactors.sample(FAMILY[kind][0], kind, FAMILY[kind][1])
    assert not [result for result in results if result.state == "WRONG"]
    assert all(result.reason for result in results if result.state == "left")
    mine = [result for result in results if not result.mutant]
    assert mine and len(results) - len(mine) > 1
    # left: experts' loops, unless they are transformers' own, and what the signature does not name
    left = [r for r in mine if r.state == "left" and "popped_from_kwargs" not in r.name]
    assert not left or kind == "experts", refactors.table(results)


@contextlib.contextmanager
def trap(family, kind, name):
    """(unit, module) of a trap that can be made of this family."""
    ((_, unit, module),) = refactors.traps.traps(
        refactors.cases.subject_of(family, kind), False, [name]
    )
    try:
        yield unit, module
    finally:
        refactors.cases.forget(type(module))


@pytest.mark.parametrize("family, kind", [("llama", "layer"), ("qwen3", "attention")])
def test_words_of_functions_inside_of_a_forward(kernel, family, kind):
    """A keyword that only an inner function has a name for is for the class's own forward."""
    for name in refactors.traps.WORDS:
        with trap(family, kind, name) as (unit, module):
            state, reason = refactors.examine(module, unit)
            assert state != "WRONG", (name, reason)


KDA = [  # (family, refactor of a layer with its gate)
    ("bailing_hybrid", "everything_renamed"), ("glm5_next_text", "gate_inlined"),
    ("bailing_hybrid", "gate_of_raw_values"),
]  # fmt: skip


@pytest.mark.parametrize("family, refactor", KDA)
def test_roles_of_kimi_delta_attention(kernel, family, refactor):
    """Whatever names, classes and projections its parts have."""
    subject = refactors.cases.subject_of(family, "kda")
    unit, module = refactors.built(refactor, subject, False)
    try:
        assert refactors.is_case(module, unit)
        assert refactors.examine(module, unit) == ("served", "")
    finally:
        refactors.cases.forget(type(module))


SERVED = ("served", "")
TRAPS = [  # (family, kind, trap, outcome): those of one kind, each in one family
    # another scale in 16 bits alone; a cache that a call by its old name leaves empty
    ("qwen3_next", "gdn", "dtype_check_that_scales",
     ("left", "its forward gives other values on a small copy of it")),
    ("qwen3_5", "gdn", "old_keyword_without_decorator", SERVED),
    ("olmo_hybrid", "gdn", "old_keyword_without_decorator", SERVED),
    # of a layer with its gate: another computation is left alone, for some reason
    *[("kimi_linear", "kda", f"kda_{name}", None) for name in (
        "without_l2_norm", "decay_halved", "state_transposed", "cache_of_the_first_layer",
        "another_width_of_the_cache", "gate_bent_between_its_projections",
        "chunks_without_the_state")],
    ("bailing_hybrid", "kda", "kda_bound_of_a_constant", None),
    ("glm5_next_text", "kda", "kda_bound_doubled", None),
    # harmless until then; another known form
    ("kimi_linear", "kda", "kda_gate_patched_afterwards", SERVED),
    ("glm5_next_text", "kda", "kda_bound_ignored", SERVED),
]  # fmt: skip


@pytest.mark.parametrize("family, kind, name, outcome", TRAPS)
def test_traps_of_delta_rules(kernel, family, kind, name, outcome):
    with trap(family, kind, name) as (unit, module):
        if outcome is not None:
            assert refactors.examine(module, unit) == outcome
        else:
            with refactors.everywhere():
                assert refactors.served(module) is not None


@pytest.mark.parametrize("user", [False, True])
def test_a_function_of_torch_that_is_not_listed(kernel, user):
    """It is called, as any is, once the user names the class; unasked, other people's is not."""
    subject = refactors.cases.subject_of("llama", "mlp")
    unit, module = refactors.built("a_function_of_torch", subject, user)
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
    subject = refactors.cases.subject_of("llama", "mlp")
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
