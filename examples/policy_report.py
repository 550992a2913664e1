"""What policy_update.py shows of two runs of the same update: figures, a table, a chart."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from policy_step import PHASES, Result
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

MIB = 1024 * 1024

# Largest allowed difference of a gradient, as a part of the largest gradient.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}

COLORS = {"replicated": "#9aa5b1", "packed": "#1f6feb"}


def figures(replicated: Result, packed: Result, dtype: torch.dtype) -> dict:
    """Everything that is reported, ready for JSON."""
    total = {name: sum(result.seconds.values()) for name, result in _named(replicated, packed)}
    return {
        **{name: _mode_figures(result) for name, result in _named(replicated, packed)},
        "token_ratio": replicated.tokens / packed.tokens,
        "speedup": {
            **{phase: _ratio(replicated.seconds[phase], packed.seconds[phase]) for phase in PHASES},
            "total": _ratio(total["replicated"], total["packed"]),
        },
        "memory_ratio": _ratio(replicated.peak_bytes, packed.peak_bytes),
        "agreement": _agreement(replicated, packed, TOLERANCES[dtype]),
    }


def _named(replicated: Result, packed: Result):
    return (("replicated", replicated), ("packed", packed))


def _mode_figures(result: Result) -> dict:
    return {
        "tokens": result.tokens,
        "rows": result.rows,
        "micro_batches": result.micro_batches,
        "seconds": {**result.seconds, "total": sum(result.seconds.values())},
        "loaded_mib": result.loaded_bytes / MIB,
        "peak_mib": result.peak_bytes / MIB,
        "loss": result.loss,
    }


def _agreement(replicated: Result, packed: Result, tolerance: float) -> dict:
    differences = {
        name: (packed.gradients[name].double() - gradient.double()).abs().max().item()
        for name, gradient in replicated.gradients.items()
    }
    worst = max(differences, key=differences.get)
    largest = max(gradient.abs().max().item() for gradient in replicated.gradients.values())
    # Equal rewards everywhere make all gradients zero, and then they must be so on both sides.
    relative = differences[worst] / largest if largest > 0 else differences[worst]
    return {
        "gradient": relative,
        "gradient_of": worst,
        "largest_gradient": largest,
        "log_prob": (packed.log_probs - replicated.log_probs).abs().max().item(),
        "loss": abs(packed.loss - replicated.loss),
        "tolerance": tolerance,
        "agrees": relative <= tolerance,  # false for NaN
    }


def _ratio(first: float, second: float) -> float | None:
    return first / second if second > 0 else None


def print_table(console: Console, title: str, report: dict) -> None:
    replicated, packed = report["replicated"], report["packed"]
    console.print(f"\n[bold]{title}[/]", highlight=False)
    table = Table()
    table.add_column("")
    for column in ("replicated", "packed", "ratio"):
        table.add_column(column, justify="right")

    def row(name: str, form: str, first: float, second: float, compare: bool = True, **style) -> None:
        ratio = _ratio(first, second) if compare else None
        table.add_row(
            name, form.format(first), form.format(second), "" if ratio is None else f"{ratio:.2f}x", **style
        )

    row("tokens", "{:,}", replicated["tokens"], packed["tokens"])
    row("rows with padding", "{:,}", replicated["rows"], packed["rows"])
    row("micro-batches", "{}", replicated["micro_batches"], packed["micro_batches"], False, end_section=True)
    for phase in PHASES:
        row(f"{phase}, s", "{:.2f}", replicated["seconds"][phase], packed["seconds"][phase])
    row("all phases, s", "{:.2f}", *(m["seconds"]["total"] for m in (replicated, packed)), style="bold")
    table.add_section()
    row("process with model, MiB", "{:.0f}", replicated["loaded_mib"], packed["loaded_mib"], False)
    row("peak above that, MiB", "{:.0f}", replicated["peak_mib"], packed["peak_mib"], end_section=True)
    row("loss", "{:+.4g}", replicated["loss"], packed["loss"], False)
    console.print(table)

    agreement = report["agreement"]
    verdict = "[green]agree[/]" if agreement["agrees"] else "[bold red]DISAGREE[/]"
    console.print(
        f"Gradients {verdict}: largest difference {agreement['gradient']:.1e} of the largest gradient, in "
        f"{agreement['gradient_of']} (tolerance {agreement['tolerance']:.0e}).\n"
        f"Largest log-prob difference {agreement['log_prob']:.1e}, loss difference {agreement['loss']:.1e}.\n"
        f"Speed-up [bold]{report['speedup']['total']:.2f}x[/] for {report['token_ratio']:.2f}x fewer tokens.",
        highlight=False,
    )


def draw_chart(path: Path, title: str, report: dict) -> None:
    """Two panels: seconds of each phase, and tokens, time and memory relative to the replicated run."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    seconds = {mode: report[mode]["seconds"] for mode in COLORS}
    _grouped_bars(
        left, list(PHASES), {mode: [seconds[mode][p] for p in PHASES] for mode in COLORS}, "{:.1f} s"
    )
    left.set_ylabel("seconds")
    left.set_title("Time of each phase")

    quantities = {
        "tokens": [report[mode]["tokens"] for mode in COLORS],
        "time": [seconds[mode]["total"] for mode in COLORS],
        "peak memory": [report[mode]["peak_mib"] for mode in COLORS],
    }
    relative = {
        mode: [values[i] / values[0] if values[0] > 0 else 0.0 for values in quantities.values()]
        for i, mode in enumerate(COLORS)
    }
    _grouped_bars(right, list(quantities), relative, "{:.0%}")
    right.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    right.set_title("Relative to replicated prompts")
    right.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _grouped_bars(axes, names: list[str], values: dict[str, list[float]], form: str) -> None:
    """A bar for each mode in each group, labelled with its value."""
    width = 0.8 / len(values)
    for index, (mode, heights) in enumerate(values.items()):
        centers = [group + (index - (len(values) - 1) / 2) * width for group in range(len(names))]
        bars = axes.bar(centers, heights, width * 0.95, label=mode, color=COLORS[mode])
        axes.bar_label(bars, [form.format(height) for height in heights], padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
