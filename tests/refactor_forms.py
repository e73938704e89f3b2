"""Refactors: functions that rewrite the tree of a class (refactor_cases.Unit), so that its modules
should compute the same. One that does not apply to a class raises Inapplicable.

What a forward computes is found by running it, so that its spelling is of no matter: here is what a
run meets another way, one case a kind: decorators, arguments, parts, helpers, conditions, calls.
"""

import ast
import copy
import re
from typing import Callable, Dict, List

from refactor_cases import Unit, rename_members

REFACTORS: Dict[str, Callable] = {}  # by name; `kinds` of each: what it is for, None for all
WITH_CACHE = ("attention", "layer", "gdn", "kda")


class Inapplicable(Exception):
    """The class has nothing that the refactor is about."""


def refactor(function=None, *, kinds=None):
    def keep(function):
        function.kinds = kinds
        REFACTORS[function.__name__] = function
        return function

    return keep if function is None else keep(function)


def need(condition) -> None:
    if not condition:
        raise Inapplicable


# ---------------------------------------------------------------------------- trees


def statements(text: str) -> List[ast.stmt]:
    return ast.parse(text).body


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def every_argument(function) -> List[ast.arg]:
    a = function.args
    more = [x for x in (a.vararg, a.kwarg) if x is not None]
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *more]


def names_of(function) -> List[str]:
    return [a.arg for a in every_argument(function)]


