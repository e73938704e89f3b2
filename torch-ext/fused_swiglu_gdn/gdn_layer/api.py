"""The parts of a layer around the gated delta rule: short convolution, gated norm, gate."""

from typing import Optional, Tuple, Union

from torch import Tensor, strided

from ..gdn.reference import common as gdn_common
from ..parallel.context import known_call
from ..runtime.checks import may_be_written
from . import checks
from .api_context import convolve_with_context, lengths_alone
from .ops import CONVOLUTION, CONVOLUTION_UPDATE, GATED_NORM


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: Optional[str] = None,
    *, seq_idx: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None, return_final_states: bool = False, cp_context=None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:  # fmt: skip
    """Depthwise causal convolution: y_t = act(bias + sum_w weight[:, w] * x_{t - W + 1 + w}).

    The interface of the causal-conv1d package (Dao-AILab), and of transformers.

    Args:
        x: [B, D, T]; fp32, bf16 or fp16; any strides (a transposed [B, T, D] needs no copy).
        weight: [D, W], W from 2 to 8; bias: [D] or None.
        activation: None, "silu" (or "swish").
        seq_idx: [B, T], int32 or int64: the sequence of each token; others are not read.
        cu_seqlens: [N + 1], the same for a batch of one by cumulative lengths.
        initial_states: [N, D, W - 1], the inputs before each sequence; zeros by default.
        return_final_states: also return the last W - 1 inputs of each sequence.
        cp_context: from build_cp_context, for sequences that are split among ranks: x has the
            tokens of this rank, states are those of its local segments, and cu_seqlens and seq_idx
            are not given.

    Returns:
        y [B, D, T], the dtype of x; with return_final_states also [N, D, W - 1].

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> x, weight = torch.randn(2, 8, 10), torch.randn(8, 4)
        >>> y = causal_conv1d_fn(x, weight, activation="silu")
        >>> y.shape
        torch.Size([2, 8, 10])
    """
    tensors = (x, weight, bias, seq_idx, cu_seqlens, initial_states)
    options = (activation, return_final_states)
    if cp_context is not None:
        run = known_call(cp_context, tensors, options)
        if run is not None:
            y, final = run(*tensors)
            return (y, final) if return_final_states else y
        lengths = lengths_alone(tensors, cp_context)
        if lengths is None:
            y, final = convolve_with_context(tensors, options, cp_context)
            return (y, final) if return_final_states else y
        tensors = (x, weight, bias, None, lengths, initial_states)
    y, final = CONVOLUTION(tensors, options)
    return (y, final) if return_final_states else y


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    *, conv_state_indices: Optional[Tensor] = None, num_accepted_tokens: Optional[Tensor] = None,
    cu_seqlens: Optional[Tensor] = None, null_index: int = -1, out: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """The next tokens of causal_conv1d_fn, with the inputs before them in `conv_state`.

    The interface of the causal-conv1d package (Dao-AILab), and of vLLM.

    Args:
        x: [B, D, T] or, for one token, [B, D]; fp32, bf16 or fp16; any strides.
        conv_state: [B, D, S], S at least W - 1: the latest inputs; updated in place; any strides.
        weight: [D, W], W from 2 to 8; bias: [D] or None.
        activation: None, "silu" (or "swish").
        conv_state_indices: [B], int32 or int64: rows of conv_state, which then is a pool [P, D, S].
            An index up to null_index skips the sequence: its outputs are zero and no row is read
            or written.
        num_accepted_tokens: [B], int32 or int64, for verifying drafts. A state then has at least
            W - 2 + T columns. With n of the tokens of the call before accepted, 1 to S - W + 2, the
            inputs before x are columns n - 1 to n + W - 3; this call leaves the latest W - 2 of
            them in the first columns, then its T tokens. After a prompt, whose W - 1 latest inputs
            are in the first columns, n is 1.
        cu_seqlens: [N + 1], for x of N sequences packed into a batch of one; states are N then.
        null_index: -1, or 0 for pools whose row 0 is a null slot, as in vLLM.
        out: the shape and dtype of x, any strides: y is written there, and `out` is returned. It
            shares no memory with the other tensors.

    Returns:
        y, the shape and dtype of x.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> weight, conv_state = torch.randn(8, 4), torch.zeros(2, 8, 3)
        >>> y = causal_conv1d_update(torch.randn(2, 8), conv_state, weight)
        >>> y.shape, bool(conv_state[..., -1].any())
        (torch.Size([2, 8]), True)

        Two drafts after a token, the second rejected; the next call has three tokens again:

        >>> pool, slots = torch.zeros(5, 8, 5), torch.tensor([3, 1])
        >>> for accepted in ([1, 1], [2, 2]):
        ...     y = causal_conv1d_update(
        ...         torch.randn(2, 8, 3), pool, weight, conv_state_indices=slots,
        ...         num_accepted_tokens=torch.tensor(accepted),
        ...     )
        >>> y.shape, [bool(row.any()) for row in pool]
        (torch.Size([2, 8, 3]), [False, True, False, True, False])
    """
    single = isinstance(x, Tensor) and x.ndim == 2 and x.layout is strided
    tokens = x.unsqueeze(-1) if single else x
    widens = single and isinstance(out, Tensor) and out.layout is strided
    room = out.unsqueeze(-1) if widens else out
    may_be_written(conv_state=conv_state, out=out)
    tensors = (
        tokens, conv_state, weight, bias, conv_state_indices, num_accepted_tokens, cu_seqlens, room,
    )  # fmt: skip
    y = CONVOLUTION_UPDATE(tensors, (activation, null_index))
    if out is not None:
        return out
    return y.squeeze(-1) if single else y


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, activation: str = "silu"
) -> Tensor:
    """weight * x / sqrt(mean(x ** 2) + eps) * act(gate): RMSNorm (arXiv:1910.07467) with a gate.

    Args:
        x, gate: [..., D]; fp32, bf16 or fp16. weight: [D].
        eps: added to the mean square.
        activation: "silu" (or "swish") or "sigmoid", of the gate.

    Returns:
        [..., D], the dtype of x; computed in fp32 and rounded once.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> x, gate = torch.randn(2, 3, 5, 16).unbind(0)
        >>> rms_norm_gated(x, gate, torch.ones(16)).shape
        torch.Size([3, 5, 16])
    """
    return GATED_NORM((x, gate, weight), (eps, activation))


def gated_delta_gate(a: Tensor, A_log: Tensor, dt_bias: Optional[Tensor] = None) -> Tensor:
    """g = -exp(A_log) * softplus(a + dt_bias), the natural-log decay of the gated delta rule
    (arXiv:2412.06464).

    Args:
        a: [..., HV], any floating dtype. A_log, dt_bias: [HV]; dt_bias may be None.

    Returns:
        [..., HV], fp32, at most 0.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> g = gated_delta_gate(torch.randn(2, 7, 4), A_log=torch.zeros(4), dt_bias=torch.zeros(4))
        >>> g.shape, bool((g <= 0).all())
        (torch.Size([2, 7, 4]), True)
    """
    checks.gated_delta_gate(a, A_log, dt_bias)
    return gdn_common.gated_delta_gate(a, A_log, dt_bias)
