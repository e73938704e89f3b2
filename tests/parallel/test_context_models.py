"""Models of kernelize(cp_group=) whose sequences are fragments of one process, in another order:
beside the model itself, and which models are refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from conftest import relative_error, submodule
from tiny_models import config_of, random_model

LAYOUT = [[(20, 40), (0, 20)]]
SERVED = ("llama", "qwen3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid",
          "deepseek_v3", "minicpm3", "gpt2", "mixtral", "kimi_linear",
          "bailing_hybrid")  # fmt: skip
OF_EXPERTS = (
    "kimi_linear",
    "bailing_hybrid",
    "qwen3_5_moe_text",
    "qwen3_next",
    "deepseek_v3",
    "mixtral",
)  # in fp32
MORE = {"gpt2": {}, "mixtral": {}}
# what the error says of models that mix tokens in other ways, or attend to some alone
REFUSED = {
    "falcon": (r"gives other numbers in transformer.h.0.self_attention", {}),
    "bloom": (r"gives other numbers in transformer.h.0.self_attention", {}),
    "lfm2": (r"gives other numbers in model.layers.0.conv \(Lfm2ShortConv\)",
             {"layer_types": ["conv", "full_attention"]}),
    "minimax": (r"gives other numbers in model.layers.0.self_attn \(MiniMaxLightningAttention\)",
                {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}),
    "llama4_text": ("has a window, chunks", {"layer_types": ["chunked_attention"] * 2}),
    "gemma2": ("has a window, chunks", {}),
    "bert": ("has a window, chunks or tokens that see later", {}),
    "stablelm": ("cp_context must be given", {}),
    "mamba2": ("model must have", {"num_heads": 4, "head_dim": 16, "n_groups": 1}),
}  # fmt: skip


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def made(name: str, **more) -> torch.nn.Module:
    """A tiny model, of types that tiny_models has not as well."""
    transformers = pytest.importorskip("transformers")
    try:
        return random_model(name, **more)
    except KeyError:
        from tiny_models import BASE, randomise

        sizes = {**BASE, "num_experts_per_tok": 2, "n_inner": 48, **more}
        try:
            config = transformers.AutoConfig.for_model(name, **sizes)
        except ValueError:
            pytest.skip(f"this transformers has no {name}")
        torch.manual_seed(0)
        return randomise(transformers.AutoModelForCausalLM.from_config(config)).eval()


def results(model, given: dict) -> tuple:
    """Logits and loss, and the gradients of a loss."""
    out = model(**given)
    out.loss.backward()
    return out.logits.detach(), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", SERVED)
def test_as_the_model_itself(kernel, group, name):
    model = made(name, **MORE.get(name, {}))
    model = model if name in OF_EXPERTS else model.double()
    shared, ids = copy.deepcopy(model), torch.randint(8, 90, (2, 40))
    flags = [module.training for module in shared.train().modules()]
    state = torch.get_rng_state()
    report = kernel.kernelize(shared, mode="training", cp_group=group)
    assert torch.equal(torch.get_rng_state(), state) and "gathered keys" in str(report)
    assert [module.training for module in shared.modules()] == flags
    assert not any(module._forward_hooks for module in shared.modules())
    part = kernel.shard_batch({"input_ids": ids, "labels": ids}, group, layout=LAYOUT)
    logits, gradients = results(shared.eval(), part)
    want, right = results(model, {"input_ids": ids, "labels": ids})
    limit = 1e-4 if name in OF_EXPERTS else 1e-6
    assert relative_error(logits, part["cp_context"].shard(want)) < limit
    assert gradients.keys() == right.keys()
    assert all(relative_error(gradients[n], right[n]) < 5e-3 for n in right)
    assert kernel.restore(shared) >= 1 or name == "gpt2"
    assert torch.equal(shared(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_in_another_way(kernel, group, name):
    says, more = REFUSED[name]
    model, ids = made(name, **more), torch.randint(8, 90, (2, 20))
    before = model(ids).logits
    with pytest.raises(ValueError, match=says):
        kernel.kernelize(model, cp_group=group)
    assert torch.equal(model(ids).logits, before) and kernel.restore(model) == 0
    assert not any(module._forward_hooks for module in model.modules())


def test_parts_that_users_put_in(kernel, group):
    """Wrong by any amount: the numbers of a module are compared, not those of the model."""

    class Shifted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 1e-4 * torch.roll(x, 1, 1)

    class Mean(Shifted):
        def forward(self, x):
            return self.inner(x - x.mean(1, keepdim=True))

    for kind in (Shifted, Mean):
        model = random_model("llama")
        layer = model.model.layers[1]
        layer.input_layernorm = kind(layer.input_layernorm)
        if kind is Shifted:  # its rest gives nothing
            torch.nn.init.zeros_(layer.input_layernorm.inner.weight)
        with pytest.raises(ValueError, match=f"model.layers.1.input_layernorm .{kind.__name__}"):
            kernel.kernelize(model, cp_group=group)


@pytest.mark.parametrize("options", [{"skip": ["kda"]}, {"only": ["gdn"], "cp_attention": False}])
def test_layers_that_must_be_served(kernel, group, options):
    model = made("kimi_linear")
    with pytest.raises(ValueError, match='only and skip must leave "kda" in with cp_group'):
        kernel.kernelize(model, cp_group=group, **options)
    assert kernel.restore(model) == 0
    kernel.kernelize(made("qwen3_5_text"), cp_group=group, only=["gdn"])  # which has none


def test_weights_of_another_kind(kernel, group):
    """As quantised ones are, which torch knows as parameters."""

    class Packed(torch.nn.Parameter):
        pass

    for name in ("falcon", "llama"):
        model = made(name)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = Packed(module.weight.detach())
        if name == "falcon":
            with pytest.raises(ValueError, match="gives other numbers in"):
                kernel.kernelize(model, cp_group=group)
        else:
            kernel.kernelize(model, cp_group=group)


def test_models_that_cannot_be_tried(kernel, group):
    """On meta, and without attention of ours."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of("llama"))
    assert "gathered keys" in str(kernel.kernelize(model, cp_group=group))
    lfm2 = made("lfm2", layer_types=["conv", "full_attention"])
    kernel.kernelize(lfm2, cp_group=group, cp_attention=False)


