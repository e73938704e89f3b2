"""Latent attention of a few tokens: three or four launches, by shapes alone.

The slots of each sequence are cut into parts that fill the device; their size follows from the
length on the device, as in decode.py.
"""

from typing import Callable, NamedTuple, Optional

import torch

from ...fp8.call import as_bytes
from ...runtime import device, tuning
from ...runtime.cache import keep
from ...runtime.copies import on_copies
from ...runtime.dtypes import HALF
from ...runtime.launch import Launch, kind_of
from ...runtime.sizes import next_power_of_2
from ..call import LatentAttention, reads_fp8, rows_at_once
from .latent_kernels import (
    _absorb_kernel,
    _attend_kernel,
    _finish_kernel,
    _finish_parts_kernel,
)
from .latent_rope import prepare_latent_norm_rope  # noqa: F401
from .parts import combine_kernel

MAX_TOKENS, MAX_LATENT, MAX_ROTARY, MAX_PARTS = 8, 512, 128, 128
SHARED = 96 << 10  # bytes of shared memory that all GPUs have
FILLED = 1.1  # parts for which fewer, a power of two, are taken; over these
ABSORBED, COMBINED = 64, 16384  # channels of a program; and times parts
# of finish, by the tokens of a program: channels of a program, latent channels at a time, warps
FINISHED = {1: (16, 512, 8), 16: (32, 128, 4)}
# where it combines the parts: the least heads of one token over the multiprocessors; and constexprs
MANY = 0.75
IN_ONE = {"BLOCK_P": 16, "AT_ONCE": 2, "BLOCK_V": 128, "num_warps": 16}


class Form(NamedTuple):
    """A kernel over the parts of the slots."""

    kernel: object
    block_r: int  # rows of queries
    block_n: int  # slots
    values: dict  # constexprs of its own, and options
    halves: int  # of absorbed queries: 1, which is rounded, or 2, a high and a low one
    # of kernels that read by TMA: their tensor maps, of the queries, of which there are two, too
    maps: Optional[Callable] = None


