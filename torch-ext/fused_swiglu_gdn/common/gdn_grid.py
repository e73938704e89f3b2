"""How the value heads of a call are shared out to the programs of gdn_prepare.py.

Sizes: H key heads, R value heads for each of them.
"""

import torch

from .. import device

UNITS = 4  # value heads of a program that are inverted at once: a warp each


def keys_together(H: int, R: int, heads: int) -> int:
    """Key heads of one program: as many as have at most `heads` value heads, if that divides."""
    return next(n for n in (4, 2, 1) if n * R <= heads and H % n == 0 or n == 1)


def programs(rows: int, H: int, R: int, heads: int) -> int:
    """The grid for `rows` chunk rows and at most `heads` value heads a program."""
    return rows * (H // keys_together(H, R, heads)) * -(-R // heads)


def processors(where: torch.device) -> int:
    return device.multiprocessor_count(where.index) if where.type == "cuda" else 0


def heads_together(rows: int, H: int, R: int, where: torch.device) -> int:
    """Value heads of one program, at most: a short call spreads over the processors.

    No result depends on it: warps without a head of their own repeat another's.
    """
    room = processors(where)
    return next(n for n in (1, 2, UNITS) if n == UNITS or programs(rows, H, R, n) <= room)
