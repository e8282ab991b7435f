"""The figure of landscape: curves over k, slopes of all cases, how right prediction and bound are at each radius."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evolute.studies.figures import MARKERS, PALETTE, SERIES, dot, heading, panels
from evolute.studies.over_training import TITLES
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHORT = {name: title.split(",")[0] for name, title in TITLES.items()}


def draw(table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
    """From the saved table alone."""
    made, (curves, slopes, levels) = panels(3, 12.0, 4.6, width_ratios=(1.25, 1.0, 1.0))
    first = [row for row in table if (row["model"], row["training"]) == (table[0]["model"], table[0]["training"])]
    _curves(curves, first)
    _slopes(slopes, table)
    _levels(levels, table)
    note = (
        f"Left: one seed; the band holds 80 % of single orders at σ = {first[0]['radius']:g}. "
        f"Middle and right: 95 % over {settings['repeats']} seeds."
    )
    heading(made, "How the loss settles as samples are added, at and around a trained point", note)
    return made


def _curves(axes: Axes, rows: Sequence[Row]) -> None:
    """Measured lines, the second-order level dashed, the bound of the largest radius dotted."""
    for series, row in enumerate(rows):
        k, colour = row["sizes"], SERIES[series % len(SERIES)]
        if series == 0:
            axes.fill_between(k, row["low"], row["high"], color=colour, alpha=0.15, lw=0)
        axes.plot(k, row["changes"], color=colour, lw=1.8, label=f"σ = {row['radius']:g}")
        if row["radius"]:
            axes.plot(k, [row["predicted"] / (each + 1) for each in k], color=colour, lw=1.2, ls="--")
    k, bound = rows[0]["sizes"], rows[0]["bound"]
    axes.plot(k, [bound / (each + 1) for each in k], color=PALETTE["ink"], lw=1.2, ls=":", label="bound, σ = 0")
    axes.plot([], [], color=PALETTE["soft"], lw=1.2, ls="--", label="second order")
    axes.set(xscale="log", yscale="log", xlabel="number of samples k", ylabel=r"expected $|L_{k+1} - L_k|$")
    axes.set_title(f"{TITLES[rows[0]['model']]}, {rows[0]['training']}")
    axes.legend(loc="lower left", ncols=1)
    axes.grid(alpha=0.6)


def _slopes(axes: Axes, table: Sequence[Row]) -> None:
    """A row of the panel for each model and training; radii side by side."""
    cases = list(dict.fromkeys((row["model"], row["training"]) for row in table))
    radii = sorted({row["radius"] for row in table})
    for row in table:
        series = radii.index(row["radius"])
        place = cases.index((row["model"], row["training"])) + 0.16 * (series - (len(radii) - 1) / 2)
        dot(axes, row["slope"], row["slope_low"], row["slope_high"], place, series=series)
    axes.axvline(-1, color=PALETTE["ink"], lw=0.9)
    axes.set_yticks(range(len(cases)), [f"{SHORT[model]}\n{way.replace('_', ' ')}" for model, way in cases])
    axes.set_ylim(len(cases) - 0.5, -0.5)
    reach = max(0.02, max(abs(row[end] + 1) for row in table for end in ("slope_low", "slope_high"))) * 1.15
    axes.set_xlim(-1 - reach, -1 + reach)
    axes.set_xlabel("slope on log–log axes")
    axes.grid(axis="x", alpha=0.6)
    axes.set_title("Slope at each radius, colours as left")


def _levels(axes: Axes, table: Sequence[Row]) -> None:
    """Predicted and bounded level over the measured one, for each radius."""
    radii = sorted({row["radius"] for row in table})
    cases = list(dict.fromkeys((row["model"], row["training"]) for row in table))
    models = list(dict.fromkeys(row["model"] for row in table))
    for case, (model, way) in enumerate(cases):
        rows = sorted((r for r in table if (r["model"], r["training"]) == (model, way)), key=lambda r: r["radius"])
        series = models.index(model)
        colour, marker = SERIES[series + 4], MARKERS[series]
        shift = 0.06 * (case - (len(cases) - 1) / 2)
        for name, face in (("loose", "none"), ("ratio", colour)):
            shown = rows if name == "loose" else [row for row in rows if row["radius"] > 0]
            x = [radii.index(row["radius"]) + shift for row in shown]
            y = [row[name] for row in shown]
            error = [
                [row[name] - row[f"{name}_low"] for row in shown],
                [row[f"{name}_high"] - row[name] for row in shown],
            ]
            axes.errorbar(x, y, error, color=colour, marker=marker, mfc=face, ls="", ms=5, lw=1)
    axes.axhline(1, color=PALETTE["ink"], lw=0.9)
    axes.set_yscale("log")
    axes.set_xticks(range(len(radii)), [f"{radius:g}" for radius in radii])
    axes.set_xlabel("radius σ")
    axes.set_title("Level over the measured one")
    axes.grid(axis="y", alpha=0.6)
    for series, model in enumerate(models):
        style: dict[str, Any] = {"color": SERIES[series + 4], "marker": MARKERS[series], "ls": "", "ms": 5}
        axes.plot([], [], **style, label=f"{SHORT[model]}: second order")
        axes.plot([], [], **style, mfc="none", label=f"{SHORT[model]}: bound")
    axes.legend(loc="upper left")
