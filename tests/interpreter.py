"""Kernels on the CPU, in Triton's interpreter: a pytest session of its own, because Triton reads
the setting when it is imported. A test file imports `test_in_the_interpreter`, and marks tests
`@interpreted` or, where they run on a GPU as well, `@both_ways`.

    python tests/interpreter.py [test_norm.py ..]   # runs these files, or all; writes INTERPRETED

INTERPRETED lists the kernels that each file launches: a session fails where it launches fewer, and
tests/repository/test_house.py where a portable kernel is in no list."""

import argparse
import dataclasses
import gc
import importlib
import inspect
import json
import math
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import numpy
import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="for a session of Triton's interpreter")
compiled = pytest.mark.skipif(INTERPRETING, reason="not for Triton's interpreter")
# of a test that runs kernels on `device`: once under the interpreter, once compiled on a GPU
wherever_kernels_run = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=interpreted),
        pytest.param("cuda", marks=[pytest.mark.gpu, compiled]),
    ],
)
# of a test of kernels: in the session of the interpreter it runs on the CPU, else on a GPU
both_ways = interpreted if INTERPRETING else pytest.mark.gpu
DEVICE = "cpu" if INTERPRETING else "cuda"
# a process that has imported what takes long, from which each session is forked
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["torch._dynamo", "triton.language", "triton.runtime.interpreter", "pytest", "interpreter"]
)


def where_kernels_run(device, monkeypatch, *operations):
    """For a fixture to yield from: the device, where kernels compute these operations."""
    if not (INTERPRETING or device.type == "cuda"):
        pytest.skip("needs a GPU or Triton's interpreter")
    if INTERPRETING:
        from conftest import submodule  # which the process that forks sessions does without

        dispatch = submodule("runtime.dispatch")
        monkeypatch.setattr(dispatch, "_folders", lambda *where: ("portable",))
    for operation in operations:
        operation.cache_clear()
    yield device
    for operation in operations:
        operation.cache_clear()


TESTS = Path(__file__).resolve().parent
INTERPRETED = TESTS / "interpreted.json"


@compiled
def test_in_the_interpreter(request) -> None:
    """The tests of the file that imports this one once more, under the interpreter."""
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(f"Triton 3.6's interpreter needs numpy below 2.4, got {numpy.__version__}")
    launched = launched_by(request.path)
    listed = json.loads(INTERPRETED.read_text()).get(request.path.name, [])
    gone = sorted(set(listed) - set(launched))
    assert not gone, f"no longer launched: {gone}; run python tests/interpreter.py"


def launched_by(path: Path) -> list:
    """Runs a file under the interpreter; returns the kernels of the package that it launched."""
    with tempfile.TemporaryDirectory() as folder:
        log, found = Path(folder, "log"), Path(folder, "launched.json")
        with pytest.MonkeyPatch.context() as patch:  # the server starts at the first call
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            process = _server.Process(target=_session, args=(str(path), str(log), str(found)))
            process.start()
        process.join()
        text = log.read_text()
        assert process.exitcode == 0, text[-6000:]
        assert " passed" in text, text
        return json.loads(found.read_text())


def _session(path: str, log: str, found: str) -> None:
    from triton.runtime.interpreter import GridExecutor

    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    launched, launch = set(), GridExecutor.__call__

    def launch_and_record(self, *args, **kwargs):
        module = self.fn.__module__.partition(".")[2]
        launched.add(f"{module}.{self.fn.__name__}")
        return launch(self, *args, **kwargs)

    GridExecutor.__call__ = launch_and_record
    gc.freeze()  # what the server has imported is looked through by no collection
    code = int(pytest.main(["-o", "addopts=", path]))
    Path(found).write_text(json.dumps(sorted(launched)))
    sys.exit(code)


