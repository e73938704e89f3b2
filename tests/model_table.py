"""The table of models, docs/model_table.md: what kernelize serves in a tiny model of every type.

    python tests/model_table.py                   # write the page from tests/model_table.json
    python tests/model_table.py --check           # exit code 1 if the page is another
    python tests/model_table.py --run             # try every type of the installed transformers
    python tests/model_table.py --run --only llama mt5

A type is tried as tests/sweep_models.py does, with the package's reference in place of kernels:
logits, greedy tokens, gradients and single MLPs, before and after kernelize, by fp32 weights. Then
`generate` decodes on a static cache by an emulated CUDA graph, and its tokens are compared; and the
linear layers and experts of a wider model get weights in FP8, whose logits are compared with those
of transformers' modules. `--run` replaces what the record says of this release and these types.
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Dict, List, Optional

import fp8_problems
import pytest
import sweep_models
import sweep_on_gpu
import torch
from conftest import ROOT, load_package, submodule
from emulated_graph import EmulatedGraph
from release_counts import served_everywhere
from sweep_models import SIZES, Result, Wrong, callable_model

RECORD, PAGE = ROOT / "tests" / "model_table.json", ROOT / "docs" / "model_table.md"
COLUMNS = {  # title: kinds of rows of the report
    "MLP": ("mlp",), "norm": ("norm",), "attention": ("attention",), "layer": ("layer",),
    "GDN": ("gdn",), "KDA": ("kda",), "experts": ("experts",), "router": ("router", "block"),
    "graphs": ("graphs",), "FP8": ("fp8",),
}  # fmt: skip
REPLACED = tuple(COLUMNS)[:-2]
# Widths that products in FP8 take on a CPU, too: multiples of 512, and heads of 128.
WIDER = {**SIZES, **{name: 512 for name, size in SIZES.items() if size in (24, 32, 48)}}
WIDER.update(dict.fromkeys([name for name in SIZES if name.endswith("head_dim")], 128))
WIDER.update(q_lora_rank=512, kv_lora_rank=512, d_kv=128, attention_head_size=128, qk_head_dim=256)
WIDER.update(vocab_size=128, image_size=32, mamba_head_dim=16, hidden_size_per_layer_input=512)
# Relative error of the median token, for each layer: values that differ by a rounding of bf16 are
# rounded to FP8, and some tokens go to another expert. It grows with the layers: of a Gemma 4 it is
# 0.05 with two and 0.09 with four.
FP8 = 0.05
NEW = 6  # tokens by graph
HEAD = """# Models

`kernelize` was tried on a tiny random model of every type that transformers knows. This page is
written by `python tests/model_table.py --run`: each model is made from its default configuration
with small sizes, and the flags of its published checkpoints where the defaults have none (shared
keys and values, kinds of layers); its logits, greedy tokens and gradients are compared before and
after, with the package's reference in place of kernels, on a CPU.

- **yes**: all modules of the kind are replaced. **part**: some are. **no**: they are left alone and
  run transformers' code. Empty: the model has none, or the kind could not be tried.
- *MLP* is a gated MLP, *layer* a decoder layer whose sums are fused with its norms, *GDN* a Gated
  DeltaNet layer, *KDA* a Kimi Delta Attention layer. *router* includes sums with shared experts.
- *graphs*: `generate` decodes by CUDA graphs with `cuda_graphs=True` (an emulated graph here).
- *FP8*: linear layers and experts with FP8 weights and scales of 128 x 128 values are replaced.
  Projections to fewer than 128 features are left alone, and then it is a part.
- *(in 5.24.0)*: the type was tried with this release alone.
- A larger model of a type can have other parts: `print(kernel.kernelize(model))` says what is
  replaced in yours, and what to do about the rest ([use.md](use.md)).
