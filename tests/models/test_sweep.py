"""tests/sweep_models.py on a sample of types: what it makes, serves and compares; and that it sees
a wrong kernel."""

import pytest
import sweep_models
from conftest import submodule

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLE = {  # modules served of each, of two decoder layers
    "llama4": 11, "seed_oss": 11, "lfm2": 11, "modernbert": 2, "mt5": 4, "phi3": 11, "pixtral": 9,
    "granitemoehybrid": 8, "gemma": 11, "qwen3_5": 13,
}  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_type(kind):
    result = sweep_models.compare(kind)
    assert result.state == "ok" and result.served == SAMPLE[kind], result
    if kind == "llama4" and "logits" not in result.compared:
        pytest.skip("transformers' own forward raises, in 5.24.0")
    assert result.compared.startswith("modules, logits") and "gradients" in result.compared
    if kind in ("modernbert", "pixtral"):
        assert "its activation is GELUActivation, by erf" in result.note


def test_a_wrong_kernel_is_seen(monkeypatch):
    reference = submodule("swiglu.reference")
    forward = reference.swiglu_fwd
    monkeypatch.setattr(reference, "swiglu_fwd", lambda *args: forward(*args) * 1.01)
    with pytest.raises(sweep_models.Wrong, match="in float64 differs by 1.0e-02"):
        sweep_models.compare("lfm2")
    monkeypatch.setattr(sweep_models, "check_modules", lambda *_: None)
    with pytest.raises(sweep_models.Wrong, match="logits differ"):
        sweep_models.compare("lfm2")


def test_every_type_is_known():
    assert len(sweep_models.types()) > 500 and set(SAMPLE) <= set(sweep_models.types())
