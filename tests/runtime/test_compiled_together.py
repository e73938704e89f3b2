"""A first call of several kernels compiles them in threads, and starts them in their order."""

import sys
import threading

import pytest
import torch
from conftest import submodule
from interpreter import compiled

pytest.importorskip("triton")
pytestmark = compiled
ahead, launch = submodule("runtime.ahead"), submodule("runtime.launch")


@pytest.fixture
def events(monkeypatch):
    """What is compiled, in any order, and what is started, by names of kernels; nothing runs."""
    found, lock = [], threading.Lock()

    def note(kind, one):
        with lock:
            found.append((kind, one.kernel.__name__, threading.get_ident()))

    monkeypatch.setattr(ahead, "_compile", lambda one, places: note("compiled", one))
    monkeypatch.setattr(launch.Launch, "_find_and_start", lambda one, _: note("started", one))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def launches():
    """Two launches of one kernel that are alike, and one of another."""
    quantise, token = submodule("fp8.portable.quantise"), submodule("fp8.call")
    x = torch.zeros(4, 256).bfloat16()
    first = quantise.quantise_launch(x)
    gate = quantise.launch_of(quantise._silu_mul_quantise_kernel, 8, (256, 256), x.device, x.shape)
    codes = torch.zeros(token.padded(4), 256).to(torch.float8_e4m3fn), torch.zeros(2, 16)
    return lambda: [one(*given, *codes) for one, given in (
        (first, (x,)), (gate, (x, x)), (first, (x,)))]  # fmt: skip


def names(events, kind) -> list:
    return [name for found, name, _ in events if found == kind]


def test_kernels_are_compiled_before_the_first_starts(events):
    run = launches()
    with ahead.compiled_together():
        run()
        assert not events
    both = ["_quantise_kernel", "_silu_mul_quantise_kernel"]
    assert sorted(names(events, "compiled")) == both
    assert names(events, "started") == [*both, both[0]]
    assert [kind for kind, *_ in events] == ["compiled"] * 2 + ["started"] * 3
    here = threading.get_ident()
    assert all((thread == here) is (kind == "started") for kind, _, thread in events)


def test_kernels_that_are_known_are_not_compiled(events, monkeypatch):
    run = launches()
    monkeypatch.setattr(launch.Launch, "kept", lambda one, tensors: object())
    with ahead.compiled_together():
        run()
    assert not names(events, "compiled") and len(names(events, "started")) == 3


def test_where_launches_are_watched_or_captured(events, monkeypatch):
    """They start where they are."""
    run, seen = launches(), []
    with launch.watched(lambda one, tensors: seen.append(one)), ahead.compiled_together():
        run()
        assert len(seen) == len(names(events, "started")) == 3
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with ahead.compiled_together():
        run()
        assert len(names(events, "started")) == 6
    assert not names(events, "compiled") and not launch.is_watched()


def test_other_threads_and_errors(events):
    """Another thread's kernels start at once; those before an error do not start."""
    run = launches()
    with ahead.compiled_together():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert len(names(events, "started")) == 3
    with pytest.raises(ZeroDivisionError), ahead.compiled_together():
        run()
        raise ZeroDivisionError
    assert len(names(events, "started")) == 3 and not launch.is_watched()


def test_each_thread_has_watches_of_its_own(events):
    """Many that come and go: each sees its own launches alone, and all of them."""
    run, counts, everywhere = launches(), [], []

    def work():
        for _ in range(200):
            seen = []
            with launch.watched(lambda one, tensors, seen=seen: seen.append(one) is None):
                run()
            counts.append(len(seen))

    threads, switching = [threading.Thread(target=work) for _ in range(4)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with launch.watched(lambda one, tensors: everywhere.append(one), everywhere=True):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(switching)
    assert counts == [3] * 800 and len(everywhere) == 2400
    assert not events and not launch._watches


@pytest.mark.gpu
def test_experts_on_a_gpu():
    """A first call has the bits of a second one, for few tokens and many."""
    import fp8_problems

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("experts in FP8 are of Hopper")
    experts = submodule("experts.ops_fp8")
    for T in (4, 16, 300):
        problem = fp8_problems.experts_problem(T, 8, 2, 256, 384, "cuda")
        experts.FP8_EXPERTS.cache_clear()
        launch._codes.clear()
        first, again = (experts.fp8_experts(*problem) for _ in range(2))
        assert torch.equal(first, again) and first.isfinite().all()
