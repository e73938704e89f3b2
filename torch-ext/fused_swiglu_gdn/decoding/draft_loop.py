"""generate with drafts and CUDA graphs: a loop of our own for one sequence.

transformers' assisted decoding runs each round eagerly and reads from the device some twenty times
in it. Here a round is one replay and one read. What is around it are transformers' own objects: the
`LogitsProcessor`s, the stopping criteria and the streamer, which get the tokens one by one,
as without drafts.
"""

import contextlib
import copy
import sys
from typing import Any, Callable, List, Optional

import torch
from torch import nn

from .capture import Graph
from .graph_rules import CACHE_NAMES, CACHES, why_not_cache, why_not_model, why_not_now
from .late import EOS, LENGTH, UTILS, Draws
from .lookup import Lookup, Pace
from .rounds import Round
from .row_choice import RowChoice, right_on_host, rows_choice
from .rows import TakesBack, why_not_rows, with_rows
from .static_cache import PREPARE, TooLong, _slides, check_length, with_static_cache

MOST = 7  # drafts of a round: a round keeps a state for each of its tokens
# arguments of generate's loop that are not the model's
LOOPS = ("synced_gpus", "streamer", "inputs_tensor", "assistant_model", "assistant_tokenizer",
         "tokenizer")  # fmt: skip
OTHERS = ("assistant_early_exit", "assistant_ensemble_weight", "use_mtp", "speculation_type")


class NotServed(Exception):
    """The call is left to transformers' loop; nothing was changed."""


def drafted(
    model: nn.Module, input_ids, logits_processor, stopping_criteria, generation_config, **given
):
    """Returns what transformers' assisted decoding does, for a model that decodes by graphs.

    Raises NotServed, before a token is drawn or streamed.
    """
    config, around = generation_config, {name: given.pop(name, None) for name in LOOPS}
    if config.prompt_lookup_num_tokens is None:
        raise NotServed  # an assistant's rounds
    if why_not_loop(model, input_ids, config, around) is not None:
        raise NotServed
    choice = rows_choice(logits_processor, config, input_ids)
    if choice is None:
        raise NotServed
    if getattr(config, "output_scores", False):
        choice.known = None  # a kernel's are seen by nobody
    count = min(config.prompt_lookup_num_tokens, MOST)
    given = _with_cache(model, input_ids, config, given, count)
    drafter = Lookup(count)
    loop = Loop(model, input_ids, choice, stopping_criteria, config, around["streamer"], given)
    try:
        loop.prompt(count)
    except TooLong:
        raise NotServed from None
    with getattr(model, "_optimize_model_for_decode", contextlib.nullcontext)():
        loop.run(drafter, count)
    return loop.result()


def why_not_loop(model: nn.Module, ids: torch.Tensor, config: Any, around: dict) -> Optional[str]:
    """Reason why the call is left to transformers' loop, or None."""
    if not hasattr(model.__dict__.get("get_compiled_call"), "steps"):
        return "the model has no graphs"
    if ids.ndim != 2 or len(ids) != 1 or around["synced_gpus"]:
        return "it is not for one sequence"
    if around["assistant_tokenizer"] is not None or model.training:
        return "the assistant has other tokens"
    if any(getattr(config, name, None) for name in OTHERS):
        return "drafts come in another way"
    if getattr(config, "disable_compile", True) or why_not_now(ids.device) is not None:
        return "graphs are switched off"
    if getattr(config, "output_attentions", False) or getattr(
        config, "output_hidden_states", False
    ):
        return "hidden states are asked for"
    return why_not_model(model)


def _with_cache(model: nn.Module, ids: torch.Tensor, config: Any, given: dict, count: int) -> dict:
    """The arguments of the model with a static cache of our own, which has a slot for each draft
    behind the longest text."""
    name = next((name for name in CACHE_NAMES if given.get(name) is not None), None)
    cache, slots = given.get(name), getattr(config, "max_length", None)
    if type(slots) is not int:
        raise NotServed
    longer = copy.copy(config)
    longer.max_length = slots + count
    asked = getattr(config, "cache_implementation", None)
    if asked is None and not getattr(config, "return_dict_in_generate", False):
        found = with_static_cache(model, ids, longer, given)
        made = found.get(name)
        if found is given:
            raise NotServed
    elif asked != "static" or why_not_cache(cache) is not None or _is_used(cache):
        raise NotServed
    elif PREPARE in model.__dict__ or given.get("inputs_embeds") is not None:
        raise NotServed
    else:
        made = sys.modules[CACHES].StaticCache(config=model.config, max_cache_len=slots + count)
        if _slides(made, slots + count):
            raise NotServed  # a window becomes full
    if why_not_rows(made, model) is not None:
        raise NotServed
    with_rows(made, 1 + count)
    return {**given, name: made}


def _is_used(cache: Any) -> bool:
    started = any(getattr(layer, "is_initialized", False) for layer in cache.layers)
    return started or getattr(cache, "_is_user_defined", False)


