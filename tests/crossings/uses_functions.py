"""Uses of a public function: inputs of other strides, no rows, autocast, compilers, threads, what
torch does with gradients. What is expected is the function in fp64 on the CPU, its definition."""

import concurrent.futures
import copy
from typing import Callable, Dict, NamedTuple, Optional

import torch
from conftest import TOLERANCE, load_package, relative_error, submodule
from emulated_graph import EmulatedGraph
from problems import F64, FORMS, PROBLEMS, arguments
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint


class FunctionUse(NamedTuple):
    name: str
    run: Callable  # gives (found, expected) of a Call
    slow: bool = False
    refused: str = ""  # what kernels say where the reference gives a result
    interpreted: bool = True  # whether Triton's interpreter can run it
    only: Callable = lambda problem: True  # which problems it is about


FUNCTION_USES: Dict[str, FunctionUse] = {}


def use(name: str, **facts):
    def add(function):
        FUNCTION_USES[name] = FunctionUse(name, function, **facts)
        return function

    return add


def has_gradients(problem) -> bool:
    return bool(problem.grads)


class Call:
    """Calls of a problem in one dtype, and what they should give."""

    def __init__(self, name: str, dtype, device: str):
        self.problem = PROBLEMS.get(name) or FORMS[name]
        self.dtype, self.device = dtype, device
        self.function = getattr(load_package(), self.problem.function)

    def given(self, seed=0, **sizes) -> dict:
        return arguments(self.problem, self.dtype, self.device, seed, round_to=self.dtype, **sizes)

    def wide(self, seed=0, **sizes) -> dict:
        return arguments(self.problem, F64, "cpu", seed, round_to=self.dtype, **sizes)

    def __call__(self, given: dict, function=None) -> list:
        """The tensors that a call returns and writes."""
        found = (function or self.function)(**given)
        found = list(found) if isinstance(found, tuple) else [found]
        return [x for x in found if x is not None] + [given[n] for n in self.problem.written]

    def values(self, given: dict, function=None) -> list:
        with torch.no_grad():
            return self(given, function)

    def expected(self, seed=0, **sizes) -> list:
        return self.values(self.wide(seed, **sizes))

    def gradients(self, given: dict, function=None, names=None) -> list:
        """Outputs, and gradients of a sum of them that weighs each element differently."""
        names = self.problem.grads if names is None else names
        leaves = [given[n].detach().requires_grad_() for n in names]
        found = self({**given, **dict(zip(names, leaves))}, function)
        loss = total(found)
        return [*(x.detach() for x in found), *torch.autograd.grad(loss, leaves)]

    def expected_gradients(self, seed=0, **sizes) -> list:
        return self.gradients(self.wide(seed, **sizes))

    def of_gradients(self) -> bool:
        return bool(self.problem.grads)

    def both(self, given: dict, function=None) -> list:
        """With gradients, where the function has some."""
        return self.gradients(given, function) if self.of_gradients() else self.values(given)

    def expected_both(self, seed=0, **sizes) -> list:
        wide = self.wide(seed, **sizes)
        return self.gradients(wide) if self.of_gradients() else self.values(wide)


def total(found: list):
    """A sum whose gradient differs for each element."""
    there = [x for x in found if x.is_floating_point()]
    return sum((x.double() * weights(x)).sum() for x in there)


def weights(x):
    return torch.linspace(-1, 1, x.numel(), dtype=F64, device=x.device).cos().view(x.shape)


def difference(found, expected, problem, dtype) -> Optional[str]:
    if isinstance(expected, torch.Tensor):
        found, expected = [found], [expected]
    if len(found) != len(expected):
        return f"{len(found)} tensors, not {len(expected)}"
    for i, (x, y) in enumerate(zip(found, expected)):
        if isinstance(y, (list, tuple)):
            what = difference(x, y, problem, dtype)
        elif not isinstance(y, torch.Tensor):
            what = None if x == y else f"{x}, not {y}"
        else:
            what = tensor_differs(x.detach().cpu(), y.detach().cpu(), problem, dtype)
        if what:
            return f"result {i}: {what}"
    return None


def tensor_differs(x, y, problem, dtype) -> Optional[str]:
    if x.shape != y.shape:
        return f"{list(x.shape)}, not {list(y.shape)}"
    if not torch.equal(x.isnan(), y.isnan()):
        return f"{int(x.isnan().sum())} NaNs, not {int(y.isnan().sum())}"
    limit = max(TOLERANCE[dtype], TOLERANCE[x.dtype]) if x.is_floating_point() else 0
    if y.double().nan_to_num().norm() < 1e-9:
        return None if x.double().nan_to_num().norm() < 1e-6 else "not zero"
    # gradients of parameters are sums over rows, some of which cancel
    error, limit = relative_error(x.nan_to_num(), y.nan_to_num()), 4 * problem.factor * limit
    return None if error <= limit else f"relative error {error:.1e} above {limit:.1e}"


