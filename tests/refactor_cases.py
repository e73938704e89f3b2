"""Modules of transformers' models as subjects of refactors: the tree of their class, the calls that
their model makes of them, and a class of another source in their place."""

import ast
import copy
import functools
import inspect
import logging
import sys
import types
import warnings
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional

import sweep_models
import tiny_models
import torch
from torch import nn

FAMILIES = (
    "llama", "qwen3", "qwen3_5_text", "qwen3_next", "olmo_hybrid", "gemma2", "glm4", "mixtral",
    "qwen3_moe", "deepseek_v3", "phi3", "lfm2", "cohere", "granite", "olmo2", "qwen2_moe",
    "qwen3_5_moe_text", "gpt_oss", "kimi_linear", "bailing_hybrid", "glm5_next_text",
)  # fmt: skip
KINDS = ("mlp", "norm", "attention", "layer", "gdn", "kda", "experts", "router", "block")
IN_HALF = ("experts", "router", "block")  # which are served in 16 bits alone
ENDS = {
    "MLP": "mlp", "RMSNorm": "norm", "DeltaAttention": "kda", "TextLinearAttention": "kda",
    "Attention": "attention", "DecoderLayer": "layer",
    "GatedDeltaNet": "gdn", "Experts": "experts", "Router": "router", "SparseMoeBlock": "block",
}  # fmt: skip
STATES = ("keys", "values", "conv_states", "recurrent_states")


class Call(NamedTuple):
    """Of a module's forward: all arguments by name, and how many of them came by position."""

    given: dict
    positional: int


class Cache:
    """Stands for the cache of a sequence of calls, which is a new one each time."""


def kind_of(module: nn.Module) -> Optional[str]:
    name = type(module).__name__
    return next((kind for end, kind in ENDS.items() if name.endswith(end)), None)


class Unit:
    """The source of a class: a tree to rewrite, and what callers must know of the rewriting."""

    def __init__(self, subject: "Subject"):
        self.subject = subject
        self.cls: ast.ClassDef = copy.deepcopy(subject.tree)
        self.before: List[ast.stmt] = []  # statements of the module before the class
        self.moves: List[Callable[[nn.Module, dict], None]] = []  # what modules get of the file
        self.attributes: Dict[str, str] = {}  # old name: new name, of parts and values
        self.arguments: Dict[str, str] = {}  # old name: new name
        self.by_keyword = False  # arguments are no more in their order
        self.calls_old: List[dict] = []  # {old name: new name} of calls to try besides
        self.after: Optional[Callable] = None  # patches what it uses, after kernelize
        self.words: dict = {}  # further keywords of each call

    @property
    def forward(self) -> ast.FunctionDef:
        return self.method("forward")

    def method(self, name: str) -> ast.FunctionDef:
        return [m for m in self.methods() if m.name == name][-1]

    def methods(self) -> List[ast.FunctionDef]:
        return [n for n in self.cls.body if isinstance(n, ast.FunctionDef)]

    def source(self) -> str:
        body = ast.Module([*self.before, self.cls], [])
        return ast.unparse(ast.fix_missing_locations(body)) + "\n"


class Subject:
    """A module of a model, in fp64 with random weights."""

    def __init__(self, model: "Model", module: nn.Module, kind: str, number: int = 1):
        self.family, self.kind, self.module = model.family, kind, module
        self.name = f"{model.family}.{kind}{number if number > 1 else ''}"
        self.calls, self.config = model.calls[id(module)], model.config
        self.home = sys.modules[type(module).__module__]
        self.file = ast.parse(inspect.getsource(self.home))
        self.tree = self.of_the_file(type(module).__name__)

    def of_the_file(self, name: str):
        """The definition of a class or function."""
        return next(n for n in self.file.body if getattr(n, "name", None) == name)

    @functools.cached_property
    def outputs(self) -> list:
        return run(copy.deepcopy(self.module), self, torch.float64)

    @functools.cached_property
    def outputs_in_half(self) -> list:
        return run(copy.deepcopy(self.module).bfloat16(), self, torch.bfloat16)


def small_model(family: str) -> nn.Module:
    if family not in tiny_models.KDA:
        return next(sweep_models.models(family))
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {**tiny_models.BASE, **tiny_models.KDA[family], "vocab_size": 120}
    config = CONFIG_MAPPING[family](**values)
    return sweep_models.classes(family)[0]._from_config(config).float().eval()


