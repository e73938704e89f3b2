"""Makes .venv, once, for the Makefile: `PYTHON tools/setup_env.py`.

Where PYTHON's own torch is a GPU build, .venv borrows PYTHON's packages and installs only what is
missing, never a torch or a Triton; else it gets the pinned packages of requirements-dev.txt, with
the CPU build of torch where there is no NVIDIA device.

Every Python since 2.7 can parse this file, so that an old one says that it is too old.
"""

import sys

if sys.version_info < (3, 10):
    found = sys.version.split()[0]
    sys.exit("setup: Python 3.10 or newer is needed, got " + found + ": make PYTHON=python3.12 ...")

import argparse
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import tempfile
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
REQUIREMENTS = ROOT / "requirements-dev.txt"
READY = VENV / "ready"  # the Makefile's stamp
LOG = ROOT / ".venv-setup.log"

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
TRITON = "triton==3.6.0"  # for a torch that brings none
NEVER_REPLACED = ("torch", "triton", "numpy")  # of a borrowed environment
PAIRED = ("kernels", "huggingface_hub", "transformers")  # wanted at their pins there, too
NOT_NEEDED_TO_RUN = ("ruff", "tabulate", "matplotlib", "scikit-learn")


def say(*words):
    sys.stdout.write(" ".join(map(str, ("setup:",) + words)) + "\n")
    sys.stdout.flush()


def fail(*words):
    sys.exit(" ".join(map(str, ("setup:",) + words)))


def gpu_torch():
    """The version of PYTHON's torch if it is a GPU build, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch.__version__ if torch.version.cuda or torch.version.hip else None


def nvidia_device():
    """True if the machine has an NVIDIA GPU, by the traces of its driver."""
    traces = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one: WSL
    return shutil.which("nvidia-smi") is not None or any(map(os.path.exists, traces))


def requirements():
    """{name: pin} of the lines of requirements-dev.txt that are for this Python."""
    pins = {}
    for line in REQUIREMENTS.read_text().splitlines():
        requirement, _, marker = line.partition(";")
        if not line.strip() or line.startswith("#"):
            continue
        if marker.strip():
            operator = marker.split()[1]  # the file's markers are: python_version < or >= "3.11"
            if (operator == ">=") != (sys.version_info >= (3, 11)):
                continue
        name, _, version = requirement.strip().partition("==")
        pins[name] = version
    return pins


def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def show_progress(line):
    """Of what pip says: large downloads, and that it unpacks them."""
    words = line.split()
    if line.startswith("Installing collected packages:"):
        say("unpacking", len(words) - 3, "packages")
    elif words[:1] == ["Downloading"] and line.rstrip().endswith(("MB)", "GB)")):
        name = words[1].rpartition("/")[2]
        say("downloading", " ".join(name.split("-")[:2] + words[2:4]))


def pip(*arguments):
    """What kept pip from installing, its last ERROR line, or None. All it says is in the log."""
    command = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    command += arguments
    cause = "pip gave no cause"
    with LOG.open("a") as log:
        log.write("$ " + " ".join(command) + "\n")
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(os.environ, PYTHONUNBUFFERED="1"),
        )
        try:
            for line in process.stdout:
                log.write(line)
                show_progress(line)
                if line.startswith("ERROR: "):
                    cause = line[len("ERROR: ") :].strip()
            status = process.wait()
            if status < 0:
                cause = "another process ended pip by signal " + str(-status) + ", as the system"
                cause += " does when memory is short: call this again"
            return cause if status else None
        finally:
            process.kill()


def make_venv(with_pip):
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        venv.EnvBuilder(with_pip=with_pip, symlinks=os.name != "nt").create(VENV)
    except subprocess.CalledProcessError:
        fail("this Python cannot make a venv with pip: install its venv package")


def check_space(gigabytes):
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < gigabytes:
        fail("about", gigabytes, "GB are needed in", ROOT, "and", round(free, 1), "GB are free")


def pinned_environment():
    make_venv(with_pip=True)
    torch = "torch==" + requirements()["torch"]
    small = sys.platform != "linux"  # elsewhere the default index has CPU builds only
    if sys.platform == "linux" and not nvidia_device():
        check_space(2)
        say("no NVIDIA device here: taking the CPU build of torch, if there is one to be had")
        options = ("--no-deps", "--extra-index-url", CPU_BUILDS, "--timeout", "5", "--retries", "0")
        small = pip(torch + "+cpu", *options) is None
        if not small:
            say("none is to be had: taking the build with CUDA")
    gigabytes, download = (2, 0.5) if small else (6, 1.7)
    check_space(gigabytes)
    say("about", download, "GB are downloaded and", gigabytes, "GB needed on the disk, once")
    cause = pip("-r", str(REQUIREMENTS))
    if cause and "No space left" in cause:
        temporary = tempfile.gettempdir()
        fail(cause + ": about", gigabytes, "GB are needed, and", download, "GB in", temporary)
    if cause:
        fail("pip could not install requirements-dev.txt:", cause)
    has_triton = subprocess.run([str(VENV_PYTHON), "-c", "import triton"], capture_output=True)
    if has_triton.returncode != 0 and pip(TRITON):
        say("no", TRITON, "for this machine: only plain torch will serve here")


def borrowed_environment(torch_version):
    pins = requirements()
    present = {name: installed(name) for name in pins}
    missing = [
        name
        for name, pin in pins.items()
        if present[name] is None or (name in PAIRED and present[name] != pin)
    ]
    say("using this machine's torch", torch_version)
    make_venv(with_pip=False)  # pip is among what is borrowed
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    target = next(VENV.glob("lib*/python*/site-packages"), VENV / "Lib" / "site-packages")
    lines = ["import site; site.addsitedir(" + repr(path) + ")\n" for path in packages]
    (target / "borrowed.pth").write_text("".join(lines))
    if not missing:
        return
    kept = [name + "==" + installed(name) for name in NEVER_REPLACED if installed(name)]
    constraints = VENV / "constraints.txt"
    constraints.write_text("".join(line + "\n" for line in kept))
    wanted = [name + "==" + pins[name] for name in missing]
    say("installing", ", ".join(wanted))
    cause = pip("--retries", "1", "--timeout", "15", "-c", str(constraints), *wanted)
    if not cause:
        return
    lacking = [name for name in missing if not present[name] and name not in NOT_NEEDED_TO_RUN]
    if lacking:
        fail("pip could not install", ", ".join(lacking) + ":", cause)
    say("pip could not install them; going on with what is there:", cause)


def make():
    LOG.write_text("")
    say("making .venv, which takes some minutes, once; what pip says is in", LOG)
    torch_version = gpu_torch()
    if torch_version is None:
        pinned_environment()
    else:
        borrowed_environment(torch_version)
    READY.write_text("")


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        make()
    except KeyboardInterrupt:
        fail("interrupted; the next call begins again")
    except OSError as error:
        fail(error)


if __name__ == "__main__":
    main()
