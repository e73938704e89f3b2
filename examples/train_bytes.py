"""Train a small hybrid model (Qwen3.5: three GDN layers, one of attention) on bytes.

    python examples/train_bytes.py                          # 300 steps on the GPU, three seeds
    python examples/train_bytes.py --steps 4 --seeds 1      # a few on the CPU
    torchrun --nproc-per-node 2 examples/train_bytes.py --cp 2 --seeds 1

With --cp N every sequence is held by N processes, a part in each (docs/parallel.md); weights are
sharded over all processes by FSDP2, and activations recomputed in the backward.

The text is what ships with Python: the sources of its standard library. The same model from the
same seeds trains on transformers' own torch functions, on FLA's kernels where they run, and on
ours; the loss curves go to one picture, losses and tokens a second to JSON.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Dict, Iterator, Optional

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("ours", "torch", "FLA")
SIZES = {
    "cpu": {"hidden": 64, "heads": 2, "head_dim": 16, "tokens": 128, "batch": 2},
    "cuda": {"hidden": 512, "heads": 4, "head_dim": 128, "tokens": 1024, "batch": 8},
}


def runner():
    """What the benchmarks share."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import runner

    return runner


def load_kernel():
    """The package in the tree, as the benchmarks load it: the tests' way would hide FLA."""
    return runner().load_package()


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


def loss_of(model, batch: torch.Tensor) -> torch.Tensor:
    """The mean over a batch [batch, tokens + 1] of bytes."""
    logits = model(batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


class ContextParallel:
    """Processes that hold sequences together, in groups of `size`; each group has its batches."""

    def __init__(self, size: int, device: str):
        if device == "cuda":  # first: NCCL takes the device that is current
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        self.world = dist.get_world_size()
        shape = (self.world // size, size)
        self.mesh = dist.init_device_mesh(device, shape, mesh_dim_names=("dp", "cp"))
        self.group, self.kernel = self.mesh["cp"].get_group(), load_kernel()
        self.first = dist.get_rank() == 0

    def prepare(self, model) -> None:
        self.kernel.kernelize(model, mode="training", cp_group=self.group)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        everyone = self.mesh._flatten("dp_cp")
        for layer in model.model.layers:
            fully_shard(layer, mesh=everyone)
        fully_shard(model, mesh=everyone)

    def loss_of(self, model, batch: torch.Tensor) -> torch.Tensor:
        """This process's part of the mean loss of its group, times their number: FSDP2 averages."""
        given = {"input_ids": batch[:, :-1], "shift_labels": batch[:, 1:], "labels": batch[:, 1:]}
        part = self.kernel.shard_batch(given, self.group, layout="zigzag")
        return model(**part).loss * self.group.size()

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(losses)
        return losses / self.world


def train(model, text, sizes: dict, device: str, steps: int, seed: int, shared=None):
    """The loss of each step, and tokens a second after the first few.

    shared: a ContextParallel, whose batches differ between groups.
    """
    loss_of_batch = loss_of if shared is None else shared.loss_of
    if shared is not None:
        seed += 1000 * shared.mesh["dp"].get_local_rank()
    # fused: one launch for all parameters, so that the optimizer hides nothing
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    losses = []
    warm = min(10, steps // 2)
    start = time.perf_counter()
    for step, batch in zip(range(steps), batches(text, sizes, seed)):
        if step == warm:
            synchronize(device)
            start = time.perf_counter()
        batch = batch.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of_batch(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize(device)
    seconds = time.perf_counter() - start
    per_second = (steps - warm) * sizes["batch"] * sizes["tokens"] / seconds
    losses = torch.stack(losses)
    if shared is not None:
        losses, per_second = shared.mean(losses), per_second * shared.mesh["dp"].size()
    return losses.tolist(), per_second


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


def ways(device: str, shared: Optional[ContextParallel]) -> Dict[str, object]:
    if shared is not None:
        return {"ours": shared.prepare}
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
    shared = ContextParallel(args.cp, device) if args.cp else None
    results: Dict[str, dict] = {}
    facts = runner().machine()
    report = {**facts, "device": facts["gpu"], "sizes": sizes, "ways": results}
    for name, prepare in ways(device, shared).items():
        if args.only and name not in args.only:
            continue
        curves, speeds = [], []
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            try:
                with contextlib.nullcontext() if name == "FLA" else without_fla():
                    model = random_model(sizes, device, seed)
                    if prepare is not None:
                        prepare(model)
                    curve, speed = train(model, text, sizes, device, args.steps, seed, shared)
            except Exception as error:  # FLA refuses its backward on Hopper with Triton < 3.7.1
                print(f"{name} does not train here: {type(error).__name__}: {str(error)[:100]}")
                break
            curves.append(curve)
            speeds.append(speed)
            last = statistics.mean(curve[-20:])
            if shared is not None and not shared.first:
                continue
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
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of each run, at least 1")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way, at least 1")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it")
    parser.add_argument(
        "--cp", type=int, help="processes that hold each sequence; torchrun starts them"
    )
    parser.add_argument("--only", nargs="+", choices=WAYS, help="which ways to train")
    parser.add_argument("--out", type=Path, help="folder for train_bytes.json and train_bytes.png")
    args = parser.parse_args()
    for name in ("steps", "seeds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1: {getattr(args, name)}")
    if args.cp is not None:
        started = int(os.environ.get("WORLD_SIZE", 0))
        if args.cp < 1 or started < 1 or started % args.cp:
            parser.error(
                f"--cp {args.cp} needs a multiple of {args.cp} processes, by torchrun "
                f"--nproc-per-node: {started or 'none'} started"
            )
    elif args.out and importlib.util.find_spec("matplotlib") is None:
        parser.error("--out needs a package that is not installed: pip install matplotlib")
    report = run(args)
    if args.cp:
        dist.destroy_process_group()
    elif args.out:
        draw(report, args.out / "train_bytes.png")


if __name__ == "__main__":
    main()
