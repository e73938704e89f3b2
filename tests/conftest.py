"""The kernel as the tests see it, the devices it runs on, and the one table of tolerances.

Tests import `torch-ext/fused_swiglu_gdn` under a name of its own, with the generated `_ops.py`, so
that they reach its inner modules. tests/repository/test_build.py and tests/models/test_models.py
load what tools/build.py built, as users do.
"""

import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest

# One thread a worker: the tensors of tests are small, and threads that outnumber the cores spin.
# Before torch is imported, and for the processes that tests start as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

# first on the path, since a package is called `build` as well
for folder in ("tools", "examples", "tests/crossings"):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / folder))
import in_tree  # noqa: E402
from in_tree import NAME, PACKAGE, ROOT, submodule  # noqa: E402, F401
from interpreter import compiled, interpreted  # noqa: E402


def prepared(module: str, name: str, call: type, *fields):
    """What a kernel module computes of a call, whose fields are given flat, options last; None if
    it does not compute it."""
    return computed(module, name, call.of(fields))


def computed(module: str, name: str, call):
    """What a kernel module computes of a call; None if it does not compute it."""
    run = getattr(submodule(module), f"prepare_{name}")(call)
    return None if run is None else run(*call.tensors)


if not torch.cuda.is_available():
    # torch.manual_seed writes down its caller for each kind of device that may come: 0.7 ms a call
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.manual_seed_all = lambda seed: None

# Where these packages are installed, transformers calls them; the tests compare with its own torch
# functions, which are right in fp32 and on a CPU.
sys.modules.update(dict.fromkeys(("fla", "causal_conv1d")))

REPOSITORY = "org/fused-swiglu-gdn"


DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

# Relative error ||out - ref|| / ||ref|| against the reference in fp64 on the same inputs. bf16 has
# 8 significant bits and rounds by up to 2^-9 = 2e-3 of each value; the operands of a product are
# rounded once more, hence a few times that. fp16 has 3 more bits. fp32 is for products in true
# fp32.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1.5e-3,
    torch.bfloat16: 1e-2,
}


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| in fp64; NaN where one has a NaN that the other has not."""
    assert out.shape == ref.shape, (out.shape, ref.shape)
    out, ref = out.double(), ref.double()
    if out.numel() == 0:
        return 0.0
    norm = ref.norm()
    return ((out - ref).norm() / norm if norm > 0 else out.norm()).item()


def assert_close(out: torch.Tensor, ref: torch.Tensor, dtype=None, factor: float = 1.0) -> None:
    """The relative error is within the table's tolerance for the dtype of `out`."""
    limit = TOLERANCE[dtype or out.dtype] * factor
    error = relative_error(out, ref)
    assert error <= limit, f"relative error {error:.2e} above {limit:.2e}"


def beside_a_gpu(package):
    """The package, as on a machine with a GPU: without one kernelize leaves alone what is on a CPU,
    for no kernel would ever serve it."""
    sys.modules[f"{package.__name__}.runtime.device"].has_gpu = lambda: True
    return package


def load_package():
    return beside_a_gpu(in_tree.load_package())


@pytest.fixture(scope="session")
def kernel():
    return load_package()


def load_example(name: str):
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # as for a program: its folder is first
        patch.syspath_prepend(str(ROOT / "examples"))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """A built repository of this tree, known to `kernels` by the Hub name REPOSITORY."""
    root = tmp_path_factory.mktemp("hub") / "fused-swiglu-gdn"
    importlib.import_module("build").build(out=root / "build")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={root}")
        yield root


@pytest.fixture(scope="session")
def built(repository):
    """The built kernel, loaded as users load it."""
    return beside_a_gpu(pytest.importorskip("kernels").get_kernel(REPOSITORY, version=1))


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def captured(function, *arguments, **words) -> tuple:
    """A CUDA graph of a call, which has run before, and what the call gave in the capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*arguments, **words)
    return graph, result


@pytest.fixture
def by_portable(monkeypatch):
    """The portable kernels compute tensors of the CPU, where Triton's interpreter runs them."""
    monkeypatch.setattr(submodule("runtime.dispatch"), "_folders", lambda *where: ("portable",))


def pytest_addoption(parser):
    parser.addoption("--all-pairs", action="store_true", help="all crossings, not a share of them")


