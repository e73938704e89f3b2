"""GDN prefill by the peers.

Each takes compare_gdn.py's tensors (q, k, v, g, beta, state) and returns a call that gives o and
the final state [B, HV, K, V], with l2norm of q and k in it. Where the peer is not installed it
raises ImportError.
"""

import contextlib
import os

import torch
from kernel_time import keep_fla_to_triton, share_autotuning

OPTIONS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


def fla(x):
    keep_fla_to_triton()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta, state = x
    return lambda: chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, **OPTIONS)


def aiter(x):
    # it would take defaults chosen on AMD's chips: as FLA's are, its kernels are tuned here
    os.environ.setdefault("GATED_DELTA_RULE_TRITON_AUTOTUNE", "1")
    from aiter.ops.triton.gated_delta_net import chunk_gated_delta_rule_opt_vk

    q, k, v, g, beta, state = x
    state = state.mT.contiguous()

    def call():
        o, final = chunk_gated_delta_rule_opt_vk(
            q, k, v, g=g, beta=beta, initial_state=state, **OPTIONS
        )
        return o, final.mT

    return call


def flashinfer(x):
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k, v, g, beta, state = x
    B, T = q.shape[:2]
    flat = [y.flatten(0, 1) for y in (q, k, v)]
    alpha, beta = g.exp().flatten(0, 1), beta.flatten(0, 1)
    cu_seqlens = torch.arange(B + 1, device="cuda") * T
    final = torch.empty_like(state)

    def call():
        o, _ = chunk_gated_delta_rule(
            *flat, alpha, beta, initial_state=state, output_state=final, cu_seqlens=cu_seqlens,
            **OPTIONS,
        )  # fmt: skip
        return o.unflatten(0, (B, T)), final.mT

    return call


def flashqla(x):
    from flash_qla import chunk_gated_delta_rule

    q, k, v, g, beta, state = x
    return lambda: chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, **OPTIONS)


MAKERS = {"fla": fla, "aiter": aiter, "flashinfer": flashinfer, "flashqla": flashqla}
WARMED = ("fla", "aiter", "flashqla")  # what compiles for minutes: see kernel_time.warm_up


def warm(tensors, cases, names, part: int, parts: int) -> None:
    """One part of what the named peers compile for `cases` of (B, T, H, HV).

    FLA and aiter compile the same whatever the tokens, but for aiter's other kernels beyond 2048,
    and many configurations of each kernel: every part tries a few. FlashQLA compiles one kernel
    each, some only for some lengths: every part takes a few cases.
    """
    share_autotuning(part, parts)
    heads = dict.fromkeys(case[2:] for case in cases)
    todo = {name: [(1, T, *h) for h in heads for T in (256, 4096)] for name in ("fla", "aiter")}
    todo["flashqla"] = cases[part::parts]
    for name in names:
        with contextlib.suppress(ImportError), torch.no_grad():
            for case in todo.get(name, ()):
                MAKERS[name](tensors(*case, "slow"))()
