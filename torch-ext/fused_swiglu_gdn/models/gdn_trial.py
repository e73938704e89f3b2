"""A Gated DeltaNet layer of transformers and ours on the same small numbers."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from .. import layers
from .delta_trial import EPS, DeltaTrial, Found, Packing
from .handed import attributes_of
from .stand_ins import Part, probe_of, random


class Roles(NamedTuple):
    """The roles of a module's parts and parameters, and its sizes."""

    layer: str  # the name of ours
    names: Tuple[Tuple[str, str], ...]  # (ours, the module's)
    widths: Tuple[Tuple[str, Optional[tuple]], ...]  # (the module's name, how often it has k, v
    # and a head) of projections; None of the last
    hidden: int
    values: Tuple[Tuple[str, object], ...]  # of our attributes
    index: str  # the attribute that is the layer's index


class _Trial(DeltaTrial):
    """Runs of a class's forward, and of ours."""

    TOLERANCES = {
        torch.float32: 1e-4, torch.float64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2,
    }  # fmt: skip
    PACKING = Packing("cu_seqlens", "seq_idx")

    def __init__(self, module: nn.Module, kind: type, facts, roles: Roles):
        super().__init__(module, kind, facts)
        self.roles = roles
        sizes = {name for name, value in facts.values.items() if type(value) is int}
        self.small = sizes <= {*dict(roles.values), roles.index}

    # -- stubs

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

    def probe(self, dtype, training: bool, index: int) -> nn.Module:
        parts = self.parts(dtype)
        own = {n: parts.pop(n) for n in self.module._parameters if n in parts}
        sizes = {n: v for n, v in self.values(self.roles).items() if n in self.module.__dict__}
        values = {**sizes, self.roles.index: index, "training": training}
        attributes = attributes_of(self.module, (), values, set())
        return probe_of(self.module, self.copies.kind, parts, own, **attributes)

    def ours(self, roles: Roles, dtype, index: int):
        parts = self.parts(dtype)
        own = {name: parts[mine] for name, mine in roles.names}
        view = SimpleNamespace(**{**own, **self.values(roles), "layer_idx": index})
        forward = getattr(layers, roles.layer).forward
        return lambda x, cache=None, mask=None, **more: forward(view, x, cache, mask, **more)

    def confirmed(self, roles: Roles) -> bool:
        if not self.small:
            return True
        self.small = False  # with the module's own sizes
        return self.agree(roles, (torch.float32, True, 0), {})


def width_of(counts: tuple, sizes: tuple) -> int:
    return sum(count * size for count, size in zip(counts, sizes))


def found_by(module: nn.Module, kind: type, facts, candidates) -> Found:
    """Returns the role of each part and argument; raises Refused."""
    first = next(candidates)
    trial = _Trial(module, kind, facts, first)
    return trial.found(itertools.chain([first], candidates))
