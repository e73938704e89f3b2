"""The chain of the maps of segments that ranks send, in one launch, against fp64."""

import pytest
import torch
from conftest import computed, relative_error, submodule
from interpreter import DEVICE, both_ways, test_in_the_interpreter  # noqa: F401


def problem(counts, given: bool, backward: bool, HV=2, K=32, V=48, where="cpu"):
    """A GdnChain: counts of links of each segment, of three ranks with slots enough."""
    calls = submodule("gdn.call")
    generator = torch.Generator().manual_seed(0)
    most = max(counts)
    slots = -(-max(most, 1) // 3) + 1
    rows = V + (K if most > 1 else 0)
    # maps that neither grow nor vanish in a chain
    gathered = torch.randn(3, slots, HV, rows, K, generator=generator) * K**-0.5
    used = [torch.randperm(3 * slots, generator=generator)[:n].tolist() for n in counts]
    unused = set(range(3 * slots)) - {slot for row in used for slot in row}
    gathered.flatten(0, 1)[list(unused)] = torch.nan  # slots of no segment
    for row in used:
        if row and not any(row[0] in other[1:] for other in used):
            gathered.flatten(0, 1)[row[0], :, V:] = torch.nan  # the first has no transition
    links = [[len(row), *row, *[0] * (most - len(row))] for row in used]
    places = [i for i, n in enumerate(counts) if n]
    state = torch.randn(len(counts), HV, V, K, generator=generator).mT  # as states [V, K] lie
    if not backward:
        state[places] = torch.nan  # which is not read
    tensors = (
        gathered, torch.tensor(links, dtype=torch.int32), torch.tensor(places, dtype=torch.int64),
        state if given else None,
    )  # fmt: skip
    options = calls.ChainOptions(V, backward)
    return calls.GdnChain(*[x if x is None else x.to(where) for x in tensors], options), used


def expected(call, used):
    """By the definition, one link after the other."""
    V, backward = call.options
    flat, found = call.gathered.double().flatten(0, 1), []
    for n, row in enumerate(used):
        given = torch.zeros(call.HV, call.K, V, dtype=torch.float64, device=flat.device)
        if call.given is not None and (backward or not row):
            given = call.given[n].double()
        S = torch.zeros_like(given)
        for i, slot in enumerate(row):
            own, M = flat[slot, :, :V], flat[slot, :, V:].mT
            own = own.reshape(call.HV, call.K, V) if backward else own.mT
            S = own if i == 0 else own + (M.mT if backward else M) @ S
        found.append(S + given)
    return torch.stack(found)


COUNTS = [(1,), (0, 1), (2, 0, 0), (3, 5), (8,), (7, 6, 0, 1)]


@both_ways
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_kernel(counts, given, backward):
    for HV, K, V in ((2, 32, 48), (1, 24, 20)):
        call, used = problem(counts, given, backward, HV, K, V, DEVICE)
        got = computed("gdn.portable.chain", "gdn_chain_fwd", call)
        want = expected(call, used)
        assert got.is_contiguous() and relative_error(got, want) < 3e-6


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_reference(counts, given, backward):
    call, used = problem(counts, given, backward)
    got = submodule("gdn.reference.chain").gdn_chain_fwd(*call.tensors, *call.options)
    assert relative_error(got, expected(call, used)) < 3e-7


def test_what_the_kernel_leaves():
    prepare = submodule("gdn.portable.chain").prepare_gdn_chain_fwd
    call, _ = problem((1, 0), True, False)
    wide = [x.double() if x is not None and x.is_floating_point() else x for x in call.tensors]
    assert prepare(type(call)(*wide, call.options)) is None
    assert prepare(problem((2,), True, False, K=160)[0]) is None
