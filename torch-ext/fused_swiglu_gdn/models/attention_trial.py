"""The equivalence check of attention modules: everything around their attention function.

The class's forward runs on stubs in fp64. The role of each argument and part follows from what the
forward does with them; the arguments of the cache and the attention function, and the output, are
compared with each of our forms. The check gives the plan of our forward.
"""

import contextlib
import functools
from typing import Dict, List

import torch
from torch import nn

from ..attention.reference import qk_norm_rope_fwd
from ..layers.attention import Attention, AttentionForm
from ..layers.norm import NormForm
from ..layers.own_code import found_at, names_in
from ..layers.plain import told
from .attention_learning import (
    CASES,
    FIRST,
    PARTIAL,
    WITHOUT,
    Case,
    Learning,
    Run,
)
from .code import Refused
from .norm_trial import norm_in
from .reader import read
from .serving import own_class
from .stand_ins import (
    F64,
    Cache,
    Interface,
    KeepsFp64,
    Part,
    Unknown,
    asked_by_this_thread,
    features,
    is_identity,
    put,
    quiet,
    random,
    readable,
    twin_of,
)
from .trial import WORD, alike, called, form_key, plain_values, toggles, why_odd_module

# names that make a module one to look at
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
JOINED = ("qkv_proj", "query_key_value", "qkv")
OUT = ("o_proj", "out_proj", "dense", "wo", "c_proj")

# by the class and its code: (attributes that are only handed on, all other values, form or reason)
_forms: Dict[tuple, List[tuple]] = {}


def is_attention(module: nn.Module) -> bool:
    """True if the module looks like attention.

    It has projections of queries, keys and values and an output projection, or it uses
    transformers' registry of attention functions.
    """
    parts = set(module._modules)
    makes = parts.issuperset(PROJECTIONS) or not parts.isdisjoint(JOINED)
    if makes and not parts.isdisjoint(OUT):
        return True
    return len(parts) > 1 and asks_for_attention(own_class(module))


@functools.cache
def asks_for_attention(kind: type) -> bool:
    """True if a method of the class calls the registry of attention functions."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for value in vars(base).values():
            for _ in range(20):  # decorators
                value = getattr(value, "__wrapped__", value)
            code = getattr(value, "__code__", None)
            if code is not None and "get_interface" in code.co_names:
                return True
    return False


def attention_form(module: nn.Module) -> AttentionForm:
    """The form of an attention module; raises Refused with the reason why it has none of ours."""
    return form_by(AttentionTrial, module, read(own_class(module), module))


def form_by(trial: type, module: nn.Module, source):
    """The form that a trial of the module's forward gives; raises Refused."""
    kind = own_class(module)
    values = plain_values(module, source.reads)
    values.pop("training", None)  # both are tried
    norms = _norms_of(module)
    key = (trial, kind, source.pinned.codes, _parts_key(module), module.config.__class__)
    key += tuple((n, _norm_key(module._modules[n], form)) for n, form in norms.items())
    known = _forms.setdefault(key, [])
    for handed, facts, found in known:
        if form_key(module, kind, source, _without(values, handed)) == facts:
            form = found
            break
    else:
        form, handed = _find(trial, module, kind, source, values, norms)
        known.append((handed, form_key(module, kind, source, _without(values, handed)), form))
    if isinstance(form, str):
        raise Refused(form)
    return form


def _without(values: dict, names: frozenset) -> dict:
    return {name: value for name, value in values.items() if name not in names}


def _norms_of(module: nn.Module) -> Dict[str, NormForm]:
    """The forms of the parts that are RMS norms with a weight."""
    found = {}
    for name, part in module._modules.items():
        form = norm_in(part) if part is not None and part._parameters else None
        if form is not None and form.weight is not None:
            found[name] = form
    return found


