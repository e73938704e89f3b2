"""Publishes the committed tree to the Hub: the build to branch v<version>, the card to main.

    python tools/publish.py --repo-id org/name [--dry-run] [--create-pr] [--private]

A version goes out in one commit. The branch of a new version is made last, on that commit, so that
nobody ever loads a part of it. What is already there is not sent again; a second run mends a first
that was cut short.
"""

import argparse
import contextlib
import hashlib
import pathlib
import runpy
import sys
import tempfile
import typing

import hub_errors
import release_checks
from build import benchmark_files, build
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars
from public_api import BUMP, breaks, public_api
from sources import ROOT, package_dir, read_config

KERNEL = {"repo_type": "kernel"}


class Stop(Exception):
    """A line for the maintainer; the Hub is as it was."""


class Plan(typing.NamedTuple):
    """State of the Hub and the changes to make."""

    repo_id: str
    branch: str  # v<version>
    heads: typing.Optional[dict]  # {branch: commit} on the Hub; None where there is no repository
    base: typing.Optional[str]  # the commit that ours follows
    add: dict  # {path in the repository: local file}, new or changed
    delete: list  # paths there that the build no longer has
    unchanged: int
    variant: typing.Optional[str]  # a build/<variant>/ there that can be looked at
    card: typing.Optional[pathlib.Path]  # None where README.md is the same already

    @property
    def is_new(self):
        return self.heads is None or self.branch not in self.heads


def local_files(root, built):
    """{path in the repository: local file} of the version branch."""
    files = [path for path in built.rglob("*") if path.is_file() and path.parent != built]
    found = {f"build/{path.relative_to(built).as_posix()}": path for path in files}
    for path in benchmark_files(root):
        found[f"benchmarks/{path.name}"] = path
    return dict(sorted(found.items()))


def git_blob(path):
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def remote_files(api, repo_id, revision):
    """{path: git blob id} on the Hub at a commit."""
    entries = api.list_repo_tree(repo_id, recursive=True, revision=revision, **KERNEL)
    return {entry.path: entry.blob_id for entry in entries if hasattr(entry, "blob_id")}


def branch_heads(api, repo_id):
    return {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id, **KERNEL).branches}


def make_plan(api, repo_id, version, files, card):
    branch = f"v{version}"
    try:
        heads = branch_heads(api, repo_id)
    except RepositoryNotFoundError:
        return Plan(repo_id, branch, None, None, files, [], 0, None, card)
    if "main" not in heads:
        raise Stop(f"{repo_id} has no branch main")
    base = heads.get(branch, heads["main"])
    there = remote_files(api, repo_id, base)
    add = {path: file for path, file in files.items() if there.get(path) != git_blob(file)}
    ours = [path for path in there if path.startswith(("build/", "benchmarks/"))]
    same = (path for path in files if path.endswith("/metadata.json") and path not in add)
    delete = sorted(set(ours) - set(files) - {f"{path}.sigstore" for path in same})
    main = there if base == heads["main"] else remote_files(api, repo_id, heads["main"])
    same_card = main.get("README.md") == git_blob(card)
    variants = [path.split("/")[1] for path in ours if path.count("/") == 2]
    return Plan(
        repo_id, branch, heads, base, add, delete, len(files) - len(add),
        min(variants, default=None), None if same_card else card,
    )  # fmt: skip


def check_published_api(api, plan, new):
    """A version that is out keeps what it exports: the build there is read, not run."""
    if plan.is_new or plan.variant is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        api.snapshot_download(
            plan.repo_id, revision=plan.base, local_dir=folder,
            allow_patterns=f"build/{plan.variant}/*.py", **KERNEL,
        )  # fmt: skip
        published = pathlib.Path(folder, "build", plan.variant)
        if not (published / "__init__.py").exists():
            return
        try:
            old = public_api(published)
        except (SyntaxError, KeyError, ValueError) as error:
            raise Stop(f"cannot read the API of the {plan.branch} on the Hub: {error}") from error
    broken = breaks(old, new)
    if broken:
        raise Stop(f"{BUMP}: callers of the {plan.branch} on the Hub break: {'; '.join(broken)}")


def send_version(api, plan, identity, create_pr):
    """The version's commit, by which it appears or changes all at once."""
    operations = [CommitOperationAdd(path, file) for path, file in plan.add.items()]
    operations += [CommitOperationDelete(path, is_folder=False) for path in plan.delete]
    commit = {
        "commit_message": f"{plan.branch}: build {identity}", "parent_commit": plan.base, **KERNEL,
    }  # fmt: skip
    if not plan.is_new:
        return api.create_commit(
            plan.repo_id, operations, revision=plan.branch, create_pr=create_pr, **commit
        )
    aside = f"publish-{plan.branch}-{identity}"
    if aside in plan.heads:  # left by a run of this tool that was cut short
        api.delete_branch(plan.repo_id, branch=aside, **KERNEL)
    api.create_branch(plan.repo_id, branch=aside, revision=plan.base, **KERNEL)
    try:
        sent = api.create_commit(plan.repo_id, operations, revision=aside, **commit)
        api.create_branch(plan.repo_id, branch=plan.branch, revision=sent.oid, **KERNEL)
    finally:
        with contextlib.suppress(Exception):  # a branch that no loader looks at
            api.delete_branch(plan.repo_id, branch=aside, **KERNEL)
    return sent


def send_card(api, plan, create_pr):
    return api.create_commit(
        plan.repo_id, [CommitOperationAdd("README.md", plan.card)], revision="main",
        parent_commit=plan.heads["main"], commit_message=f"Card of {plan.branch}",
        create_pr=create_pr, **KERNEL,
    )  # fmt: skip


