"""Train a small hybrid model (Qwen3.5: three GDN layers, one of attention) on bytes.

    python examples/train_bytes.py                          # 300 steps on the GPU, three seeds
    python examples/train_bytes.py --steps 4 --seeds 1      # a few on the CPU

The text is what ships with Python: the sources of its standard library. The same model from the
same seeds trains on transformers' own torch functions, on FLA's kernels where they run, and on
ours; the loss curves go to one picture, losses and tokens a second to JSON.
"""

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Dict, Iterator, List, Optional

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "cpu": {"hidden": 64, "heads": 2, "head_dim": 16, "tokens": 128, "batch": 2},
    "cuda": {"hidden": 512, "heads": 4, "head_dim": 128, "tokens": 1024, "batch": 8},
}


def kernel_time():
    """What the benchmarks share."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import kernel_time

    return kernel_time


def load_kernel():
    """The package in the tree, as the benchmarks load it: the tests' way would hide FLA."""
    return kernel_time().load_package()


def corpus() -> torch.Tensor:
    """The standard library's modules as bytes, in the order of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def random_model(sizes: dict, device: str, seed: int):
    heads, dim = sizes["heads"], sizes["head_dim"]
    config = transformers.Qwen3_5TextConfig(
        vocab_size=256, hidden_size=sizes["hidden"], intermediate_size=3 * sizes["hidden"],
        num_hidden_layers=4, num_attention_heads=heads, num_key_value_heads=heads, head_dim=dim,
        linear_num_key_heads=heads, linear_num_value_heads=2 * heads, linear_key_head_dim=dim,
        linear_value_head_dim=dim, max_position_embeddings=4096, pad_token_id=None,
        eos_token_id=None, layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config).train()


def batches(text: torch.Tensor, sizes: dict, seed: int) -> Iterator[torch.Tensor]:
    """[batch, tokens + 1] of bytes from random places; the same ones for every way to train."""
    random = torch.Generator().manual_seed(seed)
    span = torch.arange(sizes["tokens"] + 1)
    while True:
        places = torch.randint(len(text) - len(span), (sizes["batch"], 1), generator=random)
        yield text[places + span].long()


def train(model, text, sizes: dict, device: str, steps: int, seed: int):
    """The loss of each step, and tokens a second after the first few."""
    # fused: one launch for all parameters, so that the optimizer hides nothing
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    losses: List[torch.Tensor] = []
    warm = min(10, steps // 2)
    start = time.perf_counter()
    for step, batch in zip(range(steps), batches(text, sizes, seed)):
        if step == warm:
            synchronize(device)
            start = time.perf_counter()
        batch = batch.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize(device)
    seconds = time.perf_counter() - start
    per_second = (steps - warm) * sizes["batch"] * sizes["tokens"] / seconds
    return torch.stack(losses).tolist(), per_second


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def without_fla():
    """transformers' own functions: where FLA is installed, it takes FLA's instead by itself."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    names = (
        "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn",
        "causal_conv1d_update",
    )  # fmt: skip
    before = {name: getattr(modeling, name) for name in names}
    for name, function in before.items():
        setattr(modeling, name, getattr(function, "__wrapped__", function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(modeling, name, function)


def ways(device: str) -> Dict[str, object]:
    kernel = load_kernel()

    def ours(model):
        kernel.kernelize(model, mode="training")

    found: Dict[str, object] = {"ours": ours, "torch": None}
    if device == "cuda" and importlib.util.find_spec("fla"):
        found["FLA"] = None
    return found


def run(args) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, text = SIZES[device], corpus()
    results: Dict[str, dict] = {}
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    shared = kernel_time()
    report = {
        "command": shared.command(),
        "device": gpu,
        "torch": torch.__version__,
        "triton": shared.installed(["triton"]).get("triton"),
        "versions": shared.installed(),
        "date": shared.today(),
        "sizes": sizes,
        "ways": results,
    }
    for name, prepare in ways(device).items():
        if args.only and name not in args.only:
            continue
        curves, speeds = [], []
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            try:
                with contextlib.nullcontext() if name == "FLA" else without_fla():
                    model = random_model(sizes, device, seed)
                    if prepare is not None:
                        prepare(model)
                    curve, speed = train(model, text, sizes, device, args.steps, seed)
            except Exception as error:  # FLA refuses its backward on Hopper with Triton < 3.7.1
                print(f"{name} does not train here: {type(error).__name__}: {str(error)[:100]}")
                break
            curves.append(curve)
            speeds.append(speed)
            last = statistics.mean(curve[-20:])
            print(f"{name}, seed {seed}: loss {last:.4f}, {speed:,.0f} tokens/s", flush=True)
            results[name] = {"losses": curves, "tokens_per_second": statistics.median(speeds)}
            write(report, args.out)
    return report


def write(report: dict, folder: Optional[Path]) -> None:
    """What there is so far: a run that is cut short leaves its part."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train_bytes.json").write_text(json.dumps(report, indent=1))


def draw(report: dict, path: Path) -> None:
    """One curve a way: the mean of its seeds, averaged over 10 steps, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for (name, way), style in zip(report["ways"].items(), ("-", "--", ":")):
        curves = torch.tensor(way["losses"])  # [seeds, steps]
        width = min(10, curves.shape[1])
        smooth = curves.unfold(1, width, 1).mean(-1)
        steps = range(width, curves.shape[1] + 1)
        label = f"{name}: {curves[:, -20:].mean():.3f}, {way['tokens_per_second']:,.0f} tokens/s"
        axes.plot(steps, smooth.mean(0), style, label=label)
        axes.fill_between(steps, smooth.amin(0), smooth.amax(0), alpha=0.15)
    axes.set(
        xlabel="step", ylabel="loss (nats a byte)", title=f"Bytes of Python, {report['device']}"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="of ours, torch, FLA")
    parser.add_argument("--out", type=Path, help="folder for train_bytes.json and train_bytes.png")
    args = parser.parse_args()
    report = run(args)
    if args.out:
        draw(report, args.out / "train_bytes.png")


if __name__ == "__main__":
    main()
