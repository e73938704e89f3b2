"""Recognises modules of multi-head latent attention, by a trial of their class's own forward.

Which part makes what follows from a run on stubs; how queries and keys are turned, and whether
layers/latent_attention.py computes the same, from the comparison with ours in each case.
"""

import itertools
from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..attention.checks import ROTARY
from ..attention.reference import latent_norm_rope
from ..layers.latent_attention import Call, LatentAttention, LatentForm, tables_of
from ..layers.plain import told
from .attention_learning import Case, Run
from .attention_trial import AttentionTrial, asks_for_attention, form_by
from .code import Refused
from .facts import read
from .handed import Cache
from .serving import own_class
from .stand_ins import F64, FREE, KeepsFp64, features, random, same


class Parts(NamedTuple):
    """The parts of a forward's computation, the same in every run."""

    queries: Tuple[str, ...]
    kv_a: str
    kv_norm: str
    kv_b: str
    out: str
    gate: Optional[str]


def latent_form(module: nn.Module) -> LatentForm:
    """The form of a module; raises Refused with the reason why it has none."""
    for name, part in module._modules.items():
        if part is not None and any(map(features, part._modules.values())):
            wraps = "base_layer" in part._modules  # adapters, as PEFT's modules have them
            does = "is wrapped by adapters" if wraps else "chooses the slots that it attends to"
            raise Refused(f"its part {name} {does}")
    return form_by(LatentTrial, module, read(own_class(module), module))


def is_latent(module: nn.Module) -> bool:
    """True if the module looks like latent attention: a projection of the hidden states makes
    latents, which a norm of their width and a projection of another width follow."""
    if not asks_for_attention(own_class(module)):
        return False
    linears = list(filter(None, map(features, module._modules.values())))
    norms = set(_norm_widths(module))
    hidden = linears[0][0] if linears else 0
    latents = {i for i, _ in linears if i in norms and i != hidden}
    return any(i == hidden and any(o >= C for C in latents) for i, o in linears)


def _norm_widths(module: nn.Module) -> Iterator[int]:
    for part in module._modules.values():
        weight = None if part is None else part._parameters.get("weight")
        shape = None if weight is None else told(weight, "shape")
        if shape is not None and len(shape) == 1:
            yield shape[0]


class _Ours(LatentAttention):
    """Ours on stubs, by the definition of its operation: nothing is asked but the form."""

    @staticmethod
    def normed_and_turned(q, kv, weight, cos, sin, eps: float, rotary: str) -> tuple:
        return latent_norm_rope(q, kv, weight, cos, sin, None, None, None, eps, rotary)

    def served(self, *call) -> Optional[tuple]:
        with KeepsFp64():
            return super().served(*call)

    def call(self, attention, x: torch.Tensor, given: dict, rest: dict) -> Optional[Call]:
        form, own_tables, past = self.form, given.get(self.form.tables), given.get(self.form.cache)
        tables = tables_of(form, own_tables, x, form.sizes[1])
        if tables is None:
            return None
        norm = attention.__dict__["_modules"][form.kv_norm].weight.to(x.dtype), 1e-6
        index = None if past is None else self.index.of(attention, given)
        words = self.words.made(attention, given, rest, own_tables)
        known = x, given.get(form.mask), self.interface.of(attention, given), words
        more = rest if form.rests else {}
        return Call(*known, more, tables, norm, past, index, slots=None, few=False)


