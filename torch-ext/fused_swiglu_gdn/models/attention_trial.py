"""The equivalence check of attention modules: everything around their attention function.

The class's forward runs on stubs in fp64. The role of each argument and part follows from what the
forward does with them; the arguments of the cache and the attention function, and the output, are
compared with each of our forms. The check gives the plan of our forward.
"""

import contextlib
import functools
import inspect
import itertools
from typing import Callable, Dict, Iterator, List, Optional

import torch
from torch import nn

from ..attention.reference import qk_norm_rope_fwd, sigmoid_gate_fwd
from ..layers.attention import Attention, AttentionForm
from ..layers.norm import NormForm
from ..layers.pinned import GIVEN, found_at
from ..layers.plain import told
from .attention_learning import CASES, PARTIAL, WIDE, WITHOUT, Case, Learning
from .code import Refused
from .facts import Facts, read
from .handed import Cache, Interface, Store, asked_by_this_thread, attributes_of, readable
from .norm_trial import norm_in
from .serving import own_class
from .stand_ins import (
    F64,
    OF_THE_PROCESS,
    KeepsFp64,
    Part,
    Unknown,
    features,
    is_identity,
    numbers,
    probe_of,
    quiet,
    random,
)
from .trial import Run, alike, called, form_key, refuse_odd_module, sizes_of, together, toggles

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
            code = getattr(inspect.unwrap(value), "__code__", None)
            if code is not None and "get_interface" in code.co_names:
                return True
    return False


def attention_form(module: nn.Module) -> AttentionForm:
    """The form of an attention module; raises Refused with the reason why it has none of ours."""
    return form_by(AttentionTrial, module, read(own_class(module), module))


def form_by(trial: type, module: nn.Module, facts: Facts):
    """The form that a trial of the module's forward gives; raises Refused."""
    kind = own_class(module)
    values = facts.values_but("training")  # both are tried
    norms = {name: norm_in(part) for name, part in module._modules.items()}
    key = trial, kind, facts.pinned, module.config.__class__, *_sizes(module, norms)
    known = _forms.setdefault(key, [])
    for handed, of_others, found in known:
        if _key(module, kind, facts, values, handed) == of_others:
            form = found
            break
    else:
        form, handed = _find(trial, module, kind, facts, values, norms)
        known.append((handed, _key(module, kind, facts, values, handed), form))
    if isinstance(form, str):
        raise Refused(form)
    return form


def _key(module: nn.Module, kind: type, facts: Facts, values: dict, handed: frozenset) -> tuple:
    """All that a form depends on: of attributes that are only handed on, whether they are None."""
    given = [values.get(path) is None for path in sorted(handed)]
    return (*form_key(module, kind, facts, _without(values, handed)), *given)


def _without(values: dict, names: frozenset) -> dict:
    return {name: value for name, value in values.items() if name not in names}


def _sizes(module: nn.Module, norms: Dict[str, Optional[NormForm]]) -> Iterator[tuple]:
    """The sizes of parts and parameters and the forms of norms, on which a trial depends."""
    for name, part in module._modules.items():
        yield name, type(part), is_identity(part), *features(part)
        if norms[name] is not None:
            yield *norms[name][3:], _weight_of(part, norms[name])
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, *told(parameter, "shape")


def _weight_of(part: nn.Module, form: NormForm) -> tuple:
    """The shape of a norm's weight, () of a norm without."""
    weight = part._parameters.get(form.weight)
    return () if weight is None else tuple(told(weight, "shape"))


def _find(kind_of_trial, module, kind, facts, values, norms) -> tuple:
    """The form, or the reason against it, and the attributes on whose values that does not
    depend."""
    try:
        refuse_odd_module(module, kind, facts, (*values, *module._modules, "training"))
    except Refused as why:
        return str(why), frozenset()
    paths = [p for p in facts.reads if readable(module, p) and type(values.get(p)) is not bool]
    reasons = []
    # in both modes, or where the forward reads its mode in evaluation alone
    modes = (True, False) if "training" in facts.names else (True,)
    for trains in modes if kind_of_trial.trains else (False,):
        trial = kind_of_trial(module, kind, facts, norms, frozenset(paths))
        trial.trains = trains
        try:
            with quiet(), asked_by_this_thread(trial):
                return trial.form(values), trial.handed
        except Refused as why:
            reasons.append((str(why), trial.handed))
    return reasons[0]


