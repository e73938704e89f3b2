"""A committed copy of this repository that a test may change, build and publish."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fresh
import pytest

if shutil.which("git") is None:
    pytest.skip("needs git", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "build.toml", "CARD.md", "CHANGELOG.md", ".gitignore", "torch-ext", "tools", "benchmarks",
)  # fmt: skip

# the same commit id on every machine, and no one's git settings
GIT = {
    **{f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in (
        ("NAME", "test"), ("EMAIL", "test@localhost"), ("DATE", "2026-01-01T00:00:00Z"))},
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
}  # fmt: skip


# of a package of three files, for tests that publish often: (name, text)
SMALL = (
    ("__init__.py", 'from . import layers\nfrom .runtime.verify import verify\n\n'
     '__all__ = ["layers", "verify"]\n'),
    ("layers/__init__.py", "__all__ = []\n"),
    ("runtime/__init__.py", ""),
    ("runtime/device.py", "import torch\n"),
)  # fmt: skip


class Checkout:
    """A repository at `root`, with the package or a small one; `build` runs its own tools/."""

    def __init__(self, root: Path, small: bool = False):
        self.root = root
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "_ops.py")
                shutil.copytree(source, root / name, ignore=ignore)
            elif source.exists():
                root.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, root / name)
        if small:
            verify = (self.package / "runtime/verify.py").read_text()
            shutil.rmtree(self.package)
            for name, text in (*SMALL, ("runtime/verify.py", verify)):
                (self.package / name).parent.mkdir(parents=True, exist_ok=True)
                (self.package / name).write_text(text)
        (root / "tests").mkdir()
        for record in (ROOT / "tests").glob("api_v*.json" if not small else "none"):
            shutil.copy(record, root / "tests")
        self.git("init", "-q")
        self.commit("first")

    def copy(self, root: Path) -> "Checkout":
        """The same at another root, with its history and its build."""
        shutil.copytree(self.root, root, symlinks=True)
        other = object.__new__(Checkout)
        other.root = root
        return other

    @property
    def package(self) -> Path:
        return self.root / "torch-ext" / "fused_swiglu_gdn"

    def git(self, *arguments):
        command = ["git", *arguments]
        ran = subprocess.run(
            command, cwd=self.root, env={**os.environ, **GIT}, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    def commit(self, message):
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def edit(self, name, old, new, message=None):
        """Replaces text in a file, and commits that if there is a message."""
        path = self.root / name
        text = path.read_text()
        assert old in text, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new))
        if message:
            self.commit(message)

    def run(self, script, *arguments, env=None):
        """Runs a script of the checkout; the caller looks at the result. With variables of its own
        the process is a new one: clients of the Hub read theirs when they are imported."""
        words, given = [self.root / script, *arguments], {**os.environ, **GIT, **(env or {})}
        if env is None:
            return fresh.python(*words, cwd=self.root, env=given, imported="kernels")
        return subprocess.run(
            [sys.executable, *map(str, words)], cwd=self.root, capture_output=True, text=True,
            env=given, stdin=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip

    def build(self, *arguments):
        ran = self.run("tools/build.py", *arguments)
        assert ran.returncode == 0, ran.stderr
        return self.root / "build"
