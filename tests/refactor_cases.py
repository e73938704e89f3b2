"""Modules of transformers' models as subjects of refactors: the tree of their class, the calls that
their model makes of them, and a class of another source in their place."""

import ast
import builtins
import contextlib
import copy
import functools
import importlib.util
import inspect
import linecache
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional

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
CACHES = ("past_key_values", "cache_params")
STATES = ("keys", "values", "conv_states", "recurrent_states")
IMPORTS = {
    "torch": "import torch", "F": "import torch.nn.functional as F", "nn": "from torch import nn",
    "math": "import math", "functools": "import functools", "warnings": "import warnings",
    "logging": "import logging", "Callable": "from collections.abc import Callable",
    "deprecate_kwarg": "from transformers.utils.deprecation import deprecate_kwarg",
    "transformers_logging": "from transformers.utils import logging as transformers_logging",
}  # fmt: skip


class Call(NamedTuple):
    """Of a module's forward: all arguments by name, and how many of them came by position."""

    given: dict
    positional: int


class Cache:
    """Stands for the cache of a sequence of calls, which is a new one each time."""


def kind_of(module: nn.Module) -> Optional[str]:
    name = type(module).__name__
    return next((kind for end, kind in ENDS.items() if name.endswith(end)), None)


def copied(tree):
    """A copy of a tree with its nodes' types: in a tenth of copy.deepcopy's time."""
    return pickle.loads(pickle.dumps(tree))


class Unit:
    """The source of a class: a tree to rewrite, and what callers must know of the rewriting."""

    def __init__(self, subject: "Subject"):
        self.subject = subject
        self.cls: ast.ClassDef = copied(subject.tree)
        self.before: List[ast.stmt] = []  # statements of the module before the class
        self.attributes: dict = {}  # old name: new name, of parts and parameters
        self.paths: dict = {}  # the same by paths, "forget_gate.A_log"
        self.fused: Dict[str, List[str]] = {}  # a new weight: those that lie side by side in it
        self.arguments: dict = {}  # old name: new name
        self.by_keyword = False  # arguments are no more in their order
        self.old_names = False  # it may be called by the old names of arguments, too
        self.calls_old: List[dict] = []  # {old name: new name} of calls to try besides
        self.after = None  # (module) -> None: a patch of what it uses, after kernelize
        self.words: dict = {}  # further keywords of each call

    @property
    def forward(self) -> ast.FunctionDef:
        return self.method("forward")

    def method(self, name: str) -> ast.FunctionDef:
        found = [n for n in self.cls.body if isinstance(n, ast.FunctionDef) and n.name == name]
        return found[-1]

    def methods(self) -> List[ast.FunctionDef]:
        return [n for n in self.cls.body if isinstance(n, ast.FunctionDef)]

    def source(self) -> str:
        body = ast.Module([*self.before, self.cls], [])
        text = ast.unparse(ast.fix_missing_locations(body))
        body = ast.parse(text)
        made = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)
                and isinstance(n.ctx, ast.Store)}  # fmt: skip
        made |= {n.name for n in body.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        used = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)}
        theirs = vars(self.subject.home)
        lines = [line for name, line in IMPORTS.items() if name in used - made]
        names = sorted(n for n in used - made - IMPORTS.keys()
                       if n in theirs and (not hasattr(builtins, n)))  # fmt: skip
        lines += [f"from {self.subject.home.__name__} import {name}" for name in names]
        old = self.subject.tree.name
        if f"Base{old}" in used - made:
            lines.append(f"from {self.subject.home.__name__} import {old} as Base{old}")
        return "\n".join(lines) + "\n\n\n" + text + "\n"