class Model:
    """A small random model, and how it calls its modules."""

    def __init__(self, family: str):
        self.family, self.model = family, small_model(family)
        self.model.double().eval()
        if hasattr(self.model.config, "_experts_implementation_internal"):
            self.model.config._experts_implementation_internal = "eager"  # grouped_mm has no fp64
        self.config = self.model.config
        rotary = {id(b) for m in self.model.modules() if "Rotary" in type(m).__name__
                  for b in m.buffers()}  # fmt: skip
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for x in [*self.model.parameters(), *self.model.buffers()]:
                if id(x) not in rotary and x.is_floating_point():
                    noise = torch.randn(x.shape, generator=random, dtype=x.dtype) * 0.3
                    x.copy_(noise if x.ndim > 1 else x + noise)
        self.calls = self.called()

    def called(self) -> dict:
        """{id of a module: sequences of its calls}, each with a cache of its own, or without."""
        found: dict = {}
        now: dict = {}

        def note(module, args, kwargs):
            forward = type(module).forward
            names = list(inspect.signature(forward).parameters)[1:]
            given = {**dict(zip(names, args)), **kwargs}
            given = {n: kept(v) for n, v in given.items()}
            now.setdefault(id(module), []).append(Call(given, len(args)))

        hooks = [m.register_forward_pre_hook(note, with_kwargs=True)
                 for m in self.model.modules() if kind_of(m)]  # fmt: skip
        for sequence in self.sequences():
            now.clear()
            with torch.no_grad():
                for arguments in sequence:
                    self.model(**arguments)
            for key, calls in now.items():
                found.setdefault(key, []).append(calls)
        for hook in hooks:
            hook.remove()
        return found

    def sequences(self) -> Iterator[list]:
        random = torch.Generator().manual_seed(1)

        def ids(*shape):
            return torch.randint(8, 100, shape, generator=random)

        mask = torch.ones(2, 9, dtype=torch.int64)
        mask[1, :3] = 0
        yield [{"input_ids": ids(2, 9), "attention_mask": mask, "use_cache": False}]
        cache, mask = self.new_cache(), torch.ones(2, 12, dtype=torch.int64)
        mask[0, :2] = 0
        yield [
            {"input_ids": ids(2, n), "attention_mask": mask[:, :end], "past_key_values": cache,
             "use_cache": True} for n, end in ((7, 7), (1, 8), (3, 11), (1, 12))
        ]  # fmt: skip
        yield [{"input_ids": ids(1, 5), "use_cache": False}]

    def new_cache(self):
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def subjects(self, kinds) -> Iterator[Subject]:
        done: dict = {}
        for module in self.model.modules():
            kind, key = kind_of(module), (type(module), tuple(module._modules))
            if kind in kinds and key not in done and id(module) in self.calls:
                done[key] = kind
                yield Subject(self, module, kind, list(done.values()).count(kind))


def kept(value):
    from transformers.cache_utils import Cache as TheirCache

    if isinstance(value, TheirCache):
        return Cache()
    return copy.deepcopy(value)


def as_dtype(value, dtype):
    if isinstance(value, torch.Tensor):
        if value.dtype is torch.float64 and dtype is not torch.float64:
            limit = torch.finfo(dtype)  # a mask has the lowest number of its own dtype
            return value.clamp(limit.min, limit.max).to(dtype)
        return value.clone()  # what is in fp32 in a model of fp64 is so in any
    if isinstance(value, (tuple, list)):
        return type(value)([as_dtype(v, dtype) for v in value])
    return value


def cleaned(kind: str, out) -> list:
    """What counts of an output."""
    if kind == "router":
        logits, weights, ids = out
        dense = torch.zeros_like(logits, dtype=weights.dtype).scatter(1, ids, weights)
        return [logits, dense]
    out = out[0] if isinstance(out, tuple) else out
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"gives a {type(out).__name__}")
    return [out]


def run(module, subject: Subject, dtype, unit: Optional[Unit] = None, names=None) -> list:
    """The outputs of all calls of a module, and what it leaves in the cache."""
    from transformers import DynamicCache

    names = names if names is not None else unit.arguments if unit else {}
    out = []
    for sequence in subject.calls:
        cache = DynamicCache(config=subject.config)
        for call in sequence:
            given = {n: as_dtype(v, dtype) for n, v in call.given.items()}
            given = {n: cache if isinstance(v, Cache) else v for n, v in given.items()}
            first = 0 if unit is not None and unit.by_keyword else call.positional
            args = [given.pop(n) for n in list(given)[:first]]
            words = {names.get(n, n): v for n, v in given.items()}
            words.update(unit.words if unit is not None else {})
            torch.manual_seed(0)
            with torch.no_grad():
                out += cleaned(subject.kind, module(*args, **words))
        for layer in cache.layers:
            for name in STATES:
                x = getattr(layer, name, None)
                states = x.values() if isinstance(x, dict) else [x]
                out += [s.clone() for s in states if isinstance(s, torch.Tensor)]
    return out


def difference(found: list, expected: list) -> float:
    """The largest, each relative to the largest value of its tensor."""
    if len(found) != len(expected):
        return float("inf")
    return max([sweep_models.difference(a, b) for a, b in zip(found, expected)], default=0.0)


@functools.cache
def subject_of(family: str, kind: str) -> Subject:
    """The first module of a kind in a family's model: to be copied, not to be changed."""
    return next(iter(Model(family).subjects((kind,))))


_count = 0


def load(unit: Unit, user: bool = False) -> type:
    """The class of a unit, of a file beside transformers' models, or of a user's."""
    global _count
    _count += 1
    subject = unit.subject
    home = subject.home.__name__ if not user else f"modeling_{subject.family}"
    module = types.ModuleType(f"{home}_{_count}")
    module.__dict__.update({n: v for n, v in vars(subject.home).items() if n[:2] != "__"})
    module.__dict__.update(
        F=nn.functional, functools=functools, logging=logging, warnings=warnings,
        Own=type(subject.module), __file__=f"/refactors/{module.__name__}.py",
    )  # fmt: skip
    sys.modules[module.__name__] = module
    exec(compile(unit.source(), module.__file__, "exec"), module.__dict__)
    return vars(module)[unit.cls.name]


def forget(cls: type) -> None:
    """Nothing asks for the file of a case once it is done."""
    sys.modules.pop(cls.__module__, None)


def rename_members(module: nn.Module, names: Dict[str, str]) -> None:
    for space in (module._modules, module._parameters, module._buffers, module.__dict__):
        for name in list(space):
            space[names.get(name, name)] = space.pop(name)


def build(cls: type, unit: Unit) -> nn.Module:
    """A copy of the original that is of a rewritten class."""
    module = copy.deepcopy(unit.subject.module)
    for move in unit.moves:
        move(module, vars(sys.modules[cls.__module__]))
    rename_members(module, unit.attributes)
    module.__class__ = cls
    return module
