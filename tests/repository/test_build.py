"""tools/build.py: the Hub's layout, accepted by the loaders, the same bytes every time."""

import compileall
import importlib.util
import json
import marshal
import os
import runpy
import shutil
import struct
import subprocess
import sys
import types
from pathlib import Path

import fresh
import pytest
import torch
from checkout import Checkout

rust = pytest.importorskip("kernels._rust")
Digest, DigestAlgorithm, Metadata = rust.Digest, rust.DigestAlgorithm, rust.Metadata

BACKENDS = ["cpu", "cuda", "metal", "rocm", "xpu"]
HERE = "cuda" if torch.version.cuda else "rocm" if torch.version.hip else "cpu"
if torch.backends.mps.is_available():
    HERE = "metal"
elif getattr(torch.version, "xpu", None):
    HERE = "xpu"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A committed checkout with its build; tests that change something take a copy."""
    checkout = Checkout(tmp_path_factory.mktemp("built") / "repo")
    checkout.build()
    return checkout


@pytest.fixture
def copy(built, tmp_path, request):
    """A folder with a copy of a variant of the build, which a test may change."""
    variant = f"build/torch-{getattr(request, 'param', HERE)}"
    shutil.copytree(built.root / variant, tmp_path / "repo" / variant)
    return tmp_path / "repo"


@pytest.fixture(scope="module")
def small_built(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("small") / "repo", small=True)
    checkout.build()
    return checkout


@pytest.fixture
def variant(small_built, tmp_path):
    """A built variant of the small package, which a test may change."""
    return Path(
        shutil.copytree(small_built.root / "build" / f"torch-{HERE}", tmp_path / f"torch-{HERE}")
    )


@pytest.fixture
def small(small_built, tmp_path):
    """A committed checkout of a small package with its build, which a test may change."""
    return small_built.copy(tmp_path / "repo")


def contents(folder: Path):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def python(code, *arguments, **env):
    """Output of the code, run in a new process."""
    ran = fresh.python("-c", code, *arguments, env={**os.environ, **env})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_backend_has_a_variant_that_kernels_can_read(built):
    variants = sorted((built.root / "build").glob("torch-*"))
    assert [path.name for path in variants] == [f"torch-{name}" for name in BACKENDS]
    tree = built.git("rev-parse", "HEAD^{tree}")[:7]
    for path, backend in zip(variants, BACKENDS):
        metadata = Metadata.read_from_file(path / "metadata.json")
        assert metadata.id == f"_fused_swiglu_gdn_{backend}_{tree}"
        assert (str(metadata.name), metadata.version) == ("fused-swiglu-gdn", 1)
        assert metadata.provenance.kernel.commit == built.git("rev-parse", "HEAD")
        assert not metadata.provenance.dirty
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, path))
        assert metadata.source == "https://github.com/org/fused-swiglu-gdn"
        assert f'_UNIQUE_ID = "{tree}"' in (path / "_ops.py").read_text()


def test_a_variant_is_the_package_and_two_generated_files(built):
    shipped = contents(built.package)
    variant = contents(built.root / "build" / "torch-cuda")
    assert variant.keys() - shipped.keys() == {"_ops.py", "metadata.json"}
    assert all(variant[name] == shipped[name] for name in shipped)


def test_the_card_is_filled_in_and_lies_beside_the_variants(built):
    card = (built.root / "build" / "CARD.md").read_text()
    assert 'get_kernel("org/fused-swiglu-gdn", version=1)' in card
    assert "- `fused_swiglu`" in card and "- `SwiGLUMLP`" in card and "{{" not in card
    assert "`kernels benchmark org/fused-swiglu-gdn --version 1`" in card
    assert "available at https://github.com/org/fused-swiglu-gdn." in card


def test_the_card_has_what_there_is_to_tell(small):
    """As kernel-builder's fill-card: the benchmark's paragraph goes by benchmarks/benchmark.py."""
    source = 'source = "https://github.com/org/fused-swiglu-gdn"\n'
    small.edit("build.toml", source, 'upstream = "https://github.com/a/b"\n')
    (small.root / "benchmarks" / "benchmark.py").unlink()
    card = (small.build() / "CARD.md").read_text()
    assert "## Benchmark" not in card and "## Source" not in card
    assert "comes from https://github.com/a/b." in card
    metadata = Metadata.read_from_file(small.root / "build" / "torch-cpu" / "metadata.json")
    assert metadata.source is None and metadata.upstream == "https://github.com/a/b"


def test_same_sources_same_bytes(built, tmp_path):
    built.build("--out", str(tmp_path / "again"))
    assert contents(tmp_path / "again") == contents(built.root / "build")
    other = tmp_path / "clone"
    built.git("clone", "-q", str(built.root), str(other))
    assert fresh.python(other / "tools" / "build.py", cwd=other, imported="kernels").returncode == 0
    assert contents(other / "build") == contents(built.root / "build")


def test_a_build_replaces_what_was_there(small):
    before = contents(small.root / "build")
    (small.root / "build" / "torch-tpu").mkdir()
    (small.root / "build" / "torch-cpu" / "stale.py").write_text("")
    names = sorted(path.name for path in small.root.iterdir())
    assert contents(small.build()) == before
    assert sorted(path.name for path in small.root.iterdir()) == names  # no scratch left


def test_a_build_that_would_be_the_same_stays(small):
    """So that another process may load it; byte code that Python wrote there is no difference."""
    out, built = small.root / "build", contents(small.root / "build")
    small.build()
    compileall.compile_dir(out / "torch-cpu" / "runtime", quiet=1)
    before, folder = contents(out), out.stat().st_ino
    assert before != built
    small.build()
    assert contents(out) == before and out.stat().st_ino == folder
    (out / "torch-cpu" / "runtime" / "device.py").write_text("")
    assert contents(small.build()) == built


def test_builds_at_the_same_time_write_the_same(tmp_path):
    """What one of them writes for a moment is no uncommitted change to another."""
    checkout = Checkout(tmp_path / "repo", small=True)
    command = [sys.executable, str(checkout.root / "tools" / "build.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, cwd=checkout.root, **pipes) for _ in range(4)]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert len(set(said)) == 1 and "dirty" not in said[0]
    assert (checkout.root / "build" / "torch-cuda" / "metadata.json").exists()


def test_uncommitted_changes_are_marked_and_named_by_content(tmp_path):
    checkout = Checkout(tmp_path / "repo", small=True)
    ids = []
    for line in ("# one\n", "# two\n"):
        device = "torch-ext/fused_swiglu_gdn/runtime/device.py"
        checkout.edit(device, "import torch\n", "import torch\n" + line)
        metadata = Metadata.read_from_file(checkout.build() / "torch-cpu" / "metadata.json")
        assert metadata.provenance.dirty
        ids.append(metadata.id)
    assert all(name.endswith("_dirty") for name in ids) and ids[0] != ids[1]
    shutil.rmtree(checkout.root / ".git")  # a tarball: no commit to name
    metadata = Metadata.read_from_file(checkout.build() / "torch-cpu" / "metadata.json")
    assert metadata.provenance.kernel is None and metadata.id == ids[1]


def test_what_git_ignores_is_not_shipped(small):
    """Nor does it make a build dirty; what git would add is shipped and does."""
    checkout, before = small, contents(small.root / "build")
    with (checkout.root / ".git" / "info" / "exclude").open("a") as exclude:
        exclude.write("secrets.py\nnotes/\nbenchmark_mine.py\n")
    (checkout.package / "secrets.py").write_text("PASSWORD = 1\n")
    (checkout.package / "notes").mkdir()
    (checkout.package / "notes" / "a.json").write_text("{}")
    assert contents(checkout.build()) == before
    (checkout.root / "benchmarks" / "benchmark_mine.py").write_text("")
    command = "import build; print(*[path.name for path in build.benchmark_files(build.ROOT)])"
    command = f"import sys; sys.path.insert(0, 'tools'); {command}"
    ran = fresh.python("-c", command, cwd=checkout.root, imported="kernels")
    assert ran.stdout.split() == ["benchmark.py"]
    (checkout.package / "new.py").write_text("")
    variant = checkout.build() / "torch-cpu"
    assert (variant / "new.py").exists()
    assert Metadata.read_from_file(variant / "metadata.json").provenance.dirty


def out_of_the_tree(checkout, elsewhere):
    (checkout.package / "passwd.py").symlink_to(elsewhere)


def folder_out_of_the_tree(checkout, elsewhere):
    (checkout.package / "linked").symlink_to(elsewhere.parent)


def to_nothing(checkout, elsewhere):
    (checkout.package / "gone.py").symlink_to("nowhere.py")


def to_what_git_ignores(checkout, elsewhere):
    (checkout.package / "_ops.py").write_text("SECRET = 1\n")
    (checkout.package / "ops.py").symlink_to("_ops.py")


def package_elsewhere(checkout, elsewhere):
    checkout.package.rename(elsewhere.parent / "package")
    checkout.package.symlink_to(elsewhere.parent / "package")


def card_elsewhere(checkout, elsewhere):
    (checkout.root / "CARD.md").unlink()
    (checkout.root / "CARD.md").symlink_to(elsewhere)


@pytest.mark.parametrize("in_git", [True, False])
@pytest.mark.parametrize(
    "change, says",
    [
        (out_of_the_tree, "passwd.py is a link to no file of this repository"),
        (folder_out_of_the_tree, "linked is a link to no file of this repository"),
        (to_nothing, "gone.py is a link to no file of this repository"),
        (to_what_git_ignores, "ops.py is a link to no file of this repository"),
        (package_elsewhere, "fused_swiglu_gdn"),
        (card_elsewhere, "CARD.md is a link to no file of this repository"),
    ],
)
def test_links_out_of_the_tree_are_refused(small, tmp_path, change, says, in_git):
    if change is to_what_git_ignores and not in_git:
        pytest.skip("without git nothing is ignored")
    checkout, before = small, contents(small.root / "build")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.py").write_text("PASSWORD = 1\n")
    change(checkout, tmp_path / "outside" / "secret.py")
    checkout.commit("a link")
    if not in_git:
        shutil.rmtree(checkout.root / ".git")
    ran = checkout.run("tools/build.py")
    assert ran.returncode != 0 and says in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr
    assert contents(checkout.root / "build") == before


def test_a_link_to_a_file_of_the_tree_is_that_file(small):
    (small.package / "other.py").symlink_to("runtime/device.py")
    small.commit("a link")
    variant = small.build() / "torch-cpu"
    assert not (variant / "other.py").is_symlink()
    assert (variant / "other.py").read_text() == "import torch\n"


def test_a_wrong_build_toml_is_refused_and_the_old_build_stays(small):
    before = contents(small.root / "build")
    small.edit("build.toml", "[torch-noarch]", "[torch-noarch]\nsurprise = 1")
    ran = small.run("tools/build.py")
    assert ran.returncode != 0 and "surprise" in ran.stderr
    assert contents(small.root / "build") == before


def test_kernels_info_reads_it(built):
    code = "from kernels.cli import main; main()"
    out = fresh.python("-c", code, "info", built.root, imported="kernels").stdout
    assert "Name: fused-swiglu-gdn" in out and f"Backends: {', '.join(BACKENDS)}" in out


LOAD = """
import sys
from pathlib import Path
from kernels import get_kernel, get_local_kernel
import torch

