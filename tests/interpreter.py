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
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(f"Triton 3.6's interpreter needs numpy below 2.4, got {numpy.__version__}")
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout


def _hasten() -> None:
    """Half of the interpreter's time goes into two things that change no value: at every call of a
    device function it looks through triton.language for what to replace, though the launch has
    replaced it, and it makes every sum of 32-bit integers again in 64 bits. Of Triton 3.6; another
    version is left as it is."""
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


if INTERPRETING:
    _hasten()
