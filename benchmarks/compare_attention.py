"""Time, error and host time of what surrounds attention, and of attention over a static cache.

    python benchmarks/compare_attention.py [--no-compile] [--json FILE]     on a GPU

Peers do the same with transformers' own functions: eagerly ("modeling"), by torch.compile, and with
Liger's rotary embedding where that fits. A token is written to a static cache, too. The peer of
attention is scaled_dot_product_attention as transformers calls it in decoding: with a mask over all
slots, for which keys and values are repeated for each query head.
"""

import argparse
import importlib.util
import itertools
import time
from pathlib import Path
from typing import NamedTuple, Optional

import kernel_time
import torch
import torch.nn.functional as F
from kernel_time import RESULTS, load_package, parse_on_gpu, save

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

    def liger(self):
        from liger_kernel.ops.rope import LigerRopeFunction

        # it writes to its input in place, as a model's projection allows
        q, k = LigerRopeFunction.apply(*self._normed(), self.cos, self.sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    def errors(self, names) -> dict:
        """Relative errors of q against fp64."""
        f = self.family
        wide = [None if n is None else n.weight.double() for n in self.norms]
        right, _ = self.package.fused_qk_norm_rope(
            self.query().double(), self.k.double(), self.cos.double(), self.sin.double(),
            q_weight=wide[0], k_weight=wide[1], norm=f.norm, offset=f.offset,
        )  # fmt: skip
        found = {name: getattr(self, name)()[0].double() for name in names}
        return {n: ((q - right).norm() / right.norm()).item() for n, q in found.items()}


def microseconds(calls: dict) -> dict:
    return kernel_time.microseconds(calls, rounds=2, rep_ms=5)


def host_us(call) -> float:
    """Time until an eager call returns, the queue being empty: least mean of 5 runs of 100."""
    means = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(100):
            call()
        means.append((time.perf_counter() - start) * 1e4)
        torch.cuda.synchronize()
    return min(means[1:])


@torch.no_grad()
def rotary_rows(package, compiled: bool):
    for name, family in FAMILIES.items():
        for B, T in ((1, 1), (64, 1), (1, 8192)):
            one = Rotary(package, family, B, T, cache=T == 1)
            calls = {"ours": one.ours, "modeling": one.modeling}
            row = {"error": one.errors(calls)}
            if T > 1 and compiled:
                torch._dynamo.reset()
                calls["compile"] = torch.compile(one.modeling, dynamic=False)
            if T > 1 and family.norm_class is None and importlib.util.find_spec("liger_kernel"):
                calls["liger"] = one.liger
            what = f"batch {B}, and its cache" if T == 1 else f"{T} tokens"
            row.update(what=f"{name}, q and k, {what}", us=microseconds(calls))
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
        yield {"what": f"{name}, q and k, 4096 tokens, forward and backward",
               "us": microseconds(calls)}  # fmt: skip


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
        row["us"] = microseconds(calls)
        if B == T == 1:
            row["host_us"] = {n: host_us(calls[n]) for n in ("ours", "modeling")}
        yield row


@torch.no_grad()
def attention_rows(package):
    for B, S, filled, HQ, HK, D in (
        (1, 640, 600, 32, 8, 128), (1, SLOTS, FILLED, 32, 8, 128), (1, SLOTS, SLOTS, 32, 8, 128),
        (64, 640, 600, 32, 8, 128), (64, SLOTS, FILLED, 32, 8, 128), (1, 640, 600, 16, 4, 256),
        (64, 640, 600, 16, 4, 256),
    ):  # fmt: skip
        q, k, v = normal(B, 1, HQ, D), normal(B, HK, S, D), normal(B, HK, S, D)
        length = torch.tensor(filled, device="cuda")
        mask = (torch.arange(S, device="cuda") < length).repeat(B, 1, 1, 1)

        def sdpa(q=q, k=k, v=v, mask=mask):
            every = [x[:, :, None].expand(-1, -1, q.shape[2] // x.shape[1], -1, -1).flatten(1, 2)
                     for x in (k, v)]  # fmt: skip
            y = F.scaled_dot_product_attention(q.transpose(1, 2), *every, attn_mask=mask)
            return y.transpose(1, 2).contiguous()

        def ours(q=q, k=k, v=v, length=length, mask=mask):
            return package.attention_with_kvcache(q, k, v, length, attention_mask=mask)

        calls = {"ours": ours, "sdpa": sdpa}
        row = {"what": f"attention, {HQ}/{HK} heads of {D}, batch {B}, {filled} of {S} slots"}
        row["us"] = microseconds(calls)
        right = package.attention_with_kvcache(
            q[:1].double(), k[:1].double(), v[:1].double(), length, attention_mask=mask[:1]
        )
        found = {name: call()[:1].double() for name, call in calls.items()}
        row["error"] = {n: ((y - right).norm() / right.norm()).item() for n, y in found.items()}
        if B == 1 and S == 640 and D == 128:
            row["host_us"] = {n: host_us(calls[n]) for n in calls}
        yield row


def line(row: dict) -> str:
    parts = [row["what"]]
    for key, form in (("us", ".1f"), ("host_us", ".1f"), ("error", ".1e")):
        if key in row:
            parts.append(f"{key} " + ", ".join(f"{n} {x:{form}}" for n, x in row[key].items()))
    return " | ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path, default=RESULTS / "attention.json")
    options = parse_on_gpu(parser)
    package, compiled, rows = load_package(), not options.no_compile, []
    torch.manual_seed(0)
    groups = (attention_rows(package), gate_rows(package), training_rows(package))
    for row in itertools.chain(*groups, rotary_rows(package, compiled)):
        rows.append(row)
        print(line(row), flush=True)
        save(options.json, rows)


if __name__ == "__main__":
    main()
