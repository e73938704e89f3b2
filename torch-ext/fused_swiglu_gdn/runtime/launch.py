"""Launches kernels; every launch of the package goes through `Launch`.

`kernel[grid](...)` looks at every argument to find the compiled code again, `compiled[grid](...)`
prepares for launch hooks: 34 us a launch of 19 arguments (H200, Triton 3.6.0), more than a decoding
kernel runs. A `Launch` keeps the compiled code for each specialisation key it has met and starts it
by the last function that Triton's own launcher calls. Triton's launch hooks (its profiler Proton
has some) see only the first launch. If a Triton launches in another way, that way is taken.

The specialisation key (`kind`) is all that Triton compiles for: dtypes, which arguments are None,
which addresses are multiples of 16, which scalars are 1 or multiples of 16 or need 64 bits, the
boxes of tensor maps. It is computed from the arguments of each call.
"""

import contextlib
import operator
import threading
from typing import Any, Callable, Dict, Iterator, Optional, Union

import torch

from .cache import keep
from .code import ROCM, Code
from .device import on
from .maps import RawPointer

Argument = Optional[Union[torch.Tensor, RawPointer]]

# a * b + c is rounded once, whatever a Triton's default is, where a kernel does not ask for less
FUSED = ("enable_fp_fusion", True)

_codes: Dict[tuple, Code] = {}  # by kind: Launch.key
_watches: Dict[Optional[int], tuple] = {}  # by thread; None: of all of them
_lock = threading.Lock()


def steps(x: torch.Tensor) -> tuple:
    """Strides of B, T and heads of x [B, T, heads, ..].

    The stride of a batch of one is given as 0: it means nothing, but would make a specialisation of
    its own for each T.
    """
    batch, token, head = x.stride()[:3]
    return (batch if x.shape[0] > 1 else 0, token, head)


def aligned(*tensors: torch.Tensor) -> bool:
    """True if all begin at a multiple of 16 bytes, which is not among the facts of a call."""
    bits = 0
    for x in tensors:
        bits |= x.data_ptr()
    return bits % 16 == 0


def by_alignment(make: Callable, call, *places: int) -> Callable:
    """A function of the tensors of all calls like this one.

    That is make(call) of calls in which the tensors at these places all begin at multiples of 16
    bytes, and another make(call) of those in which some do not.
    """
    made: Dict[bool, Callable] = {}
    pick, kind, options = operator.itemgetter(*places), type(call), call.options

    def run(*tensors):
        alike = aligned(*pick(tensors))
        if alike not in made:
            made[alike] = make(kind(*tensors, options))
        return made[alike](*tensors)

    return run


def kind_of(number) -> Any:
    """Specialisation key of a scalar or a tuple of them, at least as fine as Triton's."""
    if number.__class__ is int:
        if number == 1:
            return 1
        wide = 0 if -(2**31) <= number < 2**31 else 4 if number < 2**63 else 8
        return wide + (2 if number % 16 else 3)
    return tuple(map(kind_of, number)) if isinstance(number, tuple) else number.__class__


def _kind_of_pointer(x: Argument) -> Any:
    if x is None:
        return None
    if ROCM and isinstance(x, torch.Tensor):  # which compiles for offsets of 32 bits, too
        return (x.dtype, x.data_ptr() % 16, x.untyped_storage().nbytes() < 2**31)
    return (x.dtype, x.data_ptr() % 16 == 0)


