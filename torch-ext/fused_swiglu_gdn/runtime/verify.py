"""Whether the files of the loaded build are those that were built.

`metadata.json` of a build holds a hash of every file; the loaders do not look at it.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import Dict, List, Optional

# not hashed: the metadata holds the hashes, and its signature comes later
_UNHASHED = ("metadata.json", "metadata.json.sigstore")


def verify(expected: Optional[str] = None) -> str:
    """Checks every file of this build against the hashes recorded when it was built.

    That finds damage and edits. Whoever can rewrite metadata.json and this file too is found only
    by a caller who noted the build's digest when they trusted it, and gives it as `expected`.

    Args:
        expected: what an earlier verify() returned, or the release printed, for this build.

    Returns:
        The digest of the whole build, "sha256:" and 64 hexadecimal digits.

    Raises:
        RuntimeError: a file is changed, missing or extra, the build's digest is another than
            `expected`, or this is no build (a source tree has no metadata.json).
    """
    root = Path(__file__).parents[1]
    recorded = _recorded(root)
    algorithm = recorded["algorithm"]
    found = _hashes(root, algorithm)
    problems = _differences(recorded["files"], found)
    if problems:
        raise RuntimeError(f"the build in {root} is not as it was built: {'; '.join(problems)}")
    digest = _whole(found)
    if expected is not None and expected != digest:
        raise RuntimeError(f"the build in {root} must have digest {expected}, got {digest}")
    return digest


def _recorded(root: Path) -> dict:
    """The "digest" of metadata.json: the name of an algorithm, and a hash for each file."""
    try:
        metadata = json.loads((root / "metadata.json").read_text(encoding="utf-8"))
        digest = metadata["digest"]
        if digest["algorithm"] in ("sha256", "sha512") and isinstance(digest["files"], dict):
            return digest
        problem = f"unknown digest algorithm {digest['algorithm']}"
    except FileNotFoundError:
        problem = "no metadata.json: a source tree, not a build"
    except (ValueError, KeyError, TypeError):
        problem = "metadata.json cannot be read or holds no digest"
    raise RuntimeError(f"the build in {root} cannot be verified: {problem}")


def _hashes(root: Path, algorithm: str) -> Dict[str, str]:
    """{path: base64 hash} of every file but byte code, as kernels' Digest.hash_variant."""
    found = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if name in _UNHASHED or "__pycache__" in path.parts or path.suffix == ".pyc":
            continue
        if path.is_file():  # a link into the Hub's cache is followed
            digest = hashlib.new(algorithm, path.read_bytes()).digest()
            found[name] = base64.b64encode(digest).decode()
    return found


def _differences(recorded: Dict[str, str], found: Dict[str, str]) -> List[str]:
    return (
        [f"missing {name}" for name in sorted(recorded.keys() - found.keys())]
        + [f"not part of it: {name}" for name in sorted(found.keys() - recorded.keys())]
        + [
            f"changed {name}"
            for name in sorted(recorded.keys() & found.keys())
            if recorded[name] != found[name]
        ]
    )


def _whole(files: Dict[str, str]) -> str:
    lines = "".join(f"{name} {files[name]}\n" for name in sorted(files))
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()
