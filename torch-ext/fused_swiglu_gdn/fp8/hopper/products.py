"""Products of any number of tokens with weights in FP8, and MLPs of them: x quantised where its
codes are not known, then kernels for few tokens (few.py) or torch's product (multiply.py)."""

import math
from typing import Callable, List, Optional, Sequence

import torch

from ...projection.call import MAX_WEIGHTS
from ...runtime import device
from ...runtime.ops import rows_of
from ..call import (
    BLOCK,
    E8M0,
    MOST,
    ROWS,
    Mlp,
    Product,
    Products,
    Quantised,
    blocks_of,
    is_scaled,
    padded,
)
from ..portable.quantise import (
    behind,
    gate_launch,
    is_quantised_here,
    making,
    quantiser,
)
from .few import Few, gate_of_products, gated
from .multiply import prepare_multiply_fwd


def _product(
    lead: tuple, K: int, weights: Sequence, scales: Sequence, plain: Sequence = ()
) -> Optional[Callable]:
    """A function like Few: of tokens in FP8, weights and their scales that gives all products."""
    where, M = weights[0].device, math.prod(lead)
    if not (0 < M and 0 < K and K % ROWS == 0) or not all([w.device == where for w in weights]):
        return None
    if M > MOST:
        return None if plain else _of_many(lead, weights, scales)
    if device.is_gpu(where) and not device.has_wgmma(where):
        return None
    if not all([is_scaled(w, s) and w.shape[1] == K for w, s in zip(weights, scales)]):
        return None
    rows, others = (tuple([w.shape[0] for w in side]) for side in (weights, plain))
    return Few(where, lead, K, rows, plain=others, e8m0=E8M0 in [s.dtype for s in scales])


def _of_many(lead: tuple, weights: Sequence, scales: Sequence) -> Optional[Callable]:
    calls = [Product(w, s, ()) for w, s in zip(weights, scales)]
    multiply = [prepare_multiply_fwd(call) for call in calls]
    if None in multiply:
        return None

    def run(codes, s_x, weights, scales, plain=None) -> List[torch.Tensor]:
        x = Quantised(codes, s_x)
        # no views: of the rows of zeros behind the tokens nothing is seen
        return [
            by(w, s, x).resize_((*lead, w.shape[0])) for by, w, s in zip(multiply, weights, scales)
        ]

    return run


def _quantiser(x: Optional[torch.Tensor], M: int, K: int) -> Optional[Callable]:
    """A function of tokens like x that quantises them, or None."""
    rows = None if x is None else rows_of(x)
    if rows is None:
        made = None if x is None else _quantiser(x.contiguous(), M, K)
        return made and (lambda x: made(x.contiguous()))
    return quantiser(rows) if rows.shape == (M, K) and is_quantised_here(rows) else None


def prepare_products_fwd(call: Products) -> Optional[Callable]:
    """The tensors of a call -> the products [*lead, N_i], in a launch to quantise, and one or two
    for few tokens, or one for each weight. The weights begin at multiples of 16 bytes, which the
    caller sees to."""
    *tensors, x, codes, _, p0, p1, (lead,) = call
    weights = [w for w in tensors[:MAX_WEIGHTS] if w is not None]
    count, M, K = len(weights), math.prod(lead), weights[0].shape[-1]
    plain = [p for p in (p0, p1) if p is not None]
    last = MAX_WEIGHTS + count
    quantise = _quantiser(x, M, K) if codes is None else None
    product = _product(lead, K, weights, tensors[MAX_WEIGHTS:last], plain)
    if product is None or plain and not _are_plain(M, K, x, plain):
        return None
    if quantise is None and (codes is None or codes.shape[1] != K):
        return None
    scales_of = behind(weights[0].device, padded(M) * K)

    def run(*tensors):
        x, codes, scales, p0, p1 = tensors[2 * MAX_WEIGHTS :]
        if codes is None:
            codes, scales = quantise(x)
        scales = scales_of(codes) if scales is None else scales
        plain = (None, None, None) if p0 is None else (x, p0, p0 if p1 is None else p1)
        return product(codes, scales, tensors[:count], tensors[MAX_WEIGHTS:last], plain)

    run.together = M <= MOST
    return run


def _are_plain(M: int, K: int, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """x [.., K] and weights [N_i, K] are in bf16 and lie densely."""
    if x.numel() != M * K or not all([w.ndim == 2 and w.shape[0] > 0 for w in weights]):
        return False
    return all([
        t.dtype is torch.bfloat16 and t.is_contiguous() and t.device == x.device
        and t.shape[-1] == K
        for t in (x, *weights)
    ])  # fmt: skip


def prepare_mlp_fwd(call: Mlp) -> Optional[Callable]:
    """The tensors of a call -> [*lead, H] bf16, in two launches to six; the weights as above."""
    w_gate, w_up, w_down, s_gate, s_up, s_down, *biases, x, codes, _, residual, options = call
    if w_gate.ndim != 2 or w_down.ndim != 2:
        return None
    (lead, gate_first), K, (H, N), where = options, w_gate.shape[1], w_down.shape, w_gate.device
    M, both = math.prod(lead), w_up is None
    alike = residual is None or residual.shape == (*lead, H) and residual.is_contiguous()
    shape = (2 * N if both else N, K)
    if w_gate.shape != shape or not both and w_up.shape != shape or N % ROWS or not alike:
        return None
    quantise = _quantiser(x, M, K) if codes is None else None
    down = _product(lead, N, (w_down,), (s_down,))
    weights, scales = ((w_gate,), (s_gate,)) if both else ((w_gate, w_up), (s_gate, s_up))
    product = _product((M,), K, weights, scales)
    if down is None or product is None or quantise is None and codes is None:
        return None
    apart = not both or N % BLOCK == 0  # a block of scales is of gate or of up
    biased, order = any([b is not None for b in biases]), 1 if gate_first else -1
    few = M <= MOST and apart and not biased
    if few:
        gate = gated(where, M, K, N, E8M0 in [s.dtype for s in scales])
    else:
        stride = 2 * N if both or M <= MOST else N
        gate = gate_of_products(product, gate_launch(where, (M, N), (stride, stride)), order)
    floats = getattr(down, "floats", 0)
    adds = floats > 0 and biases[2] is None  # the residual, in the launch that adds parts of K
    make, z_scales = making(where, M, N, floats)
    scales_of, parts_of = (behind(where, padded(M) * n) for n in (K, N + 4 * blocks_of(N)))

    def run(w_gate, w_up, w_down, s_gate, s_up, s_down, b_gate, b_up, b_down, x, codes, s_x, added):
        if codes is None:
            codes, s_x = quantise(x)
        s_x = scales_of(codes) if s_x is None else s_x
        weights, scales = (w_gate, w_up), (s_gate, s_up)
        if few and both:
            weights, scales = w_gate.chunk(2)[::order], s_gate.chunk(2)[::order]
        elif both:
            weights, scales = (w_gate,), (s_gate,)
        z = make()
        s_z = z_scales(z)
        gate(codes, s_x, weights, scales, z, s_z, (b_gate, b_up))
        more = {"added": added, "parts": parts_of(z)} if adds else {}
        (y,) = down(z, s_z, (w_down,), (s_down,), **more)
        y = y if b_down is None else y.add_(b_down)
        return y if adds or added is None else added + y

    run.together = few and (adds or residual is None)  # else torch would add too soon
    return run
