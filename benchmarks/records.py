"""What the files in benchmarks/results say: the times that page.py tabulates and pictures.py draws.

A record is what runner.save writes: the command, the machine and the peers' versions, a date
and rows. `cases` reads the rows of any record into one form: a label, our times and the peers', in
microseconds. A record whose rows have {"what": label, "us": {"ours": .., peer: ..}} needs no reader
of its own here.
"""

import json
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"

GATES = {"slow": "slow gates", "qwen": "Qwen3.5's gates"}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
OURS = {"hopper": "ours (Hopper)", "portable": "ours (portable)"}
PEERS = {  # name in a record -> name on the page, and the package whose version goes with it
    "aiter": ("aiter", "aiter"),
    "compile": ("torch.compile", None),
    "copy": ("a copy of as many bytes", None),
    "cudnn": ("cuDNN frontend", "nvidia-cudnn-frontend"),
    "eager": ("eager torch", None),
    "expanded": ("transformers' form", None),
    "fla": ("FLA", "fla-core"),
    "flashinfer": ("FlashInfer", "flashinfer-python"),
    "flashinfer_pool": ("FlashInfer, states by index", None),
    "flashqla": ("FlashQLA", "flash-qla"),
    "formula": ("the formula in torch", None),
    "gemm": ("one cuBLAS product", None),
    "graph": ("the graph by itself", None),
    "grouped_mm": ("transformers' grouped_mm", "transformers"),
    "left to SDPA": ("ours, attention by SDPA", None),
    "liger": ("Liger", "liger-kernel"),
    "liger_mlp": ("Liger's mlp", None),
    "modeling": ("transformers' own functions", "transformers"),
    "sdpa": ("SDPA", None),
    "sdpa, without cuDNN": ("SDPA without cuDNN", None),
    "skip_lora": ('ours, skip=["lora"]', None),
    "sonicmoe": ("SonicMoE", "sonic-moe"),
    "transformers": ("transformers with FLA", "fla-core"),
    "transformers_fp8": ("cuBLAS within transformers", "transformers"),
}


class Case(NamedTuple):
    """One thing that was timed: microseconds of ours by variant, and of each peer."""

    label: str
    ours: Dict[str, float]
    peers: Dict[str, float]


def load(name: str, folder: Path = RESULTS) -> dict:
    return {"name": name, **json.loads((folder / f"{name}.json").read_text())}


def title_of(peer: str, record: dict) -> str:
    """The peer's name with its version, as far as the record knows it."""
    name, package = PEERS.get(peer, (peer, None))
    version = record.get("versions", {}).get(package)
    return f"{name} {version}" if version else name


def machine(record: dict) -> str:
    gpu = record.get("gpu") or record["device"]
    triton = f"Triton {record['triton']}, " if record.get("triton") else ""
    return f"{gpu}, torch {record['torch']}, {triton}{record['date']}"


def split(label: str, us: dict, ours: dict, record: dict) -> Case:
    """`ours` maps the names of ours to how they are shown; all else in `us` are peers."""
    peers = {title_of(name, record): t for name, t in us.items() if name not in ours}
    return Case(label, {shown: us[name] for name, shown in ours.items() if name in us}, peers)


def matrices(row: dict) -> str:
    return f"K {row['K']}, N {row['N']}, {row['M']} token" + "s" * (row["M"] > 1)


def swiglu_forward(record: dict) -> Iterator[Case]:
    for row in sorted(record["rows"], key=lambda r: (-r["K"] * r["N"], r["M"])):
        yield split(matrices(row), row["us"], {"ours": "ours"}, record)


def swiglu_training(record: dict) -> Iterator[Case]:
    ways = {"ours": "", "recompute": ", recompute=True"}
    for row in record["rows"]:
        peers = {n: row[n]["step"] * 1e3 for n in row if n in PEERS}
        for way, said in ways.items() if "K" in row else ():
            us = {"ours": row[way]["step"] * 1e3, **peers}
            yield split(matrices(row) + said, us, {"ours": "ours"}, record)


def heads(row: dict) -> str:
    return "{}/{} heads".format(*row["heads"])


def lengths_of(lengths) -> str:
    """Lengths of packed sequences as they are shown."""
    first, n = lengths[0], len(lengths)
    return f"{n} x {first}" if set(lengths) == {first} else " + ".join(map(str, lengths))


def tokens(row: dict) -> str:
    if "lengths" in row:
        return f"packed {lengths_of(row['lengths'])} tokens"
    return f"{row['T']} tokens" if row.get("B", 1) == 1 else f"{row['B']} x {row['T']} tokens"


def gdn_chunk(record: dict) -> Iterator[Case]:
    for row in record["rows"]:
        label = f"{heads(row)}, {tokens(row)}, {GATES[row['gates']]}"
        yield split(label, row["us"], OURS, record)


