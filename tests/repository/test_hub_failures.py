"""Publishing that is refused or breaks on the way: one clear line, and no half of a version."""

import errno
import pathlib
import re
import shutil

import pytest
from checkout import Checkout
from hub_double import CUT, LOST
from hub_fixtures import (  # noqa: F401
    REPO,
    builds,
    checkout,
    expected,
    hub,
    known,
    one_line,
    publish,
    release,
    send,
    small,
    whole,
)  # fmt: skip

# ---- what is refused before anything is sent


def dirty(checkout):
    (checkout.root / "build.toml").write_text((checkout.root / "build.toml").read_text() + "\n")


def untracked(checkout):
    (checkout.package / "extra.py").write_text("")


def no_commit(checkout):
    shutil.rmtree(checkout.root / ".git")


def version_two_without_changelog(checkout):
    checkout.edit("build.toml", "version = 1", "version = 2")
    release(checkout)


def changelog_says_nothing(checkout):
    text = (checkout.root / "CHANGELOG.md").read_text()
    (checkout.root / "CHANGELOG.md").write_text(text[: text.index("## 1")] + "## 1\n")
    checkout.commit("empty")


def card_of_another_version(checkout):
    checkout.edit("CARD.md", "version={{ version }}", "version=7", "card")


def card_with_other_numbers(checkout):
    card = checkout.root / "CARD.md"
    before, row, after = re.split(r"(\n\| SwiGLU .*)", card.read_text(), maxsplit=1)
    card.write_text(before + re.sub(r"\| \d", "| 9", row) + after)
    checkout.commit("numbers")


def card_with_a_number_of_no_record(checkout):
    with (checkout.root / "CARD.md").open("a") as card:
        card.write("\n| decode | 0.21 ms |\n")
    checkout.commit("numbers")


def api_that_shrank(checkout):
    checkout.edit("torch-ext/fused_swiglu_gdn/__init__.py", ', "verify"]', "]", "smaller")


def api_not_recorded(checkout):
    checkout.edit(
        "torch-ext/fused_swiglu_gdn/runtime/verify.py",
        "expected: Optional[str] = None)", "expected: Optional[str] = None, deep: bool = False)",
        "larger",
    )  # fmt: skip


def without(name):
    def change(checkout):
        (checkout.root / name).unlink()
        checkout.commit("less")

    return change


def ending_in(name, text):
    def change(checkout):
        with (checkout.root / name).open("ab") as file:
            file.write(text.encode("latin-1"))
        checkout.commit("more")

    return change


@pytest.mark.parametrize(
    "change, says",
    [
        (without("build.toml"), "build.toml for reading: No such file"),
        (ending_in("build.toml", "[["), "TOML parse error at line"),
        (ending_in("build.toml", "\xff"), "did not contain valid UTF-8"),
        (without("CHANGELOG.md"), "CHANGELOG.md is missing"),
        (ending_in("CHANGELOG.md", "\xff"), "CHANGELOG.md is not UTF-8 text"),
        (without("CARD.md"), "CARD.md is missing"),
        (ending_in("CARD.md", "\xff"), "CARD.md is not UTF-8 text"),
        (ending_in("CARD.md", "{% if %}"), "cannot be filled in: Expected an expression"),
        (ending_in("CARD.md", "{{ a.b }}"), "CARD.md cannot be filled in: 'a' is undefined"),
        (ending_in("CARD.md", "{{ 1 / 0 }}"), "CARD.md cannot be filled in: division by zero"),
        (without("torch-ext/fused_swiglu_gdn/__init__.py"), "__init__.py is missing"),
        (ending_in("torch-ext/fused_swiglu_gdn/__init__.py", "("), "'(' was never closed"),
        (
            ending_in("torch-ext/fused_swiglu_gdn/__init__.py", '__version__ = "2"\n'),
            "build.toml is at version 1, the package's __version__ is 2",
        ),
        (dirty, "uncommitted changes: build.toml"),
        (untracked, "uncommitted changes: torch-ext/fused_swiglu_gdn/extra.py"),
        (no_commit, "no git checkout with a commit"),
        (version_two_without_changelog, "build.toml is at version 2, CHANGELOG.md's newest"),
        (changelog_says_nothing, "CHANGELOG.md says nothing under 1"),
        (card_of_another_version, "CARD.md speaks of version 7, build.toml of 1"),
        (card_with_other_numbers, "CARD.md and benchmarks/results disagree"),
        (card_with_a_number_of_no_record, "page.py writes no such row: | decode"),
        (api_that_shrank, "bump the version in build.toml: verify is gone"),
        (api_not_recorded, "does not have all of the API: run tools/public_api.py"),
    ],
)
def test_what_does_not_agree_is_named_and_nothing_is_asked(hub, checkout, send, change, says):
    change(checkout)
    code, _, err = send(checkout)
    assert code == 1 and says in one_line(err) and hub.log == []


