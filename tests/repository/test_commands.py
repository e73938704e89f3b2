"""Every command that a page prints is there, and takes the options that it is printed with."""

import json
import re
import shlex
import shutil
import subprocess

import fresh
import pytest
from conftest import ROOT
from setup_env import NOT_NEEDED_TO_RUN

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CARD.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
CODE = re.compile(r"```(\w*)[^\n`]*\n(.*?)```|`([^`]+)`", flags=re.S)
PYTHON = (".venv/bin/python", "python", "python3")
PROGRAMS = (*PYTHON, "make", "pip", "kernels")
OF_THE_READER = ("my_script.py", "load.py")
FILLED_IN = {"{{ repo_id }}": "org/name", "{{ version }}": "1"}


def words_of(code: str) -> list:
    """The words of a command without the variables before it; [] for other code."""
    try:
        words = shlex.split(code, comments=True)
    except ValueError:  # a quotation mark of its own
        return []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    named = len(words) > 1 and words[0] in PROGRAMS and words[1] not in OF_THE_READER
    return words if named else []


def printed(text: str) -> list:
    """(words of a command, options that the text names after it) in a page's order. Commands are
    inline code, and what follows a $ in a block of what was seen in a console."""
    for blank, value in FILLED_IN.items():
        text = text.replace(blank, value)
    found = []
    for kind, block, inline in CODE.findall(text):
        lines = [" ".join(inline.split())] if inline else []
        if kind == "console":
            lines = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
        for line in lines:
            if re.fullmatch(r"--[\w-]+", line):
                found[-1][1].append(line)
            elif words_of(line):
                found.append((words_of(line), []))
    return found


def as_for_python(words: list) -> list:
    """Arguments after Python's name in a command; [] for another program."""
    if words[0] in ("pip", "kernels"):
        named_only = words[0] == "kernels" and len(words) == 2
        return ["-m", *words, *["--help"] * named_only]
    return words[1:] if words[0] in PYTHON else []


def recipes(*words) -> list:
    """The Python commands by which make would make this; it fails where there is no such target."""
    ran = subprocess.run(
        ["make", "-n", "-B", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, f"make {' '.join(words)}: {ran.stderr}"
    return [words_of(line) for line in ran.stdout.splitlines() if line.startswith(PYTHON)]


def run(commands: list, folder) -> list:
    files = folder / "commands.json", folder / "results.json"
    files[0].write_text(json.dumps(commands))
    ran = fresh.python(ROOT / "tests" / "run_commands.py", *files, cwd=ROOT, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(files[1].read_text())


def wrong(words: list, options: list, result: dict) -> str:
    """Describes the fault of a command that was run; "" if there is none."""
    end, said = result["end"], result["said"]
    lacking = re.fullmatch(r"ModuleNotFoundError: No module named '(\w+)'", end)
    if lacking and lacking[1] in (*NOT_NEEDED_TO_RUN, "triton"):
        return ""  # which is not to be had on every machine
    one_line = said.count("\n") == 1 and ": needs a GPU, and torch" in said
    if end not in ("options read", "exit 0") and not (end == "exit 2" and one_line):
        return f"{shlex.join(words)}: {end}: {said}"
    unknown = [option for option in options if option not in result["options"]]
    return f"{shlex.join(words)} has no {', '.join(unknown)}" if unknown else ""


MISPRINTED = [
    (["tools/gone.py"], []),
    (["tools/tune.py", "--nonsense"], []),
    (["tools/publish.py", "--repo-id"], []),
    (["tools/releases.py"], ["--nonsense"]),
    (["-m", "pytest", "tests/gone.py"], []),
    (["-m", "kernels", "gone"], []),
    (["-m", "pip", "install", "--nonsense", "triton"], []),
]


def test_commands_of_python(tmp_path):
    """Printed commands have options that their programs accept, parsed in one shared process."""
    pytest.importorskip("kernels")
    pages = {page: printed(page.read_text()) for page in PAGES}
    assert len(pages[ROOT / "README.md"]) >= 5 and len(pages[ROOT / "CONTRIBUTING.md"]) >= 15
    commands = [(as_for_python(words), more) for found in pages.values() for words, more in found]
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    commands += [(as_for_python(words_of(entry)), []) for entry in hooks]
    if shutil.which("make"):
        made = recipes("demo", "test", "check", "bench", "build")
        assert len(made) >= 8
        commands += [(as_for_python(words), []) for words in made]
    unique = {json.dumps(command): command for command in commands if command[0]}
    commands = [*unique.values(), *MISPRINTED]
    results = run([words for words, _ in commands], tmp_path)
    assert len(results) == len(commands)
    found = [wrong(*command, result) for command, result in zip(commands, results)]
    bad, planted = found[: -len(MISPRINTED)], found[-len(MISPRINTED) :]
    assert not any(bad), "\n".join(filter(None, bad))
    assert all(planted)  # the check can fail


def test_targets_of_make():
    if shutil.which("make") is None:
        pytest.skip("needs make")
    pages = [page.read_text() for page in PAGES]
    commands = [words[1:] for page in pages for words, _ in printed(page) if words[0] == "make"]
    script = (ROOT / ".ci" / "run").read_text()
    commands += [words_of(line)[1:] for line in script.splitlines() if line.startswith("make ")]
    assert len(commands) >= 9
    makefile = (ROOT / "Makefile").read_text()
    for words in {tuple(words) for words in commands}:
        recipes(*words)
        variables = [word.split("=")[0] for word in words if "=" in word]
        assert all(f"\n{variable} ?=" in makefile for variable in variables), words
    with pytest.raises(AssertionError, match="gone"):
        recipes("gone")


def test_what_is_a_command():
    text = """Not `x --flag`. `make a B=1`, `C=2 python\n tools/b.py "c d"` (`--json`), `make`
```console
$ pip install e  # f
make nothing
```
```python
python = 1
```
"""
    assert printed(text) == [
        (["make", "a", "B=1"], []),
        (["python", "tools/b.py", "c d"], ["--json"]),
        (["pip", "install", "e"], []),
    ]
