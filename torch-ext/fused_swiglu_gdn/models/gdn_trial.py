"""A Gated DeltaNet layer of transformers and ours on the same small numbers: do they give the same?

The class's forward runs with the module's own attributes, on parts that stand in for its own. Which
argument is what is learned from what the forward does with them.
"""

import inspect
import itertools
from types import CellType, FunctionType, SimpleNamespace
from typing import Dict, Iterator, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import layers
from ..layers.forward import Arguments
from ..layers.own_code import names_in, undispatched
from ..runtime.recording import pretending
from .code import Refused
from .gdn_body import OF_CACHES, PACKED
from .reader import Reader
from .stand_ins import Part, put, quiet, random, twin_of
from .trial import WORD, Trial, called, plain_values

# relative to the largest value; transformers' rule is in fp32 also within a layer of fp64
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
EPS = 0.03  # small outputs, and their roundings, stay small
VALUES = {
    getattr(torch.Tensor, name) for name in (
        "__bool__", "__eq__", "__float__", "__ge__", "__gt__", "__index__", "__int__", "__le__",
        "__lt__", "__ne__", "eq", "ge", "gt", "item", "le", "lt", "ne", "numpy", "tolist",
    )
}  # fmt: skip


class Roles(NamedTuple):
    """The roles of a module's parts and parameters, and its sizes."""

    layer: str  # the name of ours
    names: Tuple[Tuple[str, str], ...]  # (ours, the module's)
    widths: Tuple[Tuple[str, Optional[tuple]], ...]  # (the module's name, how often it has k, v
    # and a head) of projections; None of the last
    hidden: int
    values: Tuple[Tuple[str, object], ...]  # of our attributes
    index: str  # the attribute that is the layer's index


class Found(NamedTuple):
    roles: Roles
    arguments: Arguments
    cache: Optional[str]
    mask: Optional[str]


class ReadsNoValues(TorchFunctionMode):
    """A forward must not go by the values of tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in VALUES:
            raise Refused("its forward reads values of tensors")
        return function(*args, **(kwargs or {}))


def _of_each(function: FunctionType):
    """A convolution of transformers, or its rule, which keep no packed sequences apart, for one
    after another."""

    known = inspect.signature(function).parameters
    first = next(iter(known))

    def of_each(*args, **words):
        rule, given = "cu_seqlens" in words, dict(zip(known, args))
        given.update({n: x for n, x in words.items() if n in known})
        ends, index, lengths = words.get("cu_seqlens"), words.get("seq_idx"), None
        with torch._C.DisableTorchFunction():
            if rule and ends is not None:
                lengths = ends.diff().tolist()
            elif not rule and index is not None:
                lengths = index[0].bincount().tolist()
        if lengths is None:
            return function(**given)
        dim = 1 if rule else -1
        names = [first]
        if rule:
            names = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
        pieces = zip(*(given[n].split(lengths, dim) for n in names))
        found = [function(**{**given, **dict(zip(names, piece))}) for piece in pieces]
        return (torch.cat([x for x, _ in found], 1), None) if rule else torch.cat(found, -1)

    return of_each


class _Copies:
    """A class and the functions that its forward consists of, which find torch functions where
    transformers' own find kernels."""

    def __init__(self, kind: type, source):
        self.reader, self.made = Reader(kind, None), {}
        self.read = {function for function, _ in source.pinned.codes}
        self.classes: Dict[type, type] = {}
        for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
            self.classes[base] = self.copied(base)
        self.kind, self.forward = self.classes[kind], self.function(source.forward)

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
            return _of_each(plain)
        if not isinstance(value, FunctionType):
            return value
        inner = value if value in self.read and not value.__closure__ else self.inner(value)
        return self.function(inner) if inner in self.read else value

    def inner(self, value: FunctionType) -> object:
        try:
            return self.reader.bare(value)
        except Refused:
            return value

    def function(self, function: FunctionType) -> FunctionType:
        if function not in self.made:
            space, code = dict(function.__globals__), function.__code__
            cells = [CellType(self.classes.get(c.cell_contents, c.cell_contents))
                     for c in function.__closure__ or ()]  # fmt: skip
            made = FunctionType(code, space, function.__name__, function.__defaults__, tuple(cells))
            made.__kwdefaults__ = function.__kwdefaults__
            self.made[function] = made
            for name in names_in(function) & set(space):
                space[name] = self.value(space[name])
        return self.made[function]