class Subject:
    """A module of a model, in fp64 with random weights."""

    def __init__(self, model: "Model", module: nn.Module, kind: str, number: int = 1):
        self.family, self.kind, self.module = model.family, kind, module
        self.name = f"{model.family}.{kind}{number if number > 1 else ''}"
        self.made, self.calls = model.made[id(module)], model.calls[id(module)]
        self.home = sys.modules[type(module).__module__]
        file = ast.parse(inspect.getsource(self.home))
        self.file = file
        self.tree = next(
            n for n in file.body
            if isinstance(n, ast.ClassDef) and n.name == type(module).__name__
        )  # fmt: skip
        self.config = model.config
        observe(self)

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
    """A small random model, what its modules were made of and how it calls them."""

    def __init__(self, family: str):
        self.family, self.made = family, {}
        home = sys.modules[sweep_models.classes(family)[0].__module__]
        with self.recording(home):
            self.model = small_model(family)
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

    @contextlib.contextmanager
    def recording(self, home):
        """Modules note what they are made of."""
        kinds = [k for k in vars(home).values() if isinstance(k, type)
                 and issubclass(k, nn.Module) and "__init__" in vars(k)]  # fmt: skip
        plain = {kind: kind.__init__ for kind in kinds}
        for kind in kinds:
            kind.__init__ = self.noted(kind, plain[kind])
        try:
            yield
        finally:
            for kind in kinds:
                kind.__init__ = plain[kind]

    def noted(self, kind, plain):
        @functools.wraps(plain)
        def init(module, *args, **kwargs):
            if type(module) is kind:
                self.made[id(module)] = args, kwargs
            plain(module, *args, **kwargs)

        return init

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
                 for m in self.model.modules() if id(m) in self.made]  # fmt: skip
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


_folder = tempfile.TemporaryDirectory(prefix="refactors")
_count = 0


def load(unit: Unit, text: Optional[str] = None, user: bool = False):
    """The class of a unit, from a file of its own: beside transformers' models, or a user's."""
    global _count
    _count += 1
    subject = unit.subject
    package = subject.home.__name__ if not user else f"modeling_{subject.family}"
    name = f"{package}_{_count}"
    path = Path(_folder.name, name.rpartition(".")[2] + ".py")
    path.write_text(unit.source() if text is None else text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return vars(module)[unit.cls.name]


def forget(cls) -> None:
    """Nothing asks for the file of a case once it is done."""
    module = sys.modules.pop(cls.__module__)
    linecache.cache.pop(module.__file__, None)


def build(cls, unit: Unit) -> nn.Module:
    """A module of a rewritten class, with the weights of the original."""
    subject = unit.subject
    args, kwargs = copy.deepcopy(subject.made)
    module = cls(*args, **kwargs).double().eval()
    known, state = subject.module.state_dict(), {}
    for new, names in unit.fused.items():
        state[new] = torch.cat([known.pop(name) for name in names])
    for name, value in known.items():
        head, dot, rest = name.partition(".")
        moved = [old for old in unit.paths if name == old or name.startswith(f"{old}.")]
        if moved:
            name = unit.paths[moved[0]] + name[len(moved[0]) :]
            head, dot, rest = name.partition(".")
        state[unit.attributes.get(head, head) + dot + rest] = value
    module.load_state_dict(state)
    return module


def observe(subject: Subject) -> None:
    """Marks each expression of the class's methods with the types that it has in the calls: the
    attribute `seen` of its node."""
    tree = copy.deepcopy(subject.tree)
    originals = list(ast.walk(subject.tree))
    for node, original in zip(ast.walk(tree), originals):
        node.number = id(original)
    types: dict = {}

    def see(number, value):
        name = "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__
        types.setdefault(number, set()).add(name)
        return value

    unit = Unit(subject)
    unit.cls = _Watcher().visit(tree)
    text = unit.source()
    import builtins as space

    space.__see__ = see
    try:
        cls = load(unit, text)
        run(build(cls, unit), subject, torch.float64)
        forget(cls)
    finally:
        del space.__see__
    for node in originals:
        if id(node) in types:
            node.seen = frozenset(types[id(node)])


class _Watcher(ast.NodeTransformer):
    """Puts a call of __see__ around expressions."""

    def visit_FunctionDef(self, node):
        if node.name != "__init__":
            node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_ClassDef(self, node):
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_AnnAssign(self, node):
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_JoinedStr(self, node):
        return node

    def visit_Call(self, node):
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return node
        node.args = [self.visit(a) for a in node.args]
        for word in node.keywords:
            word.value = self.visit(word.value)
        return self.watched(node)

    def visit_Subscript(self, node):
        node.value = self.visit(node.value)
        return self.watched(node)

    def watched(self, node):
        number = ast.Constant(getattr(node, "number", 0))
        return ast.Call(ast.Name("__see__", ast.Load()), [number, node], [])

    def generic_visit(self, node):
        super().generic_visit(node)
        plain = isinstance(node, ast.expr) and not isinstance(
            node, (ast.Starred, ast.Slice, ast.Constant, ast.comprehension, ast.GeneratorExp)
        )
        if plain and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return self.watched(node)
        return node
