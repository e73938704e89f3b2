"""Train a small SwiGLU network on real images: ours, ours with frozen weights, Liger and torch.

    python examples/train_digits.py [--seeds 5] [--epochs 20] [--data digits|mnist]
                                    [--report-to trackio] [--plot digits.png]

scikit-learn's digits need no download; `--data mnist` fetches MNIST through torchvision. Accuracy
should agree within the seeds' noise, and frozen projections should cost accuracy, not time.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from kernels import get_kernel
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "org/fused-swiglu-gdn"
HIDDEN = 256
LOADERS = {"digits": ("sklearn", "scikit-learn"), "mnist": ("torchvision", "torchvision")}


def load():
    """The kernel as a user loads it, from the tree that tools/build.py builds."""
    subprocess.run([sys.executable, ROOT / "tools" / "build.py"], check=True)
    os.environ["LOCAL_KERNELS"] = f"{REPOSITORY}={ROOT}"
    return get_kernel(REPOSITORY, version=1)


def data(name: str, device):
    """Images [n, pixels] in 0..1 and labels [n]: for training, for testing."""
    if name == "mnist":
        from torchvision.datasets import MNIST

        sets = [
            MNIST(ROOT / "build" / "mnist", train=train, download=True) for train in (True, False)
        ]
        pairs = [(s.data.flatten(1) / 255.0, s.targets) for s in sets]
    else:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        split = train_test_split(
            images / 16.0, labels, test_size=0.3, random_state=0, stratify=labels
        )
        x_train, x_test, y_train, y_test = map(torch.as_tensor, split)
        pairs = [(x_train.float(), y_train), (x_test.float(), y_test)]
    return [(x.to(device), y.to(device)) for x, y in pairs]


class TwoLinears(nn.Module):
    """silu(gate(x)) * up(x) by torch, or with Liger's gate."""

    def __init__(self, pixels: int, gated=None):
        super().__init__()
        self.gate = nn.Linear(pixels, HIDDEN, bias=False)
        self.up = nn.Linear(pixels, HIDDEN, bias=False)
        self.gated = gated or (lambda gate, up: F.silu(gate) * up)

    def forward(self, x):
        return self.gated(self.gate(x), self.up(x))


def contenders(kernel, pixels: int, device) -> dict:
    """What makes the first layer, by name; all start from the same weights for the same seed."""

    def ours(weight_grad):
        plain = TwoLinears(pixels)
        return kernel.FusedSwiGLU.from_linears(plain.gate, plain.up, weight_grad=weight_grad)

    found = {
        "torch": lambda: TwoLinears(pixels),
        "fused": lambda: ours(True),
        "fused, frozen": lambda: ours(False),
    }
    if device.type == "cuda":
        try:
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction

            found["liger"] = lambda: TwoLinears(pixels, LigerSiLUMulFunction.apply)
        except ImportError:
            pass
    return found


def progress(done: int, total: int, text: str) -> None:
    if sys.stderr.isatty():
        bar = "#" * (20 * done // total)
        end = "\n" if done == total else ""
        print(f"\r{text:24s} [{bar:20s}] {done}/{total}", end=end, file=sys.stderr)


def train(make, seed: int, sets, epochs: int, text: str, batch: int = 64):
    """(losses of each epoch, accuracy, seconds)."""
    (x, y), (x_test, y_test) = sets
    torch.manual_seed(seed)
    first = make()
    model = nn.Sequential(first, nn.Linear(HIDDEN, 10)).to(x.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    order = torch.Generator().manual_seed(seed)
    losses = []
    start = time.perf_counter()
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(x), generator=order).to(x.device).split(batch):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)
        losses.append(float(total) / len(x))
        progress(epoch + 1, epochs, f"{text}, seed {seed}")
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    return losses, accuracy, seconds


def plot(curves: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6))
    for name, losses in curves.items():
        mean = [statistics.mean(epoch) for epoch in zip(*losses)]
        axis.plot(range(1, len(mean) + 1), mean, label=name)
    axis.set(xlabel="epoch", ylabel="cross entropy, mean of seeds", yscale="log")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(name: str, seed: int, losses, accuracy) -> None:
    """One run to trackio (https://github.com/gradio-app/trackio)."""
    import trackio

    trackio.init(project="fused-swiglu-digits", name=f"{name}-{seed}")
    for loss in losses:
        trackio.log({"loss": loss})
    trackio.log({"accuracy": accuracy})
    trackio.finish()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", choices=("digits", "mnist"), default="digits", help="the images")
    parser.add_argument("--epochs", type=int, default=20, help="of each run, at least 1")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind, at least 1")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="a picture of the losses")
    parser.add_argument(
        "--report-to", choices=("none", "trackio"), default="none", help="who gets each run"
    )
    options = parser.parse_args()
    for name in ("epochs", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1: {getattr(options, name)}")
    for option, module, package in (
        (f"--data {options.data}", *LOADERS[options.data]),
        *([("--plot", "matplotlib", "matplotlib")] if options.plot else []),
        *([("--report-to trackio", "trackio", "trackio")] if options.report_to != "none" else []),
    ):
        if importlib.util.find_spec(module) is None:
            parser.error(f"{option} needs a package that is not installed: pip install {package}")
    if options.plot and not options.plot.absolute().parent.is_dir():
        parser.error(f"--plot must be in a folder that is there: {options.plot}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        sets = data(options.data, device)
    except (ImportError, OSError, RuntimeError) as error:  # MNIST is fetched from the network
        parser.error(f"--data {options.data} cannot be read: {str(error).splitlines()[0]}")
    makers = contenders(load(), sets[0][0].shape[1], device)
    curves = {}
    for name, make in makers.items():
        runs = [train(make, s, sets, options.epochs, name) for s in range(options.seeds)]
        curves[name] = [losses for losses, _, _ in runs]
        if options.report_to == "trackio":
            for seed, (losses, accuracy, _) in enumerate(runs):
                report(name, seed, losses, accuracy)
        accuracies = [100 * accuracy for _, accuracy, _ in runs]
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        seconds = statistics.median(seconds for _, _, seconds in runs)
        mean = statistics.mean(accuracies)
        print(f"{name:16s} accuracy {mean:.2f} +- {spread:.2f} %, {seconds:.1f} s a run")
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
