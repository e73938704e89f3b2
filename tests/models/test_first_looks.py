"""The first look at a class: its verdict is kept, so one thread looks at a time, and an error that
says nothing of the class is none."""

import threading
import time

import pytest
import torch
from conftest import submodule
from tiny_models import random_model

pytest.importorskip("transformers")
apply, report = submodule("models.apply"), submodule("models.report")


def test_one_thread_looks_at_a_time(kernel, monkeypatch):
    inside, most, own = [], [], apply.recognise

    def slowly(module):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()
        return own(module)

    monkeypatch.setattr(apply, "recognise", slowly)
    models = [random_model("llama") for _ in range(2)]
    threads = [threading.Thread(target=kernel.kernelize, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) > 10 and max(most) == 1


@pytest.mark.parametrize("error", [MemoryError, RecursionError, SystemError, OSError])
def test_an_error_of_the_process_is_no_verdict(error):
    stand_ins = submodule("models.stand_ins")

    def forward(twin, x):
        raise error("no more")

    with pytest.raises(error):
        stand_ins.result_of(forward, torch.nn.Module(), torch.ones(2))
    with pytest.raises(stand_ins.Raises, match="its forward raises ValueError when tried"):
        stand_ins.result_of(_raises, torch.nn.Module(), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_number_in_place_of_infinity_is_another(dtype):
    same = submodule("models.stand_ins").same
    x = torch.tensor([1.0, torch.inf], dtype=dtype)
    assert same(x, x.clone())
    for other in (1.0, 6e4, torch.nan, -torch.inf):
        assert not same(torch.tensor([1.0, other], dtype=dtype), x)


def _raises(twin, x):
    raise ValueError("sizes do not fit")


def test_a_failed_trial_is_not_another_formula():
    assert report.advice_for("its forward raises RuntimeError when tried: x") == report.TRIAL_FAILED
    assert report.advice_for("looking at it raises KeyError") == report.TRIAL_FAILED
    assert report.advice_for("its values are another formula") == report.ITS_OWN
