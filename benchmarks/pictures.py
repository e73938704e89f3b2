"""Draws the pictures of benchmarks/results from the records there, all in one style.

    python benchmarks/pictures.py [NAME ..]     default: all of PICTURES

A bar is a speed-up over the peer that the title or the legend names: the peer's time divided by
ours. The line is at 1, where both take the same time. Curves are losses of a training. The GPU, the
versions and the dates stand below.
"""

import argparse
import hashlib
from typing import Callable, Dict, List, NamedTuple, Tuple, Union

from records import RESULTS, Case, cases, load, machine, title_of

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


WHOLE = {  # what a case of whole models was, as the picture has it, in the picture's order
    "prompt of 8192": "prompt",
    "training step of 4096": "training",
    "token": "a token",
    "a token": "in generate",
}


def whole(case: Case) -> Tuple[str, str]:
    """Prompts, training steps and tokens of whole models; the largest mixture of experts alone."""
    name, *parts = case.label.removesuffix(", eager").split(", ")
    what = next((said for part, said in WHOLE.items() if part in parts), "")
    batch = [part for part in parts if part.startswith("batch")]
    left = name == "Qwen3-30B-A3B" or "CUDA graph" in parts or not what
    name = name.replace("Qwen3.5-35B-A3B", "Qwen3.5\n35B-A3B")
    name = name if "\n" in name else f"{name}\n"
    return ("" if left else "\n".join([name, what, *batch])), ""


class Curves(NamedTuple):
    """Losses by step: one plot for each of `parts`, which are entries of the record."""

    title: str
    records: Tuple[str, ...]
    parts: Tuple[str, ...]


PICTURES: Dict[str, Union[Picture, Curves]] = {
    "whole_models": Picture(
        "Whole models of 8 or 16 layers, bf16: speed-up over three others",
        (
            "whole_models",
            "mixtures",
            "whole_models_training",
            "whole_models_qwen",
            "whole_models_moe",
            "generate",
        ),
        "",
        whole,
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
    if picture.bar is whole:
        groups.sort(key=lambda group: list(WHOLE.values()).index(group.split("\n")[2]))
    if all(group.isdigit() for group in groups):
        groups.sort(key=int)
    return groups, series


def caption(names: Tuple[str, ...]) -> str:
    machines: Dict[str, list] = {}
    for name in names:
        where, date = machine(load(name)).rsplit(", ", 1)
        machines.setdefault(where, []).append(date)
    return "; ".join(f"{m}, {' and '.join(sorted(set(d)))}" for m, d in machines.items())


def digest(picture: Picture) -> str:
    """Digest of the records; a picture carries that of the records that it was drawn from."""
    records = b"".join((RESULTS / f"{name}.json").read_bytes() for name in picture.records)
    return hashlib.sha256(records).hexdigest()


def draw(name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture = PICTURES[name]
    make = draw_curves if isinstance(picture, Curves) else draw_bars
    figure = make(picture, pyplot)
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
    fits = 8.5 if picture.bar is not whole else 7.5
    axes.set_xticks(range(len(groups)), groups, fontsize=fits)
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
