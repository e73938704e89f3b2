"""The reference against itself and against transformers' own torch functions."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, gdn_inputs, relative_error

pytestmark = pytest.mark.kernels_ci

F64 = torch.float64


def test_aiter_functions(kernel):
    x = gdn_inputs(1, 100, 2, 4, 60, 60, F64)
    cu = torch.tensor([0, 30, 100])
    x["initial_state"] = torch.randn(2, 4, 60, 60, dtype=F64)
    expected, final = kernel.fused_recurrent_gated_delta_rule(
        **x, cu_seqlens=cu, output_final_state=True
    )
    with torch.no_grad():
        o, state = kernel.chunk_gated_delta_rule_opt(**x, cu_seqlens=cu, output_final_state=True)
        assert relative_error(o, expected) < 1e-12 and relative_error(state, final) < 1e-12
        out = torch.full_like(x["v"], float("nan"))
        start = x.pop("initial_state").mT.contiguous()
        q, k, v, g, beta = x.values()
        o, state = kernel.chunk_gated_delta_rule_opt_vk(
            q, k, v, out, g, beta, None, start, True, cu_seqlens=cu
        )
        assert o is out
        assert relative_error(o, expected) < 1e-12 and relative_error(state.mT, final) < 1e-12
        prefix = torch.tensor([0, 1, 2, 32, 102])  # two decode sequences of one token before
        o, _ = kernel.chunk_gated_delta_rule_opt_vk(
            q, k, v, None, g, beta, None, start, False, False, prefix,
            num_decodes=2, num_decode_tokens=2,
        )  # fmt: skip
        assert relative_error(o, expected) < 1e-12
        pool = torch.cat([start, torch.zeros_like(start)])
        before = pool.clone()
        _, state = kernel.chunk_gated_delta_rule_opt_vk(
            q, k, v, None, g, beta, None, pool, True, False, cu,
            initial_state_indices=torch.tensor([0, 1]), inplace_final_state=False,
            state_dtype=torch.bfloat16,
        )  # fmt: skip
        assert torch.equal(pool, before) and state.dtype == torch.bfloat16
        assert_close(state.mT, final)


@pytest.mark.parametrize("T", [1, 64, 150])
def test_equals_transformers(kernel, T):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    x = gdn_inputs(2, T, 2, 2, 16, 16)
    q, k, v, g, beta, state = x.values()
    for ours, theirs in (
        (kernel.chunk_gated_delta_rule, modeling.torch_chunk_gated_delta_rule),
        (kernel.fused_recurrent_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule),
    ):
        options = dict(initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        o, final = ours(q, k, v, g, beta, **options)
        expected, expected_final = theirs(q, k, v, g=g, beta=beta, **options)
        assert_close(o, expected, factor=0.1)
        assert_close(final, expected_final, factor=0.1)
    conv = torch.randn(2, 6, T), torch.randn(6, 4), torch.randn(6), "silu"
    assert_close(kernel.causal_conv1d_fn(*conv), modeling.causal_conv1d_fn(*conv))
    ours, theirs = torch.randn(2, 6, 4).expand(2, 2, 6, 4).unbind()
    ours, theirs = ours.clone(), theirs.clone()
    token = torch.randn(2, 6, 1)
    assert_close(
        kernel.causal_conv1d_update(token, ours, *conv[1:]),
        modeling.causal_conv1d_update(token, theirs, *conv[1:]),
    )
    assert torch.equal(ours, theirs)
    norm = modeling.Qwen3_5RMSNormGated(16)
    h, gate = torch.randn(5, 16), torch.randn(5, 16)
    assert_close(kernel.rms_norm_gated(h, gate, norm.weight, norm.variance_epsilon), norm(h, gate))


def test_conv_packed_equals_one_by_one(kernel):
    x, weight = torch.randn(1, 6, 30, dtype=F64), torch.randn(6, 4, dtype=F64)
    before = torch.randn(4, 6, 3, dtype=F64)
    cu = torch.tensor([0, 2, 2, 17, 30])
    y, final = kernel.causal_conv1d_fn(
        x, weight, None, "silu", cu_seqlens=cu, initial_states=before, return_final_states=True
    )
    for n, (a, b) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        one, last = kernel.causal_conv1d_fn(
            x[..., a:b], weight, None, "silu",
            initial_states=before[n : n + 1], return_final_states=True,
        )  # fmt: skip
        assert relative_error(y[..., a:b], one) < 1e-12
        assert torch.equal(final[n : n + 1], last)
    index = torch.searchsorted(cu[1:], torch.arange(30), right=True)[None]
    assert relative_error(
        kernel.causal_conv1d_fn(x, weight, seq_idx=index),
        kernel.causal_conv1d_fn(x, weight, cu_seqlens=cu),
    ) < 1e-12  # fmt: skip


def test_conv_update_continues(kernel):
    x, weight = torch.randn(2, 6, 12, dtype=F64), torch.randn(6, 4, dtype=F64)
    y = kernel.causal_conv1d_fn(x, weight, None, "silu")
    for width in (3, 4):  # causal-conv1d keeps W - 1 inputs, transformers W
        state = torch.zeros(2, 6, width, dtype=F64)
        parts = [
            kernel.causal_conv1d_update(x[..., a:b], state, weight, None, "silu")
            for a, b in ((0, 5), (5, 6), (6, 12))
        ]
        assert relative_error(torch.cat(parts, -1), y) < 1e-12
        assert torch.equal(state, x[..., 12 - width :])


def test_fused_swiglu_module(kernel):
    gate, up = (torch.nn.Linear(8, 12, bias=False) for _ in range(2))
    module = kernel.FusedSwiGLU.from_linears(gate, up)
    x = torch.randn(2, 5, 8)
    expected = F.silu(gate(x)) * up(x)
    assert module.Wf.shape == (8, 24)
    assert_close(module(x), expected)
    seeds = F.silu(x @ module.Wf[:, :12]) * (x @ module.Wf[:, 12:])
    assert_close(module(x), seeds)
    again = kernel.FusedSwiGLU.from_linears(*module.to_linears(), gate_first=False)
    assert_close(again(x), expected)
    loaded = kernel.FusedSwiGLU(8, 12, block=128)
    loaded.load_state_dict(module.state_dict())
    assert_close(loaded(x), expected)
    module(x).sum().backward()
    assert module.Wf.grad.shape == (8, 24)
    frozen = kernel.FusedSwiGLU(8, 12, weight_grad=False)
    x.requires_grad_()
    frozen(x).sum().backward()
    assert frozen.Wf.grad is None and x.grad.abs().sum() > 0


def test_fused_swiglu_module_is_saved_as_any(kernel, tmp_path):
    """safetensors, as in Trainer's checkpoints and save_pretrained, takes dense tensors alone."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = torch.nn.Sequential(kernel.FusedSwiGLU(8, 12), torch.nn.Linear(12, 4))
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    file = tmp_path / "model.safetensors"
    safetensors.save_file(model.state_dict(), file, metadata={"format": "pt"})
    again = torch.nn.Sequential(kernel.FusedSwiGLU(8, 12), torch.nn.Linear(12, 4))
    again.load_state_dict(safetensors.load_file(file))
    x = torch.randn(3, 8)
    assert torch.equal(again(x), model(x))
    safetensors.save_model(model, file)
    again[0].reset_parameters()
    safetensors.load_model(again, file)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("assign", [False, True])