def test_the_api_on_the_hub_holds_even_where_its_record_was_rewritten(hub, checkout, send):
    assert send(checkout)[0] == 0
    before, hub.log[:] = dict(hub.repos[REPO].branches), []
    api_that_shrank(checkout)
    (checkout.root / "tests" / "api_v1.json").unlink()
    release(checkout)
    code, _, err = send(checkout)
    assert code == 1 and "bump the version in build.toml" in one_line(err)
    assert "verify is gone" in err and hub.writes() == [] and hub.repos[REPO].branches == before
    checkout.edit("build.toml", "version = 1", "version = 2")
    checkout.edit("CHANGELOG.md", "## 1\n", "## 2\n\n- No verify.\n\n## 1\n")
    release(checkout)
    assert send(checkout)[0] == 0 and hub.repos[REPO].branches["v1"] == before["v1"]


# ---- whatever breaks on the way

WRITES = [
    r"/repos/create", r"/branch/publish-", r"/preupload/publish-", r"/commit/publish-",
    r"/branch/v1", r"/validate-yaml", r"/preupload/main", r"/commit/main",
]  # fmt: skip
STATUSES = [401, 409, 507]
BREAKS = [500, CUT, LOST]


@pytest.mark.parametrize(
    "path, what",
    [(path, what) for path in WRITES for what in BREAKS] + [(WRITES[3], what) for what in STATUSES],
)
def test_a_new_version_is_there_whole_or_not_at_all(hub, small, known, send, path, what):
    hub.fault("POST", path, what, times=99 if what != LOST else 1)
    code, _, err = send(small)
    repo = hub.repos.get(REPO)
    there = repo is not None and "v1" in repo.branches
    assert not there or whole(hub, expected(small), "v1")
    if code == 0:  # the client tried again, and well
        assert what == LOST
    else:
        assert ("v1 is there whole" in one_line(err)) == there, err
    hub.faults.clear()
    code, _, err = send(small)
    assert code == 0, err
    assert whole(hub, expected(small), "v1") and set(hub.repos[REPO].branches) == {"main", "v1"}
    assert b"version=1" in hub.repos[REPO].files("main")["README.md"]


@pytest.fixture(scope="module")
def two_commits(tmp_path_factory):
    """A checkout with its next commit made, and the one before: (checkout, first, second)."""
    checkout = release(Checkout(tmp_path_factory.mktemp("two") / "repo", small=True))
    first = checkout.git("rev-parse", "HEAD")
    (checkout.package / "extra.py").write_text('"""More."""\n')
    checkout.edit("CARD.md", "# fused-swiglu-gdn", "# Fused")
    return checkout, first, checkout.commit("more")


EXISTING = [r"/preupload/v1", r"/commit/v1", r"/commit/main"]


@pytest.mark.parametrize(
    "path, what", [(path, what) for path in EXISTING for what in BREAKS] + [(r"/commit/v1", 409)]
)
def test_a_version_that_is_out_changes_all_at_once(hub, two_commits, known, send, path, what):
    checkout, first, second = two_commits
    checkout.git("checkout", "-q", first)
    assert send(checkout)[0] == 0
    old = dict(hub.repos[REPO].branches)
    checkout.git("checkout", "-q", second)
    hub.fault("POST", path, what, times=99 if what != LOST else 1)
    code, _, err = send(checkout)
    head = hub.repos[REPO].branches["v1"]
    assert head == old["v1"] or whole(hub, expected(checkout), "v1")
    if code:
        said = "v1 is as it was" if head == old["v1"] else "v1 is there whole"
        assert said in one_line(err)
    hub.faults.clear()
    assert send(checkout)[0] == 0
    assert whole(hub, expected(checkout), "v1")
    assert b"# Fused" in hub.repos[REPO].files("main")["README.md"]


