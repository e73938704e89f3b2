"""Sequences that several processes hold, against one process: tests/parallel/test_parallel.py.

    python tests/parallel_problems.py FOLDER [cpu | cuda]

Four processes are forked once (two are spawned for "cuda": they share one GPU, and gloo) and go
through CASES, each on a group of the first P of them: in fp64 on the CPU, in bf16 by kernels on a
GPU. FOLDER/RANK.json gets the errors of every case against one process in fp64, and, for a GPU,
those of one process there: each process makes some of these, so that they compile side by side.
"""

import contextlib
import datetime
import json
import random
import sys
import traceback
from pathlib import Path
from typing import Dict, NamedTuple

import torch
import torch.distributed as dist
from conftest import load_package, relative_error, submodule

WORLD = {"cpu": 4, "cuda": 2}
H, HV, W = 1, 2, 4  # heads of q and k, of v, taps
DIMS = {"cpu": (8, 12), "cuda": (128, 128)}  # head dims K, V
DTYPES = {"cpu": torch.float64, "cuda": torch.bfloat16}
OPTIONS = {
    "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}  # fmt: skip
PACKED = [0, 5, 7, 90, 90, 128, 170, 171, 200]  # one empty, one of one token
NAMES = ("x", "weight", "a", "b", "A_log", "dt_bias", "conv_state", "state")


class Case(NamedTuple):
    P: int
    lengths: list
    layout: object
    batch: int = 1
    options: tuple = ()  # of the rule, beyond OPTIONS
    frozen: tuple = ()  # NAMES of what needs no gradient
    states: bool = True  # initial states are given
    exchange: bool = True  # False: the control


def random_case(seed: int) -> Case:
    """A random pack on random shards: of few or no tokens, in any order."""
    draw = random.Random(seed)
    P, T = draw.choice([2, 3, 4]), draw.choice([40, 97, 200])
    lengths = [0, *sorted(draw.choices(range(T + 1), k=draw.randrange(6))), T]
    cuts = sorted(draw.choices(range(T + 1), k=draw.randrange(2 * P)))
    near = [cut + draw.choice([-1, 0, 1]) for cut in lengths[1:-1]]  # beside borders of sequences
    cuts = sorted({0, T, *cuts, *[cut for cut in near if 0 < cut < T and draw.random() < 0.5]})
    layout = [[] for _ in range(P)]
    for fragment in zip(cuts, cuts[1:]):
        layout[draw.randrange(P)].append(fragment)
    for fragments in layout:
        draw.shuffle(fragments)
    return Case(P, lengths, layout)


def cases() -> Dict[str, Case]:
    found = {}
    for P in (2, 3, 4):
        for layout in ("contiguous", "zigzag", "torch"):
            found[f"one sequence, {layout}, {P}"] = Case(P, [0, 200], layout)
            found[f"packed, {layout}, {P}"] = Case(P, PACKED, layout)
    rest = [[] for _ in range(2)]
    found["an empty shard first"] = Case(
        4, [0, 150, 200], [[], [(0, 64)], [(64, 130)], [(130, 200)]]
    )
    found["an empty shard between"] = Case(4, PACKED, [[(0, 100)], *rest, [(100, 200)]])
    found["an empty shard last"] = Case(3, [0, 200], [[(0, 65)], [(65, 200)], []])
    found["shards of one token"] = Case(4, [0, 70], [[(0, 1)], [(1, 2)], [(2, 3)], [(3, 70)]])
    found["an empty shard, in reverse"] = Case(2, PACKED, [[(100, 200), (0, 100)], []])
    turns = [[(0, 50), (100, 150)], [(50, 100), (150, 200)]]
    found["in turns"] = Case(2, [0, 200], turns)  # four pieces, two of them in the middle
    found["in reverse"] = Case(2, [0, 130], [[(64, 130)], [(0, 64)]])
    found["rows, zigzag"] = Case(2, [0, 60, 70, 140, 210], "zigzag", batch=3)
    found["rows, contiguous"] = Case(3, [0, 70, 140], "contiguous", batch=2)
    found["no initial states"] = Case(2, PACKED, "zigzag", states=False)
    found["states [V, K]"] = Case(3, [0, 200], "zigzag", options=(("state_v_first", True),))
    found["saved blocks"] = Case(2, PACKED, "zigzag", options=(("recompute", False),))
    found["only v"] = Case(3, [0, 200], "contiguous", frozen=NAMES[1:])
    found["nothing needs a gradient"] = Case(3, [0, 200], "contiguous", frozen=NAMES)
    found["long"] = Case(2, [0, 1500], "zigzag")
    found["no exchange"] = Case(2, [0, 200], "contiguous", exchange=False)
    found.update({f"random {seed}": random_case(seed) for seed in range(50)})
    return found


CASES = cases()
FEW = (
    "one sequence, contiguous, 2", "no initial states", "in turns", "packed, contiguous, 2",
    "an empty shard, in reverse", "rows, zigzag", "saved blocks", "long", "no exchange",
)  # fmt: skip


def cases_of(kind: str) -> Dict[str, Case]:
    """All, or those that take two processes through every kernel: a GPU's compile for seconds."""
    return {name: CASES[name] for name in (CASES if kind == "cpu" else FEW)}


def inputs(case: Case, kind: str) -> list:
    """The same in every process: NAMES, of the whole stream, on the CPU."""
    generator = torch.Generator().manual_seed(len(case.lengths))
    N, T = len(case.lengths) - 1, case.lengths[-1]
    (K, V), dtype = DIMS[kind], DTYPES[kind]
    D = 2 * H * K + HV * V  # channels of the convolution

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    made = [normal(1, T, D), normal(D, W) * 0.5, normal(1, T, HV), normal(1, T, HV)]
    # their gradients are sums over processes, or chains: 16 bits would round each part of them
    wide = torch.promote_types(dtype, torch.float32)
    decay = torch.tensor([0.02, 0.5], dtype=torch.float64).log().to(wide)  # one forgets
    state = (normal(N, HV, K, V) * 0.3).to(wide)
    made += [decay, normal(HV).to(wide), normal(N, D, W - 1), state]
    if dict(case.options).get("state_v_first"):
        made[-1] = state.mT.contiguous()
    return made


def layer(kernel, case: Case, x, weight, a, b, A_log, dt_bias, conv_state, state, **where):
    """From a layer's projections to o, the last inputs and the states: (o, final, states)."""
    K = state.shape[-1 if dict(case.options).get("state_v_first") else -2]
    V = (x.shape[-1] - 2 * H * K) // HV
    if not case.states:
        conv_state = state = None
    x = x.transpose(1, 2)
    y, final = kernel.causal_conv1d_fn(
        x, weight, None, "silu", initial_states=conv_state, return_final_states=True, **where
    )
    q, k, v = y.transpose(1, 2).split([H * K, H * K, HV * V], -1)
    q, k, v = (t.unflatten(-1, (n, -1)) for t, n in ((q, H), (k, H), (v, HV)))
    o, states = kernel.chunk_gated_delta_rule(
        q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, initial_state=state,
        **{**OPTIONS, **dict(case.options)}, **where,
    )  # fmt: skip
    return o, final, states


def outer(outputs) -> list:
    """Gradients of the outputs of the whole stream, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, generator=generator).to(t) for t in outputs]


def alone(case: Case, kind: str, device, dtype) -> dict:
    """Results of one process for the whole stream, by the kernels that the processes' parts
    take."""
    given = [x.to(device, torch.promote_types(x.dtype, dtype)) for x in inputs(case, kind)]
    given = [x.requires_grad_(name not in case.frozen) for name, x in zip(NAMES, given)]
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    outputs = layer(load_package(), case, *given, cu_seqlens=lengths)
    grads = {}
    wanted = [x for x in given if x.requires_grad]
    if wanted:
        found = torch.autograd.grad(outputs, wanted, outer(outputs), materialize_grads=True)
        grads = dict(zip([n for n in NAMES if n not in case.frozen], [x.cpu() for x in found]))
    return {"outputs": [x.detach().cpu() for x in outputs], "grads": grads}


@contextlib.contextmanager
def exchange_of(case: Case):
    """Inside, a rule whose processes hear nothing, where the case wants that."""
    ops = submodule("gdn.ops_context")
    told = ops.start_all_gather

    def start(own, *more):
        end = told(own, *more)
        return lambda: torch.zeros_like(end())

    if not case.exchange:
        ops.start_all_gather = start
    try:
        yield
    finally:
        ops.start_all_gather = told


@contextlib.contextmanager
def unchecked():
    """Inside, a call like an earlier one under its context skips the checks, as with NCCL."""
    module = submodule("parallel.exchange")
    agrees, module.agrees = module.agrees, lambda group: False
    try:
        yield
    finally:
        module.agrees = agrees


def errors_alone(want: dict, got: dict) -> Dict[str, float]:
    names = ("o", "final inputs", "final states")
    errors = {n: relative_error(g, w) for n, g, w in zip(names, got["outputs"], want["outputs"])}
    grads = got["grads"]
    return {**errors, **{f"d{n}": relative_error(grads[n], want["grads"][n]) for n in grads}}


def check(case: Case, want: dict, group, kind: str) -> Dict[str, float]:
    """Relative errors of the outputs and gradients of all processes together."""
    kernel, B, device = load_package(), case.batch, torch.device(kind)
    cp = kernel.build_cp_context(case.lengths, group, layout=case.layout, batch_size=B)
    rows, starts, ends = cp.sequences.cpu(), cp.starts_here.cpu(), cp.ends_here.cpu()

    def here(x):  # [1, T, ..] of the stream
        return cp.shard(x.reshape(B, x.shape[1] // B, *x.shape[2:]))

    def only(mask, x, other):  # rows of x, and others
        return torch.where(mask.view(-1, *[1] * (x.ndim - 1)), x, other)

    x, weight, a, b, A_log, dt_bias, *states = inputs(case, kind)
    nan = torch.tensor(float("nan"), dtype=x.dtype)  # in rows that must not be read
    states = [only(starts, s[rows], nan) for s in states]
    own = [here(x), weight, here(a), here(b), A_log, dt_bias, *states]
    own = [t.to(device, copy=True).requires_grad_(n not in case.frozen) for n, t in zip(NAMES, own)]
    if case.P == 2:
        with unchecked():
            layer(kernel, case, *own, cp_context=cp)
            if B == 1 and cp.plan.chains:
                assert len(cp.calls) == 2  # the convolution's, too
            outputs = layer(kernel, case, *own, cp_context=cp)
    else:
        outputs = layer(kernel, case, *own, cp_context=cp)
    pairs = {"o": (outputs[0], here(want["outputs"][0]))}
    for name, got, t in zip(("final inputs", "final states"), outputs[1:], want["outputs"][1:]):
        pairs[name] = got.cpu()[ends], t[rows[ends]]
    d_o, *d_states = outer(want["outputs"])
    # states at cuts are no outputs of one process
    d_outputs = [here(d_o), *(only(ends, d[rows], 0) for d in d_states)]
    d_outputs = [d.to(t) for d, t in zip(d_outputs, outputs)]
    wanted = [t for t in own if t.requires_grad]
    if wanted:
        found = torch.autograd.grad(outputs, wanted, d_outputs, materialize_grads=True)
        for name, got in zip([n for n in NAMES if n not in case.frozen], found):
            t = want["grads"][name]
            if name in ("x", "a", "b"):
                t = here(t)
            elif name.endswith("state"):
                got, t = got.cpu()[starts], t[rows[starts]]
            else:  # of parameters each process has a part
                got = got.detach().cpu().double()
                dist.all_reduce(got, group=group)
            pairs[f"d{name}"] = got, t
    return {name: error_over(group, *pair) for name, pair in pairs.items()}


def error_over(group, got, want) -> float:
    """||got - want|| / ||want|| over all processes."""
    got, want = got.detach().cpu().double(), want.double()
    assert got.shape == want.shape, (got.shape, want.shape)
    sums = torch.stack([(got - want).square().sum(), want.square().sum()])
    dist.all_reduce(sums, group=group)
    return (sums[0] / sums[1].clamp_min(1e-300)).sqrt().item()


def unsharded(group, device: str) -> Dict[str, float]:
    """shard and unshard undo each other, and so do their gradients."""
    kernel, errors = load_package(), {}
    apart = [[(40, 50)], *[[]] * (dist.get_world_size(group) - 2), [(0, 40)]]
    pieces = kernel.build_cp_context([0, 20, 50], group)
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.float64):
        x = torch.arange(100, device=device).view(1, 50, 2).to(dtype)
        errors[f"{dtype}"] = float((pieces.unshard(pieces.shard(x)) != x).sum())
    errors["nothing"] = float(pieces.unshard(pieces.shard(x[..., :0])).numel())
    for name, layout in (("contiguous", "contiguous"), ("zigzag", "zigzag"), ("apart", apart)):
        cp = kernel.build_cp_context([0, 20, 50], group, layout=layout)
        x = torch.arange(150.0, dtype=torch.float64, device=device).view(1, 3, 50)
        own = cp.shard(x, 2).requires_grad_()
        back = cp.unshard(own, 2)
        back.backward(x * (1 + cp.rank))
        total = sum(range(1, 1 + cp.size))
        errors[name] = relative_error(back, x)
        errors[f"gradient {name}"] = relative_error(own.grad, cp.shard(x, 2) * total)
        positions = torch.cat([torch.arange(20), torch.arange(30)])[None]
        errors[f"places {name}"] = float((cp.position_ids != cp.shard(positions)).sum())
    return errors


def batches(group) -> Dict[str, int]:
    """How many values differ between a batch's parts, put together again, and what is meant."""
    kernel, wrong = load_package(), {}
    ids = torch.arange(22).view(2, 11) + 1
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    for layout, T in (("zigzag", 12), ("contiguous", 12)):
        given = {"input_ids": ids, "labels": labels, "attention_mask": mask, "name": "kept"}
        part = kernel.shard_batch(given, group, layout=layout)
        cp = part["cp_context"]
        shifted = [[*range(2, 12), -100, -100], [*range(13, 19), *[-100] * 6]]
        places = [[*range(11), 0], [*range(7), *range(4), 0]]  # padding is a sequence of its own
        want = {"shift_labels": torch.tensor(shifted), "position_ids": torch.tensor(places)}
        want["input_ids"] = torch.nn.functional.pad(ids, (0, 1))
        for name, expected in want.items():
            wrong[f"{name} {layout}"] = int((cp.unshard(part[name]) != expected).sum())
        wrong[f"length {layout}"] = abs(cp.unshard(part["input_ids"]).shape[1] - T)
        wrong[f"targets {layout}"] = abs(int(part["num_items_in_batch"]) - 16)
        wrong[f"rest {layout}"] = int(part["name"] != "kept" or "attention_mask" in part)
    packed = {"input_ids": ids[:1], "labels": ids[:1]}
    for name, lengths in (
        ("cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([0, 4, 5, 11])}),
        ("position_ids", {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]])}),
    ):
        part = kernel.shard_batch({**packed, **lengths}, group)
        shifted = part["cp_context"].unshard(part["shift_labels"])
        want = torch.tensor([[2, 3, 4, -100, -100, 7, 8, 9, 10, 11, -100, -100]])
        wrong[f"packed by {name}"] = int((shifted != want).sum())
    own = kernel.shard_batch({"input_ids": ids, "shift_labels": labels}, group)
    wrong["shifted before"] = abs(int(own["num_items_in_batch"]) - 18)
    return wrong


