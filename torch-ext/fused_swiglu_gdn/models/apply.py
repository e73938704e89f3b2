"""kernelize(model) and restore(model)."""

from typing import List, Optional, Sequence

import torch
from torch import nn

from ..attention.call import QkNormRope, QkOptions
from ..attention.ops import FAMILY as ATTENTION
from ..gdn.call import GdnCall, GdnOptions
from ..gdn_layer.call import DecodeOptions, LayerDecode
from ..layers.replay import PAYS_FROM
from ..norm.ops import FAMILY as NORM
from ..parallel.checks import is_group
from ..runtime import dispatch
from ..runtime.checks import are_flags, is_model
from ..runtime.ops import tensors_of
from . import gated_mlp
from .context_attention import restore_attention, serve_attention
from .experts import restore_experts, serve_experts
from .graph_rules import why_not_model
from .graphs import restore_graphs, serve_graphs
from .loss import serve_loss
from .moe_blocks import serve_blocks
from .recognise import KINDS, Finding, recognise, remember
from .report import Report, Row
from .serving import serve, unserve, why_nowhere
from .sharded import as_gathered

PROMPT = 4096  # tokens of a call that stands for prompts and training; 1 stands for decoding


def kernelize(
    model: nn.Module,
    mode=None,
    *,
    only: Optional[Sequence[str]] = None,
    skip: Optional[Sequence[str]] = None,
    loss: bool = False,
    cuda_graphs: bool = False,
    replay: int = 0,
    cp_group=None,
    cp_attention: bool = True,
) -> Report:
    """Serves every MLP, norm, attention module, decoder layer, Gated DeltaNet layer and module of
    routed experts of a model that our layers and fused_experts compute the same.

    Modules are recognised by what they are, not by the model's name; all others, and those that
    something else was done to (quantization of what we read, hooks, sharding), are left alone. Only
    forwards change, and for experts transformers' choice of their implementation: parameters,
    state_dict and saved configuration stay, and restore(model) undoes it.
    Call it last, after adapters are added and after `use_kernels=True`.

    Args:
        model: any nn.Module, on any device. Where no kernel can serve a module, it is left alone;
            on the CPU of a machine with a GPU it is served, since it may be moved (docs/models.md).
        mode: "inference", "training" or a kernels.Mode; by default as model.training says. Layers
            without gradients are not used for training.
        only, skip: kinds of modules to serve, or not to: "mlp", "gdn", "norm", "attention",
            "layer" (decoder layers), "experts". All by default.
        loss: in training steps the loss of a language model is made without its logits, by Liger,
            where liger-kernel is installed and the loss is the same; any use of `output.logits` is
            an error there (docs/models.md).
        cuda_graphs: `model.generate(..., cache_implementation="static")` then replays a CUDA graph
            of a decoding step instead of compiling it, where a replay does the same.
        replay: in CUDA graphs (cuda_graphs, or graphed_step), Gated DeltaNet layers that decode
            many sequences write their states once in so many tokens, of which 16 are best, by
            replay_gated_delta_rule. 0: at every token. A state that is read from the cache has all
            tokens in it, always.
        cp_group: a torch.distributed.ProcessGroup that holds parts of every sequence: the model is
            then called with what shard_batch gives (docs/parallel.md).
        cp_attention: with cp_group, whether softmax attention gathers keys and values of the
            group; False leaves that to torch's context_parallel or to DeepSpeed's Ulysses.

    Returns:
        A report: print it for a table of the modules, who serves them, and why some are left.

    Raises:
        TypeError: model is no nn.Module, replay no int, or a flag no bool.
        ValueError: mode, only or skip is no known word; replay is 1 or negative; with cp_group, a
            Gated DeltaNet layer cannot or shall not be served.
    """
    is_model("kernelize", model)
    are_flags(loss=loss, cuda_graphs=cuda_graphs, cp_attention=cp_attention)
    training = _is_training(model, mode)
    kinds = _kinds(only, skip)
    _check_replay(replay)
    if cp_group is not None:
        if "gdn" not in kinds:
            raise ValueError('only and skip must leave "gdn" in where cp_group is given')
        is_group(cp_group)
    restore_attention(model)
    with as_gathered(model):
        rows = _serve_modules(model, training, kinds, replay)
    if cp_group is not None:
        _exchanges_states(model, rows)
        rows += serve_attention(model) if cp_attention else []
    restore_graphs(model)
    rows += [serve_loss(model)] if loss else []
    rows += [serve_graphs(model)] if cuda_graphs else []
    rows += [_replays(model, rows, replay)] if replay else []
    return Report([row for row in rows if row is not None])


def _exchanges_states(model: nn.Module, rows: List[Row]) -> None:
    """Raises ValueError for a model of which a layer would miss what other processes hold."""
    for row in rows:
        if row.reason is not None and row.layer.endswith("GatedDeltaNet"):
            restore(model)
            raise ValueError(
                f"model must have all its Gated DeltaNet layers served with cp_group, but "
                f"{row.module} is left alone: {row.reason}"
            )


def _check_replay(replay: int) -> None:
    if not isinstance(replay, int) or isinstance(replay, bool):
        raise TypeError(f"replay must be an int, got {type(replay).__name__}")
    if replay < 0 or replay == 1:
        raise ValueError(f"replay must be 0, or at least 2 tokens, got {replay}")


