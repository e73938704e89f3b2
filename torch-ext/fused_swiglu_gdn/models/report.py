"""What kernelize did, as a table."""

import re
from typing import Dict, List, NamedTuple, Optional

WAITS = "its own forward, until the model is on a GPU"


class Row(NamedTuple):
    module: str  # its path in the model
    kind: str  # its class
    layer: str  # our layer
    note: Optional[str]  # what else is to be known of one that is served
    reason: Optional[str]  # why it is left alone


class Report:
    """The modules that kernelize looked at. print(report) shows a table."""

    def __init__(self, rows: List[Row]):
        self.rows = rows

    @property
    def served(self) -> List[Row]:
        return [row for row in self.rows if row.reason is None]

    @property
    def left(self) -> List[Row]:
        return [row for row in self.rows if row.reason is not None]

    def __str__(self) -> str:
        if not self.rows:
            return NOTHING
        waiting = sum(row.note == WAITS for row in self.served)
        head = f"{len(self.served)} modules served, {len(self.left)} left alone"
        if waiting:
            head += f"; {waiting} of the served wait for the model to be moved to a GPU"
        groups: Dict[tuple, int] = {}
        for row in self.rows:
            key = (re.sub(r"\.\d+(?=\.|$)", ".*", row.module) or "(the model)", *row[1:])
            groups[key] = groups.get(key, 0) + 1
        table = [("module", "", "class", "layer", "note")]
        for (module, kind, layer, note, reason), count in groups.items():
            remark = note or "" if reason is None else f"left alone: {reason}"
            table.append((module, f"x{count}", kind, layer if reason is None else "-", remark))
        return "\n".join([head, aligned(table)])

    __repr__ = __str__


NOTHING = (
    "nothing to serve: no MLP with a gate (down(act(gate(x)) * up(x))), RMS norm, attention module "
    "or layer of a decoder, Gated DeltaNet layer or mixture of experts was found"
)


def aligned(table) -> str:
    """Rows of equal length, the first one the head, as text in columns."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in table]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
