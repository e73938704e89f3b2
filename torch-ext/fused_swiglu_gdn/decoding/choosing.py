"""The choice of a token inside a graph: transformers' changes of the scores, and its draw.

`torch.multinomial(p, 1)` is the argmax of p / q, where q are exponential numbers that torch draws.
A graph that captures these operations gives transformers' own tokens for a seed and advances the
random generator as an eager call does. A `LogitsProcessor` that looks at the scores alone is
captured as it is; one that looks at the tokens so far has a form here that reads what the graph
itself keeps: the number of tokens, and which ones were met.

transformers' loop gets a `Token` in the place of logits. It runs with functions of its own names
(`argmax`, `multinomial`, `softmax`) that hand a Token on and are torch's for any other value.
"""

import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import nn

from ..sampling.call import ChooseOptions
from ..sampling.ops import CHOOSE

MOST_ENDS = 16  # words that end a sequence, which a kernel compares one by one; models have 1 to 5
# processors of the scores alone, whose operations wait for nothing; eta's distribution asks on the
# host whether its arguments are valid
FREE = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "LogitNormalization",
    "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor",
}  # fmt: skip
PENALTY = "RepetitionPenaltyLogitsProcessor"
LEAST = ("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor")
# what the loop calls with scores and what they give
NAMES = {"argmax", "multinomial", "softmax", "functional", "squeeze"}


class Token:
    """Stands for the logits, scores and probabilities of tokens [B] that a graph has chosen."""

    def __init__(self, tokens: torch.Tensor):
        self.tokens = tokens

    def __getitem__(self, place) -> "Token":
        return self

    def to(self, *args, **options) -> "Token":
        return self

    clone = float = to

    def squeeze(self, dim: int) -> torch.Tensor:
        return self.tokens


class Passing:
    """A module with some functions in the place of its own."""

    def __init__(self, own: Any, **functions):
        self.__dict__.update(functions, own=own)

    def __getattr__(self, name: str):
        return getattr(self.own, name)


def _argmax(x, *args, **options):
    return x.tokens if type(x) is Token else torch.argmax(x, *args, **options)


def _multinomial(x, *args, **options):
    return x if type(x) is Token else torch.multinomial(x, *args, **options)


def _softmax(x, *args, **options):
    return x if type(x) is Token else F.softmax(x, *args, **options)


GLOBALS = {
    "torch": Passing(torch, argmax=_argmax, multinomial=_multinomial),
    "nn": Passing(nn, functional=Passing(F, softmax=_softmax)),
}


def hands_on(loop: Any) -> bool:
    """True if the loop uses torch and nn by these names, as far as its code tells."""
    return NAMES <= set(loop.__code__.co_names) and all(
        loop.__globals__.get(name) is module.own for name, module in GLOBALS.items()
    )


def choice_of(processors: list, draws: bool) -> Optional["Choice"]:
    """The choice of a call of generate, if a graph can make it; else None."""
    names = [type(each).__name__ for each in processors]
    if not set(names) <= {*FREE, PENALTY, *LEAST} or names.count(PENALTY) > 1:
        return None
    return Choice(processors, bool(draws))


class Choice:
    """The list of `LogitsProcessor`s of one call of generate, in the place of that list."""

    def __init__(self, processors: list, draws: bool):
        self.processors, self.draws = processors, draws
        self.ids: Optional[torch.Tensor] = None  # those of the latest token that was chosen
        self.vocabulary = 0
        self.key = (draws, *map(_key, processors))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options) -> Any:
        self.ids = input_ids
        if type(scores) is Token:
            return scores
        self.vocabulary = scores.shape[-1]
        return self.processors(input_ids, scores, **options)


def _key(processor: Any) -> tuple:
    """The class of a `LogitsProcessor` and the values of its attributes."""
    values = [
        (name, (*value.shape, *value.flatten().tolist()) if torch.is_tensor(value) else value)
        for name, value in sorted(vars(processor).items())
    ]
    return type(processor).__name__, repr(values)


class Choosing:
    """The captured operations of a choice, and what they read and advance.

    length: of the ids up to each row's token. seen [B, V + 1]: which tokens are among those that a
    penalty concerns; the last column is for ids past the vocabulary.
    """

    def __init__(self, choice: Choice):
        self.choice, self.steps = choice, [_step(each) for each in choice.processors]
        self.known = known_to_kernels(choice)
        self.length: Optional[torch.Tensor] = None
        self.seen: Optional[torch.Tensor] = None

    def mark(self, seen: torch.Tensor, ids: torch.Tensor) -> None:
        """Sets `seen` to the tokens of ids [B, T] that the penalty concerns."""
        for each in self.choice.processors:
            if type(each).__name__ == PENALTY:
                ones = torch.ones_like(seen[:, :-1], dtype=torch.float32)
                seen[:, :-1] = each(ids, ones) != 1

    def penalises(self) -> bool:
        return any(type(each).__name__ == PENALTY for each in self.choice.processors)

    def chosen(self, logits: torch.Tensor, ids: torch.Tensor, length: torch.Tensor) -> tuple:
        """The tokens [B] after logits [B, V] of ids [B, 1], and the scores [B, V] of which they are
        chosen, or None where a kernel chooses. length []: the first row's."""
        q = None
        if self.choice.draws:
            q = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).exponential_()
        if self.known is not None:
            ends, options = self.known
            found = CHOOSE((logits, q, self.seen, ends, length), options)
            if found is not None:
                tokens, right = found
                if q is not None:
                    torch._assert_async(right.all())  # as torch.multinomial does
                return tokens, None
        scores = logits.float()
        for step in self.steps:
            scores = step(scores, ids, self)
        if q is None:
            return scores.argmax(-1), scores
        p = scores.softmax(-1)
        first = p[:, :1]  # NaN if any score is, as torch.multinomial asserts
        torch._assert_async((first == first).all())
        return (p / q).argmax(-1), scores


