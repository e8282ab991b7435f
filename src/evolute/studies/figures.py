"""Pictures that studies have in common, from tables alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evolute.errors import MissingExtraError
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"H": "#6b7280", "H_o": "#2563c9", "H_f": "#c2570c"}


def panels(columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Without pyplot, which would keep every figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("figures need matplotlib: pip install 'evolute[report]'") from error
    made = Figure(figsize=(width, height), layout="constrained")
    return made, list(made.subplots(1, columns, squeeze=False).flat)


def dots(rows: Sequence[Row], title: str) -> Figure:
    """Exponents with their intervals: one panel per model, one line per depth and block."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    most = max((sum(row["model"] == model for row in rows) for model in models), default=1)
    made, axes = panels(max(1, len(models)), 3.1 * max(1, len(models)) + 0.8, 1.2 + 0.17 * most)
    for model, panel in zip(models, axes, strict=False):
        _panel(panel, model, [row for row in rows if row["model"] == model])
    made.suptitle(title, fontsize=11)
    return made


def _panel(axes: Axes, model: str, rows: Sequence[Row]) -> None:
    names = [f"depth {row['depth']}  {row['part']}({row['block']})" for row in rows]
    for place, row in enumerate(rows):
        colour = COLOURS[row["part"]]
        axes.plot([row["ci_low"], row["ci_high"]], [place, place], color=colour, lw=1)
        axes.plot(row["exponent"], place, "o", color=colour, ms=4)
        if row["theory"] is not None:
            axes.plot(row["theory"], place, "o", mfc="none", mec="#111827", ms=8)
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_title(model, fontsize=10)
    axes.set_xlabel("exponent of σ", fontsize=9)
    axes.ticklabel_format(axis="x", useOffset=False)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, (low + high) / 2 - 1), max(high, (low + high) / 2 + 1))
    axes.grid(axis="x", alpha=0.3)