def outcome_of(use: FunctionUse, name: str, dtype, device: str) -> str:
    """The outcome of a pair in words, as sides.crossing has them."""
    call = Call(name, dtype, device)
    try:
        found, expected = use.run(call)
    except Exception as error:
        if use.refused and use.refused in str(error):
            return "equal, but refused by kernels"
        return f"refuses: {type(error).__name__}: {' '.join(str(error).split())}"
    what = difference(found, expected, call.problem, call.dtype)
    return f"WRONG: {what}" if what else "equal"


# ---- values, gradients, sizes


@use("values")
def values(c):
    return c.values(c.given()), c.expected()


@use("gradients", only=has_gradients)
def gradients(c):
    return c.gradients(c.given()), c.expected_gradients()


@use("gradients of each argument alone", only=has_gradients)
def alone(c):
    found = [c.gradients(c.given(), names=(name,))[-1] for name in c.problem.grads]
    return found, c.expected_gradients()[-len(found) :]


use("no rows")(lambda c: (c.both(c.given(B=0)), c.expected_both(B=0)))
use("no tokens")(lambda c: (c.both(c.given(T=0)), c.expected_both(T=0)))


@use("no rows, gradient of a sum", only=has_gradients)
def empty_sum(c):
    """As in loss + 0 * f(h[mask]).sum(): the gradient of the result is expanded."""

    def run(given):
        leaves = {n: given[n].detach().requires_grad_() for n in c.problem.grads}
        found = [x for x in c({**given, **leaves}) if x.requires_grad]
        return torch.autograd.grad(sum(x.sum() for x in found), list(leaves.values()))

    sizes = ({"B": 0}, {"T": 0}, {"B": 1, "T": 1})
    return [run(c.given(**x)) for x in sizes], [run(c.wide(**x)) for x in sizes]


@use("one row of one token")
def one(c):
    return c.both(c.given(B=1, T=1)), c.expected_both(B=1, T=1)


use("67 tokens")(lambda c: (c.both(c.given(T=67)), c.expected_both(T=67)))


@use("repeats, bit for bit")
def repeats(c):
    first, second = c.both(c.given()), c.both(c.given())
    same = [torch.equal(x, y) for x, y in zip(first, second)]
    return same, [True] * len(same)


def by_torch(record: dict) -> bool:
    """Whether the reference computed something of what was recorded."""
    made = {x for served in record.values() for x in served}
    return not made or "reference" in made


@use("a row alone, bit for bit", only=lambda problem: problem.rows)
def row_alone(c):
    given = c.given(B=3)
    one = {n: x[1:2] if n in c.problem.rows else x for n, x in c.given(B=3).items()}
    with submodule("runtime.dispatch").served() as record:
        whole, part = c.values(given), c.values(one)
    if by_torch(record):  # whose own sums may depend on the number of rows
        return part, [x[1:2] for x in whole]
    same = [torch.equal(x[1:2], y) for x, y in zip(whole, part)]
    return same, [True] * len(same)


@use("NaN in a row", only=lambda problem: problem.rows)
def nan_row(c):
    given, wide = c.given(B=3), c.wide(B=3)
    for x in (given, wide):
        x[c.problem.rows[0]][1].fill_(float("nan"))
    found, clean = c.values(given), c.values(c.given(B=3))
    same = [torch.equal(x[[0, 2]], y[[0, 2]]) for x, y in zip(found, clean)]
    return [same, bool(found[0][1].isnan().any())], [[True] * len(same), True]


# ---- dtypes and modes


@use("float16")
def float16(c):
    c.dtype = torch.float16
    return c.both(c.given()), c.expected_both()


@use("bfloat16", interpreted=False)
def bfloat16(c):
    c.dtype = torch.bfloat16
    return c.both(c.given()), c.expected_both()


@use("autocast", interpreted=False)
def autocast(c):
    with torch.autocast(c.device, torch.bfloat16):
        found = c.both(c.given())
    c.dtype = torch.bfloat16
    return found, Call.expected_both(c)


@use("a gradient inside autocast", only=has_gradients, interpreted=False)
def gradient_in_autocast(c):
    given = c.given()
    leaves = [given[n].requires_grad_() for n in c.problem.grads]
    with submodule("runtime.dispatch").served() as record:
        loss = total(c(given))
        with torch.autocast(c.device, torch.bfloat16):
            found = torch.autograd.grad(loss, leaves)
    if by_torch(record):  # which rounds its own products in the backward there
        c.dtype = torch.bfloat16
    return found, c.expected_gradients()[-len(leaves) :]


