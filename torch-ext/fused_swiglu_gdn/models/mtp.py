"""load_mtp: the multi-token-prediction (MTP) layer of a checkpoint, by the names of its weights."""

import json
import re
from pathlib import Path
from typing import Any, Dict, Mapping, Union

import torch
from torch import nn

from ..decoding.drafters import MOST
from ..decoding.mtp import Mtp
from ..decoding.reading import inner_of
from ..layers.plain import named_modules, served_as
from ..runtime.checks import is_int, is_model
from .apply import kernelize

PREFIX = "mtp."


def load_mtp(
    model: nn.Module, weights: Union[str, Path, Mapping[str, torch.Tensor]], count: int = 2
) -> Mtp:
    """Loads the multi-token-prediction layer of a checkpoint, for drafts in `model.generate`.

        x_p = fc([norm(embedding of token p + 1), norm(hidden state of token p)])
        draft of token p + 2 = argmax(head(norm(layer(x_p))))

    `model.generate(ids, assistant_model=load_mtp(model, folder))` verifies `count` drafts a round
    and gives the tokens of `model.generate(ids)`, for one sequence, whatever the weights are. The
    model must have been prepared with kernelize, as transformers refuses drafts for it.

    Args:
        model: a causal language model of Qwen3.5 or Qwen3-Next, dense or with experts.
        weights: the folder of a checkpoint in safetensors, one such file, or its tensors by name.
            The names that begin with "mtp." are read, all of them: mtp.fc, mtp.norm,
            mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden and mtp.layers.0.*.
        count: drafts of a round, 1 to 7. The first is the likeliest to be right.

    Returns:
        The layer, in the dtype and on the device of the model's head.

    Raises:
        TypeError: model is no nn.Module, weights no path or dict, or count no int.
        ValueError: the model has no parts of that form, a weight is missing, has another shape, or
            is not one of the layer's; count is out of range.

    Source: DeepSeek-V3 technical report (arXiv:2412.19437), section 2.2; the names are those of
        Qwen's checkpoints.

    Example:
        >>> from transformers import Qwen3_5TextConfig, Qwen3_5ForCausalLM
        >>> config = Qwen3_5TextConfig(
        ...     vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        ...     num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2,
        ...     linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        ... )
        >>> model = Qwen3_5ForCausalLM(config).eval()
        >>> try:
        ...     load_mtp(model, {})
        ... except ValueError as error:
        ...     print(str(error)[:45])
        weights must have mtp.fc.weight, but it is mi
    """
    is_model("load_mtp", model)
    is_int("count", count, 1)
    if count > MOST:
        raise ValueError(f"count must be at most {MOST} drafts, got {count}")
    _check_model(model)
    if not isinstance(weights, (str, Path, Mapping)):
        raise TypeError(f"weights must be a path or a dict of tensors, got {weights!r}")
    if not isinstance(weights, Mapping):
        weights = _read(Path(weights))
    found = {n[len(PREFIX) :]: x for n, x in weights.items() if n.startswith(PREFIX)}
    with torch.device("meta"):
        mtp = Mtp(model, count)
    found = _stacked(found)
    expected = mtp.state_dict()
    for name, x in expected.items():
        if name not in found:
            raise ValueError(f"weights must have {PREFIX}{name}, but it is missing")
        shape = getattr(found[name], "shape", None)
        if shape != x.shape:
            got = type(found[name]).__name__ if shape is None else list(shape)
            raise ValueError(
                f"weights must have {PREFIX}{name} of shape {list(x.shape)}, got {got}"
            )
    more = sorted(found.keys() - expected.keys())
    if more:
        raise ValueError(f"weights must be those of one MTP layer, got {PREFIX}{more[0]}")
    head = model.lm_head.weight
    mtp.load_state_dict(
        {n: x.to(head.device, head.dtype, copy=True) for n, x in found.items()}, assign=True
    )
    mtp.eval().requires_grad_(False)
    if any(served_as(m) for _, m in named_modules(model)):
        kernelize(mtp)
    return mtp


def _check_model(model: nn.Module) -> None:
    inner = getattr(model, "model", None)
    inner = None if inner is None else inner_of(model)
    parts = ("layers", "norm", "embed_tokens", "rotary_emb")
    if not all(hasattr(inner, name) for name in parts) or not hasattr(model, "lm_head"):
        raise ValueError(
            "model must be a causal language model with layers, norm, embed_tokens, rotary_emb and "
            f"lm_head, got {type(model).__name__}"
        )
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise ValueError("model must share its embedding with the MTP layer, which has its own")


def _read(path: Path) -> Dict[str, torch.Tensor]:
    """The tensors of an MTP layer in a file or in the files of a folder."""
    from safetensors import safe_open

    index = path / "model.safetensors.index.json"
    if index.is_file():
        table = json.loads(index.read_text())["weight_map"]
        files = sorted({path / file for n, file in table.items() if n.startswith(PREFIX)})
    else:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if name.startswith(PREFIX):
                    found[name] = tensors.get_tensor(name)
    return found


ONE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def _stacked(found: Dict[str, Any]) -> Dict[str, Any]:
    """Returns experts that are stored one by one as the tensors of all: gate_up_proj [E, 2 I, H]
    and down_proj [E, H, I]."""
    kept, experts = {}, {}
    for name, x in found.items():
        match = ONE.fullmatch(name)
        if match is None:
            kept[name] = x
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = x
    for place, parts in experts.items():
        E = 1 + max(e for e, _ in parts)
        for e in range(E):
            for kind in ("gate", "up", "down"):
                if (e, kind) not in parts:
                    name = f"{PREFIX}{place}.{e}.{kind}_proj.weight"
                    raise ValueError(f"weights must have {name}, but it is missing")
        pairs = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(E)]
        kept[f"{place}.gate_up_proj"] = torch.stack(pairs)
        kept[f"{place}.down_proj"] = torch.stack([parts[e, "down"] for e in range(E)])
    return kept
