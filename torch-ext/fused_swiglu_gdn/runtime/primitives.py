"""Triton helpers that kernels of more than one implementation share."""

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x, PTX: tl.constexpr):
    """1 / (1 + exp(-x)); exp2 takes two thirds of the instructions that exp does.

    PTX: uses four instructions and omits those that keep denormal numbers.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.f32 $0, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, $0; add.f32 $0, $0, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, $0;",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, PTX: tl.constexpr = False):
    """The activation of a gate, x and result fp32. PTX: as for _sigmoid, of silu alone.

    gelu_tanh: 0.5 x (1 + tanh(y)) = x sigmoid(2 y), y = sqrt(2/pi) (x + 0.044715 x^3).
    """
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "relu")
    if ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x)
    if ACTIVATION == "gelu_tanh":
        return x / (1.0 + tl.exp2(-2.302208198144325 * (x + 0.044715 * x * x * x)))
    if PTX:
        return x * _sigmoid(x, True)
    return x / (1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr, PTX: tl.constexpr = False):
    """The activation of a gate and its derivative, all fp32. PTX: as for _sigmoid.

    silu: s = sigmoid(x), (x s)' = s (1 + x (1 - s)); gelu_tanh is x sigmoid(2 y), as in activate.
    """
    if ACTIVATION == "relu":
        return activate(x, ACTIVATION), tl.where(x > 0.0, 1.0, 0.0)
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        inner = x
        slope = 1.0
    s = _sigmoid(inner, PTX)
    return x * s, s * (1.0 + x * slope * (1.0 - s))


@triton.jit
def exact_exp2(x):
    """2^x fp32 of x <= 0 fp64, right to half a unit in the last place or little more.

    exp2 is off by up to two, and on average to one side, and x in fp32 is itself off by several: a
    state that only decays is multiplied by the result once a chunk. 2^n is exact for a whole n; the
    polynomial is Cephes' for 2^f, |f| <= 1/2.
    """
    n = tl.floor(x + 0.5)
    f = (x - n).to(tl.float32)
    p = 1.535336188319500e-4 * f + 1.339887440266574e-3
    p = p * f + 9.618437357674640e-3
    p = p * f + 5.550332471162809e-2
    p = p * f + 2.402264791363012e-1
    p = p * f + 6.931472028550421e-1
    return (p * f + 1.0) * tl.exp2(n.to(tl.float32))


@triton.jit
def sequence_bounds(cu_ptr, n, T):
    """(first token, end) of packed sequence n, int64.

    Both are clamped to the T tokens of the call: the host has not checked the values of cu, and
    wrong ones must not make a kernel read or write out of bounds.
    """
    start = tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), T).to(tl.int64)
    stop = tl.minimum(tl.load(cu_ptr + n + 1), T).to(tl.int64)
    return start, tl.maximum(stop, start)


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, group):
    """(row, column) of a tile in grouped order: `group` rows of tiles at a time, for reuse in
    L2."""
    per_group = group * tiles_n
    first = (tile // per_group) * group
    rows = min(tiles_m - first, group)
    return first + (tile % per_group) % rows, (tile % per_group) // rows


@triton.jit
def after_predecessor(PDL: tl.constexpr):
    """If PDL, waits until all is there that the launch before this one writes, and lets the next
    one begin."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def either(first, first_ptr, second_ptr, NUMBERS: tl.constexpr):
    """first_ptr if `first` is true, else second_ptr.

    NUMBERS: select between addresses as integers, for Triton's compiler for AMD GPUs fails at a
    select of pointers.
    """
    if NUMBERS:
        chosen = tl.where(first, first_ptr.to(tl.int64), second_ptr.to(tl.int64))
        return chosen.to(first_ptr.dtype)
    else:
        return tl.where(first, first_ptr, second_ptr)
