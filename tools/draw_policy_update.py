#!/usr/bin/env python3
"""Writes the tables of docs/policy_update.md from what bench/policy_update.py has measured, and its picture.

    python tools/draw_policy_update.py RECORDS.json PICTURE.svg PAGE.md

The tables stand between two markers in the page. Without a file of records the page says that nothing has
been measured yet, and nothing is drawn. The same records give the same files.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from charts import save_chart

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from mfu import PASSES  # noqa: E402

SPEEDUP_GOAL = 0.92  # of the token ratio
BEGIN, END = "<!-- tables: make docs -->", "<!-- end of tables -->"
PASS_NAMES = {"old": "old log-probs", "update": "update"}
SIDES = {"packed": ("packed", "#1f6fb4"), "replicated": ("replicated", "#7d8995")}
IMPLS = {
    "dualkv": ("dualkv", "#1f6fb4", "o"),
    "flex": ("FlexAttention", "#3f8a55", "^"),
    "prefix-grouping": ("prefix grouping", "#b3541e", "s"),
    "replicated": ("replicated", "#5b6875", "D"),
}
INK = "#1f2933"
CHART_RESPONSES = 8  # of the layer's panel


def part(records: list[dict], name: str, **wanted) -> list[dict]:
    """The records of a part that have certain values, small micro-batches first."""
    found = [
        record
        for record in records
        if record["part"] == name and all(record.get(key) == value for key, value in wanted.items())
    ]
    return sorted(found, key=lambda record: record.get("micro_batch", 0))


def policy_records(records: list[dict]) -> dict[tuple[int, str], dict]:
    """By micro-batch and side; of a side that ran with two backends, the first that did."""
    found = {}
    for record in part(records, "policy"):
        if "micro_batch" in record:
            key = record["micro_batch"], record["side"]
            if key not in found or found[key]["status"] != "ok":
                found[key] = record
    return found


# ------------------------------------------------------------------------------------------------------- tables


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    alignments = ["---" if i == 0 else "---:" for i in range(len(header))]
    return ["| " + " | ".join(row) + " |" for row in (header, alignments, *rows)] + [""]


def gib(record: dict, name: str) -> str:
    size = record.get(name)
    return "-" if size is None else f"{size / 2**30:.1f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def failed(record: dict) -> str:
    return {"oom": "OOM", "skipped": "-"}.get(record["status"], "failed")


def policy_table(records: list[dict]) -> list[str]:
    header = ["micro-batch", "attention", "tokens"]
    header += ["old log-probs, s", "update, s", "allocated, GiB", "reserved, GiB"]
    header += [f"effective MFU, {name}" for name in PASS_NAMES.values()]
    header += [f"physical MFU, {name}" for name in PASS_NAMES.values()]
    rows = []
    for record in part(records, "policy"):
        if "micro_batch" not in record:
            continue
        row = [f"{record['micro_batch']}, {record['side']}", record["attention"]]
        if record["status"] == "ok":
            row += [f"{record['tokens']:,}"]
            row += [f"{record[f'{name}_s']:.2f}" for name in PASSES]
            row += [gib(record, f"update_{kind}_bytes") for kind in ("allocated", "reserved")]
            row += [share(record[f"{name}_{of}_mfu"]) for of in ("effective", "physical") for name in PASSES]
        else:
            row += ["-", failed(record)] + ["-"] * (len(header) - 4)
        rows.append(row)
    return table(header, rows)


def comparison_table(records: list[dict]) -> list[str]:
    header = ["micro-batch", "token ratio"]
    header += [f"speed-up, {name} (of the ratio)" for name in PASS_NAMES.values()]
    header += ["log-probs, largest difference (between backends)", "gradients (between backends)"]
    rows = []
    for record in part(records, "comparison"):
        row = [str(record["micro_batch"]), f"{record['token_ratio']:.2f}"]
        row += [
            f"{record[f'{name}_speedup']:.2f} ({record[f'{name}_speedup_of_ratio']:.2f})" for name in PASSES
        ]
        noise = record.get("between_backends")
        for of in (
            lambda found: found["logprob_difference"],
            lambda found: max(found["gradient_differences"].values()),
        ):
            row.append(f"{of(record):.2g}" + ("" if noise is None else f" ({of(noise):.2g})"))
        rows.append(row)
    return table(header, rows) if rows else []


def largest_table(records: list[dict]) -> list[str]:
    rows = []
    for record in part(records, "largest"):
        fits = str(record.get("fits", "-"))
        if record["status"] == "skipped":
            fits += "; the search was not finished"
        rows.append([record["side"], fits, str(record.get("out_of_memory") or "not reached")])
    return table(["side", "largest micro-batch that fits", "out of memory at"], rows) if rows else []


def layer_records(records: list[dict]) -> list[dict]:
    """Those of the layer. What was skipped is out of memory, if a batch of no more responses to a prompt that is no
    longer was."""
    found = [record for record in part(records, "layer") if "impl" in record]
    too_large = [record for record in found if record["status"] == "oom"]

    def is_too_large(record: dict) -> bool:
        return any(
            small["impl"] == record["impl"]
            and small["prompt"] <= record["prompt"]
            and small["responses"] <= record["responses"]
            for small in too_large
        )

    return [
        {**record, "status": "oom"} if record["status"] == "skipped" and is_too_large(record) else record
        for record in found
    ]


def layer_table(records: list[dict]) -> list[str]:
    found = {(record["batch"], record["impl"]): record for record in layer_records(records)}
    if not found:
        return []
    impls = [impl for impl in IMPLS if any(impl == name for _, name in found)]
    others = [impl for impl in impls if impl != "dualkv"]
    header = ["P, responses", *[f"{IMPLS[impl][0]}, ms (GiB)" for impl in impls]]
    header += [f"{IMPLS[impl][0]} / dualkv" for impl in others]
    rows = []
    for batch in dict.fromkeys(batch for batch, _ in found):
        of_batch = {impl: found[batch, impl] for impl in impls if (batch, impl) in found}
        if all(record["status"] == "skipped" for record in of_batch.values()):
            continue
        row = [batch]
        for impl in impls:
            record = of_batch.get(impl, {"status": "skipped"})
            if record["status"] == "ok":
                row.append(f"{1e3 * record['seconds']:.1f} ({gib(record, 'allocated_bytes')})")
            else:
                row.append(failed(record))
        for impl in others:
            pair = [of_batch.get(name, {}).get("seconds") for name in (impl, "dualkv")]
            row.append("-" if None in pair else f"{pair[0] / pair[1]:.2f}")
        rows.append(row)
    return table(header, rows)


def commits_of(records: list[dict]) -> str:
    """One, or several with the micro-batches, or a layer's prompts, that were measured at each."""
    of_layer = "micro_batch" not in records[0]
    what, key = ("prompts", "prompt") if of_layer else ("micro-batches", "micro_batch")
    batches: dict[str, list[int]] = {}
    for record in records:
        commit, _, dirty = record["commit"].partition("-")
        name = f"`{commit[:12]}`{' with changes' if dirty else ''}"
        batches.setdefault(name, []).append(record.get(key, 0))
    if len(batches) == 1:
        return f"commit {next(iter(batches))}"
    found = (
        f"{name} ({what} {', '.join(map(str, sorted(set(of_commit))))})"
        for name, of_commit in batches.items()
    )
    return f"commits {' and '.join(sorted(found))}"


