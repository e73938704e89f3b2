"""What kernelize serves in each release of transformers, beside the table tests/releases.json.

    python tools/releases.py                  # the newest patch of each minor from the oldest on
    python tools/releases.py 5.25.0           # one that came out today: what it lost, and why
    python tools/releases.py 5.24 --write     # the table gets what was found

A release is installed into a folder, with what it needs and this environment has not, and tried by
tests/release_counts.py in a process of its own: half a minute. It is compared with the table's row
of its minor, a new one with the newest row. The exit status is 1 if a module fewer is served, a
type cannot be made any more, or numbers differ.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from in_tree import PACKAGE, ROOT
from packaging.requirements import Requirement

FOLDER = ROOT / ".venv" / "releases"
TABLE = ROOT / "tests" / "releases.json"
COUNTS = ROOT / "tests" / "release_counts.py"
KINDS = ("mlp", "norm", "attention", "layer", "gdn", "kda", "experts", "router", "block")
MOST_NAMED = 6  # classes with the same reason


class NotTried(Exception):
    """A release that cannot be installed or imported here."""


def minor(version: str) -> tuple:
    """(5, 24) of "5.24.0"."""
    return tuple(int(part) for part in version.split(".")[:2])


def tried() -> tuple:
    """The oldest and the newest minor that the package says it was tested with."""
    return runpy.run_path(str(PACKAGE / "models" / "releases.py"))["TRIED"]


def read_table() -> dict:
    """{release: {type: {kind: modules that are served}}}, oldest first."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def write_table(table: dict) -> None:
    """A line for each type."""
    releases = []
    for release in sorted(table, key=minor):
        lines = [f"  {json.dumps(kind)}: {json.dumps(of)}" for kind, of in table[release].items()]
        releases.append(f" {json.dumps(release)}: {{\n" + ",\n".join(lines) + "\n }")
    TABLE.write_text("{\n" + ",\n".join(releases) + "\n}\n")


def pip(*arguments) -> str:
    patience = ("--retries", "1", "--timeout", "15", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", *arguments, *patience]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        errors = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")]
        raise NotTried(f"pip {arguments[0]}: {(errors or [ran.stderr.strip()])[-1]}")
    return ran.stdout


def available(wanted=()) -> list:
    """The newest patches of the minors on the index, oldest first: of all that are not older than
    the first that was tried, or of those that are wanted, "5.24" or "5.24.0"."""
    exact = [version for version in wanted if version.count(".") > 1]
    if exact and len(exact) == len(wanted):
        return exact
    listed = re.search(r"Available versions: (.*)", pip("index", "versions", "transformers"))
    newest = {}
    for version in listed.group(1).split(", ") if listed else ():
        newest.setdefault(minor(version), version)  # the index has the newest first
    if wanted:
        return exact + [newest[minor(v)] for v in wanted if v not in exact]
    return [newest[key] for key in sorted(newest) if key >= minor(tried()[0])]


def unmet(folder: pathlib.Path) -> list:
    """Requirements of the transformers in a folder that this environment does not meet."""
    (library,) = importlib.metadata.distributions(name="transformers", path=[str(folder)])
    found = []
    for requirement in map(Requirement, library.requires or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


def install(version: str, folder: pathlib.Path = FOLDER) -> pathlib.Path:
    """The folder with a release; makes it where it is not there, whole or not at all."""
    target = folder / version
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".install-") as scratch:
        new = pathlib.Path(scratch) / version
        quietly = ("install", "--quiet", "--no-compile", "--target", str(new))
        pip(*quietly, "--no-deps", f"transformers=={version}")
        missing = unmet(new)
        if missing:
            pip(*quietly, "--upgrade", *missing)
        try:
            new.rename(target)
        except OSError:  # another process has made it meanwhile
            if not target.exists():
                raise
    return target


