"""A trial of a few tokens: does all that mixes tokens in a model exchange with other ranks?

They run twice in this process: as one fragment of a sequence, and as two, the later one first,
which exchange keys and states as ranks do, beside another sequence. In the second run every module
is given what the first one computed, in the other order, so that only a module that mixes tokens by
itself gives something else.
"""

import contextlib
import itertools
from typing import Callable, Collection, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn

from ..layers.plain import Named, named_modules
from ..parallel.batch import Batch, shard
from ..runtime import dispatch
from .context_attention import judging_masks
from .serving import why_partitioned

TOKENS, CUT, OTHERS = 23, 13, 5  # of the sequence, before the cut, and of the other one
FIRST = 8  # the smallest id, below which are padding and other marks
# Relative error of a module's output: roundings of bf16 stay below 0.02. A convolution of four taps
# that misses the tokens before a fragment is off by about 0.3.
LIMIT = 0.05


class _Alone:
    """Stands for a process group of this process alone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def _parts(embedding: nn.Module) -> List[dict]:
    """The arguments of both runs."""
    weight, found = next(embedding.parameters()), []
    cut = [(CUT, TOKENS), (0, CUT), (TOKENS, TOKENS + OTHERS)]
    for others, layout in (0, [(0, TOKENS)]), (OTHERS, cut):
        ids = torch.arange(FIRST, FIRST + TOKENS + others, device=weight.device) % len(weight)
        places = torch.cat([torch.arange(TOKENS), torch.arange(others)])
        batch = Batch({"input_ids": ids[None], "position_ids": places[None].to(ids.device)})
        found.append(shard(batch, _Alone(), 1, [layout]))
    del found[0]["position_ids"]
    return found


def _tokens_of(output: object, count: int) -> Optional[Tensor]:
    """A module's output [1, tokens, ..], or the first of its outputs; or None. Rows without a
    batch may be an expert's, in an order of its own."""
    x = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    return x if x.ndim > 2 and x.shape[:2] == (1, count) else None


class _Compared:
    """Hooks of all modules: what they are given and give in the first run, and how far the second
    one is off."""

    def __init__(self):
        self.known: Dict[tuple, tuple] = {}  # by module, and how often it has been called
        self.calls: Dict[str, int] = {}
        self.errors: List[Tuple[str, Tensor]] = []
        self.order: Optional[Tensor] = None  # of the sequence's tokens in the second run

    def second(self, order: Tensor) -> None:
        self.order, self.calls = order, {}

    def hook(self, name: str) -> Callable:
        def after(module: nn.Module, args: tuple, output):
            at = (name, self.calls.get(name, 0))
            self.calls[name] = at[1] + 1
            count = TOKENS if self.order is None else TOKENS + OTHERS
            taken, x = _tokens_of(args, count), _tokens_of(output, count)
            if self.order is None:  # copies: what is computed next may be written there
                self.known[at] = tuple([t if t is None else t.clone() for t in (taken, x)])
                return None
            before, want = self.known.get(at, (None, None))
            error, _ = self._off(taken, before)
            if error is not None:  # what its parent did
                self.errors.append((name.rpartition(".")[0], error))
            error, want = self._off(x, want)
            if error is None:
                return None
            self.errors.append((name, error))
            want = torch.cat([want, x[:, TOKENS:]], 1)
            return want if x is output else type(output)((want, *output[1:]))

        return after

    def _off(self, x: Optional[Tensor], want: Optional[Tensor]) -> tuple:
        """The error of the sequence's tokens, and what they should be; or None."""
        if x is None or want is None or want.shape[2:] != x.shape[2:]:
            return None, None
        want, mine = want.index_select(1, self.order).to(x.dtype), x[:, :TOKENS]
        off = (mine.float() - want.float()).nan_to_num().norm()
        return off / want.float().nan_to_num().norm(), want


@contextlib.contextmanager
def _hooked(modules: Named, compared: _Compared, apart: Set[nn.Module]) -> Iterator[None]:
    """Inside, modules are compared, but those apart, and none is in training: dropout would
    differ."""
    training = [module for _, module in modules if module.training]
    hooks = [
        module.register_forward_hook(compared.hook(name))
        for name, module in modules
        if module not in apart
    ]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
        for hook in hooks:
            hook.remove()


def _model_of(modules: Named) -> Optional[nn.Module]:
    """The model that takes tokens, or None."""
    of_models = ("get_input_embeddings", "set_attn_implementation")
    for _, module in modules:
        if all(hasattr(module, name) for name in of_models):
            return module
    return None


def _is_here(model: nn.Module) -> bool:
    """True if this process has all of its weights."""
    if any(x.is_meta or hasattr(x, "device_mesh") for x in model.parameters()):  # of a DTensor
        return False
    return not any(why_partitioned(module) for module in model.modules())


@torch.compiler.disable
@torch.no_grad()
def why_not_exchanged(modules: Named, exchange: Collection[str]) -> Optional[str]:
    """Why a model whose attention gathers would be wrong over several ranks, or None.

    modules: of all of it. exchange: the names of those that exchange states, whose parts are read
    and not called, so that none may have a hook. A model that cannot be tried here, on meta or with
    partitioned weights, is not.
    """
    model = _model_of(modules)
    if model is None or not _is_here(model):
        return None
    compared = _Compared()
    inside = [[*module.modules()][1:] for name, module in modules if name in exchange]
    apart = set(itertools.chain(*inside))
    try:
        whole, cut = _parts(model.get_input_embeddings())
        with _hooked(named_modules(model), compared, apart), dispatch.force("reference"):
            with judging_masks():
                model(**whole)  # whose positions are the model's own
            compared.second(cut["position_ids"][0, :TOKENS])
            model(**cut)
    except Exception as error:  # whatever the model's own code says of such a call
        return f"fails in a trial of {TOKENS} tokens: {type(error).__name__}: {error}"
    for name, error in compared.errors:
        if error > LIMIT:
            kind = type(model.get_submodule(name)).__name__
            return f"gives other numbers in {name or 'all'} ({kind}) where a sequence is cut in two"
    return None
