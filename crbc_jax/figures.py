"""Rows of metrics.jsonl and evaluations -> Matplotlib figures."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Row = Mapping[str, Any]

# Okabe and Ito's colours, which colour-blind readers tell apart.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#d55e00", "#009e73", "#6b6b6b"
_STYLE = {"linewidth": 1.6, "marker": "o", "markersize": 3}

# Title of a panel -> pattern of the last part of the names of its fields.
_PANELS = {
    "Policy entropy (nats a token)": r"(.*_)?entropy",
    "KL divergence (nats a token)": r"(.*_)?kl(_.*)?",
    "Clipped share of tokens": r".*clip(ped)?_(fraction|share)",
    "Gradient norm (before clipping)": r"grad_norm",
    "Invalid share of actions": r"invalid(_action)?_share",
    "Groups without variance (share)": r"(zero_variance|degenerate)_.*",
}


def draw_curves(rows: Sequence[Row]) -> Figure:
    """Success over updates, and below it what the learner did."""
    panels = {title: _matching(rows, end) for title, end in _PANELS.items()}
    panels = {title: fields for title, fields in panels.items() if fields}
    num_rows = -(-len(panels) // 3)
    figure = Figure(figsize=(10, 3.6 + 2.2 * num_rows), layout="constrained")
    grid = figure.add_gridspec(1 + num_rows, 3, height_ratios=[3.4] + [2.2] * num_rows)
    _draw_success(figure.add_subplot(grid[0, :]), rows)
    for index, (title, fields) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[1 + index // 3, index % 3])
        for field, colour in zip(fields, (_BLUE, _ORANGE, _GREEN), strict=False):
            axes.plot(*_curve(rows, field), color=colour, label=field, **_STYLE)
        if len(fields) > 1:
            axes.legend(fontsize=7, frameon=False)
        _finish(axes, title)
    return figure


def draw_category(before: Row, after: Row) -> Figure:
    """Success by category in two evaluations, with 95 % intervals.

    Args:
        before, after: as `evaluate.EvalResult.to_json` gives them.
    """
    names = list(after["by_category"])
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for label, evaluation, colour, shift in (
        (f"update {before['update']}", before, _GREY, -0.12),
        (f"update {after['update']}", after, _BLUE, 0.12),
    ):
        shares = [evaluation["by_category"].get(name) for name in names]
        known = [(i, s) for i, s in enumerate(shares) if s and s["trials"]]
        rates = [share["rate"] for _, share in known]
        axes.errorbar(
            [index + shift for index, _ in known],
            rates,
            yerr=[
                [share["rate"] - share["low"] for _, share in known],
                [share["high"] - share["rate"] for _, share in known],
            ],
            fmt="o",
            color=colour,
            capsize=3,
            label=label,
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(-0.03, 1.03)
    axes.legend(frameon=False)
    _finish(axes, "Held-out success by category (95 % intervals)", x="category")
    return figure


def draw_seconds(seconds: Mapping[str, float]) -> Figure:
    """Time of each stage, longest first."""
    names = sorted(seconds, key=seconds.__getitem__)
    figure = Figure(figsize=(10, 0.8 + 0.3 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(names, [seconds[name] for name in names], color=_BLUE)
    total = sum(seconds.values()) or 1.0
    axes.bar_label(
        bars,
        [f"{seconds[name]:.1f} s ({seconds[name] / total:.0%})" for name in names],
        padding=4,
        fontsize=8,
    )
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds")
    return figure


def _draw_success(axes, rows: Sequence[Row]) -> None:
    updates, rates = _curve(rows, "eval/success_rate")
    _, lows = _curve(rows, "eval/success_low")
    _, highs = _curve(rows, "eval/success_high")
    for field in _matching(rows, "success_rate"):
        if not field.startswith("eval/"):
            axes.plot(*_curve(rows, field), color=_GREY, linewidth=1, label=field)
    if updates:
        axes.plot(updates, rates, color=_BLUE, label="held-out tasks", **_STYLE)
    if updates and len(lows) == len(highs) == len(updates):
        axes.fill_between(
            updates, lows, highs, color=_BLUE, alpha=0.18, label="95 % interval"
        )
    axes.set_ylim(0, 1)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
    _finish(axes, "Success rate")


def _matching(rows: Sequence[Row], pattern: str) -> list[str]:
    """Fields whose last part matches `pattern`, in order of appearance."""
    fields = dict.fromkeys(field for row in rows for field in row)
    return [f for f in fields if re.fullmatch(pattern, f.split("/")[-1])]


def _curve(rows: Sequence[Row], field: str) -> tuple[list[int], list[float]]:
    """Steps and values at which a field is known and finite."""
    points = [(r["step"], r[field]) for r in rows if r.get(field) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _finish(axes, title: str, x: str = "update") -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(x, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if x == "update":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