class LatentTrial(AttentionTrial):
    """A trial of a class with latents in its cache. `R`: the width of the rotary tables."""

    READS = {
        **AttentionTrial.READS,
        "tables": lambda how, optional: how in ("__iter__", "__getitem__", "to"),
    }
    trains = False  # calls in training are the class's own
    ours = _Ours

    def learn(self, what) -> None:
        if what.how == "to" and self.tables is None:
            self.complex = True
        super().learn(what)

    def tables_of(self, case: Case) -> List[torch.Tensor]:
        """cos and sin [B or 1, T, R], or one complex tensor [B or 1, T, R / 2]."""
        if not self.complex:
            return super().tables_of(case)
        size = case.tables or case.B, case.T, self.R // 2
        dtype = F64 if case.dtype is F64 else torch.float32
        return [torch.complex(*[random(*size, seed=seed, dtype=dtype) for seed in (21, 22)])]

    def first(self) -> LatentForm:
        reason = None
        for width in self.widths():
            self.R = width
            try:
                return self.fitting(*self.learned(self.first_runs))
            except Refused as why:
                reason = reason or why
        raise reason or Refused("none of its projections makes latents")

    def widths(self) -> Iterator[int]:
        """Candidates for R: what a projection makes beside latents."""
        parts = self.parts.values()
        sizes = [part.sizes for part in parts if hasattr(part, "sizes")]
        norms = {size[0] for size in sizes if len(size) == 1}
        outs = [size[1] for size in sizes if len(size) == 2 and size[0] == self.width]
        yield from dict.fromkeys(out - C for out in outs for C in norms if out > C)

    def form(self, values: dict) -> LatentForm:
        form = self.first()
        self.check_all(form)
        return self.guarded(form, values)

    def forms(self, run: Run) -> Iterator[LatentForm]:
        if self.store is not None:
            raise Refused("it stores keys and values for other layers")
        implementation, words, index, updates, updates_with, _ = self.calls
        parts, sizes = self.planned(run)
        scaled = dict.fromkeys((None, self.positions))
        for rotary, positions in itertools.product((None, *ROTARY), scaled):
            yield LatentForm(
                self.kind, FREE, (), self.arguments(), self.tables, self.cache, self.mask,
                positions, index, updates, updates_with, *parts, rotary, sizes,
                implementation, words, self.rests, self.eager,
            )  # fmt: skip

    def planned(self, run: Run) -> Tuple[Parts, tuple]:
        """The parts by what they are given and give, in a run with a cache; C, R, N and V."""
        _, q, k, v, *_ = run.interface.calls[0]
        if not all(isinstance(t, torch.Tensor) and t.ndim == 4 for t in (q, k, v)):
            raise Refused("it gives its attention function other things than heads")
        cache = run.given.get(self.cache)
        if type(cache) is not Cache or len(cache.calls) != 1:
            raise Refused("it has no cache, or updates it in another way")
        c, r = cache.calls[0][:2]
        if not c.ndim == r.ndim == 4 or not c.shape[1] == r.shape[1] == 1:
            raise Refused("it keeps something else than latents in the cache")
        log = run.log[: run.log.index(None)]
        by_output = {y.data_ptr(): (name, x) for name, x, y in log}
        norm = next(
            (e for e in log if e[2].numel() == c.numel() and same(e[2].view_as(c), c)), None
        )
        out = next((n for n, _, y in filter(None, run.log) if y is run.result[0]), None)
        if norm is None or out is None:
            raise Refused("its latents are not those of a norm, or its output not a projection's")
        (_, H, _, D), C = q.shape, c.shape[3]
        kv_a = next((n for n, x, y in log if x is run.x and same(y[..., :C], norm[1])), None)
        kv_b = next(
            (n for n, x, _ in log if x.shape[-1] == C and x.shape[-2] == 2 * c.shape[2]), None
        )
        queries, gate = (), None
        for name, x, y in filter(None, run.log):
            if name in (kv_a, norm[0], kv_b, out):
                continue
            if y.shape[-1] == H and x is run.x and len(self.parts[name].sizes) == 2 and D != 1:
                gate = name
            elif y.shape[-1] == H * D:
                queries = (name,)
                if x is not run.x:
                    between = by_output.get(x.data_ptr(), (None, None))
                    before = by_output.get(getattr(between[1], "data_ptr", int)(), (None, None))
                    if before[1] is not run.x:
                        raise Refused("its queries are of something else than the hidden states")
                    queries = (before[0], between[0], name)
        found = Parts(queries, kv_a, norm[0], kv_b, out, gate)
        used = {*queries, *filter(None, found[1:])}
        called = [entry[0] for entry in filter(None, run.log)]
        if not queries or None in found[:-1] or {*called} != used or len(called) != len(used):
            raise Refused("its parts are called in another order, or other ones")
        R = r.shape[3]
        return found, (C, R, D - R, v.shape[3])
