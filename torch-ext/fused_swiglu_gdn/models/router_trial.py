"""Which choice of experts a class of routers makes, told by its source and by a trial.

The forward of the class is read (reader.py) and run on a twin of the module, with random weights of
the module's own sizes. Its logits must be a product of input and weight, and its weights and
experts those that experts/reference.py gives for these logits.
"""

import itertools
from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..experts import reference
from ..experts.call import LEAST, TopkOptions
from ..layers.plain import told
from ..layers.untouched import why_patched
from .code import Refused
from .reader import Source, why_odd_module
from .stand_ins import quiet, random, twin_of

FP32 = torch.float32
DTYPES = (torch.bfloat16, torch.float16, FP32)
# leading sizes of x, the size of the logits, and what is added to all of them: to scores that
# round to 0 or 1, or are small beside what a denominator may have added
CASES = (
    ((2, 9), 1.0, 0.0), ((1, 5), 5.0, 0.0), ((2, 6), 20.0, -100.0), ((1, 9), 4.0, -20.0),
    ((1, 1), 2.0, 1.0), ((3, 3), 60.0, 0.0), ((1, 12), 0.1, 0.0),
)  # fmt: skip
APART = 1e-5  # of scores for the choice: between closer ones either may be chosen
LEAST_ROWS = 20  # tokens of which the choice is certain
ANOTHER_PRODUCT = "its logits are another product than x @ weight.T"
ANOTHER_CHOICE = "its weights or experts are not those of fused_topk"


class Choice(NamedTuple):
    """What a forward does, x @ weight.T + added being its logits. Names are of attributes."""

    weight: str
    experts: int
    width: int
    bias: Optional[str]  # added to the scores for the choice alone
    added: Optional[str]
    wide: bool  # the product is made in fp32
    upcast: bool  # it is given as fp32
    dims: Tuple[int, ...]  # that x may have
    dtype: Optional[torch.dtype]  # of the weights; None: that of x
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0

    def logits(self, x: torch.Tensor, tensors) -> torch.Tensor:
        """[T, E] of x [..., H]; tensors: weight, bias, added."""
        (weight, _, added), x = tensors, x.reshape(-1, self.width)
        if self.wide:
            return F.linear(x.float(), weight.float(), None if added is None else added.float())
        logits = F.linear(x, weight, added)
        return logits.float() if self.upcast else logits

    def options(self, dtype: torch.dtype) -> TopkOptions:
        return TopkOptions(self.top_k, self.scoring, self.renormalize, self.scale, dtype)


PRODUCT = Choice._fields.index("dims")  # the fields before it tell the logits


def weight_among(module: nn.Module) -> Optional[str]:
    """The name of the one matrix of a module without parts, as routers have it."""
    if module._modules:
        return None
    names = [n for n, x in module._parameters.items() if told(x, "ndim") == 2]
    return names[0] if len(names) == 1 else None