class Loop:
    """One call of generate. ids: the prompt [1, T]; given: the model's arguments."""

    def __init__(self, model, ids, choice: RowChoice, criteria, config, streamer, given: dict):
        self.model, self.prompt_ids, self.choice = model, ids, choice
        self.config, self.streamer, self.given = config, streamer, given
        self.name = next(name for name in CACHE_NAMES if given.get(name) is not None)
        self.cache = given[self.name]
        self.ids: List[int] = ids[0].tolist()
        told = getattr(config, "return_dict_in_generate", False)
        self.scores = [] if told and config.output_scores else None
        self.logits = [] if told and config.output_logits else None
        self.ends = set()
        self.others: List[Callable] = []
        self.longest = config.max_length
        for each in criteria:
            kind = type(each).__name__
            if kind == LENGTH:
                self.longest = min(self.longest, each.max_length)
            elif kind == EOS and each.eos_token_id.ndim == 1:
                self.ends |= set(each.eos_token_id.tolist())
            else:
                self.others.append(each)
        self.hidden = not told and not self.others  # what a token leaves in the cache
        generator = Graph.generator(ids.device) if choice.choice.draws else None
        self.draws = None if generator is None else Draws(generator)
        self.pace = Pace()
        self.rounds: dict = {}  # by the number of tokens
        self.now: Optional[Round] = None

    def prompt(self, count: int) -> None:
        """Computes the prompt, and chooses the first token."""
        model, given = self.model, self.given
        model.get_compiled_call(getattr(self.config, "compile_config", None))  # expects a prompt
        ids = self.prompt_ids
        inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **given)
        out = model(**inputs, return_dict=True)
        check_length(self.cache, ids.shape[1])
        self.given = model._update_model_kwargs_for_generation(out, dict(given), num_new_tokens=1)
        self.out = out
        logits = out.logits[:, -1]
        token, scores = self.choice.first(logits)
        self.choice.begin(logits.shape[-1])
        self.back = TakesBack(self.cache, 1 + count)
        self.first, self.kept = token.tolist(), (logits, scores)

    def run(self, drafter: Any, count: int) -> None:
        for token in self.ids:
            drafter.add(token)
        pace, back = self.pace, self.back
        self._take(self.first, *self.kept, drafter)
        self.kept = None
        while not self.ended:
            drafts = pace.drafts(drafter, count)
            if self.now is not None and self.now.sent:  # launched before its token was known
                T, read = 1, self.ids[-1:]
            else:
                T = 1 + count if drafts else 1
                read = self.ids[-1:] + drafts
                read += read[-1:] * (T - len(read))
                back.begin() if T > 1 else back.end()
                self._launch(self._round(T), read)
            if not drafts and self._may_follow():
                self._launch(self.now, None)
            chosen = self.now.receive()
            right = right_on_host(read, chosen)
            if T > 1:
                back.of_rows = right
                pace.note(right)
            taken = self._take(chosen[:right], self.now.logits, self.now.scores, drafter)
            back.take_back(right - taken)
            self.now.count(len(self.ids) - 1)
            if self.others or self.streamer is not None:
                self.now.checked = False  # they may have changed what it was
        if self.now is not None and self.now.sent and self.draws is not None:
            self.draws.take_back()

    def _launch(self, now: Round, ids: Optional[List[int]]) -> None:
        if now is not self.now:
            self.now, now.checked = now, False
        now.launch(ids)
        if self.draws is not None:
            self.draws.note()

    def _may_follow(self) -> bool:
        """True if the next token may be launched before this one is known: where none is drafted
        for it, and of a surplus one nothing is seen."""
        room = len(self.ids) + 1 < self.longest
        return room and self.hidden and self.pace.rests() and self.now.follows()

    def _round(self, T: int) -> Round:
        if T not in self.rounds:
            of = self.model, self.cache, self.name, T, self.choice, self.back
            self.rounds[T] = Round(*of, self._inputs)
        return self.rounds[T]

    def _inputs(self, ids: torch.Tensor) -> dict:
        """transformers' inputs for tokens [1, T], the first of which is the latest of the text."""
        T, model = ids.shape[1], self.model
        since = len(self.ids) - self.prompt_ids.shape[1] - 1 + T - 1
        given = dict(self.given)
        if since:
            own = model._update_model_kwargs_for_generation
            given = own(self.out, given, num_new_tokens=since)
        text = torch.cat([ids.new_tensor([self.ids[:-1]]), ids], 1)
        found = model.prepare_inputs_for_generation(
            text, next_sequence_length=T, is_first_iteration=False, **given
        )
        if "logits_to_keep" in found:
            found["logits_to_keep"] = T
        found.pop(self.name, None)
        return {**found, "return_dict": True}

    def _take(self, tokens: List[int], logits, scores, drafter: Any) -> int:
        """Adds tokens to the text, one by one, until it ends; returns how many."""
        self.ended = False
        for n, token in enumerate(tokens):
            self.ids.append(token)
            drafter.add(token)
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
                text = self.prompt_ids.new_tensor([self.ids])
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
        ids = self.prompt_ids.new_tensor([self.ids])
        if not getattr(self.config, "return_dict_in_generate", False):
            return ids
        kind = sys.modules[UTILS].GenerateDecoderOnlyOutput
        name = self.name if self.name in kind.__dataclass_fields__ else CACHE_NAMES[0]
        lists = (None if x is None else tuple(x) for x in (self.scores, self.logits))
        scores, logits = lists
        return kind(sequences=ids, scores=scores, logits=logits, **{name: self.cache})
