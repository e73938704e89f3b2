"""Parts of compare_parallel.py that say how fast several GPUs are, and FLA's cp_context there.

Ten calls in a row are timed, as layers follow each other: one GPU may be at the next call while
another still has this one. A call by itself begins on idle GPUs, with the host's time in it.
"""

import copy
import os
import statistics
import sys
from functools import partial
from typing import Callable

import compare_gdn
import torch
import torch.distributed as dist
from conftest import load_package, relative_error
from parallel_worker import LeftOut, Part, Worker
from peers import lift_fla_guard, share_autotuning, shorten_autotuning
from records import GATES
from tiny_models import mlps_and_gdn
from two_processes import in_shards

RULE = (32768, 16, 64)  # tokens over all GPUs, H, HV
LONG = (32768, 16, 32)  # tokens of each GPU
LAYER = {
    "hidden_size": 2560, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
MLP = {"hidden_size": 4096, "intermediate_size": 14336}
TUNERS = max(12, (os.cpu_count() or 1) - 4)  # processes that try FLA's configurations


def sizes(worker: Worker, T: int, H: int, HV: int) -> tuple:
    """Tiny ones where there is no GPU."""
    return (T, H, HV) if worker.on_gpu else (256, 1, 2)


def tensors(worker: Worker, T: int, H: int, HV: int, gates: str) -> tuple:
    """q, k, v, g, beta of a stream, the same in all processes."""
    return compare_gdn.tensors(1, T, H, HV, gates, device=worker.device)[:5]


def ours(x: list, **options) -> torch.Tensor:
    rule = load_package().chunk_gated_delta_rule
    return rule(*x, use_qk_l2norm_in_kernel=True, **options)[0]


def step(call: Callable, x: list) -> Callable:
    """Forward and backward of o = call(x)."""
    leaves = [t.detach().requires_grad_() for t in x]
    do = torch.randn_like(leaves[2])
    return lambda: torch.autograd.grad(call(leaves), leaves, do)


def label(worker: Worker, T: int, H: int, HV: int, gates: str, what: str) -> str:
    return f"{H}/{HV} heads, {T} tokens over {worker.world}, {GATES[gates]}, {what}"


def contexts(worker: Worker, T: int, x: list) -> dict:
    """Layout -> (context, what is here of x)."""
    build = load_package().build_cp_context
    found = {name: build([0, T], worker.group, layout=name) for name in ("contiguous", "zigzag")}
    return {name: (cp, [cp.shard(t) for t in x]) for name, cp in found.items()}


def rule(worker: Worker, T: int, H: int, HV: int) -> tuple:
    T, H, HV = sizes(worker, T, H, HV)
    rows, said = [], []
    for gates in GATES:
        x = tensors(worker, T, H, HV, gates)
        parts = contexts(worker, T, x)
        cp, own = parts["contiguous"]
        zigzag, turned = parts["zigzag"]
        with torch.no_grad():
            want = ours(x)
            wrong = relative_error(ours(own, cp_context=cp), cp.shard(want))
            calls = {
                "one GPU": partial(ours, x), "ours": partial(ours, own, cp_context=cp),
                "ours, zigzag": partial(ours, turned, cp_context=zigzag),
                "one GPU, its part alone": partial(ours, own, output_final_state=True),
            }  # fmt: skip
            us = {name: worker.microseconds(call) for name, call in calls.items()}
            us["ours, a call by itself"] = worker.microseconds(calls["ours"], 1, 9)
            more = {name: worker.host_microseconds(call) for name, call in calls.items()}
            alone = calls["one GPU, its part alone"]
            extra = worker.peak_mib(calls["ours"]) - worker.peak_mib(alone)
        what = label(worker, T, H, HV, gates, "forward")
        rows.append({"what": what, "us": us, "host_us": more, "error": wrong, "more_mib": extra})
        by_itself = f"by itself {us['ours, a call by itself']:.0f}"
        said.append(f"{gates} {us['ours']:.0f} us, {by_itself}, one GPU {us['one GPU']:.0f}")
        if gates == "slow":
            steps = {
                "one GPU": step(ours, x),
                "ours": step(partial(ours, cp_context=cp), own),
                "ours, zigzag": step(partial(ours, cp_context=zigzag), turned),
            }
            us = {name: worker.microseconds(call, 4, 3) for name, call in steps.items()}
            what = label(worker, T, H, HV, gates, "forward and backward")
            rows.append({"what": what, "us": us})
            said.append(f"with gradients {us['ours']:.0f}, one GPU {us['one GPU']:.0f}")
    return f"{H}/{HV} heads, {T} tokens: {'; '.join(said)}", rows


def packed(worker: Worker) -> tuple:
    """Sequences that no other rank has a part of, 16 on each GPU."""
    each, H, HV = (512, 16, 32) if worker.on_gpu else (64, 1, 2)
    many = 16 * worker.world
    T = many * each
    borders = list(range(0, T + 1, each))
    cp = load_package().build_cp_context(borders, worker.group)
    own = [cp.shard(t) for t in tensors(worker, T, H, HV, "slow")]
    with torch.no_grad():
        us = {
            "one GPU, its part alone": worker.microseconds(
                lambda: ours(own, cu_seqlens=cp.cu_seqlens)
            ),
            "ours": worker.microseconds(lambda: ours(own, cp_context=cp)),
        }
    what = f"{H}/{HV} heads, {many} x {each} tokens over {worker.world}, slow gates, forward"
    return f"{us}", [{"what": what, "us": us}]


def layer_of(worker: Worker):
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    tiny = {"hidden_size": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
    config = Qwen3_5TextConfig(**(LAYER if worker.on_gpu else {**LAYER, **tiny}))
    torch.manual_seed(0)
    with worker.device:
        return modeling.Qwen3_5GatedDeltaNet(config, 0).bfloat16().train()


def layer_step(module, x: torch.Tensor, **options) -> Callable:
    dy, leaves = torch.randn_like(x), [x.requires_grad_(), *module.parameters()]
    return lambda: torch.autograd.grad(module(x, **options), leaves, dy)


def layer(worker: Worker) -> tuple:
    """A training step of Qwen3.5-4B's layer: as many tokens a GPU as one GPU has alone."""
    kernel, tokens = load_package(), 8192 if worker.on_gpu else 64
    alone = layer_of(worker)
    shared = copy.deepcopy(alone)
    kernel.kernelize(alone, mode="training")
    kernel.kernelize(shared, mode="training", cp_group=worker.group, cp_attention=False)
    cp = kernel.build_cp_context([0, tokens * worker.world], worker.group)
    width = alone.out_proj.weight.shape[0]
    x = torch.randn(1, tokens, width, device=worker.device, dtype=torch.bfloat16)
    steps = {
        "one GPU, its part alone": layer_step(alone, x.clone()),
        "ours": layer_step(shared, x.clone(), cp_context=cp),
    }
    us = {name: worker.microseconds(call, 5) for name, call in steps.items()}
    more = {name: worker.host_microseconds(call, 5) for name, call in steps.items()}
    what = f"layer, training step, {tokens * worker.world} tokens over {worker.world}"
    return f"{us}, host {more}", [{"what": what, "us": us, "host_us": more}]


def mlp(worker: Worker) -> tuple:
    """An MLP under transformers' tensor parallelism, its own and a kernelized one in turns."""
    import transformers

    mesh = dist.init_device_mesh(worker.device.type, (worker.world,), mesh_dim_names=("tp",))
    config = transformers.AutoConfig.for_model(
        "llama", num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8, vocab_size=64,
        **(MLP if worker.on_gpu else {"hidden_size": 64, "intermediate_size": 96}),
    )  # fmt: skip
    models, rows, said = {}, [], []
    for name in ("transformers", "ours"):
        torch.manual_seed(0)
        with worker.device:
            model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
        models[name] = in_shards(model, mesh)
    report = load_package().kernelize(models["ours"], mode="inference")
    assert not worker.on_gpu or mlps_and_gdn(report) == 1, str(report)
    modules = {name: model.model.layers[0].mlp for name, model in models.items()}
    for M in (4096, 64, 16, 1):
        shape = (1, M if worker.on_gpu else 2, config.hidden_size)
        x = torch.randn(shape, device=worker.device, dtype=torch.bfloat16)
        dist.broadcast(x, 0, group=worker.group)
        turns = {name: [] for name in modules}
        with torch.no_grad():
            error = relative_error(modules["ours"](x), modules["transformers"](x))
            for _ in range(41 if worker.on_gpu else 1):
                for name, module in modules.items():
                    time = worker.microseconds(lambda x=x, f=module: f(x), 20, rounds=1)
                    turns[name].append(time)
        assert error < 2e-2, f"{error:.1e} from transformers' own"
        us = {name: statistics.median(times) for name, times in turns.items()}
        what = f"MLP of Llama 8B, tensor parallel over {worker.world}, {M} tokens"
        rows.append({"what": what, "us": us, "turns": turns, "difference": error})
        ratios = sorted(a / b for a, b in zip(turns["ours"], turns["transformers"]))
        low, middle, high = (ratios[int(part * (len(ratios) - 1))] for part in (0.25, 0.5, 0.75))
        said.append(f"{M} tokens: {us}, of theirs {middle:.2f} ({low:.2f} to {high:.2f})")
    return "; ".join(said), rows


def import_fla():
    """FLA's rule, with the guard of its backward off as in compare_gdn_backward.py."""
    for name in [name for name, module in sys.modules.items() if module is None and name == "fla"]:
        del sys.modules[name]  # the tests hide it
    try:
        from fla.ops.cp import build_cp_context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise LeftOut(f"fla-core: {error}") from None
    lift_fla_guard()
    return chunk_gated_delta_rule, build_cp_context


def fla(worker: Worker) -> tuple:
    worker.needs_gpu()
    theirs, build = import_fla()
    shorten_autotuning()  # a process tunes while the others wait for it
    T, H, HV = RULE
    rows, said = [], []
    for gates in GATES:
        for name, (_, own) in contexts(worker, T, tensors(worker, T, H, HV, gates)).items():
            lengths = torch.tensor([0, T], dtype=torch.int32)
            cp = build(lengths.to(worker.device), worker.group, 4, lengths, layout=name)

            def call(x, cp=cp):
                options = {"cu_seqlens": cp.cu_seqlens, "cp_context": cp}
                return theirs(*x, use_qk_l2norm_in_kernel=True, **options)[0]

            with torch.no_grad():
                time = worker.microseconds(lambda x=own: call(x), 4, 3)
            which = "fla" if name == "contiguous" else "fla, zigzag"
            rows.append({"what": label(worker, T, H, HV, gates, "forward"), "us": {which: time}})
            said.append(f"{gates}, {name} {time:.0f} us")
            if gates == "slow" and name == "contiguous":
                time = worker.microseconds(step(call, own), 3, 3)
                what = label(worker, T, H, HV, gates, "forward and backward")
                rows.append({"what": what, "us": {which: time}})
                said.append(f"with gradients {time:.0f}")
    return "; ".join(said), rows


def fla_step(worker: Worker, group, T: int, layout: str) -> Callable:
    """A training step of FLA's rule on this process's part of T tokens."""
    theirs, build = import_fla()
    lengths = torch.tensor([0, T], dtype=torch.int32)
    cp = build(lengths.to(worker.device), group, 4, lengths, layout=layout)
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": cp.cu_seqlens, "cp_context": cp}
    x = tensors(worker, T // dist.get_world_size(group), *RULE[1:], "slow")
    return step(lambda x: theirs(*x, **options)[0], x)


def warm_fla(worker: Worker) -> None:
    """Steps of each of two processes in turn, with nobody at the other end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shorten_autotuning()
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        for layout in ("contiguous", "zigzag"):
            fla_step(worker, dist.group.WORLD, 4096, layout)()
        dist.destroy_process_group()


def warm(word: str) -> None:
    """Compiles, in a process of its own and on one GPU, what a part will start."""
    import parallel_problems as problems

    word, _, which = word.partition(":")
    torch.cuda.set_device(int(which or 0) % torch.cuda.device_count())
    worker = Worker(0, 1, torch.device("cuda", torch.cuda.current_device()), None)
    if word == "fp32":
        problems.alone(problems.CASES["packed, zigzag, 2"], "cuda", worker.device, torch.float32)
    elif word == "rule":
        for T, H, HV in (RULE, LONG):
            x = tensors(worker, T // 2, H, HV, "slow")
            start = torch.zeros(1, HV, 128, 128, device=worker.device)
            lengths = torch.tensor([0, T // 2], dtype=torch.int32, device=worker.device)
            for more in ({}, {"initial_state": start, "cu_seqlens": lengths}):
                step(lambda x, more=more: ours(x, output_final_state=True, **more), x)()
    elif word == "layer":
        module = layer_of(worker)
        load_package().kernelize(module, mode="training")
        x = torch.randn(1, 8192, 2560, device=worker.device, dtype=torch.bfloat16)
        layer_step(module, x)()
        weight = module.conv1d.weight.squeeze(1)  # [D, W]
        x = x.new_ones(1, 8192, len(weight)).transpose(1, 2).requires_grad_()
        before = x.new_zeros(1, len(weight), weight.shape[1] - 1).requires_grad_()
        options = {"activation": "silu", "initial_states": before}
        y = load_package().causal_conv1d_fn(x, weight, **options)
        torch.autograd.grad(y, [x, weight, before], torch.zeros_like(y))
    elif word == "fla":
        share_autotuning(int(which), TUNERS)
        warm_fla(worker)


def long(worker: Worker) -> tuple:
    """As many tokens a GPU as the longest that one GPU is timed with."""
    T, H, HV = LONG
    return rule(worker, T * worker.world, H, HV)


PARTS = (
    Part("time of 16/64", 40, partial(rule, T=RULE[0], H=RULE[1], HV=RULE[2]), True, ("rule",)),
    Part("time of the layer", 30, layer, True, ("layer",)),
    Part("time of the MLP", 30, mlp, True),
    Part("time of 16/32", 40, long, True, ("rule",)),
    Part("time of packed", 20, packed, True),
    Part("time of FLA", 90, fla, True, tuple(f"fla:{part}" for part in range(TUNERS))),
)
