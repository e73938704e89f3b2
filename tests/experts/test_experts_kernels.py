"""The kernels of the routed experts against the reference in fp64, and what they promise."""

import itertools

import pytest
import torch
from conftest import TOLERANCE, assert_close, captured, relative_error, submodule
from experts_problems import (
    LAYOUTS,
    ROUTINGS,
    answer,
    by_grouped_mm,
    gradients,
    of_gradient,
    options_of,
    problem,
    with_leaves,
)
from interpreter import (  # noqa: F401
    DEVICE,
    INTERPRETING,
    both_ways,
    compiled,
    interpreted,
    test_in_the_interpreter,
)

NAMES = ("dx", "dw_gate_up", "dw_down", "dweights", "db_gate_up", "db_down")
# Gate, up, z and y are rounded once each at most, and out once more
ROUNDED = {torch.bfloat16: 3.5e-3, torch.float16: 5e-4, torch.float32: 1e-6}


def module(name):
    return submodule(f"experts.portable.{name}")


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch):
    """The interpreter, which rounds as it likes, may compute in fp32."""
    if INTERPRETING:
        monkeypatch.setattr(module("experts"), "HALF", (torch.float16, torch.float32))


def poison(p):
    """The allocator's next blocks are full of NaN."""
    size = 4 * p.ids.numel() * (p.x.shape[1] + p.w_gate_up.shape[1]) + 1000
    del_me = torch.full((size,), float("nan"), dtype=p.x.dtype, device=p.x.device)
    del del_me


def forward(p):
    """out by the kernels."""
    out, gate_up, routing = module("experts").prepare_experts_fwd(p)(*p.tensors)
    assert gate_up is None and routing is None
    return out


def check_forward(p):
    poison(p)
    out = forward(p)
    assert out.dtype == p.x.dtype and out.shape == p.x.shape
    assert relative_error(out, answer(p)) < ROUNDED[p.x.dtype]


def backward(p, dout, recompute=False, needs=None, main_grads=(None, None)):
    """(out, gradients) by the kernels."""
    keeping = p._replace(options=p.options._replace(keeps=True, recompute=recompute))
    out, gate_up, routing = module("experts").prepare_experts_fwd(keeping)(*p.tensors)
    assert (gate_up is None) == recompute
    call = of_gradient(p, dout, gate_up, routing, needs)
    found = module("experts").prepare_experts_bwd(call)(*call.tensors, main_grads=main_grads)
    return out, found if p.b_down is not None else found[:4]


def check_backward(p, recompute=False, factor=2.0):
    """factor: gradients come of more roundings than the output."""
    dout = torch.randn_like(p.x)
    poison(p)
    out, found = backward(p, dout, recompute)
    right = answer(p)
    assert relative_error(out, right) < ROUNDED[p.x.dtype]
    # dweights is <dout, y> of each slot, which can cancel by chance where there are few of them.
    # Its error is told by the size to expect of it, |y| (dout has unit variance): at least this
    K = p.weights.shape[1]
    size = (K**0.5 * right.norm(dim=1) / p.weights.double().sum(1)).norm()
    for name, mine, exact in zip(NAMES, found, gradients(p, dout)):
        error, limit = relative_error(mine, exact), factor * ROUNDED[p.x.dtype]
        if name == "dweights":
            if exact.norm() < size:
                error *= (exact.norm() / size).item()
            # the error of eight numbers is up to 1.66 times that of many in 1 of 1500 draws (the
            # same roundings in torch)
            limit *= 1 + 2 * p.weights.numel() ** -0.5
        assert error < limit, f"{name}: {error:.1e}"


def check_routing(ids, E, height):
    """The buffer says what a stable sort of the live entries says, and the tiles cover the rows."""
    found = module("routing").route(ids, E, height)
    routing = found.buffer.cpu()
    flat, S = ids.cpu().reshape(-1).long(), ids.numel()
    live = (flat >= 0) & (flat < E)
    rows = int(live.sum())
    order = torch.argsort(torch.where(live, flat, E), stable=True)[:rows]
    counts = torch.bincount(flat[live], minlength=E)
    first = torch.cat([torch.zeros(1).long(), counts.cumsum(0)])
    assert torch.equal(routing[1 : E + 2].long(), first)
    assert torch.equal(routing[E + 2 : E + 2 + rows].long(), order)
    places = torch.full((S,), -1)
    expert = flat[order]
    gaps = first[expert] // height * height + height * expert - first[expert]
    places[order] = torch.arange(rows) + gaps
    assert places.max() < found.places
    assert torch.equal(routing[E + 2 + S : E + 2 + 2 * S].long(), places)
    tiles, lists = int(routing[0]), routing[E + 2 + 2 * S :]
    most = S // 16 + E
    listed = list(zip(lists[:tiles].tolist(), lists[most : most + tiles].tolist()))
    expected = [
        (e, row) for e in range(E) for row in range(int(first[e]), int(first[e + 1]), height)
    ]
    assert listed == expected
    assert tiles <= found.tiles


