"""In what order a decoder layer calls its parts and adds them up, told by its source and a trial.

The class's forward runs on parts that remember what they are given.
"""

import inspect
import itertools
from typing import Dict, NamedTuple, Optional, Tuple, Union

from torch import nn

from ..layers.decoder import Call, LayerForm, Order
from .code import Refused, Source, form_key, plain_values, read, why_odd_module
from .norm_trial import norm_form
from .serving import own_class
from .stand_ins import WORD, Block, Opaque, quiet, random, same, twin_of

OUTPUTS = (1, 2, 3)

_forms: Dict[tuple, Union[LayerForm, str]] = {}


def is_decoder_layer(module: nn.Module) -> bool:
    """It has a mixer of tokens, an MLP, and norms."""
    names = module._modules
    attention = any("attn" in n or "attention" in n for n in names if "norm" not in n)
    return attention and sum("norm" in n for n in names) >= 2


def layer_form(module: nn.Module) -> Union[LayerForm, str]:
    """The form of a decoder layer, or why it is none of ours."""
    kind = own_class(module)
    try:
        source = read(kind, module)
        values = plain_values(module, source.reads)
        norms = {n for n, m in module._modules.items() if not isinstance(norm_form(m), str)}
        plain = {n for n, m in module._modules.items() if is_identity(m)}
        key = form_key(module, kind, source, values) + (
            tuple((n, n in norms, n in plain) for n in module._modules),
            bool(module._parameters),
        )
        if key not in _forms:
            _forms[key] = _find(module, kind, source, values, norms, plain)
        return _forms[key]
    except Refused as why:
        return str(why)


def is_identity(module: nn.Module) -> bool:
    return type(module) is nn.Identity or type(module) is nn.Dropout and module.p == 0


def _find(module, kind, source, values, norms, plain) -> Union[LayerForm, str]:
    if any(p is not None for p in module._parameters.values()):
        return "it has parameters of its own"
    reason = why_odd_module(module, kind, source, (*values, *module._modules))
    if reason is not None:
        return reason
    names = tuple(n for n in inspect.signature(source.forward).parameters if n != "self")
    reasons = []
    with quiet():
        for outputs in itertools.product(OUTPUTS, OUTPUTS[:2]):
            trial = _Trial(module, kind, source, norms, plain, outputs)
            try:
                order, scale, *calls = trial.plan(values)
            except Refused as why:
                reasons.append(str(why))
                continue
            if order.pre_mlp is None and (scale or not (order.post_mixer and order.post_mlp)):
                return "no sum is before or after a norm"
            found = (order, scale, *calls, tuple(plain))
            facts = kind, source.pinned, tuple(values.items()), names, source.renamed
            return LayerForm(*facts, *found)
    return min(reasons, key=lambda reason: "raises" in reason)


class _Trial(NamedTuple):
    """Runs of a layer whose mixer and MLP have so many outputs."""

    module: nn.Module
    kind: type
    source: Source
    norms: set
    plain: set
    outputs: Tuple[int, int]

    def plan(self, values: dict) -> tuple:
        """What an agreeing LayerForm has: its order, its scale, and the calls of mixer and MLP."""
        x, out, log, marks, word = self.run()
        order, scale = _order(log, self.norms, x, out, values)
        sources = {id(v): n for n, v in marks.items()}
        called = {name: (place, rest) for name, _, _, place, rest in log}
        if any(called[name] != (None, {}) for name in self.norms & set(called)):
            raise Refused("it gives its norms more than one tensor")
        parameters = inspect.signature(self.source.forward).parameters
        calls = []
        for name in (order.mixer, order.mlp):
            try:
                flat = same(self.run(flat=name)[1], out)
            except Refused:
                flat = False
            calls.append(_call(*called[name], sources, word, parameters, flat))
        return order, scale, *calls

    def run(self, flat: Optional[str] = None) -> tuple:
        """The input, the output, what the parts were given, and what stood for other arguments."""
        log, parts, norms = [], {}, self.norms

        def count(name):
            """The outputs of a part that is called now."""
            before = sum(entry[0] not in norms for entry in log)
            return 1 if name in norms else self.outputs[min(before, 1)]

        for i, (name, part) in enumerate(self.module._modules.items()):
            block = Block(name, 300 + 11 * i, log, count, name == flat)
            parts[name] = part if name in self.plain else block
        parameters = inspect.signature(self.source.forward).parameters
        if "hidden_states" not in parameters:
            raise Refused("its forward takes no hidden_states")
        marks = {
            n: Opaque(n) for n, p in parameters.items()
            if n not in ("self", "hidden_states") and p.kind is not p.VAR_KEYWORD
        }  # fmt: skip
        more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        twin, x, word = twin_of(self.module, self.kind, parts), random(5, 4, 16, seed=1), object()
        try:
            out = self.source.forward(twin, x, **marks, **({WORD: word} if more else {}))
        except Refused:
            raise
        except Exception as error:
            why = f"{type(error).__name__} on stand-ins: {str(error)[:60]}"
            raise Refused(f"its forward raises {why}") from None
        return x, out, log, marks, word


def _order(log, norms, x, out, values):
    """Which part is what, and the attribute that scales what is added; Refused if it is none."""
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
        """What a part gives for `value`, if that is what it was given."""
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


def _call(place, given: dict, sources: dict, word: object, parameters, flat: bool) -> Call:
    """Which argument of the layer is which of a part's."""
    passes = given.pop(WORD, None) is word
    arguments = []
    for name, value in given.items():
        source = sources.get(id(value))
        if source is None:
            raise Refused(f"it gives a part {name}")
        default = parameters[source].default
        arguments.append((name, source, None if default is inspect.Parameter.empty else default))
    return Call(place, tuple(arguments), passes, flat)
