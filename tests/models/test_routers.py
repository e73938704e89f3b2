"""Tests of the recognition of routers of experts and of blocks with a shared expert."""

import copy

import pytest
import torch
from conftest import relative_error, submodule
from router_forms import BLOCKS, ROUTERS, Block, E, H, Plain
from tiny_models import serve_blocks

blocks = submodule("models.moe_blocks")
Once, Scaled = BLOCKS["once"][0], ROUTERS["scaled"][0]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("trusts_all")


def made(kind, dtype=torch.float32):
    torch.manual_seed(0)
    return kind().to(dtype).eval()


def dense(logits, weights, ids):
    """Logits, and the weights of all experts."""
    wide = torch.zeros(logits.shape, dtype=torch.float64)
    return torch.stack([logits.double(), wide.scatter(1, ids.long(), weights.double())])


def apart(T, dtype):
    """Inputs [T, H] with which no two experts have scores of one rounding."""
    random = torch.Generator().manual_seed(2)
    return torch.randn(T, H, generator=random).to(dtype)


def refusal(module):
    with pytest.raises(blocks.Refused) as found:
        blocks.form_of(module)
    return str(found.value)


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(kernel, everywhere, name):
    kind, wanted = ROUTERS[name]
    if isinstance(wanted, str):
        assert wanted in refusal(made(kind))
        return
    form = blocks.form_of(made(kind))
    assert {name: getattr(form.found, name) for name in wanted} == wanted
    for dtype in DTYPES:
        served = made(kind, dtype)
        plain, given = copy.deepcopy(served), [apart(40, dtype)]
        if form.found.bias in form.arguments:
            given.append(torch.linspace(-0.3, 0.3, E))
        serve_blocks(served)
        assert submodule("models.serving").is_served(served)
        with submodule("runtime.dispatch").served() as record:
            mine, theirs = ([m(*given)[i] for i in form.found.order] for m in (served, plain))
        assert record["topk_fwd"]
        assert [out.dtype for out in mine] == [out.dtype for out in theirs]
        eps = torch.finfo(theirs[1].dtype).eps
        same = (dense(*mine) - dense(*theirs)).abs() <= 4 * eps * dense(*theirs).abs() + 1e-6
        assert same.all(-1).all(0).float().mean() > 0.9  # of two that are alike either is chosen
        assert torch.equal(mine[0], theirs[0])


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(kernel, everywhere, name):
    kind, wanted = BLOCKS[name]
    if wanted is not None:
        assert wanted in refusal(made(kind))
        return
    served = made(kind)
    plain, x = copy.deepcopy(served), apart(6, torch.float32).view(2, 3, H)
    serve_blocks(served)
    with submodule("runtime.dispatch").served() as record:
        assert torch.allclose(served(x), plain(x), atol=1e-6)
    assert record["shared_fwd"]


def test_what_changes_afterwards(kernel, everywhere):
    """Values, parts and methods that were looked at, and weights of another shape."""
    x = apart(6, torch.float32)
    for kind, name, value in (
        (Plain, "top_k", 2), (Plain, "normalizes", False), (Once, "one", 3.0),
        (Plain, "weight", torch.nn.Parameter(torch.randn(E + 1, H))), (Once, "shared_expert", None),
    ):  # fmt: skip
        served = made(kind)
        plain = copy.deepcopy(served)
        serve_blocks(served)
        x = x.view(2, 3, H) if kind is Once else x
        setattr(served, name, value)
        setattr(plain, name, value)
        if value is None:
            with pytest.raises(TypeError):
                served(x)
            continue
        found, expected = (m(x) for m in (served, plain))
        found, expected = ([out] if kind is Once else out for out in (found, expected))
        assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(found, expected))


def test_inputs_that_no_trial_had(kernel, everywhere):
    router = made(Plain)
    plain = copy.deepcopy(router)
    serve_blocks(router)
    for x in (torch.randn(H), torch.randn(2, 3, 2, H), torch.randn(0, H)):
        assert all(map(torch.equal, router(x), plain(x)))
    for x in (torch.randn(3, H).double(), torch.randn(3, H + 1)):
        with pytest.raises(RuntimeError):
            plain(x)
        with pytest.raises(RuntimeError):
            router(x)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(5, H)
        assert all(map(torch.equal, router(x), plain(x)))


