"""Tokens of transformers' generate in rounds of drafts: CUDA graphs of several tokens.

    python benchmarks/compare_drafts.py [--cases qwen:1 llama:1 kimi:1 moe:1 qwen:mtp
                                                 llama32:assistant] [--turns 3] [--wait-for FILE]

Random weights, bf16, greedy, as compare_generate.py has them, but for 512 tokens (256 in 32
layers): what is not a token's, the capture of two graphs above all, is subtracted, and its spread
is divided by their number. A turn that compiles comes before those that are
timed.
Compares tokens without drafts with those of rounds of three drafts, which an oracle makes so that
each is right at a rate of 0, .7 and 1, in turns; and the graph of four tokens with that of one.
Random weights repeat no text, so drafts by lookup in a real text are another measurement, with a
trained model: that of drafts_of_text.py. `qwen:mtp` and `llama32:assistant` do so with drafts of an
MTP layer and of a smaller model, both of random weights, which are computed and then replaced by an
oracle's. A row has the date of its process: a case alone takes 20 to 50 seconds.
"""

import contextlib
import datetime
import random
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Callable, Dict, Iterator

import model_cases
import torch
from compare_generate import MODELS, PROMPT, in_turns, model_of, prompt_of, row_of, token_us
from runner import DEVICE, kernelized, run

CASES = ["qwen:1", "llama:1", "kimi:1", "moe:1", "qwen:mtp", "llama32:assistant"]
DRAFTS = 3  # of a round
ONE_B = {  # sizes of Llama 3.2 1B
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
NEW, SOME = 512, 160  # tokens: timed, and where a graph alone is timed
FEWER = {"llama32": 256}  # timed of a large model


def oracle_of(drafter: type, truth: list, rate: float):
    """A class of drafters of a text, whose drafts are right at a rate, given those before are."""

    class Oracle(drafter):
        def __init__(self, count):
            self.count, self.ids, self.random = count, [], random.Random(0)

        def add(self, token):
            self.ids.append(token)

        def drafts(self):
            n = len(self.ids)
            found = truth[n : n + self.count] or [0]
            return [x if self.random.random() < rate else (x + 1) % 1000 for x in found]

    return Oracle


def round_us(round, tokens: int) -> float:
    """Microseconds of a replay of a round's graph behind a prompt of `tokens`."""
    marks, times = [torch.cuda.Event(enable_timing=True) for _ in range(2)], []
    lengths = [*round.back.lengths]
    if round.drafter is not None and round.drafter.reads_hidden:
        lengths.append(round.drafter.layer.cumulative_length)
    for _ in range(9):
        for length in lengths:
            length.fill_(tokens)  # there are slots for all replays
        marks[0].record()
        for _ in range(16):
            round.graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]) / 16 * 1e3)
    return statistics.median(times)


