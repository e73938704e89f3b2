"""Compiles what is launched, for every supported chip, without a GPU, and prints what came out.

    python tools/compile_all.py [--call "gdn prefill"] [--chip sm_90] [--kernel scan] [--json FILE]

The calls of tools/launched.py are recorded, so this is what users' calls compile. Of each kernel:
registers, spilled bytes and shared memory a program; for Hopper the wgmma instructions (HGMMA, or
QGMMA in FP8), the waits for them (DEPBAR), whether ptxas says that it serialized them (C7510 to
C7519: a wait behind every product), and whether it lost an operand (wgmma_descriptors.py: wrong
code). --json has the digest of the machine code, too: equal digests before and after a change say
that a kernel is the same.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, Tuple

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # machine code alone, whatever lines it came from

import launched  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from wgmma_descriptors import lost_descriptors  # noqa: E402

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclasses.dataclass
class Report:
    call: str
    kernel: str
    chip: str
    registers: int = 0
    spills: int = 0  # bytes
    shared: int = 0  # bytes
    hgmma: int = 0
    waits: int = 0
    lost: int = 0  # wgmmas that read at a wrong address
    serialized: bool = False
    code: str = ""  # digest of the machine code
    error: str = ""


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(BINARIES / tool), *arguments], capture_output=True, text=True)
    return done.stdout + done.stderr


def _digest(assembly: str) -> str:
    """Of instructions alone: no comments, which hold addresses and encodings, and no space."""
    text = re.sub(r"/\*.*?\*/|//.*|\s+", " ", assembly)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _take_apart(cubin: bytes, ptx: str, said: str, digest: bool) -> dict:
    """Fields of a report. The machine code is looked at (a second) where it has wgmmas, or for its
    digest."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name) if digest or "wgmma.mma_async" in ptx else ""
    registers, spills = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    hgmma = len(re.findall(r"\b[HQ]GMMA\.", sass))
    errors = {
        "an mbarrier is never invalidated: Triton may put something else there": _reuses_barriers,
        "a product of 16 bits is added before it is rounded": _contracts_halves,
    }
    return {
        "registers": registers, "spills": spills, "hgmma": hgmma,
        "waits": len(re.findall(r"\bWARPGROUP\.DEPBAR", sass)),
        "lost": len(lost_descriptors(sass)),
        "serialized": hgmma > 0 and _is_serialized(ptx, said),
        "code": _digest(sass) if digest else "",
        "error": ", ".join(error for error, has in errors.items() if has(ptx)),
    }  # fmt: skip


def _is_serialized(ptx: str, said: str) -> bool:
    """By what ptxas said, or says now where Triton had the kernel from its cache."""
    if not said:
        # what ptxas writes to is removed first: to root, /dev/null itself
        with tempfile.TemporaryDirectory() as folder:
            ptx_file, out = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            ptx_file.write_text(ptx)
            said = _run("ptxas", "-v", "--gpu-name=sm_90a", "-o", str(out), str(ptx_file))
    return "wgmma.mma_async instructions are serialized" in said


def _reuses_barriers(ptx: str) -> bool:
    """Whether a kernel that is not divided among warps (those keep their barriers to the end) may
    use an mbarrier's memory for something else before mbarrier.inval, which PTX forbids."""
    missing = ptx.count("mbarrier.init") > ptx.count("mbarrier.inval")
    return missing and "setmaxnreg" not in ptx


def _contracts_halves(ptx: str) -> bool:
    """Whether LLVM made multiply-adds of 16 bits of fp32 arithmetic between values that the kernel
    rounds. Before sm_90 a product of 16 bits is such an instruction, too."""
    newest = int(re.search(r"\.target sm_(\d+)", ptx).group(1)) >= 90
    return newest and re.search(r"\bfma\.rn\.b?f16", ptx) is not None


def _read_amdgcn(text: str, report: Report) -> None:
    report.registers = int(re.search(r"\.vgpr_count:\s*(\d+)", text).group(1))
    report.spills = 4 * int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text).group(1))
    report.code = _digest(text)


def compile_one(call: str, chip: str, record, digest: bool = False) -> Report:
    report, said = Report(call, record.name, chip), io.StringIO()
    try:
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(said):
            triton.knobs.nvidia.dump_ptxas_log = True
            compiled = triton.compile(record.source(), target=record.target, options=record.options)
    except Exception as error:  # a kernel that does not compile is a row of the table
        report.error = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:100]}"
        return report
    report.shared = compiled.metadata.shared
    if (getattr(compiled.metadata, "tmem_size", 0) or 0) > 512:  # ptxas is given a trap instead
        report.error = f"{compiled.metadata.tmem_size} of 512 columns of tensor memory"
    elif "cubin" in compiled.asm:
        asm = compiled.asm
        vars(report).update(_take_apart(asm["cubin"], asm["ptx"], said.getvalue(), digest))
    else:
        _read_amdgcn(compiled.asm["amdgcn"], report)
    return report


def kernels(chip: str, *match: str) -> List[Tuple[str, object]]:
    """(call, record) of each kernel that the calls launch on a chip, once for each that differs.

    match: only calls whose name holds one of these.
    """
    found = {}
    for call, record in launched.launches(chip, *match):
        kind = tuple(map(str, (record.name, *record[2:6])))
        found.setdefault(kind, (call, record))
    return list(found.values())


def print_row(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def compile_here(options) -> list:
    """In a process that has not imported the package, where the chip is of AMD: launchers choose
    by what torch says it was built for."""
    if launched.CHIPS[options.chip][1] is None:
        torch.version.hip = "pretended"
    rows = []
    for call, record in kernels(options.chip, options.call):
        if options.kernel in record.name:
            r = compile_one(call, options.chip, record, digest=True)
            note = f"{r.lost} operands lost" if r.lost else "serialized" if r.serialized else ""
            numbers = (r.registers, r.spills, r.shared, r.hgmma, r.waits)
            print_row(r.call, r.kernel, r.chip, *numbers, r.error or note)
            rows.append(dataclasses.asdict(r))
    return rows


def compile_each(options) -> list:
    """Every chip in a process of its own."""
    rows = []
    for chip in launched.CHIPS:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            more = ("--call", options.call, "--kernel", options.kernel, "--json", file.name)
            subprocess.run([sys.executable, __file__, "--chip", chip, *more])
            rows += json.loads(Path(file.name).read_text())["rows"]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--call", default="", help="only calls whose name holds this")
    parser.add_argument("--chip", choices=launched.CHIPS)
    parser.add_argument("--kernel", default="", help="only kernels whose name holds this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.chip is None:
        print(f"Triton {triton.__version__}")
        print_row(*"call kernel chip registers spills/B shared/B HGMMA waits note".split())
        print_row(*["---"] * 9)
    rows = compile_each(options) if options.chip is None else compile_here(options)
    if options.json:
        found = {"triton": triton.__version__, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1))
    return 1 if any(row["error"] or row["lost"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
