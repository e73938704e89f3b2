"""fused_topk where a token's experts come from a few groups, and the routers that it serves."""

import copy
import importlib
import inspect

import pytest
import torch
from conftest import load_package, relative_error, submodule
from interpreter import INTERPRETING, compiled, test_in_the_interpreter  # noqa: F401
from tiny_models import serve_blocks
from written import with_forward

blocks = submodule("models.moe_blocks")
DEVICES = ["cpu"] if INTERPRETING else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INF, NAN = float("inf"), float("nan")
# T, E, K, n_group, topk_group; the second and third have sizes that are no powers of two
SIZES = [(5, 256, 8, 8, 4), (9, 160, 6, 8, 3), (7, 30, 4, 5, 2), (3, 12, 2, 12, 3), (4, 8, 4, 2, 1)]
OPTIONS = [
    {"scoring": "sigmoid", "bias": True, "scale": 2.5},
    {"scoring": "softmax", "renormalize": False, "group_score": "max"},
    {"scoring": "softmax"},
]


@pytest.fixture(autouse=True)
def kernels_in_the_interpreter(request):
    if INTERPRETING:
        request.getfixturevalue("by_portable")


def by_torch(logits, K, bias, n_group, topk_group, scoring, renormalize=True, scale=1.0, **more):
    """As transformers writes it for DeepSeek-V3, and for DeepSeek-V2 where group_score is max."""
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    in_groups, top = choice.view(len(logits), n_group, -1), more.get("group_score") == "max"
    of_groups = in_groups.amax(-1) if top else in_groups.topk(2, dim=-1)[0].sum(-1)
    chosen = torch.topk(of_groups, k=topk_group, dim=-1)[1]
    mask = torch.zeros_like(of_groups).scatter_(1, chosen, 1)
    mask = mask.unsqueeze(-1).expand_as(in_groups).reshape(choice.shape)
    ids = choice.masked_fill(~mask.bool(), -INF).topk(K, dim=-1)[1]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids


def problem(T, E, K, n_group, topk_group, device, dtype=torch.float32, bias=False, **options):
    """Logits of which no two of a token are equal, in steps that bf16 does not round."""
    random = torch.Generator().manual_seed(T + E)
    logits = torch.stack([torch.randperm(E, generator=random) for _ in range(T)]) / 64.0 - 2
    bias = torch.randn(E, generator=random).to(device) if bias else None
    groups = {"n_group": n_group, "topk_group": topk_group}
    return logits.to(device, dtype), K, {"bias": bias, **groups, **options}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(device, options):
    kernel = load_package()
    for T, E, K, n_group, topk_group in SIZES:
        if E == n_group and "group_score" not in options:
            continue  # two experts of each are asked for
        logits, K, given = problem(T, E, K, n_group, topk_group, device, **options)
        leaf, wide = logits.requires_grad_(), logits.detach().double().requires_grad_()
        weights, ids = kernel.fused_topk(leaf, K, **given)
        exact, theirs = by_torch(wide, K, **given)
        assert torch.equal(ids, theirs) and relative_error(weights, exact) < 1e-6
        dweights = torch.randn(T, K, device=device)
        (found,) = torch.autograd.grad(weights, leaf, dweights)
        (expected,) = torch.autograd.grad(exact, wide, dweights.double())
        assert relative_error(found, expected) < 2e-5


@pytest.mark.parametrize("device", DEVICES)
def test_ties(device):
    """The lower group of equal ones, NaN above all; and no expert of another group, even where
    all of a chosen one are at -inf."""
    cases = [  # six experts in groups of two: logits, experts
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 1]),
        ([1.0, 2.0, 2.0, 1.0, 0.0, 0.0], [1, 0]),
        ([1.0, 2.0, NAN, -5.0, 3.0, 3.0], [2, 3]),
        ([-INF, 4.0, 3.0, 3.0, -INF, -INF], [2, 3]),
        ([-0.0, 0.0, -1.0, -1.0, 0.0, -0.0], [0, 1]),
    ]
    logits, expected = (torch.tensor(list(part), device=device) for part in zip(*cases))
    words = {"n_group": 3, "topk_group": 1, "scoring": "sigmoid"}
    _, ids = load_package().fused_topk(logits, 2, **words)
    assert torch.equal(ids, expected)
    # two groups have equal sums, of sigmoids and a bias, and experts that differ
    bias = torch.tensor([0.0, 1.0, 0.5, 0.5, -9.0, -9.0], device=device)
    logits = torch.zeros(2, 6, device=device)
    _, ids = load_package().fused_topk(logits, 2, bias=bias, **words)
    assert torch.equal(ids, torch.tensor([[1, 0]] * 2, device=device))
    bias = torch.full((6,), -INF, device=device)
    _, ids = load_package().fused_topk(logits, 2, bias=bias, **words)
    assert torch.equal(ids, torch.tensor([[0, 1]] * 2, device=device))


