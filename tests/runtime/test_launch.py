"""Tests of kernel launches (runtime/launch.py), with Triton's own binder and stubs of its launchers
of several versions; and on a GPU."""

import itertools
import random
import weakref

import pytest
import torch
from conftest import captured, gdn_inputs, submodule
from interpreter import compiled

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from launching import (  # noqa: E402
    CODE,
    CUDA,
    Kernel,
    OtherRun,
    PackedRun,
    Run,
    ScratchRun,
    pretending,
)

RUNS = [Run, PackedRun, ScratchRun, OtherRun]
STEPPED = RUNS[:2]  # whose last step is found


@triton.jit(do_not_specialize=["M"])
def _pointers(
    x_ptr, y_ptr, z_ptr, strides, M, N, scale, FLAG: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    pass


@triton.jit(do_not_specialize=["M"])
def _maps(x_desc, y_desc, z_ptr, M, WIDTH: tl.constexpr):
    pass


def launches():
    return submodule("runtime.launch")


@pytest.fixture(params=RUNS, ids=lambda run: run.__name__)
def run(request):
    return request.param


@pytest.fixture
def cuda(monkeypatch, request):
    used = request.node.callspec.params.get("run") if hasattr(request.node, "callspec") else None
    with pretending(monkeypatch, packed=used is PackedRun) as state:
        yield state


def pointers(kernel, numbers=((8, 16, 1), 5, 16, 0.5), constexprs=(True, 64), options=()):
    return launches().Launch(
        kernel, 3, CUDA, numbers=numbers, constexprs=constexprs, options=options
    )


def at(shift: int = 0, dtype=torch.float32, size: int = 64):
    """A tensor so many elements behind a multiple of 16 bytes."""
    x = torch.zeros(size + 64, dtype=dtype)
    start = -x.data_ptr() // x.element_size() % 16 + shift
    return x[start : start + size]


# ---- the last step of Triton's launchers


@pytest.mark.parametrize("packed", [False, True])
def test_last_step(packed):
    steps, arguments = [], (16, 32, None, (1, 2), 0.5)
    run = (PackedRun if packed else Run)(lambda *step: steps.append(step))
    launch, middle, as_one = submodule("runtime.code").last_step(
        run, (4, 1, 1), (7, *CODE), arguments
    )
    assert not steps and as_one is packed  # looking launches nothing
    run(4, 1, 1, 9, 7, *CODE, *arguments)
    launch(4, 1, 1, 9, *middle, *((arguments,) if packed else arguments))
    assert steps[0] == steps[1]


@pytest.mark.parametrize("run", [ScratchRun, OtherRun])
def test_where_there_is_no_last_step(run):
    started = []
    found = submodule("runtime.code").last_step(
        run(lambda *step: started.append(step)), (4, 1, 1), (7, *CODE), (16, None)
    )
    assert found is None


# ---- kinds


NUMBERS = [0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**32, 2**63, 1.0, 0.0, 2.5, True, None]


@compiled
def test_kinds_are_at_least_as_fine_as_tritons():
    """What is one kind to us is one to Triton: random calls, bound by it."""
    draw, seen, kernel = random.Random(0), {}, Kernel(_pointers)
    tensors = [None, at(), at(1), at(0, torch.int32), at(3, torch.bfloat16), at(0, torch.bfloat16)]
    for _ in range(1500):
        numbers = [draw.choice(NUMBERS) for _ in range(6)]
        strides = tuple(numbers[:3]) if draw.random() < 0.8 else ((numbers[0], 1), numbers[1])
        scale = draw.choice([0.5, 1.0, 1, 16])
        constexprs = (draw.choice([True, False, 1, 0]), draw.choice([64, 64.0, 1, True]))
        one = launches().Launch(
            kernel, 3, CUDA, numbers=(strides, *numbers[3:5], scale), constexprs=constexprs
        )
        given = tuple(draw.choice(tensors) for _ in range(3))
        special = repr(kernel.specialization(*one.arguments(given)))
        assert seen.setdefault(one.key(given), special) == special
    assert len(seen) > 1000 and len(set(seen.values())) > 500


@compiled
def test_kinds_of_maps():
    kernel, seen = Kernel(_maps), {}
    compat, Map = submodule("runtime.gluon"), submodule("runtime.maps").Map
    maps = [
        None, Map((64, 64), (64, 1), (32, 64)), Map((99, 64), (80, 1), (32, 64)),
        Map((64, 64), (64, 1), (64, 32)),
        compat.tile_map(torch.bfloat16, (64, 64), (64, 1), 32, 64),
        compat.tile_map(torch.bfloat16, (64, 64), (64, 1), 64, 32),
    ]  # fmt: skip
    tensors = [torch.zeros(99, 80, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    for m, x, n in itertools.product(maps, tensors, maps):
        one = launches().Launch(kernel, 3, CUDA, maps=(m, n), numbers=(5,), constexprs=(8,))
        given = (None if m is None else x, None if n is None else x, x)
        special = repr(kernel.specialization(*one.arguments(given)))
        assert seen.setdefault(one.key(given), special) == special
    assert len(set(seen.values())) == len(seen)  # sizes and strides make no kind of their own


# ---- starts


@compiled
def test_every_start_is_as_tritons_own(run, cuda):
    """Alternating calls of several kinds run the code that Triton would choose, with its values."""
    kernel = Kernel(_pointers, run)
    one = pointers(kernel)
    x, y = at(), at()
    calls = [
        (x, None, y), (y, None, x), (x, y, None), (at(1), None, y),
        (x, None, at(0, torch.bfloat16)), (x, None, y), (x, None, at(2, torch.bfloat16)),
        (at(1), None, y), (y, None, x),
    ]  # fmt: skip
    with launches().paranoid():
        for cuda.stream, call in enumerate(calls):
            kernel.stream = cuda.stream
            one(*call)
    assert len(kernel.starts) == len(calls) and kernel.bound == len(kernel.codes) == 5
    for stream, (call, start) in enumerate(zip(calls, kernel.starts)):
        code, grid, used, values = start
        bound = kernel.warmup(*one.arguments(call), grid=one.grid, **dict(one.options))
        places = [None if t is None else t.data_ptr() for t in call]
        assert code is bound and used == stream and tuple(grid) == (3, 1, 1)
        assert values == [*places, *one.rest]


@compiled
@pytest.mark.parametrize("run", STEPPED, ids=lambda run: run.__name__)
def test_a_start_again_asks_nobody(run, cuda):
    """The second call of a kind is one call of the last step."""
    kernel = Kernel(_pointers, run)
    one = pointers(kernel)
    x, y = at(), at()
    one(x, None, y)
    assert one.types is not None and cuda.entered == [CUDA]
    del kernel.codes
    for _ in range(3):
        one(y, None, x)
    assert len(kernel.starts) == 4 and kernel.bound == 1 and cuda.entered == [CUDA]


@compiled
def test_others_like_it_share_the_code(run, cuda):
    """A Launch of other sizes that Triton compiles nothing for does not ask it."""
    kernel = Kernel(_pointers, run)
    x = at()
    for M in (5, 7, 1001):
        pointers(kernel, numbers=((8, 16, 1), M, 16, 0.5 + M))(x, x, x)
    assert kernel.bound == 1 and [start[3][4] for start in kernel.starts] == [5, 7, 1001]
    for changed in (
        pointers(kernel, numbers=((8, 16, 1), 5, 17, 0.5)),
        pointers(kernel, constexprs=(False, 64)),
        pointers(kernel, options=(("num_warps", 8),)),
    ):
        changed(x, x, x)
    assert kernel.bound == len(kernel.codes) == 4


@compiled
def test_maps_are_encoded_once_an_address(run, cuda):
    Map = submodule("runtime.maps").Map
    kernel = Kernel(_maps, run)
    x, y, other = torch.zeros(3, 128, 64, dtype=torch.bfloat16).unbind(0)
    z = at()
    one = launches().Launch(
        kernel, (3, 2), CUDA, numbers=(5,), constexprs=(128,),
        maps=(Map((128, 64), (64, 1), (64, 64)), Map((64, 64), (128, 1), (8, 64))),
    )  # fmt: skip
    calls = [(x, y), (x, y), (y, x), (x, y), (other, y), (x, x)]
    with launches().paranoid():
        for call in calls:
            one(*call, z)
    if run is OtherRun:  # descriptors as they are
        assert all(start[3][0].base is a for start, (a, _) in zip(kernel.starts, calls))
        return
    for start, (a, b) in zip(kernel.starts, calls):
        first = (("map", a.data_ptr(), (64, 1)), 128, 64)
        second = (("map", b.data_ptr(), (128, 1)), 64, 64)
        assert start[3] == [*first, *second, z.data_ptr(), 5, 128]
    if run in STEPPED:
        assert [len(m.kept) for m in one.maps] == [3, 2]


@compiled
@pytest.mark.parametrize("run", STEPPED, ids=lambda run: run.__name__)
def test_a_map_may_be_missing(run, cuda):
    Map = submodule("runtime.maps").Map
    x, z = torch.zeros(64, 64, dtype=torch.bfloat16), at()
    for maps, tensors in (
        ((Map((64, 64), (64, 1), (8, 64)), None), (x, None)),
        ((None, None), (None, None)),
    ):
        kernel = Kernel(_maps, run)
        one = launches().Launch(kernel, 3, CUDA, maps=maps, numbers=(5,), constexprs=(128,))
        with launches().paranoid():
            for _ in range(3):
                one(*tensors, z)
        assert kernel.starts[0][1:] == kernel.starts[1][1:] == kernel.starts[2][1:]
        assert kernel.bound == 1


@compiled
def test_nothing_is_kept_alive(run, cuda):
    kernel, x, y = Kernel(_pointers, run), at(), at()
    one = pointers(kernel)
    for _ in range(3):
        one(x, None, y)
    gone = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert [ref() for ref in gone] == [None, None]


@compiled
def test_no_programs_no_start(run, cuda):
    kernel, x = Kernel(_pointers, run), at()
    launches().Launch(kernel, (3, 0), CUDA, numbers=(1, 2, 3, 4), constexprs=(True, 1))(x, x, x)
    assert not kernel.starts and not kernel.codes


@compiled
def test_another_device(run, monkeypatch):
    """Launches on a device that is not the current one make it current."""
    with pretending(monkeypatch, packed=run is PackedRun, devices=2) as state:
        kernel, x = Kernel(_pointers, run), at()
        one = launches().Launch(
            kernel, 3, torch.device("cuda", 1), numbers=((1, 2), 5, 6, 0.5), constexprs=(True, 1)
        )
        for _ in range(3):
            one(x, x, x)
        assert len(state.entered) == 3 and state.device == 0
        state.device = 1
        one(x, x, x)
    assert len(kernel.starts) == 4 and kernel.bound == 1
    assert len(state.entered) == (3 if run in STEPPED else 4)


@compiled
def test_on_rocm_the_size_of_the_storage_counts(cuda, monkeypatch):
    """Triton compiles for offsets of 32 bits into tensors below 2 GB there."""
    monkeypatch.setattr(launches(), "ROCM", True)
    kernel = Kernel(_pointers)
    one, small = pointers(kernel), torch.empty(64, device="meta")
    large = torch.empty(2**29 + 4, device="meta")
    keys = {one.key((x, None, small)) for x in (small, large)}
    assert len(keys) == 2
    for _ in range(3):
        one(small, None, small)
    assert one.types is None and kernel.bound == 1  # the kind is looked at each time


def test_what_is_compiled_nowhere():
    """In the interpreter, say: every call goes to the kernel."""
    calls = []

    class Interpreted:
        arg_names = ("x_ptr", "N", "BLOCK")

        def __getitem__(self, grid):
            return lambda *args, **options: calls.append((grid, args, options))

    x = torch.zeros(4)
    one = launches().Launch(
        Interpreted(), 2, x.device, numbers=(4,), constexprs=(8,), options=(("num_warps", 1),)
    )
    for _ in range(2):
        one(x)
    assert calls == [((2, 1, 1), (x, 4, 8), {"num_warps": 1, "enable_fp_fusion": True})] * 2


def test_named():
    class Interpreted:
        arg_names = ("x_ptr", "N", "A", "B")

    one = launches().Launch(Interpreted, 2, torch.device("cpu"), B=2, num_warps=4, A=1)
    assert one.constexprs == (1, 2) and one.options[1:] == (("num_warps", 4),)


# ---- watching


@compiled
def test_paranoia_finds_a_wrong_code(run, cuda):
    kernel, x = Kernel(_pointers, run), at()
    one, other = pointers(kernel), pointers(kernel, constexprs=(False, 64))
    one(x, x, x)
    other(x, x, x)
    codes = launches()._codes
    codes[other.key((x, x, x))] = codes[one.key((x, x, x))]
    fresh = pointers(kernel, constexprs=(False, 64))
    with launches().paranoid(), pytest.raises(AssertionError, match="not the code of this call"):
        fresh(x, x, x)
    one.code = other.code or submodule("runtime.code").Code.__new__(submodule("runtime.code").Code)
    if one.types is not None:
        with launches().paranoid(), pytest.raises(AssertionError, match="not the code"):
            one(x, x, x)


@compiled
def test_what_is_recorded(kernel):
    """Public calls on meta tensors, by the chip that they are taken to be on."""
    recording, Chip = submodule("runtime.recording"), submodule("runtime.device").Chip

    def recorded(chip, M):
        with recording.recorded(chip) as records:
            gate, up = torch.empty(1024, 256, device="meta", dtype=torch.bfloat16).chunk(2)
            x = torch.empty(M, 256, device="meta", dtype=torch.bfloat16)
            z = kernel.fused_swiglu(x, gate, up)
        assert z.shape == (M, 512) and len(records) == 1
        return records[0]

    h200, a100 = Chip("NVIDIA_H200", (9, 0), 132), Chip("NVIDIA_A100", (8, 0), 108)
    record = recorded(h200, 512)
    assert record.name == "swiglu_fwd_kernel" and record.target.arch == 90
    assert record.signature["x_desc"].startswith("tensordesc<bf16[")
    assert record.signature["b_gate_ptr"] == "constexpr" and record.signature["M"] == "i32"
    assert record.grid[0] <= 132
    # what Triton would take from its environment is said
    assert set(record.options) == {"num_warps", "num_stages", "enable_fp_fusion"}
    record = recorded(a100, 512)
    assert record.name == "_swiglu_fwd_kernel" and record.target.arch == 80
    assert record.signature["x_ptr"] == "*bf16"
    assert record.attributes[(0,)] == [["tt.divisibility", 16]]
    names = {record.kernel.arg_names[path[0]]: value for path, value in record.constexprs.items()}
    assert names["ACTIVATION"] == "silu" and names["b_up_ptr"] is None
    compiled = triton.compile(record.source(), target=record.target, options=record.options)
    assert "cubin" in compiled.asm
    amd = recorded(Chip("gfx942", None, 304), 1)
    assert amd.target.backend == "hip" and amd.options["num_warps"] > 0
    x = torch.randn(3, 8)  # and nothing of it stays
    w = torch.randn(2, 4, 8)
    assert torch.allclose(
        kernel.fused_swiglu(x, *w), torch.nn.functional.silu(x @ w[0].T) * (x @ w[1].T)
    )


# ---- bounds


def identity(descriptor):
    return [descriptor.base.data_ptr()]


def test_few_maps_are_kept(monkeypatch):
    maps = submodule("runtime.maps")
    monkeypatch.setattr(maps, "LIMIT", 4)
    one = maps.Map((64, 64), (64, 1), (64, 64))
    for x in torch.zeros(9, 64, 64, dtype=torch.bfloat16):
        assert one.encoded(x, identity, "") == [x.data_ptr()]
    assert len(one.kept) <= 4


def test_few_are_kept_by_all(monkeypatch):
    maps = submodule("runtime.maps")
    monkeypatch.setattr(maps, "BOUND", submodule("runtime.cache").Bound(10))
    many = [maps.Map((64, 64), (64, 1), (64, 64)) for _ in range(7)]
    for x in torch.zeros(9, 64, 64, dtype=torch.bfloat16):
        for one in many:
            one.encoded(x, identity, "")
            assert sum(len(one.kept) for one in many) <= 10


def test_maps_of_codes_that_encode_otherwise_are_kept_apart():
    one = submodule("runtime.maps").Map((64, 64), (64, 1), (64, 64))
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert one.encoded(x, lambda d: ["a"], "a") == ["a"]
    assert one.encoded(x, lambda d: ["b"], "b") == ["b"]
    assert one.encoded(x, lambda d: ["c"], "a") == ["a"]


# ---- on a GPU


def swiglu_case(M):
    torch.manual_seed(0)
    weights = [torch.randn(256, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return torch.randn(M, 128, device="cuda", dtype=torch.bfloat16), *weights


@pytest.fixture
def started(monkeypatch):
    """Every Launch that is called."""
    found, original = [], launches().Launch.__call__

    def spy(self, *tensors):
        found.append(self)
        return original(self, *tensors)

    monkeypatch.setattr(launches().Launch, "__call__", spy)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("M", [3, 300])
def test_kept_launches_are_right(kernel, started, M):
    """Few rows by pointers, else by maps."""
    x, w_gate, w_up = swiglu_case(M)
    want = kernel.fused_swiglu(x, w_gate, w_up)
    other = torch.randn_like(x)
    want_other = kernel.fused_swiglu(other, w_gate, w_up)
    for _ in range(3):  # the same addresses in turn; the outputs' come back from the allocator
        assert torch.equal(kernel.fused_swiglu(x, w_gate, w_up), want)
        assert torch.equal(kernel.fused_swiglu(other, w_gate, w_up), want_other)
    assert started[-1].types is not None and len(set(map(id, started[2:]))) == 1
    assert len(started[-1].maps) == (0 if M == 3 else 5)
    if M > 3:
        assert 2 <= len(started[-1].maps[0].kept) <= 7
    x.copy_(other)  # another tensor in the same place
    assert torch.equal(kernel.fused_swiglu(x, w_gate, w_up), want_other)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [3, 300])
def test_no_memory_is_kept(kernel, M):
    kernel.fused_swiglu(*swiglu_case(M))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    case = swiglu_case(M)
    for _ in range(3):
        kernel.fused_swiglu(*case)
    del case
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.parametrize("M", [3, 300])
def test_a_triton_that_launches_otherwise(kernel, started, M, monkeypatch):
    case = swiglu_case(M)
    want = kernel.fused_swiglu(*case)
    monkeypatch.setattr(submodule("runtime.code"), "last_step", lambda *_: None)
    monkeypatch.setattr(launches(), "_codes", {})
    monkeypatch.setattr(started[-1], "types", None)
    for _ in range(3):
        assert torch.equal(kernel.fused_swiglu(*case), want)
    assert started[-1].types is None
    assert [code.step for code in launches()._codes.values()] == [None]


@pytest.mark.gpu
def test_other_kinds_by_one_launch(kernel):
    """A Launch that meets dtypes, missing pointers and odd addresses takes the code of each."""
    gate = submodule("swiglu.portable.gate")
    one = launches().Launch(
        gate._gate_bwd_kernel, (4, 1), torch.device("cuda", 0), numbers=(64, 64, 128, 128, 128),
        constexprs=("silu", 1024),
    )  # fmt: skip
    for dtype, shift, with_z in itertools.product((torch.bfloat16, torch.float32), (0, 1), (0, 1)):
        dz = torch.randn(4 * 64 + 1, device="cuda", dtype=dtype)[shift:][: 4 * 64].view(4, 64)
        gate_up = torch.randn(4, 128, device="cuda", dtype=dtype)
        z = torch.empty(4, 64, device="cuda", dtype=dtype) if with_z else None
        want = gate_up.clone()
        want_z = gate.gate_bwd(dz, want, "silu", bool(with_z))
        with launches().paranoid():
            halves = gate_up.chunk(2, dim=1)
            one(dz, *halves, *halves, z)
        assert torch.equal(gate_up, want) and (z is None or torch.equal(z, want_z))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [3, 300, 2048])
def test_two_devices(kernel, M):
    """Tensors on another device than the current one, alternating with the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    cases = [[t.to(f"cuda:{i}").requires_grad_() for t in swiglu_case(M)] for i in range(2)]
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


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("T", [300, 9000])
def test_addresses_in_turn(kernel, T):
    """The same kind of call on other tensors, on other values in the same tensors, on a stream, in
    a graph."""
    from gdn_problems import arguments

    gdn = pytest.importorskip("triton.experimental.gluon") and submodule("gdn.hopper.chunk")
    cases = [gdn_inputs(1, T, 2, 4, 128, 128, torch.bfloat16, "cuda", seed=i) for i in range(2)]
    calls = [arguments(x, use_qk_l2norm=True) for x in cases]
    want = [gdn.prepare_gdn_chunk_fwd(args)(*args.tensors)[0] for args in calls]
    run = gdn.prepare_gdn_chunk_fwd(calls[0])
    for _ in range(3):
        for args, o in zip(calls, want):
            assert torch.equal(run(*args.tensors)[0], o)
    for name in "qkv":
        cases[0][name].copy_(cases[1][name])
    for name in ("g", "beta", "initial_state"):
        if name in cases[0]:
            cases[0][name].copy_(cases[1][name])
    assert torch.equal(run(*calls[0].tensors)[0], want[1])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        o = run(*calls[1].tensors)[0]
    stream.synchronize()
    assert torch.equal(o, want[1])
    graph, (o, *_) = captured(run, *calls[1].tensors)
    graph.replay()
    assert torch.equal(o, want[1])
