"""Products of up to MOST tokens in FP8, of several weights in one launch, and the gate of an MLP.

A weight of few rows has too few tiles for a whole GPU: parts of K are then programs of their own,
added up in order by a second launch. How K is cut goes by the weights, so a token has the same bits
beside any others, up to MOST.
"""

import functools
import math
from typing import Callable, List, Optional, Sequence, Tuple

import torch

from ...projection.call import MAX_WEIGHTS
from ...projection.portable.project import add_parts_kernel
from ...runtime import device, tuning
from ...runtime.launch import Launch
from ...runtime.maps import Map, RawPointer
from ..call import BLOCK, MAX_PLAIN, PLAIN_ROWS, as_bytes, blocks_of, padded
from ..portable.quantise import gate_launch
from .few_products import few_gate_kernel, few_kernel

Tensors = Sequence[Optional[torch.Tensor]]


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


class Few:
    """(codes, scales, weights, their scales) -> the products [*lead, N_i] of M tokens, views of one
    tensor.

    rows, plain: the numbers N_i of the weights' rows, and of those in bf16. whole: K is not cut.
    e8m0: scales of the weights are. floats: how many fp32 the parts of K have.
    """

    __slots__ = ("sizes", "make", "make_parts", "missing", "product", "add", "e8m0", "floats")

    def __init__(
        self, where: torch.device, lead: tuple, K: int, rows: Tuple[int, ...], whole: bool = False,
        plain: Tuple[int, ...] = (), e8m0: bool = False,
    ):  # fmt: skip
        M, self.sizes = math.prod(lead), [*rows, *plain]
        width, missing = sum(self.sizes), MAX_WEIGHTS - len(rows)
        self.missing, shape = (None,) * missing, (*lead, width)
        empty = functools.partial(torch.empty_strided, device=where)
        strides = torch.empty(shape, device="meta").stride()
        self.make = functools.partial(empty, shape, strides, dtype=torch.bfloat16)
        self.make_parts: Optional[Callable] = None
        self.e8m0, self.floats = e8m0, 0
        config = tuning.lookup("hopper_fp8_few", where, M=M, N=sum(rows))
        height, blocks, pdl = config["ROWS"], blocks_of(K), device.overlaps_launches(where)
        tiles = sum([-(-n // height) for n in rows])
        parts, size = 1 if whole else parts_of_k(where, rows, blocks), M * width
        if parts > 1:
            fp32 = {"dtype": torch.float32}
            self.floats = parts * size
            self.make_parts = functools.partial(empty, (parts, size), (size, 1), **fp32)
        steps = math.gcd(config["STEPS"], -(-blocks // parts), blocks)
        tiles += sum([-(-n // PLAIN_ROWS) for n in plain])
        sizes = (*rows, *(0,) * missing, *plain, *(0,) * (MAX_PLAIN - len(plain)))
        self.product = Launch(
            few_kernel, (tiles, parts), where, numbers=(M, width, padded(M), *sizes),
            constexprs=(K, _tokens(M), height, steps, parts, pdl),
            options=tuple((name, config[name]) for name in ("num_warps", "num_stages")),
            guarded=True, early=pdl,
        )  # fmt: skip
        self.add = Launch(
            add_parts_kernel, -(-size // 512), where, numbers=(size,),
            constexprs=(parts, 512, pdl), guarded=True, early=pdl,
        )  # fmt: skip

    def __call__(
        self, codes: torch.Tensor, scales: torch.Tensor, weights: Tensors, w_scales: Tensors,
        plain: Tensors = (None, None, None),  # x in bf16, and weights in bf16
        added: Optional[torch.Tensor] = None,  # where K is cut
        parts: Optional[RawPointer] = None,  # memory for parts of K
    ) -> List[torch.Tensor]:  # fmt: skip
        if self.e8m0:
            w_scales = as_bytes(w_scales)
        tensors = (codes, scales, *weights, *self.missing, *w_scales, *self.missing, *plain)
        y = self.make()
        if self.make_parts is None:
            self.product(*tensors, y)
        else:
            parts = self.make_parts() if parts is None else parts
            self.product(*tensors, parts)
            self.add(parts, added, y)
        return [y] if len(self.sizes) == 1 else list(y.split_with_sizes(self.sizes, -1))


def _is_apart(where: torch.device, tiles: int) -> bool:
    """Returns True if programs that make a block of scales each, one an SM, would leave half of the
    SMs' turns empty."""
    if not device.overlaps_launches(where):
        return False
    count = device.multiprocessor_count(where.index)
    return tiles < 0.53 * count * -(-tiles // count)


def gate_of_products(product: Callable, launch: Launch, order: int = 1) -> Callable:
    """The function that gated() returns, by products with gate and up, or with a weight that holds
    both in this order (1 or -1), and a launch of gate_launch(). biases: of gate and up, or None."""

    def run(codes, scales, weights, w_scales, z, s_z, biases):
        found = product(codes, scales, weights, w_scales)
        found = [y if b is None else y.add_(b) for y, b in zip(found, biases)]
        gate, up = found[0].chunk(2, 1)[::order] if len(found) == 1 else found
        launch(gate, up, z, s_z)

    return run


def gated(where: torch.device, M: int, K: int, N: int, e8m0: bool = False) -> Callable:
    """A function of (codes, scales, weights, their scales, z, its scales, biases of None) that
    writes silu(gate) * up in FP8 to z: by a kernel whose programs make a block of scales each, or,
    where these are too few, after products by narrower ones. e8m0: scales of the weights are."""
    if _is_apart(where, blocks_of(N)):
        # the sums are those of the other kernel
        product = Few(where, (M,), K, (N, N), whole=True, e8m0=e8m0)
        return gate_of_products(product, gate_launch(where, (M, N), (2 * N, 2 * N)))
    launch = _gate(where, M, K, N, tuning.lookup("hopper_fp8_few_gate", where, M=M, N=N))

    def run(codes, scales, weights, w_scales, z, s_z, _):
        w_scales = as_bytes(w_scales) if e8m0 else w_scales
        launch(*weights, codes, scales, *w_scales, z, s_z)

    return run


def _gate(where: torch.device, M: int, K: int, N: int, config: dict) -> Launch:
    pdl, rows = device.overlaps_launches(where), Map((N, K), (K, 1), (BLOCK, BLOCK))
    tokens = Map((padded(M), K), (K, 1), (_tokens(M), BLOCK))
    return Launch(
        few_gate_kernel, blocks_of(N), where, guarded=True, early=pdl,
        maps=(rows, Map((N, K), (K, 1), (BLOCK, BLOCK)), tokens),
        numbers=(M, padded(M)),
        constexprs=(N, K, _tokens(M), pdl),
        options=tuple((name, config[name]) for name in ("num_warps", "num_stages")),
    )  # fmt: skip
