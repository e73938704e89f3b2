"""Writes build/torch-<backend>/ for every backend of build.toml, as kernel-builder does with Nix.

    python tools/build.py               # build/ and its card
    python tools/build.py --in-place    # torch-ext/.../_ops.py alone: tests import the tree

Same sources, same bytes. A build from uncommitted changes is marked dirty, and its id carries a
hash of the sources, so that no two different builds meet in one process under one name.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import sys
import tempfile

try:
    import jinja2
    import kernels
    from kernels._rust import Digest, DigestAlgorithm, KernelName, Metadata
except ImportError as missing:
    sys.exit(
        f"build: {missing.name} is missing in {sys.executable}: install it with that Python's pip, "
        "as README.md says"
    )
from public_api import literal_all, parse
from sources import ROOT, git, package_dir, read_config, sources, text_of

OPS = '''"""Names this build's operators: a namespace of their own for every build. Generated."""

import torch

_UNIQUE_ID = "{unique_id}"


def get_backend() -> str:
    """The backend that this torch was built for."""
    if hasattr(torch.backends, "tpu"):
        return "tpu"
    if hasattr(torch, "neuron"):
        return "neuron"
    if torch.version.cuda is not None:
        return "cuda"
    if torch.version.hip is not None:
        return "rocm"
    if torch.backends.mps.is_available():
        return "metal"
    if getattr(torch.version, "xpu", None) is not None:
        return "xpu"
    return "cpu"


_OPS_NAME = f"_{name}_{{get_backend()}}_{{_UNIQUE_ID}}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """The operator's full name."""
    return f"{{_OPS_NAME}}::{{op_name}}"
