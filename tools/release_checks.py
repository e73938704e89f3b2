"""What must agree before a version goes out: tree, build.toml, CHANGELOG.md, CARD.md, the API."""

import json
import re
import subprocess
import sys

from build import card, provenance
from public_api import BUMP, breaks, public_api
from sources import git, package_dir, text_of

PAGES = ("CARD.md", "README.md")  # with tables of numbers that benchmarks/page.py writes
WRITTEN = re.compile(r"<!-- numbers: .*?<!-- end of numbers -->", flags=re.S)
NUMBER = re.compile(r"(?<![\w.])\d+(\.\d+)?x?(?![\w.]*\d)")


def tree_problems(root):
    source = provenance(root)
    if source is None:
        return ["this is no git checkout with a commit to name"]
    if not source["dirty"]:
        return []
    changed = [line.split(None, 1)[1] for line in git(root, "status", "--porcelain").splitlines()]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return [f"uncommitted changes: {', '.join(changed[:3])}{more}"]


def changelog_problems(root, version):
    """The newest heading is this version's, and says something."""
    text = text_of(root, "CHANGELOG.md")
    headings = re.findall(r"^## (.*)$", text, flags=re.M)
    if not headings or headings[0].strip() != str(version):
        newest = headings[0].strip() if headings else "none"
        return [f"build.toml is at version {version}, CHANGELOG.md's newest heading is {newest}"]
    entry = text.split(f"## {headings[0]}", 1)[1].split("\n## ", 1)[0]
    return [] if "- " in entry else [f"CHANGELOG.md says nothing under {version}"]


def card_problems(root, config, repo_id):
    version = config["general"]["version"]
    text = card(root, config, repo_id)
    said = {int(n) for n in re.findall(r"(?:version=|This is version )(\d+)", text)}
    wrong = [
        f"CARD.md speaks of version {n}, build.toml of {version}" for n in sorted(said - {version})
    ]
    return wrong + [problem for name in PAGES for problem in page_problems(root, name)]


def source_problems(config, repo_id):
    """The card and every build name the repository with the source: not that of the placeholder."""
    source = config["general"].get("source", "")
    if repo_id.startswith("org/") or "/org/" not in source:
        return []
    return [f"build.toml's source is the placeholder {source}: put your git repository's URL there"]


def page_problems(root, name):
    """A table that is not what its records say; a number in a table that no record bears out."""
    if not (root / name).exists():
        return []
    command = [sys.executable, root / "benchmarks" / "page.py", "--check", name]
    out = subprocess.run(command, capture_output=True, text=True)
    found = out.stdout.splitlines() or ([] if out.returncode == 0 else [out.stderr.strip()])
    for row in WRITTEN.sub("", (root / name).read_text()).splitlines():
        if row.startswith("|") and NUMBER.search(row.partition("|")[2].partition("|")[2]):
            found.append(f"{name}: python benchmarks/page.py writes no such row: {row}")
    return found


def version_problems(root, config):
    """__version__ of the package, if there is one, is build.toml's."""
    version, text = config["general"]["version"], text_of(package_dir(root, config), "__init__.py")
    said = re.findall(r'^__version__ = "(.*)"', text, flags=re.M) or [str(version)]
    wrong = f"build.toml is at version {version}, the package's __version__ is {said[-1]}"
    return [] if said[-1] == str(version) else [wrong]


def api_problems(root, config):
    """The API recorded in tests/ holds, and the record knows all of today's."""
    record = root / "tests" / f"api_v{config['general']['version']}.json"
    if not record.exists():
        return [f"tests/{record.name} is missing: run tools/public_api.py"]
    old, new = json.loads(record.read_text()), public_api(package_dir(root, config))
    broken = breaks(old, new)
    if broken:
        return [f"{BUMP}: {'; '.join(broken)}"]
    if old != new:
        return [f"tests/{record.name} does not have all of the API: run tools/public_api.py"]
    return []


def problems(root, config, repo_id):
    """One line for everything that does not agree."""
    return [
        *tree_problems(root),
        *changelog_problems(root, config["general"]["version"]),
        *card_problems(root, config, repo_id),
        *source_problems(config, repo_id),
        *version_problems(root, config),
        *api_problems(root, config),
    ]
