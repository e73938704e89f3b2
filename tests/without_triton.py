"""Calls the built package where modules of Triton cannot be imported, and compares with formulas
written out here: for tests/repository/test_without_triton.py.

    python tests/without_triton.py PATH_OF_REPOSITORY MODULE[,MODULE..]

Calls are made as if tensors were on an H200. Without any Triton they are made as on a machine
without a GPU as well, and `make demo` is run, with smaller models.
"""

import importlib.abc
import sys
from pathlib import Path

path, hidden = sys.argv[1], sys.argv[2].split(",")


class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{each}.") for each in hidden):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


assert "triton" not in sys.modules
sys.meta_path.insert(0, Hidden())

import torch  # noqa: E402
from kernels import get_local_kernel  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig  # noqa: E402

F = torch.nn.functional
kernel = get_local_kernel(Path(path))
device = sys.modules[f"{kernel.__name__}.runtime.device"]

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
LINEAR = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16
}  # fmt: skip
MODELS = (Qwen3_5TextConfig(**LINEAR, **SIZES), Qwen3MoeConfig(**EXPERTS, **SIZES))


def randn(*shape):
    return torch.randn(*shape, requires_grad=True)


def same(function, formula, *inputs):
    """The function's result and its gradients are the formula's."""
    results = []
    for each in (function, formula):
        out = each(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        wanted = [x for x in inputs if x.requires_grad]
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for got, wanted in zip(*results):
        assert got.shape == wanted.shape and (got - wanted).norm() <= 1e-4 * wanted.norm()
    assert kernel.implementation_of(function, *inputs) == "reference"


def experts(x, w_gate_up, w_down, ids, weights):
    total = torch.zeros_like(x)
    for e in range(len(w_down)):
        gate, up = (x @ w_gate_up[e].T).chunk(2, -1)
        share = (weights * (ids == e)).sum(1, keepdim=True)
        total = total + share * ((F.silu(gate) * up) @ w_down[e].T)
    return total


def delta_rule(q, k, v, g, beta):
    """Token by token; g [B, T, H] or, with a gate for each channel, [B, T, H, K]."""
    g = g if g.ndim == 4 else g[..., None]
    state, rows = q.new_zeros(*q.shape[::2], q.shape[-1], v.shape[-1]), []
    for qt, kt, vt, gt, bt in zip(*(x.unbind(1) for x in (q, k, v, g, beta))):
        state = state * gt.exp()[..., None]
        delta = bt[..., None] * (vt - torch.einsum("bhk,bhkv->bhv", kt, state))
        state = state + kt[..., None] * delta[..., None, :]
        rows.append(torch.einsum("bhk,bhkv->bhv", qt, state) * q.shape[-1] ** -0.5)
    return torch.stack(rows, 1)


def functions():
    x, w_gate, w_up, w_out = randn(5, 16), randn(24, 16), randn(24, 16), randn(4, 16, 24)
    same(kernel.fused_swiglu, lambda x, g, u: F.silu(x @ g.T) * (x @ u.T), x, w_gate, w_up)
    same(kernel.rms_norm, lambda x, w: F.rms_norm(x, (16,), w, 1e-6), x, randn(16))
    routed = torch.stack([torch.randperm(4)[:2] for _ in range(5)]), torch.rand(5, 2)
    same(kernel.fused_experts, experts, x, randn(4, 48, 16), w_out, *routed)
    qkv, beta = [F.normalize(randn(2, 7, 2, 8), dim=-1) for _ in range(3)], torch.rand(2, 7, 2)
    same(kernel.chunk_gated_delta_rule, delta_rule, *qkv, -torch.rand(2, 7, 2), beta)
    same(kernel.chunk_kda, delta_rule, *qkv, -torch.rand(2, 7, 2, 8), beta)


def outcome(model, ids):
    """Logits of a prompt, gradients of all weights, and tokens."""
    model.zero_grad()
    logits = model(ids).logits
    logits.logsumexp(-1).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logits, gradient, model.generate(ids, max_new_tokens=6, do_sample=False)


def models():
    for config in MODELS:
        model = AutoModelForCausalLM.from_config(config).eval()
        ids = torch.randint(1, 64, (2, 9))
        before = outcome(model, ids)
        report = kernel.kernelize(model, cuda_graphs=True)
        after = outcome(model, ids)
        for got, wanted in zip(after[:2], before[:2]):
            assert (got - wanted).norm() <= 1e-4 * wanted.norm()
        assert torch.equal(after[2], before[2])
        kernel.restore(model)
        print(config.model_type, sorted({row.layer for row in report.served}))


def demonstration():
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import kernelize_llm as demo

    demo.load_kernel = lambda: kernel
    demo.SIZES["cpu"].update(hidden_size=32, intermediate_size=48, head_dim=16)
    demo.HEADS["cpu"] = 4, 8, 8
    demo.PROMPT["cpu"], demo.NEW_TOKENS, demo.REPEATS, demo.TOKENS = 80, 3, 2, 1
    sys.argv = ["kernelize_llm.py", "--device", "cpu"]
    assert demo.main() == 0


chips = [device.Chip("NVIDIA_H200", (9, 0), 132)]
if hidden == ["triton"]:  # an old one differs where kernels would serve, so not without a GPU
    chips.insert(0, None)
for chip in chips:
    torch.manual_seed(0)
    with device.pretending(chip):
        functions()
        models()
if hidden == ["triton"]:
    demonstration()
    assert "triton" not in sys.modules
print("all served")
