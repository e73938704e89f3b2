"""Checks texts: length, words, names of files, and numbers against the records."""

import ast
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
# A docstring begins with a verb or a noun that names the thing: not with one of these.
FIRST = set(
    "what who whoever whom whose which how whether where wherever when as of nobody somebody "
    "anybody everybody whatever it is are was they this that these those room by told tells asks "
    "lies comes place ready room tail taken trials twin".split()
)
# Private words, and the field's words for them (CONTRIBUTING.md).
GLOSSARY = {
    "copy engine": "TMA", "processor": "SM, or CPU", "multiprocessor": "SM", "in turn":
    "interleaved, alternately", "lie alike": "have the same layout", "in 16 bits":
    "in bf16 and fp16", "16-bit inputs": "bf16 and fp16 inputs", "landed": "full", "tailed":
    "with an overlapped epilogue", "stand-in": "stub", "nobody": "no rank, null slot", "whoever":
    "callers that", "somebody": "a caller", "anybody": "any code", "undisturbed": "fast_path_ok",
    "untouched": "torch_unpatched", "seldom": "deferred", "who serves": "implementation",
    "bitwise repeatable": "deterministic",
}  # fmt: skip
PRIVATE = re.compile(r"\b(" + "|".join(GLOSSARY) + r")s?\b", flags=re.I)
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_ops.py")
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
    assert len(text.splitlines()) <= 125 and len(text.split()) <= 900
    numbers = text.split("## Speed")[1].split("\n## ")[0]
    assert 3 <= numbers.count("\n| ") - 1 <= 11, "one table of at most ten rows and a head"
    assert text.count("![") == 1, "one picture"


@pytest.mark.parametrize("path", PAGES + RECORDS, ids=name_of)
def test_nothing_is_told_of_the_occasion(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = BANNED.search(line)
        assert not found, f"{name_of(path)}:{number}: '{found.group()}'"


def docstrings(path) -> list:
    """(name, docstring) of a module and of the classes and functions in it."""
    tree = ast.parse(path.read_text())
    nodes = (ast.ClassDef, ast.FunctionDef)
    every = [tree, *(node for node in ast.walk(tree) if isinstance(node, nodes))]
    found = [(getattr(node, "name", path.stem), ast.get_docstring(node)) for node in every]
    return [(name, text) for name, text in found if text]


def private_words(text: str) -> list:
    return [f"'{word}': write {GLOSSARY[word.lower()]}" for word in PRIVATE.findall(text)]


def odd_beginning(text: str) -> bool:
    first = re.sub(r"^(The|A|An) ", "", text).split()[0]
    return first.strip(".,:;").lower() in FIRST


def test_docstrings_are_in_the_words_of_the_field():
    for path in SOURCES:
        name = path.relative_to(PACKAGE).as_posix()
        for owner, text in docstrings(path):
            assert not odd_beginning(text), f"{name}: {owner} begins with '{text.split()[0]}'"
            assert not private_words(text), f"{name}: {owner}: {private_words(text)}"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_pages_are_in_the_words_of_the_field(path):
    if "notes" in path.parts or path.name == "CHANGELOG.md":
        pytest.skip("a record")
    for number, line in prose(path):
        found = private_words(re.sub("`[^`]*`", "", line))
        assert not found, f"{name_of(path)}:{number}: {found}"


def test_words_that_are_not_the_fields_are_found():
    """The checks of words can fail."""
    assert odd_beginning("What serves a call.") and odd_beginning("The twin of it.")
    assert not odd_beginning("Returns the implementation of a call.")
    assert private_words("Copy engines move it.") == ["'Copy engine': write TMA"]
    assert private_words("TMA moves it; `logits_processor` is a name.") == []


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
    names = pictures.recorded()
    assert len(names) >= 6
    for name in names:
        picture = pictures.PICTURES[name]
        drawn = (RESULTS / f"{name}.png").read_bytes()
        stale = f"{name}.png: run python benchmarks/pictures.py"
        assert pictures.digest(picture).encode() in drawn, stale


def test_a_number_that_no_record_has_is_found(tmp_path):
    """The check of the pages can fail."""
    for folder in ("benchmarks", "docs"):
        (tmp_path / folder).mkdir()
    written = ("benchmarks/page.md", "README.md", "CARD.md")
    for source in (*(ROOT / "benchmarks").glob("*.py"), *(ROOT / name for name in written)):
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
