"""The house: imports go down from room to room, files and functions stay small; the package can be
imported and computes, and the interpreter runs every portable kernel."""

import ast
import functools
import json
import re
import tokenize

import pytest
import torch
from conftest import PACKAGE, ROOT, assert_close, load_package, submodule
from sources import read_config

release_checks = pytest.importorskip("release_checks")  # it needs kernels

# A room is an operation, and a module imports from its own room and from rooms further left.
# `_ops` is generated. A new operation becomes a room between `runtime` and `layers`.
ROOMS = [
    "_ops", "runtime", "parallel", "loss", "norm", "swiglu", "projection", "lora", "fp8",
    "sampling", "experts", "attention", "gdn", "gdn_layer", "kda", "layers", "decoding", "models",
    "__init__",
]  # fmt: skip
OPERATIONS = ROOMS[3:-4]
# Inside an operation: api (and module, fused, project) -> ops -> reference, checks; the kernels of
# a chip are reached through runtime/dispatch.py alone. `chunks` and `call` hold what all agree on.
KINDS = {"chunks": 0, "call": 0, "reference": 1, "checks": 1, "portable": 1, "hopper": 2, "ops": 3}
KERNELS = ("portable", "hopper")
SHARED = ("chunks", "call")
API = 4
MAX_FILE, MAX_KERNEL, MAX_FUNCTION = 350, 150, 60
# Parameters. On the host more are a call (gdn/call.py); a kernel can take no object.
MOST, MOST_OF_A_KERNEL = 17, 36

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_ops.py")
OWN = [path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES]
every_room = pytest.mark.parametrize("room", sorted(set(OWN)))


@functools.lru_cache(None)
def tree_of(path) -> ast.Module:
    return ast.parse(path.read_text(), feature_version=(3, 9))


def files_of(room: str) -> list:
    return [path for path, own in zip(FILES, OWN) if own == room]


def place(parts) -> tuple:
    """(room, kind) of a module by the parts of its path, e.g. ("gdn", "hopper")."""
    if parts[0] not in OPERATIONS or len(parts) == 1:
        return parts[0], ""
    kind = parts[1].partition("_")[0]  # ops_train and checks_replay are ops and checks
    return parts[0], kind if kind in ("ops", "checks") else parts[1]


def at_import(tree) -> list:
    """The nodes that are executed when the module is imported: all but the bodies of functions."""
    nodes = [tree]
    for node in nodes:  # appended to while iterating
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)
    return nodes


def imported(path, nodes=None):
    """(parts of a module of this package, line) for each import in the file, or of these nodes."""
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(tree_of(path)) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            assert not any(a.name.startswith("fused_swiglu_gdn") for a in node.names)
        if not isinstance(node, ast.ImportFrom):
            continue
        assert node.level or not (node.module or "").startswith("fused_swiglu_gdn")
        if node.level:
            base = package[: len(package) - node.level + 1]
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                target = PACKAGE.joinpath(*base, alias.name)
                is_module = target.is_dir() or target.with_suffix(".py").exists()
                yield base + ((alias.name,) if is_module else ()), node.lineno


@every_room
def test_imports_go_down(room):
    for path in files_of(room):
        own, kind = place(path.relative_to(PACKAGE).with_suffix("").parts)
        for parts, line in imported(path):
            theirs, their_kind = place(parts)
            where = f"{path.name}:{line}: {own}/{kind} imports {'.'.join(parts)}"
            assert ROOMS.index(theirs) <= ROOMS.index(own), f"{where}, a room above it"
            if theirs not in OPERATIONS or own not in OPERATIONS:
                assert their_kind not in KERNELS, f"{where}: that is dispatch's job"
                continue
            assert KINDS.get(their_kind, API) <= KINDS.get(kind, API), (
                f"{where}, which stands on it"
            )
            if kind in KERNELS:
                assert their_kind in (*SHARED, *KERNELS), f"{where}: kernels stand on kernels"
            else:
                assert their_kind not in KERNELS, f"{where}: that is dispatch's job"
            if kind == "reference":
                assert their_kind in (*SHARED, "reference"), f"{where}: torch alone"


def picture() -> str:
    """The rooms by floors, highest first, each with the rooms that it imports from."""
    rooms = [room for room in ROOMS if (PACKAGE / room).is_dir()]
    below = {room: {p[0] for path in files_of(room) for p, _ in imported(path)} for room in rooms}
    floors = {}
    for room in rooms:  # from the left, so that those below a room have their floors
        below[room] = sorted(below[room] - {room, "_ops"})
        floors[room] = max([1 + floors[x] for x in below[room]], default=0)
    ground = " ".join(sorted(room for room in rooms if floors[room] == 1))
    high = sorted((-floors[room], room) for room in rooms if floors[room] > 1)
    lines = [
        f"{-floor}  {room:<12}" + " ".join(x for x in below[room] if x != "runtime")
        for floor, room in high
    ]
    return "\n".join([*lines, f"1  {ground}", "0  runtime"])


@pytest.mark.parametrize("room", ["decoding", "layers", "models"])
def test_a_large_room_says_what_its_files_are_for(room):
    """By their names; files in a folder of its own by that of the folder."""
    text = ast.get_docstring(tree_of(PACKAGE / room / "__init__.py"))
    parts = {path.relative_to(PACKAGE / room).with_suffix("").parts[0] for path in files_of(room)}
    missing = sorted(parts - {"__init__", *re.findall(r"\w+", text)})
    assert not missing, f"say in {room}/__init__.py what these files are for: {missing}"


