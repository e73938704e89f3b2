"""Gates that quantise for an output projection: attention's and Gated DeltaNet's gated norm."""

import copy

import fp8_problems
import pytest
import torch
from conftest import prepared, submodule
from fp8_problems import quantised
from interpreter import (  # noqa: F401
    INTERPRETING,
    compiled,
    test_in_the_interpreter,
    wherever_kernels_run,
)

dispatch, reference = submodule("runtime.dispatch"), submodule("fp8.reference")
attention, layer = submodule("attention.call"), submodule("gdn_layer.call")


def values(*shape, device="cpu", seed=0, scale=2.0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random).mul(scale).bfloat16().to(device)


def same(found, y, rows=None) -> None:
    """Codes and scales to the bit as the quantiser makes them of y, a row a token, and of rows of
    zeros behind them; rows: how many are written."""
    y = y.flatten(0, 1).flatten(1)
    found, expected = fp8_problems.apart(found, len(y)), quantised(y)
    assert found.codes.shape == expected.codes.shape and found.codes.dtype == torch.float8_e4m3fn
    assert found.scales.stride() == expected.scales.stride() == (1, expected.codes.shape[0])
    for mine, other in zip(found, expected):
        assert torch.equal(mine.float()[:rows], other.float()[:rows])


def needs_fp8(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")


def sigmoid_gate(x, gate) -> tuple:
    """In FP8, and in bf16."""
    return tuple(
        prepared(f"attention.portable.{module}", name, attention.SigmoidGate, x, gate)
        for module, name in (
            ("gate_fp8", "sigmoid_gate_quantise_fwd"), ("gate", "sigmoid_gate_fwd"),
        )
    )  # fmt: skip


HEADS = [(1, 1, 4, 128), (2, 17, 6, 64), (16, 1, 2, 256), (1, 65, 16, 256)]
NORMS = [((1, 1, 4), "silu"), ((2, 17, 6), "sigmoid"), ((3, 30, 2, 3), "silu"),
         ((16, 1, 32), "silu")]  # fmt: skip
if INTERPRETING:  # more tokens than a block of codes has, with a rest; few heads
    HEADS = [(1, 1, 2, 128), (2, 9, 6, 64), (3, 1, 2, 256)]
    NORMS = [((2, 9, 2), "sigmoid"), ((3, 1, 2, 3), "silu")]


@wherever_kernels_run
def test_sigmoid_gates(device):
    """Codes and scales are the quantiser's of what the gate gives in bf16; of views, too."""
    needs_fp8(device)
    for B, T, HQ, D in HEADS:
        both = values(B, T, HQ, 2 * D, device=device)
        gate, heads_first = both[..., D:], both[..., :D].transpose(1, 2).contiguous()
        for x in (both[..., :D].contiguous(), both[..., :D], heads_first.transpose(1, 2)):
            found, y = sigmoid_gate(x, gate)
            if B > 1 and T > 1 and x.stride(0) != T * x.stride(1):
                assert found is None
                continue
            same(found, y)
    x = values(1, 3, 2, 64, device=device)
    assert sigmoid_gate(x, x)[0] is not None
    for bad in (x.half(), x[..., :32], x[:0], x[:, :, :1], x.transpose(2, 3)):
        assert sigmoid_gate(bad, bad)[0] is None
    assert sigmoid_gate(x, x[:, :1].expand_as(x)[..., :64].half())[0] is None


def gated_norm(x, gate, weight, activation="silu") -> tuple:
    """In FP8, and in bf16."""
    return tuple(
        prepared(
            f"gdn_layer.portable.{module}", name, layer.GatedNorm, x, gate, weight, 1e-6, activation
        )
        for module, name in (
            ("fp8", "rms_norm_gated_quantise_fwd"), ("layer", "rms_norm_gated_fwd"),
        )
    )  # fmt: skip


@wherever_kernels_run
def test_gated_norms(device):
    needs_fp8(device)
    weight = values(128, device=device, scale=1.0)
    for (B, T, *heads), activation in NORMS:
        x = values(B, T, *heads, 128, device=device)
        z = values(B, T, *heads, 256, device=device, seed=1)[..., 128:]
        z = z if len(heads) == 1 else z.contiguous()
        found, y = gated_norm(x, z, weight, activation)
        same(found, y.flatten(2, -2))
    narrow = values(1, 3, 2, 64, device=device)
    assert gated_norm(narrow, narrow, weight[:64])[0] is None
    for bad in (x.half(), x[:0], x.transpose(1, 2)[..., ::1].mT):
        assert gated_norm(bad, bad, weight.to(bad.dtype))[0] is None


def decoding(B, H, HV, device="cpu", K=128) -> tuple:
    """The tensors of a token; its states are [6:8]."""
    q, k = (values(B, 1, H, K, device=device, seed=i) for i in (1, 2))
    v, z = (values(B, 1, HV, 128, device=device, seed=i) for i in (3, 4))
    a, b = (values(B, 1, HV, device=device, seed=i) for i in (5, 6))
    D = 2 * H * K + HV * 128
    held, state = values(B, D, 4, device=device), values(B, HV, K, 128, device=device).float()
    weight, norm = values(D, 4, device=device, scale=0.5), values(128, device=device, scale=1.0)
    A_log, dt_bias = (values(HV, device=device, seed=i, scale=1.0).float() for i in (7, 8))
    return q, k, v, z, a, b, held, state, weight, None, A_log, dt_bias, norm


def copied(tensors: tuple) -> tuple:
    return tuple(None if x is None else x.clone() for x in tensors)


OPTIONS = "silu", 1e-6, "silu", False


def decode(tensors, module: str, name: str):
    return prepared(f"gdn_layer.portable.{module}", name, layer.LayerDecode, *tensors, *OPTIONS)


@wherever_kernels_run
def test_decoding(device):
    """Codes, scales and both states."""
    needs_fp8(device)
    quantising = "fp8", "gdn_layer_decode_quantise"
    for B, H, HV in ((1, 2, 4), (3 if INTERPRETING else 17, 1, 2)):
        tensors = decoding(B, H, HV, device)
        twin = copied(tensors)
        found, y = decode(tensors, *quantising), decode(twin, "layer", "gdn_layer_decode")
        same(found, y.flatten(2), rows=B)
        assert all(map(torch.equal, tensors[6:8], twin[6:8]))
    assert decode(decoding(65, 1, 1, device), *quantising) is None


GATES = {
    "sigmoid_gate_quantise_fwd", "rms_norm_gated_quantise_fwd", "gdn_layer_decode_quantise",
}  # fmt: skip


def logits_of(model, ids, steps: int) -> tuple:
    """Of a prompt and of tokens after it, and what computed them."""
    transformers = pytest.importorskip("transformers")
    cache = transformers.StaticCache(config=model.config, max_cache_len=128)
    found = []
    with torch.no_grad(), dispatch.force("reference"), dispatch.served() as record:
        for part in (ids[:, :-steps], *ids[:, -steps:].split(1, 1)):
            found.append(model(part, past_key_values=cache).logits)
    return torch.cat(found, 1), record


@compiled
def test_a_model_has_the_same_bits(kernel, monkeypatch):
    """Of a prompt and of tokens, whether the gates quantise or the output projections do."""
    fp8_problems.stand_in(monkeypatch)
    model = fp8_problems.tiny_qwen3_5()
    assert not kernel.kernelize(model).left
    for B, T in ((1, 80), (2, 6)):
        ids = torch.randint(3, 97, (B, T), generator=torch.Generator().manual_seed(0))
        found, record = logits_of(model, ids, 3)
        assert {name: len(rows) for name, rows in record.items() if name in GATES} == {
            "sigmoid_gate_quantise_fwd": 4, "rms_norm_gated_quantise_fwd": 1,
            "gdn_layer_decode_quantise": 3,
        }  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(submodule("layers.fp8.linear"), "weight_of_out", lambda *_: None)
            expected, record = logits_of(model, ids, 3)
        assert GATES.isdisjoint(record) and torch.equal(found, expected)


@compiled
def test_output_projections_that_do_more(kernel, monkeypatch):
    """They are called: with a hook, with biases of their own as well as by products; where a
    gradient may be asked for; without kernels of products."""
    fp8_problems.stand_in(monkeypatch)
    model = fp8_problems.tiny_qwen3_5()
    kernel.kernelize(model)
    ids = torch.arange(3, 12).view(1, 9)
    expected, _ = logits_of(model, ids, 2)
    seen, layers = [], model.model.layers
    handles = [
        part.register_forward_hook(lambda *_: seen.append(1))
        for part in (layers[0].linear_attn.out_proj, layers[1].self_attn.o_proj)
    ]
    found, record = logits_of(model, ids, 2)
    assert GATES.isdisjoint(record) and len(seen) == 6 and torch.equal(found, expected)
    for handle in handles:
        handle.remove()
    with dispatch.force("reference"), dispatch.served() as record:
        model(ids)
    assert GATES.isdisjoint(record)
    out = submodule("layers.fp8.linear").weight_of_out
    part, x = layers[1].self_attn.o_proj, torch.zeros(1, 3, 512).bfloat16()
    with torch.no_grad(), dispatch.force("reference"):
        assert out(part, x, 512) is not None and out(part, x, 256) is None
        assert out(torch.nn.Linear(512, 512), x, 512) is None
    with torch.no_grad(), dispatch.force("portable"):
        assert out(part, x, 512) is None  # nothing multiplies
    with torch.no_grad():
        assert out(part, x, 512) is None  # no kernels for a CPU
    biased = copy.deepcopy(part)
    biased.bias = torch.nn.Parameter(values(512), requires_grad=False)
    heads, gate = values(2, 3, 4, 128), values(2, 3, 4, 128, seed=1)
    with torch.no_grad(), dispatch.force("reference"):
        y = submodule("layers.fp8.linear").gated(heads, gate, biased)
        x = submodule("attention.reference").sigmoid_gate_fwd(heads, gate).view(2, 3, 512)
        assert torch.equal(y, biased(x))