@pytest.mark.parametrize(
    "method, path, what, says",
    [
        ("GET", "whoami", 401, "refuses the token (401): log in"),
        ("GET", "/refs", 403, "may not do that in org (403)"),
        ("GET", "/refs", 500, "the Hub failed (500)"),
        ("GET", "/refs", CUT, "the connection to the Hub broke"),
        ("POST", "/repos/create", 403, "the approval that publishing kernels needs"),
        ("POST", "/repos/create", 404, "check org/fused-swiglu-gdn"),
        ("POST", "/repos/create", 409, "somebody else changed"),
        ("POST", "/repos/create", 429, "too many requests (429)"),
    ],
)
def test_a_refusal_at_the_start_leaves_nothing(hub, small, known, send, method, path, what, says):
    hub.fault(method, path, what, times=99)
    code, _, err = send(small)
    assert code == 1 and says in one_line(err) and hub.repos == {}
    assert err.rstrip().endswith("Nothing was changed")


def test_a_placeholder_does_not_go_out(hub, small, send):
    code, _, err = send(small, repo="other/name")
    assert code == 1 and hub.log == []
    assert "source is the placeholder https://github.com/org/fused-swiglu-gdn" in one_line(err)


def test_the_token_and_the_organisation_are_the_hubs_to_refuse(
    hub, small, checkout, send, tmp_path
):
    assert "refuses the token (401)" in one_line(send(small, token="hf_wrong")[2])
    ran = small.run("tools/publish.py", "--repo-id", REPO, env={"HF_HOME": str(tmp_path)})
    assert ran.returncode == 1 and "there is no token" in one_line(ran.stderr)
    checkout.edit("build.toml", "github.com/org/", "github.com/other/", "source")
    assert "may not do that in other (403)" in one_line(send(checkout, repo="other/name")[2])
    assert hub.repos == {}


@pytest.mark.parametrize(
    "repo", ["", "name", "a/b/c", "/name", "org/", "org/a b", "https://hub/org/name", "org/n\n"]
)
def test_a_repository_id_that_is_none(hub, small, send, repo):
    code, _, err = send(small, "--dry-run", repo=repo)
    assert code == 1 and "--repo-id must be organisation/name" in one_line(err) and hub.log == []


def test_a_token_that_cannot_be_sent(hub, small, send, tmp_path):
    for token in ("hf_s\u00e9cret", "hf_s\u20accret", "hf_se cret", "hf_se\x07cret"):
        code, _, err = send(small, token=token)
        assert code == 1 and "must be ASCII text" in one_line(err) and hub.log == []
        assert token not in err and token[3:] not in err
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_bytes(b"hf_\xff")
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": ""}
    ran = small.run("tools/publish.py", "--repo-id", REPO, env=env)
    assert ran.returncode == 1 and "must be ASCII text" in one_line(ran.stderr) and hub.log == []


@pytest.mark.parametrize(
    "address", ["http://me:pa55word@127.0.0.1:9", "https://pa55word@h", "pa55word", "", "ftp://h"]
)
def test_an_address_that_is_none_or_holds_a_password(small, send, address):
    code, out, err = send(small, "--dry-run", endpoint=address or " ")
    assert code == 1 and "HF_ENDPOINT must" in one_line(err) and "pa55word" not in out + err
    env = {"HF_ENDPOINT": address}
    ran = small.run("tools/publish.py", "--repo-id", REPO, "--dry-run", env=env)
    assert "pa55word" not in ran.stdout + ran.stderr


def test_no_network_is_one_line(small, send):
    code, _, err = send(small, endpoint="http://127.0.0.1:9")
    assert code == 1 and "cannot reach the Hub at http://127.0.0.1:9" in one_line(err)


def test_a_dry_run_without_a_network_says_what_it_found(small, send):
    code, out, err = send(small, "--dry-run", token=False, endpoint="http://127.0.0.1:9")
    assert code == 1 and "cannot reach the Hub at http://127.0.0.1:9" in one_line(err)
    assert out.startswith("built version 1 as ") and ": sha256:" in out


def test_a_second_maintainer_in_between_is_seen(hub, checkout, send, monkeypatch):
    assert send(checkout)[0] == 0
    repo = hub.repos[REPO]
    checkout.edit("CARD.md", "# fused-swiglu-gdn", "# Fused", "card")
    show = publish.show

    def meanwhile(*arguments):
        head = repo.branches["v1"]
        repo.branches["v1"] = repo.commit(repo.files(head), head)
        show(*arguments)

    monkeypatch.setattr(publish, "show", meanwhile)
    code, _, err = send(checkout)
    assert code == 1 and "somebody else changed" in one_line(err)


@pytest.mark.parametrize("files", [0, 7])
def test_a_full_disk_is_one_line_and_nothing_is_sent(hub, small, send, monkeypatch, files):
    write, left = pathlib.Path.write_bytes, [files]

    def full(path, data):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, data)

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    code, _, err = send(small)
    assert code == 1 and "the disk is full" in one_line(err) and hub.writes() == []
