"""Finds the role of each argument of an attention module's forward, and the form that gives its
numbers."""

import itertools
from typing import Callable, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..layers.attention import GATES, NORMS, ROTARY, Heads
from ..layers.forward import ALONE, Word
from .code import Refused
from .handed import Cache, Interface
from .stand_ins import F64, SIZES, Opaque, Part, Raises, Read, name_of, same
from .trial import Trial, alike, plain_values


class Case(NamedTuple):
    """One run of an equivalence check."""

    B: int
    T: int
    rotary: Optional[float] = 1.0  # the width of the tables, of the head dim; None: none are given
    tables: int = 0  # the batch of the tables, as the input's by default
    cached: bool = False
    masked: bool = False
    training: bool = False
    values: str = ""  # "+", "-": of one sign; "mixed"
    dtype: torch.dtype = F64
    words: int = 1  # keywords that nobody knows
    by_position: bool = False


FIRST = Case(2, 5, cached=True, masked=True)
TRAINING = FIRST._replace(training=True)
CASES = (  # with and without a cache, a mask and training
    FIRST,
    Case(1, 3, cached=True, masked=True, training=True, values="mixed", words=0),
    Case(2, 1, tables=1, cached=True, values="+", words=3),
    Case(1, 2, cached=True, training=True, values="-", by_position=True),
    Case(9, 5, masked=True, dtype=torch.bfloat16),
    Case(3, 2, tables=1, masked=True, training=True, dtype=torch.float16),
    Case(2, 3, dtype=torch.float32, words=0, by_position=True),
    Case(1, 1, training=True, values="mixed"),
)
# every form of queries and keys
HEADS = tuple(itertools.starmap(Heads, itertools.product(GATES, NORMS, (*ROTARY, None))))
WITHOUT, PARTIAL = Case(2, 3, None), Case(2, 3, 0.5, masked=True)


class Run(NamedTuple):
    """Inputs, intermediate calls and outputs of a run of the class's forward."""

    twin: nn.Module
    x: torch.Tensor
    tables: Optional[tuple]
    given: dict
    rest: dict  # keywords for which the forward has no name
    interface: Interface
    log: list  # calls of parts; None where the attention function was called
    result: object


