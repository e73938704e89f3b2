"""Draws the pictures of benchmarks/results from the records there, all in one style.

    python benchmarks/pictures.py [NAME ..]     default: all of PICTURES

A bar is a speed-up over the peer that the title or the legend names: the peer's time divided by
ours. The line is at 1, where both take the same time. Curves are losses of a training. The GPU, the
versions and the dates stand below.
"""

import argparse
import hashlib
from typing import Callable, Dict, List, NamedTuple, Tuple, Union

from records import RESULTS, Case, cases, load, machine, title_of, whole_name

COLOURS = ("#3b6ea5", "#e08e3c", "#6b9e5f", "#8d6aa8")
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the line must not cross a number


class Picture(NamedTuple):
    title: str  # what was timed; the peer is added
    records: Tuple[str, ...]
    peer: str  # "": every peer of a record is a series
    bar: Callable[[Case], Tuple[str, str]]  # a case -> (group, series); no group: left out


def tokens(case: Case) -> Tuple[str, str]:
    *sizes, count = case.label.split(", ")
    wanted = sizes in (["K 4096", "N 14336"], ["K 1024", "N 3072"])
    return (count.split()[0] if wanted else ""), "ours, " + ", ".join(sizes)


def experts(case: Case) -> Tuple[str, str]:
    model, count, *more = case.label.split(", ")
    return ("" if more else count.split()[0]), f"ours, {model}"


def prompt(case: Case) -> Tuple[str, str]:
    heads, count, gates = case.label.split(", ")
    return ("" if gates == "slow gates" else f"{heads}\n{count}"), ""


def decode(case: Case) -> Tuple[str, str]:
    heads, batch, state = case.label.split(", ", 2)
    return f"{heads}\n{batch}", f"ours, {state}"


def model(case: Case) -> Tuple[str, str]:
    part, what, *batch, how = case.label.split(", ")
    return "\n".join((part, what, *batch)), f"ours, {how}"


class Curves(NamedTuple):
    """Losses by step: one plot for each of `parts`, which are entries of the record."""

    title: str
    records: Tuple[str, ...]
    parts: Tuple[str, ...]


class Panels(NamedTuple):
    """Whole models: training steps beside transformers, and a token of `generate`."""

    title: str
    records: Tuple[str, ...]  # the last one is of generate, the others of training steps
    tokens: Tuple[Tuple[str, str], ...]  # a group of the second panel, its label in the record


PICTURES: Dict[str, Union[Picture, Curves, Panels]] = {
    "whole_models": Panels(
        "Whole models of 8 layers (Llama, Qwen3-MoE) or 16 (Qwen3.5), random weights, bf16",
        ("whole_models_training", "whole_models_qwen", "whole_models_moe", "generate"),
        (
            ("Llama\nbatch 1", "Llama, 8 layers, batch 1"),
            ("Qwen3.5\nbatch 1", "Qwen3.5, 16 layers, batch 1"),
            ("Qwen3.5\nbatch 64", "Qwen3.5, 16 layers, batch 64"),
        ),
    ),
    "swiglu_fwd": Picture("SwiGLU forward, bf16, by tokens", ("swiglu_fwd",), "liger", tokens),
    "experts": Picture("Routed experts, bf16, by tokens", ("experts",), "grouped_mm", experts),
    "gdn_chunk_fla": Picture(
        "GDN prefill, bf16, head dim 128, gates of Qwen3.5",
        ("gdn_chunk_fla", "gdn_chunk_few_heads_fla"),
        "fla",
        prompt,
    ),
    "gdn_chunk_flashinfer": Picture(
        "GDN prefill, bf16, head dim 128, gates of Qwen3.5",
        ("gdn_chunk_flashinfer",),
        "flashinfer",
        prompt,
    ),
    "gdn_recurrent": Picture("GDN decode, head dim 128", ("gdn_recurrent",), "flashinfer", decode),
    "real_model": Curves(
        "Fine-tuning SmolLM2-135M on Python's manual", ("real_model",), ("AdamW", "LoRA")
    ),
    "models": Picture("A GDN layer and a 24-layer model, bf16", ("models",), "transformers", model),
}


