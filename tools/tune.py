"""Tunes an operation for the GPU at hand: times candidate configurations, writes the best.

    python tools/tune.py "swiglu forward, M 64" [--shapes M=96,K=2048,N=8192] [--operation NAME]

Takes the calls of tools/launched.py whose name holds the words given, with other sizes if --shapes
says so. For each look-up of runtime/tuning.py that such a call makes, it goes from the best
configuration in any table to its neighbours (each number halved, doubled, or one more or less) for
as long as one of them is faster, and leaves the winner in
`configs/<operation>,device_name=<this GPU>.json`. A candidate whose results differ, or that does
not compile or fit, is passed over. Time is that of the kernels, by CUDA graph. Tables that list
tiles with their measured costs (Hopper's SwiGLU) are left alone: no one call can choose among them.
"""

import argparse
import contextlib
import copy
import json
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Tuple

import launched
import torch
from in_tree import PACKAGE, load_package, parse_on_gpu, submodule

CONFIGS = PACKAGE / "configs"
GAIN = 0.99  # a neighbour is taken if it needs less than this of the best's time


def lookups(call: Callable) -> Dict[tuple, dict]:
    """{(operation, sizes): configuration} of what a call asks for."""
    tuning, found = submodule("runtime.tuning"), {}
    original = tuning._nearest

    def listen(operation, chip, sizes):
        found[operation, sizes] = original(operation, chip, sizes)
        return found[operation, sizes]

    with replaced(listen):
        call()
    return found


@contextlib.contextmanager
def replaced(nearest: Callable):
    """Inside, the look-up is another function, and nothing that was chosen before is remembered."""
    tuning, forget = submodule("runtime.tuning"), submodule("runtime.device").forget
    original, tuning._nearest = tuning._nearest, nearest
    forget()
    try:
        yield
    finally:
        tuning._nearest = original
        forget()


def lists_tiles(config: dict) -> bool:
    return any(isinstance(value, list) for value in config.values())


def known(operation: str) -> List[dict]:
    """The configurations in all tables of an operation."""
    found = []
    for path in (CONFIGS / f"{operation}.json", *CONFIGS.glob(f"{operation},*.json")):
        table = json.loads(path.read_text())
        for config in (table["default"], *[entry["config"] for entry in table.get("tuned", [])]):
            if config not in found:
                found.append(config)
    return found


def neighbours(config: dict) -> Iterator[dict]:
    """The configurations that differ in one number, however deep it lies."""
    for key, value in config.items():
        if isinstance(value, dict):
            others = list(neighbours(value))
        elif isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int) and value > 0:
            close = value < 8 and key not in ("num_warps", "W") and not key.startswith("BLOCK")
            others = [value - 1, value + 1] if close else [value // 2, value * 2]
        else:
            continue
        for other in others:
            if other or isinstance(other, bool):
                yield {**copy.deepcopy(config), key: other}


def best(operation: str, sizes: tuple, call: Callable, time_of: Callable) -> dict:
    """The fastest configuration that gives the results of the one in use now."""
    now, right = lookups(call)[operation, sizes], call()
    original, times = submodule("runtime.tuning")._nearest, {}

    def seconds(config: dict) -> float:
        key = json.dumps(config, sort_keys=True)
        if key not in times:
            own = lambda *asked: config if asked[::2] == (operation, sizes) else original(*asked)  # noqa: E731
            try:
                with replaced(own):
                    times[key] = time_of(call) if same(call(), right) else float("inf")
            except Exception:  # it does not compile, or does not fit
                times[key] = float("inf")
        return times[key]

    chosen = min([now, *known(operation)], key=seconds)
    while True:
        other = min(neighbours(chosen), key=seconds, default=chosen)
        if seconds(other) >= GAIN * seconds(chosen):
            break
        chosen = other
    print(f"{operation} {dict(sizes)}: {seconds(now):.4g} -> {seconds(chosen):.4g} us {chosen}")
    return chosen


def same(found, right) -> bool:
    """Equal but for the roundings of other tiles; tensors, or tuples of them."""
    if isinstance(right, (tuple, list)):
        return all(map(same, found, right))
    if right is None:
        return found is None
    error = (found.double() - right.double()).norm()
    return bool(error <= 1e-2 * right.double().norm())


def write(operation: str, chip: Tuple[str, ...], sizes: tuple, config: dict) -> Path:
    """Into the chip's own table, which begins as the one that has served it."""
    path = CONFIGS / f"{operation},{chip[0]}.json"
    table = json.loads(
        (CONFIGS / submodule("runtime.tuning").path_of(operation, chip).name).read_text()
    )
    if not sizes:
        table["default"] = config
    else:
        entries = table.get("tuned", [])
        told_by = entries[0]["sizes"] if entries else dict(sizes)  # what the table goes by
        own = {"sizes": {k: v for k, v in sizes if k in told_by}, "config": config}
        table["tuned"] = [*[entry for entry in entries if entry["sizes"] != own["sizes"]], own]
    path.write_text(json.dumps(table, indent=1) + "\n")
    return path


def microseconds(call: Callable) -> float:
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(call, rep=20, return_mode="median") * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calls", help="words of the calls' names in tools/launched.py")
    parser.add_argument("--shapes", default="", help="sizes in place of theirs: M=96,K=2048")
    parser.add_argument("--operation", default="", help="only operations whose name holds this")
    options = parse_on_gpu(parser)
    launched.DEVICE = "cuda"
    kernel, tuning = load_package(), submodule("runtime.tuning")
    sizes = {k: int(v) for k, v in (part.split("=") for part in options.shapes.split(",") if part)}
    here = tuning.chip(torch.device("cuda", torch.cuda.current_device()))
    for name, make in launched.CALLS.items():
        if options.calls not in name:
            continue
        call = make(kernel, **sizes)
        for (operation, asked), config in lookups(call).items():
            if options.operation in operation and not lists_tiles(config):
                config = best(operation, asked, call, microseconds)
                print("wrote", write(operation, here, asked, config))


if __name__ == "__main__":
    main()