def _parts_key(module: nn.Module) -> tuple:
    sizes = [(n, type(m), is_identity(m), *features(m)) for n, m in module._modules.items()]
    own = {n: p for n, p in module._parameters.items() if p is not None}
    return (*sizes, *((n, tuple(told(p, "shape"))) for n, p in own.items()))


def _norm_key(norm: nn.Module, form: NormForm) -> tuple:
    return (*form[3:], told(norm._parameters[form.weight], "shape"))


def _find(kind_of_trial, module, kind, source, values, norms) -> tuple:
    """The form, or the reason against it, and the attributes on whose values that does not
    depend."""
    paths = frozenset(p for p in source.reads if readable(module, p)) - source.guarded
    reasons = []
    for handed in (paths, frozenset()):
        trial = kind_of_trial(module, kind, source, norms, handed)
        try:
            with quiet(), asked_by_this_thread(trial):
                form = trial.form((kind, source.pinned))
        except Refused as why:
            reasons.append((str(why), trial.handed))
            if not trial.handed:
                break
            continue
        names = (*_without(values, trial.handed), *module._modules, "training")
        reason = why_odd_module(module, kind, source, names)
        if reason is not None:
            return reason, trial.handed
        return form, trial.handed
    return reasons[0]


class AttentionTrial(Learning):
    def __init__(self, module, kind, source, norms, handed: frozenset):
        super().__init__(module, kind, source)
        self.handed = handed  # attributes that nothing has read yet
        # their values, where to read them from the configuration passes many functions
        probe = twin_of(module, kind)
        put(probe, {p: found_at(module, p) for p in handed if "." in p})
        self.values = {n: probe.__dict__[n] for n in {p.split(".")[0] for p in handed if "." in p}}
        self.parts = {}
        for i, (name, part) in enumerate(module._modules.items()):
            self.parts[name] = Unknown(name)
            if name in norms:
                size = told(part._parameters[norms[name].weight], "shape")
                self.parts[name] = Part(name, tuple(size), 200 + i, self)
            elif features(part):
                self.parts[name] = Part(name, features(part), 100 + 7 * i, self)
            elif is_identity(part):
                self.parts[name] = part
        self.own = {
            n: random(*told(p, "shape"), seed=77)
            for n, p in module._parameters.items()
            if p is not None
        }
        self.tables = self.cache = self.mask = None  # arguments
        self.width = next((features(m)[0] for m in module._modules.values() if features(m)), 0)
        self.dims, self.D, self.R = 3, 1, 0
        self.projections = frozenset(
            n for n, part in self.parts.items() if isinstance(part, Part) and part.sizes[1:]
        )
        names = {name for function, _ in source.pinned.codes for name in names_in(function)}
        self.has_float = "float" in names

    # ------------------------------------------------------------------ runs

    def called(self, case: Case, dtype=F64, values=None, absent=frozenset()) -> Run:
        """One run of the class's forward, with attributes `values` by their paths."""
        own = self.own and {n: p.to(dtype) for n, p in self.own.items()}
        twin = twin_of(self.module, self.kind, self.parts, own)
        twin.__dict__["training"] = case.training
        twin.__dict__.update(self.values)
        if values:
            put(twin, values)
        numbers, tables = [random(case.B, case.T, self.width, seed=1, dtype=dtype)], None
        if case.rotary is not None:
            width = self.R or max(int(self.D * case.rotary), 1)
            size = (case.tables or case.B, case.T, width)[3 - self.dims :]
            numbers += [random(*size, seed=21, dtype=dtype), random(*size, seed=22, dtype=dtype)]
        x, *tables = map(torch.clone, numbers)
        tables, self.log = tuple(tables) or None, []
        roles = {self.hidden: x, self.tables: tables}
        roles[self.cache] = Cache(self.cache) if case.cached else None
        roles[self.mask] = self.opaque[self.mask] if case.masked else None
        given, word = self.given(roles, absent), object()
        log = self.log
        self.interface = interface = Interface(log)
        with KeepsFp64() if self.has_float else contextlib.nullcontext():
            forward, signature = self.source.forward, self.source.signature
            result = called(forward, signature, twin, dict(given), {WORD: word})
        self.log = []  # whoever calls a part now is no forward
        if not all(map(torch.equal, (x, *(tables or ())), numbers)):
            raise Refused("its forward writes to its input")
        if len(interface.calls) != 1 or len(interface.asked) != 1:
            raise Refused("it does not call one attention function, by its configuration")
        return Run(twin, x, tables, given, word, interface, log, result)

    def marks(self) -> dict:
        return {path: self.opaque[f"self.{path}"] for path in self.handed}

    def form(self, known: tuple) -> AttentionForm:
        """The form with which ours does what the class's forward does. known: its first fields, but
        for the guards."""
        first, training = self.first()
        if self.cache is None and self.tables is None and self.plan.q_norm is None:
            raise Refused("it has no norm, no rotary embedding and no cache")
        self.travelling = self.those_travelling(first)
        self.calls, self.training_words = self.calls_of(first), self.calls_of(training)[1]
        self.handed = self.those_handed()
        values = plain_values(self.module, self.source.reads - self.handed - {"training"})
        form = AttentionForm(*known, tuple(values.items()), *self.fields())
        for case in (FIRST, *CASES):
            self.check(form, self.called(case))
        for absent in toggles(self.others(), self.source.asked):
            self.check(form, self.called(FIRST, absent=absent))
        self.keeps_dtype()
        optional = self.agrees(form._replace(optional=True), WITHOUT)
        if not self.R and self.agrees(form._replace(widths=()), PARTIAL):
            form = form._replace(widths=())
        return form._replace(optional=optional)

    def agrees(self, form: AttentionForm, case: Case) -> bool:
        try:
            self.check(form, self.called(case))
        except Refused:
            return False
        return True

    def check(self, form: AttentionForm, run: Run) -> None:
        """Checks that ours gives the cache, the attention function and the parts of the module what
        the class's forward gives them, and returns the same; raises Refused if not."""
        given = {n: Cache(n) if type(v) is Cache else v for n, v in run.given.items()}
        self.log, self.interface = [], Interface([])
        self.interface.log = self.log
        result = _Ours(form).served(run.twin, run.x, given, self.rest(run))
        ours = run._replace(given=given, interface=self.interface, log=self.log, result=result)
        self.log = []
        if not alike(_done(ours, self.projections), _done(run, self.projections)):
            raise Refused("its forward depends on the call")

    def keeps_dtype(self) -> None:
        """Checks that all outputs of the forward have the dtype of the input, in bf16 too."""
        run = self.called(FIRST, torch.bfloat16)
        left = (*run.interface.calls[0][1:4], run.result[0])
        if {x.dtype for x in left} != {torch.bfloat16}:
            raise Refused("it changes the dtype")


class _Ours(Attention):
    """Ours on stubs, whose norms are no modules, and by the definition of its operation."""

    @staticmethod
    def normed_and_turned(q, k, cos, sin, interleaved, q_weight=None, k_weight=None, norm="head"):
        options = 1e-6, 0.0, norm == "all", interleaved
        return qk_norm_rope_fwd(q, k, cos, sin, q_weight, k_weight, *[None] * 4, *options)

    def norms(self, parts: dict, x: torch.Tensor) -> dict:
        q, k = parts[self.form.q_norm], parts[self.form.k_norm]
        return {"q_weight": q.weight, "k_weight": k.weight, "norm": self.form.heads.norm}


def _done(run: Run, projections: frozenset) -> tuple:
    """All that a forward has done in a run that others see."""
    ((module, *heads, mask, keywords, _),) = run.interface.calls
    updates = {n: v.calls for n, v in run.given.items() if type(v) is Cache}
    products = {entry[0]: entry[1] for entry in run.log if entry and entry[0] in projections}
    return run.interface.asked, module, heads, mask, keywords, updates, products, run.result
