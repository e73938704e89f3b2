"""Mutated refactors: cases of refactor_forms.py with one operator, constant, argument or part
changed, and traps that a recogniser which follows helpers, wrappers and arguments may fall into."""

import ast
import copy
import random
import sys
from typing import Callable, Dict, Iterator

import mutants as single
import refactor_cases as cases
import refactor_forms as forms
import torch
from refactor_forms import (
    WRAPPERS,
    expression,
    names_of,
    need,
    one_expression,
    put_first,
    put_in_init,
    rename_arguments,
    statements,
    updates,
    whole,
)  # fmt: skip

OTHER = 1e-3  # a mutant differs from the original by more, relative to the largest value
TRIES = 6  # places that are tried for each mutant that is wanted
TRAPS: Dict[str, Callable] = {}


class Change(single.Mutation):
    """Changes the n-th place of a class and its helpers; arguments and parts may be swapped."""

    def __init__(self, n: int, parts: dict):
        super().__init__(n)
        self.parts = parts

    def visit_FunctionDef(self, node):
        if node.name not in ("__init__", "extra_repr"):
            node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_ClassDef(self, node):
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_AnnAssign(self, node):
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Call(self, node):
        node = super().visit_Call(node)
        if isinstance(node, ast.Call) and self.what is None and len(node.args) > 1:
            if not any(isinstance(a, ast.Starred) for a in node.args[:2]):
                if self.hit(node, "first arguments swapped"):
                    node.args[:2] = node.args[1::-1]
        return node

    def visit_Tuple(self, node):
        self.generic_visit(node)
        if len(node.elts) > 1 and self.hit(node, "elements swapped"):
            node.elts[:2] = node.elts[1::-1]
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        other = self.parts.get(node.attr)
        if other and self.hit(node, f"{other} instead"):
            node.attr = other
        return node

    def visit_IfExp(self, node):
        self.generic_visit(node)
        return node.orelse if self.hit(node, "the other value") else node


def others(unit) -> dict:
    """{part: the next one of its class} of a module, by their names in the unit."""
    module, groups = unit.subject.module, {}
    for name, part in [*module._modules.items(), *module._parameters.items()]:
        groups.setdefault(type(part), []).append(unit.attributes.get(name, name))
    return {a: b for names in groups.values() for a, b in zip(names, names[1:] + names[:1])
            if a != b}  # fmt: skip


def differs(module, unit) -> bool:
    """It runs, and gives something else than the original."""
    subject = unit.subject
    half = torch.bfloat16 if subject.kind in cases.IN_HALF else torch.float64
    try:
        found = cases.run(copy.deepcopy(module), subject, torch.float64, unit)
        cases.run(copy.deepcopy(module).to(half), subject, half, unit)
    except Exception:
        return False
    return cases.difference(found, subject.outputs) > OTHER


def changes(unit) -> int:
    """How many places there are."""
    change = Change(-1, others(unit))
    for node in [*unit.before, unit.cls]:  # no place is the -1st: nothing is changed
        change.visit(node)
    return change.count


def mutated(refactor: str, subject, n: int):
    """(unit, what was changed) of a refactor with its n-th place changed."""
    unit = forms.apply(refactor, cases.Unit(subject))
    change = Change(n, others(unit))
    unit.before = [change.visit(node) for node in unit.before]
    unit.cls = change.visit(unit.cls)
    return unit, change.what


def mutants(refactor: str, subject, count: int, user: bool = False) -> Iterator[tuple]:
    """(label, unit, module) of `count` mutants of a refactor, drawn from all its places."""
    if not count:
        return
    places = changes(forms.apply(refactor, cases.Unit(subject)))
    order = random.Random(f"{subject.name} {refactor}").sample(range(places), places)
    found = 0
    for n in order[: TRIES * count]:
        unit, _ = mutated(refactor, subject, n)
        module = built(unit, user)
        if module is not None:
            yield f"{n}", unit, module
            found += 1
        if found == count:
            return


