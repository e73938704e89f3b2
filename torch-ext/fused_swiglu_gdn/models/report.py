"""What kernelize did, as a table."""

import re
from typing import Dict, List, NamedTuple, Optional

COPIES = "copies of these modules are served too; pickles hold them without the kernels"


class Row(NamedTuple):
    module: str  # its path in the model
    kind: str  # its class
    layer: str  # our layer
    implementation: Optional[str]  # who computes; None if the module is left alone
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
        head = f"{len(self.served)} modules served, {len(self.left)} left alone"
        if not self.rows:
            return "no MLP, Gated DeltaNet layer or experts found: nothing to serve"
        groups: Dict[tuple, int] = {}
        for row in self.rows:
            key = (re.sub(r"\.\d+(?=\.|$)", ".*", row.module) or "(the model)", *row[1:])
            groups[key] = groups.get(key, 0) + 1
        table = [("module", "", "class", "layer", "served by")]
        for (module, kind, layer, implementation, reason), count in groups.items():
            by = implementation if reason is None else f"left alone: {reason}"
            table.append((module, f"x{count}", kind, layer if reason is None else "-", by))
        return "\n".join([head, aligned(table), *([COPIES] if self.served else [])])

    __repr__ = __str__


def aligned(table) -> str:
    """Rows of equal length, the first one the head, as text in columns."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in table]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
