"""The common parts of Gated DeltaNet (gdn.py) and Kimi Delta Attention layers (kda.py).

Both convolve q, k and v, apply a delta rule to them and gate its normed result. They read their
cache in the one way that transformers' releases have in common.

Sizes: B batch, T tokens, H heads of q and k, HV heads of v, K and V head dims,
D = 2 H K + HV V channels of the convolution, W its taps.
"""

from types import MethodType, SimpleNamespace
from typing import Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..gdn_layer import api as gdn_layer
from ..gdn_layer.ops_fused import PROLOGUE
from ..runtime.activations import OF_CONVOLUTION, OF_GATED_NORM
from ..runtime.checks import FLOATING
from ..runtime.ops import needs_grad
from .forward import Layer
from .own_classes import Answers
from .own_code import peeled
from .plain import PLAIN_TENSORS, torch_unpatched, why_hooked
from .replay import held_states

CACHE_NAMES = ("cache", "cache_params", "past_key_values")  # of a layer's argument


def packed_lengths(kwargs: dict) -> Optional[Tensor]:
    """The cumulative lengths [N + 1] of a packed batch, under any name that callers use."""
    lengths = kwargs.get("cu_seqlens")
    return kwargs.get("cu_seq_lens_q") if lengths is None else lengths


def lengths_of(seq_idx: Tensor) -> Tensor:
    """Cumulative lengths from the index of each token's sequence, [1, T]. Stops the host once."""
    if seq_idx.shape[0] != 1:
        raise ValueError(
            "seq_idx must have shape [1, T] unless cu_seq_lens_q is given, "
            f"got {list(seq_idx.shape)}"
        )
    starts = torch.nonzero(seq_idx[0, 1:] != seq_idx[0, :-1])[:, 0] + 1
    ends = starts.new_tensor([0, seq_idx.shape[1]])
    return torch.cat([ends[:1], starts, ends[1:]])


def without_padding(x: Tensor, mask: Optional[Tensor]) -> Tensor:
    """x [B, T, hidden] with zeros where the mask [B, T] has them: padding must not reach states."""
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


class Sequences:
    """The position of a layer's tokens: the cached states they go on from, and packed lengths.

    k: [B, T, ...], of GDN the keys. index: of the layer in the cache.
    """

    def __init__(self, layer: nn.Module, index: int, k: Tensor, cache, kwargs: dict):
        tokens = k.shape[1]
        self.cache, self.index, self.cp = cache, index, kwargs.get("cp_context")
        if cache is not None and self.cp is not None:
            raise ValueError("use_cache must be False with cp_context: decoding has no such")
        self.conv_state = self.state = self.held = cached = None
        self.recording = before = False
        if cache is not None:
            cached = cache.layers[index]
            self.recording = getattr(cached, "record_past", False)
            before = cached.has_previous_state[0]
        self.lengths = packed_lengths(kwargs)
        if self.cp is not None:
            self.lengths = None  # the context has them
        elif self.lengths is None and kwargs.get("seq_idx") is not None:
            self.lengths = lengths_of(kwargs["seq_idx"])
        # a cache layer that takes tokens back (decoding/drafts.py) keeps the state after each
        takes_back = getattr(cached, "takes_back", None)
        self.back = cached if before and takes_back is not None and takes_back(tokens) else None
        self.rows = None if self.back is None else self.back.rows
        self.one_step = tokens == 1 and before
        alone = not self.recording and self.lengths is None and self.back is None
        self.in_place = self.one_step and alone and not torch.is_grad_enabled()
        if before:
            self.conv_state = cached.conv_states[0]  # [B, D, W]
            self.held = held_states(layer, cached, k) if self.in_place else None
            if self.held is None:
                state = cached.recurrent_states[0]  # [B, HV, K, V]
                self.state = state if self.in_place else state.contiguous()
        if self.state is not None and torch.is_grad_enabled():
            # autograd keeps what it reads, and the cache is about to be overwritten
            self.conv_state, self.state = self.conv_state.clone(), self.state.clone()


# -- the convolution


def named_activation(name: str) -> Callable:
    """The function of any other activation that a transformers config can name."""
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def _joined(q: Tensor, k: Tensor, v: Tensor, joined: Optional[Tensor]) -> Tensor:
    """[B, D, T]: of `joined` if they lie side by side already."""
    y = torch.cat([x.flatten(2) for x in (q, k, v)], -1) if joined is None else joined
    return y.transpose(1, 2)