def built(unit, user: bool):
    """The module of a unit, if it gives other outputs than the original."""
    cls = None
    try:
        cls = cases.load(unit, user=user)
        module = cases.build(cls, unit)
        if differs(module, unit):
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
        function = TRAPS[name]
        if function.kinds is not None and subject.kind not in function.kinds:
            continue
        unit = cases.Unit(subject)
        try:
            function(unit)
            cls = cases.load(unit, user=user)
        except (forms.Inapplicable, AttributeError, StopIteration):
            continue
        try:
            module = cases.build(cls, unit)
            cases.run(copy.deepcopy(module), subject, torch.float64, unit)
        except Exception:
            cases.forget(cls)
            continue
        yield name, unit, module


CHANGING = {
    "wrapper_doubles_the_input":
        "args = (args[0], *(x * 2 for x in args[1:2]), *args[2:])\n"
        "        kwargs = {n: v * 2 if n == 'hidden_states' else v for n, v in kwargs.items()}",
    "wrapper_drops_the_mask": "kwargs['attention_mask'] = None",
    "wrapper_drops_the_cache": "kwargs['past_key_values'] = None",
    "wrapper_pops_the_mask": "kwargs.pop('attention_mask', None)",
    "wrapper_halves_some_batches":
        "args = tuple(a / 2 if isinstance(a, torch.Tensor) and a.is_floating_point() else a\n"
        "                     for a in args)",
    "wrapper_that_calls_twice":
        "function(*args, **kwargs)\n        args = (args[0], -args[1], *args[2:])",
    "wrapper_by_the_count": "if len(args) > 1:\n            return function(args[0], args[1] * 2)",
    "wrapper_by_a_word": "if kwargs.get('factor'):\n            kwargs['factor'] = 0",
    "wrapper_in_no_grad": "with torch.no_grad():\n            args = (args[0], *args[1:][::-1])",
}  # fmt: skip
AFTERWARDS = {
    "wrapper_doubles_the_output": "result[0] * 2, *result[1:]",
    "wrapper_negates_in_evaluation": "-result[0], *result[1:]",
}


def _register_wrappers():
    call = "return function(*args, **kwargs)"
    texts = {name: f"{text}\n        {call}" for name, text in CHANGING.items()}
    for name, text in AFTERWARDS.items():
        texts[name] = (
            "result = function(*args, **kwargs)\n"
            "        if isinstance(result, tuple):\n"
            f"            return ({text})\n"
            f"        return {text.split(',')[0].replace('[0]', '')}"
        )
    for name, text in texts.items():
        wrapper = WRAPPERS["pass_through"].replace(call, text)
        trap(lambda u, wrapper=wrapper: forms.traced(u, wrapper), name=name)


_register_wrappers()


