"""The role of each argument of an attention module's forward, and the possible roles of its parts,
by their calls in a run: the comparison with ours (attention_trial.py) says which are right."""

import itertools
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import nn

from ..layers.attention import GATE_FUNCTIONS, GATES, NORMS, ROTARY, AttentionForm, Heads
from ..layers.forward import ALONE, Word
from .code import Refused
from .handed import Cache
from .opaque import Opaque, Read, name_of
from .stand_ins import F64, FREE, SIZES, Part, Raises
from .trial import Run, Trial, alike


class Case(NamedTuple):
    """One run of an equivalence check."""

    B: int
    T: int = 5
    rotary: Optional[float] = 1.0  # the width of the tables, of the head dim; None: none are given
    tables: int = 0  # the batch of the tables, as the input's by default
    cached: bool = False
    masked: bool = False
    training: bool = False
    values: str = ""  # "+", "-": of one sign; "mixed"
    dtype: torch.dtype = F64
    of_tables: Optional[torch.dtype] = None  # as the input's by default
    words: int = 1  # keywords that nobody knows
    by_position: bool = False


FIRST = Case(2, cached=True, masked=True)
TRAINING = FIRST._replace(training=True)
CASES = (  # with and without a cache, a mask and training; each gets several numbers of tokens
    FIRST,
    Case(1, cached=True, masked=True, training=True, values="mixed", words=0),
    Case(2, tables=1, cached=True, values="+", words=3),
    Case(1, cached=True, training=True, values="-", by_position=True),
    Case(9, masked=True, dtype=torch.bfloat16),
    Case(3, tables=1, masked=True, training=True, dtype=torch.float16),
    Case(2, dtype=torch.float32, words=0, by_position=True),
    Case(1, training=True, values="mixed"),
)
WITHOUT, PARTIAL = Case(2, rotary=None), Case(2, rotary=0.5, masked=True)
WIDE = [Case(2, dtype=t, of_tables=torch.float32) for t in (torch.bfloat16, torch.float16)]


# every form of queries and keys
HEADS = tuple(itertools.starmap(Heads, itertools.product(GATES, NORMS, (*ROTARY, None))))


