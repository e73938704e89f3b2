"""Products of up to MOST tokens in FP8, of several weights in one launch, and MLPs in a few.

A weight of few rows has too few tiles for a whole GPU: parts of K are then programs of their own,
added up in order by a second launch. How K is cut goes by the weights, so a token has the same bits
beside any others, up to MOST.
"""

import math
import operator
from typing import Callable, Optional, Sequence, Tuple

import torch

from ...projection.call import MAX_WEIGHTS
from ...projection.portable.project import add_parts_kernel
from ...runtime import device, tuning
from ...runtime.launch import Launch
from ...runtime.maps import Map
from ...runtime.ops import rows_of
from ..call import BLOCK, MAX_PLAIN, MOST, PLAIN_ROWS, Few, FewMlp, QuantiseFew, padded
from ..portable.quantise import gate_of, is_quantised_here, making, quantise_launch
from .few_products import few_gate_kernel, few_kernel


def _lies_so(weight: torch.Tensor, scale: torch.Tensor, K: int) -> bool:
    return (
        weight.dtype is torch.float8_e4m3fn
        and scale.dtype is torch.float32
        and weight.shape[1] == K
        and scale.shape == (-(-weight.shape[0] // BLOCK), K // BLOCK)
        and weight.is_contiguous()
        and scale.is_contiguous()
        and weight.device == scale.device
    )


def _supports(codes: torch.Tensor, M: int, weights: Sequence, scales: Sequence) -> bool:
    K, where = codes.shape[1], codes.device
    if device.is_gpu(where) and not device.has_wgmma(where):
        return False
    here = all([w.device == where and w.shape[0] > 0 for w in weights])
    fits = 0 < M <= MOST and K > 0 and K % BLOCK == 0
    return fits and here and all([_lies_so(w, s, K) for w, s in zip(weights, scales)])


def _tokens(M: int) -> int:
    """The width of a tile of M tokens."""
    return 16 if M <= 16 else 32 if M <= 32 else 64


def parts_of_k(where: torch.device, rows: Tuple[int, ...], blocks: int) -> int:
    """Into how many parts `blocks` steps of K are cut: two programs an SM, of 64 rows
    and at least 8 steps each, whatever tiles serve."""
    if not device.overlaps_launches(where):
        return 1
    tiles = sum([-(-n // 64) for n in rows])
    return max(1, min(2 * device.multiprocessor_count(where.index) // tiles, blocks // 8))


def _places(count: int, plain: int) -> operator.itemgetter:
    """Picks the tensors of a launch from those of a Few call of `count` weights, the first of which
    stands for those that are missing, and of `plain` weights in bf16."""
    missing, half = MAX_WEIGHTS - count, 2 + MAX_WEIGHTS
    first, x = range(2, 2 + count), 2 + 2 * MAX_WEIGHTS
    scales = range(half, half + count)
    others = (x, x + 1, x + (plain or 2))
    return operator.itemgetter(0, 1, *first, *(2,) * missing, *scales, *(half,) * missing, *others)


# of one weight: (codes, scales, weight, scale, None)
_ONE = operator.itemgetter(0, 1, *(2,) * MAX_WEIGHTS, *(3,) * MAX_WEIGHTS, 4, 4, 4)
# of two: (codes, scales, weights, their scales, None)
_TWO = operator.itemgetter(
    0, 1, 2, 3, *(2,) * (MAX_WEIGHTS - 2), 4, 5, *(4,) * (MAX_WEIGHTS - 2), 6, 6, 6
)


class _Few:
    """The product of M tokens with weights of some numbers of rows. whole: K is not cut. pick: the
    tensors of its launch but the last, from those that it is called with. lead: the result's shape
    but its last dimension, if not (M,)."""

    __slots__ = ("where", "shape", "strides", "cut", "whole", "pick", "product", "add")

    def __init__(
        self, where: torch.device, M: int, K: int, rows: Tuple[int, ...], whole: bool = False,
        plain: Tuple[int, ...] = (), pick: Optional[operator.itemgetter] = None,
        lead: Optional[tuple] = None,
    ):  # fmt: skip
        width, missing = sum(rows) + sum(plain), MAX_WEIGHTS - len(rows)
        self.where, self.shape = where, (*(lead or (M,)), width)
        self.strides = torch.empty(self.shape, device="meta").stride()
        self.pick = pick or _places(len(rows), len(plain))
        config = tuning.lookup("hopper_fp8_few", where, M=M)
        height, blocks, pdl = config["ROWS"], K // BLOCK, device.overlaps_launches(where)
        tiles = sum([-(-n // height) for n in rows])
        parts, size = 1 if whole else parts_of_k(where, rows, blocks), M * width
        self.cut, self.whole = (parts, size), parts == 1
        steps = math.gcd(config["STEPS"], -(-blocks // parts), blocks)
        early = (("launch_pdl", True),) if pdl else ()
        tiles += sum([-(-n // PLAIN_ROWS) for n in plain])
        sizes = (*rows, *(0,) * missing, *plain, *(0,) * (MAX_PLAIN - len(plain)))
        self.product = Launch(
            few_kernel, (tiles, parts), where, numbers=(M, width, padded(M), *sizes),
            constexprs=(K, _tokens(M), height, steps, parts, pdl),
            options=(
                ("num_warps", config["num_warps"]), ("num_stages", config["num_stages"]), *early
            ),
            guarded=True,
        )  # fmt: skip
        self.add = Launch(
            add_parts_kernel, -(-size // 512), where, numbers=(size,),
            constexprs=(parts, 512, pdl), options=early, guarded=True,
        )  # fmt: skip

    def __call__(
        self, *tensors: Optional[torch.Tensor], added: Optional[torch.Tensor] = None
    ) -> torch.Tensor:  # [M, N]
        # empty would cost the host half as much again
        y = torch.empty_strided(self.shape, self.strides, dtype=torch.bfloat16, device=self.where)
        if self.whole:
            self.product(*self.pick(tensors), y)
            return y if added is None else added + y
        cut = self.cut
        parts = torch.empty_strided(cut, (cut[1], 1), dtype=torch.float32, device=self.where)
        self.product(*self.pick(tensors), parts)
        self.add(parts, added, y)
        return y


def _are_plain(codes: torch.Tensor, M: int, x: torch.Tensor, weights: Sequence) -> bool:
    """x [M, K] and weights [N_i, K] are in bf16 and lie densely, beside the codes of x."""
    return len(x) == M and all([
        t.dtype is torch.bfloat16 and t.is_contiguous() and t.device == codes.device
        and t.shape[1:] == codes.shape[1:] and t.shape[0] > 0
        for t in (x, *weights)
    ])  # fmt: skip


def prepare_few_fwd(call: Few) -> Optional[Callable]:
    """The tensors of a call -> x W_i^T side by side, [M, N] bf16, in a launch or two. The weights
    begin at multiples of 16 bytes, which the caller sees to."""
    codes, _, *tensors, x, p0, p1, (M,) = call
    there = [w for w in tensors[:MAX_WEIGHTS] if w is not None]
    plain = [p for p in (p0, p1) if p is not None]
    if not _supports(codes, M, there, tensors[MAX_WEIGHTS:]):
        return None
    if plain and not _are_plain(codes, M, x, plain):
        return None
    rows, others = (tuple([w.shape[0] for w in side]) for side in (there, plain))
    return _Few(codes.device, M, codes.shape[1], rows, plain=others)


def prepare_quantise_few_fwd(call: QuantiseFew) -> Optional[Callable]:
    """(x, weight, scale) -> x W^T [..., N] bf16, in two launches or three; the weight as above."""
    x, weight, scale, _ = call
    rows, where = rows_of(x), x.device
    if rows is None or not is_quantised_here(rows):
        return None
    M, K = rows.shape
    if not _supports(rows, M, (weight,), (scale,)):
        return None
    quantise, (make_codes, make_scales) = quantise_launch(rows), making(where, M, K)
    product = _Few(where, M, K, (weight.shape[0],), pick=_ONE, lead=x.shape[:-1])

    def run(x, weight, scale):
        codes, scales = make_codes(), make_scales()
        quantise(x, codes, scales)
        return product(codes, scales, weight, scale, None)

    return run


def _is_added(residual: torch.Tensor, M: int, w_down: torch.Tensor) -> bool:
    alike = residual.dtype is torch.bfloat16 and residual.device == w_down.device
    return alike and residual.is_contiguous() and residual.shape == (M, w_down.shape[0])


def _is_apart(where: torch.device, tiles: int) -> bool:
    """Returns True if programs that make a block of scales each, one an SM, would leave half of the
    SMs' turns empty."""
    if not device.overlaps_launches(where):
        return False
    count = device.multiprocessor_count(where.index)
    return tiles < 0.53 * count * -(-tiles // count)


def _gated(where: torch.device, M: int, K: int, N: int) -> Callable:
    """(codes, scales, w_gate, w_up, s_gate, s_up) -> silu(gate) * up in FP8: by a kernel whose
    programs make a block of scales each, or, where these are too few, after products by narrower
    ones."""
    config = tuning.lookup("hopper_fp8_few_gate", where, M=M)
    if _is_apart(where, N // BLOCK):
        # the sums are those of the other kernel
        product = _Few(where, M, K, (N, N), whole=True, pick=_TWO)
        gate = gate_of(where, (M, N), (2 * N, 2 * N))

        def apart(codes, scales, w_gate, w_up, s_gate, s_up):
            both = product(codes, scales, w_gate, w_up, s_gate, s_up, None)
            return gate(*both.split(N, 1))

        return apart
    launch, (make_codes, make_scales) = _gate(where, M, K, N, config), making(where, M, N)

    def run(codes, scales, w_gate, w_up, s_gate, s_up):
        z, s_z = make_codes(), make_scales()
        launch(w_gate, w_up, codes, scales, s_gate, s_up, z, s_z)
        return z, s_z

    return run


def _gate(where: torch.device, M: int, K: int, N: int, config: dict) -> Launch:
    pdl, rows = device.overlaps_launches(where), Map((N, K), (K, 1), (BLOCK, BLOCK))
    early = (("launch_pdl", True),) if pdl else ()
    return Launch(
        few_gate_kernel, N // BLOCK, where, guarded=True,
        maps=(rows, Map((N, K), (K, 1), (BLOCK, BLOCK))),
        numbers=(M, padded(M)),
        constexprs=(N, K, _tokens(M), pdl),
        options=(
            ("num_warps", config["num_warps"]), ("num_stages", config["num_stages"]), *early
        ),
    )  # fmt: skip


def prepare_few_mlp_fwd(call: FewMlp) -> Optional[Callable]:
    """The tensors of a call -> [M, H] bf16, in two launches to five; the weights as above."""
    codes, _, w_gate, w_up, w_down, s_gate, s_up, s_down, residual, (M,) = call
    N, where = w_gate.shape[0], codes.device
    served = (
        N > 0
        and N % BLOCK == 0
        and w_up.shape == w_gate.shape
        and _supports(codes, M, (w_gate, w_up), (s_gate, s_up))
        and w_down.device == where
        and w_down.shape[0] > 0
        and _lies_so(w_down, s_down, N)
        and (residual is None or _is_added(residual, M, w_down))
    )
    if not served:
        return None
    gate = _gated(where, M, w_gate.shape[1], N)
    down = _Few(where, M, N, (w_down.shape[0],), pick=_ONE)

    def run(codes, scales, w_gate, w_up, w_down, s_gate, s_up, s_down, residual):
        z = gate(codes, scales, w_gate, w_up, s_gate, s_up)
        return down(*z, w_down, s_down, None, added=residual)

    return run
