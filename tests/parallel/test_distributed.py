"""Kernelized models under FSDP2, DDP, tensor and context parallelism: two processes reproduce the
losses and gradients of one, with half of a batch each, of every weight, or of every sequence. On
two GPUs, and with gloo on the CPU."""

import contextlib
import copy
import gc
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from conftest import load_package, relative_error, submodule
from interpreter import compiled
from tiny_models import GRADIENTS, SERVED, mlps_and_gdn, random_model, tokens
from two_processes import KINDS, WORLD, found_by, in_shards

STEPS = 3
MODELS = ["llama", "qwen3_5_text"]
WRAPS = ["ddp", "fsdp2", "fsdp2 first", "hybrid first", "tp first"]  # first: then kernelize
WRAPS += ["cp ddp", "cp zigzag fsdp2"]


PARTED = {"num_key_value_heads": WORLD, "vocab_size": 49 * WORLD}  # sizes that WORLD divides


def loss_of(model, ids):
    """Mean over all tokens; a batch's halves weigh the same, so their losses can be averaged."""
    logits = model(ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def loss_of_part(model, ids, layout: str):
    """Its share of that loss, times the number of processes: gradients are averaged."""
    batch = {"input_ids": ids, "labels": ids}
    return model(**load_package().shard_batch(batch, layout=layout)).loss * WORLD


def steps(model, ids, loss_of=loss_of):
    """Losses of a few steps of SGD, and the gradients of the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
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


def wrapped(model, wrap: str, kind: str):
    if wrap.endswith("ddp"):
        return torch.nn.parallel.DistributedDataParallel(model)
    mesh = torch.distributed.init_device_mesh(kind, (1, WORLD), mesh_dim_names=("dp", "shards"))
    if wrap == "tp first":
        return in_shards(model, mesh["shards"])
    from torch.distributed.fsdp import fully_shard

    mesh = mesh if wrap == "hybrid first" else mesh["shards"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def own_forward(module):
    """The forward of one of an MLP's projections, which TP puts on the module itself."""
    return [part.__dict__.get("forward") for part in module.modules()]


def check(name: str, wrap: str, rank: int, device) -> dict:
    """Relative errors of this process's results against those of one process alone."""
    kernel = load_package()
    ids = tokens(2 * WORLD, 70, device=device)
    alone, shared = (random_model(name, device, **PARTED).train() for _ in range(2))
    served, first, cp = SERVED.get(name, 2), wrap.endswith("first"), wrap.startswith("cp")
    if device.type == "cpu":  # in fp32 the gradient of A_log is right to 6e-4 only
        alone, shared = alone.double(), shared.double()
    assert mlps_and_gdn(kernel.kernelize(alone, mode="training")) == served
    if cp:
        kernel.kernelize(shared, mode="training", cp_group=dist.group.WORLD)
        shared.gradient_checkpointing_enable({"use_reentrant": False})
    elif not first:
        kernel.kernelize(shared, mode="training")
    shared = wrapped(shared, wrap, device.type)
    before = own_forward(shared)
    if first:
        report = kernel.kernelize(shared, mode="training")
        assert mlps_and_gdn(report) == served, str(report)
        assert [row.layer for row in report.served].count("DecoderLayer") == 2, str(report)
    want_losses, want = steps(alone, ids)
    dispatch, tp = submodule("runtime.dispatch"), wrap == "tp first"
    # on a CPU no kernel would serve an MLP
    force = dispatch.force if device.type == "cpu" else contextlib.nullcontext
    with force("reference"), dispatch.served() as record:
        if cp:
            layout = "zigzag" if "zigzag" in wrap else "contiguous"
            losses, got = steps(shared, ids, lambda *args: loss_of_part(*args, layout))
        else:
            losses, got = steps(shared, ids if tp else ids.chunk(WORLD)[rank])
    assert any(n.startswith("swiglu") and n.endswith("_fwd") for n in record), record.keys()
    dist.all_reduce(losses)
    errors = {"loss": relative_error(losses / WORLD, want_losses)}
    for parameter, gradient in got.items():
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        errors[parameter] = relative_error(gradient, want[parameter.replace("module.", "", 1)])
    assert len(errors) == len(want) + 1
    if tp:  # without gradients MLPs go another way
        with force("reference"), dispatch.served() as record, torch.no_grad():
            errors["logits"] = relative_error(shared(ids).logits, alone(ids).logits)
        assert "swiglu_fwd" in record
    if first:
        assert kernel.restore(shared) == len(report.served) and own_forward(shared) == before
    return errors


def limit_of(wrap: str, kind: str) -> float:
    """Tolerance of those errors."""
    factor = 1
    if wrap == "tp first":
        factor = 2  # the parts of each product are rounded before they are added
    elif wrap.startswith("cp") and kind == "cuda":
        factor = 5  # in fp32, where the gradient of A_log is a difference of large sums
    return factor * GRADIENTS[kind]


def checks(rank: int, device) -> dict:
    return {f"{m} {w}": check(m, w, rank, device) for m in MODELS for w in WRAPS}


@pytest.fixture(scope="module", params=KINDS)
def results(request, tmp_path_factory):
    """Errors of both processes by model and wrapper. One launch serves all tests of a device."""
    folder = tmp_path_factory.mktemp("distributed")
    return found_by(checks, request.param, folder), request.param


def test_weights_of_zero_3_are_left_alone(kernel, monkeypatch):
    """DeepSpeed leaves empty parameters with a `ds_id`, and hooks on every module. Whole models of
    the same classes are served after them."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(submodule("models.trial"), "_found", {})
    monkeypatch.setattr(submodule("models.attention_trial"), "_forms", {})
    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    for name in MODELS:
        model = random_model(name)
        for i, parameter in enumerate(model.parameters()):
            parameter.data, parameter.ds_id = parameter.data.new_empty(0), i
        for module in model.modules():
            module.register_forward_pre_hook(lambda *args: None)
        report = kernel.kernelize(model)
        assert not report.served and len(report.left) > SERVED.get(name, 2)
        assert {row.reason for row in report.left} == {"is partitioned by ZeRO-3"}
        with submodule("runtime.dispatch").force("reference"):
            assert not kernel.kernelize(random_model(name)).left


def test_sharded_models_are_freed_and_moved(kernel, tmp_path):
    """What is remembered of their MLPs neither keeps them alive nor stands in torch's way."""
    pytest.importorskip("transformers.distributed.tensor_parallel")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = in_shards(random_model("llama", **PARTED).eval(), mesh)
        assert kernel.kernelize(model).served
        ids, dispatch = tokens(1, 5), submodule("runtime.dispatch")
        with torch.no_grad(), dispatch.force("reference"):
            before = model(ids).logits
            with dispatch.served() as record:
                again = model.double()(ids).logits
        assert "swiglu_fwd" in record and again.dtype == torch.float64
        assert relative_error(before, again) < 1e-5
        mlp = weakref.ref(model.model.layers[0].mlp)
        gate = weakref.ref(mlp().gate_proj)
        del model
        gc.collect()
        assert mlp() is None and gate() is None
    finally:
        dist.destroy_process_group()


def sharded(model, mesh):
    """With FSDP2 on layers, on some of their parts and on the whole."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        for part in (layer.mlp, layer.input_layernorm, layer):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("order", ["kernelize first", "fully_shard first"])
@pytest.mark.parametrize("name", MODELS)
def test_modules_that_fsdp2_wraps(kernel, tmp_path, name, order, checkpoints):
    """Modules are served in either order, stay wrapped by FSDP2, and are restored."""
    from torch.distributed.fsdp import FSDPModule

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        alone, model = (random_model(name).train().double() for _ in range(2))
        expected = kernel.kernelize(alone)
        names = [type(module).__name__ for module in alone.modules()]
        if order == "kernelize first":
            report = kernel.kernelize(model)
            sharded(model, mesh)
        else:
            sharded(model, mesh)
            before = [type(module) for module in model.modules()]
            report = kernel.kernelize(model)
            kernel.kernelize(model)  # again
        found = [(row.module, row.layer) for row in report.served]
        assert found == [(row.module, row.layer) for row in expected.served]
        wrapped = [m for m in model.modules() if isinstance(m, FSDPModule)]
        assert len(wrapped) == 7 and all(type(m).__name__.startswith("FSDP") for m in wrapped)
        for module in wrapped:
            with pytest.raises(AssertionError, match="does not support deepcopy"):
                copy.deepcopy(module)
        for m in (alone, model) if checkpoints else ():
            m.gradient_checkpointing_enable({"use_reentrant": False})
        dispatch, ids = submodule("runtime.dispatch"), tokens(2, 40)
        with dispatch.force("reference"):
            with dispatch.served() as record:
                losses, gradients = steps(model, ids)
            with dispatch.served() as expected:
                want_losses, want = steps(alone, ids)
        assert record == expected and "rms_norm_fwd" in record
        for layer in model.model.layers:
            assert type(layer).forward.__qualname__ == "DecoderLayer.forward"
        assert relative_error(losses, want_losses) < 1e-9
        for parameter, gradient in gradients.items():
            assert relative_error(gradient.full_tensor(), want[parameter]) < 1e-9, parameter
        assert kernel.restore(model) == len(report.served)
        after = [type(module) for module in model.modules()]
        if order == "fully_shard first":
            assert after == before
        assert [kind.__name__.removeprefix("FSDP") for kind in after] == names
        assert not any("served_as" in vars(base) for kind in after for base in kind.__mro__)
        assert sum(issubclass(kind, FSDPModule) for kind in after) == 7
        assert torch.isfinite(model(ids).logits).all()
    finally:
        dist.destroy_process_group()


@compiled
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_train_as_one(results, name, wrap):
    pytest.importorskip("transformers")
    found, kind = results
    limit = limit_of(wrap, kind)
    for errors in found:
        wrong = {part: error for part, error in errors[f"{name} {wrap}"].items() if error > limit}
        assert not wrong
