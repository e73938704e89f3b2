"""Refactors of Kimi Delta Attention layers with their forget gate, and traps: what computes
something else in a layer whose gate is in its own file."""

import ast
from typing import List

from refactor_cases import copied
from refactor_forms import (
    body_of,
    expression,
    need,
    refactor,
    rename,
    rename_attributes,
    statements,
)  # fmt: skip
from refactor_mutants import of_the_file, patched, trap

KDA = ("kda",)
GATE = {
    "f_a_proj": "down", "f_b_proj": "up", "f_proj": "projection", "A_log": "log_rate",
    "dt_bias": "offset", "num_heads": "count", "head_dim": "width", "lower_bound": "least",
    "safe_gate": "bounded", "safe_gate_lower_bound": "least",
}  # fmt: skip


def gate_of(unit) -> ast.ClassDef:
    """The class of the forget gate, which the file of the unit has then."""
    name = type(unit.subject.module.forget_gate).__name__
    found = [n for n in unit.subject.file.body if getattr(n, "name", None) == name]
    gate = copied(found[0])
    gate.name = "ForgetGate"
    unit.before.append(gate)
    for node in ast.walk(unit.cls):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = gate.name
    return gate


def method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)


def assigned(init: ast.FunctionDef, name: str) -> ast.Assign:
    """The statement of __init__ that makes an attribute."""
    return next(s for s in init.body if isinstance(s, ast.Assign)
                and ast.unparse(s.targets[0]) == f"self.{name}")  # fmt: skip


def attributes_renamed(owner: ast.ClassDef, names: dict) -> None:
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "self":
                node.attr = names.get(node.attr, node.attr)


@refactor(kinds=KDA)
def gate_copied(unit):
    gate_of(unit)


@refactor(kinds=KDA)
def gate_renamed(unit):
    """Its parts, parameters and numbers."""
    attributes_renamed(gate_of(unit), GATE)
    for old, new in GATE.items():
        unit.paths[f"forget_gate.{old}"] = f"forget_gate.{new}"


@refactor(kinds=KDA)
def everything_renamed(unit):
    gate_renamed(unit)
    module = unit.subject.module
    names = {n: f"{n}_part" for n in module._modules}
    names |= {n: f"{n}_value" for n in ("num_heads", "head_dim", "qkv_dim", "layer_idx",
                                        "activation", "conv_kernel_size")}  # fmt: skip
    rename_attributes(unit, names)


@refactor(kinds=KDA)
def gate_inlined(unit):
    """The layer has the gate's parts, and its forward the formula."""
    gate = gate_of(unit)
    moved_to_the_layer(unit, gate)
    forward = method(gate, "forward")
    rename(forward, {"hidden_shape": "gate_shape", "gate": "gate_value"})
    body = assigning(body_of(forward), "forget")
    at = next(i for i, s in enumerate(unit.forward.body) if "self.forget_gate(" in ast.unparse(s))
    replaced(unit.forward, "self.forget_gate(hidden_states)", "forget")
    unit.forward.body[at:at] = body


def assigning(body: List[ast.stmt], name: str) -> List[ast.stmt]:
    """Statements that give a name the value that they returned."""
    found = []
    for i, statement in enumerate(body):
        if isinstance(statement, ast.Return):
            found += statements(f"{name} = {ast.unparse(statement.value)}")
        elif isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return):
            rest = statement.orelse or body[i + 1 :]
            branch = ast.If(statement.test, assigning(statement.body, name), assigning(rest, name))
            return [*found, branch]
        else:
            found.append(statement)
    return found


@refactor(kinds=KDA)
def gate_as_a_method(unit):
    gate = gate_of(unit)
    moved_to_the_layer(unit, gate)
    forward = method(gate, "forward")
    forward.name = "forget"
    unit.cls.body.append(forward)
    replaced(unit.forward, "self.forget_gate(hidden_states)", "self.forget(hidden_states)")


