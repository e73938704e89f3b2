"""Time, error and host time of what surrounds attention, and of attention over a static cache.

    python benchmarks/compare_attention.py [--no-compile] [--json FILE]     on a GPU

Peers do the same with transformers' own functions: eagerly ("modeling"), by torch.compile, and with
Liger's rotary embedding where that fits. A token is written to a static cache, too. The peer of
attention is scaled_dot_product_attention as transformers calls it in decoding: with a mask over all
slots, for which keys and values are repeated for each query head.
"""

import importlib
from functools import partial
from typing import NamedTuple, Optional

import torch
from compare_growing import Attention
from kernel_time import host_us, microseconds
from peers import peer
from runner import relative_error, run

ARGUMENTS = {"--no-compile": {"action": "store_true", "help": "without torch.compile"}}
SLOTS, FILLED = 8192, 1024


class Family(NamedTuple):
    """Module and sizes of a model's queries and keys."""

    module: str  # of transformers
    norm_class: Optional[str]
    norm: str
    offset: float
    HQ: int
    HK: int
    D: int
    R: int


FAMILIES = {
    "Llama": Family("llama", None, "head", 0.0, 32, 8, 128, 128),
    "Qwen3": Family("qwen3", "Qwen3RMSNorm", "head", 0.0, 32, 8, 128, 128),
    "Qwen3.5": Family("qwen3_5", "Qwen3_5RMSNorm", "head", 1.0, 16, 4, 256, 64),
    "OLMo-Hybrid": Family("olmo_hybrid", "OlmoHybridRMSNorm", "all", 0.0, 30, 30, 128, 128),
}


def normal(*shape, grad=False):
    return torch.randn(*shape, device="cuda").bfloat16().requires_grad_(grad)


