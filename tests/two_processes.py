"""What two processes of one group find, on two GPUs by NCCL or on the CPU by gloo."""

import datetime
import json
from pathlib import Path
from typing import Callable

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
    """check(rank, device) of both processes, by way of JSON. They are forked where torch has no
    GPU, which a fork could not use."""
    if kind == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")
    how = "spawn" if torch.cuda.is_available() else "fork"
    args = (check, kind, str(folder))
    torch.multiprocessing.start_processes(_process, args, nprocs=WORLD, start_method=how)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def in_shards(model, mesh, plan=None):
    """A model under transformers' tensor parallelism, by a plan or that of its class."""
    from transformers import PreTrainedModel
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = model.tp_plan if plan is None else plan
    if hasattr(PreTrainedModel, "_expand_parallel_plan"):  # 5.24 takes names without a star
        plan = PreTrainedModel._expand_parallel_plan(model, plan)
    return apply_tensor_parallelism(model, mesh, plan)