def test_an_argument_is_given_in_another_way(kernel, everywhere):
    """By position or by name, too few, None, twice, and in another shape."""
    x, bias = apart(6, torch.float32), torch.linspace(1.0, -1.0, E)
    for name in ("given", "given or not", "not given"):
        served = made(ROUTERS[name][0])
        plain = copy.deepcopy(served)
        serve_blocks(served)
        for args, words in (
            ((x, bias), {}), ((x,), {"bias": bias}), ((), {"x": x, "bias": bias}), ((x,), {}),
            ((x, None), {}), ((x, bias), {"bias": bias}), ((x, bias[:-1]), {}), ((x, 0.5), {}),
            ((x, bias, bias), {}), ((), {"bias": bias}), ((x,), {"word": bias}),
        ):  # fmt: skip
            wanted, found = (outcome(m, args, words) for m in (plain, served))
            assert type(found) is type(wanted)
            if isinstance(wanted, tuple):
                assert torch.allclose(dense(*found), dense(*wanted), atol=1e-6)


def outcome(module, args, words):
    try:
        return module(*args, **words)
    except (RuntimeError, TypeError) as error:
        return error


def test_a_form_is_tried_once(kernel, monkeypatch):
    tried = []
    for name in ("find_choice", "find_parts"):
        find = getattr(blocks, name)
        monkeypatch.setattr(blocks, name, lambda *a, find=find: tried.append(a[1]) or find(*a))
    monkeypatch.setattr(submodule("models.trial"), "_found", {})
    model = torch.nn.ModuleList(made(kind) for kind in (Block, Block, Scaled, Scaled))
    for _ in range(2):
        serve_blocks(model)
        assert sorted(map(id, tried)) == sorted(map(id, (Block, Plain, Scaled)))


class Head(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(experts, 4096, device="meta"))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


class ChoosingHead(Head):
    def forward(self, x):
        logits = super().forward(x)
        return logits, *logits.softmax(-1).topk(8)


@pytest.mark.parametrize("head", [Head(64), Head(5000), ChoosingHead(5000)])
def test_a_head_of_a_vocabulary_is_not_tried(kernel, monkeypatch, head):
    monkeypatch.setattr(submodule("models.router_trial"), "random", None)
    assert refusal(head) == "it does not choose among at most 4096 experts"
    assert serve_blocks(head) == []


def test_compiles_in_one_graph(kernel, everywhere):
    module = made(Block)
    serve_blocks(module)
    x = apart(6, torch.float32).view(2, 3, H)
    for part, given in ((module, x), (module.gate, x)):
        torch._dynamo.reset()
        compiled = torch.compile(part, fullgraph=True, backend="eager")
        assert torch.allclose(dense_or_same(compiled(given)), dense_or_same(part(given)), atol=1e-6)


def dense_or_same(out):
    return dense(*out) if isinstance(out, tuple) else out


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 300])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_product_in_fp32_of_halves(dtype, T):
    """By tensor cores or, of one token, without; and with a gradient where one is wanted."""
    x, weight = torch.randn(T, 2048, device="cuda"), torch.randn(96, 2048, device="cuda")
    x, weight = x.to(dtype), weight.to(dtype)
    kind = submodule("models.router_trial").Choice
    choice = kind(**{**dict.fromkeys(kind._fields), "wide": True, "shape": weight.shape})
    wanted = x.double() @ weight.double().T
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            found = choice.logits(x, (weight, None, None))
        assert found.dtype == torch.float32 and relative_error(found, wanted) < 1e-5
    learned = choice.logits(x, (weight.requires_grad_(), None, None))
    (gradient,) = torch.autograd.grad(learned.sum(), weight)
    assert gradient.dtype == dtype and relative_error(learned, wanted) < 1e-6
