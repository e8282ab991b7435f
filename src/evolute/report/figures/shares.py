"""Who has the curvature: shares of ‖H‖² by kind of weight and by layer, beside shares of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evolute.report.analysis import Analysis, Blocks
from evolute.report.derived import Share, by_kind, by_layer
from evolute.report.figures.drawing import Drawing, Runs, Table, head, named, per_run
from evolute.report.figures.style import bare, light, run_colour
from evolute.report.naming import in_order
from evolute.report.numbers import percent

Sides = tuple[tuple[str, Callable[[Blocks], tuple[Share, ...]]], ...]
SIDES: Sides = (("By kind of weight", by_kind), ("By place in the model", by_layer))


def _draw(figure: Figure, runs: Runs, narrow: bool) -> None:
    rows = [len(_names(runs, part)) for _, part in SIDES]
    panels = figure.subplots(2, 1, height_ratios=[n + 1.0 for n in rows]) if narrow else figure.subplots(1, 2)
    for axes, (title, part) in zip(panels, SIDES, strict=True):
        _panel(axes, runs, part)
        axes.set_title(title)
    _legend(figure, runs)


def _panel(axes: Axes, runs: Runs, part: Callable[[Blocks], tuple[Share, ...]]) -> None:
    names = _names(runs, part)
    height = 0.7 / len(runs)
    for index, run in enumerate(runs):
        for share in part(_blocks(run)):
            y = names.index(share.name) + (index - (len(runs) - 1) / 2) * height
            _bar(axes, share, y, height, run_colour(index))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=light("ink"))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, _reach(runs, part))
    axes.set_xticks([])
    bare(axes, "left", "bottom")


def _bar(axes: Axes, share: Share, y: float, height: float, colour: str) -> None:
    value, error = share.of_H.value, share.of_H.error
    axes.barh(y, value, 0.86 * height, color=colour)
    if error > 0.004:
        axes.plot([value - error, value + error], [y, y], color=light("ink"), lw=1)
    axes.plot(share.of_parameters, y, "D", mfc="none", mec=light("ink"), ms=4.2, mew=1)
    right = axes.get_yaxis_transform()  # a column of numbers along the right edge
    axes.text(1.0, y, percent(value), transform=right, ha="right", va="center", color=light("ink"))


def _legend(figure: Figure, runs: Runs) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    several = [Patch(color=run_colour(i), label=run.name) for i, run in enumerate(runs)]
    one = [Patch(color=run_colour(0), label="share of ‖H‖²")]
    marker: Any = Line2D(
        [], [], marker="D", mfc="none", mec=light("ink"), ms=4.2, ls="none", label="share of parameters"
    )
    figure.legend(handles=[*(several if len(runs) > 1 else one), marker], loc="outside lower left", ncols=3)


def _names(runs: Runs, part: Callable[[Blocks], tuple[Share, ...]]) -> tuple[str, ...]:
    return in_order(share.name for run in runs for share in part(_blocks(run)))


def _reach(runs: Runs, part: Callable[[Blocks], tuple[Share, ...]]) -> float:
    found = [share for run in runs for share in part(_blocks(run))]
    return 1.2 * max(max(s.of_H.value + s.of_H.error, s.of_parameters) for s in found)


def _blocks(run: Analysis) -> Blocks:
    assert run.blocks is not None
    return run.blocks


def _height(runs: Runs, narrow: bool) -> float:
    rows = [len(_names(runs, part)) * (0.28 + 0.14 * (len(runs) - 1)) for _, part in SIDES]
    return sum(rows) + 1.3 if narrow else max(rows) + 0.8


def _alt(runs: Runs) -> str:
    def sentence(run: Analysis) -> str:
        found = sorted(by_kind(_blocks(run)), key=lambda share: -share.of_H.value)[:3]
        return ", ".join(f"{share.name} {percent(share.of_H.value)}" for share in found) + "."

    return "Bars of the share of the squared norm of H; the largest by kind: " + per_run(runs, sentence)


def _table(runs: Runs) -> Table:
    rows = [row for run in runs for _, part in SIDES for row in _rows(runs, run, part(_blocks(run)))]
    return Table(head(runs, "Part", "of ‖H‖²", "of ‖H_o‖²", "of ‖H_f‖²", "of the parameters"), tuple(rows))


def _rows(runs: Runs, run: Analysis, found: tuple[Share, ...]) -> list[tuple[str, ...]]:
    return [
        named(
            runs,
            run,
            share.name,
            *(percent(e.value, e.error) for e in (share.of_H, share.of_G, share.of_F)),
            percent(share.of_parameters),
        )
        for share in found
    ]


SHARES = Drawing("shares", "Shares of the curvature", _draw, _height, _alt, _table, lambda run: run.blocks is not None)
