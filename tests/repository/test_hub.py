"""Publish, pin, lock and load against a double of the Hub, with the real clients."""

import json
import re

import pytest
from hub_double import TOKEN
from hub_fixtures import (  # noqa: F401
    REPO,
    ROOT,
    checkout,
    expected,
    hub,
    one_line,
    publish,
    release,
    send,
    small,
    user,
    whole,
)  # fmt: skip
from huggingface_hub import HfApi

# ---- what a maintainer does


def test_the_command_publishes_and_a_second_run_sends_nothing(hub, small, tmp_path):
    env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
    ran = small.run("tools/publish.py", "--repo-id", REPO, "--dry-run", env=env)
    assert ran.returncode == 0 and hub.writes() == [], ran.stderr
    assert f"v1 (new version): {len(expected(small))} files to send" in ran.stdout
    ran = small.run("tools/publish.py", "--repo-id", REPO, env=env)
    assert ran.returncode == 0, ran.stderr
    assert "v1 (new version)" in ran.stdout and "done" in ran.stdout
    assert whole(hub, expected(small), "v1")
    card = hub.repos[REPO].files("main")["README.md"].decode()
    assert f'get_kernel("{REPO}", version=1)' in card
    assert set(hub.repos[REPO].branches) == {"main", "v1"}
    before, hub.log[:] = dict(hub.repos[REPO].branches), []
    ran = small.run("tools/publish.py", "--repo-id", REPO, env=env)
    assert ran.returncode == 0 and "nothing to send" in ran.stdout and hub.writes() == []
    assert hub.repos[REPO].branches == before


def test_the_card_its_numbers_and_the_changelog_agree_today():
    config, _ = publish.read_config(ROOT)
    version = config["general"]["version"]
    assert publish.release_checks.changelog_problems(ROOT, version) == []
    assert publish.release_checks.card_problems(ROOT, config, REPO) == []


def test_a_dry_run_reads_only(hub, small, send):
    code, out, _ = send(small, "--dry-run", token=False)
    built, digest, where, version, card, end = out.splitlines()
    files = len(expected(small))
    assert re.fullmatch(rf"built version 1 as \w+: {files} files, 0\.\d MB, and a card", built)
    assert re.fullmatch(r"  torch-cpu, .*: sha256:[0-9a-f]{64}", digest)
    assert code == 0 and where == f"{hub.url}/kernels/{REPO} (new repository)"
    assert (
        version
        == f"  v1 (new version): {len(expected(small))} files to send, 0 to remove, 0 unchanged"
    )
    assert card == "  main: card to send" and end == "dry run: nothing was sent"
    assert hub.writes() == [] and hub.repos == {}


def test_a_dry_run_finds_an_addition_that_nobody_recorded(hub, checkout, send):
    init, more = "torch-ext/fused_swiglu_gdn/__init__.py", "\n\n\ndef more(): ..."
    checkout.edit(init, '"layers", "verify"]', '"layers", "more", "verify"]' + more, "more")
    code, out, err = send(checkout, "--dry-run", token=False)
    line = "tests/api_v1.json does not have all of the API: run tools/public_api.py"
    assert code == 1 and one_line(err) == f"publish: {line}\n" and out == "" and hub.log == []
    release(checkout)
    assert send(checkout, "--dry-run", token=False)[0] == 0 and hub.writes() == []


def test_private_is_asked_of_a_new_repository(hub, small, send, monkeypatch):
    asked = {}
    create = HfApi.create_repo
    monkeypatch.setattr(HfApi, "create_repo", lambda *a, **k: asked.update(k) or create(*a, **k))
    assert send(small, "--private")[0] == 0
    assert asked["private"] is True


def test_a_pull_request_changes_no_branch(hub, checkout, send):
    code, _, err = send(checkout, "--create-pr")
    assert code == 1 and "needs the branch v1" in one_line(err) and hub.repos == {}
    assert send(checkout)[0] == 0
    before = dict(hub.repos[REPO].branches)
    checkout.edit("CARD.md", "# fused-swiglu-gdn", "# fused-swiglu-gdn!", "card")
    code, out, _ = send(checkout, "--create-pr")
    assert code == 0 and "/discussions/1" in out and "/discussions/2" in out
    assert hub.repos[REPO].branches == before
    (v1, proposed), (main, _) = hub.repos[REPO].pull_requests
    assert (v1, main) == ("v1", "main") and whole(hub, expected(checkout), proposed)


