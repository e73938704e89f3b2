"""Where the time goes until the first tokens of a fresh process, with an empty Triton cache.

    python benchmarks/first_token.py [--case qwen:1] [--one-by-one] [--wait-for FILE] [--json FILE]

From the call of kernelize to each of the first tokens of generate, after everything is imported
and the model is on the GPU: how much of it Triton compiled, by stage and by kernel, how long the C
compiler made launchers, and how long the first products of cuBLAS took. --one-by-one
has Triton compile kernels where they are first launched. --wait-for begins to measure once FILE
exists: for a GPU that others use meanwhile.
"""

import collections
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # before Triton is imported

import torch  # noqa: E402
from compare_generate import MODELS, generate, model_of  # noqa: E402
from kernel_time import seconds  # noqa: E402
from runner import run, wait_for  # noqa: E402


class Watch:
    """Seconds of compiling: of kernels by stage, and of launchers."""

    def __init__(self):
        import triton
        from triton.runtime import build

        self.kernels, self.launchers = [], []
        triton.knobs.compilation.listener = self.kernel
        self.build, build._build = build._build, self.launcher

    def kernel(self, src, metadata, metadata_group, times, cache_hit):
        stages = {"python": times.ir_initialization, **dict(times.lowering_stages)}
        found = {stage: us / 1e6 for stage, us in stages.items()}
        self.kernels.append((time.perf_counter(), metadata["name"], cache_hit, found))

    def launcher(self, name, *arguments, **options):
        start = time.perf_counter()
        out = self.build(name, *arguments, **options)
        self.launchers.append((start, time.perf_counter() - start))
        return out

    def between(self, start: float, end: float) -> dict:
        kernels = [k for k in self.kernels if start <= k[0] < end]
        launchers = [seconds for at, seconds in self.launchers if start <= at < end]
        stages: collections.Counter = collections.Counter()
        for _, _, _, found in kernels:
            stages.update(found)
        return {
            "kernels": len(kernels),
            "from_cache": sum(hit for _, _, hit, _ in kernels),
            "stages_s": {name: round(x, 3) for name, x in stages.items()},
            "by_kernel_s": [(name, round(sum(x.values()), 3)) for _, name, _, x in kernels],
            "launchers": len(launchers),
            "launchers_s": round(sum(launchers), 3),
        }


def cublas() -> float:
    """Seconds of its first product: its library is loaded."""
    x = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    return seconds(lambda: x @ x)


def measured(package, model, batch: int, watch: Watch) -> dict:
    found = {"cublas_s": cublas()}
    start = time.perf_counter()
    report = package.kernelize(model, cuda_graphs=True)
    called = time.perf_counter()
    times = [called + t for t in generate(model, batch, 5)]
    marks = [start, called, *times]
    for phase, begin, end in zip(("kernelize", "first token", "second token"), marks, marks[1:]):
        found[phase] = watch.between(begin, end)
    print(report)
    seconds = {
        "kernelize and first token": times[0] - start,
        "fifth token": times[4] - start,
        "fifth token, again": generate(model, batch, 5)[4],
        "fifth token, another batch and length": generate(model, batch + 2, 5, 300)[4],
    }
    found["another"] = watch.between(times[-1], time.perf_counter())
    return {"seconds": seconds, "more": found}


def rows(package, options):
    name, batch = options.case.split(":")
    model = model_of(name)
    if options.one_by_one:
        sys.modules[f"{package.__name__}.decoding.graphs"].expect_prompt = lambda *_: None
    watch = Watch()
    wait_for(options.wait_for)
    way = "one after another" if options.one_by_one else "by several threads"
    row = {"what": f"{MODELS[name][0]}, batch {batch}, compiled {way}"}
    yield {**row, **measured(package, model, int(batch), watch)}


ARGUMENTS = {
    "--case": {"default": "qwen:1", "help": "model:batch"},
    "--one-by-one": {"action": "store_true"},
    "--wait-for": {"type": Path},
}

if __name__ == "__main__":
    run(__doc__, "first_token", rows, ARGUMENTS, merge=True)
