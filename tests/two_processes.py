"""What two processes of one group find, on two GPUs by NCCL or on the CPU by gloo."""

import datetime
import gc
import json
import pickle
import sys
from pathlib import Path
from typing import Callable

import fresh
import pytest
import torch
import torch.distributed as dist

WORLD = 2
KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _process(rank: int, check: Callable, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{folder}/rendezvous",
        rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    # one that raises leaves its group standing, and torch ends the other: to take a group down
    # that is at work may wait for ever
    (Path(folder) / f"{rank}.json").write_text(json.dumps(check(rank, device)))
    dist.destroy_process_group()


def found_by(check: Callable, kind: str, folder: Path) -> list:
    """check(rank, device) of both processes, by way of JSON.

    They are spawned for GPUs, which a fork could not use, and else forked: by a fresh process where
    torch was built with CUDA, which takes GPUs that torch.compile and FSDP2 pretend for real ones,
    starts threads for them, and can then not be forked.
    """
    if kind == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")
    if kind == "cuda" or not torch.backends.cuda.is_built():
        start(check, kind, str(folder))
    else:
        (folder / "check").write_bytes(pickle.dumps(check))
        code = (
            f"import pickle, sys; sys.path[:0] = {sys.path!r}; import two_processes; "
            f"check = pickle.load(open({str(folder / 'check')!r}, 'rb')); "
            f"two_processes.start(check, {kind!r}, {str(folder)!r})"
        )
        done = fresh.python("-c", code, timeout=300)
        assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def start(check: Callable, kind: str, folder: str) -> None:
    how = "spawn" if kind == "cuda" else "fork"
    args = (check, kind, folder)
    # a fork that collects a group of an earlier test would wait for threads that it has not
    gc.collect()
    gc.freeze()
    try:
        torch.multiprocessing.start_processes(_process, args, nprocs=WORLD, start_method=how)
    finally:
        gc.unfreeze()


def in_shards(model, mesh, plan=None):
    """A model under transformers' tensor parallelism, by a plan or that of its class."""
    from transformers import PreTrainedModel
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = model.tp_plan if plan is None else plan
    if hasattr(PreTrainedModel, "_expand_parallel_plan"):  # 5.24 takes names without a star
        plan = PreTrainedModel._expand_parallel_plan(model, plan)
    return apply_tensor_parallelism(model, mesh, plan)
