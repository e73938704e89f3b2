"""kernelize(model) and restore(model)."""

import contextlib
import enum
import threading
from typing import List, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from ..decoding.generate import restore_graphs, serve_drafts, serve_graphs
from ..decoding.graph_rules import why_not_model
from ..layers.plain import PLAIN_TENSORS, Named, named_modules, told
from ..layers.replay import PAYS_FROM
from ..parallel.checks import is_group
from ..runtime.checks import are_flags, are_words, is_int, is_model
from .context_attention import restore_attention, serve_attention
from .context_trial import why_not_exchanged
from .experts import restore_experts, serve_experts
from .fused_loss import LEAST, serve_loss
from .lora import note_of
from .loss import serve_cross_entropy
from .recognise import KINDS, OF_MODULES, Kind, is_nothing, recognise, replace
from .report import WAITS, Report, Row, kind_of
from .serving import as_gathered, may_move, unserve, why_not_on
from .stand_ins import quiet
from .training_graphs import restore_training_graphs, serve_training_graphs
from .trust import trusting

# what is learnt of a class is kept for all threads
_looking = threading.RLock()


def kernelize(
    model: nn.Module, mode=None,
    *, only: Optional[Sequence[str]] = None, skip: Optional[Sequence[str]] = None,
    loss: Union[bool, str] = False, cuda_graphs: bool = False, training_graphs: bool = False,
    replay: int = 0, cp_group=None, cp_attention: bool = True,
    trust: Sequence[type] = (),
) -> Report:  # fmt: skip
    """Replaces the forwards of modules that our layers and fused_experts compute.

    These are MLPs, norms, attention modules, decoder layers, Gated DeltaNet layers and modules of
    routed experts. Modules are recognised by what they compute, not by the model's name: the
    forward of a class of transformers, or of one that `trust` names, is tried beside the kernel's
    formula. All others, and those that were changed otherwise (quantization of what we read, hooks,
    sharding), are left alone. Only forwards change, and for experts transformers' choice of their
    implementation: parameters, state_dict and saved configuration stay, and restore(model) undoes
    it. Call it last, after adapters are added and after `use_kernels=True`.

    Args:
        model: any nn.Module, on any device. A module for which no kernel exists is left alone; on
            the CPU of a machine with a GPU it is replaced, since it may be moved (docs/use.md).
        mode: "inference", "training" or a kernels.Mode. All of our layers have gradients, so every
            mode replaces the same modules.
        only, skip: kinds of modules to replace, or not to: "mlp", "gdn", "kda" (Kimi Delta
            Attention layers), "norm", "attention", "layer" (decoder layers), "linear" (FP8Linear),
            "lora" (of the peft package), "experts", "loss" (of language models). All of them by
            default.
        loss: in training steps the loss of a language model is made without its logits, where the
            loss is the same; `output.logits` is None there (docs/training.md). "least memory": also
            without a copy of the gradient of `lm_head`'s weight in fp32, at the price of a fourth
            product of tokens, width and vocabulary.
        cuda_graphs: `model.generate` then replays a CUDA graph of a decoding step, if a replay
            computes the same. That needs a static cache; a call that asks for no kind of cache and
            does not return it gets one where graphs pay (docs/decoding.md).
        training_graphs: in training steps decoder layers replay CUDA graphs of their forwards and
            gradients, where a replay computes the same, for models whose steps wait for the host;
            activations then stay allocated between steps (docs/training.md).
        replay: in CUDA graphs (cuda_graphs, or graphed_step), Gated DeltaNet layers that decode
            many sequences write their states once in this many tokens, of which 16 are best, by
            replay_gated_delta_rule. 0: at every token. A state that is read from the cache always
            includes all tokens.
        cp_group: a torch.distributed.ProcessGroup that holds parts of every sequence: the model is
            then called with the result of shard_batch (docs/parallel.md).
        cp_attention: with cp_group, softmax attention gathers keys and values of the group; False
            leaves that to torch's context_parallel or to DeepSpeed's Ulysses.
        trust: classes of modules that are not transformers' own, such as [MyMLP], whose forwards
            are to be tried, too: a module is replaced if the trial agrees (docs/models.md). The
            report names the classes that may be worth it.

    Returns:
        A report: print it for a table of the modules, why some are left, and what to do about it.

    Raises:
        TypeError: model is no nn.Module, replay no int, a flag no bool, or trust no list of
            classes of modules.
        ValueError: mode, only, skip or loss is no known word; replay is 1 or negative; with
            cp_group, a layer of Gated DeltaNet or Kimi Delta Attention cannot be replaced, or only
            or skip excludes it, or a trial of a few tokens finds that the model mixes tokens in
            another way.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48,
        ...                      num_hidden_layers=2, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> before = model(ids).logits
        >>> report = kernelize(model, skip=["layer", "loss"])  # print(report) shows every module
        >>> sorted({row.kind for row in report.rows})
        ['LlamaAttention', 'LlamaMLP', 'LlamaRMSNorm']
        >>> torch.allclose(model(ids).logits, before, atol=1e-5)
        True
    """
    is_model("kernelize", model)
    are_flags(cuda_graphs=cuda_graphs, training_graphs=training_graphs, cp_attention=cp_attention)
    _check_loss(loss)
    _check_mode(mode)
    kinds = _kinds(only, skip)
    _check_replay(replay)
    _check_trust(trust)
    if cp_group is not None:
        if "gdn" not in kinds:
            raise ValueError('only and skip must leave "gdn" in where cp_group is given')
        is_group(cp_group, "cp_group")
    modules = named_modules(model)  # once: a large model has thousands
    restore_attention(modules)
    needed = kinds if cp_group is None else {*kinds, "kda"}
    with _looking, as_gathered(modules), _as_it_was(), quiet(), trusting(trust):
        rows = _serve_modules(modules, needed, replay)
    if cp_group is not None:
        _exchanges_states(model, rows, kinds)
        if cp_attention:
            rows += serve_attention(model)
            delta = [row.module for row in rows if kind_of(row) in ("gdn", "kda")]
            with _looking:
                why = why_not_exchanged(modules, delta)
            if why is not None:
                restore(model)
                raise ValueError(f"model must exchange all it mixes with cp_group, but it {why}")
    restore_graphs(modules)
    restore_training_graphs(modules)
    with trusting(trust):
        of_loss = serve_loss(modules, loss == LEAST) if loss else None
    if "loss" in kinds and (of_loss is None or of_loss.reason is not None):
        found = serve_cross_entropy(modules, _place_of(model))
        of_loss = of_loss or found
    rows += [] if of_loss is None else [of_loss]
    if cuda_graphs:
        module, kind, note, reason = serve_graphs(model)
        rows.append(Row(module, kind, "decode", note, reason))
    if training_graphs:
        rows.append(serve_training_graphs(modules, _place_of(model), cp_group is not None))
    drafts = serve_drafts(modules)
    rows += [_replays(model, rows, replay)] if replay else []
    rows = [row for row in rows if row is not None]
    return Report(rows, _place_of(model), drafts).warn_once()