FIRST = {
    "shape_check_that_returns": "if _x_.shape[0] == 1:\n    _return_",
    "size_check_that_returns": "if _x_.shape[-2] == 3:\n    _return_",
    "dim_check_that_returns": "if _x_.dim() > 1:\n    _return_",
    "size_check_that_scales": "if _x_.shape[0] == 1:\n    _x_ = _x_ * 2",
    "element_check": "if _x_.flatten()[0] > 0:\n    _x_ = _x_ * 2",
    "assert_with_a_value": "assert (_x_ := _x_ * 2) is not None",
    "dtype_check_that_scales": "if _x_.dtype == torch.bfloat16:\n    _x_ = _x_ * 2",
    "scaled_in_evaluation": "if not self.training:\n    _x_ = _x_ * 2",
    "scaled_without_gradients": "if not torch.is_grad_enabled():\n    _x_ = _x_ * 2",
    "in_place": "_x_ = _x_.mul(2)\n_x_.add_(1)",
    "input_scaled_in_place": "_x_ *= 2",
    "input_written_by_a_function": "torch.mul(_x_, 2, out=_x_)",
    "input_written_by_a_value": "_x_ = torch.mul(_x_, 2, out=_x_)",
    "sizes_that_cancel": "if _x_.shape[0] - 1 == 0:\n    _x_ = _x_ * 2",
    "input_scaled_in_place_by_an_alias": "alias = _x_.view(_x_.shape)\nalias *= 2",
    "a_size_that_counts_when_large": "_x_ = _x_ * (1 + _x_.shape[-2] // 8)",
    "a_size_that_counts_by_a_function": "_x_ = torch.mul(_x_, 1 + _x_.shape[-2] // 8)",
    "a_size_compared_and_computed_with": "_x_ = _x_ * (1 + (_x_.shape[-2] > 8))",
    "a_larger_size_by_max": "_x_ = _x_ * max(_x_.shape[-2] - 7, 1)",
    "size_check_of_a_copy": "_x_ = _x_ + 0\nif _x_.shape[0] == 1:\n    _x_ = _x_ * 2",
    "size_check_in_a_lambda":
        "scaled = lambda y: y * 2 if y.shape[0] == 1 else y\n_x_ = scaled(_x_)",
    "size_check_in_a_function":
        "def scaled(y):\n    if y.shape[0] == 1:\n        return y * 2\n    return y\n"
        "_x_ = scaled(_x_)",
    "size_check_of_what_came":
        "given = _x_\n_x_ = _x_ + 0\nif given.shape[0] == 1:\n    _x_ = _x_ * 2",
    "size_check_with_an_else":
        "if _x_.shape[0] == 2:\n    pass\nelse:\n    _x_ = _x_ * 2",
    "tokens_check_that_sorts": "if _x_.shape[-2] == 1:\n    _x_ = torch.sort(_x_)[0]",
    "a_loop_over_sizes": "for i in range(_x_.shape[-2] // 8):\n    _x_ = _x_ * 2",
    "a_loop_that_doubles": "for factor in (1, 2):\n    _x_ = _x_ * factor",
    "late_binding": "factor = 1\nscaled = lambda y: y * factor\nfactor = 2\n_x_ = scaled(_x_)",
    "no_grad_mode": "with torch.no_grad():\n    _x_ = _x_ * 2",
    "in_autocast": "with torch.autocast('cpu'):\n    _x_ = _x_ @ _x_.mT @ _x_",
    "state_of_torch": "_x_ = _x_ * (1 if torch.is_grad_enabled() else 2)",
    "a_truth_by_a_value": "_x_ = _x_ if bool(_x_.sum() > 0) else -_x_",
    "a_number_by_a_value": "_x_ = _x_ * float(_x_.flatten()[0])",
    "log_that_changes_its_argument": "_x_ = _x_ + 0\nlogger.debug('%s', _x_.mul_(2))",
    "an_item": "_x_ = _x_ * (_x_.flatten()[0].item() > 0)",
}  # fmt: skip


for _name, _text in FIRST.items():
    trap(forms.first(_text), name=_name)


@trap
def a_flag_that_is_set(unit):
    put_in_init(unit, "self.rescale = True")
    put_first(unit, "if self.rescale:\n    _x_ = _x_ * 2")


LATER = {  # what a name or an attribute is, how it is read, and what it is after kernelize
    "a_module_constant_set_afterwards": ("FACTOR = 1", "_x_ = _x_ * FACTOR", "FACTOR", 2),
    "a_flag_of_the_module_set_afterwards":
        ("SCALED = False", "if SCALED:\n    _x_ = _x_ * 2", "SCALED", True),
    "a_helper_set_afterwards":
        ("def factor():\n    return 1", "_x_ = _x_ * factor()", "factor", lambda: 2),
    "a_partial_set_afterwards": (
        "def scaled(factor, y):\n    return y * factor",
        "_x_ = functools.partial(scaled, 1)(_x_)", "scaled", lambda factor, y: y * 2),
    "a_class_constant_set_afterwards": ("factor = 1", "_x_ = _x_ * type(self).factor", "", 2),
    "a_getattr_set_afterwards":
        ("", "if getattr(self, 'factor', None) is not None:\n    _x_ = _x_ * self.factor", "", 2),
    "a_hasattr_set_afterwards":
        ("", "if hasattr(self, 'factor'):\n    _x_ = _x_ * self.factor", "", 2),
    "a_property_set_afterwards": (
        "@property\ndef factor(self):\n    return 1", "_x_ = _x_ * self.factor", "",
        property(lambda self: 2)),
    "a_staticmethod_set_afterwards": (
        "@staticmethod\ndef factor(y):\n    return y", "_x_ = self.factor(_x_)", "",
        staticmethod(lambda y: y * 2)),
    "a_classmethod_set_afterwards": (
        "@classmethod\ndef factor(cls, y):\n    return y", "_x_ = self.factor(_x_)", "",
        classmethod(lambda cls, y: y * 2)),
}  # fmt: skip


