"""What an attention module does around its attention function, told by its source and a trial.

The class's forward runs on stand-ins in fp64. Which argument and which part is what is learned from
what the forward does with them; what reaches the cache and the attention function, and what comes
back, is compared with each form that ours has. The trial gives the plan of our forward.
"""

import functools
import itertools
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from ..layers.attention import GATES, NORMS, ROTARY, AttentionForm, Heads
from ..layers.forward import PLAIN_VALUES
from ..layers.norm import NormForm
from ..layers.words import Word, Words
from .forms import Refused
from .norm_trial import norm_form
from .serving import own_class
from .source import form_key, plain_values, read, why_odd_module
from .stand_ins import (
    F64,
    SIZES,
    WORD,
    Cache,
    Interface,
    KeepsFp64,
    Logged,
    Norm,
    Opaque,
    Product,
    Raises,
    Read,
    Unknown,
    arguments_of,
    asked_by_this_thread,
    name_of,
    put,
    quiet,
    random,
    readable,
    same,
    signature_of,
    toggles,
    twin_of,
)

# names that make a module one to look at
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
JOINED = ("qkv_proj", "query_key_value", "qkv")
OUT = ("o_proj", "out_proj", "dense", "wo", "c_proj")
# what an attribute that is only handed on may be as well
OTHERS = (None, True, 3, "word")

# by the class, its code and its values: (attributes that are only handed on, {key: form})
_forms: Dict[tuple, List[tuple]] = {}


class Case(NamedTuple):
    """One run of a trial."""

    B: int
    T: int
    rotary: Optional[float]  # the width of the tables, of the head dim; None: there are none
    tables: int = 0  # the batch of the tables, as the input's by default
    cached: bool = False
    masked: bool = False
    training: bool = False


FIRST = Case(2, 5, 1.0, 0, True, True)
TRAINING = FIRST._replace(training=True)
CASES = (
    Case(2, 5, 1.0, 0, False),
    Case(2, 1, 1.0, 1, True, True),
    Case(1, 3, 1.0, 0, True, False, True),
    Case(3, 2, 1.0, 1, False, True, True),
)
WITHOUT, PARTIAL = Case(2, 3, None), Case(2, 3, 0.5, 0, False, True)


def is_attention(module: nn.Module) -> bool:
    """It makes queries, keys and values, and what comes out of attention, or asks transformers'
    registry for an attention function."""
    parts = set(module._modules)
    makes = set(PROJECTIONS) <= parts or any(name in parts for name in JOINED)
    if makes and any(name in parts for name in OUT):
        return True
    return len(parts) > 1 and asks_for_attention(own_class(module))


@functools.cache
def asks_for_attention(kind: type) -> bool:
    """A method of the class names what the registry of attention functions answers."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    codes = [getattr(value, "__code__", None) for base in own for value in vars(base).values()]
    return any("get_interface" in code.co_names for code in codes if code is not None)


def attention_form(module: nn.Module) -> Union[AttentionForm, str]:
    """The form of an attention module, or why it is none of ours."""
    kind = own_class(module)
    try:
        source = read(kind, module)
        values = plain_values(module, source.reads)
        values.pop("training", None)  # both are tried
        norms = {n: norm_form(m) for n, m in module._modules.items() if may_be_norm(m)}
        key = (kind, source.pinned.codes, _parts_key(module), module.config.__class__)
        key += tuple((n, _norm_key(module._modules[n], form)) for n, form in norms.items())
        known = _forms.setdefault(key, [])
        for handed, forms in known:
            found = forms.get(form_key(module, kind, source, _without(values, handed)))
            if found is not None:
                return found
        form, handed = _find(module, kind, source, values, norms)
        forms = next((forms for names, forms in known if names == handed), None)
        if forms is None:
            forms = {}
            known.append((handed, forms))
        forms[form_key(module, kind, source, _without(values, handed))] = form
        return form
    except Refused as why:
        return str(why)


def _without(values: dict, names: frozenset) -> dict:
    return {name: value for name, value in values.items() if name not in names}


def may_be_norm(part: nn.Module) -> bool:
    """It has one vector of weights, and nothing else."""
    shapes = [p.ndim for p in part._parameters.values() if p is not None]
    return shapes == [1] and not part._modules


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


def _find(module, kind, source, values, norms) -> tuple:
    """The form, or why there is none, and the attributes on whose values that does not depend."""
    paths = frozenset(p for p in source.reads if readable(module, p))
    reasons = []
    for handed in (paths, frozenset()):
        trial = _Trial(module, kind, source, norms, handed)
        try:
            with quiet():
                fields = trial.fields()
        except Refused as why:
            reasons.append((str(why), trial.handed))
            if not trial.handed:
                break
            continue
        guards = _without(values, trial.handed)
        names = (*guards, *module._modules, "training")
        reason = why_odd_module(module, kind, source, names)
        if reason is not None:
            return reason, trial.handed
        return AttentionForm(kind, source.pinned, tuple(guards.items()), *fields), trial.handed
    return reasons[0]


class Run(NamedTuple):
    """What a run of the class's forward was given, met and gave."""

    twin: nn.Module
    x: torch.Tensor
    tables: Optional[tuple]
    given: dict
    word: object
    interface: Interface
    log: list  # calls of parts; None where the attention function was called
    result: object


