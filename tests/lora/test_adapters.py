"""Projections with low-rank adapters: values and gradients by the kernels, beside fp64."""

import pytest
import torch
from conftest import TOLERANCE, relative_error, submodule
from interpreter import (  # noqa: F401
    INTERPRETING,
    compiled,
    interpreted,
    test_in_the_interpreter,
    where_kernels_run,
)

ops = submodule("lora.ops")
dispatch = submodule("runtime.dispatch")
# M, K, and (N, rank) of each adapter: of one, of equal ones, and of others
SIZES = [
    (70, 40, [(33, 4)]),
    (65, 80, [(64, 8), (32, 8), (32, 8)]),
    (130, 72, [(48, 3), (130, 17), (16, 1), (24, 16)]),
] + ([] if INTERPRETING else [(4096, 4096, [(4096, 16), (1024, 16), (1024, 16)])])
# of x, and of the adapters; in the interpreter products in bf16 are not right
DTYPES = [(torch.float32, torch.float32)]
if not INTERPRETING:
    DTYPES += [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.fixture
def where(device, monkeypatch):
    yield from where_kernels_run(device, monkeypatch, ops.LORA, ops.GRADIENT)


def problem(M, K, outputs, dtype, device, drops=None, low=torch.float32):
    random = torch.Generator().manual_seed(0)

    def normal(*shape, kind=dtype, grad=True, scale=1.0):
        found = (torch.randn(*shape, generator=random) * scale).to(kind).to(device)
        return found.requires_grad_(grad)

    return (
        normal(M, K),
        [normal(N, K, grad=False, scale=K**-0.5) for N, _ in outputs],
        [normal(N, grad=False) if i % 2 else None for i, (N, _) in enumerate(outputs)],
        [normal(r, K, kind=low, scale=K**-0.5) for _, r in outputs],
        [normal(N, r, kind=low) for N, r in outputs],
        tuple(0.5 + i for i in range(len(outputs))),
        drops or (0.0,) * len(outputs),
    )


def exact(x, weights, biases, down, up, scales, drops, seed=None, wide=torch.float64):
    """Leaves and results in this dtype as PEFT computes them, with the masks of a seed."""
    leaves = [t.detach().to(wide).requires_grad_() for t in (x, *down, *up)]
    x, down, up = leaves[0], leaves[1 : 1 + len(down)], leaves[1 + len(down) :]
    found = []
    kept = submodule("lora.reference").is_kept
    for i, (w, bias, a, b, scale) in enumerate(zip(weights, biases, down, up, scales)):
        z, p = x, drops[i]
        if seed is not None:
            z = torch.where(kept(seed, i, *x.shape, p), x / (1 - p), 0.0)
        y = x @ w.to(wide).t() + z @ a.t() @ b.t() * scale
        found.append(y if bias is None else y + bias.to(wide))
    return leaves, found


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("dtype, low", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels(where, size, dtype, low, drop):
    drops = tuple(drop * (1 + i % 2) for i in range(len(size[2])))
    given = problem(*size, dtype, where, drops, low)
    x, _, _, down, up, *_ = given
    torch.manual_seed(3)
    ys = ops.adapted(*given)
    torch.manual_seed(3)
    seed = torch.randint(2**62, (1,), device=x.device) if any(drops) else None
    leaves, right = exact(*given, seed)
    dys = [
        torch.randn(y.shape, generator=torch.Generator().manual_seed(i)) for i, y in enumerate(ys)
    ]
    dys = [dy.to(dtype).to(where) for dy in dys]
    found = torch.autograd.grad(ys, (x, *down, *up), dys)
    true = torch.autograd.grad(right, leaves, [dy.double() for dy in dys])
    for ours, y in zip(ys, right):
        assert ours.dtype == dtype and relative_error(ours, y) < TOLERANCE[dtype]
    assert relative_error(found[0], true[0]) < TOLERANCE[dtype]
    for ours, theirs in zip(found[1:], true[1:]):
        assert ours.dtype == low
        fine = 5e-5 if dtype is torch.bfloat16 else 1e-5
        assert relative_error(ours, theirs) < (fine if low is torch.float32 else TOLERANCE[low])


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("dtype, low", DTYPES)
def test_over_given_products(where, dtype, low, drop):
    """As base layers compute them that are not plain weights; they are not overwritten."""
    x, weights, biases, down, up, scales, _ = problem(*SIZES[2], dtype, where, low=low)
    drops, absent = (drop,) * len(up), [None] * len(up)
    products = [(x.detach() @ w.t()).requires_grad_() for w in weights]
    before = [y.detach().clone() for y in products]
    torch.manual_seed(3)
    ys = ops.adapted(x, products, absent, down, up, scales, drops, True)
    torch.manual_seed(3)
    seed = torch.randint(2**62, (1,), device=x.device) if drop else None
    nothing = [torch.zeros_like(w) for w in weights]
    leaves, right = exact(x, nothing, absent, down, up, scales, drops, seed)
    dys = [torch.randn_like(y) for y in ys]
    found = torch.autograd.grad(ys, (x, *products, *down, *up), dys)
    true = torch.autograd.grad(right, leaves, [dy.double() for dy in dys])
    assert all(map(torch.equal, products, before))
    for ours, y, base in zip(ys, right, before):
        assert relative_error(ours, y + base) < TOLERANCE[dtype]
    count = len(ys)
    assert all(map(torch.equal, found[1 : 1 + count], dys))
    for ours, theirs in zip((found[0], *found[1 + count :]), true):
        assert relative_error(ours, theirs) < TOLERANCE[ours.dtype]


def test_rows_of_a_batch(where):
    """x of three dimensions, also of a part of each sequence, is its rows."""
    given = problem(*SIZES[1], torch.float32, where)
    x, leaves = given[0].detach(), (*given[3], *given[4])
    M, K = x.shape
    whole = x.new_full((5, M // 5 + 2, K), torch.nan)
    whole[:, :-2] = x.view(5, M // 5, K)
    ys = ops.adapted(x.requires_grad_(), *given[1:])
    dys = [torch.randn_like(y) for y in ys]
    right = torch.autograd.grad(ys, (x, *leaves), dys)
    for of in (x.detach().view(5, M // 5, K), whole[:, :-2]):
        of.requires_grad_()
        found = ops.adapted(of, *given[1:])
        assert all([torch.equal(a, b.view(a.shape)) for a, b in zip(found, ys)])
        dys = [dy.view(y.shape) for dy, y in zip(dys, found)]
        found = torch.autograd.grad(found, (of, *leaves), dys)
        assert found[0].shape == of.shape
        assert all([torch.equal(a.reshape(b.shape), b) for a, b in zip(found, right)])


def test_what_is_not_needed(where):
    """Gradients of frozen adapters, of outputs that no loss reads, and of an x that needs none."""
    given = problem(*SIZES[1], torch.float32, where)
    x, _, _, down, up, *_ = given
    down[1].requires_grad_(False)
    ys = ops.adapted(x.detach(), *given[1:])
    leaves, right = exact(*given)
    found = torch.autograd.grad(ys[1].sum(), up[1])[0]
    true = torch.autograd.grad(right[1].sum(), leaves[5])[0]
    assert relative_error(found, true) < 1e-5
    ys = ops.adapted(*given)
    leaves, right = exact(*given)
    found = torch.autograd.grad(ys[0].sum() + ys[2].sum(), (x, down[2]))
    true = torch.autograd.grad(right[0].sum() + right[2].sum(), (leaves[0], leaves[3]))
    for ours, theirs in zip(found, true):
        assert relative_error(ours, theirs) < 1e-5


def test_gradients_that_kernels_cannot_read(where):
    """Views with the negative bit, and zeros without memory."""
    given = problem(*SIZES[1], torch.float32, where)
    leaves = (given[0], *given[3], *given[4])
    ys = ops.adapted(*given)
    dys = [torch.randn_like(y) for y in ys]
    nothing = torch._efficientzerotensor(dys[0].shape, device=dys[0].device)
    for ours, theirs in (
        ([torch._neg_view(-dy) for dy in dys], dys),
        ([nothing, *dys[1:]], [torch.zeros_like(dys[0]), *dys[1:]]),
    ):
        found = torch.autograd.grad(ys, leaves, ours, retain_graph=True)
        want = torch.autograd.grad(ys, leaves, theirs, retain_graph=True)
        assert all(map(torch.equal, found, want))


def test_repeats_and_no_second_derivative(where):
    given = problem(*SIZES[2], torch.float32, where)
    tensors, found = (given[0], *given[3], *given[4]), []
    for _ in range(2):
        ys = ops.adapted(*given)
        found.append((*ys, *torch.autograd.grad([y.sum() for y in ys], tensors)))
    assert all(map(torch.equal, *found))
    (dx,) = torch.autograd.grad(ops.adapted(*given)[0].sum(), given[0], retain_graph=True)
    (again,) = torch.autograd.grad(ops.adapted(*given)[0].sum(), given[0], create_graph=True)
    assert torch.equal(again, dx)
    with pytest.raises(NotImplementedError, match="adapters has no second derivative"):
        again.sum().backward()


@compiled
def test_the_reference(device):
    given = problem(*SIZES[2], torch.float64, device)
    wide = [[t.detach().double().requires_grad_() for t in ts] for ts in given[3:5]]
    given = (*given[:3], *wide, *given[5:])
    with dispatch.force("reference"):
        ys = ops.adapted(*given)
    leaves, right = exact(*given)
    for ours, y in zip(ys, right):
        assert relative_error(ours, y) < 1e-12
    tensors = (given[0], *given[3], *given[4])
    dys = [torch.randn_like(y) for y in ys]
    true = torch.autograd.grad(right, leaves, dys)
    reference, options = submodule("lora.reference"), (*given[5:], False, True, True, True)
    absent = (None,) * (4 - len(ys))
    h = torch.cat([given[0] @ a.t() for a in given[3]], 1)
    parts = (
        given[0],
        h,
        None,
        *given[1],
        *absent,
        *given[3],
        *absent,
        *given[4],
        *absent,
        *dys,
        *absent,
    )
    for found in (torch.autograd.grad(ys, tensors, dys), reference.lora_bwd(*parts, *options)):
        for ours, theirs in zip(found, true):
            assert relative_error(ours, theirs) < 1e-12


@compiled
def test_masks(device):
    """Of independent numbers, with the probability that was asked for, and others for each seed,
    adapter, row and column."""
    kept = submodule("lora.reference").is_kept
    seeds = torch.tensor([[3], [4], [1 << 40]], device=device)
    masks = torch.stack([kept(seed, i, 512, 640, 0.1) for seed in seeds for i in range(3)]).float()
    assert (masks.mean((1, 2)) - 0.9).abs().max() < 4 * (0.09 / 512 / 640) ** 0.5
    for dim in (1, 2):  # of rows and of columns: as far from the mean as chance has it
        spread = masks.mean(dim).var(1) * masks.shape[dim] / 0.09
        assert (spread - 1).abs().max() < 0.3
    centred = masks.flatten(1) - 0.9
    together = centred @ centred.t() / centred.shape[1] / 0.09
    assert (together - torch.eye(9, device=device)).abs().max() < 0.02
    for a, b in ((masks[:, 1:], masks[:, :-1]), (masks[:, :, 1:], masks[:, :, :-1])):
        assert (((a - 0.9) * (b - 0.9)).mean((1, 2)) / 0.09).abs().max() < 0.01
