"""Routers as people write them, and modules that only look like one; blocks likewise.

Every entry of ROUTERS is a class with H = 16 and E = 12, with what is to be said of it: fields of
its Choice where it is one of fused_topk's, else a part of the reason for leaving it alone. BLOCKS
has None or a reason.
"""

import torch
import torch.nn.functional as F
from torch import nn

H, E, K = 16, 12, 3
ANOTHER, PRODUCT = "not those of fused_topk", "another product"


class Plain(nn.Module):
    """Softmax of all, and the chosen ones renormalized."""

    vectors = ()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H))
        for name in self.vectors:
            self.register_buffer(name, torch.randn(E))
        self.top_k, self.factor, self.noise = K, 2.5, 0.1
        self.normalizes = True

    def forward(self, x):
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
        weights, ids = logits.float().softmax(-1).topk(self.top_k)
        if self.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(x.dtype), ids


class OfTheChosen(Plain):
    """Granite's."""

    def forward(self, x):
        logits = F.linear(x, self.weight).float()
        chosen, ids = logits.topk(self.top_k, dim=-1)
        return logits, torch.softmax(chosen, dim=-1).type_as(x), ids


class LogitsLast(Plain):
    """Granite's before transformers 5.21."""

    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return ids, weights, logits


class ByArgsort(Plain):
    def forward(self, x):
        logits = torch.einsum("th,eh->te", x, self.weight)
        ids = torch.argsort(logits, dim=-1, descending=True)[:, : self.top_k]
        weights = torch.take_along_dim(torch.exp(torch.log_softmax(logits.float(), -1)), ids, -1)
        weights.div_(weights.sum(-1, keepdim=True))
        return logits, weights.type_as(x), ids


class LogitsInPlace(Plain):
    def forward(self, x):
        x.mul_(1.0)
        return super().forward(x)


class Masked(Plain):
    """All other weights are 0, and those of the chosen are taken of that."""

    def forward(self, x):
        logits = torch.mm(x, self.weight.t())
        ids = logits.topk(self.top_k).indices
        rest = torch.ones_like(logits).scatter(1, ids, 0.0).bool()
        scores = logits.float().masked_fill(rest, float("-inf")).softmax(-1)
        return logits, scores.gather(1, ids).to(x.dtype), ids


class NotNormalized(Plain):
    """Jamba's."""

    def forward(self, x):
        logits = F.linear(x, self.weight)
        weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float), self.top_k, dim=-1)
        return logits, weights, ids


class Sorted(Plain):
    def forward(self, x):
        logits = x.float() @ self.weight.float().t()
        scores, order = logits.softmax(-1).sort(dim=-1, descending=True)
        return logits, (scores[:, : self.top_k] / self.top_k), order[:, : self.top_k]


class Corrected(Plain):
    vectors = ("correction",)

    def forward(self, tokens, *, unused=None):
        tokens = tokens.flatten(0, -2)
        logits = tokens.float() @ self.weight.float().T
        scores = logits.sigmoid()
        ids = (scores + self.correction).topk(self.top_k, sorted=False).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.factor
        return logits, weights, ids


class Added(Plain):
    vectors = ("bias",)

    def forward(self, x):
        logits = F.linear(x, self.weight, self.bias)
        scores, ids = logits.topk(self.top_k)
        return logits, scores.softmax(-1), ids


class Both(Plain):
    """A bias of the product, and one of the choice."""

    vectors = ("first", "second")

    def forward(self, x):
        logits = F.linear(x, self.weight, self.second)
        scores = logits.float().softmax(-1)
        ids = (scores + self.first).topk(self.top_k)[1]
        return logits, scores.gather(-1, ids).to(x.dtype), ids


class NoLeast(Corrected):
    """Nothing is added to the sum: MiniMax-M3's."""

    def forward(self, x):
        logits = x.float() @ self.weight.float().T
        scores = logits.sigmoid()
        ids = (scores + self.correction).topk(self.top_k)[1]
        weights = scores.gather(1, ids)
        return logits, weights / weights.sum(-1, keepdim=True), ids


class MoreThanLeast(Corrected):
    def forward(self, x):
        logits = x.float() @ self.weight.float().T
        scores = logits.sigmoid()
        ids = (scores + self.correction).topk(self.top_k)[1]
        weights = scores.gather(1, ids)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-6), ids


class ByLogits(Corrected):
    """The bias is added to logits for the choice: Kolibri's."""

    def forward(self, x):
        logits = x.float() @ self.weight.float().T
        ids = (logits + self.correction).topk(self.top_k)[1]
        weights = logits.gather(1, ids).sigmoid()
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


class Biased(Corrected):
    """The bias stays in the weights."""

    def forward(self, x):
        logits = x.float() @ self.weight.float().T
        weights, ids = (logits.sigmoid() + self.correction).topk(self.top_k)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