"""
# Of parts that are left alone in well-known language models: types, part, why.
LEFT = (
    (
        ("llama4", "llama4_text"), "attention",
        "rotary embedding is a product of complex numbers, and queries of layers without it are "
        "scaled by the length of the cache; its smallest checkpoint needs more than one GPU",
    ),
    (
        ("llama4", "llama4_text"), "router",
        "its scores multiply what experts are given, and every expert computes every token",
    ),
    (
        ("hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat"), "attention",
        "queries and keys are normed after the rotary embedding",
    ),
    (("deepseek_v32", "glm_moe_dsa", "axk2"), "attention", "an indexer chooses the keys"),
    (
        ("qwen4_exp", "qwen4_exp_text"), "norm",
        "these norms have groups of channels, with a weight for each channel of all groups",
    ),
    (("kolibri1",), "router", "the bias is added to logits, not to scores"),
)  # fmt: skip
MORE = (
    ("Nothing is replaced in", "They have none of these parts, or compute others"),
    (
        "Not tried:",
        "A tiny model of the type could not be made, or was not compared, for the reason behind it",
    ),
    ("Other results:", "A comparison failed"),
)


def graphs(kind: str, model, arguments) -> Optional[str]:
    """None if decoding steps were replayed, else why not; "" for a model that does not generate."""
    if arguments is None or "input_ids" not in arguments or not model.can_generate():
        return ""
    import transformers

    counted = type("Counted", (EmulatedGraph,), {"replays": 0, "replay": _counting})
    with pytest.MonkeyPatch.context() as patch:
        for name in ("graphs", "graph_rules", "late", "static_cache"):
            patch.setattr(submodule(f"decoding.{name}"), "Graph", counted)
        # modules run transformers' code: the reference reads values on the host, kernels do not
        row = load_package().kernelize(model, only=["norm"], cuda_graphs=True).rows[-1]
        if row.reason is not None:
            return row.reason
        ids, config = arguments["input_ids"], transformers.CompileConfig()
        config._compile_all_devices = True
        words = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}
        words.update(do_sample=False, cache_implementation="static")
        try:
            expected = model.generate(ids, disable_compile=True, **words)
        except Exception as error:
            return f"a static cache: {type(error).__name__}"
        found = model.generate(ids, compile_config=config, **words)
        if not torch.equal(found, expected):
            raise Wrong(f"{kind} by graphs: other tokens")
    return None if counted.replays else "no step is a replay"


def _counting(self):
    type(self).replays += 1
    return EmulatedGraph.replay(self)


def in_fp8(kind: str) -> list:
    """Of each module in FP8 why it is left alone, or None; [] if the type cannot be tried."""
    try:
        model, arguments, _ = callable_model(kind, WIDER)
        if arguments is None or "input_ids" not in arguments:
            return []
        names = [name for name, _ in model.named_modules()]
        skip = [name for name in names if name.endswith(("lm_head", "router", ".gate"))]
        model = fp8_problems.in_fp8(model.bfloat16(), skip)
    except TimeoutError:
        raise
    except Exception:
        return []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        fp8_problems.stand_in(patch)
        patch.setattr(submodule("models.experts"), "why_not_fp8_here", lambda module: None)
        try:
            model.set_experts_implementation("eager")  # a loop, which needs no other kernels
            expected = sweep_models.output_of(model, arguments)
        except Exception:
            return []
        report = load_package().kernelize(model, only=["linear", "mlp", "experts"])
        rows = [row for row in report.rows if "FP8" in row.kind]
        found, expected = sweep_models.output_of(model, arguments).float(), expected.float()
        errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        layers = getattr(model.config.get_text_config(), "num_hidden_layers", 2)
        if not errors.median() <= FP8 * layers:
            raise Wrong(f"{kind} in FP8: logits of a token differ by {errors.median():.1e}")
    return [row.reason for row in rows]


def look(kind: str) -> Result:
    """A type by all comparisons; rows for graphs and FP8 are added."""
    result = sweep_models.compare(kind, submodule("models.recognise").KINDS)
    if result.state != "ok":
        return result
    model, arguments, _ = callable_model(kind)
    of_graphs = graphs(kind, model, arguments)
    with submodule("runtime.dispatch").force("reference"):
        added = [("fp8", reason) for reason in in_fp8(kind)]
    added += [("graphs", of_graphs)] if of_graphs != "" else []
    notes = dict.fromkeys(f"{name}: {reason}" for name, reason in added if reason)
    notes = "; ".join([*notes, result.note])
    return result._replace(rows=(*result.rows, *added), note=notes)


def cells(rows) -> Dict[str, str]:
    """{column: "yes", "part" or "no"} of the kinds that a model has."""
    found = {}
    for title, kinds in COLUMNS.items():
        reasons = [reason for kind, reason in rows if kind in kinds]
        if reasons:
            left = sum(reason is not None for reason in reasons)
            found[title] = "yes" if not left else "no" if left == len(reasons) else "part"
    return found


def said_of(result: Result) -> str:
    """The state of a type that was not tried, or is wrong; and why it could not be made."""
    why = result.note.replace("NotMade: ", "").split(". ")[0].strip()
    return f"{result.state}: {why}" if result.state == "not made" else result.state


def run(kinds: List[str], record: dict) -> list:
    """Tries the types; the record gets what was found. Returns what is wrong."""
    import transformers

    served_everywhere()
    of_release, bad = record.setdefault(transformers.__version__, {}), []
    for kind in kinds:
        result = sweep_models.look_at(kind, look)
        of_release[kind] = cells(result.rows) if result.state == "ok" else said_of(result)
        said = " ".join(f"{k}={v}" for k, v in cells(result.rows).items())
        print(f"{kind:32} {result.state:9} {said} {result.note}"[:240], flush=True)
        bad += [result] if result.state in ("WRONG", "CRASH") else []
        write(record)
    return bad


def release_order(version: str) -> tuple:
    return tuple(map(int, version.split(".")[:3]))


def cell(title: str, by_release: Dict[str, object]) -> str:
    """The newest release's cell, and those of others that differ."""
    found = {release: of.get(title, "") for release, of in by_release.items()}
    *others, newest = found
    differs = [f"{r}: {found[r] or 'none'}" for r in others if found[r] != found[newest]]
    return " ".join([found[newest], f"({', '.join(differs)})" if differs else ""]).strip()


