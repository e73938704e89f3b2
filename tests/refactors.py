"""Is a refactored module still served, and never wrongly?

    python tests/refactors.py [--kind mlp ...] [--family llama ...] [--every N]

Classes of transformers' models are rewritten, by the functions of refactor_forms.py, so that they
compute the same: a case counts only if the modules of the new class, without the package, give the
outputs of the original's. It is then kernelized, with the package's reference in a kernel's place,
and either served with these outputs, or left alone with a reason; all else is WRONG. A trap, and a
mutant, which differs from the original's class at one place and gives other outputs
(refactor_traps.py): a served one must give its own. Exits with 1 if one is WRONG.
"""

import argparse
import collections
import contextlib
import copy
import sys
import time
import warnings
from typing import Iterator, List, NamedTuple, Optional

import refactor_cases as cases
import refactor_forms as forms
import refactor_traps as traps
import torch
from conftest import load_package, submodule

# Relative to the largest value. What transformers computes in fp32 within a model of fp64 is summed
# in other orders; 16 bits: a few roundings of the module's own.
SAME, SAME_IN_HALF = 1e-5, 3e-2


class Result(NamedTuple):
    name: str
    kind: str
    state: str  # served, left, WRONG
    reason: str = ""
    mutant: bool = False


@contextlib.contextmanager
def everywhere():
    """The reference serves as a kernel would, also what no kernel serves on a CPU."""
    dispatch = submodule("runtime.dispatch")
    has, dispatch.has_kernels = dispatch.has_kernels, lambda *args: True
    try:
        with dispatch.force("reference"):
            yield
    finally:
        dispatch.has_kernels = has


def run(module, unit, dtype, names=None) -> list:
    return cases.run(module, unit.subject, dtype, unit, names)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:150]


def is_case(module, unit) -> bool:
    """Without the package it gives what the original gives, in fp64 and in 16 bits."""
    subject = unit.subject
    try:
        outputs = run(copy.deepcopy(module), unit, torch.float64)
        half = run(copy.deepcopy(module).bfloat16(), unit, torch.bfloat16)
    except Exception:
        return False
    return (
        cases.difference(outputs, subject.outputs) <= SAME
        and cases.difference(half, subject.outputs_in_half) <= SAME_IN_HALF / 3
    )


def wrong(module, unit, dtype, outputs, names=None, factor=1.0) -> Optional[str]:
    """How a served module differs from `outputs`."""
    try:
        found = run(module, unit, dtype, names)
    except Exception as error:
        return first_line(error)
    worst = cases.difference(found, outputs)
    limit = SAME_IN_HALF if dtype is torch.bfloat16 else SAME
    if not worst <= limit * factor:
        return f"differs by {worst:.1e} in {str(dtype)[6:]}"
    return None


def served(module):
    """(the module served, or None; the reason why it is left alone)."""
    kinds = {type(m) for m in module.modules() if type(m).__module__.split(".")[0] != "torch"}
    report = load_package().kernelize(module, trust=list(kinds))
    rows = [row for row in report.rows if row.module == ""]
    if not rows:
        return "it is not recognised as anything"
    return rows[0].reason


def dtypes_of(subject) -> tuple:
    """To compare in. In 16 bits a rounding may send a token of a layer to another expert."""
    if subject.kind in cases.IN_HALF:
        return (torch.bfloat16,)
    routed = any("Experts" in type(m).__name__ for m in subject.module.modules())
    return (torch.float64, torch.float32 if routed else torch.bfloat16)


def examine(module, unit) -> tuple:
    """(state, reason) of a case."""
    subject, reason = unit.subject, None
    for dtype in dtypes_of(subject):
        plain = copy.deepcopy(module).to(dtype)
        twin = copy.deepcopy(plain)
        with everywhere():
            try:
                why = served(twin)
            except Exception as error:
                return "WRONG", f"kernelize raises {first_line(error)}"
            undo = unit.after(type(module)) if unit.after is not None else None
            try:
                outputs = run(plain, unit, dtype)
                bad = wrong(twin, unit, dtype, outputs)
                for names in unit.calls_old:
                    words = {old: names.get(new, new) for old, new in unit.arguments.items()}
                    if wrong(plain, unit, dtype, outputs, words) is None:
                        bad = bad or wrong(twin, unit, dtype, outputs, words)
            finally:
                if undo is not None:
                    undo()
        if bad:
            return "WRONG", f"{'served, ' if why is None else 'left alone, '}{bad}"
        reason = reason or why
    return ("served", "") if reason is None else ("left", reason)


