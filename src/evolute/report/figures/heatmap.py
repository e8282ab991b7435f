"""Norms of all blocks of H, G and F, each pair of groups one cell; per parameter, on one logarithmic colour scale."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from evolute.report.analysis import Analysis, Blocks
from evolute.report.figures.axes import power
from evolute.report.figures.drawing import Drawing, Runs, Table, head, named
from evolute.report.figures.style import H_F, H_O, LEVELS, RAMP_LIGHT, bare, light, ramp
from evolute.report.merging import merged
from evolute.report.naming import MOST, label
from evolute.report.numbers import short

TITLES = {"H": "H, all of it", "G": f"{H_O}, Gauss–Newton part", "F": f"{H_F}, functional part"}
DECADES = 5.0  # from the darkest to the palest; what is less is palest


def entries(blocks: Blocks, matrix: str) -> list[list[float]]:
    """‖A_ij‖ / √(n_i n_j): the root mean square of the entries of each block."""
    sizes, norms = blocks.sizes, blocks[matrix].norms
    return [[norms[i][j] / math.sqrt(n * m) for j, m in enumerate(sizes)] for i, n in enumerate(sizes)]


def _draw(figure: Figure, runs: Runs, narrow: bool) -> None:
    tables = [merged(_blocks(run), MOST) for run in runs]
    top = max(value for blocks in tables for row in entries(blocks, "H") for value in row)
    scale = math.floor(math.log10(top) - DECADES + 0.5), math.log10(top)
    shape = (3 * len(runs), 1) if narrow else (len(runs), 3)
    panels = figure.subplots(*shape, squeeze=False)
    for place, axes in enumerate(panels.flat):
        run, matrix = divmod(place, 3)
        _panel(axes, tables[run], "HGF"[matrix], scale, show_names=narrow or matrix == 0)
        several = f"{runs[run].name}: " if len(runs) > 1 and (narrow or matrix == 0) else ""
        axes.set_title(several + TITLES["HGF"[matrix]])
    _colour_bar(figure, list(panels.flat), scale)


def _panel(axes: Axes, blocks: Blocks, matrix: str, scale: tuple[float, float], show_names: bool) -> None:
    count, values = len(blocks.groups), entries(blocks, matrix)
    cells = [(i, j) for i in range(count) for j in range(count)]
    squares = [[(j, i), (j + 1, i), (j + 1, i + 1), (j, i + 1)] for i, j in cells]
    colours = [_colour(values[i][j], scale) for i, j in cells]
    axes.add_collection(PolyCollection(squares, facecolors=colours, edgecolors=light("surface"), linewidths=0.5))
    axes.set(xlim=(0, count), ylim=(count, 0), aspect="equal")
    _names(axes, [label(group) for group in blocks.groups], show_names)
    bare(axes, "left", "bottom")


def _names(axes: Axes, names: list[str], rows: bool) -> None:
    size = max(5.2, min(8.5, 165 / len(names)))
    places = [place + 0.5 for place in range(len(names))]
    axes.set_xticks(places, names, rotation=90, fontsize=size)
    axes.set_yticks(places, names if rows else [], fontsize=size)
    axes.tick_params(length=0, pad=1.5)


def _colour(value: float, scale: tuple[float, float]) -> str:
    position = (math.log10(value) - scale[0]) / (scale[1] - scale[0]) if value > 0 else 0.0
    return _RAMP[round(max(0.0, min(1.0, position)) * (LEVELS - 1))]


_RAMP = ramp(RAMP_LIGHT)


def _colour_bar(figure: Figure, panels: list[Axes], scale: tuple[float, float]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    edges = [scale[0] + (scale[1] - scale[0]) * i / LEVELS for i in range(LEVELS + 1)]
    mappable = ScalarMappable(BoundaryNorm(edges, LEVELS), ListedColormap(_RAMP))
    bar = figure.colorbar(mappable, ax=panels, location="bottom", fraction=0.04, aspect=46, pad=0.015, shrink=0.7)
    ticks = range(math.ceil(scale[0]), math.floor(scale[1]) + 1)
    bar.set_ticks(list(ticks), labels=[power(10.0**tick) for tick in ticks])
    bar.set_label("typical size of an entry of the block (root mean square)")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def _blocks(run: Analysis) -> Blocks:
    assert run.blocks is not None
    return run.blocks


def _height(runs: Runs, narrow: bool) -> float:
    return 0.7 + 4.75 * 3 * len(runs) if narrow else 1.1 + 3.35 * len(runs)


def _alt(runs: Runs) -> str:
    return (
        "Heatmaps of the blocks of the Hessian, its Gauss–Newton part and its functional part: "
        "one cell for every pair of weight matrices, darker where the entries are larger. The table has the numbers."
    )


def _table(runs: Runs) -> Table:
    rows = [row for run in runs for row in _strongest(runs, run)]
    return Table(head(runs, "Block", "‖H‖", "‖H_o‖", "‖H_f‖", "Entries"), tuple(rows))


def _strongest(runs: Runs, run: Analysis, most: int = 60) -> list[tuple[str, ...]]:
    """The diagonal blocks, then those with the largest norms."""
    blocks = merged(_blocks(run), MOST)
    n = len(blocks.groups)
    pairs = sorted(((i, j) for i in range(n) for j in range(i + 1)), key=lambda p: -blocks.H.norms[p[0]][p[1]])
    chosen = [(i, i) for i in range(n)] + [pair for pair in pairs if pair[0] != pair[1]][: max(0, most - n)]
    return [_row(runs, run, blocks, i, j) for i, j in chosen]


def _row(runs: Runs, run: Analysis, blocks: Blocks, i: int, j: int) -> tuple[str, ...]:
    from evolute.report.numbers import with_error

    name = blocks.groups[i] if i == j else f"{blocks.groups[i]} × {blocks.groups[j]}"
    norms = (with_error(blocks[m].norms[i][j], blocks[m].errors[i][j]) for m in "HGF")
    return named(runs, run, name, *norms, short(float(blocks.sizes[i] * blocks.sizes[j])))


HEATMAP = Drawing("blocks", "Norms of all blocks", _draw, _height, _alt, _table, lambda run: run.blocks is not None)
