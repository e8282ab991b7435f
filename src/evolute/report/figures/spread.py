"""How unlike the weight matrices are: the typical entry of each diagonal block on one logarithmic axis."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evolute.report.analysis import Analysis, Blocks
from evolute.report.derived import per_parameter, spread
from evolute.report.figures.axes import log_ticks, positive_range
from evolute.report.figures.drawing import Drawing, Runs, Table, head, named, per_run
from evolute.report.figures.style import bare, light, run_colour
from evolute.report.merging import merged
from evolute.report.naming import in_order, kind_of, layer_of
from evolute.report.numbers import times

MOST = 60


def _draw(figure: Figure, runs: Runs, narrow: bool) -> None:
    axes = figure.subplots()
    kinds = in_order(kind_of(group) for run in runs for group in _blocks(run).groups)
    for index, run in enumerate(runs):
        _dots(axes, run, kinds, 0.44 * ((index + 0.5) / len(runs) - 0.5), run_colour(index))
    values = [e.value for run in runs for e in per_parameter(_blocks(run), "H")]
    axes.set_xscale("log")
    axes.set_xlim(*positive_range(values))
    axes.set_yticks(range(len(kinds)), kinds)
    axes.tick_params(axis="y", labelcolor=light("ink"))
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.grid(axis="y")
    log_ticks(axes, "x")
    axes.set_xlabel(
        "typical size of an entry (root mean square)"
        if narrow
        else "typical size of an entry of the diagonal block (root mean square), logarithmic"
    )
    bare(axes, "left")
    if len(runs) > 1:
        figure.legend(loc="outside lower left", ncols=3)


def _dots(axes: Axes, run: Analysis, kinds: tuple[str, ...], shift: float, colour: str) -> None:
    blocks = _blocks(run)
    values = per_parameter(blocks, "H")
    for place, (group, estimate) in enumerate(zip(blocks.groups, values, strict=True)):
        y = kinds.index(kind_of(group)) + shift
        low, high = max(estimate.value - estimate.error, estimate.value * 0.2), estimate.value + estimate.error
        axes.plot([low, high], [y, y], color=colour, lw=1.6, alpha=0.45)
        axes.plot(estimate.value, y, "o", color=colour, ms=9.5, mec=light("surface"), label="" if place else run.name)
        _number(axes, group, estimate.value, y)


def _number(axes: Axes, group: str, x: float, y: float) -> None:
    """The number of the layer, in its dot."""
    found = layer_of(group).rpartition(" ")[2]
    if found.isdigit():
        axes.annotate(
            found, (x, y), ha="center", va="center_baseline", fontsize=6.6, color=light("surface"), weight="bold"
        )


def _blocks(run: Analysis) -> Blocks:
    assert run.blocks is not None
    return merged(run.blocks, MOST)


def _height(runs: Runs, narrow: bool) -> float:
    kinds = in_order(kind_of(group) for run in runs for group in _blocks(run).groups)
    return 0.75 + len(kinds) * (0.24 + 0.1 * len(runs))


def _alt(runs: Runs) -> str:
    def sentence(run: Analysis) -> str:
        found = spread(_blocks(run))
        if found is None:
            return "too few blocks are surely above zero."
        return f"the largest, {found.largest}, is {times(found.ratio.value)} the smallest, {found.smallest}."

    return "One dot for every weight matrix, at the typical entry of its own block of H; " + per_run(runs, sentence)


def _table(runs: Runs) -> Table:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        blocks = _blocks(run)
        three = [per_parameter(blocks, name) for name in "HGF"]
        rows += [
            named(runs, run, group, *(str(values[i]) for values in three), f"{blocks.sizes[i]:,}")
            for i, group in enumerate(blocks.groups)
        ]
    return Table(head(runs, "Group", "of H", "of H_o", "of H_f", "Parameters"), tuple(rows))


SPREAD = Drawing("spread", "Spread between weights", _draw, _height, _alt, _table, lambda run: run.blocks is not None)
