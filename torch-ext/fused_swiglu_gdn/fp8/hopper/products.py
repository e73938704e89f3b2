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
    SCALES,
    Mlp,
    Product,
    Products,
    Quantised,
    as_bytes,
    blocks_of,
    padded,
)
from ..portable.quantise import (
    behind,
    gate_of,
    is_quantised_here,
    making_together,
    quantise_launch,
    quantising,
)
from .few import Few, gated
from .multiply import prepare_multiply_fwd


def lies_so(weight: torch.Tensor, scale: torch.Tensor, K: int) -> bool:
    """True if the kernels for few tokens read this weight for K columns."""
    return (
        weight.dtype is torch.float8_e4m3fn
        and weight.ndim == 2
        and scale.dtype in SCALES
        and weight.shape[1] == K
        and weight.shape[0] > 0
        and scale.shape == (blocks_of(weight.shape[0]), blocks_of(K))
        and weight.is_contiguous()
        and scale.is_contiguous()
        and weight.device == scale.device
    )


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
    if not all([lies_so(w, s, K) for w, s in zip(weights, scales)]):
        return None
    rows, others = (tuple([w.shape[0] for w in side]) for side in (weights, plain))
    return Few(where, lead, K, rows, plain=others, e8m0=E8M0 in [s.dtype for s in scales])


def _of_many(lead: tuple, weights: Sequence, scales: Sequence) -> Optional[Callable]:
    calls = [Product(w, s, ()) for w, s in zip(weights, scales)]
    multiply = [prepare_multiply_fwd(call) for call in calls]
    if None in multiply:
        return None

    def run(codes, s_x, weights, scales, plain=None, added=None) -> List[torch.Tensor]:
        x = Quantised(codes, s_x)
        # no views: of the rows of zeros behind the tokens nothing is seen
        found = [
            by(w, s, x).resize_((*lead, w.shape[0])) for by, w, s in zip(multiply, weights, scales)
        ]
        return found if added is None else [added + found[0]]

    return run


def _quantiser(x: Optional[torch.Tensor], M: int, K: int) -> Optional[Callable]:
    """A function of tokens like x that quantises them, or None."""
    rows = None if x is None else rows_of(x)
    if rows is None:
        made = None if x is None else _quantiser(x.contiguous(), M, K)
        return made and (lambda x: made(x.contiguous()))
    if rows.shape != (M, K) or not is_quantised_here(rows):
        return None
    return quantising(quantise_launch(rows), x.device, rows.shape)


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
        elif scales is None:
            scales = scales_of(codes)
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
    (lead, gate_first), K, (H, N) = options, w_gate.shape[1], w_down.shape
    M, both, order = math.prod(lead), w_up is None, 1 if gate_first else -1
    rows, wide = 2 * N if both else N, E8M0 in [s.dtype for s in (s_gate, s_up) if s is not None]
    alike = residual is None or residual.shape == (*lead, H) and residual.is_contiguous()
    if w_gate.shape != (rows, K) or not both and w_up.shape != (N, K) or N % ROWS or not alike:
        return None
    quantise = _quantiser(x, M, K) if codes is None else None
    down = _product(lead, N, (w_down,), (s_down,))
    scales_of = behind(w_gate.device, padded(M) * K)
    weights, scales = ((w_gate,), (s_gate,)) if both else ((w_gate, w_up), (s_gate, s_up))
    product = _product((M,), K, weights, scales)
    if down is None or product is None or quantise is None and codes is None:
        return None
    apart = not both or N % BLOCK == 0  # a block of scales is of gate or of up
    if M <= MOST and apart and not any([b is not None for b in biases]):
        gate = gated(w_gate.device, M, K, N)
        make, z_scales, parts_of = making_together(w_gate.device, M, N, down.floats)

        def few(w_gate, w_up, w_down, s_gate, s_up, s_down, b0, b1, b2, x, codes, s_x, residual):
            if codes is None:
                codes, s_x = quantise(x)
            elif s_x is None:
                s_x = scales_of(codes)
            if both:
                weights, scales = w_gate.chunk(2)[::order], s_gate.chunk(2)[::order]
            else:
                weights, scales = (w_gate, w_up), (s_gate, s_up)
            z = make()
            s_z, parts = z_scales(z), parts_of(z) if down.floats else None
            gate(codes, s_x, weights, as_bytes(scales) if wide else scales, z=z, s_z=s_z)
            return down(z, s_z, (w_down,), (s_down,), added=residual, parts=parts)[0]

        # a residual that torch adds would be added too soon
        few.together = residual is None or down.floats > 0
        return few
    stride = 2 * N if both or M <= MOST else N
    gate = gate_of(w_gate.device, (M, N), (stride, stride))

    def run(w_gate, w_up, w_down, s_gate, s_up, s_down, b_gate, b_up, b_down, x, codes, s_x, added):
        if codes is None:
            codes, s_x = quantise(x)
        elif s_x is None:
            s_x = scales_of(codes)
        if both:
            (g,) = product(codes, s_x, (w_gate,), (s_gate,))
            g, u = (g if b_gate is None else g.add_(b_gate)).chunk(2, 1)[::order]
        else:
            g, u = product(codes, s_x, (w_gate, w_up), (s_gate, s_up))
            g = g if b_gate is None else g.add_(b_gate)
            u = u if b_up is None else u.add_(b_up)
        (y,) = down(*gate(g, u), (w_down,), (s_down,))
        y = y if b_down is None else y.add_(b_down)
        return y if added is None else added + y

    return run
