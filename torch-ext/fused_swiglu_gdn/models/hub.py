"""Mappings of our layers for `kernels` and transformers; `kernels` is imported on use."""

import re
from pathlib import Path
from types import ModuleType
from typing import Dict, List, Optional, Sequence, Union

from torch import nn

from .. import layers
from ..layers.plain import named_modules
from ..runtime.checks import are_words, is_int, is_model
from .recognise import Finding, recognise
from .serving import own_class

# the names that models are decorated with, or ask functions by, and our layer for each
OTHERS = {
    "FusedRMSNormGated": "RMSNormGated",
    "recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "chunk_kda",
    "recurrent_kimi_delta_attention": "fused_recurrent_kda",
}
NAMES = {OTHERS.get(n, n): n for n in layers.__all__ if n != "SwiGLUGateUpLayout"}
DEVICES = ("cpu", "cuda", "mps", "neuron", "npu", "rocm", "tpu", "xpu")  # that `kernels` knows
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class _Loaded:
    """A layer repository, in the sense of `kernels`, of layers that are in memory already."""

    def __init__(self, package: ModuleType, layer_name: str):
        self.package, self.layer_name = package, layer_name

    def load(self):
        return getattr(self.package, self.layer_name)

    def _key(self):
        return self.package.__name__, self.layer_name

    def __deepcopy__(self, memo):
        return self

    def __eq__(self, other):
        return isinstance(other, _Loaded) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def __str__(self):
        return f"`{self.package.__name__}` (in memory), layer `{self.layer_name}`"


def layer_mapping(
    source: Union[None, ModuleType, str, Path] = None,
    *,
    version: Optional[int] = None,
    revision: Optional[str] = None,
    names: Optional[Sequence[str]] = None,
    devices: Sequence[str] = ("cuda", "rocm", "cpu", "mps"),
    trust_remote_code: Union[bool, List[str]] = False,
) -> Dict[str, dict]:
    """A mapping for kernels.use_kernel_mapping or kernels.register_kernel_mapping.

    It survives transformers' `use_kernels=True`, which puts its own mapping over others each time:
    a range of capabilities is narrower than no range, and the narrower one wins.

    Args:
        source: "org/repo" on the Hub (with version or revision), the path of a local repository,
            a loaded kernel, or None for this one.
        version, revision: of the Hub repository; one of them. With LOCAL_KERNELS and no network,
            only revision works (kernels 0.17.2).
        names: the names to map: "SwiGLUMLP", "SwiGLUGateUp", "Qwen3_5GatedDeltaNet",
            "Qwen3NextGatedDeltaNet", "OlmoHybridGatedDeltaNet", "RMSNorm", "RMSNormZeroCentered",
            "RMSNormGated", "SoftmaxTopKRouter", "rotary_pos_emb", "ForCausalLMLoss",
            "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda",
            "fused_recurrent_kda", "causal_conv1d_fn", "causal_conv1d_update"; all by default.
        devices: the device types to map, of those that `kernels` knows: "cpu", "cuda", "mps",
            "neuron", "npu", "rocm", "tpu", "xpu".
        trust_remote_code: for a Hub repository whose publisher is not a trusted one: True, or a
            list of the repositories to trust, each by its whole name "org/repo".

    Returns:
        {name: {device: {mode: repository}}}

    Raises:
        ValueError: names or devices has an unknown word; source is neither a Hub repository's name
            nor a folder that is there; version and revision do not go with it.
        TypeError: an argument is of the wrong type.
        ImportError: the package `kernels` is not installed.

    Example:
        >>> mapping = layer_mapping(names=["SwiGLUMLP", "RMSNormGated"], devices=["cpu"])
        >>> list(mapping), len(mapping["SwiGLUMLP"])
        (['SwiGLUMLP', 'RMSNormGated'], 1)
        >>> mapping = layer_mapping("org/fused-swiglu-gdn", version=1)  # nothing is fetched yet
        >>> len(mapping)
        17
    """
    if names is not None:
        are_words("names", names, NAMES)
    are_words("devices", devices, DEVICES)
    _is_source(source, version, revision)
    _is_trust(trust_remote_code)
    from kernels import Mode

    both = Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE
    gradients = Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE
    mapping = {}
    for name in NAMES if names is None else names:
        layer = NAMES[name]
        repository = _repository(source, layer, version, revision, trust_remote_code)
        flags = getattr(layers, layer)
        modes = both + gradients if flags.has_backward else both
        entry = {mode: repository for mode in modes}
        mapping[name] = {_device(device): dict(entry) for device in devices}
    return mapping


