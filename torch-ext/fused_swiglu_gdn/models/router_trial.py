"""The equivalence check of routers: which choice of experts a class makes.

The forward of the class is run on a probe module, with random weights of the module's own sizes; a
second tensor that it may be given is the bias of the choice. Its logits must be a product of input
and weight, and its weights and experts those that experts/reference.py gives for these logits.
"""

import collections
import itertools
import math
from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..experts import reference
from ..experts.call import EPS, TopkOptions
from ..layers.plain import told
from ..runtime.dtypes import HALF
from .code import Refused
from .facts import CHOOSE, Facts
from .gradients import same_gradients
from .router_choice import Choice
from .stand_ins import probe_of, random, run
from .trial import refuse_odd_module, sizes_of

F32 = torch.float32
DTYPES = (torch.bfloat16, torch.float16, F32)
# leading sizes of x, the size of the logits, and what is added to all of them: to scores that
# round to 0 or 1, or are small beside what a denominator may have added
CASES = (
    ((2, 9), 1.0, 0.0), ((1, 5), 5.0, 0.0), ((2, 6), 20.0, -100.0), ((1, 9), 4.0, -20.0),
    ((1, 1), 2.0, 1.0), ((3, 3), 60.0, 0.0), ((1, 12), 0.1, 0.0),
    ((1, 7), 3.0, -45.0),
)  # fmt: skip
APART = 1e-5  # of scores for the choice: between closer ones either may be chosen
MOST = 4096  # experts
ALL = (1, 1, "top2")  # groups of a choice among all experts
LEAST_ROWS = 20  # tokens of which the choice is certain
ANOTHER_PRODUCT = "its logits are another product than x @ weight.T"
IN_GROUPS = "it chooses groups of experts first, by another rule than fused_topk"
ANOTHER_CHOICE = "its weights or experts are not those of fused_topk"
ANOTHER_GRADIENT = "its gradients are not those of fused_topk"
ANOTHER_RESULT = "it does not return logits, weights and experts"
LEAST_EPS, MOST_EPS = 1e-30, 1e-3  # of numbers that a forward may add to a sum of scores


def weight_among(module: nn.Module) -> Optional[str]:
    """The name of the only matrix of a module without parts, as routers have, or None."""
    if module._modules:
        return None
    names = [n for n, x in module._parameters.items() if told(x, "ndim") == 2]
    return names[0] if len(names) == 1 else None


def shapes_of(module: nn.Module) -> tuple:
    """(name, shape) of the parameters and buffers of a module."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return tuple((name, told(x, "shape")) for name, x in tensors if x is not None)


def find_choice(module: nn.Module, kind: type, facts: Facts, values: dict) -> Choice:
    """The computation of a router; raises Refused."""
    weight, shapes = weight_among(module), dict(shapes_of(module))
    refuse_odd_module(module, kind, facts, shapes, "__call__")
    if facts.parts:  # functions of the module's own, which may be replaced
        raise Refused(f"its forward calls {min(facts.parts)}")
    if not facts.names & CHOOSE or shapes[weight][0] > MOST:  # a head of a vocabulary
        raise Refused(f"it does not choose among at most {MOST} experts")
    experts = shapes[weight][:1]
    vectors = [n for n, shape in shapes.items() if shape == experts and n in facts.reads]
    given = (*arguments_of(facts)[1:], None)[0]
    roles = [pair for pair in itertools.product((*vectors, None), repeat=2)
             if len({*pair}) == 2 or not vectors]  # fmt: skip
    if given is not None:
        roles = [(given, added) for bias, added in roles if bias is None] + roles
    numbers = [v for v in values.values() if type(v) in (int, float) and v > 0]
    scales = tuple(dict.fromkeys([1.0, *(float(s) for v in numbers for s in (v, 1.0 / v))]))
    counts = [v for n, v in values.items() if "group" in n and type(v) is int and v > 0]
    groups, weights = _groupings(counts, shapes[weight][0]), _weights(*shapes[weight])
    sums = [0.0, EPS["sigmoid"], *numbers, *_constants(facts)]
    sums = tuple(dict.fromkeys(e for e in sums if not e or LEAST_EPS < e < MOST_EPS))
    reasons, usual = [], (None,)
    for pair, added in itertools.product(roles, (usual, sums)):
        if added is sums and reasons[-1] != ANOTHER_CHOICE:
            continue
        for dims in ((2, 3), (2,), (3,)):
            names = weight, tuple(shapes[weight]), *pair
            ways = added, scales, groups
            try:
                return _tried(module, kind, facts, names, weights, dims, given, ways)
            except Refused as why:
                reasons.append(str(why))
                if reasons[-1] in (ANOTHER_PRODUCT, ANOTHER_CHOICE):
                    break
    reason = ANOTHER_CHOICE if ANOTHER_CHOICE in reasons else reasons[0]
    grouped = any(count > 1 for count in counts)
    raise Refused(IN_GROUPS if grouped and reason == ANOTHER_CHOICE else reason)


def arguments_of(facts: Facts) -> Tuple[str, ...]:
    """The names of a router's input and, if it has one, of a second argument: the bias or None."""
    known = facts.signature
    if len(known.positional) == len(known.names) == 2 and not (known.several or known.more):
        first, second = known.names
        if first not in known.defaults and known.defaults.get(second) is None:
            return known.names
    return (facts.only_argument(),)


