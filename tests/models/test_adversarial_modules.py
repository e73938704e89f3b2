"""Modules that look like a gated MLP: served with the same values, or left alone with a reason.

No kernel serves a CPU, so that the package's own reference stands in for one here
(dispatch.force); where a call has to run the module itself, a kernel that gives NaN stands in.
"""

import contextlib
import copy
import io

import pytest
import torch
import torch.nn.functional as F
from adversarial_forms import FORMS, T5, Adapter, Dropout, Joined, K, N, P, Rate, gelu_new, hook
from conftest import assert_close, submodule
from torch import nn
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trusts_all")]
dispatch = submodule("runtime.dispatch")
swiglu = submodule("layers.swiglu")
FEATURES = ("fused_swiglu", "fused_swiglu_mlp")


@contextlib.contextmanager
def reference():
    """The reference serves as a kernel would; gives the record of who served."""
    with dispatch.force("reference"), dispatch.served() as record:
        yield record


@contextlib.contextmanager
def poison():
    """A kernel that serves, and gives NaN."""
    with pytest.MonkeyPatch.context() as patch, dispatch.force("reference"):
        for name in FEATURES:
            patch.setattr(swiglu, name, lambda x, *rest, **options: x * float("nan"))
        yield


def random_input(*shape, dtype=torch.float64, scale=1.0):
    random = torch.Generator().manual_seed(1)
    return (torch.randn(*shape, generator=random, dtype=torch.float64) * scale).to(dtype)


def results(module, dtype, training, grad):
    """Outputs for inputs of several sizes, the last one large, with the same random numbers."""
    module = module.to(dtype).train(training)
    out = []
    with torch.set_grad_enabled(grad):
        for shape, scale in (((4,), 1.0), ((2, 3), 1.0), ((65,), 100.0)):
            torch.manual_seed(0)
            x = random_input(*shape, K, dtype=dtype, scale=scale)
            y = module(x)
            out.append(y[0] if isinstance(y, tuple) else y)
    return out


def made(make):
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("name", FORMS)
def test_served_or_left_alone(kernel, name):
    make, expected = FORMS[name]
    plain, module = made(make), made(make)
    row = kernel.kernelize(nn.Sequential(module).train()).rows[0]
    assert (row.reason is None) == (expected is None), row.reason
    if expected is not None:
        assert expected in row.reason
        assert type(module) is type(plain) and "forward" not in vars(module).keys() - vars(plain)
    for dtype in (torch.float64, torch.bfloat16):
        for training in (False, True):
            for grad in (False, True):
                with reference() as record:
                    out = results(module, dtype, training, grad)
                assert bool(record) == (expected is None)
                for got, ref in zip(out, results(plain, dtype, training, grad)):
                    assert_close(got, ref)


def test_dropout_is_served_in_evaluation(kernel):
    """And drops out as before once the model trains."""
    for make in (Dropout, Rate, T5):
        module = made(make).eval()
        plain = copy.deepcopy(module)
        assert kernel.kernelize(nn.Sequential(module).eval()).served
        with reference() as record:
            for got, ref in zip(*(results(m, torch.float64, False, True) for m in (module, plain))):
                assert_close(got, ref)
        assert record
        with poison():
            for got, ref in zip(*(results(m, torch.float64, True, True) for m in (module, plain))):
                assert_close(got, ref)


def test_gradients(kernel):
    for make in (P, Joined, T5):
        module = made(make).eval().double()
        plain = copy.deepcopy(module)
        assert kernel.kernelize(module).served
        grads = []
        for m in (plain, module):
            x = random_input(5, K).requires_grad_()
            with reference():
                grads.append(torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]))
        for got, ref in zip(grads[1], grads[0]):
            assert_close(got, ref)


class Spelled(nn.Module):
    def forward(self, x):
        return x.relu()


def set_part(name, part):
    return lambda m: setattr(m, name, part(m) if callable(part) else part)


def new_weight(m):
    m.up_proj.weight = nn.Parameter(m.up_proj.weight.detach() * 2)


def in_place(m):
    with torch.no_grad():
        m.up_proj.weight.mul_(2)


def add_bias(m):
    m.up_proj.bias = nn.Parameter(random_input(N))


def swap_class(m):
    m.up_proj.__class__ = type("First", (nn.Linear,), {"forward": lambda self, x: x[..., :1] * 2})


def weight_norm(m):
    nn.utils.parametrizations.weight_norm(m.up_proj)


