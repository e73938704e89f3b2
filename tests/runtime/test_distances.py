"""Layers of one size differ in how far apart their weights lie: plans of one and of the others."""

import pytest
import torch
from conftest import submodule
from interpreter import compiled

pytest.importorskip("triton.experimental.gluon")
from launching import started  # noqa: E402
from test_host_calls import hopper  # noqa: E402, F401

pytestmark = compiled
HALF, N, K = torch.bfloat16, 512, 256
SIZES = (100, 256, 1000, 4096, 9000)  # tokens: tiles of several widths, with and without halves


@pytest.fixture
def layers():
    """Both weights in either order, as two tensors, as one, and interleaved."""
    memory, at, found = torch.zeros(40 * N * K, dtype=HALF), 0, []
    for gap in (0, 64, 64, 4096, 8 * K):
        first = memory[at : at + N * K].view(N, K)
        at += N * K + gap
        second = memory[at : at + N * K].view(N, K)
        at += N * K
        found += [(first, second), (second, first)]
    found.append(memory[: 2 * N * K].view(N, 2, K).unbind(1))
    return found


@torch.no_grad()
def test_launches_of_layers(hopper, layers):  # noqa: F811
    """Those of a layer that comes after others are those of the layer alone."""
    known, runs = submodule("swiglu.ops").SWIGLU, []
    for forgets in (False, True):
        known.cache_clear()
        with started() as starts:
            for M in SIZES:
                x = torch.zeros(M, K, dtype=HALF)
                for weights in layers * 2:
                    hopper.fused_swiglu(x, *weights)
                    if forgets:
                        known.cache_clear()
        runs.append(starts)
    assert len(runs[0]) == 2 * len(SIZES) * len(layers)
    assert runs[0] == runs[1] and len({str(start[:3]) for start in runs[0]}) >= len(SIZES)


@torch.no_grad()
def test_maps_of_weights_in_common(hopper, layers):  # noqa: F811
    """A new number of tokens encodes none of the weights' maps again."""
    forward, maps = submodule("swiglu.hopper.forward"), submodule("runtime.maps")
    forward.map_of_weights.cache_clear()
    found = []
    for M in (4096, 4097, 4098):
        for weights in layers:
            hopper.fused_swiglu(torch.zeros(M, K, dtype=HALF), *weights)
        found.append(forward.map_of_weights.cache_info().misses)
    assert found[0] == found[1] == found[2] > 0 and maps.BOUND.count > 0
