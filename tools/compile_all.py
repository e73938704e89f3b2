"""Compiles every kernel in use for every supported chip, without a GPU, and prints what came out.

    python tools/compile_all.py [--family swiglu] [--target sm_90] [--match fwd] [--json out.json]

Registers, spilled bytes and shared memory a program; for Hopper the wgmma instructions (HGMMA), the
waits for them (DEPBAR), whether ptxas says that it serialized them (C7510 to C7519: a wait behind
every product), and whether it lost an operand (wgmma_descriptors.py: wrong code). A family adds its
kernels as `tools/variants_<family>.py`: a list VARIANTS.
"""

import argparse
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Optional, Tuple, Union

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parent))
from wgmma_descriptors import lost_descriptors  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch-ext" / "fused_swiglu_gdn"
NAME = "fused_swiglu_gdn_in_tree"  # as in tests/conftest.py
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclasses.dataclass
class Variant:
    """One kernel as one launch compiles it.

    signature: type of each run-time argument, "*bf16", "i32", "tensordesc<bf16[128, 64]>"; with
    ":16" behind it the value is a multiple of 16, which Triton sees of arguments at run time. The
    type of a tuple is a tuple, in which a 1 stands for itself: Triton compiles it in.
    """

    name: str
    module: str  # dotted, inside the package: "swiglu.hopper.forward"
    kernel: str
    signature: Dict[str, Union[str, tuple]]
    constexprs: Dict[str, object]
    options: Dict[str, int]
    targets: Tuple[str, ...] = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


@dataclasses.dataclass
class Report:
    name: str
    target: str
    registers: int = 0
    spills: int = 0  # bytes
    shared: int = 0  # bytes
    hgmma: int = 0
    waits: int = 0
    lost: int = 0  # wgmmas that read at a wrong address
    serialized: bool = False
    error: str = ""


def load(path: str):
    """A module of the package in the tree by its dotted path."""
    if NAME not in sys.modules:
        if not (PACKAGE / "_ops.py").exists():
            subprocess.run([sys.executable, ROOT / "tools" / "build.py", "--in-place"], check=True)
        spec = importlib.util.spec_from_file_location(
            NAME, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
        )
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return importlib.import_module(f"{NAME}.{path}")


def _argument(kind, path: tuple, attributes: dict, constexprs: dict):
    """The type of an argument (or of each part of a tuple); the rest goes to the dicts."""
    if isinstance(kind, tuple):
        parts = enumerate(kind)
        return tuple(_argument(part, (*path, j), attributes, constexprs) for j, part in parts)
    if kind == 1:
        constexprs[path] = 1
        return "constexpr"
    kind, _, multiple = kind.partition(":")
    if multiple:
        attributes[path] = [["tt.divisibility", int(multiple)]]
    return kind


def source(variant: Variant):
    kernel = getattr(load(variant.module), variant.kernel)
    signature, constexprs, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in variant.signature:
            signature[argument] = _argument(
                variant.signature[argument], (i,), attributes, constexprs
            )
        else:
            signature[argument] = "constexpr"
            constexprs[(i,)] = variant.constexprs[argument]
    if hasattr(kernel, "is_gluon") and kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, constexprs, attributes)
    return ASTSource(kernel, signature, constexprs, attributes)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(BINARIES / tool), *arguments], capture_output=True, text=True)
    return done.stdout + done.stderr


def _read_cubin(cubin: bytes, report: Report) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    report.registers, report.spills = int(found.group(1)), int(found.group(2))
    report.hgmma = len(re.findall(r"\bHGMMA\.", sass))
    report.waits = len(re.findall(r"\bWARPGROUP\.DEPBAR", sass))
    report.lost = len(lost_descriptors(sass))


def _is_serialized(ptx: str) -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        said = _run("ptxas", "-v", "--gpu-name=sm_90a", "-o", "/dev/null", file.name)
    return "wgmma.mma_async instructions are serialized" in said


def _reuses_barriers(ptx: str) -> bool:
    """Whether a kernel that is not divided among warps (those keep their barriers to the end) may
    use an mbarrier's memory for something else before mbarrier.inval, which PTX forbids."""
    missing = ptx.count("mbarrier.init") > ptx.count("mbarrier.inval")
    return missing and "setmaxnreg" not in ptx


def _read_amdgcn(text: str, report: Report) -> None:
    report.registers = int(re.search(r"\.vgpr_count:\s*(\d+)", text).group(1))
    report.spills = 4 * int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text).group(1))


def compile_one(variant: Variant, target: str) -> Report:
    report = Report(variant.name, target)
    try:
        compiled = triton.compile(
            source(variant), target=TARGETS[target], options=dict(variant.options)
        )
    except Exception as error:  # a kernel that does not compile is a row of the table
        report.error = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:100]}"
        return report
    report.shared = compiled.metadata.shared
    if (getattr(compiled.metadata, "tmem_size", 0) or 0) > 512:  # ptxas is given a trap instead
        report.error = f"{compiled.metadata.tmem_size} of 512 columns of tensor memory"
        return report
    if "cubin" in compiled.asm:
        _read_cubin(compiled.asm["cubin"], report)
        report.serialized = report.hgmma > 0 and _is_serialized(compiled.asm["ptx"])
        if _reuses_barriers(compiled.asm["ptx"]):
            report.error = "an mbarrier is never invalidated: Triton may put something else there"
    else:
        _read_amdgcn(compiled.asm["amdgcn"], report)
    return report


def variants(family: Optional[str] = None) -> List[Variant]:
    """The VARIANTS of one tools/variants_<family>.py, or of all."""
    sys.modules.setdefault("compile_all", sys.modules[__name__])
    found = []
    for path in sorted((ROOT / "tools").glob(f"variants_{family or '*'}.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.VARIANTS
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family")
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--match", default="", help="only variants whose name holds this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"Triton {triton.__version__}")
    print("| kernel | target | registers | spills B | shared B | HGMMA | waits | |")
    print("|---|---|---|---|---|---|---|---|")
    reports = []
    for variant in variants(options.family):
        for target in variant.targets:
            if options.match not in variant.name or options.target not in (None, target):
                continue
            r = compile_one(variant, target)
            reports.append(r)
            note = r.error or ("serialized" if r.serialized else "")
            note = f"{r.lost} operands lost" if r.lost else note
            cells = (r.name, r.target, r.registers, r.spills, r.shared, r.hgmma, r.waits, note)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if options.json:
        rows = [dataclasses.asdict(r) for r in reports]
        options.json.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1))
    return 1 if any(r.error or r.lost for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
