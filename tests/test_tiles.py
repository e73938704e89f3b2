"""Tensor maps that are kept and launched with again (runtime/tiles.py)."""

import types

import pytest
import torch
from conftest import gdn_inputs, submodule
from interpreter import compiled
from test_gdn_chunk import arguments

pytest.importorskip("triton.experimental.gluon")
KIND = "tensordesc<bf16[64, 64]>"
CODE = (77, (1, 1, 0), None, None, None)


class Stand:
    """A Prepared whose launcher is as Triton's, down to its last step, which writes down what it
    is given."""

    constexprs = (128,)
    code = CODE

    def __init__(self, driver):
        self.steps, self.encodings = [], 0
        signature = {0: KIND, 1: KIND, 2: "*fp32", 3: "i32", 4: "constexpr"}
        self.compiled = types.SimpleNamespace(
            src=types.SimpleNamespace(signature=signature),
            metadata=types.SimpleNamespace(tensordesc_meta=[{}, {}]),
        )

        def last(*step):
            self.steps.append(step)

        class Run:
            launch = staticmethod(driver.wrap_handle_tensordesc(last, signature, [{}, {}]))

            def __call__(self, x, y, z, stream, function, *rest):
                self.launch(x, y, z, stream, function, False, False, None, None, *rest)

        self.run = Run()

    def launch(self, grid, *given):
        self.run(*grid, 0, *self.code, *given, *self.constexprs)

    def at(self, *pointers):
        return [x.data_ptr() for x in pointers]


def test_the_last_step_gets_what_triton_would_give_it(monkeypatch):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    if submodule("runtime.gluon").TRITON_VERSION >= (3, 7):
        pytest.skip("Triton 3.7 packs its arguments: its launches go as usual")
    tiles, compat = submodule("runtime.tiles"), submodule("runtime.gluon")
    encoded = []

    def encode(descriptor, meta):
        encoded.append(descriptor.base.data_ptr())
        return [("map", descriptor.base.data_ptr()), *descriptor.shape]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    active = types.SimpleNamespace(get_current_stream=lambda index: 0)
    monkeypatch.setattr(tiles, "driver", types.SimpleNamespace(active=active))
    prepared = Stand(driver)
    kernel = tiles.TiledKernel(prepared)
    x, y = torch.zeros(2, 128, 64, dtype=torch.bfloat16).unbind(0)
    factors = torch.zeros(4)
    how = ((128, 64), (64, 1), *compat.box(torch.bfloat16, 64, 64))
    both = tiles.Tiles(how, how)
    for tensors in ((x, y), (x, y), (y, x), (x, y)):
        kernel.launch((3, 1, 1), both, tensors, (factors,), 5)
    steps = prepared.steps
    assert kernel.step is not None and steps[0] == steps[1] == steps[3]
    want = (("map", y.data_ptr()), 128, 64, ("map", x.data_ptr()), 128, 64)
    assert steps[2] == (*steps[0][:-9], *want, factors.data_ptr(), 5, 128)
    assert len(encoded) == 2 + 2 + 2  # Triton's own, then two of each tensor, once


def test_few_maps_are_kept(monkeypatch):
    tiles, compat = submodule("runtime.tiles"), submodule("runtime.gluon")
    monkeypatch.setattr(tiles, "LIMIT", 4)
    how = ((64, 64), (64, 1), *compat.box(torch.bfloat16, 64, 64))
    one = tiles.Tiles(how)
    for x in torch.zeros(9, 64, 64, dtype=torch.bfloat16):
        assert one.encoded([x], [lambda descriptor: [descriptor.base.data_ptr()]]) == [x.data_ptr()]
    assert len(one.kept[0]) <= 4


def test_few_are_kept_by_all(monkeypatch):
    tiles, compat = submodule("runtime.tiles"), submodule("runtime.gluon")
    monkeypatch.setattr(tiles, "BOUND", submodule("runtime.facts").Bound(10))
    how = ((64, 64), (64, 1), *compat.box(torch.bfloat16, 64, 64))
    many = [tiles.Tiles(how) for _ in range(7)]
    for x in torch.zeros(9, 64, 64, dtype=torch.bfloat16):
        for one in many:
            one.encoded([x], [lambda descriptor: [descriptor.base.data_ptr()]])
            assert sum(len(one.kept[0]) for one in many) <= 10


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("T", [300, 9000])
def test_addresses_in_turn(kernel, T):
    """The same kind of call on other tensors, on other values in the same tensors, on a stream."""
    gdn = submodule("gdn.hopper.chunk")
    cases = [gdn_inputs(1, T, 2, 4, 128, 128, torch.bfloat16, "cuda", seed=i) for i in range(2)]
    calls = [arguments(x, use_qk_l2norm=True) for x in cases]
    want = [gdn.gdn_chunk_fwd(*args)[0] for args in calls]
    run = gdn.plan_gdn_chunk_fwd(*calls[0])
    for _ in range(3):
        for args, o in zip(calls, want):
            assert torch.equal(run(*args[:10])[0], o)
    for name in "qkv":
        cases[0][name].copy_(cases[1][name])
    for name in ("g", "beta", "initial_state"):
        if name in cases[0]:
            cases[0][name].copy_(cases[1][name])
    assert torch.equal(run(*calls[0][:10])[0], want[1])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        o = run(*calls[1][:10])[0]
    stream.synchronize()
    assert torch.equal(o, want[1])
