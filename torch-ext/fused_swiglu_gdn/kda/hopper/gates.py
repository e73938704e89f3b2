"""Raw gates of Kimi Delta Attention in few instructions, as exact as gdn/portable/gates.py."""

from ...gdn.portable.gates import LOG2_E
from ...runtime.gluon import gl, gluon

# log(1 + x) / x for x in [0, 1] by powers of x: off by 2e-7 of itself, in fp32
LOG1P = gl.constexpr(
    (
        0.9999999403953552, -0.4999949336051941, 0.3331909775733948, -0.2484297752380371,
        0.1910598874092102, -0.13663208484649658, 0.0782255083322525, -0.029504964128136635,
        0.005232625175267458,
    )
)  # fmt: skip


@gluon.jit
def exp2_short(x):
    """2^x, which is 0 where it is no normal number: one instruction."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return _reciprocal(1.0 + exp2_short(x * -LOG2_E))


@gluon.jit
def rate_of(A_log_ptr, hv):
    """exp(A_log) of a value head; 1 without A_log."""
    rate = 1.0
    if A_log_ptr is not None:
        rate = gl.exp(gl.load(A_log_ptr + hv).to(gl.float32))
    return rate


@gluon.jit
def raw_log_decay(a, rate, dt_bias_ptr, at, LOWER: gl.constexpr):
    """-rate softplus(a + dt_bias), or LOWER sigmoid(rate (a + dt_bias)); `at`: of dt_bias."""
    if dt_bias_ptr is not None:
        a += gl.load(dt_bias_ptr + at).to(gl.float32)
    if LOWER is not None:
        return LOWER * _reciprocal(1.0 + exp2_short(a * (-LOG2_E * rate)))
    x = exp2_short(gl.abs(a) * -LOG2_E)
    y = LOG1P[8]
    for i in gl.static_range(8):
        y = y * x + LOG1P[7 - i]
    return -rate * (gl.maximum(a, 0.0) + y * x)
