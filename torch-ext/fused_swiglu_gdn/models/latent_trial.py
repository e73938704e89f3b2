"""Recognises modules of multi-head latent attention, by a trial of their class's own forward.

The forward runs on stubs in fp64: what the cache's update, the attention function and the parts
get, and its result, say which part makes what, how queries and keys are turned, and whether
layers/latent_attention.py computes the same.
"""

from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..layers.forward import Word, Words
from ..layers.latent_attention import LatentForm
from ..layers.pinned import GIVEN
from ..layers.plain import told
from .attention_learning import FIRST, Case, Run
from .attention_trial import AttentionTrial, asks_for_attention, form_by
from .code import Refused
from .facts import read
from .handed import Cache
from .serving import own_class
from .stand_ins import F64, features, random, same
from .trial import alike, toggles

ROTARY = (None, "halves", "pairs", "pairs_to_halves")


class Parts(NamedTuple):
    """The parts of a forward's computation, the same in every run."""

    queries: Tuple[str, ...]
    kv_a: str
    kv_norm: str
    kv_b: str
    out: str
    gate: Optional[str]
    rotary: Optional[str]


def latent_form(module: nn.Module) -> LatentForm:
    """The form of a module; raises Refused with the reason why it has none."""
    for name, part in module._modules.items():
        if part is not None and any(map(features, part._modules.values())):
            raise Refused(f"its part {name} chooses the slots that it attends to")
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


