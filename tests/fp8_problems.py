"""Weights and models in FP8, made offline as transformers makes them, and a stand-in in torch for
the kernels that transformers loads from the Hub."""

import copy

import pytest
import torch
from conftest import submodule

E4M3 = torch.float8_e4m3fn


def needs_hopper(device: str) -> None:
    """Skips a test on a GPU of another kind."""
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("products of FP8 blocks are of Hopper")


def tokens(*shape, device="cpu", seed: int = 0) -> torch.Tensor:
    """Tokens in bf16 whose columns differ much."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=random) * torch.randn(shape[-1], generator=random).exp()
    return x.bfloat16().to(device)


def quantised(x: torch.Tensor):
    """x [M, K] in FP8 by the quantiser's kernel."""
    return apart(submodule("fp8.portable.quantise").quantiser(x)(x), len(x))


def apart(x, tokens: int):
    """Tokens in FP8 whose scales are a tensor of their own, and not behind the codes."""
    if x.scales is not None:
        return x
    P, K = submodule("fp8.call").padded(tokens), x.codes.shape[1]
    blocks = -(-K // 128)
    scales = x.codes.view(-1)[P * K : P * (K + 4 * blocks)].view(torch.float32)
    return x._replace(codes=x.codes[:P], scales=scales.view(blocks, P).t())


def quantised_weight(weight: torch.Tensor, e8m0: bool = False) -> tuple:
    """As transformers' Fp8Quantize: [N, K] e4m3 and 1 / scale [ceil(N / 128), ceil(K / 128)]."""
    N, K = weight.shape
    whole = torch.nn.functional.pad(weight.float(), (0, -K % 128, 0, -N % 128))
    blocks = whole.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # [N / 128, 128, K / 128, 128]
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scale = 448.0 / torch.where(amax > 0, amax, torch.full_like(amax, 448.0))
    if e8m0:
        scale = 2.0 ** scale.log2().floor()
    codes = (blocks * scale).clamp(-448, 448).to(E4M3)
    codes, inverse = codes.flatten(2).flatten(0, 1)[:N, :K], (1.0 / scale)[:, 0, :, 0].contiguous()
    return codes.contiguous(), inverse.to(torch.float8_e8m0fnu) if e8m0 else inverse


def quantised_experts(weight: torch.Tensor) -> tuple:
    """Of each expert of [E, N, K]."""
    codes, scales = zip(*map(quantised_weight, weight))
    return torch.stack(codes), torch.stack(scales)


def exact(x, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The product of FP8 operands in fp64, [P, N]."""
    N, K = weight.shape
    wide = scale.double().repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    codes = x.codes.double() * x.scales.double().repeat_interleave(128, 1)[:, :K]
    return codes @ (weight.double() * wide).t()


@torch.library.custom_op("fused_swiglu_gdn_tests::fp8_product", mutates_args=())
def _product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """An operator without a gradient, as those of the Hub's kernels."""
    reference, rows = submodule("fp8.reference"), x.reshape(-1, x.shape[-1])
    y = reference.multiply_fwd(weight, scale, reference.quantise_fwd(rows))
    return y[: len(rows)].view(*x.shape[:-1], -1).clone()  # a bias may be added in place


@_product.register_fake
def _(x, weight, scale):
    return x.new_empty(*x.shape[:-1], len(weight), dtype=torch.bfloat16)


def has_gradients() -> bool:
    """transformers' own FP8Linear has the gradient of its input, which 5.20 has not."""
    from transformers.integrations import finegrained_fp8

    return hasattr(finegrained_fp8, "FP8LinearFunction")


def stand_in(monkeypatch) -> list:
    """Lets transformers' own FP8Linear run in torch, by DeepGEMM's formula; counts its calls."""
    from transformers.integrations import finegrained_fp8

    calls = []

    def matmul(x, weight, scale, block_size, output_dtype, activation_scale=None):
        calls.append(tuple(x.shape))
        return _product(x, weight, scale).to(output_dtype)

    made = finegrained_fp8.FineGrainedFP8(matmul, None, None)
    monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", made)
    monkeypatch.setenv("TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR", "1")
    return calls


def in_fp8(model: torch.nn.Module, skip=("lm_head",), **config) -> torch.nn.Module:
    """The model with its linears in FP8, by transformers' own replacement of modules."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import (
        FP8Experts,
        FP8Linear,
        replace_with_fp8_linear,
    )

    plain, e8m0 = dict(copy.deepcopy(model).named_modules()), config.get("scale_fmt") == "ue8m0"
    replace_with_fp8_linear(model, list(skip), FineGrainedFP8Config(**config))
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):
            weight, scale = quantised_weight(plain[name].weight.detach(), e8m0)
            module.weight = torch.nn.Parameter(weight)
            module.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=not e8m0)
            module.bias = plain[name].bias
        elif isinstance(module, FP8Experts):
            for part in ("gate_up_proj", "down_proj"):
                weight, scale = quantised_experts(getattr(plain[name], part).detach())
                setattr(module, part, torch.nn.Parameter(weight))
                setattr(module, f"{part}_scale_inv", torch.nn.Parameter(scale))
    return model.eval()


def linear(N: int, K: int, bias: bool = False, device="cpu", seed: int = 0) -> torch.nn.Module:
    """One FP8Linear [N, K] of random values."""
    random = torch.Generator().manual_seed(seed)
    part = torch.nn.Linear(K, N, bias=bias, dtype=torch.bfloat16)
    part.weight.data = torch.randn(N, K, generator=random).mul(K**-0.5).bfloat16()
    if bias:
        part.bias.data = torch.randn(N, generator=random).bfloat16()
    return in_fp8(torch.nn.Sequential(part), skip=())[0].to(device)


SIZES = dict(  # of tiny models: widths that torch's product takes
    vocab_size=97, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=1, head_dim=128, initializer_range=0.05,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip


def _tiny(name: str, config: str, skip: tuple, scales="float", **sizes) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config)(**{**SIZES, **sizes})
    model = getattr(transformers, name)(config).to(torch.bfloat16)
    return in_fp8(model, skip, scale_fmt=scales)


def tiny_qwen3(skip=("lm_head",), **more) -> torch.nn.Module:
    """Two layers of Qwen3."""
    return _tiny("Qwen3ForCausalLM", "Qwen3Config", skip, **more)


def tiny_odd() -> torch.nn.Module:
    """The same of widths that are no multiples of 512, one no multiple of 128, with scales in
    e8m0, as DeepSeek-V3.1 and GLM have them."""
    return tiny_qwen3(hidden_size=640, intermediate_size=1360, scales="ue8m0")


def tiny_qwen3_5(skip=("lm_head", "in_proj_a", "in_proj_b"), **more) -> torch.nn.Module:
    """A layer of Gated DeltaNet and one of attention; as checkpoints have it, the projections of
    few rows stay in bf16."""
    sizes = dict(
        linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=128,
        linear_value_head_dim=128, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return _tiny("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", skip, **{**sizes, **more})


def tiny_moe(**more) -> torch.nn.Module:
    """Two layers of Qwen3-MoE."""
    sizes = dict(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2)
    return _tiny("Qwen3MoeForCausalLM", "Qwen3MoeConfig", ("lm_head", "gate"), **{**sizes, **more})


def tiny_latent(scales="float") -> torch.nn.Module:
    """A layer of latent attention, whose heads do not begin at blocks of scales."""
    sizes = dict(
        kv_lora_rank=256, q_lora_rank=256, qk_rope_head_dim=32, qk_nope_head_dim=96, v_head_dim=64,
        num_key_value_heads=4, head_dim=32, num_hidden_layers=1,
    )  # fmt: skip
    return _tiny("YoutuForCausalLM", "YoutuConfig", ("lm_head",), scales, **sizes)


def experts_problem(T, E, K, H, I, device="cpu", seed=0, absent=True) -> tuple:  # noqa: E741
    """Arguments of fp8_experts; two ids are of experts that are held elsewhere."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=random)
    x *= torch.randn(H, generator=random).exp()
    tensors = [x.bfloat16()]
    for N, width in ((2 * I, H), (H, I)):
        weight = torch.randn(E, N, width, generator=random).mul(width**-0.5)
        tensors += quantised_experts(weight)
    ids = torch.rand(T, E, generator=random).argsort(1)[:, :K].contiguous()
    if absent and T > 1:
        ids[0, 0], ids[-1, -1] = E, -1
    weights = torch.rand(T, K, generator=random)
    return tuple(t.to(device) for t in (*tensors, ids, weights))


def exact_experts(x, w_gate_up, s_gate_up, w_down, s_down, ids, weights) -> torch.Tensor:
    """In fp64 of dequantised weights and x that is not rounded, [T, H]."""
    reference, y = submodule("fp8.reference"), torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(w_down)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        up = reference.dequantised(w_gate_up[expert], s_gate_up[expert]).double()
        down = reference.dequantised(w_down[expert], s_down[expert]).double()
        gate, up = (x[token].double() @ up.t()).chunk(2, 1)
        found = (torch.nn.functional.silu(gate) * up) @ down.t()
        found *= weights[token, slot].double().unsqueeze(1)
        y = y.to(x.device).index_add(0, token, found)
    return y


def dequantised(model: torch.nn.Module) -> torch.nn.Module:
    """A copy in fp32 that multiplies with what the weights in FP8 stand for."""
    found = copy.deepcopy(model)
    for name, module in list(found.named_modules()):
        if hasattr(module, "weight_scale_inv"):
            weight = submodule("fp8.reference").dequantised(module.weight, module.weight_scale_inv)
            part = torch.nn.Linear(*weight.shape[::-1], bias=False, device=weight.device)
            part.weight.data = weight
            found.set_submodule(name, part)
    return found.float()
