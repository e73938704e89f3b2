"""In what order a decoder layer calls its parts and adds them up, told by its source and a trial.

The class's forward runs on parts that remember what they are given.
"""

import itertools
import operator
from typing import Dict, NamedTuple, Optional, Tuple, Union

from torch import nn

from ..layers.decoder import Call, LayerForm, Order
from ..layers.words import Word
from .attention_trial import is_attention, may_be_norm
from .code import Refused
from .gated_delta_net import is_gated_delta_net
from .norm_trial import is_norm, norm_form
from .reader import form_key, plain_values, read, why_odd_module
from .serving import own_class
from .stand_ins import (
    SIZES,
    Block,
    Read,
    is_identity,
    quiet,
    random,
    same,
    twin_of,
)
from .trial import WORD, Trial, called, toggles

OUTPUTS = ((2, 1), (1, 1), (1, 2), (2, 2), (3, 1), (3, 2))  # of mixer and MLP

_forms: Dict[tuple, Union[LayerForm, str]] = {}


def is_decoder_layer(module: nn.Module) -> bool:
    """Returns True if it has a mixer of tokens, an MLP, and norms."""
    parts = module._modules.items()
    mixes = any(_mixes(name, part) for name, part in parts if part is not None)
    return mixes and sum("norm" in n or m is not None and _norms(m) for n, m in parts) >= 2


def _mixes(name: str, part: nn.Module) -> bool:
    if "norm" in name:
        return False
    if "attn" in name or "attention" in name or is_attention(part):
        return True
    return is_gated_delta_net(part)


def _norms(part: nn.Module) -> bool:
    return is_norm(part) or may_be_norm(part) and not isinstance(norm_form(part), str)


def layer_form(module: nn.Module) -> Union[LayerForm, str]:
    """The form of a decoder layer, or why it is none of ours."""
    kind = own_class(module)
    try:
        source = read(kind, module)
        values = plain_values(module, source.reads)
        modules = {n: m for n, m in module._modules.items() if m is not None}
        norms = {n for n, m in modules.items() if not isinstance(norm_form(m), str)}
        plain = {n for n, m in modules.items() if is_identity(m)}
        key = form_key(module, kind, source, values) + (
            tuple((n, n in norms, n in plain) for n in modules),
            bool(module._parameters),
        )
        if key not in _forms:
            _forms[key] = _find(module, kind, source, values, norms, plain)
        return _forms[key]
    except Refused as why:
        return str(why)


def _find(module, kind, source, values, norms, plain) -> Union[LayerForm, str]:
    if any(p is not None for p in module._parameters.values()):
        return "it has parameters of its own"
    reason = why_odd_module(module, kind, source, (*values, *module._modules))
    if reason is not None:
        return reason
    reasons = []
    with quiet():
        for outputs in OUTPUTS:
            trial = _Trial(module, kind, source, norms, plain, outputs)
            try:
                order, scale, *calls = trial.plan(values)
            except Refused as why:
                reasons.append(str(why))
                continue
            if order.pre_mlp is None and (scale or not (order.post_mixer and order.post_mlp)):
                return "no sum is before or after a norm"
            facts = kind, source.pinned, tuple(values.items()), trial.arguments()
            return LayerForm(*facts, source.checks, order, scale, *calls, tuple(plain))
    return min(reasons, key=lambda reason: "raises" in reason)


class Run(NamedTuple):
    """The record of a run of a layer's forward: what it was given, what its parts were given, and
    what it gave."""

    x: object
    given: dict
    word: object
    log: list
    out: object