def spread(items: list, workers: int) -> None:
    """Puts the long tests, each a whole file under the interpreter, where workers begin: a worker's
    share of the tests lies in one piece, and those that finish early help the others."""
    long = [item for item in items if item.name.endswith("in_the_interpreter")]
    short = [item for item in items if item not in long]
    per_worker = -(-len(items) // workers)
    items.clear()
    for worker in range(workers):
        mine = long[worker::workers]
        items += mine + short[: per_worker - len(mine)]
        del short[: per_worker - len(mine)]
    items += short


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config):
    """One worker a core that is ours to use; few where all of them share one GPU."""
    cores = os.cpu_count() or 1
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    if torch.cuda.is_available():
        return min(ours, 4)
    return ours if ours < cores else None  # xdist's own number: it knows of hyperthreads


@pytest.fixture(autouse=True)
def paranoid():
    """On a GPU Triton binds every launch as well, and must come to the code that is started."""
    if not torch.cuda.is_available():
        yield
        return
    pytest.importorskip("triton")
    with submodule("runtime.launch").paranoid():
        yield


def has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@pytest.fixture(autouse=True)
def no_group():
    """Ends the process group of a test that made one."""
    before = has_group()
    yield
    if has_group() and not before:
        torch.distributed.destroy_process_group()


def is_for_another_session(item) -> bool:
    """It needs a GPU, and there is none; or it is for Triton's interpreter, and this session is
    not, or the other way round."""
    if "gpu" in item.keywords and not torch.cuda.is_available():
        return True
    of_sessions = (interpreted.mark, compiled.mark)
    return any(mark in of_sessions and mark.args[0] for mark in item.iter_markers("skipif"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:  # a test on the device "cuda" is one of those that `-m gpu` runs
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("device") == "cuda":
            item.add_marker("gpu")
    # thousands: reporting a skip of each takes long
    left = {item for item in items if is_for_another_session(item)}
    config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]
    spread(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    gc.freeze()  # what was imported stays: no collection looks through it again


def gdn_inputs(B, T, H, HV, K, V, dtype=torch.float32, device="cpu", seed=0, gates="slow"):
    """Random q, k, v, g, beta and a state [B, HV, K, V], by name.

    Gates: "slow" logsigmoid(n + 4); "qwen" as Qwen3.5 initialises them, A from 0.01 to 16;
    "none" g = 0; "extreme" g = -30.
    """
    random = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, device=device, dtype=torch.float64)

    q, k, v = (normal(B, T, n, d).to(dtype) for n, d in ((H, K), (H, K), (HV, V)))
    raw = normal(B, T, HV)
    softplus, logsigmoid = torch.nn.functional.softplus, torch.nn.functional.logsigmoid
    decay = torch.linspace(0.01, 16, HV, device=device, dtype=torch.float64)
    g = {
        "slow": logsigmoid(raw + 4),
        "qwen": -decay * softplus(raw + 1),
        "none": torch.zeros_like(raw),
        "extreme": torch.full_like(raw, -30.0),
    }[gates]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    beta = normal(B, T, HV).sigmoid()
    state = normal(B, HV, K, V) * 0.2
    return {
        "q": q,
        "k": torch.nn.functional.normalize(k.double(), dim=-1).to(dtype),
        "v": v,
        "g": g.to(wide),
        "beta": beta.to(wide),
        "initial_state": state.to(wide),
    }


@pytest.fixture
def own_functions():
    """Gives the functions of models, which `kernels` replaces for the whole process, back."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models."):
            for function in vars(module).values():
                if isinstance(function, torch.nn.Module):
                    function.__dict__.pop("forward", None)


@pytest.fixture
def kernels_of_transformers(own_functions):
    """Skips where the installed transformers asks for another release of kernels: it then has none
    of what it does with kernels."""
    transformers = pytest.importorskip("transformers")
    if not transformers.utils.is_kernels_available():
        pytest.skip("this transformers asks for a release of kernels that is not here")


@pytest.fixture
def everywhere(monkeypatch):
    """Kernels are said to be there for any device and dtype: the reference stands in for them."""
    blocks = submodule("models.moe_blocks")
    monkeypatch.setattr(blocks, "_why_not_dtype", lambda *args: None)
    monkeypatch.setattr(blocks.dispatch, "serves", lambda *args: True)


@pytest.fixture
def trusts_all(monkeypatch):
    """Every class that is not transformers' own is one that kernelize(model, trust=[..]) names."""
    for name in ("trust", "experts"):
        monkeypatch.setattr(submodule(f"models.{name}"), "is_named", is_other)
    monkeypatch.setattr(submodule("models.experts"), "_named", Others())


class Others(set):
    """All classes that stand in no file of transformers."""

    def __contains__(self, kind: type) -> bool:
        return is_other(kind)


def is_other(kind: type) -> bool:
    """The class stands in no file of transformers."""
    home = os.path.dirname(importlib.util.find_spec("transformers").origin)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return not str(file).startswith(home)
