"""The peers: whether they are installed, their autotuning, and GDN prefill by each of them.

A maker of MAKERS takes compare_gdn.py's tensors (q, k, v, g, beta, states, cu_seqlens) and returns
a call that gives o and the final states [N, HV, K, V], with l2norm of q and k in it. Where the peer
is not installed it raises ImportError.
"""

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict

import torch


def peer(module: str, name: str):
    """An object of a peer's module; None, and a line that says so, where it is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        print(f"{module} is left out: {error}", flush=True)
        return None


def working(makers: Dict[str, Callable], needed=(), runs: int = 1) -> Dict[str, Callable]:
    """The calls that makers give and that run; a line says which are left out, and why."""
    found = {}
    for name, maker in makers.items():
        try:
            call = maker()
            for _ in range(runs):
                call()
            found[name] = call
        except Exception as error:  # a peer that is not installed or refuses is left out
            if name in needed:
                raise
            said = [type(error).__name__, *str(error).strip().splitlines()]
            print(f"{name} is left out: {said[0]}: {said[-1][:200]}", flush=True)
    return found


def keep_fla_to_triton() -> None:
    """FLA hands calls to FlashQLA, FlashKDA and TileLang where they are installed; not now."""
    for name in ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG"):
        os.environ.setdefault(name, "0")


def lift_fla_guard() -> None:
    """Lets FLA's Triton backward run on Hopper with Triton 3.4.0 to 3.7.0, which miscompiles it
    (flash-linear-attention#640): for its time and its errors."""
    import fla.ops.common.chunk_o  # noqa: F401 (which has the guard)

    for name, module in list(sys.modules.items()):
        if name.startswith("fla.") and hasattr(module, "TRITON_ABOVE_3_7_1"):
            module.TRITON_ABOVE_3_7_1 = True


def install_fla_convolution(prompts: Callable = None) -> None:
    """Puts FLA's convolution, or another one for prompts, where transformers looks for the package
    causal_conv1d: before its models are imported, which ask for it by name, once. It is a file of
    its own, as an installed package is: kernelize leaves modules with functions alone that are not
    what their file holds."""
    sys.path.insert(0, str(Path(__file__).parent / "stand_ins"))
    import causal_conv1d

    causal_conv1d.prompts = prompts


def share_autotuning(part: int, parts: int) -> None:
    """This process tries every parts-th configuration alone, of all that are tuned at run time."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self, fn, arg_names, configs, *args, **kwargs):
        configs = list(configs or [])
        original(self, fn, arg_names, configs[part::parts] or configs[:1], *args, **kwargs)

    Autotuner.__init__ = init


def shorten_autotuning(warmup_ms: int = 3, rep_ms: int = 15) -> None:
    """From here on every trial of what is tuned at run time takes so long, not 25 and 100 ms."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    trial = functools.partial(do_bench, warmup=warmup_ms, rep=rep_ms)
    Autotuner.do_bench = property(lambda tuner: trial)


def thin_autotuning(most: int) -> None:
    """Of each kernel that is tuned at run time, `most` configurations are tried."""
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def thinned(self, *args, **kwargs):
        if len(self.configs) > most:
            self.configs = self.configs[:: -(-len(self.configs) // most)]
        return run(self, *args, **kwargs)

    Autotuner.run = thinned


def start_warming(parts: int = 12) -> list:
    """Processes of this command, each of which compiles a part of what a peer's autotuner will try,
    minutes one after another.

    They leave it in the caches on disk; the tuning itself is then this process's, and whole.
    """
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--warm", f"{part}/{parts}"], stdout=subprocess.DEVNULL
        )
        for part in range(parts)
    ]


def warm_up(parts: int = 12) -> None:
    """Starts such processes, and waits for them."""
    for worker in start_warming(parts):
        worker.wait()


OPTIONS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


def packed(x):
    """cu_seqlens where the sequences of x are packed in one row of a batch, or None."""
    return x[-1] if len(x[-1]) - 1 != len(x[0]) else None


def fla(x):
    keep_fla_to_triton()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    *given, state, _ = x
    options = {**OPTIONS, "initial_state": state, "cu_seqlens": packed(x)}
    return lambda: chunk_gated_delta_rule(*given, **options)


def aiter(x):
    # it would take defaults chosen on AMD's chips: as FLA's are, its kernels are tuned here
    os.environ.setdefault("GATED_DELTA_RULE_TRITON_AUTOTUNE", "1")
    from aiter.ops.triton.gated_delta_net import chunk_gated_delta_rule_opt_vk

    q, k, v, g, beta, state, _ = x
    options = {**OPTIONS, "initial_state": state.mT.contiguous(), "cu_seqlens": packed(x)}

    def call():
        o, final = chunk_gated_delta_rule_opt_vk(q, k, v, g=g, beta=beta, **options)
        return o, final.mT

    return call


def flashinfer(x):
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k, v, g, beta, state, cu_seqlens = x
    flat = [y.flatten(0, 1) for y in (q, k, v)]
    alpha, beta = g.exp().flatten(0, 1), beta.flatten(0, 1)
    final = torch.empty_like(state)

    def call():
        o, _ = chunk_gated_delta_rule(
            *flat, alpha, beta, initial_state=state, output_state=final, cu_seqlens=cu_seqlens,
            **OPTIONS,
        )  # fmt: skip
        return o.unflatten(0, q.shape[:2]), final.mT

    return call


def flashqla(x):
    from flash_qla import chunk_gated_delta_rule

    *given, state, _ = x
    options = {**OPTIONS, "initial_state": state, "cu_seqlens": packed(x)}
    return lambda: chunk_gated_delta_rule(*given, **options)


MAKERS = {"fla": fla, "aiter": aiter, "flashinfer": flashinfer, "flashqla": flashqla}


def warm_gdn(tensors: Callable, cases: list, options) -> None:
    """One part of what the peers of options.only compile for `cases` of (B, T, H, HV).

    FLA and aiter compile the same whatever the tokens, but for aiter's other kernels beyond 2048,
    and many configurations of each kernel: every part tries a few. FlashQLA compiles one kernel
    each, some only for some lengths: every part takes a few cases.
    """
    part, parts = map(int, options.warm.split("/"))
    heads = dict.fromkeys(case[2:] for case in cases)
    todo = {name: [(1, T, *h) for h in heads for T in (256, 4096)] for name in ("fla", "aiter")}
    todo["flashqla"] = cases[part::parts]
    for name in options.only:
        with contextlib.suppress(ImportError), torch.no_grad():
            for case in todo.get(name, ()):
                MAKERS[name](tensors(*case, "slow"))()