class _Trial(Trial):
    """Runs of a class's forward, and of ours."""

    READS = {
        "hidden": lambda how, optional: False,
        "cache": lambda how, optional: how in OF_CACHES,
        "mask": lambda how, optional: how != "__bool__" and hasattr(torch.Tensor, how),
    }

    def __init__(self, module: nn.Module, kind: type, source, roles: Roles):
        super().__init__(module, kind, source)
        self.roles, self.copies = roles, _Copies(kind, source)
        self.cache = self.mask = None
        self.takes = frozenset(PACKED).intersection(self.signature.names)
        names = tuple([n for n in self.signature.names if n not in PACKED])
        self.signature = self.signature._replace(names=names)
        numbers = plain_values(module, source.reads).items()
        sizes = {name for name, value in numbers if type(value) is int}
        self.small = sizes <= {*dict(roles.values), roles.index}

    # -- stand-ins

    @property
    def width(self) -> int:
        return 16 if self.small else self.roles.hidden

    def values(self, roles: Roles) -> dict:
        """Returns values of our attributes: smaller ones, if it is known which are read."""
        values = dict(roles.values)
        if not self.small:
            return values
        some = 4 if values["num_v_heads"] > values["num_k_heads"] else 2
        return {**values, "num_k_heads": 2, "num_v_heads": some, "head_k_dim": 3, "head_v_dim": 5,
                "key_dim": 6, "value_dim": 5 * some}  # fmt: skip

    def parts(self, dtype) -> dict:
        """The module's parts and parameters by their names."""
        names, values = dict(self.roles.names), self.values(self.roles)
        V, heads = values["head_v_dim"], values["num_v_heads"]
        conv, weight = self.module._modules[names["conv1d"]], random(V, seed=3).to(dtype)
        channels = 2 * values["key_dim"] + values["value_dim"]
        bias = None if conv.bias is None else random(channels, seed=5).to(dtype)
        kernel = random(channels, *conv.weight.shape[1:], seed=4).to(dtype)
        norm = names.get("norm") or names["o_norm"]
        made, sizes = {}, (values["key_dim"], values["value_dim"], heads)
        for i, (name, counts) in enumerate(sorted(self.roles.widths)):
            width = self.width if counts is None else width_of(counts, sizes)
            ends = (values["value_dim"], width) if counts is None else (self.width, width)
            made[name] = Part(name, ends, 100 + 7 * i)
        made[names["conv1d"]] = SimpleNamespace(weight=kernel, bias=bias)
        made[norm] = lambda x, gate: F.rms_norm(x, (V,), weight, EPS) * F.silu(gate)
        for i, name in enumerate(sorted((names["A_log"], names["dt_bias"]))):
            made[name] = random(heads, seed=11 + i).to(dtype)
        return made

    def theirs(self, dtype, training: bool, index: int):
        """(hidden states, cache, mask, more) -> what the class's forward gives."""
        parts = self.parts(dtype)
        own = {n: parts.pop(n) for n in self.module._parameters if n in parts}
        twin = twin_of(self.module, self.copies.kind, parts, own)
        twin.training = training
        sizes = {n: v for n, v in self.values(self.roles).items() if n in twin.__dict__}
        put(twin, {**sizes, self.roles.index: index})

        def call(x, cache=None, mask=None, **more):
            roles = {self.hidden: x, self.cache: cache, self.mask: mask}
            roles = {n: value for n, value in roles.items() if n not in self.fixed}
            given = self.given(roles, frozenset())
            given.update({n: more.pop(n) for n in self.takes.intersection(more)})
            with ReadsNoValues():
                source = self.source._replace(forward=self.copies.forward)
                return called(source, twin, given, {WORD: 1, **more})

        return call

    def ours(self, roles: Roles, dtype, index: int):
        parts = self.parts(dtype)
        view = _View({n: parts[mine] for n, mine in roles.names})
        view.__dict__.update(self.values(roles), layer_idx=index)
        forward = getattr(layers, roles.layer).forward
        return lambda x, cache=None, mask=None, **more: forward(view, x, cache, mask, **more)

    # -- arguments

    def find_roles(self) -> None:
        """Finds the role of each argument."""
        names = self.signature.names
        usual = [n for n in names if n not in self.signature.defaults]
        guesses = [n for n in ("hidden_states", *usual, *names) if n in names]
        reasons = []
        for self.hidden in dict.fromkeys(guesses):
            self.cache, self.fixed = None, set(self.source.switches)
            self.mask = "attention_mask" if "attention_mask" in names else None
            try:
                return self.learned(self.first_runs)
            except Refused as error:
                reasons.append(error)
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
        uses = ((2, (2, 1, 1, 6), False), (1, (1, 1), False), (2, (3, 1), True))
        for B, lengths, records in uses if whole else ((2, (5, 1), False),):
            x, cache, mask = self.inputs(B, sum(lengths), dtype, index)
            layer = cache.layers[index]
            if records:
                layer.record_past = True
            for part, shown in zip(x.split(lengths, 1), mask.split(lengths, 1)):
                yield forward(part, cache, shown if part.shape[1] > 1 else None)
            yield layer.conv_states[0]
            yield layer.recurrent_states[0]
        if not whole or not (self.signature.more or self.takes == set(PACKED)):
            return
        ends = torch.tensor([0, 5, 6, 12])
        places = torch.arange(3).repeat_interleave(ends.diff()).int()[None]
        x, _, _ = self.inputs(1, 12, dtype)
        yield forward(x, cu_seq_lens_q=ends, seq_idx=places)

    def same_as(self, candidates: Iterator[Roles]) -> Roles:
        """The first that gives what the forward gives."""
        runs = [(dtype, False, 1) for dtype in TOLERANCES] + [(torch.float32, True, 0)]
        expected: dict = {}
        for roles in candidates:
            if all(self.agree(roles, run, expected) for run in runs):
                if not self.small:
                    return roles
                self.small = False  # with the module's own sizes
                if self.agree(roles, runs[-1], {}):
                    return roles
                break
        raise Refused("its forward gives other values on a small twin")

    def agree(self, roles: Roles, run: tuple, known: dict) -> bool:
        """Ours and the class's forward give the same in a run."""
        dtype, training, index = run
        whole = run == (torch.float32, False, 1)
        if run not in known:
            known[run] = list(self.outputs(self.theirs(*run), *run, whole))
        try:
            found = list(self.outputs(self.ours(roles, dtype, index), *run, whole))
        except Exception:  # no parts of such sizes
            return False
        return all(itertools.starmap(_near(TOLERANCES[dtype]), zip(known[run], found)))


def width_of(counts: tuple, sizes: tuple) -> int:
    return sum(count * size for count, size in zip(counts, sizes))


def _near(tolerance: float):
    def near(expected, got) -> bool:
        if type(expected) is not torch.Tensor or got.shape != expected.shape:
            return False
        if got.dtype != expected.dtype and got.dtype is not torch.float64:
            return False
        return bool((got - expected).abs().max() <= tolerance * expected.abs().max())

    return near


class _View:
    """Has the attributes that a layer of ours reads, and nothing else."""

    def __init__(self, attributes: dict):
        self.__dict__.update(attributes)


def found_by(module: nn.Module, kind: type, source, candidates) -> Found:
    """Returns the role of each part and argument; raises Refused."""
    first = next(candidates)
    with quiet(), pretending(None):
        trial = _Trial(module, kind, source, first)
        trial.find_roles()
        switches = source.switches & {trial.hidden, trial.cache, trial.mask}
        if switches:
            raise Refused(f"its forward branches on {', '.join(sorted(switches))}")
        roles = trial.same_as(itertools.chain([first], candidates))
    return Found(roles, trial.arguments(), trial.cache, trial.mask)
