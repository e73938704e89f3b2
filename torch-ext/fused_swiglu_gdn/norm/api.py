"""RMSNorm, with the residual added before or after it."""

from typing import Optional, Tuple, Union

from torch import Tensor

from .ops import RMS_NORM


def rms_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    casting_mode: str = "llama",
    offset: float = 0.0,
    residual: Optional[Tensor] = None,
    after: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """weight * x / sqrt(mean(x ** 2) + eps): RMSNorm (arXiv:1910.07467) over the last dimension.

    The computation is in fp32, rounded where transformers' models round:

    - "llama" (Llama, Mistral, Qwen2, Qwen3): n = (x / sqrt(..)).to(x.dtype); y = weight * n.
    - "gemma" (Gemma and Qwen3.5 with offset=1.0, OLMo with offset=0.0):
      y = (x / sqrt(..) * (offset + weight)).to(x.dtype), the weight in fp32.

    Autocast does not change the result. Differentiable in x, weight and residual; the gradient
    saves x (or the sum) and one number a row.

    Args:
        x: [..., D]; fp32, bf16 or fp16; any strides (rows of a wider tensor need no copy).
        weight: [D] or None, of any of these dtypes.
        eps: added to the mean square.
        casting_mode: "llama" or "gemma".
        offset: added to the weight, at least 0; with "gemma" alone.
        residual: [..., D] as x, added to x first; the sum is rounded to their dtype.
        after: the residual is added to y instead, which is rounded first: OLMo-2's layers.

    Returns:
        y [..., D] in the dtype of x; with "llama" in what torch makes of weight * x, so fp32 of
        an fp32 weight. With a residual (y, x + residual), or y + residual with after=True.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> x, residual = torch.randn(2, 3, 5, 16).unbind(0)
        >>> y, residual = rms_norm(x, torch.ones(16), residual=residual)
        >>> y.shape, residual.shape
        (torch.Size([3, 5, 16]), torch.Size([3, 5, 16]))
    """
    tensors = (x, weight, residual)
    y, total, _ = RMS_NORM(tensors, (eps, casting_mode, offset, after))
    return y if residual is None or after else (y, total)
