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
from adversarial_forms import FORMS, T5, Dropout, Joined, K, P, Rate
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


def in_place(m):
    with torch.no_grad():
        m.up_proj.weight.mul_(2)


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
    for make, _ in FORMS.values():
        for part in made(make).children():
            assert (plain.parameters_of(part) is None) == (plain.why_not_linear(part) is not None)
