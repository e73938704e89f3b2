"""Hopper's gradients of the routed experts against torch in fp64, and the calls that they serve."""

from types import SimpleNamespace

import pytest
import test_experts_kernels as plain
import torch
from conftest import captured, relative_error, submodule
from experts_problems import of_gradient, problem, reference, with_leaves

BF16, FP16 = torch.bfloat16, torch.float16
NAN = float("nan")


@pytest.fixture
def hopper(monkeypatch):
    """The checks of portable's kernels, of Hopper's."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's own")
    portable, own = plain.module, submodule("experts.hopper.experts")
    experts = SimpleNamespace(
        prepare_experts_fwd=portable("experts").prepare_experts_fwd,
        prepare_experts_bwd=own.prepare_experts_bwd,
    )
    monkeypatch.setattr(plain, "module", lambda n: experts if n == "experts" else portable(n))


class Routed:
    """A routing in tiles of 128, of which some entries are held elsewhere and two experts get no
    rows; and the places and entries of each expert's rows."""

    def __init__(self, T, K, E):
        self.ids = problem(T, K, E, 8, 8, BF16, "cuda", "held elsewhere").ids.clone()
        self.ids[(self.ids == 0) | (self.ids == 3)] = -1
        self.routing = plain.module("routing").route(self.ids, E, 128)
        self.places, self.entries, first = [], [], 0
        for expert in range(E):
            entries = (self.ids.reshape(-1) == expert).nonzero()[:, 0]
            place = first // 128 * 128 + 128 * expert
            self.places.append(slice(place, place + len(entries)))
            self.entries.append(entries)
            first += len(entries)

    def lay(self, x):
        """x [S, width] by places: zeros behind an expert's rows up to a whole step, then NaN."""
        out = x.new_full((self.routing.places, x.shape[1]), NAN)
        for places, entries in zip(self.places, self.entries):
            out[places.start : places.start + -(-len(entries) // 64) * 64] = 0
            out[places] = x[entries]
        return out


def normal(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


# strips held, streamed and both, odd numbers of tiles, one tile, ragged widths, no rows
@pytest.mark.gpu
@pytest.mark.parametrize("T, K, E, M, N, dtype", [
    (2000, 8, 64, 1024, 2048, BF16), (3000, 2, 5, 256, 384, BF16), (500, 2, 9, 200, 72, FP16),
    (5000, 8, 100, 136, 640, BF16), (4600, 8, 100, 136, 384, BF16), (3000, 2, 5, 256, 1288, BF16),
])  # fmt: skip
def test_weight_strips(hopper, T, K, E, M, N, dtype):
    strips, routed = submodule("experts.hopper.strips"), Routed(T, K, E)
    a = routed.lay(normal(T * K, M, dtype=dtype))
    b = routed.lay(normal(T * K, N, dtype=dtype))
    exact = torch.stack([a[p].double().T @ b[p].double() for p in routed.places])
    for _ in range(20):
        found = strips.weight_gradient(a, b, routed.routing)
        assert relative_error(found, exact) < plain.ROUNDED[dtype]
        assert not found[0].any() and not found[3].any()


@pytest.mark.gpu
@pytest.mark.parametrize("T, K, E, H, I, activation, limit, dtype", [
    (2000, 8, 64, 256, 512, "silu", None, BF16), (3000, 2, 5, 136, 200, "silu", 0.7, FP16),
    (500, 2, 9, 72, 264, "swigluoai", 0.9, BF16),
])  # fmt: skip
def test_gate_strips(hopper, T, K, E, H, I, activation, limit, dtype):  # noqa: E741
    """All it writes, zeros behind an expert's last row included, and nothing else."""
    routed = Routed(T, K, E)
    dout, gate_up = normal(T, H, dtype=dtype), normal(T * K, 2 * I, dtype=dtype)
    w_down, weights = normal(E, H, I, dtype=dtype) * H**-0.5, torch.rand(T, K, device="cuda")
    entry_dout = dout.repeat_interleave(K, 0)
    gate, up = gate_up.double().chunk(2, -1)
    z = reference.gated(gate, up, activation, limit)
    dz = torch.zeros_like(z)
    for w, entries in zip(w_down, routed.entries):
        dz[entries] = entry_dout[entries].double() @ w.double()
    by_entry = weights.double().reshape(-1, 1)
    d_gate_up = reference._gated_gradient(by_entry * dz, gate, up, activation, limit, False)
    right = (routed.lay(d_gate_up), routed.lay(by_entry * z), (dz * z).sum(1).reshape(T, K))
    for _ in range(10):
        rows = torch.cat([gate_up[entries] for entries in routed.entries])
        mine = normal(routed.routing.places, 2 * I, dtype=dtype) * NAN
        wz = normal(routed.routing.places, I, dtype=dtype) * NAN
        parts = submodule("experts.hopper.gate").gate_gradient(
            routed.lay(entry_dout), w_down, rows, weights, routed.routing, mine, wz, True,
            activation, limit,
        )  # fmt: skip
        dweights = plain.module("combine").weights_gradient(parts, weights, routed.routing)
        for found, exact in zip((mine, wz, dweights), right):
            assert torch.equal(found.isnan(), exact.isnan())
            error = relative_error(found.nan_to_num(), exact.nan_to_num())
            assert error < 2 * plain.ROUNDED[dtype]


SIZES = plain.SIZES[5:]  # those with tiles of 128 rows


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
def test_values(hopper, sizes):
    for routing in plain.ROUTINGS:
        plain.test_backward(sizes, routing, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_repeat(hopper, sizes):
    plain.test_bits_repeat(sizes, {})


@pytest.mark.gpu
def test_a_graph_replays_the_gradients(hopper):
    """With other ids: grids are sized by a bound, so programs may have nothing to do."""
    p, dout = problem(700, 8, 64, 512, 256, BF16, "cuda"), normal(700, 512, dtype=BF16)
    plain.backward(p, dout)
    graph, (_, found) = captured(plain.backward, p, dout)
    for routing in ("one expert", "held elsewhere", "random"):
        q = problem(700, 8, 64, 512, 256, BF16, "cuda", routing, seed=1)
        for kept, new in zip(p[:5], q[:5]):
            kept.copy_(new)
        graph.replay()
        assert all(map(torch.equal, found, plain.backward(q, dout)[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("T, folder", [(4000, "hopper"), (100, "portable")])
def test_who_serves(kernel, hopper, T, folder):
    p, leaves = with_leaves(problem(T, 4, 32, 512, 256, BF16, "cuda"))
    with submodule("runtime.dispatch").served() as record:
        kernel.fused_experts(*p[:5]).sum().backward()
    assert record["experts_bwd"] == [folder] and all(leaf.grad is not None for leaf in leaves)


def test_plain_weights_without_biases(monkeypatch):
    """All else is the portable kernels', of any number of rows."""
    own, portable = submodule("experts.hopper.experts"), submodule("experts.portable.experts")
    monkeypatch.setattr(own.device, "has_wgmma", lambda where: True)
    monkeypatch.setattr(portable, "tiles_for", lambda *sizes: {"BLOCK_M": 128})

    def served(**layout):
        p = problem(9, 2, 4, 16, 8, BF16, **layout)
        return own.prepare_experts_bwd(of_gradient(p, p.x)) is not None

    assert served() and not served(biased=True) and not served(turned=True)