def test_contributing_shows_the_rooms_as_they_are():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"```text\n{picture()}\n```" in page, f"the picture of CONTRIBUTING.md is:\n{picture()}"
    for room in ROOMS[1:-1]:
        assert f"| `{room}/` |" in page, f"CONTRIBUTING.md has no row for {room}/"


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


def exported() -> list:
    """The public names, whose signatures others have fixed."""
    public = ast.parse((PACKAGE / "__init__.py").read_text())
    return next(
        ast.literal_eval(node.value)
        for node in public.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )


@every_room
def test_sizes(room):
    for path in files_of(room):
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_FILE, f"{path} is longer than {MAX_FILE} lines"
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                limit = MAX_KERNEL if is_kernel(node) else MAX_FUNCTION
                where = f"{path.name}:{node.lineno}: {node.name}"
                assert code_lines(node) <= limit, f"{where} is too long"
                most = MOST_OF_A_KERNEL if is_kernel(node) else MOST
                taken = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                assert taken <= most or node.name in exported(), f"{where} takes {taken} parameters"


def foreign(path) -> set:
    """Top-level names of other packages that the module imports when it is imported."""
    names = set()
    for node in at_import(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@every_room
def test_python_39_grammar_and_no_optional_packages(room):
    for path in files_of(room):
        assert not foreign(path) & {"transformers", "kernels", "numpy", "huggingface_hub"}, path


def test_importing_the_package_imports_no_triton():
    """Where there is no Triton, or an old one, the package serves plain torch: whatever its
    __init__.py imports, directly or through others, does without. Kernels are imported by
    runtime/dispatch.py, and by functions that run beside kernels alone."""
    reached = [PACKAGE / "__init__.py"]
    for path in reached:  # appended to while iterating
        assert "triton" not in foreign(path), f"{path} imports triton; {reached_by(reached, path)}"
        for parts, _ in imported(path, at_import(tree_of(path))):
            folders = [
                PACKAGE.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1)
            ]
            module = PACKAGE.joinpath(*parts).with_suffix(".py")
            reached += [x for x in (*folders, module) if x in FILES and x not in reached]
    assert len(reached) > 100


def reached_by(paths: list, target) -> str:
    """The first of the files that imports the target, for a message."""
    parts = target.relative_to(PACKAGE).with_suffix("").parts
    found = [p for p in paths if parts in {x for x, _ in imported(p, at_import(tree_of(p)))}]
    return f"it is imported by {found[0]}" if found else "it is where imports begin"


def test_the_package_computes():
    x, w_gate, w_up = (torch.randn(n, 8) for n in (3, 5, 5))
    y = load_package().fused_swiglu(x, w_gate, w_up)
    assert_close(y, torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T))


@every_room
def test_every_module_is_imported(room):
    """Modules of kernels, too, which an import of the package does not reach."""
    pytest.importorskip("triton")
    for path in files_of(room):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            submodule(".".join(part for part in parts if part != "__init__"))


def names_in(function) -> set:
    """Names of all that the function calls or hands over."""
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def test_the_interpreter_runs_every_portable_kernel():
    """A kernel that no test launches under the interpreter could compute anything, as far as a
    machine without a GPU can tell. tests/interpreter.py writes the lists, and each session of the
    interpreter fails where a kernel of its list is no longer launched."""
    kernels, helpers = {}, set()
    for path in FILES:
        functions = [node for node in tree_of(path).body if isinstance(node, ast.FunctionDef)]
        for function in filter(is_kernel, functions):
            helpers |= names_in(function)
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            if parts[1] == "portable":
                kernels[".".join((*parts, function.name))] = function.name
    lists = json.loads((ROOT / "tests" / "interpreted.json").read_text()).values()
    launched = {name for names in lists for name in names}
    missing = sorted(name for name, own in kernels.items() if own not in helpers)
    missing = [name for name in missing if name not in launched]
    assert len(kernels) > 50 and not missing, (
        f"tests under the interpreter launch no {missing}: write one, and run python "
        "tests/interpreter.py with its file's name"
    )


@every_room
def test_nothing_printed_or_left_to_do(room):
    for path in files_of(room):
        with tokenize.open(path) as file:
            tokens = list(tokenize.generate_tokens(file.readline))
        comments = [token for token in tokens if token.type == tokenize.COMMENT]
        for comment in comments:
            if "TODO" in comment.string:
                assert "http" in comment.string or "version" in comment.string, comment.line
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path.name}:{node.lineno} prints"


def test_every_public_function_says_shapes_and_errors():
    tree = {
        path: tree_of(path)
        for path in PACKAGE.glob("*/*.py")
        if path.stem.startswith("api") or path.stem == "module"
    }
    public = exported()
    functions = [
        node
        for module in tree.values()
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name in public
    ]
    assert functions
    for function in functions:
        doc = ast.get_docstring(function) or ""
        assert "Returns:" in doc or "Args, Returns:" in doc or "Raises:" in doc, function.name


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("*.py")), ids=lambda path: path.name)
def test_tools_stand_on_no_tests(path):
    """What compares values lies with the tests, which import tools."""
    tests = {test.stem for test in (ROOT / "tests").rglob("*.py")}
    for node in ast.walk(tree_of(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert not tests & set(names), f"{path.name} imports {', '.join(tests & set(names))}"


def test_the_public_api_is_recorded():
    """tests/functions/test_api.py has it, too; `make check` runs this file."""
    assert release_checks.api_problems(ROOT, read_config(ROOT)[0]) == []


def test_tree_has_no_strays():
    allowed = {"benchmarks", "docs", "examples", "tests", "tools", "torch-ext", "build"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    strays = {name for name in folders - allowed if not name.startswith(".")}
    assert not strays, strays
