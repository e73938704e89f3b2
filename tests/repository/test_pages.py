"""Every block of Python that README.md, CARD.md and docs/*.md print is run, in a page's order, as
a reader would who types one after the other into one session.

A word behind ```python says why a block is not run here: `gpu`, `download` (of a checkpoint),
`processes` (of torchrun). The names and keywords by which it calls the kernel are checked instead.
"""

import ast
import inspect
import re

import pytest
import torch
from conftest import REPOSITORY, ROOT

PAGES = [ROOT / "README.md", ROOT / "CARD.md", *sorted((ROOT / "docs").glob("*.md"))]
FILLED_IN = {"{{ repo_id }}": REPOSITORY, "{{ version }}": "1"}  # of CARD.md, by tools/publish.py
MARKS = {"gpu", "download", "processes"}
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", flags=re.M | re.S)
# pages that are no instructions: measurements, and a generated table
NO_CALL = {"benchmarks.md", "crossings.md", "model_table.md"}
OURS = ("kernel", "ours")  # what pages call the package
pytestmark = pytest.mark.filterwarnings("ignore")


def blocks(text: str) -> list:
    """(line, words behind the language, code) of each block."""
    found = []
    for blank, value in FILLED_IN.items():
        text = text.replace(blank, value)
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        found.append((line, set(match[1].split()), match[2]))
    return found


ALL = [
    pytest.param(page, place, id=f"{page.relative_to(ROOT).as_posix()}:{line}")
    for page in PAGES
    for place, (line, _, _) in enumerate(blocks(page.read_text()))
]


def calls_of_the_kernel(code: str) -> list:
    """(name, keywords) of what is called as kernel.name(...) or ours.name(...)."""
    found = []
    for node in ast.walk(ast.parse(code)):
        named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if named and isinstance(node.func.value, ast.Name) and node.func.value.id in OURS:
            found.append((node.func.attr, {word.arg for word in node.keywords} - {None}))
    return found


def misprinted(code: str, kernel) -> list:
    """Names that the kernel has not, and keywords that a function does not take."""
    wrong = []
    for name, words in calls_of_the_kernel(code):
        if name not in kernel.__all__:
            wrong.append(name)
            continue
        taken = inspect.signature(getattr(kernel, name)).parameters
        wrong += [f"{name}({word}=)" for word in words - set(taken)]
    return wrong


@pytest.fixture(scope="module")
def sessions():
    """{page: (number of blocks that ran, names)}."""
    return {}


@pytest.fixture
def as_a_reader(repository, monkeypatch, own_functions):
    """In a built clone; what torch has for the whole process is put back."""
    pytest.importorskip("kernels")
    pytest.importorskip("transformers")
    monkeypatch.chdir(repository)
    threads, grad, random = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state()
    yield
    torch.set_default_device(None)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
    torch.set_rng_state(random)


def runs_here(marks: set) -> bool:
    return not marks or marks == {"gpu"} and torch.cuda.is_available()


@pytest.mark.parametrize("page, place", ALL)
def test_a_block(page, place, sessions, as_a_reader, kernel):
    found = blocks(page.read_text())
    line, marks, code = found[place]
    assert marks <= MARKS, f"{page.name}:{line}: {marks - MARKS} is no mark"
    assert not misprinted(code, kernel), misprinted(code, kernel)
    if not runs_here(marks):
        return
    done, names = sessions.get(page, (0, {"__name__": "__page__"}))
    if done > place:
        done, names = 0, {"__name__": "__page__"}
    torch.set_default_device(names.get("__device__"))
    for line, marks, code in found[done : place + 1]:
        if runs_here(marks):
            padded = "\n" * line + code  # so that a traceback has the page's line
            exec(compile(padded, str(page), "exec"), names)
    if torch.get_default_device().type != "cpu":  # one that the page has set
        names["__device__"] = torch.get_default_device()
    sessions[page] = place + 1, names


def test_the_front_page_shows_what_its_code_prints(as_a_reader, capsys):
    text = (ROOT / "README.md").read_text()
    shown = re.search(r"^```text\n(.*?)^```", text, flags=re.M | re.S)[1].splitlines()
    for _, _, code in blocks(text):
        exec(code, {"__name__": "__page__"})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    start = len(printed) - printed[::-1].index(shown[0]) - 1
    assert len(shown) >= 5 and printed[start : start + len(shown)] == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_a_call(page):
    """Before its first section a page shows a call that was run here."""
    if page.name in NO_CALL or page.parent == ROOT:
        return
    found = blocks(page.read_text().partition("\n## ")[0])
    assert found, f"{page.name} shows no call before its first section"
    assert any(not marks for _, marks, _ in found), f"{page.name}: its first call is not run"


def test_what_is_checked_can_fail(kernel):
    assert misprinted("kernel.kernelise(model)", kernel) == ["kernelise"]
    assert misprinted("kernel.kernelize(model, graphs=True)", kernel) == ["kernelize(graphs=)"]
    assert misprinted("other.kernelise(); kernel.restore(model)", kernel) == []
    text = "a\n```python gpu\nx = 1\n```\n```text\ny\n```\n```python\nz\n```\n"
    assert blocks(text) == [(2, {"gpu"}, "x = 1\n"), (8, set(), "z\n")]
    assert len(ALL) >= 30


def anchors(text: str) -> set:
    """Anchors of a page's headings, as GitHub makes them."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    heads = re.findall(r"^#+ (.*)$", plain, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"`[^`]*`", "", page.read_text())
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(other.read_text()), f"{page.name}: {target}#{anchor}"


def test_functions_have_all_public_names(kernel):
    text = (ROOT / "docs" / "functions.md").read_text()
    missing = [name for name in kernel.__all__ if f"kernel.{name}" not in text]
    assert not missing, missing