def test_a_changed_version_replaces_what_it_had(hub, checkout, send):
    assert send(checkout)[0] == 0
    first = hub.repos[REPO].branches["v1"]
    stale = checkout.package / "stale.py"
    stale.write_text("# not for long\n")
    checkout.commit("a file more")
    assert send(checkout)[0] == 0
    stale.unlink()
    checkout.commit("a file less")
    code, out, _ = send(checkout)
    assert code == 0 and "remove build/torch-cpu/stale.py" in out
    assert whole(hub, expected(checkout), "v1") and hub.repos[REPO].branches["v1"] != first


# ---- what a user does

SHOW = """
import sys
from kernels import get_kernel
kernel = get_kernel(sys.argv[1], **eval(sys.argv[2]))
print(kernel.verify(), hasattr(kernel, "news"))
"""


def test_load_by_version_and_find_a_tampered_file(hub, small, send, user):
    _, out, _ = send(small)
    digest, news = user(SHOW, REPO, "dict(version=1)").split()
    assert f"kernel.verify('{digest}')" in out and news == "False"
    files = hub.repos[REPO].files("v1")
    for path in list(files):  # somebody with access to the store, not to the build
        if path.endswith("/device.py"):
            files[path] += b"\nSTOLEN = True\n"
    home = str(small.root.parent / "another-home")
    told = user(SHOW, REPO, "dict(version=1)", fails=True, HF_HOME=home)
    assert "is not as it was built: changed runtime/device.py" in told


CLI = """
import sys
from kernels.cli import main
words = sys.argv[1:]
at = words.index("--")
for arguments in (words[:at], words[at + 1 :]):
    sys.argv[1:] = arguments
    main()
"""
LOCKED = """
import sys
from pathlib import Path
from kernels import get_kernel, get_locked_kernel
old = get_locked_kernel(sys.argv[1], lockfile=Path("kernels.lock"))
one, two = (get_kernel(sys.argv[1], version=n) for n in (1, 2))
assert len({k.__name__ for k in (old, one, two)}) == 3 and one.layers is not two.layers
by_commit = get_kernel(sys.argv[1], revision=sys.argv[2])
print(*[getattr(k, "news", 0) for k in (old, one, two, by_commit)])
"""


def test_lock_then_a_changed_v1_and_a_v2_all_in_one_process(hub, checkout, send, user, tmp_path):
    init = "torch-ext/fused_swiglu_gdn/__init__.py"
    assert send(checkout)[0] == 0
    first = hub.repos[REPO].branches["v1"]
    project = f'[tool.kernels.dependencies]\n"{REPO}" = 1\n'
    (tmp_path / "pyproject.toml").write_text(project)
    assert "Version 1:" in user(CLI, "lock", ".", "--", "versions", REPO)
    assert first in (tmp_path / "kernels.lock").read_text()

    checkout.edit(init, "from . import layers\n", "from . import layers\n\nnews = 1\n", "news")
    assert send(checkout)[0] == 0
    checkout.edit(init, "news = 1\n", "news = 2\n")
    checkout.edit("build.toml", "version = 1", "version = 2")
    checkout.edit("CHANGELOG.md", "## 1\n", "## 2\n\n- News.\n\n## 1\n")
    release(checkout)
    assert send(checkout)[0] == 0
    assert set(hub.repos[REPO].branches) == {"main", "v1", "v2"}
    assert b"version=2" in hub.repos[REPO].files("main")["README.md"]
    assert user(LOCKED, REPO, first).split() == ["0", "1", "2", "0"]


TRUSTED = """
import sys
from kernels import get_kernel
for trust in (True, [sys.argv[1]]):
    print(get_kernel(sys.argv[1], version=1, trust_remote_code=trust).verify())
"""