def rename(function, names: dict) -> None:
    """Renames locals and arguments of a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in names:
            node.id = names[node.id]
    for argument in every_argument(function):
        argument.arg = names.get(argument.arg, argument.arg)


def replaced(tree: ast.AST, old: str, new: str) -> None:
    """Every expression of this text becomes another; raises Inapplicable where there is none."""
    count = 0
    for node in list(ast.walk(tree)):
        for field, value in ast.iter_fields(node):
            several = isinstance(value, list)
            for i, one in enumerate(value if several else [value]):
                if isinstance(one, ast.expr) and ast.unparse(one) == old:
                    count += 1
                    if several:
                        value[i] = expression(new)
                    else:
                        setattr(node, field, expression(new))
    need(count)


def respelled(function: ast.FunctionDef, pattern: str, new: str, count: int = 0) -> None:
    """Replaces what a pattern finds in the text of a function, each statement on one line."""
    text, count = re.subn(pattern, new, ast.unparse(function), count=count, flags=re.M)
    need(count)
    made = statements(text)[0]
    function.args, function.body = made.args, made.body


def put_first(unit: Unit, text: str) -> None:
    """Statements about _x_, the first argument, _kwargs_, which the forward must have, and
    _return_, what a forward that does nothing returns."""
    x, kwargs = names_of(unit.forward)[1], unit.forward.args.kwarg
    need(kwargs or "_kwargs_" not in text)
    need("_return_" not in text or unit.subject.kind != "router")
    result = f"return {x}, None" if unit.subject.kind == "attention" else f"return {x}"
    text = text.replace("_kwargs_", kwargs.arg if kwargs else "").replace("_return_", result)
    unit.forward.body[:0] = statements(text.replace("_x_", x))


def has_value(unit: Unit, name: str, value: object) -> None:
    """Modules of the class have an attribute."""
    unit.moves.append(lambda module, space: setattr(module, name, value))


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
    used = {n.id for n in ast.walk(unit.forward) if isinstance(n, ast.Name)}
    need(names and not set(names.values()) & {*used, *mine})
    rename(unit.forward, names)
    unit.arguments.update(names)
    return names


@refactor
def arguments_renamed(unit):
    rename_arguments(unit, NEW)


DEPRECATED = "from transformers.utils.deprecation import deprecate_kwarg"


@refactor(kinds=WITH_CACHE)
def cache_renamed(unit):
    """The cache has another name, and a decorator translates the old one, as in transformers."""
    names = rename_arguments(unit, {"past_key_values": "cache", "cache_params": "cache"})
    unit.before += statements(DEPRECATED)
    for old, new in names.items():
        decorator = f'deprecate_kwarg("{old}", version="99.0", new_name="{new}")'
        unit.forward.decorator_list.insert(0, expression(decorator))
    unit.calls_old.append({new: old for old, new in names.items()})


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


@refactor
def keyword_only(unit):
    a = unit.forward.args
    need(len(a.args) > 2)
    optional(unit)
    a.kwonlyargs, a.kw_defaults = a.args[2:], a.defaults
    a.args, a.defaults = a.args[:2], []
    unit.by_keyword = True


def add_argument(unit, name: str, default: str) -> None:
    a = unit.forward.args
    if len(a.args) - len(a.defaults) > 2 or (len(a.args) > 2 and not a.defaults):
        optional(unit)
    a.args.append(ast.arg(name))
    a.defaults.append(expression(default))


@refactor
def new_argument_behind_a_branch(unit):
    add_argument(unit, "scale_by", "None")
    put_first(unit, "if scale_by is not None:\n    _x_ = _x_ * scale_by")


@refactor(kinds=WITH_CACHE)
def mask_popped_from_kwargs(unit):
    a = unit.forward.args
    mine = [x.arg for x in a.args]
    need("attention_mask" in mine[2:] and a.kwarg is not None)
    at = mine.index("attention_mask")
    optional(unit)
    default = ast.unparse(a.defaults.pop(at - 2))
    a.args.pop(at)
    put_first(unit, f"attention_mask = _kwargs_.pop('attention_mask', {default})")
    unit.by_keyword = True


# ---------------------------------------------------------------------------- parts

PARTS = {
    "q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj", "o_proj": "output_proj",
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "gate_up_proj": "w13",
    "w1": "gate_linear", "w2": "down_linear", "w3": "up_linear", "mlp": "feed_forward",
    "feed_forward": "mlp", "eps": "epsilon", "variance_epsilon": "eps", "norm": "out_norm",
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


# ---------------------------------------------------------------------------- decorators

WRAPPER = """
def traced(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
"""


def traced(unit, text: str) -> None:
    """A decorator `traced` of the forward."""
    unit.before += statements(text)
    unit.forward.decorator_list.insert(0, expression("traced"))


@refactor
def wrapped(unit):
    traced(unit, WRAPPER)


# ---------------------------------------------------------------------------- helpers


def passed_on(function) -> str:
    """The arguments of a function, without self, for a call of another one that has the same."""
    a = function.args
    words = [x.arg for x in [*a.posonlyargs, *a.args][1:]]
    words += [f"{x.arg}={x.arg}" for x in a.kwonlyargs]
    return ", ".join(words + ([f"**{a.kwarg.arg}"] if a.kwarg else []))


@refactor
def whole_body_to_method(unit):
    forward = unit.forward
    inner = ast.FunctionDef("_compute", copy.deepcopy(forward.args), forward.body, [])
    inner.args.defaults, inner.args.kw_defaults = [], [None] * len(forward.args.kwonlyargs)
    unit.cls.body.append(inner)
    forward.body = statements(f"return self._compute({passed_on(forward)})")


@refactor
def super_forward(unit):
    """The class becomes a base, and a class of its name calls the base's forward."""
    name, base, forward = unit.cls.name, unit.cls, copy.deepcopy(unit.forward)
    for node in ast.walk(base):  # super(Old, self) stays right
        need(not (isinstance(node, ast.Name) and node.id == name))
    base.name = f"{name}Base"
    unit.before.append(base)
    unit.cls = statements(f"class {name}({base.name}):\n    pass")[0]
    unit.cls.decorator_list, base.decorator_list = base.decorator_list, []
    forward.decorator_list = []
    forward.body = statements(f"return super().forward({passed_on(forward)})")
    unit.cls.body = [forward]


@refactor
def helpers_copied(unit):
    """The functions that it calls are in its own file, too."""
    mine = {n.name: n for n in unit.subject.file.body if isinstance(n, ast.FunctionDef)}
    todo, done = list(unit.methods()), set()
    while todo:
        names = {n.id for n in ast.walk(todo.pop()) if isinstance(n, ast.Name)}
        new = names.intersection(mine) - done
        done |= new
        todo += [mine[name] for name in new]
    need(done)
    unit.before += [copy.deepcopy(node) for name, node in mine.items() if name in done]


# ---------------------------------------------------------------------------- conditions, calls


@refactor
def noise_behind_training_and_a_flag(unit):
    has_value(unit, "noise", 0.0)
    put_first(
        unit,
        "if self.training and self.noise > 0:\n    _x_ = _x_ + self.noise * torch.randn_like(_x_)",
    )


@refactor
def a_function_of_torch(unit):
    put_first(unit, "_x_ = torch.nn.functional.pad(_x_, (0, 0))")


@refactor(kinds=("attention",))
def kwargs_to_the_cache(unit):
    """As in transformers 5.24."""
    update = "past_key_values.update(key_states, value_states, self.layer_idx"
    respelled(unit.forward, rf"{re.escape(update)}\)", f"{update}, kwargs=kwargs)")


@refactor(kinds=("layer", "attention"))
def result_by_index(unit):
    respelled(
        unit.forward,
        r"^( +)(\w+), (\w+) = (\w+(?:\.\w+)?\(.*(?:scaling|self_attn|mask).*)$",
        r"\1both = \4\n\1\2 = both[0]\n\1\3 = both[1]",
    )


# ---------------------------------------------------------------------------- a gate of its own

KDA = ("kda",)


def gate_of(unit) -> ast.ClassDef:
    """The class of the forget gate, which the file of the unit has then."""
    name = type(unit.subject.module.forget_gate).__name__
    gate = copy.deepcopy(unit.subject.of_the_file(name))
    gate.name = "ForgetGate"
    unit.before.append(gate)

    def move(module, space):
        module.forget_gate.__class__ = space["ForgetGate"]

    unit.moves.append(move)
    return gate


def method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)


