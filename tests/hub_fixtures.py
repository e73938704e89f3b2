"""Fixtures of the tests that publish to the Hub's double and load from it."""

import os
import shutil
import time
from types import SimpleNamespace

import fresh
import pytest
from checkout import Checkout
from conftest import ROOT  # noqa: F401
from hub_double import TOKEN, Hub
from huggingface_hub import HfApi

publish = pytest.importorskip("publish")  # it needs kernels
REPO = "org/fused-swiglu-gdn"


@pytest.fixture
def hub():
    double = Hub()
    yield double
    double.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkout of a package of a few files that no test changes."""
    return release(Checkout(tmp_path_factory.mktemp("small") / "repo", small=True))


@pytest.fixture
def checkout(small, tmp_path):
    """One of a package of a few files, to change."""
    return small.copy(tmp_path / "repo")


def release(checkout, message="release"):
    """Records the API as it is and commits: what a maintainer does first."""
    ran = checkout.run("tools/public_api.py")
    assert ran.returncode == 0, ran.stderr
    checkout.commit(message)
    return checkout


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Function: publish.build, which copies what was built of a commit before."""
    own, done = publish.build, {}

    def build(root, out=None, repo_id=None):
        if out is None:
            return own(root)
        commit = root, Checkout.git(SimpleNamespace(root=root), "rev-parse", "HEAD"), repo_id
        if commit not in done:
            folder = tmp_path_factory.mktemp("builds") / "build"
            done[commit] = folder, own(root, folder, repo_id)
        shutil.copytree(done[commit][0], out)
        return done[commit][1]

    return build


@pytest.fixture
def known(builds, monkeypatch):
    """Commits that agree with themselves are looked at and built once."""
    monkeypatch.setattr(publish, "build", builds)
    monkeypatch.setattr(publish.release_checks, "problems", lambda *given: [])


@pytest.fixture
def send(hub, capsys, monkeypatch):
    """Function: tools/publish.py in this process; (exit code, what it printed, its errors)."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client's pauses before retries

    def run(checkout, *arguments, repo=REPO, token=TOKEN, endpoint=None):
        api = HfApi(endpoint=endpoint or hub.url, token=token)
        capsys.readouterr()
        code = publish.main(["--repo-id", repo, *arguments], api=api, root=checkout.root)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def user(hub, tmp_path):
    """Function: what Python code prints on a user's machine, which has a cache of its own."""
    home = tmp_path / "home"

    def run(code, *arguments, fails=False, **env):
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), **env}
        env.pop("HF_TOKEN", None)
        env.pop("LOCAL_KERNELS", None)
        ran = fresh.python("-c", code, *arguments, env=env, cwd=tmp_path)
        assert (ran.returncode != 0) == fails, ran.stderr
        return ran.stderr if fails else ran.stdout

    return run


def one_line(err):
    assert err.startswith("publish: ") and err.count("\n") == 1, err
    return err


def whole(hub, built, revision, repo=REPO):
    """The revision has the build and the benchmarks of a checkout, and nothing else of ours."""
    files = {p: d for p, d in hub.repos[repo].files(revision).items() if "/" in p}
    return files == built


_EXPECTED = {}


def expected(checkout):
    """{path on the version branch: content} of the commit that is checked out."""
    commit = checkout.root, checkout.git("rev-parse", "HEAD")
    if commit not in _EXPECTED:
        publish.build(checkout.root)
        files = publish.local_files(checkout.root, checkout.root / "build")
        _EXPECTED[commit] = {path: file.read_bytes() for path, file in files.items()}
    return _EXPECTED[commit]
