"""linear_cross_entropy and token_log_probs: values, gradients, ways, what counts, and errors."""

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE, relative_error, submodule
from interpreter import (  # noqa: F401
    INTERPRETING,
    compiled,
    interpreted,
    test_in_the_interpreter,
    where_kernels_run,
)

ops, checks = submodule("loss.ops"), submodule("loss.checks")
dispatch = submodule("runtime.dispatch")
# of (M, H, V): rows and words that are no multiple of anything, one of each
SIZES = [(13, 24, 301), (1, 8, 1), (70, 16, 65)] + (
    [] if INTERPRETING else [(1500, 64, 50257), (300, 128, 151665)]
)
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETING else [torch.bfloat16])
FORMS = [
    {}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"softcap": 3.0},
    {"temperature": 0.7, "reduction": "sum"}, {"ignore_index": 0},
    {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 5.0, "temperature": 2.0},
]  # fmt: skip


@pytest.fixture
def where(device, monkeypatch):
    operations = ops.LINEAR_LOSS, ops.LINEAR_LOSS_GRADIENT, ops.TOKENS, ops.TOKENS_GRADIENT
    yield from where_kernels_run(device, monkeypatch, *operations)


def by_way(monkeypatch, way, step=5):
    monkeypatch.setattr(checks, "way_of", lambda *sizes: way)
    monkeypatch.setattr(checks, "rows_of_piece", lambda *sizes: step)


