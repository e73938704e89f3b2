"""Norms, attention and decoder layers of transformers' models, before and after kernelize.

No kernel serves a CPU, so that the package's own reference stands in for one here (dispatch.force).
"""

import copy
import itertools

import pytest
import torch
from conftest import DEVICES, relative_error, submodule
from tiny_models import (
    BASE,
    CONFIGS,
    MORE,
    assert_same,
    assert_same_gradients,
    logits,
    random_model,
    serving,
    tokens,
)
from torch import nn

transformers = pytest.importorskip("transformers")
dispatch = submodule("runtime.dispatch")
norm_trial, attention_trial, layer_trial = (
    submodule(f"models.{name}_trial") for name in ("norm", "attention", "layer")
)

pytestmark = pytest.mark.filterwarnings("ignore")
on_every_device = pytest.mark.parametrize("device", DEVICES)
NAMES = [*(set(CONFIGS) - {"qwen4_exp_text"}), *MORE]
NAMES.sort()
SOME = ["llama", "qwen3_5_text"]
OPERATIONS = ("rms_norm_fwd", "qk_norm_rope_fwd")


def pair(kernel, name, device="cpu", **changes):
    model = random_model(name, device, **changes)
    served = copy.deepcopy(model)
    kernel.kernelize(served)
    return model, served


def kinds_of(report):
    return {row.layer for row in report.served}


@pytest.mark.parametrize("name", NAMES)
@on_every_device
def test_logits(kernel, name, device):
    model, served = pair(kernel, name, device)
    ids, mask = tokens(2, 19, device=device), torch.ones(2, 19, dtype=torch.int64, device=device)
    mask[0, :7] = 0
    for arguments in ({}, {"attention_mask": mask}):
        ref = logits(model, ids, **arguments)
        with serving(device) as record:
            out = logits(served, ids, **arguments)
        keep = mask.bool() if arguments else torch.ones_like(mask).bool()
        assert_same(out[keep], ref[keep])
        assert all(record[operation] for operation in OPERATIONS)


@pytest.mark.parametrize("name, rows", [("glm4v_text", 2), ("pixtral", 1)])
def test_attention_with_tables_of_its_own(kernel, name, rows):
    """Side by side for the two channels of a pair; without rows."""
    kind = "PixtralAttention" if name == "pixtral" else "Glm4vTextAttention"
    own = next(m for m in random_model(name).modules() if type(m).__name__ == kind)
    served = copy.deepcopy(own)
    assert kinds_of(kernel.kernelize(served)) == {"Attention"}
    random = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 7, 32, generator=random)
    for batch in (rows, 1):
        size = (7, 16) if name == "pixtral" else (batch, 7, 16)
        tables = torch.randn(2, *size, generator=random).unbind(0)
        given = {"position_embeddings": tables, "attention_mask": None}
        with serving() as record:
            out = served(x, **given)[0]
        assert record["qk_norm_rope_fwd"]
        assert_same(out, own(x, **given)[0])


def test_rotary_embedding_of_a_width_that_the_forward_reads(kernel):
    """Phi takes half of each head by an attribute, and tables of that width alone."""
    config = transformers.AutoConfig.for_model("phi", **BASE)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    served = copy.deepcopy(model)
    assert kinds_of(kernel.kernelize(served)) >= {"Attention"}
    with serving() as record:
        out = logits(served, tokens(2, 9))
    assert len(record["qk_norm_rope_fwd"]) == 2
    assert_same(out, logits(model, tokens(2, 9)))
    own, mine = (m.model.layers[0].self_attn for m in (model, served))
    x, tables = torch.randn(1, 3, 32), torch.randn(2, 1, 3, 16)
    with serving() as record, pytest.raises(RuntimeError):
        mine(x, tuple(tables), None)  # as its own forward does
    with pytest.raises(RuntimeError):
        own(x, tuple(tables), None)
    assert "qk_norm_rope_fwd" not in record


