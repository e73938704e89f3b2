"""What an attention module does around its attention function, told by its source and a trial.

The class's forward runs on stand-ins in fp64: what reaches the cache and the attention function,
and what comes back, is compared with each form that ours has. The trial gives the plan of our
forward.
"""

import ast
import inspect
import itertools
from types import FunctionType
from typing import Callable, Dict, NamedTuple, Optional, Union

import torch
from torch import nn

from ..layers.attention import GATES, NORMS, ROTARY, AttentionForm, Heads
from ..layers.norm import NormForm
from .attention_source import attention_call, handed_on, keywords_of
from .code import Refused, form_key, plain_values, read, why_odd_module
from .norm_trial import norm_form
from .serving import own_class
from .stand_ins import (
    F64,
    WORD,
    Cache,
    Interface,
    KeepsFp64,
    Norm,
    Opaque,
    Product,
    Unknown,
    quiet,
    random,
    same,
    twin_of,
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
JOINED = ("qkv_proj", "query_key_value", "qkv")
OUT = ("o_proj", "out_proj", "dense", "wo", "c_proj")
Q_NORM, K_NORM = (
    ("q_norm", "query_layernorm", "q_layernorm"),
    ("k_norm", "key_layernorm", "k_layernorm"),
)
ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask")
DROPOUT = 0.37  # of the twin: 0 in most configurations, which would hide it

_forms: Dict[tuple, Union[AttentionForm, str]] = {}


class Case(NamedTuple):
    """One run of a trial."""

    B: int
    T: int
    rotary: Optional[float]  # the width of the tables, of the head dim; None: there are none
    tables: int = 0  # the batch of the tables, as the input's by default
    cached: bool = False
    masked: bool = False
    training: bool = False


FIRST = Case(2, 5, 1.0, 0, True)
CASES = (Case(2, 1, 1.0, 1, True, True), Case(1, 3, 1.0, 0, True, False, True))
WITHOUT, PARTIAL = Case(2, 3, None), Case(2, 3, 0.5, 0, False, True)


def is_attention(module: nn.Module) -> bool:
    """It makes queries, keys and values, and what comes out of attention."""
    parts = set(module._modules)
    makes = set(PROJECTIONS) <= parts or any(name in parts for name in JOINED)
    return makes and any(name in parts for name in OUT)


def attention_form(module: nn.Module) -> Union[AttentionForm, str]:
    """The form of an attention module, or why it is none of ours."""
    kind = own_class(module)
    try:
        source = read(kind, module)
        values = plain_values(module, set(source.reads) - handed_on(source))
        norms = {n: norm_form(m) for n, m in module._modules.items() if "norm" in n.lower()}
        key = form_key(module, kind, source, values)
        key += (_parts_key(module), module.config.__class__)
        key += tuple(_norm_key(module._modules[n], form) for n, form in norms.items())
        if key not in _forms:
            _forms[key] = _find(module, kind, source, values, norms)
        return _forms[key]
    except Refused as why:
        return str(why)


def _parts_key(module: nn.Module) -> tuple:
    sizes = [(n, type(m), *_features(m)) for n, m in module._modules.items()]
    return (*sizes, *((n, tuple(p.shape)) for n, p in module._parameters.items() if p is not None))


def _norm_key(norm: nn.Module, form: Union[NormForm, str]) -> tuple:
    if isinstance(form, str):
        return (form,)
    weight = norm._parameters.get(form.weight)
    return (*form[3:], None if weight is None else len(weight))


def _features(part: nn.Module) -> tuple:
    """The sizes of a projection, wrapped or not; () of any other part."""
    sizes = getattr(part, "in_features", None), getattr(part, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else ()


def _first(names, parts) -> Optional[str]:
    return next((name for name in names if name in parts), None)


def _find(module, kind, source, values, norms) -> Union[AttentionForm, str]:
    try:
        trial = _Trial(module, kind, source, norms)
        plan = trial.plan()
    except Refused as why:
        return str(why)
    reason = why_odd_module(module, kind, source, (*values, *module._modules, "training"))
    if reason is not None:
        return reason
    guards = tuple(values.items())
    facts = kind, source.pinned, guards, trial.names, source.renamed
    facts += trial.cache, trial.updates_with, trial.handed
    return AttentionForm(*facts, *plan, trial.keywords, trial.eager)


class _Trial:
    def __init__(self, module, kind, source, norms):
        self.module, self.kind, self.source = module, kind, source
        parameters = inspect.signature(source.forward).parameters
        self.names = tuple(
            n for n, p in parameters.items() if n != "self" and p.kind is not p.VAR_KEYWORD
        )
        self.takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        missing = set(ARGUMENTS) - set(self.names)
        if missing or not self.takes_more:
            raise Refused(f"its forward takes no {missing.pop() if missing else '**kwargs'}")
        self.parts = {}
        for i, (name, part) in enumerate(module._modules.items()):
            self.parts[name] = Unknown(name)
            if name in norms and not isinstance(norms[name], str):
                weight = part._parameters.get(norms[name].weight)
                if weight is not None:
                    self.parts[name] = Norm(len(weight), 200 + i)
            elif _features(part):
                self.parts[name] = Product(*_features(part), 100 + 7 * i)
            elif type(part) is nn.Identity:
                self.parts[name] = part
        self.own = {
            n: random(*p.shape, seed=77) for n, p in module._parameters.items() if p is not None
        }
        self.D, self.out = getattr(module, "head_dim", None), _first(OUT, self.parts)
        if not isinstance(self.D, int) or self.out is None:
            raise Refused("it has no " + ("output projection" if self.out is None else "head_dim"))
        self.joined = None if set(PROJECTIONS) <= set(self.parts) else _first(JOINED, self.parts)
        first = self.joined or "q_proj"
        if first not in self.parts or not _features(module._modules[first]):
            raise Refused("its projections are other ones")
        self.hidden = _features(module._modules[first])[0]
        self.q_norm, self.k_norm = (
            _first(names, {n for n, p in self.parts.items() if isinstance(p, Norm)})
            for names in (Q_NORM, K_NORM)
        )
        self.keywords = keywords_of(source)
        self.cache, self.updates_with = None, ()
        self.handed = tuple(
            k.arg for k in attention_call(source).keywords
            if isinstance(k.value, ast.Name) and k.value.id == k.arg and k.arg in self.names
        )  # fmt: skip
        self.eager, self.dims = source.globals.get("eager_attention_forward"), 3

    def plan(self) -> tuple:
        """The fields of an AttentionForm that the trial finds."""
        with quiet():
            found = self.first()
            for case in CASES:
                if self.run(case) != found:
                    raise Refused("its forward depends on the call")
            partial, without = (
                self.tries(PARTIAL, found),
                self.tries(WITHOUT, found._replace(rotary=None)),
            )
            if not self.keeps_dtype():
                raise Refused("it changes the dtype")
        projections = (self.joined,) if self.joined else PROJECTIONS
        norms = (self.q_norm, self.k_norm) if found.norm != "none" else (None, None)
        identities = tuple(n for n, part in self.parts.items() if isinstance(part, nn.Identity))
        return (
            projections,
            self.sizes,
            *norms,
            self.out,
            found,
            self.dims,
            partial,
            without,
            identities,
        )

    def first(self) -> Heads:
        """The form by tables of each row, or by tables of all rows."""
        try:
            return self.run(FIRST)
        except Refused as why:
            self.dims = 2
            try:
                return self.run(FIRST)
            except Refused:
                raise why from None

    def tries(self, case: Case, expected: Heads) -> bool:
        try:
            return self.run(case) == expected
        except Refused:
            return False

    def called(self, case: Case, dtype: torch.dtype = F64) -> tuple:
        """One run of the class's forward: what it was given, met and gave."""
        own = {name: p.to(dtype) for name, p in self.own.items()}
        twin = twin_of(self.module, self.kind, self.parts, own)
        twin.training = case.training
        if "attention_dropout" in twin.__dict__:
            twin.__dict__["attention_dropout"] = DROPOUT
        interface = Interface()
        x = random(case.B, case.T, self.hidden, seed=1, dtype=dtype)
        tables = None
        if case.rotary is not None:
            width = int(self.D * case.rotary)
            size = (case.tables or case.B, case.T, width)[3 - self.dims :]
            tables = tuple(random(*size, seed=seed, dtype=dtype) for seed in (21, 22))
        mask, word = Opaque("attention_mask") if case.masked else None, object()
        given = dict(zip(ARGUMENTS, (x, tables, mask)))
        given.update({n: Cache(n) for n in self.names if n not in ARGUMENTS})
        if self.cache is not None and not case.cached:
            given[self.cache] = None
        names = {**self.source.globals, self.registry(): interface}
        forward = self.source.forward
        forward = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
        try:
            with KeepsFp64():
                result = forward(twin, **given, **{WORD: word})
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                f"its forward raises {type(error).__name__} on stand-ins: {str(error)[:60]}"
            ) from None
        if len(interface.calls) != 1 or interface.asked != [
            (twin.config._attn_implementation, self.eager)
        ]:
            raise Refused("it does not call one attention function, by its configuration")
        return twin, given, word, interface.calls[0], result

    def run(self, case: Case) -> Heads:
        """Which of our forms a run of the class's forward agrees with."""
        twin, given, word, call, result = self.called(case)
        q, k, v, mask_seen, keywords, out = call
        x, tables, mask = (given[name] for name in ARGUMENTS)
        if mask_seen is not mask or keywords.pop(WORD, None) is not word:
            raise Refused("it changes the attention mask, or keeps keyword arguments back")
        for name in self.handed:
            if keywords.pop(name, None) is not given.get(name):
                raise Refused(f"it gives another {name} to its attention function")
        if keywords != self.keywords(twin):
            raise Refused("other keyword arguments reach its attention function")
        k, v = self.before_the_cache(given, word, k, v)
        heads, gate = self.compared(x, tables, q, k, v)
        y = out.reshape(case.B, case.T, -1)
        y = self.parts[self.out](y if gate is None else y * torch.sigmoid(gate))
        if (
            type(result) is not tuple
            or len(result) != 2
            or result[1] != "weights"
            or not same(result[0], y)
        ):
            raise Refused("it is another formula after attention")
        return heads

    def keeps_dtype(self) -> bool:
        """All that leaves the forward has the dtype of what came, in 16 bits too."""
        *_, call, result = self.called(FIRST, torch.bfloat16)
        return {x.dtype for x in (*call[:3], result[0])} == {torch.bfloat16}

    def registry(self) -> str:
        """The name by which the forward knows the registry of attention functions."""
        names = [
            name for _, name, value in self.source.pinned.names
            if type(value).__name__ == "AttentionInterface"
        ]  # fmt: skip
        if not names:
            raise Refused("it does not call one attention function, by its configuration")
        return names[0]

    def before_the_cache(self, given, word, k, v):
        """Keys and values as they came to the cache, if one was given."""
        caches = {n: x.calls for n, x in given.items() if isinstance(x, Cache) and x.calls}
        if not caches:
            return k, v
        if self.cache is None:
            self.find_cache(caches, word)
        calls = caches.get(self.cache, ())
        handed = dict.fromkeys(self.updates_with, {WORD: word})
        if len(caches) != 1 or len(calls) != 1 or calls[0][2] != self.module.layer_idx:
            raise Refused("it updates the cache in another way")
        k_new, v_new, _, more = calls[0]
        if more != handed:
            raise Refused("it gives the cache's update other keywords")
        kept = torch.cat([k_new * 0.5, k_new], -2), torch.cat([v_new * 0.25, v_new], -2)
        if not (same(k, kept[0]) and same(v, kept[1])):
            raise Refused("it changes keys or values after the cache")
        return k_new, v_new

    def find_cache(self, caches: dict, word: object) -> None:
        """The cache is the argument that was updated; its update may get all that is handed on."""
        self.cache = next(iter(caches))
        more = caches[self.cache][0][3]
        self.updates_with = tuple(n for n, v in more.items() if v == {WORD: word})

    def compared(self, x, tables, q, k, v):
        """The form that gives q, k and v, and its gate."""
        if not all(isinstance(t, torch.Tensor) and t.ndim == 4 for t in (q, k, v)):
            raise Refused("it gives its attention function other things than heads")
        self.sizes = sizes = tuple(t.shape[1] * t.shape[-1] for t in (q, k, v))
        if self.joined:
            joined = self.parts[self.joined](x)
            if joined.shape[-1] != sum(sizes):
                raise Refused("its joined projection is of another width")
            raw_q, raw_k, raw_v = joined.split(sizes, -1)
        else:
            raw_q, raw_k, raw_v = (self.parts[name](x) for name in PROJECTIONS)
        if q.shape[-1] != self.D or k.shape[-1] != self.D:
            raise Refused("its heads are of another size")
        if not same(v, raw_v.unflatten(-1, (-1, v.shape[-1])).transpose(1, 2)):
            raise Refused("its values are another formula")
        for gated, norm, rotary in itertools.product(GATES, NORMS, (*ROTARY, None)):
            if (
                gated
                and raw_q.shape[-1] != 2 * sizes[0]
                or (norm != "none") != (self.q_norm is not None)
            ):
                continue
            if rotary is not None and tables is None:
                continue
            own_q, gate = raw_q, None
            if gated:
                own_q, gate = raw_q.unflatten(-1, (-1, 2 * self.D)).chunk(2, -1)
                own_q, gate = own_q.flatten(2), gate.flatten(2)
            try:
                expected = [
                    self.formed(t, self.parts.get(name), norm, tables, rotary)
                    for t, name in ((own_q, self.q_norm), (raw_k, self.k_norm))
                ]
            except (Refused, RuntimeError, TypeError):
                continue
            if same(q, expected[0]) and same(k, expected[1]):
                return Heads(gated, norm, rotary), gate
        raise Refused("its queries and keys are another formula")

    def formed(self, x, norm: Optional[Callable], over: str, tables, rotary: Optional[str]):
        """x [B, T, H * D] as heads [B, H, T, D], normed and rotated."""
        x = norm(x) if over == "all" else x
        x = x.unflatten(-1, (-1, self.D)).transpose(1, 2)
        x = norm(x) if over == "head" else x
        if rotary is None:
            return x
        cos, sin = (table.unsqueeze(-3) for table in tables)
        R = cos.shape[-1]
        y, rest = x[..., :R], x[..., R:]
        if rotary == "halves":
            a, b = y.chunk(2, -1)
            turned = torch.cat([-b, a], -1)
        else:
            turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
        if rotary == "pairs":
            cos, sin = (t[..., : R // 2].repeat_interleave(2, -1) for t in (cos, sin))
        return torch.cat([y * cos + turned * sin, rest], -1)