def test_an_untrusted_organisation_needs_the_users_word(hub, checkout, send, user):
    repo = "untrusted/fused-swiglu-gdn"
    checkout.edit("build.toml", "github.com/org/", "github.com/untrusted/", "source")
    assert send(checkout, repo=repo)[0] == 0
    refused = user(SHOW, repo, "dict(version=1)", fails=True)
    assert "is not from a trusted publisher" in refused
    both = user(TRUSTED, repo).split()
    assert len(both) == 2 and all(digest.startswith("sha256:") for digest in both)


DOWNLOAD = """
import sys
from huggingface_hub import HfApi
from kernels import verify
HfApi().snapshot_download(sys.argv[1], repo_type="kernel", revision="v1")
"""
OFFLINE = """
import sys
from pathlib import Path
from kernels import get_kernel, get_locked_kernel, load_kernel
repo, commit = sys.argv[1:]
for load in (
    lambda: get_kernel(repo, version=1),
    lambda: get_kernel(repo, revision=commit),
    lambda: get_locked_kernel(repo, lockfile=Path("kernels.lock")),
    lambda: load_kernel(repo, lockfile=Path("kernels.lock")),
):
    try:
        print(load().verify()[:6])
    except Exception as error:
        print(type(error).__name__)
"""


def test_offline_needs_a_whole_snapshot(hub, small, send, user, tmp_path):
    assert send(small)[0] == 0
    commit = hub.repos[REPO].branches["v1"]
    lock = [{"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": commit}}]
    (tmp_path / "kernels.lock").write_text(json.dumps(lock))
    user(SHOW, REPO, "dict(version=1)")
    away = {"HF_HUB_OFFLINE": "1"}
    not_enough = user(OFFLINE, REPO, commit, **away).split()
    assert "sha256" not in not_enough
    user(DOWNLOAD, REPO)
    hub.log.clear()
    assert user(OFFLINE, REPO, commit, **away).split() == ["sha256"] * 4 and hub.log == []


VERIFY = """
import sys
from kernels.cli import main
given = sys.argv[1:]
for more in ([], ["--all-variants"]):
    sys.argv[1:] = ["verify-signature", *given, *more]
    try:
        main()
    except SystemExit as stop:
        print("ended with", stop.code)
"""


def test_no_build_is_signed(hub, small, send, user):
    """docs/hub.md has the line; the loaders do not look for signatures."""
    assert send(small)[0] == 0
    one, every, end = user(VERIFY, REPO, 1).split("ended with 1\n")
    assert end == ""
    (line,) = one.splitlines()
    assert line.endswith(": cannot verify kernel integrity, signature not found")
    assert line.partition(": ")[2] in (ROOT / "docs" / "hub.md").read_text()
    variants = {line.partition(": ")[0][2:] for line in every.splitlines()}
    assert variants == {f"torch-{name}" for name in ("cpu", "cuda", "metal", "rocm", "xpu")}


def test_whose_signatures_kernels_accepts():
    """As docs/hub.md says: those of four workflows of one repository."""
    verify = pytest.importorskip("kernels.verify")  # which needs `cryptography`
    (policy,) = verify.DEFAULT_POLICIES
    assert policy.repo_id == "huggingface/kernels-community" and len(policy.signer_uris) == 4
    start = f"https://github.com/{policy.repo_id}/.github/workflows/"
    assert all(uri.startswith(start) for uri in policy.signer_uris)


def test_a_signature_stays_as_long_as_what_it_signs(hub, checkout, send):
    assert send(checkout)[0] == 0
    repo, name = hub.repos[REPO], "build/torch-cpu/metadata.json.sigstore"
    signed = {**repo.files("v1"), name: b"{}"}
    repo.branches["v1"] = repo.commit(signed, repo.branches["v1"])
    code, out, _ = send(checkout)
    assert code == 0 and "nothing to send" in out and repo.files("v1") == signed
    (checkout.package / "more.py").write_text("")
    checkout.commit("another build")
    code, out, _ = send(checkout)
    assert code == 0 and f"remove {name}" in out and name not in repo.files("v1")