def channels(group) -> Dict[str, float]:
    """Largest errors of chunk_kda over the processes, in fp64: outputs, states and gradients beside
    those of one process; calls that skip the checks are as those before them."""
    kernel, errors, T, HV, D = load_package(), {}, 48, 2, 8
    torch.manual_seed(0)
    q, k, v, raw, beta = (torch.randn(1, T, n, D).double() for n in (1, 1, HV, HV, HV))
    tensors = [q, k, v, raw, beta[..., 0].sigmoid()]
    tensors += [torch.randn(1, 1, HV, 1).double() * 0.1, torch.randn(HV * D).double() * 0.1]
    do, starts, ends = torch.randn_like(v), *torch.randn(2, 2, HV, D, D).double() * 0.3

    def call(x: list, **where) -> tuple:
        *five, A_log, dt_bias, start = x
        options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, **where}
        return kernel.chunk_kda(*five, initial_state=start, output_final_state=True, **options)

    for lengths in ([0, T], [0, 30, T]):
        leaves = [x.requires_grad_() for x in (*tensors, starts[: len(lengths) - 1])]
        whole = call(leaves, cu_seqlens=torch.tensor(lengths))
        want = torch.autograd.grad(whole, leaves, (do, ends[: len(lengths) - 1]))
        for layout in ("contiguous", "zigzag"):
            cp = kernel.build_cp_context(lengths, group, layout=layout)
            first, last = (x.view(-1, 1, 1, 1) for x in (cp.starts_here, cp.ends_here))
            own = [cp.shard(x.detach()) for x in tensors[:5]]
            own += [*tensors[5:], starts[cp.sequences]]
            own = [x.detach().requires_grad_() for x in own]
            with unchecked():
                for _ in range(2):
                    o, states = call(own, cp_context=cp)
                    given = cp.shard(do), ends[cp.sequences] * last
                    got = torch.autograd.grad((o, states), own, given)
            found = [(cp.unshard(o), whole[0])]
            found += [(cp.unshard(x), y) for x, y in zip(got[:5], want)]
            for x, y in zip(got[5:7], want[5:7]):
                dist.all_reduce(x := x.clone(), group=group)
                found.append((x, y))
            for x, y in ((got[7] * first, want[7]), (states * last, whole[1])):
                x = torch.zeros_like(y).index_add(0, cp.sequences, x)
                dist.all_reduce(x, group=group)
                found.append((x, y))
            worst = max(relative_error(x.detach(), y.detach()) for x, y in found)
            errors[f"{lengths}, {layout}"] = worst
    return errors


