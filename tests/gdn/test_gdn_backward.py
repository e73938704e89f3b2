"""Gradients of the chunked gated delta rule against fp64 automatic differentiation of the
recurrence: the written-out reference, the kernels, and the operators that train."""

import pytest
import torch
from conftest import gdn_inputs, relative_error, submodule
from gdn_gradients import GRADS, Case
from gdn_problems import blocks_of
from interpreter import compiled, interpreted, test_in_the_interpreter  # noqa: F401

written_out = submodule("gdn.reference.backward")
train, calls = submodule("gdn.ops_train"), submodule("gdn.call")
functional = submodule("gdn.api")

# Relative errors of gradients. Two half-precision tensors meet in most products (o has one), and
# the gradients of the gates are differences: twice the limit that conftest.py has for outputs.
# fp32 sums of the gates' gradients cancel: up to 1e-4 of their terms is left of 1e-7 errors.
# fp64 on a CPU was 1e-9 off once, in one of hundreds of runs.
LIMIT = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

OPTIONS = {
    "plain": {},
    "norm": {"l2norm": True},
    "gate": {"l2norm": True, "gate": True},
    "no bias": {"gate": True, "dt_bias": False},
    "sigmoid": {"l2norm": True, "sigmoid": True},
    "negative": {"l2norm": True, "sigmoid": True, "negative": True, "gate": True},
    "state_v_first": {"v_first": True},
    "packed": {"lengths": (0, 1, 64, 70, 0, 3)},
    "packed gate": {"lengths": (65, 0, 20), "gate": True, "sigmoid": True, "l2norm": True},
    "no states": {"states": False},
    "zero beta": {"zero_beta": True},
}


def compare(got, want, dtype, factor=1.0):
    """Every gradient is there where it should be, and right.

    A_log and dt_bias take sums over all tokens of terms of either sign, which leaves less of them.
    """
    errors = {}
    for name, a, b in zip(GRADS, got, want):
        assert (a is None) == (b is None), name
        if a is not None:
            errors[name] = relative_error(a, b) / (3 if name in ("A_log", "dt_bias") else 1)
    limit = LIMIT[dtype] * factor
    assert all(error <= limit for error in errors.values()), errors


@compiled
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_written_out(options):
    case = Case(2, 70, 2, 4, 8, 6, torch.float64, **options)
    compare(case.gradients(written_out), case.expected(), torch.float64)


@compiled
@pytest.mark.parametrize("gates", ["none", "qwen", "extreme"])
def test_written_out_for_gates(gates):
    case = Case(1, 130, 1, 2, 8, 8, torch.float64, gates=gates)
    compare(case.gradients(written_out), case.expected(), torch.float64)


# what an option does is seen best in fp32; fp16 takes other products
IN_FP16 = ("plain", "norm", "packed gate")


@interpreted
@pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.float32) for name in OPTIONS] + [(name, torch.float16) for name in IN_FP16],
)
def test_kernels(name, dtype):
    case = Case(2, 70, 1, 2, 16, 16, dtype, **OPTIONS[name])
    got = case.gradients(submodule("gdn.portable.backward"))
    compare(got, case.expected(), dtype)
    places = [x.untyped_storage().data_ptr() for x in got if x is not None]
    assert len(set(places)) == len(places)  # an operator's results may not share memory


@interpreted
@pytest.mark.parametrize("K, V", [(16, 40), (20, 16), (8, 8), (136, 16)])
def test_kernels_of_head_dims(K, V):
    case = Case(1, 66, 2, 6, K, V, torch.float32)
    got = case.gradients(submodule("gdn.portable.backward"))
    compare(got, case.expected(), torch.float32)


def equal(got, want) -> bool:
    """The same gradients are there, bit for bit."""
    return all(b is None if a is None else torch.equal(a, b) for a, b in zip(got, want))


def check_parts(implementation, case):
    """From saved blocks the same bits; the values' gradients alone, too."""
    module = submodule(f"gdn.{implementation}.backward")
    whole = case.gradients(module)
    *prepared, _ = blocks_of(implementation, case.call())
    assert equal(case.gradients(module, prepared), whole)
    part = case.gradients(module, values_only=True)
    assert equal(part, [None, None, whole[2], *[None] * 4, whole[7]])


@interpreted
def test_parts_interpreted():
    check_parts("portable", Case(1, 66, 1, 2, 16, 16, torch.float32))


@interpreted
@pytest.mark.parametrize("B, T, lengths", [(0, 5, None), (2, 0, None), (1, 0, (0, 0))])
def test_kernels_of_nothing(B, T, lengths):
    module = submodule("gdn.portable.backward")
    case = Case(B, T, 1, 2, 16, 16, torch.float32, lengths=lengths, gate=True)
    got = case.gradients(module)
    for grad, x in zip(got, case.inputs):
        assert grad.shape == x.shape
    if T == 0:
        assert torch.equal(got[7], case.d_final)


