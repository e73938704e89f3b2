"""The report of kernelize, as a table."""

import logging
import re
from typing import Dict, List, NamedTuple, Optional, Set

import torch

from .advice import advice, tuning_of
from .releases import TRIED, untried

WAITS = "its own forward, until the model is on a GPU"
# the kind of a module by a part of our layer's name, and in words
KINDS = {
    "SwiGLU": ("mlp", "MLP"),
    "RMSNorm": ("norm", "norm"),
    "KimiDeltaAttention": ("kda", "Kimi Delta Attention layer"),
    "Attention": ("attention", "attention module"),
    "DecoderLayer": ("layer", "decoder layer"),
    "GatedDeltaNet": ("gdn", "Gated DeltaNet layer"),
    "fused_experts": ("experts", "expert module"),
    "fused_topk": ("router", "router"),
    "add_shared": ("block", "block with a shared expert"),
    "FP8Linear": ("linear", "FP8 linear"),
}

logger = logging.getLogger(__name__)
_warned: Set[str] = set()  # versions of transformers


class Row(NamedTuple):
    module: str  # its path in the model
    kind: str  # its class
    layer: str  # our layer
    note: Optional[str]  # what else is to be known of one that is served
    reason: Optional[str]  # why it is left alone
    unknown: bool = False  # the reason is what transformers has made its class


def kind_of(row: Row) -> str:
    """The kind of a row's module, such as "mlp", or our layer's name if it has none."""
    return next((kind for part, (kind, _) in KINDS.items() if part in row.layer), row.layer)


class Report:
    """The modules that kernelize examined.

    print(report) shows a table, what can be done about modules that are left alone, and whether the
    kernels were tuned for the model's GPU.
    """

    def __init__(self, rows: List[Row], device: Optional[torch.device] = None):
        self.rows = rows
        self.device = device  # of the model's parameters

    @property
    def served(self) -> List[Row]:
        return [row for row in self.rows if row.reason is None]

    @property
    def left(self) -> List[Row]:
        return [row for row in self.rows if row.reason is not None]

    @property
    def untried(self) -> Optional[str]:
        """The warning about a transformers newer than the tested releases, or None.

        It is given only if modules are left alone because of their classes.
        """
        version, unknown = untried(), [row for row in self.rows if row.unknown]
        if version is None or not unknown:
            return None
        kinds = {kind_of(row) for row in unknown}
        *first, last = [
            name + "s"[: len(unknown) > 1] for kind, name in KINDS.values() if kind in kinds
        ]
        names = f"{', '.join(first)} and {last}" if first else last
        return (
            f"transformers {version} is newer than this build was tested with "
            f"({' to '.join(TRIED)}): {len(unknown)} {names} "
            f"{'is' if len(unknown) == 1 else 'are'} left alone; results stay right"
        )

    def warn_once(self) -> "Report":
        """Logs the warning about a newer transformers, once in a process; returns the report."""
        said = self.untried
        if said is not None and untried() not in _warned:
            _warned.add(untried())
            logger.warning("%s", said)
        return self

    def __str__(self) -> str:
        if not self.rows:
            return NOTHING
        waiting = sum(row.note == WAITS for row in self.served)
        head = f"{len(self.served)} modules served, {len(self.left)} left alone"
        if waiting:
            head += f"; {waiting} of the served wait for the model to be moved to a GPU"
        groups: Dict[tuple, int] = {}
        for row in self.rows:
            key = (re.sub(r"\.\d+(?=\.|$)", ".*", row.module) or "(the model)", *row[1:5])
            groups[key] = groups.get(key, 0) + 1
        table = [("module", "", "class", "layer", "note")]
        for (module, kind, layer, note, reason), count in groups.items():
            remark = note or "" if reason is None else f"left alone: {reason}"
            table.append((module, f"x{count}", kind, layer if reason is None else "-", remark))
        kinds = {kind_of(row) for row in self.rows}
        gateless = None if kinds & {"mlp", "experts", "block"} else f"no {GATED} was found"
        todo = advice(row.reason for row in self.left)
        lines = (self.untried, head, gateless, aligned(table), *todo, tuning_of(self.device))
        return "\n".join(filter(None, lines))

    __repr__ = __str__


GATED = "MLP with a gate (down(act(gate(x)) * up(x)))"
NOTHING = (
    f"nothing to serve: no {GATED}, RMS norm, attention module or layer of a decoder, "
    "Gated DeltaNet layer or mixture of experts was found"
)


def aligned(table) -> str:
    """Rows of equal length, the first one the head, as text in columns."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in table]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
