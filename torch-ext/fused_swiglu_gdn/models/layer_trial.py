"""In what order a decoder layer calls its parts and adds them up, told by a trial.

The class's forward and ours run on parts that remember what they are given.
"""

import itertools
from typing import Iterator, Optional, Tuple

import torch
from torch import nn

from ..layers.decoder import Beside, Call, Decoder, Inputs, LayerForm, Order
from ..layers.plain import told
from .attention_trial import is_attention
from .code import Refused
from .facts import read
from .gated_delta_net import is_gated_delta_net
from .handed import attributes_of
from .norm_trial import norm_in
from .serving import own_class
from .stand_ins import F64, FREE, SIZES, Block, is_identity, probe_of, random, same
from .trial import (
    Run,
    Trial,
    alike,
    called,
    form_key,
    inputs_of,
    refuse_odd_module,
    remembered,
    together,
    toggles,
)

OF_HIDDEN = (*SIZES, "part", "__add__", "__radd__")  # what hidden states alone are read for
DTYPES = F64, torch.bfloat16, torch.float16, torch.float32
# of mixer and MLP, and of a router and experts beside that
OUTPUTS = ((2, 1), (1, 1), (1, 2), (2, 2), (3, 1), (3, 2), (2, 1, 3, 1))


def is_decoder_layer(module: nn.Module) -> bool:
    """Returns True if it has a mixer of tokens, an MLP, and norms."""
    parts = module._modules.items()
    return _has_mixer(parts) and sum(["norm" in n or _norms(m) for n, m in parts]) >= 2


def _has_mixer(parts) -> bool:
    for name, part in parts:
        if part is not None and "norm" not in name:
            named = "attn" in name or "attention" in name
            if named or is_attention(part) or is_gated_delta_net(part):
                return True
    return False


def _norms(part: Optional[nn.Module]) -> bool:
    return "rmsnorm" in type(part).__name__.lower() or norm_in(part) is not None


def layer_form(module: nn.Module) -> LayerForm:
    """The form of a decoder layer; raises Refused with the reason why it is none of ours."""
    kind = own_class(module)
    facts = read(kind, module)
    values = facts.values_but("training")
    modules = {n: m for n, m in module._modules.items() if m is not None}
    plain = {n for n, m in modules.items() if is_identity(m)}
    norms = {n for n, m in modules.items() if n not in plain and norm_in(m) is not None}
    parts = tuple([(n, n in norms, n in plain) for n in modules])
    own = bool(module._parameters), _scalars(module)
    key = (*form_key(module, kind, facts, values), parts, *own)
    return remembered(_find, key, module, kind, facts, values, norms, plain)


def _scalars(module: nn.Module) -> Tuple[str, ...]:
    """The names of buffers of one value."""
    shapes = {name: told(buffer, "shape") for name, buffer in module._buffers.items()}
    return tuple([name for name, shape in shapes.items() if shape and shape.numel() == 1])


def _find(module, kind, facts, values, norms, plain) -> LayerForm:
    if any(p is not None for p in module._parameters.values()):
        raise Refused("it has parameters of its own")
    refuse_odd_module(module, kind, facts, (*values, *module._modules))
    reasons = []
    for outputs in OUTPUTS:
        try:
            form = _Trial(module, kind, facts, norms, plain, outputs).form(values)
        except Refused as why:
            reasons.append(str(why))
            continue
        order = form.order
        if order.pre_mlp is None and (form.scale or not (order.post_mixer and order.post_mlp)):
            raise Refused("no sum is before or after a norm")
        return form
    raise Refused(min(reasons, key=lambda reason: "raises" in reason))