GATE = "self.forget_gate(hidden_states)"
OF_GATE = {
    "f_a_proj": "down", "f_b_proj": "up", "f_proj": "projection", "A_log": "log_rate",
    "dt_bias": "offset", "num_heads": "count", "head_dim": "width", "lower_bound": "least",
    "safe_gate": "bounded", "safe_gate_lower_bound": "least",
}  # fmt: skip


@refactor(kinds=KDA)
def everything_renamed(unit):
    """Parts, parameters and numbers, of the gate as well."""
    gate = gate_of(unit)
    for node in ast.walk(gate):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            node.attr = OF_GATE.get(node.attr, node.attr)
    unit.moves.insert(0, lambda module, space: rename_members(module.forget_gate, OF_GATE))
    names = {n: f"{n}_part" for n in unit.subject.module._modules}
    names |= {n: f"{n}_value" for n in ("num_heads", "head_dim", "qkv_dim", "layer_idx",
                                        "activation", "conv_kernel_size")}  # fmt: skip
    rename_attributes(unit, names)


@refactor(kinds=KDA)
def gate_inlined(unit):
    """The gate's forward is a method of the layer's class, which has its parts."""
    forward = copy.deepcopy(method(gate_of(unit), "forward"))
    forward.name = "forget"
    unit.cls.body.append(forward)
    replaced(unit.forward, GATE, "self.forget(hidden_states)")

    def move(module, space):
        gate = module._modules.pop("forget_gate")
        module._modules.update(gate._modules)
        module._parameters.update(gate._parameters)
        module.__dict__.update({n: v for n, v in vars(gate).items() if n not in vars(module)})

    unit.moves.append(move)


@refactor(kinds=KDA)
def gate_of_raw_values(unit):
    """The projections are the layer's, the formula is the gate's."""
    gate, names = gate_of(unit), list(unit.subject.module.forget_gate._modules)
    call = "hidden_states"
    for name in names:
        call = f"self.{name}({call})"
    replaced(unit.forward, GATE, f"self.forget_gate({call})")
    replaced(method(gate, "forward"), call, "hidden_states")

    def move(module, space):
        for name in names:
            module._modules[name] = module.forget_gate._modules.pop(name)

    unit.moves.append(move)


def apply(name: str, unit: Unit) -> Unit:
    function = REFACTORS[name]
    need(function.kinds is None or unit.subject.kind in function.kinds)
    function(unit)
    return unit
