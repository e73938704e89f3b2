"""A Kimi Delta Attention layer of transformers and ours on the same small numbers.

The role of each part follows from a run of the class's forward: whose output the convolution, the
gated norm and the other parts get.
"""

import itertools
from types import SimpleNamespace
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..layers import kda
from ..layers.kda import Chain, Roles
from .code import Refused
from .delta_trial import EPS, VALUES, Copies, DeltaTrial, Found, Packing, ReadsNoValues
from .facts import Facts
from .handed import attributes_of
from .stand_ins import Part, probe_of, random

# gates on both sides of what they bend at, and one whose exponential fp32 has not
BIASES = (-30.0, 100.0, 0.5, 25.0, -1.0, 2.0, 14.0, -8.0)
BOUNDS = (-5.0, -1.5)


class Inner(NamedTuple):
    """The layer, or a part of it with parts or parameters of its own."""

    path: str  # "" of the layer
    module: nn.Module
    kind: type
    facts: Facts

    def below(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


class Layout(NamedTuple):
    """The parts of a layer, whatever their names are."""

    linears: Dict[str, tuple]  # (in, out) by paths
    conv: str
    norm: str
    vectors: Dict[str, tuple]  # shapes of A_log and dt_bias, by paths
    heads: int
    channels: int  # of k
    hidden: int
    taps: int

    @property
    def head_dim(self) -> int:
        return self.channels // self.heads


class Bends(ReadsNoValues):
    """Tensors may be compared with a number, if both answers occur."""

    def __init__(self):
        super().__init__()
        self.count, self.answers = 0, {}

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in VALUES or len(args) != 2 or type(args[1]) not in (int, float):
            return super().__torch_function__(function, types, args, kwargs)
        found = function(*args)
        self.answers.setdefault(self.count, set()).update(found.unique().tolist())
        self.count += 1
        return found


class _Norm:
    """Stub of the gated norm. It logs its calls."""

    def __init__(self, size: int, dtype, log: list):
        self.size, self.log = (size,), log
        self.weight = random(size, seed=3).to(dtype)

    def __call__(self, x, gate):
        y = F.rms_norm(x, self.size, self.weight, EPS) * torch.sigmoid(gate)
        self.log.append((gate, y))
        return y


def smaller(layout: Layout, heads: int, dim: int, hidden: int) -> Dict[int, int]:
    """Small sizes in place of a layer's own, where those that are equal stay so; none if that is
    not possible. Taps stay as many."""
    sizes, HK = {1: 1, layout.taps: layout.taps}, layout.channels
    heads, dim = sizes.setdefault(layout.heads, heads), sizes.setdefault(layout.head_dim, dim)
    for n in (1, 2, 3):
        if sizes.setdefault(n * HK, n * heads * dim) != n * heads * dim:
            return {}
    sizes.setdefault(layout.hidden, hidden)
    free = (n for n in itertools.count(5) if n not in sizes.values())
    for _, width in layout.linears.values():
        if width not in sizes:
            sizes[width] = next(free)
    return sizes


class Flows:
    """The projection whose output each function of a layer gets, in one run of it."""

    def __init__(self, x: torch.Tensor, calls: list, norms: list, functions: list, linears: dict):
        mixed = [y for y in functions if y.ndim == 3]
        if len(mixed) != 1 or len(norms) != 1:
            raise Refused("it has not one convolution and one gated norm")
        if sorted(path for path, _, _ in calls) != sorted(linears):
            raise Refused("it does not call each of its projections once")
        gate, normed = norms[0]
        self.chains: Dict[str, Chain] = {}
        self.left: Dict[str, torch.Tensor] = {}  # outputs whose role is not known
        self.out = ""
        for path, given, y in calls:
            if torch.equal(given.flatten(), normed.flatten()):
                self.out = path
                continue
            before = () if torch.equal(given, x) else self.taken(given, path)
            self.chains[path], self.left[path] = (*before, path), y
        self.mixed_channels = mixed[0].shape[1]
        parts = mixed[0].transpose(1, 2).chunk(3, -1)
        self.mixed = [self.taken(part, "its convolution") for part in parts]
        self.z = self.taken(gate.reshape(*x.shape[:2], -1), "its gated norm")

    def taken(self, given: torch.Tensor, where: str) -> Chain:
        """The projections, one after another, that give a tensor; the last one has a role now."""
        for path, y in self.left.items():
            if torch.equal(y, given):
                del self.left[path]
                return self.chains[path]
        raise Refused(f"{where} gets what is not of one projection")

    def placed(self, heads: int, channels: int) -> Iterator[Tuple[Chain, Chain]]:
        """The possible roles of what is left: the write strength, and the gate of each channel."""
        widths: List[tuple] = [(path, y.shape[-1]) for path, y in self.left.items()]
        for (b, n), (f, m) in itertools.permutations(widths, 2):
            if len(widths) == 2 and (n, m) == (heads, channels):
                yield self.chains[b], self.chains[f]


class _Trial(DeltaTrial):
    """Runs of a class's forward, and of ours."""

    TOLERANCES = {
        torch.float32: 1e-4, torch.float64: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1,
    }  # fmt: skip
    USES = ((2, (2, 1, 1, 6), False), (1, (1, 1), False), (2, (7, 1, 4), False))
    PACKING = Packing("cu_seq_lens_q", "cu_seq_lens_q")
    MODE = Bends

    def __init__(self, layout: Layout, inner: Tuple[Inner, ...], index: str):
        layer = inner[0]
        super().__init__(layer.module, layer.kind, layer.facts)
        self.layout, self.inner = layout, {each.path: each for each in inner}
        more = {each.path: Copies(each.kind, each.facts, self.PACKING) for each in inner[1:]}
        self.copied = {"": self.copies, **more}
        self.index, self.bound, self.norms = index, BOUNDS[0], []
        self.sizes = smaller(layout, heads=3, dim=7, hidden=17)

    def small(self, size: int) -> int:
        return self.sizes.get(size, size)

    @property
    def width(self) -> int:
        return self.small(self.layout.hidden)

    # -- stubs

    def owner_of(self, path: str) -> str:
        """The part that has the attribute at a path."""
        while path not in self.inner or not path:
            if "." not in path:
                return ""
            path = path.rpartition(".")[0]
        return path

    @property
    def values(self) -> Dict[str, object]:
        """The values that forwards read, by their paths."""
        every = [(each.below(n), v) for each in self.inner.values()
                 for n, v in each.facts.values.items()]  # fmt: skip
        return dict(every)

    def attributes(self, index: int) -> Dict[str, object]:
        """Numbers in place of those that the forwards read, by their paths."""
        found = {}
        for path, value in self.values.items():
            if type(value) in (int, float) and value < 0:
                found[path] = self.bound
            elif type(value) is int:
                found[path] = index if path == self.index else self.small(value)
        return found

    def stubs(self, dtype) -> dict:
        """The parts and parameters by their paths."""
        layout, made = self.layout, {}
        for i, (path, sizes) in enumerate(sorted(layout.linears.items())):
            made[path] = Part(path, tuple(map(self.small, sizes)), 100 + 7 * i, self)
        conv = self.module.get_submodule(layout.conv)
        channels = self.small(3 * layout.channels)
        bias = None if conv.bias is None else random(channels, seed=5).to(dtype)
        kernel = random(channels, *conv.weight.shape[1:], seed=4).to(dtype)
        made[layout.conv] = SimpleNamespace(weight=kernel, bias=bias)
        made[layout.norm] = _Norm(self.small(layout.head_dim), dtype, self.norms)
        for i, (path, shape) in enumerate(sorted(layout.vectors.items())):
            shape = tuple(map(self.small, shape))
            x = random(*shape, seed=11 + i)
            if x.numel() == self.small(layout.channels):
                biases = torch.tensor(BIASES).double()
                x = biases.repeat(-(-x.numel() // len(biases)))[: x.numel()].view(shape)
            made[path] = x.to(dtype)
        return made

    def probe(self, dtype, training: bool, index: int) -> nn.Module:
        for log in (self.log, self.norms, self.copies.log):
            log.clear()
        return self.part("", self.stubs(dtype), training, self.attributes(index))

    def part(self, path: str, stubs: dict, training: bool, attributes: dict) -> nn.Module:
        """The probe module of the layer or of a part."""
        each = self.inner[path]
        parts, own = {}, {}
        for name in each.module._modules:
            below = each.below(name)
            if below in self.inner:
                parts[name] = self.part(below, stubs, training, attributes)
            elif below in stubs:
                parts[name] = stubs[below]
        for name in each.module._parameters:
            if each.below(name) in stubs:
                own[name] = stubs[each.below(name)]
        start = len(path) + 1 if path else 0
        mine = {p[start:]: v for p, v in attributes.items() if self.owner_of(p) == path}
        mine = attributes_of(each.module, (), {**mine, "training": training}, set())
        return probe_of(each.module, self.copied[path].kind, parts, own, **mine)

    def ours(self, roles: Roles, dtype, index: int) -> Callable:
        probe = self.probe(dtype, False, index)
        bound = None if roles.bound is None else self.bound

        def forward(x, cache=None, mask=None, cu_seq_lens_q=None):
            return kda.kimi_delta_attention(probe, roles, x, cache, mask, cu_seq_lens_q, bound)

        return forward

    def packed(self, ends: torch.Tensor) -> dict:
        return {"cu_seq_lens_q": ends}

    # -- roles

    def candidates(self) -> Iterator[Roles]:
        """Returns the possible roles, by what a run of the forward shows."""
        x, _, _ = self.inputs(2, 9, torch.float64)
        self.theirs(torch.float64, False, 0)(x)
        flows = Flows(x, self.log, self.norms, self.copies.log, self.layout.linears)
        if flows.mixed_channels != self.small(3 * self.layout.channels):
            raise Refused("its convolution is not that of q, k and v")
        if any(len(chain) > 1 for chain in flows.mixed):
            raise Refused("its q, k and v are not those of one projection each")
        mixed, layout, values = [chain[0] for chain in flows.mixed], self.layout, self.values
        H, P = self.small(layout.heads), self.small(layout.channels)
        sizes = {path: torch.Size(shape).numel() for path, shape in layout.vectors.items()}
        vectors = [pair for pair in itertools.permutations(sizes)
                   if [*map(sizes.get, pair)] == [layout.heads, layout.channels]]  # fmt: skip
        bounds = [n for n, v in values.items() if type(v) in (int, float) and v < 0] + [None]
        words = dict.fromkeys([*(v for v in values.values() if type(v) is str), "silu"])
        every = itertools.product(flows.placed(H, P), vectors, bounds, words)
        for (b, f), (A_log, dt_bias), bound, activation in every:
            yield Roles(
                tuple(mixed), f, flows.z, b, layout.conv, layout.norm, flows.out, A_log, dt_bias,
                self.index, activation, bound,
            )  # fmt: skip

    def confirmed(self, roles: Roles) -> bool:
        if any(len(answers) < 2 for answers in self.mode.answers.values()):
            raise Refused("its forward compares with a number that no gate is near")
        self.sizes = smaller(self.layout, heads=5, dim=3, hidden=19)
        self.bound = BOUNDS[1]
        return self.agree(roles, (torch.float32, True, 1), {})


def found_by(layout: Layout, inner: Tuple[Inner, ...], index: str) -> Found:
    """Returns the role of each part and argument; raises Refused. index: the path of its own."""
    trial = _Trial(layout, inner, index)
    return trial.found(trial.candidates())
