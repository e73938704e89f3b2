"""Tokens of transformers' generate in rounds of drafts: CUDA graphs of several tokens.

    python benchmarks/compare_drafts.py [--cases qwen:1 llama:1 kimi:1] [--wait-for FILE]

Random weights, bf16, greedy, as compare_generate.py has them, but for 512 tokens: what is not a
token's, the capture of two graphs above all, is subtracted, and its spread is divided by their
number. Compares tokens without drafts with those of rounds of three drafts, which an oracle makes
so that each is right at a rate of 0, .7 and 1, in turns; and the graph of four tokens with that of
one. Random weights repeat no text, so drafts by lookup in a real text are another measurement, with
a trained model.
"""

import random
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Optional

import torch
from compare_generate import MODELS, PROMPT, in_turns, model_of, prompt_of, row_of, token_us
from runner import run

DRAFTS = 3  # of a round
NEW = 512  # tokens


def oracle_of(truth: list, rate: float):
    """A class of drafters of a text, whose drafts are right at a rate, given those before are."""

    class Oracle:
        def __init__(self, count):
            self.count, self.ids, self.random = count, [], random.Random(0)

        def add(self, token):
            self.ids.append(token)

        def drafts(self):
            n = len(self.ids)
            found = truth[n : n + self.count] or [0]
            return [x if self.random.random() < rate else (x + 1) % 1000 for x in found]

        def end(self):
            pass

    return Oracle


def round_us(round, tokens: int) -> float:
    """Microseconds of a replay of a round's graph behind a prompt of `tokens`."""
    marks, times = [torch.cuda.Event(enable_timing=True) for _ in range(2)], []
    for _ in range(9):
        for length in round.back.lengths:
            length.fill_(tokens)  # there are slots for all replays
        marks[0].record()
        for _ in range(16):
            round.graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]) / 16 * 1e3)
    return statistics.median(times)


@torch.no_grad()
def drafted(package, name: str, batch: int, begin: Optional[Path] = None) -> list:
    """Greedy tokens without drafts and with those of an oracle, and what its graphs take."""
    model = model_of(name)
    print(package.kernelize(model, cuda_graphs=True), flush=True)
    loop, rows = (sys.modules[f"{package.__name__}.decoding.{x}"] for x in ("draft_loop", "rows"))
    own, pace, rounds, taken = loop.Round, loop.Pace, {}, {}
    words = {"prompt_lookup_num_tokens": DRAFTS}

    class Seen(own):
        def __init__(self, model, cache, argument, T, *rest):
            super().__init__(model, cache, argument, T, *rest)
            rounds[T] = self

    def noting(found: list):
        """A Pace that writes down how many tokens each round gave."""

        class Noting(pace):
            def note(self, tokens):
                found.append(tokens)
                super().note(tokens)

        return Noting

    def text() -> list:
        """The ids of a call in which no draft is right and every round has all rows: what those
        choose may differ from what one row chooses by rounding."""
        loop.Lookup = oracle_of([], 0.0)
        pace.WORTH, worth = 0, pace.WORTH
        try:
            found = model.generate(
                prompt_of(batch), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                eos_token_id=2**31, cache_implementation="static", **words,
            )  # fmt: skip
        finally:
            pace.WORTH = worth
        return found[0].tolist()

    truth = text()

    def way(rate: float) -> float:
        taken[rate] = []
        loop.Lookup, loop.Pace = oracle_of(truth, rate), noting(taken[rate])
        return token_us(model.generate, batch, NEW, **words)

    ways = {"without drafts": lambda: token_us(model.generate, batch, NEW)}
    ways.update({f"drafts, {rate:g} right": partial(way, rate) for rate in (0.0, 0.7, 1.0)})
    row = row_of(name, batch, in_turns(ways, begin))
    row["tokens_a_round"] = {f"{rate:g}": statistics.mean(x) for rate, x in taken.items() if x}
    loop.Round, leave = Seen, rows.TakesBack.leave
    rows.TakesBack.leave = lambda self: None  # the graphs read what it gives back
    try:
        loop.Lookup = oracle_of(truth, 0.0)  # after 8 rounds it is one token a time
        token_us(model.generate, batch, **words)
        graphs = {f"a graph of {T}": round_us(x, PROMPT) for T, x in sorted(rounds.items())}
    finally:
        rows.TakesBack.leave, loop.Round = leave, own
    return [row, {"what": f"{MODELS[name][0]}, batch {batch}, a round's graph", "us": graphs}]


def rows(package, options):
    for case in options.cases or ["qwen:1", "llama:1", "kimi:1"]:
        name, batch = case.split(":")
        yield from drafted(package, name, int(batch), options.wait_for)
        torch.cuda.empty_cache()


ARGUMENTS = {"--cases": {"nargs": "+", "help": "model:1"}, "--wait-for": {"type": Path}}
main = partial(run, __doc__, lambda options: "generate_drafts", rows, ARGUMENTS, merge=True)

if __name__ == "__main__":
    main()