def source_of(records: list[dict]) -> str:
    """What the records of a part were measured on."""
    if not records:
        return "Nothing was measured."
    first, rates = records[0], [record["matmul_tflops"] for record in records]
    return (
        f"{first['device']}, PyTorch {first['torch']}, Transformers {first['transformers']}, {commits_of(records)}; "
        f"a product of 8192^3 ran at {min(rates):.0f} to {max(rates):.0f} TFLOP/s."
    )


def tables(records: list[dict] | None) -> str:
    """What stands between the markers. records: None if nothing has been measured."""
    if not records:
        return "Not measured yet.\n"
    lines = [
        "![A policy update, packed and replicated: seconds, effective MFU and memory; a decoder layer: milliseconds]"
        "(images/policy_update.svg)",
        "",
    ]
    policy = part(records, "policy", status="ok")
    if policy:
        shape = policy[0]
        lines += [
            f"The update: P {shape['prompt']}, R {shape['response']}, {shape['layers']} layers, weights of "
            f"{gib(shape, 'weights_bytes')} GiB. {source_of(policy)}",
            "",
            *policy_table(records),
            *comparison_table(records),
            *largest_table(records),
        ]
    layer = layer_table(records)
    if layer:
        source = source_of(part(records, "layer", status="ok"))
        lines += [f"The decoder layer, forward and backward. {source}", "", *layer]
        found = layer_records(records)
        skipped = [record for record in found if record["status"] == "skipped"]
        if skipped:
            lines += [
                f"{len(skipped)} of {len(found)} were skipped for lack of time. "
                "Batches of which all were are not in the table.",
                "",
            ]
    errors = {
        f"{record.get('impl') or record.get('side')}: {record['error']}": None
        for record in records
        if record.get("status") == "error"
    }
    if errors:
        lines += ["What failed:", "", *(f"- {error}" for error in errors), ""]
    return "\n".join(lines).rstrip() + "\n"