# ids of one block; of several blocks that count for themselves; of many blocks that are counted
@both_ways
@pytest.mark.parametrize("T, K, E", [(1, 1, 1), (20, 3, 9), (100, 4, 40), (1500, 2, 5)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing(T, K, E, routing):
    index = torch.int32 if T % 2 else torch.int64
    p = problem(T, K, E, 8, 8, device=DEVICE, routing=routing, index=index)
    check_routing(p.ids, E, 16 if T < 1000 else 64)


HALF, FP16 = torch.bfloat16, torch.float16
GATES = [("silu", 0.3), ("gelu_tanh", None), ("relu", None), ("swigluoai", 0.9)]
if INTERPRETING:
    # few tokens; tiles of 16, 32 and 64 rows; widths that no block divides
    HALF = torch.float32
    SIZES = [(3, 2, 12, 72, 40), (30, 2, 20, 72, 40), (40, 3, 7, 72, 40), (70, 2, 2, 72, 40)]
    # every routing with few tokens, and in tiles: of 16 and 64 rows the first two, of 32 the others
    MET = [(SIZES[0], r, HALF) for r in ROUTINGS] + [(SIZES[2], r, HALF) for r in ROUTINGS[2:]]
    MET += [(s, r, HALF) for s in (SIZES[1], SIZES[3]) for r in ROUTINGS[:2]]
    MET += [(SIZES[2], "held elsewhere", FP16)]
    TRAINED = [*MET[4:7], *MET[9:]]
    GATED, LAID = [(3, 2, 12, 40, 24), (30, 2, 4, 40, 24)], [(12, 2, 8, 72, 40), SIZES[3]]
else:
    # decoding; tiles of 16, 32, 64 and 128 rows; ragged widths; one expert
    SIZES = [
        (1, 8, 64, 2048, 512), (7, 10, 32, 2048, 512), (5, 3, 40, 72, 40), (9, 2, 16, 2048, 768),
        (100, 3, 7, 200, 136), (700, 8, 64, 2048, 512), (3000, 10, 64, 2048, 512),
        (3000, 2, 8, 72, 200), (600, 1, 1, 256, 128), (1200, 2, 8, 4096, 1792),
    ]  # fmt: skip
    MET = TRAINED = list(itertools.product(SIZES, ROUTINGS, (HALF, FP16)))
    GATED, LAID = [(T, 2, 8, 256, 128) for T in (3, 30, 3000)], SIZES


@both_ways
@pytest.mark.parametrize("sizes, routing, dtype", MET)
def test_forward(sizes, routing, dtype):
    p = problem(*sizes, dtype, DEVICE, routing)
    check_forward(p)
    check_routing(p.ids, sizes[2], 64)


@both_ways
@pytest.mark.parametrize("sizes, routing, dtype", TRAINED)
def test_backward(sizes, routing, dtype):
    p = problem(*sizes, dtype, DEVICE, routing)
    for recompute in (dtype == FP16,) if INTERPRETING else (False, True):
        check_backward(p, recompute)


@both_ways
@pytest.mark.parametrize("sizes", GATED)
@pytest.mark.parametrize("activation, limit", GATES)
def test_gates(sizes, activation, limit):
    p = problem(*sizes, HALF, DEVICE, activation=activation, limit=limit)
    check_forward(p)
    check_backward(p)


@both_ways
@pytest.mark.parametrize("sizes", LAID)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout))
def test_layouts(sizes, layout):
    """In fp16, of millions of numbers some lie so close to a clamp's limit that a sum in fp32 falls
    on its other side: their gradients are whole, or zero, and show beside errors of fp16."""
    other = HALF if "limit" in layout or INTERPRETING else FP16
    forms = [(HALF, "twice"), (other, "held elsewhere")]
    few = LAID.index(sizes)  # in the interpreter one form of each size
    for dtype, routing in forms[few : few + 1] if INTERPRETING else forms:
        p = problem(*sizes, dtype, DEVICE, routing, **layout)
        check_forward(p)
        for recompute in (few == 0,) if INTERPRETING else (False, True):
            check_backward(p, recompute)


@interpreted
def test_copy_engine(monkeypatch):
    """Flat loops, stores by tensor map, and tiles of half the height."""
    tiles = {**module("experts").tiles_for(torch.device("cpu"), 150, 2, 2), "BLOCK_M": 128}
    tiles["weight"] = {**tiles["weight"], "FLAT": True, "STORE": True, "BLOCK_K": 16}
    for part in ("up", "down", "dx", "gate"):
        tiles[part] = {**tiles[part], "TAILS": True, "STORE": part == "down"}
    monkeypatch.setattr(module("experts"), "tiles_for", lambda *sizes: tiles)
    check_backward(problem(150, 2, 2, 72, 40, routing="held elsewhere"))


