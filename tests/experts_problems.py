"""Problems of routed experts for the tests: what is asked, and the answer in fp64."""

import types
from typing import NamedTuple, Optional
from unittest import mock

import torch
from conftest import submodule

reference, call = submodule("experts.reference"), submodule("experts.call")


class Problem(NamedTuple):
    """Arguments of experts_fwd, in their order."""

    x: torch.Tensor  # [T, H]
    w_gate_up: torch.Tensor  # [E, 2 I, H]
    w_down: torch.Tensor  # [E, H, I]
    ids: torch.Tensor  # [T, K]
    weights: torch.Tensor  # [T, K]
    activation: str = "silu"
    limit: Optional[float] = None
    interleaved: bool = False
    biases: tuple = call.NO_BIASES


def problem(
    T, K, E, H, I, dtype=torch.float32, device="cpu", routing="random", activation="silu",
    limit=None, index=torch.int64, seed=0, turned=False, interleaved=False, biased=False,
) -> Problem:  # fmt: skip
    """turned: the weights are .mT of contiguous ones.

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
    biases = [normal(E, n).to(dtype) for n in (2 * I, H)] if biased else ()
    more = (activation, limit, interleaved, call.Biases(*biases))
    return Problem(x, *tensors, ids.to(index), weights, *more)


def options_of(p: Problem) -> dict:
    """Options of fused_experts for a problem."""
    biases = {"b_gate_up": p.biases[0], "b_down": p.biases[1]}
    return {"activation": p.activation, "limit": p.limit, "interleaved": p.interleaved, **biases}


def doubled(p: Problem) -> Problem:
    wide = (t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in p)
    p = Problem(*wide)
    return p._replace(biases=call.Biases(*(b if b is None else b.double() for b in p.biases)))


def answer(p: Problem) -> torch.Tensor:
    return reference.experts_fwd(*doubled(p))


def by_grouped_mm(p: Problem) -> torch.Tensor:
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


def gradients(p: Problem, dout: torch.Tensor) -> tuple:
    """dx, dw_gate_up, dw_down, dweights, and those of the biases if there are any, in fp64, as
    torch differentiates the reference.

    A clamp's gradient jumps at the limit: on which side of it gate and up are is asked of their
    values in p's dtype, in which the kernels keep them, as transformers does.
    """
    wide = doubled(p)
    given = [b for b in wide.biases if b is not None]
    leaves = [t.detach().requires_grad_() for t in (*wide[:3], wide.weights, *given)]
    exact = reference.gated

    def gated(gate, up, activation, limit):
        if limit is not None:
            gate, up = (t + (t.to(p.x.dtype).to(t.dtype) - t).detach() for t in (gate, up))
        return exact(gate, up, activation, limit)

    with mock.patch.object(reference, "gated", gated):
        biases = call.Biases(*leaves[4:])
        out = reference.experts_fwd(*leaves[:3], p.ids, leaves[3], *p[5:8], biases)
    return torch.autograd.grad(out, leaves, dout.double())