def with_tables(page: str, records: list[dict] | None) -> str:
    """The page with what stands between its markers written anew."""
    between = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)})", flags=re.DOTALL)
    if len(between.findall(page)) != 1:
        raise ValueError(f"the page must have the lines {BEGIN} and {END} once")
    return between.sub(lambda found: f"{found[1]}\n{tables(records)}\n{found[2]}", page)


# ------------------------------------------------------------------------------------------------------ picture


def draw(records: list[dict]) -> plt.Figure:
    figure, panels = plt.subplots(ncols=4, figsize=(13, 3.8), layout="constrained")
    found = policy_records(records)
    draw_seconds(panels[0], found)
    draw_bars(panels[1], found, "effective MFU of the update", lambda record: record["update_effective_mfu"])
    draw_bars(
        panels[2],
        found,
        "peak of the update, GiB allocated",
        lambda record: (
            None if record["update_allocated_bytes"] is None else record["update_allocated_bytes"] / 2**30
        ),
    )
    draw_layer(panels[3], records)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    figure.suptitle(f"Policy update and decoder layer of Qwen3-8B, {records[0]['device']}", fontsize=10)
    return figure


def places(found: dict) -> dict[tuple[int, str], float]:
    """Where the bar of each micro-batch and side stands."""
    counts = sorted({count for count, _ in found})
    return {
        (count, side): x + (0.21 if side == "replicated" else -0.21)
        for x, count in enumerate(counts)
        for side in SIDES
    }


def label_micro_batches(panel, found: dict) -> None:
    counts = sorted({count for count, _ in found})
    panel.set_xticks(range(len(counts)), [str(count) for count in counts])
    panel.set_xlim(-0.5, len(counts) - 0.5)
    panel.set_xlabel("micro-batch", fontsize=8)


def draw_bars(panel, found: dict, title: str, value) -> None:
    for key, x in places(found).items():
        record = found.get(key)
        height = value(record) if record and record["status"] == "ok" else None
        if height is None:
            panel.text(
                x, 0, failed(record or {"status": "skipped"}), ha="center", va="bottom", fontsize=7, color=INK
            )
        else:
            panel.bar(x, height, 0.4, color=SIDES[key[1]][1])
    label_micro_batches(panel, found)
    panel.set_title(title, fontsize=9)


def draw_seconds(panel, found: dict) -> None:
    """The old log-probs below, the update on top."""
    draw_bars(panel, found, "seconds: old log-probs (hatched) and update", sum_of_passes)
    for key, x in places(found).items():
        record = found.get(key)
        if record and record["status"] == "ok":
            panel.bar(x, record["old_s"], 0.4, fill=False, hatch="////", edgecolor="white", linewidth=0)
            packed = found.get((key[0], "packed"))
            if key[1] == "replicated" and packed and packed["status"] == "ok":
                goal = sum_of_passes(record) / (SPEEDUP_GOAL * record["tokens"] / packed["tokens"])
                panel.hlines(goal, x - 0.62, x - 0.22, INK, "dotted", linewidth=1.2)
    panel.set_ylim(top=1.3 * panel.get_ylim()[1])  # room for the legend
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour, label=label) for label, colour in SIDES.values()]
    goal = f"goal: {SPEEDUP_GOAL} of the token ratio"
    handles.append(plt.Line2D([], [], color=INK, linestyle="dotted", linewidth=1.2, label=goal))
    panel.legend(handles=handles, fontsize=7.5, frameon=False, loc="upper left")


def sum_of_passes(record: dict) -> float:
    return sum(record[f"{name}_s"] for name in PASSES)


def draw_layer(panel, records: list[dict]) -> None:
    for impl, (label, colour, marker) in IMPLS.items():
        points = part(records, "layer", impl=impl, responses=CHART_RESPONSES, status="ok")
        if points:
            panel.plot(
                [record["prompt"] for record in points],
                [1e3 * record["seconds"] for record in points],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.4,
                label=label,
            )
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda prompt, _: f"{prompt / 1024:.0f}K")
    panel.set_yscale("log")
    panel.set_xlabel("prompt, tokens", fontsize=8)
    panel.set_title(f"layer, {CHART_RESPONSES} responses: ms forward + backward", fontsize=9)
    if panel.lines:
        panel.legend(fontsize=7.5, frameon=False)


def main() -> None:
    source, picture, page = map(Path, sys.argv[1:])
    records = json.loads(source.read_text()) if source.exists() else None
    page.write_text(with_tables(page.read_text(), records))
    if records:
        save_chart(picture, draw, records)


if __name__ == "__main__":
    main()
