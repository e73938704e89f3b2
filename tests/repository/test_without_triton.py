"""The built package where there is no Triton, or one that is too old: plain torch serves all."""

import fresh
import pytest
from conftest import ROOT

# what is in no Triton before 3.3; torch cannot be imported with much less
LATER = "triton.tools.tensor_descriptor,triton.experimental"


@pytest.mark.parametrize("hidden", ["triton", LATER], ids=["none", "old"])
def test_everything_is_served_by_plain_torch(repository, hidden):
    pytest.importorskip("transformers")
    if hidden == LATER:
        pytest.importorskip("triton")
    script = ROOT / "tests" / "without_triton.py"
    ran = fresh.python(script, repository, hidden, timeout=300, imported="torch")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "all served"
    assert ("identical" in ran.stdout) == (hidden == "triton")
    assert "hopper kernels for swiglu.forward are not used: No module named" in ran.stderr
