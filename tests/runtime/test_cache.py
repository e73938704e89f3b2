"""Calls like one before (runtime/cache.py): when they are taken to be, and that they are served as
right."""

import pytest
import torch
from conftest import assert_close, gdn_inputs, submodule

NAMES = ("q", "k", "v", "g", "beta")


@pytest.fixture
def cache(kernel):
    return submodule("runtime.cache").CallCache()


def test_what_makes_calls_alike(cache):
    x, p = torch.randn(2, 4, 8), torch.nn.Parameter(torch.randn(4))
    with torch.no_grad():
        cache.keep((x, p, None), (1,), "the plan")
        assert cache.find((x.clone(), p, None), (1,)) == "the plan"
        others = [
            (x[:1], p, None), (x.transpose(1, 2).contiguous().transpose(1, 2), p, None),
            (x.double(), p, None), (x.clone().requires_grad_(), p, None), (x, p.detach(), None),
            (x, p, x), (x, None, None), (x, None, p), (x.to("meta"), p, None), ([1.0], p, None),
            (x, 1.0, None), (x, p[:3], None), (x, p[::2], None),
        ]  # fmt: skip
        assert [cache.find(other, (1,)) for other in others] == [None] * len(others)
        for options in ((2,), (), (1, 1), ([],)):
            assert cache.find((x, p, None), options) is None
    assert cache.find((x, p, None), (1,)) is None  # p asks for a gradient


def test_calls_of_other_numbers_of_tensors(cache):
    """A product with three weights and one with five begin alike."""
    x, *weights = (torch.zeros(2, 3) for _ in range(6))
    for several in (3, 5, 1):
        assert cache.find((x, *weights[:several]), ()) is None
        cache.keep((x, *weights[:several]), (), several)
    for several in (1, 3, 5):
        assert cache.find((x, *weights[:several]), ()) == several


def test_options_that_are_equal_but_of_other_types(cache):
    x = torch.randn(2)
    for value in (1, 1.0, True):
        assert cache.find((x,), (value,)) is None
        cache.keep((x,), (value,), repr(value))
    assert [cache.find((x,), (value,)) for value in (1, 1.0, True)] == ["1", "1.0", "True"]


def test_modes_of_torch(cache):
    x, found = torch.randn(2), []
    cache.keep((x,), (), "the plan")
    with torch.autocast("cpu", torch.bfloat16):
        assert cache.find((x,), ()) is None
        cache.keep((x,), (), "with bf16")
        assert cache.find((x,), ()) == "with bf16"
    with torch.autocast("cpu", torch.float16):
        assert cache.find((x,), ()) is None
    with torch.no_grad():
        found.append(cache.find((x,), ()))
    with torch.inference_mode():
        found.append(cache.find((torch.randn(2),), ()))
    torch.vmap(lambda y: found.append(cache.find((y,), ())) or y)(torch.randn(3, 2))
    assert found == [None] * 3
    assert cache.find((x,), ()) == "the plan"


def test_calls_that_alternate(cache):
    """Calls that differ in anything beside the first tensor's shape keep their plans."""
    x, y = torch.randn(2, 4), torch.randn(3)
    calls = [(x, None), (x, y), (x, y[:2]), (x, y[::2]), (x.t().contiguous().t(), y)]
    for number, call in enumerate(calls):
        assert cache.find(call, ()) is None
        cache.keep(call, (), number)
    assert [cache.find(call, ()) for call in calls * 2] == [*range(len(calls))] * 2
    assert len(cache) == len(calls)


def test_one_tensor_in_two_places(cache):
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    cache.keep((x, None, x, y), (), "repeated")
    assert cache.find((y, None, y, x), ()) == "repeated"
    for other in ((x, None, y, y), (x, None, y, x.clone()), (x, None, x, y[:1]), (x, None, x, x)):
        assert cache.find(other, ()) is None
    cache.keep((x, None, y, x.clone()), (), "all others")
    assert cache.find((x, None, x, y), ()) == "repeated"
    assert cache.find((y, None, x, x.clone()), ()) == "all others"


