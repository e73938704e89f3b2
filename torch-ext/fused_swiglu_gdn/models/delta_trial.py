"""A layer of a delta rule, of transformers and ours, on the same small numbers: are they the same?

The class's forward runs with the module's own attributes, on parts that stand in for its own. Which
argument is what is learned from what the forward does with them; which part is what, by trying all
that their sizes allow.
"""

import itertools
from types import SimpleNamespace
from typing import Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..layers.delta import CACHE_NAMES
from ..layers.forward import Arguments
from ..runtime.device import pretending
from .code import Refused
from .delta_copies import Copies, Packing
from .delta_layers import Inner, Layout, index_among, values_of
from .handed import attributes_of
from .stand_ins import F64, Part, probe_of, random, same
from .trial import WORD, Trial, called, form_key, remembered, sizes_of

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


class Found(NamedTuple):
    """The result of a trial: the roles of a layer's parts and of the arguments of its calls."""

    roles: tuple
    index: str  # the path of the attribute that is the layer's index
    arguments: Arguments
    cache: Optional[str]  # the names of its arguments
    mask: Optional[str]


class ReadsNoValues(TorchFunctionMode):
    """A forward must not go by the values of tensors; where it compares them with a number, both
    answers have to occur in the trial."""

    def __init__(self):
        super().__init__()
        self.count, self.answers = 0, {}

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function in VALUES:
            if len(args) != 2 or type(args[1]) not in (int, float):
                raise Refused("its forward reads values of tensors")
            self.answers.setdefault(self.count, set()).update(found.unique().tolist())
            self.count += 1
        return found


