"""generate with drafts and CUDA graphs: a loop of our own for one sequence.

transformers' assisted decoding runs each round eagerly and reads from the device some twenty times
in it. Here a round is one replay and one read. What is around it are transformers' own objects: the
`LogitsProcessor`s, the stopping criteria and the streamer, which get the tokens one by one,
as without drafts.
"""

import contextlib
import sys
from typing import Any, Callable, List, Optional

import torch
from torch import nn

from .assistants import Assistant, drafts_of
from .caches import (
    CACHE_NAMES,
    CACHES,
    cache_among,
    linear_layers,
    set_count,
    slides,
    takes_back,
    why_not_cache,
)  # fmt: skip
from .capture import Graph
from .choosing import choice_of
from .drafters import MOST, Drafter, Lookup, NotServed, Pace, Weights
from .graph_rules import why_not_model, why_not_now
from .graphs import decoding_of
from .late import EOS, UTILS, Criteria, Draws
from .mtp import Mtp, MtpRounds
from .reading import Reader, last_hidden
from .rounds import Round, RowChoice
from .rows import TakesBack, keeping, with_rows
from .static_cache import TooLong, is_its_own, with_static_cache

# arguments of the loop of assisted decoding that are not the model's
HELPERS = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")
LOOPS = ("synced_gpus", "streamer", *HELPERS)  # and of every loop
OTHERS = ("assistant_early_exit", "assistant_ensemble_weight", "use_mtp", "speculation_type")


def drafted(
    model: nn.Module, input_ids, logits_processor, stopping_criteria, generation_config, **given
):
    """Returns what transformers' assisted decoding does, for a model that decodes by graphs.

    Raises NotServed, before a token is drawn or streamed.
    """
    config, around = generation_config, {name: given.pop(name, None) for name in LOOPS}
    check_loop(model, input_ids, config, around)
    choice = choice_of(logits_processor, config.do_sample)
    if choice is None:
        raise NotServed("a LogitsProcessor cannot be in a graph")
    choice = RowChoice(choice, input_ids)
    if config.output_scores:
        choice.known = None  # a kernel's are seen by nobody
    helper, asked = around["assistant_model"], config.prompt_lookup_num_tokens
    if asked is not None:
        count = min(asked, MOST)
    elif type(helper) is Mtp:
        count = helper.count
    else:
        count = drafts_of(model, helper, input_ids, given)
    given, slots = with_slots(model, input_ids, config, given, count), config.max_length + 2 * count
    if asked is not None:
        drafter = Lookup(count)
    elif type(helper) is Mtp:
        drafter = MtpRounds(model, helper, slots)
    else:
        drafter = Assistant(model, helper, input_ids, given, count, slots)
    loop = Loop(Reader(model, input_ids, given), choice, stopping_criteria, config, drafter)
    loop.streamer = around["streamer"]
    try:
        loop.prompt()
    except TooLong:
        raise NotServed("its prompt fills more slots than it has ids") from None
    with _decoding(model), _decoding(helper):
        loop.run()
    return loop.result()


def _decoding(model: Any):
    """transformers' context of a model that decodes."""
    return getattr(model, "_optimize_model_for_decode", contextlib.nullcontext)()


def check_loop(model: nn.Module, ids: torch.Tensor, config: Any, around: dict) -> None:
    """Raises NotServed for a call that is left to transformers' loop."""
    off = getattr(config, "disable_compile", True)
    others = any(getattr(config, name, None) for name in OTHERS)
    reasons = (
        (decoding_of(model) is None or off, "the model decodes without graphs"),
        (ids.ndim != 2 or len(ids) != 1, "it is not for one sequence"),
        (around["synced_gpus"], "the model is on several GPUs"),
        (model.training, "the model is in training mode"),
        (around["assistant_tokenizer"] is not None, "the assistant has other tokens"),
        (others, "drafts come in another way"),
        (config.output_attentions or config.output_hidden_states, "hidden states are asked for"),
    )
    reason = next((reason for found, reason in reasons if found), None)
    reason = reason or why_not_model(model) or why_not_now(ids.device)
    if reason is not None:
        raise NotServed(reason)


def with_slots(model: nn.Module, ids: torch.Tensor, config: Any, given: dict, count: int) -> dict:
    """The arguments of the model with a static cache of our own, which has a slot for each draft
    behind the longest text. Raises NotServed."""
    (name, cache), slots = cache_among(given), config.max_length
    asked = config.cache_implementation
    if type(slots) is not int:
        raise NotServed("the length of the text has no limit")
    if asked is None and not config.return_dict_in_generate:
        found = with_static_cache(model, ids, config, given, count)
        if found is given:
            raise NotServed("a static cache would not pay")
        made = found[name]
    elif asked != "static" or why_not_cache(cache) or not is_its_own(model, cache, given):
        raise NotServed("the cache is the caller's, or not static")
    else:
        made = sys.modules[CACHES].StaticCache(config=model.config, max_cache_len=slots + count)
    served = keeping(model) == len(linear_layers(made))
    if slides(made, slots + count) or not takes_back(made) or not served:
        raise NotServed("tokens cannot be taken back from its cache")
    with_rows(made, 1 + count)
    return {**given, name: made}


