"""Projections of one x with low-rank adapters: torch's products with the frozen weights, and round
them the kernels of kernels.py."""

from typing import Callable, Optional

import torch

from ...runtime.launch import Launch
from ...runtime.products import linear
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import MOST, Lora, LoraGradient
from .kernels import input_kernel, narrow_kernel, weights_kernel, wide_kernel

ROWS, STEP, WORDS = 64, 64, 64  # rows of a tile, its step along a sum, columns of a wide tile
MAX_RANK = 128  # an adapter's, rounded up to a power of two: what a tile holds


def _padded(values) -> tuple:
    """Four values; those of absent adapters are 0."""
    values = tuple(values)
    return values + (0,) * (MOST - len(values))


def _ends(sizes, step: int) -> tuple:
    """The first tile behind each of some widths; for absent ones that of the last."""
    found, end = [], 0
    for size in sizes:
        end += cdiv(size, step)
        found.append(end)
    return tuple(found + [end] * (MOST - len(found)))


def _is_served(x, weights: list, down: list, up: list) -> bool:
    dtype = x.dtype
    wide = [*down, *up]
    return (
        dtype in (torch.bfloat16, torch.float32)
        and x.numel() > 0
        and x.stride(1) == 1
        and all([w.dtype is dtype and w.stride(1) == 1 for w in weights])
        and all([t.dtype in (torch.float32, dtype) and t.is_contiguous() for t in wide])
        and max([len(a) for a in down]) <= MAX_RANK
        and max([t.numel() for t in wide]) < 2**31
        and max([len(b) for b in up]) * x.shape[0] < 2**46
    )


class _Group:
    """The sizes of a call, and launches of its kernels."""

    def __init__(self, x, down: list, up: list, scales: tuple, drops: tuple):
        self.where, self.count = x.device, len(down)
        (self.M, self.K), self.N = x.shape, [len(b) for b in up]
        self.ranks = [len(a) for a in down]
        self.R = max(16, next_power_of_2(max(self.ranks)))
        self.total = sum(self.ranks)
        self.scales = _padded(map(float, scales))
        self.kept = _padded([1.0 / (1.0 - p) for p in drops])  # what x has lost
        self.drops = _padded(map(float, drops))
        self.forms = (*_padded(self.ranks), self.R)

    def _launch(self, kernel, grid, numbers: tuple, constexprs: tuple, warps: int = 4) -> Launch:
        return Launch(
            kernel, grid, self.where, numbers=numbers, constexprs=constexprs,
            options=(("num_warps", warps),),
        )  # fmt: skip

    def narrow(self, sizes: list, strides: list, scales: tuple, up: bool) -> Launch:
        numbers = (self.M, _padded(sizes), _padded(strides), scales, self.drops, self.total)
        grid = (cdiv(self.M, ROWS), self.count)
        return self._launch(narrow_kernel, grid, numbers, (*self.forms, up, ROWS, STEP))

    def wide(self) -> Launch:
        ends = _ends(self.N, WORDS)
        numbers = (self.M, _padded(self.N), ends, self.scales, self.total)
        grid = (cdiv(self.M, ROWS), ends[-1])
        return self._launch(wide_kernel, grid, numbers, (*self.forms, ROWS, WORDS))

    def input(self) -> Launch:
        grid = (cdiv(self.M, ROWS), cdiv(self.K, WORDS))
        numbers = (self.M, self.K, self.kept, self.drops, self.total)
        return self._launch(input_kernel, grid, numbers, (*self.forms, ROWS, WORDS))

    def weights(self, sizes: list, strides: list, scales: tuple, up: bool) -> Launch:
        ends = _ends(sizes, WORDS)
        numbers = (self.M, _padded(sizes), _padded(strides), ends, scales, self.drops, self.total)
        return self._launch(weights_kernel, ends[-1], numbers, (*self.forms, up, STEP, WORDS))


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _there(tensors) -> list:
    return [t for t in tensors if t is not None]


def prepare_lora_fwd(call: Lora) -> Optional[Callable]:
    """(x, weights, biases, a, b, seed) -> (h, y of each)."""
    given, (scales, drops, known) = call.tensors[1:-1], call.options
    shape, x = call.x.shape[:-1], _rows(call.x)
    weights, _, down, up = [given[i : i + MOST] for i in range(0, len(given), MOST)]
    if not _is_served(x, _there(weights), _there(down), _there(up)):
        return None
    group = _Group(x, _there(down), _there(up), scales, drops)
    count, K, total = group.count, group.K, group.total
    narrow = group.narrow([K] * count, [x.stride(0)] * count, group.kept, False)
    wide, absent = group.wide(), (None,) * (MOST - count)

    def run(x, *given):
        (*given, seed), x = given, _rows(x)
        h = x.new_empty((x.shape[0], total), dtype=torch.float32)
        narrow(*(x,) * count, *absent, *given[2 * MOST : 3 * MOST], h, seed)
        ys = []
        for w, bias, N in zip(given, given[MOST:], group.N):
            y = x.new_empty((*shape, N))
            rows = y.view(-1, N)
            rows.copy_(w) if known else linear(x, w, bias, rows)
            ys.append(y)
        wide(*ys, *absent, *given[3 * MOST :], h)
        return (h, *ys)

    return run


def prepare_lora_bwd(call: LoraGradient) -> Optional[Callable]:
    """(x, h, seed, weights, a, b, dy) -> (dx, da of each, db of each)."""
    x, _, _, *given = call.tensors
    weights, down, up, dys = [given[i : i + MOST] for i in range(0, len(given), MOST)]
    scales, drops, known, of_x, of_a, of_b = call.options
    dys = _there(dys)
    if not _is_served(x, _there(weights), _there(down), _there(up)):
        return None
    if not all([dy.dtype is x.dtype and dy.stride(1) == 1 for dy in dys]):
        return None
    group = _Group(x, _there(down), _there(up), scales, drops)
    count, K, N = group.count, group.K, group.N
    strides = [dy.stride(0) for dy in dys]
    back = group.narrow(N, strides, group.scales, True)
    of_up = group.weights(N, strides, group.scales, True)
    of_down = group.weights([K] * count, [x.stride(0)] * count, group.kept, False)
    add, absent = group.input(), (None,) * (MOST - count)

    def run(x, h, seed, *given):
        weights, down, up = given[:count], given[MOST : 2 * MOST], given[2 * MOST : 3 * MOST]
        dys = given[3 * MOST :]
        dh = torch.empty_like(h)
        dx, das, dbs = None, [None] * count, [None] * count
        if of_x or of_a:
            back(*dys, *up, dh, None)
        if of_b:
            dbs = [torch.empty_like(b) for b in up[:count]]
            of_up(*dys, *dbs, *absent, h, None)
        if of_a:
            das = [torch.empty_like(a) for a in down[:count]]
            of_down(*(x,) * count, *absent, *das, *absent, dh, seed)
        if of_x:
            dx = torch.zeros_like(x) if known else torch.mm(dys[0], weights[0])
            for dy, w in zip(dys[1:count], () if known else weights[1:]):
                dx.addmm_(dy, w)
            add(dx, dh, *down, seed)
        return (dx, *das, *dbs)

    return run
