"""No operation returns its input, or a view of it, unless it is asked to write in place."""

import pytest
import torch

F32, F64 = torch.float32, torch.float64


def random(*shape, dtype=F32):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def rule(name, **options):
    def call(kernel, T, dtype, N=1):
        packed = N > 1
        B = 1 if packed else N
        q, k, v = (random(B, T, 2, 8, dtype=dtype) for _ in range(3))
        g, beta = random(B, T, 2, dtype=dtype).sigmoid().log(), random(B, T, 2, dtype=dtype)
        state = random(N, 2, 8, 8, dtype=dtype)
        lengths = torch.tensor([0] * N + [T]) if packed else None
        given = (q, k, v, g, beta, state)
        chosen = {"initial_state": state, "output_final_state": True, "cu_seqlens": lengths}
        return given, getattr(kernel, name)(*given[:5], **chosen, **options)

    return call


def packed_rule(name):
    return lambda kernel, T, dtype: rule(name)(kernel, T, dtype, N=3)


def convolution(packed):
    def call(kernel, T, dtype):
        x, weight = random(1, 4, T, dtype=dtype), random(4, 3, dtype=dtype)
        states = random(1, 4, 2, dtype=dtype)
        lengths = torch.tensor([0, T]) if packed else None
        found = kernel.causal_conv1d_fn(
            x, weight, cu_seqlens=lengths, initial_states=states, return_final_states=True
        )
        return (x, weight, states), found

    return call


def ring(kernel, T, dtype):
    """replay_gated_delta_rule, and the states of a ring without tokens."""
    T = max(T, 1)  # a call without tokens is refused
    q, k, v = (random(1, T, 2, 8, dtype=dtype) for _ in range(3))
    g, beta = random(1, T, 2).sigmoid().log(), random(1, T, 2)
    state, cursor = random(1, 2, 8, 8, dtype=dtype), torch.zeros(1, 2, dtype=torch.int32)
    made = kernel.make_ring(state, 2, dtype, rows=8, max_tokens=4)
    tensors = [x.zero_() for x in made if torch.is_tensor(x)]
    found = kernel.materialise_ring(state, made, cursor)
    o = kernel.replay_gated_delta_rule(q, k, v, g, beta, state, made, cursor)
    return (q, k, v, g, beta, state, cursor, *tensors), (found, o)


def norms(kernel, T, dtype):
    x, residual = random(T, 8, dtype=dtype), random(1, T, 8, dtype=dtype)[0]
    y, total = kernel.rms_norm(x, residual=residual)
    after = kernel.rms_norm(x, residual=residual, after=True)
    return (x, residual), (kernel.rms_norm(x), y, total, after)


def experts(kernel, T, dtype):
    x, up, down = random(T, 8, dtype=dtype), random(3, 8, 8), random(3, 8, 4)
    up, down = up.to(dtype), down.to(dtype)
    ids, weights = torch.full((T, 1), -1), torch.ones(T, 1, dtype=dtype)  # all held elsewhere
    return (x, up, down, ids, weights), kernel.fused_experts(x, up, down, ids, weights)


def router(kernel, T, dtype):
    logits = random(T, 4, dtype=dtype)
    return (logits,), kernel.fused_topk(logits, 4)


def rotary(kernel, T, dtype):
    """Without weights and angles nothing is done to q and k."""
    q, k = (random(1, T, 2, 8, dtype=dtype) for _ in range(2))
    return (q, k), kernel.fused_qk_norm_rope(q, k)


def gates(kernel, T, dtype):
    x, gate, A_log = random(T, 8, dtype=dtype), random(T, 8, dtype=dtype), random(8, dtype=dtype)
    found = (
        kernel.sigmoid_gate(x, gate),
        kernel.silu_mul(x, gate),
        kernel.gated_delta_gate(x, A_log),
        kernel.rms_norm_gated(x, gate, A_log),
    )
    return (x, gate, A_log), found


def mlp(kernel, T, dtype):
    x, weight = random(T, 8, dtype=dtype), random(8, 8, dtype=dtype)
    found = (
        kernel.fused_swiglu(x, weight, weight),
        kernel.fused_swiglu_mlp(x, weight, weight, weight),
    )
    return (x, weight), found


CHUNK, STEPS = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
CALLS = {
    "chunk": rule(CHUNK), "chunk, V first": rule(CHUNK, state_v_first=True),
    "chunk, packed": packed_rule(CHUNK), "aiter": rule("chunk_gated_delta_rule_opt"),
    "steps": rule(STEPS), "steps, V first": rule(STEPS, state_v_first=True),
    "steps, packed": packed_rule(STEPS), "convolution": convolution(False),
    "convolution, packed": convolution(True), "ring": ring, "norms": norms,
    "experts": experts, "router": router,
    "rotary": rotary, "gates": gates, "mlp": mlp,
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("T", [0, 1, 3])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_results_are_in_memory_of_their_own(kernel, call, T, dtype, grad):
    with torch.set_grad_enabled(grad):
        given, found = call(kernel, T, dtype)
    theirs = {x.untyped_storage().data_ptr() for x in given if x.numel()}
    found = [found] if torch.is_tensor(found) else [x for x in found if x is not None]
    assert found
    for x in found:
        assert not x.numel() or x.untyped_storage().data_ptr() not in theirs


@pytest.mark.parametrize("name", [CHUNK, STEPS])
def test_a_final_state_without_tokens(kernel, name):
    """The final state has the initial state's values and gradient, and can be written to."""
    q, state = random(1, 0, 2, 8), random(1, 2, 8, 8).requires_grad_()
    g = random(1, 0, 2)
    _, final = getattr(kernel, name)(q, q, q, g, g, initial_state=state, output_final_state=True)
    assert torch.equal(final, state)
    final.sum().backward()
    assert torch.equal(state.grad, torch.ones_like(state))
    before = state.detach().clone()
    final.detach().zero_()
    assert torch.equal(state, before)