def _register_later():
    for name, (text, first, of_the_module, value) in LATER.items():

        def later(unit, text=text, first=first, of_the_module=of_the_module, value=value):
            if of_the_module:
                unit.before += statements(text)
            else:
                unit.cls.body += statements(text)
            put_first(unit, first)

            def after(cls):
                owner = of_the_file(cls) if of_the_module else cls
                return patched(owner, of_the_module or "factor", value)

            unit.after = after

        trap(later, name=name)


_register_later()

WORDS = {  # what is done with a word of **kwargs that is given
    "a_word_in_kwargs": "if 'factor' in kwargs:\n    _x_ = _x_ * 2",
    "a_word_not_in_kwargs": "if 'factor' not in kwargs:\n    pass\nelse:\n    _x_ = _x_ * 2",
    "a_word_with_a_default": "_x_ = _x_ * kwargs.get('factor', 1)",
    "a_word_popped_with_a_default": "_x_ = _x_ * kwargs.pop('factor', 1)",
    "a_word_for_a_function": "def scaled(y, factor=1, **more):\n    return y * factor\n"
                             "_x_ = scaled(_x_, **kwargs)",
    "a_word_in_a_function": "def scaled(y, **more):\n    return y * more.get('factor', 1)\n"
                            "_x_ = scaled(_x_, **kwargs)",
    "a_word_in_a_dict": "words = {'other': 1, **kwargs}\n_x_ = _x_ * words.get('factor', 1)",
    "any_word": "_x_ = _x_ * 2 if kwargs else _x_",
}  # fmt: skip


@trap(kinds=("layer", "attention"))
def a_factor_by_the_count_of_words(unit):
    """One word, as a trial may give, is the factor that changes nothing."""
    a = unit.forward.args
    a.kwarg = a.kwarg or ast.arg("kwargs")
    put_first(unit, f"_x_ = _x_ * len({a.kwarg.arg})")


def _register_words():
    for name, text in WORDS.items():

        def words(unit, text=text):
            a = unit.forward.args
            a.kwarg = a.kwarg or ast.arg("kwargs")
            put_first(unit, text.replace("kwargs", a.kwarg.arg))
            unit.words = {"factor": 2}

        trap(words, kinds=("mlp", "norm", "layer", "attention"), name=name)


_register_words()


@trap
def a_default_that_scales(unit):
    forms.add_argument(unit, "scale_by", "2.0")
    put_first(unit, "_x_ = _x_ * scale_by")


@trap
def a_class_attribute_set_afterwards(unit):
    unit.cls.body.insert(0, statements("rescale = False")[0])
    put_first(unit, "if self.rescale:\n    _x_ = _x_ * 2")
    unit.after = lambda cls: patched(cls, "rescale", True)


def patched(owner, name: str, value):
    """Sets an attribute of a class, or a name of a module; returns what takes it back."""
    before = vars(owner).get(name, patched)

    def undo():
        delattr(owner, name) if before is patched else setattr(owner, name, before)

    setattr(owner, name, value)
    return undo


def doubled(function):
    """The function gives twice what it gave, or a tuple with twice its first element."""

    def double(*args, **kwargs):
        out = function(*args, **kwargs)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    return double


def of_the_file(cls):
    return sys.modules[cls.__module__]


def a_copied_helper(unit) -> str:
    forms.helpers_copied(unit)
    return next(n.name for n in unit.before if n.name.startswith(("apply_", "rotate_", "torch_")))


