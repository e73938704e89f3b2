"""Latent attention whose kv_b_proj is in FP8: tokens attend to the latents."""

import copy
import functools

import fp8_problems
import pytest
import torch
from conftest import load_package, relative_error, submodule

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.youtu")
dispatch = submodule("runtime.dispatch")
kernel = load_package()


@torch.no_grad()
def logits(model, ids: torch.Tensor, static: bool) -> torch.Tensor:
    """Of the tokens after a prompt of eleven, fp32."""
    cache = transformers.DynamicCache(config=model.config)
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    model(ids[:, :11], past_key_values=cache)
    found = [model(x, past_key_values=cache).logits for x in ids[:, 11:].split(1, 1)]
    return torch.cat(found, 1).float()


def check(theirs, static: bool, force=None) -> None:
    """No further from dequantised weights in fp32 than transformers' own modules; kv_b_proj is not
    called for tokens, and its weight is read in every call, in FP8."""
    ours = copy.deepcopy(theirs)
    report = kernel.kernelize(ours)
    assert sum(row.layer == "LatentAttention" and row.reason is None for row in report.rows), report
    device = next(theirs.parameters()).device
    ids = torch.randint(3, 97, (2, 14), generator=torch.Generator().manual_seed(0)).to(device)
    for _ in range(2):
        with (force or functools.partial(dispatch.force, None))(), dispatch.served() as record:
            mine = logits(ours, ids, static)
        steps = [by for by in record.get("latent_step", ()) if by != "reference"]
        assert len(record.get("latent_attention", ())) + len(steps) == 3, record
        assert "dequantise_fwd" not in record
        exact = logits(fp8_problems.dequantised(theirs), ids, static)
        errors = [relative_error(found, exact) for found in (mine, logits(theirs, ids, static))]
        assert errors[0] <= 1.05 * errors[1], errors
        for model in (theirs, ours):  # in place
            scale = model.model.layers[0].self_attn.kv_b_proj.weight_scale_inv.data
            scale.copy_((2 * scale.float()).to(scale.dtype))


@pytest.mark.parametrize("static, scales", [(False, "float"), (True, "ue8m0")])
def test_tokens(monkeypatch, static, scales):
    fp8_problems.stand_in(monkeypatch)
    theirs = fp8_problems.tiny_latent(scales)
    check(theirs, static, functools.partial(dispatch.force, "reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
def test_tokens_on_a_gpu(monkeypatch, static):
    fp8_problems.needs_hopper("cuda")
    fp8_problems.stand_in(monkeypatch)
    check(fp8_problems.tiny_latent().cuda(), static)