def moved_to_the_layer(unit, gate: ast.ClassDef) -> None:
    """The gate's parts and parameters become the layer's."""
    unit.before.remove(gate)
    init, body = method(unit.cls, "__init__"), method(gate, "__init__").body
    made = assigned(init, "forget_gate")
    at = init.body.index(made)
    theirs = [s for s in body if not ast.unparse(s).startswith("super()")]
    init.body[at : at + 1] = theirs
    for name in [*unit.subject.module.forget_gate.state_dict()]:
        unit.paths[f"forget_gate.{name}"] = name


def replaced(tree: ast.AST, old: str, new: str) -> None:
    """Every expression of this text becomes another."""
    count = 0
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            for i, each in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(each, ast.expr) and ast.unparse(each) == old:
                    count += 1
                    if isinstance(value, list):
                        value[i] = expression(new)
                    else:
                        setattr(node, field, expression(new))
    need(count)


@refactor(kinds=KDA)
def gate_read_from_outside(unit):
    """The gate keeps its parts, and the layer's forward has the formula."""
    gate = gate_of(unit)
    forward = copied(method(gate, "forward"))
    for node in ast.walk(forward):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            node.value = expression("self.forget_gate")
    forward.name = "forget"
    unit.cls.body.append(forward)
    replaced(unit.forward, "self.forget_gate(hidden_states)", "self.forget(hidden_states)")


@refactor(kinds=KDA)
def gate_of_raw_values(unit):
    """The projections are the layer's, the formula is the gate's."""
    gate = gate_of(unit)
    names = [n for n in unit.subject.module.forget_gate._modules]
    init, inner = method(unit.cls, "__init__"), method(gate, "__init__")
    at = init.body.index(assigned(init, "forget_gate"))
    for name in names:
        made = assigned(inner, name)
        inner.body.remove(made)
        init.body.insert(at, made)
        unit.paths[f"forget_gate.{name}"] = name
    call = "hidden_states"
    for name in names:
        call = f"self.{name}({call})"
    replaced(unit.forward, "self.forget_gate(hidden_states)", f"self.forget_gate({call})")
    replaced(method(gate, "forward"), call, "hidden_states")


@refactor(kinds=KDA)
def softplus_for_its_formula(unit):
    gate = gate_of(unit)
    replaced(gate, "torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))", "F.softplus(g)")


@refactor(kinds=KDA)
def formula_for_softplus(unit):
    gate = gate_of(unit)
    replaced(gate, "F.softplus(gate_input)",
             "torch.where(gate_input > 20, gate_input, torch.log1p(gate_input.exp()))")  # fmt: skip


@refactor(kinds=KDA)
def gate_by_a_function(unit):
    gate = gate_of(unit)
    forward = method(gate, "forward")
    last = forward.body[-1]
    unit.before[-1:-1] = statements("def decay(rate, x):\n    return -rate * x")
    need(ast.unparse(last.value) == "-decay_rate * g_softplus")
    last.value = expression("decay(decay_rate, g_softplus)")


QKV = "[self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)]"


def fused(unit, names: List[str], new: str, width: str) -> None:
    """Projections become one."""
    init = method(unit.cls, "__init__")
    first = assigned(init, names[0])
    at = init.body.index(first)
    for name in names:
        init.body.remove(assigned(init, name))
    init.body[at:at] = statements(f"self.{new} = nn.Linear(self.hidden_size, {width}, bias=False)")
    unit.fused[f"{new}.weight"] = [f"{name}.weight" for name in names]


@refactor(kinds=KDA)
def qkv_fused(unit):
    fused(unit, ["q_proj", "k_proj", "v_proj"], "qkv_proj", "3 * self.qkv_dim")
    replaced(unit.forward, f"torch.cat({QKV}, dim=-1)", "self.qkv_proj(hidden_states)")


