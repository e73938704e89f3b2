"""Every argument of every public function with values that it cannot be: what is refused is refused
with a ValueError or TypeError that names an argument, says what it must be and what came, before
any operator runs; what is taken stands in argument_cases.py, and has the same result where only the
dtype is another."""

import inspect
import re
from typing import Iterator, Tuple

import pytest
import torch
from argument_cases import CASES, EXCUSED
from conftest import relative_error, submodule
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.filterwarnings("ignore")  # of nested tensors and of CSR
DTYPES = ("float16", "float64")  # what is taken in another dtype has the same result
FORMS = ("rank", "less", "more", "none", "scalar")  # of these the message may name another argument


def other_tensors(x: torch.Tensor) -> Iterator[Tuple[str, object]]:
    """(kind, value) of what a tensor argument may be by mistake."""
    yield "number", 1.0
    yield "word", "x"
    yield "list", x.tolist()
    yield "array", x.numpy()
    yield "meta", x.to("meta")
    yield "complex", x.to(torch.complex64)
    yield "int8", x.to(torch.int8)
    if x.ndim:
        yield "sparse", x.to_sparse()
        yield "nested", torch.nested.nested_tensor([x, x])
    if x.ndim == 2:
        yield "csr", x.to_sparse_csr()
    dtypes = {torch.int64, torch.bool, torch.half, torch.float32, torch.double}
    for dtype in sorted(dtypes - {x.dtype}, key=str):
        yield str(dtype).partition(".")[2], x.to(dtype)
    if x.is_floating_point():
        yield "float8", x.to(torch.float8_e4m3fn)
    elif x.dtype != torch.bool:
        yield "high", x + 1000
        yield "low", x - 1000
    yield "rank+1", x.unsqueeze(0)
    if x.ndim:
        yield "rank-1", x[0]
        yield "scalar", x.flatten()[0]
    for dim in range(x.ndim):
        if x.shape[dim] > 1:
            yield f"less{dim}", x.narrow(dim, 0, x.shape[dim] - 1)
        yield f"more{dim}", torch.cat([x, x.narrow(dim, 0, 1)], dim)
        yield f"none{dim}", x.narrow(dim, 0, 0)


NO_TENSOR = {"number": 1.0, "word": "x", "list": [1.0], "tensor": torch.ones(7, 7, 7)}
OTHERS = {  # by a word of the annotation; the first that is found
    "Tensor": NO_TENSOR,
    "float": {
        "word": "x", "flag": True, "nan": float("nan"), "inf": float("inf"), "minus": -1.0,
        "zero": 0.0, "list": [1.0], "complex": 1j, "tensor": torch.tensor(1.0), "huge": 10**400,
    },
    "bool": {
        "word": "x", "two": 2, "minus": -1, "number": 1.5, "list": [1], "tensor": torch.tensor(1),
    },
    "dtype": {
        "word": "float32", "int8": torch.int8, "number": 3, "list": [torch.float32],
        "float8": torch.float8_e4m3fn, "complex": torch.complex64,
    },
    "int": {
        "word": "x", "number": 1.5, "flag": True, "minus": -2, "list": [1],
        "tensor": torch.tensor(1), "zero": 0,
    },
    "str": {
        "word": "x", "number": 3, "list": ["silu"], "tensor": torch.ones(2), "flag": True,
        "bytes": b"silu", "upper": "SILU",
    },
    "": {"word": "x", "number": 3, "list": [1], "tensor": torch.ones(2)},
}  # fmt: skip


def others(value: object, parameter: inspect.Parameter) -> Iterator[Tuple[str, object]]:
    """Invalid values that may be passed by mistake in place of this one."""
    annotation = str(parameter.annotation)
    if isinstance(value, torch.Tensor):
        yield from other_tensors(value)
    elif hasattr(value, "_asdict") or isinstance(value, dict):  # a ring, or a batch
        fields = value if isinstance(value, dict) else value._asdict()
        for name, part in fields.items():
            listed = (
                other_tensors(part) if isinstance(part, torch.Tensor) else OTHERS["int"].items()
            )
            for kind, other in listed:
                changed = {**fields, name: other}
                yield f"{kind}:{name}", changed if fields is value else value._replace(**changed)
    else:
        kind = next(word for word in OTHERS if word in annotation)
        yield from OTHERS[kind].items()
    if parameter.default is inspect.Parameter.empty and "Optional" not in annotation:
        yield "None", None


def fault(error: Exception, argument: str, kind: str, names) -> str:
    """Describes the fault of an error message for an argument; empty if there is none."""
    message = str(error)
    *_, argument = (argument, *kind.split(":")[1:])  # or its field
    said = [name for name in {*names, argument} if re.search(rf"\b{re.escape(name)}\b", message)]
    if type(error) not in (ValueError, TypeError):
        return "it is of another type"
    if not said or (argument not in said and not kind.startswith(FORMS)):
        return "it does not name the argument"
    if " must " not in message or not re.search(r"\bgot\b|\bNone\b|requires|unless", message):
        return "it does not say what was expected and what came"
    if re.search(r"(\[[^\]]*\]) = \1|\b(\d+) to \2\b", message):
        return "it says one thing twice"
    if (
        kind.partition(":")[0] in ("sparse", "csr", "nested")
        and "dense torch.Tensor" not in message
    ):
        return "it does not say that the tensor must be dense"
    if error.served:
        return f"{error.served} came before it"
    return ""


def numbers(result: object) -> torch.Tensor:
    """All tensors of a result as one, in fp64."""
    tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    return torch.cat([torch.zeros(0), *[x.double().flatten() for x in tensors]])


def alike(result: object, other: object) -> bool:
    return relative_error(numbers(result), numbers(other)) <= 2e-3


@pytest.fixture(scope="module", autouse=True)
def processes(tmp_path_factory):
    """A group of this one process, for what several share."""
    dist, file = torch.distributed, tmp_path_factory.mktemp("group") / "one"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def outcomes(kernel, case):
    """(argument, kind, what was returned or raised) of calls with one other value each."""
    function = getattr(kernel, case.function)
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = case.make(kernel).get(argument, parameter.default)
        for kind, other in others(value, parameter):
            with submodule("runtime.dispatch").served() as record:
                try:
                    outcome = function(**{**case.make(kernel), argument: other})
                except Exception as error:
                    outcome = error
                    outcome.served = ", ".join(record)  # operators that ran before
            yield argument, kind, outcome


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{n}-{case.function}" for n, case in enumerate(CASES)]
)
def test_every_argument(kernel, case):
    if case.function in ("decorate", "layer_mapping"):
        pytest.importorskip("kernels")
    function, faults, taken = getattr(kernel, case.function), [], {}
    names = inspect.signature(function).parameters
    with torch.no_grad():
        right = function(**case.make(kernel))
        for argument, kind, outcome in outcomes(kernel, case):
            if isinstance(outcome, Exception):
                what = fault(outcome, argument, kind, names)
                if what:
                    faults.append(f"{argument} = {kind}: {what}: {outcome!r:.200}")
                continue
            taken.setdefault(argument, []).append(kind)
            if case.values and kind.partition(":")[0] in DTYPES and not alike(outcome, right):
                faults.append(f"{argument} = {kind}: the result is another")
    assert not faults, "\n".join(faults)
    assert {name: " ".join(kinds) for name, kinds in taken.items()} == case.taken


def test_every_public_function_has_a_case(kernel):
    assert sorted({case.function for case in CASES} | set(EXCUSED)) == sorted(kernel.__all__)
    assert not {case.function for case in CASES} & set(EXCUSED)