def convolution(
    conv: nn.Conv1d, name: Optional[str], q, k, v, joined: Optional[Tensor], seq: Sequences
) -> Tensor:
    """act(conv([q k v])), [B, T, D], after the inputs in the cache, which these then join.

    q, k [B, T, H, K]; v [B, T, HV, V]; joined [B, T, D]: these, if they lie side by side. name: of
    the activation.
    """
    weight, bias, W = conv.weight.squeeze(1), conv.bias, conv.weight.shape[-1]  # [D, W], [D]
    known = name if name in OF_CONVOLUTION else None
    cache, latest = None if seq.in_place or seq.rows is not None else seq.cache, None
    before = None if seq.conv_state is None else seq.conv_state[..., 1 - W :]
    if seq.in_place or seq.rows is not None:
        state, accepted = seq.conv_state, None
        if seq.rows is not None:
            state, accepted = seq.rows.columns, seq.rows.accepted
        x = _joined(q, k, v, joined)
        y = gdn_layer.causal_conv1d_update(
            x, state, weight, bias, known, num_accepted_tokens=accepted
        ).transpose(1, 2)
    elif torch.is_grad_enabled() or seq.cp is not None:  # PROLOGUE has no gradient
        y = gdn_layer.causal_conv1d_fn(
            _joined(q, k, v, joined), weight, bias, known, cu_seqlens=seq.lengths,
            initial_states=before, cp_context=seq.cp,
        ).transpose(1, 2)  # fmt: skip
    else:
        # the same launch makes the inputs that the cache keeps, but for the rare cases
        keeps = cache is not None and not seq.recording and seq.lengths is None
        tensors = (q, k, v, weight, bias, seq.lengths, before)
        y, latest = PROLOGUE(tensors, (known, W if keeps else 0))
    if cache is not None:
        if latest is None:
            last = slice(None) if seq.recording else slice(-W, None)
            latest = _joined(q[:, last], k[:, last], v[:, last], None)
        cache.update_conv_state(latest, seq.index, conv_kernel_size=W)
    return y if known == name else named_activation(name)(y)


# -- the rule


def recurred(rules: Tuple[Callable, Callable], tensors: tuple, options: dict, seq: Sequences):
    """The delta rule's o [B, T, HV, V]; the cache gets the state after it.

    rules: of chunks, and token by token. tensors: q, k, v and raw gates; options: what the two
    families do not have in common.
    """
    chunked, by_token = rules
    options.update(
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True
    )
    if seq.held is not None:
        return seq.held.step(*tensors, **options)
    if seq.back is not None and seq.lengths is None:
        return seq.back.recur(by_token, tensors, seq.state, options)
    options.update(initial_state=seq.state, output_final_state=seq.cache is not None)
    options["cu_seqlens"] = seq.lengths
    if seq.cp is not None:
        options["cp_context"] = seq.cp
    # kernels have the gradient of chunks alone
    if seq.one_step and not needs_grad((*tensors, *options.values())):
        o, state = by_token(*tensors, inplace_final_state=seq.in_place, **options)
    else:
        o, state = chunked(*tensors, **options)
    if seq.cache is not None and not seq.in_place:
        seq.cache.update_recurrent_state(state, seq.index)
    return o


# -- the gated norm


def normed_and_gated(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """The output of a model's RMSNormGated `norm` for x and gate [..., D]."""
    weight, eps = norm.weight, norm.variance_epsilon
    activation = getattr(norm, "activation", "silu")
    if activation in OF_GATED_NORM:
        return gdn_layer.rms_norm_gated(x, gate, weight, eps=eps, activation=activation)
    y = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (y * named_activation(activation)(gate.float())).to(x.dtype)


class FusedRMSNormGated(Layer):
    """weight * hidden_states / rms(hidden_states) * act(gate): the norm comes before the gate.

    Shapes:
        hidden_states, gate: [..., D] -> [..., D]
    """

    def forward(self, hidden_states, gate):
        return normed_and_gated(self, hidden_states, gate)


def is_gated_norm(norm: nn.Module, eager: bool = False) -> bool:
    """True if calling the norm computes weight * x / rms(x) * act(gate) and nothing else.

    It is of a class of transformers with its own forward, whose values were compared with the
    formula; there are no hooks, and no forward on the instance but its class's or ours. eager: the
    caller knows that torch is in eager mode, and unpatched.
    """
    kind = type(norm)
    if not issubclass(kind, nn.Module) or not NORMS.of(kind):
        return False
    bound = norm.__dict__.get("forward")
    if bound is not None:
        function = bound.__func__ if isinstance(bound, MethodType) else None
        if function is not kind.forward and function is not FusedRMSNormGated.forward:
            return False
    if not (eager or torch_unpatched()) or why_hooked(norm) is not None:
        return False
    weight, eps = norm._parameters.get("weight"), norm.__dict__.get("variance_epsilon")
    if type(weight) not in PLAIN_TENSORS or weight.ndim != 1 or weight.dtype not in FLOATING:
        return False
    return type(eps) is float and eps >= 0.0


def _is_the_formula(kind: type, _) -> bool:
    """True if the forward of a class agrees with the formula on small inputs; transformers computes
    in fp32."""
    if kind.__call__ is not nn.Module.__call__:
        return False
    forward = peeled(kind.forward).forward
    values = torch.linspace(-3, 5, 15, device="cpu", dtype=torch.float32)
    x, gate, weight = values.view(3, 5).tensor_split(3)
    for eps in (1e-6, 0.5):
        norm = SimpleNamespace(weight=weight[0], variance_epsilon=eps, activation="silu")
        expected = F.rms_norm(x, (5,), weight[0], eps) * F.silu(gate)
        got = forward(norm, x, gate)
        if got.shape != x.shape or not torch.allclose(got, expected, rtol=1e-5, atol=1e-6):
            return False
    return True


NORMS = Answers(_is_the_formula)
