#!/usr/bin/env python3
"""Draws what bench/attention.py has measured as a bar chart.

    python tools/draw_attention_bench.py RECORDS.json PICTURE.svg [forward]

With "forward", of records of both passes the forward alone. The same records give the same file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from charts import save_chart

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from attention_batches import BATCHES, goals_of, have_backward  # noqa: E402

# In the order in which they stand beside each other.
LOOKS = {
    "dualkv": ("dualkv", "#1f6fb4"),
    "dualkv-deterministic": ("dualkv, deterministic", "#7fb0da"),
    "fa4-cascade": ("FA4 cascade", "#b3541e"),
    "fa3-cascade": ("FA3 cascade", "#d1702f"),
    "cudnn-cascade": ("cuDNN cascade", "#e38b3c"),
    "fa2-cascade": ("FA2 cascade", "#f3bd87"),
    "magi": ("MagiAttention", "#9a6fb3"),
    "flex": ("FlexAttention", "#57a06c"),
    "fa4-replicated": ("FA4 replicated", "#5b6875"),
    "fa3-replicated": ("FA3 replicated", "#7d8995"),
    "cudnn-replicated": ("cuDNN replicated", "#9aa5b0"),
    "fa2-replicated": ("FA2 replicated", "#c6ced6"),
}
INK = "#1f2933"


def read_rates(records: list[dict]) -> dict[int, dict[str, dict[str, float]]]:
    """Useful TFLOP/s: rates[head dim][batch][impl], without those that failed."""
    rates = {}
    for record in records:
        if "error" not in record:
            of_batch = rates.setdefault(record["head_dim"], {}).setdefault(record["batch"], {})
            of_batch[record["impl"]] = record["useful_tflops"]
    return rates


def forward_of(records: list[dict]) -> list[dict]:
    """Records of both passes as those of the forward would be."""
    batches, found = {batch.name: batch for batch in BATCHES}, []
    for record in records:
        if "error" not in record and record["impl"] != "dualkv-deterministic":  # which has the same forward
            forward = {name: value for name, value in record.items() if name != "backward_ms"}
            rate = batches[record["batch"]].useful_tflops(record["forward_ms"])
            found.append({**forward, "useful_tflops": rate})
    return found


def draw(records: list[dict]) -> plt.Figure:
    rates, goals = read_rates(records), goals_of(records)
    impls = [impl for impl in LOOKS if any(record["impl"] == impl for record in records)]
    width = 0.84 / len(impls)
    figure, panels = plt.subplots(
        ncols=len(rates),
        figsize=(1.25 * sum(map(len, rates.values())) + 1, 4.6),
        width_ratios=[len(batches) for batches in rates.values()],
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, (head_dim, batches) in zip(panels[0], rates.items()):
        for i, impl in enumerate(impls):
            label, colour = LOOKS[impl]
            places = [x + (i - (len(impls) - 1) / 2) * width for x in range(len(batches))]
            of_impl = [batch.get(impl, 0) for batch in batches.values()]
            panel.bar(places, of_impl, 0.92 * width, color=colour, label=label)
            for x, batch in zip(places, batches.values()):
                if f"{impl}-graph" in batch:
                    panel.bar(
                        x, batch[f"{impl}-graph"], 0.92 * width, fill=False, edgecolor=INK, linewidth=0.7
                    )
        for x, name in enumerate(batches):
            panel.hlines(goals[name].fa3_cascade, x - 0.42, x + 0.42, INK, "dotted", linewidth=1)
        panel.set_xticks(range(len(batches)), [name.replace(", ", " · ") for name in batches], fontsize=7.5)
        panel.set_title(f"head dim {head_dim}", fontsize=9)
        panel.margins(x=0.02)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("useful TFLOP/s")
    handles = panels[0][0].get_legend_handles_labels()[0]
    handles += [
        plt.Rectangle((0, 0), 1, 1, fill=False, edgecolor=INK, linewidth=0.7, label="in a CUDA graph"),
        plt.Line2D([], [], color=INK, linestyle="dotted", linewidth=1, label="FA3 cascade, quoted"),
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7.5, frameon=False
    )
    passes = "forward + backward" if have_backward(records) else "forward"
    figure.suptitle(
        f"Attention {passes}, bf16, {records[0]['device']}: responses · prompt · response", fontsize=10
    )
    return figure


def main() -> None:
    source, picture = map(Path, sys.argv[1:3])
    records = json.loads(source.read_text())
    save_chart(picture, draw, forward_of(records) if sys.argv[3:] == ["forward"] else records)


if __name__ == "__main__":
    main()
