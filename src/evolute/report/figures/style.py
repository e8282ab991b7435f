"""One look for all figures: palette, type, sizes. Colours are CSS variables on the page, so that themes can change."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# name → (light, dark); blue, orange and teal are apart for every kind of colour vision
PALETTE = {
    "ink": ("#1b2130", "#e8ecf4"),
    "soft": ("#5b6579", "#9aa6ba"),
    "line": ("#d6dce6", "#313a4c"),
    "faint": ("#eef1f6", "#1d2431"),
    "surface": ("#fffffe", "#151a24"),
    "blue": ("#2563c9", "#6da6ff"),
    "orange": ("#cf5a06", "#ff9a4d"),
    "teal": ("#0c857a", "#43cdb8"),
    "violet": ("#7c4fc4", "#b99aff"),
    "rose": ("#c22f66", "#ff7da8"),
}
RUNS = ("blue", "orange", "teal", "violet", "rose")
# from little to much: pale to deep on white, dark to bright on black
RAMP_LIGHT = ("#f2f6f1", "#d8ecd9", "#b2ddc8", "#83cac2", "#56b0c0", "#3490ba", "#2a6bab", "#274a92", "#1f2d6b")
RAMP_DARK = ("#1a2130", "#1d2f4e", "#20446f", "#235f8e", "#2a7fa3", "#43a3ad", "#77c6b0", "#b5e3b9", "#f1fbd0")
H_O, H_F = "H$_{\\mathrm{o}}$", "H$_{\\mathrm{f}}$"
LEVELS = 32
WIDE, NARROW = 9.4, 4.7  # inches
PRINTED: dict[Any, Any] = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "evolute"}


def light(name: str) -> str:
    return PALETTE[name][0]


def run_colour(index: int) -> str:
    return light(RUNS[index % len(RUNS)])


def ramp(colours: Sequence[str]) -> list[str]:
    """LEVELS colours from end to end of a few."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    colormap = LinearSegmentedColormap.from_list("ramp", list(colours))
    return [to_hex(colormap(i / (LEVELS - 1))) for i in range(LEVELS)]


def variables(theme: int) -> dict[str, str]:
    """CSS variable → colour, of the light (0) or the dark theme (1)."""
    named = {f"--{name}": colours[theme] for name, colours in PALETTE.items()}
    levels = ramp((RAMP_LIGHT, RAMP_DARK)[theme])
    return named | {f"--q{level}": colour for level, colour in enumerate(levels)}


def drawn(width: float, height: float, draw: Callable[[Figure], None], narrow: bool) -> Figure:
    """A figure in our style, laid out without overlaps."""
    with mpl.rc_context(_settings(narrow)):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
    return figure


def _settings(narrow: bool) -> dict[Any, Any]:
    size = 9.5 if narrow else 8.6
    colours = {key: light("soft") for key in ("xtick.color", "ytick.color", "axes.labelcolor")}
    return PRINTED | colours | {
        "font.family": "DejaVu Sans",
        "font.size": size,
        "axes.titlesize": size + 1,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": light("ink"),
        "text.color": light("ink"),
        "axes.edgecolor": light("line"),
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "axes.axisbelow": True,
        "figure.facecolor": "none",
        "grid.color": light("line"),
        "grid.linewidth": 0.6,
        "xtick.labelsize": size,
        "ytick.labelsize": size,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "legend.frameon": False,
        "legend.fontsize": size,
        "lines.solid_capstyle": "round",
    }  # fmt: skip


def bare(axes: Axes, *sides: str) -> None:
    """Without these spines."""
    for side in sides:
        axes.spines[side].set_visible(False)


# ---------------------------------------------------------------- files


def bytes_of(figure: Figure, kind: str) -> bytes:
    """As svg, png or pdf, on white; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with mpl.rc_context(PRINTED):
        figure.savefig(buffer, format=kind, dpi=200, facecolor=light("surface"), metadata=metadata)
    return buffer.getvalue()


def inline(figure: Figure, prefix: str) -> str:
    """As SVG for the page: transparent, colours as variables, ids that are its own."""
    buffer = io.StringIO()
    with mpl.rc_context(PRINTED):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(buffer.getvalue(), prefix)


def _for_page(text: str, prefix: str) -> str:
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r' version="1.1"', "", text, count=1)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'id="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = text.replace("'DejaVu Sans', sans-serif", "var(--font)").replace("'DejaVu Sans'", "var(--font)")
    return _with_variables(text)


def _with_variables(text: str) -> str:
    colours = {colour: name for name, colour in variables(0).items()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var({colours[m[0]]})" if m[0] in colours else m[0], text)
