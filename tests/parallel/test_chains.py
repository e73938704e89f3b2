"""A stream whose fragments are all in one process, in another order: the whole exchange and chain
without a second process. What is expected is the ordinary call in fp64 on the CPU."""

import pytest
import torch
import torch.distributed as dist
from conftest import relative_error, submodule
from interpreter import (  # noqa: F401
    DEVICE,
    both_ways,
    test_in_the_interpreter,
    where_kernels_run,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

T = 192
LAYOUTS = {"a middle": [(128, 192), (0, 64), (64, 128)], "none": [(96, 192), (0, 96)]}


@pytest.fixture
def device(kernel, monkeypatch):
    rules, convolutions = submodule("gdn.ops_context"), submodule("gdn_layer.ops_context")
    operations = [
        getattr(rules, x) for x in ("PIECES", "ENTRY", "BEGUN", "CHAIN", "CHUNK", "GRADIENT")
    ]
    operations += [submodule("kda.ops").CHUNK, submodule("kda.ops").GRADIENT]
    operations += [convolutions.CONVOLUTION, convolutions.CONVOLUTION_GRADIENT]
    for where in where_kernels_run(torch.device(DEVICE), monkeypatch, *operations):
        yield where.type


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def negative(x: torch.Tensor) -> torch.Tensor:
    """A view with the negative bit."""
    return torch._neg_view(-x)


class Case:
    """A function over the fragments, and by itself over the stream."""

    def __init__(self, kernel, cp, device: str):
        self.kernel, self.cp, self.device = kernel, cp, device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def shards(self, wide: list, dtype=None) -> list:
        """Leaves of this process, from the stream's tensors in fp64."""
        own = [self.cp.shard(x, self.dim) if self.dim in self.tokens(x) else x for x in wide]
        return [x.to(self.device, dtype or self.dtype).requires_grad_() for x in own]

    def tokens(self, x: torch.Tensor) -> tuple:
        return (self.dim,) if x.ndim > 2 and x.shape[self.dim] == T else ()


class Rule(Case):
    dim = 1

    def wide(self) -> list:
        H, HV, D = (2, 4, 128) if self.device == "cuda" else (1, 2, 16)
        q, k, v = (torch.randn(1, T, n, D, dtype=torch.float64) for n in (H, H, HV))
        g, beta = -torch.rand(1, T, HV, dtype=torch.float64), torch.rand(1, T, HV).double()
        return [x.to(self.dtype).double() for x in (q, k, v, 0.1 * g, beta)]

    def run(self, x: list, **options) -> torch.Tensor:
        return self.kernel.chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True, **options)[0]


class Channels(Rule):
    def wide(self) -> list:
        q, k, v, g, beta = super().wide()
        return [q, k, v, 0.1 * -torch.rand(1, T, *v.shape[2:3], q.shape[3]).double(), beta]

    def run(self, x: list, **options) -> torch.Tensor:
        return self.kernel.chunk_kda(*x, use_qk_l2norm_in_kernel=True, **options)[0]


class Convolution(Case):
    dim = 2

    def wide(self) -> list:
        x, weight = torch.randn(1, 8, T), torch.randn(8, 4)
        return [t.to(self.dtype).double() for t in (x, weight)]

    def run(self, x: list, **options) -> torch.Tensor:
        y = self.kernel.causal_conv1d_fn(*x, activation="silu", **options)
        return y[0] if isinstance(y, tuple) else y


def plain(case, leaves, dy) -> list:
    o = case.run(leaves, cp_context=case.cp)
    return [o, *torch.autograd.grad(o, leaves, dy)]


def known(case, leaves, dy) -> list:
    """A call like one before it."""
    plain(case, leaves, dy)
    return plain(case, leaves, dy)


def negative_inputs(case, leaves, dy) -> list:
    plain(case, leaves, dy)
    o = case.run([negative(x) for x in leaves], cp_context=case.cp)
    return [o, *torch.autograd.grad(o, leaves, dy)]


def negative_gradient(case, leaves, dy) -> list:
    plain(case, leaves, dy)
    return plain(case, leaves, negative(dy))


def gradient_without_memory(case, leaves, dy) -> list:
    o = case.run(leaves, cp_context=case.cp)
    nothing = torch._efficientzerotensor(o.shape, dtype=o.dtype, device=o.device)
    assert all(not x.any() for x in torch.autograd.grad(o, leaves, nothing, retain_graph=True))
    return [o, *torch.autograd.grad(o, leaves, dy)]


def counted(case, leaves, dy) -> list:
    with FlopCounterMode(display=False):
        return plain(case, leaves, dy)


def twice(case, leaves, dy) -> list:
    o = case.run(leaves, cp_context=case.cp)
    first = torch.autograd.grad(o, leaves, 3 * dy, retain_graph=True)
    second = torch.autograd.grad(o, leaves, dy)
    assert all(relative_error(a, 3 * b) < 1e-2 for a, b in zip(first, second))
    return [o, *second]


def copied(case, leaves, dy) -> list:
    """What is kept for the gradient is packed and unpacked."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        o = case.run(leaves, cp_context=case.cp)
    return [o, *torch.autograd.grad(o, leaves, dy)]


def checkpointed(case, leaves, dy) -> list:
    o = checkpoint(lambda *x: case.run(x, cp_context=case.cp), *leaves, use_reentrant=False)
    return [o, *torch.autograd.grad(o, leaves, dy)]


def autocast_outside(case, leaves, dy) -> list:
    """Gradients have the precision of the forward."""
    o = case.run(leaves, cp_context=case.cp)
    with torch.autocast(case.device, torch.float16):
        return [o, *torch.autograd.grad(o, leaves, dy)]


USES = (
    plain, known, negative_inputs, negative_gradient, gradient_without_memory, counted, twice,
    copied, checkpointed, autocast_outside,
)  # fmt: skip


@both_ways
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [Rule, Channels, Convolution])
def test_uses(kernel, group, device, monkeypatch, kind, layout, use):
    monkeypatch.setattr(submodule("parallel.exchange"), "agrees", lambda group: False)
    torch.manual_seed(0)
    lengths = torch.tensor([0, T], device=device)
    case = kind(kernel, kernel.build_cp_context(lengths, group, layout=[LAYOUTS[layout]]), device)
    wide = case.wide()
    want = case.run(stream := [x.requires_grad_() for x in wide])
    dy = torch.randn_like(want).to(case.dtype).double()
    want = [want, *torch.autograd.grad(want, stream, dy)]
    leaves = case.shards([x.detach() for x in wide])
    found = use(case, leaves, *[x.detach() for x in case.shards([dy])])
    limit = 1e-5 if device == "cpu" else 2e-2
    for a, b in zip(found, want):
        b = case.cp.shard(b.detach(), case.dim) if case.tokens(b) else b.detach()
        assert relative_error(a.detach().cpu(), b.cpu()) < limit
    o = case.run(leaves, cp_context=case.cp)
    (first,) = torch.autograd.grad(o.float().square().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="over ranks has no second derivative"):
        first.sum().backward()
