"""How this folder launches: descriptors and pointers, then numbers, then constexprs."""

from typing import Optional

from triton.tools.tensor_descriptor import TensorDescriptor

from ...runtime.launch import prepare, specialized_on


def box(tensor, *block: int) -> TensorDescriptor:
    """The contiguous tensor in blocks of this shape; outside it, zeros are read."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _kind(operand):
    if isinstance(operand, TensorDescriptor):
        return operand.base.dtype, tuple(operand.block_shape)
    return specialized_on(operand)


def launch(
    kernel, size: int, operands: tuple, numbers: tuple, constexprs: tuple, num_warps: int,
    num_stages: Optional[int] = None, pdl: bool = False,
) -> None:  # fmt: skip
    """The kernel with `size` programs. Its parameters in their order: operands (descriptors,
    tensors or None, a tensor last), numbers that it does not specialize on, constexprs."""
    options = (("num_warps", num_warps),)
    if num_stages is not None:
        options += (("num_stages", num_stages),)
    if pdl:
        options += (("launch_pdl", True),)
    where = operands[-1].device
    prepared = prepare(kernel, constexprs, options, where, *map(_kind, operands))
    prepared.launch((size, 1, 1), *operands, *numbers)
