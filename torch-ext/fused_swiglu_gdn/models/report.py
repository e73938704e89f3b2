"""The report of kernelize, as a table."""

import logging
import re
from typing import Dict, Iterable, List, NamedTuple, Optional, Set

import torch

from ..runtime import device as devices
from ..runtime import dispatch, tuning
from .releases import TRIED, untried

WAITS = "its own forward, until the model is on a GPU"
# the kind of a module by a part of our layer's name
KINDS = {
    "SwiGLU": "mlp",
    "RMSNorm": "norm",
    "KimiDeltaAttention": "kda",
    "Attention": "attention",
    "DecoderLayer": "layer",
    "GatedDeltaNet": "gdn",
    "fused_experts": "experts",
    "fused_topk": "router",
    "add_shared": "block",
    "FP8Linear": "linear",
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
    return next((kind for part, kind in KINDS.items() if part in row.layer), row.layer)


class Report:
    """The modules that kernelize examined.

    print(report) shows a table, what can be done about modules that are left alone, and whether the
    kernels were tuned for the model's GPU.
    """

    def __init__(
        self, rows: List[Row], device: Optional[torch.device] = None, drafts: bool = False
    ):
        self.rows = rows
        self.device = device  # of the model's parameters
        self.drafts = drafts  # generate takes them, which transformers refuses for the model
        self.by_reference = dispatch.forced == "reference"  # use_reference()

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
        return (
            f"transformers {version} is newer than this build was tested with "
            f"({' to '.join(TRIED)}): modules left alone, maybe for that reason: {len(unknown)}; "
            "results stay right"
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
        last = BY_REFERENCE if self.by_reference else tuning_of(self.device)
        drafts = DRAFTS if self.drafts else None
        lines = (self.untried, head, gateless, aligned(table), *todo, drafts, last)
        return "\n".join(filter(None, lines))

    __repr__ = __str__


DRAFTS = "generate takes drafts: prompt lookup, assistants, MTP layers (docs/decoding.md)"
BY_REFERENCE = "inside use_reference(): plain torch serves what kernels would serve on a GPU"
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


TO_A_GPU = "move the model to a CUDA or ROCm GPU, then call kernelize again"
IN_BF16 = "load the model in bfloat16 or float16"
ITS_OWN = "nothing to do, no kernel computes this formula; their own forward stays right"
# the first pattern that a reason has in it says what to do
TRIAL_FAILED = "nothing to do, the trial of these failed; their own forward stays right"
ADVICE = (
    (r"trust=\[", "other people's code is tried where it is named (docs/models.md)"),
    # a ValueError is the class's own word that it does not compute this
    (r"raises (?!ValueError)\w+ when tried: (?!a part)|looking at it raises", TRIAL_FAILED),
    (r"no kernels for meta|on the meta device", "load its weights, then call kernelize again"),
    (r"no kernels for cuda",
     "nothing to do, kernels need Triton, and a GPU from Ampere on or of AMD"),
    (r"no kernels for|the model is on (cpu|meta|mps)", TO_A_GPU),
    (r"AMD GPU", "nothing to do, decoding stays eager there"),
    (r"accelerate hook|on several devices",
     'put the whole model on one GPU, device_map="cuda", and call kernelize again'),
    (r"not bfloat16 or float16|several dtypes|of another dtype|a dtype of its own", IN_BF16),
    (r"MXFP4", "load it with dequantize=True in its Mxfp4Config"),
    (r"^quantised to|of dtype u?int|is an? (?!D)\w+Tensor\b",
     "load the checkpoint in bfloat16, or in FP8 with block scales (docs/fp8.md)"),
    (r"^FP8 with|is FP4|of dtype float8",
     "load it with dequantize=True in its FineGrainedFP8Config, or another one (docs/fp8.md)"),
    (r"ZeRO-3", "call kernelize before deepspeed.initialize (docs/parallel.md)"),
    (r"DTensor|tensor parallel", "see docs/parallel.md for what may be sharded"),
    (r"hooks?\b", "remove the hooks, or register them after kernelize"),
    (r"replaced already|is patched|forward of its own|has an? \w+ of its own",
     "undo the other patch, or leave these modules to it"),
    (r"implementation was set to", 'set the experts implementation to "grouped_mm" or "eager"'),
    (r"dropout and is in training", "set its dropout to 0, or call model.eval()"),
    (r"multiples? of|head dims? (are|is) above|taps",
     "nothing to do, the kernels do not have these sizes"),
    (r"StaticCache|cache_implementation|cannot generate|no replay|no CUDA graph|encoder and a",
     "see docs/decoding.md for what a graph needs"),
)  # fmt: skip


def advice_for(reason: str) -> str:
    """Returns what a person can do about a reason."""
    return next((said for pattern, said in ADVICE if re.search(pattern, reason)), ITS_OWN)


def advice(reasons: Iterable[str]) -> List[str]:
    """A line for each thing to do, with the number of modules that it concerns."""
    counts: Dict[str, int] = {}
    for reason in reasons:
        said = advice_for(reason)
        counts[said] = counts.get(said, 0) + 1
    return [f"  {count} left alone: {said}" for said, count in counts.items()]


def tuning_of(device: Optional[torch.device]) -> Optional[str]:
    """A line about the settings that kernels have on the device; None for other than GPUs."""
    if device is None or not devices.is_gpu(device):
        return None
    name, found = devices.name(device.index).replace("_", " "), tuning.tuned_for(device)
    if found is None:
        return f"{name}: kernels run with settings that were not tuned for it: tools/tune.py"
    return f"{name}: kernels run with settings tuned for {found}"