def _is_trust(trusted: object) -> None:
    if isinstance(trusted, bool):
        return
    if not isinstance(trusted, list) or not all(isinstance(x, str) for x in trusted):
        raise TypeError(
            "trust_remote_code must be True, False or a list of repositories' names, "
            f"got {trusted!r}"
        )


def _is_source(source: object, version: object, revision: object) -> None:
    """Checks the source of a repository, and that only the Hub's has a version or revision."""
    if source is not None and not isinstance(source, (ModuleType, str, Path)):
        raise TypeError(
            'source must be "org/repo", the path of a folder, a loaded kernel or None, '
            f"got {type(source).__name__}"
        )
    for name, value, kind in (("version", version, int), ("revision", revision, str)):
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise TypeError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}")
    if version is not None:
        is_int("version", version, 0)
    given = [name for name, x in (("version", version), ("revision", revision)) if x is not None]
    if not isinstance(source, (str, Path)) or Path(source).is_dir():
        if given:
            raise ValueError(
                f'{given[0]} must be None unless source is "org/repo" on the Hub, got it with '
                f"source {source!r}"
            )
        return
    if isinstance(source, Path) or not _HUB_NAME.fullmatch(source):
        raise ValueError(
            f'source must be "org/repo" on the Hub, or a folder that is there, got {str(source)!r}'
        )
    if len(given) != 1:
        raise ValueError(
            f"version or revision must be given for {source} on the Hub, one of the two, got "
            f"{'both' if given else 'neither'}; a folder of this name is not there"
        )


def _repository(source, layer, version, revision, trust_remote_code):
    if source is None or isinstance(source, ModuleType):
        return _Loaded(layers if source is None else source.layers, layer)
    from kernels import LayerRepository, LocalLayerRepository

    if Path(source).is_dir():
        return LocalLayerRepository(Path(source), layer_name=layer)
    return LayerRepository(
        source,
        layer_name=layer,
        version=version,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )


def _device(kind: str):
    from kernels import CUDAProperties, Device, ROCMProperties

    properties = {"cuda": CUDAProperties(0, 1000), "rocm": ROCMProperties(0, 1000)}
    return Device(type=kind, properties=properties.get(kind))


def decorate(model: nn.Module) -> Dict[str, str]:
    """Decorates the model's classes with names that `kernels` looks up, which most MLPs lack.

    After it, kernels.kernelize, model.set_use_kernels and KernelConfig replace the forwards of
    the modules that kernelize(model) would serve, and of no others. Classes are decorated for the
    whole process, once.

    Args:
        model: a model of transformers.

    Returns:
        {class: the name to map}, both as strings.

    Raises:
        TypeError: model is no nn.Module.
        ImportError: the package `kernels` is not installed.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48,
        ...                      num_hidden_layers=2, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> decorate(model)
        {'LlamaMLP': 'SwiGLUMLP'}
        >>> import kernels
        >>> with kernels.use_kernel_mapping(layer_mapping(), inherit_mapping=False):
        ...     model = kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
        >>> "SwiGLUMLP" in str(model.model.layers[0].mlp.forward)
        True
    """
    is_model("decorate", model)
    from kernels import replace_kernel_forward_from_hub

    named = {}
    for _, module in named_modules(model):
        kind, finding = own_class(module), recognise(module)
        if not _is_named(finding) or kind.__name__ in named:
            continue
        if not hasattr(kind, "kernel_layer_name"):
            replace_kernel_forward_from_hub(kind, finding.layer, condition=_is_served)
        named[kind.__name__] = kind.kernel_layer_name
    return named


def _is_served(module: nn.Module) -> bool:
    return _is_named(recognise(module))


def _is_named(finding: Optional[Finding]) -> bool:
    """True if the module is replaced by a layer that `kernels` can look up."""
    if finding is None or finding.reason is not None:
        return False
    return finding.layer in NAMES and finding.kind != "norm"  # transformers names its norms itself