local = get_local_kernel(Path(sys.argv[1]))
hub = get_kernel("org/fused-swiglu-gdn", version=1)  # LOCAL_KERNELS names another build
assert local.__name__ != hub.__name__, "two builds met under one name"
assert local.layers is not hub.layers and hub.layers.__name__.startswith(hub.__name__)
x, w = torch.randn(3, 8, requires_grad=True), torch.randn(16, 8)
for kernel in (local, hub):
    z = kernel.fused_swiglu(x, w, w)
    torch.testing.assert_close(z, torch.nn.functional.silu(x @ w.t()) * (x @ w.t()))
    z.sum().backward()
compiled = [torch.compile(k.fused_swiglu, fullgraph=True, backend="eager") for k in (local, hub)]
for f in compiled:
    torch.testing.assert_close(f(x.detach(), w, w), z.detach())
print(local.verify(), hub.verify())
"""


AS_ON_XPU = """
import functools
import sys
from pathlib import Path
import torch

torch.version.cuda, torch.version.hip, torch.version.xpu = None, None, "20250101"
torch.backends.mps.is_available = functools.cache(lambda: False)  # 2.15 asks for what is wrapped
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]))
x, w = torch.randn(3, 8), torch.randn(16, 8)
z = kernel.fused_swiglu(x, w, w)
torch.testing.assert_close(z, torch.nn.functional.silu(x @ w.t()) * (x @ w.t()))
mlp = torch.nn.Sequential(torch.nn.Linear(8, 8))
assert not kernel.kernelize(mlp).served
print(Path(kernel.__file__).parent.name, kernel.implementation_of(kernel.fused_swiglu, x, w, w))
"""


@pytest.mark.parametrize("copy", ["xpu"], indirect=True)
def test_torch_for_intel_gpus_finds_a_variant(copy):
    """kernels takes the variant of the backend that torch was built for, and no other. A torch that
    says that it is for Intel's GPUs is all that this machine has of them."""
    assert python(AS_ON_XPU, copy).split() == ["torch-xpu", "reference"]


