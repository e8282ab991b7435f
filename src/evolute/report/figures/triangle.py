"""H = G + F drawn to scale: three matrices are three sides of a triangle, in the plane that they span."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evolute.report.analysis import Analysis
from evolute.report.derived import Parting, parting
from evolute.report.figures.drawing import Drawing, Runs, Table, head, named, per_run
from evolute.report.figures.style import H_F, H_O, NARROW, WIDE, light
from evolute.report.numbers import percent, short

Point = tuple[float, float]
MARGIN, BELOW, RIGHT, FLAT = 0.04, 0.09, 0.24, 0.1  # in lengths of H


def _draw(figure: Figure, runs: Runs, narrow: bool) -> None:
    rows, columns = (len(runs), 1) if narrow else (1, len(runs))
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for run, axes in zip(runs, panels, strict=True):
        _panel(axes, _parting(run))
        axes.set_title(run.name if len(runs) > 1 else "")


def _panel(axes: Axes, sides: Parting) -> None:
    length, cosine = sides.outer.value, sides.cosine.value
    origin, tip = (0.0, 0.0), (1.0, 0.0)
    corner = (length * cosine, length * math.sqrt(max(0.0, 1 - cosine**2)))
    _arrow(axes, origin, tip, "ink", "H  100 %", below=True)
    _arrow(axes, origin, corner, "blue", f"{H_O}  {percent(sides.outer.value)}")
    _arrow(axes, corner, tip, "orange", f"{H_F}  {percent(sides.functional.value)}", after=True)
    xs, ys = (0.0, 1.0, corner[0]), (0.0, corner[1])
    axes.set_xlim(min(xs) - MARGIN, max(xs) + RIGHT)
    axes.set_ylim(-BELOW, max(*ys, FLAT) + MARGIN)
    axes.set_aspect("equal")
    axes.set_axis_off()


def _arrow(
    axes: Axes, start: Point, end: Point, colour: str, text: str, below: bool = False, after: bool = False
) -> None:
    from matplotlib.patches import FancyArrowPatch

    style: dict[str, Any] = {
        "arrowstyle": "-|>,head_length=7,head_width=3.6",
        "mutation_scale": 1,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.add_patch(FancyArrowPatch(start, end, color=light(colour), lw=2.6, joinstyle="miter", **style))
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    offset, align = ((0, -14), "center") if below else (((9, 4), "left") if after else ((-8, 8), "right"))
    axes.annotate(
        text,
        middle,
        xytext=offset,
        textcoords="offset points",
        ha=align,
        va="center",
        weight="bold",
        color=light(colour),
    )


def _parting(run: Analysis) -> Parting:
    assert run.blocks is not None
    return parting(run.blocks)


def _height(runs: Runs, narrow: bool) -> float:
    tallest = max(_tall(_parting(run)) for run in runs)
    width = NARROW if narrow else WIDE / len(runs)
    one = 0.25 * (len(runs) > 1) + width * (tallest + BELOW + MARGIN) / (1 + MARGIN + RIGHT)
    return one * len(runs) if narrow else min(one, 4.2)


def _tall(sides: Parting) -> float:
    return max(FLAT, sides.outer.value * math.sqrt(max(0.0, 1 - sides.cosine.value**2)))


def _alt(runs: Runs) -> str:
    def sentence(run: Analysis) -> str:
        found = _parting(run)
        return f"H_o has {percent(found.outer.value)} of the length of H, H_f {percent(found.functional.value)}."

    return "H as the sum of two arrows, H_o and H_f, drawn to scale. " + per_run(runs, sentence)


def _table(runs: Runs) -> Table:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        found = _parting(run)
        told = (("‖H‖", found.H), ("‖H_o‖ (G)", found.G), ("‖H_f‖ (F)", found.F))
        rows += [named(runs, run, name, str(estimate)) for name, estimate in told]
        rows.append(named(runs, run, "‖H_o‖ / ‖H‖", str(found.outer)))
        rows.append(named(runs, run, "‖H_f‖ / ‖H‖", str(found.functional)))
        rows.append(named(runs, run, "cosine between H and H_o", str(found.cosine)))
        if run.sharpness and run.sharpness.outer:
            top = run.sharpness.outer.values[0] / run.sharpness.largest.values[0]
            rows.append(named(runs, run, "λ_max(H_o) / λ_max(H)", short(top)))
    return Table(head(runs, "Quantity", "Value"), tuple(rows))


TRIANGLE = Drawing("parts", "H = H_o + H_f, to scale", _draw, _height, _alt, _table, lambda run: run.blocks is not None)