def test_what_is_served(kernel):
    for name in ("llama", "qwen3_5_text", "gemma2", "phi3", "granite", "glm", "ernie4_5", "olmo2"):
        report = kernel.kernelize(random_model(name))
        assert {"RMSNorm", "Attention", "DecoderLayer"} <= kinds_of(report) and not report.left


def test_only_and_skip(kernel):
    model = random_model("llama")
    layers = {
        "mlp": "SwiGLUMLP",
        "norm": "RMSNorm",
        "attention": "Attention",
        "layer": "DecoderLayer",
    }
    for kind, layer in layers.items():
        assert kinds_of(kernel.kernelize(model, only=[kind])) == {layer}
        others = {*layers.values(), "loss"} - {layer}
        assert kinds_of(kernel.kernelize(model, skip=[kind])) == others
    ids = tokens(1, 5)
    ref = logits(random_model("llama"), ids)
    for kind in layers:
        kernel.kernelize(model, only=[kind])
        with serving() as record:
            assert_same(logits(model, ids), ref)
        assert record
    for wrong in ({"only": ["norms"]}, {"skip": "norm"}, {"only": "norm"}):
        with pytest.raises(ValueError, match="must be a list of 'mlp', 'kda', 'gdn'"):
            kernel.kernelize(model, **wrong)
    for wrong in ({"only": ["mlp"]}, {"skip": ["gdn"]}):  # whose layers would exchange no states
        with pytest.raises(ValueError, match='must leave "gdn" in where cp_group is given'):
            kernel.kernelize(model, cp_group="a group", **wrong)
    with pytest.raises(TypeError, match="cp_group must be a torch.distributed.ProcessGroup.* int"):
        kernel.kernelize(model, cp_group=3)


def test_restore(kernel):
    """Whether kernelize was called once or twice."""
    model, served = pair(kernel, "qwen3_5_text")
    kernel.kernelize(served)
    count = sum(type(m) is not type(own) for m, own in zip(served.modules(), model.modules()))
    assert kernel.restore(served) == count > 10
    for m, own in zip(served.modules(), model.modules()):
        assert type(m) is type(own) and m.__dict__.keys() == own.__dict__.keys()
    assert kernel.restore(served) == 0


def test_a_registered_attention_function_gets_what_it_got(kernel):
    seen = []

    def function(module, q, k, v, mask, **keywords):
        seen.append((q.shape, k.shape, v.shape, keywords))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2), None

    transformers.AttentionInterface.register("of_this_test", function)
    model, served = pair(kernel, "mistral")
    ids, results = tokens(2, 6), []
    for m in (model, served):
        m.set_attn_implementation("of_this_test")
        with serving():
            results.append(logits(m, ids))
    assert_same(*results)
    half = len(seen) // 2
    for theirs, ours in zip(seen[:half], seen[half:]):
        assert theirs[:3] == ours[:3] and theirs[3].keys() == ours[3].keys()
        assert all(theirs[3][n] == ours[3][n] for n in ("dropout", "scaling", "sliding_window"))


def gradients(model, ids):
    model.train()
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "gemma2", "olmo_hybrid"])
@on_every_device
def test_gradients(kernel, name, device):
    model = random_model(name, device)
    ids = tokens(2, 11, device=device)
    ref = gradients(model, ids)
    kernel.kernelize(model, mode="training")
    with serving(device) as record:
        out = gradients(model, ids)
    assert all(record[operation] for operation in OPERATIONS)
    assert_same_gradients(out, ref, device)