@interpreted
@pytest.mark.parametrize("needed", range(6))
def test_one_gradient_alone(needed):
    p = problem(30, 2, 4, 40, 24, biased=needed > 3)
    dout = torch.randn_like(p.x)
    needs = [i == needed for i in range(6)]
    found = backward(p, dout, needs=needs)[1]
    assert [g is not None for g in found] == needs[: len(found)]
    assert_close(found[needed], gradients(p, dout)[needed])


@interpreted
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("spaced", [False, True])
def test_main_grads(turned, spaced):
    p = problem(30, 2, 4, 40, 24, turned=turned)
    dout = torch.randn_like(p.x)
    mains = [torch.ones_like(w, dtype=torch.float32) for w in (p.w_gate_up, p.w_down)]
    if spaced:
        mains = [main.repeat(1, 1, 2)[..., : main.shape[2]] for main in mains]
    found = backward(p, dout, main_grads=mains)[1]
    assert found[1] is None and found[2] is None
    for main, exact in zip(mains, gradients(p, dout)[1:3]):
        assert_close(main - 1, exact)


@interpreted
def test_infinite_rows_stay_with_their_expert():
    """A step over rows may reach into the next expert's: what those hold must not matter."""
    p = problem(30, 1, 3, 40, 24)
    p = p._replace(ids=torch.tensor([[0]] * 7 + [[1]] * 11 + [[2]] * 12))
    dout = torch.randn_like(p.x)
    exact = gradients(p, dout)
    p.x[7:18] = float("inf")
    found = backward(p, dout)[1]
    for mine, want in zip(found[1:3], exact[1:3]):
        for expert in (0, 2):
            assert_close(mine[expert], want[expert])
        assert not mine[1].isfinite().all()


@interpreted
def test_no_tokens():
    p = problem(0, 2, 3, 16, 8)
    assert check_forward(p) is None
    found = backward(p, p.x)[1]
    assert [g.shape for g in found] == [p.x.shape, p.w_gate_up.shape, p.w_down.shape, (0, 2)]
    assert not found[1].any() and not found[2].any()


@compiled
def test_what_is_served():
    supports = module("experts").supports
    p = problem(5, 2, 4, 16, 8, torch.bfloat16)
    assert supports(p)
    assert not supports(problem(5, 2, 4, 16, 8))  # fp32
    assert not supports(problem(5, 2, 4, 12, 8, torch.bfloat16))  # rows off 16 bytes
    assert not supports(problem(5, 2, 4, 16, 0, torch.bfloat16))  # nothing for TMA to read
    turned = problem(5, 2, 4, 16, 8, torch.bfloat16, turned=True, interleaved=True, biased=True)
    assert supports(turned)
    assert supports(turned._replace(options=p.options))
    assert not supports(p._replace(w_down=turned.w_down))  # one lies so, the other does not
    assert not supports(p._replace(options=turned.options))
    assert not supports(p._replace(b_down=p.x.new_zeros(4, 32)[:, ::2]))
    assert not supports(p._replace(weights=p.weights.double()))
    assert supports(p._replace(x=p.x.t().contiguous().t()))  # is copied


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_transformers(sizes, dtype):
    """In every form of the kernels. A few rows are rounded a few times: one draw is chance."""
    pytest.importorskip("transformers.integrations.moe")
    draws = 16 if sizes[0] * sizes[1] < 100 else 1
    names = ("out", *NAMES[:4])
    squares = torch.zeros(draws, 2, len(names), dtype=torch.float64)
    for draw in range(draws):
        p = problem(*sizes, dtype, "cuda", seed=draw)
        p = p._replace(weights=p.weights.to(dtype))
        dout = torch.randn_like(p.x)
        mine = (forward(p), *backward(p, dout)[1])
        its, leaves = with_leaves(p)
        out = by_grouped_mm(its)
        theirs = (out.detach(), *torch.autograd.grad(out, leaves, dout))
        exact = (answer(p), *gradients(p, dout))
        for side, found in enumerate((mine, theirs)):
            for name, (a, b) in enumerate(zip(found, exact)):
                squares[draw, side, name] = relative_error(a, b) ** 2
    errors = squares.mean(0).sqrt()
    for name, ours, others in zip(names, *errors.tolist()):
        assert ours <= others, f"{name}: {ours} over {others}"


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("layout", [{}, LAYOUTS[0]], ids=["plain", "gpt-oss"])
def test_bits_repeat(sizes, layout):
    routing = "held elsewhere" if sizes[0] > 8 else "random"
    p = problem(*sizes, torch.bfloat16, "cuda", routing, **layout)
    dout = torch.randn_like(p.x)
    first = (forward(p), *backward(p, dout)[1])
    for _ in range(3):
        again = (forward(p), *backward(p, dout)[1])
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.gpu
def test_a_token_does_not_depend_on_its_batch():
    """Whatever the height of the tiles; few tokens are summed in another order."""
    p = problem(3000, 8, 64, 1024, 512, torch.bfloat16, "cuda")
    everything = forward(p)
    for T in (9, 17, 40, 100, 333, 1000):
        some = p._replace(x=p.x[-T:], ids=p.ids[-T:], weights=p.weights[-T:])
        assert torch.equal(forward(some), everything[-T:])
    few = p._replace(x=p.x[-3:], ids=p.ids[-3:], weights=p.weights[-3:])
    assert relative_error(forward(few), everything[-3:]) < 4e-3
    one = few._replace(x=few.x[-1:], ids=few.ids[-1:], weights=few.weights[-1:])
    three = forward(few)
    assert torch.equal(forward(one), three[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 5, 64, 700])
