"""Adapters of the peft package in whole training loops: what a kernelized model learns is what PEFT
alone learns."""

import copy

import pytest
import torch
from conftest import load_package, relative_error
from test_lora import both, peft, step
from tiny_models import random_model, serving, tokens
from torch import nn
from two_processes import found_by

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def trained(model, steps=3, share=1, before=lambda model, i: None):
    """(loss, groups that were served) of all batches: some steps of SGD, each of `share`."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(leaves, lr=0.5), []
    model.train()
    for i in range(steps):
        before(model, i)
        for part in range(share):
            ids = tokens(2, 9 + part, seed=i * share + part)
            with serving() as record:
                loss = model(ids, labels=ids, use_cache=False).loss / share
                loss.backward()
            losses.append((loss.detach(), len(record.get("lora_fwd", ()))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def same_training(model, served, groups=8, **options):
    theirs, ours = trained(model, **options), trained(served, **options)
    for (a, none), (b, count) in zip(theirs, ours):
        assert (none, count) == (0, groups)
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    same_adapters(model, served)


def same_adapters(model, served):
    found = dict(served.named_parameters())
    for n, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(found[n], p, rtol=1e-3, atol=1e-5)


def test_adapters_that_alternate(kernel):
    model, served, _ = both(kernel)
    for each in (model, served):
        torch.manual_seed(1)
        each.add_adapter("other", peft.LoraConfig(r=3, target_modules="all-linear", lora_alpha=5))
        for n, p in each.named_parameters():
            p.requires_grad_("lora_" in n)  # the optimizer has both

    def switch(model, i):
        model.set_adapter(("default", "other")[i % 2])

    same_training(model, served, steps=4, before=switch)


def test_a_trainer_in_bf16(kernel, tmp_path):
    """Trainer(bf16=True) over weights in bf16, with accumulated gradients: as far from training in
    fp32 as PEFT's own adapters, or nearer."""
    pytest.importorskip("accelerate")
    data = [{"input_ids": x, "labels": x} for x in tokens(8, 9)]
    model, served, _ = both(kernel)
    exact = copy.deepcopy(model)
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    moved, counts = [], []
    for each, low in ((exact, False), (model, True), (served, True)):
        for n, p in each.named_parameters():
            if low and "lora" not in n:
                p.data = p.data.bfloat16()
        args = transformers.TrainingArguments(
            tmp_path, bf16=low, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            max_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=2,
            optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0,
        )  # fmt: skip
        with serving() as record:
            transformers.Trainer(each, args, train_dataset=data).train()
        counts.append(len(record.get("lora_fwd", ())))
        found = dict(each.named_parameters())
        assert all([found[n].dtype is torch.float32 for n in start])
        moved.append({n: found[n].detach() - x for n, x in start.items()})
    assert counts == [0, 0, 8 * 4]
    errors = [sum([relative_error(m[n], x) for n, x in moved[0].items()]) for m in moved[1:]]
    assert errors[1] < 1.2 * errors[0] < 0.5 * len(start)


def _adapted(device):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(random_model("llama"), config)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.normal_(std=0.05)
    return model.to(device)


def _fsdp2(rank: int, device) -> list:
    """Groups that were served and norms of gradients, of PEFT and served, under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    mesh, found = torch.distributed.init_device_mesh(device.type, (2,)), []
    for order in ("", "kernelize first", "fully_shard first"):
        model = _adapted(device)
        if order == "kernelize first":
            load_package().kernelize(model)
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if order == "fully_shard first":
            load_package().kernelize(model)
        ids = tokens(4, 9).to(device)[2 * rank : 2 * rank + 2]
        _, gradients, count = step(model, ids)
        norms = [g.full_tensor().double().norm().item() for g in gradients.values()]
        found.append([count, len(norms), *norms])
    return found


def test_two_processes_of_fsdp2(tmp_path):
    for own, *ours in found_by(_fsdp2, "cpu", tmp_path):
        assert own[0] == 0 and own[1] == 28
        for each in ours:
            assert each[0] == 8 and each[1:] == pytest.approx(own[1:], rel=1e-3)


def _ddp(rank: int, device) -> list:
    """Groups that were served and norms of gradients, of PEFT and served, under DDP and alone."""
    found = []
    for ours in (False, True):
        model = _adapted(device)
        if ours:
            load_package().kernelize(model)
        whole = nn.parallel.DistributedDataParallel(model)
        ids = tokens(4, 9).to(device)[2 * rank : 2 * rank + 2]
        _, gradients, count = step(whole, ids)
        norms = [g.double().norm().item() for g in gradients.values()]
        found.append([count, len(norms), *norms])
        if rank == 0:  # what one process finds of the whole batch
            _, gradients, _ = step(model, tokens(4, 9).to(device))
            found.append([g.double().norm().item() for g in gradients.values()])
    return found


def test_two_processes(tmp_path):
    """DDP averages the gradients of adapters that the kernels compute."""
    first, second = found_by(_ddp, "cpu", tmp_path)
    own, alone, ours, alone_ours = first
    assert own[0] == 0 and ours[0] == 8 and own[1:] == pytest.approx(ours[1:], rel=1e-3)
    assert second == [pytest.approx(own, rel=1e-6), pytest.approx(ours, rel=1e-6)]
    assert own[2:] == pytest.approx(alone, rel=1e-3)
    assert alone_ours == pytest.approx(alone, rel=1e-3)