def gdn_recurrent(record: dict) -> Iterator[Case]:
    layouts = {  # our key -> layout, and the peers that keep states so
        "ours": ("[V, K]", ("flashinfer", "flashinfer_pool", "copy")),
        "ours_kv": ("[K, V]", ("flashinfer_kv", "fla", "copy")),
    }
    rows = sorted(record["rows"], key=lambda r: (r["heads"], r["state"] != "float32", r["B"]))
    for key, (layout, peers) in layouts.items():
        for row in rows:
            us = {"ours": row["us"][key]}
            us.update({p.replace("_kv", ""): row["us"][p] for p in peers if p in row["us"]})
            label = f"{heads(row)}, batch {row['B']}, {DTYPES[row['state']]} state {layout}"
            yield split(label, us, {"ours": "ours"}, record)


def replay(record: dict) -> Iterator[Case]:
    for row in record["rows"]:
        us = {name: t for name, t in row["us"].items() if name != "ours advance"}
        before = ["ours"] if "ours, replay" in us else [n for n in us if "every" in n]
        us["state written every token"] = us.pop(before[0])
        ours = {n: n.replace("ours, replay", "ours") for n in us if n.startswith("ours")}
        yield split(row["what"], us, ours, record)


def gdn_backward(record: dict) -> Iterator[Case]:
    ours = {"recompute": "ours", "saved": "ours, recompute=False"}
    clocks = {"ms": "an eager call", "kernel_ms": "sum of its kernels"}
    for key, clock in clocks.items():
        for row in record["rows"]:
            if key in row:
                us = {n: t * 1e3 for n, t in row[key].items()}
                yield split(f"{heads(row)}, {tokens(row)}, {clock}", us, ours, record)


def gdn_layer_training(record: dict) -> Iterator[Case]:
    for row in record["rows"]:
        for key, what in {"step_ms": "training step", "forward_ms": "forward"}.items():
            if "after" in row:
                us = {"ours": row["after"][key] * 1e3, "transformers": row["before"][key] * 1e3}
                label = f"layer, {row['tokens']} tokens, {what}"
                yield split(label, us, {"ours": "ours"}, record)


def models(record: dict) -> Iterator[Case]:
    for key, how in {"eager_us": "eager", "graph_us": "CUDA graph"}.items():
        for row in record["rows"]:
            if key in row:
                us = {"ours": row[key]["after"], "transformers": row[key]["before"]}
                label = f"{row['what'].replace(':', ',')}, {how}"
                yield split(label, us, {"ours": "ours"}, record)


WHOLE = {
    "llama": "Llama, 8 layers",
    "qwen3_5": "Qwen3.5, 16 layers",
    "qwen3_moe": "Qwen3-MoE, 8 layers",
    "kimi_linear": "Kimi Linear, 8 layers",
}


def whole_name(row: dict) -> str:
    model, what = row["what"].split(": ")
    return f"{WHOLE[model]}, {what}"


def whole_models(record: dict) -> Iterator[Case]:
    for row in record["rows"]:
        us = {name: t * 1e3 for name, t in row["ms"].items()}
        ours = {name: name for name in us if name.startswith("ours")}
        yield split(f"{whole_name(row)}, eager", us, ours, record)


def plain(record: dict) -> Iterator[Case]:
    for row in record["rows"]:
        if "us" in row:
            ours = {name: name for name in row["us"] if name.startswith("ours")}
            yield split(row["what"], row["us"], ours, record)


READERS = {  # by the beginning of the record's name
    "swiglu_fwd": swiglu_forward,
    "swiglu_training": swiglu_training,
    "gdn_chunk_errors": lambda record: iter(()),
    "gdn_chunk": gdn_chunk,
    "gdn_recurrent": gdn_recurrent,
    "kda_recurrent": gdn_recurrent,
    "gdn_replay": replay,
    "replay_models": replay,
    "gdn_backward": gdn_backward,
    "gdn_layer_training": gdn_layer_training,
    "models": models,
    "mixtures": models,
    "whole_models": whole_models,
}


def cases(record: dict) -> List[Case]:
    reader = next((r for start, r in READERS.items() if record["name"].startswith(start)), plain)
    return list(reader(record))


def case(record: dict, label: str) -> Case:
    """The one case of this label."""
    found = [c for c in cases(record) if c.label == label]
    if len(found) != 1:
        raise ValueError(f"{record['name']}.json has {len(found)} cases '{label}'")
    return found[0]


def errors(record: dict) -> Iterator[tuple]:
    """(what was compared, {ours or a peer: relative error against fp64}) of a record's rows."""
    name = record["name"]
    for row in record["rows"]:
        found = row.get("errors") or row.get("error") or {}
        if name.startswith("gdn_chunk_errors"):
            (gates, beta, keys), kind = row["case"], DTYPES[row["dtype"]]
            gates = GATES.get(gates, gates)
            for at, what in enumerate(("o", "final state")):
                label = f"{kind}, {gates}, beta {beta}, {keys} keys, {what}"
                yield label, {n: e[at] for n, e in found.items()}
        elif name.startswith("gdn_backward") and found:
            for what in next(iter(found.values())):
                label = f"{heads(row)}, {row['T']} tokens, {what}"
                yield label, {n: e[what] for n, e in found.items()}
        elif name.startswith("swiglu_training") and found:
            for what in next(iter(found.values())):
                yield what, {n: e[what] for n, e in found.items()}
