"""A bound of what a chunk keeps of the state, for cuts of long sequences (docs/kda.md)."""

from ...gdn.hopper.primitives import D
from ...gdn.portable.gates import LOG2_E
from ...runtime.gluon import gl, gluon
from .gates import raw_log_decay
from .levels import positions, tokens

# of numbers of tokens [4, 16]: a block a warp
ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
# of the largest of each token's eight channels of a lane [4, 2, 8, 4]
QUARTERS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1, 0, 0]],
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 2, 8, 4],
    )
)


@gluon.jit
def tokens_of_rows():
    """The token of a chunk that each number [4, 16] is of."""
    b = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, ROWS)), 1)
    return 16 * b + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, ROWS)), 0)


@gluon.jit
def _slowest_gates(g_smem, rate, dt_bias_ptr, hv, RAW: gl.constexpr, LOWER: gl.constexpr):
    """The largest gate of each token [4, 16]. Gates fall where raw ones rise."""
    _, _, _, d = positions()
    extreme = gl.full([4, 2, 8, 4], float("inf") if RAW else float("-inf"), gl.float32, QUARTERS)
    for p in range(4):
        x = tokens(g_smem.index(p)).to(gl.float32)
        if RAW and dt_bias_ptr is not None:
            x += gl.load(dt_bias_ptr + hv * D + 32 * p + d).to(gl.float32)
        x = x.reshape([4, 2, 8, 4, 8])
        x = gl.min(x, 4) if RAW else gl.max(x, 4)
        x = gl.convert_layout(x, QUARTERS, assert_trivial=True)
        extreme = gl.minimum(extreme, x) if RAW else gl.maximum(extreme, x)
    x = gl.min(extreme, 3) if RAW else gl.max(extreme, 3)
    x = gl.convert_layout(x.reshape([4, 16]), ROWS)
    return raw_log_decay(x, rate, None, 0, LOWER) if RAW else x


@gluon.jit
def store_decay(
    ptr, g_smem, beta, rest, rate, dt_bias_ptr, hv, RAW: gl.constexpr, LOWER: gl.constexpr
):
    """Stores log2 of a bound of the norm of a chunk's transition: a token's factor diag(exp g) (I -
    beta k k^T) stretches no vector by more than exp(max g) max(1, |1 - beta|) where |k| is at most
    1."""
    g = _slowest_gates(g_smem, rate, dt_bias_ptr, hv, RAW, LOWER)
    x = g * LOG2_E + gl.log2(gl.maximum(gl.abs(1.0 - beta), 1.0))
    gl.store(ptr, gl.sum(gl.sum(gl.where(tokens_of_rows() < rest, x, 0.0), 1), 0))
