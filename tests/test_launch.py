"""How a launch is found again, on stand-ins for Triton's launchers of several versions."""

import pytest
import torch
from conftest import submodule

pytest.importorskip("triton")
CODE = (123, (1, 1, 0), None, None, None)  # function, packed metadata, launch metadata, hooks
ARGUMENTS = (16, 32, None, (1, 2), 0.5)


class Launcher:
    """As in Triton 3.6: the last step takes what the launcher was given."""

    def __init__(self):
        self.steps = []
        self.launch = lambda *step: self.steps.append(step)

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, False, False, None, None, *rest)


class PackedLauncher(Launcher):
    """As in Triton 3.9: the arguments in one tuple."""

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, *rest[:4], rest[4:])


class ScratchLauncher(Launcher):
    """Memory is allocated for every launch."""

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, torch.empty(1), *rest)


class OtherLauncher:
    def __call__(self, *everything):
        raise AssertionError("launched")


def last_step(run):
    return submodule("runtime.launch").last_step(run, (4, 1, 1), 0, CODE, ARGUMENTS)


def test_last_step():
    run = Launcher()
    launch, middle = last_step(run)
    assert not run.steps  # looking launches nothing
    run(4, 1, 1, 7, *CODE, *ARGUMENTS)
    launch(4, 1, 1, 7, *middle, *ARGUMENTS)
    assert run.steps[0] == run.steps[1]


@pytest.mark.parametrize("launcher", [PackedLauncher, ScratchLauncher, OtherLauncher])
def test_where_there_is_no_last_step(launcher):
    assert last_step(launcher()) is None
