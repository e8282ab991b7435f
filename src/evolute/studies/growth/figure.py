"""Exponents of the growth: block by block against theory, with depth, and from small to large inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evolute.studies.figures import COLOURS, MARKERS, NAMES, PALETTE, SERIES, heading, panels
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "softmax": "softmax, no norm",
    "pre_norm": "softmax, pre-norm",
    "linear": "linear attention",
    "mlp": "linear MLP",
}
RANGES = ("small", "mid", "large")
DASHES = {"Q": "-", "W": "-", "V": "--"}
SIDES = {"Q with Q, W with W": "-", "V with V": "--"}
SHIFT = {"H_o": -0.17, "H_f": 0.17}


def drawn(table: Sequence[Row]) -> Figure:
    """Three panels, of whatever models there are."""
    figure, (blocks, depths, ranges) = panels(3, 11.0, 4.5, width_ratios=(1.25, 1, 1.1))
    _blocks(blocks, [row for row in table if row["model"] == "softmax" and row["range"] == "small"])
    _depths(depths, [row for row in table if row["part"] == "H_o" and row["range"] == "small"])
    _ranges(ranges, [row for row in table if row["part"] == "H_o" and row["block"] in ("Q", "V")])
    heading(figure, "How fast the norms of the blocks grow with the size σ of the input")
    _legend(figure)
    return figure


def _blocks(axes: Axes, rows: Sequence[Row]) -> None:
    """Every layer of every depth is a dot; the ring is theory."""
    names = list(dict.fromkeys(row["block"] for row in rows))
    for part, shift in SHIFT.items():
        here = [row for row in rows if row["part"] == part]
        for row in here:
            place = names.index(row["block"]) + shift
            axes.plot([row["ci_low"], row["ci_high"]], [place, place], color=COLOURS[part], lw=1, alpha=0.4)
            axes.plot(row["exponent"], place, "os"[part == "H_f"], color=COLOURS[part], ms=4.5, alpha=0.6, mew=0)
            if row["theory"] is not None:
                axes.plot(row["theory"], place, "o", mfc="none", mec=PALETTE["ink"], ms=10, mew=0.9)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(1, len(names)) - 0.5, -0.5)
    axes.grid(axis="x")
    axes.set_xlabel("exponent, for σ from 0.01 to 0.1")
    axes.set_title("Softmax attention: all layers, all depths")


def _depths(axes: Axes, rows: Sequence[Row]) -> None:
    """The first layer: Q with Q is solid, V with V is dashed."""
    for model in LABELS:
        for block in DASHES:
            here = [row for row in rows if (row["model"], row["layer"], row["block"]) == (model, 0, block)]
            here.sort(key=lambda row: row["depth"])
            bounds = [(row["exponent"], row["ci_low"], row["ci_high"]) for row in here]
            shift = 0.06 * (list(LABELS).index(model) - 1)  # lines that coincide
            _bars(axes, [row["depth"] + shift for row in here], bounds, model, block)
    axes.set_yscale("symlog", linthresh=6, linscale=1.6)
    axes.set_yticks([0, 2, 4, 6, 18, 54], ["0", "2", "4", "6", "18", "54"])
    axes.set_ylim(-2, 90)
    axes.set_xticks(sorted({row["depth"] for row in rows}))
    axes.set_xlabel("depth (layers)")
    axes.set_ylabel("exponent")
    axes.grid(axis="y")
    axes.set_title(f"{NAMES['H_o']} of the first layer, small σ")


def _ranges(axes: Axes, rows: Sequence[Row]) -> None:
    """With and without a norm: the mean over all layers of all depths, and from the lowest to the highest."""
    for model in ("softmax", "pre_norm"):
        for block in ("Q", "V"):
            found = [
                [r["exponent"] for r in rows if (r["model"], r["block"], r["range"]) == (model, block, name)]
                for name in RANGES
            ]
            bounds = [(sum(each) / len(each), min(each), max(each)) for each in found if each]
            shift = 0.06 * (block == "V") - 0.03
            _bars(axes, [i + shift for i, each in enumerate(found) if each], bounds, model, block)
    axes.set_xticks(range(len(RANGES)), ["0.01–0.1", "0.1–1", "1–10"])
    axes.set_xlim(-0.35, len(RANGES) - 0.65)
    axes.set_xlabel("range of σ")
    axes.set_ylabel("exponent")
    axes.grid(axis="y")
    axes.axhline(0, color=PALETTE["soft"], lw=0.8)
    axes.set_title(f"{NAMES['H_o']} from small to large inputs")


def _bars(axes: Axes, x: Sequence[float], bounds: Sequence[tuple[float, float, float]], model: str, block: str) -> None:
    """Middles with their bars, in the colour of the model."""
    series = list(LABELS).index(model)
    below_above = [[middle - low for middle, low, _ in bounds], [high - middle for middle, _, high in bounds]]
    style: dict[str, Any] = {
        "color": SERIES[series],
        "marker": MARKERS[series],
        "ls": DASHES[block],
        "ms": 5,
        "lw": 1.4,
    }
    if bounds:
        axes.errorbar(x, [middle for middle, _, _ in bounds], below_above, capsize=2.5, **style)


def _legend(figure: Figure) -> None:
    """Of all panels, below them."""
    from matplotlib.lines import Line2D

    dots = [Line2D([], [], ls="", marker="os"[part == "H_f"], color=COLOURS[part], label=NAMES[part]) for part in SHIFT]
    ring = Line2D([], [], ls="", marker="o", mfc="none", mec=PALETTE["ink"], ms=9, label="theory")
    models = [
        Line2D([], [], color=SERIES[series], marker=MARKERS[series], label=label)
        for series, label in enumerate(LABELS.values())
    ]
    dashes = [Line2D([], [], color=PALETTE["soft"], ls=dash, label=name) for name, dash in SIDES.items()]
    figure.legend(handles=[*dots, ring, *models, *dashes], loc="outside lower center", ncols=9, columnspacing=1.2)