def timed(name: str, ways: Dict[str, Callable], options) -> dict:
    """A row of ways, which are functions of the number of new tokens."""
    ways = {each: partial(way, FEWER.get(name, NEW)) for each, way in ways.items()}
    row = row_of(name, 1, in_turns(ways, options.wait_for, options.turns))
    return {**row, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")}


def graphs_us(model, back: type, rounds: dict, **words) -> dict:
    """Of the rounds that a generate of SOME tokens makes: microseconds of each one's graph."""
    leave, back.leave = back.leave, lambda self: None  # the graphs read what it gives back
    try:
        model.generate(
            prompt_of(1), max_new_tokens=SOME, do_sample=False, pad_token_id=0,
            eos_token_id=2**31, cache_implementation="static", **words,
        )  # fmt: skip
        return {str(T): round_us(x, PROMPT) for T, x in sorted(rounds.items())}
    finally:
        back.leave = leave


@contextlib.contextmanager
def given_text(package):
    """Rounds choose the words of a given text, which they yield as a list, whatever the logits are:
    random weights have so many of nearly the same size that a text depends on how sums round."""
    choice = sys.modules[f"{package.__name__}.decoding.rounds"].RowChoice
    own, first = choice.choose, choice.first
    random.seed(0)
    text = [*prompt_of(1)[0].tolist(), *(random.randrange(1, 1000) for _ in range(NEW + 64))]
    table = torch.tensor(text, device=DEVICE)

    def choose(self, logits, ids, before):
        tokens, scores = own(self, logits, ids, before)
        if isinstance(before, torch.Tensor):  # else a draft
            tokens = table[before + 1 + torch.arange(len(tokens), device=DEVICE)]
        return tokens, scores

    def chosen_first(self, logits):
        return table[PROMPT : PROMPT + 1], first(self, logits)[1]

    choice.choose, choice.first = choose, chosen_first
    try:
        yield text
    finally:
        choice.choose, choice.first = own, first


def with_mtp(package, model, table) -> tuple:
    """An MTP layer of random weights for generate, a class of drafters and a change of it by which
    drafts are those of the table [tokens of the text], at the cost of the layer's own."""
    loop, mtp = (sys.modules[f"{package.__name__}.decoding.{x}"] for x in ("draft_loop", "mtp"))
    weights = {
        f"mtp.{n}": torch.randn(x.shape, device=DEVICE, dtype=model.dtype) * 0.02
        for n, x in mtp.Mtp(model, 1).state_dict().items()
    }
    layer, own = package.load_mtp(model, weights, 2), loop.MtpRounds.after
    place = torch.arange(layer.count, device=DEVICE) + 1

    def after(self, read, tokens, hidden, right, length):
        found = own(self, read, tokens, hidden, right, length)
        return torch.cat([found[:1], table[length + right + place]])

    return layer, loop.MtpRounds, {"after": after}, layer.count


def with_assistant(package, model, table) -> tuple:
    """The same of an assistant, which is Llama 3.2 1B's size."""
    loop = sys.modules[f"{package.__name__}.decoding.draft_loop"]
    helper = model_cases.model_of("llama", device=DEVICE, **ONE_B)
    package.kernelize(helper, cuda_graphs=True)
    helper.generation_config.num_assistant_tokens = DRAFTS
    own, place = loop.Assistant._chain, torch.arange(DRAFTS, device=DEVICE) + 2

    def chain(self, pair, length):
        own(self, pair, length)
        return table[length + place]

    return helper, loop.Assistant, {"_chain": chain}, DRAFTS


HELPERS = {"mtp": (with_mtp, "an MTP layer"), "assistant": (with_assistant, "an assistant of 1B")}


@torch.no_grad()
def helped(package, truth: list, name: str, kind: str, options) -> Iterator[dict]:
    """Greedy tokens without drafts, and with those of a helper, of which an oracle says how many
    are right."""
    model = model_of(name)
    kernelized(package, model, cuda_graphs=True)
    loop = sys.modules[f"{package.__name__}.decoding.draft_loop"]
    table = torch.zeros(PROMPT + NEW + 64, dtype=torch.int64, device=DEVICE)
    helper, drafter, changes, count = HELPERS[kind][0](package, model, table)
    before, words = {n: getattr(drafter, n) for n in changes}, {"assistant_model": helper}
    pace, own_round, rounds, taken = loop.Pace, loop.Round, {}, {}

    def drafts(truth: list, rate: float) -> None:
        coin = random.Random(0)
        found = [x if coin.random() < rate else (x + 1) % 1000 for x in truth]
        table[: len(found)] = torch.tensor(found, device=DEVICE, dtype=torch.int64)

    class Seen(own_round):
        def __init__(self, *given):
            super().__init__(*given)
            rounds[self.T] = self

    def way(rate: float, new: int) -> float:
        taken[rate] = []

        class Noting(pace):
            def note(self, tokens):
                taken[rate].append(tokens)
                super().note(tokens)

        drafts(truth, rate)
        loop.Pace = Noting
        try:
            return token_us(model.generate, 1, new, **words)
        finally:
            loop.Pace = pace

    for each, change in changes.items():
        setattr(drafter, each, change)
    try:
        ways = {"without drafts": partial(token_us, model.generate, 1)}
        ways.update({f"drafts, {rate:g} right": partial(way, rate) for rate in (0.0, 0.7, 1.0)})
        row = timed(name, ways, options)
        row["what"] = f"{MODELS[name][0]}, {count} drafts of {HELPERS[kind][1]}"
        row["tokens_a_round"] = {f"{rate:g}": statistics.mean(x) for rate, x in taken.items() if x}
        yield row
        back = sys.modules[f"{package.__name__}.decoding.rows"].TakesBack
        loop.Round = Seen
        drafts(truth, 0.0)  # after 8 rounds it is one token a time
        row["graph_us"] = graphs_us(model, back, rounds, **words)
    finally:
        loop.Round = own_round
        for each, own in before.items():
            setattr(drafter, each, own)
    yield row


@torch.no_grad()
def drafted(package, truth: list, name: str, options) -> Iterator[dict]:
    """Greedy tokens without drafts and with those of an oracle, and what its graphs take."""
    model = model_of(name)
    kernelized(package, model, cuda_graphs=True)
    loop, rows = (sys.modules[f"{package.__name__}.decoding.{x}"] for x in ("draft_loop", "rows"))
    own, pace, rounds, taken = loop.Round, loop.Pace, {}, {}
    words = {"prompt_lookup_num_tokens": DRAFTS}

    class Seen(own):
        def __init__(self, *given):
            super().__init__(*given)
            rounds[self.T] = self

    def noting(found: list):
        """A Pace that writes down how many tokens each round gave."""

        class Noting(pace):
            def note(self, tokens):
                found.append(tokens)
                super().note(tokens)

        return Noting

    def way(rate: float, new: int) -> float:
        taken[rate] = []
        loop.Lookup, loop.Pace = oracle_of(loop.Drafter, truth, rate), noting(taken[rate])
        return token_us(model.generate, 1, new, **words)

    ways = {"without drafts": partial(token_us, model.generate, 1)}
    ways.update({f"drafts, {rate:g} right": partial(way, rate) for rate in (0.0, 0.7, 1.0)})
    row = timed(name, ways, options)
    row["what"] = f"{MODELS[name][0]}, {DRAFTS} drafts by lookup"
    row["tokens_a_round"] = {f"{rate:g}": statistics.mean(x) for rate, x in taken.items() if x}
    yield row
    loop.Round = Seen
    try:
        loop.Lookup = oracle_of(loop.Drafter, truth, 0.0)  # after 8 rounds it is one token a time
        row["graph_us"] = graphs_us(model, rows.TakesBack, rounds, **words)
    finally:
        loop.Round = own
    yield row


def rows(package, options):
    for case in options.cases or CASES:
        name, kind = case.split(":")
        with given_text(package) as text:
            if kind in HELPERS:
                yield from helped(package, text, name, kind, options)
            else:
                yield from drafted(package, text, name, options)
        torch.cuda.empty_cache()


ARGUMENTS = {
    "--cases": {"nargs": "+", "help": "model:1 or model:mtp"},
    "--turns": {"type": int, "default": 3, "help": "that are timed"},
    "--wait-for": {"type": Path},
}
main = partial(run, __doc__, lambda options: "generate_drafts", rows, ARGUMENTS, merge=True)

if __name__ == "__main__":
    main()