def _replays(model: nn.Module, rows: List[Row], replay: int) -> Row:
    """What the report says of the states of served GDN layers."""
    served = any(row.reason is None and row.layer.endswith("GatedDeltaNet") for row in rows)
    reason = why_not_model(model) if served else "it has no Gated DeltaNet layer that is served"
    if reason is not None:
        return Row("", type(model).__name__, "decode", None, f"no replay: {reason}")
    size = PAYS_FROM // 2**20
    by = f"in CUDA graphs: states of {size} MiB a layer or more, written once in {replay} tokens"
    return Row("", type(model).__name__, "decode", by, None)


def _serve_modules(model: nn.Module, training: bool, kinds: set, replay: int) -> List[Row]:
    rows = []
    for name, module in model.named_modules():
        unserve(module)
        finding = recognise(module)
        if finding is None or finding.kind not in kinds:
            continue
        implementation, reason = None, finding.reason or _why_no_kernel(module, finding)
        if reason is None:
            implementation = _implementations(module, finding, training)
            replay_rows = replay if finding.kind == "gdn" else 0
            serve(module, finding.layer, finding.forward, replay_rows)
            remember(module, finding)
        kind = type(module).__name__
        rows.append(Row(name, kind, finding.layer, implementation, reason))
    if "experts" in kinds:
        return rows + serve_blocks(model) + serve_experts(model, training)
    restore_experts(model)
    return rows


def _why_no_kernel(module: nn.Module, finding: Finding) -> Optional[str]:
    if finding.kind == "gdn":  # in plain torch ours are the faster ones, too
        return None
    family, operation, args = _FACTS[finding.kind](module, finding.form, 1)
    return why_nowhere(args[0].device, family, operation)


def _kinds(only, skip) -> set:
    """The kinds of modules to serve."""
    for name, words in (("only", only), ("skip", skip)):
        if words is None:
            continue
        listed = isinstance(words, (list, tuple, set, frozenset))
        if not listed or not set(words) <= set(KINDS):
            raise ValueError(
                f"{name} must be a list of {', '.join(map(repr, KINDS))}, got {words!r}"
            )
    return set(KINDS if only is None else only) - set(skip or ())


def restore(model: nn.Module) -> int:
    """Gives every module that kernelize served its own forward back, experts the implementation
    that they had and generate its own decoding; returns how many modules."""
    is_model("restore", model)
    restore_attention(model)
    served = sum([unserve(module) for module in model.modules()])
    return served + restore_experts(model) + restore_graphs(model)


def _is_training(model: nn.Module, mode) -> bool:
    if mode is None:
        return model.training
    words = str(mode).lower()
    if "training" in words or "inference" in words:
        return "training" in words
    raise ValueError(f'mode must be "inference", "training" or a kernels.Mode, got {mode!r}')


def _implementations(module: nn.Module, finding: Finding, training: bool) -> str:
    """Who computes for a module: for prompts and, if another does, for decoding."""
    gdn, names = finding.kind == "gdn", []
    for tokens in (PROMPT,) if training else (PROMPT, 1):
        if gdn:
            family, operation, args = _gdn_facts(module, tokens)
        else:
            family, operation, args = _FACTS[finding.kind](module, finding.form, tokens)
        saving = training and operation == "swiglu_fwd"
        if saving:  # a forward of its own keeps what the backward needs
            family, operation = "swiglu.backward", "swiglu_saving_fwd"
        with dispatch.served() as record:
            dispatch.choose(family, operation, training and not saving, args)
        names.append(record[operation][0])
        if names[-1] == "reference":
            who = "plain torch" if gdn else "its own forward"
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


def _width(module: nn.Module) -> torch.Tensor:
    """A norm's weight, or a tensor of the dtype and device of a module's parameters."""
    return next(iter(module.parameters()), torch.empty(1))


def _norm_facts(module: nn.Module, form, tokens: int):
    weight = module._parameters.get(form.weight)
    x = _width(module).new_empty(tokens, 64 if weight is None else len(weight))
    return NORM, "rms_norm_fwd", (x, weight, None, 1e-6, form.casting_mode, form.offset, False)


def _layer_facts(module: nn.Module, form, tokens: int):
    norm = module._modules[form.order.pre_mlp or form.order.post_mlp]
    weight = next(norm.parameters(), None)
    x = _width(module).new_empty(tokens, 64 if weight is None else len(weight))
    return NORM, "rms_norm_fwd", (x, weight, x, 1e-6, "gemma", 0.0, False)


def _attention_facts(module: nn.Module, form, tokens: int):
    x, D = _width(module), module.head_dim
    q, k = (x.new_empty(1, tokens, size // D, D) for size in form.sizes[:2])
    table = x.new_empty(1, tokens, D) if form.heads.rotary else None
    norms = [
        None if n is None else next(module._modules[n].parameters())
        for n in (form.q_norm, form.k_norm)
    ]
    options = QkOptions(1e-6, 0.0, form.heads.norm == "all")
    call = QkNormRope(q, k, table, table, *norms, None, None, None, None, options)
    return ATTENTION, "qk_norm_rope_fwd", (call,)


_FACTS = {
    "mlp": gated_mlp.facts, "norm": _norm_facts, "layer": _layer_facts,
    "attention": _attention_facts,
}  # fmt: skip