def _constants(facts: Facts) -> List[float]:
    """The numbers that are written in a forward."""
    every = [c for function in facts.functions for c in function.__code__.co_consts]
    return [c for c in every if type(c) is float]


def _groupings(counts: list, E: int) -> tuple:
    """The `groups` of a Choice that these numbers of a module leave possible."""
    pairs = dict.fromkeys(itertools.permutations(counts, 2))
    pairs = [(n, most) for n, most in pairs if n > most and E % n == 0]
    found = [(*pair, by) for pair in pairs for by in ("top2", "max") if by == "max" or pair[0] < E]
    return (ALL, *found)


def _tried(
    module, kind, facts: Facts, named: tuple, weights: dict, dims, given: Optional[str], ways: tuple
) -> Choice:
    """The choice, for given roles of bias and added in `named`; raises Refused."""
    found, rows, experts = None, collections.Counter(), named[1][0]
    inputs = _inputs(named, weights, dims, sizes_of(facts, named[1][1]))
    for (x, names, tensors), training in itertools.product(inputs, facts.modes):
        args = (x,) if given is None else (x, names.pop(given, None))
        probe = probe_of(module, kind, parameters=names, training=training)
        out, order = _outputs(facts.forward, probe, args, experts)
        if found is None:
            found = _candidates(x, out, named, (dims, order), *ways)
        found = [c for c in found if c.order == order]
        products = {c[:6]: c for c in found}.items()
        right = {key for key, c in products if _is_product(x, tensors, out[0], c)}
        counts = {c: _rows_alike(out, tensors[1], c, x) for c in found if c[:6] in right}
        found = [c for c, count in counts.items() if count is not None]
        if not found:
            raise Refused(ANOTHER_CHOICE if right else ANOTHER_PRODUCT)
        rows.update({c: counts[c] for c in found})
    found = [c for c in found if rows[c] >= LEAST_ROWS]
    if not found:
        raise Refused("its choice is uncertain")
    x, names, tensors = next(c for c in _inputs(named, weights, dims[:1], []) if c[0].dtype == F32)
    rest = () if given is None else (names.pop(given, None),)
    probe, options = probe_of(module, kind, None, names, training=True), found[0].options(F32)

    def ours(x: torch.Tensor) -> tuple:
        logits = found[0].logits(x, tensors)
        return logits, reference.topk_fwd(logits, tensors[1], options._replace(dtype=F32))[0]

    def theirs(x: torch.Tensor) -> tuple:
        return _outputs(facts.forward, probe, (x, *rest), experts)[0][:2]

    if not same_gradients(facts, [x], ours, theirs):
        raise Refused(ANOTHER_GRADIENT)
    return found[0]


