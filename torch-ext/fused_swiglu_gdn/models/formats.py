"""Names the formats of quantised weights that are left to their own modules, by class names."""

import functools
import re
from typing import NamedTuple, Optional

from torch import nn

from .serving import own_class


class Format(NamedTuple):
    """Classes of quantised modules."""

    where: str  # a pattern of the path of their module and their name, in lower case
    reason: str
    kind: str = "linear"
    layer: str = "FP8Linear"


FORMATS = (
    Format(r"^transformers\.integrations\.mxfp4\..*experts$",
           "MXFP4: load with dequantize=True to be served", "experts", "fused_experts"),
    Format(r"^transformers\.integrations\.fbgemm_fp8\.", "FP8 by FBGEMM, with a scale a row"),
    Format(r"^bitsandbytes\..*linear4bit$", "4 bits by bitsandbytes"),
    Format(r"^bitsandbytes\..*linear8bitlt$", "int8 by bitsandbytes"),
    Format(r"awq.*linear", "int4 by AWQ"),
    Format(r"gptq.*linear", "int4 by GPTQ"),
)  # fmt: skip


def format_of(module: nn.Module) -> Optional[Format]:
    """The format of a quantised module; None of any other."""
    return _of_class(own_class(module))


@functools.lru_cache(maxsize=1024)
def _of_class(kind: type) -> Optional[Format]:
    name = f"{kind.__module__}.{kind.__name__}".lower()
    return next((f for f in FORMATS if re.search(f.where, name)), None)
