"""Kernels on the CPU, in Triton's interpreter: a pytest session of its own, because Triton reads
the setting when it is imported. A test file marks tests `@interpreted` and has one test that calls
`rerun(__file__)`."""

import dataclasses
import inspect
import os
import subprocess
import sys

import numpy
import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="for a session of Triton's interpreter")
compiled = pytest.mark.skipif(INTERPRETING, reason="not for Triton's interpreter")


def rerun(path: str) -> None:
    """The file's tests once more, under the interpreter; fails with their output."""
    assert not INTERPRETING, "the test that reruns a file is marked @compiled"
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(f"Triton 3.6's interpreter needs numpy below 2.4, got {numpy.__version__}")
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout


def _hasten() -> None:
    """Most of the interpreter's time goes into three things that can be had for less: at every call
    of a device function it looks through triton.language for what to replace, though the launch has
    replaced it; it makes every sum of 32-bit integers again in 64 bits; and it reduces by a
    function of one's own one element at a time. Of Triton 3.6; another version is left as it is."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    replace, replaced, modules = interpreter._patch_lang, set(), {}

    def replace_once(function):
        if function not in modules:
            found = [v for v in function.__globals__.values() if inspect.ismodule(v)]
            modules[function] = frozenset(v.__name__ for v in found if "triton.lang" in v.__name__)
        if modules[function] in replaced:
            return None  # nobody takes back what a device function replaces
        scope = replace(function)
        restore = scope.restore
        scope.restore = lambda: (replaced.clear(), restore())
        replaced.add(modules[function])
        return scope

    interpreter._patch_lang = replace_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    one_by_one = interpreter.ReduceOps.generic_reduce

    def reduce(self, inputs):
        if self.axis is None or self.keep_dims:
            return one_by_one(self, inputs)
        rows = [numpy.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        tensors = [[self.to_tensor(y, x.dtype) for y in ys] for x, ys in zip(inputs, rows)]
        total, *rest = zip(*tensors)
        for row in rest:
            total = self.combine_fn.fn(*total, *row)
            total = total if isinstance(total, tuple) else (total,)
        return list(total)

    interpreter.ReduceOps.generic_reduce = reduce


if INTERPRETING:
    _hasten()