def state_after(api, plan):
    """What the Hub really has after a failure: an answer may be lost when the deed is done."""
    try:
        heads = branch_heads(api, plan.repo_id)
    except RepositoryNotFoundError:
        return "Nothing was changed"
    except Exception:
        return "The Hub does not answer; a version is there whole or not at all"
    if heads.get(plan.branch) == (plan.heads or {}).get(plan.branch):
        if plan.branch in heads:
            return f"{plan.branch} is as it was"
        new = "" if plan.heads is not None else f"; {plan.repo_id} is new and has no version"
        return f"No {plan.branch} was made{new}"
    return f"{plan.branch} is there whole, at {heads.get(plan.branch)}; run this again for the rest"


def show_build(files, identity, version, built):
    """The lines about what was built, which need no Hub."""
    size = sum(path.stat().st_size for path in files.values()) / 1e6
    print(f"built version {version} as {identity}: {len(files)} files, {size:.1f} MB, and a card")
    for digest, names in digests(built).items():
        print(f"  {', '.join(names)}: {digest}")
    sys.stdout.flush()


def show(plan, endpoint):
    """The lines that say what will be done."""
    where = f"{endpoint}/kernels/{plan.repo_id}"
    kind = "new version" if plan.is_new else f"follows {plan.base[:12]}"
    print(f"{where}{' (new repository)' if plan.heads is None else ''}")
    print(
        f"  {plan.branch} ({kind}): {len(plan.add)} files to send, {len(plan.delete)} to remove,"
        f" {plan.unchanged} unchanged"
    )
    for path in plan.delete:
        print(f"    remove {path}")
    print("  main: " + ("card to send" if plan.card else "card unchanged"))


def summary(plan, results, variants):
    print("done" if results else "nothing to send: the Hub has all of it")
    for where, commit in results.items():
        print(f"  {where}: {commit.pr_url or commit.oid}")
    print(f"  load: get_kernel({plan.repo_id!r}, version={plan.branch[1:]})")
    for digest, names in variants.items():
        print(f"  {', '.join(names)}: kernel.verify({digest!r})")


def digests(built):
    """{what verify() of a variant returns: the variants it is the same for}."""
    found = {}
    for variant in sorted(built.glob("torch-*")):
        digest = runpy.run_path(str(variant / "runtime/verify.py"))["verify"]()
        found.setdefault(digest, []).append(variant.name)
    return found


def send(api, plan, identity, arguments):
    """Everything that changes the Hub; {where: commit}."""
    results = {}
    if plan.heads is None:
        print(f"creating {plan.repo_id}")
        api.create_repo(plan.repo_id, private=arguments.private, **KERNEL)
        heads = branch_heads(api, plan.repo_id)
        plan = plan._replace(heads=heads, base=heads["main"])
    if plan.add or plan.delete or plan.is_new:
        print(f"sending {plan.branch}", flush=True)
        results[plan.branch] = send_version(api, plan, identity, arguments.create_pr)
    if plan.card:
        print("sending the card", flush=True)
        results["main"] = send_card(api, plan, arguments.create_pr)
    return results


@contextlib.contextmanager
def reading_the_tree():
    """What is wrong with a file of the tree is one line. A full disk is told by hub_errors."""
    try:
        yield
    except FileNotFoundError as error:
        raise Stop(f"{error.filename} is missing") from error
    except (ValueError, KeyError, SyntaxError) as error:
        raise Stop(" ".join(str(error).split())) from error


def refuse(problems):
    if problems:
        raise Stop(" ".join("; ".join(problems).split()))


def publish(arguments, api, root):
    """Looks, then sends; every refusal that can be known comes before the first change."""
    refuse(hub_errors.problems(arguments.repo_id, api))
    with reading_the_tree():
        config, _ = read_config(root)
        refuse(release_checks.problems(root, config, arguments.repo_id))
    if not arguments.dry_run:
        api.whoami()
    with tempfile.TemporaryDirectory() as folder:
        built = pathlib.Path(folder, "build")
        with reading_the_tree():
            identity = build(root, built, arguments.repo_id)
            files = local_files(root, built)
        version = config["general"]["version"]
        show_build(files, identity, version, built)
        plan = make_plan(api, arguments.repo_id, version, files, built / "CARD.md")
        check_published_api(api, plan, public_api(package_dir(root, config)))
        if arguments.create_pr and plan.is_new:
            raise Stop(
                f"a pull request needs the branch {plan.branch}: ask the owners of"
                f" {plan.repo_id} to make it first"
            )
        show(plan, api.endpoint)
        if arguments.dry_run:
            print("dry run: nothing was sent")
            return
        try:
            results = send(api, plan, identity, arguments)
        except Exception as error:
            why = hub_errors.line(error, plan.repo_id, api.endpoint)
            if why is None:
                raise
            raise Stop(f"{why}. {state_after(api, plan)}") from error
        summary(plan, results, digests(built))


def main(argv=None, api=None, root=ROOT):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repo-id", required=True, help="org/name on the Hub")
    parser.add_argument("--dry-run", action="store_true", help="say what would be sent")
    parser.add_argument("--create-pr", action="store_true", help="propose it, do not push it")
    parser.add_argument("--private", action="store_true", help="of a repository that is new")
    arguments = parser.parse_args(argv)
    api = api or HfApi()
    disable_progress_bars()  # what is being sent is said
    try:
        publish(arguments, api, root)
        return 0
    except Stop as stop:
        print(f"publish: {stop}", file=sys.stderr)
    except KeyboardInterrupt:
        print("publish: interrupted; run this again", file=sys.stderr)
    except Exception as error:
        why = hub_errors.line(error, arguments.repo_id, api.endpoint)
        if why is None:
            raise
        print(f"publish: {why}. Nothing was changed", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
