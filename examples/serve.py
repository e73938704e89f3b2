"""A pipeline and continuous batching of transformers, before and after kernelize(model).

    python examples/serve.py [--model NAME] [--tokens 16]

Three prompts are answered by `pipeline("text-generation")`, one after another and as one batch, and
by `model.generate_batch`, in which prompts of different lengths share each step and keep their keys
and values in pages. Without --model, weights are random and so are the texts; they stay the same.
"""

import parts
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, pipeline

PROMPTS = ["Python is", "What is the capital of France? It is", "A prime number"]


def answers(model, tokenizer, count: int) -> dict:
    """{way to generate: texts}"""
    how = {"max_new_tokens": count, "do_sample": False, "return_full_text": False}
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    found = {
        "pipeline": [out[0]["generated_text"] for out in pipe(PROMPTS, **how)],
        "pipeline, a batch": [
            out[0]["generated_text"] for out in pipe(PROMPTS, batch_size=len(PROMPTS), **how)
        ],
    }
    greedy = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    pages = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)  # else all free memory
    batch = model.generate_batch(
        inputs=ids, generation_config=greedy, continuous_batching_config=pages, progress_bar=False
    )
    by_prompt = {tuple(out.prompt_ids): out.generated_tokens for out in batch.values()}
    tokens = [by_prompt[tuple(prompt)] for prompt in ids]
    found["continuous batching"] = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return found


def run(kernel, name, count: int, family: str = "llama") -> dict:
    """{way: {way to generate: texts}}; continuous batching knows no Gated DeltaNet layers."""
    tokenizer = parts.tokenizer_of(name)
    model = parts.model_of(name, family).to(parts.default_device()).eval()
    if torch.cuda.is_available():
        model = model.bfloat16()
    found = {}
    for way in parts.WAYS:
        if way == "kernelized":
            print(kernel.kernelize(model))
        found[way] = answers(model, tokenizer, count)
        for how, texts in found[way].items():
            print(f"{way}, {how}:")
            print("\n".join(f"  {prompt}|{text!r}" for prompt, text in zip(PROMPTS, texts)))
    same = found[parts.WAYS[0]] == found["kernelized"]
    print(f"all texts are the same: {same}")
    return found


def main() -> None:
    parser = parts.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at least 1")
    options = parts.options_of(parser)
    if options.tokens < 1:
        parser.error(f"--tokens must be at least 1: {options.tokens}")
    run(parts.load_kernel(), options.model, options.tokens)


if __name__ == "__main__":
    main()
