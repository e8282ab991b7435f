"""The figure of the study of dynamics: loss, sharpness, edge, trace and negative mass over steps, and the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evolute.studies.figures import PALETTE, SERIES, SMALL, heading, line, panels
from evolute.studies.over_training import TITLES
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"sgd": "gradient descent", "momentum": "momentum", "adam": "Adam", "adamw": "AdamW, warm-up and cosine"}
PANELS = {
    "loss": "Loss",
    "sharpness": r"Sharpness $\lambda_\mathrm{max}$",
    "edge": "Edge: rate × sharpness / limit",
    "trace": r"Trace $\Sigma\lambda$",
    "negative": r"Negative share of $\Sigma|\lambda|$",
}
LOGARITHMIC = ("loss", "sharpness", "edge")
BLOCKS = dict(zip(("Q", "K", "V", "O", "W1", "W2"), SERIES, strict=True)) | {
    "N": PALETTE["soft"],
    "rest": PALETTE["line"],
}
SHOWN = ("adam", "sgd", "momentum", "adamw")  # whose blocks are drawn: the first that is there


def drawn(table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
    """From the saved table alone."""
    rows = [row for row in table if row["kind"] == "step"]
    made, axes = panels(3, 11.0, 6.6, rows=2)
    for panel, (name, title) in zip(axes, PANELS.items(), strict=False):
        for place, setup in enumerate(NAMES):
            _curve(panel, [row for row in rows if row["setup"] == setup and name in row], name, place, NAMES[setup])
        panel.set_title(title)
        _dress(panel, name)
    axes[2].axhline(1, color=PALETTE["ink"], lw=0.9)
    axes[0].legend(loc="lower left")
    shown = next((setup for setup in SHOWN if any(row["setup"] == setup for row in rows)), "")
    _blocks(axes[5], [row for row in rows if row["setup"] == shown], NAMES.get(shown, ""))
    heading(made, "From the first step on: curvature along training", _note(settings))
    return made


def _note(settings: Mapping[str, Any]) -> str:
    batch = f"batches of {settings['batch']}" if settings["batch"] else "full batch"
    return (
        f"{TITLES[settings['model']]}, width {settings['width']}, {settings['samples']} samples, {batch}. Bands: 95 % "
        f"over {settings['repeats']} seeds. For Adam the sharpness in the edge is that of $P^{{-1/2}} H P^{{-1/2}}$."
    )


def _curve(axes: Axes, rows: Sequence[Row], name: str, place: int, label: str) -> None:
    if not rows:
        return
    steps, middle = [row["step"] for row in rows], [row[name] for row in rows]
    low, high = [row[f"{name}_low"] for row in rows], [row[f"{name}_high"] for row in rows]
    if name in LOGARITHMIC:
        low = [max(a, b / 100) for a, b in zip(low, middle, strict=True)]
        high = [min(a, b * 100) for a, b in zip(high, middle, strict=True)]
    line(axes, steps, middle, low, high, series=place, label=label)


def _dress(axes: Axes, name: str) -> None:
    _steps(axes)
    if name in LOGARITHMIC:
        axes.set_yscale("log")
    if name == "edge":
        axes.set_ylim(0.01, 5)
    if name == "trace":
        axes.set_yscale("symlog", linthresh=10)
    if name == "negative":
        axes.set_ylim(-0.02, 0.6)
    axes.grid(axis="y", alpha=0.6)


def _steps(axes: Axes) -> None:
    """Logarithmic from the first step on, with 0 beside it."""
    from matplotlib.ticker import ScalarFormatter

    axes.set_xscale("symlog", linthresh=1, linscale=0.4)
    axes.set_xticks([0, 1, 10, 100])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("training step")


def _blocks(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """Shares of ‖H‖², one on top of the other, named where they are widest."""
    if not rows:
        return
    steps, parts = [row["step"] for row in rows], list(rows[0]["shares"])
    colours = [BLOCKS.get(part, PALETTE["sand"]) for part in parts]
    layers = [[row["shares"][part] for row in rows] for part in parts]
    axes.stackplot(steps, layers, colors=colours, alpha=0.55, edgecolor="white", linewidth=0.8)
    for i, part in enumerate(parts):
        at = max(range(len(steps)), key=lambda j, i=i: layers[i][j] if 0 < steps[j] < steps[-1] else -1.0)
        below = sum(layers[k][at] for k in range(i))
        if layers[i][at] > 0.055:
            where = (steps[at], below + layers[i][at] / 2)
            axes.annotate(part, where, ha="center", va="center", fontsize=SMALL, color=PALETTE["ink"])
    _steps(axes)
    axes.set(xlim=(0, steps[-1]), ylim=(0, 1), title=rf"Shares of the blocks in $\|H\|^2$: {name}")
