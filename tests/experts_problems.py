"""Problems of routed experts for the tests: what is asked, and the answer in fp64."""

import types
from unittest import mock

import torch
from conftest import submodule

reference, call = submodule("experts.reference"), submodule("experts.call")
ROUTINGS = ("random", "held elsewhere", "one expert", "twice")
# as gpt-oss has them, and each part of it alone
LAYOUTS = [
    {"turned": True, "interleaved": True, "biased": True, "activation": "swigluoai", "limit": 0.9},
    {"turned": True, "interleaved": True}, {"turned": True}, {"biased": True},
]  # fmt: skip


def problem(
    T, K, E, H, I, dtype=torch.float32, device="cpu", routing="random", index=torch.int64, seed=0,
    turned=False, biased=False, **options,
):  # fmt: skip
    """A call of the experts. turned: the weights are .mT of contiguous ones.

    routing: "random"; "held elsewhere", some of them -1, E or above, and all of one token;
    "one expert", the same for all; "twice", a token may choose an expert more than once.
    """
    random = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, device=device)

    ids = torch.rand(T, E, generator=random, device=device).topk(min(K, E), -1)[1]
    if routing == "twice" or K > E:
        ids = torch.randint(0, E, (T, K), generator=random, device=device)
    elif routing == "one expert":
        ids = torch.full((T, K), E - 1, device=device)
    elif routing == "held elsewhere":
        ids[::3, 0], ids[1::4, -1] = E, -1
        ids[T // 2] = E + 7
    weights = torch.rand(T, K, generator=random, device=device)
    tensors = (normal(T, H), normal(E, 2 * I, H) * H**-0.5, normal(E, H, I) * max(I, 1) ** -0.5)
    x, *tensors = (t.to(dtype) for t in tensors)
    if turned:
        tensors = [w.mT.contiguous().mT for w in tensors]
    biases = [normal(E, n).to(dtype) if biased else None for n in (2 * I, H)]
    options = call.ExpertsOptions(**options)
    return call.Experts(x, *tensors, ids.to(index), weights, *biases, options)


def options_of(p) -> dict:
    """Options of fused_experts for a problem."""
    _, _, _, _, _, b_gate_up, b_down, (activation, limit, *_, interleaved) = p
    biases = {"b_gate_up": b_gate_up, "b_down": b_down}
    return {"activation": activation, "limit": limit, "interleaved": interleaved, **biases}


def doubled(p):
    return call.Experts(
        *[t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in p]
    )


def answer(p) -> torch.Tensor:
    return reference.experts_fwd(doubled(p))


def of_gradient(p, dout, gate_up=None, routing=None, needs=None):
    """The call of the gradient, of all that it can be of if nothing else is said."""
    needs = needs or (True,) * 4 + (p.b_gate_up is not None, p.b_down is not None)
    options = call.BackwardOptions(
        needs, p.options.activation, p.options.limit, p.options.interleaved
    )
    return call.ExpertsBackward(*p.tensors, dout, gate_up, routing, options)


def by_grouped_mm(p) -> torch.Tensor:
    """out as transformers computes it unless told otherwise; with the default gate only."""
    from transformers.integrations import moe

    def gated(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    experts = types.SimpleNamespace(
        num_experts=p.w_down.shape[0], gate_up_proj=p.w_gate_up, down_proj=p.w_down, has_gate=True,
        has_bias=False, is_transposed=False, is_concatenated=True, has_post_expert_norm=False,
        _is_expert_parallel=False, _apply_gate=gated,
    )  # fmt: skip
    return moe.grouped_mm_experts_forward(experts, p.x, p.ids, p.weights)


def with_leaves(p, *names: str) -> tuple:
    """The problem with tensors of these names, or all that have a gradient, that require one; and
    these, but for biases that are not there."""
    names = names or ("x", "w_gate_up", "w_down", "weights", "b_gate_up", "b_down")
    tensors = {name: getattr(p, name) for name in names if getattr(p, name) is not None}
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    return p._replace(**leaves), list(leaves.values())


def gradients(p, dout: torch.Tensor) -> tuple:
    """dx, dw_gate_up, dw_down, dweights, and those of the biases if there are any, in fp64, as
    torch differentiates the reference.

    A clamp's gradient jumps at the limit: on which side of it gate and up are is asked of their
    values in p's dtype, in which the kernels keep them, as transformers does.
    """
    wide, leaves = with_leaves(doubled(p))
    exact = reference.gated

    def gated(gate, up, activation, limit):
        if limit is not None:
            gate, up = (t + (t.to(p.x.dtype).to(t.dtype) - t).detach() for t in (gate, up))
        return exact(gate, up, activation, limit)

    with mock.patch.object(reference, "gated", gated):
        out = reference.experts_fwd(wide)
    return torch.autograd.grad(out, leaves, dout.double())
