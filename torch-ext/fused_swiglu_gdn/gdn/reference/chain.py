"""The chain of the maps of segments in plain torch, in fp64: torch may compute products of fp32 in
TF32, which is too coarse for it."""

from typing import Optional

import torch
from torch import Tensor


def gdn_chain_fwd(
    gathered: Tensor, links: Tensor, places: Tensor, given: Optional[Tensor], V: int, backward: bool
) -> Tensor:
    """The state before each segment, or the gradient of the state after it: call.GdnChain."""
    (HV, _, K), flat = gathered.shape[2:], gathered.flatten(3).flatten(0, 1)
    out = flat.new_zeros(len(links), HV, K, V) if given is None else given.to(flat.dtype)
    counts, *slots = links.index_select(0, places).long().unbind(1)
    S = None
    for i, slot in enumerate(slots):
        taken = flat.index_select(0, slot).double()  # [chained, HV, words]
        own = taken[..., : V * K]
        own = own.unflatten(-1, (K, V)) if backward else own.unflatten(-1, (V, K)).mT
        if S is None:
            S = own
            continue
        M = taken[..., V * K :].unflatten(-1, (K, K))  # M^T
        linked = own + (M if backward else M.mT) @ S
        S = torch.where((counts > i)[:, None, None, None], linked, S)
    S = S.to(flat.dtype)
    return out.index_add(0, places, S) if backward else out.index_copy(0, places, S)
