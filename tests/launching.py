"""Triton without a GPU, for launches: its own binder finds the code, and stand-ins for its
launchers of several versions write down what they are given."""

import contextlib
import types

import torch
from conftest import submodule

CODE = ((1, 1, 0), None, None, None)  # packed metadata, launch metadata, hooks
CUDA = torch.device("cuda", 0)


class Run:
    """Launcher call of Triton 3.5 and 3.6: the last step takes the launcher's arguments."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, last):
        self.launch = last

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, False, False, None, None, *rest)


class PackedRun(Run):
    """Launcher call since Triton 3.7: the kernel's arguments in one tuple."""

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, *rest[:4], ["annotations"], b"iii", rest[4:])


class ScratchRun(Run):
    """Memory is allocated for every launch."""

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, torch.empty(1), *rest)


class OtherRun:
    """A launcher of a kind never seen."""

    def __init__(self, last):
        self.last = last

    def __call__(self, *everything):
        self.last(*everything)


def encode(descriptor, meta):
    """Stub of Triton's encoding of a tensor map."""
    return [("map", descriptor.base.data_ptr(), tuple(descriptor.strides)), *descriptor.shape]


def wrap(packed: bool):
    """Stub of triton.backends.nvidia.driver.wrap_handle_tensordesc of 3.6, or of 3.7 if packed."""

    def wrap_handle_tensordesc(launcher, signature, metas):
        kinds = [i for i, s in enumerate(signature.values()) if str(s).startswith("tensordesc")]
        if not kinds:
            return launcher

        def expanded(values):
            found = []
            for i, value in enumerate(values):
                found += encode(value, None) if i in kinds else [value]
            return found

        def inner(*args):
            if packed:
                return launcher(*args[:-1], tuple(expanded(args[-1])))
            base = len(args) - len(signature)
            return launcher(*args[:base], *expanded(args[base:]))

        return inner

    return wrap_handle_tensordesc


class Kernel:
    """A kernel of triton.jit that is bound as by Triton and never compiled.

    starts: (compiled, grid, stream, arguments in the end) of each start. bound: how often Triton's
    binder was asked.
    """

    def __init__(self, kernel, run=Run):
        self.kernel, self.run, self.packed = kernel, run, run is PackedRun
        self.arg_names, self.__name__ = kernel.arg_names, kernel.__name__
        self.codes, self.starts, self.bound, self.stream = {}, [], 0, 0

    def specialization(self, *args, **options):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime import jit

        backend, kernel = make_backend(GPUTarget("cuda", 90, 32)), self.kernel
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        return bind(*args, **options)[1]

    def warmup(self, *args, grid, **options):
        special = self.specialization(*args, **options)
        key = (repr(special), repr(options))
        if key not in self.codes:
            self.codes[key] = self._compiled(special)
        return self.codes[key]

    def __getitem__(self, grid):
        def start(*args, **options):
            self.bound += 1
            compiled = self.warmup(*args, grid=grid, **options)
            compiled.run(*grid, self.stream, compiled.function, *CODE, *args)
            return compiled

        return start

    def _compiled(self, special):
        signature = dict(zip(self.arg_names, [kind for kind, _ in special]))
        metas = [{} for kind in signature.values() if str(kind).startswith("tensordesc")]
        metadata = types.SimpleNamespace(
            tensordesc_meta=metas, global_scratch_size=0, profile_scratch_size=0
        )
        compiled = types.SimpleNamespace(
            function=len(self.codes), packed_metadata=CODE[0], metadata=metadata,
            src=types.SimpleNamespace(signature=signature), hash=repr(special),
        )  # fmt: skip

        def last(*step):
            values = step[-1] if self.packed else step[-self.ends(special) :]
            places = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values]
            self.starts.append((compiled, step[:3], step[3], places))

        launched = last if self.run is OtherRun else wrap(self.packed)(last, signature, metas)
        compiled.run = self.run(launched)
        return compiled

    def ends(self, special) -> int:
        """Number of arguments that the last step takes for the kernel."""
        if self.run is OtherRun:
            return len(special)
        ranks = [kind.count(",", 0, kind.index("]")) + 1 for kind, _ in special
                 if str(kind).startswith("tensordesc")]  # fmt: skip
        return len(special) + sum(ranks)


@contextlib.contextmanager
def started():
    """Launches inside, each (kernel, grid, numbers, constexprs, options, code, (maps, where the
    second tensor lies)); Triton's binder comes to the same code."""
    launch, found = submodule("runtime.launch"), []

    def note(one, tensors):
        maps = [m and (m.shape, m.strides, m.box, m.layout, m.kind) for m in one.maps]
        sizes = one.grid, one.numbers, one.constexprs, one.options
        second = None if tensors[1] is None else tensors[1].data_ptr()
        found.append((one.kernel, *sizes, one.key(tensors), (maps, second)))

    with launch.watched(note), launch.paranoid():
        yield found


@contextlib.contextmanager
def pretending(patch, packed: bool = False, devices: int = 1):
    """Launches on CUDA as far as they go without it."""
    launch, code = submodule("runtime.launch"), submodule("runtime.code")
    import triton.backends.nvidia.driver as nvidia

    state = types.SimpleNamespace(stream=0, device=0, entered=[])

    @contextlib.contextmanager
    def on(device):
        before, state.device = state.device, device.index
        state.entered.append(device)
        yield
        state.device = before

    active = types.SimpleNamespace(get_current_stream=lambda index: state.stream)
    patch.setattr(code, "driver", types.SimpleNamespace(active=active))
    patch.setattr(nvidia, "wrap_handle_tensordesc", wrap(packed))
    patch.setattr(launch, "on", on)
    patch.setattr(launch, "_codes", {})
    patch.setattr(torch.cuda, "device_count", lambda: devices)
    patch.setattr(torch.cuda, "current_device", lambda: state.device)
    yield state