def shapes_of(module: nn.Module) -> tuple:
    """(name, shape) of the parameters and buffers of a module."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return tuple((name, told(x, "shape")) for name, x in tensors if x is not None)


def find_choice(module: nn.Module, kind: type, source: Source, values: dict) -> Choice:
    """What a router does; raises Refused."""
    weight, shapes = weight_among(module), dict(shapes_of(module))
    reason = why_patched() or why_odd_module(module, kind, source, shapes, "__call__")
    if reason is not None:
        raise Refused(reason)
    E, H = shapes[weight]
    vectors = [n for n, shape in shapes.items() if tuple(shape) == (E,) and n in source.reads]
    pairs = [(None, None)] if not vectors else [(n, None) for n in vectors]
    pairs += [(n, m) for n in (None, *vectors) for m in vectors if n != m]
    scales = [1.0, *(v for v in values.values() if type(v) in (int, float) and v > 0)]
    scales = tuple(dict.fromkeys(float(s) for v in scales for s in (v, 1.0 / v)))
    used = {weight, *(name for pair in pairs for name in pair)}
    trial = _Trial(module, kind, source, {n: s for n, s in shapes.items() if n not in used})
    reasons = []
    for bias, added in pairs:
        for dims in ((2, 3), (2,), (3,)):
            try:
                return trial.choice((weight, E, H, bias, added), dims, scales)
            except Refused as why:
                reasons.append(str(why))
    raise Refused(ANOTHER_CHOICE if ANOTHER_CHOICE in reasons else reasons[0])


class _Run(NamedTuple):
    """A run of a forward on random numbers."""

    x: torch.Tensor
    tensors: tuple  # weight, bias, added
    logits: torch.Tensor  # what it gave
    weights: torch.Tensor
    ids: torch.Tensor


class _Trial:
    """The forward of a class, run on twins of one module."""

    def __init__(self, module, kind, source: Source, others: dict):
        self.module, self.kind, self.source = module, kind, source
        self.others = {name: random(*shape, seed=7) for name, shape in others.items()}
        self.modes = (False, True) if "training" in source.reads else (module.training,)

    def choice(self, facts: tuple, dims: tuple, scales: tuple) -> Choice:
        """What the forward does if bias and added of `facts` are what they are called; raises
        Refused."""
        found: Optional[List[Choice]] = None
        rows = 0
        with quiet():
            for run in self.runs(*facts, dims):
                if found is None:
                    found = list(_candidates(run, facts, dims, scales))
                right = {c[:PRODUCT]: c for c in found}
                right = {key for key, c in right.items() if _is_product(run, c)}
                products = [c for c in found if c[:PRODUCT] in right]
                if not products:
                    raise Refused(ANOTHER_PRODUCT)
                counts = [_rows_alike(run, choice) for choice in products]
                found = [c for c, count in zip(products, counts) if count is not None]
                if not found:
                    raise Refused(ANOTHER_CHOICE)
                rows += max(count for count in counts if count is not None)
        if rows < LEAST_ROWS:
            raise Refused("its choice is uncertain")
        return found[0]

    def runs(self, weight, E, H, bias, added, dims) -> Iterator[_Run]:
        w = random(E, min(H, 64)).repeat(1, 1 + H // 64)[:, :H] * random(H, seed=1) * H**-0.5
        w[:, 0] = 1.0  # so that the first of x is added to all logits
        weights = {dtype: w.to(dtype) for dtype in DTYPES}
        vectors = random(2, E, seed=2) * 0.5
        for (i, (sizes, scale, shift)), dtype in itertools.product(enumerate(CASES), DTYPES):
            x = random(*sizes, H, seed=i + 3) * scale
            x[..., 0] = shift
            x = (x.flatten(0, 1) if dims[i % len(dims)] == 2 else x).to(dtype)
            tensors = [weights[dtype], None, None]
            if bias is not None:  # which models have in fp32, too
                tensors[1] = vectors[0].to(FP32 if i % 2 else dtype)
            if added is not None:
                tensors[2] = vectors[1].to(dtype)
            names = dict(zip((weight, bias, added), tensors))
            names.pop(None, None)
            for training in self.modes:
                yield self.run(x, tuple(tensors), names, training)

    def run(self, x, tensors, names: dict, training: bool) -> _Run:
        more = {name: v.to(x.dtype) for name, v in self.others.items() if name not in names}
        twin = twin_of(self.module, self.kind, parameters={**more, **names})
        twin.__dict__["training"] = training
        before = [tensor._version for tensor in (x, *names.values())]
        try:
            out = self.source.forward(twin, x)
        except Exception as error:
            raise Refused(f"its forward raises {type(error).__name__} on stand-ins") from None
        if not (type(out) is tuple and len(out) == 3 and {*map(type, out)} == {torch.Tensor}):
            raise Refused("it does not return logits, weights and experts")
        if [tensor._version for tensor in (x, *names.values())] != before:
            raise Refused("its forward writes to what it is given")
        logits, weights, ids = out
        E, T = len(tensors[0]), x.numel() // x.shape[-1]
        right = logits.shape == (T, E) and weights.ndim == 2 and ids.shape == weights.shape
        if not right or len(ids) != T or not 0 < ids.shape[1] <= E or ids.dtype != torch.int64:
            raise Refused("it does not return logits, weights and experts")
        return _Run(x, tensors, logits, weights, ids)


def _candidates(run: _Run, facts: tuple, dims: tuple, scales: tuple) -> Iterator[Choice]:
    """What the first run, in 16 bits, leaves possible."""
    dtype = None if run.weights.dtype == run.x.dtype else run.weights.dtype
    K, same = run.ids.shape[1], run.logits.dtype == run.x.dtype
    for product in ((False, False),) if same else ((True, False), (False, True)):
        for how in itertools.product(LEAST, (True, False), scales):
            yield Choice(*facts, *product, dims, dtype, K, *how)


def _is_product(run: _Run, choice: Choice) -> bool:
    """The logits are those of the candidate, but for the order of their sums."""
    mine, theirs = choice.logits(run.x, run.tensors), run.logits
    if mine.dtype != theirs.dtype:
        return False
    if choice.upcast and not torch.equal(theirs.to(run.x.dtype).float(), theirs):
        return False
    eps = torch.finfo(run.x.dtype if choice.upcast else mine.dtype).eps
    return bool((mine - theirs).abs().max() <= 4 * eps * mine.abs().max())


def _rows_alike(run: _Run, choice: Choice) -> Optional[int]:
    """The number of tokens whose choice is certain, if all of these have the weights and experts
    of the candidate."""
    bias, K, E = run.tensors[1], choice.top_k, choice.experts
    if run.weights.dtype != (choice.dtype or run.x.dtype) or run.ids.shape[1] != K:
        return None
    if int(run.ids.min()) < 0 or int(run.ids.max()) >= E:
        return None
    logits = run.logits.double()
    scores = logits.softmax(-1) if choice.scoring == "softmax" else logits.sigmoid()
    scores = scores if bias is None else scores + bias.double()
    top = scores.topk(min(K + 1, E), -1)[0]
    apart = top[:, K - 1] - top[:, -1] > APART * (1.0 if bias is not None else top[:, K - 1].abs())
    rows = apart if K < E else torch.ones_like(apart)
    weights, ids = reference.topk_fwd(run.logits, bias, choice.options(run.weights.dtype))
    mine, theirs = (
        torch.zeros(len(i), E, dtype=torch.float64).scatter(1, i, w.double())[rows]
        for w, i in ((weights, ids), (run.weights, run.ids))
    )
    eps = torch.finfo(run.weights.dtype).eps
    rtol = eps if eps > APART else 2 * APART
    close = torch.allclose(theirs, mine, rtol=rtol, atol=1e-9 if eps < APART else 1e-7)
    return int(rows.sum()) if close else None
