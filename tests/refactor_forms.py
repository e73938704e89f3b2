"""Refactors: functions that rewrite the tree of a class (refactor_cases.Unit), so that its modules
should compute the same. One that does not apply to a class raises Inapplicable."""

import ast
import copy
import random
from textwrap import indent
from typing import Callable, Dict, List, Optional

from refactor_cases import Unit
from refactor_cases import copied as copied_tree

REFACTORS: Dict[str, Callable] = {}  # by name; `kinds` of each: what it is for, None for all
WITH_CACHE = ("attention", "layer", "gdn", "kda")


class Inapplicable(Exception):
    """The class has nothing that the refactor is about."""


def refactor(function=None, *, name=None, kinds=None):
    def keep(function):
        function.kinds = kinds
        REFACTORS[name or function.__name__] = function
        return function

    return keep if function is None else keep(function)


# ---------------------------------------------------------------------------- trees


def statements(text: str) -> List[ast.stmt]:
    return ast.parse(text).body


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def is_tensor(node) -> bool:
    return getattr(node, "seen", None) == {"Tensor"}


def like(node, other):
    """`node`, which has the types that `other` had."""
    if hasattr(other, "seen"):
        node.seen = other.seen
    return node


def body_of(function) -> List[ast.stmt]:
    """The statements without a docstring."""
    first = function.body[0]
    has = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.body[1:] if has else function.body


def reads(nodes) -> set:
    return {n.id for node in nodes for n in ast.walk(node)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}  # fmt: skip


def writes(nodes) -> set:
    found = {n.id for node in nodes for n in ast.walk(node)
             if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}  # fmt: skip
    inner = {n.id for node in nodes for c in ast.walk(node) if isinstance(c, ast.comprehension)
             for n in ast.walk(c.target) if isinstance(n, ast.Name)}  # fmt: skip
    return found - inner


def every_argument(function) -> List[ast.arg]:
    a = function.args
    more = [x for x in (a.vararg, a.kwarg) if x is not None]
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *more]


def names_of(function) -> List[str]:
    return [a.arg for a in every_argument(function)]


def local_names(function) -> set:
    return set(names_of(function)) | writes(function.body)


def in_order(names, function) -> List[str]:
    """Names as they come up in a function."""
    seen = [*names_of(function), *(n.id for n in ast.walk(ast.Module(function.body, []))
                                   if isinstance(n, ast.Name))]  # fmt: skip
    return [n for n in dict.fromkeys(seen) if n in names]


def define(name: str, arguments: List[str], body: List[ast.stmt]) -> ast.FunctionDef:
    function = statements(f"def {name}({', '.join(arguments)}):\n    pass")[0]
    function.body = body
    return function


def has(nodes, *kinds) -> bool:
    return any(isinstance(n, kinds) for node in nodes for n in ast.walk(node))


class Each(ast.NodeTransformer):
    """Replaces nodes of a kind by what a function makes of them; None leaves one."""

    def __init__(self, kind, change, limit: int = 10**6):
        self.kind, self.change, self.limit, self.count = kind, change, limit, 0

    def visit(self, node):
        self.generic_visit(node)
        if isinstance(node, self.kind) and self.count < self.limit:
            new = self.change(node)
            if new is not None:
                self.count += 1
                return new
        return node

    def visit_arg(self, node):
        return node

    def statements(self, function) -> None:
        """Of a function, but not its arguments and decorators."""
        function.body = self.visit(ast.Module(function.body, [])).body


def each(unit: Unit, kind, change, limit=10**6, methods=None) -> None:
    """Changes nodes of all methods but __init__; raises Inapplicable where there is none."""
    count = 0
    for method in methods or unit.methods():
        if method.name in ("__init__", "extra_repr"):
            continue
        worker = Each(kind, change, limit - count)
        worker.statements(method)
        count += worker.count
    for function in () if methods else unit.before:
        if isinstance(function, ast.FunctionDef) and getattr(function, "helper", False):
            worker = Each(kind, change, limit - count)
            worker.statements(function)
            count += worker.count
    need(count)


def need(condition) -> None:
    if not condition:
        raise Inapplicable


def call_parts(node: ast.Call):
    """("torch", name) or ("method", name) of a call."""
    if isinstance(node.func, ast.Attribute):
        path = ast.unparse(node.func.value)
        if path in ("torch", "F", "nn.functional", "torch.nn.functional"):
            return path, node.func.attr
        if is_tensor(node.func.value):
            return "method", node.func.attr
    return None, None


def substitute(node, name: str, value: ast.expr):
    def change(found):
        if found.id == name and isinstance(found.ctx, ast.Load):
            return copy.deepcopy(value)
        return None

    return Each(ast.Name, change).visit(node)


def rename(function, names: dict) -> None:
    """Renames locals and arguments of a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in names:
            node.id = names[node.id]
    for argument in every_argument(function):
        argument.arg = names.get(argument.arg, argument.arg)


def call_of(function: str, names: List[str], first: Optional[str] = None) -> ast.Call:
    return expression(f"{function}({', '.join([*([first] if first else []), *names])})")


# ---------------------------------------------------------------------------- arguments

NEW = {
    "x": "hidden", "hidden_states": "inputs", "position_embeddings": "rotary",
    "attention_mask": "mask", "past_key_values": "cache", "cache_params": "cache",
    "position_ids": "positions", "use_cache": "caching", "top_k_index": "chosen",
    "top_k_weights": "scores",
}  # fmt: skip


@refactor
def copied(unit):
    """As it is, in a file of its own."""


def rename_arguments(unit, names: dict) -> dict:
    mine = names_of(unit.forward)[1:]
    names = {old: new for old, new in names.items() if old in mine}
    need(names and not set(names.values()) & local_names(unit.forward))
    rename(unit.forward, names)
    unit.arguments.update(names)
    return names


@refactor
def arguments_renamed(unit):
    rename_arguments(unit, NEW)


RENAMED = """
def renamed_argument(old, new):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)
        return wrapper
    return decorate
