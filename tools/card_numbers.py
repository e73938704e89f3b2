"""Whether the numbers in CARD.md's and README.md's tables are those of benchmarks/results.

The table between page.py's two comments must be what page.py writes. Any other row with numbers
ends in a comment that names a file of benchmarks/results:

    | prefill, 4096 tokens | 0.31 ms | 0.53 ms | 1.7x | <!-- gdn_chunk_h200.json -->

Each number behind the first cell must be a number in that file, rounded as it is written; one with
an x may also be the ratio of two numbers of its row.
"""

import json
import re
import subprocess
import sys

FILES = ("CARD.md", "README.md")
WRITTEN = re.compile(r"<!-- numbers: .*?<!-- end of numbers -->", flags=re.S)
NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(x?)(?![\w.]*\d)")
SOURCE = re.compile(r"<!--\s*(\S+\.json)\s*-->")


def leaves(value):
    """Every number in a JSON value."""
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from leaves(inner)


def shown_as(value, text):
    digits = len(text.partition(".")[2])
    return abs(value - float(text)) <= 0.5000001 * 10**-digits


def row_problem(row, results):
    source = SOURCE.search(row)
    cells = SOURCE.sub("", row).strip().strip("|").split("|")[1:]
    numbers = NUMBER.findall(" | ".join(cells))
    if not numbers:
        return None
    if source is None:
        return "names no file of benchmarks/results"
    file = results / source.group(1)
    if not file.is_file():
        return f"names {source.group(1)}, which is not in benchmarks/results"
    known = set(leaves(json.loads(file.read_text())))
    plain = [float(text) for text, times in numbers if not times]
    ratios = {a / b for a in plain for b in plain if b}
    for text, times in numbers:
        candidates = known | ratios if times else known
        if not any(shown_as(value, text) for value in candidates):
            return f"{text}{times} is not in {source.group(1)}"
    return None


def written_problems(root, name):
    command = [sys.executable, root / "benchmarks" / "page.py", "--check", name]
    out = subprocess.run(command, capture_output=True, text=True)
    return out.stdout.splitlines() or ([] if out.returncode == 0 else [out.stderr.strip()])


def problems(root):
    """One line for each table that its source does not bear out."""
    found = []
    for name in FILES:
        if not (root / name).exists():
            continue
        text = (root / name).read_text()
        if WRITTEN.search(text):
            found += written_problems(root, name)
        for row in WRITTEN.sub("", text).splitlines():
            problem = row_problem(row, root / "benchmarks" / "results") if row[:1] == "|" else None
            if problem:
                found.append(f"{name}, row '{row.strip('| ').split('|')[0].strip()}': {problem}")
    return found
