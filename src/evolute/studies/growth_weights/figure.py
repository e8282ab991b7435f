"""Exponents as a table of colours: blocks down, weights across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evolute.studies.figures import NAMES, PALETTE, SMALL, heading, panels, ramp
from evolute.studies.growth.fits import agrees
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (("H_o", "small"), ("H_f", "small"), ("H_o", "large"), ("H_f", "large"))
RANGES = {"small": "weight × 0.01–0.1", "large": "weight × 1–10"}
MOST = 2.5  # where the colours end


def drawn(table: Sequence[Row]) -> Figure:
    """Small weights beside large ones."""
    blocks = list(dict.fromkeys(row["block"] for row in table))
    weights = list(dict.fromkeys(row["scaled"] for row in table))
    figure, axes = panels(len(PANELS), 10.0, 4.4, sharey=True)
    for panel, (part, range_) in zip(axes, PANELS, strict=True):
        rows = [row for row in table if row["part"] == part and row["range"] == range_]
        _panel(panel, rows, blocks, weights)
        panel.set_title(f"{NAMES[part]},  {RANGES[range_]}")
    note = "Exponents, with half their intervals from 0.05 on. A dot: the block is zero."
    if any(panel.patches for panel in axes):
        note += " Boxed: not what theory says."
    heading(figure, "How fast the norm of each block grows with the size of each weight", note)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], blocks: Sequence[str], weights: Sequence[str]) -> None:
    cells = {(row["block"], row["scaled"]): row for row in rows}
    values = [[_value(cells.get((block, weight))) for weight in weights] for block in blocks]
    axes.imshow(values, cmap=ramp(), vmin=0, vmax=MOST, aspect="auto")
    for y, block in enumerate(blocks):
        for x, weight in enumerate(weights):
            _cell(axes, x, y, cells.get((block, weight)))
    axes.set_xticks(range(len(weights)), [f"$W_{weight}$" for weight in weights])
    axes.set_yticks(range(len(blocks)), blocks)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _value(row: Row | None) -> float:
    return 0.0 if row is None else row["exponent"]


def _cell(axes: Axes, x: int, y: int, row: Row | None) -> None:
    """A number, dark on pale and pale on dark."""
    text = "·" if row is None else _number(row)
    pale = _value(row) > 0.55 * MOST
    axes.text(x, y, text, ha="center", va="center", fontsize=SMALL, color="white" if pale else PALETTE["ink"])
    if row is not None and row["theory"] is not None and agrees(row) is not True:
        from matplotlib.patches import Rectangle

        axes.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, fill=False, ec=PALETTE["rose"], lw=1.6))


def _number(row: Row) -> str:
    reach = (row["ci_high"] - row["ci_low"]) / 2
    value = f"{row['exponent']:.1f}".replace("-", "−").replace("−0.0", "0.0")
    return value if reach < 0.05 else f"{value}\n±{reach:.1f}"