class _Trial(Trial):
    """Runs of a layer whose parts that are no norms have so many outputs, in their order."""

    READS = {
        "hidden": lambda how, optional: not optional or how in OF_HIDDEN,
        "factor": lambda how, optional: how in ("__mul__", "__rmul__"),
    }

    def __init__(self, module, kind, facts, norms, plain, outputs: Tuple[int, ...]):
        super().__init__(module, kind, facts)
        self.norms, self.plain, self.outputs = norms, tuple(sorted(plain)), outputs
        self.parts, self.factor = dict(module._modules), None
        self.buffers = {n: random(1, seed=5 + i) for i, n in enumerate(_scalars(module))}
        for i, name in enumerate(self.parts):
            if name not in plain and self.parts[name] is not None:
                self.parts[name] = Block(name, 300 + 11 * i, self, name in norms)

    def form(self, values: dict) -> LayerForm:
        """The form by which our layer does what the class's does."""
        run = self.learned(self.run)
        if self.hidden is None:
            raise Refused("none of its arguments reaches its parts")
        known = self.kind, FREE, (), self.arguments()
        scales = (None, *(n for n, v in values.items() if type(v) is float))
        inputs, names = self.with_inputs([entry[0] for entry in run.log])
        beside, names = self.with_experts(names)
        orders = list(_orders(names, self.norms))
        calls = [self.call(name, run) for name in names if name not in self.norms]
        for order, scale, last in itertools.product(orders, scales, (None, *self.buffers)):
            form = LayerForm(*known, order, beside, inputs, scale, last, *calls, self.plain)
            if self.agrees(Decoder(form), run):
                break
        else:
            raise Refused("it adds its parts up in another way")
        ours = Decoder(form)
        for given in self.further():
            if not self.agrees(ours, self.run(**given)):
                raise Refused("its forward depends on the call")
        return form._replace(pinned=self.facts.pinned, guards=tuple(self.guards(values).items()))

    def with_inputs(self, names: list) -> Tuple[Optional[Inputs], list]:
        """The parts of the layer's inputs among those that were called, and the others."""
        if self.factor is None:
            return None, names
        return Inputs(*names[-4:], self.factor) if len(names) > 5 else None, names[:-4]

    def with_experts(self, names: list) -> Tuple[Optional[Beside], list]:
        """The parts of experts beside an MLP, which stand behind it, and the others."""
        blocks = [i for i, name in enumerate(names) if name not in self.norms]
        if len(blocks) != 4:
            return None, names
        begin, end = blocks[1] + 1, blocks[1] + 6
        if end > len(names):
            return None, names
        return Beside(*names[begin:end]), names[:begin] + names[end:]

    def further(self) -> Iterator[dict]:
        """The arguments of further runs: each input and mode, with other arguments left out; of
        other people's code each input in each mode."""
        modes, inputs = list(self.facts.modes), list(inputs_of(self.facts, DTYPES, 4, (3,)))
        pairs = itertools.product if self.facts.named else together
        ways = list(pairs(modes, inputs))
        left_out = toggles(self.others(self.factor))
        for i, (absent, (training, x)) in enumerate(together(left_out, ways)):
            yield {
                "absent": absent, "x": x, "words": (1, 0, 3)[i % 3], "by_position": i % 5 == 0,
                "training": training,
            }  # fmt: skip

    def begin(self, flat: Optional[str] = None) -> list:
        """Begins a new log, which is returned; `flat`: see Block."""
        self.log, self.flat = [], flat
        self.counts = itertools.chain(self.outputs, itertools.repeat(self.outputs[-1]))
        return self.log

    def run(
        self, flat: Optional[str] = None, absent=frozenset(), x: Optional[torch.Tensor] = None,
        words: int = 1, by_position: bool = False, **attributes: bool,
    ) -> Run:  # fmt: skip
        """One run of the class's forward, where some arguments are left at their defaults."""
        before = random(5, 4, 16, seed=1) if x is None else x
        log, x = self.begin(flat), before.clone()
        factor = random(*x.shape, seed=9, dtype=x.dtype)
        roles = {self.hidden: x, self.factor: factor}
        given, rest = self.given(roles, absent), self.unknown_words(words)
        attributes = attributes_of(self.module, self.facts.reads, attributes, self.seen)
        probe = probe_of(self.module, self.kind, self.parts, **attributes)
        probe.__dict__["_buffers"] = self.buffers
        out = called(self.facts, probe, given, rest, by_position)
        if not torch.equal(x, before):
            raise Refused("its forward writes to its input")
        return Run(probe, x, given, rest, log, out)

    def call(self, name: str, run: Run) -> Call:
        """Returns where a part's arguments come from."""
        place, after, words = next(entry[2:] for entry in run.log if entry[0] == name)
        try:
            flat = same(self.run(flat=name).result, run.result)
        except Refused:
            flat = False
        passes, words = self.passed(words, run)
        after = tuple(self.word("", value, run) for value in after)
        return Call(place, after, self.words(words, run), passes, flat)

    def agrees(self, ours: Decoder, run: Run) -> bool:
        """Our layer gives its parts what the class's forward has given them, and gives the same."""
        log = self.begin()
        out = ours.served(run.probe, run.x, run.given, run.rest)
        return alike((log, out), (run.log, run.result))


def _orders(names: list, norms: set) -> Iterator[Order]:
    """Returns the possible roles of the parts that were called, in their order."""
    blocks = [i for i, name in enumerate(names) if name not in norms]
    if len(set(names)) != len(names) or len(blocks) != 2:
        raise Refused("its parts come in another order: " + ", ".join(names))
    a, m = blocks
    for between in range(m - a):  # norms after the mixer, before those of the MLP
        cut = a + 1 + between
        groups = names[:a], names[a + 1 : cut], names[cut:m], names[m + 1 :]
        if max(map(len, groups)) <= 1:
            yield Order(*[group[0] if group else None for group in groups], names[a], names[m])
