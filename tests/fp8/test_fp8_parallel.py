"""FP8Linears under tensor parallelism and FSDP2: two processes give the logits of one, and the
gradients of adapters, by our products in both. With gloo and the formulas on the CPU; on two GPUs
with NCCL and the kernels."""

import contextlib
import copy

import fp8_problems
import pytest
import torch
import torch.distributed as dist
from conftest import load_package, relative_error, submodule
from two_processes import KINDS, WORLD, found_by, in_shards

WRAPS = ["tp", "fsdp2", "fsdp2 after"]  # after: kernelize comes before
IDS = torch.randint(5, 90, (2, 40), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 98}


def wrapped(model, wrap: str):
    mesh = dist.init_device_mesh(model.device.type, (1, WORLD), mesh_dim_names=("dp", "shards"))[
        "shards"
    ]
    if wrap == "tp":
        return in_shards(model, mesh)
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradient(model, force) -> torch.Tensor:
    """Of the embedding of IDS, through all linears."""
    x = model.model.embed_tokens(IDS.to(model.device)).detach().requires_grad_()
    with force():
        model(inputs_embeds=x, use_cache=False).logits.float().square().mean().backward()
    return x.grad


def check(wrap: str, device: str) -> dict:
    kernel, dispatch = load_package(), submodule("runtime.dispatch")
    calls = fp8_problems.stand_in(pytest.MonkeyPatch())
    alone = fp8_problems.tiny_qwen3(**SIZES).requires_grad_(False).to(device)
    ids, on_gpu = IDS.to(device), device == "cuda"
    truth = fp8_problems.dequantised(alone).double()

    def force():
        return contextlib.nullcontext() if on_gpu else dispatch.force("reference")

    with torch.no_grad():
        want = truth(ids).logits
        theirs = relative_error(alone(ids).logits, want)
    model, own = copy.deepcopy(alone), False
    if wrap == "fsdp2 after":
        report, model = kernel.kernelize(model), wrapped(model, "fsdp2")
    else:
        model = wrapped(model, wrap)
        forwards = [m.__dict__.get("forward") for m in model.modules()]
        own = "forward" in vars(model.model.layers[0].self_attn.q_norm)
        report = kernel.kernelize(model)
        assert len(kernel.kernelize(model).served) == len(report.served)
    served = [row.kind for row in report.served].count("FP8Linear")
    left = sorted({row.kind for row in report.left})
    calls.clear()
    with torch.no_grad(), force(), dispatch.served() as record:
        error = relative_error(model(ids).logits, want)
    slope = relative_error(gradient(model, force), gradient(truth, force))
    found = {"served": served, "left": left, "calls": len(calls), "error": error, "slope": slope}
    found |= {"theirs": theirs, "made": sorted(record), "own": own}
    assert kernel.restore(model) == len(report.served)
    if wrap != "fsdp2 after":
        assert [m.__dict__.get("forward") for m in model.modules()] == forwards
    with torch.no_grad():
        found["restored"] = relative_error(model(ids).logits, want)
    return {**found, "calls after": len(calls)}


def checks(rank: int, device) -> dict:
    return {wrap: check(wrap, device.type) for wrap in WRAPS}


@pytest.fixture(scope="module", params=KINDS)
def results(request, tmp_path_factory):
    return found_by(checks, request.param, tmp_path_factory.mktemp("fp8"))


@pytest.mark.parametrize("wrap", WRAPS)
def test_two_processes_give_what_one_gives(results, wrap):
    for found in (each[wrap] for each in results):
        assert found["served"] == 14 and found["calls"] == 0, found
        assert {"products_fwd", "norm_quantise_fwd"} <= set(found["made"])
        # newer releases' tensor parallelism gives norms of heads a forward of their own
        assert found["left"] == (["Qwen3RMSNorm"] if found["own"] else [])
        assert wrap == "tp" or not found["own"]
        assert found["error"] < 1.1 * found["theirs"] and found["restored"] < 1.1 * found["theirs"]
        assert found["slope"] < 0.2 and found["calls after"] == 14
    if wrap == "tp":
        assert results[0][wrap]["error"] == results[1][wrap]["error"]


def test_shards_that_begin_inside_a_block(kernel, tmp_path):
    """Their scales would be of other rows, as they are for transformers."""
    pytest.importorskip("transformers.distributed.tensor_parallel")
    advice = submodule("models.report").advice_for
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for N, K, plan, cut in (
            (192, 512, "colwise", "192 rows"), (512, 192, "rowwise", "192 columns"),
            (512, 192, "colwise", None), (192, 512, "rowwise", None),
        ):  # fmt: skip
            model = torch.nn.ModuleDict({"a": fp8_problems.linear(N, K)})
            model["a"]._hf_quantized_needs_local_tp = True
            in_shards(model, mesh, {"a": plan})
            left = [row.reason for row in kernel.kernelize(model).left]
            assert len(left) == (cut is not None), (N, K, plan, left)
            assert cut is None or cut in left[0] and "parallel" in advice(left[0])
    finally:
        dist.destroy_process_group()
