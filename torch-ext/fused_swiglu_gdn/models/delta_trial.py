"""A layer of a delta rule, of transformers and ours, on the same small numbers: are they the same?

The class's forward runs with the module's own attributes, on parts that stand in for its own. Which
argument is what is learned from what the forward does with them.
"""

import inspect
import itertools
from types import CellType, FunctionType
from typing import Callable, Dict, Iterator, NamedTuple, Optional

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..layers.delta import CACHE_NAMES
from ..layers.forward import Arguments
from ..layers.own_code import peeled, undispatched
from ..layers.pins import names_in
from ..runtime.device import pretending
from .code import Refused
from .stand_ins import F64, random, same
from .trial import WORD, Trial, called, sizes_of

OF_CACHES = frozenset((  # what a layer asks its cache for
    "conv_states", "get_conv_state", "get_recurrent_state", "has_previous_state",
    "is_recording_past", "layers", "record_past", "recurrent_states", "update_conv_state",
    "update_recurrent_state",
))  # fmt: skip
PACKED = ("cu_seq_lens_q", "seq_idx")  # keywords that the trial gives
EPS = 0.03  # of norms: small outputs, and their roundings, stay small
VALUES = {
    getattr(torch.Tensor, name) for name in (
        "__bool__", "__eq__", "__float__", "__ge__", "__gt__", "__index__", "__int__", "__le__",
        "__lt__", "__ne__", "eq", "ge", "gt", "item", "le", "lt", "ne", "numpy", "tolist",
    )
}  # fmt: skip


class Packing(NamedTuple):
    """The keywords with lengths, or an index, of packed sequences that functions of a layer get."""

    of_rule: str
    of_convolution: str


class Found(NamedTuple):
    """The result of a trial: the roles of a layer's parts and of the arguments of its calls."""

    roles: tuple
    arguments: Arguments
    cache: Optional[str]  # the names of its arguments
    mask: Optional[str]


class ReadsNoValues(TorchFunctionMode):
    """A forward must not go by the values of tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in VALUES:
            raise Refused("its forward reads values of tensors")
        return function(*args, **(kwargs or {}))


def of_each(function: FunctionType, packing: Packing, log: list) -> Callable:
    """A convolution of transformers, or its rule, which keep no packed sequences apart, for one
    after another; the log gets the first argument of each call."""

    known = inspect.signature(function).parameters
    first = next(iter(known))

    def computed(*args, **words):
        given = dict(zip(known, args))
        given.update({n: x for n, x in words.items() if n in known})
        x = given.get(first)
        log.append(x)
        rule = isinstance(x, torch.Tensor) and x.ndim == 4
        lengths = None
        with torch._C.DisableTorchFunction():
            what = words.get(packing.of_rule if rule else packing.of_convolution)
            if what is not None:
                lengths = (what.diff() if what.ndim == 1 else what[0].bincount()).tolist()
        if lengths is None:
            return function(**given)
        dim, names = (1 if rule else -1), [first]
        if rule:
            names = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
        pieces = zip(*(given[n].split(lengths, dim) for n in names))
        found = [function(**{**given, **dict(zip(names, piece))}) for piece in pieces]
        return (torch.cat([x for x, _ in found], 1), None) if rule else torch.cat(found, -1)

    return computed


class Copies:
    """A class and the functions that its forward consists of, which find torch functions where
    transformers' own find kernels."""

    def __init__(self, kind: type, facts, packing: Packing):
        self.made: dict = {}
        self.packing, self.log = packing, []
        self.own = set(facts.functions)
        self.classes: Dict[type, type] = {}
        for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
            self.classes[base] = self.copied(base)
        self.kind, self.forward = self.classes[kind], self.function(facts.forward)

    def copied(self, base: type) -> type:
        hidden = ("__dict__", "__weakref__")
        members = {n: v for n, v in vars(base).items() if n not in hidden}
        bases = tuple(self.classes.get(each, each) for each in base.__bases__)
        made = type(base)(base.__name__, bases, members)
        self.classes[base] = made
        for name, value in members.items():
            static = isinstance(value, staticmethod)
            found = self.value(value.__func__ if static else value)
            if found is not (value.__func__ if static else value):
                setattr(made, name, staticmethod(found) if static else found)
        return made

    def value(self, value: object) -> object:
        plain = undispatched(value)
        if plain is not value:
            return of_each(plain, self.packing, self.log)
        if not isinstance(value, FunctionType):
            return value
        inner = peeled(value).forward
        return self.function(inner) if inner in self.own else value

    def variable(self, value: object) -> object:
        """A free variable: of a decorator, what it is around."""
        if isinstance(value, FunctionType) and value in self.own:
            return self.function(value)
        return self.classes.get(value, value) if isinstance(value, type) else value

    def function(self, function: FunctionType) -> FunctionType:
        if function not in self.made:
            space, code = dict(function.__globals__), function.__code__
            cells = [CellType(self.variable(c.cell_contents)) for c in function.__closure__ or ()]
            made = FunctionType(code, space, function.__name__, function.__defaults__, tuple(cells))
            made.__kwdefaults__ = function.__kwdefaults__
            self.made[function] = made
            for name in names_in(code).intersection(space):
                space[name] = self.value(space[name])
        return self.made[function]


