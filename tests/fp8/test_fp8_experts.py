"""Routed experts in FP8: the products against their operands, FP8Experts modules and models."""

import copy

import fp8_problems
import pytest
import torch
from conftest import captured, prepared, submodule
from conftest import relative_error as error
from fp8_problems import E4M3, needs_hopper
from interpreter import (
    compiled,
    interpreted,
    test_in_the_interpreter,  # noqa: F401
    wherever_kernels_run,
)

reference, dispatch = submodule("experts.reference"), submodule("runtime.dispatch")
quantiser, models = submodule("fp8.reference"), submodule("models.fp8")
fp8_experts = submodule("experts.ops_fp8").fp8_experts
# height, and what of the tables is for tiles of it
PART = {"GROUP": 2, "num_warps": 8, "num_stages": 3}
TILES = {height: {"HEIGHT": height, "up": PART, "down": PART} for height in (16, 32, 64)}


# --- the products


def parts(problem, height, monkeypatch):
    """(places of entries [T, K], z dequantised by places, what z is exactly, y by places, what y is
    of the kernel's own z) of tiles of one height."""
    hopper, routing = submodule("experts.hopper.fp8"), submodule("experts.portable.routing")
    x, w_gate_up, s_gate_up, w_down, s_down, ids, _ = problem
    (E, H, I), (T, K) = w_down.shape, ids.shape
    monkeypatch.setattr(hopper.tuning, "lookup", lambda *_, **__: TILES[height])
    plain, up, down = hopper._products(x.device, T, K, E, H, I)
    few = T <= hopper.FEW
    routed = plain if few else routing.route(ids, E, height)
    here = (ids >= 0) & (ids < E)
    places = torch.arange(T * K, device=x.device).view(T, K)
    if not few:
        first = E + 2 + T * K
        places = routed.buffer[first : first + T * K].view(T, K).long()
        assert torch.equal(places >= 0, here)
    count = T * K if few else plain.places
    codes, scales = quantiser.quantise_fwd(x)
    z = torch.zeros(count, I, device=x.device).to(E4M3)
    z_scales = torch.zeros(I // 128, count, device=x.device)
    y = torch.full((count, H), float("nan"), device=x.device, dtype=torch.bfloat16)
    up(w_gate_up, codes, scales, s_gate_up, ids, routed.buffer, z, z_scales)
    down(z, w_down, z_scales, s_down, ids, routed.buffer, y)
    wide = z.double() * z_scales.t().double().repeat_interleave(128, 1)
    tokens = (codes.double() * scales.double().repeat_interleave(128, 1))[:T]
    exact_z, exact_y = torch.zeros_like(wide), torch.zeros(count, H, dtype=torch.float64)
    exact_y = exact_y.to(x.device)
    for expert in range(E):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        at = places[token, slot]
        gate_up = quantiser.dequantised(w_gate_up[expert], s_gate_up[expert]).double()
        gate, up = (tokens[token] @ gate_up.t()).chunk(2, 1)
        exact_z[at] = torch.nn.functional.silu(gate) * up
        down_part = quantiser.dequantised(w_down[expert], s_down[expert]).double()
        exact_y[at] = wide[at] @ down_part.t()
    return places[here], wide, exact_z, y, exact_y


@wherever_kernels_run
def test_products(device, monkeypatch):
    """Triton's interpreter rounds to e4m3 and bf16 in ways of its own: twice the error of z."""
    needs_hopper(device)
    most_z = 0.045 if device == "cuda" else 0.09
    for T, E, K, H, I in ((3, 4, 2, 256, 128), (5, 3, 3, 384, 256), (150, 3, 2, 384, 256)):
        problem = fp8_problems.experts_problem(T, E, K, H, I, device)
        seen = []
        for height in (16,) if T < 9 else TILES:
            places, z, exact_z, y, exact_y = parts(problem, height, monkeypatch)
            assert error(z[places], exact_z[places]) < most_z, (T, height)
            assert error(y[places], exact_y[places]) < 4e-3, (T, height)
            seen.append((z[places], y[places]))
        for other in seen[1:]:
            assert all(map(torch.equal, other, seen[0])), T  # whatever the tiles


def by_kernels(*tensors):
    kind = submodule("experts.call").Fp8Experts
    return prepared("experts.hopper.fp8", "fp8_experts_fwd", kind, *tensors)


@interpreted
def test_a_call_interpreted():
    for T in (2, 20):
        problem = fp8_problems.experts_problem(T, 4, 2, 256, 128)
        found = by_kernels(*problem)
        assert error(found, reference.fp8_experts_fwd(*problem)) < 0.15
    assert not found[0].isnan().any()


@compiled
def test_the_reference_is_the_formula():
    problem = fp8_problems.experts_problem(20, 4, 2, 256, 128)
    found = reference.fp8_experts_fwd(*problem)
    exact = fp8_problems.exact_experts(*problem)
    assert found.dtype is torch.bfloat16 and found.shape == (20, 256)
    assert 5e-3 < error(found, exact) < 5e-2  # of rounding x and z to e4m3
    with dispatch.force("reference"):
        assert torch.equal(fp8_experts(*problem), found)
    assert fp8_experts(*problem) is None  # a CPU has no kernels


@compiled
def test_launches():
    """On a pretended H200: few tokens are four launches, others sort their entries besides."""
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    for T, sorts in ((1, 0), (8, 0), (9, 1), (1100, 3)):
        problem = fp8_problems.experts_problem(T, 4, 2, 256, 256, absent=False)
        with recording.recorded(device.Chip("NVIDIA_H200", (9, 0), 132)) as records:
            assert fp8_experts(*problem).shape == (T, 256)
        names = [record.name for record in records]
        route = ["_place_kernel"] if sorts == 1 else ["_count_kernel", "_scan_kernel"]
        route = (route + ["_place_kernel"])[:sorts]
        expected = [*route, "_quantise_kernel", "up_kernel", "down_kernel", "_combine_kernel"]
        if T > 1000:
            expected = [*route, "spread_kernel", "wide_kernel", "wide_kernel", "_combine_kernel"]
        assert names == expected
        assert all(record.options["launch_pdl"] for record in records)
        tiles = 2 * T * 2  # entries by blocks of 128 columns
        if not sorts:
            assert [r.grid[0] for r in records[1:3]] == [tiles, tiles]
    with recording.recorded(device.Chip("NVIDIA_B200", (10, 0), 148)) as records:
        assert fp8_experts(*problem) is None and not records


def test_what_kernels_refuse():
    prepare = submodule("experts.hopper.fp8").prepare_fp8_experts_fwd
    kind = submodule("experts.call").Fp8Experts
    problem = fp8_problems.experts_problem(4, 3, 2, 256, 128)
    assert prepare(kind.of(problem)) is not None
    x, w_gate_up, s_gate_up, w_down, s_down, ids, weights = problem
    others = {
        0: (x.half(), x[:, :128], x[:2], x.t().contiguous().t(), x[0]),
        1: (w_gate_up[:2], w_gate_up.mT.contiguous().mT, w_gate_up.view(torch.int8)),
        2: (s_gate_up[:, :1], s_gate_up.double(), s_gate_up.to(torch.float8_e8m0fnu)),
        3: (w_down[0], w_down[:, :128], w_down.float()),
        4: (s_down.mT, s_down[:2]),
        5: (ids.double(), ids[:2], ids[0]),
        6: (weights.double(), weights[:, :1]),
    }
    for place, values in others.items():
        for value in values:
            args = (*problem[:place], value, *problem[place + 1 :])
            assert prepare(kind.of(args)) is None, (place, value.shape)


def test_scales_in_e8m0():
    """They give what the same powers of two give in fp32."""
    x, w_gate_up, s_gate_up, w_down, s_down, *slots = fp8_problems.experts_problem(
        4, 3, 2, 256, 128
    )
    experts = submodule("experts.ops_fp8").fp8_experts
    powers = [2.0 ** s.log2().round() for s in (s_gate_up, s_down)]
    with dispatch.force("reference"):
        found, expected = (
            experts(x, w_gate_up, s_gate_up, w_down, s_down, *slots)
            for s_gate_up, s_down in ([s.to(torch.float8_e8m0fnu) for s in powers], powers)
        )
    assert torch.equal(found, expected)


# --- on a GPU


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("E, K, H, I", [(16, 4, 512, 256), (8, 2, 1152, 384), (64, 8, 2048, 512)])
def test_experts_on_a_gpu(E, K, H, I):
    """Error against fp64 of dequantised weights at most 1.02 of that of the formula in torch; a
    row has the same bits in any batch; ids of either type, weights of any dtype."""
    needs_hopper("cuda")
    problem = fp8_problems.experts_problem(1500, E, K, H, I, "cuda")
    x, *tensors, ids, weights = problem
    whole = fp8_experts(*problem)
    exact = fp8_problems.exact_experts(*problem)
    mine, theirs = error(whole, exact), error(reference.fp8_experts_fwd(*problem), exact)
    assert whole.isfinite().all() and mine <= 1.02 * theirs, (mine, theirs)
    for T in (1, 2, 7, 8, 9, 17, 33, 64, 130, 600):
        found = fp8_experts(x[3 : 3 + T], *tensors, ids[3 : 3 + T].int(), weights[3 : 3 + T])
        assert torch.equal(found, whole[3 : 3 + T]), T
    again = fp8_experts(x, *tensors, ids, weights.bfloat16())
    assert error(again, whole) < 1e-2
    nobody = fp8_experts(x[:20], *tensors, torch.full_like(ids[:20], E), weights[:20])
    assert not nobody.any()


@pytest.mark.gpu
@compiled
def test_a_graph_on_a_gpu():
    """Captured with ids that a replay changes."""
    needs_hopper("cuda")
    for T in (2, 40):
        x, *tensors, ids, weights = fp8_problems.experts_problem(T, 8, 2, 512, 256, "cuda")
        other = fp8_problems.experts_problem(T, 8, 2, 512, 256, "cuda", seed=1)
        expected = fp8_experts(other[0], *tensors, *other[-2:])
        fp8_experts(x, *tensors, ids, weights)
        graph, found = captured(fp8_experts, x, *tensors, ids, weights)
        for mine, new in zip((x, ids, weights), (other[0], *other[-2:])):
            mine.copy_(new)
        graph.replay()
        assert torch.equal(found, expected)


# --- FP8Experts: served, refused, restored


@pytest.fixture
def everywhere(monkeypatch):
    """Kernels are said to be there for any device."""
    monkeypatch.setattr(submodule("models.experts"), "why_not_fp8_here", lambda module: None)


def experts_of(model):
    return [m for m in model.modules() if type(m).__name__ == "FP8Experts"]


@compiled
def test_a_model_is_served_and_restored(kernel, everywhere, monkeypatch):
    calls = fp8_problems.stand_in(monkeypatch)
    model, ids = fp8_problems.tiny_moe(), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    model.set_experts_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits
    report = kernel.kernelize(model, only=["experts"])
    rows = [row for row in report.rows if row.kind == "FP8Experts"]
    assert len(rows) == 2 and all(row.reason is None for row in rows), report
    assert "fused_experts" in {row.layer for row in rows}
    assert model.config._experts_implementation == "fused_swiglu_gdn"
    calls.clear()
    with torch.no_grad(), dispatch.force("reference"), dispatch.served() as record:
        found = model(ids).logits
    assert len(record["fp8_experts_fwd"]) == 2
    assert len(calls) == 8  # q, k, v and o of two layers: of experts none is transformers'
    assert error(found, expected) < 0.02  # sums of slots are rounded once
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)  # a CPU is left to what was chosen before
    assert kernel.restore(model) >= 2
    assert model.config._experts_implementation == "eager"


