"""FLA's tests of Kimi Delta Attention (flash-linear-attention's tests/ops/test_kda.py) for our
functions: their names, cases and limits, of the ratio of root mean squares of an error and of the
result that is expected.

On a GPU in their sizes; on a CPU, where plain torch computes, with fewer tokens, sequences, heads
and channels. What is expected is the rule by chunks in fp64, which is the recurrence to 1e-12
(tests/functions/test_definition.py).
"""

import pytest
import torch
import torch.nn.functional as F
from conftest import load_package
from kda_problems import terms_of_A_log, wide

kernel = load_package()
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def everywhere(names: str, cases: list, *on_cpu: int):
    """All cases on a GPU, and those at some places on a CPU, where others would be the same."""
    every = [pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in cases]
    return pytest.mark.parametrize(f"{names}, device", every + [(*cases[i], "cpu") for i in on_cpu])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(42)


def fitted(device, B=1, T=1, H=1, HV=1, D=16):
    """Sizes of a case on a device: on a CPU small ones, no multiples where these are none."""
    if device == "cuda":
        return B, T, H, HV, D
    return min(B, 2), min(T, 140), min(H, 2), min(H, 2) * (HV // H), 20


def close(name, ref, tri, ratio):
    """FLA's rule: nothing above 1e-6, or the error is below `ratio` of the root mean square."""
    assert tri.shape == ref.shape and torch.isfinite(tri).all(), name
    error = (tri.double() - ref.double()).abs()
    if error.numel() == 0 or error.max() <= 1e-6:
        return
    found = error.square().mean().sqrt() / (ref.double().square().mean().sqrt() + 1e-8)
    assert found < ratio, f"{name}: {found:.2e}, allowed are {ratio:.0e}"


def unit(x):
    return F.normalize(x, p=2, dim=-1)


def drawn(device, B, T, H, HV, D, dtype, normalizer=1.0, raw=False, N=None, draw=torch.rand):
    """Inputs by name; raw: g is the input of a gate."""
    x = {"q": draw(B, T, H, D), "k": draw(B, T, H, D), "v": draw(B, T, HV, D)}
    x = {name: y.to(dtype) for name, y in x.items()}
    x["g"] = torch.randn(B, T, HV, D)
    x["g"] = x["g"].to(dtype) if raw else F.logsigmoid(x["g"]) / normalizer
    x["beta"] = torch.randn(B, T, HV).to(dtype).sigmoid()
    x["initial_state"] = torch.randn(B if N is None else N, HV, D, D)
    return {name: y.to(device) for name, y in x.items()}


def expected(**given):
    """The rule in fp64."""
    return kernel.chunk_kda(**{name: wide(x) for name, x in given.items()})


def normed(x, in_kernel):
    return x if in_kernel else {**x, "q": unit(x["q"]), "k": unit(x["k"])}


def results(function, x, do=None, dht=None, in_kernel=False, **options):
    """o, the final state, and gradients by name where those of the outputs are given; unit q and k
    are made first unless the rule makes them."""
    leaves = {name: y.detach().requires_grad_(do is not None) for name, y in x.items()}
    given = normed(leaves, in_kernel)
    o, state = function(
        **given, output_final_state=True, use_qk_l2norm_in_kernel=in_kernel, **options
    )
    found = {"o": o, "ht": state}
    if do is not None:
        loss = (o * do.to(o.dtype)).sum() + (state * dht.to(state.dtype)).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        found.update({f"d{name}": y for name, y in zip(leaves, grads)})
    return {name: y.detach() for name, y in found.items()}


def compare(ref, tri, limits):
    for name, limit in limits.items():
        if name in ref:
            close(name, ref[name], tri[name], limit)


def gate_of(g, A_log, dt_bias, bound, dtype=FP32):
    """The gate in plain torch, written here."""
    a = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.view(g.shape[-2:])
    rate = 1.0 if A_log is None else A_log.view(-1, 1).exp()
    return -rate * F.softplus(a) if bound is None else bound * torch.sigmoid(rate * a)


STEPS = [  # the last: what the function makes of its inputs
    (1, 64, 1, 1, 64, 1, 1, FP32, ""), (2, 512, 3, 3, 60, 1, 1, FP32, ""),
    (3, 1000, 4, 4, 100, 0.1, 1, FP32, "norms"), (4, 1024, 4, 4, 128, 0.1, 1, FP32, ""),
    (2, 512, 2, 4, 60, 1, 1, FP32, ""), (2, 1024, 2, 8, 128, 0.1, 1, FP32, "norms"),
    (2, 256, 4, 4, 64, None, 1, FP32, "sigmoid"), (2, 256, 4, 4, 64, None, 1, FP32, "twice"),
    (1, 512, 3, 3, 60, None, 1, FP32, "twice"),
    (1, 64, 1, 1, 64, 1, 1, FP32, "v_first"), (2, 512, 3, 3, 60, 1, 1, FP32, "v_first"),
    (3, 1000, 4, 4, 100, 0.1, 1, FP32, "v_first"), (4, 1024, 4, 4, 128, 0.1, 1, FP32, "v_first"),
    (1, 64, 1, 1, 64, 1, 1, FP32, "norms rate"), (2, 256, 2, 2, 64, 1, 1, FP32, "norms rate bias"),
    (2, 512, 2, 4, 64, 0.1, 1, FP16, "norms rate bias safe"),
    (3, 1000, 2, 8, 128, 1, 1, FP16, "norms rate"),
    (4, 1024, 4, 4, 128, 0.1, 1, FP16, "norms rate bias safe"),
    (1, 64, 1, 1, 64, 1, 1, FP32, "norms safe"), (2, 256, 2, 4, 64, 1, 1, FP32, "norms bias safe"),
]  # fmt: skip


@everywhere("B, T, H, HV, D, scale, normalizer, dtype, makes", STEPS, 4, 5, 6, 7, 10, 14, 15, 19)
def test_fused_recurrent(device, B, T, H, HV, D, scale, normalizer, dtype, makes):
    B, T, H, HV, D = fitted(device, B, T, H, HV, D)
    x, makes = drawn(device, B, T, H, HV, D, dtype, normalizer), makes.split()
    options, more = {"scale": scale, "in_kernel": "norms" in makes}, {}
    given, bound = dict(x), -5.0 if "safe" in makes else None
    if "sigmoid" in makes or "twice" in makes:
        x["beta"] = x["beta"].clamp(1e-4, 1 - 1e-4)
        given["beta"] = torch.logit(x["beta"])
        x["beta"] = x["beta"] * (2 if "twice" in makes else 1)
        more.update(use_beta_sigmoid_in_kernel=True, allow_neg_eigval="twice" in makes)
    if "rate" in makes or "safe" in makes:
        gate = {
            "A_log": torch.empty(HV, device=device).uniform_(1, 16).log(),
            "dt_bias": torch.randn(HV * D, device=device),
        }
        gate["A_log"] = gate["A_log"] if "rate" in makes else None
        gate["dt_bias"] = gate["dt_bias"] if "bias" in makes else None
        given["g"] = torch.randn(B, T, HV, D, device=device)
        x["g"] = gate_of(given["g"], **gate, bound=bound)
        more.update(use_gate_in_kernel=True, lower_bound=bound, **gate)
    if "v_first" in makes:
        given["initial_state"] = x["initial_state"].mT.contiguous()
        more["state_v_first"] = True
    ref = results(expected, x, **options)
    tri = results(kernel.fused_recurrent_kda, given, **options, **more)
    tri["ht"] = tri["ht"].mT if "v_first" in makes else tri["ht"]
    compare(ref, tri, dict.fromkeys(("o", "ht"), 1e-4 if "v_first" in makes else 2e-3))


@everywhere("B, H, D, scale, normalizer, in_kernel, raw, safe, dtype", [
    (16, 16, 128, 0.1, 1.0, True, False, False, BF16),
    (32, 8, 64, 1.0, 1.0, False, False, False, FP16),
    (7, 32, 128, 0.5, 0.5, True, False, False, BF16),
    (16, 16, 128, 0.1, 1.0, True, True, False, BF16),
    (32, 8, 64, 1.0, 1.0, False, True, False, FP16),
    (7, 32, 128, 0.5, 0.5, True, True, True, BF16),
], 0, 4, 5)  # fmt: skip
def test_fused_recurrent_vllm_decode(
    device, B, H, D, scale, normalizer, in_kernel, raw, safe, dtype
):
    """Tokens packed into one row, and states in rows of a pool: other rows hold huge values, and
    stay as they are."""
    B, _, H, _, D = fitted(device, B, 1, H, H, D)
    x = drawn(device, 1, B, H, H, D, dtype, normalizer, raw)
    pool = torch.randn(3 * B, H, D, D, device=device)
    rows = torch.randperm(3 * B, device=device)[:B].int()
    other = torch.ones(3 * B, dtype=torch.bool, device=device)
    other[rows.long()] = False
    pool[other] = 1e30
    gate, bound = {}, -5.0 if safe else None
    if raw:
        gate["A_log"] = torch.empty(H, device=device).uniform_(1, 16).log()
        gate["dt_bias"] = torch.randn(H * D, device=device)
    alone = {name: y.transpose(0, 1) for name, y in x.items()}
    alone["initial_state"] = pool[rows.long()]
    if raw:
        alone["g"] = gate_of(alone["g"], **gate, bound=bound)
    ref = results(expected, alone, scale=scale)
    x = normed({**x, "initial_state": pool.clone()}, in_kernel)
    o, after = kernel.fused_recurrent_kda(
        **x, scale=scale, state_indices=rows, inplace_final_state=True,
        cu_seqlens=torch.arange(B + 1, dtype=torch.int32, device=device),
        use_qk_l2norm_in_kernel=in_kernel, use_gate_in_kernel=raw, lower_bound=bound, **gate,
    )  # fmt: skip
    assert after is x["initial_state"]
    compare(ref, {"o": o.transpose(0, 1), "ht": after[rows.long()]}, {"o": 5e-3, "ht": 5e-3})
    assert torch.equal(after[other], pool[other])


# of the gradient of A_log FLA's test only warns
CHUNK = {
    "o": 5e-3, "ht": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dg": 2e-2, "dbeta": 2e-2,
    "ddt_bias": 8e-3, "dinitial_state": 8e-3,
}  # fmt: skip
CHUNKS = [
    (1, 63, 1, 1, 64, 1, 1, 0, False, False, FP16, True, False, 64),
    (2, 500, 3, 3, 60, 1, 1, 0, False, False, FP16, True, True, 64),
    (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False, False, FP16, False, True, 64),
    (3, 1024, 4, 4, 100, 1, 0.1, 0, False, False, FP16, False, False, 64),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, False, False, FP16, True, True, 64),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, True, False, FP16, True, False, 64),
    (2, 1500, 4, 4, 128, 0.1, 10, 0, False, True, FP16, False, True, 64),
    (4, 2048, 8, 8, 64, 0.1, 1, 0, False, True, FP16, True, True, 64),
    (2, 1024, 2, 4, 64, 0.1, 1, 0, False, False, FP16, False, False, 64),
    (2, 1024, 2, 8, 64, 0.1, 1, 0, False, True, FP16, False, False, 64),
    (2, 1024, 4, 8, 128, 0.1, 1, 0, True, True, FP16, False, False, 64),
    (2, 160, 2, 4, 64, 0.1, 1, 0, False, True, FP16, True, True, 32),
    (2, 1024, 2, 4, 64, 0.1, 1, 0, True, True, BF16, True, False, 64),
    (2, 1024, 2, 4, 64, 0.1, 1, 0, False, True, BF16, False, False, 64),
    (2, 160, 2, 4, 64, 0.1, 1, 0, False, True, BF16, True, True, 32),
    (2, 1024, 2, 8, 128, 0.1, 1, 0, True, True, BF16, False, False, 64),
]


