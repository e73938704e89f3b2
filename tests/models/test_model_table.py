"""docs/model_table.md and its record agree, and a sample of types gives what the record says."""

import json

import model_table
import pytest
import release_counts
import sweep_models
import torch
from conftest import submodule

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLE = ("phi3", "qwen3_5_moe_text")


@pytest.fixture
def as_run(monkeypatch):
    """As the program sets it up: kernels are said to be there for experts, too."""
    for name in ("experts", "moe_blocks"):
        module = submodule(f"models.{name}")
        for attribute in ("why_not_on", "HALF"):
            monkeypatch.setattr(module, attribute, getattr(module, attribute))
    release_counts.served_everywhere()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_page_is_the_records():
    record = model_table.read()
    assert model_table.PAGE.read_text() == model_table.page(record)
    assert all(len(of) > 500 for of in record.values()) and len(record) >= 2
    wrong = {kind for of in record.values() for kind, s in of.items() if s in ("WRONG", "CRASH")}
    assert not wrong
    other = json.loads(json.dumps(record))
    newest = max(other, key=model_table.release_order)
    other[newest]["llama"]["MLP"] = "part"
    assert model_table.page(other) != model_table.page(record)


def test_what_the_page_says_is_left_alone_is():
    record = model_table.read()
    newest = record[max(record, key=model_table.release_order)]
    for kinds, part, _ in model_table.LEFT:
        assert {newest[kind].get(part) for kind in kinds} <= {"no", "part"}, (kinds, part)


FAMILIES = """
    llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_5_text qwen3_5_moe_text gemma gemma2
    gemma3_text gemma4_text deepseek_v2 deepseek_v3 glm4 glm4_moe gpt_oss kimi_linear lfm2 lfm2_moe
    olmo2 olmo3 granite phi3
""".split()


def test_the_families_of_the_front_page():
    """README says that these parts are replaced in their language models."""
    record = model_table.read()
    newest = record[max(record, key=model_table.release_order)]
    for kind in FAMILIES:
        parts = {newest[kind].get(part) for part in model_table.REPLACED}
        assert parts <= {"yes", None}, (kind, newest[kind])


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_type_is_as_recorded(as_run, kind):
    record = model_table.read().get(transformers.__version__)
    if record is None:
        pytest.skip("this release was not run")
    result = sweep_models.look_at(kind, model_table.look)
    assert result.state == "ok", result.note
    assert model_table.cells(result.rows) == record[kind]


def test_a_wrong_kernel_in_fp8_is_seen(as_run, monkeypatch):
    reference, force = submodule("fp8.reference"), submodule("runtime.dispatch").force
    with force("reference"):
        found = model_table.in_fp8("phi3")
        assert found and set(found) == {None}
        for name in ("mlp_fwd", "products_fwd"):
            right = getattr(reference, name)
            monkeypatch.setattr(reference, name, lambda *a, right=right: _half(right(*a)))
        with pytest.raises(sweep_models.Wrong, match="in FP8: logits"):
            model_table.in_fp8("phi3")


def _half(out):
    return out / 2 if isinstance(out, torch.Tensor) else type(out)(x / 2 for x in out)


def test_cells():
    rows = (("mlp", None), ("mlp", "why"), ("norm", None), ("block", "why"), ("router", "why"))
    assert model_table.cells(rows) == {"MLP": "part", "norm": "yes", "router": "no"}
    both = {"5.22.2": {"MLP": "no"}, "5.24.0": {"MLP": "yes"}}
    assert model_table.cell("MLP", both) == "yes (5.22.2: no)"
    assert model_table.cell("GDN", both) == ""
