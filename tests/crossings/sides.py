"""A use of a model, once by transformers alone and once kernelized, and whether both gave the same.

A use is a function of a side: it makes models by it, lets it serve them at the moment at which a
user would call kernelize, and returns what is compared: tensors, caches, dicts and lists of them.
"""

import contextlib
from pathlib import Path
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
from conftest import load_package, relative_error, submodule
from subjects import MODELS, WITH_EXPERTS
from tiny_models import GRADIENTS, tokens

# Relative errors of logits, states and losses. In fp32 those are sums in another order; in FP8 a
# norm that rounds once instead of twice moves codes of three bits: up to .096 in 54 pairs. In bf16
# the last logits of 60 prompts are off by at most .009 (Llama), .020 (Qwen3.5) and .016 (mixtures)
# on a CPU, and those of 127 tokens of Kimi Linear with an adapter by .033, where both sides choose
# the same experts. Where a rounding changes a token's choice it is .08 to .30, on either side: of
# 72 tokens of Kimi Linear on a GPU transformers' own chooses otherwise than in fp64 for one, ours
# for another, and they are .35 and .46 off; with all experts the 72 are .010 off: EVERY_EXPERT.
VALUES = {"fp32": 2e-5, "FP8": 0.15, "bf16": 0.05}
EVERY_EXPERT = {"num_experts_per_tok": 4}  # of mixtures in 16 bits
FACTOR = {"fp32": 1, "FP8": 3000, "bf16": 1000}  # of GRADIENTS
# Of 150 draws of ids and masks (Qwen3.5 in bf16 on a CPU) the worst gradient of an adapter is .05
# off in the median, .15 in one of ten, .42 at most; from fp64 transformers' own is off by .06, .20
# and .45, ours by .06, .18 and .44. In fp32 it is 1e-5, with masks of another seed above 1.4.
ADAPTERS = 2.5


class Use(NamedTuple):
    name: str
    run: Callable
    needs: Tuple[str, ...] = ()  # packages
    only: Tuple[str, ...] = ()  # subjects
    graphs: bool = False  # CUDA graphs, which are emulated on a CPU
    gpus: int = 0  # how many it needs
    slow: bool = False  # takes seconds
    rough: bool = False  # it computes in 16 bits
    refused: str = ""  # what kernels say where the reference gives a result
    note: str = ""  # what the page says beside the outcome
    processes: bool = False  # by two processes
    without: str = ""  # in a process without this package


USES: Dict[str, Use] = {}


def use(name: str, **facts):
    """Adds the function below to the table of uses."""

    def add(function):
        assert name not in USES, name
        USES[name] = Use(name, function, **facts)
        return function

    return add


class Side:
    """One of the two: transformers' own where `kernel` is None."""

    def __init__(self, subject: str, kernel, device: str, folder: Path, graph=None, rough=False):
        self.subject, self.kernel, self.device, self.folder = subject, kernel, device, folder
        self.graph, self.rough, self.report = graph, rough, None
        folder.mkdir(exist_ok=True, parents=True)

    def make(self, **changes):
        """A fresh model, the same each time; changes: of its configuration."""
        in_bf16 = self.device == "cuda" and self.precision == "bf16"
        if self.subject in WITH_EXPERTS and (in_bf16 or self.rough):
            changes = {**EVERY_EXPERT, **changes}
        model = MODELS[self.subject](**changes)
        return (model.bfloat16() if in_bf16 else model).to(self.device)

    def serve(self, model, **options):
        """The model, kernelized."""
        if self.kernel is not None:
            self.report = self.kernel.kernelize(model, **options)
        return model

    def served(self, **options):
        return self.serve(self.make(), **options)

    def restore(self, model):
        if self.kernel is not None:
            self.kernel.restore(model)
        return model

    def ids(self, *shape, seed=0):
        return tokens(*(shape or (2, 9)), seed=seed, device=self.device)

    @property
    def precision(self) -> str:
        if self.subject.startswith("FP8"):
            return "FP8"
        return "fp32" if self.device == "cpu" else "bf16"


def leaves_of(found, name: str = "") -> list:
    """(name, value) of all tensors, numbers and words of what a use returned."""
    if found is None or isinstance(found, (torch.Tensor, int, float, str)):
        return [(name, found)]
    if hasattr(found, "layers") and hasattr(found, "get_seq_length"):
        found = {"length": int(found.get_seq_length()), **states_of(found)}
    items = found.items() if hasattr(found, "items") else enumerate(found)
    return [leaf for key, x in items for leaf in leaves_of(x, f"{name} {key}".strip())]


def states_of(cache) -> dict:
    """The keys, values and recurrent states of each layer of a cache."""
    found = {}
    for i, layer in enumerate(cache.layers):
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            x = getattr(layer, name, None)
            parts = dict(x) if hasattr(x, "keys") else {"": x}
            for key, part in parts.items():
                if isinstance(part, torch.Tensor):
                    found[f"{name} {i} {key}"] = part.detach().clone()
    return found