@compiled
def test_a_module_gives_what_its_loop_gives(everywhere, kernel, monkeypatch):
    fp8_problems.stand_in(monkeypatch)
    model = fp8_problems.tiny_moe()
    module = experts_of(model)[0]
    random = torch.Generator().manual_seed(0)
    x = torch.randn(37, 512, generator=random).bfloat16()
    ids = torch.rand(37, 8, generator=random).argsort(1)[:, :2]
    weights = torch.rand(37, 2, generator=random).bfloat16()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        expected = module(x, ids, weights)
    kernel.kernelize(model)
    with torch.no_grad(), dispatch.force("reference"):
        found = module(x, ids, weights)
        assert error(found, expected) < 4e-3  # theirs round each weighted row to bf16
        away = torch.where(ids < 4, ids, 8)
        part = module(x, away, weights)
        assert error(part, found) > 0.1 and not part[(away == 8).all(1)].any()


@compiled
def test_calls_that_are_left_to_transformers(everywhere, kernel, monkeypatch):
    """What needs a gradient, another dtype, a gate that was changed."""
    calls = fp8_problems.stand_in(monkeypatch)
    model = fp8_problems.tiny_moe()
    module = experts_of(model)[0]
    model.set_experts_implementation("eager")
    kernel.kernelize(model)
    x = torch.randn(4, 512).bfloat16()
    ids, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)

    def own(x, weights=weights):
        calls.clear()
        with dispatch.force("reference"):
            module(x, ids, weights)
        return bool(calls)

    assert not own(x)
    assert own(x.clone().requires_grad_()) and own(x, weights.clone().requires_grad_())
    with torch.no_grad():
        assert not own(x.clone().requires_grad_())
    assert own(x.float())
    module.limit = 7.0
    assert own(x)
    module.limit = None
    module.act_fn = torch.nn.ReLU()
    assert own(x)
    module.act_fn = torch.nn.SiLU()
    assert not own(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert own(x)
    monkeypatch.undo()
    fp8_problems.stand_in(monkeypatch)
    kind = type(module)
    monkeypatch.setattr(kind, "_apply_gate", lambda self, x: x.chunk(2, -1)[0])
    assert isinstance(models.form_of_fp8(kind), str)
    monkeypatch.setattr(models, "computes", None)  # a call does not try it again
    assert isinstance(models.form_of_fp8(kind), str)


def parameter(*shape, dtype=torch.float32):
    return torch.nn.Parameter(torch.ones(shape).to(dtype), requires_grad=False)


REASONS = {
    "static activations": {"activation_scheme": "static"},
    "one scale for its whole weight": {"block_size": None},
    "blocks of 64 x 64": {"block_size": [64, 64]},
    "FP4": {"gate_up_proj": parameter(8, 256, 256, dtype=torch.int8)},
    "of dtype float64": {"down_proj_scale_inv": parameter(8, 4, 1, dtype=torch.float64)},
    "its gate is another: limit is 7.0": {"limit": 7.0},
    "swiglu_alpha is 1.702": {"swiglu_alpha": 1.702},
    "its activation is GELU": {"act_fn": torch.nn.GELU()},
    "has_gate is False": {"has_gate": False},
    "it has a linear of its own": {"linear": torch.nn.functional.linear},
    "is no parameter of its own": {"down_proj": None},
    "of dtype bfloat16": {"down_proj": parameter(8, 512, 128, dtype=torch.bfloat16)},
    "is of shape [8, 1, 4]": {"gate_up_proj_scale_inv": parameter(8, 1, 4)},
    "not multiples of 128": {
        "down_proj": parameter(8, 512, 64, dtype=E4M3),
        "gate_up_proj": parameter(8, 128, 512, dtype=E4M3),
    },
}


@compiled
def test_reasons(kernel, everywhere):
    model = fp8_problems.tiny_moe()
    first, second = experts_of(model)
    assert models.why_not_fp8_experts(first) is None
    for reason, changes in REASONS.items():
        module = copy.copy(first)
        module._parameters, module._modules = dict(first._parameters), dict(first._modules)
        for name, value in changes.items():
            setattr(module, name, value)
        assert reason in models.why_not_fp8_experts(module)
    # one that is not served leaves all of its configuration alone
    second.limit = 7.0
    rows = [r for r in kernel.kernelize(model).rows if r.kind == "FP8Experts"]
    assert "other experts of the same configuration" in rows[0].reason
    assert "its gate is another" in rows[1].reason
    second.limit = None
    model.set_experts_implementation("deepgemm")
    rows = [r for r in kernel.kernelize(model).rows if r.kind == "FP8Experts"]
    assert all("was set to deepgemm" in row.reason for row in rows)


@compiled
def test_classes_that_are_left_alone(kernel, everywhere, monkeypatch):
    from transformers.integrations import finegrained_fp8

    model = fp8_problems.tiny_moe()
    other = type("OthersExperts", (finegrained_fp8.FP8Experts,), {})
    first = experts_of(model)[0]
    first.__class__ = other
    assert "is a OthersExperts" in models.why_not_fp8_experts(first)
    first.__class__ = finegrained_fp8.FP8Experts
    own = finegrained_fp8.fp8_linear
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", lambda *args, **kwargs: own(*args, **kwargs))
    assert "fp8_linear, which is patched" in models.why_not_fp8_experts(first)
    monkeypatch.undo()
    assert models.why_not_fp8_experts(first) is None
    known = submodule("models.trial")._of_classes[models._find_experts, finegrained_fp8.FP8Experts]
    pinned = known[2]  # looked at in every call
    assert max(len(pins.functions) for pins in pinned) <= 24
    monkeypatch.setattr(finegrained_fp8.FP8Experts, "forward", lambda self, *args: args[0])
    assert "does not choose" in models.why_not_fp8_experts(first)