def test_two_builds_load_in_one_process_as_users_load_them(copy, built, tmp_path):
    changed = Checkout(tmp_path / "changed")
    verify = "torch-ext/fused_swiglu_gdn/runtime/verify.py"
    changed.edit(verify, "import json\n", "import json  # again\n", "another commit")
    changed.build()
    out = python(LOAD, copy, LOCAL_KERNELS=f"org/fused-swiglu-gdn={changed.root}")
    first, second = out.split()
    assert first.startswith("sha256:") and first != second


def load_verify(folder: Path):
    """verify() of the build in a folder, without the package around it."""
    return runpy.run_path(str(folder / "runtime/verify.py"))["verify"]


def test_a_signature_is_no_part_of_the_digest(variant):
    """It is made of the metadata, later, by whoever signs; of a folder below it would be a file
    like others. Nor is there a compiled library for `kernel-builder check-abi` to open."""
    assert {path.suffix for path in variant.rglob("*") if path.is_file()} == {".py", ".json"}
    verify = load_verify(variant)
    digest = verify()
    (variant / "metadata.json.sigstore").write_text("{}")
    assert verify() == digest
    recorded = Metadata.read_from_file(variant / "metadata.json").digest
    recorded.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    (variant / "layers" / "metadata.json.sigstore").write_text("{}")
    with pytest.raises(RuntimeError, match="not part of it: layers/metadata.json.sigstore"):
        verify()


