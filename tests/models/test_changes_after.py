"""What is put in the place of parts, methods and functions counts, after kernelize as before it:
logits of a prompt, and of tokens after it, are those of the same model without kernelize.

No kernel serves a CPU, so that the package's own reference stands in for one (dispatch.force).
"""

import copy
import functools
import importlib
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from tiny_models import in_use, random_model, serving
from torch import nn

activations = pytest.importorskip("transformers.activations")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trusts_all")]


@functools.cache
def model_of(name):
    """To be copied, not to be changed; and what it gives."""
    model = random_model(name)
    return model, in_use(model)


def times(factor, out):
    return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor


def tripled(own):
    return lambda *args, **kwargs: times(3, own(*args, **kwargs))


def doubled(module, args, out):
    return times(2, out)


class Doubled(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, *args, **kwargs):
        return times(2, self.own(*args, **kwargs))


class Tripled(nn.Module):
    def forward(self, x):
        return x * 3


class BareRMSNorm(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class OtherNorm(nn.Module):
    """A gated norm of another formula, with the attributes of transformers' own."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.activation = norm.weight, norm.activation
        self.variance_epsilon = norm.variance_epsilon

    def forward(self, x, gate):
        return 2 * self.weight * x * F.silu(gate)


class OfFLA(nn.Module):
    """As FLA's FusedRMSNormGated: eps under another name."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps, self.activation = norm.weight, 0.3, "swish"

    def forward(self, x, g):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps) * F.silu(g)


def parts(model, end):
    """The modules whose path ends so; a GDN layer's norm by the name of its family."""
    if end == "gdn":
        return [m for m in model.modules() if hasattr(m, "conv1d")]
    if end == "gdn.norm":
        return [getattr(m, "norm", None) or m.o_norm for m in parts(model, "gdn")]
    found = [m for path, m in model.named_modules() if path.endswith(end)]
    assert found, end
    return found


def each(end, do):
    """A change of the parts of a model."""

    def change(model, patch):
        for part in parts(model, end):
            do(part)

    return change


def replace(end, make):
    def change(model, patch):
        for part in parts(model, end):
            parent = next(m for m in model.modules() if part in m._modules.values())
            name = next(n for n, m in parent._modules.items() if m is part)
            setattr(parent, name, make(part))

    return change


def attribute(end, *names, value):
    return each(end, lambda part: [setattr(part, n, value) for n in names])


def hook(end):
    return each(end, lambda part: part.register_forward_hook(doubled))


def forward(end, wrap=tripled):
    return each(end, lambda part: setattr(part, "forward", wrap(part.forward)))


def method(end, name, wrap=tripled):
    return each(end, lambda part: setattr(part, name, wrap(getattr(part, name))))


def subclass(end, member, own):
    """Of a class that has another member, which calls own(class)."""

    def do(part):
        kind = type(part)
        part.__class__ = type("Mine", (kind,), {member: tripled(own(kind))})

    return each(end, do)


def own_class(part):
    """The class of transformers, of a module that may be served."""
    theirs = [k for k in type(part).__mro__ if k.__module__.startswith("transformers.models")]
    return next(k for k in theirs if vars(sys.modules[k.__module__]).get(k.__name__) is k)


def patch_class(end, wrap=tripled):
    def change(model, patch):
        once(patch, own_class(parts(model, end)[0]), "forward", wrap)

    return change


def patch_function(of, name, wrap=tripled):
    """Of the file of a part's class."""

    def change(model, patch):
        kind = own_class(parts(model, of)[0])
        once(patch, importlib.import_module(kind.__module__), name, wrap)

    return change


def call_of_a_class(end):
    """Layers and attention read the weights of their norms in place of calling them."""

    def change(model, patch):
        for part in parts(model, end):
            kind = next((k for k in type(part).__mro__ if k.__name__ == "SubRMSNorm"), None)
            kind.__call__ = lambda self, x: nn.Module.__call__(self, x) * 1.5

    return change


def with_subclass(end):
    def prepare(model):
        kind = None
        for part in parts(model, end):
            kind = kind or type("SubRMSNorm", (type(part),), {})
            part.__class__ = kind

    return prepare


def identities(model):
    """In place of norms, as Qwen3-Omni has them."""
    for name in ("q_norm", "k_norm"):
        replace(name, lambda _: nn.Identity())(model, None)


def bare_norms(model, patch):
    for name in ("q_norm", "k_norm"):
        replace(name, lambda _: BareRMSNorm(0.1))(model, patch)


def reordered(own):
    return lambda *args: [x * 2 for x in own(*args)]


def halved(own):
    return lambda x: own(x) * 0.5


def once(patch, owner, name, make):
    """Patches what both models have."""
    own = getattr(owner, name)
    if not hasattr(own, "patched"):
        other = make(own)
        other.patched = True
        patch.setattr(owner, name, other)


def patched(owner, name, make):
    return lambda model, patch: once(patch, owner, name, make)


