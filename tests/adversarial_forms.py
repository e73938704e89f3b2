"""Gated MLPs as people write them, and modules that only look like one.

Every entry of FORMS is a class of MLPs of width 16 -> 24 -> 16, or a function that makes a module,
with what kernelize must say of it: None where it is the formula, else a part of the reason for
leaving it alone. TEXTS has those of which only the forward is another. What is put in the place of
parts of a model: tests/models/test_changes_after.py.
"""

import functools
import re
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import nn
from written import with_forward

K, N = 16, 24


class P(nn.Module):
    """The usual MLP."""

    bias = False

    def __init__(self, act_fn=None):
        super().__init__()
        self.gate_proj = nn.Linear(K, N, bias=self.bias)
        self.up_proj = nn.Linear(K, N, bias=self.bias)
        self.down_proj = nn.Linear(N, K, bias=self.bias)
        self.act_fn = nn.SiLU() if act_fn is None else act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Joined(nn.Module):
    """Gate and up in one projection."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(K, 2 * N), nn.Linear(N, K)
        self.activation_fn = nn.SiLU()

    def forward(self, hidden_states):
        up = self.gate_up_proj(hidden_states)
        gate, up = up.chunk(2, dim=-1)
        up = up * self.activation_fn(gate)
        return self.down_proj(up)


def with_parts(base=P, **parts):
    """A module of `base` with these attributes beside its own."""

    def make():
        module = base()
        for name, part in parts.items():
            setattr(module, name, part() if isinstance(part, FunctionType) else part)
        return module

    return make


def changed(change, base=P):
    def make():
        module = base()
        change(module)
        return module

    return make


class Named(nn.Module):
    """Of LFM2: other names, and the activation in the code."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SiluInTheCode(P):
    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class UpFirst(Joined):
    def forward(self, x):
        x, gate = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.activation_fn(gate) * x)


class Dropout(P):
    p = 0.5

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(type(self).p)

    def forward(self, x):
        x = self.drop(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(x)


class DropoutOfNone(Dropout):
    p = 0.0


class Rate(P):
    """Of Seed-OSS."""

    def __init__(self):
        super().__init__()
        self.rate = 0.5

    def forward(self, x):
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return nn.functional.dropout(y, p=self.rate, training=self.training)


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi_0, self.wi_1, self.wo = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, K)
        self.dropout, self.act = nn.Dropout(0.1), nn.GELU(approximate="tanh")

    def forward(self, hidden_states):
        hidden_gelu = self.act(self.wi_0(hidden_states))
        hidden_linear = self.wi_1(hidden_states)
        hidden_states = hidden_gelu * hidden_linear
        hidden_states = self.dropout(hidden_states)
        if (
            isinstance(self.wo.weight, torch.Tensor)
            and hidden_states.dtype != self.wo.weight.dtype
            and self.wo.weight.dtype != torch.int8
        ):
            hidden_states = hidden_states.to(self.wo.weight.dtype)
        hidden_states = self.wo(hidden_states)
        return hidden_states


def tie(m):
    m.up_proj.weight = m.gate_proj.weight


def forged():
    """A class that says it is transformers' own."""
    kind = type("NewGELUActivation", (nn.Module,), {"forward": lambda self, x: x.relu()})
    kind.__module__ = "transformers.activations"
    return kind()


class Scaled(P):
    scale = 2.0


class Flags(P):
    """Off: what is behind them is not read."""

    def __init__(self, noise=0.0, mode="plain"):
        super().__init__()
        self.noise, self.mode = noise, mode

    def forward(self, x):
        if self.training and self.noise > 0:
            x = x + self.noise * torch.randn_like(x)
        if self.mode == "clamped":
            x = x.clamp(-0.1, 0.1)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ByWeights(P):
    def forward(self, x):
        gate = F.linear(x, self.gate_proj.weight, self.gate_proj.bias)
        return self.down_proj(self.act_fn(gate) * (x @ self.up_proj.weight.T))


class PropertyPart(P):
    @property
    def up_proj(self):
        return lambda x: self._modules["up_proj"](x) * 2


class GetAttr(P):
    def __getattr__(self, name):
        part = super().__getattr__(name)
        return nn.Sequential(part, nn.ReLU()) if name == "up_proj" else part


class OwnCall(P):
    def __call__(self, x):
        return super().__call__(x) * 2


class OwnCallImpl(P):
    def _call_impl(self, *args, **kwargs):
        return super()._call_impl(*args, **kwargs) * 2


