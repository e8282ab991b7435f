"""The spectrum: how many eigenvalues are where, on a symmetric-logarithmic axis, with the outliers as ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evolute.report.analysis import Analysis, Sharpness, Spectrum
from evolute.report.figures.axes import log_ticks, symmetric, threshold_for
from evolute.report.figures.drawing import Drawing, Runs, Table, head, named, per_run
from evolute.report.figures.style import bare, light
from evolute.report.numbers import percent, short

FLOOR = 0.1  # eigenvalues per decade: below this nothing is drawn
FLOORS = (-math.inf, FLOOR, FLOOR, FLOOR)
STRIP = 0.09  # of the height, for the ticks


def _draw(figure: Figure, runs: Runs, narrow: bool) -> None:
    panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True, sharey=True).flat
    values = [value for run in runs for value in (*_spectrum(run).density.grid, *outliers(run.sharpness))]
    threshold = threshold_for(values, 4 if narrow else 5)
    top = max(max(per_decade(run, "mean", threshold)) for run in runs)
    for place, (run, axes) in enumerate(zip(runs, panels, strict=True)):
        symmetric(axes, "x", threshold, min(values), max(values), 6 if narrow else 11)
        _panel(axes, run, threshold, top)
        axes.set_title(run.name if len(runs) > 1 else "")
        if place == len(runs) - 1:
            axes.set_xlabel("eigenvalue of the Hessian")


def _panel(axes: Axes, run: Analysis, threshold: float, top: float) -> None:
    low, mean, high = (per_decade(run, side, threshold) for side in ("low", "mean", "high"))
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, max(top, 10.0) * 25)
    for negative, colour in ((True, light("orange")), (False, light("blue"))):
        _side(axes, _spectrum(run).density.grid, (low, mean, high), negative, colour)
    axes.axvline(0, color=light("soft"), lw=0.8)
    _ticks(axes, run.sharpness)
    log_ticks(axes, "y")
    axes.set_ylabel("eigenvalues per decade")
    axes.grid(axis="y")
    bare(axes, "left")


def per_decade(run: Analysis, side: str, threshold: float) -> list[float]:
    """How many eigenvalues lie where, per unit of the axis: density × n √(λ² + λ₀²) ln 10."""
    density, count = _spectrum(run).density, run.subject.parameters
    values = {"low": density.low, "mean": density.mean, "high": density.high}[side]
    scale = count * math.log(10)
    return [p * scale * math.hypot(x, threshold) for x, p in zip(density.grid, values, strict=True)]


def _side(axes: Axes, grid: Sequence[float], sides: Sequence[Sequence[float]], negative: bool, colour: str) -> None:
    kept = [i for i, x in enumerate(grid) if (x <= 0) == negative]
    x, low, mean, high = (
        [max(side[i], floor) for i in kept] for side, floor in zip((grid, *sides), FLOORS, strict=True)
    )
    axes.fill_between(x, FLOOR, mean, color=colour, alpha=0.22, lw=0)
    axes.fill_between(x, low, high, color=colour, alpha=0.35, lw=0)
    axes.plot(x, mean, color=colour, lw=1.7)


def _ticks(axes: Axes, sharpness: Sharpness | None) -> None:
    for value in outliers(sharpness):
        colour = light("blue" if value > 0 else "orange")
        axes.plot([value, value], [1 - STRIP, 1], color=colour, lw=1.6, transform=axes.get_xaxis_transform())


def outliers(sharpness: Sharpness | None) -> list[float]:
    """The eigenvalues that were found one by one."""
    ends = (sharpness.smallest, sharpness.largest) if sharpness else ()
    return [value for end in ends if end for value in end.values]


def _spectrum(run: Analysis) -> Spectrum:
    assert run.spectrum is not None
    return run.spectrum


def _height(runs: Runs, narrow: bool) -> float:
    return (2.9 if narrow else 3.3) * (1 if len(runs) == 1 else 0.8 * len(runs))


def _alt(runs: Runs) -> str:
    def sentence(run: Analysis) -> str:
        found = _spectrum(run)
        return f"{percent(found.negative.value)} of the curvature is negative, the trace is {short(found.trace.value)}."

    return (
        "Density of the eigenvalues of the Hessian on a symmetric-logarithmic axis, negative ones in orange, with a "
        "band of one standard error and a tick for each outlying eigenvalue. " + per_run(runs, sentence)
    )


def _table(runs: Runs) -> Table:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        density = _spectrum(run).density
        step = max(1, len(density.grid) // 40)
        for i in range(0, len(density.grid), step):
            numbers = (density.grid[i], density.mean[i], density.low[i], density.high[i])
            rows.append(named(runs, run, *(short(number) for number in numbers)))
    return Table(head(runs, "Eigenvalue", "Density", "Band from", "to"), tuple(rows))


DENSITY = Drawing("density", "Density of the spectrum", _draw, _height, _alt, _table, lambda r: r.spectrum is not None)
