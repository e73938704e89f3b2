"""Summaries of the local segments of a process, on Hopper, compared with the ordinary rule: N is
the final state, M that of the identity without V, E the gradient of the initial state."""

import pytest
import torch
from conftest import computed, relative_error, submodule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs Hopper",
    ),
]
D = 128
GATES = {"slow": (0.001, 0.003), "forgets": (2.0, 5.0), "mixed": (0.001, 5.0)}  # decay of a token
LIMIT = 6e-3  # two runs of the same in bf16: the order of roundings differs


def problem(lengths, H, HV, gates: str):
    """A GdnCall on packed sequences from random states, and what its gradient takes."""
    call = submodule("gdn.call")
    generator = torch.Generator("cuda").manual_seed(len(lengths) + HV)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    T, N = sum(lengths), len(lengths)
    least, most = GATES[gates]
    g = -torch.linspace(least, most, HV, device="cuda").expand(1, T, HV).contiguous()
    q, k, v = normal(1, T, H, D), normal(1, T, H, D), normal(1, T, HV, D)
    beta, start = torch.rand(1, T, HV, device="cuda"), normal(N, HV, D, D, dtype=torch.float32)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    options = call.GdnOptions(D**-0.5, use_qk_l2norm=True, output_final_state=True)
    one = call.GdnCall(q, k, v, g, beta, None, None, start, None, cu, options)
    return one, (normal(1, T, HV, D), torch.randn_like(start))


def forward(call):
    return computed("gdn.hopper.chunk", "gdn_chunk_fwd", call)


def of_pieces(call, *more):
    """The function that pieces.py prepares, and its tensors."""
    kind = submodule("gdn.call").GdnPieces
    tensors = (*call.tensors[:8], call.cu_seqlens, *more)
    run = submodule("gdn.hopper.pieces").prepare_gdn_pieces_fwd(kind(*tensors, call.options))
    return run(*tensors)


def backward(call, asked, blocks=(None, None, None)):
    """The call of the gradient, of v and initial_state alone."""
    calls = submodule("gdn.call")
    options = calls.GradientOptions(True, *call.options)
    tensors = (*call.tensors[:8], call.cu_seqlens, *asked, *blocks)
    return calls.GdnBackward(*tensors, options)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize(
    "lengths, H, HV", [((1000,), 2, 4), ((130, 64, 700), 2, 4), ((1, 63, 65), 1, 2)]
)
def test_pieces(lengths, H, HV, gates):
    call, _ = problem(lengths, H, HV, gates)
    N, start = len(lengths), call.initial_state
    o, states, *_ = forward(call)
    eye = torch.eye(D, device="cuda").expand(N, HV, D, D).contiguous()
    zeros = torch.zeros_like(start)
    from_zeros = forward(call._replace(initial_state=zeros))[1]
    transition = forward(call._replace(v=torch.zeros_like(call.v), initial_state=eye))[1]
    tell = torch.arange(N, device="cuda").roll(1).int()  # in other rows, and the last one nothing
    tell[-1] = -1 if N > 1 else 0
    for with_m in (False, True):
        for before, want in ((None, from_zeros), (start.mT.contiguous(), states)):
            told = torch.full((N, HV, 2 * D if with_m else D, D), float("nan"), device="cuda")
            finish = of_pieces(call, tell, told, before)
            for n, row in enumerate(tell.tolist()):
                if row < 0:
                    continue
                assert relative_error(told[row, :, :D].mT, want[n]) < LIMIT
                if with_m:  # what a head has forgotten is nothing
                    off = (told[row, :, D:].mT - transition[n]).norm()
                    assert off < LIMIT * transition[n].norm() + 1e-6
            unused = sorted(set(range(N)) - set(tell.tolist()))
            assert all(told[row].isnan().all() for row in unused)
            again = torch.full_like(told, float("nan"))
            got, ends, _ = finish(start)
            assert torch.equal(got, o) and torch.equal(ends, states)
            of_pieces(call, tell, again, before)
            assert torch.equal(told.nan_to_num(7.0), again.nan_to_num(7.0))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("lengths, H, HV", [((1000,), 2, 4), ((130, 64, 700), 2, 4)])
def test_what_pieces_ask_for(lengths, H, HV, gates):
    call, given = problem(lengths, H, HV, gates)
    one = backward(call, given)
    before = [x.clone() for x in (call.q, call.k, one.do)]
    want = computed("gdn.hopper.chunk", "gdn_chunk_bwd", one)[7]
    kind = submodule("gdn.call").GdnEntry
    for rows in (D, 2 * D, D):  # with room for M^T below E, and again
        sent = torch.full((len(lengths) + 1, HV, rows, D), float("nan"), device="cuda")
        entry = kind(*one[:11], sent, one.options)
        blocks = computed("gdn.hopper.pieces", "gdn_entry_bwd", entry)
        asked = sent[:-1, :, :D]
        if gates == "slow":
            assert torch.equal(asked, want)
        else:  # heads that forget begin from zeros behind their first chunks
            assert relative_error(asked, want) < 1e-6
        assert sent[-1].isnan().all() and sent[:, :, D:].isnan().all()
    assert all(map(torch.equal, before, (call.q, call.k, one.do)))
    found = computed("gdn.hopper.chunk", "gdn_chunk_bwd", backward(call, given, blocks))
    assert torch.equal(found[7], want)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("lengths, H, HV", [((700, 64, 1), 2, 4), ((4096,), 1, 1)])
def test_a_gradient_begun_without_that_of_the_final_state(lengths, H, HV, prepared):
    """Its forward pass over the states comes first: the same to the bit."""
    call, (do, d_final) = problem(lengths, H, HV, "mixed")
    blocks = ()
    if prepared:
        blocks = forward(call._replace(options=call.options._replace(save_blocks=True)))[3:]
    one = backward(call, (do, d_final), *([blocks] if prepared else []))
    one = one._replace(options=one.options._replace(values_only=False))
    want = computed("gdn.hopper.chunk", "gdn_chunk_bwd", one)
    for _ in range(2):
        stand_in = one._replace(d_final_state=one.initial_state)
        got = computed("gdn.hopper.pieces", "gdn_begun_bwd", stand_in)(d_final)
        assert len(got) == len(want) == 8
        for a, b in zip(got, want):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
