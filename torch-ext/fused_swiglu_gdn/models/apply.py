"""kernelize(model) and restore(model)."""

import torch
from torch import nn

from .. import layers
from ..gdn.call import GdnCall, GdnOptions
from ..gdn_layer.call import DecodeOptions, LayerDecode
from ..layers.swiglu import FORMS, forward_of
from ..runtime import dispatch
from ..runtime.ops import tensors_of
from . import gated_mlp
from .experts import restore_experts, serve_experts
from .recognise import Finding, recognise
from .report import Report, Row
from .serving import serve, unserve
from .sharded import as_gathered

PROMPT = 4096  # tokens of a call that stands for prompts and training; 1 stands for decoding


def kernelize(model: nn.Module, mode=None) -> Report:
    """Serves every MLP, Gated DeltaNet layer and module of routed experts of a model that our
    layers and fused_experts compute the same.

    Modules are recognised by what they are, not by the model's name; all others, and those that
    something else was done to (adapters, quantization, hooks, sharding), are left alone. Only
    forwards change, and for experts transformers' choice of their implementation: parameters,
    state_dict and saved configuration stay, and restore(model) undoes it.
    Call it last, after adapters are added and after `use_kernels=True`.

    Args:
        model: any nn.Module, on any device.
        mode: "inference", "training" or a kernels.Mode; by default as model.training says. Layers
            without gradients are not used for training.

    Returns:
        A report: print it for a table of the modules, who serves them, and why some are left.
    """
    _check_model("kernelize", model)
    training = _is_training(model, mode)
    with as_gathered(model):
        return _kernelize(model, training)


def _kernelize(model: nn.Module, training: bool) -> Report:
    rows = []
    for name, module in model.named_modules():
        unserve(module)
        finding = recognise(module)
        if finding is None:
            continue
        layer = getattr(layers, finding.layer, None)
        reason = finding.reason
        if reason is None and training and not layer.has_backward:
            reason = "the layer has no gradients"
        implementation = None
        if reason is None:
            implementation = _implementations(module, finding, training)
            forward = layer.forward if finding.form is None else forward_of(finding.form)
            serve(module, finding.layer, forward)
            if finding.form is not None:
                FORMS[type(module)] = finding.form
        rows.append(Row(name, type(module).__name__, finding.layer, implementation, reason))
    return Report(rows + serve_experts(model, training))


def restore(model: nn.Module) -> int:
    """Gives every module that kernelize served its own forward back, and experts the implementation
    that they had; returns how many modules."""
    _check_model("restore", model)
    return sum([unserve(module) for module in model.modules()]) + restore_experts(model)


def _check_model(function: str, model) -> None:
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{function}: model must be an instance of torch.nn.Module, got {kind}")


def _is_training(model: nn.Module, mode) -> bool:
    if mode is None:
        return model.training
    words = str(mode).lower()
    if "training" in words or "inference" in words:
        return "training" in words
    raise ValueError(f'mode must be "inference", "training" or a kernels.Mode, got {mode!r}')


def _implementations(module: nn.Module, finding: Finding, training: bool) -> str:
    """Who computes for a module: for prompts and, if another does, for decoding."""
    mlp = finding.form is not None
    names = []
    for tokens in (PROMPT,) if training else (PROMPT, 1):
        if mlp:
            family, operation, args = gated_mlp.facts(module, finding.form, tokens)
        else:
            family, operation, args = _gdn_facts(module, tokens)
        if training and mlp:  # a forward of its own keeps what the backward needs
            family, operation = "swiglu.backward", "swiglu_saving_fwd"
        with dispatch.served() as record:
            dispatch.choose(family, operation, training and not mlp, args)
        names.append(record[operation][0])
        if names[-1] == "reference":
            who = "its own forward" if mlp else "plain torch"
            names[-1] = f"{who} (no kernel for {_place(tensors_of(args)[0])})"
    prompt, decode = names[0], names[-1]
    return prompt if prompt == decode else f"{prompt}, {decode} for decoding"


def _place(x: torch.Tensor) -> str:
    return "fp64" if x.dtype == torch.float64 else x.device.type


def _gdn_facts(module: nn.Module, tokens: int):
    conv = module.conv1d
    w = conv.weight
    H, HV, K, V = (
        getattr(module, name) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    )

    def empty(*shape):
        return w.new_empty(1, tokens, *shape)

    q, v, a = empty(H, K), empty(HV, V), empty(HV)
    if tokens > 1:
        options = GdnOptions(
            K**-0.5, use_qk_l2norm=True, use_beta_sigmoid=True, output_final_state=True
        )
        tensors = (q, q, v, a, a, module.A_log, module.dt_bias)
        return "gdn.chunk", "gdn_chunk_fwd", (GdnCall(*tensors, None, None, None, options),)
    conv_state = w.new_empty(1, *w.shape[::2])  # [1, D, W]
    state = torch.empty(1, HV, K, V, device=w.device)
    rest = (w.squeeze(1), conv.bias, module.A_log, module.dt_bias, w.new_empty(V))
    options = DecodeOptions("silu", 1e-6, "silu", False)
    call = LayerDecode(q, q, v, v, a, a, conv_state, state, *rest, options)
    return "gdn_layer.layer", "gdn_layer_decode", (call,)