@refactor(kinds=KDA)
def qk_fused(unit):
    fused(unit, ["q_proj", "k_proj"], "qk_proj", "2 * self.qkv_dim")
    two = "[self.qk_proj(hidden_states), self.v_proj(hidden_states)]"
    replaced(unit.forward, QKV, two)


@refactor(kinds=KDA)
def output_gate_and_strength_fused(unit):
    """One projection for beta and what comes first of the output's gate."""
    name = "g_a_proj" if "g_a_proj" in unit.subject.module._modules else "g_proj"
    rows = "self.head_dim" if name == "g_a_proj" else "self.qkv_dim"
    fused(unit, [name, "b_proj"], "gb_proj", f"{rows} + self.num_heads")
    replaced(unit.forward, f"self.{name}(hidden_states)",
             f"self.gb_proj(hidden_states)[..., :{rows}]")  # fmt: skip
    replaced(unit.forward, "self.b_proj(hidden_states)",
             f"self.gb_proj(hidden_states)[..., {rows}:]")  # fmt: skip
    statements_ = statements("gate_and_strength = self.gb_proj(hidden_states)")
    for old in (f":{rows}", f"{rows}:"):
        replaced(unit.forward, f"self.gb_proj(hidden_states)[..., {old}]",
                 f"gate_and_strength[..., {old}]")  # fmt: skip
    at = next(i for i, s in enumerate(unit.forward.body) if "gate_and_" in ast.unparse(s))
    unit.forward.body[at:at] = statements_


@refactor(kinds=KDA)
def flattened_heads(unit):
    replaced(unit.forward, "query.view(hidden_shape)", "query.unflatten(-1, (-1, self.head_dim))")


@refactor(kinds=KDA)
def rules_by_one_name(unit):
    """recurrent if there is one token, else in chunks."""
    calls = [n for n in ast.walk(unit.forward) if isinstance(n, ast.If)
             and "recurrent_kimi_delta_attention(" in ast.unparse(n)]  # fmt: skip
    node = calls[-1]
    test = ast.unparse(node.test)
    call = copied(node.orelse[0])
    call.value.func = expression("rule")
    new = statements(
        f"rule = recurrent_kimi_delta_attention if {test} else chunk_kimi_delta_attention"
    )
    at = unit.forward.body.index(node)
    unit.forward.body[at : at + 1] = [*new, call]


# ---------------------------------------------------------------------------- traps