def _exchanges_states(model: nn.Module, rows: List[Row], kinds: set) -> None:
    """Raises ValueError for a model with a layer that would miss the states of other ranks."""
    for row in rows:
        if kind_of(row) == "kda" and "kda" not in kinds:
            restore(model)
            raise ValueError(f'only and skip must leave "kda" in with cp_group, for {row.module}')
        if kind_of(row) in ("gdn", "kda") and row.reason is not None:
            restore(model)
            raise ValueError(
                "model must have all its Gated DeltaNet and Kimi Delta Attention layers served "
                f"with cp_group, but {row.module} is left alone: {row.reason}"
            )


def _check_loss(loss: object) -> None:
    if not isinstance(loss, str):
        are_flags(loss=loss)
    elif loss != LEAST:
        raise ValueError(f"loss must be True, False or {LEAST!r}, got {loss!r}")


def _check_replay(replay: int) -> None:
    is_int("replay", replay, 0)
    if replay == 1:
        raise ValueError(f"replay must be 0, or at least 2 tokens, got {replay}")


def _check_trust(trust: Sequence[type]) -> None:
    if not isinstance(trust, (list, tuple, set, frozenset)):
        raise TypeError(f"trust must be a list of classes of modules, got {trust!r}")
    for kind in trust:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"trust must be a list of classes of modules, got {kind!r} in it")