def calls_of_the_rule(group) -> Dict[str, list]:
    """Number of runs of the rule and of its gradient in this process: one for segments that need no
    other rank's state, and one for those whose state no rank waits for."""
    kernel, dispatch, found = load_package(), submodule("runtime.dispatch"), {}
    layouts = {"contiguous": "contiguous", "zigzag": "zigzag", "empty": [[(6, 12), (0, 6)], []]}
    for name, layout in layouts.items():
        cp = kernel.build_cp_context([0, 12], group, layout=layout)
        q, v = (torch.randn(1, cp.tokens, 1, 4, requires_grad=True) for _ in range(2))
        g = -torch.ones(1, cp.tokens, 1)
        with dispatch.served() as record:
            o, _ = kernel.chunk_gated_delta_rule(q, q, v, g, -g, cp_context=cp)
            o.sum().backward()
        found[name] = [len(record.get(n, ())) for n in ("gdn_chunk_fwd", "gdn_chunk_bwd")]
    return found


def refused(group) -> Dict[str, str]:
    """Error of each process for invalid use: all must raise, and all can communicate afterwards."""
    kernel, rank = load_package(), dist.get_rank(group)
    cp = kernel.build_cp_context([0, 12], group)
    q, v, g = torch.randn(1, 6, 1, 4), torch.randn(1, 6, 1, 4), -torch.ones(1, 6, 1)
    x, weight = torch.randn(1, 8, 6), torch.randn(8, 4)

    def rule(**options):
        given = {"q": q, "k": q, "v": v, "g": g, "beta": -g, **options}
        return kernel.chunk_gated_delta_rule(cp_context=cp, **given)

    def conv(**options):
        return kernel.causal_conv1d_fn(**{"x": x, "weight": weight, "cp_context": cp, **options})

    def build(lengths, **options):
        return kernel.build_cp_context(lengths, group, **options)

    first = rank == 0
    uses = {
        "tokens of one": lambda: rule(q=q[:, 1:] if first else q),
        "gradients of one": lambda: rule(v=v.clone().requires_grad_(first)),
        "a state of one": lambda: rule(initial_state=torch.zeros(2 if first else 1, 1, 4, 4)),
        "cu_seqlens": lambda: rule(cu_seqlens=torch.tensor([0, 6])),
        "state_indices": lambda: rule(state_indices=torch.tensor([0])),
        "checkpoint_every": lambda: rule(checkpoint_every=64),
        "chunk_size of one": lambda: rule(chunk_size=32 if first else 64),
        "conv tokens of one": lambda: conv(x=x[..., 1:] if first else x),
        "conv seq_idx": lambda: conv(seq_idx=torch.zeros(1, 6, dtype=torch.int32)),
        "conv taps": lambda: conv(weight=torch.randn(8, 3 if first else 4)),
        "lengths": lambda: build([0, 12 + rank]),
        "lengths of one": lambda: build([0, 5, 3, 12] if first else [0, 12]),
        "layout of one": lambda: build([0, 12], layout="zigzag" if first else "contiguous"),
        "a name": lambda: build([0, 12], layout="ring" if first else "zigzag"),
        "a hole": lambda: build([0, 12], layout=[[(0, 5)], [(6, 12)]]),
        "rows": lambda: build([0, 12], batch_size=5),
        "batch": lambda: kernel.shard_batch({"labels": torch.zeros(1, 4).long()}, group),
        "batch labels": lambda: kernel.shard_batch(
            {"input_ids": torch.zeros(1, 4).long(), "labels": torch.zeros(1, 5).long()}, group
        ),
        "batch mask": lambda: kernel.shard_batch(
            {"input_ids": torch.zeros(1, 3).long(), "attention_mask": torch.tensor([[0, 1, 1]])},
            group,
        ),
        "batch of one": lambda: kernel.shard_batch(
            {"input_ids": torch.zeros(1, 4 + rank).long()}, group
        ),
        "borders of rows": lambda: build([0, 12], batch_size=2),
    }
    said = {}
    for name, use in uses.items():
        try:
            use()
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    o, _ = rule()  # and all is well
    assert o.shape == v.shape
    return said