def silu_on_the_instance(m):
    m.act_fn.forward = F.relu


def hidden(m):
    m.__dict__["gate_proj"] = m.up_proj


# what is done to a served module, and whether the kernels may serve it then
AFTER = {
    "nothing": (lambda m: None, True),
    "another weight": (new_weight, True),
    "a weight changed in place": (in_place, True),
    "a bias": (add_bias, True),
    "another activation": (set_part("act_fn", lambda m: nn.ReLU()), True),
    "an activation by name": (set_part("act_fn", lambda m: gelu_new()), True),
    "an adapter on down": (set_part("down_proj", lambda m: Adapter(m.down_proj).double()), True),
    "a hook on the module": (lambda m: m.register_forward_hook(hook), True),
    "exact gelu": (set_part("act_fn", lambda m: nn.GELU()), False),
    "an unknown activation": (set_part("act_fn", lambda m: Spelled()), False),
    "a hook on the activation": (lambda m: m.act_fn.register_forward_hook(hook), False),
    "another forward of the activation": (silu_on_the_instance, False),
    "a hook on gate": (lambda m: m.gate_proj.register_forward_hook(hook), False),
    "a hook before up": (
        lambda m: m.up_proj.register_forward_pre_hook(lambda m, args: (args[0] * 2,)), False),
    "an adapter on up": (set_part("up_proj", lambda m: Adapter(m.up_proj).double()), False),
    "another forward of up": (lambda m: setattr(m.up_proj, "forward", m.gate_proj.forward), False),
    "another class of up": (swap_class, False),
    "up of one column": (set_part("up_proj", lambda m: nn.Linear(K, 1).double()), True),
    "weight norm": (weight_norm, False),
    "spectral norm": (lambda m: nn.utils.spectral_norm(m.up_proj), False),
    "a hidden part": (hidden, False),
}  # fmt: skip


@pytest.mark.parametrize("name", AFTER)
def test_what_is_done_after_kernelize_counts(kernel, name):
    change, served = AFTER[name]
    plain = made(P).double().eval()
    module = copy.deepcopy(plain)
    assert kernel.kernelize(module).served
    for m in (plain, module):
        torch.manual_seed(5)
        change(m)
    x = random_input(4, K)
    with torch.no_grad(), reference() if served else poison():
        out = module(x)
    ref = plain(x)
    assert_close(out, ref)
    if name not in ("nothing", "weight norm"):
        assert not torch.allclose(ref, made(P).double()(x))


def reloaded(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)))


def linear_forward(self, x):
    return F.linear(x, self.weight, self.bias) * 2


def of_all_modules(patch):
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if isinstance(module, nn.Linear) else None
    )
    patch.callback = handle.remove


def pre_hook_of_all_modules(patch):
    handle = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (args[0] * 2,) if isinstance(module, nn.Linear) else None
    )
    patch.callback = handle.remove


