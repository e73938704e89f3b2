"""Properties of the Hopper kernels alone: the prepare kernel's blocks compared with the portable
ones; the scan's segments, with one or two state warpgroups; the calls that they refuse.

The rest is tested for all implementations alike in test_gdn_chunk.py, the compiled code in
test_compile.py, and random small problems by tests/fuzz_gdn.py.
"""

import threading

import pytest
import torch
from conftest import assert_close, gdn_inputs, relative_error, submodule
from gdn_problems import arguments, blocks_of, on_gpu
from test_gdn_chunk import check, cu, expected

pytest.importorskip("triton")
gdn = pytest.importorskip("triton.experimental.gluon") and submodule("gdn.hopper.chunk")
gdn_plan = submodule("gdn.hopper.plan")


@pytest.fixture
def hopper(monkeypatch):
    """Tensors, wherever they are, count as being on a Hopper GPU."""
    monkeypatch.setattr(gdn_plan.device, "has_wgmma", lambda where: True)


def forward(call):
    return gdn.prepare_gdn_chunk_fwd(call)(*call.tensors)


def supports(**options):
    x = gdn_inputs(1, 64, 2, 4, 128, 128, torch.bfloat16)
    x.pop("initial_state", None)
    x.update({name: options.pop(name) for name in list(options) if name in x})
    return gdn.prepare_gdn_chunk_fwd(arguments(x, **options)) is not None


def test_takes_what_the_copy_engine_reads(hopper):
    x = gdn_inputs(1, 64, 2, 4, 128, 128, torch.bfloat16)
    packed = torch.cat([x["q"].flatten(2), x["k"].flatten(2), x["v"].flatten(2)], -1)
    q, k, v = (y.unflatten(-1, (-1, 128)) for y in packed.split([256, 256, 512], -1))
    assert supports() and supports(q=q, k=k, v=v)
    assert supports(initial_state=torch.zeros(6, 5, 128, 128)[:, :4])
    head_major = torch.zeros(1, 2, 64, 128, dtype=torch.bfloat16).transpose(1, 2)
    assert supports(q=head_major)
    odd = torch.zeros(64 * 256 + 1, dtype=torch.bfloat16)[1:].view(1, 64, 2, 128)
    assert supports(q=odd)  # by a copy


def test_copies_lie_as_those_of_the_first_call():
    """Of a call where one tensor begins off 16 bytes, and of another where that is another one."""

    def kind(call):
        made_for = [x.stride() for x in call[:3]]
        return lambda *tensors: made_for == [x.stride() for x in tensors[:3]]

    x = gdn_inputs(1, 64, 2, 2, 128, 128, torch.bfloat16)
    packed = torch.cat([x[name] for name in "qkv"], -1)
    off = torch.cat([packed.new_zeros(1), packed.flatten()])[1:].view(packed.shape)
    there, moved = (arguments({**x, **dict(zip("qkv", y.split(128, -1)))}) for y in (packed, off))
    on_read = submodule("gdn.portable.primitives").on_read
    run = on_read(kind, moved, 0, 1, 2, lies=gdn_plan.lies_for_tma)
    for call in (moved, there._replace(k=moved.k), there._replace(v=moved.v), there, moved):
        assert run(*call.tensors)


def test_prompts_of_a_pool_that_are_known_are_not_checked_again(kernel, monkeypatch):
    chip = submodule("runtime.device").Chip("NVIDIA_H200", (9, 0), 132)
    x = gdn_inputs(1, 128, 2, 4, 128, 128, torch.bfloat16)
    x["initial_state"] = torch.zeros(3, 4, 128, 128)
    options = {"state_indices": torch.tensor([2, 0]), "cu_seqlens": cu(60, 68)}
    kept = torch.tensor([True, False])

    def call(kept):
        return kernel.chunk_gated_delta_rule(**x, **options, has_initial_state=kept)

    with torch.no_grad(), submodule("runtime.recording").recorded(chip) as records:
        call(kept)
        monkeypatch.setattr(submodule("gdn.api"), "_checked", None)
        call(~kept)
        for wrong, error in ((kept[:1], ValueError), (kept.int(), TypeError), ([], TypeError)):
            with pytest.raises(error, match="has_initial_state must"):
                call(wrong)
    assert [record.name for record in records].count("_clear_rows_kernel") == 2


@pytest.mark.parametrize(
    "capability, served", [((9, 0), True), ((8, 0), False), ((10, 0), False), ((12, 0), False),
                           (None, False)]
)  # fmt: skip
def test_only_hopper_has_wgmma(monkeypatch, capability, served):
    """Neither AMD GPUs, whose capability is None, nor CPUs, which are asked for none."""
    device = gdn_plan.device
    monkeypatch.setattr(device, "capability", lambda index: capability)
    device.has_wgmma.cache_clear()
    try:
        assert device.has_wgmma(torch.device("cuda", 0)) is served
        assert device.has_wgmma(torch.device("cpu")) is False
        assert not supports()
    finally:
        device.has_wgmma.cache_clear()