def results_of_chunks(x, raw, bound, options, **more):
    """What is expected, and what the kernels compute, with gradients."""
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    given = {"use_gate_in_kernel": raw, "lower_bound": bound, **options}
    ref = results(expected, x, do, dht, **given)
    return ref, results(kernel.chunk_kda, x, do, dht, **given, **more)


@everywhere(
    "B, T, H, HV, D, scale, normalizer, masked, in_kernel, raw, dtype, safe, kept, chunk_size",
    CHUNKS, 2, 5, 6, 11, 12, 15,
)  # fmt: skip
def test_chunk(
    device, B, T, H, HV, D, scale, normalizer, masked, in_kernel, raw, dtype, safe, kept,
    chunk_size,
):  # fmt: skip
    B, T, H, HV, D = fitted(device, B, T, H, HV, D)
    x = drawn(device, B, T, H, HV, D, dtype, normalizer, raw)
    if raw:
        x["A_log"] = torch.randn(HV, device=device)
        x["dt_bias"] = torch.randn(HV * D, device=device)
    else:
        x["g"] *= torch.rand_like(x["g"]) > masked
        x["g"] = x["g"].clamp(min=-5) if safe else x["g"]
    ref, tri = results_of_chunks(
        x, raw, -5.0 if safe else None, {"scale": float(scale)}, in_kernel=in_kernel,
        safe_gate=safe, disable_recompute=kept, chunk_size=chunk_size,
    )  # fmt: skip
    compare(ref, tri, CHUNK)