def hook_for_all(end):
    def change(model, patch):
        some = parts(model, end) if end else ()

        def double(module, args, out):
            chosen = any(module is part for part in some) or not end and type(module) is nn.Linear
            return out * 2 if chosen else None

        handle = nn.modules.module.register_module_forward_hook(double)
        patch.callbacks.append(handle.remove)

    return change


def before_all_modules(model, patch):
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (args[0] * 2,) if isinstance(module, nn.Linear) else None
    )
    patch.callbacks.append(handle.remove)


def doubled_linears(call):
    def doubled_call(self, *args, **kwargs):
        out = call(self, *args, **kwargs)
        return out * 2 if isinstance(self, nn.Linear) else out

    return doubled_call


def reloaded(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)))


def another_code(model, patch):
    function = own_class(parts(model, "mlp")[0]).forward
    patch.setattr(function, "__code__", reloaded.__code__)


def another_class(linear):
    linear.__class__ = type(
        "First", (nn.Linear,), {"forward": lambda self, x: x[..., :1] * self.weight[:, 0]}
    )


def parameter(name, make):
    return lambda part: setattr(part, name, nn.Parameter(make(part)))


def hide(mlp):
    mlp.__dict__["gate_proj"] = mlp.up_proj


WRAPPED = functools.partial(patch_class, wrap=lambda own: functools.wraps(own)(tripled(own)))
LAYER, EPS = "layers.1", "variance_epsilon"
WEIGHT_NORM = "weight norm"  # which changes no value
# what a reference that stands in for a kernel calls, too
OF_REFERENCES = ("F.linear", "F.silu", "nn.Linear.forward", "nn.Module.__call__")
UP, ACT, MLP = "1.mlp.up_proj", "1.mlp.act_fn", "1.mlp"
GDN = ("qwen3_5_text", "qwen3_next", "olmo_hybrid")
# {what: (models, the change; more: what is left alone for it, before; what is done first)}
CHANGES = {
    **{f"a hook on {end}": ("qwen3", hook(f"{LAYER}.{end}")) for end in (
        "post_attention_layernorm", "input_layernorm", "self_attn", "self_attn.q_norm",
        "self_attn.v_proj", "mlp", "mlp.gate_proj", "mlp.act_fn")},
    **{f"another {end}": ("qwen3", replace(f"{LAYER}.{end}", Doubled)) for end in (
        "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        "post_attention_layernorm", "self_attn.k_norm", "mlp")},
    # an MLP
    "another weight": ("qwen3", each(UP, parameter("weight", lambda m: m.weight.detach() * 2))),
    "a weight in place": ("qwen3", each(UP, lambda m: m.weight.data.mul_(2))),
    "a bias": ("qwen3", each(UP, parameter("bias", lambda m: m.weight.detach()[:, 0]))),
    "another activation": ("qwen3", replace(ACT, lambda _: nn.ReLU())),
    "an activation by name": ("qwen3", replace(ACT, lambda _: activations.ACT2FN["gelu_new"])),
    "exact gelu": ("qwen3", replace(ACT, lambda _: nn.GELU()), "activation is GELU"),
    "an unknown activation": ("qwen3", replace(ACT, lambda _: Tripled()), "its activation is"),
    "a forward of the activation": ("qwen3", forward(ACT), "its activation is"),
    "a hook before up": ("qwen3", each(UP, lambda m: m.register_forward_pre_hook(
        lambda m, args: (args[0] * 2,)))),
    "another forward of up": ("qwen3", each(MLP, lambda m: setattr(
        m.up_proj, "forward", m.gate_proj.forward))),
    "another class of up": ("qwen3", each(UP, another_class)),
    "up of one column": ("qwen3", replace(UP, lambda m: nn.Linear(m.in_features, 1))),
    WEIGHT_NORM: ("qwen3", each(UP, nn.utils.parametrizations.weight_norm)),
    "spectral norm": ("qwen3", each(UP, nn.utils.spectral_norm)),
    "a hidden part": ("qwen3", each(MLP, hide), "is no module of its own"),
    # of the process
    "a hook on all modules": ("qwen3", hook_for_all("")),
    "a hook before all modules": ("qwen3", before_all_modules),
    "nn.Linear.forward": ("qwen3", patched(nn.Linear, "forward", tripled)),
    "F.linear": ("qwen3", patched(F, "linear", tripled)),
    "F.silu": ("qwen3", patched(F, "silu", lambda _: lambda x, inplace=False: x.relu())),
    "a forward of activations": ("qwen3", patched(
        activations.SiLUActivation, "forward", lambda _: lambda self, x: x.relu())),
    "nn.Module.__call__": ("qwen3", patched(nn.Module, "__call__", doubled_linears)),
    "the class's forward": ("qwen3", patch_class("mlp"), "is patched"),
    "its code": ("qwen3", another_code, "is patched"),
    "another eps": ("qwen3", attribute("post_attention_layernorm", EPS, value=0.1)),
    "another eps of q_norm": ("qwen3", attribute("q_norm", EPS, value=0.1)),
    "another scaling": ("qwen3", attribute("self_attn", "scaling", value=0.7)),
    "another scaling of latents": ("glm4_moe_lite", attribute("self_attn", "scaling", value=0.7)),
    "a method of latent attention": ("glm4_moe_lite", method("self_attn", "expand_kv")),
    "a forward on a norm": ("qwen3", forward("1.input_layernorm")),
    "a method of a norm": (
        "gemma2", each("1.input_layernorm", lambda norm: setattr(
            norm, "_norm", types.MethodType(lambda self, x: x * 2, norm)))),
    "a part for a dropout": ("phi3", replace("resid_mlp_dropout", lambda _: Tripled())),
    "norms without weights": ("qwen3", bare_norms),
    **{f"{norm} of {name} by {tuple(weight.shape)}": (name, each(norm, lambda part, weight=weight: (
        setattr(part, "weight", nn.Parameter(weight.clone())))))
       for name, norm in (("qwen3", "q_norm"), ("olmo2", "k_norm"), ("qwen3_5_text", "model.norm"))
       for weight in (torch.tensor(1.5), torch.tensor([1.5]))},
    **{f"a call of the class of {end}": (
        name, call_of_a_class(end), "a __call__ of its own", with_subclass(end))
       for name, end in (("llama", "layernorm"), ("qwen3", "k_norm"))},
    "in place of an identity": ("qwen3", replace("k_norm", lambda _: Tripled()), "", identities),
    **{f"the class of {end}": ("qwen3", patch_class(end), "is patched") for end in (
        "k_norm", "self_attn", LAYER)},
    "a function of rotary embedding": (
        "qwen3", patch_function("self_attn", "apply_rotary_pos_emb"), "is patched"),
    # Gated DeltaNet
    "the class of a layer, wrapped": (GDN, WRAPPED("gdn"), "is patched"),
    "a gated norm of another formula": (GDN, replace("gdn.norm", OtherNorm)),
    "a gated norm of FLA": (GDN, replace("gdn.norm", OfFLA)),
    "a gated norm, subclassed": (GDN, subclass("gdn.norm", "forward", lambda kind: kind.forward)),
    "a gated norm, called otherwise": (
        GDN, subclass("gdn.norm", "__call__", lambda kind: nn.Module.__call__)),
    "a gated norm, patched": (GDN, forward("gdn.norm")),
    "a gated norm, its class": (GDN, patch_class("gdn.norm")),
    "a gated norm, its class wrapped": (GDN, WRAPPED("gdn.norm")),
    "a gated norm, hooked": (GDN, hook("gdn.norm")),
    "a gated norm, hooked for all": (GDN, hook_for_all("gdn.norm")),
    "a method of the layer": (
        "qwen3_next", method("gdn", "fix_query_key_value_ordering", reordered)),
    **{part: ("qwen3_5_text", forward(part, halved)) for part in (
        "in_proj_z", "in_proj_qkv", "out_proj")},
    "activations": ("qwen3_5_text", lambda model, patch: [
        setattr(part, "activation", "relu")
        for end in ("gdn", "gdn.norm") for part in parts(model, end)]),
    **{name: ("qwen3_5_text", patch_function("gdn", name), f"{name}, which is patched")
       for name in ("apply_mask_to_padding_states", "causal_conv1d_fn",
                    "torch_chunk_gated_delta_rule", "l2norm")},
    "softplus": ("qwen3_5_text", patched(F, "softplus", tripled), "softplus, which is patched"),
}  # fmt: skip
CASES = [
    (what, when, found[0] if isinstance(found[0], str) else found[0][(i + j) % 3])
    for i, (what, found) in enumerate(CHANGES.items()) for j, when in enumerate(("before", "after"))
]  # fmt: skip


@pytest.fixture
def patch(monkeypatch):
    monkeypatch.callbacks = []
    yield monkeypatch
    for undo in monkeypatch.callbacks:
        undo()


@pytest.mark.parametrize("what, when, name", CASES, ids=lambda word: word)
def test_what_is_put_in_place_counts(kernel, patch, what, when, name):
    """Each in one family, the next one in the next."""
    change, reason, prepare = (*CHANGES[what][1:], *("", None)[len(CHANGES[what]) - 2 :])
    own, usual = model_of(name)
    model, served = copy.deepcopy(own), copy.deepcopy(own)
    if prepare is not None:
        prepare(model), prepare(served)
        usual = in_use(model)
    if when == "after":
        kernel.kernelize(served)
    for each_model in (served, model):
        torch.manual_seed(5)
        change(each_model, patch)
    if when == "before":
        left = [row.reason for row in kernel.kernelize(served).left]
        assert not reason or any(reason in each for each in left), left
    with serving() as record:
        found = in_use(served)
    assert what not in OF_REFERENCES or "swiglu_fwd" not in record
    expected = in_use(model)
    assert (found - expected).abs().max() <= 2e-5 * max(1, expected.abs().max())
    assert what == WEIGHT_NORM or (expected - usual).abs().max() > 1e-3
