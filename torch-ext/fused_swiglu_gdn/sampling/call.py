"""The call that chooses a token. Sizes: B sequences, V words of a vocabulary, N words that end."""

from typing import NamedTuple, Optional

from torch import Tensor

from ..runtime.call import call


class ChooseOptions(NamedTuple):
    top_k: int  # 0: the word of the largest score, without a draw
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    penalty: float = 1.0  # of the words in seen
    least: int = 0  # the length from which a word in ends may be chosen


@call
class Choose(NamedTuple):
    logits: Tensor  # [B, V]
    q: Optional[Tensor]  # [B, V] fp32, exponential numbers
    seen: Optional[Tensor]  # [B, V + 1] bool
    ends: Optional[Tensor]  # [N] int64
    length: Tensor  # [] int64
    options: ChooseOptions