def _weights(E: int, H: int) -> dict:
    w = random(E, min(H, 64)).repeat(1, 1 + H // 64)[:, :H] * random(H, seed=1) * H**-0.5
    w[:, 0] = 1.0  # so that the first of x is added to all logits
    return {dtype: w.to(dtype) for dtype in DTYPES}


def _inputs(named: tuple, weights: dict, dims: tuple, tokens: list) -> Iterator[tuple]:
    """Yields x, the parameters by their names, and (weight, bias, added)."""
    weight, (E, H), *roles = named
    vectors = random(2, E, seed=2) * 0.5
    every = list(itertools.product(enumerate(CASES), DTYPES))
    every += [((i, ((1, n), 1.0, 0.0)), DTYPES[i % 3]) for i, n in enumerate(tokens)]
    every += [((0, ((1, 3), 0.0, 0.5)), dtype) for dtype in DTYPES]  # ties
    for (i, (sizes, scale, shift)), dtype in every:
        x = random(*sizes, H, seed=i + 3) * scale
        x[..., 0] = shift
        x = (x.flatten(0, 1) if dims[i % len(dims)] == 2 else x).to(dtype)
        dtypes = torch.float32 if i % 2 else dtype, dtype  # models have the bias in fp32, too
        more = [None if n is None else v.to(d) for n, v, d in zip(roles, vectors, dtypes)]
        tensors = weights[dtype], *more
        names = {n: v for n, v in zip((weight, *roles), tensors) if n is not None}
        yield x, names, tensors


class Outputs(NamedTuple):
    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    unsorted: bool  # ids are in the order of a topk(sorted=False), which torch leaves open


class Unsorted(TorchFunctionMode):
    """Collects the indices of each topk(sorted=False)."""

    def __init__(self):
        super().__init__()
        self.ids = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.topk, torch.Tensor.topk):
            if not (kwargs or {}).get("sorted", args[4] if len(args) > 4 else True):
                self.ids.append(out[1].clone())
        return out


def _outputs(forward, probe: nn.Module, args: tuple, experts: int) -> tuple:
    """The Outputs of a forward, and their order; raises Refused."""
    given = [x for x in (*args, *probe._parameters.values()) if x is not None]
    before, x = [tensor._version for tensor in given], args[0]
    with Unsorted() as unsorted:
        out = run(forward, probe, *args)
    if type(out) is not tuple or [*map(type, out)] != [torch.Tensor] * 3:
        raise Refused(ANOTHER_RESULT)
    if [tensor._version for tensor in given] != before:
        raise Refused("its forward writes to what it is given")
    T, at = x.numel() // x.shape[-1], [i for i, t in enumerate(out) if t.dtype == torch.int64]
    wide = [i for i, t in enumerate(out) if t.shape == (T, experts) and i not in at]
    if len(at) != 1 or not wide:
        raise Refused(ANOTHER_RESULT)
    places = wide[0], 3 - wide[0] - at[0], at[0]
    logits, weights, ids = map(out.__getitem__, places)
    if ids.shape != weights.shape or ids.ndim != 2 or len(ids) != T:
        raise Refused(ANOTHER_RESULT)
    if not 0 < ids.shape[1] <= experts or not 0 <= int(ids.min()) <= int(ids.max()) < experts:
        raise Refused(ANOTHER_RESULT)
    found = Outputs(logits, weights, ids, any([torch.equal(ids, i) for i in unsorted.ids]))
    return found, tuple(map(places.index, range(3)))


def _in_order(top: torch.Tensor, theirs: torch.Tensor, mine: torch.Tensor, rows) -> bool:
    """True if the experts of tokens whose scores are far apart come in the same order."""
    apart = (top[:, :-1] - top[:, 1:]).min(-1)[0] > 1e-3 * top[:, 0].abs()
    sure = rows & apart
    return torch.equal(theirs[sure], mine[sure])