class Learning(Trial):
    """The part of an equivalence check (attention_trial.py) that finds roles."""

    DIMS: Tuple[int, ...] = (3, 2)  # that tables may have

    READS = {
        "hidden": lambda how, optional: (
            how in (*SIZES, "part") or not optional and how not in ("__iter__", "update")
        ),
        "tables": lambda how, optional: how in ("__iter__", "__getitem__"),
        "cache": lambda how, optional: how == "update",
        "mask": lambda how, optional: False,
        "positions": lambda how, optional: how in ("__truediv__", "__div__"),
        "store": lambda how, optional: how in ("__setitem__", "__getitem__"),
    }

    def first_runs(self) -> Tuple[Run, Run]:
        """A run without and one in training."""
        marks = {path: self.opaque[f"self.{path}"] for path in self.handed}
        run = self.called(FIRST, values=marks)
        self.D = run.interface.calls[0][1].shape[-1]
        if self.tables is not None and run.tables[0].shape[-1] != (self.R or self.D):
            run = self.called(FIRST, values=marks)  # with tables as wide as the heads
        return run, self.called(TRAINING, values=marks) if self.trains else run

    def learn(self, what: Read) -> None:
        """Also of an attribute that was assumed to be passed on."""
        if what.name.startswith("self."):
            self.handed -= {what.name[5:]}
            self.seen.add(what.name[5:])
        else:
            super().learn(what)

    def first(self) -> NamedTuple:
        """The form that agrees with a first run, with tables for each row or for all rows."""
        reason = None
        for dims in self.DIMS:
            self.dims = dims
            try:
                return self.fitting(*self.with_tables())
            except Refused as why:
                reason = why if reason is None or isinstance(reason, Raises) else reason
                if self.tables is None:
                    break
        raise reason

    def with_tables(self) -> Tuple[Run, Run]:
        """First runs with tables of the first width with which they do not raise."""
        error = None
        for sizes in self.widths_of_tables():
            self.D, self.R = sizes
            try:
                return self.learned(self.first_runs)
            except Raises as why:
                error = error or why
                if self.tables is None:
                    raise
        raise error or Refused("none of its projections makes latents")

    def widths_of_tables(self) -> List[Tuple[int, int]]:
        """The head dims, and widths of the tables or 0, that are to be tried."""
        dims, numbers = list(self.head_dims()), self.numbers()
        found = [(n, 0) for n in dict.fromkeys([1, 2, *dims])] + [(n, n) for n in numbers]
        return found + [(n, n // 2) for n in dims if n % 2 == 0]

    def forms(self, run: Run) -> Iterator[NamedTuple]:
        """The possible forms, by what the parts were given and gave in a run."""
        self.sizes = sizes_in(run)
        known = {
            **self.fields(), "store": self.store, "stored": self.stored, "takes": self.takes,
            "sizes": self.sizes, "D": self.D, "dims": self.dims, "widths": (self.R or self.D,),
            "wide": False, "optional": False, "training_words": self.training_words,
        }  # fmt: skip
        identities = [n for n, part in self.parts.items() if isinstance(part, nn.Module)]
        for plan in plans_of(self, run):
            for positions in dict.fromkeys((None, self.positions)):
                more = {"positions": positions, "identities": tuple(identities)}
                yield AttentionForm(**known, **plan, **more)

    def fields(self) -> Dict[str, object]:
        """The fields that a form of attention has, whatever its parts do."""
        return {
            "kind": self.kind, "pinned": FREE, "guards": (), "arguments": self.arguments(),
            "tables": self.tables, "cache": self.cache, "mask": self.mask, **self.calls,
        }  # fmt: skip

    def more_of(self, gate: Optional[str]) -> List[tuple]:
        """The functions of a gate, and attributes by which values may be multiplied."""
        functions = (None,) if gate is None else (None, *GATE_FUNCTIONS)
        numbers = [n for n, v in self.facts.values.items() if type(v) is float and "." not in n]
        scales = (None, *(n for n in numbers if n not in self.handed))
        return [*itertools.product(functions, scales)]

    def fitting(self, run: Run, training: Run) -> NamedTuple:
        """Finds what every argument of an inner call is, and the first form that agrees."""
        if self.hidden is None:
            raise Refused("none of its arguments reaches its projections")
        self.takes = self.store is not None and run.given[self.store].taken
        mask = run.interface.calls[0][4]
        if mask is not None and self.mask is None:
            self.mask = name_of(mask) if type(mask) is Opaque else None
            if self.mask is None or run.given.get(self.mask) is not mask:
                raise Refused("it changes the attention mask")
        self.given_on: Set[str] = set()
        self.training_words = self.calls_of(training)["words"]
        self.calls = self.calls_of(run)
        # attributes that reach the attention function or the cache, and nothing else
        self.handed = self.handed.intersection(self.given_on)
        found = next((form for form in self.forms(run) if self.agrees(form, FIRST, run)), None)
        if found is None:
            raise Refused("its values or output, or its queries and keys are another formula")
        return found

    def head_dims(self) -> Iterator[int]:
        """Candidates for the head dim."""
        outs = [p.sizes[1] for p in self.parts.values() if isinstance(p, Part) and p.sizes[1:]]
        sizes = [v for v in self.numbers() if any(n % v == 0 for n in outs)]
        yield from dict.fromkeys([*sizes, 64, 128, 32, 256, 96, 80, 16, 8])

    def numbers(self) -> List[int]:
        """Sizes that the forward reads; one may be the width of the tables, whatever that of the
        heads is."""
        return [v for v in self.facts.values.values() if type(v) is int and v > 1]

    # ------------------------------------------------------------------ what is learned

    def others(self) -> tuple:
        return super().others(self.tables, self.cache, self.mask, self.positions, self.store)

    def calls_of(self, run: Run) -> Dict[str, object]:
        """The sources of what the registry, the attention function and the cache get in a run, by
        the fields of a form."""
        _, _, k, v, _, keywords, _ = run.interface.calls[0]
        ((name, eager),) = run.interface.asked
        rests, keywords = self.passed(keywords, run)
        name, index, updates, more = self.word("", name, run), None, (), {}
        for cache in run.given.values():
            if type(cache) is Cache and cache.calls:
                _, _, layer, updates, more = cache.calls[0]
                index = self.word("", layer, run)
        self.stored = self.key_of(run, (k, v)) if self.store is not None else None
        if not {word.how for word in (name, index, self.stored) if word is not None} <= {*ALONE}:
            raise Refused("it makes the name of its attention function, or its cache's layer")
        return {
            "implementation": name, "eager": eager, "rests": rests, "index": index,
            "words": self.words(keywords, run), "updates_with": self.words(more, run),
            "updates": tuple(self.word("", value, run) for value in updates),
        }  # fmt: skip

    def key_of(self, run: Run, pair: tuple) -> Word:
        """The source of the key under which keys and values are stored, or found."""
        calls = run.given[self.store].calls
        if len(calls) != 1 or not alike(calls[0][1], pair):
            raise Refused(f"it has other things in {self.store}")
        return self.word("", calls[0][0], run)

    def word(self, name: str, value: object, run: Run) -> Word:
        if self.positions is not None and value is run.given.get(self.positions):
            return Word(name, "argument", self.positions)
        if issubclass(type(value), Opaque):
            path = name_of(value)
            if path.startswith("self."):
                self.given_on.add(path[5:])
                return Word(name, "attribute", path[5:])
        elif type(value) is dict and alike(value, run.rest):
            return Word(name, "rest")
        elif type(value) is dict and all(type(key) is str for key in value):
            return Word(name, "dict", self.words(value, run))
        elif isinstance(value, torch.Tensor):
            for n, table in enumerate(run.tables or ()):
                if value is table:
                    return Word(name, "table", n)
            for parameter, own in run.probe._parameters.items():
                if value is own:
                    return Word(name, "parameter", parameter)
        return super().word(name, value, run)


# ------------------------------------------------------------------ the parts


def sizes_in(run) -> Tuple[int, int, int]:
    """The widths of queries, keys and values that the attention function got."""
    heads = run.interface.calls[0][1:4]
    if not all(isinstance(t, torch.Tensor) and t.ndim == 4 for t in heads):
        raise Refused("it gives its attention function other things than heads")
    q, k, v = (t.shape for t in heads)
    if q[3] != k[3]:
        raise Refused("its heads are of another size")
    return q[1] * q[3], k[1] * k[3], v[1] * v[3]


def plans_of(trial, run) -> Iterator[Dict[str, object]]:
    """The fields of a form that its parts are, for all parts that a run has called, by widths."""
    at, names = run.log.index(None), [entry[0] for entry in run.log if entry is not None]
    if len({*names}) != len(names):
        raise Refused("it calls a part twice")
    sizes = {name: trial.parts[name].sizes for name in names}
    before, (*gates, out) = names[:at], names[at:] or [None]
    of_values, norms, products = ([n for n in before if len(sizes[n]) == i] for i in range(3))
    if trial.takes:  # its keys and values are another layer's
        norms = norms * 2 if len(norms) == 1 and len(products) == 1 else norms
    gates = gates or (products if len(products) > 3 else [None])
    if out is None or len(of_values) > 1 or len(norms) not in (0, 2) or len(products) > 4:
        raise Refused("its parts are called in another order, or other ones")
    normed = [*itertools.permutations(norms)] if norms else [(None, None)]
    for gate in gates:
        made = [name for name in products if name != gate]
        ways = [*itertools.product(HEADS, normed, trial.more_of(gate))]
        for order in itertools.permutations(made):
            widths = [sizes[name][1] for name in order]
            for heads, (q_norm, k_norm), (gate_by, v_scale) in ways:
                plan = {
                    "projections": order, "q_norm": q_norm, "k_norm": k_norm,
                    "v_norm": next(iter(of_values), None), "gate": gate, "gate_by": gate_by,
                    "out": out, "v_scale": v_scale, "heads": heads,
                }  # fmt: skip
                if (heads.norm == "none") != bool(norms) and _fits(trial, run, plan, widths):
                    yield plan


def _fits(trial, run, plan: dict, widths: List[int]) -> bool:
    """The projections are as wide as the plan has them."""
    q, k, v = trial.sizes
    heads, gate = plan["heads"], plan["gate"]
    q *= 1 + heads.gated
    if heads.rotary is not None and not run.tables:
        return False
    if gate is not None and (heads.gated or not _gates(trial, run, gate)):
        return False
    if trial.takes:
        return widths == [q] and heads.norm != "all" and plan["v_norm"] is None
    if len(widths) == 1:
        return widths == [q + k + v] and not heads.gated
    return widths == [q, k, v] or widths == [q, k] and k == v


def _gates(trial, run, gate: str) -> bool:
    """The gate has a number for each head, or each channel of what attention gives."""
    q, k, v = (t.shape for t in run.interface.calls[0][1:4])
    size = trial.parts[gate].sizes
    return len(size) == 2 and size[1] in (q[1], q[1] * v[3])