"""


def cache_renamed(decorator: str, before: str = ""):
    """The cache has another name, and a decorator translates the old one."""

    def change(unit):
        names = rename_arguments(unit, {"past_key_values": "cache", "cache_params": "cache"})
        unit.before += statements(before)
        for old, new in names.items():
            unit.forward.decorator_list.insert(0, expression(decorator.format(old, new)))
        unit.calls_old.append({new: old for old, new in names.items()})

    return change


cache_renamed_deprecated = refactor(  # as transformers 5.24 does it
    cache_renamed('deprecate_kwarg("{}", version="99.0", new_name="{}")'),
    name="cache_renamed_deprecated", kinds=WITH_CACHE,
)  # fmt: skip
cache_renamed_own_decorator = refactor(
    cache_renamed("renamed_argument('{}', '{}')", RENAMED),
    name="cache_renamed_own_decorator", kinds=WITH_CACHE,
)  # fmt: skip


def optional(unit) -> None:
    """Every argument but self and the first has a default."""
    a = unit.forward.args
    wanted = max(len(a.args) - 2, 0)
    a.defaults = [ast.Constant(None)] * (wanted - len(a.defaults)) + a.defaults
    a.defaults = a.defaults[-wanted:] if wanted else []


@refactor
def arguments_reordered(unit):
    a = unit.forward.args
    need(len(a.args) > 3)
    optional(unit)
    a.args[2:], a.defaults = a.args[:1:-1], a.defaults[::-1]
    unit.by_keyword = True


@refactor(kinds=WITH_CACHE)
def hidden_states_last(unit):
    a = unit.forward.args
    need(len(a.args) > 2)
    optional(unit)
    a.args[1:] = [*a.args[2:], a.args[1]]
    a.defaults = [*a.defaults, ast.Constant(None)]
    unit.by_keyword = True


@refactor
def keyword_only(unit):
    a = unit.forward.args
    need(len(a.args) > 2)
    optional(unit)
    a.kwonlyargs, a.kw_defaults = a.args[2:], a.defaults
    a.args, a.defaults = a.args[:2], []
    unit.by_keyword = True


def add_argument(unit, name: str, default: str, keyword_only=False) -> None:
    a = unit.forward.args
    if keyword_only:
        a.kwonlyargs.append(ast.arg(name))
        a.kw_defaults.append(expression(default))
    else:
        if len(a.args) - len(a.defaults) > 2 or (len(a.args) > 2 and not a.defaults):
            optional(unit)
        a.args.append(ast.arg(name))
        a.defaults.append(expression(default))


@refactor
def new_ignored_arguments(unit):
    add_argument(unit, "layer_head_mask", "None")
    add_argument(unit, "cache_position", "None", True)


def with_argument(name: str, default: str, text: str, keyword_only=False):
    """A new argument, and what is done with it first."""

    def change(unit):
        add_argument(unit, name, default, keyword_only)
        put_first(unit, text)

    return change


refactor(with_argument("scale_by", "None", "if scale_by is not None:\n    _x_ = _x_ * scale_by"),
         name="new_argument_behind_a_branch")  # fmt: skip
refactor(with_argument("upcast", "False", "if upcast:\n    _x_ = _x_.to(torch.float32)", True),
         name="new_flag_behind_a_branch")  # fmt: skip


@refactor
def kwargs_added(unit):
    need(unit.forward.args.kwarg is None)
    unit.forward.args.kwarg = ast.arg("kwargs")


@refactor
def args_and_kwargs_added(unit):
    need(unit.forward.args.kwarg is None and unit.forward.args.vararg is None)
    unit.forward.args.vararg, unit.forward.args.kwarg = ast.arg("args"), ast.arg("kwargs")


@refactor
def positional_only(unit):
    a = unit.forward.args
    call = unit.subject.calls[0][0]
    need(call.positional >= 1)
    a.posonlyargs, a.args = a.args[:2], a.args[2:]


def from_kwargs(unit, names) -> None:
    """An argument is taken out of kwargs."""
    a = unit.forward.args
    mine = [x.arg for x in a.args]
    name = next(n for n in names if n in mine)
    at = mine.index(name)
    need(at > 1 and a.kwarg is not None)
    optional(unit)
    default = ast.unparse(a.defaults.pop(at - 2))
    a.args.pop(at)
    put_first(unit, f"{name} = _kwargs_.pop('{name}', {default})")
    unit.by_keyword = True


for _name, _words in {
    "mask": ("attention_mask",), "tables": ("position_embeddings",),
    "cache": ("past_key_values", "cache_params"),
}.items():  # fmt: skip
    refactor(lambda u, words=_words: from_kwargs(u, words), name=f"{_name}_popped_from_kwargs",
             kinds=WITH_CACHE)  # fmt: skip


@refactor(kinds=("layer",))
def handed_on_in_kwargs(unit):
    """Arguments that only travel on are left in kwargs."""
    a, dropped = unit.forward.args, []
    need(a.kwarg is not None)
    optional(unit)
    for name in ("position_ids", "use_cache"):
        if name in [x.arg for x in a.args]:
            at = [x.arg for x in a.args].index(name)
            a.args.pop(at)
            a.defaults.pop(at - 2)
            dropped.append(name)
    need(dropped)
    for node in ast.walk(ast.Module(unit.forward.body, [])):
        if isinstance(node, ast.Call):
            node.keywords = [k for k in node.keywords if k.arg not in dropped]
    unit.by_keyword = True


# ---------------------------------------------------------------------------- locals and parts


@refactor
def locals_renamed(unit):
    names = writes(unit.forward.body) - set(names_of(unit.forward))
    names = {n: n + "_out" for n in sorted(names)}
    need(names)
    rename(unit.forward, names)


@refactor
def self_renamed(unit):
    rename(unit.forward, {"self": "module"})


PARTS = {
    "q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj", "o_proj": "output_proj",
    "q_norm": "query_norm", "k_norm": "key_norm", "gate_proj": "w1", "up_proj": "w3",
    "down_proj": "w2", "gate_up_proj": "w13", "act_fn": "activation_function", "w1": "gate_linear",
    "w2": "down_linear", "w3": "up_linear", "self_attn": "attention", "linear_attn": "mixer",
    "mlp": "feed_forward", "feed_forward": "mlp", "input_layernorm": "norm1", "eps": "epsilon",
    "post_attention_layernorm": "norm2", "weight": "scale", "variance_epsilon": "eps",
    "in_proj_qkv": "qkv_proj", "in_proj_z": "z_proj", "in_proj_b": "b_proj", "in_proj_a": "a_proj",
    "in_proj_qkvz": "qkvz_proj", "in_proj_ba": "ba_proj", "norm": "out_norm", "o_norm": "out_norm",
    "out_proj": "o_proj", "qkv_proj": "wqkv", "gate": "router", "experts": "routed_experts",
    "shared_expert": "shared_mlp", "shared_expert_gate": "shared_gate", "top_k": "num_selected",
    "norm_topk_prob": "renormalize", "hidden_dim": "width", "num_experts": "expert_count",
    "e_score_correction_bias": "correction", "activation_fn": "act", "q_layernorm": "norm_q",
    "k_layernorm": "norm_k", "operator_norm": "pre_norm", "ffn_norm": "post_norm",
    "a_proj": "decay_proj", "b_proj": "beta_proj", "g_proj": "z_proj",
}  # fmt: skip


def rename_attributes(unit, names: dict) -> None:
    """In all of the class: `self.old` and what decorators name."""
    count = 0
    for node in ast.walk(unit.cls):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "self" and node.attr in names:
                node.attr, count = names[node.attr], count + 1
    for function in unit.methods():
        for decorator in function.decorator_list:
            for node in ast.walk(decorator):
                if isinstance(node, ast.Constant) and node.value in names:
                    node.value = names[node.value]
    need(count)
    unit.attributes.update(names)


@refactor
def parts_renamed(unit):
    need(unit.subject.kind != "experts")  # transformers' other implementations read their names
    module = unit.subject.module
    mine = {*module._modules, *module._parameters, *module._buffers}
    rename_attributes(unit, {n: PARTS.get(n, n + "_part") for n in sorted(mine)})


@refactor
def one_part_renamed(unit):
    need(unit.subject.kind != "experts")
    module = unit.subject.module
    name = next(iter([*module._modules, *module._parameters]), None)
    need(name)
    rename_attributes(unit, {name: PARTS.get(name, name + "_part")})


@refactor(kinds=("norm", "router", "gdn", "kda", "mlp", "layer"))
def values_renamed(unit):
    """Attributes that are numbers and flags."""
    module = unit.subject.module
    need(unit.subject.kind != "layer")
    own = [n for n, v in vars(module).items() if isinstance(v, (int, float))
           and n not in ("training", "layer_idx") and not n.startswith("_")]  # fmt: skip
    need(own)
    rename_attributes(unit, {n: PARTS.get(n, n + "_value") for n in own})


# ---------------------------------------------------------------------------- decorators

PASSED_ON = "return function(*args, **kwargs)"
OF_SELF = PASSED_ON.replace("(*", "(self, *")
LOGS = "logger = transformers_logging.get_logger(__name__)\n"
WRAPPER = """
def traced(function):
    @functools.wraps(function)
    def wrapper({arguments}):
{body}
    return wrapper