def survey(folder=None, kinds=()) -> dict:
    """Results of tests/release_counts.py for a release in a folder, or for this environment's."""
    paths = [str(folder)] if folder else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(COUNTS), *kinds]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**env, "CUDA_VISIBLE_DEVICES": ""}
    )
    if ran.returncode != 0:
        raise NotTried("\n".join(ran.stderr.strip().splitlines()[-3:]))
    return json.loads(ran.stdout.splitlines()[-1])


def expected(table: dict, version: str) -> dict:
    """The table's row of a release's minor, or its newest one."""
    of_minor = [release for release in table if minor(release) == minor(version)]
    newest = max(table, key=minor, default=None)
    return table.get((of_minor or [newest])[0], {})


def losses(found: dict, table: dict) -> list:
    """Losses and wrong results of a release compared with the table: a line for each reason."""
    lines, fewer = [], {}
    if found.get("waits"):
        lines.append(f"generate, a wait in each token: {found['waits']}")
    for kind, of in found["types"].items():
        if of["wrong"]:
            lines.append(f"{kind}: {of['wrong']}")
    for kind, counts in expected(table, found["transformers"]).items():
        if kind not in found["types"]:
            lines.append(f"{kind}: this release has no such type")
            continue
        of = found["types"][kind]
        for part, count in counts.items():
            missing = count - of["served"].get(part, 0)
            if missing <= 0 or (of["wrong"] and not of["served"]):
                continue
            rows = of["left"].get(part, []) + [f"{kind}: the report has no row for it"] * missing
            for line in rows[:missing]:
                name, _, reason = line.partition(": ")
                fewer.setdefault((part, reason), []).append(name)
    for (part, reason), names in fewer.items():
        classes = list(dict.fromkeys(names))
        more = f" and {len(classes) - MOST_NAMED} more" if len(classes) > MOST_NAMED else ""
        named = ", ".join(classes[:MOST_NAMED])
        lines.append(f"{part}, {len(names)} fewer: {named}{more}: {reason}")
    return lines


def totals(types: dict) -> dict:
    """{kind: modules that are served} over all types."""
    return {kind: sum(of.get(kind, 0) for of in types.values()) for kind in KINDS}


def counts_of(found: dict) -> dict:
    return {kind: of["served"] for kind, of in found["types"].items()}


def row(found: dict, table: dict) -> str:
    """A release's served modules, each beside the table's."""
    of_table = expected(table, found["transformers"])
    there = {kind: of_table[kind] for kind in found["types"] if kind in of_table}
    have, want = totals(counts_of(found)), totals(there)
    cells = [f"{kind} {have[kind]}/{want[kind]}" for kind in KINDS]
    return f"{found['transformers']:10} {len(found['types'])} types  " + "  ".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("releases", nargs="*", help="5.24 (its newest patch) or 5.24.0")
    parser.add_argument("--types", nargs="+", default=[], help="model types, not all of them")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="of the installs")
    parser.add_argument("--processes", type=int, default=2, help="releases at a time")
    parser.add_argument("--write", action="store_true", help="write what was found to the table")
    options = parser.parse_args()
    if options.write and options.types:
        parser.error("--write wants all types")

    def look_at(version: str) -> dict:
        try:
            return survey(install(version, options.folder), options.types)
        except NotTried as error:
            return {"transformers": version, "error": str(error)}

    table, bad = read_table(), False
    if options.types:
        table = {r: {k: of[k] for k in options.types if k in of} for r, of in table.items()}
    try:
        versions = available(options.releases)
    except NotTried as error:
        print(error)
        return 1
    with ThreadPoolExecutor(options.processes) as pool:
        results = list(pool.map(look_at, versions))
    for found in results:
        if "error" in found:
            print(f"{found['transformers']}: not tried: {found['error']}")
            bad = True
            continue
        print(row(found, table))
        lines = losses(found, table)
        bad |= bool(lines)
        print("".join(f"  {line}\n" for line in lines), end="")
        if options.write:
            version = found["transformers"]
            table = {r: of for r, of in table.items() if minor(r) != minor(version)}
            table[version] = counts_of(found)
    if options.write:
        write_table(table)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