def test_positions_that_the_model_counts(kernel, group):
    model, ids = random_model("qwen3_5_text"), torch.randint(8, 90, (2, 40))
    kernel.kernelize(model, cp_group=group)
    part = kernel.shard_batch({"input_ids": ids}, group, layout=LAYOUT)
    want = model(**part).logits
    copied = {**part, "position_ids": part["position_ids"].clone()}
    assert torch.equal(model(**copied).logits, want)
    part = kernel.shard_batch({"input_ids": ids}, group, layout=LAYOUT)
    del part["position_ids"]
    with pytest.raises(ValueError, match="position_ids must be cp_context.position_ids"):
        model(**part)
    whole = kernel.shard_batch({"input_ids": ids}, group, layout=[[(0, 40)]])
    del whole["position_ids"]
    assert model(**whole).logits.isfinite().all()  # the same numbers


def test_masks():
    masks = pytest.importorskip("transformers.masking_utils")
    is_causal, causal = submodule("models.context_attention")._is_causal, masks.causal_mask_function
    for one in (
        causal,
        masks.and_masks(causal),
        masks.and_masks(causal, lambda *_: torch.tensor(True)),
    ):
        assert is_causal(one)
    for one in (
        masks.sliding_window_causal_mask_function(4096), masks.bidirectional_mask_function,
        masks.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)),
        masks.or_masks(causal, lambda *_: torch.tensor(True)),
        masks.packed_sequence_mask_function(torch.zeros(1, 23, dtype=torch.int64)),
    ):  # fmt: skip
        assert not is_causal(one)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "kimi_linear"])
def test_compiled(kernel, group, name):
    model = random_model(name)
    shared = copy.deepcopy(model)
    kernel.kernelize(shared, mode="training", cp_group=group)
    compiled = torch.compile(shared, backend="eager")
    for T in (40, 24):
        ids = torch.randint(8, 90, (2, T))
        layout = [[(T // 2, T), (0, T // 2)]]
        part = kernel.shard_batch({"input_ids": ids, "labels": ids}, group, layout=layout)
        out = compiled(**part)
        assert relative_error(out.logits, part["cp_context"].shard(model(ids).logits)) < 1e-5
    out.loss.backward()
    assert all(p.grad is not None for p in shared.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_on_a_gpu(kernel, group, name, dtype):
    """Its roundings are not taken for something else, and models that mix in another way are still
    found."""
    model, ids = made(name, **MORE.get(name, {})).to("cuda", dtype), torch.randint(8, 90, (2, 40))
    shared, ids = copy.deepcopy(model), ids.cuda()
    kernel.kernelize(shared, mode="training", cp_group=group)
    part = kernel.shard_batch({"input_ids": ids}, group, layout=LAYOUT)
    with torch.no_grad():
        want = part["cp_context"].shard(model(ids).logits)
        # a rounding sends a token to another expert
        limit = (0.2 if name in OF_EXPERTS else 0.05) if dtype is torch.bfloat16 else 1e-3
        assert relative_error(shared(**part).logits, want) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["falcon", "bloom", "lfm2", "minimax", "llama4_text"])
def test_what_a_gpu_refuses(kernel, group, name):
    says, more = REFUSED[name]
    model = made(name, **more).to("cuda", torch.bfloat16)
    with pytest.raises(ValueError, match=says):
        kernel.kernelize(model, cp_group=group)
