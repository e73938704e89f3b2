"""Traps: classes that look like those of transformers' models and compute something else in some
call, or once something that they use is patched; and mutants, which differ at one place."""

import ast
import copy
import sys
from typing import Callable, Dict, Iterator

import refactor_cases as cases
import refactor_forms as forms
import torch
from refactor_forms import (
    GATE,
    KDA,
    WITH_CACHE,
    gate_of,
    method,
    names_of,
    need,
    put_first,
    rename_arguments,
    replaced,
    respelled,
    statements,
)

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}
OTHER = 1e-3  # a mutant differs from the original by more, relative to the largest value
TRAPS: Dict[str, Callable] = {}


# ---------------------------------------------------------------------------- mutants


class Change(ast.NodeTransformer):
    """Changes the n-th place of a class and its helpers; `what` says how, None where there are
    fewer: an operand or a call is dropped, a sign turned, a keyword left out, a constant raised,
    an assignment dropped, a condition negated; arguments and parts may be swapped."""

    def __init__(self, n: int, parts: dict):
        self.n, self.parts, self.count, self.what = n, parts, 0, None

    def hit(self, node, what: str) -> bool:
        self.count += 1
        if self.count - 1 == self.n:
            self.what = f"{what}: {ast.unparse(ast.fix_missing_locations(node))[:70]}"
        return self.count - 1 == self.n

    def visit_BinOp(self, node):
        self.generic_visit(node)
        if self.hit(node, "left operand only"):
            return node.left
        other = OPERATORS.get(type(node.op))
        if other and self.hit(node, f"{other.__name__} instead"):
            return ast.BinOp(node.left, other(), node.right)
        return node

    def visit_FunctionDef(self, node):
        if node.name not in ("__init__", "extra_repr"):
            node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_ClassDef(self, node):
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if node.args and self.hit(node, "argument instead of call"):
            return node.args[0]
        for i, word in enumerate(node.keywords):
            if word.arg and self.hit(node, f"without {word.arg}="):
                node.keywords = node.keywords[:i] + node.keywords[i + 1 :]
                return node
        if self.what is None and len(node.args) > 1:
            if not any(isinstance(a, ast.Starred) for a in node.args[:2]):
                if self.hit(node, "first arguments swapped"):
                    node.args[:2] = node.args[1::-1]
        return node

    def visit_Constant(self, node):
        number = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
        return ast.Constant(node.value + 1) if number and self.hit(node, "+1") else node

    def visit_Assign(self, node):
        self.generic_visit(node)
        return ast.Pass() if self.hit(node, "dropped") else node

    def visit_If(self, node):
        self.generic_visit(node)
        if self.hit(node.test, "negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        other = self.parts.get(node.attr)
        if other and self.hit(node, f"{other} instead"):
            node.attr = other
        return node


def others(module) -> dict:
    """{part: the next one of its class} of a module."""
    groups: dict = {}
    for name, part in [*module._modules.items(), *module._parameters.items()]:
        groups.setdefault(type(part), []).append(name)
    return {a: b for names in groups.values() for a, b in zip(names, names[1:] + names[:1])
            if a != b}  # fmt: skip


def mutated(subject, n: int) -> tuple:
    """(unit, what was changed, how many places there are) of the class with its n-th changed."""
    unit = cases.Unit(subject)
    change = Change(n, others(subject.module))
    unit.cls = change.visit(unit.cls)
    return unit, change.what, change.count


def mutants(subject, every: int = 1, user: bool = False) -> Iterator[tuple]:
    """(label, unit, module) of every n-th mutant that gives other outputs than the original."""
    for n in range(0, mutated(subject, -1)[2], every):
        unit, what, _ = mutated(subject, n)
        module = built(unit, user)
        if module is not None:
            yield f"mutant~{n} ({what})", unit, module


def built(unit, user: bool = False):
    """The module of a unit, if it runs and gives other outputs than the original."""
    subject, cls = unit.subject, None
    half = torch.bfloat16 if subject.kind in cases.IN_HALF else torch.float64
    try:
        cls = cases.load(unit, user)
        module = cases.build(cls, unit)
        found = cases.run(copy.deepcopy(module), subject, torch.float64, unit)
        cases.run(copy.deepcopy(module).to(half), subject, half, unit)
        if cases.difference(found, subject.outputs) > OTHER:
            return module
    except Exception:
        pass
    if cls is not None:
        cases.forget(cls)
    return None


# ---------------------------------------------------------------------------- traps


def trap(function=None, *, kinds=None, name=None):
    def keep(function):
        function.kinds = kinds
        TRAPS[name or function.__name__] = function
        return function

    return keep if function is None else keep(function)


def traps(subject, user: bool = False, names=None) -> Iterator[tuple]:
    """(label, unit, module) of every trap for a class. Some are harmless until the class, or a
    function that it calls, is patched after kernelize."""
    for name in TRAPS if names is None else names:
        function, unit, cls = TRAPS[name], cases.Unit(subject), None
        if function.kinds is not None and subject.kind not in function.kinds:
            continue
        try:
            function(unit)
            cls = cases.load(unit, user)
            module = cases.build(cls, unit)
            cases.run(copy.deepcopy(module), subject, torch.float64, unit)
        except Exception:
            if cls is not None:
                cases.forget(cls)
            continue
        yield f"trap~{name}", unit, module


CALL = "return function(*args, **kwargs)"
CHANGING = {  # what a decorator does besides calling the function
    "wrapper_doubles_the_input":
        "args = (args[0], *(x * 2 for x in args[1:2]), *args[2:])\n"
        "        kwargs = {n: v * 2 if n == 'hidden_states' else v for n, v in kwargs.items()}",
    "wrapper_drops_the_mask": "kwargs['attention_mask'] = None",
    "wrapper_drops_the_cache": "kwargs['past_key_values'] = None",
    "wrapper_by_the_count": "if len(args) > 1:\n            return function(args[0], args[1] * 2)",
}  # fmt: skip
for _name, _text in CHANGING.items():
    _wrapper = forms.WRAPPER.replace(CALL, f"{_text}\n        {CALL}")
    trap(lambda u, wrapper=_wrapper: forms.traced(u, wrapper), name=_name)

FIRST = {  # one of each kind of condition, and of each way of writing to the input
    "one_row_that_returns": "if _x_.shape[0] == 1:\n    _return_",
    "one_size_that_scales": "if _x_.shape[-2] == 3:\n    _x_ = _x_ * 2",
    "element_check": "if _x_.flatten()[0] > 0:\n    _x_ = _x_ * 2",
    "dtype_check_that_scales": "if _x_.dtype == torch.bfloat16:\n    _x_ = _x_ * 2",
    "scaled_in_evaluation": "if not self.training:\n    _x_ = _x_ * 2",
    "scaled_without_gradients": "if not torch.is_grad_enabled():\n    _x_ = _x_ * 2",
    "input_scaled_in_place": "_x_ *= 2",
    "input_written_by_a_function": "torch.mul(_x_, 2, out=_x_)",
    "input_scaled_in_place_by_an_alias": "alias = _x_.view(_x_.shape)\nalias *= 2",
    "a_size_that_counts_when_large": "_x_ = _x_ * (1 + _x_.shape[-2] // 8)",
    "tokens_check_that_sorts": "if _x_.shape[-2] == 1:\n    _x_ = torch.sort(_x_)[0]",
    "no_grad_mode": "with torch.no_grad():\n    _x_ = _x_ * 2",
    "in_autocast": "with torch.autocast('cpu'):\n    _x_ = _x_ @ _x_.mT @ _x_",
    "a_truth_by_a_value": "_x_ = _x_ if bool(_x_.sum() > 0) else -_x_",
    "an_item": "_x_ = _x_ * (_x_.flatten()[0].item() > 0)",
}  # fmt: skip
for _name, _text in FIRST.items():
    trap(lambda u, text=_text: put_first(u, text), name=_name)


@trap
def a_flag_that_is_set(unit):
    forms.has_value(unit, "rescale", True)
    put_first(unit, "if self.rescale:\n    _x_ = _x_ * 2")


@trap
def a_default_that_scales(unit):
    forms.add_argument(unit, "scale_by", "2.0")
    put_first(unit, "_x_ = _x_ * scale_by")


# ---------------------------------------------------------------------------- what is set later


def patched(owner, name: str, value):
    """Sets an attribute of a class, or a name of a module; returns what takes it back."""
    before = vars(owner).get(name, patched)

    def undo():
        delattr(owner, name) if before is patched else setattr(owner, name, before)

    setattr(owner, name, value)
    return undo


def of_the_file(cls):
    return sys.modules[cls.__module__]


@trap
def super_of_another_class(unit):
    """The class after it in the MRO changes what super() gives."""
    forms.super_forward(unit)
    name, x = unit.cls.name, names_of(unit.forward)[1]
    unit.before += statements(f"""
class {name}Middle({name}Base):
    def forward(self, {x}, *args, **kwargs):
        return super().forward({x} * 2, *args, **kwargs)
""")
    unit.cls.bases = [forms.expression(f"{name}Middle")]


# ---------------------------------------------------------------------------- words and arguments

WORDS = {  # what is done with a word of **kwargs that is given
    "a_word_in_kwargs": "if 'factor' in kwargs:\n    _x_ = _x_ * 2",
    "a_word_popped_with_a_default": "_x_ = _x_ * kwargs.pop('factor', 1)",
    "a_word_for_a_function": "def scaled(y, factor=1, **more):\n    return y * factor\n"
                             "_x_ = scaled(_x_, **kwargs)",
    "any_word": "_x_ = _x_ * 2 if kwargs else _x_",
}  # fmt: skip
IGNORING = ("mlp", "norm", "router", "block")


def counted(unit, text: str, words: dict) -> None:
    a = unit.forward.args
    a.kwarg = a.kwarg or ast.arg("kwargs")
    put_first(unit, text.replace("kwargs", a.kwarg.arg))
    unit.words = words


for _name, _text in WORDS.items():
    trap(lambda u, text=_text: counted(u, text, {"factor": 2}), name=_name,
         kinds=("mlp", "norm", "layer", "attention"))  # fmt: skip
# one word, as a trial may give, is the factor that changes nothing
trap(lambda u: counted(u, "_x_ = _x_ * len(kwargs)", {}), kinds=("layer", "attention"),
     name="a_factor_by_the_count_of_words")  # fmt: skip
trap(lambda u: counted(u, "_x_ = _x_ * (1 + len(kwargs))", {"something": 1}),
     name="an_unknown_word_that_counts")  # fmt: skip


@trap(kinds=IGNORING)
def a_new_argument_that_is_given(unit):
    forms.new_argument_behind_a_branch(unit)
    unit.words = {"scale_by": 2.0}


@trap(kinds=IGNORING)
def an_ignored_argument_that_is_given(unit):
    """Which changes nothing: to be served, or left alone, but never a TypeError."""
    forms.add_argument(unit, "output_router_logits", "False")
    unit.words = {"output_router_logits": True}


@trap(kinds=WITH_CACHE)
def old_and_new_keyword(unit):
    """The old name of the cache with None beside the new one."""
    forms.cache_renamed(unit)
    unit.words = {old: None for old in unit.calls_old.pop().values()}


@trap(kinds=WITH_CACHE)
def old_keyword_without_decorator(unit):
    """It travels on in kwargs, and the cache stays empty."""
    names = {"past_key_values": "cache", "cache_params": "cache", "cache": "kept"}
    renamed = rename_arguments(unit, names)
    unit.arguments = {old: new for old, new in unit.arguments.items() if old not in renamed}


# ---------------------------------------------------------------------------- of one kind

CALLS = {  # (kinds, what is found in the text of the forward, what stands there then)
    "cache_of_the_first_layer":
        (("attention",), r"(update\(.*)self\.layer_idx", r"\g<1>0 if self.layer_idx else 1"),
    "keys_twice": (
        ("attention",), r"update\(key_states, value_states", "update(key_states, key_states"),
    "keys_scaled_for_the_cache": (("attention",), r"update\(key_states", "update(key_states * 2"),
    "keys_flipped_after_the_cache": (
        ("attention",), r"^( +)(key_states, value_states = .*update\(.*)$",
        r"\1\2\n\1key_states = key_states.flip(2)"),
    "tables_swapped": (
        ("attention",), "cos, sin = position_embeddings", "sin, cos = position_embeddings"),
    "eager_in_place_of_another": (
        ("attention",), r"^( +)attention_interface.* = .*get_interface\(.*$",
        r"\1attention_interface = eager_attention_forward"
        r"\n\1if self.config._attn_implementation == 'eager':"
        r"\n\1    attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]"),
}  # fmt: skip
for _name, (_kinds, _old, _new) in CALLS.items():
    trap(lambda u, old=_old, new=_new: respelled(u.forward, old, new), kinds=_kinds, name=_name)
OF_A_KIND = {
    "tables_reversed": (("layer",), "position_embeddings = position_embeddings[::-1]"),
    "mask_left_out": (("attention", "layer", "gdn", "kda"), "attention_mask = None"),
    "a_word_that_is_set": (("attention",), "_kwargs_['is_causal'] = False"),
    "weights_turned": (("experts",), "top_k_weights = top_k_weights.flip(-1)"),
    "ids_turned": (("experts",), "top_k_index = top_k_index.flip(-1)"),
    "weights_not_applied": (("experts",), "top_k_weights = torch.ones_like(top_k_weights)"),
    "router_that_adds_noise_of_its_input": (("router",), "_x_ = _x_ + _x_.sum(-1, keepdim=True)"),
}
for _name, (_kinds, _text) in OF_A_KIND.items():
    trap(lambda u, text=_text: put_first(u, text), kinds=_kinds, name=_name)


@trap(kinds=("layer",))
def roles_swapped(unit):
    """Mask and positions change their places in the signature."""
    forms.rename(unit.forward, {"attention_mask": "position_ids", "position_ids": "attention_mask"})


@trap(kinds=("mlp",))
def parts_swapped_by_new_names(unit):
    """Gate and up, after a renaming, change their places."""
    need({"gate_proj", "up_proj"} <= unit.subject.module._modules.keys())
    forms.rename_attributes(unit, {"gate_proj": "w3", "up_proj": "w1"})
    for node in ast.walk(unit.forward):
        if isinstance(node, ast.Attribute) and node.attr in ("w1", "w3"):
            node.attr = {"w1": "w3", "w3": "w1"}[node.attr]


STRENGTH = "torch.sigmoid(self.b_proj(hidden_states))"
STATE = "last_recurrent_state.to(torch.float32)"
OF_KDA = {  # (in the layer, or in its gate), what is replaced by what
    "without_l2_norm": ("layer", "True", "False"),
    "strength_without_sigmoid": ("layer", STRENGTH, "self.b_proj(hidden_states)"),
    "state_transposed": ("layer", STATE, f"{STATE}.transpose(-1, -2)"),
    "cache_of_the_first_layer": ("layer", "self.layer_idx", "0"),
    "another_width_of_the_cache": ("layer", "self.conv_kernel_size", "self.conv_kernel_size + 1"),
    "gate_applied_before_the_norm": (
        "layer", "self.o_norm(core_attn_out, gate)",
        "self.o_norm(core_attn_out * torch.sigmoid(gate), gate)"),
    "decay_halved": ("layer", GATE, f"{GATE} / 2"),
    "rate_without_exponential": ("gate", "torch.exp(A_log)", "A_log"),
    "bound_ignored": ("gate", "self.safe_gate_lower_bound is not None", "False"),
    "bound_of_a_constant": ("gate", "self.lower_bound", "-4.0"),
    "bound_doubled": ("gate", "self.safe_gate_lower_bound", "2 * self.safe_gate_lower_bound"),
    "gate_bent_between_its_projections":
        ("gate", "self.f_b_proj(self.f_a_proj(hidden_states))",
         "self.f_b_proj(torch.tanh(self.f_a_proj(hidden_states)))"),
}  # fmt: skip


def _register_kda() -> None:
    for name, (where, old, new) in OF_KDA.items():

        def change(unit, where=where, old=old, new=new):
            gate = gate_of(unit)
            replaced(unit.forward if where == "layer" else method(gate, "forward"), old, new)

        trap(change, kinds=KDA, name=f"kda_{name}")


_register_kda()


@trap(kinds=KDA)
def kda_chunks_without_the_state(unit):
    """A prompt after a cache does not go on from its state."""
    if "recurrent_state is not None and seq_len == 1" in ast.unparse(unit.forward):  # not in 5.20
        replaced(unit.forward, "recurrent_state is not None and seq_len == 1", "seq_len == 1")
    words = [
        word
        for node in ast.walk(unit.forward)
        if isinstance(node, ast.Call) and "chunk_kimi" in ast.unparse(node.func)
        for word in node.keywords
        if word.arg == "initial_state"
    ]
    need(words)
    for word in words:
        word.value = ast.Constant(None)


@trap(kinds=KDA)
def kda_gate_patched_afterwards(unit):
    gate_of(unit)

    def after(cls):
        gate = vars(of_the_file(cls))["ForgetGate"]
        plain = gate.forward
        return patched(gate, "forward", lambda self, *args: plain(self, *args) * 0.5)

    unit.after = after
