"""Whole Kimi Delta Attention layers: Kimi Linear, GLM-5-Next, Bailing-Hybrid (Ling-3.0).

    q, k, v = silu(conv([x Wq, x Wk, x Wv]))        y = (rms_norm(o) * sigmoid(z)) Wo
    o = chunk_kda or fused_recurrent_kda, from raw gates

Which part of a layer has which role is a property of its class (Roles). Sizes: B batch, T tokens, H
heads, K their dim, D = 3 H K channels of the convolution.
"""

import functools
import operator
from typing import Callable, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..kda import api as kda
from ..kda.call import has_gradient
from .delta import (
    Sequences,
    convolution,
    is_gated_norm,
    normed_and_gated,
    packed_lengths,
    recurred,
    without_padding,
)
from .forward import Arguments, forward_by
from .pinned import Pinned
from .plain import PLAIN_TENSORS, is_plain
from .projections import joined, projections

RULES = kda.chunk_kda, kda.fused_recurrent_kda
Chain = Tuple[str, ...]  # paths of one projection after another, of the hidden states


class Roles(NamedTuple):
    """The paths of a layer's parts and attributes, "forget_gate.A_log"."""

    mixed: Tuple[str, str, str]  # the projections of q, k and v
    f: Chain  # the raw gate of each channel, [B, T, H K]
    z: Chain  # the gate of the output
    b: Chain  # the raw write strength, [B, T, H]
    conv: str
    norm: str
    out: str
    A_log: str
    dt_bias: str
    index: str  # of the layer
    activation: str  # of the convolution: its name itself
    bound: Optional[str]  # of the decays, if they have one


class Owner(NamedTuple):
    """A class whose forward was read: of the layer, or of a part with parts of its own."""

    path: str  # "" of the layer
    kind: type
    pinned: Pinned  # what a patch could replace
    guards: Tuple[Tuple[str, object], ...]  # attributes on which its forward depends


class KdaForm(NamedTuple):
    """A class of layers that this file computes the same."""

    kind: type
    arguments: Arguments
    cache: Optional[str]  # the names of its arguments
    mask: Optional[str]
    owners: Tuple[Owner, ...]
    roles: Roles


at = functools.cache(operator.attrgetter)  # at(path)(layer): the layer's attribute at a path


@functools.lru_cache(maxsize=1024)
def forward_of(form: KdaForm) -> Callable:
    """Our forward for the layers of a class, and its own wherever that may do anything else."""
    roles = form.roles

    def serve(layer, x, given, rest):
        cache = given.get(form.cache)
        lengths = packed_lengths(rest)
        cp = rest.get("cp_context")
        if rest.get("seq_idx") is not None or cache is not None and lengths is not None:
            return None
        if cp is None and x.is_cuda and torch.is_grad_enabled() and not _learns(layer, roles, x):
            return None
        if not _is_as_known(layer, form):
            return None
        cached = None if cache is None else cache.layers[at(roles.index)(layer)]
        if getattr(cached, "record_past", False) and not hasattr(cached, "takes_back"):
            return None  # it keeps what it needs to take tokens back in the class's own way
        bound = None if roles.bound is None else at(roles.bound)(layer)
        if roles.bound is not None and not (type(bound) in (int, float) and bound < 0.0):
            return None
        mask = given.get(form.mask)
        return kimi_delta_attention(layer, roles, x, cache, mask, lengths, bound, cp)

    return forward_by(form, serve, "KimiDeltaAttention", exchanges=True)


def _is_as_known(layer: nn.Module, form: KdaForm) -> bool:
    """True if the classes are not patched, and a call would read what we read without calling."""
    roles = form.roles
    conv = at(roles.conv)(layer)
    if not is_plain(conv):
        return False
    for path, kind, pinned, guards in form.owners:
        owner = at(path)(layer) if path else layer
        if path and (type(owner) is not kind or not is_plain(owner)):
            return False
        if not pinned.unchanged(owner, guards):
            return False
    read = (at(roles.A_log)(layer), at(roles.dt_bias)(layer), conv.weight)
    return all([type(x) in PLAIN_TENSORS for x in read])


def _head_dim(layer: nn.Module, roles: Roles) -> int:
    return at(roles.dt_bias)(layer).numel() // at(roles.A_log)(layer).numel()


def _learns(layer: nn.Module, roles: Roles, x: torch.Tensor) -> bool:
    """True if the gradient is made by kernels: in torch code it may be slower than the class's."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    K = _head_dim(layer, roles)
    return has_gradient(K, K, dtype, x.device)


def kimi_delta_attention(
    layer, roles: Roles, hidden_states, cache, mask, lengths, bound, cp=None
) -> torch.Tensor:
    """hidden_states [B, T, hidden] -> [B, T, hidden], with both states in the cache updated."""
    x = without_padding(hidden_states, mask)
    heads = (*x.shape[:2], at(roles.A_log)(layer).numel(), _head_dim(layer, roles))
    qkv, f, z, b = _projected(layer, roles, x)
    seq = Sequences(
        layer, at(roles.index)(layer), x, cache, {"cu_seqlens": lengths, "cp_context": cp}
    )
    q, k, v = [part.view(heads) for part in qkv.chunk(3, -1)]
    y = convolution(at(roles.conv)(layer), roles.activation, q, k, v, qkv, seq)
    q, k, v, f, z = [part.view(heads) for part in (*y.chunk(3, -1), f, z)]
    gates = {"A_log": at(roles.A_log)(layer), "dt_bias": at(roles.dt_bias)(layer)}
    options = {"lower_bound": bound, **gates}
    o = recurred(RULES, (q, k, v, f, b), options, seq)
    norm = at(roles.norm)(layer)
    o = normed_and_gated(norm, o, z) if is_gated_norm(norm) else norm(o, z)
    return projections(o.flatten(2), at(roles.out)(layer))[0]


def _projected(layer: nn.Module, roles: Roles, x: torch.Tensor) -> tuple:
    """q, k and v side by side [B, T, D], f, z [B, T, H K] and b [B, T, H].

    Those that are called are called in the order of the classes, for a module may draw random
    numbers (dropout of adapters).
    """
    parts = {path: at(path)(layer) for path in (roles.f[0], *roles.z[:-1], roles.b[0])}
    qkv, *found = joined(x, [at(path)(layer) for path in roles.mixed], [*parts.values()])
    outputs = dict(zip(parts, found))

    def output(chain: Chain) -> torch.Tensor:
        path, *others = chain
        y = outputs[path] if path in outputs else (parts.get(path) or at(path)(layer))(x)
        for path in others:
            y = projections(y, at(path)(layer))[0]
        return y

    f, b = output(roles.f), output(roles.b)
    return qkv, f, output(roles.z), b