@pytest.mark.parametrize("what", ["fp32", "head dim", "no token", "odd stride"])
def test_leaves_the_rest_to_the_portable_scan(hopper, what):
    x = gdn_inputs(1, 64, 2, 4, 128, 128, torch.bfloat16)
    if what == "fp32":
        x.update({name: x[name].float() for name in "qkv"})
    elif what == "head dim":
        x["v"] = x["v"][..., :64]
    elif what == "no token":
        x = {name: y[:, :0] if y.dim() > 2 and y.shape[1] == 64 else y for name, y in x.items()}
    else:
        x["k"] = torch.zeros(1, 64, 2, 132, dtype=torch.bfloat16)[..., :128]
    x.pop("initial_state", None)
    assert gdn.prepare_gdn_chunk_fwd(arguments(x)) is None


@pytest.mark.parametrize("HV", [2, 8, 24, 32, 64])
@pytest.mark.parametrize(
    "lengths", [(100,), (32768,), (2047, 4095, 1), (4096, 0, 6000), (64,) * 99]
)
def test_every_segment_has_a_slot(monkeypatch, lengths, HV):
    """Sequence n owns the slots from cu[n] // span + n on: as many as it is cut into."""
    monkeypatch.setattr(gdn_plan.device, "multiprocessor_count", lambda index: 132)
    N, T, span = len(lengths), sum(lengths), gdn_plan.MIN_SEGMENT_TOKENS
    split, slots = gdn_plan.count_slots(N, T, HV, True, torch.device("cuda", 0))
    start = 0
    for n, length in enumerate(lengths):
        cut = min(split, length // span) if length >= 4 * span else 1
        end = start + length
        first, next_first = start // span + n, end // span + n + 1
        if slots != N * split:
            assert first + cut <= next_first and first + cut <= slots
        alone, _ = gdn_plan.count_slots(1, length, HV, False, torch.device("cuda", 0))
        assert cut == max(alone, 1)  # the same as without the batch
        start = end
    assert sum([n >= 4 * span for n in lengths]) <= gdn_plan.count_long(N, T, True)


@pytest.mark.parametrize(
    "lengths, HV, launches",
    [((1024, 7168), 32, 2), ((2048,) * 4, 32, 1), ((1024,) * 8, 64, 2), ((512,) * 16, 64, 1),
     ((1024, 3072), 64, 1)],
)  # fmt: skip
def test_which_packed_calls_launch_both_forms(monkeypatch, lengths, HV, launches):
    """On 132 multiprocessors; of 32 heads sequences may be cut."""
    monkeypatch.setattr(gdn_plan.device, "multiprocessor_count", lambda index: 132)
    T, heads = sum(lengths), {"q": 16, "k": 16, "v": HV}
    x = {name: torch.empty(1, T, n, 128, device="meta").bfloat16() for name, n in heads.items()}
    x.update({name: torch.empty(1, T, HV, device="meta") for name in ("g", "beta")})
    ends = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
    assert len(gdn_plan.Scan(arguments(x, cu_seqlens=ends)).kernels) == launches


@pytest.fixture
def warpgroups(request, monkeypatch):
    """One or two state warpgroups a CTA, whatever the batch."""
    count = gdn_plan.device.multiprocessor_count
    limit = {1: 10**9, 2: 0}[request.param]
    segments = gdn_plan.count_slots
    monkeypatch.setattr(gdn_plan.device, "multiprocessor_count", lambda index: limit)
    operations = submodule("gdn.ops_train")
    for operation in (operations.CHUNK, operations.CHUNK_IN_POOL):
        monkeypatch.setattr(operation, "_rows", {})  # which keep what was made for each call

    def as_ever(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gdn_plan.device, "multiprocessor_count", count)
            return segments(*args)

    monkeypatch.setattr(gdn_plan, "count_slots", as_ever)


both = pytest.mark.parametrize("warpgroups", [1, 2], indirect=True)


@on_gpu
@both
@pytest.mark.parametrize("gates", ["qwen", "slow", "none"])
@pytest.mark.parametrize(
    "lengths", [(4500, 100, 6001, 0, 2047, 4096), (70,) * 140 + (4500, 30, 4096)]
)
def test_segments(warpgroups, gates, lengths):
    """Heads that forget are cut, others not; checkpoints fall into warm-ups and behind them."""
    x = gdn_inputs(1, sum(lengths), 2, 4, 128, 128, torch.bfloat16, "cuda", gates=gates)
    x["initial_state"] = torch.randn(len(lengths), 4, 128, 128, device="cuda")
    offsets = cu(*lengths, device="cuda")
    check("hopper", arguments(x, cu_seqlens=offsets, checkpoint_every=1024, use_qk_l2norm=True))


@on_gpu
def test_in_a_thread_that_has_called_nothing():
    """Such a thread, of autograd's say, has no CUDA context, which encoding tensor maps takes."""
    x = gdn_inputs(1, 300, 2, 4, 128, 128, torch.bfloat16, "cuda")
    options = {"use_qk_l2norm_in_kernel": True}
    want, _ = submodule("gdn.api").chunk_gated_delta_rule(**x, **options)
    moved = {name: tensor.clone() for name, tensor in x.items()}
    found = []

    def call():
        found.append(submodule("gdn.api").chunk_gated_delta_rule(**moved, **options)[0])

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert torch.equal(found[0], want)


@on_gpu
@both
def test_states_at_cuts(warpgroups):
    """Heads that forget at some cuts only: a state is found from the last one that is known."""
    x = gdn_inputs(1, 33000, 1, 4, 128, 128, torch.bfloat16, "cuda", gates="none")
    x["g"][:, 6000:6100, 0] = x["g"][:, 20000:20700, 0] = -1.0
    x["g"][:, 9000:, 1] = -0.01
    x["g"][..., 2] = -0.02 * torch.rand(33000, device="cuda")
    check("hopper", arguments(x, use_qk_l2norm=True))
    x["initial_state"] = torch.randn(4, 4, 128, 128, device="cuda")
    args = arguments(
        x, cu_seqlens=cu(16600, 20, 16380, device="cuda"), use_qk_l2norm=True, state_v_first=True,
        state_indices=torch.tensor([2, 0, 3], device="cuda"), checkpoint_every=8192,
    )  # fmt: skip
    check("hopper", args)


@on_gpu
def test_cut_pool_is_written_behind_all_reads():
    lengths = (4500, 4600, 4200)
    x = gdn_inputs(1, sum(lengths), 2, 4, 128, 128, torch.bfloat16, "cuda")
    x["initial_state"] = torch.randn(5, 4, 128, 128, device="cuda")
    args = arguments(
        x, cu_seqlens=cu(*lengths, device="cuda"), use_qk_l2norm=True, state_v_first=True,
        state_indices=torch.tensor([4, -1, 1], device="cuda"),
    )  # fmt: skip
    ref = expected(args)
    o, pool, *_ = forward(args)
    assert_close(o, ref[0])
    assert_close(pool, ref[1], torch.bfloat16)
    assert not o[:, 4500:9100].any()


@on_gpu
def test_cut_alone_as_in_a_batch():
    lengths = (4500, 100, 6001)
    x = gdn_inputs(1, sum(lengths), 2, 4, 128, 128, torch.bfloat16, "cuda", gates="qwen")
    x.pop("initial_state", None)
    offsets = cu(*lengths, device="cuda")
    o, state, *_ = forward(arguments(x, cu_seqlens=offsets, use_qk_l2norm=True))
    for n in (0, 2):
        own = slice(int(offsets[n]), int(offsets[n + 1]))
        alone = {name: y[:, own] for name, y in x.items()}
        o1, state1, *_ = forward(arguments(alone, use_qk_l2norm=True))
        assert torch.equal(o[:, own], o1) and torch.equal(state[n : n + 1], state1)


@on_gpu
@both
def test_wrong_offsets_stay_in_bounds(warpgroups):
    """No check on the host can see them; they must neither hang nor write elsewhere."""
    short = ([0, 500, 300], [-70, 100, 300], [200, 100, 10**6])
    long = ([5000, 0, 0, 9000], [0, 9000, 4000, 10**6], [9000, -5000, 8000, 100])
    for T, wrong in ((300, short), (9000, long)):
        x = gdn_inputs(1, T, 2, 4, 128, 128, torch.bfloat16, "cuda", gates="none")
        x.pop("initial_state", None)
        for ends in wrong:
            offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
            forward(arguments(x, cu_seqlens=offsets, use_qk_l2norm=True))
            torch.cuda.synchronize()


@on_gpu
@pytest.mark.parametrize("warpgroups", [2], indirect=True)
@pytest.mark.parametrize("lengths", [(300, 40), (40, 0, 300), (170, 170), (100, 130, 110)])
def test_one_long_sequence_of_few(warpgroups, monkeypatch, lengths):
    """Launched with one and with two state warpgroups, of which one works: the same bits, and the
    states of a pool are written once."""
    x = gdn_inputs(1, sum(lengths), 2, 4, 128, 128, torch.bfloat16, "cuda")
    options = {"cu_seqlens": cu(*lengths, device="cuda"), "use_qk_l2norm": True}
    pool = torch.randn(len(lengths), 4, 128, 128, device="cuda")
    rows = torch.arange(len(lengths), device="cuda").flip(0)
    found = []
    for long in (gdn_plan.LONG, 64):
        monkeypatch.setattr(gdn_plan, "LONG", long)
        x["initial_state"] = pool.clone()
        call = arguments(x, **options, output_final_state=True)
        assert len(gdn._Chunked(call).scan.kernels) == (2 if long == 64 else 1)
        held = pool.clone()
        pooled = arguments({**x, "initial_state": held}, **options, state_indices=rows)
        found.append((*forward(call)[:2], *forward(pooled)[:2]))
    for a, b in zip(*found):
        assert torch.equal(a, b)


def prepared(H=1, HV=4, T=64, device="cpu", **options):
    """A call with what prepare reads."""
    dtype = options.pop("dtype", torch.bfloat16)
    x = gdn_inputs(1, T, H, HV, 128, 128, dtype, device, gates=options.pop("gates", "slow"))
    x.pop("initial_state", None)
    options.setdefault("use_qk_l2norm", True)
    return arguments(x, **options)


def test_prepares_unit_keys(hopper):
    portable = submodule("gdn.portable.prepare").Prepare
    for kind, options in ((gdn.Prepare, {}), (portable, {"use_qk_l2norm": False})):
        assert type(gdn.prepare_of(prepared(2, 6, **options))) is kind


def same_blocks(args, live=slice(None)):
    """Against the kernel for all chips: the same but for roundings, and again bit for bit."""
    blocks = blocks_of("hopper", args)
    limits = (2e-3, 5e-4, 1e-4, 1e-5)
    for out, ref, limit in zip(blocks, blocks_of("portable", args), limits):
        assert relative_error(out[live], ref[live]) < limit
    assert all(torch.equal(a[live], b[live]) for a, b in zip(blocks, blocks_of("hopper", args)))


@on_gpu
@pytest.mark.parametrize("gates", ["qwen", "slow", "none", "extreme"])
@pytest.mark.parametrize(
    "H, HV, dtype",
    [(2, 8, torch.bfloat16), (3, 6, torch.float16), (3, 3, torch.bfloat16), (1, 3, torch.float16)],
)
def test_prepare(H, HV, dtype, gates):
    same_blocks(prepared(H, HV, 300, "cuda", dtype=dtype, gates=gates))


@on_gpu
@pytest.mark.parametrize("H, HV", [(2, 12), (1, 8), (3, 3)])
def test_prepare_packed_from_raw_gates(H, HV):
    """Neighbouring sequences' tokens, here NaN, have no effect; some rows belong to no chunk."""
    lengths = (100, 0, 1, 64, 0, 200)
    raw = {"A_log": torch.randn(HV, device="cuda"), "dt_bias": torch.randn(HV, device="cuda")}
    offsets = cu(*lengths, device="cuda", dtype=torch.int64)
    args = prepared(H, HV, sum(lengths), "cuda", use_beta_sigmoid=True, cu_seqlens=offsets, **raw)
    rows = [0, 1, 3, 4, 7, 8, 9, 10]  # cu[n] // 64 + n + chunk
    same_blocks(args, rows)
    before = blocks_of("hopper", args)
    names = ("q", "k", "g", "beta")
    args = args._replace(**{name: getattr(args, name).clone() for name in names})
    for name in names:
        getattr(args, name)[:, 100:165] = float("nan")
    for out, ref in zip(blocks_of("hopper", args), before):
        assert torch.equal(out[[0, 1, 7, 8, 9, 10]], ref[[0, 1, 7, 8, 9, 10]])


@on_gpu
def test_prompts_like_one_before(kernel):
    """A plan serves them: the same bits, also where a tensor begins at another address."""
    x = gdn_inputs(1, 300, 2, 4, 128, 128, torch.bfloat16, "cuda")
    known = submodule("gdn.ops_train").CHUNK
    known.cache_clear()

    def call(x):
        return kernel.chunk_gated_delta_rule(
            **x, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    def shifted(y):
        """At no multiple of 16 bytes."""
        return torch.cat([y.new_zeros(1), y.flatten()])[1:].view(y.shape)

    with torch.no_grad():
        first = call(x)
        assert len(known) == 1
        y = {name: value.clone() for name, value in x.items()}
        assert all(map(torch.equal, call(y), first))
        for name in ("q", "g", "initial_state"):
            assert all(map(torch.equal, call({**x, name: shifted(x[name])}), first))
        assert len(known) == 1
        with pytest.raises(ValueError, match="must have shape"):
            call({**x, "k": x["k"][:, :1]})


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one():
    x = gdn_inputs(1, 300, 2, 4, 128, 128, torch.bfloat16, "cuda:1")
    check("hopper", arguments(x, use_qk_l2norm=True))