'''


def source_files(root, config):
    """Paths of the shipped files in package_dir, sorted; _ops.py is generated."""
    package = package_dir(root, config)
    suffixes = {"." + ext for ext in config.get("torch-noarch", {}).get("pyext", ("py", "pyi"))}
    found = [
        path.relative_to(package)
        for path in sources(root, package)
        if path.suffix in suffixes and "__pycache__" not in path.parts
        if path.relative_to(package).as_posix() != "_ops.py"
    ]
    if not found:
        raise ValueError(f"{package.relative_to(root)} has no source files that git knows")
    return found


def benchmark_files(root):
    """Files that `kernels benchmark` runs, sorted."""
    return sources(root, root / "benchmarks", "benchmark*.py")


def provenance(root):
    """{"commit": ..., "dirty": ...} of the sources, or None outside a git checkout."""
    commit = git(root, "rev-parse", "HEAD")
    if commit is None or git(root, "rev-parse", "--show-prefix") != "":
        return None
    return {"commit": commit, "dirty": bool(git(root, "status", "--porcelain"))}


def unique_id(root, config, source):
    """kernel-builder's: 7 digits of the commit's tree. With uncommitted changes, of the sources."""
    if source is not None and not source["dirty"]:
        return git(root, "rev-parse", "HEAD^{tree}")[:7]
    package = package_dir(root, config)
    content = hashlib.sha256((root / "build.toml").read_bytes())
    for path in source_files(root, config):
        content.update(path.as_posix().encode() + b"\0" + (package / path).read_bytes() + b"\0")
    return content.hexdigest()[:7] + "_dirty"


def ops_text(config, identity):
    name = KernelName(config["general"]["name"]).python_name
    return OPS.format(name=name, unique_id=identity)


def metadata(config, backend, identity, source):
    general = config["general"]
    archs = {"cuda": "cuda_capabilities", "rocm": "rocm_archs"}.get(backend, "")
    archs = config.get("torch-noarch", {}).get(archs)
    result = {
        "name": general["name"],
        "id": f"_{KernelName(general['name']).python_name}_{backend}_{identity}",
        "version": general["version"],
        "license": general["license"],
        **{key: general[key] for key in ("upstream", "source") if key in general},
        "python-depends": general.get("python-depends", []),
        "kernel-depends": [],
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
        "provenance": {"kernel-builder": {"version": kernels.__version__}},
    }
    if source is not None:
        result["provenance"]["kernel"] = source
    return result


def write_variant(root, variant, config, backend, identity, source, files):
    """One build/torch-<backend>/, its digest checked with the classes that load it."""
    package = package_dir(root, config)
    for path in files:
        target = variant / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((package / path).read_bytes())
    (variant / "_ops.py").write_text(ops_text(config, identity))
    facts = metadata(config, backend, identity, source)
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    facts["digest"] = {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))}
    (variant / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n")
    read_back = Metadata.read_from_file(variant / "metadata.json")
    read_back.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def card(root, config, repo_id=None):
    """CARD.md filled in as `kernel-builder fill-card` does, with the same variables."""
    general = config["general"]
    package = package_dir(root, config)
    names = literal_all(parse(package / "__init__.py"))
    layers = []
    if "layers" in names:
        layers = literal_all(parse(package / "layers" / "__init__.py"))
    engine = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    values = {
        "repo_id": repo_id or general["hub"]["repo-id"],
        "version": general["version"],
        "functions": [name for name in names if name != "layers"],
        "layers": layers,
        "has_benchmark": root / "benchmarks" / "benchmark.py" in benchmark_files(root),
        "upstream": general.get("upstream"),
        "source": general.get("source"),
        "license": general["license"].lower(),
    }
    template = text_of(root, "CARD.md")
    try:
        return engine.from_string(template).render(values)
    except Exception as error:  # whatever an expression in it raises
        line = getattr(error, "lineno", None)
        where = f"CARD.md, line {line}" if line else "CARD.md"
        raise ValueError(f"{where} cannot be filled in: {error}") from error


def contents(folder):
    """Path and bytes of each file below it, but for what Python compiled there."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder): path.read_bytes()
        for path in files
        if path.parent.name != "__pycache__"
    }


@contextlib.contextmanager
def only_process(folder):
    """One process at a time goes on in here, where the system has locks of files."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def build(root=ROOT, out=None, repo_id=None):
    """Writes `out` (root/build) whole or not at all; returns the identity in its builds' ids.

    What is there and would be written again stays, as another process may be loading it.
    """
    root, out = pathlib.Path(root), pathlib.Path(out or root / "build")
    out.parent.mkdir(parents=True, exist_ok=True)
    with only_process(out.parent):
        return write_build(root, out, repo_id)


def write_build(root, out, repo_id):
    config, backends = read_config(root)
    source = provenance(root)
    identity, files = unique_id(root, config, source), source_files(root, config)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-") as scratch:
        new = pathlib.Path(scratch) / "build"
        for backend in backends:
            variant = new / f"torch-{backend}"
            write_variant(root, variant, config, backend, identity, source, files)
        (new / "CARD.md").write_text(card(root, config, repo_id))
        if contents(out) != contents(new):
            shutil.rmtree(out, ignore_errors=True)
            new.rename(out)
    return identity


def write_in_place(root=ROOT):
    """The tree's own _ops.py, so that torch-ext/ can be imported as it lies."""
    config, _ = read_config(root)
    path = package_dir(pathlib.Path(root), config) / "_ops.py"
    path.write_text(ops_text(config, "in_tree"))
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-place", action="store_true", help="only torch-ext/.../_ops.py")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build", help="not build/")
    parser.add_argument("--repo-id", help="for the card; build.toml's repo-id if not given")
    arguments = parser.parse_args()
    if arguments.in_place:
        print("wrote", write_in_place().relative_to(ROOT))
        return
    try:
        identity = build(ROOT, arguments.out, arguments.repo_id)
    except ValueError as error:
        sys.exit(f"build: {' '.join(str(error).split())}")
    variants = sorted(path.name for path in arguments.out.glob("torch-*"))
    print(f"built {', '.join(variants)} as {identity} in {arguments.out}")


if __name__ == "__main__":
    main()
