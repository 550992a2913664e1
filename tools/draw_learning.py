#!/usr/bin/env python3
"""Draws the rewards that bench/learning.py has recorded: means over the seeds, from lowest to highest shaded.

    python tools/draw_learning.py RECORDS.json PICTURE.svg

The same records give the same file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from charts import save_chart

COLOURS = {"packed": "#1f6fb4", "replicated": "#d1702f"}
DASHES = {"packed": "solid", "replicated": "dashed"}


def read_rewards(records: list[dict]) -> dict[str, dict[str, dict[int, list[float]]]]:
    """rewards[algorithm][trainer][step], of all seeds."""
    rewards = {}
    for record in records:
        of_trainer = rewards.setdefault(record["algorithm"], {}).setdefault(record["trainer"], {})
        of_trainer.setdefault(record["step"], []).append(record["reward"])
    return rewards


def draw(records: list[dict]) -> plt.Figure:
    rewards = read_rewards(records)
    figure, panels = plt.subplots(
        ncols=len(rewards), figsize=(8, 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (algorithm, trainers) in zip(panels[0], rewards.items()):
        for trainer, steps in trainers.items():
            means = [sum(seeds) / len(seeds) for seeds in steps.values()]
            look = {"color": COLOURS[trainer], "linestyle": DASHES[trainer]}
            panel.plot(list(steps), means, linewidth=1.6, label=trainer, **look)
            lowest, highest = map(min, steps.values()), map(max, steps.values())
            panel.fill_between(
                list(steps), list(lowest), list(highest), color=COLOURS[trainer], alpha=0.15, linewidth=0
            )
        panel.set_title(algorithm, fontsize=10)
        panel.set_xlabel("optimizer step")
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("mean reward")
    panels[0][0].legend(frameon=False, loc="upper left")
    return figure


def main() -> None:
    source, picture = map(Path, sys.argv[1:])
    save_chart(picture, draw, json.loads(source.read_text()))


if __name__ == "__main__":
    main()
