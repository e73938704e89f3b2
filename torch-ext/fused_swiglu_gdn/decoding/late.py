"""transformers' generate with a stop check that is read one token late if tokens are replays.

The loop checks after every token whether all sequences have ended. That blocks the host, and the
GPU is then idle until the host has prepared the next inputs. transformers has a deferred check,
`DeferredStopCheck`, and uses it on Apple's GPUs only. Here its own loop runs with another class
under that name: the copy of a token to the host is read after the next token has been launched. The
surplus token is a replay, which runs no Python, into a cache that is not returned; transformers
drops its output, and the generator's state is restored.
"""

import functools
import inspect
import math
import sys
from collections import deque
from types import FunctionType
from typing import Any, Callable, Optional

import torch
from torch import nn

from .caches import why_not_cache
from .capture import Graph
from .choosing import GLOBALS, Choice, choice_of, hands_on
from .graphs import Decoding, decoding_of
from .static_cache import TooLong, check_length, with_static_cache

UTILS = "transformers.generation.utils"
LOOP, CHECK, MODES = "_sample", "DeferredStopCheck", "GENERATION_MODES_MAPPING"
# the first arguments of the loop, and those of what it calls of that class: so a release is known
TAKES = ("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config")
CALLS = {
    "__init__": ("self", "input_ids", "max_length", "cache", "cache_is_returned", "streamer"),
    "is_supported": ("device", "cache", "cache_is_returned", "is_assistant"),
    "__call__": ("self", "unfinished_sequences", "tokens", "length"),
    "finish": ("self",),
}
# What may be called once more than there are tokens, and not late: functions of ids and scores.
PROCESSORS = {
    f"{name}{end}"
    for end, names in (
        ("LogitsProcessor", "MinLength MinNewTokensLength RepetitionPenalty "
         "EncoderRepetitionPenalty NoRepeatNGram EncoderNoRepeatNGram SequenceBias NoBadWords "
         "ForcedBOSToken ForcedEOSToken InfNanRemove SuppressTokensAtBegin SuppressTokens"),
        ("LogitsWarper", "Temperature TopP TopK TopH MinP Typical Epsilon Eta"),
        ("", "ExponentialDecayLengthPenalty LogitNormalization"),
    )
    for name in names.split()
}  # fmt: skip
LENGTH, EOS = "MaxLengthCriteria", "EosTokenCriteria"  # the host knows the length by itself
CRITERIA = {LENGTH, "MaxTimeCriteria", EOS, "StopStringCriteria"}


def is_own(kind: type, *names: str) -> bool:
    """True if the methods of a model's class are those that transformers has for all models."""
    mixin = getattr(sys.modules.get(UTILS), "GenerationMixin", None)
    return all(getattr(kind, name, None) is getattr(mixin, name, name) for name in names)


def why_not_late(kind: type) -> Optional[str]:
    """Reason why models of the class must read the stop check at once, or None."""
    if not is_own(kind, "generate"):
        return "generate is not transformers' own"
    utils = sys.modules[UTILS]
    found = LOOP in getattr(utils, MODES, {}).values() and is_own(kind, LOOP)
    known = found and _is_known(getattr(kind, LOOP), getattr(utils, CHECK, None))
    return None if known else "its loop is of no known form"


@functools.lru_cache(maxsize=16)
def _is_known(loop: Callable, check: Optional[type]) -> bool:
    if not isinstance(loop, FunctionType) or CHECK not in loop.__code__.co_names:
        return False
    if tuple(inspect.signature(loop).parameters)[: len(TAKES)] != TAKES:
        return False
    for name, expected in CALLS.items():
        function = getattr(check, name, None)
        if function is None or tuple(inspect.signature(function).parameters) != expected:
            return False
    return True


