"""Finds the role of each argument of an attention module's forward."""

import itertools
from typing import Iterator, Tuple

import torch
from torch import nn

from ..layers.forward import Word
from .attention_numbers import FIRST, OTHERS, TRAINING, Run, are_the_same
from .code import Refused
from .stand_ins import (
    SIZES,
    Cache,
    Opaque,
    Part,
    Raises,
    Read,
    name_of,
)
from .trial import Trial, plain_values


class Learning(Trial):
    """The part of an equivalence check (attention_trial.py) that finds roles."""

    READS = {
        "hidden": lambda how, optional: (
            how in (*SIZES, "part") or not optional and how not in ("__iter__", "update")
        ),
        "tables": lambda how, optional: how in ("__iter__", "__getitem__"),
        "cache": lambda how, optional: how == "update",
        "mask": lambda how, optional: False,
    }

    def first_runs(self) -> Tuple[Run, Run]:
        """A run without and one in training."""
        run = self.called(FIRST, values=self.marks())
        self.D = run.interface.calls[0][1].shape[-1]
        if self.tables is not None and run.tables[0].shape[-1] != self.D:
            run = self.called(FIRST, values=self.marks())  # with tables as wide as the heads
        return run, self.called(TRAINING, values=self.marks())

    def learn(self, what: Read) -> None:
        """Also of an attribute that was assumed to be passed on."""
        if what.name.startswith("self."):
            self.handed -= {what.name[5:]}
        else:
            super().learn(what)

    def first(self) -> Tuple[Run, Run]:
        """Finds the arguments and the plan, with tables for each row or for all rows."""
        self.dims = 3
        try:
            return self.fitting()
        except Refused as why:
            if self.tables is None:
                raise
            self.dims = 2
            try:
                return self.fitting()
            except Refused:
                raise why from None

    def fitting(self) -> Tuple[Run, Run]:
        """The first runs with tables of a width that fits, from which the plan is found."""
        runs = self.with_tables()
        self.see(runs[0])
        return runs

    def with_tables(self) -> Tuple[Run, Run]:
        error = None
        for width in dict.fromkeys([1, 2, *self.widths()]):
            self.D = width
            try:
                return self.learned(self.first_runs)
            except Raises as why:
                error = error or why
                if self.tables is None:
                    raise
        raise error

    def see(self, run: Run) -> None:
        if self.hidden is None:
            raise Refused("none of its arguments reaches its projections")
        mask = run.interface.calls[0][4]
        if mask is not None and self.mask is None:
            word = self.known_word("", mask, run)
            self.mask = word.what if word is not None and word.how == "argument" else None
            if self.mask is None:
                raise Refused("it changes the attention mask")
        self.plan, self.sizes = self.planned(run)

    def widths(self) -> Iterator[int]:
        """Candidates for the head dim."""
        outs = [p.sizes[1] for p in self.parts.values() if isinstance(p, Part) and p.sizes[1:]]
        values = plain_values(self.module, self.source.reads).values()
        sizes = [v for v in values if type(v) is int and v > 2 and any(n % v == 0 for n in outs)]
        yield from dict.fromkeys([*sizes, 64, 128, 32, 256, 96, 80, 16, 8])

    # ------------------------------------------------------------------ what is learned

    def those_handed(self) -> frozenset:
        """Attributes that are only passed on, whatever their value."""
        implementation, words, index, updates, updates_with = self.calls
        everything = (implementation, index, *updates, *updates_with, *words, *self.training_words)
        met = frozenset(w.what for w in everything if w is not None and w.how == "attribute")
        if not self.handed <= met:
            return met
        if self.are_handed(self.handed):
            return self.handed
        return frozenset(name for name in self.handed if self.are_handed({name}))

    def are_handed(self, names) -> bool:
        others = OTHERS if self.source.guarded.intersection(names) else OTHERS[: bool(names)]
        for value, case in itertools.product(others, (FIRST, TRAINING)):
            if not self.passes(case, dict.fromkeys(names, value)):
                return False
        return True

    def form(self, partial: bool, without: bool) -> tuple:
        implementation, words, index, updates, updates_with = self.calls
        identities = [n for n, part in self.parts.items() if isinstance(part, nn.Module)]
        return (
            self.arguments(), self.source.checks, self.tables, self.cache,
            self.mask, index, updates, updates_with, self.plan.projections, self.sizes,
            self.plan.q_norm, self.plan.k_norm, self.plan.out, self.plan.heads, self.D, self.dims,
            partial, without, tuple(identities), implementation, words, self.training_words,
            self.rests, self.eager,
        )  # fmt: skip

    def others(self) -> tuple:
        return super().others(self.tables, self.cache, self.mask)

    def again(self, absent: frozenset) -> Run:
        return self.called(FIRST, values=self.marks(), absent=absent)

    def keywords_in(self, run: Run) -> list:
        return [run.interface.calls[0][5]]

    def calls_of(self, run: Run) -> tuple:
        """The sources of all arguments of the registry, the attention function and the cache."""
        *_, keywords, _ = run.interface.calls[0]
        ((name, self.eager),) = run.interface.asked
        self.rests, keywords = self.passed(keywords, run)
        caches = [v for v in run.given.values() if type(v) is Cache and v.calls]
        index, updates, updates_with = None, (), ()
        if caches:
            _, _, layer, positional, more = caches[0].calls[0]
            index = self.word("", layer, run)
            updates = tuple(self.word("", v, run) for v in positional)
            updates_with = self.words(more, run)
        words = self.words(keywords, run)
        return self.word("", name, run), words, index, updates, updates_with

    def words(self, values: dict, run: Run) -> Tuple[Word, ...]:
        return tuple(self.word(name, value, run) for name, value in values.items())

    def word(self, name: str, value: object, run: Run) -> Word:
        """The source of a value."""
        known = self.known_word(name, value, run)
        if known is not None:
            return known
        if issubclass(type(value), Opaque):
            path = name_of(value)
            if path.startswith("self."):
                return Word(name, "attribute", path[5:])
        elif type(value) is dict and are_the_same(value, self.rest(run)):
            return Word(name, "rest")
        elif type(value) is dict and all(type(key) is str for key in value):
            return Word(name, "dict", self.words(value, run))
        elif isinstance(value, torch.Tensor):
            for n, table in enumerate(run.tables or ()):
                if value is table:
                    return Word(name, "table", n)
            for parameter, own in run.twin._parameters.items():
                if value is own:
                    return Word(name, "parameter", parameter)
        raise Refused(f"it hands on {name or 'a value'}, and nobody knows where it comes from")