class Loud(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def loud_call(m):
    m.up_proj._call_impl = lambda x: x[..., :1] * x.new_ones(N)


class OwnDict(P):
    @property
    def __dict__(self):
        return {**super().__dict__, "extra": 1}


def named(name):
    def make():
        from transformers.activations import ACT2FN

        return ACT2FN[name]

    return make


# forwards by what they do first and what they return: `gate` and `up` are the products of x, with
# `act` and `down` as functions; the usual formula where nothing is returned
USUAL = "return down(act(gate) * up)"
WORDS = {"gate": "self.gate_proj(x)", "up": "self.up_proj(x)", "act": "self.act_fn",
         "down": "self.down_proj"}  # fmt: skip
TEXTS = {
    "the activation on up": ("return down(act(up) * gate)", None),
    "checked later": ("x = x.flatten(0, -2)\nassert x.shape[0] > 3", "raises AssertionError"),
    "gelu tanh in the code": ("return down(F.gelu(gate, approximate='tanh') * up)", None),
    "dropout by grad mode": (
        "x = F.dropout(x, p=0.5, training=torch.is_grad_enabled())", "another formula"),
    "branch on dtype": ("if x.dtype == torch.bfloat16:\n    x = -x", "another formula"),
    "branch on size": (
        "return down(act(gate) * up) * (-1.0 if x.shape[0] == 3 else 1.0)", "another formula"),
    "branch on grad mode": (
        "y = down(act(gate) * up)\nreturn y if torch.is_grad_enabled() else 2 * y",
        "another formula"),
    "multiplier": ("return down(act(gate * self.scale) * up)", "another formula", Scaled),
    "two signs turned": ("return down(act(-gate) * -up)", "another formula"),  # of an odd one not
    "a tuple": ("return (down(act(gate) * up),)", "another formula"),
    "in fp32": (
        "g = gate\nreturn down((act(g.float()) * up.float()).to(g.dtype))", "another formula"),
    "one row is another formula": ("if x.shape[0] == 1:\n    x = x * 2", "another formula"),
    "large sizes are another formula": ("x = x * (1 + x.shape[0] // 1000)", "another formula"),
    "by the truth of a value": ("x = -x if bool(x.sum() > 1e6) else x", "another formula"),
    "scaled in place": ("x *= 2", "writes to its input"),
    "no gradients": (
        "with torch.no_grad():\n    return down(act(gate) * up)", "gradients"),
    "sorted": ("return down(act(gate) * up.sort(-1).values)", "another formula"),
    "dropout always": (
        "return F.dropout(down(act(gate) * up), p=self.rate)", "another formula", Rate),
    "T5 with another cast": (  # of the result, not of the product
        "x = self.wo(self.act(self.wi_0(x)) * self.wi_1(x))\n"
        "return x if x.dtype == torch.float32 else x.to(torch.bfloat16)", "another formula", T5),
    "one half for both": (
        "g, _ = self.gate_up_proj(x).chunk(2, dim=-1)\nreturn down(self.activation_fn(g) * g)",
        "another formula", Joined),
}  # fmt: skip


def written(text: str, base: type = P) -> type:
    """A class with a forward of these statements."""
    if not text.rpartition("\n")[2].startswith("return"):
        text += f"\n{USUAL}"
    words = r"(?<![\w.`])(gate|up|act|down)\b"
    return with_forward(base, re.sub(words, lambda word: WORDS[word[0]], text))


FORMS = {
    "usual": (P, None),
    "biases": (type("Biases", (P,), {"bias": True}), None),
    "other names, F.silu": (Named, None),
    "silu in the code, act_fn is relu": (with_parts(SiluInTheCode, act_fn=nn.ReLU()), None),
    "joined": (Joined, None),
    "joined, up first": (UpFirst, None),
    "dropout of none": (DropoutOfNone, None),
    "dropout": (Dropout, "drops values out"),
    "rate": (Rate, "drops values out"),
    "T5": (T5, "drops values out"),
    "T5 without dropout": (with_parts(T5, dropout=lambda: nn.Dropout(0.0)), None),
    "flags that are off": (Flags, None),
    "a flag that is on": (functools.partial(Flags, mode="clamped"), "another formula"),
    "noise in training": (functools.partial(Flags, noise=0.1), "another formula"),
    "by weights": (ByWeights, None),
    "a bias that is not added": (type("Biased", (ByWeights,), {"bias": True}), "another formula"),
    "by weights of a subclass": (
        with_parts(ByWeights, gate_proj=lambda: Loud(K, N)), "gate_proj is a"),
    "relu": (with_parts(act_fn=nn.ReLU()), None),
    "silu in place": (with_parts(act_fn=nn.SiLU(inplace=True)), None),
    "gelu tanh": (with_parts(act_fn=nn.GELU(approximate="tanh")), None),
    "gelu_new": (with_parts(act_fn=named("gelu_new")), None),
    "one weight for two": (changed(tie), None),
    "quick_gelu": (with_parts(act_fn=named("quick_gelu")), "QuickGELU"),
    "a forged activation": (with_parts(act_fn=forged), "its activation is NewGELU"),
    "a property": (PropertyPart, "attribute up_proj"),
    "__getattr__": (GetAttr, "__getattr__ of its own"),
    "__call__": (OwnCall, "__call__ of its own"),
    "_call_impl": (OwnCallImpl, "_call_impl of its own"),
    "a subclass of nn.Linear": (with_parts(gate_proj=lambda: Loud(K, N)), None),
    "own call of a part": (changed(loud_call), None),
    "an offloaded part": (changed(lambda m: setattr(m.up_proj, "_hf_hook", object())), None),
    "__dict__": (OwnDict, "__dict__ of its own"),
}  # fmt: skip
for _name, (_text, _expected, *_base) in TEXTS.items():
    FORMS[_name] = written(_text, *_base), _expected