def process(rank: int, folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    wanted, world = torch.load(f"{folder}/wanted.pt"), WORLD[kind]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    # groups that name their backend in either way
    backends = {2: "cpu:gloo" if kind == "cpu" else "gloo", 3: "gloo", 4: "gloo"}
    groups = {P: dist.new_group(list(range(P)), backend=backends[P]) for P in range(2, world + 1)}
    found, name = {}, ""
    try:
        if kind == "cuda":
            found["alone"] = alone_on_a_gpu(rank, wanted)
        for name, case in cases_of(kind).items():
            if rank < case.P:
                with exchange_of(case):
                    found[name] = check(case, wanted[name], groups[case.P], kind)
        if rank < min(3, world):
            found["unshard"] = unsharded(groups[min(3, world)], kind)
        if kind == "cpu":
            found["channels"] = channels(groups[world])
        if rank < 3 and kind == "cpu":
            found["batches"] = batches(groups[3])
        if rank < 2 and kind == "cpu":
            found["calls"] = calls_of_the_rule(groups[2])
            found["refused"] = refused(groups[2])
    except Exception:
        found["failed"] = f"{name}: {traceback.format_exc()}"
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def alone_on_a_gpu(rank: int, wanted: dict) -> Dict[str, dict]:
    """Errors of one process in bf16, of this process's share of the cases."""
    found = {}
    for name in list(wanted)[rank :: WORLD["cuda"]]:
        own = alone(CASES[name], "cuda", torch.device("cuda"), DTYPES["cuda"])
        found[name] = errors_alone(wanted[name], own)
    return found


def main(folder: str, kind: str = "cpu") -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    cases = cases_of(kind)
    wanted = {name: alone(cases[name], kind, cpu, torch.float64) for name in cases}
    torch.save(wanted, f"{folder}/wanted.pt")
    how = "fork" if kind == "cpu" else "spawn"
    many = WORLD[kind]
    torch.multiprocessing.start_processes(process, (folder, kind), nprocs=many, start_method=how)


if __name__ == "__main__":
    main(*sys.argv[1:])