def _replays(model: nn.Module, rows: List[Row], replay: int) -> Row:
    """The report's row about deferred write-back in GDN layers."""
    kind, size = type(model).__name__, PAYS_FROM // 2**20
    served = any([row.reason is None and kind_of(row) == "gdn" for row in rows])
    reason = why_not_model(model) if served else "it has no Gated DeltaNet layer that is served"
    if reason is not None:
        return Row("", kind, "decode", None, f"no replay: {reason}")
    by = f"in CUDA graphs: states of {size} MiB a layer or more, written once in {replay} tokens"
    return Row("", kind, "decode", by, None)


@contextlib.contextmanager
def _as_it_was():
    """Equivalence checks multiply small matrices: waking a pool of threads takes longer. What they
    take from the CPU's generator is put back."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if threads > 1:
            torch.set_num_threads(threads)


def _serve_modules(modules: Named, kinds: set, replay: int) -> List[Row]:
    rows = []
    for name, module in reversed(modules):  # parts come before what they are parts of
        if is_nothing(type(module), bool(module._modules)) and "forward" not in module.__dict__:
            continue
        unserve(module)
        finding = recognise(module)
        if finding is None or finding.kind not in kinds:
            continue
        note, reason = None, finding.reason
        if reason is None:
            note, reason = _kernels_for(module, OF_MODULES[finding.kind])
        if reason is None:
            replace(module, finding, replay)
            note = note or note_of(module)
        kind = type(module).__name__
        rows.append(Row(name, kind, finding.layer, note, reason, finding.unknown))
    rows.reverse()
    if "experts" in kinds:
        return rows + serve_experts(modules)
    restore_experts(modules)
    return rows


def _kernels_for(module: nn.Module, kind: Kind) -> Tuple[Optional[str], Optional[str]]:
    """The report's note about a module that can be replaced, and the reason why it is not."""
    where = _place_of(module)
    missing = None if kind.operation is None else why_not_on(where, *kind.operation)
    if missing is None:
        return None, None
    if kind.by_torch:
        return "in plain torch", None
    return (WAITS, None) if may_move(where) else (None, missing)


def _place_of(module: nn.Module) -> torch.device:
    """The device of a module's parameters, preferably of plain ones; "cpu" without parameters."""
    parts, other = [module], None
    for part in parts:  # appended to while iterating
        for x in part._parameters.values():
            if type(x) in PLAIN_TENSORS:
                return x.device
            other = other or told(x, "device")
        parts += filter(None, part._modules.values())
    return other or torch.device("cpu")


def _kinds(only, skip) -> set:
    """The kinds of modules to replace."""
    for name, words in (("only", only), ("skip", skip)):
        if words is not None:
            are_words(name, words, KINDS)
    return set(KINDS if only is None else only) - set(skip or ())


def restore(model: nn.Module) -> int:
    """Undoes kernelize.

    Every replaced module gets its own forward back, experts their previous implementation, and
    generate its own decoding.

    Args:
        model: any nn.Module, whether or not kernelize has seen it.

    Returns:
        The number of modules that were replaced.

    Raises:
        TypeError: model is no nn.Module.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48,
        ...                      num_hidden_layers=2, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> report = kernelize(model)
        >>> restore(model) == len(report.served)
        True
        >>> restore(model)  # nothing is left to undo
        0
    """
    is_model("restore", model)
    modules = named_modules(model)
    restore_attention(modules)
    restore_training_graphs(modules)
    served = sum([unserve(module) for _, module in modules])
    return served + restore_experts(modules) + restore_graphs(modules)


def _check_mode(mode) -> None:
    words = str(mode).lower()
    of_kernels = isinstance(mode, enum.Flag) and ("training" in words or "inference" in words)
    if mode is not None and not of_kernels and words not in ("inference", "training"):
        raise ValueError(f'mode must be "inference", "training" or a kernels.Mode, got {mode!r}')