def sample(
    view: nn.Module, model: nn.Module, input_ids, logits_processor, stopping_criteria,
    generation_config, **given,
):  # fmt: skip
    """transformers' loop for a model and its view, with the late check if everything that takes
    part is known."""
    loop, decoding = getattr(type(model), LOOP), decoding_of(model)
    given.update(
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
    )
    criteria = Criteria(stopping_criteria)
    slots = getattr(generation_config, "max_length", None) or 0
    if (
        decoding is None
        or given.get("synced_gpus")
        or why_not_late(type(model)) is not None
        or not _are_of("logits_process", logits_processor, PROCESSORS)
        or not _are_of("stopping_criteria", stopping_criteria, CRITERIA)
        or getattr(generation_config, "disable_compile", True)
        or criteria.max_length > slots  # a token too many would have none
    ):
        return loop(model, input_ids, **given)
    late = Late(decoding, criteria, bool(generation_config.do_sample))
    shown = generation_config.output_scores or generation_config.output_logits
    if hands_on(loop) and not (shown and generation_config.return_dict_in_generate):
        late.choice = choice_of(logits_processor, generation_config.do_sample)
    loop = _with(loop, late)
    given["stopping_criteria"] = criteria
    given["logits_processor"] = late.choice or logits_processor
    if "tokenizer" not in inspect.signature(model.forward).parameters:
        given.pop("tokenizer", None)  # the criteria have it; a graph takes no such input
    found = with_static_cache(model, input_ids, generation_config, given)
    try:
        late.tokens = None if found is given else input_ids.shape[1]
        try:
            return loop(view, input_ids, **found)
        except TooLong:  # no token was drawn or streamed yet
            late.tokens = None
            return loop(view, input_ids, **given)
    finally:
        late.leave()


def _are_of(file: str, objects: list, names: set) -> bool:
    known = f"transformers.generation.{file}"
    kinds = map(type, objects)
    return all(kind.__module__ == known and kind.__name__ in names for kind in kinds)


def _with(loop: FunctionType, late: "Late") -> FunctionType:
    """The function with another stop check; nothing in transformers is modified."""
    names = {**loop.__globals__, **(GLOBALS if late.choice else {}), CHECK: late}
    found = FunctionType(loop.__code__, names, loop.__name__, loop.__defaults__, loop.__closure__)
    found.__kwdefaults__ = loop.__kwdefaults__
    return found


class Criteria(list):
    """transformers' list of stopping criteria, without launches for a length that is not reached,
    and with fewer for tokens that end a sequence."""

    def __init__(self, criteria):
        super().__init__(criteria)
        lengths = [each for each in criteria if type(each).__name__ == LENGTH]
        self.all = criteria
        self.max_length = min([each.max_length for each in lengths], default=math.inf)
        self.others = [each for each in criteria if type(each).__name__ != LENGTH]
        told = [getattr(each, "max_position_embeddings", None) for each in lengths]  # by a warning
        self.reached = min([self.max_length, *filter(None, told)])
        self.none: Optional[torch.Tensor] = None

    def __call__(self, input_ids, scores, **options) -> torch.Tensor:
        """Returns which sequences [B] have ended."""
        if input_ids.shape[1] >= self.reached:
            return self.all(input_ids, scores, **options)
        if self.others:
            found = [_ended(each, input_ids, scores, options) for each in self.others]
            return functools.reduce(torch.Tensor.logical_or, found)
        if self.none is None:
            self.none = input_ids.new_zeros(len(input_ids), dtype=torch.bool)
        return self.none


def _ended(criterion: Callable, input_ids, scores, options: dict) -> torch.Tensor:
    """Returns which sequences [B] a criterion ends; for tokens that end one in two launches, of
    which torch.isin takes five and more."""
    ends = getattr(criterion, "eos_token_id", None)
    known = type(criterion).__name__ == EOS and not options and ends.ndim == 1
    if not known or ends.device != input_ids.device:  # it moves them to the device
        return criterion(input_ids, scores, **options)
    found = input_ids[:, -1:] == ends
    return found[:, 0] if len(ends) == 1 else found.any(1)