def test_few_are_kept(cache, monkeypatch):
    monkeypatch.setattr(submodule("runtime.cache"), "MOST", 20)
    x = torch.randn(3)
    for n in range(1, 60):
        cache.keep((x, torch.empty(n)), (), n)  # alike but for the second
        assert len(cache) <= submodule("runtime.cache").ALIKE
        assert cache.find((x, torch.empty(n)), ()) == n
    for n in range(1, 60):
        cache.keep((torch.empty(n),), (n,), n)
        assert len(cache) <= 20 and cache.find((torch.empty(n),), (n,)) == n
    assert cache.keep((x,), (), None) is None and cache.find((x,), ()) is None


def test_without_tensor_guards(monkeypatch):
    """Another torch: nothing is kept."""
    module = submodule("runtime.cache")
    monkeypatch.setattr(module, "TensorGuards", None)
    cache, x = module.CallCache({1: 0}), torch.randn(2, 4)
    assert cache.keep((x, x), (1,), "the plan") == "the plan"
    assert cache.find((x, x), (1,)) is None and len(cache) == 0


def test_where_no_plan_serves():
    dispatch, module = submodule("runtime.dispatch"), submodule("runtime.cache")
    assert module.fast_path_ok()
    with dispatch.served():
        assert not module.fast_path_ok()
    with dispatch.force("reference"):
        assert not module.fast_path_ok()

    @torch.compile(backend="eager", fullgraph=True)
    def traced(x):
        return x + (2 if module.fast_path_ok() else 1)

    x = torch.randn(2)
    assert torch.equal(traced(x), x + 1)
    assert module.fast_path_ok()


def far_apart(x):
    """The same values with the last dimension's elements two apart."""
    return torch.stack([x, x], -1)[..., 0]


def decode(kernel, x, **options):
    return kernel.fused_recurrent_gated_delta_rule(
        *(x[name] for name in NAMES), initial_state=x["initial_state"], output_final_state=True,
        use_qk_l2norm_in_kernel=True, **options,
    )  # fmt: skip


@pytest.mark.gpu
def test_decoding_again(kernel):
    """The second call takes the plan: the same bits; one that only looks alike is checked."""
    x = gdn_inputs(3, 1, 2, 4, 64, 64, torch.bfloat16, "cuda")
    known = submodule("gdn.ops").RECURRENT
    known.cache_clear()
    with torch.no_grad():
        first = decode(kernel, x)
        assert len(known) == 1
        for _ in range(2):
            assert all(map(torch.equal, decode(kernel, x), first))
        with submodule("runtime.dispatch").force("reference"):
            ref = decode(kernel, x)
        for out, expected in zip(first, ref):
            assert_close(out, expected, torch.bfloat16)
        for name in NAMES:  # strides that kernels do not know are no longer the same call
            assert_close(decode(kernel, {**x, name: far_apart(x[name])})[0], first[0])
        with pytest.raises(ValueError, match="must have shape"):
            decode(kernel, {**x, "k": x["k"][:2]})
        with pytest.raises(TypeError, match="dtype"):
            decode(kernel, {**x, "k": x["k"].float()})
        other = {**x, "initial_state": x["initial_state"].clone()}
        _, state = decode(kernel, other, inplace_final_state=True)
        assert state is other["initial_state"] and torch.equal(state, first[1])


@pytest.mark.gpu
def test_decoding_with_gradients(kernel):
    """No plan where a gradient is needed, also after one was made for the same sizes."""
    x = gdn_inputs(1, 1, 1, 2, 32, 32, torch.float32, "cuda")
    decode(kernel, x)
    x["v"].requires_grad_()
    o, _ = decode(kernel, x)
    o.sum().backward()
    assert x["v"].grad.abs().sum() > 0