class TwiceBiased(Corrected):
    def forward(self, x):
        logits = x.float() @ self.weight.float().T
        scores = logits.sigmoid()
        ids = (scores + self.correction + self.correction).topk(self.top_k)[1]
        weights = scores.gather(1, ids)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


class Scaled(Plain):
    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits, weights * 1.01, ids


class Capped(Plain):
    def forward(self, x):
        logits = F.linear(x, self.weight)
        scores = (torch.tanh(logits.float() / 50) * 50).softmax(-1)
        weights, ids = scores.topk(self.top_k)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids


class Warm(Plain):
    """A temperature of the scores, not of the logits that are returned."""

    def forward(self, x):
        logits = F.linear(x, self.weight)
        weights, ids = (logits.float() / 1.05).softmax(-1).topk(self.top_k)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids


class WarmLogits(Plain):
    def forward(self, x):
        logits = F.linear(x, self.weight) / 1.05
        weights, ids = logits.float().softmax(-1).topk(self.top_k)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids


class OverTokens(Plain):
    def forward(self, x):
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
        weights, ids = logits.float().softmax(0).topk(self.top_k)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids


class Smallest(Plain):
    def forward(self, x):
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
        weights, ids = logits.float().softmax(-1).topk(self.top_k, largest=False)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids


class Rounded(Plain):
    """Rounds the scores to the dtype of x before the choice and the sum."""

    def forward(self, x):
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
        weights, ids = logits.sigmoid().topk(self.top_k)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


class NoZeros(Plain):
    """Scores that round to 0 are others."""

    def forward(self, x):
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
        scores = logits.float().softmax(-1)
        weights, ids = scores.masked_fill(~scores.bool(), 0.5).topk(self.top_k)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids


class Short(Plain):
    """Indices of 32 bits."""

    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits, weights, ids.type(torch.int32)


class Turned(Plain):
    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits, weights, ids[:, [1, 0, 2]]


class Pair(Plain):
    def forward(self, x):
        return super().forward(x)[1:]


class Twin(Plain):
    """One logit of all is moved."""

    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits + logits.new_zeros(E).scatter(0, ids[0, :1], 1.0), weights, ids


class Writes(Plain):
    def forward(self, x):
        x *= 0.5
        return super().forward(x)


class WritesWeight(Plain):
    def forward(self, x):
        out = super().forward(x)
        self.weight.view(self.weight.shape).scatter_(0, out[2][:1, :1], 0.0)
        return out


class InTraining(Plain):
    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits, weights * self.factor if self.training else weights, ids


class Half(Plain):
    """Only in fp16."""

    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits, weights * 2.5 if x.dtype == torch.float16 else weights, ids


class Noisy(Plain):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x) * self.noise)


class Branches(Plain):
    def forward(self, x):
        if x.shape[0] > 100:
            x = x * 2
        return super().forward(x)


class Reads(Plain):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.table = [torch.zeros(E)]

    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits + self.table[0].to(x.dtype), weights, ids


class Calls(Plain):
    def __init__(self):
        super().__init__()
        self.score = torch.sigmoid

    def forward(self, x):
        logits = F.linear(x, self.weight)
        weights, ids = self.score(logits).topk(self.top_k)
        return logits, weights, ids


class Detached(Plain):
    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits, weights.detach(), ids


class Square(Plain):
    """Weights of which the norm is 1."""

    def forward(self, x):
        logits = F.linear(x, self.weight.square())
        weights, ids = logits.float().softmax(-1).topk(self.top_k)
        return logits, weights.to(x.dtype), ids


