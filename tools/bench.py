"""Builds, and times every workload of benchmarks/benchmark*.py beside plain torch, as
`kernels benchmark .` does, which shows its results together, after minutes: here each is shown as
it comes.

    make bench          (or: .venv/bin/python tools/bench.py --iterations 20)
"""

import argparse
import contextlib
import io
import sys

import in_tree


def say(*words, end="\n"):
    print("bench:", *words, end=end, flush=True)


def workloads(classes):
    """(name, class that has this workload alone) of every workload of these classes."""
    found = []
    for kind in classes:
        names = [name for name in dir(kind) if name.startswith("benchmark_")]
        for name in names:
            without = dict.fromkeys(set(names) - {name})
            label = f"{kind.__name__} {name.removeprefix('benchmark_')}"
            found.append((label, type(kind.__name__, (kind,), without)))
    return found


def show(timing):
    """Times of a call by the host's clock, ours and the reference's."""
    ours, reference = timing.mean_ms, timing.ref_mean_ms
    speed_up = f"{reference / ours:.2f}" if ours else "-"  # times are rounded
    print(f"{ours:10.4f} ms   reference {reference:10.4f} ms   speed-up {speed_up:>6}", flush=True)


def run(options):
    """Times one workload after the other; 1 where one cannot be timed or gives another result than
    its reference."""
    from kernels.cli import benchmark  # which imports torch

    machine, root = benchmark.collect_machine_info(), in_tree.ROOT
    scripts = benchmark.discover_benchmark_scripts(".", root)
    classes = [c for script in scripts for c in benchmark.discover_benchmark_classes(script, root)]
    found = workloads(classes)
    say(f"{len(found)} workloads on {machine.gpu}, torch {machine.pytorch_version}")
    done = 0
    for number, (name, kind) in enumerate(found, 1):
        say(f"{number} of {len(found)}  {name:30}", end="")
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # the class's name
                (timing,) = benchmark.run_benchmark_class(
                    kind, options.iterations, options.warmup, str(root), True, "local"
                )[0].values()
        except RuntimeError as error:  # another result, or no room for it
            print(f"   {error}".partition("\n")[0], flush=True)
            continue
        show(timing)
        done += 1
    say(f"{done} of {len(found)} are right and timed")
    return 0 if done == len(found) else 1


def main():
    parser = argparse.ArgumentParser(
        prog="bench", description="Times benchmarks/benchmark*.py beside plain torch on a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, default=20, help="timed calls of a workload")
    parser.add_argument("--warmup", type=int, default=3, help="calls before them")
    options = parser.parse_args()
    if options.iterations < 1 or options.warmup < 0:
        parser.error("--iterations must be at least 1 and --warmup at least 0")
    say("times benchmarks/benchmark*.py beside plain torch, a line for each workload, for minutes")
    try:
        in_tree.need_gpu(parser, options)
        import build  # which imports kernels

        build.build()
        return run(options)
    except KeyboardInterrupt:
        print()
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
