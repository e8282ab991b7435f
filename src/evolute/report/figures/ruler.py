"""Step sizes on a ruler: how far each method is stable, and where training stood."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evolute.report.analysis import Analysis
from evolute.report.derived import Limit, limit_of_training, limits
from evolute.report.figures.axes import log_ticks
from evolute.report.figures.drawing import Drawing, Runs, Table, head, named, per_run
from evolute.report.figures.style import bare, light, run_colour
from evolute.report.naming import in_order
from evolute.report.numbers import short


def _draw(figure: Figure, runs: Runs, narrow: bool) -> None:
    axes = figure.subplots()
    methods = _methods(runs)
    low, high = _span(runs, narrow)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(len(methods) - 0.4, -0.62)
    for row, method in enumerate(methods):
        axes.text(low, row - 0.42, method, weight="bold", va="center")
        for index, run in enumerate(runs):
            _bar(axes, run, method, row + _offset(index, len(runs)), 0.44 / len(runs), index, (low, high))
    bare(axes, "left")
    axes.set_yticks([])
    axes.set_xlabel("step size η" if narrow else "step size η (learning rate)")
    log_ticks(axes, "x")


def _bar(
    axes: Axes, run: Analysis, method: str, y: float, height: float, index: int, span: tuple[float, float]
) -> None:
    limit = next((each for each in limits(run) if each.method == method), None)
    axes.barh(y, span[1] - span[0], height, left=span[0], color=light("faint"))
    if limit is None:
        axes.text(span[0] * 1.1, y, "not measured", va="center", color=light("soft"))
        return
    colour, edge = run_colour(index), limit.step.value
    axes.barh(y, edge - span[0], height, left=span[0], color=colour)
    lr = _trained_at(run, limit)
    beyond = max(edge, lr) if lr is not None and lr < 4 * edge else edge
    words = f"stable below {short(edge)}" + (f", trained at {lr:g}" if lr is not None else "")
    axes.annotate(words, (beyond, y), xytext=(9, 0), textcoords="offset points", va="center", color=light("ink"))
    if lr is not None:
        axes.plot([lr, lr], [y - 0.62 * height, y + 0.62 * height], color=light("ink"), lw=2.4, solid_capstyle="butt")


def _trained_at(run: Analysis, limit: Limit) -> float | None:
    """The learning rate, on the ruler of the optimiser that was used."""
    used = limit_of_training(run)
    return run.training.lr if run.training and used and used.method == limit.method else None


def _methods(runs: Runs) -> tuple[str, ...]:
    return in_order(limit.method for run in runs for limit in limits(run))


def _offset(index: int, count: int) -> float:
    return 0.44 * ((index + 0.5) / count - 0.5) * 1.12


def _span(runs: Runs, narrow: bool) -> tuple[float, float]:
    steps = [limit.step.value for run in runs for limit in limits(run)]
    steps += [run.training.lr for run in runs if run.training and run.training.lr]
    low, high = math.log10(min(steps)), math.log10(max(steps))
    room = max((0.8 if narrow else 0.45) * (high - low), 0.7)
    return 10 ** (low - max(0.3 * (high - low), 0.5)), 10 ** (high + room)


def _height(runs: Runs, narrow: bool) -> float:
    return 0.75 + len(_methods(runs)) * (0.52 + 0.26 * len(runs))


def _alt(runs: Runs) -> str:
    def sentence(run: Analysis) -> str:
        return "; ".join(f"{limit.method} is stable for steps below {short(limit.step.value)}" for limit in limits(run))

    return "A ruler of step sizes. " + per_run(runs, sentence) + "."


def _table(runs: Runs) -> Table:
    rows = [named(runs, run, limit.method, limit.formula, str(limit.step)) for run in runs for limit in limits(run)]
    return Table(head(runs, "Method", "Limit", "Largest stable step"), tuple(rows))


RULER = Drawing("step-sizes", "Stable step sizes", _draw, _height, _alt, _table, lambda run: bool(limits(run)))