"""


def wrapper(body: str, arguments: str = "*args, **kwargs") -> str:
    return WRAPPER.format(arguments=arguments, body=indent(body, " " * 8))


WRAPPERS = {
    "pass_through": wrapper(PASSED_ON),
    "pass_through_with_self":
        wrapper(f"outputs = {OF_SELF[7:]}\nreturn outputs", "self, *args, **kwargs"),
    "pass_through_that_logs": LOGS + wrapper("logger.debug('called')\n" + PASSED_ON),
    "pass_through_with_options":
        "def traced(name=None, enabled=True):\n"
        + indent(wrapper(OF_SELF, "self, *args, **kwargs").replace("traced", "decorate"), " " * 4)
        + "    return decorate",
    "drops_an_unknown_word": wrapper("kwargs.pop('output_router_logits', None)\n" + PASSED_ON),
    "wrapper_with_a_context": wrapper(
        "with torch.profiler.record_function('forward'):\n    " + OF_SELF,
        "self, *args, **kwargs"),
    "wrapper_that_times": "import time\n" + LOGS + wrapper(
        "start = time.perf_counter()\n" + PASSED_ON.replace("return", "result =")
        + "\nlogger.debug('took %s', time.perf_counter() - start)\nreturn result"),
    "wrapped_after_the_class": """
def traced(cls):
    original_forward = cls.forward
    @functools.wraps(original_forward)
    def forward(self, *args, **kwargs):
        return original_forward(self, *args, **kwargs)
    cls.forward = forward
    return cls
""",
    "identity_decorator":
        "def traced(function):\n    function.is_traced = True\n    return function",
}  # fmt: skip


def traced(unit, text: str) -> None:
    """A decorator `traced` of the forward, or of the class."""
    unit.before += statements(text)
    owner = unit.cls if "def traced(cls)" in text else unit.forward
    decorator = "traced(name='forward')" if "def decorate" in text else "traced"
    owner.decorator_list.insert(0, expression(decorator))


for _name, _text in WRAPPERS.items():
    refactor(lambda u, text=_text: traced(u, text), name=_name)


@refactor
def two_decorators(unit):
    traced(unit, WRAPPERS["pass_through"])
    unit.before += statements(WRAPPERS["identity_decorator"].replace("traced", "marked"))
    unit.forward.decorator_list.append(expression("marked"))


# ---------------------------------------------------------------------------- helpers


def helper(unit, name, arguments, body, how):
    """A helper with a body, as a method or a function of the module; the name to call it by."""
    mine = has(body, ast.Name) and "self" in reads(body)
    if how == "method":
        unit.cls.body.append(define(name, ["self", *arguments], body))
        return f"self.{name}", None
    if how == "static" and not mine:
        function = define(name, arguments, body)
        function.decorator_list.append(expression("staticmethod"))
        unit.cls.body.append(function)
        return f"self.{name}", None
    need(how == "function")
    function = define(name.strip("_"), ["module"] * mine + arguments, body)
    rename(function, {"self": "module"})
    function.helper = True
    unit.before.append(function)
    return name.strip("_"), "self" if mine else None


def span(unit, start: float, end: float, how: str):
    """Statements of the forward from and to a share of them become a helper."""
    forward = unit.forward
    body = body_of(forward)
    i, j = round(len(body) * start), round(len(body) * end)
    part, rest = body[i:j], body[j:]
    need(part and not has(part, ast.Return) and len(part) < len(body))
    known = set(names_of(forward)) | writes(body[:i])
    arguments = in_order((reads(part) & known) - {"self"}, forward)
    results = in_order(writes(part) & reads(rest), forward)
    need(results)
    names = ", ".join(results)
    part = part + statements(f"return {names}")
    called, first = helper(unit, "_part_of_forward", arguments, part, how)
    call = statements(f"{names} = x")[0]
    call.value = call_of(called, arguments, first)
    forward.body = body[:i] + [call] + rest


def tail(unit, share: float, how: str):
    forward = unit.forward
    body = body_of(forward)
    i = round(len(body) * share)
    part = body[i:]
    need(part and i > 0 and has(part[-1:], ast.Return) and not has(body[:i], ast.Return))
    known = set(names_of(forward)) | writes(body[:i])
    arguments = in_order((reads(part) & known) - {"self"}, forward)
    called, first = helper(unit, "_finish", arguments, part, how)
    forward.body = body[:i] + [ast.Return(call_of(called, arguments, first))]


def _register_extractions():
    for how in ("method", "function"):
        for label, i, j in (("head", 0, 0.35), ("first_half", 0, 0.5), ("middle", 0.3, 0.7),
                            ("late", 0.5, 0.85)):  # fmt: skip
            refactor(lambda u, i=i, j=j, how=how: span(u, i, j, how), name=f"{label}_to_{how}")
        for label, i in (("tail", 0.7), ("second_half", 0.5)):
            refactor(lambda u, i=i, how=how: tail(u, i, how), name=f"{label}_to_{how}")
        refactor(lambda u, how=how: whole(u, how), name=f"whole_body_to_{how}")
        refactor(lambda u, how=how: one_expression(u, how, 0), name=f"expression_to_{how}")
        refactor(lambda u, how=how: one_expression(u, how, -1), name=f"last_expression_to_{how}")
    refactor(lambda u: one_expression(u, "static", 0), name="expression_to_staticmethod")


def whole(unit, how: str):
    forward = unit.forward
    body = body_of(forward)
    names = names_of(forward)[1:]
    called, first = helper(unit, "_forward_impl", names, body, how)
    forward.body = [ast.Return(call_of(called, names, first))]


def one_expression(unit, how: str, which: int):
    """A value of the forward that is a tensor becomes a call of a helper."""
    forward = unit.forward
    locals_ = local_names(forward)
    found = [
        n for s in body_of(forward) for n in ast.walk(s)
        if isinstance(n, (ast.BinOp, ast.Call)) and is_tensor(n)
        and len(list(ast.walk(n))) > 5 and not has([n], ast.Starred)
        and (how != "static" or "self" not in reads([n]))
    ]  # fmt: skip
    need(found)
    node = found[which]
    arguments = in_order((reads([node]) & locals_) - {"self"}, forward)
    body = [ast.Return(copy.deepcopy(node))]
    called, first = helper(unit, "_value_of", arguments, body, how)
    new = call_of(called, arguments, first)
    each(unit, type(node), lambda n: like(new, node) if n is node else None, 1, [forward])


_register_extractions()


def calling_super(forward) -> ast.FunctionDef:
    """A forward with the same arguments that calls super()'s."""
    function, a = copy.deepcopy(forward), forward.args
    function.decorator_list = []
    words = names_of(forward)[1 : len(a.posonlyargs + a.args)]
    words += [f"{x.arg}={x.arg}" for x in a.kwonlyargs]
    words += [f"**{a.kwarg.arg}"] if a.kwarg else []
    function.body = statements(f"return super().forward({', '.join(words)})")
    return function


