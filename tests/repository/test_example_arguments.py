"""The command lines of examples/: what cannot run is refused in a line, before anything is made."""

import importlib.util
import sys

import pytest
import torch
from conftest import load_example

pytest.importorskip("transformers")
pytest.importorskip("kernels")
EXAMPLES = (
    "finetune_lora", "fp8_checkpoint", "generate_fast", "kernelize_llm", "load_gguf", "serve",
    "train_bytes", "train_digits", "train_fsdp", "train_policy", "train_sft", "train_trainer",
)  # fmt: skip


def said(name: str, line: str, monkeypatch, capsys, code: int) -> str:
    """What the example prints before it exits with this code."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *line.split()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as exit:
        load_example(name).main()
    assert exit.value.code == code
    out, err = capsys.readouterr()
    return err if code else out


@pytest.mark.parametrize(
    "name, line, words",
    [
        ("generate_fast", "--tokens 4", "--tokens must be at least 5"),
        ("generate_fast", "--device gpu", "invalid choice: 'gpu'"),
        ("generate_fast", "--device cuda", "--device cuda: torch finds no GPU"),
        ("fp8_checkpoint", "--tokens 0", "--tokens must be at least 1"),
        ("fp8_checkpoint", "", "FP8 needs a GPU of compute capability 9.0"),
        ("kernelize_llm", "--device gpu", "invalid choice: 'gpu'"),
        ("kernelize_llm", "--device cuda", "--device cuda: torch finds no GPU"),
        ("finetune_lora", "--steps 0", "--steps must be at least 2"),
        ("finetune_lora", "--gguf no.gguf", "--gguf must be a file: no.gguf"),
        ("train_bytes", "--steps 0", "--steps must be at least 1"),
        ("train_bytes", "--seeds 0", "--seeds must be at least 1"),
        ("train_bytes", "--only mine", "invalid choice: 'mine'"),
        ("train_bytes", "--cp 2", "--cp 2 needs a multiple of 2 processes"),
        ("train_policy", "--steps 0", "--steps must be at least 1"),
        ("train_digits", "--epochs 0", "--epochs must be at least 1"),
        ("train_digits", "--seeds 0", "--seeds must be at least 1"),
        ("train_digits", "--plot no/folder/digits.png", "--plot must be in a folder"),
    ],
)
def test_what_cannot_run(monkeypatch, capsys, name, line, words):
    *_, last = said(name, line, monkeypatch, capsys, 2).splitlines()
    assert last.startswith(f"{name}.py: error: ") and words in last


@pytest.mark.parametrize(
    "name, line, package",
    [
        ("finetune_lora", "", "peft"),
        ("train_policy", "--trl", "trl"),
        ("finetune_lora", "--gguf", "gguf"),
        ("train_bytes", "--out .", "matplotlib"),
        ("train_digits", "", "scikit-learn"),
        ("train_digits", "--data mnist", "torchvision"),
        ("train_digits", "--plot digits.png", "matplotlib"),
        ("train_digits", "--report-to trackio", "trackio"),
    ],
)
def test_packages_that_are_not_installed(monkeypatch, capsys, name, line, package):
    module = {"scikit-learn": "sklearn"}.get(package, package)
    find = importlib.util.find_spec

    def without(asked, *args):  # all others are installed
        return None if asked == module else find(asked, *args) or find("json")

    monkeypatch.setattr(importlib.util, "find_spec", without)
    *_, last = said(name, line, monkeypatch, capsys, 2).splitlines()
    assert last.startswith(f"{name}.py: error: ") and last.endswith(f"pip install {package}")


def test_images_that_cannot_be_fetched(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    class Torchvision:
        def MNIST(self, *args, **kwargs):
            raise RuntimeError("Error downloading train-images\nmore lines")

    monkeypatch.setitem(sys.modules, "torchvision.datasets", Torchvision())
    *_, last = said("train_digits", "--data mnist", monkeypatch, capsys, 2).splitlines()
    assert last.endswith("--data mnist cannot be read: Error downloading train-images")


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_has_values_and_defaults(monkeypatch, capsys, name):
    text = said(name, "--help", monkeypatch, capsys, 0)
    _, _, *options = " ".join(text.partition("options:")[2].split()).split(" --")
    assert options and all("(default: " in option for option in options)