def test_verify_returns_the_digest_and_holds_a_caller_to_it(variant):
    (variant / "__pycache__").mkdir()
    (variant / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"any")
    verify = load_verify(variant)
    digest = verify()
    assert verify(digest) == digest
    with pytest.raises(RuntimeError, match="must have digest sha256:0, got sha256:"):
        verify("sha256:0")
    with pytest.raises(TypeError, match="expected must be a digest.* or None, got int"):
        verify(3)


def _folder_in_its_place(variant: Path) -> None:
    (variant / "metadata.json").unlink()
    (variant / "metadata.json").mkdir()


@pytest.mark.parametrize(
    "tamper, says",
    [
        (
            lambda v: (v / "runtime" / "device.py").write_text("import os"),
            "changed runtime/device.py",
        ),
        (lambda v: (v / "layers" / "__init__.py").unlink(), "missing layers/__init__.py"),
        (lambda v: (v / "layers" / "extra.py").write_text(""), "not part of it: layers/extra.py"),
        (lambda v: (v / "metadata.json").unlink(), "a source tree, not a build"),
        (lambda v: (v / "metadata.json").write_text("{}"), "holds no digest"),
        (lambda v: (v / "metadata.json").write_text("half"), "cannot be read"),
        (lambda v: (v / "metadata.json").write_text("[" * 10**6), "cannot be verified: .*read"),
        (
            lambda v: (v / "metadata.json").write_text('{"digest":' * 10**6),
            "cannot be verified: .*read",
        ),
        (lambda v: (v / "metadata.json").write_bytes(b"\xff\xfe"), "cannot be read"),
        (_folder_in_its_place, "cannot be read"),
    ],
)
def test_verify_finds_what_was_done_to_a_build(variant, tamper, says):
    verify = load_verify(variant)
    tamper(variant)
    with pytest.raises(RuntimeError, match=says):
        verify()


