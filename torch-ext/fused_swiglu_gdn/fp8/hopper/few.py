"""Products of up to MOST tokens in FP8, of several weights in one launch, and MLPs in a few.

A weight of few rows has too few tiles for a whole GPU: parts of K are then programs of their own,
added up in order by a second launch. How K is cut goes by the weights, so a token has the same bits
beside any others, up to MOST.
"""

import functools
import math
from typing import Callable, Optional, Tuple

import torch

from ...projection.call import MAX_WEIGHTS
from ...projection.portable.project import add_parts_kernel
from ...runtime import device, tuning
from ...runtime.launch import Launch
from ...runtime.maps import Map
from ..call import BLOCK, MOST, Quantised, padded
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
        and weight.data_ptr() % 16 == 0
    )


def supports_few_fwd(codes: torch.Tensor, scales: torch.Tensor, M: int, *tensors) -> bool:
    """tensors: weights [N_i, K], then their scales."""
    half, K = len(tensors) // 2, codes.shape[1]
    if device.is_gpu(codes.device) and not device.has_wgmma(codes.device):
        return False
    pairs = list(zip(tensors[:half], tensors[half:]))
    here = all([w.device == codes.device and w.shape[0] > 0 for w in tensors[:half]])
    fits = 0 < M <= MOST and 1 <= half <= MAX_WEIGHTS and K > 0 and K % BLOCK == 0
    return fits and here and all([_lies_so(w, s, K) for w, s in pairs])


def supports_few_mlp_fwd(codes, scales, M, w_gate, w_up, w_down, s_gate, s_up, s_down) -> bool:
    N = w_gate.shape[0]
    return (
        N > 0
        and N % BLOCK == 0
        and w_up.shape == w_gate.shape
        and supports_few_fwd(codes, scales, M, w_gate, w_up, s_gate, s_up)
        and w_down.device == codes.device
        and w_down.shape[0] > 0
        and _lies_so(w_down, s_down, N)
    )


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


class _Few:
    """The product of M tokens with weights of some numbers of rows."""

    __slots__ = ("where", "M", "width", "parts", "missing", "product", "add")

    def __init__(self, where: torch.device, M: int, K: int, rows: Tuple[int, ...]):
        self.where, self.M, self.width = where, M, sum(rows)
        self.missing = MAX_WEIGHTS - len(rows)
        config = tuning.lookup("hopper_fp8_few", where, M=M)
        height, blocks, pdl = config["ROWS"], K // BLOCK, device.overlaps_launches(where)
        tiles = sum([-(-n // height) for n in rows])
        self.parts = parts_of_k(where, rows, blocks)
        steps = math.gcd(config["STEPS"], -(-blocks // self.parts), blocks)
        early = (("launch_pdl", True),) if pdl else ()
        self.product = Launch(
            few_kernel, (tiles, self.parts), where,
            numbers=(M, self.width, padded(M), *rows, *(0,) * self.missing),
            constexprs=(K, _tokens(M), height, steps, self.parts, pdl),
            options=(
                ("num_warps", config["num_warps"]), ("num_stages", config["num_stages"]), *early
            ),
        )  # fmt: skip
        size = M * self.width
        self.add = Launch(
            add_parts_kernel, -(-size // 512), where, numbers=(size,),
            constexprs=(self.parts, 512, pdl), options=early,
        )  # fmt: skip

    def __call__(self, x: Quantised, weights: tuple, scales: tuple) -> torch.Tensor:  # [M, N]
        more = self.missing
        tensors = (*x, *weights, *weights[:1] * more, *scales, *scales[:1] * more)
        y = torch.empty((self.M, self.width), dtype=torch.bfloat16, device=self.where)
        if self.parts == 1:
            self.product(*tensors, y)
            return y
        parts = torch.empty((self.parts, y.numel()), dtype=torch.float32, device=self.where)
        self.product(*tensors, parts)
        self.add(parts, y)
        return y


_few = functools.lru_cache(maxsize=1024)(_Few)


def _plan(where: torch.device, M: int, tensors: tuple) -> Callable:
    half = len(tensors) // 2
    product = _few(where, M, tensors[0].shape[1], tuple([w.shape[0] for w in tensors[:half]]))

    def plan(codes, scales, M, *tensors) -> Optional[torch.Tensor]:
        bits = 0
        for w in tensors[:half]:
            bits |= w.data_ptr()
        if bits & 15:
            return None
        return product(Quantised(codes, scales), tensors[:half], tensors[half:])

    return plan


def plan_few_fwd(codes: torch.Tensor, scales: torch.Tensor, M: int, *tensors) -> Callable:
    """few_fwd for all calls like this one, from their tensors; it returns None where a weight does
    not begin at a multiple of 16 bytes."""
    return _plan(codes.device, M, tensors)


def few_fwd(
    codes: torch.Tensor,  # [P, K] e4m3
    scales: torch.Tensor,  # [P, K / 128]
    M: int,
    *tensors: torch.Tensor,  # weights [N_i, K], then their scales [ceil(N_i / 128), K / 128]
) -> torch.Tensor:  # [M, N] bf16: x W_i^T side by side
    return _plan(codes.device, M, tensors)(codes, scales, M, *tensors)


@functools.lru_cache(maxsize=1024)
def _gate(where: torch.device, M: int, K: int, N: int) -> Launch:
    config = tuning.lookup("hopper_fp8_few_gate", where, M=M)
    pdl, rows = device.overlaps_launches(where), Map((N, K), (K, 1), (BLOCK, BLOCK))
    early = (("launch_pdl", True),) if pdl else ()
    return Launch(
        few_gate_kernel, N // BLOCK, where, maps=(rows, Map((N, K), (K, 1), (BLOCK, BLOCK))),
        numbers=(M, padded(M)),
        constexprs=(N, K, _tokens(M), pdl),
        options=(
            ("num_warps", config["num_warps"]), ("num_stages", config["num_stages"]), *early
        ),
    )  # fmt: skip


def plan_few_mlp_fwd(codes, scales, M, w_gate, w_up, w_down, s_gate, s_up, s_down) -> Callable:
    """few_mlp_fwd for all calls like this one, from their tensors; None as above."""
    (N, K), where, P = w_gate.shape, codes.device, padded(M)
    gate, down = _gate(where, M, K, N), _few(where, M, N, (w_down.shape[0],))

    def plan(codes, scales, M, w_gate, w_up, w_down, s_gate, s_up, s_down):
        if (w_gate.data_ptr() | w_up.data_ptr() | w_down.data_ptr()) & 15:
            return None
        z = torch.empty((P, N), dtype=torch.float8_e4m3fn, device=where)
        z_scales = torch.empty((N // BLOCK, P), dtype=torch.float32, device=where)
        gate(w_gate, w_up, codes, scales, s_gate, s_up, z, z_scales)
        return down(Quantised(z, z_scales), (w_down,), (s_down,))

    return plan


def few_mlp_fwd(
    codes: torch.Tensor,  # [P, K] e4m3
    scales: torch.Tensor,  # [P, K / 128]
    M: int,
    w_gate: torch.Tensor,  # [N, K] e4m3
    w_up: torch.Tensor,
    w_down: torch.Tensor,  # [H, N]
    s_gate: torch.Tensor,  # [N / 128, K / 128]
    s_up: torch.Tensor,
    s_down: torch.Tensor,  # [ceil(H / 128), N / 128]
) -> torch.Tensor:  # [M, H] bf16
    args = (codes, scales, M, w_gate, w_up, w_down, s_gate, s_up, s_down)
    return plan_few_mlp_fwd(*args)(*args)
