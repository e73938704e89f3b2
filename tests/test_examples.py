"""The examples in the docstrings of public functions run and give what they show."""

import doctest
import inspect

import pytest
import torch
from in_tree import load_package

FUNCTIONS = sorted(set(load_package().__all__) - {"layers"})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples(kernel, name):
    names = {"torch": torch, **{public: getattr(kernel, public) for public in kernel.__all__}}
    doc = inspect.getdoc(getattr(kernel, name))
    for package in ("transformers", "kernels"):
        if f"import {package}" in doc or f"from {package}" in doc or name == "layer_mapping":
            pytest.importorskip(package)
    example = doctest.DocTestParser().get_doctest(doc, names, name, None, 0)
    assert len(example.examples) >= 2, f"{name} has no example"
    said = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)