@everywhere("B, T, H, D, scale", [
    (1, 63, 1, 64, 1), (2, 500, 3, 60, 1), (3, 1024, 4, 128, 0.1), (4, 2048, 8, 64, 0.1),
], 1)  # fmt: skip
def test_chunk_state_v_first(device, B, T, H, D, scale):
    x = drawn(device, *fitted(device, B, T, H, H, D), FP16)
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    ref = results(kernel.chunk_kda, x, do, dht, scale=float(scale))
    x["initial_state"] = x["initial_state"].mT.contiguous()
    tri = results(kernel.chunk_kda, x, do, dht.mT, scale=float(scale), state_v_first=True)
    for name in ("ht", "dinitial_state"):
        tri[name] = tri[name].mT
    compare(ref, tri, dict.fromkeys(CHUNK, 1e-4))


@everywhere("B, T, H, D, twice, dtype", [
    (1, 8192, 96, 128, False, BF16), (1, 8192, 96, 128, True, BF16), (2, 96, 2, 64, True, FP16),
], 0, 2)  # fmt: skip
def test_chunk_use_beta_sigmoid_in_kernel(device, B, T, H, D, twice, dtype):
    x = drawn(device, *fitted(device, B, T, H, H, D), dtype)
    raw = {**x, "beta": torch.randn_like(x["beta"])}
    post = raw["beta"].float().sigmoid()
    x["beta"] = post * (2 if twice else 1)
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    ref = results(kernel.chunk_kda, x, do, dht)
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": twice}
    tri = results(kernel.chunk_kda, raw, do, dht, **options)
    ref["dbeta"] = (ref["dbeta"] * (2 if twice else 1) * post * (1 - post)).to(raw["beta"].dtype)
    compare(ref, tri, dict.fromkeys(CHUNK, 1e-4))


