"""Small random models of every causal language model's type on a GPU, by kernels and without.

    python tests/sweep_on_gpu.py [--workers 14] [--seconds 600] [--only TYPE ..] [--json FILE]

Models are those of sweep_models.py in the sizes of model_table.py's FP8 models, which kernels take.
In fp32 logits, the tokens of `generate` with `cuda_graphs=True`, gradients and training steps by
`training_graphs` are compared with transformers' own; in bf16 the distance of both from the fp32
model, where a rounding may send a token to another expert. docs/model_table.md tells of the record,
tests/gpu_models.json: {type: what was found, or why nothing was}.
"""

import argparse
import copy
import datetime
import json
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Dict, List, Tuple
from unittest import mock

import sweep_models
import torch
from conftest import ROOT, load_package, submodule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECORD = ROOT / "tests" / "gpu_models.json"
SECONDS, NEW, STEPS = 45, 6, 6  # of a type; tokens; training steps, the third captures graphs


def given_to(model, arguments: dict, shape: tuple) -> dict:
    ids = torch.randint(8, 100, shape, device=DEVICE)
    names = ("input_ids", "decoder_input_ids")
    return {name: ids for name in names if name in arguments or name == "input_ids"}


def largest(found: Dict[str, torch.Tensor], expected: Dict[str, torch.Tensor]) -> float:
    """The largest difference of gradients, relative to the largest value of each; what is below a
    ten thousandth of all counts as that much, for it may be zero but for roundings."""
    if found.keys() != expected.keys():
        return float("inf")
    least = 1e-4 * max(x.abs().max().item() for x in expected.values())
    return max(
        ((found[n] - x).abs().max() / max(x.abs().max().item(), least)).item()
        for n, x in expected.items()
    )


def trained(model, arguments: dict) -> Tuple[float, int]:
    """The largest difference of gradients over steps by CUDA graphs of layers, and how often a
    layer's forward was a replay."""
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False  # with a cache layers train without graphs
    ours, worst, replays = copy.deepcopy(model).train(), 0.0, []
    load_package().kernelize(ours, mode="training", training_graphs=True)
    kind = submodule("models.layer_step").LayerStep
    run = kind.run
    with mock.patch.object(kind, "run", lambda *given: (replays.append(1), run(*given))[1]):
        for _ in range(STEPS):
            given = given_to(model, arguments, (2, 37))
            expected = sweep_models.gradients(model.train(), given)
            worst = max(worst, largest(sweep_models.gradients(ours, given), expected))
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name in expected:
                        p.sub_(expected[name], alpha=0.05)
                for p, q in zip(ours.parameters(), model.parameters()):
                    p.copy_(q)
    return float(f"{worst:.1e}"), len(replays)


def without_dropout(model):
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, float) and (name == "p" or "dropout" in name):
                setattr(module, name, 0.0)
    return model


def look(kind: str) -> dict:
    from model_table import WIDER  # whose page tells of the record

    model, arguments, _ = sweep_models.callable_model(kind, WIDER)
    if arguments is None or "input_ids" not in arguments:
        raise sweep_models.NotMade("cannot be called with tokens alone")
    torch.manual_seed(3)
    model = without_dropout(model).to(DEVICE)
    given, off = given_to(model, arguments, (2, 37)), sweep_models.difference
    with torch.no_grad():
        exact = sweep_models.output_of(model, given).double()
    found: dict = {}
    for dtype in (torch.float32, torch.bfloat16):
        theirs, ours = (copy.deepcopy(model).to(dtype) for _ in range(2))
        report = load_package().kernelize(ours, cuda_graphs=True)
        with torch.no_grad():
            errors = [off(sweep_models.output_of(m, given).double(), exact) for m in (ours, theirs)]
        found[str(dtype).removeprefix("torch.")] = [float(f"{x:.1e}") for x in errors]
        if dtype is torch.float32:
            found["served"] = len(report.served)
            pair = [sweep_models.tokens_of(m, given, NEW) for m in (ours, model)]
            if model.can_generate():
                found["tokens"] = pair == [None, None] or torch.equal(*pair)
    found["steps"], found["replays"] = trained(model, arguments)
    return found


def out_of_time(*_):
    raise TimeoutError("out of time")


def work(kinds: List[str], path: Path) -> None:
    """A worker: looks at these types, a line each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, out_of_time)
    with open(path, "w", buffering=1) as file:
        for kind in kinds:
            signal.alarm(SECONDS)
            try:
                found = look(kind)
            except Exception as error:
                found = sweep_models._short(error)
            finally:
                signal.alarm(0)
            file.write(json.dumps([kind, found]) + "\n")


def causal_types() -> List[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return sorted(names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=600, help="end after so many")
    parser.add_argument("--only", nargs="+", metavar="TYPE")
    parser.add_argument("--json", type=Path, default=RECORD)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = options.only or causal_types()
    if options.work:
        work(kinds, options.work)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for n in range(min(options.workers, len(kinds))):
            path = Path(folder, str(n))
            words = ["--work", str(path), "--only", *kinds[n :: options.workers]]
            started.append((path, subprocess.Popen([sys.executable, __file__, *words])))
        end = time.monotonic() + options.seconds
        for _, process in started:
            try:
                process.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
        lines = [line for path, _ in started for line in path.read_text().splitlines()]
    import transformers
    import triton

    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    today = datetime.datetime.now(datetime.timezone.utc).date()
    where += f" ({versions}, transformers {transformers.__version__}, {today})"
    types = [
        f"  {json.dumps(kind)}: {json.dumps(of)}" for kind, of in sorted(map(json.loads, lines))
    ]
    parts = f' "where": {json.dumps(where)}', ' "types": {\n' + ",\n".join(types) + "\n }"
    options.json.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(told(json.loads(options.json.read_text())))
    return 0


def is_right(of: dict) -> bool:
    return of["float32"][0] < 2e-4 and of["steps"] < 1e-2 and of.get("tokens", True)


def told(record: dict) -> str:
    """What the record says, in words."""
    found = {kind: of for kind, of in record["types"].items() if isinstance(of, dict)}
    wrong = [f"`{kind}`" for kind, of in found.items() if not is_right(of)]
    ratios = sorted(of["bfloat16"][0] / max(of["bfloat16"][1], 1e-9) for of in found.values())
    larger, smaller = sum(r > 3 for r in ratios), sum(r < 1 / 3 for r in ratios)
    return (
        f"By kernels {len(found)} types of causal language models ran on an {record['where']}, "
        "`tests/sweep_on_gpu.py`: in fp32 logits, greedy tokens with `cuda_graphs=True` and the "
        f"gradients of {STEPS} training steps by `training_graphs` (of which "
        f"{sum(of['replays'] > 0 for of in found.values())} replay) are transformers' own in "
        f"{'all of them' if not wrong else 'all but ' + ', '.join(wrong)}. In bf16 the distance "
        f"from the fp32 model is {ratios[len(ratios) // 2]:.2f} of transformers' in the median; "
        "where a rounding sends a token to another expert, it is more than three times as large "
        f"({larger} types) or less than a third ({smaller})."
    )


if __name__ == "__main__":
    sys.exit(main())
