"""The part of a model's batch that one rank gets."""

from typing import Dict, List, Optional, Union

import torch
from torch import Tensor

from ..runtime.checks import has_shape_of, is_tensor
from ..runtime.device import from_host
from .checks import has_values, ints, is_of_ints
from .context import CpContext
from .layouts import fragments_of

LENGTHS = ("cu_seq_lens_q", "cu_seqlens")  # names of cumulative lengths
# all whose values are read here
READ = ("input_ids", *LENGTHS, "labels", "shift_labels", "position_ids", "attention_mask")
OTHERS = ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # what follows from them
IGNORED = -100  # the label of no target


class Batch:
    """The arguments of shard_batch: tokens [B, T] in rows, and the starts of sequences."""

    def __init__(self, given: dict):
        ids = given.get("input_ids")
        if isinstance(ids, Tensor):
            is_tensor("input_ids", ids)
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            found = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f'batch must have "input_ids" of shape [B, T], got {found}')
        is_of_ints("input_ids", ids)
        for name in READ:
            if given.get(name) is not None:
                is_tensor(name, given[name])
                has_values(name, given[name])
        self.given, self.ids = given, ids
        self.B, self.T = ids.shape
        self.starts = self._starts()  # [B, T], whether a sequence begins here

    def _starts(self) -> Tensor:
        starts = torch.zeros(self.B, self.T, dtype=torch.bool)
        starts[:, :1] = True
        lengths = next((self.given[n] for n in LENGTHS if self.given.get(n) is not None), None)
        positions, mask = self.given.get("position_ids"), self.given.get("attention_mask")
        if lengths is not None:
            if self.B != 1:
                raise ValueError(
                    f"input_ids must have shape [1, T] when cu_seqlens is given, got {self.B} rows"
                )
            ends = ints("cu_seqlens", lengths)
            if not ends or ends[0] != 0 or ends[-1] != self.T or ends != sorted(ends):
                raise ValueError(f"cu_seqlens must go from 0 to {self.T}, got {ends}")
            starts[0, [n for n in ends if n < self.T]] = True
        if positions is not None:
            has_shape_of("position_ids", positions, "input_ids", self.ids)
            is_of_ints("position_ids", positions)
            positions = positions.cpu()
            starts |= (positions == 0) & (lengths is None)
        here = torch.ones_like(starts)
        if mask is not None:
            has_shape_of("attention_mask", mask, "input_ids", self.ids)
            if mask.is_complex():
                raise TypeError(f"attention_mask must be of a real dtype, got {mask.dtype}")
            here = mask.cpu().bool()
            if not (here.long().diff() <= 0).all() or not here[:, :1].all():
                raise ValueError(
                    "attention_mask must have its zeros at the end of each row, and none in front, "
                    f"got {here.long().tolist()}"
                )
            starts[:, 1:] |= here[:, :-1] & ~here[:, 1:]  # padding is a sequence of its own
        if positions is not None:
            _are_consecutive(positions, starts, here)
        return starts

    def padded(self, x: Tensor, T: int, value) -> Tensor:
        """Pads [B, self.T, ..] to [B, T, ..]."""
        if T == self.T:
            return x
        return torch.cat([x, x.new_full((self.B, T - self.T, *x.shape[2:]), value)], 1)

    def lengths(self, T: int) -> List[int]:
        """Cumulative lengths of the stream of rows that are padded to T tokens."""
        starts = self.padded(self.starts, T, False)
        if T > self.T:
            starts[:, self.T] = True
        return [*starts.flatten().nonzero()[:, 0].tolist(), self.B * T]

    def targets(self) -> Optional[Tensor]:
        """The token that each token is to predict, [B, T], or None; a sequence's last has no
        target."""
        shifted = self.given.get("shift_labels")
        name = "labels" if shifted is None else "shift_labels"
        labels = self.given.get(name)
        if labels is None:
            return None
        has_shape_of(name, labels, "input_ids", self.ids)
        is_of_ints(name, labels)
        if shifted is not None:
            return shifted
        ends = torch.ones_like(self.starts)
        ends[:, :-1] = self.starts[:, 1:]
        return labels.roll(-1, 1).masked_fill(from_host(ends, labels.device), IGNORED)


def _are_consecutive(positions: Tensor, starts: Tensor, here: Tensor) -> None:
    """Checks that positions [B, T] count from 0 in each sequence; those of padding are ignored."""
    token = torch.arange(starts.shape[1]).expand(starts.shape)
    places = token - token.masked_fill(~starts, 0).cummax(1).values
    wrong = ((positions != places) & here).nonzero().tolist()
    if wrong:
        row, t = wrong[0]
        raise ValueError(
            f"position_ids must count 0, 1, 2, .. in each sequence, got {int(positions[row, t])} "
            f"where {int(places[row, t])} is due, at token {t} of row {row}"
        )


def whole_size(T: int, P: int, layout: Union[str, list]) -> int:
    """Tokens of a row, padded so that the layout splits it evenly."""
    if not isinstance(layout, str):
        return T
    parts = P if layout == "contiguous" else 2 * P
    return -(-T // parts) * parts


def shard(batch: Batch, group, P: int, layout) -> Dict[str, object]:
    """The part of a batch that this rank has, and its context."""
    T = whole_size(batch.T, P, layout)
    device = batch.ids.device
    fragments = fragments_of(layout, T, P)
    cp = CpContext(batch.lengths(T), group, fragments, batch.B, device)
    found: Dict[str, object] = {}
    dropped = (*LENGTHS, *OTHERS, "attention_mask", "labels", "shift_labels")
    for name, x in batch.given.items():
        if name in dropped:
            continue
        by_token = isinstance(x, Tensor) and x.shape[:2] == batch.ids.shape
        found[name] = cp.shard(batch.padded(x, T, 0)) if by_token else x
    targets = batch.targets()
    if targets is not None:
        targets = batch.padded(targets, T, IGNORED)
        found["labels"] = found["shift_labels"] = cp.shard(targets)
        found["num_items_in_batch"] = (targets != IGNORED).sum()
    found.update(position_ids=cp.position_ids, cp_context=cp, use_cache=False)
    return found
