"""The outermost eigenvalues: those that curve up, those that curve down, and how surely."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evolute.report.analysis import Analysis, Sharpness
from evolute.report.figures.axes import symmetric, threshold_for
from evolute.report.figures.drawing import Drawing, Runs, Table, head, named, per_run
from evolute.report.figures.style import bare, light
from evolute.report.numbers import short, with_error


def _draw(figure: Figure, runs: Runs, narrow: bool) -> None:
    rows, columns = (len(runs), 1) if narrow else (1, len(runs))
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    everything = [value for run in runs for value, _ in _pairs(run.sharpness)]
    for run, axes in zip(runs, panels, strict=True):
        _panel(axes, run, everything)
        axes.set_title(run.name if len(runs) > 1 else "")


def _panel(axes: Axes, run: Analysis, everything: list[float]) -> None:
    low, high = min(*everything, 0.0), max(*everything, 0.0)
    threshold = threshold_for(everything, 3)
    symmetric(axes, "y", threshold, low, high)
    for place, (value, residual) in enumerate(_pairs(run.sharpness)):
        colour = light("blue" if value > 0 else "orange")
        axes.plot([place, place], [0, value], color=colour, lw=3)
        axes.plot(place, value, "o", color=colour, ms=6)
        if residual > 0.02 * abs(value):
            axes.errorbar(place, value, residual, color=light("soft"), lw=1, capsize=2.5)
    axes.axhline(0, color=light("soft"), lw=1)
    axes.grid(axis="y")
    axes.set_xticks([])
    bare(axes, "bottom", "left")
    axes.set_ylim(min(low * 2.2, -threshold), max(high * 2.2, threshold))
    _name_ends(axes, run.sharpness)


def _name_ends(axes: Axes, sharpness: Sharpness | None) -> None:
    assert sharpness is not None and sharpness.smallest is not None
    last = len(_pairs(sharpness)) - 1
    top, bottom = sharpness.largest.values[0], sharpness.smallest.values[0]
    offset: dict[str, Any] = {"textcoords": "offset points", "weight": "bold"}
    below = -12 if bottom < 0 else 8
    axes.annotate(short(bottom), (0, bottom), xytext=(-4, below), va="center", color=light("ink"), **offset)
    axes.annotate(short(top), (last, top), xytext=(4, 12), ha="right", va="center", color=light("ink"), **offset)


def _pairs(sharpness: Sharpness | None) -> list[tuple[float, float]]:
    """All that were found, ascending."""
    assert sharpness is not None
    assert sharpness.smallest is not None
    ends = (sharpness.smallest, sharpness.largest)
    return sorted(pair for end in ends for pair in zip(end.values, end.residuals, strict=True))


def _height(runs: Runs, narrow: bool) -> float:
    return 2.7 * len(runs) if narrow else 3.1


def _alt(runs: Runs) -> str:
    def sentence(run: Analysis) -> str:
        assert run.sharpness is not None and run.sharpness.smallest is not None
        low, high = run.sharpness.smallest.values[0], run.sharpness.largest.values[0]
        return f"they reach from {short(low)} to {short(high)}."

    return "The outermost eigenvalues of the Hessian as stems from zero. " + per_run(runs, sentence)


def _table(runs: Runs) -> Table:
    rows = [
        named(runs, run, with_error(value, 0), short(residual, 2))
        for run in runs
        for value, residual in _pairs(run.sharpness)
    ]
    return Table(head(runs, "Eigenvalue", "Residual"), tuple(rows))


def _there(run: Analysis) -> bool:
    return run.sharpness is not None and run.sharpness.smallest is not None


ENDS = Drawing("eigenvalues", "Outermost eigenvalues", _draw, _height, _alt, _table, _there)
