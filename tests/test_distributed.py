"""Kernelized models under FSDP2 and DDP: two processes with half of a batch each reproduce the
losses and gradients of one with all of it. On two GPUs, and with gloo on the CPU."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import load_package, relative_error
from interpreter import compiled
from tiny_models import GRADIENTS, SERVED, random_model, tokens

WORLD = 2
STEPS = 3
MODELS = ["llama", "qwen3_5_text"]
WRAPS = ["ddp", "fsdp2"]


def loss_of(model, ids):
    """Mean over all tokens; a batch's halves weigh the same, so their losses can be averaged."""
    logits = model(ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def steps(model, ids):
    """Losses of a few steps of SGD, and the gradients of the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = loss_of(model, ids)
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), gradients


def wrapped(model, wrap: str):
    if wrap == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def check(name: str, wrap: str, rank: int, device) -> dict:
    """Relative errors of this process's results against those of one process alone."""
    kernelize = load_package().kernelize
    ids = tokens(2 * WORLD, 70, device=device)
    alone, shared = (random_model(name, device).train() for _ in range(2))
    assert len(kernelize(alone, mode="training").served) == SERVED.get(name, 2)
    kernelize(shared, mode="training")
    want_losses, want = steps(alone, ids)
    losses, got = steps(wrapped(shared, wrap), ids.chunk(WORLD)[rank])
    dist.all_reduce(losses)
    errors = {"loss": relative_error(losses / WORLD, want_losses)}
    for parameter, gradient in got.items():
        gradient = gradient.full_tensor() if wrap == "fsdp2" else gradient
        errors[parameter] = relative_error(gradient, want[parameter.replace("module.", "", 1)])
    assert len(errors) == len(want) + 1
    return errors


def process(rank: int, kind: str, folder: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=where, rank=rank, world_size=WORLD
    )
    try:
        found = {f"{m} {w}": check(m, w, rank, device) for m in MODELS for w in WRAPS}
        (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def results(request, tmp_path_factory):
    """What both processes found: errors by model and wrap. One start for all tests of a device."""
    if request.param == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")
    folder = tmp_path_factory.mktemp("distributed")
    torch.multiprocessing.spawn(process, (request.param, str(folder)), nprocs=WORLD)
    limit = GRADIENTS[request.param]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)], limit


@compiled
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_train_as_one(results, name, wrap):
    pytest.importorskip("transformers")
    found, limit = results
    for errors in found:
        wrong = {part: error for part, error in errors[f"{name} {wrap}"].items() if error > limit}
        assert not wrong