class _Ours(Attention):
    """Ours on stubs, whose norms are no modules, and by the definition of its operation."""

    gated = staticmethod(sigmoid_gate_fwd)

    @staticmethod
    def quantised(*given) -> None:
        return None

    @staticmethod
    def projected(x: torch.Tensor, *parts: Part, eager: bool) -> list:
        return [part(x) for part in parts]

    @staticmethod
    def normed_and_turned(q, k, cos, sin, interleaved, q_weight=None, k_weight=None, norm="head"):
        if q_weight is not None:
            q_weight, k_weight = q_weight.to(q.dtype), k_weight.to(q.dtype)
        options = 1e-6, 0.0, norm == "all", interleaved
        return qk_norm_rope_fwd(q, k, cos, sin, q_weight, k_weight, *[None] * 4, *options)

    def norms(self, parts: dict, x: torch.Tensor) -> dict:
        q, k = parts[self.form.q_norm], parts[self.form.k_norm]
        return {"q_weight": q.weight, "k_weight": k.weight, "norm": self.form.heads.norm}


class AttentionTrial(Learning):
    complex = False  # the tables are one complex tensor
    trains = True  # a call in training is tried, too
    ours: Callable = _Ours

    def __init__(self, module, kind, facts, norms, handed: frozenset):
        super().__init__(module, kind, facts)
        self.handed = handed  # attributes that nothing has read yet
        # their values: to read them from the configuration passes many functions
        self.values = {p: found_at(module, p) for p in handed if "." in p}
        self.parts = {}
        for i, (name, part) in enumerate(module._modules.items()):
            norm = norms[name]
            if norm is not None or features(part):
                sizes = features(part) if norm is None else _weight_of(part, norm)
                self.parts[name] = Part(name, sizes, 100 + 7 * i, self)
            else:
                self.parts[name] = part if is_identity(part) else Unknown(name)
        own = [(n, p) for n, p in module._parameters.items() if p is not None]
        self.own = [(n, random(*told(p, "shape"), seed=77)) for n, p in own]
        self.tables = self.cache = self.mask = self.positions = self.store = None  # arguments
        self.takes = False  # keys and values from the store
        self.width = next((features(m)[0] for m in module._modules.values() if features(m)), 0)
        self.dims, self.D, self.R = 3, 1, 0
        # those whose inputs are compared: projections, and norms that ours calls
        self.projections = frozenset(
            n for n, part in self.parts.items() if isinstance(part, Part) and len(part.sizes) != 1
        )
        self.has_float = "float" in facts.names

    # ------------------------------------------------------------------ runs

    def called(self, case: Case, values=None, absent=frozenset()) -> Run:
        """One run of the class's forward, with attributes `values` by their paths."""
        dtype = case.dtype
        own = {n: p.to(dtype) for n, p in self.own}
        values = {**self.values, **(values or {}), "training": case.training}
        attributes = attributes_of(self.module, self.facts.reads, values, self.seen)
        probe = probe_of(self.module, self.kind, self.parts, own, **attributes)
        shape = case.B, case.T, self.width
        x = numbers(*shape, values=case.values, seed=1, dtype=dtype)
        before, self.log = [x, *self.tables_of(case)], []
        made, log = list(map(torch.clone, before)), self.log
        x, tables = made[0], made[1] if self.complex else tuple(made[1:]) or None
        given = self.given(self.roles_of(case, x, tables), absent)
        rest = self.unknown_words(case.words)
        self.interface = interface = Interface(log)
        with KeepsFp64() if self.has_float and dtype is F64 else contextlib.nullcontext():
            result = called(self.facts, probe, given, rest, case.by_position)
        self.log = []  # whoever calls a part now is no forward
        if not all(map(torch.equal, made, before)):
            raise Refused("its forward writes to its input")
        if len(interface.calls) != 1 or len(interface.asked) != 1:
            raise Refused("it does not call one attention function, by its configuration")
        return Run(probe, x, given, rest, log, result, tables, interface)

    def tables_of(self, case: Case) -> List[torch.Tensor]:
        """cos and sin [B or 1, T, R], or without a batch; none where none are given."""
        if case.rotary is None:
            return []
        width = self.R or max(int(self.D * case.rotary), 1)
        size = (case.tables or case.B, case.T, width)[3 - self.dims :]
        dtype = case.of_tables or case.dtype
        return [random(*size, seed=seed, dtype=dtype) for seed in (21, 22)]

    def roles_of(self, case: Case, x: torch.Tensor, tables) -> dict:
        """The arguments of a run whose roles are known, by their names."""
        roles = {self.hidden: x, self.tables: tables}
        roles[self.cache] = Cache(self.cache) if case.cached else None
        roles[self.mask] = self.opaque[self.mask] if case.masked else None
        if self.positions is not None:
            roles[self.positions] = torch.arange(case.T).repeat(case.B, 1) * 20011 + 5
        if self.store is not None:
            roles[self.store] = Store(self.store, case.B, self.D, case.dtype)
        return roles

    def form(self, values: dict) -> AttentionForm:
        """The form with which ours does what the class's forward does; values: of what that
        reads."""
        form = self.first()
        if self.cache is None and self.tables is None and form.q_norm is None:
            raise Refused("it has no norm, no rotary embedding and no cache")
        self.check_all(form)
        optional = self.agrees(form._replace(optional=True), WITHOUT)
        wider = form._replace(wide=True)
        form = wider if all([self.agrees(wider, case) for case in WIDE]) else form
        if not self.R and self.agrees(form._replace(widths=()), PARTIAL):
            form = form._replace(widths=())
        return self.guarded(form._replace(optional=optional), values)

    def guarded(self, form, values: dict):
        """The form, with all that each call has to compare."""
        values = self.guards(_without(values, self.handed))
        # what ours hands on was not None; the name of the attention function and the cache's layer
        # are never that
        known = {word.what for word in (form.implementation, form.index) if word is not None}
        guards = {**values, **dict.fromkeys(sorted(self.handed - known), GIVEN)}
        guards.update({} if self.trains else {"training": False})
        return form._replace(pinned=self.facts.pinned, guards=tuple(guards.items()))

    def check_all(self, form) -> None:
        """Checks ours with this form in all cases; raises Refused if it differs in one."""
        ours = self.ours(form)
        for case, absent in together(list(self.cases()), toggles(self.others())):
            self.check(ours, self.called(case, absent=absent))

    def cases(self) -> Iterator[Case]:
        """CASES, with the numbers of tokens that have to be tried; long inputs are in fp64."""
        sizes = [size for part in self.parts.values() for size in getattr(part, "sizes", ())]
        tokens = sizes_of(self.facts, max(sizes))
        for case, T in together(list(CASES), [n for n in tokens if n <= 66]):
            B = case.B + (case.B == T)  # rows and tokens are not as many
            yield case._replace(B=B, T=T, training=self.trains and case.training)
        for case, T in zip(itertools.cycle(CASES), [n for n in tokens if n > 66]):
            training = self.trains and case.training
            yield case._replace(B=1, T=T, tables=0, dtype=F64, training=training)

    def agrees(self, form, case: Case, run: Optional[Run] = None) -> bool:
        try:
            self.check(self.ours(form), run or self.called(case))
        except OF_THE_PROCESS:
            raise
        except Exception:  # a form of another module's parts may raise anything
            return False
        return True

    def check(self, ours, run: Run) -> None:
        """Checks that ours gives the cache, the attention function and the parts of the module what
        the class's forward gives them, and returns the same; raises Refused if not."""
        given = {n: v.again() if type(v) in (Cache, Store) else v for n, v in run.given.items()}
        self.log = log = []
        self.interface = Interface(log)
        result = ours.served(run.probe, run.x, given, run.rest)
        mine = run._replace(given=given, interface=self.interface, log=log, result=result)
        self.log = []
        if result is None or not alike(_done(mine, self.projections), _done(run, self.projections)):
            raise Refused("its forward depends on the call")


def _done(run: Run, projections: frozenset) -> tuple:
    """All that a forward has done in a run that others see."""
    ((module, *heads, mask, keywords, _),) = run.interface.calls
    updates = {n: v.calls for n, v in run.given.items() if type(v) in (Cache, Store)}
    calls = filter(None, run.log)
    products, (B, T, _) = {}, run.x.shape
    for name, x, _ in calls:
        if name in projections:  # by rows of tokens, where it is given tokens of rows (MLCD)
            turned = B != T and x.shape[:2] == (T, B)
            products[name] = (x.transpose(0, 1) if turned else x).flatten(0, -2)
    return run.interface.asked, module, heads, mask, keywords, updates, products, run.result
