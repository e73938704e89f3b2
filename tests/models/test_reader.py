"""What a reader of forwards takes for granted is looked at again in every call."""

import copy
import functools

import pytest
import torch
from adversarial_forms import ByWeights, EmptyFirst, Flags, K, N, P
from conftest import assert_close, submodule
from torch import nn

dispatch = submodule("runtime.dispatch")


def made(make=P):
    torch.manual_seed(0)
    return make()


def kernelized(kernel, module):
    """The reasons why what is in a module is left alone, None for what is served."""
    return [row.reason for row in kernel.kernelize(nn.Sequential(module)).rows]


def assert_same(module, plain, x=None):
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1)) if x is None else x
    with dispatch.force("reference"):
        torch.manual_seed(2)
        got = module(x)
    torch.manual_seed(2)
    assert_close(got, plain(x))


@pytest.mark.parametrize("name, value", [("mode", "clamped"), ("noise", 0.1)])
def test_a_flag_that_is_set_afterwards(kernel, name, value):
    module, plain = made(Flags).train(), made(Flags).train()
    assert kernelized(kernel, module) == [None]
    assert_same(module, plain)
    for each in (module, plain):
        setattr(each, name, value)
    assert_same(module, plain)


@pytest.mark.parametrize("modes", [("plain", "clamped"), ("clamped", "plain")])
def test_modules_of_a_class_with_other_flags(kernel, modes):
    class Own(Flags):
        pass

    for mode in modes:
        module, plain = (
            made(functools.partial(Own, mode=mode)),
            made(functools.partial(Own, mode=mode)),
        )
        (reason,) = kernelized(kernel, module)
        assert (reason is None) == (mode == "plain"), reason
        assert_same(module, plain)


def test_what_is_off_inside_is_on_outside(kernel):
    """A context that turns autocast off, in a call under autocast; and an input of no rows."""
    module, plain = made(EmptyFirst), made(EmptyFirst)
    assert kernelized(kernel, module) == [None]
    assert_same(module, plain)
    assert_same(module, plain, torch.empty(0, K))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(module, plain)


def traced(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return wrapper


def passed_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def test_a_wrapper_of_a_forward_with_several_arguments(kernel):
    """It has no name for the module itself; the forward has names for all of its arguments."""

    class Wrapped(P):
        @passed_on
        def forward(self, x, scale=None, **kwargs):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    module, plain = made(Wrapped), made(Wrapped)
    assert kernelized(kernel, module) == [None]
    assert_same(module, plain)


def test_what_a_wrapper_calls_is_another_afterwards(kernel):
    class Wrapped(P):
        @traced
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    module, plain = made(Wrapped), made(Wrapped)
    assert kernelized(kernel, module) == [None]
    (cell,) = Wrapped.forward.__closure__
    kept = cell.cell_contents
    cell.cell_contents = lambda self, x: kept(self, x) * 2
    assert_same(module, plain)


def test_a_class_that_was_refused_is_read_again_once_it_is_another(kernel):
    class Changing(P):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)).sort()[0] * self.up_proj(x))

    assert kernelized(kernel, made(Changing)) != [None]
    assert kernelized(kernel, made(Changing)) != [None]
    Changing.forward = P.forward
    module = made(Changing)
    assert kernelized(kernel, module) == [None]
    assert_same(module, made())


def test_a_bias_that_is_there_afterwards(kernel):
    module, plain = made(ByWeights), made(ByWeights)
    assert kernelized(kernel, module) == [None]
    assert_same(module, plain)
    for each in (module, plain):
        each.up_proj.bias = nn.Parameter(torch.ones(N))
    assert_same(module, plain)
    for each in (module, plain):
        each.gate_proj.register_forward_hook(lambda part, args, y: y * 2)  # which nobody calls
    assert_same(module, plain)


class TwoInputs(P):
    def forward(self, x, residual):
        return super().forward(x) + residual


def test_two_arguments_that_have_to_be_given(kernel):
    reason = "its forward takes other arguments than one tensor"
    assert kernelized(kernel, made(TwoInputs)) == [reason]


class Rate(P):
    """The rate of a dropout that also decides."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if self.rate > 0.3:
            x = nn.functional.dropout(x, p=self.rate, training=self.training)
        else:
            x = x * 2
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_a_rate_that_decides(kernel):
    module, plain = made(Rate).eval(), made(Rate).eval()
    kernelized(kernel, module)
    for rate in (0.5, 0.1):
        module.rate = plain.rate = rate
        assert_same(module, plain)


class Norm(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.weight, self.eps, self.scaled = nn.Parameter(torch.ones(K)), 1e-6, False

    def forward(self, x, scale=None):
        if self.scaled:
            x = torch.sort(x)[0]
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class InPlaceNorm(Norm):
    def forward(self, x):
        y = x.to(torch.float32)
        y *= torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


Norm.__name__ = "SortingRMSNorm"
InPlaceNorm.__name__ = "InPlaceRMSNorm"


def test_norms(kernel):
    module = Norm()
    plain = copy.deepcopy(module)
    assert kernelized(kernel, module) == [None]
    assert_same(module, plain)
    module.scaled = plain.scaled = True
    assert_same(module, plain)
    assert kernelized(kernel, InPlaceNorm()) == ["its forward writes to its input"]


def doubled(function):
    return lambda *args: 2 * function(*args)


class Decorated(P):
    def forward(self, x):
        @doubled
        def gate(x):
            return self.gate_proj(x)

        return self.down_proj(self.act_fn(gate(x)) * self.up_proj(x))


class Wrapped(P):
    @torch.no_grad()
    def other(self, x):
        return x


def test_a_function_inside_with_a_decorator(kernel):
    """It computes something else than its statements say."""
    module, plain = made(Decorated), made(Decorated)
    (reason,) = kernelized(kernel, module)
    assert reason is not None
    assert_same(module, plain)


def test_where_a_function_begins(kernel):
    """Functions are found in their file by name and first line, which is a decorator's."""
    code = submodule("models.code")
    found = code.source_of(Decorated.forward)
    assert [node.name for node in found.body[:1]] == ["gate"]
    assert [node.id for node in found.body[0].decorator_list] == ["doubled"]
    assert code.source_of(Wrapped.other.__wrapped__).body[0].value.id == "x"
