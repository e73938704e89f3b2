"""Advice about each reason for which kernelize leaves a module alone."""

import re
from typing import Dict, Iterable, List, Optional

import torch

from ..runtime import device as devices
from ..runtime import tuning

TO_A_GPU = "move the model to a CUDA or ROCm GPU, then call kernelize again"
IN_BF16 = "load the model in bfloat16 or float16"
ITS_OWN = "nothing to do, no kernel computes this formula; their own forward stays right"
# the first pattern that a reason has in it says what to do
ADVICE = (
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
    (r'only=\["', "name the kind in only=[..] to replace it"),
    (r"multiples? of|head dims? (are|is) above|taps",
     "nothing to do, the kernels do not have these sizes"),
    (r"StaticCache|cache_implementation|cannot generate|no replay|no CUDA graph|encoder and a",
     "see docs/decoding.md for what a graph needs"),
    (r"liger", "pip install liger-kernel"),
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