class Rotary:
    """One call of a family and what its peers do for it."""

    def __init__(self, package, family: Family, B, T, cache=False, grad=False):
        self.family, self.cache = family, cache
        _, name, norm, offset, HQ, HK, D, R = family
        far = 2 if offset else 1  # Qwen3.5's gate lies behind each head's query
        self.q, self.k = normal(B, T, HQ, far * D, grad=grad), normal(B, T, HK, D, grad=grad)
        self.v, self.keys, self.values = normal(B, T, HK, D), None, None
        angle = torch.rand(1, T, R // 2, device="cuda").mul(6.28).repeat(1, 1, 2)
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        self.module = importlib.import_module(
            f"transformers.models.{family.module}.modeling_{family.module}"
        )
        widths = (HQ * D, HK * D) if norm == "all" else (D, D)
        self.norms = [None, None]
        if name:
            made = getattr(self.module, name)
            self.norms = [made(n, eps=1e-6).to("cuda", torch.bfloat16) for n in widths]
            for one in self.norms:
                one.weight.data.normal_(0, 0.3)
                one.weight.requires_grad_(grad)
        self.position = torch.tensor(FILLED - 1, device="cuda")
        if cache:
            self.keys, self.values = (normal(B, HK, SLOTS // max(1, B // 8), D) for _ in "kv")
        self.package = package

    def query(self):
        return self.q[..., : self.family.D]

    def leaves(self) -> list:
        return [self.q, self.k, *(n.weight for n in self.norms if n is not None)]

    def ours(self):
        f, options = self.family, {}
        if f.norm_class:
            options.update(norm=f.norm, offset=f.offset, q_weight=self.norms[0].weight)
            options.update(k_weight=self.norms[1].weight)
        if self.cache:
            options.update(v=self.v, key_cache=self.keys, value_cache=self.values)
            options.update(cache_position=self.position)
        return self.package.fused_qk_norm_rope(self.query(), self.k, self.cos, self.sin, **options)

    def _normed(self):
        rows = []
        for x, norm in zip((self.query(), self.k), self.norms):
            if norm is not None:
                x = norm(x.flatten(2)).view_as(x) if self.family.norm == "all" else norm(x)
            rows.append(x.transpose(1, 2))
        return rows

    def modeling(self):
        q, k = self.module.apply_rotary_pos_emb(*self._normed(), self.cos, self.sin)
        if self.cache:
            slots = torch.arange(k.shape[2], device="cuda") + self.position
            self.keys.index_copy_(2, slots, k)
            self.values.index_copy_(2, slots, self.v.transpose(1, 2))
        return q.transpose(1, 2), k.transpose(1, 2)

    def liger(self, rope):
        # it writes to its input in place, as a model's projection allows
        q, k = rope.apply(*self._normed(), self.cos, self.sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    def errors(self, names) -> dict:
        """Relative errors of q against fp64."""
        f = self.family
        wide = [None if n is None else n.weight.double() for n in self.norms]
        right, _ = self.package.fused_qk_norm_rope(
            self.query().double(), self.k.double(), self.cos.double(), self.sin.double(),
            q_weight=wide[0], k_weight=wide[1], norm=f.norm, offset=f.offset,
        )  # fmt: skip
        return {name: relative_error(getattr(self, name)()[0], right) for name in names}


clock = partial(microseconds, rounds=2, rep_ms=5)


@torch.no_grad()
def rotary_rows(package, compiled: bool):
    rope = peer("liger_kernel.ops.rope", "LigerRopeFunction")
    for name, family in FAMILIES.items():
        for B, T in ((1, 1), (64, 1), (1, 8192)):
            one = Rotary(package, family, B, T, cache=T == 1)
            calls = {"ours": one.ours, "modeling": one.modeling}
            row = {"error": one.errors(calls)}
            if T > 1 and compiled:
                torch._dynamo.reset()
                calls["compile"] = torch.compile(one.modeling, dynamic=False)
            if T > 1 and family.norm_class is None and rope:
                calls["liger"] = partial(one.liger, rope)
            what = f"batch {B}, and its cache" if T == 1 else f"{T} tokens"
            row.update(what=f"{name}, q and k, {what}", us=clock(calls))
            if B == T == 1:
                row["host_us"] = {n: host_us(calls[n]) for n in ("ours", "modeling")}
            yield row


def training_rows(package):
    for name in ("Llama", "Qwen3", "Qwen3.5"):
        one = Rotary(package, FAMILIES[name], 1, 4096, grad=True)
        leaves, d = one.leaves(), [torch.randn_like(y) for y in one.ours()]

        def step(forward, leaves=leaves, d=d):
            return lambda: torch.autograd.grad(forward(), leaves, d)

        calls = {"ours": step(one.ours), "modeling": step(one.modeling)}
        what = f"{name}, q and k, 4096 tokens, forward and backward"
        yield {"what": what, "us": clock(calls)}


@torch.no_grad()
def gate_rows(package):
    for B, T in ((1, 1), (64, 1), (1, 8192)):
        x, far = normal(B, T, 16, 256), normal(B, T, 16, 512)

        def modeling(x=x, far=far):
            gate = far.chunk(2, dim=-1)[1].reshape(*x.shape[:2], -1)
            return x.flatten(2) * torch.sigmoid(gate)

        def ours(x=x, far=far):
            return package.sigmoid_gate(x, far.chunk(2, dim=-1)[1])

        calls = {"ours": ours, "modeling": modeling}
        row = {"what": f"Qwen3.5, gate, batch {B}, {T} token" + "s" * (T > 1)}
        row["us"] = clock(calls)
        if B == T == 1:
            row["host_us"] = {n: host_us(calls[n]) for n in ("ours", "modeling")}
        yield row


@torch.no_grad()
def attention_rows(package):
    for B, S, filled, *heads in (
        (1, 640, 600, 32, 8, 128), (1, SLOTS, FILLED, 32, 8, 128), (1, SLOTS, SLOTS, 32, 8, 128),
        (64, 640, 600, 32, 8, 128), (64, SLOTS, FILLED, 32, 8, 128), (1, 640, 600, 16, 4, 256),
        (64, 640, 600, 16, 4, 256),
    ):  # fmt: skip
        one, length = Attention(package, heads, B, padded=False), torch.tensor(filled).cuda()
        k, v, _ = one.over(S)
        mask = (torch.arange(S, device="cuda") < length).repeat(B, 1, 1, 1)
        ways = {"ours": partial(one.ours, length=length), "sdpa": one.sdpa}
        calls = {name: partial(way, k, v, mask) for name, way in ways.items()}
        what = "attention, {}/{} heads of {}".format(*heads)
        row = {"what": f"{what}, batch {B}, {filled} of {S} slots", "us": clock(calls)}
        row["error"] = {name: one.error(way, k, v, mask) for name, way in ways.items()}
        if B == 1 and S == 640 and one.D == 128:
            row["host_us"] = {name: host_us(call) for name, call in calls.items()}
        yield row


def rows(package, options):
    yield from attention_rows(package)
    yield from gate_rows(package)
    yield from training_rows(package)
    yield from rotary_rows(package, compiled=not options.no_compile)


if __name__ == "__main__":
    run(__doc__, "attention", rows, ARGUMENTS)
