"""transformers' Trainer with gradient checkpointing and resume, before and after kernelize(model).

    pip install accelerate
    python examples/train_trainer.py [--model NAME] [--steps 8]

A run is trained to its end, and once more from the checkpoint that it left half way: in a new
model, whose weights, optimizer and order of batches Trainer reads from the folder. The losses are
those of transformers alone, and the checkpoint is as well: it loads without the kernel.
"""

import tempfile

import parts
import torch
from transformers import Trainer, TrainingArguments

LENGTH, BATCH = 128, 2  # tokens, sequences


def batches_of(tokenizer) -> list:
    ids = tokenizer("\n".join(parts.sections(40)), return_tensors="pt").input_ids[0]
    rows = [ids[i : i + LENGTH] for i in range(0, min(len(ids), 64 * LENGTH) - LENGTH, LENGTH)]
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(model, data, folder: str, steps: int, resume: bool) -> list:
    """The losses of all steps."""
    how = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        gradient_checkpointing=True,
        learning_rate=1e-3 if model.config.hidden_size < 100 else 2e-5,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        save_steps=steps // 2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="steps",
    )
    trainer = Trainer(model, how, train_dataset=data)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{steps // 2}" if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_twice(kernel, way: str, name, data, steps: int) -> list:
    """The losses of a run, and of the one that was resumed half way."""
    curves = []
    with tempfile.TemporaryDirectory() as folder:
        for resume in (False, True):
            model = parts.model_of(name).to(parts.default_device())
            if way == "kernelized":
                report = kernel.kernelize(model)
                if not resume:
                    print(report)
            curves.append(trained(model, data, folder, steps, resume))
        plain = type(model).from_pretrained(f"{folder}/checkpoint-{steps}")
    names = plain.state_dict().keys()
    same = names == model.state_dict().keys()
    print(f"{way}: losses {' '.join(f'{loss:.4f}' for loss in curves[0])}")
    print(f"  resumed half way: {' '.join(f'{loss:.4f}' for loss in curves[1])}")
    print(f"  {len(names)} tensors of the checkpoint load by transformers alone: {same}")
    return curves


def run(kernel, name, steps: int) -> dict:
    """{way: (losses, losses of the run that was resumed)}, or what transformers alone raises."""
    data = batches_of(parts.tokenizer_of(name))
    return {
        way: parts.attempt(way, lambda way=way: train_twice(kernel, way, name, data, steps))
        for way in parts.WAYS
    }


def main() -> None:
    parser = parts.parser_of(__doc__, packages=["accelerate"])
    parser.add_argument("--steps", type=int, default=8, help="of the whole run, at least 2")
    options = parts.options_of(parser)
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, a checkpoint is half way: {options.steps}")
    run(parts.load_kernel(), options.model, options.steps)


if __name__ == "__main__":
    main()
