"""Real transformers models, small and random, before and after kernelize: the same, in every use.

The kernel is the built one, loaded as users load it.
"""

import copy
import importlib
import shutil
import sys

import pytest
import torch
from conftest import DEVICES, REPOSITORY, ROOT, beside_a_gpu, relative_error
from tiny_models import (
    CONFIGS,
    WITH_GDN,
    assert_same,
    assert_same_gradients,
    in_parts,
    logits,
    pair,
    random_model,
    tokens,
)

transformers = pytest.importorskip("transformers")
kernels = pytest.importorskip("kernels")

T = 70  # more than a chunk of 64 tokens
pytestmark = pytest.mark.filterwarnings("ignore")
# their MLPs alone are served, all in one way: what caches and packing do is seen in one of them
every_kind = pytest.mark.parametrize("name", ["llama", *WITH_GDN])
every_gdn_model = pytest.mark.parametrize("name", WITH_GDN)
on_every_device = pytest.mark.parametrize("device", DEVICES)


@every_kind
@on_every_device
@pytest.mark.parametrize("padding", [0, 9])
def test_logits(built, name, device, padding):
    """With two lengths, one of them unpadded, or one."""
    model, served = pair(built, name, device)
    ids = tokens(2, T, device=device)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    out, ref = (logits(m, ids, attention_mask=mask) for m in (served, model))
    assert_same(out[mask.bool()], ref[mask.bool()])


@every_kind
@on_every_device
@pytest.mark.parametrize("lengths", [[37, 33], [1] * 8, [2, 1, 64, 3]], ids=str)
def test_prompt_in_parts(built, name, device, lengths):
    """Chunked prefill; prompts shorter than the convolution; several tokens after a state."""
    model, served = pair(built, name, device)
    ids = tokens(2, sum(lengths), device=device)
    assert_same(in_parts(served, ids, lengths), in_parts(model, ids, lengths))


@every_kind
@on_every_device
def test_packed_batch(built, name, device):
    """Sequences of a flattened batch come out as they do alone."""
    if name == "qwen4_exp_text":
        pytest.skip("its indexer knows no packed sequences (transformers 5.22)")
    model, served = pair(built, name, device)
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True
    )
    sequences = [tokens(n, seed=n) for n in (5, 67, 1, 20)]
    batch = collator([{"input_ids": ids.tolist()} for ids in sequences])
    batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
    batch.pop("labels")
    with torch.no_grad():
        out = served(**batch, use_cache=False).logits[0]
    ref = [logits(model, ids[None].to(device))[0] for ids in sequences]
    assert_same(out, torch.cat(ref))


@every_kind
@on_every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_close_to_fp32(built, name, device, dtype):
    """Prompt and decoding: the error of transformers' own forward is not exceeded."""
    # all experts take part: rounding must not send a token to another one
    experts = {k: 4 for k in CONFIGS[name] if k == "num_experts_per_tok"}
    wide = random_model(name, device, hidden_size=64, **experts)
    ids, lengths = tokens(2, 84, device=device), [70, 10, 1, 1, 1, 1]
    ref = in_parts(wide, ids, lengths)
    model = wide.to(dtype)
    theirs = relative_error(in_parts(model, ids, lengths), ref)
    assert built.kernelize(model).served
    assert relative_error(in_parts(model, ids, lengths), ref) <= 1.25 * theirs


@every_gdn_model
@on_every_device
def test_packed_batch_by_seq_idx_alone(built, name, device):
    _, served = pair(built, name, device)
    layer = next(m for m in served.modules() if hasattr(m, "conv1d"))
    x = torch.randn(1, 30, 32, device=device)
    index = torch.tensor([[0] * 7 + [1] * 3 + [2] * 20], device=device)
    lengths = torch.tensor([0, 7, 10, 30], dtype=torch.int32, device=device)
    with torch.no_grad():
        out = layer(x, seq_idx=index)
        assert_same(out, layer(x, cu_seq_lens_q=lengths, seq_idx=index))
        parts = [layer(part) for part in x.split([7, 3, 20], dim=1)]
    assert_same(out, torch.cat(parts, 1))


def test_gradients_after_a_cache(built):
    """Autograd's graph survives that the second part overwrites the states of the first.

    Transformers' own layer does not; it is spared the overwriting.
    """
    model = random_model("qwen3_5_text")
    ids = tokens(1, T)

    def step(keep):
        model.zero_grad()
        with torch.no_grad():
            cache = model(ids[:, :40], use_cache=True).past_key_values
        if keep:
            cache.layers[0].update_recurrent_state = lambda state, *args, **kwargs: state
        model(ids[:, 40:], past_key_values=cache).logits.square().mean().backward()
        return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}

    ref = step(keep=True)
    built.kernelize(model, mode="training")
    assert_same_gradients(step(keep=False), ref, "cpu")


def second_version(tmp_path):
    """The same sources as version 2, with another id, as the next release will have."""
    root = tmp_path / "next"
    shutil.copytree(ROOT / "torch-ext", root / "torch-ext")
    shutil.copytree(ROOT / "tools", root / "tools")
    for file in ("build.toml", "CARD.md"):
        shutil.copy(ROOT / file, root)
    text = (root / "build.toml").read_text()
    assert "version = 1" in text
    (root / "build.toml").write_text(text.replace("version = 1", "version = 2"))
    with open(root / "torch-ext" / "fused_swiglu_gdn/runtime/device.py", "a") as file:
        file.write("\nSECOND = True\n")
    importlib.import_module("build").build(root, root / "build")
    return root


def test_two_versions_in_one_process(built, repository, tmp_path, monkeypatch):
    root = second_version(tmp_path)
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={repository}:org/next={root}")
    other = beside_a_gpu(kernels.get_kernel("org/next", version=2))
    assert other.__name__ != built.__name__
    assert other.layers.SwiGLUMLP is not built.layers.SwiGLUMLP
    assert sys.modules[f"{other.__name__}.runtime.device"].SECOND
    assert not hasattr(sys.modules[f"{built.__name__}.runtime.device"], "SECOND")
    model, _ = pair(built, "qwen3_5_text", "cpu")
    ids = tokens(2, 9)
    ref = logits(model, ids)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    assert built.kernelize(first).served and other.kernelize(second).served
    assert_same(logits(first, ids), ref)
    assert torch.equal(logits(first, ids), logits(second, ids))
    # neither touches what the other serves
    assert built.restore(second) == 0
    assert "replaced already" in built.kernelize(second).left[0].reason
    assert other.restore(second) == len(other.kernelize(copy.deepcopy(model)).served)