class Loop:
    """One call of generate. reader: of the model, which has the prompt [1, T] to read.

    The `drafts()` of a drafter in the graph are asked for only behind a token that no round has
    chosen.
    """

    def __init__(self, reader: Reader, choice: RowChoice, criteria, config, drafter: Drafter):
        self.reader, self.choice, self.config, self.drafter = reader, choice, config, drafter
        self.cache, self.streamer = reader.cache, None
        self.ids: List[int] = reader.ids[0].tolist()
        told = getattr(config, "return_dict_in_generate", False)
        self.scores = [] if told and config.output_scores else None
        self.logits = [] if told and config.output_logits else None
        self.ends = set()
        self.others: List[Callable] = []
        criteria = Criteria(criteria)
        self.longest = min(config.max_length, criteria.max_length)
        for each in criteria.others:
            if type(each).__name__ == EOS and each.eos_token_id.ndim == 1:
                self.ends |= set(each.eos_token_id.tolist())
            else:
                self.others.append(each)
        self.hidden = not told and not self.others  # what a token leaves in the cache
        device = reader.ids.device
        generator = Graph.generator(device) if choice.choice.draws else None
        self.draws = None if generator is None else Draws(generator)
        weights = Weights(reader.model)
        one, all_rows = weights.read(), weights.read(1 + drafter.count)
        # half of a token's time is not that of weights
        self.pace = Pace((drafter.reads + (all_rows - one) / 2) / one)
        self.rounds: dict = {}  # by the number of tokens
        self.now: Optional[Round] = None

    def prompt(self) -> None:
        """Computes the prompt, and chooses the first token."""
        model, drafter = self.reader.model, self.drafter
        model.get_compiled_call(getattr(self.config, "compile_config", None))  # expects a prompt
        drafter.begin()
        hidden = drafter.reads_hidden
        with last_hidden(model) if hidden else contextlib.nullcontext() as found:
            logits = self.reader.prompt().logits[:, -1]
        token, scores = self.choice.first(logits)
        self.back = TakesBack(self.cache, 1 + drafter.count)
        if drafter.in_graph:
            drafter.read(self.reader.ids, token, found.states if hidden else None)
        for each in self.ids:
            drafter.add(each)
        self._take(token.tolist(), logits, scores)

    def run(self) -> None:
        while not self.ended:
            if self.now is None or not self.now.sent:  # else launched before its token was known
                self._next()
            now = self.now
            if self._may_follow():
                self._launch(now, None)
            chosen = now.receive()
            if now.T > 1:
                self.back.of_rows = len(chosen)
                self.pace.note(len(chosen))
                self.drafter.verified(len(chosen))
            taken = self._take(chosen, now.logits, now.scores)
            self.back.take_back(len(chosen) - taken)
            set_count(self.cache, len(self.ids) - 1)
            if self.others or self.streamer is not None:
                now.checked = False  # they may have changed what it was
        if self.now is not None and self.now.sent and self.draws is not None:
            self.draws.take_back()

    def _next(self) -> None:
        """Launches a round with drafts, or one token."""
        back, drafter = self.back, self.drafter
        made = drafter.in_graph and self.now is not None and self.now.T > 1
        if made and not self.pace.waits:
            return self._launch(self.now, None)
        drafts = self.pace.drafts(drafter)
        T = 1 + drafter.count if len(drafts) else 1
        back.begin() if T > 1 else back.end()
        now = self._round(T)
        if isinstance(drafts, torch.Tensor):
            now.ids[0, :1] = self.ids[-1]
            now.ids[0, 1:] = drafts
            return self._launch(now, None)
        read = [self.ids[-1], *drafts]
        self._launch(now, read + read[-1:] * (T - len(read)))

    def _launch(self, now: Round, ids: Optional[List[int]]) -> None:
        if now is not self.now:
            self.now, now.checked = now, False
        now.launch(ids)
        if self.draws is not None:
            self.draws.note()

    def _may_follow(self) -> bool:
        """True if the next call may be launched before this one's tokens are known: of a surplus
        one nothing is seen, and what it reads is on the device."""
        now = self.now
        room = len(self.ids) + now.T < self.longest
        likely = self.pace.rests() if now.T == 1 else not self.pace.waits
        return room and self.hidden and likely and now.follows()

    def _round(self, T: int) -> Round:
        if T not in self.rounds:
            drafter = self.drafter if self.drafter.in_graph else None
            self.rounds[T] = Round(self.reader, self.ids, T, self.choice, self.back, drafter)
        return self.rounds[T]

    def _take(self, tokens: List[int], logits, scores) -> int:
        """Adds tokens to the text, one by one, until it ends; returns how many."""
        self.ended = False
        for n, token in enumerate(tokens):
            self.ids.append(token)
            self.drafter.add(token)
            if self.logits is not None:
                self.logits.append(logits[n : n + 1].to(torch.float32, copy=True))
            if self.scores is not None:
                self.scores.append(
                    (logits if scores is None else scores)[n : n + 1].float().clone()
                )
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            self.ended = len(self.ids) >= self.longest or token in self.ends
            if self.others:
                text = self.reader.ids.new_tensor([self.ids])
                given = None if self.scores is None else tuple(self.scores)
                found = [bool(each(text, given).all()) for each in self.others]
                self.ended = self.ended or any(found)
            if self.ended:
                return n + 1
        return len(tokens)

    def result(self):
        """Returns what transformers' loop does."""
        if self.streamer is not None:
            self.streamer.end()
        self.back.leave()
        self.rounds, self.now = {}, None  # they hold the loop, too: their graphs are freed here
        ids = self.reader.ids.new_tensor([self.ids])
        if not getattr(self.config, "return_dict_in_generate", False):
            return ids
        kind = sys.modules[UTILS].GenerateDecoderOnlyOutput
        name = self.reader.name
        if name not in kind.__dataclass_fields__:
            name = CACHE_NAMES[0]
        lists = (None if x is None else tuple(x) for x in (self.scores, self.logits))
        scores, logits = lists
        return kind(sequences=ids, scores=scores, logits=logits, **{name: self.cache})
