"""The examples in the docstrings of public functions run and give what they show."""

import doctest
import inspect

import pytest
import torch

COMPUTE = (
    "fused_swiglu", "fused_swiglu_mlp", "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule_opt",
    "chunk_gated_delta_rule_opt_vk", "causal_conv1d_fn", "causal_conv1d_update", "rms_norm_gated",
    "gated_delta_gate", "rms_norm", "silu_mul", "implementation_of", "fused_qk_norm_rope",
    "sigmoid_gate", "attention_with_kvcache", "graphed_step", "fused_topk", "fused_experts",
    "build_cp_context", "shard_batch", "make_ring", "replay_gated_delta_rule", "advance_ring",
    "materialise_ring",
)  # fmt: skip


@pytest.mark.parametrize("name", COMPUTE)
def test_examples(kernel, name):
    names = {"torch": torch, **{public: getattr(kernel, public) for public in kernel.__all__}}
    doc = inspect.getdoc(getattr(kernel, name))
    example = doctest.DocTestParser().get_doctest(doc, names, name, None, 0)
    assert len(example.examples) >= 2, f"{name} has no example"
    said = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)