@refactor
def forward_of_a_base(unit):
    """The class becomes a base, and a class of its name has nothing of its own."""
    name, base = unit.cls.name, unit.cls
    base.name = f"{name}Base"
    decorators, base.decorator_list = base.decorator_list, []
    unit.before.append(base)
    unit.cls = statements(f"class {name}({base.name}):\n    pass")[0]
    unit.cls.decorator_list = decorators


@refactor
def super_forward(unit):
    """The class becomes a base, and a class of its name calls the base's forward."""
    forward = unit.forward
    forward_of_a_base(unit)
    unit.cls.body = [calling_super(forward)]
    for node in ast.walk(unit.before[-1]):  # super(Old, self) stays right
        need(not (isinstance(node, ast.Name) and node.id == unit.cls.name))


@refactor
def subclass_of_the_original(unit):
    need(unit.subject.kind != "experts")
    name, forward = unit.cls.name, calling_super(unit.forward)
    unit.cls = statements(f"class {name}(Base{name}):\n    pass")[0]
    unit.cls.body = [forward]


@refactor
def helper_of_a_mixin(unit):
    one_expression(unit, "method", 0)
    method = unit.cls.body.pop()
    mixin = ast.parse(f"class {unit.cls.name}Mixin:\n    pass").body[0]
    mixin.body = [method]
    unit.before.append(mixin)
    unit.cls.bases.insert(0, load(mixin.name))


@refactor
def nested_function(unit):
    """A function inside of the forward."""
    forward = unit.forward
    one_expression(unit, "method", 0)
    method = unit.cls.body.pop()
    method.args.args.pop(0)
    method.name = "compute"
    for node in ast.walk(ast.Module(forward.body, [])):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._value_of":
            node.func = load("compute")
    forward.body = [method, *body_of(forward)]


def function_of(unit, name: str) -> ast.FunctionDef:
    """A function of the original's module."""
    for node in unit.subject.file.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return copy.deepcopy(node)
    raise Inapplicable


def called_functions(nodes, unit) -> List[str]:
    mine = {n.name for n in unit.subject.file.body if isinstance(n, ast.FunctionDef)}
    used = [n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)]
    return [n for n in dict.fromkeys(used) if n in mine]


@refactor
def helpers_copied(unit):
    """The functions that it calls are in its own file, too."""
    todo, done = called_functions(unit.methods(), unit), {}
    need(todo)
    while todo:
        name = todo.pop()
        if name not in done:
            done[name] = function_of(unit, name)
            todo += called_functions([ast.Module(done[name].body, [])], unit)
    order = [n.name for n in unit.subject.file.body if getattr(n, "name", None) in done]
    unit.before += [done[name] for name in order]


def inline(unit, name: str, function: ast.FunctionDef, method: bool) -> int:
    """Calls of a straight helper in assignments of the forward become its statements."""
    forward, count = unit.forward, 0
    body = body_of(function)
    need(isinstance(body[-1], ast.Return) and not has(body[:-1], ast.Return))
    new = []
    for statement in body_of(forward):
        calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call)
                 and ast.unparse(n.func) == (f"self.{name}" if method else name)]  # fmt: skip
        if not isinstance(statement, (ast.Assign, ast.Return)) or len(calls) != 1:
            new.append(statement)
            continue
        count += 1
        copied_ = copy.deepcopy(function)
        prefix = name.strip("_")[:12]
        names = {n: f"{prefix}_{n}" for n in local_names(copied_) - {"self"}}
        rename(copied_, names)
        arguments = copied_.args.args[1:] if method else copied_.args.args
        values = dict(zip([a.arg for a in arguments][::-1], copied_.args.defaults[::-1]))
        values.update(zip([a.arg for a in arguments], calls[0].args))
        values.update({names[k.arg]: k.value for k in calls[0].keywords})
        for a in arguments:
            assign = statements(f"{a.arg} = 0")[0]
            assign.value = copy.deepcopy(values[a.arg])
            new.append(assign)
        inner = body_of(copied_)
        new += inner[:-1]
        result = inner[-1].value
        new.append(Each(ast.Call, lambda n: result if n is calls[0] else None).visit(statement))  # noqa: B023
    forward.body = new
    return count


