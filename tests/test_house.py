"""The house: imports go down the storeys, siblings never meet, files and functions stay small."""

import ast
import tokenize

import pytest
from conftest import PACKAGE, ROOT

# A module may import from storeys below its own. `_ops` is generated.
STOREYS = [
    ("reference", "common", "portable", "hopper"),  # see SIBLINGS for what these may not do
    ("dispatch",),
    ("checks",),
    ("ops",),
    ("functional",),
    ("modules", "layers"),
    ("mapping",),
    ("__init__",),
]
GROUND = ("_ops", "chunks", "device", "facts", "tuning", "verify")
STOREY = {name: level for level, names in enumerate(STOREYS) for name in names}
SIBLINGS = {"reference": set(), "common": set(), "portable": {"common"}, "hopper": {"common"}}
MAX_FILE, MAX_KERNEL, MAX_FUNCTION = 400, 150, 60

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_ops.py")
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]


def top(path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """(name of the top module or folder of this package, line) for each import in the file."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(a.name.startswith("fused_swiglu_gdn") for a in node.names)
        if not isinstance(node, ast.ImportFrom):
            continue
        assert node.level or not (node.module or "").startswith("fused_swiglu_gdn")
        if node.level != depth:  # another package's, or within the same folder
            continue
        if node.module:
            yield node.module.split(".")[0], node.lineno
        else:
            for alias in node.names:
                yield alias.name, node.lineno


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_go_down(path):
    mine = top(path)
    for name, line in imported(path):
        if name == mine or name in GROUND:
            continue
        assert mine not in GROUND, f"{path.name}:{line}: {mine} stands on the ground"
        if mine in SIBLINGS:
            assert name in SIBLINGS[mine], f"{path.name}:{line}: {mine} must not import {name}"
            continue
        assert name in STOREY, f"{path.name}:{line}: {name} has no storey"
        assert STOREY[name] < STOREY[mine], f"{path.name}:{line}: {mine} imports {name} above it"
        assert name not in ("portable", "hopper", "common"), f"{path.name}:{line}: dispatch's job"


def is_kernel(function) -> bool:
    names = [
        node.attr for d in function.decorator_list for node in ast.walk(d) if hasattr(node, "attr")
    ]
    return "jit" in names


def code_lines(function) -> int:
    """Lines of a function without its docstring."""
    doc = function.body[0]
    spared = 0
    if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
        spared = doc.end_lineno - doc.lineno + 1
    return function.end_lineno - function.lineno + 1 - spared


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_sizes(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE, f"{path} is longer than {MAX_FILE} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            limit = MAX_KERNEL if is_kernel(node) else MAX_FUNCTION
            assert code_lines(node) <= limit, f"{path.name}:{node.lineno}: {node.name} is too long"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_python_39_grammar_and_lazy_triton(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    names = {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else
                     [alias.name for alias in node.names])
    }  # fmt: skip
    if "triton" in names:
        assert top(path) in ("portable", "hopper", "common"), f"{path.name} imports triton"
    assert not names & {"transformers", "kernels", "numpy", "huggingface_hub"}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_nothing_printed_or_left_to_do(path):
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    for comment in comments:
        if "TODO" in comment.string:
            assert "http" in comment.string or "version" in comment.string, comment.line
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{path.name}:{node.lineno} prints"


def test_every_public_function_says_shapes_and_errors():
    tree = {
        path.stem: ast.parse(path.read_text()) for path in (PACKAGE / "functional").glob("*.py")
    }
    public = ast.parse((PACKAGE / "__init__.py").read_text())
    exported = next(
        ast.literal_eval(node.value)
        for node in public.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    functions = [
        node
        for module in tree.values()
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name in exported
    ]
    assert functions
    for function in functions:
        doc = ast.get_docstring(function) or ""
        assert "Returns:" in doc or "Args, Returns:" in doc or "Raises:" in doc, function.name


def test_tree_has_no_strays():
    allowed = {"benchmarks", "docs", "examples", "tests", "tools", "torch-ext", "build"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    strays = {name for name in folders - allowed if not name.startswith(".")}
    assert not strays, strays