class Late:
    """The replacement of transformers' DeferredStopCheck for one call of generate."""

    def __init__(self, decoding: Decoding, criteria: Criteria, draws: bool):
        self.decoding, self.known, self.draws = decoding, not criteria.others, draws
        self.choice: Optional[Choice] = None  # that graphs make
        self.cache: Any = None  # for which they make it
        self.tokens: Optional[int] = None  # of the prompt, into a cache that nobody asked for

    def is_supported(
        self, device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool
    ) -> bool:
        """True if the late check may be used: in a cache that lives on, a surplus step would be
        visible. Raises TooLong if the prompt has filled more slots than it has ids."""
        if self.tokens is not None:
            check_length(cache, self.tokens)
        if is_assistant or cache_is_returned and not self.known:
            return False
        return Graph.why_not(device) is None and why_not_cache(cache) is None

    def __call__(
        self, input_ids, max_length: int, cache: Any, cache_is_returned: bool, streamer=None
    ) -> "StopCheck":
        steps = self.decoding.steps
        if self.choice is not None:
            self.decoding.choices[cache], self.cache = self.choice, cache
        kept = cache_is_returned and streamer is not None  # whose errors end a call

        def is_replayed() -> bool:
            step = steps.get(cache)
            return not kept and step is not None and step.graph is not None

        reads = [] if self.known else [input_ids.new_ones(len(input_ids))]
        reads += [] if streamer is None else [input_ids.new_ones(len(input_ids))]
        slots = [Graph.delivery(input_ids.device, reads) for _ in range(2)]
        draws = Draws(Graph.generator(input_ids.device)) if self.draws else None
        return StopCheck(max_length, is_replayed, slots, draws, streamer, self.known)

    def leave(self) -> None:
        """Ends the call: a later one on the cache may have another loop, which knows no Token."""
        if self.cache is not None:
            self.decoding.choices.pop(self.cache, None)


class Draws:
    """The offsets of a generator after each of the latest tokens."""

    def __init__(self, generator):
        self.generator = generator
        self.offsets = deque([generator.get_offset()], maxlen=3)

    def note(self) -> None:
        self.offsets.append(self.generator.get_offset())

    def take_back(self) -> None:
        """Restores the generator's state before the latest token, unless another thread draws,
        too."""
        before, kept, after = self.offsets
        if after - kept == kept - before and self.generator.get_offset() == after:
            self.generator.set_offset(kept)


class StopCheck:
    """transformers' StopCheck, which answers for the token before if tokens are replays.

    max_length: of the ids. is_replayed(): True if the next step may be launched before the answer.
    slots: two deliveries to the host. known: sequences end by their length alone.
    """

    def __init__(self, max_length, is_replayed, slots, draws, streamer, known):
        self.max_length, self.is_replayed, self.known = max_length, is_replayed, known
        self.free, self.sent = deque(slots), deque()
        self.draws, self.streamer = draws, streamer
        self.ended = False

    def __call__(self, unfinished_sequences, tokens, length: int) -> bool:
        if self.draws is not None:
            self.draws.note()
        slot = self.free.popleft()
        reads = [] if self.known else [unfinished_sequences]
        slot.send(reads if self.streamer is None else [*reads, tokens])
        self.sent.append(slot)
        late = 1 if self.is_replayed() else 0
        while len(self.sent) > late and not self.ended:
            self._receive()
        return self.ended or length >= self.max_length

    def _receive(self) -> None:
        slot = self.sent.popleft()
        values = slot.wait()
        self.free.append(slot)
        if self.streamer is not None:
            self.streamer.put(values[-1].clone())
        if not self.known:
            self.ended = not values[0].any()

    def finish(self) -> int:
        """Returns the number of surplus steps."""
        if self.ended:
            if self.sent and self.draws is not None:
                self.draws.take_back()
            return len(self.sent)
        while self.sent:
            self._receive()
        return 0