@refactor
def functions_inlined(unit):
    count = 0
    for name in called_functions([unit.forward], unit):
        function = function_of(unit, name)
        body = body_of(function)
        straight = isinstance(body[-1], ast.Return) and not has(body[:-1], ast.Return, ast.For)
        if straight and len(body) < 14 and not name.endswith("attention_forward"):
            if name.startswith(("torch_", "causal_")):
                continue
            count += inline(unit, name, function, False)
    need(count)


@refactor
def methods_inlined(unit):
    names = [m.name for m in unit.methods() if m.name not in ("__init__", "forward", "extra_repr")]
    need(names)
    count = sum(inline(unit, name, unit.method(name), True) for name in names)
    need(count)
    unit.cls.body = [n for n in unit.cls.body if getattr(n, "name", None) not in names]


# ---------------------------------------------------------------------------- order


def pure(statement) -> bool:
    if not isinstance(statement, ast.Assign):
        return False
    for node in ast.walk(statement.value):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("update", "pop") or node.func.attr.startswith("update_"):
                return False
        if isinstance(node, ast.Call) and any(k.arg is None for k in node.keywords):
            return False
    return all(isinstance(t, (ast.Name, ast.Tuple)) for t in statement.targets)


def independent(a, b) -> bool:
    return not (writes([a]) & (reads([b]) | writes([b])) or reads([a]) & writes([b]))


def pairs(unit, make) -> None:
    """Neighbours that do not depend on one another become make(a, b), where that is not None."""
    body, new, count = list(body_of(unit.forward)), [], 0
    while body:
        a = body.pop(0)
        made = None
        if body and pure(a) and pure(body[0]) and independent(a, body[0]):
            made = make(a, body[0])
        if made is not None:
            body.pop(0)
            count += 1
        new += made or [a]
    need(count)
    unit.forward.body = new


@refactor
def statements_reordered(unit):
    pairs(unit, lambda a, b: [b, a])


@refactor
def assigned_in_pairs(unit):
    def make(a, b):
        if not all(isinstance(s.targets[0], ast.Name) for s in (a, b)):
            return None
        target = ast.Tuple([a.targets[0], b.targets[0]], ast.Store())
        return [ast.Assign([target], ast.Tuple([a.value, b.value], ast.Load()))]

    pairs(unit, make)


# ---------------------------------------------------------------------------- spelling

OPERATORS = {ast.Add: ("add", "+"), ast.Mult: ("mul", "*"), ast.Sub: ("sub", "-"),
             ast.Div: ("truediv", "/")}  # fmt: skip


def operators_by(name: str, text: str, count=4, before: str = ""):
    """Sums, products and so on of tensors in another spelling."""

    def apply(unit):
        unit.before += statements(before)

        def change(node):
            known = type(node.op) in list(OPERATORS)[:count] and is_tensor(node)
            if not known or not (count == 2 or is_tensor(node.left)):
                return None
            word, sign = OPERATORS[type(node.op)]
            word = word if before else word.replace("true", "")
            new, sides = expression(text.format(word, sign)), {"a": node.left, "b": node.right}
            return like(Each(ast.Name, lambda n: sides.get(n.id)).visit(new), node)

        each(unit, ast.BinOp, change)

    refactor(apply, name=name)


operators_by("operands_swapped", "b {1} a", 2)
operators_by("operators_as_functions", "torch.{0}(a, b)")
operators_by("operators_as_methods", "a.{0}(b)")
operators_by("operators_of_the_operator_module", "operator.{0}(a, b)", before="import operator")
FUNCTIONS = (
    "transpose", "pow", "mean", "reshape", "sigmoid", "chunk", "softmax", "unsqueeze", "squeeze",
    "sum", "exp", "permute", "topk", "gather", "masked_fill", "split", "repeat_interleave",
)  # fmt: skip


@refactor
def methods_as_functions(unit):
    def change(node):
        home, name = call_parts(node)
        if home != "method" or name not in FUNCTIONS:
            return None
        arguments = node.args
        if name in ("reshape", "permute") and not (len(node.args) == 1):
            arguments = [ast.Tuple(node.args, ast.Load())]
        func = expression(f"torch.{name}")
        return like(ast.Call(func, [node.func.value, *arguments], node.keywords), node)

    each(unit, ast.Call, change)


@refactor
def functions_as_methods(unit):
    def change(node):
        home, name = call_parts(node)
        if home not in ("torch", "nn.functional", "F", "torch.nn.functional"):
            return None
        if (
            name not in (*FUNCTIONS, "rsqrt", "sqrt")
            or not node.args
            or not is_tensor(node.args[0])
        ):
            return None
        if name == "softmax" and any(k.arg is None for k in node.keywords):
            return None
        func = ast.Attribute(node.args[0], name, ast.Load())
        return like(ast.Call(func, node.args[1:], node.keywords), node)

    each(unit, ast.Call, change)


def respell(name: str, change) -> None:
    """Calls of tensors' methods: change(node, receiver, its text) gives the source of another."""

    def apply(unit):
        def one(node):
            home, method = call_parts(node)
            if home != "method":
                return None
            text = change(method, node, lambda: [ast.unparse(a) for a in node.args])
            if text is None:
                return None
            new = expression(text)
            new = substitute(new, "_x_", node.func.value)
            return like(new, node)

        each(unit, ast.Call, one)

    refactor(apply, name=name)


def _args(node) -> str:
    words = [f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords]
    return ", ".join([*(ast.unparse(a) for a in node.args), *words])