ROUTERS = {
    Plain: {"scoring": "softmax", "renormalize": True, "dtype": None, "dims": (2, 3)},
    ByArgsort: {"renormalize": True, "dims": (2,)}, Masked: {"renormalize": True},
    LogitsInPlace: "has `x.mul_(1.0)`",
    LogitsLast: {"order": (2, 1, 0)},
    OfTheChosen: {"renormalize": True, "upcast": True, "dims": (2,)},
    NotNormalized: {"renormalize": False, "dtype": torch.float32, "upcast": False},
    Sorted: {"wide": True, "renormalize": False, "scale": 1 / K, "dims": (2,)},
    Corrected: {"wide": True, "scoring": "sigmoid", "bias": "correction", "scale": 2.5},
    Added: {"added": "bias", "bias": None, "renormalize": True},
    Both: {"added": "second", "bias": "first", "renormalize": False},
    NoLeast: ANOTHER, MoreThanLeast: ANOTHER, ByLogits: ANOTHER, Biased: ANOTHER,
    TwiceBiased: ANOTHER, Scaled: ANOTHER, Capped: ANOTHER, Warm: ANOTHER, WarmLogits: PRODUCT,
    OverTokens: ANOTHER, Smallest: ANOTHER, Rounded: ANOTHER, NoZeros: ANOTHER,
    Short: "does not return logits, weights and experts", Turned: ANOTHER,
    Pair: "does not return logits, weights and experts", Twin: PRODUCT,
    Writes: "has `x *= 0.5`", WritesWeight: "writes to what it is given",
    InTraining: ANOTHER, Half: ANOTHER, Noisy: "has `torch.randn_like(x)`",
    Branches: "has `x.shape[0] > 100`", Reads: "reads table",
    Calls: "score is no module of its own",
    Detached: "has `weights.detach()`", Square: PRODUCT,
}  # fmt: skip


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(E, H, H) * 0.1)

    def forward(self, x, ids, weights):
        rows = torch.einsum("th,tkhd->tkd", x, self.w[ids])
        return (rows * weights.unsqueeze(-1)).sum(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = Plain(), Experts()
        self.shared_expert, self.shared_expert_gate = nn.Linear(H, H), nn.Linear(H, 1, bias=False)
        self.factor, self.one = 0.7, 1.0

    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        _, weights, ids = self.gate(rows)
        shared = self.shared_expert_gate(rows).sigmoid() * self.shared_expert(rows)
        return (self.experts(rows, ids, weights) + shared).view(x.shape)


class TwoSigns(Block):
    """With an odd shared expert it would be the formula."""

    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        _, weights, ids = self.gate(rows)
        shared = self.shared_expert_gate(rows).sigmoid() * -self.shared_expert(-rows)
        return (self.experts(rows, ids, weights) + shared).view(x.shape)


class Renamed(Block):
    def __init__(self):
        super().__init__()
        for old, new in zip(list(self._modules), ("c", "a", "d", "b")):
            self._modules[new] = self._modules.pop(old)

    def forward(self, hidden):
        assert hidden.ndim == 3
        B, T, width = hidden.shape
        hidden = hidden.reshape(B * T, width)
        shared = self.d(hidden)
        routing = self.c(hidden)
        out = self.a(hidden, routing[2], routing[1])
        return torch.add(out, torch.sigmoid(self.b(hidden)) * shared).view(B, T, width)


class Weighted(Block):
    def forward(self, x):
        return super().forward(x) * self.factor


class Once(Block):
    """A factor of 1 is none, until it is another."""

    def forward(self, x):
        return super().forward(x) * self.one


class Tanh(Block):
    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        _, weights, ids = self.gate(rows)
        shared = self.shared_expert_gate(rows).tanh() * self.shared_expert(rows)
        return (self.experts(rows, ids, weights) + shared).view(x.shape)


class Product(Block):
    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        _, weights, ids = self.gate(rows)
        shared = self.shared_expert_gate(rows).sigmoid() * self.shared_expert(rows)
        return (self.experts(rows, ids, weights) * shared).view(x.shape)


class Inner(Block):
    """The routed experts see the shared one's output."""

    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        _, weights, ids = self.gate(rows)
        y = self.shared_expert(rows)
        shared = self.shared_expert_gate(rows).sigmoid() * y
        return (self.experts(y, ids, weights) + shared).view(x.shape)


class Twice(Block):
    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        shared = self.shared_expert(rows)
        _, weights, ids = self.gate(rows)
        shared = self.shared_expert_gate(rows).sigmoid() * self.shared_expert(rows)
        return (self.experts(rows, ids, weights) + shared).view(x.shape)


class NotFlat(Block):
    """The shared expert is given rows of rows."""

    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        _, weights, ids = self.gate(rows)
        shared = self.shared_expert_gate(rows).sigmoid() * self.shared_expert(x).view(rows.shape)
        return (self.experts(rows, ids, weights) + shared).view(x.shape)


class NoGate(Block):
    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        _, weights, ids = self.gate(rows)
        return (self.experts(rows, ids, weights) + self.shared_expert(rows)).view(x.shape)


class Mean(Block):
    """Over the sequence."""

    def forward(self, x):
        out = super().forward(x)
        return out - out.mean(1, keepdim=True)


class WithLogits(Block):
    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        logits, weights, ids = self.gate(rows)
        shared = self.shared_expert_gate(rows).sigmoid() * self.shared_expert(rows)
        return (self.experts(rows, ids, weights) + shared).view(x.shape), logits


class Trained(Block):
    def forward(self, x):
        out = super().forward(x)
        return out * self.factor if self.training else out


class Written(Block):
    def forward(self, x):
        out = super().forward(x)
        x *= 0.5
        return out


OTHER = "another formula"
BLOCKS = {
    Block: None, Renamed: None, Once: None, Weighted: OTHER, Tanh: OTHER, Product: OTHER,
    Inner: OTHER, Twice: OTHER, NotFlat: OTHER, NoGate: OTHER, Mean: OTHER, WithLogits: OTHER,
    Trained: OTHER, TwoSigns: OTHER, Written: "has `x *= 0.5`",
}  # fmt: skip
