"""What people read: it is short, it names what exists, and its numbers are those of the records."""

import importlib
import json
import re
import subprocess
import sys

import pytest
from conftest import PACKAGE, ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / name for name in ("README.md", "CARD.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
RECORDS = sorted(RESULTS.glob("*.json"))

# Words for the occasion of a measurement or of the writing, and paths of one machine.
BANNED = [
    r"sessions?", r"earlier run", r"later run", r"second run", r"that record", r"since then",
    r"has since", r"have since", r"until now", r"the seed", r"before its rewriting",
    r"was fixed", r"/tmp/\S+", r"/home/\S+", r"/root/\S+", r"/work/\S+", r"printed_\w+",
]  # fmt: skip
BANNED = re.compile(r"(?<![\w./-])(?:" + "|".join(BANNED) + r")(?![\w-])", flags=re.I)
ENDING = r"\.(?:py|md|json|png|toml|nix)"
# a file in some folder, wherever it is named; a file's bare name in backticks or as a link
PATHS = re.compile(rf"(?<![\w/:.<-])((?:[\w.*-]+/)+[\w.,=*<>\[\]-]+{ENDING})(?!\w)")
FILES = re.compile(rf"[`(]([\w.,=*-]+{ENDING})(?:#[\w-]+)?[`)]")
ELSEWHERE = {"pyproject.toml", "_ops.py", "metadata.json", "setup.py"}  # of a project, of a build


def name_of(path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path) -> list:
    """(number, line) of the lines outside tables and code."""
    lines, code = [], False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code ^= line.startswith("```")
        if not code and not line.startswith(("|", "    ", "```")):
            lines.append((number, line))
    return lines


def test_the_front_page_is_one_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 900
    numbers = text.split("## Speed")[1].split("\n## ")[0]
    assert 3 <= numbers.count("\n| ") - 1 <= 11, "one table of at most ten rows and a head"
    assert text.count("![") == 1, "one picture"


@pytest.mark.parametrize("path", PAGES + RECORDS, ids=name_of)
def test_nothing_is_told_of_the_occasion(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = BANNED.search(line)
        assert not found, f"{name_of(path)}:{number}: '{found.group()}'"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_lines_are_not_too_long(path):
    for number, line in prose(path):
        long = len(line) > 120 and not line.startswith(("`python", "!["))
        assert not long, f"{name_of(path)}:{number} has {len(line)} characters"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_path_that_is_named_exists(path):
    text = path.read_text()
    for named in PATHS.findall(text):
        pattern = re.sub(r"(<\w+>|\[_<\w+>\])+", "*", named)
        found = [True for place in (ROOT, path.parent, PACKAGE) for _ in place.glob(pattern)]
        assert found, f"{name_of(path)}: {named}"
    for named in set(FILES.findall(text)) - ELSEWHERE:
        found = [*ROOT.glob(named), *path.parent.glob(named), *PACKAGE.rglob(named)]
        assert found, f"{name_of(path)}: {named}"


def test_pages_and_records_agree():
    command = [sys.executable, ROOT / "benchmarks" / "page.py", "--check"]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr


@pytest.mark.parametrize("path", RECORDS, ids=name_of)
def test_a_record_says_what_made_it(path):
    record = json.loads(path.read_text())
    script = record["command"].split()[1]
    assert record["command"].startswith("python ") and (ROOT / script).is_file(), script
    assert record.get("gpu") or record["device"]
    assert record["torch"] and re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])


def test_results_are_records_and_their_pictures():
    names = {path.stem for path in RECORDS}
    for path in RESULTS.iterdir():
        assert path.suffix in (".json", ".png") and path.stem in names, path.name
        assert path.name in (ROOT / "docs" / "benchmarks.md").read_text(), (
            f"{path.name} is not shown"
        )


def test_pictures_and_records_agree(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pictures = importlib.import_module("pictures")
    for name, picture in pictures.PICTURES.items():
        drawn = (RESULTS / f"{name}.png").read_bytes()
        stale = f"{name}.png: run python benchmarks/pictures.py"
        assert pictures.digest(picture).encode() in drawn, stale


def test_a_number_that_no_record_has_is_found(tmp_path):
    """The check of the pages can fail."""
    for folder in ("benchmarks", "docs"):
        (tmp_path / folder).mkdir()
    for source in (*(ROOT / "benchmarks").glob("*.py"), ROOT / "README.md", ROOT / "CARD.md"):
        (tmp_path / source.relative_to(ROOT)).write_text(source.read_text())
    (tmp_path / "benchmarks" / "results").mkdir()
    for source in RESULTS.glob("*"):
        (tmp_path / source.relative_to(ROOT)).write_bytes(source.read_bytes())
    command = [sys.executable, tmp_path / "benchmarks" / "page.py"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert subprocess.run([*command, "--check"]).returncode == 0
    page = tmp_path / "docs" / "benchmarks.md"
    page.write_text(page.read_text().replace("62.7", "61.7"))
    out = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert (
        out.returncode == 1 and "docs/benchmarks.md and benchmarks/results disagree" in out.stdout
    )