def test_fused_swiglu_module_takes_states_with_its_weight_transposed(kernel, assign):
    model = torch.nn.Sequential(kernel.FusedSwiGLU(8, 12))
    wanted = torch.randn(8, 24)
    given = {"0.Wf": wanted.clone()}
    model.load_state_dict(given, assign=assign)
    assert list(given) == ["0.Wf"] and torch.equal(model[0].Wf, wanted)
    assert model[0].weight.is_contiguous() and list(model.state_dict()) == ["0.weight"]
    missing = model.load_state_dict({}, strict=False)
    assert missing.missing_keys == ["0.weight"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"0.Wf": wanted.t()})


def test_the_transposed_weight_is_the_weight(kernel):
    module = kernel.FusedSwiGLU(8, 12, weight_grad=False)
    assert module.Wf.data_ptr() == module.weight.data_ptr() and not module.Wf.requires_grad
    with torch.no_grad():
        module.Wf.copy_(torch.ones(8, 24))
        module.Wf[:, 12:].mul_(2)
    assert torch.equal(
        module.weight, torch.tensor([1.0, 2]).repeat_interleave(12)[:, None].expand(24, 8)
    )
    module.Wf = torch.nn.Parameter(torch.randn(8, 24))
    assert list(dict(module.named_parameters())) == ["weight"] and module.weight.is_contiguous()
    x = torch.randn(3, 8)
    (x @ module.Wf).sum().backward()  # reaches the parameter
    assert torch.equal(module.Wf.grad, module.weight.grad.t()) and module.weight.grad.any()
    module.Wf.grad.zero_()  # likewise a view
    assert not module.weight.grad.any()
    with pytest.raises(ValueError, match=r"Wf must have shape \[8, 24\], got \[24, 8\]"):
        module.Wf = torch.nn.Parameter(torch.randn(24, 8))
    with pytest.raises(TypeError, match="Wf must be a torch.Tensor, got list"):
        module.Wf = [1.0]
    module.weight = torch.nn.Parameter(torch.randn(8, 24))
    with pytest.raises(ValueError, match=r"weight must have shape \[24, 8\], got \[8, 24\]"):
        module(x)


def test_autocast(kernel):
    torch.manual_seed(0)
    x, w1, w2, wd = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6, 8), torch.randn(8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        z = kernel.fused_swiglu_mlp(x, w1.requires_grad_(), w2, wd)
    assert z.dtype == torch.bfloat16
    z.sum().backward()
    assert w1.grad.dtype == torch.float32
    assert_close(z, (F.silu(x @ w1.T) * (x @ w2.T)) @ wd.T, factor=2)


@pytest.mark.parametrize("name, same", [("gelu", "none"), ("gelu_pytorch_tanh", "tanh")])
def test_activations_by_transformers_names(kernel, name, same):
    leaves = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 8), (12, 8))]
    x, w = leaves
    wd = torch.randn(8, 12, dtype=torch.float64)
    expected = (F.gelu(x @ w.T, approximate=same) * (x @ w.T)) @ wd.T
    for got in (
        kernel.fused_swiglu(x, w, w, activation=name) @ wd.T,
        kernel.fused_swiglu_mlp(x, w, w, wd, activation=name),
        kernel.fused_swiglu_mlp(x, w, w, wd, activation=name, recompute=True),
    ):
        assert_close(got, expected)
        found = torch.autograd.grad(got.sum(), leaves)
        for mine, ref in zip(found, torch.autograd.grad(expected.sum(), leaves, retain_graph=True)):
            assert_close(mine, ref)
    with pytest.raises(ValueError, match="activation must be one of"):
        kernel.fused_swiglu(x, w, w, activation="gelu_new")