PACKED = [
    (4, 60, 0.1, [0, 15], True, False, False, 64),
    (4, 64, 0.9, [0, 256, 500, 1000], True, False, False, 64),
    (4, 128, 0.5, [0, 256, 500, 1000], False, False, False, 64),
    (4, 100, 0, [0, 15, 100, 300, 1200, 2000], True, False, False, 64),
    (4, 256, 0, [0, 100, 300, 1200, 3000, 4096], False, True, True, 64),
    (4, 60, 0.1, [0, 31, 96, 160], True, False, True, 32),
]


def packed_inputs(device, H, D, masked, lengths, raw, safe):
    """Packed sequences, some of whose gates are -1000."""
    if device == "cpu":
        lengths = [min(end, 40 * n) for n, end in enumerate(lengths)]
    _, _, H, _, D = fitted(device, 1, 1, H, H, D)
    T, N = lengths[-1], len(lengths) - 1
    x = drawn(device, 1, T, H, H, D, FP16, raw=raw, N=N, draw=torch.randn)
    x["k"] = unit(x["k"].float()).to(FP16)
    x["beta"] = torch.rand_like(x["beta"]).sigmoid()
    if raw:
        x["A_log"] = torch.empty(1, 1, H, 1, device=device).uniform_(1, 16).log()
        x["dt_bias"] = torch.randn(H * D, device=device)
    else:
        x["g"] *= torch.rand_like(x["g"]) > masked
    x["g"][torch.rand_like(x["g"].float()) < masked] = -1000
    x["g"] = x["g"].clamp(min=-5) if safe else x["g"]
    return x, torch.tensor(lengths, device=device)


