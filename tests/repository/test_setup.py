"""tools/setup_env.py: which torch it takes, what it says where it fails. Nothing is installed."""

import ast
import runpy
import sys
import types
from pathlib import Path

import conftest
import pytest
import setup_env

SOURCE = Path(setup_env.__file__)
CUDA_BUILD = ["-r", str(setup_env.REQUIREMENTS)]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without a GPU, .venv and log under tmp_path; `.calls` are pip's arguments, and
    `.causes` what pip fails with, call by call."""
    machine = types.SimpleNamespace(calls=[], causes=[None] * 3, free=10e9, nvidia=False)

    def pip(*arguments):
        machine.calls.append(list(arguments))
        return machine.causes.pop(0)

    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(setup_env, "pip", pip)
    monkeypatch.setattr(setup_env, "gpu_torch", lambda: None)
    monkeypatch.setattr(setup_env, "nvidia_device", lambda: machine.nvidia)
    monkeypatch.setattr(setup_env, "make_venv", lambda with_pip: None)
    monkeypatch.setattr(setup_env, "VENV_PYTHON", Path(sys.executable))
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "log")
    monkeypatch.setattr(setup_env, "READY", tmp_path / "ready")
    usage = lambda path: types.SimpleNamespace(free=machine.free)  # noqa: E731
    monkeypatch.setattr(setup_env.shutil, "disk_usage", usage)
    ran = types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(setup_env.subprocess, "run", lambda *args, **kwargs: ran)
    return machine


def failure():
    """The one line with which set-up ends."""
    with pytest.raises(SystemExit) as end:
        setup_env.main()
    line = end.value.code
    assert line.startswith("setup: ") and "\n" not in line
    assert not setup_env.READY.exists()
    return line


def test_without_a_gpu_torch_is_a_cpu_build(machine, capsys):
    setup_env.main()
    (cpu, *options), rest = machine.calls[:2]
    assert cpu == f"torch=={setup_env.requirements()['torch']}+cpu" and "--no-deps" in options
    assert options[options.index("--extra-index-url") + 1].endswith("/whl/cpu")
    assert "--index-url" not in options and rest == CUDA_BUILD  # the user's index may have it, too
    assert setup_env.READY.exists()
    lines = capsys.readouterr().out.splitlines()
    assert str(setup_env.LOG) in lines[0] and "about 0.5 GB are downloaded" in lines[2]


def test_the_build_with_cuda_where_no_cpu_build_is_to_be_had(machine, capsys):
    machine.causes[0] = "No matching distribution found for torch"
    setup_env.main()
    assert len(machine.calls) >= 2 and machine.calls[1] == CUDA_BUILD
    assert "about 1.7 GB are downloaded and 6 GB needed" in capsys.readouterr().out


@pytest.mark.parametrize("nvidia, platform", [(True, "linux"), (False, "darwin")])
def test_no_other_index_is_asked_with_a_gpu_or_on_other_systems(
    machine, monkeypatch, nvidia, platform
):
    machine.nvidia = nvidia
    monkeypatch.setattr(sys, "platform", platform)
    setup_env.main()
    assert machine.calls[0] == CUDA_BUILD


def test_what_pip_failed_with_is_said(machine):
    machine.causes = [None, "No matching distribution found for peft==9"]
    assert failure().endswith("No matching distribution found for peft==9")
    machine.causes = [None, "[Errno 28] No space left on device"]
    assert "No space left on device: about 2 GB are needed" in failure()


def test_too_little_space_is_said_before_anything_is_downloaded(machine):
    machine.free = 1.5e9
    assert "about 2 GB are needed" in failure() and "1.5 GB are free" in failure()
    assert not machine.calls
    machine.free, machine.causes = 4e9, ["no such build"]
    assert "about 6 GB are needed" in failure() and len(machine.calls) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PermissionError(13, "denied", "/x")])
def test_interrupts_and_errors_of_files_are_one_line(machine, monkeypatch, error):
    def raises(with_pip):
        raise error

    monkeypatch.setattr(setup_env, "make_venv", raises)
    assert ("interrupted" if isinstance(error, KeyboardInterrupt) else "/x") in failure()


def test_pip_s_last_error_and_its_large_downloads(monkeypatch, tmp_path, capsys):
    if sys.platform == "win32":
        pytest.skip("the stand-in for Python is a shell script")
    said = (
        "Collecting torch==2.13.0",
        "  Downloading https://host/torch-2.13.0-cp312-x86_64.whl (526.6 MB)",
        "  Downloading small-1.0-py3-none-any.whl (12 kB)",
        "Installing collected packages: torch, small",
        "ERROR: first",
        "ERROR: Could not install packages: the last one",
        "WARNING: more",
    )
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in said) + "exit $code\n")
    python.chmod(0o755)
    monkeypatch.setattr(setup_env, "VENV_PYTHON", python)
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "log")
    monkeypatch.setenv("code", "1")
    assert setup_env.pip("torch") == "Could not install packages: the last one"
    assert capsys.readouterr().out.splitlines() == [
        "setup: downloading torch 2.13.0 (526.6 MB)",
        "setup: unpacking 2 packages",
    ]
    assert all(line in setup_env.LOG.read_text() for line in said)
    monkeypatch.setenv("code", "0")
    assert setup_env.pip("torch") is None
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    cause = setup_env.pip("torch")
    assert "ended pip by signal 9, as the system does when memory is short" in cause


def test_an_old_python_is_told_so(monkeypatch):
    """Before anything is imported that it lacks, and by a file that it can parse."""
    ast.parse(SOURCE.read_text(), feature_version=(3, 4))
    assert not [n for n in ast.walk(ast.parse(SOURCE.read_text())) if isinstance(n, ast.JoinedStr)]
    monkeypatch.setattr(sys, "version_info", (3, 6, 15, "final", 0))
    monkeypatch.setattr(sys, "version", "3.6.15 (default)")
    monkeypatch.setitem(sys.modules, "importlib.metadata", None)
    with pytest.raises(SystemExit, match=r"^setup: Python 3.10 or newer is needed, got 3.6.15"):
        runpy.run_path(str(SOURCE))


@pytest.mark.parametrize(
    "gpu, ours, workers", [(False, 1, 1), (False, 8, None), (True, 1, 1), (True, 8, 4)]
)
def test_one_worker_a_core_that_is_ours(monkeypatch, gpu, ours, workers):
    """Workers are counted by the cores of the process's affinity, as in `taskset -c 0 make
    test`."""
    monkeypatch.setattr(conftest.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(
        conftest.os, "sched_getaffinity", lambda process: range(ours), raising=False
    )
    monkeypatch.setattr(conftest.torch.cuda, "is_available", lambda: gpu)
    assert conftest.pytest_xdist_auto_num_workers(None) == workers