# the refactor, whose function is patched after kernelize, and that function's name
PATCHED = {
    "method": (lambda u: one_expression(u, "method", 0), lambda cls: cls, "_value_of"),
    "function": (lambda u: one_expression(u, "function", 0), of_the_file, "value_of"),
    "body": (lambda u: whole(u, "method"), lambda cls: cls, "_forward_impl"),
    "module_function": (lambda u: whole(u, "function"), of_the_file, "forward_impl"),
    "base": (forms.super_forward, lambda cls: cls.__mro__[1], "forward"),
    "forward": (forms.copied, lambda cls: cls, "forward"),
    "mixin": (forms.helper_of_a_mixin, lambda cls: cls.__mro__[1], "_value_of"),
    "copied_helper": (a_copied_helper, of_the_file, None),
}


def _register_patched():
    for label, (make, owner, name) in PATCHED.items():

        def change(unit, make=make, owner=owner, name=name):
            found = make(unit) or name

            def after(cls):
                return patched(owner(cls), found, doubled(getattr(owner(cls), found)))

            unit.after = after

        trap(change, name=f"{label}_patched_afterwards")


_register_patched()


@trap
def wrapped_afterwards(unit):
    """The wrapper's helper, which does nothing, does something after kernelize."""
    unit.before += statements("""
def prepare(x):
    return x

def traced(function):
    @functools.wraps(function)
    def wrapper(self, x=None, *args, **kwargs):
        if x is not None:
            return function(self, prepare(x), *args, **kwargs)
        return function(self, *args, **kwargs)
    return wrapper
""")
    unit.forward.decorator_list.insert(0, expression("traced"))
    unit.after = lambda cls: patched(of_the_file(cls), "prepare", lambda x: x * 2)


@trap
def super_with_another_input(unit):
    forms.super_forward(unit)
    call = unit.forward.body[-1].value
    call.args[0] = ast.BinOp(call.args[0], ast.Mult(), ast.Constant(2))


@trap
def super_of_another_class(unit):
    """The class after it in the MRO changes what super() gives."""
    forms.super_forward(unit)
    name = unit.cls.name
    x = names_of(unit.forward)[1]
    middle = ast.parse(f"""
class {name}Middle({name}Base):
    def forward(self, {x}, *args, **kwargs):
        return super().forward({x} * 2, *args, **kwargs)
""").body[0]
    unit.before.append(middle)
    unit.cls.bases = [forms.load(middle.name)]


def old_and_new_keyword(renamed):
    """The old name of the cache with None beside the new one."""

    def change(unit):
        renamed(unit)
        unit.words = {old: None for old in unit.calls_old.pop().values()}

    return change


trap(old_and_new_keyword(forms.cache_renamed_deprecated), kinds=forms.WITH_CACHE,
     name="old_and_new_keyword")  # fmt: skip
trap(old_and_new_keyword(forms.cache_renamed_own_decorator), kinds=forms.WITH_CACHE,
     name="old_and_new_keyword_own_decorator")  # fmt: skip


@trap(kinds=forms.WITH_CACHE)
def old_keyword_without_decorator(unit):
    """It travels on in kwargs, and the cache stays empty."""
    rename_arguments(unit, {"past_key_values": "cache", "cache_params": "cache"})
    for old, new in list(unit.arguments.items()):
        if new == "cache":
            unit.arguments.pop(old)


READ = {  # what is done with a word that the attention function or nobody reads, and that word
    "a_word_that_is_popped": ("_kwargs_.pop('is_causal', None)", {"is_causal": False}),
    "a_word_that_is_read": (
        "if _kwargs_.get('double', False):\n    _x_ = _x_ * 2", {"double": True}),
    "a_word_that_is_set": ("_kwargs_['is_causal'] = False", {}),
}  # fmt: skip


def given(unit, text: str, words: dict) -> None:
    put_first(unit, text)
    unit.words = words


for _name, (_text, _words) in READ.items():
    trap(lambda u, text=_text, words=_words: given(u, text, words), kinds=("attention",),
         name=_name)  # fmt: skip