class Launch:
    """A kernel at one grid on one device.

    The kernel's parameters are tensor maps, pointers, scalars (or tuples of them) and constexprs,
    in this order. A Launch is called with a tensor or None for each map and each pointer.

    maps: a Map, or None, for each of the first tensors. numbers: the scalars. options:
    ("num_warps", 4) and the like. guarded: the caller has found this Launch in a CallCache by the
    tensors' facts, so that their dtypes need no second check; addresses still do. early: the kernel
    may begin before the one launched before it has ended; it waits for that one itself. named:
    constexprs by the names of the kernel's parameters, and options by theirs.
    """

    __slots__ = (
        "kernel", "grid", "device", "maps", "numbers", "constexprs", "options", "guarded", "rest",
        "alone", "index", "fixed", "types", "code", "latest",
    )  # fmt: skip

    def __init__(
        self, kernel, grid: Union[int, tuple], device: torch.device, *, maps: tuple = (),
        numbers: tuple = (), constexprs: tuple = (), options: tuple = (), guarded: bool = False,
        early: bool = False, **named: Any,
    ):  # fmt: skip
        if named:
            constexprs = tuple([named.pop(name) for name in kernel.arg_names if name in named])
            options = tuple(named.items())
        self.kernel, self.device, self.index, self.maps = kernel, device, device.index, maps
        self.grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        self.numbers, self.constexprs = numbers, constexprs
        self.options = (FUSED, *options, *((("launch_pdl", True),) if early else ()))
        self.guarded, self.rest = guarded, (*numbers, *constexprs)
        self.alone = device.type != "cuda" or torch.cuda.device_count() == 1
        self.fixed: Optional[tuple] = None  # what all calls have in common of their kinds
        # of the kind that is started without a look into the table: dtypes (all addresses are
        # multiples of 16) and code; the last addresses of maps, with what the launcher takes
        self.types: Optional[list] = None
        self.code: Any = None
        self.latest: tuple = ([], [])

    def __call__(self, *tensors: Argument) -> None:
        if _watches and any([watch(self, tensors) for watch in watches_here()]):
            return
        if self.types is None:
            return self._find_and_start(tensors)
        places, bits = [], 0
        for x in tensors:
            if x is not None:
                x = x.data_ptr()
                bits |= x
            places.append(x)
        if bits & 15 or not (self.guarded or self._has_types(tensors)):
            return self._find_and_start(tensors)
        if not self.alone and torch.cuda.current_device() != self.index:
            return self._find_and_start(tensors)
        code = self.code
        stream = code.stream_of(self.index)
        if self.maps:
            maps = len(self.maps)
            before, mapped = self.latest
            if before != places[:maps]:
                mapped = self._mapped(code, tensors)
                self.latest = places[:maps], mapped
            places = mapped + places[maps:]
        if code.packed:
            code.step(*self.grid, stream, *code.middle, (*places, *self.rest))
        else:
            code.step(*self.grid, stream, *code.middle, *places, *self.rest)

    def at(self, numbers: tuple, maps: Optional[tuple] = None) -> "Launch":
        """Returns the launch with other scalars, each of the same kind (kind_of), and maps, each
        with the same box."""
        other = Launch.__new__(Launch)
        other.kernel, other.grid, other.maps = self.kernel, self.grid, maps or self.maps
        other.device, other.index, other.alone = self.device, self.index, self.alone
        other.constexprs, other.options, other.guarded = (
            self.constexprs, self.options, self.guarded
        )  # fmt: skip
        other.fixed, other.types, other.code = self.fixed, self.types, self.code
        other.latest, other.numbers = ([], []) if maps else self.latest, numbers
        other.rest = (*numbers, *self.constexprs)
        return other

    def _has_types(self, tensors: tuple) -> bool:
        return self.types == [None if x is None else x.dtype for x in tensors]

    def _find_and_start(self, tensors: tuple) -> None:
        """Starts the code found in the table; the first call of a key goes through Triton."""
        if 0 in self.grid:
            return
        with on(self.device):
            key = self.key(tensors)
            code = _codes.get(key)
            if code is None:
                code = self._first(key, tensors)
            else:
                self._start(code, tensors)
        if self.types is None and code is not None and code.step is not None and not ROCM:
            if all(x is None or x.data_ptr() % 16 == 0 for x in tensors):
                self.code = code
                self.types = [None if x is None else x.dtype for x in tensors]

    def key(self, tensors: tuple) -> tuple:
        """The specialisation key of a call."""
        if self.fixed is None:
            # 1, 1.0 and True are equal, but not the same to a kernel
            types = tuple(map(type, self.constexprs))
            boxes = tuple([m and (m.kind, *m.box, *m.layout) for m in self.maps])
            numbers = kind_of(self.numbers)
            values = (self.constexprs, types, self.options, numbers, boxes)
            self.fixed = (id(self.kernel), self.index, values)  # a Code keeps its kernel
        maps = len(self.maps)
        described = [None if x is None else x.dtype for x in tensors[:maps]]
        return (self.fixed, *described, *map(_kind_of_pointer, tensors[maps:]))

    def arguments(self, tensors: tuple) -> tuple:
        """The kernel's arguments in the form that Triton takes."""
        maps = len(self.maps)
        pairs = zip(self.maps, tensors)
        described = [None if m is None or x is None else m.described(x) for m, x in pairs]
        return (*described, *tensors[maps:], *self.rest)

    def _first(self, key: tuple, tensors: tuple) -> Optional[Code]:
        arguments = self.arguments(tensors)
        compiled = self.kernel[self.grid](*arguments, **dict(self.options))
        if compiled is None:  # the interpreter compiles nothing
            return None
        at = [x.data_ptr() if isinstance(x, (torch.Tensor, RawPointer)) else x for x in arguments]
        return keep(_codes, key, Code(self.kernel, compiled, self.grid, tuple(at)))

    def _start(self, code: Code, tensors: tuple) -> None:
        stream, maps = code.stream_of(self.index), len(self.maps)
        places = [None if x is None else x.data_ptr() for x in tensors[maps:]]
        if code.step is None:
            described = self.arguments(tensors)[:maps]
            code.run(*self.grid, stream, *code.fixed, *described, *places, *self.rest)
            return
        values = (*self._mapped(code, tensors), *places, *self.rest)
        if code.packed:
            code.step(*self.grid, stream, *code.middle, values)
        else:
            code.step(*self.grid, stream, *code.middle, *values)

    def _mapped(self, code: Code, tensors: tuple) -> list:
        """The encoded tensor maps, as Triton's launcher takes them in the end."""
        found: list = []
        encoders = iter(code.encoders)
        for m, x in zip(self.maps, tensors):
            if m is None or x is None:
                found.append(None)
            else:
                found += m.encoded(x, *next(encoders))
        return found

    def kept(self, tensors: tuple) -> Optional[Code]:
        """The code that a call would start without Triton's binder, or None."""
        if self.types is not None and (self.guarded or self._has_types(tensors)):
            if all(x is None or x.data_ptr() % 16 == 0 for x in tensors):
                return self.code
        return _codes.get(self.key(tensors))


