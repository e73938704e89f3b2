"""Parts of compare_parallel.py that say whether several GPUs compute what one does.

The problems are those of tests/parallel_problems.py (the rule and the convolution, on any layout),
in the same tolerances. Whole models are tests/parallel/test_distributed.py, with NCCL on two GPUs.
"""

import functools
from typing import Dict

import parallel_problems as problems
import torch
import torch.distributed as dist
from conftest import load_package, submodule
from parallel_worker import Part, Worker
from test_parallel import LEAST, LIMIT, SUMS, WORSE

LAYOUTS = [f"{what}, {layout}, {{}}" for layout in ("contiguous", "zigzag")
           for what in ("one sequence", "packed")]  # fmt: skip
CASES = (*LAYOUTS, *problems.FEW, "an empty shard first", "shards of one token")
FEWER = (LAYOUTS[0], LAYOUTS[-1])
# relative errors in fp32 below this one need not be near those of one process
LEAST_FP32 = 1e-4


def errors_of(worker: Worker, name: str, kind: str) -> tuple:
    """Of the processes together and, on a GPU, of one: relative to one process in fp64."""
    case = problems.CASES[name]
    want = problems.alone(case, kind, worker.device, torch.float64)
    with problems.exchange_of(case):
        errors = problems.check(case, want, worker.group, kind)
    if not worker.on_gpu:
        return errors, {}
    own = problems.alone(case, kind, worker.device, problems.DTYPES[kind])
    return errors, problems.errors_alone(want, own)


def limit_of(part: str, alone: Dict[str, float], least: float) -> float:
    return max(WORSE * alone[part], least) if alone else LIMIT


def rule(worker: Worker, names=CASES, dtype=torch.bfloat16, least=LEAST) -> tuple:
    """The convolution and the rule, forward and all gradients, with states."""
    kind, wrong, largest = worker.device.type, [], (0.0, "")
    names = dict.fromkeys(name.format(worker.world) for name in names)
    names = [name for name in names if problems.CASES[name].P == worker.world]
    before = problems.DTYPES[kind]
    if worker.on_gpu:
        problems.DTYPES[kind] = dtype
    try:
        for name in names:
            errors, alone = errors_of(worker, name, kind)
            if not problems.CASES[name].exchange:
                if max(errors.values()) < 0.1:
                    wrong.append("right without an exchange")
                continue
            for part, error in errors.items():
                low = SUMS.get(part, least) if dtype is torch.bfloat16 else least
                share = error / limit_of(part, alone, low)
                if not share <= 1:
                    wrong.append(f"{name}, {part}: {error:.1e}")
                largest = max(largest, (share, f"{part} of {name}"))
    finally:
        problems.DTYPES[kind] = before
    line = f"{len(names)} cases, largest error {largest[0]:.2f} of its limit ({largest[1]})"
    return verdict(wrong, line), []


def verdict(wrong: list, line: str) -> str:
    return f"WRONG: {'; '.join(wrong)[:1000]} | {line}" if wrong else f"right: {line}"


def here(worker: Worker, T: int, H: int, HV: int, layout="contiguous", grad=False) -> tuple:
    """A context, and what this process has of a rule's tensors."""
    import parallel_times

    cp = load_package().build_cp_context([0, T], worker.group, layout=layout)
    whole = parallel_times.tensors(worker, T, H, HV, "slow")
    return cp, [cp.shard(x).detach().requires_grad_(grad) for x in whole]


def call_of(cp, x: list) -> torch.Tensor:
    options = {"use_qk_l2norm_in_kernel": True, "cp_context": cp}
    return load_package().chunk_gated_delta_rule(*x, **options)[0]


def repeats(worker: Worker) -> tuple:
    """The same bits in every run."""
    T = 4096 if worker.on_gpu else 256
    runs, different = (20 if worker.on_gpu else 2), []
    for layout in ("contiguous", "zigzag"):
        cp, x = here(worker, T, 2, 4, layout, grad=True)
        do = torch.ones_like(x[2])
        first = None
        for _ in range(runs):
            o = call_of(cp, x)
            found = [o.detach(), *torch.autograd.grad(o, x, do)]
            first = first or found
            if not all(map(torch.equal, found, first)):
                different.append(layout)
    if not worker.all_true(not different):
        different = different or ["in another process"]
    return verdict(different, f"{runs} runs to the bit, forward and gradients"), []


def without_waits(worker: Worker) -> tuple:
    """A batch's context, forward and backward, while torch refuses to wait for the GPU."""
    kernel, tokens = load_package(), 4096 if worker.on_gpu else 256

    def step():
        cp = kernel.build_cp_context([0, 70, tokens], worker.group, layout="zigzag")
        own = [t[:, : cp.tokens].detach().requires_grad_() for t in x]
        y = kernel.causal_conv1d_fn(signal[..., : cp.tokens], weight, None, "silu", cp_context=cp)
        o = call_of(cp, own)
        loss = cp.unshard(o).float().square().sum() + y.float().square().sum()
        torch.autograd.grad(loss, [*own, weight])

    _, x = here(worker, tokens, 2, 4)
    signal = torch.randn(1, 512, tokens, device=worker.device, dtype=torch.bfloat16)
    weight = torch.randn(512, 4, device=worker.device, dtype=torch.bfloat16, requires_grad=True)
    step()
    worker.needs_gpu()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return verdict([], "the host waits for no GPU"), []


def captured(worker: Worker) -> tuple:
    """A forward in a CUDA graph, whose replays see what the inputs are then."""
    worker.needs_gpu()
    different = []
    for layout in ("contiguous", "zigzag"):
        cp, x = here(worker, 4096, 2, 4, layout)
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call_of(cp, x)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog asks CUDA for events from a thread of its own
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                o = call_of(cp, x)
            for seed in range(3):
                torch.manual_seed(seed + 10 * worker.rank)
                x[2].copy_(torch.randn_like(x[2]))
                graph.replay()
                got = o.clone()
                if not torch.equal(got, call_of(cp, x)) or not got.isfinite().all():
                    different.append(f"{layout}, replay {seed}")
    if not worker.all_true(not different):
        different = different or ["in another process"]
    return verdict(different, "replays with other inputs, as eager calls to the bit"), []


def messages(worker: Worker) -> tuple:
    """An all-gather by itself: what all else costs on top of."""
    exchange = submodule("parallel.exchange")
    rows, said = [], []
    for mib in (2, 4, 8):
        own = torch.full((mib * 2**18,), worker.rank + 1.0, device=worker.device)
        found = exchange.all_gather(own, worker.group)
        want = torch.arange(1.0, worker.world + 1, device=worker.device)
        assert torch.equal(found[:, -1], want) and torch.equal(found[:, 0], want)
        time = worker.microseconds(lambda x=own: exchange.all_gather(x, worker.group), 20)
        rows.append({"what": f"all-gather of {mib} MiB a process", "us": {"NCCL": time}})
        said.append(f"{mib} MiB {time:.0f} us")
    total = torch.ones(1, device=worker.device)
    dist.all_reduce(total)
    wrong = [] if total.item() == worker.world else ["the sum"]
    return verdict(wrong, f"{worker.world} processes, all-gather of {', '.join(said)}"), rows


in_fp32 = functools.partial(rule, names=FEWER, dtype=torch.float32, least=LEAST_FP32)
PARTS = (
    Part("messages", 30, messages),
    Part("rule", 75, rule),
    Part("waits", 20, without_waits),
    Part("capture", 20, captured),
    Part("bits", 20, repeats),
    Part("rule in fp32", 45, in_fp32, warm=("fp32",)),
)
