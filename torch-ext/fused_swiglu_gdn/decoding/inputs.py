"""Inputs of a step that its graph makes: positions and masks.

For each token transformers' loop makes positions and masks of attention anew, in more launches than
all else that it does. They follow from those of the token before: each position is one more, and
each mask has one more slot that is attended. So the graph of a token advances the positions and
masks that it reads, and the loop gets them back as the inputs of the next token (Ahead). They are
what transformers would have made, so the next token need not be a replay. The graph of a round of
several tokens makes them of the length of the cache, which is on the device (Following). Both are
compared with what transformers makes when a graph is captured.
"""

from typing import Any, Callable, List, Optional, Tuple

import torch

from .caches import full_windows, lengths_of

IDS, POSITIONS, MASK = "input_ids", "position_ids", "attention_mask"
Inputs = List[Tuple[tuple, torch.Tensor]]  # ((name, key in a dict or None), tensor)


def parts(inputs: dict) -> Tuple[list, tuple]:
    """(name, tensor) of the tensors among the inputs and in their dicts, and all other values."""
    tensors, plain = [], []
    for name, value in inputs.items():
        items = value.items() if isinstance(value, dict) else ((None, value),)
        for inner, x in items:
            if isinstance(x, torch.Tensor):
                tensors.append(((name, inner), x))
            else:
                plain.append((name, inner, x.__class__, x))
    return tensors, tuple(plain)


def mapped(value, function: Callable):
    """The value with function(x) in place of each tensor x in it and in its dicts."""
    if isinstance(value, dict):
        return {name: mapped(x, function) for name, x in value.items()}
    return function(value) if isinstance(value, torch.Tensor) else value


class Ahead:
    """Positions and masks that a graph reads and advances.

    cache: of which layers with full windows move their slots, and their masks with them.
    """

    def __init__(self, tensors: Inputs, cache: Any):
        self.positions = _named(tensors, POSITIONS)[0]
        self.masks = _named(tensors, MASK)  # [B, 1, 1, S]
        self.slots = [torch.arange(x.shape[-1], device=x.device) for x in self.masks]
        full = full_windows(cache)
        self.moving = {layer.max_cache_len for layer in full}
        # how many slots are filled, of a layer that is not full
        self.length = next(iter(lengths_of([x for x in cache.layers if x not in full])), None)

    def advance(self) -> None:
        """Makes those of the next token, which takes the first slot that is free."""
        self.positions.add_(1)
        for mask, slots in zip(self.masks, self.slots):
            attended = mask.dtype == torch.bool  # True, or 0 to add
            if len(slots) in self.moving:
                mask.copy_(mask.roll(-1, -1).masked_fill_(slots == slots[-1], attended))
            else:
                mask.masked_fill_(slots == self.length, attended)


def _named(tensors: Inputs, wanted: str) -> List[torch.Tensor]:
    return [x for (name, _), x in tensors if name == wanted]


def ahead_of(before: Inputs, tensors: Inputs, cache: Any) -> Optional[Ahead]:
    """Returns what a graph of a step can advance; None if the step has other inputs, or if they do
    not follow from those of the token before. The host waits for the answer.

    before, tensors: tensors of the same names and shapes; cache: of a step that has not run.
    """
    names = {name for (name, _), _ in tensors}
    if not {IDS, POSITIONS} <= names <= {IDS, POSITIONS, MASK}:
        return None
    found = Ahead(tensors, cache)
    if found.length is None and not all(len(slots) in found.moving for slots in found.slots):
        return None
    made = Ahead([(name, x.clone()) for name, x in before], cache)
    made.advance()
    pairs = zip((made.positions, *made.masks), (found.positions, *found.masks))
    return found if all(torch.equal(a, b) for a, b in pairs) else None


class Following:
    """Positions and masks of a round that follow from those of an earlier one of as many tokens.

    inputs: of that round. start []: the tokens in the cache before it.
    """

    def __init__(self, inputs: dict, start: torch.Tensor):
        self.inputs, self.start = inputs, start
        T, masks = inputs[IDS].shape[1], inputs.get(MASK)
        self.row = torch.arange(T, device=start.device)[:, None]
        several = isinstance(masks, dict)
        opened = {n: self._opened(x) for n, x in (masks if several else {"": masks}).items()}
        self.opened = opened if several else opened[""]

    def _opened(self, mask: Optional[torch.Tensor]) -> Optional[tuple]:
        """The slots, a mask [1, 1, 1, slots] in which all from `start` on are attended, and what a
        mask has for those that are not."""
        if mask is None:
            return None
        slots = torch.arange(mask.shape[-1], device=mask.device)
        holds = mask.dtype == torch.bool
        first = mask[:, :, :1].masked_fill(slots >= self.start, holds)
        return slots, first, False if holds else torch.finfo(mask.dtype).min

    def now(self, length: torch.Tensor) -> dict:
        """Returns those for `length` [] tokens in the cache."""
        found = dict(self.inputs)
        if POSITIONS in found:
            found[POSITIONS] = found[POSITIONS] + (length - self.start)
        if isinstance(self.opened, dict):
            found[MASK] = {name: self._mask(x, length) for name, x in self.opened.items()}
        else:
            found[MASK] = self._mask(self.opened, length)
        return {name: x for name, x in found.items() if name in self.inputs}

    def _mask(self, opened: Optional[tuple], length: torch.Tensor) -> Optional[torch.Tensor]:
        """Returns a mask [1, 1, T, slots] of the slots attended before, and of the tokens since."""
        if opened is None:
            return None
        slots, first, closed = opened
        return first.masked_fill(slots > length + self.row, closed)


def following(inputs: dict, start: torch.Tensor, later: dict, length: torch.Tensor):
    """The Following by which inputs give the later ones, or None. The host waits for the answer."""
    names = {name for (name, _), _ in parts(inputs)[0]}
    masks = [x for (name, _), x in parts(inputs)[0] if name == MASK]
    if not {IDS} <= names <= {IDS, POSITIONS, MASK} or any(x.ndim != 4 for x in masks):
        return None
    found = Following(inputs, start)
    (made, plain), (given, others) = parts(found.now(length)), parts(later)
    if plain != others or [name for name, _ in made] != [name for name, _ in given]:
        return None
    for ((name, _), x), (_, y) in zip(made, given):
        if name != IDS and not (x.shape == y.shape and torch.equal(x, y)):
            return None
    return found