def takes(call: LatentAttention) -> bool:
    """True for up to 8 tokens in fp16 or bf16, with C 16 to 512 and R 16 to 128, powers of two."""
    q, latents, rotated, weight, scale, _, mask, (N, _) = call
    (B, T, H, _), C, R = q.shape, latents.shape[3], rotated.shape[3]
    return (
        q.dtype in HALF
        and 0 < T <= MAX_TOKENS
        and B * H > 0
        and 0 < N
        and weight.shape[0] > H * N
        and (scale is None or reads_fp8(q.device, N, weight.shape[0] // H - N))
        and 16 <= C <= MAX_LATENT
        and 16 <= R <= MAX_ROTARY
        and C & (C - 1) == R & (R - 1) == 0
        and latents.stride()[2:] == (C, 1)
        and rotated.stride()[2:] == (R, 1)
        and (mask is None or mask.dtype != torch.float64)
    )


def form_of(call: LatentAttention) -> Form:
    """A form of the rows of queries as rows of products, for every GPU."""
    where, C, R = call.q.device, call.latents.shape[3], call.rotated.shape[3]
    config = tuning.lookup("portable_latent_attention", where, C=C)
    rows = call.q.shape[1] * call.q.shape[2]
    block_r, warps = (16, 4) if rows <= 16 else (config["BLOCK_R"], config["num_warps"])
    warps = min(warps, 4) if device.is_amd(where) else warps  # whose registers 8 would not hold
    values = {"BLOCK_N": config["BLOCK_N"], "STAGES": config["num_stages"], "num_warps": warps,
              "PDL": device.overlaps_launches(where)}  # fmt: skip
    shared = 2 * (block_r * (2 * C + R) + config["BLOCK_N"] * (C + R))
    return Form(_attend_kernel, block_r, config["BLOCK_N"], values, 2 if shared <= SHARED else 1)


def prepare_latent_attention(call: LatentAttention) -> Optional[Callable]:
    """(q, latents, rotated, weight, cache_seqlens, mask) -> y [B, T, H, V]."""
    return prepared(call, form_of) if takes(call) else None


def prepared(call: LatentAttention, form_of: Callable) -> Callable:
    weights = call.weight, call.weight_scale
    if token_step(call.q) is None or not all([w is None or w.is_contiguous() for w in weights]):

        def copied(q, latents, rotated, *more):
            weights = [w if w is None else w.contiguous() for w in more[:2]]
            return q.contiguous(), latents, rotated, *weights, *more[2:]

        return on_copies(lambda call: prepared(call, form_of), call, copied)
    kind, options, made = type(call), call.options, {}

    def resized(*tensors):
        form = form_of(kind(*tensors, options))  # it may be another one for another size
        launches = made.get(form.block_r)
        if launches is None:
            launches = made[form.block_r] = Launches(kind(*tensors, options), form)
        B, T, H, V = launches.shape
        attend, finish, size = launches.at(*tensors)

        def run(q, latents, rotated, weight, scale, cache_seqlens, mask):
            (scale,) = as_bytes((scale,))
            qa, y = q.new_empty(B, T, H, launches.width), q.new_empty(B, T, H, V)
            parts = q.new_empty(size, dtype=torch.float32)
            launches.absorb(q, weight, scale, qa)
            attend(qa, latents, rotated, cache_seqlens, mask, parts)
            finish(parts, cache_seqlens, (weight, scale), None, y)
            return y

        run.resized = resized
        return run

    return resized(*call.tensors)


def token_step(q: torch.Tensor) -> Optional[int]:
    """The stride of the tokens of q [B, T, H, D], or None if they have not one, or heads of a token
    do not follow each other."""
    B, T, _, D = q.shape
    row, step = q.stride(0), q.stride(1)
    if q.stride()[2:] != (D, 1) or B > 1 and T > 1 and row != T * step:
        return None
    return step if T > 1 else row


class Launches:
    """The launches of calls that differ in S and in strides of rows.

    new: slots that the call fills beyond cache_seqlens.
    """

    def __init__(self, call: LatentAttention, form: Form, new: int = 0):
        q, latents, rotated, weight, weight_scale, cache_seqlens, _, (N, scale) = call
        B, T, H, D = q.shape
        C, R = latents.shape[3], rotated.shape[3]
        V = weight.shape[0] // H - N
        self.form, self.device, self.dtype, self.shape = form, q.device, q.dtype, (B, T, H, V)
        self.scale2, self.B, self.rows, self.C, self.R = scale * 1.4426950408889634, B, T * H, C, R
        many = cache_seqlens is not None and cache_seqlens.ndim > 0
        self.step = cache_seqlens.stride(0) if many else 0
        self.pdl = device.overlaps_launches(q.device)
        M, self.new, self.width = B * T, new, form.halves * C + R
        self.sizes = sizes = {"H": H, "N": N, "V": V, "C": C, "PDL": self.pdl}
        BLOCK_M, BLOCK_C = min(64, max(16, next_power_of_2(M))), min(ABSORBED, C)
        BLOCK_K = max(16, min(64, next_power_of_2(N)))
        if weight_scale is not None:
            BLOCK_K = rows_at_once(N, V)
        self.tiles = {
            "R": R, "HALVES": form.halves, "BLOCK_M": BLOCK_M, "BLOCK_C": BLOCK_C,
            "BLOCK_K": BLOCK_K,
        }  # fmt: skip
        self.programs = -(-M // BLOCK_M) * H * (C // BLOCK_C + 1)  # of absorb
        few = 1 if M <= 4 else 16  # tokens that share what is read of the weight in `finish`
        finished, at_once, warps = FINISHED[few]
        if weight_scale is not None:
            finished = min(finished, BLOCK_K)
        self.absorb = self.launch(
            _absorb_kernel, self.programs, (M, token_step(q)), **sizes, **self.tiles
        )
        self.finish = self.launch(
            _finish_kernel, -(-M // few) * H * -(-V // finished), (M,), **sizes, NEW=new,
            BLOCK_M=few, BLOCK_V=finished, BLOCK_C=min(at_once, C), num_warps=warps,
        )  # fmt: skip
        sms = device.multiprocessor_count(self.device.index)
        self.in_one = M == 1 and H >= MANY * sms
        self.made: dict = {}  # by the parts' constexpr and the kinds of what varies

    def launch(self, kernel, programs: int, numbers: tuple, maps: tuple = (), **values) -> Launch:
        values = {"num_warps": 4, **values}
        return Launch(
            kernel, programs, self.device, maps=maps, numbers=numbers, guarded=True,
            early=self.pdl, **values,
        )  # fmt: skip

    def at(self, q, latents, rotated, weight, weight_scale, cache_seqlens, mask) -> tuple:
        """(launch over the parts, function that makes y of them, elements of the parts)."""
        form, B, S, C, R = self.form, self.B, latents.shape[2], self.C, self.R
        tiles = -(-self.rows // form.block_r)
        splits = self.count_parts(B * tiles, -(-S // form.block_n))
        mask_steps = (0, 0, 0)
        if mask is not None:
            steps = zip((0, 2, 3), mask.shape[::2] + mask.shape[3:])
            mask_steps = tuple([mask.stride(dim) if size > 1 else 0 for dim, size in steps])
        c_step, r_step = (x.stride(0) if B > 1 else 0 for x in (latents, rotated))
        numbers = (c_step, r_step, mask_steps, self.step, B, S, splits, self.scale2)
        maps = form.maps and form.maps(self.dtype, B, S, self.rows, C, R, (c_step, r_step))
        rest = (1, splits) if self.in_one else (self.step, B, S, splits)
        parts = next_power_of_2(splits)
        key = (parts, kind_of(numbers))
        known = self.made.get(key)
        if known is None:
            attend = self.launch(
                form.kernel, B * tiles * splits, numbers, maps or (), H=self.shape[2], C=C, R=R,
                BLOCK_R=form.block_r, ROWS=self.rows, NEW=self.new, HALVES=form.halves,
                **form.values,
            )  # fmt: skip
            last = (self.finish_parts if self.in_one else self.combine)(parts, rest)
            keep(self.made, key, (attend, last))
        else:
            attend, last = known[0].at(numbers, maps), known[1].at(rest)
            attend.grid = (B * tiles * splits, 1, 1)
        if maps:
            by_maps, attend = attend, lambda q, *more: by_maps(q, q, *more)

        def finish(parts, cache_seqlens, weight, grown, y):  # weight: with its scale
            if self.in_one:
                return last(parts, *weight, grown, y)
            o = y.new_empty(B * self.rows * C, dtype=torch.float32)
            last(parts, cache_seqlens, o)
            self.finish(o, *weight, grown, y)

        return attend, finish, B * self.rows * splits * (C + 2)

    def count_parts(self, programs: int, blocks: int) -> int:
        """Parts of the slots that fill the device, by the programs of one part. 64 and not 66: as a
        kernel that combines them has room for a power of two."""
        most = min(device.multiprocessor_count(self.device.index) // programs, MAX_PARTS)
        least = next_power_of_2(most + 1) // 2
        return max(1, min(least if most <= least * FILLED else most, blocks))

    def finish_parts(self, parts: int, numbers: tuple) -> Launch:
        values = {**self.sizes, **IN_ONE, "NEW": self.new, "PARTS": parts}
        values["BLOCK_P"] = min(values["BLOCK_P"], parts)
        if device.is_amd(self.device):
            values["num_warps"] //= 2  # whose warps have 64 threads
        programs = self.rows * -(-self.shape[3] // values["BLOCK_V"])
        return self.launch(_finish_parts_kernel, programs, numbers, **values)

    def combine(self, parts: int, numbers: tuple) -> Launch:
        rows, C = self.B * self.rows, self.C
        sms = device.multiprocessor_count(self.device.index)
        block = min(C, COMBINED // parts if rows >= sms else 64)
        return self.launch(
            combine_kernel, rows * (C // block), numbers, D=C, PARTS=parts, ROWS=self.rows,
            NEW=self.new, BLOCK_N=self.form.block_n, BLOCK_D=block, PDL=self.pdl,
        )  # fmt: skip
