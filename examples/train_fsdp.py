"""FSDP2 by accelerate, before and after kernelize(model).

    pip install accelerate
    torchrun --nproc-per-node 2 examples/train_fsdp.py [--model NAME] [--steps 4]

Each process holds a part of every weight and trains on sequences of its own. kernelize comes before
`accelerator.prepare`. On a CPU accelerate has no FSDP, so torch's `fully_shard`, which it calls on
GPUs, is called here. Process 0 prints.
"""

import os

import parts
import torch
from torch.distributed.fsdp import fully_shard

LENGTH = 64


def fsdp_plugin():
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        reshard_after_forward=True,
    )


def accelerator_of(cpu: bool):
    from accelerate import Accelerator

    if cpu:
        return Accelerator(cpu=True)
    return Accelerator(fsdp_plugin=fsdp_plugin(), mixed_precision="bf16")


def prepared(accelerator, model) -> tuple:
    """(model, optimizer), sharded."""
    if accelerator.device.type == "cpu":
        mesh = torch.distributed.init_device_mesh("cpu", (accelerator.num_processes,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    # by default accelerate looks for all classes of `_no_split_modules`, those of images among them
    layers = sorted({type(layer).__name__ for layer in model.model.layers})
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = layers
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def trained(accelerator, model, tokenizer, steps: int) -> list:
    """The losses of all steps, the mean over the processes."""
    model, optimizer = prepared(accelerator, model)
    sharded = all(hasattr(weight, "full_tensor") for weight in model.parameters())
    accelerator.print(f"all weights are sharded: {sharded}")
    ids = tokenizer("\n".join(parts.sections(40)), return_tensors="pt").input_ids[0]
    losses = []
    for step in range(steps):
        start = (step * accelerator.num_processes + accelerator.process_index) * LENGTH
        row = ids[None, start : start + LENGTH].to(accelerator.device)
        loss = model(row, labels=row, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.free_memory()
    return losses


def run(kernel, accelerator, name, steps: int) -> dict:
    """{way: losses}, or what transformers alone raises."""
    tokenizer, found = parts.tokenizer_of(name), {}
    for way in parts.WAYS:
        model = parts.model_of(name)
        if way == "kernelized":
            report = kernel.kernelize(model, mode="training")
            accelerator.print(report)
        found[way] = parts.attempt(way, lambda m=model: trained(accelerator, m, tokenizer, steps))
        if isinstance(found[way], list):
            accelerator.print(f"{way}: losses {' '.join(f'{loss:.4f}' for loss in found[way])}")
    return found


def main() -> None:
    parser = parts.parser_of(__doc__, packages=["accelerate"])
    parser.add_argument("--steps", type=int, default=4, help="how many to train, at least 1")
    options = parts.options_of(parser)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1: {options.steps}")
    if "WORLD_SIZE" not in os.environ:
        parser.error("torchrun starts the processes: torchrun --nproc-per-node 2 ...")
    accelerator = accelerator_of(not torch.cuda.is_available())
    with accelerator.main_process_first():  # which builds it for all
        kernel = parts.load_kernel(build=accelerator.is_main_process)
    run(kernel, accelerator, options.model, options.steps)
    accelerator.end_training()


if __name__ == "__main__":
    main()