def watches_here() -> tuple:
    """Watches that see the launches of this thread."""
    return (*_watches.get(None, ()), *_watches.get(threading.get_ident(), ()))


def is_watched() -> bool:
    """True if a watch sees the launches of this thread."""
    return bool(_watches) and bool(watches_here())


@contextlib.contextmanager
def watched(watch: Callable[[Launch, tuple], bool], everywhere: bool = False) -> Iterator[None]:
    """Calls watch(launch, tensors) for each launch of this thread inside; a launch for which it
    returns True is skipped.

    everywhere: for those of all threads; autograd has one for each GPU.
    """
    key = None if everywhere else threading.get_ident()
    with _lock:
        _watches[key] = (*_watches.get(key, ()), watch)
    try:
        yield
    finally:
        with _lock:
            kept = list(_watches[key])
            kept.remove(watch)  # once: the same watch may be set around this one
            _watches[key] = tuple(kept)
            if not _watches[key]:
                del _watches[key]


def _compare(launch: Launch, tensors: tuple) -> bool:
    code = launch.kept(tensors)
    if code is not None and 0 not in launch.grid:
        with on(launch.device):
            options = dict(launch.options)
            bound = launch.kernel.warmup(*launch.arguments(tensors), grid=launch.grid, **options)
        # two threads that launch a kernel for the first time each compile it, to the same code
        same = bound is code.compiled or bound.hash == code.compiled.hash
        assert same, f"{launch.kernel.__name__}: not the code of this call"
    return False


def paranoid() -> contextlib.AbstractContextManager:
    """Binds each launch inside by Triton's binder as well, and asserts that the code is the same.

    For tests.
    """
    return watched(_compare, everywhere=True)
