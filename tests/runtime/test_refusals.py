"""Calls that kernels refuse: a layer asks for them at each token, and is told at once."""

import pytest
import torch
from conftest import submodule
from interpreter import compiled

pytest.importorskip("triton.experimental.gluon")
from test_host_calls import functions, hopper  # noqa: E402, F401

pytestmark = compiled
projection = submodule("projection.project")
HALF = torch.bfloat16


def few(M=4, N=8192, K=64, dtype=HALF):
    """Tokens, and a weight whose product cuBLAS makes as fast."""
    return torch.zeros(M, K, dtype=dtype), torch.zeros(N, K, dtype=dtype)


def project(x, w):
    return projection.project(x, [w])


@torch.no_grad()
def test_functions_of_a_refusal(hopper):  # noqa: F811
    """Four times as many where the reasons are looked for again."""
    x, w = few()
    assert project(x, w) is None and len(projection.PROJECT.refused) == 1
    assert functions(lambda: project(x, w)) <= 7
    assert functions(lambda: (projection.PROJECT.cache_clear(), project(x, w))) > 24
    assert len(projection.PROJECT) == 0


@torch.no_grad()
def test_what_a_refusal_is_for(hopper):  # noqa: F811
    x, w = few()
    assert project(x, w) is None

    def known(x, w):
        tensors = (x, w, *(None,) * 5)
        return projection.PROJECT.refused.find(tensors, (None, False), True) is not None

    assert known(x, w) and known(*few())
    for other in (few(M=5), few(N=128), few(K=128), few(dtype=torch.float16), (x, few(N=64)[1])):
        assert not known(*other)
    with torch.enable_grad():
        assert not known(x, w)
    with submodule("runtime.dispatch").served() as record:
        assert project(x, w) is None and record["project_fwd"] == ["reference"]
    assert project(*few(M=1))[0].shape == (1, 8192)  # has a kernel
    assert project(x, w) is None


@torch.no_grad()
def test_refusals_that_do_not_follow_from_facts(hopper):  # noqa: F811
    """A weight at an odd address is refused; the next one of its form is not."""
    x, w = few(M=1, N=128)
    odd = torch.zeros(128 * 64 + 1, dtype=HALF)[1:].view(128, 64)
    assert odd.data_ptr() % 16
    assert project(x, odd) is None and len(projection.PROJECT.refused) == 0
    assert project(x, w)[0].shape == (1, 128) and len(projection.PROJECT) == 1
    found = []
    with torch.enable_grad():
        torch.vmap(lambda row: found.append(project(row[None], w)) or row)(x)
    torch.vmap(lambda row: found.append(project(row[None], w)) or row)(few(M=3, N=128)[0])
    assert found == [None, None] and len(projection.PROJECT.refused) == 0


@torch.no_grad()
def test_memory_of_refusals(hopper):  # noqa: F811
    x, w = few()
    for N in range(8192, 8232):
        assert project(x, torch.zeros(N, 64, dtype=HALF)) is None
    assert len(projection.PROJECT.refused) == submodule("runtime.cache").ALIKE
    projection.PROJECT.cache_clear()
    assert len(projection.PROJECT.refused) == 0