def _hasten() -> None:
    """Most of the interpreter's time goes into three things that can be had for less: at every call
    of a device function it looks through triton.language for what to replace, though the launch has
    replaced it; it makes every sum of 32-bit integers again in 64 bits; and it reduces by a
    function of one's own one element at a time. Of Triton 3.6 and 3.7 alone."""
    import triton
    from triton.language import core
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    replace, replaced, modules = interpreter._patch_lang, set(), {}

    def replace_once(function):
        if function not in modules:
            found = [v for v in function.__globals__.values() if inspect.ismodule(v)]
            modules[function] = frozenset(v.__name__ for v in found if "triton.lang" in v.__name__)
        if modules[function] in replaced:
            return None  # nobody takes back what a device function replaces
        scope = replace(function)
        restore = scope.restore
        scope.restore = lambda: (replaced.clear(), restore())
        replaced.add(modules[function])
        return scope

    interpreter._patch_lang = replace_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    one_by_one = interpreter.ReduceOps.generic_reduce

    def reduce(self, inputs):
        if self.axis is None or self.keep_dims:
            return one_by_one(self, inputs)
        rows = [numpy.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        made, blocks = self.to_tensor, rows[0].ndim > 1
        if known:
            rows = [x if blocks else x[:, None] for x in rows]  # a number is an array of one
            made = lambda y, dtype: _made(core, y, dtype, blocks)  # noqa: E731
        tensors = [[made(y, x.dtype) for y in ys] for x, ys in zip(inputs, rows)]
        total, *rest = zip(*tensors)
        for row in rest:
            total = self.combine_fn.fn(*total, *row)
            total = total if isinstance(total, tuple) else (total,)
        return list(total)

    interpreter.ReduceOps.generic_reduce = reduce
    known = triton.__version__.startswith(("3.6.", "3.7."))
    if known:
        _hasten_types(interpreter)


def _hasten_types(interpreter) -> None:
    """Every operation gives a value with a type, a shape and a tuple of its sizes' types. Here
    those alike are made once, the types of a tuple when they are read, and operands of one shape
    are not compared size by size: two thirds of the time of a kernel with small blocks."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    make_block, look_up, type_of_values = (
        core.block_type.__init__, interpreter._get_np_dtype, core._type_for_tuple_values,
    )  # fmt: skip
    blocks, shapes, numpy_types, attribute = {}, {}, {}, core.tuple.__getattr__

    def init_block(self, element_ty, shape):
        key = element_ty.name, getattr(element_ty, "address_space", None)
        key += tuple(getattr(s, "value", s) for s in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def init_tensor(self, handle, type):
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            sizes = [core.constexpr(s) for s in shape]
            shapes[shape] = core.constexpr(math.prod(shape)), core.tuple(sizes)
        self.numel, self.shape = shapes[shape]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def init_tuple(self, args, type=None):
        self.values = [*args]
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def attribute_of_tuple(self, name):
        if name != "type":
            return attribute(self, name)
        self.type = type_of_values(self.values)
        return self.type

    def numpy_type(dtype):
        if isinstance(dtype, (core.block_type, core.pointer_type)):  # which have no hash
            return look_up(dtype)
        if dtype not in numpy_types:
            numpy_types[dtype] = look_up(dtype)
        return numpy_types[dtype]

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    core.tuple.__init__, core.tuple.__getattr__ = init_tuple, attribute_of_tuple
    interpreter._get_np_dtype = numpy_type
    _hasten_operands(core, TritonSemantic)


def _hasten_operands(core, semantic) -> None:
    """Most operations are of two values of one type, or of a number beside one of fp32: nothing is
    cast. Blocks of other shapes are spread by numpy."""
    broadcast, check = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl

    def broadcast_unless_alike(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block():
            a, b = lhs.type.shape.values, rhs.type.shape.values
            if a == b:
                return lhs, rhs
            if len(a) == len(b) and all(x == y or x == 1 or y == 1 for x, y in zip(a, b)):
                shape = [y if x == 1 else x for x, y in zip(a, b)]
                return tuple(x if x.type.shape.values == shape else self.tensor(
                    self.builder.create_broadcast(x.handle, shape), core.block_type(x.dtype, shape)
                ) for x in (lhs, rhs))  # fmt: skip
        return broadcast(self, lhs, rhs)

    def check_unless_alike(self, lhs, rhs, *options, **words):
        if len(options) == 4 or words:  # quotients of fp16 are taken in fp32
            return check(self, lhs, rhs, *options, **words)
        if type(rhs) in (int, float) and getattr(lhs, "dtype", None) == core.float32:
            rhs = self.scalar_constant(rhs, dtype=core.float32)
        elif type(lhs) in (int, float) and getattr(rhs, "dtype", None) == core.float32:
            lhs = self.scalar_constant(lhs, dtype=core.float32)
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            if type(lhs.dtype) is core.dtype and lhs.dtype == rhs.dtype:
                return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *options)

    semantic.broadcast_impl_value = broadcast_unless_alike
    semantic.binary_op_type_checking_impl = check_unless_alike
    for name, operation in OPERATIONS.items():
        setattr(core.tensor, f"__{name}__", _at_once(core, semantic, f"__{name}__", operation))
    _hasten_functions(core, semantic)


OPERATIONS = {
    "add": numpy.add, "radd": numpy.add, "sub": numpy.subtract, "mul": numpy.multiply,
    "rmul": numpy.multiply, "lt": numpy.less, "le": numpy.less_equal, "gt": numpy.greater,
    "ge": numpy.greater_equal, "eq": numpy.equal, "ne": numpy.not_equal, "and": numpy.bitwise_and,
    "mod": numpy.fmod, "floordiv": lambda x, y: (x - numpy.fmod(x, y)) // y,
}  # fmt: skip
ALIKE = {}  # by dtype and shape: the type, number of values and sizes of a tensor


def _made(core, data, dtype, is_block: bool):
    """A tensor of numpy's values, which have the size of the dtype's."""
    from triton.runtime.interpreter import TensorHandle

    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    key = dtype.name, data.shape if is_block else None
    if key not in ALIKE:
        first = core.tensor(handle, core.block_type(dtype, [*data.shape]) if is_block else dtype)
        ALIKE[key] = first.type, first.numel, first.shape
    made = object.__new__(core.tensor)
    made.handle, made.dtype = handle, dtype
    made.type, made.numel, made.shape = ALIKE[key]
    return made


def _at_once(core, semantic, name: str, operation):
    """An operator of tensors: numpy's, for two of one type and as many axes, or a number beside
    one, and for offsets of pointers; Triton's own way, of forty calls, for all others."""
    from triton.runtime import interpreter

    way, usual = semantic(interpreter.interpreter_builder), getattr(core.tensor, name)
    limits = {"fp32": None, "int32": 2**31, "int64": 2**63}  # of numbers that are no other type
    if name in ("__mod__", "__floordiv__"):
        del limits["fp32"]
    limits = {"int1": 0} if name == "__and__" else limits
    compares = operation in (numpy.less, numpy.less_equal, numpy.greater, numpy.greater_equal,
                             numpy.equal, numpy.not_equal)  # fmt: skip

    block, adds = core.block_type, name == "__add__"

    def at_once(self, other):
        kind, dtype, x, y = type(other), self.dtype, self.handle.data, None
        if kind is core.constexpr:
            other = other.value
            kind = type(other)
        is_block = type(self.type) is block
        if kind is core.tensor:
            z, of_other = other.handle.data, other.dtype.name
            if is_block and type(other.type) is block and x.ndim != z.ndim:
                return usual(self, other, _semantic=way)
            is_block = is_block or type(other.type) is block
            if adds and of_other in ("int32", "int64") and dtype.is_ptr():
                size = max(1, self.handle.get_element_ty().primitive_bitwidth // 8)
                return _made(core, x + size * z.astype(numpy.uint64), dtype, is_block)
            if of_other == dtype.name and of_other in limits:
                y = z
        elif adds and kind is int and other >= 0 and dtype.is_ptr():
            size = max(1, self.handle.get_element_ty().primitive_bitwidth // 8)
            return _made(core, x + numpy.uint64(size * other), dtype, is_block)
        elif dtype.name in limits:
            limit = limits[dtype.name]
            if kind is int and limit and -limit <= other < limit or kind is float and not limit:
                y = other
        if y is None:
            return usual(self, other, _semantic=way)
        data = operation(x, y)
        return _made(core, data, core.int1 if compares else dtype, is_block)

    return at_once


def _hasten_functions(core, semantic) -> None:
    """Casts of numbers, axes of one, and choices between two of one type."""
    import triton.language as tl
    from triton.runtime import interpreter

    way = {"_semantic": semantic(interpreter.interpreter_builder)}
    cast, index, choose = core.tensor.to, core.tensor.__getitem__, core.where
    numbers = {"fp16": numpy.float16, "fp32": numpy.float32, "int32": numpy.int32,
               "int64": numpy.int64}  # fmt: skip

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        name = getattr(core._unwrap_if_constexpr(dtype), "name", None)
        plain = fp_downcast_rounding is None and not bitcast
        if not plain or name not in numbers or self.dtype.name not in (*numbers, "int1"):
            return cast(self, dtype, fp_downcast_rounding, bitcast, **way)
        if name == self.dtype.name:
            return self
        data = self.handle.data.astype(numbers[name])
        return _made(core, data, core._unwrap_if_constexpr(dtype), self.type.is_block())

    def getitem(self, slices):
        whole = slice(None)
        if type(slices) is tuple and self.type.is_block():
            if all(s is None or type(s) is slice and s == whole for s in slices):
                return _made(core, self.handle.data[slices], self.dtype, True)
        return index(self, slices, **way)

    def where(condition, x, y, _semantic=None):
        x, y = core._unwrap_if_constexpr(x), core._unwrap_if_constexpr(y)
        given = [z for z in (condition, x, y) if type(z) is core.tensor]
        blocks = [z for z in given if z.type.is_block()]
        kinds = {z.dtype.name for z in given[1:]}
        if (
            type(condition) is not core.tensor or condition.dtype.name != "int1"
            or len(kinds) != 1 or len({z.handle.data.ndim for z in blocks}) > 1
            or len(given) < 3 and kinds != {"fp32"} or given[1].dtype.is_ptr()
        ):  # fmt: skip
            return choose(condition, x, y, **way)
        values = (z.handle.data if type(z) is core.tensor else numpy.float32(z) for z in (x, y))
        data = numpy.where(condition.handle.data, *values)
        return _made(core, data, given[1].dtype, bool(blocks))

    core.tensor.to, core.tensor.__getitem__ = to, getitem
    core.where = tl.where = where


def _mend() -> None:
    """A comparison's result has the type of what was compared, for the interpreter: it spreads one
    over a block as 64-bit integers, and Triton 3.9 takes none of them as a mask."""
    from triton.language import int1
    from triton.runtime import interpreter

    compute = interpreter.InterpreterBuilder.binary_op

    def binary_op(self, *operands):
        result = compute(self, *operands)
        is_mask = result.data.dtype == numpy.bool_
        return interpreter.TensorHandle(result.data, int1) if is_mask else result

    interpreter.InterpreterBuilder.binary_op = binary_op


if INTERPRETING and __name__ != "__mp_main__":  # main()'s own, which tests import once more
    _hasten()
    _mend()
    importlib.import_module("in_tree").load_package()  # each session's, where the server imports it


def main() -> None:
    """Runs the files that are named, or all, and writes what each launched."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="*", help="names of files, as test_norm.py")
    named, found = parser.parse_args().files, {}
    sys.path.insert(0, str(TESTS.parent / "tools"))
    files = sorted(path for path in TESTS.glob("*/test_*.py") if SESSION in path.read_text())
    if named and INTERPRETED.exists():
        found = json.loads(INTERPRETED.read_text())
        files = [path for path in files if path.name in named]
    for path in files:
        found[path.name] = launched_by(path)
        print(path.name, len(found[path.name]), flush=True)
        INTERPRETED.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


SESSION = test_in_the_interpreter.__name__

if __name__ == "__main__":
    main()
