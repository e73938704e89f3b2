"""Compares the form of an operation that we choose at each size with our other forms.

    python benchmarks/sweep_forms.py [--sweeps weight few ...] [--only "30B"] [--json FILE]

On a GPU. Every sweep takes one choice that the package makes by sizes, and times all forms at
sizes between those that the other benchmarks have. A row is wrong where the form that serves takes
more than 1.05 of the time of the best: the last line counts them. Times are those of the kernels,
by CUDA graph.

    weight   the gradients of the experts' weights: Hopper's strips, portable's tiles
    few      the experts of few tokens: one launch for each projection, or grouped rows
    swiglu   fused_swiglu: Hopper's kernel, portable's
    prompt   chunk_gated_delta_rule: Hopper's kernels, portable's
"""

from functools import partial
from typing import Callable, Dict, Iterator, NamedTuple

import torch
from compare_experts import MODELS, inputs, weights_of
from kernel_time import microseconds
from runner import DEVICE, run, submodule

LIMIT = 1.05
ROWS = (96, 128, 192, 256, 320, 384, 512, 768, 1024)  # of an expert, on average
SHARES = (1, 6, 30)  # how many times as often as others a sixteenth of the experts is chosen
FEW = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)  # tokens
TOKENS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 8192)
WIDTHS = {"Qwen3-0.6B": (1024, 3072), "Llama-8B": (4096, 14336), "Qwen3.5-27B": (5120, 17408)}
PROMPTS = ((1, 64), (1, 256), (1, 512), (1, 1024), (1, 2048), (1, 8192), (4, 512), (16, 256))
HEADS = {"16/32": (16, 32), "16/64": (16, 64), "2/8": (2, 8)}  # of k, of v


class Row(NamedTuple):
    """One size: the calls by form, and the form that the package chooses."""

    what: str
    forms: Dict[str, Callable]
    served: str


def drawn(T: int, E: int, K: int, share: int) -> torch.Tensor:
    """ids [T, K] of a router that chooses a sixteenth of its experts `share` times as often."""
    random = torch.Generator(device=DEVICE).manual_seed(0)
    weights = torch.ones(E, device=DEVICE)
    weights[: max(E // 16, 1)] = share
    return weights.expand(T, E).multinomial(K, generator=random)


def weight(package) -> Iterator[Row]:
    hopper, gradients = (
        submodule("experts.hopper.experts"),
        submodule("experts.portable.weight_gradients"),
    )
    experts, routing_of = (
        submodule("experts.portable.experts"),
        submodule("experts.portable.routing"),
    )
    for model, rows in ((m, r) for m in MODELS for r in ROWS):
        E, K, H, N = MODELS[model]
        T = rows * E // K
        if T * K * max(H, 2 * N) > 2**31:
            continue
        tiles = experts.tiles_for(torch.device(DEVICE, 0), T, K, E)
        for share in SHARES:
            routing = routing_of.route(drawn(T, E, K, share), E, tiles["BLOCK_M"])
            wide = torch.randn(routing.places, 2 * N, device=DEVICE).bfloat16()
            narrow = torch.randn(routing.places, H, device=DEVICE).bfloat16()
            for name, a, b in (("gate_up", wide, narrow), ("down", narrow, wide[:, :N])):
                a, b = a.contiguous(), b.contiguous()
                plain = (a, b, routing, None, tiles["weight"])
                strips = partial(hopper.strips.weight_gradient, a, b, routing)
                forms = {"portable": partial(gradients.weight_gradient, *plain)}
                if tiles["BLOCK_M"] == hopper.BM.value:  # the only height of tiles it is for
                    forms["strips"] = strips
                chosen = "strips" in forms and hopper.takes_strips(a, b, routing)
                what = f"{model} {name}, {rows} rows an expert, share {share}"
                yield Row(what, forms, "strips" if chosen else "portable")


def few(package) -> Iterator[Row]:
    experts, calls = submodule("experts.portable.experts"), submodule("experts.call")

    def prepared(few: bool, call) -> Callable:
        before, experts.is_for_few = experts.is_for_few, lambda call: few
        try:
            return partial(experts.prepare_experts_fwd(call), *call.tensors)
        finally:
            experts.is_for_few = before

    for model in list(MODELS)[:4]:
        weights = [w.detach() for w in weights_of(model)]
        for T in FEW:
            x, *routing = inputs(model, T)
            call = calls.Experts(x, *weights, *routing, None, None, calls.ExpertsOptions())
            forms = {name: prepared(name == "few", call) for name in ("few", "grouped")}
            served = "few" if experts.is_for_few(call) else "grouped"
            yield Row(f"{model}, {T} tokens", forms, served)


def by_folder(package, what: str, operation: str, call: Callable) -> Row:
    """The forms are the folders of dispatch.py."""
    dispatch = submodule("runtime.dispatch")

    def forced(folder):
        with dispatch.force(folder):
            call()

    with dispatch.served() as served:
        call()
    forms = {folder: partial(forced, folder) for folder in ("hopper", "portable")}
    return Row(what, forms, served[operation][0])


def swiglu(package) -> Iterator[Row]:
    for model, (K, N) in WIDTHS.items():
        gate, up = (torch.randn(N, K, device=DEVICE).bfloat16() * K**-0.5 for _ in range(2))
        for M in TOKENS:
            x = torch.randn(M, K, device=DEVICE).bfloat16()
            call = partial(package.fused_swiglu, x, gate, up)
            yield by_folder(package, f"{model}, {M} tokens", "swiglu_fwd", call)


def prompt(package) -> Iterator[Row]:
    for name, (H, HV) in HEADS.items():
        for B, T in PROMPTS:
            q, k = (torch.randn(B, T, H, 128, device=DEVICE).bfloat16() for _ in range(2))
            v = torch.randn(B, T, HV, 128, device=DEVICE).bfloat16()
            g, beta = (torch.rand(B, T, HV, device=DEVICE) for _ in range(2))
            call = partial(
                package.chunk_gated_delta_rule, q, k, v, -g, beta, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            what = f"{name} heads, {B} x {T} tokens"
            yield by_folder(package, what, "gdn_chunk_fwd", call)


SWEEPS = {"weight": weight, "few": few, "swiglu": swiglu, "prompt": prompt}


ARGUMENTS = {
    "--sweeps": {"nargs": "*", "default": list(SWEEPS), "choices": SWEEPS},
    "--only": {"default": "", "help": "sizes whose name begins with this"},
    "--warm": {"action": "store_true", "help": "each is called once, not timed"},
}


def rows(package, options):
    late = count = 0
    for name in options.sweeps:
        for row in SWEEPS[name](package):
            if not row.what.startswith(options.only):
                continue
            if options.warm:
                [call() for call in row.forms.values()]
                continue
            us = microseconds(row.forms, rounds=1, rep_ms=4)
            ratio = us[row.served] / min(us.values())
            late, count = late + (ratio > LIMIT), count + 1
            if ratio > LIMIT:
                print(f"WRONG: {row.served} takes {ratio:.2f}", flush=True)
            yield {"sweep": name, "what": row.what, "served": row.served, "us": us}
    print(f"{late} of {count} sizes are served by a form that is more than {LIMIT} of the best")


if __name__ == "__main__":
    run(__doc__, "forms", rows, ARGUMENTS)
