"""Kernels on the CPU, in Triton's interpreter: a pytest session of its own, because Triton reads
the setting when it is imported. A test file marks tests `@interpreted` and has one test that calls
`rerun(__file__)`."""

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