@trap(kinds=("mlp", "norm", "router", "block", "layer", "gdn", "kda", "attention"))
def an_unknown_word_that_counts(unit):
    if unit.forward.args.kwarg is None:
        unit.forward.args.kwarg = ast.arg("kwargs")
    put_first(unit, f"_x_ = _x_ * (1 + len({unit.forward.args.kwarg.arg}))")
    unit.words = {"something": 1}


@trap(kinds=("mlp", "norm", "router", "block"))
def a_new_argument_that_is_given(unit):
    forms.add_argument(unit, "scale_by", "None")
    put_first(unit, "if scale_by is not None:\n    _x_ = _x_ * scale_by")
    unit.words = {"scale_by": 2.0}


@trap(kinds=("mlp", "norm", "router", "block"))
def an_ignored_argument_that_is_given(unit):
    """Which changes nothing: to be served, or left alone, but never a TypeError."""
    forms.add_argument(unit, "output_router_logits", "False")
    unit.words = {"output_router_logits": True}


def _caches(name: str, text: str):
    def change(unit):
        for call in updates(unit):
            for i, value in enumerate(text.split("|")):
                if value:
                    new = expression(value)
                    for n, a in (("_k_", call.args[0]), ("_v_", call.args[1])):
                        new = forms.substitute(new, n, copy.deepcopy(a))
                    call.args[i] = new

    trap(change, kinds=("attention",), name=name)


_caches("cache_of_another_layer", "||self.layer_idx + 1")
_caches("cache_of_the_first_layer", "||0 if self.layer_idx else 1")
_caches("keys_twice", "|_k_|")
_caches("keys_scaled_for_the_cache", "_k_ * 2||")


@trap(kinds=("attention",))
def eager_in_place_of_another(unit):
    """The branch that chooses another function than the eager one is turned."""
    forms.eager_chosen_by_a_branch(unit)
    for node in ast.walk(unit.forward):
        if isinstance(node, ast.Compare) and "_attn_implementation" in ast.unparse(node):
            node.ops = [ast.Eq()]


@trap(kinds=("attention",))
def keys_of_another_layer(unit):
    """The cache's keys are those of the first layer, by an attribute of the cache."""
    forms.each(unit, ast.If, lambda n: n if "update(" not in ast.unparse(n) else ast.If(
        n.test, [*n.body, *statements("key_states = key_states.flip(2)")], n.orelse
    ), methods=[unit.forward])  # fmt: skip
    need("key_states" in ast.unparse(unit.forward))


@trap(kinds=("attention", "layer"))
def tables_swapped(unit):
    a = unit.forward
    if unit.subject.kind == "attention":
        need("cos, sin = position_embeddings" in ast.unparse(a))
        put_first(unit, "position_embeddings = (position_embeddings[1], position_embeddings[0])")
    else:
        put_first(unit, "position_embeddings = position_embeddings[::-1]")


@trap(kinds=("layer",))
def roles_swapped(unit):
    """Mask and positions change their places in the signature."""
    forms.rename(unit.forward, {"attention_mask": "position_ids", "position_ids": "attention_mask"})


OF_A_KIND = {
    "mask_left_out": (("attention", "layer", "gdn", "kda"), "attention_mask = None"),
    "weights_turned": (("experts",), "top_k_weights = top_k_weights.flip(-1)"),
    "ids_turned": (("experts",), "top_k_index = top_k_index.flip(-1)"),
    "weights_not_applied": (("experts",), "top_k_weights = torch.ones_like(top_k_weights)"),
    "router_that_adds_noise_of_its_input": (("router",), "_x_ = _x_ + _x_.sum(-1, keepdim=True)"),
}
for _name, (_kinds, _text) in OF_A_KIND.items():
    trap(forms.first(_text), kinds=_kinds, name=_name)


@trap(kinds=("mlp",))
def parts_swapped_by_new_names(unit):
    """w1 and w3, after a renaming, change their places."""
    forms.parts_renamed(unit)
    names = [n for n in unit.attributes.values() if n in ("w1", "w3", "gate_linear", "up_linear")]
    need(len(names) == 2)
    for node in ast.walk(unit.forward):
        if isinstance(node, ast.Attribute) and node.attr in names:
            node.attr = names[1 - names.index(node.attr)]
