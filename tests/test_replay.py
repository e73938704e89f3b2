"""Launches that are kept and made again (runtime/replay.py)."""

import pytest
import torch
from conftest import submodule

pytestmark = pytest.mark.gpu


def setup_case(M):
    torch.manual_seed(0)
    weights = [torch.randn(256, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return torch.randn(M, 128, device="cuda", dtype=torch.bfloat16), *weights


def replays(kernel, M):
    """fused_swiglu(x, ...), and the Replay that launches it: few rows by pointers, else by maps."""
    module = submodule("swiglu.portable.forward" if M <= 64 else "swiglu.hopper.forward")
    x, w_gate, w_up = setup_case(M)
    found = []
    original = submodule("runtime.replay").Replay.__call__

    def spy(self, key, arguments):
        found.append(self)
        return original(self, key, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submodule("runtime.replay").Replay, "__call__", spy)
        kernel.fused_swiglu(x, w_gate, w_up)
    assert module._plan.cache_info().currsize
    return found[0], x, w_gate, w_up


@pytest.mark.parametrize("M", [3, 300])
def test_kept_launches_are_right(kernel, M):
    replay, x, w_gate, w_up = replays(kernel, M)
    want = kernel.fused_swiglu(x, w_gate, w_up)
    replay.kept.clear()
    other = torch.randn_like(x)
    want_other = kernel.fused_swiglu(other, w_gate, w_up)
    for _ in range(3):  # the same addresses in turn; the outputs' come back from the allocator
        assert torch.equal(kernel.fused_swiglu(x, w_gate, w_up), want)
        assert torch.equal(kernel.fused_swiglu(other, w_gate, w_up), want_other)
    assert replay.keeps and 2 <= len(replay.kept) <= 7
    x.copy_(other)  # another tensor in the same place
    assert torch.equal(kernel.fused_swiglu(x, w_gate, w_up), want_other)


@pytest.mark.parametrize("M", [3, 300])
def test_nothing_is_kept_alive(kernel, M):
    replays(kernel, M)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    case = setup_case(M)
    for _ in range(3):
        kernel.fused_swiglu(*case)
    del case
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("M", [3, 300])
def test_few_are_kept(kernel, M, monkeypatch):
    monkeypatch.setattr(submodule("runtime.replay"), "LIMIT", 4)
    replay, _, w_gate, w_up = replays(kernel, M)
    xs = torch.randn(10, M, 128, device="cuda", dtype=torch.bfloat16)
    for x in xs:
        kernel.fused_swiglu(x, w_gate, w_up)
    assert len(replay.kept) <= 4


@pytest.mark.parametrize("M", [3, 300])
def test_a_triton_that_launches_otherwise(kernel, M, monkeypatch):
    replay, x, w_gate, w_up = replays(kernel, M)
    want = kernel.fused_swiglu(x, w_gate, w_up)

    def unknown(compiled, kept):
        raise AttributeError("launch")

    monkeypatch.setattr(submodule("runtime.replay"), "_keeping", unknown)
    replay.kept.clear()
    assert torch.equal(kernel.fused_swiglu(x, w_gate, w_up), want)
    assert not replay.keeps
    assert torch.equal(kernel.fused_swiglu(x, w_gate, w_up), want)
    replay.keeps = True


@pytest.mark.parametrize("M", [3, 300, 2048])
def test_two_devices(kernel, M):
    """Tensors on a device that is not the current one, in turn with the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    cases = [[t.to(f"cuda:{i}").requires_grad_() for t in setup_case(M)] for i in range(2)]
    found = []
    for _ in range(3):
        for case in cases:
            z = kernel.fused_swiglu(*(t.detach() for t in case))
            y = kernel.fused_swiglu_mlp(*case, case[1].detach().t().contiguous())
            found.append([z, y, *torch.autograd.grad(y.float().sum(), case)])
    assert torch.cuda.current_device() == 0
    assert all(t.device == case[0].device for case, out in zip(cases, found) for t in out)
    for out in found[1:]:
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(out, found[0]))