class Plan(NamedTuple):
    """What a forward does, as far as it is the same in every run."""

    projections: Tuple[str, ...]
    q_norm: Optional[str]
    k_norm: Optional[str]
    out: str
    heads: Heads


class _Trial:
    def __init__(self, module, kind, source, norms, handed: frozenset):
        self.module, self.kind, self.source = module, kind, source
        self.signature = signature_of(source)
        self.handed = handed  # attributes that nothing has read yet
        self.parts = {}
        for i, (name, part) in enumerate(module._modules.items()):
            self.parts[name] = Unknown(name)
            if name in norms and not isinstance(norms[name], str):
                self.parts[name] = Norm(len(part._parameters[norms[name].weight]), 200 + i)
            elif _features(part):
                self.parts[name] = Product(*_features(part), 100 + 7 * i)
            elif type(part) is nn.Identity:
                self.parts[name] = part
        self.own = {
            n: random(*p.shape, seed=77) for n, p in module._parameters.items() if p is not None
        }
        self.hidden = self.tables = self.cache = self.mask = None  # arguments
        self.fixed = set()  # those that are left at their defaults
        self.width = next((_features(m)[0] for m in module._modules.values() if _features(m)), 0)
        self.dims, self.D, self.travelling = 3, 1, frozenset()

    # ------------------------------------------------------------------ runs

    def called(self, case: Case, dtype=F64, values=None, absent=frozenset()) -> Run:
        """One run of the class's forward, where attributes are `values` by their paths."""
        log, parts = [], {}
        for name, part in self.parts.items():
            logged = isinstance(part, (Product, Norm))
            parts[name] = Logged(name, part, log) if logged else part
        twin = twin_of(self.module, self.kind, parts, {n: p.to(dtype) for n, p in self.own.items()})
        twin.training = case.training
        put(twin, values or {})
        x = random(case.B, case.T, self.width, seed=1, dtype=dtype)
        tables = None
        if case.rotary is not None:
            width = max(int(self.D * case.rotary), 1)
            size = (case.tables or case.B, case.T, width)[3 - self.dims :]
            tables = tuple(random(*size, seed=seed, dtype=dtype) for seed in (21, 22))
        given, word, interface = {}, object(), Interface(log)
        for name in self.signature.names:
            if name == self.hidden:
                given[name] = x
            elif name == self.tables:
                given[name] = tables
            elif name == self.cache:
                given[name] = Cache(name) if case.cached else None
            elif name == self.mask:
                given[name] = Opaque(name) if case.masked else None
            elif name not in self.fixed and name not in absent:
                given[name] = Opaque(name)
            elif name in self.signature.positional_only:
                given[name] = self.signature.defaults[name]

        with KeepsFp64(), asked_by_this_thread(interface):
            forward = self.source.forward
            result = self.signature.called(forward, twin, dict(given), {WORD: word})
        if len(interface.calls) != 1 or len(interface.asked) != 1:
            raise Refused("it does not call one attention function, by its configuration")
        return Run(twin, x, tables, given, word, interface, log, result)

    def marks(self) -> dict:
        return {path: Opaque(f"self.{path}") for path in self.handed}

    def learned(self) -> Run:
        """The first run, when it is known which argument is what."""
        for _ in range(4 * len(self.signature.names) + len(self.handed) + 8):
            try:
                run = self.called(FIRST, values=self.marks())
                self.D = run.interface.calls[0][1].shape[-1]
                if self.tables is not None and run.tables[0].shape[-1] != self.D:
                    continue
                self.called(TRAINING, values=self.marks())
                return run
            except Read as what:
                self.learn(what)
        raise Refused("its arguments are not known")

    def learn(self, what: Read) -> None:
        """An argument was read that nobody knew, or an attribute that was to be handed on."""
        name, how = what.name, what.how
        if name.startswith("self."):
            self.handed -= {name[5:]}
            return
        optional = name in self.signature.defaults
        of_tensors = how in SIZES or not optional and how.startswith("__") and how != "__iter__"
        if name in (self.hidden, self.tables, self.cache, self.mask):
            raise what
        if self.hidden is None and (how == "part" or of_tensors):
            self.hidden = name
        elif self.tables is None and how in ("__iter__", "__getitem__"):
            self.tables = name
        elif self.cache is None and how == "update":
            self.cache = name
        elif optional and name not in self.fixed:
            self.fixed.add(name)
        else:
            raise what

    def first(self) -> None:
        """Learns the arguments and the plan, by tables of each row or of all rows."""
        self.dims = 3
        try:
            self.see(self.fitting())
        except Refused as why:
            if self.tables is None:
                raise
            self.dims = 2
            try:
                self.see(self.fitting())
            except Refused:
                raise why from None

    def fitting(self) -> Run:
        """The first run, by tables of a width that fits."""
        error = None
        for width in dict.fromkeys([1, 2, *self.widths()]):
            self.D = width
            try:
                return self.learned()
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
            self.mask = self.argument(mask, run)
            if self.mask is None:
                raise Refused("it changes the attention mask")
        self.plan, self.sizes = self.planned(run)

    def widths(self) -> Iterator[int]:
        """What the head dim may be."""
        outs = [p.features[1] for p in self.parts.values() if isinstance(p, Product)]
        values = plain_values(self.module, self.source.reads).values()
        sizes = [v for v in values if type(v) is int and v > 2 and any(n % v == 0 for n in outs)]
        yield from dict.fromkeys([*sizes, 64, 128, 32, 256, 96, 80, 16, 8])

    # ------------------------------------------------------------------ what is learned

    def fields(self) -> tuple:
        """The fields of an AttentionForm that the trial finds."""
        self.first()
        if self.cache is None and self.tables is None and self.plan.q_norm is None:
            raise Refused("it has no norm, no rotary embedding and no cache")
        self.travelling = self.those_travelling()
        self.calls = self.calls_of(self.called(FIRST, values=self.marks()))
        self.training_words = self.calls_of(self.called(TRAINING, values=self.marks()))[1]
        self.runs = {case: self.check(case) for case in (FIRST, TRAINING)}
        for case in CASES:
            self.check(case)
        for absent in toggles(self.others()):
            self.check(FIRST, absent=absent)
        handed = self.those_handed()
        if handed != self.handed:
            self.handed = handed
            return self.fields()
        kept, partial = self.plan, self.passes(PARTIAL)
        self.plan = kept._replace(heads=kept.heads._replace(rotary=None))
        without, self.plan = self.passes(WITHOUT), kept
        self.keeps_dtype()
        return self.form(partial, without)

    def those_handed(self) -> frozenset:
        """Attributes that are only handed on, whatever they are."""
        implementation, words, index, updates, updates_with = self.calls
        everything = (implementation, index, *updates, *updates_with, *words, *self.training_words)
        met = frozenset(w.what for w in everything if w is not None and w.how == "attribute")
        if not self.handed <= met:
            return met
        if self.are_handed(self.handed):
            return self.handed
        return frozenset(name for name in self.handed if self.are_handed({name}))

    def are_handed(self, names) -> bool:
        cases = itertools.product(OTHERS if names else (), (FIRST, TRAINING))
        return all(self.passes(case, dict.fromkeys(names, value)) for value, case in cases)

    def form(self, partial: bool, without: bool) -> tuple:
        implementation, words, index, updates, updates_with = self.calls
        identities = [n for n, part in self.parts.items() if isinstance(part, nn.Identity)]
        arguments = arguments_of(
            self.signature, self.source, self.hidden, self.fixed, self.travelling
        )
        return (
            arguments, tuple(getattr(self.source, "checks", ())), self.tables, self.cache,
            self.mask, index, updates, updates_with, self.plan.projections, self.sizes,
            self.plan.q_norm, self.plan.k_norm, self.plan.out, self.plan.heads, self.D, self.dims,
            partial, without, tuple(identities), implementation, words, self.training_words,
            self.rests, self.eager,
        )  # fmt: skip

    def others(self) -> tuple:
        """The arguments that are handed on, or ignored."""
        roles = {self.hidden, self.tables, self.cache, self.mask, *self.fixed}
        return tuple(
            n for n in self.signature.names if n not in roles and n in self.signature.defaults
        )

    def those_travelling(self) -> frozenset:
        """Keywords that the forward reads from **kwargs, and leaves there."""
        extra = frozenset(getattr(self.source, "extra", ())) & set(self.others())
        if not extra:
            return extra
        run = self.called(FIRST, values=self.marks())
        without = self.called(FIRST, values=self.marks(), absent=extra).interface.calls[0][5]
        met = run.interface.calls[0][5]
        return frozenset(
            n for n in extra if met.get(n) is run.given[n] and n not in without
        )  # fmt: skip

    def argument(self, value: object, run: Run) -> Optional[str]:
        """The name of the argument that is this very value."""
        return next((n for n, v in run.given.items() if v is value and v is not None), None)

    def rest(self, run: Run) -> dict:
        """The keywords of a run that the forward has no name for."""
        more = {WORD: run.word} if self.signature.more else {}
        return {**{n: run.given[n] for n in self.travelling if n in run.given}, **more}

    def calls_of(self, run: Run) -> tuple:
        """Where all comes from that the registry, the attention function and the cache get."""
        *_, keywords, _ = run.interface.calls[0]
        ((name, self.eager),) = run.interface.asked
        rest = self.rest(run)
        self.rests = bool(rest) and all(keywords.get(n) is v for n, v in rest.items())
        keywords = {n: v for n, v in keywords.items() if not self.rests or n not in rest}
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
        """Where a value comes from."""
        if issubclass(type(value), Opaque):
            known = self.argument(value, run)
            if known is not None and name_of(value) not in (self.cache,):
                return Word(name, "argument", known, self.signature.defaults.get(known))
            path = name_of(value)
            if path.startswith("self."):
                return Word(name, "attribute", path[5:])
        elif type(value) is dict and _are_the_same(value, self.rest(run)):
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
        elif value is None or type(value) in PLAIN_VALUES:
            return Word(name, "constant", value, type(value))
        raise Refused(f"it hands on {name or 'a value'}, and nobody knows where it comes from")

    # ------------------------------------------------------------------ comparison

    def passes(self, case: Case, values: Optional[dict] = None) -> bool:
        try:
            self.check(case, values)
        except Refused:
            return False
        return True

    def check(self, case: Case, values: Optional[dict] = None, absent=frozenset()) -> Run:
        """A run does what the first one did; Refused if not."""
        run = self.called(case, values=values, absent=absent)
        if values or absent:
            if not _are_equal(run, self.runs[case]):
                raise Refused("its forward depends on the call")
        elif self.planned(run, self.plan)[0] != self.plan:
            raise Refused("its forward depends on the call")
        implementation, words, index, updates, updates_with = self.calls
        words = self.training_words if case.training else words
        module, _, _, _, mask, keywords, _ = run.interface.calls[0]
        if mask is not run.given.get(self.mask):
            raise Refused("it changes the attention mask, or keeps keyword arguments back")
        asked, default = run.interface.asked[0]
        expected = [("", asked, implementation)]
        rest = self.rest(run)
        made = self.made(words, run)
        if self.rests:
            made.update(rest)
        if not _are_the_same(keywords, made) or default is not self.eager:
            raise Refused("other keyword arguments reach its attention function")
        if case.cached and self.cache is not None:
            ((_, _, layer, positional, more),) = run.given[self.cache].calls
            if len(positional) != len(updates):
                raise Refused("it updates the cache in another way")
            expected += [("", v, w) for v, w in zip((layer, *positional), (index, *updates))]
            if not _are_the_same(more, self.made(updates_with, run)):
                raise Refused("it gives the cache's update other keywords")
        for _, value, word in expected:
            if not _are_the_same({"": value}, self.made((word,), run)):
                raise Refused("it asks for other things, or updates the cache in another way")
        return run

    def made(self, words, run: Run) -> dict:
        return Words(words).made(run.twin, run.given, self.rest(run), run.tables)

    def keeps_dtype(self) -> None:
        """All that leaves the forward has the dtype of what came, in 16 bits too."""
        run = self.called(FIRST, torch.bfloat16)
        left = (*run.interface.calls[0][1:4], run.result[0])
        if {x.dtype for x in left} != {torch.bfloat16}:
            raise Refused("it changes the dtype")

    def planned(self, run: Run, known: Optional[Plan] = None) -> tuple:
        """The plan that a run agrees with, and the widths of queries, keys and values."""
        module, q, k, v, _, _, out = run.interface.calls[0]
        if module is not run.twin:
            raise Refused("it gives its attention function another module")
        k, v = self.before_the_cache(run, k, v)
        if not all(isinstance(t, torch.Tensor) and t.ndim == 4 for t in (q, k, v)):
            raise Refused("it gives its attention function other things than heads")
        if q.shape[-1] != k.shape[-1]:
            raise Refused("its heads are of another size")
        names = [entry and entry[0] for entry in run.log]
        if len(set(names)) != len(names):
            raise Refused("it calls a part twice")
        made, ended = run.log[: names.index(None)], run.log[names.index(None) + 1 :]
        ours = [e for e in made if isinstance(self.parts[e[0]], Product)]
        norms = [e[0] for e in made if isinstance(self.parts[e[0]], Norm)]
        if len(ended) != 1 or len(norms) not in (0, 2) or len(ours) not in (1, 3):
            raise Refused("its parts are called in another order, or other ones")
        if not all(same(e[1], run.x) for e in ours):
            raise Refused("its projections are of something else than the hidden states")
        ours, end = {e[0]: e[2] for e in ours}, ended[0]
        plan, gate = self.compared(run, ours, norms, (q, k, v), end[0], known)
        y = out.reshape(*run.x.shape[:2], -1)
        y = self.parts[end[0]](y if gate is None else y * torch.sigmoid(gate))
        result = run.result
        right = type(result) is tuple and len(result) == 2 and result[1] == "weights"
        if not right or not same(result[0], y):
            raise Refused("it is another formula after attention")
        return plan, tuple(t.shape[1] * t.shape[-1] for t in (q, k, v))

    def before_the_cache(self, run: Run, k, v):
        """Keys and values as they came to the cache, if one was given."""
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

    def compared(self, run: Run, ours: dict, norms: list, heads: tuple, out: str, known):
        """The plan that gives q, k and v, and its gate."""
        q, k, v = heads
        D, sizes = q.shape[-1], tuple(t.shape[1] * t.shape[-1] for t in heads)
        orders = [known.projections] if known else itertools.permutations(ours, len(ours))
        plans = [known.heads] if known else [
            Heads(*form) for form in itertools.product(GATES, NORMS, (*ROTARY, None))
        ]  # fmt: skip
        normed = [(known.q_norm, known.k_norm)] if known else list(
            itertools.permutations(norms) if norms else [(None, None)]
        )  # fmt: skip
        if known and {*known.projections, known.q_norm, known.k_norm} - {None} != {*ours, *norms}:
            raise Refused("its forward depends on the call")
        tables = self.tables and run.tables
        why = "its values are another formula"
        for order in orders:
            if len(order) == 1:
                joined = ours[order[0]]
                if joined.shape[-1] != sum(sizes):
                    raise Refused("its joined projection is of another width")
                raw_q, raw_k, raw_v = joined.split(sizes, -1)
            else:
                raw_q, raw_k, raw_v = (ours[name] for name in order)
            if raw_v.shape[-1] != sizes[2] or not same(
                v, raw_v.unflatten(-1, (-1, v.shape[-1])).transpose(1, 2)
            ):
                continue
            why = "its queries and keys are another formula"
            for form, (q_norm, k_norm) in itertools.product(plans, normed):
                if (form.norm == "none") != (q_norm is None):
                    continue
                if form.rotary is not None and not tables:
                    continue
                if raw_q.shape[-1] != sizes[0] * (1 + form.gated) or raw_k.shape[-1] != sizes[1]:
                    continue
                own_q, gate = raw_q, None
                if form.gated:
                    own_q, gate = raw_q.unflatten(-1, (-1, 2 * D)).chunk(2, -1)
                    own_q, gate = own_q.flatten(2), gate.flatten(2)
                try:
                    right = all(
                        same(t, self.formed(raw, D, self.parts.get(name), form, tables))
                        for t, raw, name in ((q, own_q, q_norm), (k, raw_k, k_norm))
                    )
                except (Refused, RuntimeError, TypeError):
                    continue
                if right:
                    return Plan(tuple(order), q_norm, k_norm, out, form), gate
        raise Refused(why)

    def formed(self, x, D: int, norm: Optional[Callable], form: Heads, tables):
        """x [B, T, H * D] as heads [B, H, T, D], normed and rotated."""
        x = norm(x) if form.norm == "all" else x
        x = x.unflatten(-1, (-1, D)).transpose(1, 2)
        x = norm(x) if form.norm == "head" else x
        if form.rotary is None:
            return x
        cos, sin = (table.unsqueeze(-3) for table in tables)
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


def _are_equal(a: Run, b: Run) -> bool:
    """Two runs on the same numbers did the same with them."""
    (twin, *heads), (_, *others) = a.interface.calls[0][:4], b.interface.calls[0][:4]
    if type(a.result) is not tuple or a.result[1:] != b.result[1:] or twin is not a.twin:
        return False
    if [entry and entry[0] for entry in a.log] != [entry and entry[0] for entry in b.log]:
        return False
    caches = [[v.calls for v in run.given.values() if type(v) is Cache] for run in (a, b)]
    updates = [[x for calls in found for call in calls for x in call[:2]] for found in caches]
    pairs = [*zip(heads, others), (a.result[0], b.result[0]), *zip(*updates)]
    return len(updates[0]) == len(updates[1]) and all(torch.equal(x, y) for x, y in pairs)


def _are_the_same(found: dict, expected: dict) -> bool:
    """Equal, with the very same objects where they are no plain values."""
    if found.keys() != expected.keys():
        return False
    for name, value in found.items():
        other = expected[name]
        if value is other:
            continue
        if type(value) is not type(other) or type(value) not in (*PLAIN_VALUES, dict):
            return False
        if not (_are_the_same(value, other) if type(value) is dict else value == other):
            return False
    return True
