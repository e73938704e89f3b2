"""The examples in the docstrings of public functions run and give what they show."""

import doctest
import inspect
import runpy
import shutil

import pytest
import torch
from in_tree import ROOT, load_package

PUBLIC = sorted(load_package().__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_examples(kernel, name):
    names = {"torch": torch, **{public: getattr(kernel, public) for public in kernel.__all__}}
    doc = inspect.getdoc(getattr(kernel, name))
    for package in ("transformers", "kernels"):
        if f"import {package}" in doc or f"from {package}" in doc or name == "layer_mapping":
            pytest.importorskip(package)
    assert "Example:" in doc, f"{name} has no example"
    assert run(doc, names, name) >= 2


def run(doc, names, name) -> int:
    """Runs the examples of a docstring; returns how many there are."""
    example = doctest.DocTestParser().get_doctest(doc, names, name, None, 0)
    said = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)
    return len(example.examples)


def test_the_package_begins_with_three_calls(kernel):
    """What help(kernel) shows first, with a tiny model and tensors under its names."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    names = {"kernel": kernel, "model": transformers.LlamaForCausalLM(config)}
    names.update(x=torch.randn(2, 8), w_gate=torch.randn(4, 8), w_up=torch.randn(4, 8))
    q, k, v = torch.randn(3, 1, 9, 2, 16).unbind(0)
    names.update(q=q, k=k, v=v, g=-torch.rand(1, 9, 2), beta=torch.rand(1, 9, 2))
    assert run(kernel.__doc__, names, "kernel") == 3


def test_the_example_of_a_built_kernel(repository, capsys):
    """As kernel-builder's template has it, beside build/."""
    pytest.importorskip("kernels")
    path = shutil.copy(ROOT / "example.py", repository)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.endswith("Success!\n")