def problem(M, H, V, dtype, device, bias=False, ignore_index=-100):
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=random).to(dtype) for n in (M, V))
    target = torch.randint(V, (M,), generator=random)
    if M > 2:
        target[[1, M // 2]] = ignore_index
    tensors = [hidden, weight] + [torch.randn(V, generator=random).to(dtype)] * bias
    return [x.to(device).requires_grad_() for x in tensors], target.to(device)


def by_torch(tensors, target, dtype=torch.float64, temperature=1.0, softcap=None):
    """(leaves, log-probabilities [M, V]) in this dtype from logits."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    z = F.linear(*leaves).to(torch.promote_types(dtype, torch.float32)) / temperature
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return leaves, z


def exact(tensors, target, dtype=torch.float64, dloss=1.0, **form):
    """The loss and the gradients in this dtype from logits."""
    more = {k: form[k] for k in ("temperature", "softcap") if k in form}
    leaves, z = by_torch(tensors, target, dtype, **more)
    index = form.get("ignore_index", -100)
    loss = F.cross_entropy(
        z, target, ignore_index=index, label_smoothing=form.get("label_smoothing", 0.0),
        reduction="none",
    )  # fmt: skip
    lse = torch.where(target == index, 0.0, z.logsumexp(1))
    loss = (loss + form.get("z_loss", 0.0) * lse**2).sum()
    if form.get("reduction", "mean") == "mean":
        loss = loss / (target != index).sum()
    return loss.detach(), torch.autograd.grad(loss, leaves, loss.new_tensor(dloss))


def compare(found, tensors, target, right, factor, **form):
    """Within torch's own error from logits of this dtype, and the table's tolerance in fp32."""
    dtype = tensors[0].dtype
    torchs = exact(tensors, target, dtype, **form)
    for ours, theirs, true in zip(
        (found[0], *found[1]), (torchs[0], *torchs[1]), (right[0], *right[1])
    ):
        limit = max(factor * relative_error(theirs, true), TOLERANCE[torch.float32])
        if dtype is torch.float16:
            limit = max(limit, TOLERANCE[dtype])
        assert relative_error(ours, true) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["kept", "rows"])
def test_ways(kernel, where, monkeypatch, way, size, dtype):
    by_way(monkeypatch, way, 5 if size[0] < 100 else 512)
    for bias in (False, True):
        tensors, target = problem(*size, dtype, where, bias)
        with dispatch.served() as record:
            loss = kernel.linear_cross_entropy(tensors[0], tensors[1], target, *tensors[2:])
            for _ in range(2):  # a second backward finds the same
                gradients = torch.autograd.grad(loss * 0.37, tensors, retain_graph=True)
                right = exact(tensors, target, dloss=0.37)
                # rows: made in the forward and multiplied in the backward, rounded twice
                factor = 1.1 if way == "kept" else 1.5
                compare((loss, gradients), tensors, target, right, factor, dloss=0.37)
        assert "reference" not in sum(record.values(), [])
        assert loss.dtype == torch.float32 and gradients[0].dtype == dtype


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["kept", "rows", "words", "reference"])
def test_forms(kernel, device, monkeypatch, request, way, form):
    if way != "reference":
        request.getfixturevalue("where")
    elif device.type != "cpu":
        pytest.skip("on a GPU kernels compute it")
    by_way(monkeypatch, way)
    index = form.get("ignore_index", -100)
    tensors, target = problem(13, 24, 301, torch.float32, device, ignore_index=index)
    right = exact(tensors, target, **form)
    if way == "words":
        given = {**form, "reduction": "none"}
        each = kernel.linear_cross_entropy(tensors[0], tensors[1], target, **given)
        assert each[target == index].eq(0).all()
        loss = each.sum()
        if form.get("reduction") != "sum":
            loss = loss / (target != index).sum()
    else:
        loss = kernel.linear_cross_entropy(tensors[0], tensors[1], target, **form)
    found = loss, torch.autograd.grad(loss, tensors)
    for ours, true in zip((found[0], *found[1]), (right[0], *right[1])):
        assert relative_error(ours, true) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "softcap": 4.0}])
@pytest.mark.parametrize("way", ["kernels", "reference"])
def test_tokens(kernel, device, monkeypatch, request, way, options, more):
    if way == "kernels":
        request.getfixturevalue("where")
    by_way(monkeypatch, "words")
    tensors, target = problem(14, 24, 301, torch.float32, device)
    leaves, z = by_torch(tensors, target, **options)
    logs, counts = z.log_softmax(1), target != -100
    right = [logs.gather(1, target.clamp(0)[:, None])[:, 0], -(logs.exp() * logs).sum(1)]
    right = [torch.where(counts, x, 0.0).view(2, 7) for x in right]
    shape = (tensors[0].view(2, 7, 24), tensors[1], target.view(2, 7))
    found = kernel.token_log_probs(*shape, entropy=more, **options)
    found = found if more else (found,)
    factors = torch.randn(2, 2, 7, generator=torch.Generator().manual_seed(2)).to(device)
    total = sum([(x * f).sum() for x, f in zip(found, factors)])
    of_torch = sum([(x * f).sum() for x, f in zip(right[: len(found)], factors)])
    for ours, true in zip(found, right):
        assert ours.shape == (2, 7) and relative_error(ours, true) < TOLERANCE[torch.float32]
    for ours, true in zip(
        torch.autograd.grad(total, tensors), torch.autograd.grad(of_torch, leaves)
    ):
        assert relative_error(ours, true) < 2 * TOLERANCE[torch.float32]


def test_gradients_that_are_not_needed(kernel, where, monkeypatch):
    """Of a frozen weight, frozen hidden states, and none at all."""
    for way in ("kept", "rows"):
        by_way(monkeypatch, way)
        tensors, target = problem(13, 24, 301, torch.float32, where, True)
        right = exact(tensors, target)
        for frozen in (1, 0, 2):
            given = [x.detach() if i == frozen else x for i, x in enumerate(tensors)]
            leaves = [x for x in given if x.requires_grad]
            loss = kernel.linear_cross_entropy(*given[:2], target, given[2])
            others = [g for i, g in enumerate(right[1]) if i != frozen]
            for ours, true in zip(torch.autograd.grad(loss, leaves), others):
                assert relative_error(ours, true) < TOLERANCE[torch.float32]
        with torch.no_grad():
            loss = kernel.linear_cross_entropy(tensors[0], tensors[1], target, tensors[2])
        assert relative_error(loss, right[0]) < TOLERANCE[torch.float32]


def test_no_target_counts(kernel, device, monkeypatch):
    """The mean of nothing is NaN with gradients of zeros, as torch has it; so with no rows."""
    for way in ("kept", "rows"):
        by_way(monkeypatch, way)
        tensors, target = problem(9, 24, 31, torch.float32, device)
        for rows in (9, 0):
            given, none = tensors[0][:rows], torch.full_like(target[:rows], -100)
            for reduction in ("mean", "sum"):
                loss = kernel.linear_cross_entropy(given, tensors[1], none, reduction=reduction)
                assert loss.isnan() if reduction == "mean" else loss == 0
                for gradient in torch.autograd.grad(loss, tensors):
                    assert gradient.eq(0).all()
        assert kernel.token_log_probs(tensors[0][:0], tensors[1], target[:0]).shape == (0,)


def test_values_that_are_not_finite(kernel, where, monkeypatch):
    """NaN and minus infinity in hidden states: only where they count."""
    for way in ("kept", "rows"):
        by_way(monkeypatch, way)
        tensors, target = problem(9, 24, 31, torch.float32, where)
        with torch.no_grad():
            tensors[0][1] = float("nan")  # ignored
        loss = kernel.linear_cross_entropy(tensors[0], tensors[1], target)
        dhidden, dweight = torch.autograd.grad(loss, tensors)
        assert loss.isfinite() and dhidden[1].eq(0).all()
        with torch.no_grad():
            tensors[0][2] = float("nan")
        assert kernel.linear_cross_entropy(tensors[0], tensors[1], target).isnan()


@pytest.mark.parametrize("factor", [65536.0, 1 / 3])
def test_factors_of_a_scaler_lose_nothing(kernel, where, monkeypatch, factor):
    """In fp16 the gradient of a mean over many rows would be below the smallest number."""
    for way in ("kept", "rows"):
        by_way(monkeypatch, way)
        tensors, target = problem(40, 24, 301, torch.float16, where)
        loss = kernel.linear_cross_entropy(tensors[0], tensors[1], target)
        found = torch.autograd.grad(loss * factor, tensors)
        right = exact(tensors, target, dloss=factor)[1]
        for ours, true in zip(found, right):
            assert relative_error(ours, true) < 2 * TOLERANCE[torch.float16]


def test_repeats(kernel, where, monkeypatch):
    for way in ("kept", "rows"):
        by_way(monkeypatch, way)
        tensors, target = problem(13, 24, 301, torch.float32, where)
        found = []
        for _ in range(2):
            loss = kernel.linear_cross_entropy(tensors[0], tensors[1], target)
            found.append((loss, *torch.autograd.grad(loss, tensors)))
        assert all(map(torch.equal, *found))


def test_the_rule():
    """ "kept" holds less up to 2 H + H / 2 tokens; with a frozen weight up to 2048."""
    assert checks.way_of(10240, 4096, True) == "kept"
    assert checks.way_of(10241, 4096, True) == "rows"
    assert checks.way_of(2048, 4096, False) == "kept"
    assert checks.way_of(2049, 4096, False) == "rows"


@compiled
def test_second_derivatives_are_refused(kernel, device):
    tensors, target = problem(13, 24, 31, torch.float32, device)
    if device.type == "cpu":
        pytest.skip("torch's own there")
    for function in (kernel.linear_cross_entropy, kernel.token_log_probs):
        out = function(tensors[0], tensors[1], target).sum()
        (gradient,) = torch.autograd.grad(out, tensors[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="has no second derivative"):
            gradient.sum().backward()


@compiled
@pytest.mark.parametrize("function", ["linear_cross_entropy", "token_log_probs"])
def test_traced(kernel, device, function):
    """In one graph, and the same as eager."""
    call = getattr(kernel, function)

    def step(hidden, weight, target):
        out = call(hidden, weight, target)
        return out.sum()

    tensors, target = problem(13, 24, 301, torch.float32, device)
    right = torch.autograd.grad(step(*tensors, target), tensors)
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(traced(*tensors, target), tensors)
    torch.compiler.reset()
    for ours, true in zip(found, right):
        assert relative_error(ours, true) < TOLERANCE[torch.float32]
