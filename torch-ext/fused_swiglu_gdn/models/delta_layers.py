"""Gated DeltaNet and Kimi Delta Attention layers before a trial: their parts, and the conditions on
their classes, their convolution and their vectors."""

from typing import Dict, Iterable, Iterator, NamedTuple, Optional, Tuple

from torch import nn

from ..gdn_layer.checks import MAX_TAPS
from ..layers.delta import is_gated_norm
from ..layers.own_code import peeled
from ..layers.pinned import found_at
from ..layers.plain import told, why_not_tensor
from .code import Refused, refuse_odd_class
from .facts import Facts, read
from .serving import own_class
from .stand_ins import features


class Inner(NamedTuple):
    """The layer, or a part of it with parts or parameters of its own."""

    path: str  # "" of the layer
    module: nn.Module
    kind: type
    facts: Facts

    def below(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


class Layout(NamedTuple):
    """The parts of a layer by their paths, whatever their names are."""

    linears: Dict[str, tuple]  # (in, out)
    conv: str
    norm: str
    vectors: Dict[str, tuple]  # shapes
    channels: int  # of the convolution
    taps: int


def is_depthwise(part: nn.Module) -> bool:
    return isinstance(part, nn.Conv1d) and part.groups == part.in_channels == part.out_channels


def _sizes(part: nn.Module) -> tuple:
    """Sizes of a projection, also with adapters beside it, as PEFT's modules have them."""
    return features(part) or features(part._modules.get("base_layer"))


def _has_parts(part: nn.Module) -> bool:
    whole = _sizes(part) or is_depthwise(part)
    return not whole and (bool(part._modules) or len(part._parameters) > 1)


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[Tuple[str, object]]:
    """The parts and parameters of a module by their paths; behind a part that has parts or
    parameters of its own, those."""
    for name, x in module._parameters.items():
        if x is not None:
            yield prefix + name, x
    for name, part in module._modules.items():
        if part is None:
            continue
        yield prefix + name, part
        if _has_parts(part):
            yield from _leaves(part, f"{prefix}{name}.")


def layout_of(module: nn.Module) -> Optional[Layout]:
    """The parts of a module, or None if they cannot be those of a layer of a delta rule."""
    if not any([isinstance(part, nn.Conv1d) for part in module._modules.values()]):
        return None
    linears, convs, norms, vectors = {}, [], [], {}
    for path, leaf in _leaves(module):
        if not isinstance(leaf, nn.Module):
            vectors[path] = tuple(told(leaf, "shape"))
        elif _sizes(leaf):
            linears[path] = _sizes(leaf)
        elif is_depthwise(leaf):
            convs.append(path)
        elif not _has_parts(leaf):
            norms.append(path)
    if len(convs) != 1 or len(norms) != 1 or len(vectors) != 2 or len(linears) < 3:
        return None
    conv = module.get_submodule(convs[0])
    return Layout(linears, convs[0], norms[0], vectors, conv.out_channels, conv.kernel_size[0])


def why_not_plain(module: nn.Module, layout: Layout) -> Optional[str]:
    """Why kernels cannot read the convolution or the vectors of a layer, or None."""
    conv, channels, taps = module.get_submodule(layout.conv), layout.channels, layout.taps
    tensors = {path: found_at(module, path) for path in layout.vectors}
    tensors.update({f"{layout.conv}.weight": conv.weight, f"{layout.conv}.bias": conv.bias})
    for label, x in tensors.items():
        reason = why_not_tensor(x)
        if reason is not None:
            return f"{label} {reason}"
    if type(conv) is not nn.Conv1d or conv.weight.shape != (channels, 1, taps):
        return f"{layout.conv} is not a depthwise nn.Conv1d of {taps} taps"
    if not 2 <= taps <= MAX_TAPS:
        return f"its convolution has {taps} taps"
    return None


def inner_of(module: nn.Module, layout: Layout) -> Iterator[Inner]:
    """The layer and its parts that have parts of their own; raises Refused for a forward that
    calls hooks of others than the convolution, whose weight ours reads, or that reads what no guard
    can compare, or whose class is odd."""
    is_gated_norm(module.get_submodule(layout.norm))  # while tracing it cannot look
    for path, part in (("", module), *_leaves(module)):
        if path and not (isinstance(part, nn.Module) and _has_parts(part)):
            continue
        kind = own_class(part)
        facts = read(kind, part)
        hooked = sorted(peeled(kind.forward).hooked - {"" if path else layout.conv})
        if hooked:
            raise Refused(f"its forward calls hooks of {', '.join(hooked)}")
        _refuse_reads(part, facts)
        refuse_odd_class(
            kind, [*part._modules, *part._parameters], *(("__call__",) if path else ())
        )
        yield Inner(path, part, kind, facts)


def _refuse_reads(module: nn.Module, facts: Facts) -> None:
    known = {*module._modules, *module._parameters, "training"}
    for path in sorted(facts.reads.difference(facts.values)):
        name = path.split(".")[0]
        if name not in known and (found_at(module, path) is not None or not hasattr(module, name)):
            raise Refused(f"its forward reads {path}")


def agreeing(sizes: Dict[int, int], pairs: Iterable[Tuple[int, int]]) -> Dict[int, int]:
    """Small sizes in place of a layer's own, with more of them; none if equal ones would then be
    different ones."""
    for own, small in pairs:
        if sizes.setdefault(own, small) != small:
            return {}
    return sizes


def values_of(inner: Iterable[Inner]) -> Dict[str, object]:
    """The values that forwards read, by their paths."""
    return {each.below(n): v for each in inner for n, v in each.facts.values.items()}


def index_among(values: dict) -> str:
    """The attribute that is a layer's index in the cache, by its name: the trial tries it."""
    numbers = [name for name, value in values.items() if type(value) is int and "idx" in name]
    return "layer_idx" if "layer_idx" in numbers or not numbers else numbers[0]