class _Trial(Trial):
    """Runs of a layer whose mixer and MLP have so many outputs."""

    def __init__(self, module, kind, source, norms, plain, outputs: Tuple[int, int]):
        super().__init__(module, kind, source)
        self.norms, self.outputs = norms, outputs
        self.parts = dict(module._modules)
        for i, name in enumerate(self.parts):
            if name not in plain and self.parts[name] is not None:
                self.parts[name] = Block(name, 300 + 11 * i, self, name in norms)

    def plan(self, values: dict) -> tuple:
        """Returns the fields of a LayerForm that agrees: its order, its scale, and the calls of
        mixer and MLP."""
        run = self.learned()
        order, scale = _order(run.log, self.norms, run.x, run.out, values)
        called = {name: (place, after, rest) for name, _, _, place, after, rest in run.log}
        if any(called[name][1:] != ((), {}) for name in self.norms & set(called)):
            raise Refused("it gives its norms more than one tensor")
        self.travelling = self.those_travelling(run)
        calls = []
        for name in (order.mixer, order.mlp):
            try:
                flat = same(self.run(flat=name).out, run.out)
            except Refused:
                flat = False
            calls.append(self.call(*called[name], run, flat))
        for absent in toggles(self.others(), self.source.asked):
            self.check(run, absent, order, calls)
        return order, scale, *calls

    def learned(self) -> Run:
        """The first run, when it is known which argument the hidden states are."""
        for _ in range(2 * len(self.signature.names) + 2):
            try:
                run = self.run()
                if self.hidden is None:
                    raise Refused("none of its arguments reaches its parts")
                return run
            except Read as what:
                optional, how = what.name in self.signature.defaults, what.how
                of_tensors = how in SIZES or how == "part" or not optional
                if what.name == self.hidden:
                    raise
                if self.hidden is None and (of_tensors or how in ("__add__", "__radd__")):
                    self.hidden = what.name
                elif optional and what.name not in self.fixed:
                    self.fixed.add(what.name)
                else:
                    raise
        raise Refused("its arguments are not known")

    def again(self, absent: frozenset) -> Run:
        return self.run(absent=absent)

    def keywords_in(self, run: Run) -> list:
        return [entry[-1] for entry in run.log]

    def run(self, flat: Optional[str] = None, absent=frozenset()) -> Run:
        """One run of the class's forward, where some arguments are left at their defaults."""
        first, second = self.outputs
        self.log, self.flat = [], flat
        self.counts = itertools.chain([first], itertools.repeat(second))
        x = random(5, 4, 16, seed=1).clone()
        given = self.given({self.hidden: x}, absent)
        twin, word = twin_of(self.module, self.kind, self.parts), object()
        out = called(self.source, twin, dict(given), {WORD: word})
        if not same(x, random(5, 4, 16, seed=1)):
            raise Refused("its forward writes to its input")
        return Run(x, given, word, self.log, out)

    def call(self, place, after: tuple, words: dict, run: Run, flat: bool) -> Call:
        """Returns where a part's arguments come from."""
        passes, words = self.passed(words, run)
        return Call(
            place,
            tuple(self.word("", v, run) for v in after),
            tuple(self.word(n, v, run) for n, v in words.items()),
            passes,
            flat,
        )

    def word(self, name: str, value: object, run: Run) -> Word:
        found = self.known_word(name, value, run)
        if found is None:
            raise Refused(f"it gives a part {name}")
        return found

    def check(self, first: Run, absent: frozenset, order: Order, calls: list) -> None:
        """The layer does the same where arguments are left at their defaults."""
        run = self.run(absent=absent)
        if not same(run.out, first.out) or len(run.log) != len(first.log):
            raise Refused("its forward depends on the call")
        for entry, before in zip(run.log, first.log):
            if entry[0] != before[0]:
                raise Refused("its forward depends on the call")
            if entry[0] not in (order.mixer, order.mlp):
                continue
            call, (place, after, words) = calls[entry[0] == order.mlp], entry[3:]
            expected = {} if not call.passes else self.rest(run)
            for word in call.words:
                expected[word.name] = self.value(word, run)
            ours = [*map(self.value, call.after, itertools.repeat(run)), *expected.values()]
            given = [*after, *map(words.get, expected)]
            right = place == call.place and len(after) == len(call.after)
            right = right and words.keys() == expected.keys()
            if not (right and all(map(operator.is_, given, ours))):
                raise Refused("its forward depends on the call")

    def value(self, word: Word, run: Run) -> object:
        return word.what if word.how == "constant" else run.given.get(word.what, word.default)


def _order(log, norms, x, out, values):
    """Returns the role of each part, and the attribute that scales what is added; Refused if it is
    none."""
    names = [entry[0] for entry in log]
    blocks = [i for i, name in enumerate(names) if name not in norms]
    if len(set(names)) != len(names) or len(blocks) != 2:
        raise Refused("its parts come in another order: " + ", ".join(names))
    a, m = blocks
    for between in range(m - a):  # norms after the mixer, before those of the MLP
        groups = (
            names[:a],
            names[a + 1 : a + 1 + between],
            names[a + 1 + between : m],
            names[m + 1 :],
        )
        if all(len(group) <= 1 for group in groups):
            order = Order(*(next(iter(group), None) for group in groups), names[a], names[m])
            for scale in (None, *(n for n, v in values.items() if type(v) is float)):
                if _agrees(order, {entry[0]: entry for entry in log}, x, out, values.get(scale)):
                    return order, scale
    raise Refused("it adds its parts up in another way")


def _agrees(order: Order, log: dict, x, out, scale) -> bool:
    """The parts were given what this order gives them, and the result is its."""

    def through(name, value):
        """Returns a part's result for `value`, if that is what it was given."""
        return value if name is None else log[name][2] if same(log[name][1], value) else None

    for pre, block, post in (
        (order.pre_mixer, order.mixer, order.post_mixer),
        (order.pre_mlp, order.mlp, order.post_mlp),
    ):
        y = x
        for name in (pre, block, post):
            y = None if y is None else through(name, y)
        if y is None:
            return False
        x = x + (y if scale is None else y * scale)
    return same(out, x)
