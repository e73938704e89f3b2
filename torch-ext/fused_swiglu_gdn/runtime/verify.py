"""Checks that the files of the loaded build are those that were built.

`metadata.json` of a build holds a hash of every file; loaders do not check it.
"""

import base64
import hashlib
import importlib.util
import json
import marshal
import sys
from pathlib import Path
from types import CodeType
from typing import Dict, Iterator, List, Optional

# not hashed: the metadata holds the hashes, and its signature comes later
_UNHASHED = ("metadata.json", "metadata.json.sigstore")
_CACHE = "__pycache__"


def verify(expected: Optional[str] = None) -> str:
    """Checks every file of this build against the hashes recorded when it was built.

    This detects damage and edits, also of the byte code that Python would run in place of a source
    file. Edits that include metadata.json or this file are detected only with `expected`: a digest
    of the build that was noted when the build was trusted.

    Args:
        expected: what an earlier verify() returned, or the release printed, for this build.

    Returns:
        The digest of the whole build, "sha256:" and 64 hexadecimal digits.

    Raises:
        TypeError: `expected` is neither a string nor None.
        RuntimeError: a file is changed, missing or extra, a folder is a link, a link leads nowhere,
            byte code is not that of its source file, the build's digest is another than `expected`,
            or this is no build (a source tree has no metadata.json).

    Example:
        >>> try:
        ...     noted = verify()  # to be kept apart from the build, for verify(noted) later
        ... except RuntimeError as error:  # whatever was loaded is not what was built
        ...     noted = str(error)
        >>> noted.startswith(("sha256:", "the build in"))
        True
    """
    if expected is not None and not isinstance(expected, str):
        raise TypeError(
            'expected must be a digest, "sha256:" and 64 hexadecimal digits, or None, '
            f"got {type(expected).__name__}"
        )
    root = Path(__file__).parents[1]
    recorded = _recorded(root)
    algorithm = recorded["algorithm"]
    problems: List[str] = []
    found = _hashes(root, algorithm, problems)
    problems += _differences(recorded["files"], found)
    problems += [
        f"byte code of another source: {_CACHE} of {name}"
        for name in sorted(found)
        if name.endswith(".py") and not _is_compiled_from(root / name)
    ]
    if problems:
        raise RuntimeError(f"the build in {root} is not as it was built: {'; '.join(problems)}")
    digest = _whole(found)
    if expected is not None and expected != digest:
        raise RuntimeError(f"the build in {root} must have digest {expected}, got {digest}")
    return digest


def _recorded(root: Path) -> dict:
    """The "digest" entry of metadata.json: the name of an algorithm, and a hash for each file."""
    try:
        metadata = json.loads((root / "metadata.json").read_text(encoding="utf-8"))
        digest = metadata["digest"]
        if digest["algorithm"] in ("sha256", "sha512") and isinstance(digest["files"], dict):
            return digest
        problem = f"unknown digest algorithm {digest['algorithm']}"
    except FileNotFoundError:
        problem = "no metadata.json: a source tree, not a build"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        problem = "metadata.json cannot be read or holds no digest"
    raise RuntimeError(f"the build in {root} cannot be verified: {problem}")


def _entries(root: Path, folder: Path, problems: List[str]) -> Iterator[Path]:
    """Yields every file below the folder, and reports links to folders, which no build contains.

    Python would import from such a link.
    """
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no file"
            problems.append(f"a link to {kind}: {path.relative_to(root).as_posix()}")
        elif path.is_dir():
            yield from _entries(root, path, problems)
        else:
            yield path


def _hashes(root: Path, algorithm: str, problems: List[str]) -> Dict[str, str]:
    """{path: base64 hash} of every file but byte code, as kernels' Digest.hash_variant."""
    found = {}
    for path in _entries(root, root, problems):
        name = path.relative_to(root).as_posix()
        if name in _UNHASHED or _is_byte_code(path):
            continue
        if not path.is_file():  # a pipe, a device
            problems.append(f"not part of it: {name}")
            continue
        # a link into the Hub's cache is followed
        digest = hashlib.new(algorithm, path.read_bytes()).digest()
        found[name] = base64.b64encode(digest).decode()
    return found


def _is_byte_code(path: Path) -> bool:
    """True if the path is the byte-code cache of an existing source file."""
    if path.parent.name != _CACHE or path.suffix != ".pyc":
        return False
    return (path.parent.parent / (path.name.split(".")[0] + ".py")).is_file()


def _is_compiled_from(source: Path) -> bool:
    """True if the byte code that this Python would run in place of the source file matches it.

    Python compares at most the source's time and size, which are easily forged.
    """
    if sys.implementation.cache_tag is None:  # it keeps none
        return True
    for optimization in ("", 1, 2):
        cached = importlib.util.cache_from_source(str(source), optimization=optimization)
        try:
            data = Path(cached).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if data[:4] != importlib.util.MAGIC_NUMBER or len(data) < 16:  # Python compiles it anew
            continue
        try:
            code = marshal.loads(data[16:])
            compiled = compile(
                source.read_bytes(), str(source), "exec",
                dont_inherit=True, optimize=int(optimization or 0),
            )  # fmt: skip
            if code != compiled or len(set(_file_names(code))) != 1:
                return False
        except (EOFError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
            return False  # the last two: nested too deeply
    return True


def _file_names(code: CodeType) -> Iterator[str]:
    """Yields the file names from which inspect, and so Triton, reads the source of a code object.

    Nested code objects are included. Python corrects one of the names, and equality of code objects
    ignores them.
    """
    yield code.co_filename
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _file_names(constant)


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