@pytest.mark.parametrize("way", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_without_value_heads(way):
    """No program would write dq and dk: the reference serves, with zeros."""
    x = gdn_inputs(1, 70, 2, 0, 128, 128, torch.bfloat16, way)
    x = {name: t.requires_grad_() for name, t in x.items()}
    with submodule("runtime.dispatch").served() as record:
        o, _ = functional.chunk_gated_delta_rule(**x)
        o.sum().backward()
    assert record.get("gdn_chunk_bwd", ["reference"]) == ["reference"]  # none: by autograd
    assert torch.equal(x["q"].grad, torch.zeros_like(x["q"]))
    assert torch.equal(x["k"].grad, torch.zeros_like(x["k"]))


CALLS = {
    "eager": lambda call, x: call(x),
    "checkpoint": lambda call, x: torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False),
    "reentrant": lambda call, x: torch.utils.checkpoint.checkpoint(
        lambda *values: call(dict(zip(x, values))), *x.values(), use_reentrant=True
    ),
    "compiled": lambda call, x: torch.compile(call, fullgraph=True)(x),
}


@compiled
@pytest.mark.parametrize("recompute", [False, True])
def test_training_is_traced_where_kernels_serve(monkeypatch, recompute):
    """One graph of operators, whose bodies run the reference here."""
    has_kernels = torch.compiler.assume_constant_result(lambda *asked: True)
    monkeypatch.setattr(submodule("runtime.dispatch"), "has_kernels", has_kernels)
    x = {name: t.requires_grad_() for name, t in gdn_inputs(2, 70, 2, 4, 16, 16).items()}
    rule = functional.chunk_gated_delta_rule
    traced = torch.compile(rule, fullgraph=True, backend="aot_eager")
    found = []
    for way in (rule, traced):
        o, state = way(**x, output_final_state=True, recompute=recompute)
        found.append(torch.autograd.grad(o.sum() + state.square().sum(), list(x.values())))
    for a, b in zip(*found):
        assert relative_error(a, b) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("way", CALLS.values(), ids=CALLS)
def test_training_on_the_gpu(way, recompute):
    do = torch.randn(2, 130, 4, 64, device="cuda", dtype=torch.bfloat16)

    def gradients(way):
        x = gdn_inputs(2, 130, 2, 4, 64, 64, torch.bfloat16, "cuda")
        x = {name: t.requires_grad_() for name, t in x.items()}

        def call(x):
            return functional.chunk_gated_delta_rule(
                **x, output_final_state=True, use_qk_l2norm_in_kernel=True, recompute=recompute
            )

        o, state = way(call, x)
        ((o * do).sum() + state.sum()).backward()
        return [t.grad for t in x.values()]

    with submodule("runtime.dispatch").force("reference"):
        want = gradients(CALLS["eager"])
    for a, b in zip(gradients(way), want):
        assert relative_error(a, b) < LIMIT[torch.bfloat16]


def layer_gradients(device, way, seed=0):
    """Gradients of a step of a small GDN layer under autocast: of x and of the parameters."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    config = transformers.Qwen3_5TextConfig(
        hidden_size=128, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(seed)
    layer = modeling.Qwen3_5GatedDeltaNet(config, 0).to(device).train()
    x, dy = torch.randn(2, 2, 130, 128).to(device).unbind(0)
    x = x.clone().requires_grad_()
    assert submodule("models").kernelize(layer, mode="training").served
    call = torch.compile(layer) if way == "compiled" else layer
    with torch.autocast(device, torch.bfloat16):
        y = call(x)
    y.backward(dy.to(y.dtype))
    return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_layer_under_autocast(way):
    """Against the reference under the same autocast, so that only the kernels differ.

    What is small goes through l2norm and the gated norm, which enlarge the errors of bf16: 1.5e-2
    in an interpreter with bf16 products and roundings. The gradients of A_log and dt_bias are sums
    over 260 tokens that cancel: autocast alone moves them by .1 to 8e-2 in torch's own functions
    (eight seeds, CPU), all others by .8 to 1.5e-2.
    """
    with submodule("runtime.dispatch").force("reference"):
        want = layer_gradients("cuda", "eager")
    for name, gradient in layer_gradients("cuda", way).items():
        limit = 1e-1 if name in ("A_log", "dt_bias") else 3 * LIMIT[torch.bfloat16]
        assert relative_error(gradient, want[name]) < limit, name


HEADS = [(1, 1), (2, 4), (4, 4), (1, 4)]


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def hopper(test):
    """Marks a test of Hopper's kernels."""
    return pytest.mark.gpu(pytest.mark.skipif(not is_hopper(), reason="for Hopper")(test))


def kernels(case):
    """The modules whose kernels take the case on this GPU."""
    found = [submodule("gdn.portable.backward")]
    if is_hopper():
        hopper = submodule("gdn.hopper.backward")
        found += [hopper] if hopper.prepare_gdn_chunk_bwd(case.backward()) else []
    return found