def recorded() -> List[str]:
    """Names of the pictures whose records are all there."""
    there = {path.stem for path in RESULTS.glob("*.json")}
    return [name for name, picture in PICTURES.items() if there.issuperset(picture.records)]


def bars(picture: Picture) -> Tuple[List[str], Dict[str, Dict[str, float]]]:
    """The groups in order, and the speed-up by series and group."""
    series: Dict[str, Dict[str, float]] = {}
    for name in picture.records:
        record = load(name)
        for case in cases(record):
            group, its_series = picture.bar(case)
            wanted = [title_of(picture.peer, record)] if picture.peer else list(case.peers)
            for peer in [p for p in wanted if group and p in case.peers]:
                for variant, time in case.ours.items():
                    if picture.peer or variant == "ours":
                        label = its_series or (variant if picture.peer else f"over {peer}")
                        series.setdefault(label, {})[group] = case.peers[peer] / time
    groups = list(dict.fromkeys(group for s in series.values() for group in s))
    if all(group.isdigit() for group in groups):
        groups.sort(key=int)
    return groups, series


def caption(names: Tuple[str, ...]) -> str:
    machines: Dict[str, list] = {}
    for name in names:
        where, date = machine(load(name)).rsplit(", ", 1)
        machines.setdefault(where, []).append(date)
    return "; ".join(f"{m}, {' to '.join(sorted({min(d), max(d)}))}" for m, d in machines.items())


def digest(picture: Picture) -> str:
    """Digest of the records; a picture carries that of the records that it was drawn from."""
    records = b"".join((RESULTS / f"{name}.json").read_bytes() for name in picture.records)
    return hashlib.sha256(records).hexdigest()