PATCHES = {
    "a hook on all modules": of_all_modules,
    "a hook before all modules": pre_hook_of_all_modules,
    "nn.Linear.forward": lambda patch: patch.setattr(nn.Linear, "forward", linear_forward),
    "F.linear": lambda patch: patch.setattr(F, "linear", lambda x, w, b=None: (x @ w.T) * 2),
    "F.silu": lambda patch: patch.setattr(F, "silu", lambda x, inplace=False: x.relu()),
    "nn.SiLU.forward": lambda patch: patch.setattr(nn.SiLU, "forward", lambda self, x: x.relu()),
    "nn.Module.__call__": lambda patch: patch.setattr(
        nn.Module, "__call__", lambda self, x: self.forward(x) * 2),
    "the class's forward": lambda patch: patch.setattr(P, "forward", lambda self, x: x * 3),
    "its code": lambda patch: patch.setattr(P.forward, "__code__", reloaded.__code__),
}  # fmt: skip


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.parametrize("when", ["before kernelize", "after kernelize"])
def test_patches_of_the_process_count(kernel, name, when):
    plain = made(P).double().eval()
    module, x = copy.deepcopy(plain), random_input(4, K)
    usual = plain(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.callback = lambda: None
        try:
            if when == "after kernelize":
                assert kernel.kernelize(module).served
            PATCHES[name](patch)
            if when == "before kernelize":
                kernel.kernelize(module)
            with torch.no_grad(), poison():
                out = module(x)
            ref = plain(x)
            assert_close(out, ref)
            assert not torch.allclose(ref, usual)
        finally:
            patch.callback()
    with reference() as record:
        assert_close(module(x), usual)
    assert record or when == "before kernelize"


def vmapped(m, x):
    return torch.func.vmap(m)(x)


def forward_derivative(m, x):
    return torch.func.jvp(m, (x,), (torch.ones_like(x),))[1]


def dual(m, x):
    with torch.autograd.forward_ad.dual_level():
        y = m(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def per_sample(m, x):
    parameters = {name: p.detach() for name, p in m.named_parameters()}

    def loss(parameters, row):
        return torch.func.functional_call(m, parameters, (row,)).square().sum()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)["up_proj.weight"]


def traced(m, x):
    return torch.jit.trace(m, x, check_trace=False)(x * 2)


def nested(m, x):
    parts = torch.nested.nested_tensor([x, x[:2]])
    return m(parts).to_padded_tensor(0.0)


class Halved(TorchFunctionMode):
    """Halves the result of every F.linear."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        y = function(*args, **(kwargs or {}))
        return y / 2 if function is F.linear else y


def in_a_mode(m, x):
    with Halved(), torch.no_grad():
        return m(x)


OTHER_CALLS = [vmapped, forward_derivative, dual, per_sample, traced, nested, in_a_mode]


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_calls_that_no_kernel_can_serve(kernel, call):
    plain = made(P).double().eval()
    module, x = copy.deepcopy(plain), random_input(4, K)
    assert kernel.kernelize(module).served
    with poison():
        out = call(module, x)
    assert_close(out, call(plain, x))


def test_a_default_device_is_no_mode_that_changes_calls(kernel):
    module = made(P).double().eval()
    assert kernel.kernelize(module).served
    with torch.device("cpu"), reference() as record:
        module(random_input(4, K))
    assert record


class Tagged(torch.Tensor):
    """A subclass of tensors, which a kernel must not unwrap."""


def test_a_subclass_of_tensors_is_not_unwrapped(kernel):
    module = made(P).double().eval()
    plain, x = copy.deepcopy(module), random_input(4, K).as_subclass(Tagged)
    assert kernel.kernelize(module).served
    with poison():
        out = module(x)
    assert type(out) is Tagged
    assert_close(out.as_subclass(torch.Tensor), plain(x).as_subclass(torch.Tensor))


def test_t5_keeps_its_last_projection_in_fp32(kernel):
    module = made(T5).eval().bfloat16()
    module.wo.float()
    plain, x = copy.deepcopy(module), random_input(4, K, dtype=torch.bfloat16)
    assert kernel.kernelize(module).served
    with poison():
        out = module(x)
    assert out.dtype == torch.float32
    assert_close(out, plain(x))


def own_parts(m):
    other = copy.copy(m)
    other._modules = {name: copy.deepcopy(part) for name, part in m._modules.items()}
    return other


def replica(m):
    other = m._replicate_for_data_parallel()
    other._modules = {name: copy.deepcopy(part) for name, part in m._modules.items()}
    return other


def pickled(m):
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make_copy", [own_parts, replica, pickled, copy.deepcopy])
def test_copies_compute_with_their_own_weights(kernel, make_copy):
    plain = made(P).double().eval()
    module, x = copy.deepcopy(plain), random_input(4, K)
    assert kernel.kernelize(module).served
    copies = [make_copy(m) for m in (plain, module)]
    for m in copies:
        in_place(m)
        m.act_fn = nn.ReLU()
    with torch.no_grad(), reference():
        ref, out, before = copies[0](x), copies[1](x), module(x)
        assert_close(out, ref)
        assert_close(before, plain(x))
    assert not torch.allclose(ref, before)


def test_random_numbers_and_modes_stay(kernel):
    """Looking at a module draws no random numbers and leaves modes as they are."""
    state, module = torch.get_rng_state(), made(P).eval()
    torch.set_rng_state(state)
    with torch.inference_mode():
        assert kernel.kernelize(made(Joined).eval()).served
    torch.set_rng_state(state)
    with torch.no_grad(), torch.autocast("cpu"):
        kernel.kernelize(module)
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert not module.training and all(p.grad is None for p in module.parameters())


def test_quick_checks_agree_with_reasons(kernel):
    """parameters_of, which looks in every call, and why_not_linear, which explains."""
    plain = submodule("layers.plain")
    for change, _ in AFTER.values():
        module = made(P).double()
        change(module)
        for part in (module.gate_proj, module.up_proj, module.down_proj):
            assert (plain.parameters_of(part) is None) == (plain.why_not_linear(part) is not None)