@use("inference_mode")
def inference(c):
    with torch.inference_mode():
        found = [x.clone() for x in c(c.given())]
    return found, c.expected()


@use("tensors of inference_mode afterwards")
def inference_tensors(c):
    with torch.inference_mode():
        given = c.given()
    return c.values(given), c.expected()


@use("poisoned memory")
def poisoned(c):
    torch.use_deterministic_algorithms(True)
    try:
        return c.both(c.given()), c.expected_both()
    finally:
        torch.use_deterministic_algorithms(False)


@use("another default dtype")
def default_dtype(c):
    given = c.given()
    torch.set_default_dtype(F64)
    try:
        return c.both(given), c.expected_both()
    finally:
        torch.set_default_dtype(torch.float32)


# ---- strides and memory


def laid_out(lay):
    """Each tensor of the call in other memory, with the same values."""

    def run(c):
        def given():
            made = c.given()
            return {n: lay(x) if isinstance(x, torch.Tensor) and x.ndim else x
                    for n, x in made.items()}  # fmt: skip

        return c.both(given()), c.expected_both()

    return run


def spaced(x):
    """Every second element of the last dimension."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


def turned(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def shifted(x):
    """An address that is no multiple of 16 bytes."""
    memory = x.new_empty(x.numel() + 1)[1:]
    return memory.view(x.shape).copy_(x)


def negated(x):
    return torch._neg_view(-x) if x.is_floating_point() else x


use("every second element")(laid_out(spaced))
use("turned dimensions")(laid_out(turned))
use("unaligned addresses")(laid_out(shifted))
use("views of the negative")(laid_out(negated))
use("parameters")(laid_out(lambda x: torch.nn.Parameter(x, False)))


def far(x, dim=0):
    """x with rows 2^31 elements apart, in memory that nobody touches but for x."""
    apart = 2**31 + 64
    strides = list(x.contiguous().stride())
    strides[dim] = apart
    memory = torch.empty(apart * (x.shape[dim] - 1) + x.numel(), dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, strides).copy_(x)


@use("rows 2^31 elements apart", slow=True)
def far_rows(c):
    """Of one argument after the other, with its values where they can be kept."""
    expected, found = c.expected(), []
    for name, x in c.given().items():
        if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[0] > 1:
            given = c.given()
            given[name] = far(given[name][:2])[: len(x)] if len(x) == 2 else given[name]
            found.append(c.values(given))
    return found, [expected] * len(found)


@use("one tensor in several places", only=has_gradients)
def aliased(c):
    """Arguments of equal shapes are one tensor."""

    def run(given):
        shapes: dict = {}
        for n in c.problem.grads:
            given[n] = shapes.setdefault((given[n].shape, given[n].dtype), given[n])
        leaves = {id(x): x.requires_grad_() for x in shapes.values()}
        found = c(given)
        return torch.autograd.grad(total(found), list(leaves.values()))

    return run(c.given()), run(c.wide())


@use("expanded arguments")
def expanded(c):
    def run(given):
        for n in c.problem.rows:
            if n not in c.problem.written:
                given[n] = given[n][:1].expand(given[n].shape)
        return c.values(given)

    return run(c.given()), run(c.wide())


# ---- what torch does around a call


use("checkpointing, use_reentrant", only=has_gradients)(lambda c: checkpointed(c, True))
use("checkpointing, not use_reentrant", only=has_gradients)(lambda c: checkpointed(c, False))


def checkpointed(c, use_reentrant: bool):
    given, names = c.given(), c.problem.grads
    leaves = [given[n].requires_grad_() for n in names]

    def run(*leaves):
        return tuple(c({**given, **dict(zip(names, leaves))}))

    total(checkpoint(run, *leaves, use_reentrant=use_reentrant)).backward()
    return [x.grad for x in leaves], c.expected_gradients()[-len(names) :]


@use("activations kept on the CPU", only=has_gradients)
def on_cpu(c):
    with torch.autograd.graph.save_on_cpu():
        return c.gradients(c.given()), c.expected_gradients()


@use("a counter of operations")
def counted(c):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return c.both(c.given()), c.expected_both()


@use("a subclass of tensors")
def subclass(c):
    class Other(torch.Tensor):
        pass

    given = c.given()
    given = tree_map(lambda x: x.as_subclass(Other) if isinstance(x, torch.Tensor) else x, given)
    return [torch.Tensor(x) for x in c.values(given)], c.expected()


@use("fake tensors")
def fake(c):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    given = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, c.given())
    with mode:
        found = c.values(given)
    return [list(x.shape) for x in found], [list(x.shape) for x in c.expected()]


@use("torch.compile", slow=True)
def compiled(c):
    torch.compiler.reset()
    function = torch.compile(c.function, backend="aot_eager", fullgraph=True)
    return c.values(c.given(), function), c.expected()


@use("torch.compile, gradients", slow=True, only=has_gradients)
def compiled_gradients(c):
    torch.compiler.reset()
    function = torch.compile(c.function, backend="aot_eager", fullgraph=True)
    return c.gradients(c.given(), function), c.expected_gradients()


@use("torch.func.grad", only=has_gradients)
def func_grad(c):
    names = c.problem.grads

    def loss(*leaves):
        return total(c({**given, **dict(zip(names, leaves))}))

    given = c.given()
    places = tuple(range(len(names)))
    found = torch.func.grad(loss, places)(*(given[n] for n in names))
    return list(found), c.expected_gradients()[-len(names) :]


@use("torch.func.vmap", only=lambda problem: not problem.written)
def vmapped(c):
    name = next(n for n, x in c.given().items() if isinstance(x, torch.Tensor))
    samples = torch.stack([c.given(seed=i)[name] for i in range(3)])

    def call(x):
        return tuple(c({**given, name: x}))

    given = c.given()

    with torch.no_grad():
        found = torch.vmap(call)(samples)
        expected = [c.values({**c.wide(), name: c.wide(seed=i)[name]}) for i in range(3)]
    return list(found), [torch.stack(rows) for rows in zip(*expected)]


@use("second derivatives", only=has_gradients, refused="second derivative")
def second(c):
    def run(given):
        leaves = [given[n].requires_grad_() for n in c.problem.grads]
        first = torch.autograd.grad(total(c(given)), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves, allow_unused=True)

    found, expected = run(c.given()), run(c.wide())
    return [x for x in found if x is not None], [x for x in expected if x is not None]


@use("a backward twice", only=has_gradients)
def twice(c):
    given = c.given()
    leaves = [given[n].requires_grad_() for n in c.problem.grads]
    loss = total(c(given))
    torch.autograd.grad(loss, leaves, retain_graph=True)
    found = list(torch.autograd.grad(loss, leaves))
    return found, c.expected_gradients()[-len(leaves) :]


@use("hooks of a gradient", only=has_gradients)
def hooks(c):
    given = c.given()
    leaves = [given[n].requires_grad_() for n in c.problem.grads]
    for leaf in leaves:
        leaf.register_hook(lambda gradient: gradient * 2)
    found = torch.autograd.grad(total(c(given)), leaves)
    return [g / 2 for g in found], c.expected_gradients()[-len(leaves) :]


@use("an argument that is changed before the backward", only=has_gradients)
def changed(c):
    """What was saved must not have changed: torch's own error."""
    given = c.given()
    name = c.problem.grads[0]
    leaf = given[name].requires_grad_()
    held = leaf * 1
    loss = total(c({**given, name: held}))
    with torch.no_grad():
        held.mul_(2)
    try:
        (found,) = torch.autograd.grad(loss, leaf)
    except RuntimeError as error:
        return ["inplace operation" in str(error)], [True]
    return found, c.expected_gradients()[-len(c.problem.grads)]


@use("a CUDA graph")
def graphed(c):
    """Replayed on other values in the same memory."""
    if c.problem.function == "fused_experts":
        c.dtype = torch.float16  # in fp32 the host reads the ids
    given, other = c.given(), c.given(seed=1)
    if c.device == "cuda":
        for _ in range(2):
            c.values(copied(given))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = c.values(given)
    else:
        graph = EmulatedGraph(None)
        found = graph.capture(lambda: c.values(given))
    for n, x in other.items():
        overwrite(given[n], x)
    graph.replay()
    return found, c.expected(seed=1)


def overwrite(old, new):
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif hasattr(old, "_fields"):
        for a, b in zip(old, new):
            overwrite(a, b)


def copied(given: dict) -> dict:
    return {n: copy.deepcopy(x) for n, x in given.items()}


@use("four threads", interpreted=False)
def threads(c):
    def work(i):
        return [c.both(c.given(seed=i)) for _ in range(3)][-1]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [job.result() for job in [pool.submit(work, i) for i in range(4)]]
    return found, [c.expected_both(seed=i) for i in range(4)]


@use("detect_anomaly", only=has_gradients)
def anomaly(c):
    with torch.autograd.set_detect_anomaly(True):
        return c.gradients(c.given()), c.expected_gradients()
