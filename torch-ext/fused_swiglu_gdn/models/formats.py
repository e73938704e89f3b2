"""Names the formats of quantised weights that are left to their own modules, by class names."""

import functools
from typing import NamedTuple, Optional, Tuple


class Format(NamedTuple):
    """Classes of quantised modules."""

    words: Tuple[str, ...]  # in the path of their module with their name, in lower case
    reason: str
    kind: str = "linear"
    layer: str = "FP8Linear"


FORMATS = (
    Format(("transformers.integrations.mxfp4.", "experts"),
           "MXFP4: load with dequantize=True to be served", "experts", "fused_experts"),
    Format(("transformers.integrations.fbgemm_fp8.",), "FP8 by FBGEMM, with a scale a row"),
    Format(("bitsandbytes.", ".linear4bit"), "4 bits by bitsandbytes"),
    Format(("bitsandbytes.", ".linear8bitlt"), "int8 by bitsandbytes"),
    Format(("awq", "linear"), "int4 by AWQ"),
    Format(("gptq", "linear"), "int4 by GPTQ"),
)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def format_of(kind: type) -> Optional[Format]:
    """The format of quantised modules of a class; None of any other."""
    name = f"{kind.__module__}.{kind.__name__}".lower()
    for known in FORMATS:
        at = 0
        for word in known.words:  # one after another
            at = name.find(word, at) + len(word) if at >= 0 and name.find(word, at) >= 0 else -1
        if at >= 0:
            return known
    return None