@pytest.mark.kernels_ci
@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["slow", "qwen", "extreme"])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("H, HV", HEADS)
def test_gpu(H, HV, T, gates):
    """The grid of flash-linear-attention#640: a transposed accumulator miscompiled on Hopper."""
    B = 16 if T == 1 else 1  # the gates' gradients are one number a head and token
    case = Case(B, T, H, HV, 128, 128, torch.bfloat16, "cuda", gates=gates)
    want = case.expected()
    for module in kernels(case):
        got = case.gradients(module)
        compare(got, want, torch.bfloat16)
        assert equal(case.gradients(module), got)  # every run


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_options(options, dtype):
    K = 64 if dtype == torch.float32 else 128
    case = Case(2, 300, 2, 4, K, 128, dtype, "cuda", **options)
    want = case.expected()
    for module in kernels(case):
        compare(case.gradients(module), want, dtype)


HEAD_DIMS = [
    (16, 16), (60, 100), (64, 64), (72, 136), (100, 60), (128, 64), (128, 256), (192, 96),
    (250, 250), (256, 64), (256, 128), (256, 256),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("K, V", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_head_dims(K, V, dtype):
    case = Case(1, 130, 2, 4, K, V, dtype, "cuda", l2norm=True, zero_beta=True)
    compare(case.gradients(submodule("gdn.portable.backward")), case.expected(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("H, HV", [(2, 4), (1, 8)])
def test_gpu_configurations_of_other_chips(H, HV, monkeypatch):
    """The tables that name no chip."""
    module, tuning = submodule("gdn.portable.backward"), submodule("runtime.tuning")
    monkeypatch.setattr(tuning, "chip", lambda device: ())
    module.configuration.cache_clear()
    try:
        for K, V, dtype in ((128, 128, torch.bfloat16), (64, 64, torch.float16)):
            case = Case(2, 130, H, HV, K, V, dtype, "cuda", l2norm=True)
            compare(case.gradients(module), case.expected(), dtype)
    finally:
        module.configuration.cache_clear()


@pytest.mark.gpu
def test_gpu_views():
    """Views that begin or continue off 16 bytes are right too."""
    module = submodule("gdn.portable.backward")
    case = Case(2, 130, 2, 4, 64, 64, torch.bfloat16, "cuda")
    want = case.gradients(module)

    def moved(x, before):
        """The same values `before` elements into rows that are 3 elements longer."""
        wide = x.new_empty(*x.shape[:-1], x.shape[-1] + 3)
        wide[..., before : before + x.shape[-1]] = x
        return wide[..., before : before + x.shape[-1]]

    q, k, v, *rest = case.inputs
    for before in (0, 3):
        case.inputs = (moved(q, before), moved(k, before), moved(v, before), *rest)
        assert equal(case.gradients(module), want)


@pytest.mark.gpu
def test_gpu_layouts():
    """q, k and v as views of one tensor, a dO that is the same everywhere, and initial states that
    lie apart or are one for all."""
    case = Case(3, 130, 2, 2, 128, 128, torch.bfloat16, "cuda", l2norm=True)
    q, k, v, *rest, state = case.inputs
    own, joined = case.do, torch.cat([q, k, v], -1)
    pool = state.new_zeros(3, 4, 128, 128)
    pool[:, 1:3] = state
    for module in kernels(case):
        case.inputs, case.do = (q, k, v, *rest, state), own
        want = case.gradients(module)
        case.inputs = (*joined.split(128, -1), *rest, pool[:, 1:3])
        assert equal(case.gradients(module), want)
        case.inputs = (q, k, v, *rest, state[:1].expand(3, -1, -1, -1))
        case.do = own[:1, :1, :1].expand_as(own)
        compare(case.gradients(module), case.expected(), torch.bfloat16)


@hopper
def test_hopper_many_chunks_a_program():
    """More chunks than processors, so that programs go from one to the next; from the same blocks
    the portable kernels give the same but for the order of sums."""
    case = Case(2, 6400, 2, 4, 128, 128, torch.bfloat16, "cuda", l2norm=True)
    *blocks, _ = blocks_of("hopper", case.call())
    one, other = (submodule(f"gdn.{x}.backward") for x in ("hopper", "portable"))
    got, want = case.gradients(one, blocks), case.gradients(other, blocks)
    compare(got, want, torch.bfloat16, factor=0.2)


@hopper
def test_hopper_parts():
    case = Case(1, 200, 2, 4, 128, 128, torch.bfloat16, "cuda", l2norm=True)
    check_parts("hopper", case)
    leaves = [x.clone().requires_grad_() for x in case.inputs[:5]]
    with submodule("runtime.dispatch").served() as record:
        o, _ = functional.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
        o.backward(case.do)
    assert record["gdn_chunk_bwd"] == ["hopper"]