@everywhere("H, D, masked, lengths, raw, safe, kept, chunk_size", PACKED, 0, 2, 4, 5)
def test_chunk_varlen(device, H, D, masked, lengths, raw, safe, kept, chunk_size):
    x, cu = packed_inputs(device, H, D, masked, lengths, raw, safe)
    ref, tri = results_of_chunks(
        x, raw, None, {"cu_seqlens": cu}, cu_seqlens_cpu=cu.cpu(), safe_gate=safe,
        disable_recompute=kept, chunk_size=chunk_size,
    )  # fmt: skip
    limits = dict.fromkeys(("dq", "dv", "dinitial_state"), 7e-3)
    limits.update(dict.fromkeys(("dg", "dbeta"), 1.5e-2), ddt_bias=5e-3)
    compare(ref, tri, {**CHUNK, **limits})


@everywhere("H, D, masked, lengths, raw, safe, kept", [
    (4, 60, 0.1, [0, 8192], True, False, False), *[case[:-1] for case in PACKED[1:5]],
], 0, 4)  # fmt: skip
@torch.inference_mode()
def test_chunk_varlen_prefill(device, H, D, masked, lengths, raw, safe, kept):
    x, cu = packed_inputs(device, H, D, masked, lengths, raw, safe)
    options = {"use_gate_in_kernel": raw, "cu_seqlens": cu}
    ref = results(expected, x, **options)
    tri = results(
        kernel.chunk_kda, x, cu_seqlens_cpu=cu.cpu(), safe_gate=safe, disable_recompute=kept,
        **options,
    )  # fmt: skip
    compare(ref, tri, {"o": 5e-3, "ht": 5e-3})


@everywhere("B, T, H, D, rate, bias, bound", [
    (1, 2, 2, 12, True, False, -5.0), (1, 32, 2, 16, True, False, -5.0),
    (2, 64, 4, 32, True, False, -5.0), (4, 128, 8, 64, True, False, -5.0),
    (4, 128, 8, 128, True, False, None), (1, 2, 2, 12, True, True, None),
    (1, 32, 2, 16, True, True, None), (2, 64, 4, 32, True, True, None),
    (4, 128, 8, 64, True, True, None), (4, 128, 8, 128, True, True, None),
    (1, 2, 2, 12, False, False, -5.0), (2, 64, 4, 32, False, False, -5.0),
    (4, 128, 8, 64, False, True, -5.0), (4, 128, 8, 128, False, True, -5.0),
], 0, 4, 5, 10, 12)  # fmt: skip
def test_gate(device, B, T, H, D, rate, bias, bound):
    """There is no function for the gate alone, so it is compared through the rule: raw gates in
    fp32 beside gates of plain torch in fp64, whose gradient torch computes."""
    B, T, H, _, D = fitted(device, B, T, H, H, D)
    x = drawn(device, B, T, H, H, D, FP32)
    x["g"] = torch.randn(B, T, H, D, device=device) * 10
    if rate:
        x["A_log"] = torch.empty(1, 1, H, 1, device=device).uniform_(1, 16).log()
    if bias:
        x["dt_bias"] = torch.randn(H * D, device=device)

    def with_gates(g, A_log=None, dt_bias=None, **more):
        given = {name: wide(y) for name, y in more.items()}
        return kernel.chunk_kda(g=gate_of(g, A_log, dt_bias, bound, torch.float64), **given)

    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    ref = results(with_gates, x, do, dht, in_kernel=True)
    tri = results(
        kernel.chunk_kda, x, do, dht, in_kernel=True, use_gate_in_kernel=True, lower_bound=bound
    )
    compare(ref, tri, dict.fromkeys(("o", "ht", "dg"), 1e-4))
    # FLA's gradients here are of the gate alone; behind the rule's, sums over tokens may cancel
    terms = terms_of_A_log(ref["dg"], x["g"], x.get("dt_bias"), bound is not None)
    for name, size in (("dA_log", terms.norm()), ("ddt_bias", ref["dg"].norm())):
        if name in ref:
            # fp32 sums over all tokens: on an H200 up to 1.7e-4 of the terms of A_log
            assert (tri[name] - ref[name]).norm() < 5e-4 * size, name
