"""fused_topk and add_shared: reference, kernels, gradients, and the modules that they serve."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, prepared, relative_error, submodule
from interpreter import INTERPRETING, compiled, test_in_the_interpreter  # noqa: F401
from tiny_models import check_the_same, random_model, serve_blocks, tokens

reference, ops_shared = submodule("experts.reference"), submodule("experts.ops_shared")
calls = submodule("experts.call")
TopkOptions, TOPK = calls.TopkOptions, "experts.portable.topk"
blocks = submodule("models.moe_blocks")
DEVICES = ["cpu"] if INTERPRETING else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The interpreter rounds to bf16 in its own way
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETING else [torch.bfloat16])
OPTIONS = [
    {}, {"renormalize": False}, {"scoring": "sigmoid", "scale": 2.5},
    {"scoring": "sigmoid", "renormalize": False}, {"scoring": "sigmoid", "bias": True},
    {"bias": True, "dtype": torch.float32}, {"scoring": "sigmoid", "eps": 0.3, "scale": 2.5},
    {"scoring": "sigmoid", "eps": 0.0, "bias": True},
]  # fmt: skip
SIZES = [(1, 4, 1), (5, 7, 7), (33, 60, 4), (9, 256, 8), (4, 512, 10), (3, 1000, 16)]


@pytest.fixture(autouse=True)
def kernels_in_the_interpreter(request):
    if INTERPRETING:
        request.getfixturevalue("by_portable")


def problem(T, E, K, kind=torch.float32, device="cpu", bias=False, **options):
    random = torch.Generator(device=device).manual_seed(T + E)
    logits = (2 * torch.randn(T, E, generator=random, device=device)).to(kind)
    bias = torch.randn(E, generator=random, device=device) if bias else None
    return logits, K, {"bias": bias, **options}


def by_torch(
    logits, top_k, bias, scoring="softmax", renormalize=True, scale=1.0, dtype=None, eps=0.0
):
    """Reference router, written like those of transformers."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    ids = (scores if bias is None else scores + bias).topk(top_k, -1)[1]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * scale, ids


def topk_options(K, dtype, given):
    scoring, renormalize = given.get("scoring", "softmax"), given.get("renormalize", True)
    options = TopkOptions(K, scoring, renormalize, given.get("scale", 1.0), dtype)
    return options._replace(eps=given.get("eps", 0.0))


def topk_bwd(dweights, logits, ids, options):
    return prepared(TOPK, "topk_bwd", calls.TopkGradient, dweights, logits, ids, *options)


def shared_fwd(*tensors):
    return prepared("experts.portable.shared", "shared_fwd", calls.Shared, *tensors)


def shared_bwd(*tensors):
    return prepared("experts.portable.shared", "shared_bwd", calls.SharedGradient, *tensors)


def distinct(logits):
    """No two logits of a token are equal, whatever they were rounded to."""
    order = logits.float().argsort(-1).argsort(-1).to(logits.dtype)
    return order / 32 - 3


