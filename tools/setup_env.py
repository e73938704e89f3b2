"""Makes .venv, once, for the Makefile: `PYTHON tools/setup_env.py`.

Where PYTHON's own torch is a GPU build, .venv borrows PYTHON's packages and installs only what is
missing, never a torch or a Triton; else it gets the pinned packages of requirements-dev.txt.
"""

import argparse
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
REQUIREMENTS = ROOT / "requirements-dev.txt"
READY = VENV / "ready"  # the Makefile's stamp
LOG = ROOT / ".venv-setup.log"

TRITON = "triton==3.6.0"  # for a torch that brings none
NEVER_REPLACED = ("torch", "triton", "numpy")  # of a borrowed environment
PAIRED = ("kernels", "huggingface_hub", "transformers")  # wanted at their pins there, too
NOT_NEEDED_TO_RUN = ("ruff", "tabulate", "matplotlib", "scikit-learn")


def gpu_torch():
    """The version of PYTHON's torch if it is a GPU build, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch.__version__ if torch.version.cuda or torch.version.hip else None


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


def pip(*arguments):
    """Whether pip could; what it said is in .venv-setup.log."""
    command = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    with LOG.open("a") as log:
        log.write("$ " + " ".join(command) + "\n")
        log.flush()
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode == 0


def make_venv(with_pip):
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        venv.EnvBuilder(with_pip=with_pip, symlinks=os.name != "nt").create(VENV)
    except subprocess.CalledProcessError:
        sys.exit("setup: this Python cannot make a venv with pip: install its venv package")


def pinned_environment():
    print("setup: making .venv with the packages of requirements-dev.txt (minutes, once)")
    make_venv(with_pip=True)
    if not pip("-r", str(REQUIREMENTS)):
        sys.exit("setup: pip could not install requirements-dev.txt: see " + LOG.name)
    has_triton = subprocess.run([str(VENV_PYTHON), "-c", "import triton"], capture_output=True)
    if has_triton.returncode != 0 and not pip(TRITON):
        print("setup: no", TRITON, "for this machine: only plain torch will serve here")


def borrowed_environment(torch_version):
    pins = requirements()
    present = {name: installed(name) for name in pins}
    missing = [
        name
        for name, pin in pins.items()
        if present[name] is None or (name in PAIRED and present[name] != pin)
    ]
    print("setup: using this machine's torch", torch_version)
    make_venv(with_pip=False)  # pip is among what is borrowed
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    target = next(VENV.glob("lib*/python*/site-packages"), VENV / "Lib" / "site-packages")
    lines = [f"import site; site.addsitedir({path!r})\n" for path in packages]
    (target / "borrowed.pth").write_text("".join(lines))
    if not missing:
        return
    kept = [f"{name}=={installed(name)}" for name in NEVER_REPLACED if installed(name)]
    constraints = VENV / "constraints.txt"
    constraints.write_text("".join(line + "\n" for line in kept))
    wanted = [f"{name}=={pins[name]}" for name in missing]
    print("setup: installing", ", ".join(wanted))
    if pip("--retries", "1", "--timeout", "15", "-c", str(constraints), *wanted):
        return
    lacking = [name for name in missing if not present[name] and name not in NOT_NEEDED_TO_RUN]
    if lacking:
        sys.exit(f"setup: pip could not install {', '.join(lacking)}: see {LOG.name}")
    print("setup: pip could not install them; going on with what is there")


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if sys.version_info < (3, 10):
        sys.exit("setup: Python 3.10 or newer is needed: PYTHON=python3.12 make ...")
    LOG.write_text("")
    torch_version = gpu_torch()
    if torch_version is None:
        pinned_environment()
    else:
        borrowed_environment(torch_version)
    READY.write_text("")


if __name__ == "__main__":
    main()
