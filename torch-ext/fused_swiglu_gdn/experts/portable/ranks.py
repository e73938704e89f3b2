"""Scores of experts as sort keys."""

import triton
import triton.language as tl


@triton.jit
def _ranked(choice, e, EXPERTS: tl.constexpr):
    """Sort keys, int64, the largest for the first choice.

    They order by value with NaN above all; among equal values the lower index comes first; indices
    past the last expert come last.
    """
    choice = tl.where(choice == 0.0, 0.0, choice)  # -0 is no less than 0
    bits = choice.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(choice != choice, 0x7FFFFFFF, bits)
    return bits.to(tl.int64) * 4294967296 + (EXPERTS - 1 - e)