def test_norms_round_as_their_own_forward(kernel):
    """Mixed dtypes as well: to the bit but for the order of sums."""
    for name in ("llama", "qwen3_5_text", "olmo2"):
        norm = random_model(name).model.norm
        for weight, dtype in ((torch.float32, torch.bfloat16), (torch.float16, torch.float16)):
            x = torch.randn(4, 32).to(dtype)
            own, served = copy.deepcopy(norm).to(weight), copy.deepcopy(norm).to(weight)
            kernel.kernelize(served)
            with serving() as record:
                out = served(x)
            assert record["rms_norm_fwd"] and out.dtype == own(x).dtype and torch.equal(out, own(x))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text", "gemma2", "glm", "ernie4_5", "olmo2"])
@on_every_device
def test_half_precision_is_as_close_to_fp64(kernel, name, device):
    exact = random_model(name, device, hidden_size=64).double()
    ids = tokens(2, 24, device=device)
    ref = logits(exact, ids)
    model = exact.bfloat16()
    theirs = relative_error(logits(model, ids), ref)
    kernel.kernelize(model)
    with serving(device):
        assert relative_error(logits(model, ids), ref) <= 1.1 * theirs


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_every_device
def test_attention_under_autocast(kernel, name, dtype, device):
    """Served where autocast's dtype is that of the model, or torch's SDPA casts to it: no cache
    keeps queries and keys of a dtype that the class's own would not have."""
    model, served = pair(kernel, name, device, hidden_size=64)
    ids = tokens(2, 12, device=device)
    exact = logits(model.double(), ids)
    model, served = model.to(dtype), served.to(dtype)
    for implementation, cached in itertools.product(("sdpa", "eager"), (False, True)):
        for each in (model, served):
            each.set_attn_implementation(implementation)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16), serving(device) as record:
            theirs = model(ids, use_cache=cached)
            record.clear()
            ours = served(ids, use_cache=cached)
        alike = dtype is torch.bfloat16 or implementation == "sdpa" and not cached
        assert ("qk_norm_rope_fwd" in record) == alike
        error = relative_error(theirs.logits, exact)
        assert relative_error(ours.logits, exact) <= 1.3 * error
        assert not cached or keys_of(ours.past_key_values) == keys_of(theirs.past_key_values)


def keys_of(cache) -> list:
    """The dtypes of keys in the layers of a cache that have some."""
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    assert layers
    return [layer.keys.dtype for layer in layers]


class OtherRMSNorm(nn.Module):
    """A norm in all but one respect."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.eps, self.how = nn.Parameter(torch.ones(8)), 1e-6, how

    def forward(self, x):
        if self.how == "clamps":
            x = x.clamp(-1e4, 1e4)
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * (x.float() * scale).to(x.dtype)
        return y * 2 if self.how == "doubles" else y


def test_norms_that_are_none(kernel, trusts_all):
    for how in ("clamps", "doubles"):
        (row,) = kernel.kernelize(OtherRMSNorm(how)).rows
        assert "another formula" in row.reason
    norm = OtherRMSNorm("neither")
    assert kernel.kernelize(norm).served
    norm.how = "doubles"  # another form than the one that was recognised
    x = torch.randn(3, 8)
    with serving() as record:
        assert torch.equal(norm(x), norm(x * 1) * 1) and norm(x).norm() > 1.5 * x.norm()
    assert not record


REFUSED = {
    ("llama4_text", "Llama4TextAttention"): "position_embeddings",
    ("hunyuan_v1_dense", "HunYuanDenseV1Attention"): "queries and keys are another formula",
    ("cohere", "CohereDecoderLayer"): "",
}


@pytest.mark.parametrize("which", REFUSED, ids=str)
def test_forwards_that_do_more(which):
    """Another rotary embedding; norms of other places."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name, kind = which
    head = {"head_dim": 128} if "hunyuan" in name else {}
    config = CONFIG_MAPPING[name](num_hidden_layers=2, **head)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    module = next(m for m in model.modules() if type(m).__name__ == kind)
    trial = attention_trial.attention_form if "Attention" in kind else layer_trial.layer_form
    with pytest.raises(submodule("models.code").Refused) as why:
        trial(module)
    assert REFUSED[which] in str(why.value)