class DeltaTrial(Trial):
    """Runs of a class's forward, and of ours on the same parts.

    A kind of layer has `candidates()`, the possible roles; `smaller()`, small sizes in place of the
    layer's own; `width` and `V`, its own sizes of hidden states and of the gated norm; and
    `ours(roles, dtype, index)`, our layer as a function of hidden states, cache, mask and more.
    """

    READS = {
        "hidden": lambda how, optional: False,
        "cache": lambda how, optional: how in OF_CACHES,
        "mask": lambda how, optional: how != "__bool__" and hasattr(torch.Tensor, how),
    }
    # relative to the largest value; transformers' rule is in fp32 also within a layer of fp64
    TOLERANCES: Dict[torch.dtype, float] = {}
    # of sequences after a cache: rows, the tokens of each call, whether the cache records its past
    USES: Tuple[tuple, ...] = ((2, (2, 1, 1, 6), False), (1, (1, 1), False))
    PACKING: Packing
    gate: Callable  # of the norm
    width: int
    V: int

    def __init__(self, layout: Layout, inner: Tuple[Inner, ...], index: str):
        layer = inner[0]
        super().__init__(layer.module, layer.kind, layer.facts)
        self.layout, self.inner, self.index = layout, {each.path: each for each in inner}, index
        self.values = values_of(inner)
        self.copies = {each.path: Copies(each.kind, each.facts, self.PACKING) for each in inner}
        self.cache = self.mask = None
        self.takes = frozenset(PACKED).intersection(self.signature.names)
        names = tuple([n for n in self.signature.names if n not in PACKED])
        self.signature = self.signature._replace(names=names)
        self.mode, self.sizes = ReadsNoValues(), {}

    def small(self, size: int) -> int:
        return self.sizes.get(size, size)

    # -- stubs

    def attributes(self, index: int) -> Dict[str, object]:
        """Numbers in place of those that the forwards read, by their paths."""
        sizes = {n: self.small(v) for n, v in self.values.items() if type(v) is int}
        return {**sizes, self.index: index}

    def vector(self, path: str, seed: int) -> torch.Tensor:
        return random(*map(self.small, self.layout.vectors[path]), seed=seed)

    def stubs(self, dtype) -> dict:
        """The parts and parameters by their paths."""
        layout, made = self.layout, {}
        for i, (path, sizes) in enumerate(sorted(layout.linears.items())):
            made[path] = Part(path, tuple(map(self.small, sizes)), 100 + 7 * i)
        channels, bias = self.small(layout.channels), None
        if self.module.get_submodule(layout.conv).bias is not None:
            bias = random(channels, seed=5).to(dtype)
        kernel = random(channels, 1, layout.taps, seed=4).to(dtype)
        made[layout.conv] = SimpleNamespace(weight=kernel, bias=bias)
        V = self.small(self.V)
        weight = random(V, seed=3).to(dtype)
        made[layout.norm] = lambda x, gate: F.rms_norm(x, (V,), weight, EPS) * self.gate(gate)
        for i, path in enumerate(sorted(layout.vectors)):
            made[path] = self.vector(path, 11 + i).to(dtype)
        return made

    def probe(self, dtype, training: bool, index: int) -> nn.Module:
        return self.part("", self.stubs(dtype), training, self.attributes(index))

    def part(self, path: str, stubs: dict, training: bool, attributes: dict) -> nn.Module:
        """The probe module of the layer or of a part."""
        each = self.inner[path]
        parts, own = {}, {}
        for name in each.module._modules:
            below = each.below(name)
            if below in self.inner:
                parts[name] = self.part(below, stubs, training, attributes)
            elif below in stubs:
                parts[name] = stubs[below]
        for name in each.module._parameters:
            if each.below(name) in stubs:
                own[name] = stubs[each.below(name)]
        start = len(path) + 1 if path else 0
        mine = {p[start:]: v for p, v in attributes.items() if self.owner_of(p) == path}
        mine = attributes_of(each.module, (), {**mine, "training": training}, set())
        return probe_of(each.module, self.copies[path].kind, parts, own, **mine)

    def owner_of(self, path: str) -> str:
        """The part that has the attribute at a path."""
        while path not in self.inner and "." in path:
            path = path.rpartition(".")[0]
        return path if path in self.inner else ""

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
                return called(self.facts, probe, given, rest, forward=self.copies[""].forward)

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

        width = self.small(self.width)
        x = (random(B, T, width, seed=1) / width**0.5).to(dtype)
        mask = torch.ones(B, T)
        mask[0, : (T + 1) // 2] = 0
        return x, Cache(layers=[LinearAttentionLayer() for _ in range(index + 1)]), mask

    def outputs(
        self, forward, dtype, training: bool, index: int, whole: bool
    ) -> Iterator[torch.Tensor]:
        """Returns the outputs of a layer in each kind of use, and the states it leaves."""
        for B, T in ((1, 3), (3, 1), (1, 1), (2, 70)) if whole else ():
            x, _, mask = self.inputs(B, T, dtype)
            before = x.clone()
            yield forward(x, mask=mask)
            yield before - x
        if whole:
            yield forward(x)
        if whole and self.facts.named:
            for T in sizes_of(self.facts, self.small(self.width)):
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

    def found(self) -> Found:
        """The first roles with which ours gives what the forward gives; raises Refused.

        Ours takes lengths of packed sequences by their names, and keywords that are arguments of
        other classes go to the class's own forward.
        """
        runs = [(dtype, False, 1) for dtype in self.TOLERANCES] + [(torch.float32, True, 0)]
        expected: dict = {}
        with pretending(None):
            self.sizes = self.smaller()
            self.find_roles()
            for roles in self.candidates():
                if all(self.agree(roles, run, expected) for run in runs):
                    break
            else:
                raise Refused("its forward gives other values on a small copy of it")
            if any(len(answers) < 2 for answers in self.mode.answers.values()):
                raise Refused("its forward compares with a number that no gate is near")
            self.sizes = {}
            if not self.agree(roles, (torch.float32, True, 0), {}):
                raise Refused("its forward gives other values than on a small copy of it")
        known, packed = self.arguments(), frozenset(PACKED)
        unknown = {*CACHE_NAMES, "hidden_states", "attention_mask"} - known.names
        known = known._replace(own=known.own - packed | unknown, names=known.names - packed)
        return Found(roles, self.index, known, self.cache, self.mask)

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


def _find(trial: type, layout: Layout, inner: Tuple[Inner, ...], index: str) -> Found:
    return trial(layout, inner, index).found()


def found_by(trial: type, layout: Layout, inner: Tuple[Inner, ...]) -> Found:
    """The roles of a layer's parts and arguments, remembered for the layers of a class; raises
    Refused."""
    values, layer = values_of(inner), inner[0]
    index = index_among(values)
    values = {name: v for name, v in values.items() if name not in ("training", index)}
    biased = layer.module.get_submodule(layout.conv).bias is not None
    key = (
        trial, tuple([(each.path, each.kind, each.facts.pinned) for each in inner]),
        form_key(layer.module, layer.kind, layer.facts, values), tuple(layout.linears.items()),
        tuple(layout.vectors.items()), layout[1:3], layout[4:], biased,
    )  # fmt: skip
    return remembered(_find, key, trial, layout, inner, index)