def _register_spellings():
    def swap(old, new):
        return lambda m, n, _: f"_x_.{new}({_args(n)})" if m == old else None

    respell("swapaxes_for_transpose", swap("transpose", "swapaxes"))
    respell("swapdims_for_transpose", swap("transpose", "swapdims"))
    respell("reshape_for_view", swap("view", "reshape"))
    respell("type_for_to", lambda m, n, _: f"_x_.type({_args(n)})"
            if m == "to" and len(n.args) == 1 and not n.keywords else None)  # fmt: skip
    respell("to_for_float", lambda m, n, _: "_x_.to(torch.float32)" if m == "float" else None)
    respell("float_for_to", lambda m, n, _: "_x_.float()"
            if m == "to" and _args(n) == "torch.float32" else None)  # fmt: skip
    respell("to_dtype_for_type_as", lambda m, n, _: f"_x_.to({_args(n)}.dtype)"
            if m == "type_as" else None)  # fmt: skip
    respell("square_for_pow", lambda m, n, _: "_x_.square()"
            if m == "pow" and _args(n) == "2" else None)  # fmt: skip
    respell("product_for_pow", lambda m, n, _: "_x_ * _x_"
            if m == "pow" and _args(n) == "2" else None)  # fmt: skip
    respell("power_operator_for_pow", lambda m, n, _: "_x_ ** 2"
            if m == "pow" and _args(n) == "2" else None)  # fmt: skip
    respell("dim_by_keyword", lambda m, n, _: f"_x_.{m}(dim={_args(n)})"
            if m in ("mean", "sum", "softmax", "unsqueeze") and len(n.args) == 1
            else None)  # fmt: skip
    respell("flatten_for_reshape", lambda m, n, t: "_x_.flatten(-2)"
            if m == "reshape" and t()[-1:] == ["-1"] and "*input_shape" in t()[:1]
            else None)  # fmt: skip
    respell("contiguous_left_out", lambda m, n, _: "_x_" if m == "contiguous" else None)
    respell("contiguous_added", lambda m, n, _: f"_x_.reshape({_args(n)}).contiguous()"
            if m == "reshape" else None)  # fmt: skip
    respell("permute_for_transpose", lambda m, n, _: "_x_.permute(0, 2, 1, 3)"
            if m == "transpose" and _args(n) == "1, 2" else None)  # fmt: skip
    respell("mT_for_transpose", lambda m, n, _: "_x_.mT"
            if m == "transpose" and _args(n) in ("-1, -2", "-2, -1") else None)  # fmt: skip
    respell("narrower_chunk", lambda m, n, _: "_x_.tensor_split(2, dim=-1)"
            if m == "chunk" else None)  # fmt: skip
    respell("negative_dims", lambda m, n, _: "_x_.transpose(-3, -2)"
            if m == "transpose" and _args(n) == "1, 2" else None)  # fmt: skip


_register_spellings()


ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu",
               "PytorchGELUTanh": "gelu"}  # fmt: skip
SPELLINGS = {
    "activation_as_function":
        {"silu": "F.silu(_x_)", "gelu": "F.gelu(_x_, approximate='tanh')"},
    "silu_as_a_module": {"silu": "nn.SiLU()(_x_)"},
    "silu_as_a_product": {"silu": "_x_ * torch.sigmoid(_x_)"},
    "silu_by_a_method": {"silu": "torch.nn.functional.silu(input=_x_)"},
}  # fmt: skip


def activation_as(unit, texts: dict) -> None:
    """Calls of the part that is the activation in another spelling."""
    module = unit.subject.module
    part = next((n for n in ("act_fn", "activation_fn") if hasattr(module, n)), "")
    text = texts.get(ACTIVATIONS.get(type(getattr(module, part, None)).__name__))
    need(text)

    def change(node):
        if ast.unparse(node.func) == f"self.{part}":
            return like(substitute(expression(text), "_x_", node.args[0]), node)
        return None

    each(unit, ast.Call, change)


for _name, _texts in SPELLINGS.items():
    refactor(lambda u, texts=_texts: activation_as(u, texts), name=_name, kinds=("mlp", "experts"))


# what is not always computed, or not once
LAZY = (ast.IfExp, ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.BoolOp)


@refactor
def temporaries(unit):
    """Each call in another's arguments gets a name first."""
    made, body = [0], []

    def hoist(node, out):
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and field not in ("func",):
                setattr(node, field, one(value, out))
            elif isinstance(value, list) and value and isinstance(value[0], ast.expr):
                setattr(node, field, [one(v, out) for v in value])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node.func.value = one(node.func.value, out)
        return node

    def one(node, out):
        if isinstance(node, LAZY):
            return node
        hoist(node, out)
        if isinstance(node, (ast.Call, ast.BinOp)) and is_tensor(node):
            made[0] += 1
            name = f"step_{made[0]}"
            assign = statements(f"{name} = 0")[0]
            assign.value = node
            out.append(assign)
            return like(load(name), node)
        return node

    for statement in body_of(unit.forward):
        value = getattr(statement, "value", None)
        if isinstance(statement, (ast.Assign, ast.Return)) and isinstance(value, ast.expr):
            if not isinstance(value, LAZY):
                hoist(value, body)
        body.append(statement)
    need(made[0])
    unit.forward.body = body


@refactor
def temporaries_inlined(unit):
    """A value that is read once, by the next statement, stands there itself."""
    body, count, i = list(body_of(unit.forward)), 0, 0
    while i + 1 < len(body):
        a, b = body[i : i + 2]
        simple = isinstance(a, ast.Assign) and len(a.targets) == 1
        if (
            simple
            and isinstance(a.targets[0], ast.Name)
            and isinstance(b, (ast.Assign, ast.Return))
        ):
            name = a.targets[0].id
            times = sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(b.value))
            later = name in reads(body[i + 2 :]) and name not in writes([b])
            if times == 1 and not later and not has([b.value], ast.GeneratorExp):
                body[i + 1] = substitute(b, name, a.value)
                body.pop(i)
                count += 1
                continue
        i += 1
    need(count)
    unit.forward.body = body


@refactor
def annotated(unit):
    def change(node):
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            if is_tensor(node.value):
                return ast.AnnAssign(node.targets[0], expression("torch.Tensor"), node.value, 1)
        return None

    each(unit, ast.Assign, change)


@refactor
def without_annotations(unit):
    for argument in every_argument(unit.forward):
        argument.annotation = None
    unit.forward.returns = None
    for method in unit.methods():
        method.body = [
            ast.Assign([s.target], s.value) if isinstance(s, ast.AnnAssign) and s.value else s
            for s in method.body
        ]


@refactor
def unpacked_by_index(unit):
    def change(node):
        target = node.targets[0]
        if not (
            isinstance(target, ast.Tuple) and all(isinstance(t, ast.Name) for t in target.elts)
        ):
            return None
        if isinstance(node.value, ast.Tuple):
            return None
        first = statements("unpacked = 0")[0]
        first.value = node.value
        rest = [statements(f"{t.id} = unpacked[{i}]")[0] for i, t in enumerate(target.elts)]
        return [first, *rest]

    each(unit, ast.Assign, change)