def generated_in(found) -> list:
    if isinstance(found, Generated):
        return [found]
    if isinstance(found, (list, tuple)):
        return [x for part in found for x in generated_in(part)]
    return []


def comparable(found, expected, a: list, b: list) -> tuple:
    """The leaves without tokens, if some differ, and without what came after the first of them, as
    with beams: in FP8 and bf16 the second best token may be as good as the best."""
    mine, theirs = generated_in(found), generated_in(expected)
    pairs = [(x["sequences"], y["sequences"]) for x, y in zip(mine, theirs)]
    beams = any(len(x["sequences"]) != len(y) for x in theirs for y in x.get("logits", [])[:1])
    if not beams and (len(mine) != len(theirs) or all(torch.equal(x, y) for x, y in pairs)):
        return a, b
    return leaves_of(first_steps(found)), leaves_of(first_steps(expected))


def first_steps(found):
    """Of each generate the logits of its first token alone."""
    if isinstance(found, Generated):
        return found.get("logits", [])[:1]
    if isinstance(found, (list, tuple)):
        return [first_steps(part) for part in found]
    return found


def difference(found, expected, precision: str, device: str) -> Optional[str]:
    """What differs, in a few words."""
    a, b = leaves_of(found), leaves_of(expected)
    if precision != "fp32":
        a, b = comparable(found, expected, a, b)
    if [name for name, _ in a] != [name for name, _ in b]:
        return f"has {[n for n, _ in a]}, not {[n for n, _ in b]}"
    for (name, x), (_, y) in zip(a, b):
        if isinstance(y, torch.Tensor) and isinstance(x, torch.Tensor):
            what = tensors_differ(name, x.detach(), y.detach(), precision, device)
        elif isinstance(y, float) and isinstance(x, float):
            what = None if abs(x - y) <= VALUES[precision] * max(abs(y), 1) else f"{x}, not {y}"
        else:
            what = None if x == y else f"{x!r}, not {y!r}"
        if what:
            return f"{name}: {what}"
    return None


def tensors_differ(name, x, y, precision: str, device: str) -> Optional[str]:
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{x.dtype} {list(x.shape)}, not {y.dtype} {list(y.shape)}"
    if not y.is_floating_point():
        return None if torch.equal(x, y) else "other numbers"
    if x.dtype in (torch.float16, torch.bfloat16) and precision == "fp32":
        precision = "bf16"
    limit, x, y = VALUES[precision], x.float(), y.float()
    if "gradient" in name:
        if y.norm() < 1e-6:  # of an expert without tokens, of a bias behind a softmax
            return None if x.norm() < 1e-5 else "a gradient where there is none"
        # sums over tokens that cancel: tiny_models.assert_same_gradients
        limit = GRADIENTS[device] * FACTOR[precision]
        limit *= 30 if name.endswith(("A_log", "dt_bias", "ranknum.default")) else 1
        limit *= ADAPTERS if "lora_" in name and precision == "bf16" else 1
    finite = y.isfinite()
    if not torch.equal(x.isfinite(), finite):
        return "not finite elsewhere"
    error = relative_error(x[finite], y[finite])
    return None if error <= limit else f"relative error {error:.1e} above {limit:.1e}"


class Generated(dict):
    """What generate returned: tokens, the logits of each, and states; compared as far as the tokens
    are the same where products are rounded to FP8 or bf16."""


def outcome_of(call: Callable, *arguments):
    """What a call returns, or (type, message) of the error that it raises."""
    try:
        return call(*arguments), None
    except Exception as error:
        return None, error


def sentence(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"


def crossing(use: Use, subject: str, device: str, folder: Path, graphs: Callable) -> str:
    """The outcome of a pair in words: "equal", "refuses: ..", or what is wrong."""
    dispatch = submodule("runtime.dispatch")
    kernel, results = load_package(), []
    for ours in (False, True):
        force = contextlib.nullcontext()
        if ours and device == "cpu" and not use.graphs:  # the reference looks at values there
            force = dispatch.force("reference")
        with force, dispatch.served() as record, graphs() as graph:
            where = device, folder / str(ours)
            side = Side(subject, kernel if ours else None, *where, graph, use.rough)
            torch.manual_seed(0)
            results.append(outcome_of(use.run, side))
    (expected, theirs), (found, error) = results
    if error is not None and theirs is None and use.refused and use.refused in str(error):
        return "equal, but refused by kernels"
    if error is not None and theirs is None:
        return f"refuses: {sentence(error)}"
    if theirs is not None:
        if error is None:
            return f"transformers alone refuses: {sentence(theirs):.150}"
        return f"both refuse: {sentence(theirs):.150}"
    precision = "bf16" if use.rough and side.precision == "fp32" else side.precision
    what = difference(found, expected, precision, device)
    if what:
        return f"WRONG: {what}"
    if graph is not None and graph.replays:
        return "equal, by replays"
    return "equal" if record else "equal, by its own forwards"
