"""Routers as people write them, and modules that only look like one; blocks likewise.

Every entry of ROUTERS is a class with H = 16 and E = 12, with what is to be said of it: fields of
its Choice where it is one of fused_topk's, else a part of the reason for leaving it alone. BLOCKS
has None or a reason.
"""

import torch
import torch.nn.functional as F
from torch import nn
from written import with_forward

H, E, K = 16, 12, 3


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


USUAL = "logits, weights, ids = super().forward(x)\n"
LOGITS = "logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)\n"
WIDE = "logits = x.float() @ self.weight.float().T\nscores = logits.sigmoid()\n"
CHOSEN = "ids = (scores + self.correction).topk(self.top_k)[1]\nweights = scores.gather(1, ids)\n"
NORMED = "return logits, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids"
SUMMED = "return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), ids"
ANOTHER, PRODUCT = "not those of fused_topk", "another product"
RESULT = "does not return logits, weights and experts"

# by name: (the forward, what is to be said of it)
TEXTS = {
    "of the chosen": (  # Granite's
        "logits = F.linear(x, self.weight).float()\n"
        "chosen, ids = logits.topk(self.top_k, dim=-1)\n"
        "return logits, torch.softmax(chosen, dim=-1).type_as(x), ids",
        {"renormalize": True, "upcast": True, "dims": (2,)}),
    "logits last": (  # Granite's before transformers 5.21
        USUAL + "return ids, weights, logits", {"order": (2, 1, 0)}),
    "by argsort": (
        'logits = torch.einsum("th,eh->te", x, self.weight)\n'
        "ids = torch.argsort(logits, dim=-1, descending=True)[:, : self.top_k]\n"
        "weights = torch.exp(torch.log_softmax(logits.float(), -1))\n"
        "weights = torch.take_along_dim(weights, ids, -1)\n"
        "weights.div_(weights.sum(-1, keepdim=True))\nreturn logits, weights.type_as(x), ids",
        {"renormalize": True, "dims": (2,)}),
    "masked": (  # all other weights are 0, and those of the chosen are taken of that
        "logits = torch.mm(x, self.weight.t())\nids = logits.topk(self.top_k).indices\n"
        "rest = torch.ones_like(logits).scatter(1, ids, 0.0).bool()\n"
        'scores = logits.float().masked_fill(rest, float("-inf")).softmax(-1)\n'
        "return logits, scores.gather(1, ids).to(x.dtype), ids", {"renormalize": True}),
    "not normalized": (  # Jamba's
        "logits = F.linear(x, self.weight)\n"
        "scores = F.softmax(logits, dim=-1, dtype=torch.float)\n"
        "return (logits, *torch.topk(scores, self.top_k, dim=-1))",
        {"renormalize": False, "dtype": torch.float32, "upcast": False}),
    "sorted": (
        "logits = x.float() @ self.weight.float().t()\n"
        "scores, order = logits.softmax(-1).sort(dim=-1, descending=True)\n"
        "return logits, (scores[:, : self.top_k] / self.top_k), order[:, : self.top_k]",
        {"wide": True, "renormalize": False, "scale": 1 / K, "dims": (2,)}),
    "logits in place": ("x.mul_(1.0)\nreturn super().forward(x)", "writes to what it is given"),
    "scaled": (USUAL + "return logits, weights * 1.01, ids", ANOTHER),
    "capped": (
        LOGITS + "scores = (torch.tanh(logits.float() / 50) * 50).softmax(-1)\n"
        "weights, ids = scores.topk(self.top_k)\n" + NORMED, ANOTHER),
    "warm": (  # a temperature of the scores, not of the logits that are returned
        LOGITS + "weights, ids = (logits.float() / 1.05).softmax(-1).topk(self.top_k)\n" + NORMED,
        ANOTHER),
    "warm logits": (
        LOGITS + "logits = logits / 1.05\n"
        "weights, ids = logits.float().softmax(-1).topk(self.top_k)\n" + NORMED, PRODUCT),
    "over tokens": (
        LOGITS + "weights, ids = logits.float().softmax(0).topk(self.top_k)\n" + NORMED, ANOTHER),
    "the smallest": (
        LOGITS + "weights, ids = logits.float().softmax(-1).topk(self.top_k, largest=False)\n"
        + NORMED, ANOTHER),
    "rounded": (  # the scores, to the dtype of x before the choice and the sum
        LOGITS + "weights, ids = logits.sigmoid().topk(self.top_k)\n" + SUMMED,
        {"rounds": True, "eps": 1e-20, "scoring": "sigmoid"}),
    "rounded once": (  # the scores, and no step behind them
        LOGITS + "weights, ids = logits.sigmoid().float().topk(self.top_k)\n" + NORMED, ANOTHER),
    "no zeros": (  # scores that round to 0 are others
        LOGITS + "scores = logits.float().softmax(-1)\n"
        "weights, ids = scores.masked_fill(~scores.bool(), 0.5).topk(self.top_k)\n" + NORMED,
        ANOTHER),
    "indices of 32 bits": (USUAL + "return logits, weights, ids.type(torch.int32)", RESULT),
    "turned": (USUAL + "return logits, weights, ids[:, [1, 0, 2]]", ANOTHER),
    "a pair": ("return super().forward(x)[1:]", RESULT),
    "one logit moved": (
        USUAL + f"moved = logits.new_zeros({E}).scatter(0, ids[0, :1], 1.0)\n"
        "return logits + moved, weights, ids", PRODUCT),
    "writes": ("x *= 0.5\nreturn super().forward(x)", "writes to what it is given"),
    "writes to its weight": (
        "out = super().forward(x)\n"
        "self.weight.view(self.weight.shape).scatter_(0, out[2][:1, :1], 0.0)\nreturn out",
        "writes to what it is given"),
    "in training": (
        USUAL + "return logits, weights * self.factor if self.training else weights, ids", ANOTHER),
    "only in fp16": (
        USUAL + "return logits, weights * 2.5 if x.dtype == torch.float16 else weights, ids",
        ANOTHER),
    "noisy": (
        "return super().forward(x + torch.randn_like(x) * self.noise)",
        PRODUCT),
    "branches": (
        "if x.shape[0] > 100:\n    x = x * 2\nreturn super().forward(x)",
        PRODUCT),
    "detached": (USUAL + "return logits, weights.detach(), ids", "gradients are not those"),
    "of squares": (
        "logits = F.linear(x, self.weight.square())\n"
        "weights, ids = logits.float().softmax(-1).topk(self.top_k)\n"
        "return logits, weights.to(x.dtype), ids", PRODUCT),
}  # fmt: skip
# with vectors of the experts: (their names, the forward, what is to be said of it)
WITH_VECTORS = {
    "added": (
        ("bias",), "logits = F.linear(x, self.weight, self.bias)\n"
        "scores, ids = logits.topk(self.top_k)\nreturn logits, scores.softmax(-1), ids",
        {"added": "bias", "bias": None, "renormalize": True}),
    "both": (  # a bias of the product, and one of the choice
        ("first", "second"), "logits = F.linear(x, self.weight, self.second)\n"
        "scores = logits.float().softmax(-1)\nids = (scores + self.first).topk(self.top_k)[1]\n"
        "return logits, scores.gather(-1, ids).to(x.dtype), ids",
        {"added": "second", "bias": "first", "renormalize": False}),
    "no least": (  # nothing is added to the sum: MiniMax-M3's
        ("correction",),
        WIDE + CHOSEN + "return logits, weights / weights.sum(-1, keepdim=True), ids",
        {"eps": 0.0, "rounds": False, "bias": "correction"}),
    "more than the least": (
        ("correction",), WIDE + CHOSEN + SUMMED.replace("1e-20", "1e-6"), {"eps": 1e-6}),
    "much more than the least": (
        ("correction",), WIDE + CHOSEN + SUMMED.replace("1e-20", "1e-2"), ANOTHER),
    "by logits": (  # to which the bias is added for the choice: Kolibri's
        ("correction",), WIDE + "ids = (logits + self.correction).topk(self.top_k)[1]\n"
        "weights = logits.gather(1, ids).sigmoid()\n" + SUMMED, ANOTHER),
    "biased weights": (
        ("correction",), WIDE + "weights, ids = (scores + self.correction).topk(self.top_k)\n"
        + SUMMED, ANOTHER),
    "biased twice": (
        ("correction",),
        WIDE + CHOSEN.replace("scores +", "scores + self.correction +") + SUMMED, ANOTHER),
}  # fmt: skip
WITH_AN_ARGUMENT = {  # as WITH_VECTORS, with a second argument, which may be left out
    "given": (
        (), WIDE + CHOSEN.replace("self.correction", "bias") + SUMMED,
        {"bias": "bias", "added": None, "eps": 1e-20}),
    "given, rounded": (  # LFM2-MoE's
        (), LOGITS + "scores = logits.sigmoid()\n" + CHOSEN.replace("self.correction", "bias")
        + SUMMED.replace("1e-20", "1e-6"), {"bias": "bias", "rounds": True, "eps": 1e-6}),
    "given or not": (
        (), WIDE + "ids = (scores if bias is None else scores + bias).topk(self.top_k)[1]\n"
        "weights = scores.gather(1, ids)\n" + SUMMED, {"bias": "bias"}),
    "not given": (  # a second argument that is for another kind of call
        ("correction",), WIDE + "scores = scores if bias is None else scores * bias\n"
        + CHOSEN + SUMMED, {"bias": "correction"}),
    "given as a factor": (
        (), WIDE + "ids = (scores * bias).topk(self.top_k)[1]\n"
        "weights = scores.gather(1, ids)\n" + SUMMED, ANOTHER),
    "given for the weights": (
        (), WIDE + "weights, ids = (scores + bias).topk(self.top_k)\n" + SUMMED, ANOTHER),
}  # fmt: skip
ROUTERS = {
    "usual": (Plain, {"scoring": "softmax", "renormalize": True, "dtype": None, "dims": (2, 3)}),
    "corrected": (
        Corrected, {"wide": True, "scoring": "sigmoid", "bias": "correction", "scale": 2.5}),
    "reads a list": (Reads, {"scoring": "softmax"}), "calls": (Calls, "calls score"),
    **{name: (with_forward(Plain, text), said) for name, (text, said) in TEXTS.items()},
    **{name: (with_forward(Plain, text, vectors=vectors), said)
       for name, (vectors, text, said) in WITH_VECTORS.items()},
    **{name: (with_forward(Plain, text, arguments="x, bias=None", vectors=vectors), said)
       for name, (vectors, text, said) in WITH_AN_ARGUMENT.items()},
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


ROWS = "rows = x.view(-1, x.shape[-1])\nlogits, weights, ids = self.gate(rows)\n"
SHARED = "shared = self.shared_expert_gate(rows).sigmoid() * self.shared_expert(rows)\n"
SUM = "return (self.experts(rows, ids, weights) + shared).view(x.shape)"
OUT, OTHER = "out = super().forward(x)\n", "another formula"
BLOCKS = {
    "usual": (Block, None), "renamed": (Renamed, None),
    # a factor of 1 is none, until it is another
    "once": (with_forward(Block, "return super().forward(x) * self.one"), None),
    **{name: (with_forward(Block, text), OTHER) for name, text in {
        "weighted": "return super().forward(x) * self.factor",
        "tanh": ROWS + SHARED.replace("sigmoid", "tanh") + SUM,
        "a product": ROWS + SHARED + SUM.replace(" + shared", " * shared"),
        # the routed experts see the shared one's output
        "one in the other": ROWS + "y = self.shared_expert(rows)\n"
            "shared = self.shared_expert_gate(rows).sigmoid() * y\n"
            + SUM.replace("experts(rows", "experts(y"),
        "called twice": ROWS + "shared = self.shared_expert(rows)\n" + SHARED + SUM,
        # the shared expert is given rows of rows
        "not flat": ROWS + SHARED.replace("expert(rows)", "expert(x).view(rows.shape)") + SUM,
        "no gate": ROWS + "shared = self.shared_expert(rows)\n" + SUM,
        "a mean of the sequence": OUT + "return out - out.mean(1, keepdim=True)",
        "with logits": ROWS + SHARED + SUM + ", logits",
        "in training": OUT + "return out * self.factor if self.training else out",
        # with an odd shared expert it would be the formula
        "two signs": ROWS + SHARED.replace("self.shared_expert(rows)", "-self.shared_expert(-rows)")
            + SUM,
    }.items()},
    "writes": (
        with_forward(Block, OUT + "x *= 0.5\nreturn out"), "another formula"),
}  # fmt: skip
