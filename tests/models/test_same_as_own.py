"""What attention modules hand on comes from where their own forward takes it, in each call."""

import copy

import pytest
import torch
from conftest import submodule
from tiny_models import BASE, LOGITS, randomise, tokens
from written import with_forward

transformers = pytest.importorskip("transformers")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")
MAMBA = {"num_key_value_heads": 2, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
SHARED = {  # an attention block that several layers share gets its cache's layer as an argument
    "zamba2": {
        **MAMBA, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
        "use_mem_rope": True, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1,
        "num_mem_blocks": 1, "chunk_size": 8,
    },
    "zamba": {
        **MAMBA, "num_hidden_layers": 7, "n_mamba_heads": 2, "mamba_dt_rank": 4,
        "attn_layer_period": 2, "attn_layer_offset": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_shared_attention(kernel, name):
    """Logits, and those of each token that follows a padded prompt."""
    config = transformers.AutoConfig.for_model(name, **{**BASE, **SHARED[name]})
    torch.manual_seed(0)
    model = randomise(transformers.AutoModelForCausalLM.from_config(config)).eval()
    served, ids = copy.deepcopy(model), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with submodule("runtime.dispatch").force("reference"), torch.no_grad():
        report = kernel.kernelize(served, skip=["loss"])
        rows = [row for row in report.rows if row.kind.endswith("Attention")]
        assert rows and not any(row.reason for row in rows), report
        for given in ({}, {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}):
            runs = []
            for each in (served, model):
                if given:
                    words = {"return_dict_in_generate": True, "output_logits": True}
                    runs.append(torch.stack(each.generate(ids, **given, **words).logits))
                else:
                    runs.append(each(ids).logits)
            assert torch.allclose(*runs, rtol=0, atol=LOGITS["cpu"]), name


FORWARD = """
shape = (*hidden_states.shape[:-1], -1, self.head_dim)
query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
cos, sin = position_embeddings
query, key = apply_rotary_pos_emb(query, key, cos, sin)
if past_key_values is not None:
    key, value = past_key_values.update(key, value, layer_idx)
attend = ALL_ATTENTION_FUNCTIONS.get_interface(_attn_implementation, eager_attention_forward)
out, weights = attend(
    self, query, key, value, attention_mask, dropout=attention_dropout, scaling=scaling, **kwargs
)
return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights
"""
ARGUMENTS = (
    "hidden_states, layer_idx, _attn_implementation, position_embeddings=None, "
    "attention_mask=None, past_key_values=None, scaling=0.5, attention_dropout=0.0, **kwargs"
)


def test_all_that_is_handed_on_may_be_an_argument(kernel, trusts_all):
    """By names that attributes of the module have, whose values are others."""
    module = llama.LlamaAttention(transformers.LlamaConfig(**BASE), layer_idx=-1).eval()
    kind = with_forward(llama.LlamaAttention, FORWARD, ARGUMENTS, vars(llama))
    module.__class__ = kind
    form = submodule("models.attention_trial").attention_form(module)
    served = submodule("layers.attention").forward_of(form)
    x, tables = torch.randn(2, 2, 3, BASE["hidden_size"]), torch.randn(2, 2, 3, 16)
    given = {"scaling": 0.3, "position_embeddings": tables.unbind()}
    caches, outs = [transformers.DynamicCache() for _ in range(2)], []
    with submodule("runtime.dispatch").force("reference"), torch.no_grad():
        for cache, forward in zip(caches, (served, kind.forward)):
            for index in (0, 1, 0):
                of_call = x[index], index, ("sdpa", "eager")[index]
                outs.append(forward(module, *of_call, past_key_values=cache, **given)[0])
    for mine, theirs in zip(outs[:3], outs[3:]):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)
    assert [[layer.keys.shape[2] for layer in cache.layers] for cache in caches] == [[6, 3]] * 2
