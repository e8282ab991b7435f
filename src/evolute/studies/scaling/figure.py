"""The figure of scaling: test loss over D with its law, curvature and critical batch over D, and held-out runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evolute.studies.figures import MARKERS, PALETTE, SERIES, heading, panels
from evolute.studies.over_training import TITLES
from evolute.studies.scaling.table import MEASURES
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADS = {
    "loss": "Test loss",
    "sharpness": r"Sharpness $\lambda_{\max}$",
    "trace": r"Trace of $H$",
    "rank": r"Effective rank $(\sum|\lambda|)^2/\sum\lambda^2$",
    "batch": r"Critical batch $\mathrm{tr}(H\Sigma)/g^\top Hg$, samples",
}
ERRORS = {"trace": "trace_error", "rank": "rank_error", "batch": "batch_error"}


def draw(table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
    """From the saved table alone."""
    made, axes = panels(3, 12.0, 7.2, rows=2)
    runs = [row for row in table if row["kind"] == "run" and "diverged" not in row]
    fits = {row["value"]: row for row in table if row["kind"] == "fit"}
    for panel, value in zip(axes, MEASURES, strict=False):
        _over_data(panel, runs, fits.get(value), value)
    axes[0].legend(title="parameters N", title_fontsize=8, ncols=2)
    _held(axes[5], [row for row in table if row["kind"] == "held"])
    note = (
        "Each run is a mark; lines are the laws, fitted without the largest N and the largest D (open marks). "
        "Bars: one standard error. Lower right: 95 % intervals."
    )
    heading(made, f"{TITLES[settings['model']]}: loss and curvature over model size and data size", note)
    return made


def _over_data(axes: Axes, runs: Sequence[Row], fit: Row | None, value: str) -> None:
    sizes = sorted({row["N"] for row in runs})
    last = (sizes[-1], max(row["D"] for row in runs))
    for series, N in enumerate(sizes):
        colour, marker = SERIES[series % len(SERIES)], MARKERS[series % len(MARKERS)]
        for row in (row for row in runs if row["N"] == N and row[value] is not None):
            held = row["N"] == last[0] or row["D"] == last[1]
            error = row[ERRORS[value]] if value in ERRORS else None
            face = "white" if held else colour
            axes.errorbar(row["D"], row[value], error, color=colour, marker=marker, mfc=face, ms=5, lw=0.8, ls="")
        if fit is not None:
            D = [
                min(row["D"] for row in runs) * (last[1] / min(row["D"] for row in runs)) ** (i / 40) for i in range(41)
            ]
            axes.plot(D, [at(fit, N, each) for each in D], color=colour, lw=1.2)
        axes.plot([], [], color=colour, marker=marker, ms=5, lw=1.2, label=f"{N:,}")
    axes.set(xscale="log", yscale="log", xlabel="training samples D", title=HEADS[value])
    _plain_ticks(axes, (1, 2, 5) if value != "loss" else (1, 1.5, 2, 2.5, 3, 3.5, 4, 5))
    sizes_of_data = sorted({row["D"] for row in runs})
    axes.set_xticks(sizes_of_data, [f"{D:,}" for D in sizes_of_data])
    axes.minorticks_off()
    axes.grid(alpha=0.6)


def _plain_ticks(axes: Axes, subs: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def at(fit: Row, N: float, D: float) -> float:
    """The law at one place, from its constants.

    >>> at({"constants": {"E": 1.0, "A": 2.0, "α": 1.0, "B": 3.0, "β": 0.5}}, 4, 9)
    2.5
    """
    c = fit["constants"]
    if "C" in c:
        return c["C"] * N ** c.get("a", 0.0) * D ** c.get("b", 0.0)
    return c["E"] + c["A"] / N ** c["α"] + c["B"] / D ** c["β"]


def _held(axes: Axes, rows: Sequence[Row]) -> None:
    """True over predicted, one column for each measure."""
    names = [name for name in MEASURES if any(row["value"] == name for row in rows)]
    for place, name in enumerate(names):
        here = sorted((row for row in rows if row["value"] == name), key=lambda row: (row["N"], row["D"]))
        for i, row in enumerate(here):
            x = place + 0.7 * (i / max(1, len(here) - 1) - 0.5)
            low, high = row["low"] / row["predicted"], row["high"] / row["predicted"]
            inside = row["low"] <= row["true"] <= row["high"]
            axes.plot([x, x], [low, high], color=PALETTE["line"], lw=2.5, solid_capstyle="butt", zorder=2)
            colour = PALETTE["blue"] if inside else PALETTE["orange"]
            axes.plot(x, row["true"] / row["predicted"], "o" if inside else "D", color=colour, ms=4, zorder=3)
    axes.axhline(1, color=PALETTE["ink"], lw=0.9)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), [MEASURES[name].replace(" ", "\n") for name in names])
    axes.set_title("Held-out runs, over prediction")
    reach = [abs(math.log10(row["true"] / row["predicted"])) for row in rows]
    _plain_ticks(axes, (1, 2, 5) if max(reach, default=0) > 0.3 else (1, 1.25, 1.6, 8, 9))
