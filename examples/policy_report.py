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

# Largest allowed difference of two fp32 gradients, as a part of the largest gradient.
TOLERANCE = 1e-4

COLORS = {"replicated": "#9aa5b1", "packed": "#1f6feb"}


def figures(replicated: Result, packed: Result, exact: Result | None) -> dict:
    """Everything that is reported, ready for JSON.

    exact: the same update in fp32, if the two were computed in a lower precision. The packed gradients may be
    twice as far from it as the replicated ones, and an eps of bfloat16.
    """
    total = {name: sum(result.seconds.values()) for name, result in _named(replicated, packed)}
    return {
        **{name: _mode_figures(result) for name, result in _named(replicated, packed)},
        "token_ratio": replicated.tokens / packed.tokens,
        "speedup": {
            **{phase: _ratio(replicated.seconds[phase], packed.seconds[phase]) for phase in PHASES},
            "total": _ratio(total["replicated"], total["packed"]),
        },
        "memory_ratio": _ratio(replicated.peak_bytes, packed.peak_bytes),
        "agreement": _agreement(replicated, packed, exact),
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


def _agreement(replicated: Result, packed: Result, exact: Result | None) -> dict:
    if exact is None:
        error, parameter = _gradient_error(packed, replicated)
        tolerance = TOLERANCE
    else:
        error, parameter = _gradient_error(packed, exact)
        tolerance = 2.0 * _gradient_error(replicated, exact)[0] + torch.finfo(torch.bfloat16).eps
    return {
        "compared_with": "the replicated run" if exact is None else "a float32 run",
        "gradient": error,
        "gradient_of": parameter,
        "log_prob": (packed.log_probs - replicated.log_probs).abs().max().item(),
        "loss": abs(packed.loss - replicated.loss),
        "tolerance": tolerance,
        "agrees": error <= tolerance,  # false for NaN
    }


def _gradient_error(result: Result, reference: Result) -> tuple[float, str]:
    """Largest difference of a gradient, as a part of the largest gradient, and the parameter where it is."""
    names = list(reference.gradients)
    differences = [(result.gradients[name] - reference.gradients[name]).abs().max() for name in names]
    worst = torch.stack(differences).argmax()  # a NaN counts as the largest
    largest = max(gradient.abs().max().item() for gradient in reference.gradients.values())
    # Equal rewards everywhere make all gradients zero, and then they must be so on both sides.
    return differences[worst].item() / (largest or 1.0), names[worst]


def _ratio(first: float, second: float) -> float | None:
    return first / second if second > 0 else None


def print_table(console: Console, title: str, report: dict) -> None:
    replicated, packed = report["replicated"], report["packed"]
    console.print(f"\n[bold]{title}[/]", highlight=False)
    table = Table()
    table.add_column("")
    for column in (f"replicated ({report['baseline']})", "packed", "ratio"):
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
    row("memory with model, MiB", "{:.0f}", replicated["loaded_mib"], packed["loaded_mib"], False)
    row("peak above that, MiB", "{:.0f}", replicated["peak_mib"], packed["peak_mib"], end_section=True)
    row("loss", "{:+.4g}", replicated["loss"], packed["loss"], False)
    console.print(table)

    agreement = report["agreement"]
    verdict = "[green]agree[/]" if agreement["agrees"] else "[bold red]DISAGREE[/]"
    console.print(
        f"Gradients {verdict}: largest difference from {agreement['compared_with']} is "
        f"{agreement['gradient']:.1e} of the largest gradient, in {agreement['gradient_of']} "
        f"(tolerance {agreement['tolerance']:.1e}).\n"
        f"Largest log-prob difference {agreement['log_prob']:.1e}, loss difference {agreement['loss']:.1e}.\n"
        f"Speed-up [bold]{report['speedup']['total']:.2f}x[/] for {report['token_ratio']:.2f}x fewer tokens.",
        highlight=False,
        soft_wrap=True,
    )


def draw_chart(path: Path, title: str, report: dict) -> None:
    """Two panels: seconds of each phase, and tokens, time and memory relative to the replicated run."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    seconds = {mode: report[mode]["seconds"] for mode in COLORS}
    phases = {mode: [seconds[mode][phase] for phase in PHASES] for mode in COLORS}
    labels = {mode: [f"{value:.1f} s" for value in phases[mode]] for mode in COLORS}
    _grouped_bars(left, list(PHASES), phases, labels)
    left.set_ylabel("seconds")
    left.set_title("Time of each phase")

    quantities = {
        "tokens": ("{:,}", [report[mode]["tokens"] for mode in COLORS]),
        "time": ("{:.1f} s", [seconds[mode]["total"] for mode in COLORS]),
        "peak memory": ("{:,.0f} MiB", [report[mode]["peak_mib"] for mode in COLORS]),
    }
    relative, labels = {}, {}
    for index, mode in enumerate(COLORS):
        relative[mode] = [_ratio(values[index], values[0]) or 0.0 for _, values in quantities.values()]
        labels[mode] = [form.format(values[index]) for form, values in quantities.values()]
    _grouped_bars(right, list(quantities), relative, labels)
    right.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    right.set_title("Relative to replicated prompts")
    right.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _grouped_bars(
    axes, names: list[str], heights: dict[str, list[float]], labels: dict[str, list[str]]
) -> None:
    """Groups of bars, one for each mode; heights and labels are [mode][group]."""
    width = 0.8 / len(heights)
    for index, mode in enumerate(heights):
        centers = [group + (index - (len(heights) - 1) / 2) * width for group in range(len(names))]
        bars = axes.bar(centers, heights[mode], width * 0.95, label=mode, color=COLORS[mode])
        axes.bar_label(bars, labels[mode], padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