class Chooser(Choosing):
    """The choice of a step: of one token [B]. length: a tensor []."""

    def __init__(self, choice: Choice):
        super().__init__(choice)
        B, device = len(choice.ids), choice.ids.device
        self.tokens = -1  # in length and seen
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        if self.penalises():
            self.seen = torch.zeros(B, choice.vocabulary + 1, dtype=torch.bool, device=device)

    def follow(self, choice: Choice) -> None:
        """Brings the tensors to where a call of generate is, for its next token."""
        tokens = choice.ids.shape[1]
        if choice is not self.choice or tokens != self.tokens:
            self.choice = choice
            self.length.fill_(tokens)
            if self.seen is not None:
                self.mark(self.seen, choice.ids)
        self.tokens = tokens + 1

    def choose(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The tokens [B] after logits [B, T, V] of a step that has read ids [B, 1]."""
        self.length.add_(1)
        if self.seen is not None:
            self.seen.scatter_(1, ids.clamp(max=self.seen.shape[1] - 1), True)
        return self.chosen(logits[:, -1], ids, self.length)[0]

    def warm_up(self, logits: torch.Tensor, ids: torch.Tensor, generator: Any) -> None:
        """Loads what a capture would have to load, and leaves the random generator as it was."""
        offset = generator.get_offset()
        self.choose(logits, ids)
        generator.set_offset(offset)
        self.tokens = -1


def _step(processor: Any):
    """A function (scores, ids, chooser) -> scores of a `LogitsProcessor`."""
    name = type(processor).__name__
    if name == PENALTY:
        penalty = processor.penalty

        def penalised(scores, _, chooser):
            changed = torch.where(scores < 0, scores * penalty, scores / penalty)
            return torch.where(chooser.seen[:, :-1], changed, scores)

        return penalised
    if name in LEAST:
        ends, least = processor.eos_token_id, least_of(processor)

        def prolonged(scores, _, chooser):
            place = torch.arange(scores.shape[-1], device=scores.device)
            ending = (place == ends.to(scores.device).reshape(-1, 1)).any(0)
            return scores.masked_fill(ending & (chooser.length < least), float("-inf"))

        return prolonged
    return lambda scores, ids, _: processor(ids, scores)


# what kernels compute, in the order in which transformers has them
KNOWN = (
    (PENALTY,), LEAST, ("TemperatureLogitsWarper",), ("TopKLogitsWarper",), ("TopPLogitsWarper",),
    ("MinPLogitsWarper",),
)  # fmt: skip


def known_to_kernels(choice: Choice) -> Optional[tuple]:
    """(ends or None, ChooseOptions) of a choice that kernels may make, else None: one in this
    order, with a top-k if it draws."""
    found: dict = {"top_k": 0}
    ends, place = None, 0
    for each in choice.processors:
        name = type(each).__name__
        here = next((i for i, names in enumerate(KNOWN) if name in names), -1)
        odd = here < place or getattr(each, "min_tokens_to_keep", 1) != 1
        if odd or getattr(each, "filter_value", -math.inf) != -math.inf:
            return None
        place = here
        if name == PENALTY:
            found["penalty"] = float(each.penalty)
        elif name in LEAST:  # transformers makes both of a least number of new tokens
            found["least"] = max(found.get("least", 0), least_of(each))
            if ends is not None and ends is not each.eos_token_id:
                return None
            ends = each.eos_token_id
        else:
            (option,) = {"temperature", "top_k", "top_p", "min_p"} & vars(each).keys()
            found[option] = getattr(each, option)
    if choice.draws != bool(found["top_k"]) or ends is not None and ends.numel() > MOST_ENDS:
        return None
    ends = None if ends is None else ends.reshape(-1).to(choice.ids.device)
    return ends, ChooseOptions(**found)


def least_of(processor: Any) -> int:
    """The length of ids from which a token may end them."""
    if type(processor).__name__ == LEAST[0]:
        return processor.min_length
    return processor.prompt_length_to_skip + processor.min_new_tokens
