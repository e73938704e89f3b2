"""TRL's SFTTrainer with packing, before and after kernelize(model).

    pip install trl
    python examples/train_sft.py [--model NAME] [--family qwen3_5] [--steps 6]

Texts of different lengths are packed into rows without padding, and kept apart by their
`position_ids`, `cu_seq_lens_q` and `seq_idx`. A Llama is packed by transformers, too. Qwen3.5's
Gated DeltaNet layers are packed by transformers only where causal-conv1d is installed; kernelized
they need no other package.
"""

import tempfile

import parts
import torch


def trained(model, tokenizer, steps: int, length: int) -> list:
    """The losses of all steps."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = Dataset.from_list([{"text": text[:400]} for text in parts.sections(40)])
    with tempfile.TemporaryDirectory() as folder:
        how = SFTConfig(
            folder,
            max_steps=steps,
            packing=True,
            max_length=length,
            per_device_train_batch_size=2,
            gradient_checkpointing=True,
            learning_rate=1e-3 if model.config.hidden_size < 100 else 2e-5,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = SFTTrainer(model, how, train_dataset=texts, processing_class=tokenizer)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(kernel, name, family: str, steps: int) -> dict:
    """{way: losses}, or what transformers alone raises where it packs no such model."""
    tokenizer = parts.tokenizer_of(name)
    found = {}
    for way in parts.WAYS:
        model = parts.model_of(name, family).to(parts.default_device())
        if way == "kernelized":
            print(kernel.kernelize(model))
        found[way] = parts.attempt(way, lambda m=model: trained(m, tokenizer, steps, 512))
        if isinstance(found[way], list):
            print(f"{way}: losses {' '.join(f'{loss:.4f}' for loss in found[way])}")
    return found


def main() -> None:
    parser = parts.parser_of(__doc__, packages=["trl", "datasets"])
    parser.add_argument("--family", choices=("llama", "qwen3_5"), default="llama", help="if tiny")
    parser.add_argument("--steps", type=int, default=6, help="how many to train, at least 1")
    options = parts.options_of(parser)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1: {options.steps}")
    run(parts.load_kernel(), options.model, options.family, options.steps)


if __name__ == "__main__":
    main()
