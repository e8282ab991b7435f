"""The figure of budget: k* for each tolerance, and how often the interval held that of other samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evolute.studies.budget import LEVEL
from evolute.studies.figures import MARKERS, PALETTE, SERIES, dot, heading, panels
from evolute.studies.over_training import TITLES
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
    """From the saved table alone."""
    made, (sizes, covered) = panels(2, 11.0, 4.4, width_ratios=(1.3, 1.0))
    cases = list(dict.fromkeys((row["model"], row["step"]) for row in table))
    for series, (model, step) in enumerate(cases):
        rows = sorted((r for r in table if (r["model"], r["step"]) == (model, step)), key=lambda r: r["share"])
        _sizes(sizes, rows, series, f"{TITLES[model].split(',')[0]}, step {step}")
    _covered(covered, table, cases)
    _dress(sizes, settings)
    note = (
        f"k* from {settings['known']} samples, its median interval of 95 % as a bar; rings: k* of the others. "
        f"Right: 95 % over {settings['repeats']} seeds, {settings['splits']} splits each."
    )
    heading(made, "From how many samples on one more hardly moves the loss", note)
    return made


def _sizes(axes: Axes, rows: Sequence[Row], series: int, label: str) -> None:
    x, y = [row["share"] for row in rows], [row["size"] for row in rows]
    colour, marker = SERIES[series % len(SERIES)], MARKERS[series % len(MARKERS)]
    error = [[row["size"] - row["interval"][0] for row in rows], [row["interval"][1] - row["size"] for row in rows]]
    axes.errorbar(x, y, error, color=colour, marker=marker, ms=5, lw=1.4, capsize=3, label=label)
    axes.plot(x, [row["other"] for row in rows], "o", mfc="none", mec=PALETTE["ink"], ms=10, mew=0.9)
    axes.plot(x, [row["accurate"] for row in rows], color=colour, lw=1.1, ls=":")


def _dress(axes: Axes, settings: Mapping[str, Any]) -> None:
    axes.plot([], [], color=PALETTE["soft"], lw=1.1, ls=":", label="for a mean that is this accurate")
    axes.axhline(settings["known"], color=PALETTE["soft"], lw=0.9, ls="--")
    axes.text(0.99, settings["known"] * 1.12, "samples that were used", transform=axes.get_yaxis_transform(),
              ha="right", fontsize=8, color=PALETTE["soft"])  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="tolerance, as a share of the loss", ylabel="samples")
    axes.set_title("Sufficient sample size k*")
    axes.grid(alpha=0.6)
    axes.legend(loc="upper right")


def _covered(axes: Axes, table: Sequence[Row], cases: Sequence[tuple[str, int]]) -> None:
    shares = sorted({row["share"] for row in table}, reverse=True)
    for row in table:
        series = cases.index((row["model"], row["step"]))
        place = shares.index(row["share"]) + 0.17 * (series - (len(cases) - 1) / 2)
        dot(axes, row["covered"], row["covered_low"], min(1.0, row["covered_high"]), place, series=series)
    axes.axvline(LEVEL, color=PALETTE["ink"], lw=0.9)
    axes.set_yticks(range(len(shares)), [f"{share:.1%}" for share in shares])
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlabel("share of intervals that hold the k* of others")
    axes.set_ylabel("tolerance")
    axes.grid(axis="x", alpha=0.6)
    axes.set_title("Coverage")
