"""Runs the crossings and writes docs/crossings.md.

    .venv/bin/python tests/crossings/table.py [--write] [WORD ..]

Prints the outcome of each pair whose name holds one of the words, or of all. --write keeps what was
found in outcomes.json, in which a pair that is not there is "equal", and makes the page of it.
"""

import argparse
import contextlib
import functools
import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Callable, List

HERE = Path(__file__).resolve().parent
FILE = HERE / "outcomes.json"
EQUAL = ("equal", "both refuse", "transformers alone refuses")
CELLS = {
    "equal": "=", "equal, by its own forwards": "own", "equal, by replays": "= graph",
    "both refuse": "both refuse", "transformers alone refuses": "= alone",
}  # fmt: skip


@functools.cache
def outcomes() -> dict:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def expected(pair) -> str:
    return outcomes().get(str(pair), "equal")


def kind(outcome: str) -> str:
    """The outcome without the words of an error."""
    return outcome.partition(":")[0]


def may_be(found: str, said: str, device: str) -> bool:
    """Whether a pair may have this outcome where the page says that: a result that is equal is
    always one, a refusal where the page has its sentence."""
    if kind(found).startswith(EQUAL):
        return kind(said).startswith(EQUAL) or device != "cpu"
    return kind(found) == kind(said) == "refuses" and found[:60] == said[:60]


def functions(note_of: Callable) -> List[str]:
    """The lines of the table of public functions: for each use what is equal and what is not."""
    from pairs import FUNCTION_USES, function_pairs

    rows: dict = {name: {} for name in FUNCTION_USES}
    for pair in function_pairs():
        rows[pair.use].setdefault(expected(pair), []).append(f"`{pair.subject}`")
    lines = ["| use | equal | refuses |", "|---|---|---|"]
    for name, found in rows.items():
        equal = found.pop("equal", [])
        total = len(equal) + sum(map(len, found.values()))
        said = f"all {total}" if len(equal) == total else f"{len(equal)} of {total}"
        refused = [f"{', '.join(x)} [{note_of(said)}]" for said, x in found.items()]
        lines.append(f"| {name} | {said} | {'; '.join(refused)} |")
    return lines


def text() -> str:
    from pairs import USES, function_pairs, pairs, reason
    from subjects import MODELS

    rows, notes, places = {}, [], {}

    def note_of(said: str) -> int:
        note = said.partition(": ")[2] or said
        if note not in notes:
            notes.append(note)
        return notes.index(note) + 1

    for pair in pairs():
        said = expected(pair)
        cell = CELLS.get(kind(said))
        if cell is None or reason(pair):
            cell = f"{cell or 'refuses'} [{note_of(reason(pair) or said)}]"
        rows.setdefault(pair.use, {})[pair.subject] = cell
    head = [f"| use | {' | '.join(MODELS)} |", "|---" * (1 + len(MODELS)) + "|"]
    for name, use in USES.items():
        module = use.run.__module__.partition("_")[2]
        cells = [rows[name].get(subject, "") for subject in MODELS]
        places.setdefault(module, []).append(f"| {name} | {' | '.join(cells)} |")
    tables = []
    for module, lines in places.items():
        tables += [f"## {TITLES[module]}", "", *head, *lines, ""]
    tables += ["## Public functions", "", FUNCTIONS, "", *functions(note_of), ""]
    words = [note.replace("|", "\\|").replace("\n", " ") for note in notes]
    notes = ["| | |", "|---|---|", *[f"| {n} | {x} |" for n, x in enumerate(words, 1)]]
    counts = {"models": len(pairs()), "functions": len(function_pairs())}
    return "\n".join([INTRODUCTION.format(**counts), *tables, "## Notes", "", *notes, ""])


TITLES = {
    "forward": "The forward of a model", "generate": "generate", "train": "Training",
    "peft": "Adapters and prompts of PEFT", "around": "What other libraries do to a model",
}  # fmt: skip
INTRODUCTION = """# Which uses go together

`tests/crossings/table.py` writes this page. {models} pairs of a use and a tiny random model are run
twice, with transformers alone and kernelized, and logits, losses, gradients, tokens and the states
of caches are compared. {functions} pairs of a use and a public function are compared with the
function in fp64.

| in a cell | |
|---|---|
| = | the results are equal, and kernels took part (on a CPU their torch form) |
| = graph | equal, and tokens were replays of a CUDA graph (on a CPU an emulated one) |
| own | equal: the modules run their own forwards in this use |
| = alone | transformers alone raises an error here, and the kernelized model gives a result |
| both refuse | transformers alone and the kernelized model raise the same error |
| refuses | the kernelized model raises the error of the note |

A number in brackets is a note at the end of the page: an error, what a pair needs to be run, or a
condition of the outcome.
"""


FUNCTIONS = """Kernels have no second derivatives: they refuse to be differentiated twice, and the
torch form of a function gives them. Results, gradients and what is written in place are compared
with the same call in fp64 on the CPU. The function is named before a comma, the way in which it is
called behind it (`tests/problems.py`)."""


@contextlib.contextmanager
def quiet():
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only pairs whose names hold one of these")
    parser.add_argument("--write", action="store_true", help="keep outcomes, and write the page")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    from pairs import function_pairs, pairs

    everything = [*pairs(), *function_pairs()]

    found: dict = {}
    try:
        with quiet():
            for pair in everything:
                if not options.words or any(word in str(pair) for word in options.words):
                    run(pair, options.device, found)
    finally:
        if options.write:
            write(found)


def run(pair, device: str, found: dict) -> None:
    """Runs a pair, prints its outcome and adds it to those that were found."""
    from pairs import outcome, why_not_here

    start, said = time.monotonic(), why_not_here(pair, device)
    if not said:
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = outcome(pair, device, Path(folder))
            except Exception as error:
                said = f"WRONG: {error!r}"
        found[str(pair)] = " ".join(said.split())[:200]
    print(f"{time.monotonic() - start:5.1f} s  {pair}: {said}", flush=True)


def write(found: dict) -> None:
    """Keeps the outcomes, and makes the page of them. What is wrong is no outcome to keep."""
    from conftest import ROOT
    from pairs import function_pairs, pairs

    outcomes.cache_clear()
    known = {str(pair) for pair in [*pairs(), *function_pairs()]}
    kept = {
        name: said
        for name, said in sorted({**outcomes(), **found}.items())
        if name in known and said != "equal" and kind(said) != "WRONG"
    }
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
    outcomes.cache_clear()
    (ROOT / "docs" / "crossings.md").write_text(text())


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
