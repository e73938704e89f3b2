"""Context parallelism: one batch over several ranks, each with a part of its tokens."""

from collections.abc import Mapping
from typing import Optional, Sequence, Union

from torch import Tensor

from ..runtime.checks import are_flags, is_int
from . import checks
from .batch import Batch, shard
from .context import CpContext
from .exchange import agreed, size
from .layouts import fragments_of


def build_cp_context(
    cu_seqlens: Union[Tensor, Sequence[int]], group=None, conv1d_kernel_size: Optional[int] = None,
    cu_seqlens_cpu: Optional[Tensor] = None, use_tf32x3_affine_chain: Optional[bool] = None,
    *, layout: Union[str, Sequence] = "contiguous", batch_size: int = 1,
) -> CpContext:  # fmt: skip
    """Describes which tokens of a batch each rank holds (docs/parallel.md).

    The result is `cp_context=` of chunk_gated_delta_rule and causal_conv1d_fn, and is built once a
    batch. A stream of T tokens, packed sequences, is split among the P ranks of the group. Every
    rank calls this function with the same arguments. The interface is that of
    flash-linear-attention 0.6, which has the first two layouts.

    Args:
        cu_seqlens: [N + 1], integers: cumulative lengths of the sequences of the whole stream. On
            the CPU, or in a list: on a GPU they are copied to the host.
        group: a torch.distributed.ProcessGroup; all ranks by default.
        conv1d_kernel_size, use_tf32x3_affine_chain: accepted for callers of FLA, without effect.
        cu_seqlens_cpu: cu_seqlens on the CPU, which saves that copy.
        layout: "contiguous": rank r has tokens r T / P to (r + 1) T / P. "zigzag": blocks r and
            2 P - 1 - r of 2 P, which balances causal attention. "torch": as torch's
            context_parallel, "zigzag" if 2 P divides T and else torch.chunk. Or for each rank a
            list of its fragments (start, stop).
        batch_size: B > 1: the stream is B rows of T / B tokens, [B, T / B], and the layout is that
            of each row.

    Returns:
        CpContext: `shard(x, dim)` and `unshard(x, dim)`; `cu_seqlens`, `position_ids`, `tokens`,
        `starts_here`, `ends_here` and `sequences` of the local segments.

    Raises:
        ValueError: the lengths, batch_size or layout do not fit, or (with gloo, or with
            TORCH_DISTRIBUTED_DEBUG=INFO) differ between ranks.
        TypeError: an argument is of the wrong type.

    Example:
        >>> import torch.distributed as dist
        >>> if dist.is_initialized():  # in each process that torchrun has started
        ...     cp = build_cp_context([0, 30, 100], layout="zigzag")
        ...     x = cp.shard(torch.randn(1, 100, 8))  # the same tokens in all of them
        ...     assert x.shape[1] == cp.tokens and cp.unshard(x).shape[1] == 100
    """
    checks.is_group(group)

    def make() -> CpContext:
        if conv1d_kernel_size is not None:
            is_int("conv1d_kernel_size", conv1d_kernel_size, 1)
        are_flags(use_tf32x3_affine_chain=use_tf32x3_affine_chain)
        if cu_seqlens_cpu is None:
            values = checks.lengths("cu_seqlens", cu_seqlens, batch_size)
        else:
            checks.is_copy("cu_seqlens_cpu", cu_seqlens_cpu, "cu_seqlens", cu_seqlens)
            values = checks.lengths("cu_seqlens_cpu", cu_seqlens_cpu, batch_size)
        fragments = fragments_of(layout, values[-1] // batch_size, size(group))
        device = checks.device_of(cu_seqlens, group)
        return CpContext(values, group, fragments, batch_size, device)

    def facts(cp: CpContext) -> str:
        return f"{cp.lengths}, layout {cp.layout}, batch_size {cp.batch_size}"

    return agreed(make, facts, group, "build_cp_context: cu_seqlens and layout")


def shard_batch(batch: dict, group=None, *, layout: Union[str, Sequence] = "contiguous") -> dict:
    """Returns this rank's part of a model's batch, for a group of ranks that share every sequence.

    For a model of `kernelize(model, cp_group=group)`: `model(**shard_batch(batch, group))`. All
    ranks of the group pass the same batch. Labels are shifted before they are split, rows are
    padded at their end if the layout requires it, and positions are those in each sequence. The
    loss of a rank is the sum over its targets divided by the number of targets in the whole batch:
    the sum of these losses over the group is the loss of the batch.

    Args:
        batch: input_ids [B, T]; and, if present, labels [B, T]; position_ids [B, T], which begin a
            new sequence at each 0 and count on in it; cu_seqlens or cu_seq_lens_q [N + 1], of
            sequences packed into one row; attention_mask [B, T] with its zeros at the end of rows.
            Other tensors [B, T, ..] are split as well; the rest is passed through.
        group: a torch.distributed.ProcessGroup; all ranks by default.
        layout: of each row, as in build_cp_context. "zigzag" balances softmax attention.

    Returns:
        The batch with cp_context, position_ids, labels, shift_labels and num_items_in_batch.

    Raises:
        ValueError: something in the batch does not fit, or (with gloo, or with
            TORCH_DISTRIBUTED_DEBUG=INFO) differs between ranks.
        TypeError: batch is no dict.

    Example:
        >>> import torch, torch.distributed as dist
        >>> if dist.is_initialized():  # in each process that torchrun has started
        ...     ids = torch.randint(2, 90, (2, 100))
        ...     part = shard_batch({"input_ids": ids, "labels": ids}, layout="zigzag")
        ...     assert part["input_ids"].shape == part["labels"].shape
    """
    checks.is_group(group)

    def make() -> dict:
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch must be a dict, got {type(batch).__name__}")
        return shard(Batch(dict(batch)), group, size(group), layout)

    def facts(part: dict) -> str:
        cp = part["cp_context"]
        return f"{cp.lengths}, layout {cp.layout}, batch_size {cp.batch_size}"

    return agreed(make, facts, group, "shard_batch: sequences and layout")
