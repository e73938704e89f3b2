"""Kernel time of decoding with a ring against writing every state, FlashInfer and a copy.

    python benchmarks/compare_replay.py [--seconds 60] [--json FILE]     on a GPU

A call's time depends on how many tokens the ring has and on whether the state is written, so what
is timed is a whole period, from one write of a state to the next, divided by its calls: `ours` with
sequences that are at different places of it, as a server's are, `ours in phase` with all at the
same. Three layers take turns, so that no state is read from the cache.

Drafts: four tokens a call, three of them accepted. FlashInfer's kernel for them writes a state for
each, and `ours every state` is output_all_states. `ours advance` is advance_ring, once a step for
all layers.
"""

import torch
from compare_gdn_recurrent import RAW, STATES, copy, flashinfer, ours, rounds, states_of, tensors
from kernel_time import microseconds
from peers import peer
from runner import SECONDS, run

DRAFTS, ACCEPTED = 4, 3
CASES = [(B, HV, state, T) for state in (torch.float32, torch.bfloat16) for T in (1, DRAFTS)
         for B in (64, 256, 8, 1) for HV in (32, 64)
         if T == 1 or (B, state) == (64, torch.float32)]  # fmt: skip


def period(package, ring, T) -> list:
    """Cursors [1, 2] from one write of the state to the next."""
    cursor, found, flushed = torch.zeros(1, 2, dtype=torch.int32, device="cuda"), [], 0
    accepted = None if T == 1 else torch.full((1,), ACCEPTED, device="cuda")
    while flushed < 2:
        before = cursor.clone()
        package.advance_ring(cursor, ring, accepted)
        if flushed == 1:
            found.append(before)
        flushed += int(cursor[0, 1] <= before[0, 1])
    return found


def replay(package, x, states, rings, cursors):
    """One call for each layer at each place of the period."""
    *given, A_log, dt_bias = x

    def call():
        for cursor in cursors:
            for state, ring in zip(states, rings):
                package.replay_gated_delta_rule(
                    *given, state, ring, cursor, A_log=A_log, dt_bias=dt_bias, **RAW
                )

    return call


def flashinfer_drafts(gated_delta_rule_mtp, x):
    q, k, v, a, b, A_log, dt_bias = x
    B, T, HV, V = v.shape
    out, rows = torch.empty_like(v), torch.arange(B, device="cuda", dtype=torch.int32)
    states = torch.empty(B, T, HV, V, q.shape[-1], device="cuda")
    return lambda state: gated_delta_rule_mtp(
        q, k, v, state, rows, A_log, a, dt_bias, b, scale=128**-0.5, output=out,
        intermediate_states_buffer=states, disable_state_update=True, use_qk_l2norm=True,
    )  # fmt: skip


@torch.no_grad()
def compare(package, B, HV, dtype, T, by_token, by_drafts) -> dict:
    H, x, states = 16, tensors(B, 16, HV, T), states_of(B, HV, dtype)
    rings = [
        package.make_ring(s, H, torch.bfloat16, rows=16 if T == 1 else 32, max_tokens=T)
        for s in states
    ]
    for ring in rings:
        ring.k.normal_(), ring.u.normal_(0, 0.01), ring.g.fill_(-0.1)
    steps = period(package, rings[0], T)
    places = torch.cat(steps)
    n = torch.arange(B, device="cuda")
    staggered = [places[(n + t) % len(steps)].contiguous() for t in range(len(steps))]
    in_phase = [cursor.expand(B, 2).contiguous() for cursor in steps]
    calls = {  # what is timed, and the calls in it
        "ours": (replay(package, x, states, rings, staggered), STATES * len(steps)),
        "ours in phase": (replay(package, x, states, rings, in_phase), STATES * len(steps)),
        "copy": (rounds(copy, states), STATES),
    }
    if T == 1:
        calls["ours every token"] = rounds(ours(package, x, True), states), STATES
    else:
        every = ours(package, x, True, output_all_states=True)
        calls["ours every state"] = rounds(every, states), STATES
    if by_token:
        kept = "by index" if dtype == torch.bfloat16 else "[V, K]"
        them = flashinfer(by_token, x, kept) if T == 1 else flashinfer_drafts(by_drafts, x)
        calls["flashinfer"] = rounds(them, states), STATES
    cursor, accepted = staggered[0].clone(), None if T == 1 else n.clamp(max=ACCEPTED)
    calls["ours advance"] = (lambda: package.advance_ring(cursor, rings[0], accepted)), 1
    times = microseconds({name: call for name, (call, _) in calls.items()}, rounds=2, rep_ms=6)
    what = f"{H}/{HV} heads, batch {B}, {'fp32' if dtype == torch.float32 else 'bf16'} state"
    return {
        "what": f"{what}, {'one token' if T == 1 else f'{T} drafts'}",
        "us": {name: times[name] / count for name, (_, count) in calls.items()},
    }


def rows(package, options):
    by_token = peer("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
    by_drafts = peer("flashinfer.gdn_decode", "gated_delta_rule_mtp")
    options.facts["peers"] = ["flashinfer"] * bool(by_token)
    for case in CASES:
        yield compare(package, *case, by_token, by_drafts)


if __name__ == "__main__":
    run(__doc__, "gdn_replay", rows, SECONDS)