@refactor
def walrus(unit):
    """The first value is named where it is used."""
    body = list(body_of(unit.forward))
    for i, (a, b) in enumerate(zip(body, body[1:])):
        simple = isinstance(a, ast.Assign) and isinstance(a.targets[0], ast.Name)
        if simple and isinstance(b, (ast.Assign, ast.Return)):
            name = a.targets[0].id
            found = [n for n in ast.walk(b.value) if isinstance(n, ast.Name) and n.id == name]
            if len(found) == 1 and not has([b.value], ast.GeneratorExp, ast.IfExp):
                new = ast.NamedExpr(ast.Name(name, ast.Store()), a.value)
                body[i + 1] = Each(ast.Name, lambda n: new if n is found[0] else None).visit(b)  # noqa: B023
                body.pop(i)
                unit.forward.body = body
                return
    raise Inapplicable


@refactor
def named_result(unit):
    need(isinstance(unit.forward.body[-1], ast.Return))
    last = unit.forward.body.pop()
    need(not isinstance(last.value, ast.Name))
    assign = statements("result = 0")[0]
    assign.value = last.value
    unit.forward.body = list(body_of(unit.forward)) + [assign] + statements("return result")


# ------------------------------------------------------- asserts, logs and guards


def put_first(unit, text: str) -> None:
    """Statements about _x_, the first argument, _kwargs_, which the forward must have, and
    _return_, what a forward that does nothing returns."""
    x, kwargs = names_of(unit.forward)[1], unit.forward.args.kwarg
    need(kwargs or "_kwargs_" not in text)
    need("_return_" not in text or unit.subject.kind != "router")
    result = f"return {x}, None" if unit.subject.kind == "attention" else f"return {x}"
    text = text.replace("_kwargs_", kwargs.arg if kwargs else "").replace("_return_", result)
    unit.forward.body = statements(text.replace("_x_", x)) + list(body_of(unit.forward))


def put_in_init(unit, text: str) -> None:
    init = [m for m in unit.methods() if m.name == "__init__"]
    need(init)
    init[0].body += statements(text)


LOGGER = "logger = transformers_logging.get_logger(__name__)"
INIT = {  # attributes that a statement reads
    "verbose": "False", "noise": "0.0", "scaled": "False", "factor": "None", "mode": "'plain'",
    "zero_dropout": "nn.Dropout(0.0)", "no_part": "nn.Identity()",
}  # fmt: skip
BEFORE = {"logger": LOGGER, "typing": "import typing"}  # what it needs of the file
FIRST = {
    "documented": "'Computes the output.'",
    "assert_on_dim": "assert _x_.dim() >= 2",
    "assert_on_size": "assert _x_.shape[-1] > 0, f'no features: {_x_.shape}'",
    "raise_on_dim": "if _x_.dim() < 2:\n    raise ValueError(f'expected tokens, got {_x_.shape}')",
    "raise_on_dtype": "if not _x_.is_floating_point():\n    raise TypeError(f'got {_x_.dtype}')",
    "shape_unpacked_unused": "*batch_dims, features = _x_.shape",
    "logs_the_shape": "logger.debug('forward of %s', tuple(_x_.shape))",
    "logs_once_behind_training": "if self.training:\n    logger.warning_once('in training')",
    "logs_behind_a_flag": "if self.verbose:\n    logger.info('forward')",
    "logs_behind_training_and_a_flag":
        "if self.training and self.verbose:\n    logger.warning_once('noisy')",
    "warns_behind_a_flag": "if self.verbose:\n    warnings.warn('forward')",
    "noise_behind_training_and_a_flag":
        "if self.training and self.noise > 0:\n"
        "    _x_ = _x_ + self.noise * torch.randn_like(_x_)",
    "scaled_behind_a_flag": "if self.scaled:\n    _x_ = _x_ * 2",
    "factor_behind_none": "if self.factor is not None:\n    _x_ = _x_ * self.factor",
    "dropout_behind_training_and_a_flag":
        "if self.training and self.scaled:\n    _x_ = nn.functional.dropout(_x_, 0.5)",
    "clamped_behind_a_flag": "if self.factor:\n    _x_ = _x_.clamp(-self.factor, self.factor)",
}  # fmt: skip


def first(text: str):
    """A refactor of statements that come first, with what they need."""

    def change(unit):
        for word, statement in BEFORE.items():
            if word in text:
                unit.before += statements(statement)
        for name, value in INIT.items():
            if f"self.{name}" in text and "hasattr" not in text:
                put_in_init(unit, f"self.{name} = {value}")
        put_first(unit, text)

    return change


for _name, _text in FIRST.items():
    refactor(first(_text), name=_name)
refactor(first("_kwargs_.pop('output_router_logits', None)"), name="an_unused_word_popped",
         kinds=WITH_CACHE)  # fmt: skip
refactor(first("debug = _kwargs_.get('debug', False)"), name="an_unused_word_read",
         kinds=WITH_CACHE)  # fmt: skip


@refactor
def guard_by_a_class_attribute(unit):
    unit.cls.body.insert(0, statements("rescale = False")[0])
    put_first(unit, "if self.rescale:\n    _x_ = _x_ / 2")


# ---------------------------------------------------------------------------- control


@refactor
def branches_turned(unit):
    """if not: the one, else the other."""

    def change(node):
        if not node.orelse:
            return ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Pass()], node.body)
        return ast.If(ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body)

    each(unit, ast.If, change)


@refactor
def conditional_expressions_as_branches(unit):
    body, count = [], 0
    for statement in body_of(unit.forward):
        found = [n for n in ast.walk(statement) if isinstance(n, ast.IfExp)]
        if isinstance(statement, (ast.Assign, ast.Return)) and len(found) == 1:
            count += 1
            node = found[0]
            branch = statements("if c:\n    chosen = 0\nelse:\n    chosen = 1")[0]
            branch.test = node.test
            branch.body[0].value, branch.orelse[0].value = node.body, node.orelse
            change = Each(ast.IfExp, lambda n: load("chosen") if n is node else None)  # noqa: B023
            body += [branch, change.visit(statement)]
        else:
            body.append(statement)
    need(count)
    unit.forward.body = body


@refactor
def branches_as_conditional_expressions(unit):
    def change(node):
        one = len(node.body) == 1 and isinstance(node.body[0], ast.Assign)
        two = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.Assign)
        if not (one and two):
            return None
        a, b = node.body[0], node.orelse[0]
        if ast.dump(a.targets[0]) != ast.dump(b.targets[0]):
            return None
        return ast.Assign(a.targets, ast.IfExp(node.test, a.value, b.value))

    each(unit, ast.If, change)


@refactor
def useless_else(unit):
    """The rest of a forward in the else of a branch that raises."""
    body = list(body_of(unit.forward))
    x = names_of(unit.forward)[1]
    branch = statements(f"if {x} is None:\n    raise ValueError('no input')\nelse:\n    pass")[0]
    branch.orelse = body
    unit.forward.body = [branch]