class LatentTrial(AttentionTrial):
    """A trial of a class with latents in its cache. `D`: R, the width of the rotary tables."""

    READS = {
        **AttentionTrial.READS,
        "tables": lambda how, optional: how in ("__iter__", "__getitem__", "to"),
    }

    def __init__(self, *given):
        super().__init__(*given)
        self.plan = None

    def learn(self, what) -> None:
        if what.how == "to" and self.tables is None:
            self.complex = True
        super().learn(what)

    def tables_of(self, case: Case) -> List[torch.Tensor]:
        """cos and sin [B or 1, T, R], or one complex tensor [B or 1, T, R / 2]."""
        size = (case.tables or case.B, case.T, self.D // 2 if self.complex else self.D)
        cos, sin = random(*size, seed=21), random(*size, seed=22)
        if self.complex:
            return [torch.complex(cos, sin)]
        return [cos.to(case.dtype), sin.to(case.dtype)]

    def first(self) -> Tuple[Run, Run]:
        reason = None
        for width in self.widths():
            self.D = width
            try:
                runs = self.learned(self.first_runs)
                self.see(runs[0])
                return runs
            except Refused as why:
                reason = reason or why
        raise reason or Refused("none of its projections makes latents")

    def first_runs(self) -> Tuple[Run, Run]:
        return (
            self.called(FIRST, values=self.marks()),
            self.called(FIRST._replace(training=True), values=self.marks()),
        )

    def widths(self) -> Iterator[int]:
        """Candidates for R: what a projection makes beside latents."""
        parts = self.parts.values()
        sizes = [part.sizes for part in parts if hasattr(part, "sizes")]
        norms = {size[0] for size in sizes if len(size) == 1}
        outs = [size[1] for size in sizes if len(size) == 2 and size[0] == self.width]
        yield from dict.fromkeys(out - C for out in outs for C in norms if out > C)

    def form(self, values: dict) -> LatentForm:
        first, training = self.first()
        if self.cache is None:
            raise Refused("it has no cache")
        if self.store is not None:
            raise Refused("it stores keys and values for other layers")
        self.calls, self.training_words = self.calls_of(first), self.calls_of(training)[1]
        for case in self.cases():
            if case.dtype is F64:
                self.check(case, self.called(case))
        for absent in toggles(self.others()):
            self.check(FIRST, self.called(FIRST, absent=absent))
        self.handed = self.those_handed()
        run = self.called(FIRST._replace(dtype=torch.bfloat16))
        left = (*run.interface.calls[0][1:4], run.result[0])
        if {x.dtype for x in left} != {torch.bfloat16}:
            raise Refused("it changes the dtype")
        implementation, words, index, updates, updates_with, _ = self.calls
        guards = self.guards({n: v for n, v in values.items() if n not in self.handed})
        guards.update(dict.fromkeys(self.given_on(), GIVEN))
        return LatentForm(
            self.kind, self.facts.pinned, tuple(guards.items()), self.arguments(), self.tables,
            self.cache, self.mask, self.scaling(), index, updates,
            updates_with, *self.plan, self.sizes, implementation, words, self.training_words,
            self.rests, self.eager,
        )  # fmt: skip

    def check(self, case: Case, run: Run) -> None:
        """Checks that the cache, the attention function and the parts get what the plan and the
        words say, and that the result is the plan's; raises Refused if not."""
        self.planned(run, self.plan)
        _, _, _, _, mask, keywords, _ = run.interface.calls[0]
        if mask is not run.given.get(self.mask):
            raise Refused("it changes the attention mask, or keeps keyword arguments back")
        asked, words, index, updates, updates_with, _ = self.calls
        words = self.training_words if case.training else words
        found, rest = {"asked": run.interface.asked[0][0], "words": keywords}, run.rest
        table = [asked._replace(name="asked"), Word("words", "dict", words)]
        if case.cached:
            ((_, _, layer, positional, more),) = run.given[self.cache].calls
            found.update(layer=layer, more=more, **_counted(positional))
            table += [index._replace(name="layer"), Word("more", "dict", updates_with)]
            table += [word._replace(name=name) for name, word in _counted(updates).items()]
        expected = Words(table).made(run.twin, run.given, rest, None)
        expected["words"].update(rest if self.rests else {})
        if run.interface.asked[0][1] is not self.eager or not alike(found, expected):
            raise Refused("its attention function or its cache gets other arguments")

    # ------------------------------------------------------------------ numbers

    def planned(self, run: Run, known: Optional[Parts] = None) -> Tuple[Parts, tuple]:
        """The parts that agree with a run; C, R, N and V."""
        module, q, k, v, _, _, out = run.interface.calls[0]
        heads = all(isinstance(t, torch.Tensor) and t.ndim == 4 for t in (q, k, v))
        if module is not run.twin or not heads:
            raise Refused("it gives its attention function other things than heads")
        parts, (C, R) = (known, self.sizes[:2]) if known else self._found(run, q)
        at = run.log.index(None)
        made = {name: (x, y) for name, x, y in filter(None, run.log)}
        used = {*parts.queries, *parts[1:5], *filter(None, [parts.gate])}
        if made.keys() != used or len(run.log) != len(used) + 1 or parts.out in [
            entry[0] for entry in run.log[:at]
        ]:  # fmt: skip
            raise Refused("its parts are called in another order, or other ones")
        N, V = q.shape[-1] - R, v.shape[-1]
        ways = [parts] if known else [parts._replace(rotary=way) for way in ROTARY]
        for parts in ways:
            if self._agrees(run, parts, made, (C, R, N, V)):
                return parts, (C, R, N, V)
        raise Refused("its queries, keys, values or output are another formula")

    def _found(self, run: Run, q: torch.Tensor) -> Tuple[Parts, tuple]:
        """The parts by what they are given and give, in a run with a cache."""
        cache = run.given.get(self.cache)
        if type(cache) is not Cache or len(cache.calls) != 1:
            raise Refused("it updates the cache in another way")
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
            if y.shape[-1] == H and x is run.x and len(self.parts[name].sizes) == 2 and H != H * D:
                gate = name
            elif y.shape[-1] == H * D:
                queries = (name,)
                if x is not run.x:
                    between = by_output.get(x.data_ptr(), (None, None))
                    before = by_output.get(getattr(between[1], "data_ptr", int)(), (None, None))
                    if before[1] is not run.x:
                        raise Refused("its queries are of something else than the hidden states")
                    queries = (before[0], between[0], name)
        if not queries or kv_a is None or kv_b is None:
            raise Refused("its parts are called in another order, or other ones")
        return Parts(queries, kv_a, norm[0], kv_b, out, gate, None), (C, r.shape[3])

    def _agrees(self, run: Run, parts: Parts, made: dict, sizes: tuple) -> bool:
        """True if our formula of these parts gives what the run has given."""
        (C, R, N, V), (B, T, _) = sizes, run.x.shape
        _, q, k, v, _, _, out = run.interface.calls[0]
        H = q.shape[1]
        first, *others = parts.queries
        own = self.parts[first](run.x)
        for name in others:
            own = self.parts[name](own)
        kv = self.parts[parts.kv_a](run.x)
        if own.shape[-1] != H * (N + R) or kv.shape[-1] != C + R:
            return False
        nope, turned = own.view(B, T, H, N + R).split([N, R], -1)
        turned, r = (_turned(x, parts.rotary, run.tables) for x in (turned, kv[:, :, None, C:]))
        if r is None:
            return False
        c, r = self.parts[parts.kv_norm](kv[..., :C]).view(B, 1, T, C), r.transpose(1, 2)
        cache = run.given.get(self.cache)
        if cache is not None:
            if len(cache.calls) != 1 or not same(cache.calls[0][0], c):
                return False
            if not same(cache.calls[0][1], r):
                return False
            c, r = torch.cat([c * 0.5, c], -2), torch.cat([r * 0.25, r], -2)
        queries = torch.cat([nope, turned], -1)
        if not self.scales(run, queries.transpose(1, 2), q):
            return False
        k_nope, values = self.parts[parts.kv_b](c).view(B, -1, H, N + V).split([N, V], -1)
        keys = torch.cat([k_nope.transpose(1, 2), r.expand(B, H, -1, R)], -1)
        if not (same(k, keys) and same(v, values.transpose(1, 2))):
            return False
        if parts.gate is not None:
            out = out * torch.sigmoid(self.parts[parts.gate](run.x))[..., None]
        y = self.parts[parts.out](out.reshape(B, T, -1))
        right = type(run.result) is tuple and len(run.result) == 2 and run.result[1] == "weights"
        return right and same(run.result[0], y)


def _counted(values) -> dict:
    return {f"update {i}": value for i, value in enumerate(values)}


def _turned(x: torch.Tensor, rotary: Optional[str], tables) -> Optional[torch.Tensor]:
    """x [B, T, H, R] turned; None if the tables do not fit."""
    if rotary is None:
        return x
    if tables is None:
        return None
    if isinstance(tables, torch.Tensor):
        cos, sin = tables.real, tables.imag
    else:
        cos, sin = tables
    P = x.shape[-1] // 2
    if rotary != "halves":
        cos, sin = cos[..., :P], sin[..., :P]
    if cos.shape[-1] != (2 * P if rotary == "halves" else P):
        return None
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if rotary == "halves":
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin
    a, b = x[..., ::2], x[..., 1::2]
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if rotary == "pairs" else torch.cat(pair, -1)