@compiled
def test_bad_input(kernel):
    logits = torch.randn(3, 12)
    for words, error, text in (
        ({"n_group": 5}, ValueError, "n_group must divide the number of experts, 12, got 5"),
        ({"n_group": 0}, ValueError, "n_group must be 1 to 12, the number of experts, got 0"),
        ({"n_group": 2.0}, TypeError, "n_group must be an int, got float"),
        ({"n_group": 3, "topk_group": 4}, ValueError, "topk_group must be 1 to 3"),
        ({"n_group": 6}, ValueError, "top_k must be 1 to 2, the number of experts of these groups"),
        ({"n_group": 12}, ValueError, "n_group must leave two experts in each group"),
        ({"group_score": "mean"}, ValueError, "group_score must be one of 'top2', 'max'"),
    ):
        with pytest.raises(error, match=text):
            kernel.fused_topk(logits, 3, **words)
    assert kernel.fused_topk(logits[:0], 2, n_group=3)[1].shape == (0, 2)


# (the model's module, the class, changes of its configuration): as published, but for the width
ROUTERS = {
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3TopkRouter", {}),
    "DeepSeek-V2": (
        "deepseek_v2", "DeepseekV2TopkRouter",
        {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
         "num_experts_per_tok": 6, "n_routed_experts": 160, "routed_scaling_factor": 16.0}),
    "Kimi Linear": ("kimi_linear", "KimiLinearTopkRouter", {"n_group": 4, "topk_group": 2}),
}  # fmt: skip
MISTRAL = {
    "Mistral 4": (
        "mistral4", "Mistral4TopkRouter", {"n_routed_experts": 16, "num_experts_per_tok": 3}),
}  # fmt: skip
FOUND = {
    "DeepSeek-V3": (8, 4, "top2"), "DeepSeek-V2": (8, 3, "max"), "Kimi Linear": (4, 2, "top2"),
}  # fmt: skip


def router_of(name, **more):
    transformers = pytest.importorskip("transformers")
    folder, kind, changes = {**ROUTERS, **MISTRAL}[name]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    words = {"hidden_size": 48, "num_attention_heads": 4, **changes, **more}
    config = transformers.AutoConfig.for_model(folder, **words)
    torch.manual_seed(0)
    router = getattr(module, kind)(config)
    for x in (*router.parameters(), *router.buffers()):
        x.data.normal_()
    return router


def dense(logits, weights, ids):
    return torch.zeros_like(logits).scatter(1, ids, weights.to(logits.dtype))


@compiled
@pytest.mark.parametrize("name", ROUTERS)
def test_models(everywhere, name):
    router = router_of(name)
    own = copy.deepcopy(router)
    (row,) = serve_blocks(router)
    assert row.reason is None and blocks.form_of(own).found.groups == FOUND[name]
    x = torch.randn(64, 48)
    found, expected = router(x), own(x)
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(dense(*found), dense(*expected), atol=1e-6)
    router.topk_group = own.topk_group = 2 if router.topk_group != 2 else 1
    assert torch.allclose(dense(*router(x)), dense(*own(x)), atol=1e-6)


@compiled
def test_scores_that_are_rounded(everywhere):
    """Mistral 4's: in its one group by a kernel, in more, as no checkpoint has it, by itself."""
    pytest.importorskip("transformers.models.mistral4")
    found = blocks.form_of(router_of("Mistral 4").bfloat16()).found
    assert (found.rounds, found.scoring, found.groups) == (True, "softmax", (1, 1, "top2"))
    with pytest.raises(blocks.Refused, match="groups of experts first, by another rule"):
        blocks.form_of(router_of("Mistral 4", n_group=4, topk_group=2).bfloat16())


@compiled
@pytest.mark.parametrize("rule", ["sum(dim=-1)", "topk(3, dim=-1)[0].sum(dim=-1)"])
def test_another_rule(everywhere, trusts_all, rule):
    """Groups are told apart by all their experts, or by three: there is no kernel for it."""
    router = router_of("DeepSeek-V3")
    own = inspect.getsource(type(router).forward)
    text = own.partition("\n")[2].replace("            .topk(2, dim=-1)[0]\n", "")
    text = inspect.cleandoc("\n" + text).replace(".sum(dim=-1)\n", f".{rule}\n", 1)
    assert rule in text
    router.__class__ = with_forward(type(router), text, "hidden_states")
    with pytest.raises(blocks.Refused, match="groups of experts first, by another rule"):
        blocks.form_of(router)


@compiled
def test_too_many_for_a_program():
    module, calls = submodule("experts.portable.topk"), submodule("experts.call")
    for E, n_group, served in ((1024, 32, True), (1000, 5, False), (960, 32, True)):
        options = calls.TopkOptions(4, "softmax", True, 1.0, torch.float32, n_group, 2)
        call = calls.Topk(torch.randn(2, E), None, options)
        assert (module.prepare_topk_fwd(call) is not None) == served
