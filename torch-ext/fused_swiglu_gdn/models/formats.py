"""Names the formats of quantised weights that are left to their own modules, by class names."""

import functools
import re
from typing import NamedTuple, Optional, Tuple

_INTEGRATION = "transformers.integrations."


class Format(NamedTuple):
    """Classes of quantised modules."""

    words: Tuple[str, ...]  # in the path of their module with their name, in lower case
    what: str  # what their weights are, and who multiplies with them
    kind: str = "linear"
    layer: str = "FP8Linear"

    @property
    def reason(self) -> str:
        return self.what if self.kind == "experts" else f"quantised to {self.what}"


FORMATS = (
    Format((f"{_INTEGRATION}mxfp4.", "experts"),
           "MXFP4: load with dequantize=True to be served", "experts", "fused_experts"),
    Format((f"{_INTEGRATION}fbgemm_fp8.",), "FP8 by FBGEMM, with a scale a row"),
    Format((f"{_INTEGRATION}compressed_tensors.", "linear"),
           "FP8 by compressed-tensors, with a scale a row or one for all"),
    Format(("compressed_tensors.", "linear"), "integers by compressed-tensors"),
    Format(("bitsandbytes.", ".linear4bit"), "4 bits by bitsandbytes"),
    Format(("bitsandbytes.", ".linear8bitlt"), "int8 by bitsandbytes"),
    Format(("awq", "linear"), "int4 by AWQ"),
    Format(("gptq", "linear"), "int4 by GPTQ"),
    Format(("auto_round", "linear"), "int4 by AutoRound"),
    Format(("hqq.", "linear"), "a few bits by HQQ"),
    Format(("quanto.", "linear"), "a few bits by Quanto"),
    Format(("aqlm.", "linear"), "codebooks by AQLM"),
    Format(("vptq.", "linear"), "codebooks by VPTQ"),
    Format(("spqr_quant.", "linear"), "3 bits and outliers by SpQR"),
    Format(("fp_quant.", "linear"), "FP4 by FP-Quant"),
    Format(("fouroversix.", "linear"), "FP4 by Four Over Six"),
    Format(("sinq.", "linear"), "4 bits by SINQ"),
    Format(("quark.", "linear"), "a few bits by Quark"),
    Format((f"{_INTEGRATION}eetq.", "linear"), "int8 by EETQ"),
    Format((f"{_INTEGRATION}bitnet.", "linear"), "three values by BitNet"),
    Format((f"{_INTEGRATION}higgs.", "linear"), "a few bits by HIGGS"),
    Format((f"{_INTEGRATION}nvfp4.", "linear"), "NVFP4 by transformers"),
    Format((f"{_INTEGRATION}metal_quantization.", "linear"), "a few bits by Metal"),
    Format((f"{_INTEGRATION}gemma_quant.", "linear"), "a few bits by transformers' own of Gemma"),
)  # fmt: skip


# the words of each, one after another
_NAMES = [(re.compile(".*".join(map(re.escape, known.words))), known) for known in FORMATS]


@functools.lru_cache(maxsize=1024)
def format_of(kind: type) -> Optional[Format]:
    """The format of quantised modules of a class; None of any other."""
    name = f"{kind.__module__}.{kind.__name__}".lower()
    return next((known for words, known in _NAMES if words.search(name)), None)