TRAPS = {  # (in the layer, or in its gate), what is replaced by what
    "without_l2_norm": ("layer", "True", "False"),
    "strength_without_sigmoid":
        ("layer", "torch.sigmoid(self.b_proj(hidden_states))", "self.b_proj(hidden_states)"),
    "strength_up_to_two": (
        "layer", "torch.sigmoid(self.b_proj(hidden_states))",
        "2 * torch.sigmoid(self.b_proj(hidden_states))"),
    "strength_by_another_activation": (
        "layer", "torch.sigmoid(self.b_proj(hidden_states))",
        "torch.tanh(self.b_proj(hidden_states))"),
    "convolution_without_silu": ("layer", "self.activation", "None"),
    "convolution_without_bias_of_taps":
        ("layer", "self.conv1d.weight.squeeze(1)", "self.conv1d.weight.squeeze(1) * 2"),
    "keys_and_queries_swapped": ("layer", "key.view(hidden_shape)", "query.view(hidden_shape)"),
    "state_of_another_dtype": (
        "layer", "last_recurrent_state.to(torch.float32)",
        "last_recurrent_state.to(torch.bfloat16)"),
    "state_transposed": (
        "layer", "last_recurrent_state.to(torch.float32)",
        "last_recurrent_state.to(torch.float32).transpose(-1, -2)"),
    "state_scaled": (
        "layer", "last_recurrent_state.to(torch.float32)",
        "last_recurrent_state.to(torch.float32) * 0.5"),
    "cache_of_the_first_layer": ("layer", "self.layer_idx", "0"),
    "another_width_of_the_cache": ("layer", "self.conv_kernel_size", "self.conv_kernel_size + 1"),
    "gate_of_the_output_first": (
        "layer", "self.o_norm(core_attn_out, gate)", "self.o_norm(gate, core_attn_out)"),
    "gate_of_the_output_of_bailing_first": (
        "layer", "self.o_norm(output, output_gate.view(hidden_shape))",
        "self.o_norm(output_gate.view(hidden_shape), output)"),
    "gate_applied_before_the_norm": (
        "layer", "self.o_norm(core_attn_out, gate)",
        "self.o_norm(core_attn_out * torch.sigmoid(gate), gate)"),
    "decay_halved": ("layer", "self.forget_gate(hidden_states)",
                     "self.forget_gate(hidden_states) / 2"),  # fmt: skip
    "decay_positive": ("gate", "-decay_rate", "decay_rate"),
    "decay_with_another_sign_of_the_bias": (
        "gate", "forget_gate.float() + self.dt_bias.float().view(1, 1, -1)",
        "forget_gate.float() - self.dt_bias.float().view(1, 1, -1)"),
    "decay_without_bias": ("gate", "self.dt_bias.float().view(1, 1, -1)", "0.0"),
    "decay_without_rate": ("gate", "torch.exp(A_log)", "torch.exp(A_log * 0)"),
    "rate_without_exponential": ("gate", "torch.exp(A_log)", "A_log"),
    "a_bend_of_softplus_that_no_trial_reaches": ("gate", "g > 20.0", "g > 2000.0"),
    "a_bend_that_negates": (
        "gate", "torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))",
        "torch.where(g > 20.0, -g, torch.log(1.0 + torch.exp(g)))"),
    "softplus_that_overflows": (
        "gate", "torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))",
        "torch.log(1.0 + torch.exp(g))"),
    "a_bend_of_the_strength": (
        "layer", "torch.sigmoid(self.b_proj(hidden_states))",
        "torch.where(self.b_proj(hidden_states) > 50.0, 0.0, "
        "torch.sigmoid(self.b_proj(hidden_states)))"),
    "bound_ignored": ("gate", "self.safe_gate_lower_bound is not None", "False"),
    "bound_of_a_constant": ("gate", "self.lower_bound", "-4.0"),
    "bound_doubled": ("gate", "self.safe_gate_lower_bound", "2 * self.safe_gate_lower_bound"),
    "gate_without_its_first_projection":
        ("gate", "self.f_b_proj(self.f_a_proj(hidden_states))",
         "self.f_b_proj(torch.tanh(self.f_a_proj(hidden_states)))"),
    "gate_of_other_tokens": ("layer", "self.forget_gate(hidden_states)",
                             "self.forget_gate(hidden_states.flip(1))"),  # fmt: skip
}  # fmt: skip


def _register_traps() -> None:
    for name, (where, old, new) in TRAPS.items():

        def change(unit, where=where, old=old, new=new):
            gate = gate_of(unit)
            replaced(unit.forward if where == "layer" else method(gate, "forward"), old, new)

        trap(change, kinds=KDA, name=f"kda_{name}")


_register_traps()


@trap(kinds=KDA)
def kda_chunks_without_the_state(unit):
    """A prompt after a cache does not go on from its state."""
    replaced(unit.forward, "recurrent_state is not None and seq_len == 1", "seq_len == 1")
    for node in ast.walk(unit.forward):
        if isinstance(node, ast.Call) and "chunk_kimi" in ast.unparse(node.func):
            for word in node.keywords:
                if word.arg == "initial_state":
                    word.value = ast.Constant(None)


@trap(kinds=KDA)
def kda_gate_patched_afterwards(unit):
    gate_of(unit)
    unit.after = _patched_gate


def _patched_gate(cls):
    gate = vars(of_the_file(cls))["ForgetGate"]
    plain = gate.forward
    return patched(gate, "forward", lambda self, *args: plain(self, *args) * 0.5)
