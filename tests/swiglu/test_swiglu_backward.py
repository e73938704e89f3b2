"""Training SwiGLU: gradients of the kernels against the reference's in fp64, and what is saved."""

import pytest
import torch
import torch.nn.functional as F
from conftest import relative_error, submodule
from interpreter import compiled, interpreted, test_in_the_interpreter  # noqa: F401

NAMES = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
# a product of operands that were rounded once or twice: RMS of the rounding times a few
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}


def inputs(M, N, K, D, dtype, device, bias=True, seed=0):
    """The tensors of NAMES, biases None without `bias`, and dy."""
    torch.manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, device=device) * scale).to(dtype)

    weights = [normal(*s, scale=s[1] ** -0.5) for s in ((N, K), (N, K), (D, N))]
    biases = [normal(n) if bias else None for n in (N, N, D)]
    return (normal(M, K), *weights, *biases), normal(M, D)


def gradients(function, tensors, dy, frozen=()):
    """The output and the gradients of the tensors that are not None and not named in frozen."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    for name, leaf in zip(NAMES, leaves):
        if name in frozen:
            leaf.requires_grad_(False)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, wanted, dy)]


def reference(activation):
    gated = submodule("swiglu.reference").swiglu_fwd

    def mlp(x, w_gate, w_up, w_down, b_gate, b_up, b_down):
        return F.linear(gated(x, w_gate, w_up, b_gate, b_up, activation), w_down, b_down)

    return mlp


def check(kernel, tensors, dy, activation="silu", recompute=False, frozen=()):
    def ours(*leaves):
        return kernel.fused_swiglu_mlp(*leaves, activation=activation, recompute=recompute)

    got = gradients(ours, tensors, dy, frozen)
    wide = [None if t is None else t.double() for t in tensors]
    want = gradients(reference(activation), wide, dy.double(), frozen)
    assert len(got) == len(want)
    for out, ref in zip(got, want):
        assert out.dtype == dy.dtype
        assert relative_error(out, ref) < LIMIT[dy.dtype]


def accumulate(kernel, dtype, device, with_main_grad, frozen=(), sizes=(40, 24, 16, 8)):
    """Two steps with main_grad where named; relative errors of its sums and the gradients left."""
    tensors, dy = inputs(*sizes, dtype, device)
    leaves = [torch.nn.Parameter(t.clone(), n not in frozen) for n, t in zip(NAMES, tensors)]
    start = torch.randn(40, device=device)[0]
    for name, leaf in zip(NAMES, leaves):
        if name in with_main_grad:
            leaf.main_grad = torch.full(leaf.shape, start.item(), device=device)
    wide = [t.double() for t in tensors]
    want = dict(zip(NAMES, gradients(reference("silu"), wide, dy.double())[1:]))
    for _ in range(2):
        kernel.fused_swiglu_mlp(*leaves, main_grad=True).backward(dy)
    errors = {}
    for name, leaf in zip(NAMES, leaves):
        if name in with_main_grad:
            found = leaf.main_grad.double() - start.double()
            assert leaf.grad is None and leaf.main_grad.dtype == torch.float32
        else:
            found = leaf.grad
        if name not in frozen:
            errors[name] = relative_error(found, 2 * want[name])
        else:
            assert found is None or not found.any()
    return errors


MAIN = [("w_gate", "w_up", "w_down"), ("w_up",), ("w_gate", "w_down")]


def stand_in(kernel):
    """A weight that says so learns that its gradient is in main_grad, and gets a stand-in."""
    tensors, dy = inputs(4, 9, 8, 3, torch.float32, "cpu", bias=False)
    leaves = [torch.nn.Parameter(t) for t in tensors[:4]]
    leaves[1].main_grad, leaves[1].grad_added_to_main_grad = torch.zeros_like(leaves[1]), False
    kernel.fused_swiglu_mlp(*leaves, main_grad=True).backward(dy)
    assert leaves[1].grad_added_to_main_grad and leaves[1].main_grad.any()
    assert not leaves[1].grad.any()


class Steps:
    """Run twice: under the interpreter on the CPU, and compiled on a GPU."""

    device, dtype, sizes = "cpu", torch.float32, (7, 11, 5, 6)

    def inputs(self, **options):
        return inputs(*self.sizes, self.dtype, self.device, **options)

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
    @pytest.mark.parametrize("recompute", [False, True])
    def test_mlp(self, kernel, activation, recompute):
        if activation == "relu" and self.dtype != torch.float32:
            pytest.skip("whose slope jumps: test_gate_gradients")
        check(kernel, *self.inputs(), activation, recompute)

    @pytest.mark.parametrize(
        "frozen", [("w_gate",), ("x", "b_up"), ("w_up", "b_gate"), ("w_gate", "w_up", "w_down")]
    )
    def test_frozen(self, kernel, frozen):
        check(kernel, *self.inputs(), frozen=frozen)

    def test_compiled_step(self, kernel):
        """Tracing sees the operators, their fakes and their functionalization."""
        tensors, dy = self.inputs(bias=False)

        def step(x, w_gate, w_up, w_down):
            return kernel.fused_swiglu_mlp(x, w_gate, w_up, w_down)

        backend = "aot_eager" if self.device == "cpu" else "inductor"
        traced = torch.compile(step, fullgraph=True, backend=backend)
        got = gradients(lambda *leaves: traced(*leaves[:4]), tensors, dy)
        want = gradients(lambda *leaves: step(*leaves[:4]), tensors, dy)
        limit = 0 if self.device == "cpu" else 1e-2
        assert all(relative_error(a, b) <= limit for a, b in zip(got, want))

    @pytest.mark.parametrize("names", MAIN)
    @pytest.mark.parametrize("frozen", [0, 1])
    def test_main_grad_in_fp32(self, kernel, names, frozen):
        errors = accumulate(kernel, torch.float32, self.device, names, frozen=names[:frozen])
        assert max(errors.values()) < 1e-5


@interpreted
class TestInterpreted(Steps):
    @pytest.fixture(autouse=True)
    def on_the_cpu(self, by_portable):
        pass

    def test_gated_gradients(self, kernel):
        (x, w_gate, w_up, _, b_gate, b_up, _), _ = self.inputs()
        tensors = (x, w_gate, w_up, b_gate, b_up)
        leaves = [t.requires_grad_() for t in tensors]
        kernel.fused_swiglu(*leaves).sum().backward()  # the gradient is one number, expanded
        wide = [t.detach().double().requires_grad_() for t in tensors]
        submodule("swiglu.reference").swiglu_fwd(*wide, "silu").sum().backward()
        assert all(relative_error(a.grad, b.grad) < 1e-6 for a, b in zip(leaves, wide))

    @pytest.mark.parametrize("whole", [True, False])
    def test_the_kept_have_no_gradients(self, kernel, whole):
        """torch would fill zeros as large as what is kept."""
        tensors, dy = self.inputs()
        leaves = [t.requires_grad_() for t in tensors]
        if whole:
            y = kernel.fused_swiglu_mlp(*leaves)
        else:
            y, dy = kernel.fused_swiglu(*leaves[:3]), torch.randn(7, 11)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            y.backward(dy)
        assert not {"aten::zeros", "aten::zero_"} & {event.name for event in found.events()}

    def test_megatrons_hooks(self, kernel):
        stand_in(kernel)


@compiled
@pytest.mark.parametrize("names", MAIN)
@pytest.mark.parametrize("frozen", [0, 1])
def test_main_grad_without_kernels(kernel, names, frozen):
    errors = accumulate(kernel, torch.float32, "cpu", names, frozen=names[:frozen])
    assert max(errors.values()) < 1e-5


@compiled
def test_main_grad_of_what_autocast_replaces(kernel):
    tensors, dy = inputs(40, 24, 16, 8, torch.float32, "cpu", bias=False)
    leaves = [torch.nn.Parameter(t) for t in tensors[:4]]
    for leaf in leaves[1:]:
        leaf.main_grad = torch.zeros_like(leaf)
    want = gradients(reference("silu"), [*(t.double() for t in tensors[:4]), None, None, None],
                     dy.double())[1:]  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        y = kernel.fused_swiglu_mlp(*leaves, main_grad=True)
    y.backward(dy.to(y.dtype))
    for leaf, ref in zip(leaves[1:], want[1:]):
        assert leaf.grad is None and relative_error(leaf.main_grad, ref) < 1.5e-2


@compiled
def test_megatrons_hooks_without_kernels(kernel):
    stand_in(kernel)


@compiled
def test_main_grad_is_refused_while_compiling(kernel):
    leaves = [torch.nn.Parameter(t) for t in inputs(4, 9, 8, 3, torch.float32, "cpu")[0]]
    compiled_mlp = torch.compile(kernel.fused_swiglu_mlp, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="main_grad=True is for eager mode"):
        compiled_mlp(*leaves, main_grad=True)


@compiled
@pytest.mark.gpu
class TestCompiled(Steps):
    device, dtype, sizes = "cuda", torch.bfloat16, (200, 264, 136, 72)


@pytest.mark.gpu
def test_main_grad(kernel):
    """Added up in fp32, without bf16's rounding of each step's gradient and of their sum.

    Of the weights alone: in bf16 the sum of a bias's few gradients may cancel to 1e-2 of error.
    """
    names, sizes = ("w_gate", "w_up", "w_down"), (200, 264, 136, 72)
    errors = accumulate(kernel, torch.bfloat16, "cuda", names, sizes=sizes)
    rounded = accumulate(kernel, torch.bfloat16, "cuda", (), sizes=sizes)
    for name in names:
        assert errors[name] < 6e-3
        assert errors[name] < rounded[name]


@pytest.mark.gpu
def test_gradients_repeat(kernel):
    tensors, dy = inputs(300, 512, 256, 256, torch.bfloat16, "cuda")
    runs = [gradients(kernel.fused_swiglu_mlp, tensors, dy) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute, share", [(False, 0.7), (True, 0.1)])
def test_held_memory(kernel, recompute, share):
    """Held memory, as a share of Liger's and eager torch's: x, gate, up and z (silu(gate) not
    counted)."""
    M, N, K = 4096, 3584, 1024
    tensors, _ = inputs(M, N, K, K, torch.bfloat16, "cuda", bias=False)
    leaves = [t.requires_grad_() for t in tensors[:4]]
    kernel.fused_swiglu_mlp(*leaves, recompute=recompute)
    before = torch.cuda.memory_allocated()
    y = kernel.fused_swiglu_mlp(*leaves, recompute=recompute)
    held = torch.cuda.memory_allocated() - before - y.nbytes
    assert held + leaves[0].nbytes <= share * (M * K + 3 * M * N) * 2 + 2**20