@pytest.mark.parametrize("layout", [{}, LAYOUTS[0]], ids=["plain", "gpt-oss"])
def test_graph_replays_with_other_ids(T, layout):
    p = problem(T, 4, 32, 512, 256, torch.bfloat16, "cuda", **layout)
    forward(p)
    graph, out = captured(forward, p)
    for routing in ("one expert", "held elsewhere" if T > 2 else "random"):
        q = problem(T, 4, 32, 512, 256, torch.bfloat16, "cuda", routing, seed=1, **layout)
        for kept, new in zip(p.tensors, q.tensors):
            if kept is not None:
                kept.copy_(new)
        graph.replay()
        assert torch.equal(out, forward(q))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [{}, LAYOUTS[0]], ids=["plain", "gpt-oss"])
def test_the_host_waits_for_nothing(kernel, layout):
    for T in (1, 700, 4000):
        p, leaves = with_leaves(problem(T, 4, 32, 512, 256, torch.bfloat16, "cuda", **layout))
        more = options_of(p)
        kernel.fused_experts(*p[:5], **more).sum().backward()
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            kernel.fused_experts(*p[:5], **more).sum().backward()
            with torch.no_grad():
                kernel.fused_experts(*p[:5], **more)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [{}, LAYOUTS[0]], ids=["plain", "gpt-oss"])
def test_compiled_by_inductor(kernel, layout):
    """torch.compile is told where gradients lie: bits as in eager mode."""
    p = problem(300, 4, 8, 512, 256, torch.bfloat16, "cuda", **layout)
    turned = p.options.interleaved
    leaves = [t.mT if t.dim() == 3 and turned else t for t in with_leaves(p)[1]]
    leaves = [t.detach().requires_grad_() for t in leaves]

    def function(x, w_gate_up, w_down, weights, *biases):
        if turned:
            w_gate_up, w_down = w_gate_up.mT, w_down.mT
        more = {**options_of(p), **dict(zip(("b_gate_up", "b_down"), biases))}
        return kernel.fused_experts(x, w_gate_up, w_down, p.ids, weights, **more)

    found = []
    for f in (function, torch.compile(function, fullgraph=True)):
        out = f(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    assert all(map(torch.equal, *found))
    assert [g.stride() for g in found[1][1:]] == [leaf.stride() for leaf in leaves]


@pytest.mark.gpu
def test_who_serves(kernel):
    p = problem(20, 4, 32, 512, 256, torch.bfloat16, "cuda")
    assert kernel.implementation_of(kernel.fused_experts, *p[:5]) == "portable"
    odd = problem(20, 4, 32, 100, 50, torch.bfloat16, "cuda")
    assert kernel.implementation_of(kernel.fused_experts, *odd[:5]) == "reference"
    assert_close(kernel.fused_experts(*odd[:5]), answer(odd))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_a_second_backward_is_the_first(kernel, recompute):
    p = problem(20, 4, 32, 512, 256, torch.bfloat16, "cuda")
    p, leaves = with_leaves(p, "x", "w_gate_up", "w_down")
    out = kernel.fused_experts(*p[:5], recompute=recompute).sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(out, leaves), first))


@pytest.mark.gpu
def test_rows_past_32_bits():
    """2^31 elements and more in the results of the experts."""
    T, K, E, H, I = 135_000, 8, 2, 2048, 64
    p = problem(T, K, E, H, I, torch.bfloat16, "cuda", "twice")
    assert T * K * H > 2**31
    out = forward(p)
    for part in (slice(0, 20), slice(T - 20, T)):
        some = p._replace(x=p.x[part], ids=p.ids[part], weights=p.weights[part])
        assert relative_error(out[part], answer(some)) < TOLERANCE[torch.bfloat16]


if INTERPRETING:
    module("experts")
