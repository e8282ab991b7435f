"""The whole Hessian as an image, before and after training, and how large the entries of its diagonal blocks are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from evolute.studies.figures import PALETTE, SMALL, bare, heading, panels, ramp
from evolute.studies.heterogeneity.measure import BINS, HIGH, LOW, magnitudes
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Variant = tuple[str, str]  # attention, norm
VARIANTS: dict[Variant, str] = {
    ("softmax", "none"): "softmax, no norm",
    ("softmax", "pre"): "softmax, pre-norm",
    ("linear", "none"): "linear attention, no norm",
    ("linear", "pre"): "linear attention, pre-norm",
}
POINTS = {"initialisation": ("at initialisation", ":"), "trained": ("trained", "-")}
BLOCKS = {"Q": PALETTE["blue"], "K": PALETTE["teal"], "V": PALETTE["orange"]}
DECADES = 6  # that the colours span, down from the largest tile of a line of images
NAMED = 6  # pixels that a group must have to be named


def drawn(table: Sequence[Row]) -> Figure:
    """A column per model: its image before and after training, and the histograms of both."""
    made, axes = panels(4, 11.0, 8.2, rows=3, height_ratios=(1, 1, 0.62))
    for line, (point, (label, _)) in enumerate(POINTS.items()):
        _images(
            axes[4 * line : 4 * line + 4], [row for row in table if row["kind"] == "image" and row["point"] == point]
        )
        axes[4 * line].set_ylabel(label, labelpad=10, fontsize=10)
    for column, (variant, title) in enumerate(VARIANTS.items()):
        _histograms(axes[8 + column], [row for row in table if _variant(row) == variant])
        axes[column].set_title(title)
    axes[8].set_ylabel("entries per decade, %")
    _legend(made)
    heading(made, "The Hessian, entry by entry, before training and after it")
    return made


def _variant(row: Row) -> Variant:
    return row.get("attention", ""), row.get("norm", "")


# ---- images


def _images(axes: Sequence[Axes], rows: Sequence[Row]) -> None:
    """A line of them, in the same colours."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    top = math.ceil(max((max(map(max, magnitudes(row))) for row in rows), default=0.0))
    known = {_variant(row): row for row in rows}
    for panel, variant in zip(axes, VARIANTS, strict=True):
        _image(panel, known.get(variant), top)
    colours = ScalarMappable(Normalize(top - DECADES, top), ramp().resampled(4 * DECADES))
    axes[0].figure.colorbar(colours, ax=list(axes), shrink=0.8, aspect=22, label="$\\log_{10}|h|$ of a tile, r.m.s.")


def _image(axes: Axes, row: Row | None, top: int) -> None:
    """log10 |h| in tiles, with the borders of the groups."""
    if row is None:
        axes.set_axis_off()
        return
    values = [[max(value, top - DECADES) for value in line] for line in magnitudes(row)]
    axes.imshow(values, cmap=ramp().resampled(4 * DECADES), vmin=top - DECADES, vmax=top, interpolation="none")
    ends = list(accumulate(row["pixels"]))
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color="white", lw=0.8)
        axes.axvline(end - 0.5, color="white", lw=0.8)
    middles = [end - size / 2 - 0.5 for end, size in zip(ends, row["pixels"], strict=True)]
    shown = [size >= NAMED for size in row["pixels"]]
    ticks = [middle for middle, show in zip(middles, shown, strict=True) if show]
    names = [_name(name) for name, show in zip(row["groups"], shown, strict=True) if show]
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    bare(axes, "left", "bottom")


def _name(label: str) -> str:
    """Of the only layer, without its number.

    >>> _name("Q0"), _name("W11"), _name("E")
    ('Q', 'W1₁', 'E')
    """
    letter, number = (label[:-1], label[-1]) if label[-1].isdigit() else (label, "")
    return letter + number.translate(str.maketrans("0123456789", "\0₁₂₃₄₅₆₇₈₉")).replace("\0", "")


# ---- histograms


def _histograms(axes: Axes, rows: Sequence[Row]) -> None:
    """Shares per decade: dotted before training, solid after it."""
    step = (HIGH - LOW) / BINS
    middles = [LOW + (i + 0.5) * step for i in range(BINS)]
    for row in rows:
        letter = row["block"][0] if row["kind"] == "block" and row["block"][1:] == "0" else ""
        if letter in BLOCKS:
            dash = POINTS[row["point"]][1]
            shares = [100 * count / max(1, sum(row["counts"])) / step for count in row["counts"]]
            axes.plot(middles, shares, dash, color=BLOCKS[letter], lw=1.5, drawstyle="steps-mid")
    axes.set_xlim(-9.5, 2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("$\\log_{10}|h|$ of entries of a block")
    axes.grid(axis="x")
    axes.set_title(_ratios(rows), fontsize=SMALL, color=PALETTE["soft"])


def _ratios(rows: Sequence[Row]) -> str:
    """The medians of V,V over Q,Q, in powers of ten."""
    told = {row["point"]: row for row in rows if row["kind"] == "ratio" and row["statistic"] == "median"}
    powers = [f"$10^{{{_tenths(row['decades'])} \\pm {_half(row):.1f}}}$" for row in told.values()]
    return f"V,V : Q,Q  = {' → '.join(powers)}" if powers else ""


def _tenths(value: float) -> str:
    """Without a sign of zero.

    >>> _tenths(-0.04), _tenths(-0.26)
    ('0.0', '-0.3')
    """
    return f"{round(value, 1) + 0.0:.1f}"


def _half(row: Row) -> float:
    return (row["ci_high"] - row["ci_low"]) / 2


def _legend(figure: Figure) -> None:
    """Lines of the histograms, below."""
    from matplotlib.lines import Line2D

    lines: list[Any] = [Line2D([], [], color=colour, lw=2, label=f"{name},{name}") for name, colour in BLOCKS.items()]
    lines += [Line2D([], [], color=PALETTE["soft"], ls=dash, label=name) for name, dash in POINTS.values()]
    figure.legend(handles=lines, loc="outside lower center", ncols=5)
