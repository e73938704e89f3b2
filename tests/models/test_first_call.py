"""What kernelize costs the first time in a process: the Python functions that it calls."""

import fresh
import pytest
from conftest import ROOT

pytest.importorskip("transformers")
MOST = 5500  # 5,260 with transformers 5.22 in Python 3.11, 5,400 with 5.24; comprehensions and
# generated constructors apart
SCRIPT = """
import sys
from conftest import load_package, submodule
from tiny_models import random_model

package, model, found = load_package(), random_model("llama"), []

def note(frame, event, _):
    if event == "call" and not frame.f_code.co_name.startswith("<"):
        found.append(frame.f_code)

with submodule("runtime.dispatch").force("reference"):
    sys.setprofile(note)
    report = package.kernelize(model)
    sys.setprofile(None)
print(len(found), len(report.served))
"""


def test_frames_of_a_llama():
    run = fresh.python("-c", SCRIPT, cwd=ROOT / "tests")
    frames, served = map(int, run.stdout.split())
    assert served == 12 and frames <= MOST
