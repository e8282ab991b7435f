"""The figure of the study of flow: curvature over blocks and steps as heat maps, and what the proxies make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evolute.studies.figures import MARKERS, PALETTE, SERIES, SMALL, bare, dot, heading, panels, ramp
from evolute.studies.flow.measure import PROXIES
from evolute.studies.over_training import TITLES
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"pre": "pre-norm", "post": "post-norm", "none": "no norm"}
LABELS = {
    "gradient": "gradient\nnorm",
    "squared": "squared\ngradient",
    "activation": "activation\nnorm",
    "attention": "attention\ndeviation",
}
MAPS = {
    "activations H": r"$\|\partial^2 L/\partial x_l^2\|$, stream",
    "parameters H": r"$\|\partial^2 L/\partial w_l^2\|$, parameters",
}
GOOD = 0.8


def drawn(table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
    """From the saved table alone; of the largest depth."""
    depth = max(row["depth"] for row in table)
    rows = [row for row in table if row["depth"] == depth]
    norms = [norm for norm in settings["norms"] if any(row["norm"] == norm for row in rows)]
    made, axes = panels(3, 11.0, 0.9 + 3.0 * len(norms), rows=len(norms), width_ratios=(1, 1, 1.05))
    for i, norm in enumerate(norms):
        here = [row for row in rows if row["norm"] == norm]
        for panel, (name, title) in zip(axes[3 * i : 3 * i + 2], MAPS.items(), strict=True):
            _map(panel, [row for row in here if row["kind"] == "map"], name)
            panel.set_title(f"{NAMES[norm]}: {title}")
        _ranks(axes[3 * i + 2], [row for row in here if row["kind"] == "correlation" and row["own"]])
        axes[3 * i + 2].set_title(f"{NAMES[norm]}: rank correlation with it")
    if norms:
        axes[2].legend(loc="upper left")
    heading(made, "Curvature through depth and training, and what stands in for it", _note(settings))
    return made


def _note(settings: Mapping[str, Any]) -> str:
    return (
        f"{TITLES[settings['model']]}, width {settings['width']}; geometric means over {settings['repeats']} seeds. "
        f"Right: the gradients beside the parameters, the others beside the stream; 95 %; line: {GOOD:g}."
    )


def _map(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """Blocks upwards, as the tokens go; steps to the right."""
    steps, layers = (sorted({row[key] for row in rows}) for key in ("step", "layer"))
    found = {(row["layer"], row["step"]): row[name] for row in rows}
    grid = np.array([[found.get((layer, step), np.nan) for step in steps] for layer in layers])
    shades = np.log10(np.where(grid > 0, grid, np.nan))
    low, high = np.nanmin(shades), np.nanmax(shades)
    axes.imshow(shades, origin="lower", aspect="auto", cmap=ramp(), vmin=low, vmax=high)
    for y, x in np.ndindex(grid.shape):
        dark = shades[y, x] > low + 0.55 * (high - low)
        colour = "white" if dark else PALETTE["ink"]
        axes.text(x, y, _short(float(grid[y, x])), ha="center", va="center", fontsize=SMALL, color=colour)
    axes.set_xticks(range(len(steps)), [str(step) for step in steps])
    axes.set_yticks(range(len(layers)), [str(layer + 1) for layer in layers])
    axes.set(xlabel="training step", ylabel="block")
    bare(axes, "left", "bottom")


def _short(value: float) -> str:
    """Two digits.

    >>> _short(0.01234), _short(5.678), _short(1234.5)
    ('0.012', '5.7', '1200')
    """
    return f"{float(f'{value:.2g}'):g}"


def _ranks(axes: Axes, rows: Sequence[Row]) -> None:
    """One row for each proxy: over blocks above, over steps below."""
    for place, (across, shift) in enumerate((("blocks", 0.14), ("steps", -0.14))):
        for at, proxy in enumerate(reversed(PROXIES)):
            for row in rows:
                if row["proxy"] == proxy and row["across"] == across:
                    low, high = max(row["rho_low"], -1.05), min(row["rho_high"], 1.05)
                    dot(axes, row["rho"], low, high, at + shift, series=place)
        axes.plot([], [], MARKERS[place], color=SERIES[place], ms=5, label=f"over {across}")
    axes.axvline(GOOD, color=PALETTE["soft"], lw=0.8)
    axes.axvline(0, color=PALETTE["line"], lw=0.8)
    axes.set_yticks(range(len(PROXIES)), [LABELS[proxy] for proxy in reversed(PROXIES)])
    axes.set(xlim=(-1.08, 1.08), ylim=(-0.5, len(PROXIES) - 0.5), xlabel="Spearman's ρ")
    axes.grid(axis="x", alpha=0.6)