def _candidates(
    x: torch.Tensor, out: Outputs, named: tuple, more: tuple, added: tuple, scales: tuple,
    groups: tuple,
) -> list:  # fmt: skip
    """The choices that the first run, in bf16, leaves possible. added: numbers that may be added to
    a sum of scores; None is what usually is, and then nothing is rounded."""
    logits, weights, ids, _ = out
    dtype = None if weights.dtype == x.dtype else weights.dtype
    wide = ((False, False),) if logits.dtype == x.dtype else ((True, False), (False, True))
    K, E = ids.shape[1], logits.shape[1]
    groups = [g for g in groups if K <= E // g[0] * g[1]]
    ways = [(scoring, EPS[scoring] if e is None else e, rounds) for scoring in EPS for e in added
            for rounds in ((False,) if e is None else (False, True))]  # fmt: skip
    every = itertools.product(wide, ways, (True, False), scales, groups)
    return [
        Choice(*named, *w, *more, dtype, ids.shape[1], *way, renormalize, scale, group)
        for w, way, renormalize, scale, group in every
        if (renormalize or not way[1] or added == (None,)) and not (way[2] and group != ALL)
    ]  # no kernel rounds scores of groups


def _is_product(x: torch.Tensor, tensors: tuple, theirs: torch.Tensor, choice: Choice) -> bool:
    """True if the logits are those of the candidate, except for the order of sums."""
    mine = choice.logits(x, tensors)
    if mine.dtype != theirs.dtype:
        return False
    if choice.upcast and not torch.equal(theirs.to(x.dtype).float(), theirs):
        return False
    eps = torch.finfo(x.dtype if choice.upcast else mine.dtype).eps
    return bool((mine - theirs).abs().max() <= 4 * eps * mine.abs().max())


def _apart(last: torch.Tensor, next_: torch.Tensor, biased: bool) -> torch.Tensor:
    """True for tokens whose last chosen score exceeds the next one, however both are rounded."""
    return last - next_ > APART * (1.0 if biased else last.abs())


def _rounded(scores: torch.Tensor, dtype: torch.dtype) -> tuple:
    """Scores as they are in a dtype, and the tokens for which that does not depend on how they were
    computed in fp32, or whether denormal ones become 0."""
    low, high = ((scores * (1 + error)).to(dtype) for error in (-1e-6, 1e-6))
    clear = (low == high) | (dtype not in HALF)
    return scores.to(dtype).double(), (clear & (scores >= torch.finfo(dtype).tiny)).all(-1)


def _in_groups(scores: torch.Tensor, options: TopkOptions, biased: bool) -> tuple:
    """The tokens whose choice of groups is certain, and scores with -inf outside of these."""
    if options.n_group == 1:
        return torch.ones(len(scores), dtype=torch.bool), scores
    top = reference.group_scores(scores, options).sort(-1, descending=True)[0]
    sure = _apart(top[:, options.topk_group - 1], top[:, options.topk_group], biased)
    return sure, scores.masked_fill(reference.outside_groups(scores, options), -math.inf)


def _rows_alike(out: Outputs, bias, choice: Choice, x: torch.Tensor) -> Optional[int]:
    """The number of tokens whose choice is certain, or None.

    None if one of these has other weights or experts than the candidate.
    """
    (logits, weights, ids, unsorted), K, E = out, choice.top_k, choice.shape[0]
    if weights.dtype != (choice.dtype or x.dtype) or ids.shape[1] != K:
        return None
    wide, options = logits.double(), choice.options(x.dtype)
    scores = wide.softmax(-1) if choice.scoring == "softmax" else wide.sigmoid()
    clear, rounds = True, options.rounds
    if rounds:
        scores, clear = _rounded(scores, logits.dtype)
    if bias is not None:
        scores = scores + bias.double()
        scores = scores.to(bias.dtype).double() if rounds else scores
    sure, scores = _in_groups(scores, options, bias is not None)
    top = scores.topk(min(K + 1, E), -1)[0]
    rows = sure & clear & (_apart(top[:, K - 1], top[:, -1], bias is not None) | (K == E))
    made, ours = reference.topk_fwd(logits, bias, options)
    mine, theirs = (
        torch.zeros_like(wide).scatter(1, i, w.double())[rows]
        for w, i in ((made, ours), (weights, ids))
    )
    if not unsorted and not _in_order(top, ids, ours, rows):
        return None
    eps = torch.finfo(weights.dtype).eps
    rtol, atol = (eps, 1e-7) if eps > APART else (2 * APART, 1e-9)
    rtol = rtol / 4 if rounds else rtol  # the same steps
    limits = {"rtol": rtol, "atol": atol, "equal_nan": True}  # where nothing is added to zeros
    return int(rows.sum()) if torch.allclose(theirs, mine, **limits) else None