def built(name: str, subject, user: bool):
    """(unit, module) of a refactor of a class; raises Inapplicable."""
    unit = forms.apply(name, cases.Unit(subject))
    cls = cases.load(unit, user=user)
    try:
        module = cases.build(cls, unit)
        module.to(torch.float64)
    except Exception:
        cases.forget(cls)
        raise
    return unit, module


# what a rewriting may run into where it does not apply
NOT_THIS = (forms.Inapplicable, StopIteration, ValueError, IndexError, AttributeError, KeyError,
            TypeError, SyntaxError, NameError, RuntimeError)  # fmt: skip


def sample(family: str, kind: str, every: int) -> List[Result]:
    """Every n-th refactor that is for a kind of class, trap and mutant; of each kind others."""
    options = parsed(["--every", str(every), "--first", str(cases.KINDS.index(kind))])
    return list(results_of(cases.subject_of(family, kind), options))


def refactored(subject, options) -> Iterator[tuple]:
    """(label, unit, module) of the refactors that are cases."""
    mine = [n for n, f in forms.REFACTORS.items() if f.kinds is None or subject.kind in f.kinds]
    for name in mine[options.first % len(mine) :: options.every]:
        try:
            unit, module = built(name, subject, False)
        except NOT_THIS:
            continue
        if is_case(module, unit):
            yield name, unit, module


def results_of(subject, options) -> Iterator[Result]:
    every, first = options.every, options.first
    names = [n for n, f in traps.TRAPS.items() if f.kinds is None or subject.kind in f.kinds]
    wanted = traps.traps(subject, False, names[first::every]), traps.mutants(subject, every)
    for found in (refactored(subject, options), *wanted):
        for label, unit, module in found:
            try:
                name = f"{subject.name}.{label}"
                yield Result(name, subject.kind, *examine(module, unit), "~" in label)
            finally:
                cases.forget(type(module))


def served_originals(model, kinds) -> Iterator:
    """Subjects whose original is served; others are no subject of refactors."""
    for subject in model.subjects(kinds):
        unit = cases.Unit(subject)
        cls = cases.load(unit)
        subject.is_served = examine(copy.deepcopy(subject.module), unit)[0] == "served"
        cases.forget(cls)
        if subject.is_served:
            yield subject


def work(family: str, options) -> List[Result]:
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    load_package()
    found = []
    for subject in served_originals(cases.Model(family), options.kind):
        found += results_of(subject, options)
    return found


def table(results: List[Result]) -> str:
    lines = []
    for kind in [*cases.KINDS, "all"]:
        mine = [r for r in results if kind in (r.kind, "all")]
        counts = collections.Counter(("different" if r.mutant else "equal", r.state) for r in mine)
        said = [f"{what}, {state}: {count}" for (what, state), count in sorted(counts.items())]
        lines += [f"{kind:10} {'; '.join(said)}"] if said else []
    return "\n".join(lines)


def parsed(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", nargs="+", default=cases.KINDS, choices=cases.KINDS)
    parser.add_argument("--family", nargs="+", default=cases.FAMILIES)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th of all")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="beginning with this one")
    return parser.parse_args(arguments)


def main() -> int:
    options = parsed()
    warnings.filterwarnings("ignore")
    load_package()
    start, results = time.time(), []
    for result in (each for family in options.family for each in work(family, options)):
        results.append(result)
        if not result.mutant or result.state == "WRONG":
            print(f"{result.state:7}{result.name:60} {result.reason[:150]}".rstrip(), flush=True)
    print()
    print(table(results))
    print(f"{time.time() - start:.0f} s")
    return 1 if any(r.state == "WRONG" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
