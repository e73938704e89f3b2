"""The gradient's own kernel on Hopper (gdn/hopper/gradient.py): what test_gdn_backward.py does not
ask of it."""

import pytest
import torch
from conftest import submodule
from gdn_gradients import Case
from gdn_problems import blocks_of
from test_gdn_backward import OPTIONS, compare

pytest.importorskip("triton.experimental.gluon")
pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    return submodule("gdn.hopper.backward")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(kernels, options):
    case = Case(2, 300, 1, 3, 128, 128, torch.float16, "cuda", **options)
    compare(case.gradients(kernels), case.expected(), torch.float16)


def test_many_chunks_a_program(kernels):
    """More chunks than processors, so that programs go from one to the next; from the same blocks
    the portable kernels give the same but for the order of sums."""
    case = Case(2, 6400, 2, 4, 128, 128, torch.bfloat16, "cuda", l2norm=True)
    *blocks, _ = blocks_of("hopper", case.call())
    portable = submodule("gdn.portable.backward")
    got, want = case.gradients(kernels, blocks), case.gradients(portable, blocks)
    compare(got, want, torch.bfloat16, factor=0.2)


def test_layouts(kernels):
    """q, k and v as views of one tensor, and a dO that is the same everywhere."""
    case = Case(2, 130, 2, 2, 128, 128, torch.bfloat16, "cuda", l2norm=True)
    q, k, v, *rest = case.inputs
    want = case.gradients(kernels)
    joined = torch.cat([q, k, v], -1)
    case.inputs = (*joined.split(128, -1), *rest)
    for a, b in zip(case.gradients(kernels), want):
        assert a is None or torch.equal(a, b)
    case.do = torch.ones(1, 1, 1, 128, device="cuda", dtype=torch.bfloat16).expand(2, 130, 2, 128)
    compare(case.gradients(kernels), case.expected(), torch.bfloat16)


def test_views_of_states(kernels):
    """Initial states that lie apart, or are one for all; their gradients are dense."""
    case = Case(3, 70, 2, 4, 128, 128, torch.bfloat16, "cuda", l2norm=True)
    *rest, state = case.inputs
    pool = state.new_zeros(3, 6, 128, 128)
    pool[:, 1:5] = state
    for view in (pool[:, 1:5], state[:1].expand(3, -1, -1, -1)):
        case.inputs = (*rest, view)
        compare(case.gradients(kernels), case.expected(), torch.bfloat16)


def test_saved_blocks(kernels):
    """From what the forward saved, the same bits; the values' gradients alone, too."""
    case = Case(1, 200, 2, 4, 128, 128, torch.bfloat16, "cuda", l2norm=True)
    whole = case.gradients(kernels)
    *saved, _ = blocks_of("hopper", case.call())
    for a, b in zip(case.gradients(kernels, saved), whole):
        assert a is None or torch.equal(a, b)
    part = case.gradients(kernels, values_only=True)
    assert [x is None for x in part] == [True, True, False] + [True] * 4 + [False]
    assert torch.equal(part[2], whole[2])


def test_who_serves(kernels):
    case = Case(1, 70, 1, 2, 128, 128, torch.bfloat16, "cuda")
    leaves = [x.clone().requires_grad_() for x in case.inputs[:5]]
    with submodule("runtime.dispatch").served() as record:
        o, _ = submodule("gdn.api").chunk_gated_delta_rule(*leaves)
        o.backward(case.do)
    assert record["gdn_chunk_bwd"] == ["hopper"]
