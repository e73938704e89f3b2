"""Sequences that several processes hold parts of: two, three and four of them reproduce one."""

import json

import fresh
import pytest
import torch
from conftest import ROOT, load_package, submodule
from interpreter import compiled
from parallel_problems import CASES, WORLD

pytestmark = compiled
LIMIT = 1e-11  # of relative errors in fp64
# of one process's error in bf16: pieces are chunks of other tokens, and these are few
WORSE, LEAST = 1.5, 1e-3
# Two numbers each, sums over all tokens whose errors come from few roundings of states. Of 16 seeds
# one process's error was 6e-3 on average and 3e-2 at most, so that one sample says little of
# another; without the exchange they are wrong by more than .1.
SUMS = {"dA_log": 4e-2, "ddt_bias": 4e-2}
ALIKE = "must be alike in all processes of the group"
REFUSALS = {  # what every process says of a use
    "tokens of one": "q must have the 6 tokens that cp_context has",
    "gradients of one": ALIKE,
    "a state of one": "initial_state must have shape [N, HV, K, V] = [1, 1, 4, 4], got [2,",
    "cu_seqlens": "cu_seqlens must be None or cp_context.cu_seqlens",
    "state_indices": "state_indices must not be given with cp_context",
    "checkpoint_every": "checkpoint_every must not be given with cp_context",
    "chunk_size of one": "chunk_size must be 64",
    "conv tokens of one": "x must have the 6 tokens that cp_context has",
    "conv seq_idx": "seq_idx must not be given with cp_context",
    "conv taps": ALIKE,
    "lengths": ALIKE,
    "lengths of one": "cu_seqlens must start with 0 and never decrease, got [0, 5, 3, 12]",
    "layout of one": ALIKE,
    "a name": "layout must be one of 'contiguous', 'zigzag', 'torch', or fragments, got 'ring'",
    "a hole": "layout must hold each of the 12 tokens once, got (6, 12) where 5 comes next",
    "rows": "batch_size must be rows that the 12 tokens fill, got 5",
    "borders of rows": "cu_seqlens must have a border after every row of 6 tokens, got [0, 12]",
    "batch": 'batch must have "input_ids" of shape [B, T], got NoneType',
    "batch labels": "labels must have the shape of input_ids, [1, 4], got [1, 5]",
    "batch mask": "attention_mask must have its zeros at the end of each row",
    "batch of one": ALIKE,
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def found(request, tmp_path_factory):
    """Results of each process, and on a GPU the errors of one: one launch for all tests."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    folder = tmp_path_factory.mktemp("parallel")
    script = ROOT / "tests" / "parallel_problems.py"
    done = fresh.python(script, folder, request.param, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    ranks = range(WORLD[request.param])
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]
    failed = [result["failed"] for result in results if "failed" in result]
    assert not failed, "\n\n".join(failed)
    return results, {k: v for result in results for k, v in result.get("alone", {}).items()}


def only_on_cpu(found) -> None:
    if "batches" not in found[0][0]:
        pytest.skip("the host's work alone: made on the CPU")


@pytest.mark.parametrize("name", CASES)
def test_as_one_process(found, name):
    results, alone = found
    if name not in results[0]:
        pytest.skip("not on a GPU")
    errors = results[0][name]
    assert len(errors) > 2 and all(results[r][name] == errors for r in range(CASES[name].P))
    if not CASES[name].exchange:
        assert max(errors.values()) > 0.1, "without an exchange the results must be wrong"
        return
    for part, error in errors.items():
        least = SUMS.get(part, LEAST)
        limit = max(WORSE * alone[name][part], least) if alone else LIMIT
        assert error <= limit, (part, error, limit)


def test_unshard_undoes_shard(found):
    for result in found[0][:3]:
        assert len(result["unshard"]) == 14
        assert max(result["unshard"].values()) == 0


def test_parts_of_batches(found):
    only_on_cpu(found)
    for result in found[0][:3]:
        assert len(result["batches"]) == 15
        assert set(result["batches"].values()) == {0}, result["batches"]


def test_gates_of_channels(found):
    only_on_cpu(found)
    for result in found[0]:
        assert len(result["channels"]) == 4 and max(result["channels"].values()) < 1e-12


def test_how_often_the_rule_runs(found):
    only_on_cpu(found)
    first, second = (result["calls"] for result in found[0][:2])
    assert first["contiguous"] == second["contiguous"] == [1, 1]
    # the outer two of three pieces; the middle one, whose transition is told, too
    assert first["zigzag"] == [2, 2] and second["zigzag"] == [3, 2]
    assert first["empty"] == [2, 2] and second["empty"] == [0, 0]


def test_bad_use_is_refused_in_every_process(found):
    only_on_cpu(found)
    first, second = (result["refused"] for result in found[0][:2])
    assert set(first) == set(second) == set(REFUSALS)
    for use, words in REFUSALS.items():
        assert words in first[use] and words in second[use], use
        if use.endswith("of one") and words is not ALIKE:
            assert f"in process 0 of the group: {words}" in second[use]


PACKED = {"cu_seqlens": [0, 4, 6]}
PADDED = {"attention_mask": [[1, 1, 1, 0, 0, 0]]}
POSITIONS = [  # what is given, position_ids, what a refusal says
    ({}, [[0, 1, 2, 3, 4, 5]], None),
    ({}, [[0, 1, 2, 0, 1, 2]], None),
    (PACKED, [[0, 1, 2, 3, 0, 1]], None),
    (PADDED, [[0, 1, 2, 1, 1, 7]], None),
    (PADDED, [[0, 1, 2, 0, 0, 0]], None),
    ({}, [[5, 6, 7, 8, 9, 10]], "got 5 where 0 is due, at token 0 of row 0"),
    ({}, [[0, 1, 1, 2, 3, 4]], "got 1 where 2 is due, at token 2 of row 0"),
    ({}, [[0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10]], "got 2 where 1 is due, at token 1 of row 1"),
    (PACKED, [[0, 1, 2, 3, 4, 5]], "got 4 where 0 is due, at token 4 of row 0"),
    (PACKED, [[0, 1, 0, 1, 0, 1]], "got 0 where 2 is due, at token 2 of row 0"),
    (PADDED, [[0, 1, 1, 2, 3, 4]], "got 1 where 2 is due, at token 2 of row 0"),
    (PACKED, [[[0, 1, 2, 3, 0, 1]]] * 3, r"shape of input_ids, \[1, 6\], got \[3, 1, 6\]"),
]


@pytest.mark.parametrize("given, positions, says", POSITIONS)
def test_positions_that_the_parts_would_not_have(given, positions, says):
    """The parts count from 0 in each sequence: other positions would be lost without a word."""
    positions = torch.tensor(positions)
    ids = torch.zeros(positions.shape[0] if positions.ndim == 2 else 1, 6, dtype=torch.long)
    batch = {"input_ids": ids, "position_ids": positions}
    batch.update({name: torch.tensor(x) for name, x in given.items()})
    make = submodule("parallel.batch").Batch
    if says is None:
        assert make(batch).lengths(6)[-1] == 6
    else:
        with pytest.raises(ValueError, match=f"position_ids must .*{says}"):
            make(batch)


def test_batches_of_no_tokens():
    nothing = torch.zeros(2, 0, dtype=torch.long)
    names = ("input_ids", "position_ids", "attention_mask", "labels")
    made = submodule("parallel.batch").Batch(dict.fromkeys(names, nothing))
    assert made.starts.shape == made.targets().shape == (2, 0)


@pytest.mark.gpu
def test_tables_reach_a_gpu_without_a_wait():
    from_host, values = submodule("runtime.device").from_host, torch.arange(1000)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [from_host(x, torch.device("cuda", 0)) for x in (values, values[:0])]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(found[0].cpu(), values) and found[1].shape == (0,) and found[1].is_cuda


@pytest.mark.skipif(torch.cuda.is_available(), reason="would take the GPUs")
def test_what_several_gpus_run_is_rehearsed():
    """benchmarks/compare_parallel.py: two processes, gloo, tiny sizes."""
    script = ROOT / "benchmarks" / "compare_parallel.py"
    parts = ("bits", "messages", "time of 16/64", "time of FLA")  # not the order of all
    done = fresh.python(script, "--seconds", "200", "--only", *parts, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = dict(line.split("): ", 1) for line in done.stdout.splitlines() if "): " in line)
    assert [name.rpartition(" (")[0] for name in said] == list(parts)
    found = list(said.values())
    assert found[0].startswith("right") and found[1].startswith("right")
    assert found[3] == "left out: needs GPUs"


def test_without_process_groups(kernel):
    with pytest.raises(ValueError, match="init_process_group"):
        kernel.build_cp_context([0, 12])
    x, weight = torch.randn(1, 8, 6), torch.randn(8, 4)
    with pytest.raises(TypeError, match="cp_context must come from build_cp_context, got str"):
        kernel.causal_conv1d_fn(x, weight, cp_context="zigzag")


def test_sequences_that_nobody_shares_are_an_ordinary_call(kernel, monkeypatch):
    """With a backend in which processes compare nothing, such as NCCL."""
    dist = torch.distributed
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=1, world_size=2, store=fake_pg.FakeStore())
    try:
        exchange = submodule("parallel.exchange")
        monkeypatch.setattr(exchange, "agrees", lambda group: False)
        cp = kernel.build_cp_context([0, 5, 7, 12], layout=[[(0, 5)], [(5, 12)]])
        tokens, weight = torch.randn(1, 12, 3), torch.randn(3, requires_grad=True)
        with torch.inference_mode():  # which leaves nothing behind that training cannot take
            assert (cp.shard(tokens) == tokens[:, 5:]).all()
        cp.shard(tokens * weight).sum().backward()
        assert torch.allclose(weight.grad, tokens[0, 5:].sum(0))
        for name in ("gdn.api", "gdn_layer.api"):
            for function in ("chunk_with_context", "convolve_with_context"):
                monkeypatch.setattr(submodule(name), function, None, raising=False)
        q, k, v = torch.randn(3, 1, 7, 2, 8).unbind(0)
        g, beta, state = -torch.rand(1, 7, 2), torch.rand(1, 7, 2), torch.randn(2, 2, 8, 8)
        options = {"initial_state": state, "output_final_state": True}
        lengths = torch.tensor([0, 2, 7])
        for grad in (False, True):
            q.requires_grad_(grad)
            got = kernel.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=cp, **options)
            want = kernel.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=lengths, **options)
            assert all(map(torch.equal, got, want)) and got[0].requires_grad == grad
        x, weight = torch.randn(1, 6, 7), torch.randn(6, 4)
        y = kernel.causal_conv1d_fn(x, weight, cp_context=cp)
        assert torch.equal(y, kernel.causal_conv1d_fn(x, weight, cu_seqlens=lengths))
        with pytest.raises(TypeError, match="NoneType"):  # what is wrong goes the long way
            kernel.causal_conv1d_fn(x[..., :6], weight, cp_context=cp)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_torch_operations_of_an_eager_call(kernel, monkeypatch, rank, layout):
    """Few and as many on every rank, beside those of the kernels' own outputs: what waits for the
    host is every other rank."""
    dist, ops = torch.distributed, submodule("gdn.ops_context")
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    T, H, HV, D, seen = 128, 2, 4, 16, []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            seen.append(str(operation))
            return operation(*args, **(kwargs or {}))

    def pieces(q, k, v, g, beta, A_log, dt_bias, start, *more):
        o, states = torch.empty_like(v), torch.empty_like(start)
        return lambda start: (o, states, None)

    def gradients(*tensors):
        return tensors[:8]

    values = {
        "PIECES": pieces, "ENTRY": lambda *x: (None,) * 3,
        "BEGUN": lambda *x: lambda d_states: gradients(*x),
    }  # fmt: skip
    for name, run in values.items():
        monkeypatch.setattr(getattr(ops, name), "serving", lambda *given, run=run: run)

    def chained(gathered, links, *_):
        return gathered.new_empty((len(links), HV, D, D))

    for name, run in (("CHAIN", chained), ("GRADIENT", gradients)):
        monkeypatch.setattr(getattr(ops, name), "launcher", lambda fields, run=run: run)
    dist.init_process_group("fake", rank=rank, world_size=4, store=fake_pg.FakeStore())
    try:
        monkeypatch.setattr(submodule("parallel.exchange"), "agrees", lambda group: False)
        cp = kernel.build_cp_context([0, 4 * T], layout=layout)
        q, v, g = torch.randn(1, T, H, D), torch.randn(1, T, HV, D), -torch.ones(1, T, HV)
        call, options = submodule("gdn.call"), (D**-0.5, True, False, False, False, True)
        options = call.GdnOptions(*options)
        one = call.GdnCall(q, q, v, g, -g, None, None, None, None, cp.cu_seqlens, options)
        ops.chunk_forward(one, cp)  # makes the tables
        with Counted():
            *_, start, sent, _ = ops.chunk_forward(one, cp)
        assert len(seen) <= 6, seen
        options = call.GradientOptions(False, *options)
        tensors = (*one.tensors[:7], start, cp.cu_seqlens, v, None, None, None, None)
        seen.clear()
        with Counted():
            ops.chunk_backward(call.GdnBackward(*tensors, options), cp, sent, False)
        assert len(seen) <= 11, seen
    finally:
        dist.destroy_process_group()


def test_kernels_that_fill_a_gpu_run_after_the_exchange(kernel):
    dist, ops, device = torch.distributed, submodule("gdn.ops_context"), submodule("runtime.device")
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=fake_pg.FakeStore())
    try:
        one, two = [kernel.build_cp_context([0, 8], layout=x) for x in ("contiguous", "zigzag")]
        cpu = torch.device("cpu")
        assert not ops._fill(one, 64, cpu)  # where there are no multiprocessors
        with device.pretending(device.Chip("NVIDIA_H200", (9, 0), 132)):
            assert [ops._fill(one, HV, cpu) for HV in (32, 50, 51, 64)] == [False] * 2 + [True] * 2
            assert [ops._fill(two, HV, cpu) for HV in (25, 26, 32)] == [False, True, True]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("grad", [False, True])
def test_what_a_call_like_an_earlier_one_skips(kernel, monkeypatch, grad):
    """The checks, which other facts, options or modes do not skip."""
    dist, api = torch.distributed, submodule("gdn.api")
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=1, world_size=2, store=fake_pg.FakeStore())
    checked = []
    try:
        monkeypatch.setattr(submodule("parallel.exchange"), "agrees", lambda group: False)
        real = api._checked
        seen = lambda *given, **more: (checked.append(1), real(*given, **more))[1]  # noqa: E731
        monkeypatch.setattr(api, "_checked", seen)
        cp = kernel.build_cp_context([0, 8])

        def run(T=4, dtype=torch.float32, cp=cp, **options):
            q, v, g = torch.randn(1, T, 2, 8), torch.randn(1, T, 2, 8), -torch.rand(1, T, 2)
            x = [t.to(dtype).requires_grad_(grad) for t in (q, q, v, g, -g)]
            checked.clear()
            o, state = kernel.chunk_gated_delta_rule(*x, cp_context=cp, **options)
            assert o.requires_grad == grad and o.dtype == dtype and o.shape == v.shape
            assert (state is not None) == options.get("output_final_state", False)
            return len(checked)

        assert [run(), run(), run()] == [1, 0, 0]
        assert [run(dtype=torch.bfloat16), run(dtype=torch.bfloat16), run()] == [1, 0, 0]
        assert [run(output_final_state=True), run(output_final_state=True)] == [1, 0]
        start = torch.zeros(1, 2, 8, 8)
        assert [run(initial_state=start), run(initial_state=start), run()] == [1, 0, 0]
        with pytest.raises(ValueError):
            run(T=5)
        assert run(cp=kernel.build_cp_context([0, 8])) == 1
        monkeypatch.setattr(submodule("parallel.exchange"), "agrees", lambda group: True)
        monkeypatch.setattr(dist, "all_gather_object", lambda all, own, group: all.__setitem__(
            slice(None), [own] * len(all)
        ))  # fmt: skip
        assert run() == 1  # where processes compare their calls
    finally:
        dist.destroy_process_group()


def test_layouts():
    fragments_of = submodule("parallel.layouts").fragments_of
    assert fragments_of("contiguous", 10, 3) == [[(0, 3)], [(3, 6)], [(6, 10)]]
    assert fragments_of("zigzag", 16, 2) == [[(0, 4), (12, 16)], [(4, 12)]]
    assert fragments_of("torch", 16, 2) == fragments_of("zigzag", 16, 2)
    # torch's context_parallel falls back to torch.chunk
    parts = [list(part) for part in torch.arange(18).chunk(4)]
    assert fragments_of("torch", 18, 4) == [[(int(p[0]), int(p[-1]) + 1)] for p in parts]
    assert fragments_of([[(3, 5), (0, 3)], [(5, 9)]], 9, 2) == [[(3, 5), (0, 3)], [(5, 9)]]


def test_messages_do_not_grow_with_the_stream():
    """One piece a fragment goes out and one comes in, however many sequences there are."""
    make_plan = submodule("parallel.plan").make_plan
    fragments_of = submodule("parallel.layouts").fragments_of
    for T in (1000, 100000):
        lengths = list(range(0, T + 1, 10))
        plan = make_plan([0, *[n + 5 for n in lengths[:-1]], T], fragments_of("zigzag", T, 4))
        assert 1 <= plan.slots_out <= 2 and 1 <= plan.slots_in <= 2
        assert not plan.has_middle
    plan = make_plan([0, T], fragments_of("zigzag", T, 4))
    assert plan.has_middle and (plan.slots_out, plan.slots_in) == (2, 2)
    whole = make_plan(lengths, fragments_of("contiguous", T, 4))  # cut where sequences end
    assert whole.slots_out == whole.slots_in == 0 and not whole.chains


def test_context_is_public():
    assert load_package().build_cp_context is submodule("parallel.api").build_cp_context
