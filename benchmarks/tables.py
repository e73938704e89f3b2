"""The tables of docs/benchmarks.md: of_NAME(record) makes the one that page.md calls NAME."""

from typing import Callable, Dict, Iterable, List

from records import GATES, OURS, Case, cases, errors, title_of, whole_name


def us(time: float) -> str:
    """Three digits or more."""
    return f"{time:.2f}" if time < 10 else f"{time:.1f}" if time < 100 else f"{time:.0f}"


def ms(time: float) -> str:
    """Microseconds as milliseconds, with three digits."""
    return f"{time / 1e3:#.3g}".rstrip(".")


def table(head: List[str], rows: List[List[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def names(dicts: Iterable[dict]) -> List[str]:
    return list(dict.fromkeys(name for d in dicts for name in d))


def cells(found: dict, columns: Iterable[str], form=us) -> List[str]:
    """A cell for each column, by a function or a format; empty where it was not found."""
    shown = form if callable(form) else form.format
    return [shown(found[name]) if name in found else "" for name in columns]


def ratio(peer: float, ours: float) -> str:
    if not ours or not peer:
        return ""
    return f"{peer / ours:.2f}" if peer < 100 * ours else f"{peer / ours:.0f}"


def of_cases(record: dict, found: Iterable[Case] = ()) -> str:
    """Times of ours and of the peers, and the speed-up of each over each."""
    found = list(found) or cases(record)
    ours, peers = names(c.ours for c in found), names(c.peers for c in found)
    pairs = [(a, b) for b in peers for a in ours]
    head = ["", *(f"{name}, us" for name in (*ours, *peers))]
    head += [f"speed-up over {b}" + (f": {a}" if len(ours) > 1 else "") for a, b in pairs]
    rows = []
    for c in found:
        times = {**c.ours, **c.peers}
        ups = [f"{c.peers[b] / c.ours[a]:.2f}" if {a, b} <= set(times) else "" for a, b in pairs]
        rows.append([c.label, *cells(times, (*ours, *peers)), *ups])
    return table(head, rows)


def of_losses(record: dict) -> str:
    """Times and peaks of each row, and of forwards alone."""
    rows, ways = [], names(row["ms"] for row in record["rows"])
    head = ["", *(f"{title_of(way, record)}, ms" for way in ways)]
    held = names(row["peak_mib"] for row in record["rows"])
    head += [f"{title_of(way, record)}, peak GiB" for way in held]
    for row in record["rows"]:
        for kind, label in (("", ""), ("forward_", ", forward alone")):
            if f"{kind}ms" in row:
                peaks = {name: mib / 1024 for name, mib in row[f"{kind}peak_mib"].items()}
                found = cells(row[f"{kind}ms"], ways, us) + cells(peaks, held, "{:.2f}")
                rows.append([row["what"] + label, *found])
    return table(head, rows)


def of_launches_of_steps(record: dict) -> str:
    """Launches, the GPU's own time and the peak memory of a step."""
    ways = names(row["launches"] for row in record["rows"])
    head = [""]
    for said in ("launches", "GPU busy, ms", "peak GiB"):
        head += [f"{title_of(way, record)}, {said}" for way in ways]
    rows = []
    for row in record["rows"]:
        busy, peaks = row["busy_us"], row["peak_mib"]
        found = cells(row["launches"], ways, "{}") + cells(busy, ways, ms)
        rows.append([row["what"], *found, *(f"{peaks[way] / 1024:.1f}" for way in ways)])
    return table(head, rows)


def of_memory_of_steps(record: dict) -> str:
    """GiB that training takes without its weights: in a step, and what it keeps between steps."""
    known = [row for row in record["rows"] if "mib_in_steps" in row]
    ways, rows = names(row["mib_in_steps"] for row in known), []
    head = ["", *(f"{title_of(way, record)}, GiB in, between steps" for way in ways)]
    for row in known:
        found = [(row["mib_in_steps"][way], row["mib_between_steps"][way]) for way in ways]
        rows.append([row["what"], *(f"{a / 1024:.1f}, {b / 1024:.1f}" for a, b in found)])
    return table(head, rows)


def of_errors(record: dict) -> str:
    """Ours as it serves: the first of OURS that is there; beside it the peers."""
    found = list(errors(record))
    mine = next(n for n in ("hopper", "recompute", "ours", "portable") if n in found[0][1])
    other = {"hopper": "portable"}.get(mine, mine)  # where the first does not serve
    peers = [n for n in ("liger", "compile", "fla", "flashqla") if n in found[0][1]]
    head = ["", "ours", *(title_of(n, record) for n in peers)]
    rows = []
    for label, e in found:
        ours = e.get(mine, e.get(other))
        row = [label, f"{ours:.1e}", *cells(e, peers, "{:.1e}")]
        rows.append([*row, *(ratio(e[n], ours) for n in peers)])
    return table([*head, *(f"{title_of(n, record)} / ours" for n in peers)], rows)


def of_largest_errors(record: dict) -> str:
    """The largest over the rows, each way."""
    found = [row["error"] for row in record["rows"] if "error" in row]
    worst = {way: max(e[way] for e in found if way in e) for way in names(found)}
    head = ["largest relative error of a row", *(title_of(way, record) for way in worst)]
    return table(head, [["result", *cells(worst, worst, "{:.2e}")]])


def of_gdn_errors(record: dict) -> str:
    """The largest over the rows, by gates."""
    ways = names(row["error"] for row in record["rows"])
    head = ["largest relative error of a row: o; final state"]
    head += [OURS.get(way) or title_of(way, record) for way in ways]
    rows = []
    for gates in dict.fromkeys(row["gates"] for row in record["rows"]):
        mine = [row["error"] for row in record["rows"] if row["gates"] == gates]
        worst = {w: [max(e[w][i] for e in mine if w in e) for i in (0, 1)] for w in ways}
        rows.append([GATES[gates], *("{:.1e}; {:.1e}".format(*worst[way]) for way in ways)])
    return table(head, rows)


def of_host(record: dict) -> str:
    """The host's time of an eager call, which differs with the load of the machine."""
    calls = [row["host_us"] for row in record["rows"] if "host_us" in row]
    shown = {"ours_kv": "ours [K, V]", "flashinfer_kv": "FlashInfer [K, V]", **OURS}
    rows = []
    for name in names(calls):
        times = [call[name] for call in calls if name in call]
        name = name.replace("_host", "")
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


def of_expert_limits(record: dict) -> str:
    both, rows = ("ours", "grouped_mm"), []
    for row in record["rows"]:
        limit = [us(row["limit_us"]), f"{row['us']['ours'] / row['limit_us']:.2f}"]
        held = cells(row.get("held_mib", {}), both, "{:.0f}")
        rows.append([row["what"], *limit, *held, *cells(row.get("error", {}), both, "{:.1e}")])
    head = ["", "limit, us", "ours / limit", "MiB held: ours", "grouped_mm", "error: ours"]
    return table([*head, "grouped_mm"], rows)


def of_expert_first_calls(record: dict) -> str:
    rows = [[what, f"{seconds:.4f}"] for what, seconds in record["first_calls"].items()]
    return table(["in a new process", "seconds"], rows)


def of_errors_and_host(record: dict) -> str:
    """Of each row that has them: relative errors, and the host's times of an eager call."""
    rows = []
    for row in record["rows"]:
        error, host = row.get("error", {}), row.get("host_us", {})
        for name in names((error, host)):
            both = [*cells(error, [name], "{:.1e}"), *cells(host, [name])]
            rows.append([row["what"], title_of(name, record), *both])
    return table(["", "", "relative error", "host time of an eager call, us"], rows)


def of_prepare(record: dict) -> str:
    f = record["prepare"]
    ours = {"ours (Hopper)": f["prepare_hopper"], "ours (portable)": f["prepare"]}
    label = "prepare kernel alone, 16/64 heads, 32768 tokens"
    return of_cases(record, [Case(label, ours, {"a copy of its bytes": f["copy"]})])


def by_way(record: dict, key: str, head: str, form, title: Callable[[str], str]) -> str:
    """Of each row that has them, what it has as `key`: a column for each name, under its title."""
    found = [row for row in record["rows"] if key in row]
    ways = names(row[key] for row in found)
    rows = [[row["what"], *cells(row[key], ways, form)] for row in found]
    return table([head, *map(title, ways)], rows) if rows else ""


def of_peaks(record: dict) -> str:
    head = "memory of a token at its peak, MiB"
    return by_way(record, "peak_mib", head, "{:.0f}", lambda name: title_of(name, record))


def of_row_errors(record: dict) -> str:
    head = "relative error against fp64"
    return by_way(record, "error", head, "{:.1e}", lambda name: title_of(name, record))


def of_differences(record: dict) -> str:
    head = "logits' relative difference from transformers'"
    return by_way(record, "difference", head, "{:.3f}", lambda name: title_of(name, record))


def of_launches(record: dict) -> str:
    shown = {"before": "transformers with FLA", "after": "ours"}
    rows = [{**row, "what": row["what"].replace(":", ",")} for row in record["rows"]]
    return by_way({"rows": rows}, "launches", "kernels launched", "{}", shown.get)


def of_whole(record: dict) -> str:
    """What a row's sides launch, keep busy and hold."""
    columns = {"launches": "{}", "busy_ms": "{:.2f}", "peak_GiB": "{:.1f}"}
    rows = []
    for row in record["rows"]:
        sides = {key: " / ".join(cells(row.get(key, {}), row.get(key, {}), form))
                 for key, form in columns.items()}  # fmt: skip
        rows.append([f"{whole_name(row)}: {' / '.join(row['ms'])}", *sides.values()])
    return table(["", "launches", "GPU busy, ms", "peak memory, GiB"], rows)


def of_parts(record: dict) -> str:
    """Of the time that the GPU works."""
    head = ["GPU busy, ms", "matrix products", "attention function", "all the rest"]
    rows = [
        [f"{whole_name(row)}: {side}", *cells(parts, parts, "{:.2f}")]
        for row in record["rows"]
        for side, parts in row.get("parts_ms", {}).items()
    ]
    return table(head, rows)


def of_extra_memory(record: dict) -> str:
    """What a call holds at its peak beyond the weights, where that was measured."""
    head = "held at the peak beyond the weights, MiB"
    return by_way(record, "extra_mib", head, "{:.0f}", lambda name: title_of(name, record))


def of_published(record: dict) -> str:
    """What a side holds at its peak, weights included, and the time of its first call."""
    shown = [
        by_way(record, key, head, form, lambda name: title_of(name, record))
        for key, head, form in (
            ("peak_GiB", "peak memory, GiB", "{:.1f}"),
            ("first_s", "first call (of a token: two) in the process, s", "{:.2f}"),
        )
    ]
    return "\n\n".join(shown)


def of_first_calls(record: dict) -> str:
    return by_way(record, "seconds", "", "{:.4f}", "{}, seconds".format)


def of_generate(record: dict) -> str:
    """Memory, and a second call of generate with another batch and length."""
    keys = [f"another_batch_and_length_{again}_fifth_s" for again in ("first", "again")]
    rows = []
    for row in record["rows"]:
        held = " / ".join(f"{way['reserved_mib']:.0f}" for way in row["more"].values())
        rows.append(
            [f"{row['what']}: {' / '.join(row['more'])}", held, *cells(row, keys, "{:.2f}")]
        )
    another = "ours, another batch and length: fifth token, s"
    return table(["", "memory reserved, MiB", another, "again, s"], rows)


def of_drafts(record: dict) -> str:
    """Tokens by the rate at which drafts are right, and the graphs of a round."""
    rows = []
    for row in record["rows"]:
        us, graphs = list(row["us"].values()), list(row["graph_us"].values())
        faster = " / ".join(f"{us[0] / t:.2f}" for t in us[1:])
        held = [f"{us[0]:.0f}", " / ".join(f"{t:.0f}" for t in us[1:]), faster]
        times = [*(f"{t:.0f}" for t in graphs), f"{graphs[1] / graphs[0]:.2f}"]
        rows.append([row["what"], *held, *times])
    right = "drafts of which 0 / .7 / 1 are right"
    return table(
        ["", "a token without drafts, us", f"{right}, us", f"speed-up: {right}",
         "graph of 1 token, us", "of a round, us", "of a round over 1"],
        rows,
    )  # fmt: skip


def of_drafts_of_text(record: dict) -> str:
    """Tokens of a trained model with drafts of each kind, and how many of these are right."""
    rows = []
    for row in record["rows"]:
        us = row["us"]
        for way, t in us.items():
            facts = [row[key].get(way) for key in ("without_a_round", "as_the_text")]
            rows.append(
                [f"{row['what']}: {way}", f"{t:.0f}", f"{us['without drafts'] / t:.2f}",
                 *cells(row["tokens_a_round"], [way], "{:.2f}"),
                 *("" if x is None else f"{100 * max(x, 0):.0f} %" for x in facts)]
            )  # fmt: skip
    return table(
        ["", "a token, us", "speed-up", "tokens a round", "tokens without a round",
         "bytes that are the text's"],
        rows,
    )  # fmt: skip


def of_parallel(record: dict) -> str:
    """Ours in its ways beside one GPU or NCCL or transformers, and beside FLA where it is."""
    ways = {"ours": "ours, us", "ours, zigzag": "zigzag, us", "ours, a call by itself": "alone, us"}
    theirs = {"fla": "FLA, us", "fla, zigzag": "FLA, zigzag, us"}
    rows = []
    for row in record["rows"]:
        others = [(name, t) for name, t in row["us"].items() if name not in {**ways, **theirs}]
        peer, time = min(others)
        beside = [f"{peer}: {us(time)}", ratio(time, row["us"].get("ours"))]
        fla = [*cells(row["us"], theirs), ratio(row["us"].get("fla"), row["us"].get("ours"))]
        rows.append([row["what"], *cells(row["us"], ways), *beside, *fla])
    heads = [*ways.values(), "beside, us", "speed-up", *theirs.values(), "over FLA"]
    return table(["", *heads], rows)


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


FLA = {"fla_safe": "FLA with safe_gate", "fla": "FLA"}


def of_launch_times(record: dict) -> str:
    """Of launches, or calls and their parts: the time of each."""
    shown = {"ours": "the call or launch", **FLA}
    return by_way(record, "us", "", us, lambda way: f"{shown.get(way, way)}, us")


def of_gradients(record: dict) -> str:
    """Times of gradients of each way, and the largest of their errors."""
    shown, times, far = {"ours": "ours", **FLA}, [], {}
    for row in record["rows"]:
        if "gradient" in row:
            both = [us(1e3 * row["ms"][what]) for what in ("backward", "both")]
            times.append([row["gradient"], shown[row["way"]], *both])
        else:
            worst = {way: max(row[way].values(), key=order) for way in shown if way in row}
            far[row["errors"]] = cells(worst, shown, "{:.1e}")
    shapes = names({row[0]: row} for row in times)
    times.sort(key=lambda row: shapes.index(row[0]))
    first = table(["", "", "gradient, us", "with the forward, us"], times)
    largest = table(["largest error", *shown.values()], [[kind, *e] for kind, e in far.items()])
    return f"{first}\n\n{largest}"


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
        same = f"{found['same'] * 100:.2f}" if "same" in found else ""
        apart = cells(found, ("kl", "error"), "{:.1e}")
        rows.append([way, f"{found['nats']:.4f}", *apart, same])
    head = ["", "nats a token", "KL from fp32, nats", "relative error of logits"]
    return table([*head, "same first choice, %"], rows)


def of_answers(record: dict) -> str:
    """Of each way to generate: how many answers are those of transformers' dynamic cache, and
    the errors of the logits that decode them."""
    rows = []
    for way, found in record["greedy"].items():
        gaps = [apart["gap"] for apart in found["apart"] if "gap" in apart]
        count = f"{found['same']} of {len(found['texts'])}"
        errors = cells(record["decoding"].get(way, {}), ("kl", "error"), "{:.1e}")
        rows.append([way, count, f"{max(gaps):.3f}" if gaps else "", *errors])
    head = ["greedy answers", "same as transformers'", "largest gap, logits"]
    return table([*head, "KL from fp32, nats", "relative error of logits"], rows)


def of_curves(record: dict) -> str:
    """The ends of the curves, and how far each is from transformers' at any step."""
    rows = []
    for name, ways in ((name, record.get(name, {})) for name in ("AdamW", "LoRA")):
        for way, found in ways.items():
            losses = found["losses"]
            off = [abs(a - b) for a, b in zip(losses, ways["transformers"]["losses"])]
            ends = [f"{x:.4f}" for x in (losses[0], sum(losses[-20:]) / len(losses[-20:]))]
            ends += ["{:.4f} to {:.4f}".format(*found["held_out"])]
            ends += [f"{sum(off) / len(off):.4f}; {max(off):.4f}" if any(off) else ""]
            ends += [f"{found['step_ms']:.1f}", *cells(found, ["peak_mib"], "{:.0f}")]
            rows.append([f"{name}, {way}", *ends])
    head = ["", "first loss", "mean of the last 20", "held out, nats a token"]
    head += ["apart from transformers' curve: mean; most", "step, ms", "peak, MiB"]
    return table(head, rows)
