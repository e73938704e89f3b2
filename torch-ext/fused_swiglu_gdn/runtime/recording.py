"""Records the launches of a call without launching them and without a GPU, for tools and tests.

with recorded(Chip("NVIDIA_H200", (9, 0), 132)) as records:
    chunk_gated_delta_rule(*meta_tensors)
for record in records:
    triton.compile(record.source(), target=record.target, options=record.options)
"""

import contextlib
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

from . import device
from .device import pretending
from .launch import Launch, watched


class Record(NamedTuple):
    """One launch: the inputs of triton.compile for it, and its grid."""

    kernel: Any  # triton.jit's or gluon.jit's
    grid: tuple
    signature: Dict[str, Any]  # type of each parameter: "*bf16", "i32", "constexpr", "tensordesc<..
    constexprs: Dict[tuple, Any]  # by (place,), and (place, place in it) in a tuple
    attributes: Dict[tuple, list]  # likewise: [["tt.divisibility", 16]]
    options: Dict[str, Any]  # num_warps, num_stages, maxnreg, launch_pdl, as the launch gave them
    target: GPUTarget

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def source(self) -> ASTSource:
        """The source object that triton.compile takes."""
        described = (self.kernel, self.signature, self.constexprs, self.attributes)
        if not self.kernel.is_gluon():
            return ASTSource(*described)
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(*described)


def _target(chip: device.Chip) -> GPUTarget:
    if chip.capability is None:
        return GPUTarget("hip", chip.name, 64)
    major, minor = chip.capability
    return GPUTarget("cuda", 10 * major + minor, 32)


def record(launch: Launch, tensors: tuple, target: GPUTarget) -> Record:
    """The record of a launch, made by Triton's own binder."""
    kernel, options, backend = launch.kernel, dict(launch.options), make_backend(target)
    bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, special, given = bind(*launch.arguments(tensors), **options)
    _, *found = kernel._pack_args(backend, dict(options), bound, special, given)
    return Record(kernel, launch.grid, *found, options, target)


@contextlib.contextmanager
def recorded(chip: Optional[device.Chip] = None) -> Iterator[List[Record]]:
    """Records launches inside instead of running them.

    chip: the GPU that all tensors are assumed to be on, whatever their device; meta tensors will
    do. Without it tensors keep their device, and launches are recorded for Hopper.
    """
    records: List[Record] = []
    target = GPUTarget("cuda", 90, 32) if chip is None else _target(chip)

    def keep(launch: Launch, tensors: tuple) -> bool:
        if 0 not in launch.grid:
            records.append(record(launch, tensors, target))
        return True

    with watched(keep), pretending(chip or device.pretended):
        yield records
