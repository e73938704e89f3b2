"""What a build is made of: build.toml, and the files that git knows and none from outside."""

import pathlib
import subprocess

from kernels._rust import Build, KernelName
from kernels.compat import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_config(root):
    """build.toml as a dictionary, and its backends; ValueError says what is wrong with it."""
    backends = [str(backend) for backend in Build.open(root).general.backends]
    return tomllib.loads((root / "build.toml").read_text()), backends


def package_dir(root, config):
    return root / "torch-ext" / KernelName(config["general"]["name"]).python_name


def git(root, *arguments):
    """Output of git, or None if root is not a git checkout with a commit."""
    command = ["git", "-C", str(root), *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return ran.stdout.strip()


def _listed(root):
    """Paths of what git has or would add; None where root is not the root of a checkout."""
    if git(root, "rev-parse", "--show-prefix") != "":
        return None
    names = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return {root / name for name in names.split("\0") if name}


def _check(root, path, listed):
    """A path that leads elsewhere leads to a file of the repository that may go out itself."""
    target, top = path.resolve(), root.resolve()
    if target == top / path.relative_to(root):
        return
    known = target.is_file() and top in target.parents
    if listed is not None:
        known = known and root / target.relative_to(top) in listed
    if not known:
        raise ValueError(f"{path.relative_to(root)} is a link to no file of this repository")


def sources(root, folder, pattern="**/*"):
    """The files of a folder that go out, sorted; ValueError for a link out of the repository.

    None that git ignores: `git status` is silent about them, so a build would be called clean.
    """
    listed = _listed(root)
    found = []
    for path in sorted(folder.glob(pattern)):
        if (listed is None or path in listed) and (path.is_symlink() or path.is_file()):
            _check(root, path, listed)
            found.append(path)
    return found


def text_of(root, name):
    """Text of a file at the root; ValueError explains why it cannot be read."""
    found = sources(root, root, name)
    if not found:
        raise ValueError(f"{name} is missing, or git ignores it")
    try:
        return found[0].read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text") from error
