"""The computation of a router: logits, and the experts and weights of a token by them."""

from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F

from ..experts.call import TopkOptions
from ..projection.project import project
from ..runtime.dtypes import HALF


class Choice(NamedTuple):
    """The computation of a forward with logits x @ weight.T + added. Names are of attributes."""

    weight: str
    shape: Tuple[int, int]  # experts and width
    bias: Optional[str]  # added to the scores for the choice alone: of an attribute or argument
    added: Optional[str]
    wide: bool  # the product is made in fp32
    upcast: bool  # it is given as fp32
    dims: Tuple[int, ...]  # that x may have
    order: Tuple[int, ...]  # 0 logits, 1 weights, 2 experts, as they are returned
    dtype: Optional[torch.dtype]  # of the weights; None: that of x
    top_k: int
    scoring: str
    eps: float  # added to the sum that divides
    rounds: bool  # every step is rounded to the dtype of the logits
    renormalize: bool
    scale: float
    groups: Tuple[int, int, str]  # how many, of which experts may be chosen, and their score

    def options(self, dtype: torch.dtype) -> TopkOptions:
        """Options of fused_topk for x of a dtype."""
        more = self.scoring, self.renormalize, self.scale, self.dtype or dtype
        return TopkOptions(self.top_k, *more, *self.groups, self.eps, self.rounds)

    def logits(self, x: torch.Tensor, tensors) -> torch.Tensor:
        """[T, E] of x [..., H]; tensors: weight, bias, added."""
        (weight, _, added), x = tensors, x.reshape(-1, self.shape[1])
        if added is None and x.shape[0] == 1:
            found = project(x, [weight], fp32=self.wide)
            if found is not None:
                return found[0].float() if self.upcast else found[0]
        if self.wide:
            if added is None and _by_tensor_cores(x, weight):
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            return F.linear(x.float(), weight.float(), None if added is None else added.float())
        logits = F.linear(x, weight, added)
        return logits.float() if self.upcast else logits


def _by_tensor_cores(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if x @ weight.T in fp32 may be made of x and weight as they are, in bf16 or fp16: the
    product of two such numbers is exact in fp32. Such a call has no gradient."""
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    same = x.dtype is weight.dtype and x.dtype in HALF and x.device == weight.device
    on_nvidia = x.is_cuda and torch.version.hip is None
    return on_nvidia and same and not learns and not torch.compiler.is_compiling()