def check(function, T, E, K, kind, device, **options):
    logits, K, options = problem(T, E, K, kind, device, **options)
    if kind == torch.float32:
        logits = distinct(logits)
    weights, ids = function(logits, K, **options)
    exact, theirs = by_torch(logits.double(), K, **options)
    assert ids.dtype == torch.int64 and weights.dtype == (options.get("dtype") or kind)
    if kind == torch.float32:  # in others logits are equal by chance
        assert torch.equal(ids, theirs)
    assert relative_error(weights, exact) < {torch.float32: 1e-6}.get(weights.dtype, 4e-3)
    again = reference.topk_fwd(logits, options["bias"], topk_options(K, weights.dtype, options))
    assert torch.equal(ids, again[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_values(kernel, device, dtype, options):
    for sizes in SIZES:
        check(kernel.fused_topk, *sizes, dtype, device, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_rounded(kernel, device, dtype, scoring):
    """Every step in the dtype of the logits, as torch rounds it there: LFM2-MoE's."""
    of_bias = dict.fromkeys((None, torch.float32, dtype))
    for (T, E, K), kind in itertools.product(((40, 32, 4), (9, 60, 6), (3, 4, 4)), of_bias):
        logits, _, _ = problem(T, E, K, dtype, device)
        bias = None if kind is None else torch.linspace(-0.2, 0.2, E, device=device).to(kind)
        options = {"scoring": scoring, "eps": 1e-6, "scale": 2.5, "rounds": True}
        with submodule("runtime.dispatch").served() as record:
            weights, ids = kernel.fused_topk(logits, K, bias=bias, **options)
        assert record["topk_fwd"] == ["reference" if device == "cpu" and not INTERPRETING
                                      else "portable"]  # fmt: skip
        scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if bias is None else scores + bias
        wanted = choice.sort(dim=-1, descending=True, stable=True)[1][:, :K]
        alike = (ids == wanted).all(-1)
        assert alike.float().mean() > 0.9  # exp may round a score to its neighbour
        chosen = scores.gather(-1, wanted)
        exact = chosen / (chosen.sum(-1, keepdim=True) + 1e-6) * 2.5
        assert weights.dtype == dtype
        apart = (weights - exact).abs()[alike] / exact[alike]
        steps = apart / torch.finfo(dtype).eps
        if dtype == torch.float32:  # a GPU's exp is off by some of these steps
            assert steps.max() <= 32
        else:
            assert steps.max() <= 4 and (steps == 0).float().mean() > 0.9


INF, NAN = float("inf"), float("nan")
TIES = [
    ([0.0, -0.0, 1.0, 1.0, -1.0], [2, 3, 0]),
    ([5.0] * 5, [0, 1, 2]),
    ([-INF, -INF, 3.0, -INF, 2.0], [2, 4, 0]),
    ([1e-9, 2e-9, 0.0, 3e-9, -1.0], [3, 1, 0]),  # of equal scores in fp32
    ([1.0, NAN, 2.0, -NAN, INF], [1, 3, 4]),
    ([-300.0, -200.0, 0.0, -400.0, -250.0], [2, 1, 4]),  # whose scores are 0
]


@pytest.mark.parametrize("device", DEVICES)
def test_ties(kernel, device):
    logits, expected = (torch.tensor(list(part), device=device) for part in zip(*TIES))
    weights, ids = kernel.fused_topk(logits, 3)
    assert torch.equal(ids, expected)
    assert weights[4].isnan().all() and weights[[0, 1, 2, 3, 5]].isfinite().all()
    assert_close(weights[2], torch.tensor([1.0, 0.0, 0.0]).to(weights) * weights[2, 0] +
                 torch.tensor([0.0, 1.0, 0.0]).to(weights) * weights[2, 1])  # fmt: skip


def check_gradients(T, E, K, kind, device, **options):
    """By the reference on a CPU, by the kernels elsewhere, against torch in fp64."""
    function = topk_bwd if INTERPRETING or device == "cuda" else reference.topk_bwd
    logits, K, options = problem(T, E, K, kind, device, **options)
    wide = logits.double().requires_grad_()
    weights, ids = by_torch(wide, K, **options)
    dweights = torch.randn(T, K, device=device, dtype=torch.float64)
    exact = torch.autograd.grad(weights, wide, dweights)[0]
    chosen = topk_options(K, kind, options)
    found = function(dweights.float(), logits, ids, chosen)
    assert found.dtype == kind
    if K > 1 or not chosen.renormalize:  # one weight alone is always 1; 1 - sigmoid cancels
        assert relative_error(found, exact) < {torch.float32: 1e-5}.get(kind, 4e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(options, dtype, device):
    for sizes in SIZES:
        check_gradients(*sizes, dtype, device, **options)


@compiled
def test_too_many_experts_for_a_program():
    """Forward and gradient, which an operator computes by the same means."""
    for E, K, served in ((1024, 64, True), (1025, 2, False), (200, 65, False)):
        logits, weights = torch.randn(2, E), torch.randn(2, K)
        options, module = TopkOptions(K, "softmax", True, 1.0, torch.float32), submodule(TOPK)
        call = calls.Topk(logits, None, options)
        assert (module.prepare_topk_fwd(call) is not None) == served
        call = calls.TopkGradient(weights, logits, weights.long(), options)
        assert (module.prepare_topk_bwd(call) is not None) == served


def shared_problem(T, H, dtype, device="cpu"):
    random = torch.Generator(device=device).manual_seed(T)
    rows = [torch.randn(T, H, generator=random, device=device).to(dtype) for _ in range(4)]
    w_gate = (torch.randn(H, generator=random, device=device) * H**-0.5).to(dtype)
    return (*rows[:3], w_gate), rows[3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T, H", [(1, 8), (3, 200), (2, 5000), (70, 2048)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared(T, H, dtype, device):
    forward, backward = reference.shared_fwd, reference.shared_bwd
    if INTERPRETING or device == "cuda":
        forward, backward = shared_fwd, shared_bwd
    args, dout = shared_problem(T, H, dtype, device)
    wide = [t.double().requires_grad_() for t in args]
    routed, shared, x, w_gate = wide
    exact = routed + (x @ w_gate).sigmoid().unsqueeze(-1) * shared
    limit = {torch.float32: 1e-6, torch.float16: 6e-4}.get(dtype, 4e-3)
    assert relative_error(forward(*args), exact) < limit
    _, dshared, dx, _ = torch.autograd.grad(exact, wide, dout.double())
    found = backward(dout, *args[1:])
    dgate = dx @ w_gate / (w_gate @ w_gate)
    for mine, right in zip(found, (dshared, dx, dgate)):
        assert mine.dtype == dtype and relative_error(mine, right) < limit


@compiled
@pytest.mark.parametrize("device", DEVICES)
def test_shared_autograd(device):
    args, dout = shared_problem(5, 24, torch.float32, device)
    leaves = [t.requires_grad_() for t in args]
    found = torch.autograd.grad(ops_shared.add_shared(*leaves), leaves, dout)
    routed, shared, x, w_gate = leaves
    exact = routed + (x @ w_gate).sigmoid().unsqueeze(-1) * shared
    for mine, right in zip(found, torch.autograd.grad(exact, leaves, dout)):
        assert_close(mine, right)


# --- in transformers' models


def served_names(rows):
    return sorted({row.kind for row in rows if row.reason is None})


@compiled
def test_models_give_the_same(everywhere):
    for name, kinds in (
        ("qwen3_5_moe_text", ["Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeTopKRouter"]),
        ("qwen3_next", ["Qwen3NextSparseMoeBlock", "Qwen3NextTopKRouter"]),
    ):
        model = random_model(name)
        served = copy.deepcopy(model)
        assert served_names(serve_blocks(served)) == kinds
        check_the_same(served, model)
        assert list(served.state_dict()) == list(model.state_dict())


@compiled
def test_router_logits_are_still_recorded(everywhere):
    model = random_model("qwen3_next")
    served = copy.deepcopy(model)
    serve_blocks(served)
    found, expected = (
        m(tokens(1, 5), output_router_logits=True).router_logits for m in (served, model)
    )
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected):
        assert torch.allclose(mine, theirs, atol=1e-5)


@compiled
def test_left_alone_without_kernels():
    rows = serve_blocks(random_model("qwen3_next"))
    assert {row.reason for row in rows} == {"there are no kernels for cpu"}


def sigmoid_router(groups=1, chosen=1, **attributes):
    modeling = pytest.importorskip("transformers.models.glm4_moe.modeling_glm4_moe")
    router = object.__new__(modeling.Glm4MoeTopkRouter)
    torch.nn.Module.__init__(router)
    router.weight = torch.nn.Parameter(torch.randn(12, 8))
    router.register_buffer("e_score_correction_bias", torch.randn(12))
    router.hidden_dim, router.top_k, router.num_experts = 8, 3, 12
    router.num_group, router.topk_group, router.norm_topk_prob = groups, chosen, True
    router.routed_scaling_factor = 2.5
    for name, value in attributes.items():
        setattr(router, name, value)
    return router


@compiled
@pytest.mark.parametrize("groups", [(1, 1), (3, 3)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_sigmoid_router(everywhere, groups, renormalize):
    router = sigmoid_router(*groups, norm_topk_prob=renormalize)
    choice = blocks.form_of(router).found
    assert (choice.wide, choice.scoring, choice.scale) == (True, "sigmoid", 2.5)
    assert (choice.bias, choice.added) == ("e_score_correction_bias", None)
    assert (choice.top_k, choice.renormalize) == (3, renormalize)
    x = torch.randn(5, 8)
    _, weights, ids = router(x)
    assert served_names(serve_blocks(router)) == ["Glm4MoeTopkRouter"]
    logits, mine, my_ids = router(x)
    dense, theirs = (torch.zeros(5, 12).scatter(1, *p) for p in ((my_ids, mine), (ids, weights)))
    assert torch.allclose(dense, theirs, atol=1e-6)


@compiled
@pytest.mark.parametrize("name, value", [
    ("top_k", 2), ("norm_topk_prob", False), ("routed_scaling_factor", 0.5), ("topk_group", 2),
    ("e_score_correction_bias", torch.arange(12.0)),
])  # fmt: skip
def test_a_router_is_changed_afterwards(everywhere, name, value):
    router = sigmoid_router(3, 3)
    plain = copy.deepcopy(router)
    assert served_names(serve_blocks(router)) == ["Glm4MoeTopkRouter"]
    x = torch.randn(50, 8)
    before = plain(x)
    for module in (router, plain):
        setattr(module, name, value)
    _, weights, ids = plain(x)
    _, mine, my_ids = router(x)
    dense, theirs = (torch.zeros(50, 12).scatter(1, *p) for p in ((my_ids, mine), (ids, weights)))
    assert torch.allclose(dense, theirs, atol=1e-6)
    assert ids.shape != before[2].shape or not torch.equal(dense, dense.scatter(1, *before[:0:-1]))


@compiled
def test_what_is_neither_a_router_nor_a_block(everywhere):
    model = random_model("qwen3_next")
    assert isinstance(blocks.form_of(model.model.layers[0].mlp.gate).found, blocks.Choice)
    assert isinstance(blocks.form_of(model.model.layers[0].mlp).found, blocks.Parts)
    assert blocks.form_of(torch.nn.Linear(3, 5)) is None and blocks.form_of(model) is None


@compiled
def test_what_is_done_to_a_block_is_seen(everywhere):
    model = random_model("qwen3_next")
    block = model.model.layers[0].mlp
    block.shared_expert_gate.register_forward_hook(lambda module, args, out: out + 1)
    rows = {row.module: row.reason for row in serve_blocks(model)}
    assert rows["model.layers.0.mlp"] == "shared_expert_gate is no plain product"
    assert rows["model.layers.0.mlp.gate"] is None and rows["model.layers.1.mlp"] is None
    with torch.no_grad():
        before = model(tokens(1, 5)).logits
        model.model.layers[1].mlp.shared_expert_gate.register_forward_hook(lambda *a: a[2] + 5)
        after = model(tokens(1, 5)).logits
        submodule("models").restore(model)
        assert torch.allclose(model(tokens(1, 5)).logits, after, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-3)


def smallest(x, k, dim=-1, **options):
    return x.sort(dim).values.narrow(dim, 0, k), x.sort(dim).indices.narrow(dim, 0, k)


PATCHES = [
    (torch, "topk", smallest),
    (F, "softmax", lambda x, dim=-1, dtype=None: x.to(dtype or x.dtype).square()),
    (F, "sigmoid", lambda x: x.tanh()),
]
UNPATCHED = {name: getattr(where, name) for where, name, _ in PATCHES}


@compiled
@pytest.mark.parametrize("where, name, patch", PATCHES)
def test_patches_of_torch_count(everywhere, monkeypatch, where, name, patch):
    """In served modules as in others; and classes that are met while torch is patched are left
    alone, as long as it is."""
    model = random_model("qwen3_next")
    served = copy.deepcopy(model)
    first = serve_blocks(served)
    assert not any(row.reason for row in first)

    def outputs():
        with torch.no_grad():
            return [m(tokens(2, 9)).logits for m in (served, model)]

    plain = outputs()[1]
    with monkeypatch.context() as patched:
        patched.setattr(where, name, patch)
        found, expected = outputs()
        assert torch.allclose(found, expected, atol=1e-5) and not torch.allclose(found, plain, 1e-3)
        rows = serve_blocks(copy.deepcopy(model))
        (reason,) = {row.reason for row in rows if row.reason}
        assert f"its forward calls {where.__name__}.{name}, which is patched" in reason
        patched.setattr(where, name, UNPATCHED[name])
        assert not any(row.reason for row in serve_blocks(copy.deepcopy(model)))
    assert all(torch.allclose(out, plain, atol=1e-5) for out in outputs())


@compiled
def test_experts_that_are_met_while_torch_is_patched(monkeypatch):
    experts, moe = submodule("models.experts"), pytest.importorskip("transformers.models.qwen3_moe")
    kind = moe.modeling_qwen3_moe.Qwen3MoeExperts
    monkeypatch.setattr(submodule("models.trial"), "_of_classes", {})
    with monkeypatch.context() as patched:
        patched.setattr(F, "one_hot", lambda *args, **kwargs: None)
        assert "torch.nn.functional.one_hot, which is patched" in experts.form_of(kind)
    assert isinstance(experts.form_of(kind), experts.Form)


@compiled
def test_trials_on_a_default_device(monkeypatch):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    experts = submodule("models.experts")
    for table in ("_of_classes", "_found"):
        monkeypatch.setattr(submodule("models.trial"), table, {})
    block = random_model("qwen3_next").model.layers[0].mlp
    with torch.device("meta"), torch.inference_mode():
        assert isinstance(experts.form_of(modeling.Qwen3NextExperts), experts.Form)
        assert isinstance(blocks.form_of(block.gate).found, blocks.Choice)
        assert isinstance(blocks.form_of(block).found, blocks.Parts)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_blocks_on_a_gpu(kernel, training):
    exact = random_model("qwen3_5_moe_text").cuda()
    plain = copy.deepcopy(exact).bfloat16()
    served = copy.deepcopy(plain)
    rows = serve_blocks(served)
    assert len(rows) == 4 and not any(row.reason for row in rows)
    ids = tokens(2, 50, device="cuda")
    if training:
        for m in (exact, plain, served):
            m.train()(ids, labels=ids).loss.backward()
        for right, theirs, mine in zip(*(m.parameters() for m in (exact, plain, served))):
            errors = [(p.grad - right.grad).norm() for p in (theirs, mine)]
            assert errors[1] <= 1.5 * errors[0] + 0.02 * right.grad.norm()
    else:
        with torch.no_grad():
            logits = [m(ids).logits.float() for m in (exact, plain, served)]
        errors = [(out - logits[0]).norm() / logits[0].norm() for out in logits[1:]]
        assert errors[1] < 1.2 * errors[0]
        assert served.generate(ids[:1, :5], max_new_tokens=4).shape == (1, 9)


if INTERPRETING:
    submodule(TOPK)