# ------------------------------------------------------- attention, cache, layers


def updates(unit):
    found = [n for m in unit.methods() for n in ast.walk(m) if isinstance(n, ast.Call)
             and isinstance(n.func, ast.Attribute) and n.func.attr == "update"]  # fmt: skip
    need(found)
    return found


@refactor(kinds=("attention",))
def kwargs_to_the_cache(unit):
    """As in transformers 5.24."""
    kwargs = unit.forward.args.kwarg
    need(kwargs)
    for call in updates(unit):
        call.keywords.append(ast.keyword("kwargs", load(kwargs.arg)))


@refactor(kinds=("attention",))
def cache_kwargs(unit):
    """As in transformers 4."""
    need({"sin", "cos"} <= local_names(unit.forward))
    for call in updates(unit):
        call.args.append(expression("{'sin': sin, 'cos': cos}"))


@refactor(kinds=("attention",))
def cache_by_keywords(unit):
    for call in updates(unit):
        names = ("key_states", "value_states", "layer_idx")
        call.keywords = [ast.keyword(n, a) for n, a in zip(names, call.args)] + call.keywords
        call.args = []


@refactor(kinds=("attention",))
def cache_updated_at_once(unit):
    """`if cache is not None` as one expression."""

    def change(node):
        if isinstance(node.test, ast.Compare) and len(node.body) == 1 and not node.orelse:
            statement = node.body[0]
            if isinstance(statement, ast.Assign) and "update(" in ast.unparse(statement):
                values = ast.Tuple([load(t.id) for t in statement.targets[0].elts], ast.Load())
                return ast.Assign(statement.targets, ast.IfExp(node.test, statement.value, values))
        return None

    each(unit, ast.If, change)


def attention_calls(unit):
    found = [n for m in unit.methods() for n in ast.walk(m) if isinstance(n, ast.Call)
             and n.args and isinstance(n.args[0], ast.Name) and n.args[0].id == "self"
             and any(k.arg == "scaling" for k in n.keywords)]  # fmt: skip
    need(found)
    return found


@refactor(kinds=("attention",))
def attention_mask_by_keyword(unit):
    for call in attention_calls(unit):
        need(len(call.args) == 5)
        call.keywords.insert(0, ast.keyword("attention_mask", call.args.pop()))


@refactor(kinds=("attention",))
def scaling_computed(unit):
    module = unit.subject.module
    need(abs(module.scaling - module.head_dim**-0.5) < 1e-12)
    for call in attention_calls(unit):
        word = next(k for k in call.keywords if k.arg == "scaling")
        word.value = expression("self.head_dim ** -0.5")


@refactor(kinds=("attention",))
def eager_chosen_by_a_branch(unit):
    """As in transformers 4.48 to 5.0."""
    body = []
    for statement in body_of(unit.forward):
        text = ast.unparse(statement)
        if "get_interface(" in text:
            name = ast.unparse(statement.target if isinstance(statement, ast.AnnAssign)
                               else statement.targets[0])  # fmt: skip
            body += statements(
                f"{name} = eager_attention_forward\n"
                "if self.config._attn_implementation != 'eager':\n"
                f"    {name} = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]"
            )
        else:
            body.append(statement)
    need(len(body) != len(body_of(unit.forward)))
    unit.forward.body = body


@refactor(kinds=("attention",))
def result_by_index(unit):
    """attention_interface(...)[0], where the weights are not read."""
    each(unit, ast.Assign, lambda n: None if "attn_weights" not in ast.unparse(n.targets[0]) else [
        ast.Assign([ast.Name("attn_result", ast.Store())], n.value),
        *statements("attn_output = attn_result[0]\nattn_weights = attn_result[1]"),
    ])  # fmt: skip


@refactor(kinds=("layer",))
def attention_result_by_index(unit):
    def change(node):
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Call):
            index = ast.Subscript(node.value, ast.Constant(0), ast.Load())
            return ast.Assign([target.elts[0]], index)
        return None

    each(unit, ast.Assign, change)


@refactor(kinds=("layer", "attention"))
def keywords_reordered(unit):
    def change(node):
        plain = [k for k in node.keywords if k.arg]
        if len(plain) < 2:
            return None
        node.keywords = plain[::-1] + [k for k in node.keywords if not k.arg]
        return node

    each(unit, ast.Call, change)


@refactor(kinds=("layer", "block", "gdn", "kda"))
def branch_on_a_part(unit):
    """`if self.mlp is not None:` around what is always done."""
    body = list(body_of(unit.forward))
    name = next((n for n in ("mlp", "feed_forward", "experts", "norm", "o_norm")
                 if n in unit.subject.module._modules), None)  # fmt: skip
    need(name)
    for i, statement in enumerate(body):
        if isinstance(statement, ast.Assign) and f"self.{name}(" in ast.unparse(statement):
            branch = statements(f"if self.{name} is not None:\n    pass")[0]
            branch.body = [statement]
            unit.forward.body = [*body[:i], branch, *body[i + 1 :]]
            return
    raise Inapplicable


@refactor(kinds=("block", "router", "experts"))
def tokens_by_flatten(unit):
    """flatten(0, -2) for view(-1, H)."""

    def change(node):
        home, name = call_parts(node)
        if home == "method" and name in ("view", "reshape") and len(node.args) == 2:
            if ast.unparse(node.args[0]) == "-1":
                node.func.attr = "flatten"
                node.args = [ast.Constant(0), expression("-2")]
                return node
        return None

    each(unit, ast.Call, change)


# ---------------------------------------------------------------------------- several at once


def combined(seed: int):
    def change(unit):
        chance = random.Random(f"{unit.subject.name} {seed}")
        names = [n for n, f in REFACTORS.items() if not n.startswith(("several", "copied"))
                 and (f.kinds is None or unit.subject.kind in f.kinds)]  # fmt: skip
        done = []
        for name in chance.sample(names, len(names)):
            trial = {k: v if k == "subject" else copied_tree(v) for k, v in vars(unit).items()}
            try:
                REFACTORS[name](unit)
                done.append(name)
            except (Inapplicable, StopIteration, ValueError, IndexError, AttributeError):
                unit.__dict__.update(trial)
            if len(done) == 2 + seed % 3:
                break
        unit.done = done

    return change


for _seed in range(12):
    refactor(combined(_seed), name=f"several_{_seed}")


def apply(name: str, unit: Unit) -> Unit:
    function = REFACTORS[name]
    need(function.kinds is None or unit.subject.kind in function.kinds)
    function(unit)
    return unit
