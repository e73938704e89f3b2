"""The oldest and the newest release of transformers, and this environment's, serve what the table
says; the range that texts give is the table's; and a release that serves less is seen."""

import copy
import json
import logging
import re
import sys

import pytest
import release_counts
import releases
import torch
from conftest import ROOT, submodule
from tiny_models import random_model

modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")
TABLE = releases.read_table()
RELEASES = sorted(TABLE, key=releases.minor)
TRIED = submodule("models.releases").TRIED
TYPES = [  # of each kind of module
    "llama", "qwen3_5_text", "qwen3_next", "gemma2", "phi3", "glm4_moe", "gpt_oss", "kimi_linear",
]  # fmt: skip
# what a release does not serve, though newer ones do: aria_text has no experts implementation
# there, and no router
LESS = {("5.17.0", "aria_text", "experts"), ("5.17.0", "aria_text", "router")}


@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_a_release_serves_what_the_table_says(release):
    try:
        found = releases.survey(releases.install(release), TYPES)
    except releases.NotTried as error:
        pytest.skip(str(error))
    assert found["transformers"] == release
    of_types = {release: {kind: TABLE[release][kind] for kind in TYPES if kind in TABLE[release]}}
    assert releases.losses(found, of_types) == []
    assert releases.counts_of(found) == of_types[release], "more is served"


def test_this_environment_serves_what_the_table_says():
    rows = releases.expected(TABLE, sys.modules["transformers"].__version__)
    for kind in ("llama", "phi3"):  # other tests are about this environment's, too
        found = release_counts.look_at(kind)
        assert found.wrong is None and found.served == rows[kind], kind
    waits = submodule("decoding.late").why_not_late
    assert waits(sys.modules["transformers"].LlamaForCausalLM) is None


def test_the_table_is_of_the_range_that_is_given():
    (major, oldest), (_, newest) = map(releases.minor, TRIED)
    assert [releases.minor(r) for r in RELEASES] == [(major, n) for n in range(oldest, newest + 1)]
    assert releases.tried() == TRIED


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_serves_what_the_newest_does(release):
    newest = TABLE[RELEASES[-1]]
    assert newest.keys() >= set(TYPES) and TABLE[release].keys() <= set(release_counts.TYPES)
    for kind, of in TABLE[release].items():
        less = {part for part, count in newest[kind].items() if of.get(part, 0) < count}
        assert less == {part for r, k, part in LESS if (r, k) == (release, kind)}, kind
    assert all(releases.totals(TABLE[release]).values())


@pytest.mark.parametrize("name", ["README.md", "docs/use.md"])
def test_texts_give_the_range(name):
    given = re.findall(r"transformers\s+(\d+\.\d+)\s+to\s+(\d+\.\d+)", (ROOT / name).read_text())
    assert given and set(given) == {TRIED}


@pytest.mark.parametrize("name", ["README.md", "docs/faq.md"])
def test_texts_give_the_range_of_torch_and_triton(name):
    """tests/torch_releases.json: {torch that the tests were run with: the Triton beside it}."""
    ran = json.loads((ROOT / "tests" / "torch_releases.json").read_text())
    text = " ".join((ROOT / name).read_text().split())
    for package, versions in (("torch", list(ran)), ("Triton", list(ran.values()))):
        given = re.findall(rf"{package} \(?(\d+\.\d+) to (\d+\.\d+)", text.replace("its ", ""))
        assert [tuple(map(releases.minor, pair)) for pair in given] == [
            (min(map(releases.minor, versions)), max(map(releases.minor, versions)))
        ]
    pinned = re.search(r"^torch==(.*)$", (ROOT / "requirements-dev.txt").read_text(), re.M)
    assert pinned.group(1) in ran


def found_as_in(release: str) -> dict:
    types = {
        kind: {"served": dict(of), "left": {}, "wrong": None} for kind, of in TABLE[release].items()
    }
    return {"transformers": release, "types": types}


def test_what_a_release_loses_is_told():
    found = found_as_in(RELEASES[-1])
    assert releases.losses(found, TABLE) == []
    types = found["types"]
    types["llama"]["served"]["attention"] = 0
    types["llama"]["left"]["attention"] = ["LlamaAttention: it is another"] * 2
    types["qwen2"]["served"]["attention"] = 1
    types["qwen2"]["left"]["attention"] = ["Qwen2Attention: it is another"]
    del types["mixtral"]["served"]["router"]
    types["mt5"].update(served={}, wrong="TypeError: no")
    types["phi3"]["wrong"] = "a prompt: differs by 1.0e-02 of the largest"
    types["qwen3"]["served"]["norm"] += 1
    del types["glm4"]
    found["waits"] = "its loop is of no known form"
    assert releases.losses(found, TABLE) == [
        "generate, a wait in each token: its loop is of no known form",
        "phi3: a prompt: differs by 1.0e-02 of the largest",
        "mt5: TypeError: no",
        "glm4: this release has no such type",
        "attention, 3 fewer: LlamaAttention, Qwen2Attention: it is another",
        "router, 2 fewer: mixtral: the report has no row for it",
    ]


