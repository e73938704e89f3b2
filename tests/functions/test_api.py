"""The API guard: what callers of this version use stays; additions are welcome and recorded."""

import inspect
import json

import public_api
import pytest
from conftest import PACKAGE, ROOT
from sources import read_config

release_checks = pytest.importorskip("release_checks")  # it needs kernels
pytestmark = pytest.mark.kernels_ci

VERSION = read_config(ROOT)[0]["general"]["version"]
RECORD = ROOT / "tests" / f"api_v{VERSION}.json"


def test_callers_of_this_version_can_go_on():
    assert RECORD.exists(), f"{RECORD.name} is missing: run tools/public_api.py"
    broken = public_api.breaks(json.loads(RECORD.read_text()), public_api.public_api(PACKAGE))
    assert not broken, f"{public_api.BUMP}: this breaks callers of v{VERSION}: {'; '.join(broken)}"


def test_the_record_has_all_of_the_api():
    assert release_checks.api_problems(ROOT, read_config(ROOT)[0]) == []


def test_an_addition_that_nobody_recorded_is_found(tmp_path):
    package, record = tmp_path / "torch-ext" / "a_b", tmp_path / "tests" / "api_v3.json"
    package.mkdir(parents=True)
    record.parent.mkdir()
    config = {"general": {"name": "a-b", "version": 3}}
    (package / "__init__.py").write_text('__all__ = ["f"]\ndef f(x): ...\n')
    record.write_text(json.dumps(public_api.public_api(package)))
    assert release_checks.api_problems(tmp_path, config) == []
    (package / "__init__.py").write_text('__all__ = ["f"]\ndef f(x, y=None): ...\n')
    (found,) = release_checks.api_problems(tmp_path, config)
    assert found == "tests/api_v3.json does not have all of the API: run tools/public_api.py"


def test_source_says_what_python_says(kernel):
    for name, text in public_api.public_api(PACKAGE).items():
        found = kernel
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
        if text == "property":
            assert isinstance(found, property), name
            continue
        if not text.startswith("("):
            assert inspect.isclass(found) if text == "class" else repr(found) == text, name
            continue
        found = getattr(found, "__func__", found)  # a classmethod
        found = found.__init__ if inspect.isclass(found) else found
        spoken = [(p.name, p.kind, p.default) for p in inspect.signature(found).parameters.values()]
        scope = {}
        exec(f"def f{text}: ...", scope)
        read = [
            (p.name, p.kind, p.default) for p in inspect.signature(scope["f"]).parameters.values()
        ]
        assert read == spoken, name


def test_the_package_shows_its_public_names_and_its_version(kernel):
    shown = {name for name in dir(kernel) if not name.startswith("_")}
    assert shown == set(kernel.__all__)
    assert kernel.__version__ == str(VERSION) and "__version__" in dir(kernel)
    assert kernel.layers.SwiGLUMLP and kernel.runtime.verify  # found all the same
    assert {*kernel.layers.__all__} >= {name for name in dir(kernel.layers) if name[0] != "_"}


OLD = "(x, w, scale=None, *, block=64, **kwargs)"


@pytest.mark.parametrize(
    "new, why",
    [
        (OLD, None),
        ("(x, w, scale=None, bias=None, *, block=64, mode=1, **kwargs)", None),  # additions
        ("(x, w=None, scale=None, *, block=64, **kwargs)", None),  # a default gained
        ("(x, w, scale=None, block=64, **kwargs)", None),  # may now be positional, too
        ("(x, scale=None, *, block=64, **kwargs)", "was (x, w"),  # gone
        ("(w, x, scale=None, *, block=64, **kwargs)", "was (x, w"),  # another order
        ("(x, weight, scale=None, *, block=64, **kwargs)", "was (x, w"),  # another name
        ("(x, bias, w, scale=None, *, block=64, **kwargs)", "was (x, w"),  # one in between
        ("(x, w, scale=None, *, block=64, mode, **kwargs)", "new parameter mode"),
        ("(x, w, scale=1.0, *, block=64, **kwargs)", "the default of scale"),
        ("(x, w, scale, *, block=64, **kwargs)", "the default of scale"),
        ("(x, w, scale=None, *, block=64)", "no longer takes kwargs"),
        ("class", "was (x, w"),
    ],
)
def test_what_breaks_a_caller(new, why):
    found = public_api.breaks({"f": OLD, "g": OLD}, {"f": new, "g": OLD})
    assert (found == []) if why is None else found[0].startswith(f"f: {why}"), found


def test_a_name_or_a_flag_that_goes_breaks_a_caller():
    old = {"f": OLD, "layers.L": "class", "layers.L.has_backward": "True"}
    assert public_api.breaks(old, {"f": OLD, "layers.L": "class"}) == [
        "layers.L.has_backward is gone"
    ]
    new = {**old, "layers.L.has_backward": "False"}
    assert public_api.breaks(old, new) == ["layers.L.has_backward: was True, is False"]