class Plan(NamedTuple):
    """The parts of a forward's computation that are the same in every run."""

    projections: Tuple[str, ...]
    q_norm: Optional[str]
    k_norm: Optional[str]
    out: str
    heads: Heads


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
        if self.tables is not None and run.tables[0].shape[-1] != (self.R or self.D):
            run = self.called(FIRST, values=self.marks())  # with tables as wide as the heads
        return run, self.called(TRAINING, values=self.marks())

    def learn(self, what: Read) -> None:
        """Also of an attribute that was assumed to be passed on."""
        if what.name.startswith("self."):
            self.handed -= {what.name[5:]}
            self.seen.add(what.name[5:])
        else:
            super().learn(what)

    def first(self) -> Tuple[Run, Run]:
        """The first runs, with tables for each row or for all rows, from which the plan is found
        and the role of each argument."""
        reason = None
        for self.dims in (3, 2):
            try:
                runs = self.with_tables()
                self.see(runs[0])
                return runs
            except Refused as why:
                reason = reason or why
                if self.tables is None:
                    break
        raise reason

    def with_tables(self) -> Tuple[Run, Run]:
        error = None
        widths = [(n, 0) for n in dict.fromkeys([1, 2, *self.widths()])]
        for sizes in [*widths, *((n, n) for n in self.numbers())]:
            self.D, self.R = sizes
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
        sizes = [v for v in self.numbers() if any(n % v == 0 for n in outs)]
        yield from dict.fromkeys([*sizes, 64, 128, 32, 256, 96, 80, 16, 8])

    def numbers(self) -> List[int]:
        """Sizes that the forward reads; one may be the width of the tables, whatever that of the
        heads is."""
        values = plain_values(self.module, self.facts.reads).values()
        return [v for v in values if type(v) is int and v > 1]

    # ------------------------------------------------------------------ what is learned

    def those_handed(self) -> frozenset:
        """Attributes that reach the attention function or the cache, and nothing else."""
        implementation, words, index, updates, updates_with = self.calls
        everything = (implementation, index, *updates, *updates_with, *words, *self.training_words)
        met = [word.what for word in everything if word is not None and word.how == "attribute"]
        return self.handed.intersection(met)

    def fields(self) -> tuple:
        """The fields of an AttentionForm that follow its guards."""
        implementation, words, index, updates, updates_with = self.calls
        identities = [n for n, part in self.parts.items() if isinstance(part, nn.Module)]
        return (
            self.arguments(), self.tables, self.cache,
            self.mask, index, updates, updates_with, self.plan.projections, self.sizes,
            self.plan.q_norm, self.plan.k_norm, self.plan.out, self.plan.heads, self.D, self.dims,
            (self.R or self.D,), False, tuple(identities), implementation, words,
            self.training_words,
            self.rests, self.eager,
        )  # fmt: skip

    def others(self) -> tuple:
        return super().others(self.tables, self.cache, self.mask)

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
        name = self.word("", name, run)
        if not {name.how, name.how if index is None else index.how} <= {*ALONE}:
            raise Refused("it makes the name of its attention function, or its cache's layer")
        return name, words, index, updates, updates_with

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
        elif type(value) is dict and alike(value, run.rest):
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

    # ------------------------------------------------------------------ numbers

    def planned(self, run: Run) -> Tuple[Plan, tuple]:
        """The plan that agrees with a run, and the widths of queries, keys and values."""
        module, q, k, v, _, _, out = run.interface.calls[0]
        if module is not run.twin:
            raise Refused("it gives its attention function another module")
        k, v = self.before_the_cache(run, k, v)
        for t in (q, k, v):
            if not isinstance(t, torch.Tensor) or t.ndim != 4:
                raise Refused("it gives its attention function other things than heads")
        if q.shape[-1] != k.shape[-1]:
            raise Refused("its heads are of another size")
        at, made, norms = run.log.index(None), {}, []
        ended, names = run.log[at + 1 :], [entry[0] for entry in run.log if entry is not None]
        if len({*names}) != len(names):
            raise Refused("it calls a part twice")
        for name, x, y in run.log[:at]:
            if not self.parts[name].sizes[1:]:
                norms.append(name)
                continue
            made[name] = y
            if x is not run.x and not same(x, run.x):
                raise Refused("its projections are of something else than the hidden states")
        if len(ended) != 1 or len(norms) not in (0, 2) or len(made) not in (1, 3):
            raise Refused("its parts are called in another order, or other ones")
        plan, gate = self.compared(run, made, (q, k, v), _plans(made, norms, ended[0][0]))
        y = out.reshape(*run.x.shape[:2], -1)
        y = self.parts[plan.out](y if gate is None else y * torch.sigmoid(gate))
        result = run.result
        right = type(result) is tuple and len(result) == 2 and result[1] == "weights"
        if plan.out != ended[0][0] or not right or not same(result[0], y):
            raise Refused("it is another formula after attention")
        return plan, _widths(q, k, v)

    def before_the_cache(self, run: Run, k, v):
        """Keys and values as passed to the cache, if one was given."""
        cache = run.given.get(self.cache)
        if cache is None:
            return k, v
        if len(cache.calls) != 1:
            raise Refused("it updates the cache in another way")
        k_new, v_new, *_ = cache.calls[0]
        kept = torch.cat([k_new * 0.5, k_new], -2), torch.cat([v_new * 0.25, v_new], -2)
        if not (same(k, kept[0]) and same(v, kept[1])):
            raise Refused("it changes keys or values after the cache")
        return k_new, v_new

    def compared(self, run: Run, made: dict, heads: tuple, plans: Iterable[Plan]) -> tuple:
        """The plan that gives q, k and v of what projections have made, and its gate."""
        (q, k, v), D = heads, heads[0].shape[-1]
        sizes, tables = _widths(*heads), self.tables and run.tables
        why = "its values are another formula"
        for plan in plans:
            form, raw = plan.heads, [made[name] for name in plan.projections]
            if len(raw) == 1 and raw[0].shape[-1] == sum(sizes):
                raw = raw[0].split(sizes, -1)
            if len(raw) != 3 or raw[2].shape[-1] != sizes[2]:
                continue
            if not same(v, raw[2].view(*raw[2].shape[:2], -1, v.shape[-1]).transpose(1, 2)):
                continue
            why, gate = "its queries and keys are another formula", None
            if form.rotary is not None and not tables:
                continue
            if raw[0].shape[-1] != sizes[0] * (1 + form.gated) or raw[1].shape[-1] != sizes[1]:
                continue
            own_q = raw[0]
            if form.gated:
                own_q, gate = own_q.unflatten(-1, (-1, 2 * D)).chunk(2, -1)
                own_q, gate = own_q.flatten(2), gate.flatten(2)
            try:
                if same(q, self.formed(own_q, D, self.parts.get(plan.q_norm), form, tables)):
                    if same(k, self.formed(raw[1], D, self.parts.get(plan.k_norm), form, tables)):
                        return plan, gate
            except (Refused, RuntimeError, TypeError):
                continue
        raise Refused(why)

    def formed(self, x, D: int, norm: Optional[Callable], form: Heads, tables):
        """x [B, T, H * D] as heads [B, H, T, D], normalised and rotated."""
        x = norm(x) if form.norm == "all" else x
        x = x.reshape(*x.shape[:2], -1, D).transpose(1, 2)
        x = norm(x) if form.norm == "head" else x
        if form.rotary is None:
            return x
        cos, sin = tables[0].unsqueeze(-3), tables[1].unsqueeze(-3)
        R = cos.shape[-1]
        y, rest = x[..., :R], x[..., R:]
        if form.rotary == "halves":
            a, b = y.chunk(2, -1)
            turned = torch.cat([-b, a], -1)
        else:
            turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
        if form.rotary == "pairs":
            cos, sin = (t[..., : R // 2].repeat_interleave(2, -1) for t in (cos, sin))
        return torch.cat([y * cos + turned * sin, rest], -1)


def _plans(projections: Iterable[str], norms: List[str], out: str) -> Iterator[Plan]:
    """Every plan of these parts."""
    normed = [*itertools.permutations(norms)] if norms else [(None, None)]
    for order in itertools.permutations(projections):
        for heads, pair in itertools.product(HEADS, normed):
            if (heads.norm == "none") != bool(norms):
                yield Plan(order, *pair, out, heads)


def _widths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tuple[int, int, int]:
    return q.shape[1] * q.shape[3], k.shape[1] * k.shape[3], v.shape[1] * v.shape[3]