def draw(name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture = PICTURES[name]
    makers = {Curves: draw_curves, Panels: draw_panels, Picture: draw_bars}
    figure = makers[type(picture)](picture, pyplot)
    figure.savefig(RESULTS / f"{name}.png", dpi=120, metadata={"Source": digest(picture)})
    pyplot.close(figure)


def draw_curves(picture: Curves, pyplot):
    """Ours is dashed, so that a curve below it can be seen."""
    record = load(picture.records[0])
    parts = [part for part in picture.parts if part in record]
    figure, plots = pyplot.subplots(
        1, len(parts), figsize=(10, 4.2), layout="constrained", squeeze=False
    )
    for axes, part in zip(plots[0], parts):
        for (way, found), colour in zip(record[part].items(), COLOURS):
            style = "--" if way == "ours" else "-"
            label = f"{way}: {found['held_out'][1]:.3f} held out, {found['step_ms']:.1f} ms a step"
            axes.plot(found["losses"], style, color=colour, linewidth=1.1, label=label)
        axes.set_title(part, fontsize=10)
        axes.set_xlabel("step", fontsize=9)
        axes.set_ylabel("loss, nats a token", fontsize=9)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(picture.title)
    figure.supxlabel(caption(picture.records), fontsize=8, color="#555555")
    return figure


def draw_panels(picture: Panels, pyplot):
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    steps = [(name.split(",")[0], row) for name, row in training_steps(picture.records[:-1])]
    for i, (key, unit, colour) in enumerate((("ms", "ms", 0), ("peak_GiB", "GiB", 2))):
        for j, (_, row) in enumerate(steps):
            ours, theirs = row[key]["ours"], row[key]["transformers"]
            label = {"ms": "time of a step", "peak_GiB": "peak memory"}[key]
            at, share = j + (i - 0.5) * 0.4, ours / theirs
            drawn = left.bar(at, share, 0.37, color=COLOURS[colour], label=label if not j else None)
            left.bar_label(drawn, [f"{ours:#.3g} {unit}\nof {theirs:.3g}"], fontsize=7.5, padding=2)
    left.axhline(1, color="black", linewidth=0.9)
    left.set_ylim(0, 1.2)
    left.set_xticks(range(len(steps)), [name for name, _ in steps], fontsize=9)
    left.set_ylabel("kernelized / transformers with FLA", fontsize=9)
    left.set_title("Training step of 4096 tokens, batch 1 (below 1: less)", fontsize=10)
    by_label = {case.label: case for case in cases(load(picture.records[-1]))}
    ways = ("transformers", "torch.compile", "kernelize", "kernelize, CUDA graphs")
    for i, way in enumerate(ways):
        found = [milliseconds(by_label, label)[i] for _, label in picture.tokens]
        at = [j + (i - 1.5) * 0.21 for j in range(len(found))]
        colour = ("#9a9a9a", COLOURS[1], "#8fb3d9", COLOURS[0])[i]
        drawn = right.bar(at, found, 0.2, label=way, color=colour)
        right.bar_label(drawn, [f"{ms:.3g}" for ms in found], fontsize=7.5, padding=2)
    right.set_ylim(0, 29)
    right.set_xticks(range(len(picture.tokens)), [name for name, _ in picture.tokens], fontsize=9)
    right.set_ylabel("ms a token", fontsize=9)
    right.set_title("A token of generate (lower is better)", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    figure.suptitle(picture.title, fontsize=11)
    versions = load(picture.records[0])["versions"]
    peers = f"transformers {versions['transformers']}, FLA {versions['fla-core']}"
    below = f"{peers}; {caption(picture.records)}"
    figure.supxlabel(below, fontsize=7.5, color="#555555")
    return figure


def training_steps(names: Tuple[str, ...]) -> List[Tuple[str, dict]]:
    """(name of the model, row of its record) of each training step."""
    return [(whole_name(row), row) for name in names for row in load(name)["rows"]]


def milliseconds(by_label: Dict[str, Case], label: str) -> Tuple[float, ...]:
    """A token by transformers, torch.compile, ours without and with CUDA graphs."""
    eager, graphs = by_label[f"{label}, an eager token"], by_label[f"{label}, a token"]
    times = (*eager.peers.values(), *graphs.peers.values(), eager.ours["ours"], graphs.ours["ours"])
    return tuple(time / 1e3 for time in times)


def draw_bars(picture: Picture, pyplot):
    groups, series = bars(picture)
    figure, axes = pyplot.subplots(figsize=(10, 4.2), layout="constrained")
    width = 0.8 / len(series)
    for i, (label, heights) in enumerate(series.items()):
        at = [j + (i - (len(series) - 1) / 2) * width for j in range(len(groups))]
        found = [heights.get(group, float("nan")) for group in groups]
        drawn = axes.bar(at, found, width * 0.94, label=label, color=COLOURS[i])
        size = 8 if len(groups) * len(series) < 28 else 6.5
        axes.bar_label(
            drawn,
            [f"{h:.2f}" if h == h else "" for h in found],
            fontsize=size,
            padding=2,
            bbox=LABEL,
            zorder=3,
        )
    axes.axhline(1, color="black", linewidth=0.9)
    axes.set_xticks(range(len(groups)), groups, fontsize=8.5)
    axes.set_xlabel(caption(picture.records), fontsize=8, color="#555555", labelpad=8)
    axes.set_ylabel("speed-up (above 1: ours is faster)", fontsize=9)
    last = load(picture.records[-1])
    peer = f": speed-up over {title_of(picture.peer, last)}" if picture.peer else ""
    axes.set_title(picture.title + peer)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(series), frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="default: all")
    for name in parser.parse_args().names or recorded():
        draw(name)
        print(f"wrote {RESULTS / name}.png")


if __name__ == "__main__":
    main()