class DeltaTrial(Trial):
    """Runs of a class's forward, and of ours on the same parts.

    A kind of layer has the `width` of its hidden states; `probe(dtype, training, index)`, the probe
    module of its class; `ours(roles, dtype, index)`, our layer as a function of hidden states,
    cache, mask and more; and `confirmed(roles)`: ours gives the same with other sizes, too.
    """

    READS = {
        "hidden": lambda how, optional: False,
        "cache": lambda how, optional: how in OF_CACHES,
        "mask": lambda how, optional: how != "__bool__" and hasattr(torch.Tensor, how),
    }
    # relative to the largest value; transformers' rule is in fp32 also within a layer of fp64
    TOLERANCES: Dict[torch.dtype, float] = {}
    # of sequences after a cache: rows, the tokens of each call, whether the cache records its past
    USES = ((2, (2, 1, 1, 6), False), (1, (1, 1), False), (2, (3, 1), True))
    PACKING: Packing
    MODE = ReadsNoValues

    def __init__(self, module: nn.Module, kind: type, facts):
        super().__init__(module, kind, facts)
        self.copies = Copies(kind, facts, self.PACKING)
        self.cache = self.mask = None
        self.takes = frozenset(PACKED).intersection(self.signature.names)
        names = tuple([n for n in self.signature.names if n not in PACKED])
        self.signature = self.signature._replace(names=names)
        self.mode = self.MODE()

    def theirs(self, dtype, training: bool, index: int) -> Callable:
        """(hidden states, cache, mask, more) -> the output of the class's forward."""
        probe = self.probe(dtype, training, index)

        def call(x, cache=None, mask=None, **more):
            roles = {self.hidden: x, self.cache: cache, self.mask: mask}
            roles = {n: value for n, value in roles.items() if n not in self.fixed}
            given = self.given(roles, frozenset())
            given.update({n: more.pop(n) for n in self.takes.intersection(more)})
            rest = {WORD: 1, **more} if self.facts.signature.more else {}
            with self.mode, torch.set_grad_enabled(training):
                return called(self.facts, probe, given, rest, forward=self.copies.forward)

        return call

    # -- arguments

    def find_roles(self) -> None:
        """Finds the role of each argument."""
        names = self.signature.names
        usual = [n for n in names if n not in self.signature.defaults]
        guesses = [n for n in ("hidden_states", *usual, *names) if n in names]
        reasons = []
        for self.hidden in dict.fromkeys(guesses):
            self.cache, self.fixed = None, set()
            self.mask = "attention_mask" if "attention_mask" in names else None
            try:
                self.learned(self.first_runs)
                break
            except Refused as error:
                reasons.append(error)
        else:
            raise reasons[0]

    def first_runs(self) -> None:
        for training, T in itertools.product((False, True), (5, 1)):
            x, cache, mask = self.inputs(2, T, torch.float32)
            self.theirs(torch.float32, training, 0)(x, cache, mask)

    # -- comparison

    def inputs(self, B: int, T: int, dtype, index: int = 0) -> tuple:
        """Hidden states, a new cache whose last layer is this one, a mask."""
        from transformers.cache_utils import Cache, LinearAttentionLayer

        x = (random(B, T, self.width, seed=1) / self.width**0.5).to(dtype)
        mask = torch.ones(B, T)
        mask[0, : (T + 1) // 2] = 0
        return x, Cache(layers=[LinearAttentionLayer() for _ in range(index + 1)]), mask

    def outputs(
        self, forward, dtype, training: bool, index: int, whole: bool
    ) -> Iterator[torch.Tensor]:
        """Returns the outputs of a layer in each kind of use, and the states it leaves."""
        for B, T in ((2, 70), (1, 3), (3, 1), (1, 1)) if whole else ():
            x, _, mask = self.inputs(B, T, dtype)
            before = x.clone()
            yield forward(x, mask=mask)
            yield before - x
        if whole:
            yield forward(x)
        if whole and self.facts.named:
            for T in sizes_of(self.facts, self.width):
                yield forward(self.inputs(1, T, dtype)[0])
        for B, lengths, records in self.USES if whole else ((2, (5, 1), False),):
            x, cache, mask = self.inputs(B, sum(lengths), dtype, index)
            layer = cache.layers[index]
            if records:
                layer.record_past = True
            for part, shown in zip(x.split(lengths, 1), mask.split(lengths, 1)):
                yield forward(part, cache, shown if part.shape[1] > 1 else None)
            yield layer.conv_states[0]
            yield layer.recurrent_states[0]
        if whole and (self.signature.more or self.takes == set(PACKED)):
            x, _, _ = self.inputs(1, 12, dtype)
            yield forward(x, **self.packed(torch.tensor([0, 5, 6, 12])))

    def packed(self, ends: torch.Tensor) -> dict:
        """The keywords of a call with packed sequences."""
        places = torch.arange(len(ends) - 1).repeat_interleave(ends.diff()).int()[None]
        return {"cu_seq_lens_q": ends, "seq_idx": places}

    def found(self, candidates: Iterator) -> Found:
        """The first roles with which ours gives what the forward gives; raises Refused.

        Ours takes lengths of packed sequences by their names, and keywords that are arguments of
        other classes go to the class's own forward.
        """
        runs = [(dtype, False, 1) for dtype in self.TOLERANCES] + [(torch.float32, True, 0)]
        expected: dict = {}
        with pretending(None):
            self.find_roles()
            every = (r for r in candidates if all(self.agree(r, run, expected) for run in runs))
            roles = next(every, None)
            if roles is None or not self.confirmed(roles):
                raise Refused("its forward gives other values on a small copy of it")
        known, packed = self.arguments(), frozenset(PACKED)
        unknown = {*CACHE_NAMES, "hidden_states", "attention_mask"} - known.names
        known = known._replace(own=known.own - packed | unknown, names=known.names - packed)
        return Found(roles, known, self.cache, self.mask)

    def agree(self, roles, run: tuple, known: dict) -> bool:
        """Ours and the class's forward give the same in a run."""
        dtype, training, index = run
        whole = run == (torch.float32, False, 1)
        if run not in known:
            known[run] = list(self.outputs(self.theirs(*run), *run, whole))
        limit = self.TOLERANCES[dtype]
        try:
            found = self.outputs(self.ours(roles, dtype, index), *run, whole)
            # ours keeps fp64 where theirs has a part in fp32
            return all(
                same(y.to(x.dtype) if y.dtype is F64 else y, x, limit)
                for x, y in zip(known[run], found)
            )
        except Exception:  # no parts of such sizes
            return False