def test_a_newer_release_is_compared_with_the_newest_row():
    found = copy.deepcopy(found_as_in(RELEASES[-1]))
    found["transformers"] = "9.1.0"
    assert releases.losses(found, TABLE) == []
    found["types"]["lfm2"]["served"]["layer"] -= 1
    assert releases.losses(found, TABLE) == ["layer, 1 fewer: lfm2: the report has no row for it"]
    old = found_as_in("5.17.0")
    old["transformers"] = "5.17.9"
    assert releases.losses(old, TABLE) == []


def test_the_tool_fails_and_writes(monkeypatch, tmp_path, capsys):
    found = found_as_in(RELEASES[-1])
    monkeypatch.setattr(releases, "TABLE", tmp_path / "table.json")
    monkeypatch.setattr(releases, "install", lambda version, folder: folder / version)
    monkeypatch.setattr(releases, "survey", lambda folder, kinds: found)
    releases.write_table(TABLE)
    assert releases.read_table() == TABLE
    command = ["releases.py", RELEASES[-1]]
    monkeypatch.setattr("sys.argv", command)
    assert releases.main() == 0
    found["types"]["llama"]["served"]["mlp"] = 1
    assert releases.main() == 1
    assert "  mlp, 1 fewer: llama: the report has no row for it\n" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*command, "--write"])
    releases.main()
    written = json.loads((tmp_path / "table.json").read_text())
    assert written[RELEASES[-1]]["llama"]["mlp"] == 1 and list(written) == RELEASES
    assert releases.main() == 0


def test_the_newest_patches_of_the_index_are_taken(monkeypatch):
    listed = "transformers (5.25.1)\nAvailable versions: 5.25.1, 5.25.0, 5.17.2, 5.17.0, 5.16.0"
    monkeypatch.setattr(releases, "pip", lambda *arguments: listed + "\n")
    assert releases.available() == ["5.17.2", "5.25.1"]
    assert releases.available(["5.17", "5.25.0"]) == ["5.25.0", "5.17.2"]


def test_wrong_numbers_are_seen(monkeypatch):
    reference = submodule("swiglu.reference")
    forward = reference.swiglu_fwd
    monkeypatch.setattr(reference, "swiglu_fwd", lambda *args: forward(*args) * 1.01)
    assert re.match("a prompt: differs by", release_counts.look_at("llama").wrong)
    monkeypatch.undo()
    monkeypatch.setitem(release_counts.RUNS, "mlp", ("another",))
    assert release_counts.look_at("llama").wrong == "what is served as mlp has not computed"


# what the report says of a newer release


def version_is(monkeypatch, version: str) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr(submodule("models.report"), "_warned", set())
    version_is(monkeypatch, "5.99.0.dev0")


def line(count: int) -> str:
    return (
        f"transformers 5.99.0.dev0 is newer than this build was tested with "
        f"({TRIED[0]} to {TRIED[1]}): modules left alone, maybe for that reason: {count}; "
        "results stay right"
    )


def kernelized(kernel, model):
    with submodule("runtime.dispatch").force("reference"):
        return kernel.kernelize(model)


def test_a_newer_release_that_leaves_modules_alone_is_told(kernel, newer, monkeypatch, caplog):
    attention, mlp = modeling_llama.LlamaAttention, modeling_llama.LlamaMLP
    model, theirs = random_model("llama"), attention.forward
    monkeypatch.setattr(attention, "forward", lambda self, *a, **k: theirs(self, *a, **k))
    with caplog.at_level(logging.WARNING):
        report = kernelized(kernel, model)
        assert report.untried == line(2)
        assert str(report).splitlines()[0] == report.untried
        monkeypatch.setattr(mlp, "forward", lambda self, x: x)
        report = kernelized(kernel, model)
    assert report.untried == line(4)
    told = [record.getMessage() for record in caplog.records if "newer" in record.getMessage()]
    assert told == [line(2)], "once in a process"
    kernel.restore(model)


def test_nothing_is_told_where_nothing_is_amiss(kernel, newer, monkeypatch):
    """All served; left alone because of a hook, an activation or the device; not transformers'."""
    model = random_model("llama")
    assert kernelized(kernel, model).untried is None
    kernel.restore(model)
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.ELU()
        layer.self_attn.forward = lambda *a, **k: None
    report = kernelized(kernel, model)
    assert len(report.left) == 4 and report.untried is None
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    report = kernelized(kernel, random_model("llama"))
    assert report.untried == line(2)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "__module__", "authors.model")
    assert kernelized(kernel, random_model("llama")).untried is None
    monkeypatch.setattr(submodule("runtime.device"), "has_gpu", lambda: False)
    report = kernel.kernelize(random_model("qwen3"))
    assert not report.served and report.untried is None


@pytest.mark.parametrize("version", ["5.17.0", TRIED[1] + ".3", "5.9.1", "", "unknown"])
def test_no_line_for_a_release_that_was_tried(monkeypatch, version):
    version_is(monkeypatch, version)
    assert submodule("models.releases").untried() is None


@pytest.mark.parametrize("version", ["5.99.0", "6.0.0", "10.0"])
def test_a_newer_version_is_told_by_its_numbers(monkeypatch, version):
    version_is(monkeypatch, version)
    assert submodule("models.releases").untried() == version
