"""Writes the tables of docs/benchmarks.md, README.md and CARD.md from benchmarks/results/*.json.

    python benchmarks/page.py                     # write what has changed
    python benchmarks/page.py --check [FILE..]    # name what has changed, exit code 1

page.md has the page's text: each section begins with `<!-- RECORD: TABLE .. -->`, the name of its
record and of its tables, of which TABLE is made by tables.of_TABLE. In README.md and CARD.md the
table stands between two comments, MARKS.
"""

import argparse
import re
import sys
import textwrap
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import tables
from records import OURS, RESULTS, case, load, machine, title_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/benchmarks.md"
FILES = [PAGE, "README.md", "CARD.md"]
MARKS = ("<!-- numbers: python benchmarks/page.py -->", "<!-- end of numbers -->")
TEXT = Path(__file__).with_suffix(".md")

# what is shown, record, label of the case, ours, peer, label of the peer's case if it is another
Summary = Tuple[str, ...]
SUMMARY: List[Summary] = [
    ("Qwen3-0.6B, LoRA step of 4096 tokens, `training_graphs=True`", "small_training",
     "Qwen3-0.6B, LoRA on bf16", "ours, training_graphs", "modeling"),
    ("Qwen3.5, 16 layers, training step of 4096 tokens", "whole_models_qwen",
     "Qwen3.5, 16 layers, training step of 4096, eager", "ours", "transformers"),
    ("Qwen3.5, 16 layers, prompt of 8192 tokens", "whole_models",
     "Qwen3.5, 16 layers, prompt of 8192, eager", "ours", "transformers"),
    ("Qwen3-30B-A3B, all 48 layers, first token after 8192", "published_models",
     "Qwen3-30B-A3B, 48 layers, first token after a prompt of 8192", "ours", "liger"),
    ("Llama in FP8, 8 layers, prompt of 8192 tokens", "fp8_models",
     "Llama, 8 layers, prompt of 8192 tokens in FP8", "ours", "transformers_fp8"),
    ("Qwen3.5, 16 layers, a token of `generate`, by CUDA graphs", "generate",
     "Qwen3.5, 16 layers, batch 1, a token", "ours", "compile"),
    ("Llama, 8 layers, a token of `generate` without CUDA graphs", "generate",
     "Llama, 8 layers, batch 1, an eager token", "ours", "compile",
     "Llama, 8 layers, batch 1, a token"),
    ("Gated DeltaNet, prompt of 2048 tokens, 16/64 heads", "gdn_chunk_flashinfer",
     "16/64 heads, 2048 tokens, slow gates", OURS["hopper"], "flashinfer"),
    ("Kimi Delta Attention, prompt of 8192 tokens, 64 heads (FLA: best of two configurations)",
     "kda_calls", "H 64, 8192", "ours", "fla"),
    ("GLM-4.7-Flash, 8 layers, a token by CUDA graphs over 32768 others", "latent_models",
     "GLM-4.7-Flash, 8 layers, a token by graphs, 1 x 32768", "ours", "transformers"),
    ("SwiGLU forward, K 1024, N 3072, 128 tokens", "swiglu_fwd", "K 1024, N 3072, 128 tokens",
     "ours", "gemm"),
]  # fmt: skip


def sections() -> Tuple[str, Dict[str, Tuple[str, str]]]:
    """The page's head, and of each record the names of its tables, and its text."""
    head, *parts = re.split(r"<!-- (\w+): (.*) -->\n", TEXT.read_text())
    return head, {n: (t, text.strip()) for n, t, text in zip(*(parts[i::3] for i in range(3)))}


def section(record: dict) -> Iterator[str]:
    name = record["name"]
    try:
        wanted, text = sections()[1][name]
    except KeyError:
        raise ValueError(f"benchmarks/results/{name}.json has no section in page.md") from None
    yield text
    source = f"[record](../benchmarks/results/{name}.json)"
    yield f"`{record['command']}`\\\n{machine(record)}, {source}"
    if "note" in record:
        yield textwrap.fill(record["note"], 100)
    yield from filter(None, (getattr(tables, f"of_{table}")(record) for table in wanted.split()))
    if (RESULTS / f"{name}.png").exists():
        title = text.splitlines()[0].lstrip("# ")
        yield f"![{title}](../benchmarks/results/{name}.png)"


def page() -> str:
    head, known = sections()
    there = {path.stem for path in RESULTS.glob("*.json")}
    order = [name for name in known if name in there] + sorted(there - set(known))
    parts = [part for name in order for part in section(load(name))]
    return head + "\n\n".join(parts) + "\n"


def summary() -> str:
    """At most eleven rows: what was timed, ours, one peer, the speed-up."""
    rows, machines = [], {}
    for what, name, label, ours, peer, *other in SUMMARY:
        record = load(name)
        peer = title_of(peer, record)
        a, b = case(record, label).ours[ours], case(record, *(other or [label])).peers[peer]
        peer = peer.replace("transformers' own functions", "transformers")
        # FLA serves Gated DeltaNet alone
        if peer.startswith("transformers with FLA") and "Qwen3.5" not in what:
            peer = f"transformers {record['versions']['transformers']}"
        rows.append([what, tables.ms(a), f"{peer}: {tables.ms(b)}", f"{b / a:.2f}"])
        where, date = machine(record).rsplit(", ", 1)
        machines.setdefault(where, set()).add(date)
    spans = {where: " to ".join(sorted({min(d), max(d)})) for where, d in machines.items()}
    seen = "; ".join(f"{where}, {span}" for where, span in spans.items())
    head = ["bf16", "ours, ms", "peer, ms", "speed-up"]
    return f"{tables.table(head, rows)}\n\nOne {seen}."


def filled(text: str) -> str:
    """The text with the summary between the two marks."""
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}\n{summary()}\n{MARKS[1]}{after}"


def stale(names: List[str]) -> Dict[str, str]:
    """What those of the files have to hold that hold something else."""
    found = {}
    for name in names:
        path = ROOT / name
        now = path.read_text() if path.exists() else ""
        then = page() if name == PAGE else filled(now)
        if now != then:
            found[name] = then
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help=f"default: {' '.join(FILES)}")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    found = stale(options.files or FILES)
    for name, text in found.items():
        if options.check:
            print(f"{name} and benchmarks/results disagree: run python benchmarks/page.py")
        else:
            (ROOT / name).write_text(text)
            print(f"wrote {name}")
    sys.exit(options.check and bool(found))


if __name__ == "__main__":
    main()
