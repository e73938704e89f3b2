"""Releases of transformers with which this build was tested, and the warning about newer ones."""

import itertools
import sys
from typing import Optional, Tuple

# the oldest and the newest; tools/releases.py tries these and all between
TRIED = ("5.17", "5.24")


def untried() -> Optional[str]:
    """The version of transformers, if it is imported and newer than all tested ones, else None."""
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    return version if minor(version) > minor(TRIED[1]) else None


def minor(version: str) -> Tuple[int, ...]:
    """(5, 24) of "5.24.0"; () of a string that is no version."""
    first, second, *_ = [*version.split("."), "", ""]
    digits = "".join(itertools.takewhile(str.isdigit, second))
    return (int(first), int(digits)) if first.isdigit() and digits else ()