def plant(variant, flags, source="device", file=None):
    """Byte code that Python runs in place of runtime/<source>.py, with `flags` as PEP 552 has them;
    file: which file a function in it says it is of."""
    path = variant / "runtime" / f"{source}.py"
    cached = Path(importlib.util.cache_from_source(str(path)))
    cached.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() + ("\nPLANTED = True\n" if file is None else "")
    code = compile(text, str(path), "exec", dont_inherit=True, optimize=0)
    if file is not None:
        inner = next(c for c in code.co_consts if isinstance(c, types.CodeType))
        consts = [inner.replace(co_filename=file) if c is inner else c for c in code.co_consts]
        code = code.replace(co_consts=tuple(consts))
    stat = path.stat()
    if flags:
        head = importlib.util.source_hash(path.read_bytes())
    else:
        head = struct.pack("<II", int(stat.st_mtime), stat.st_size)
    cached.write_bytes(
        importlib.util.MAGIC_NUMBER + struct.pack("<I", flags) + head + marshal.dumps(code)
    )


TIMESTAMP, UNCHECKED, CHECKED = 0, 1, 3


def test_verify_takes_byte_code_as_python_writes_it(variant):
    digest = load_verify(variant)()
    for level in (-1, 1, 2):  # as python, python -O and python -OO do
        assert compileall.compile_dir(variant / "runtime", quiet=1, optimize=level)
    assert load_verify(variant)(digest) == digest


@pytest.mark.parametrize("flags", [TIMESTAMP, UNCHECKED, CHECKED])
def test_verify_reads_byte_code(variant, flags):
    verify = load_verify(variant)
    digest = verify()
    run = "import sys; sys.path.insert(0, sys.argv[1]); import verify; print(dir(verify))"
    plant(variant, flags, "verify")
    assert "PLANTED" in python(run, variant / "runtime")  # Python does run it
    for expected in (None, digest):
        with pytest.raises(RuntimeError, match="byte code of another source.*runtime/verify.py"):
            verify(expected)


def test_verify_of_a_source_that_is_nested_too_deeply(variant):
    plant(variant, UNCHECKED)
    (variant / "runtime" / "device.py").write_text("x = " + "-" * 10**5 + "1")
    with pytest.raises(RuntimeError, match="changed runtime/device.py; byte code of another"):
        load_verify(variant)()


def test_verify_reads_where_byte_code_says_it_is_from(variant, tmp_path):
    """Triton compiles the text of a kernel's source file, which its code object names."""
    plant(variant, UNCHECKED, "verify", file=str(tmp_path / "other.py"))
    with pytest.raises(RuntimeError, match="byte code of another source.*runtime/verify.py"):
        load_verify(variant)()


def test_verify_reads_byte_code_kept_elsewhere(variant, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
    plant(variant, UNCHECKED)
    assert not list(variant.rglob("*.pyc"))
    with pytest.raises(RuntimeError, match="byte code of another source"):
        load_verify(variant)()


def linked_folder(variant):
    """A package that Python prefers to runtime/device.py."""
    (variant.parent / "device").mkdir()
    (variant.parent / "device" / "__init__.py").write_text("PLANTED = True\n")
    (variant / "runtime" / "device").symlink_to(variant.parent / "device")


@pytest.mark.parametrize(
    "tamper, says",
    [
        (linked_folder, "a link to a folder: runtime/device"),
        (lambda v: (v / "gone.py").symlink_to(v / "nowhere"), "a link to no file: gone.py"),
        (lambda v: (v / "evil.pyc").write_bytes(b""), "not part of it: evil.pyc"),
        (lambda v: (v / "layers" / "ops.pyc").write_bytes(b""), "not part of it: layers/ops.pyc"),
        (lambda v: planted_in_cache(v, "evil.py"), "not part of it: __pycache__/evil.py"),
        (lambda v: planted_in_cache(v, "evil.x.pyc"), "not part of it: __pycache__/evil.x.pyc"),
        (lambda v: os.mkfifo(v / "pipe"), "not part of it: pipe"),
    ],
)
def test_verify_finds_what_is_extra(variant, tamper, says):
    verify = load_verify(variant)
    verify()
    tamper(variant)
    with pytest.raises(RuntimeError, match=says):
        verify()


def planted_in_cache(variant, name):
    (variant / "__pycache__").mkdir()
    (variant / "__pycache__" / name).write_bytes(b"")


def test_verify_agrees_with_kernels_own_hash_and_reads_through_links(variant, tmp_path):
    cache = tmp_path / "snapshot"  # as the Hub's cache lays files: links into blobs
    for name in contents(variant):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(variant / name)
    assert load_verify(cache)() == load_verify(variant)()
    recorded = json.loads((cache / "metadata.json").read_text())["digest"]["files"]
    assert Digest.hash_variant(DigestAlgorithm.SHA256, cache).files == recorded
