"""Recognises modules of multi-head latent attention, by a trial of their class's own forward.

Which part makes what, how queries and keys are turned, and whether layers/latent_attention.py
computes the same, follows from the comparison with ours of all that the parts' sizes allow.
"""

import itertools
from typing import Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn

from ..attention.checks import ROTARY
from ..attention.reference import latent_norm_rope
from ..layers.latent_attention import Call, LatentAttention, LatentForm, tables_of
from ..layers.plain import told
from .attention_learning import Case
from .attention_trial import AttentionTrial, asks_for_attention, form_by
from .code import Refused
from .facts import read
from .handed import Cache
from .serving import own_class
from .stand_ins import F64, KeepsFp64, Part, features, random
from .trial import Run


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
    DIMS = (3,)
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

    def widths_of_tables(self) -> List[Tuple[int, int]]:
        """(1, width) of all that a projection may make beside latents."""
        sizes = [part.sizes for part in self.parts.values() if isinstance(part, Part)]
        norms = {size[0] for size in sizes if len(size) == 1}
        outs = [size[1] for size in sizes if len(size) == 2 and size[0] == self.width]
        return [(1, n) for n in dict.fromkeys(out - C for out in outs for C in norms if out > C)]

    def form(self, values: dict) -> LatentForm:
        form = self.first()
        self.check_all(form)
        return self.guarded(form, values)

    def forms(self, run: Run) -> Iterator[LatentForm]:
        if self.store is not None:
            raise Refused("it stores keys and values for other layers")
        known = self.fields()
        for plan, rotary in itertools.product(self.plans_of(run), (None, *ROTARY)):
            for positions in dict.fromkeys((None, self.positions)):
                yield LatentForm(**known, **plan, rotary=rotary, positions=positions)

    def plans_of(self, run: Run) -> Iterator[Dict[str, object]]:
        """The fields of a form that its parts are, by their sizes, in a run with a cache."""
        _, q, k, v, *_ = run.interface.calls[0]
        if not all(isinstance(t, torch.Tensor) and t.ndim == 4 for t in (q, k, v)):
            raise Refused("it gives its attention function other things than heads")
        cache = run.given.get(self.cache)
        if type(cache) is not Cache or len(cache.calls) != 1:
            raise Refused("it has no cache, or updates it in another way")
        c, r = cache.calls[0][:2]
        if not c.ndim == r.ndim == 4 or not c.shape[1] == r.shape[1] == 1:
            raise Refused("it keeps something else than latents in the cache")
        (_, H, _, D), C, R, V, hidden = q.shape, c.shape[3], r.shape[3], v.shape[3], self.width
        usual = [(hidden, C + R), (C,), (C, H * (D - R + V)), (H * V, hidden)]
        sizes = {name: self.parts[name].sizes for name, *_ in filter(None, run.log)}
        for parts in itertools.permutations(sizes, 4):
            if [sizes[name] for name in parts] != usual:
                continue
            kv_a, kv_norm, kv_b, out = parts
            others = [name for name in sizes if name not in parts]
            gates: list = [None] if len(others) % 2 else others
            for gate in [n for n in gates if n is None or sizes[n] == (hidden, H)]:
                for queries in itertools.permutations([n for n in others if n != gate]):
                    widths = [sizes[name] for name in queries]
                    between = widths[0][1:]
                    if widths in (
                        [(hidden, H * D)],
                        [(hidden, *between), between, (*between, H * D)],
                    ):
                        yield {
                            "queries": queries, "kv_a": kv_a, "kv_norm": kv_norm, "kv_b": kv_b,
                            "out": out, "gate": gate, "sizes": (C, R, D - R, V),
                        }  # fmt: skip
