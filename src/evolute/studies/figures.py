"""One look for the figures of all studies: palette, type, panels, lines with their uncertainty; from tables alone.

`evolute study` draws inside of `look()`, without pyplot, which would keep every figure. Nothing is smaller than 8
points, and every difference of colour has a second sign (a marker, a dash, a label): blue, orange and teal are apart
for every kind of colour vision.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from evolute.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

PALETTE = {
    "ink": "#1b2130",
    "soft": "#5b6579",
    "line": "#d6dce6",
    "blue": "#2563c9",
    "orange": "#cf5a06",
    "teal": "#0c857a",
    "violet": "#7c4fc4",
    "rose": "#c22f66",
    "sand": "#a8842c",
}
SERIES = tuple(PALETTE[name] for name in ("blue", "orange", "teal", "violet", "rose", "sand"))
MARKERS = ("o", "s", "D", "^", "v", "P")
COLOURS = {"H": PALETTE["ink"], "H_o": PALETTE["blue"], "H_f": PALETTE["orange"]}  # of the parts of the Hessian
NAMES = {"H": "$H$", "H_o": r"$H_\mathrm{o}$", "H_f": r"$H_\mathrm{f}$"}
RAMP = ("#f2f6f1", "#d8ecd9", "#b2ddc8", "#83cac2", "#56b0c0", "#3490ba", "#2a6bab", "#274a92", "#1f2d6b")
SMALL, TEXT, LARGE = 8.0, 9.0, 11.0  # points

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "axes.titlesize": TEXT + 1,
    "axes.titlelocation": "left",
    "axes.titlepad": 6,
    "axes.labelsize": TEXT,
    "axes.edgecolor": PALETTE["soft"],
    "axes.labelcolor": PALETTE["ink"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": PALETTE["line"],
    "grid.linewidth": 0.7,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.color": PALETTE["soft"],
    "ytick.color": PALETTE["soft"],
    "xtick.labelcolor": PALETTE["ink"],
    "ytick.labelcolor": PALETTE["ink"],
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "figure.titlesize": LARGE,
    "figure.titleweight": "bold",
    "svg.hashsalt": "evolute",
}


@contextmanager
def look() -> Generator[None]:
    """Inside, what matplotlib draws and saves looks like this: matplotlib reads its settings at every single step."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise MissingExtraError("figures need matplotlib: pip install 'evolute[report]'") from error
    with rc_context(STYLE):
        yield


def panels(columns: int, width: float, height: float, *, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of so many inches and its panels, row by row; options are those of `Figure.subplots`."""
    with look():
        from matplotlib.figure import Figure

        made = Figure(figsize=(width, height), layout="constrained")
        return made, list(made.subplots(rows, columns, squeeze=False, **options).flat)


def heading(figure: Figure, text: str, note: str = "") -> None:
    """What the figure says in one line, left; below all panels, in small, what was drawn how."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=LARGE, fontweight="bold", color=PALETTE["ink"])
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=SMALL, color=PALETTE["soft"])


def line(
    axes: Axes,
    x: Sequence[float],
    middle: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    series: int = 0,
    label: str | None = None,
    **options: Any,
) -> None:
    """A line with its markers, and a band for its uncertainty."""
    colour = options.pop("color", SERIES[series % len(SERIES)])
    marker = options.pop("marker", MARKERS[series % len(MARKERS)])
    axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
    axes.plot(x, middle, color=colour, marker=marker, ms=5, lw=1.6, label=label, **options)


def dot(axes: Axes, middle: float, low: float, high: float, place: float, *, series: int = 0, **options: Any) -> None:
    """A value with its interval, lying on the row `place`."""
    colour = options.pop("color", SERIES[series % len(SERIES)])
    marker = options.pop("marker", MARKERS[series % len(MARKERS)])
    axes.plot([low, high], [place, place], color=colour, lw=1.6, alpha=0.7, solid_capstyle="butt")
    axes.plot(middle, place, marker, color=colour, ms=5, **options)


def ramp() -> Colormap:
    """From little to much, pale to deep: as dark in grey as in colour."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("evolute", list(RAMP))


def bare(axes: Axes, *sides: str) -> None:
    """Without these spines and their ticks; the labels stay."""
    for side in sides:
        axes.spines[side].set_visible(False)
        axes.tick_params(axis="y" if side in ("left", "right") else "x", length=0)
