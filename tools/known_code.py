"""Kernels that are known to compile as they should, and need not be compiled again: by a digest of
all that decides a kernel's machine code, TABLE has the bytes that a thread spills and the bytes of
shared memory that a program takes.

    python tools/known_code.py      # compiles what the tests ask for and is not known; writes TABLE

TABLE has a part for each Triton that it was written with, the others' parts stay as they are.
A kernel is in TABLE only if it compiled without an error, lost no operand and is not serialized. A
changed kernel, another Triton and other ways to look at machine code have other digests."""

import argparse
import hashlib
import inspect
import itertools
import json
import sys
from typing import Dict, Iterable, List, Set, Tuple

import compile_all
import pytest
import wgmma_descriptors
from in_tree import NAME, ROOT
from triton.runtime import jit

TABLE = ROOT / "tests" / "compiled.json"
READING = ("compile_one", "_take_apart", "_is_serialized", "_reuses_barriers", "_contracts_halves")
VERSION = compile_all.triton.__version__.partition("+")[0]
tables: Dict[str, dict] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
known: Dict[str, list] = tables.get(VERSION, {})
asked: Set[str] = set()


def reports_of(pairs: Iterable[Tuple[str, object]], chip: str) -> List[compile_all.Report]:
    """What compile_one reports of each (call, record); of those in TABLE, spills and shared memory
    alone."""
    pairs, reports = list(pairs), []
    for (call, record), key in zip(pairs, digests_of(record for _, record in pairs)):
        asked.add(key)
        if key not in known:
            report = compile_all.compile_one(call, chip, record)
            if not (report.error or report.lost or report.serialized):
                known[key] = [report.spills, report.shared]
        else:
            spills, shared = known[key]
            report = compile_all.Report(call, record.name, chip, spills=spills, shared=shared)
        reports.append(report)
    return reports


def digests_of(records: Iterable) -> List[str]:
    """Of a kernel's code and all code that it calls, of its arguments' types and constants, of the
    chip, of Triton, and of how machine code is looked at; but not of the lines of the code."""
    parts = [compile_all.triton.__version__, inspect.getsource(wgmma_descriptors)]
    parts += [inspect.getsource(getattr(compile_all, name)) for name in READING]
    reading, codes, digests = hashlib.sha256("".join(parts).encode()).hexdigest(), {}, []
    for kernel, _, *more, options, target in records:
        functions = (kernel, *filter(_is_code, more[1].values()))
        key = tuple(map(id, functions))
        if key not in codes:
            codes[key] = _code_of(functions)
        text = str([reading, codes[key], *more, sorted(options.items()), target])
        digests.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    return digests


def _is_code(value: object) -> bool:
    return isinstance(value, jit.JITCallable) and value.fn.__module__.startswith(NAME)


def _code_of(functions: Iterable) -> List[str]:
    """The source of functions of the package and of all that they may call, and the constants that
    they name. (Triton's own digest depends on what it made before.)"""
    found, texts = list(functions), []
    for function in found:  # appended to while iterating
        space, names = function.fn.__globals__, _names_in(function.fn.__code__)
        space = {**space, **inspect.getclosurevars(function.fn).nonlocals}
        texts.append(function.src)
        for name in [name for name in names if name in space]:
            value = space[name]
            values = [vars(value).get(n) for n in names] if inspect.ismodule(value) else [value]
            for value in values:
                if isinstance(value, type) and value.__module__.startswith(NAME):
                    texts.append(inspect.getsource(value))
                    values += filter(_is_code, vars(value).values())
                elif _is_code(value):
                    found += [value] if not any(value is known for known in found) else []
                elif not callable(value) and not inspect.ismodule(value):
                    texts.append(f"{name}: {value}")
    return texts


def _names_in(code: object) -> List[str]:
    """What a function's code names, functions within it included."""
    inner = [_names_in(value) for value in code.co_consts if inspect.iscode(value)]
    return sorted({*code.co_names, *itertools.chain(*inner)})


def main() -> int:
    """Runs tests/runtime/test_compile.py; writes what it asked for and found right."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    code = pytest.main([str(ROOT / "tests" / "runtime" / "test_compile.py")])
    write({key: known[key] for key in asked & {*known}})
    return int(code)


def write(found: Dict[str, list]) -> None:
    """Makes these this Triton's part of TABLE."""
    parts = {**tables, VERSION: found}
    texts = []
    for version in sorted(parts):
        rows = [f'"{key}": {json.dumps(row)}' for key, row in sorted(parts[version].items())]
        texts.append(f'"{version}": {{\n' + ",\n".join(rows) + "\n}")
    TABLE.write_text("{\n" + ",\n".join(texts) + "\n}\n")


if __name__ == "__main__":
    import known_code  # as the tests import it

    sys.exit(known_code.main())