def page(record: dict) -> str:
    releases = sorted(record, key=release_order)
    rows, apart = [], ([], [], [])
    for kind in sorted({kind for of in record.values() for kind in of}):
        states = {r: record[r][kind] for r in releases if kind in record[r]}
        made = {r: state for r, state in states.items() if isinstance(state, dict)}
        last = list(states.values())[-1]
        if not isinstance(last, dict):
            apart[1 if last.startswith("not made") else 2].append((kind, last))
        elif not {"yes", "part"} & {last.get(title) for title in REPLACED}:
            apart[0].append((kind, ""))
        else:
            found = " | ".join(cell(title, made) for title in COLUMNS)
            only = "" if len(made) == len(releases) else f" (in {', '.join(made)})"
            rows.append(f"| `{kind}`{only} | {found} |")
    head = "| type | " + " | ".join(COLUMNS) + " |\n" + "|---" * (len(COLUMNS) + 1) + "|"
    newest = [of for of in record[releases[-1]].values() if isinstance(of, dict)]
    counts = [f"{title} {sum(of.get(title) == 'yes' for of in newest)}" for title in COLUMNS]
    said = wrapped(
        f"transformers {' and '.join(releases)}. A cell is of the newest, others are named. Of "
        f"{len(newest)} types of {releases[-1]} that could be made and called, all modules of a "
        f"kind are replaced in: {', '.join(counts)}."
    )
    on_gpu = wrapped(sweep_on_gpu.told(read(sweep_on_gpu.RECORD)))
    parts = [HEAD, on_gpu, said, "\n".join([head, *rows]), left_alone()]
    for (title, why), found in zip(MORE, apart):
        if found:
            by_state = {}
            for kind, state in found:
                by_state.setdefault(state.partition(": ")[2], []).append(f"`{kind}`")
            listed = [
                f"{', '.join(of)}{f' ({state})' if state else ''}" for state, of in by_state.items()
            ]
            parts.append(f"## {title} {len(found)} types\n\n{why}:\n{wrapped('; '.join(listed))}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def left_alone() -> str:
    """The section about parts of well-known models."""
    lines = ["## Why some parts are left alone\n", "| type | part | why |", "|---|---|---|"]
    for kinds, part, why in LEFT:
        lines.append(f"| {', '.join(f'`{kind}`' for kind in kinds)} | {part} | {why} |")
    return "\n".join(lines)


def wrapped(text: str) -> str:
    return textwrap.fill(text, 115, break_long_words=False, break_on_hyphens=False)


def read(path: Path = RECORD) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def write(record: dict, path: Path = RECORD) -> None:
    """A line for each type."""
    releases = []
    for release in sorted(record, key=release_order):
        of = record[release]
        lines = [f"  {json.dumps(kind)}: {json.dumps(of[kind])}" for kind in sorted(of)]
        releases.append(f" {json.dumps(release)}: {{\n" + ",\n".join(lines) + "\n }")
    path.write_text("{\n" + ",\n".join(releases) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", action="store_true", help="try the types, half an hour for all")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="with --run: these types")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    record, bad = read(), []
    if options.run:
        bad = run(options.only or sweep_models.types(), record)
        for result in bad:
            print(f"{result.kind}: {result.state}: {result.note}")
    if options.check:
        same = PAGE.exists() and PAGE.read_text() == page(record)
        print("" if same else f"{PAGE.name} and {RECORD.name} disagree: run tests/model_table.py")
        return not same
    PAGE.write_text(page(record))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
