"""The figure of gauss_newton: the top eigenvalue, what its eigenvectors capture, and the weight of H_f at each loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evolute.studies.figures import MARKERS, PALETTE, SERIES, heading, line, panels
from evolute.studies.over_training import TITLES
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
    """From the saved table alone."""
    made, axes = panels(3, 11.0, 4.0)
    models = list(dict.fromkeys(row["model"] for row in table))
    steps = sorted({row["step"] for row in table})
    for series, model in enumerate(models):
        rows = sorted((row for row in table if row["model"] == model), key=lambda row: row["step"])
        for panel, name in zip(axes, ("ratio", "captured"), strict=False):
            _over_steps(panel, rows, name, steps, series, TITLES[model])
        _over_loss(axes[2], rows, series)
    _dress(axes, steps, settings["k"])
    note = (
        f"Bands: 95 % over {settings['repeats']} seeds. Middle: the curvature of H along the first eigenvectors of "
        "H_o, over the most there is. Right: every seed and step, and their means."
    )
    heading(made, "What the Gauss–Newton matrix knows of the top of the Hessian", note)
    return made


def _over_steps(axes: Axes, rows: Sequence[Row], name: str, steps: Sequence[int], series: int, label: str) -> None:
    middle, low, high = ([row[each] for row in rows] for each in (name, f"{name}_low", f"{name}_high"))
    line(axes, [steps.index(row["step"]) for row in rows], middle, low, high, series=series, label=label)


def _over_loss(axes: Axes, rows: Sequence[Row], series: int) -> None:
    """‖H_f‖/‖H‖ against the loss that is left."""
    colour, marker = SERIES[series % len(SERIES)], MARKERS[series % len(MARKERS)]
    for row in rows:
        axes.plot(row["repeats"]["loss"], row["repeats"]["share"], marker, color=colour, ms=4, alpha=0.55, mew=0)
    axes.plot([row["loss"] for row in rows], [row["share"] for row in rows], color=colour, lw=1.2)


def _dress(axes: Sequence[Axes], steps: Sequence[int], k: int) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for panel in axes[:2]:
        panel.axhline(1, color=PALETTE["ink"], lw=0.8)
        panel.set_xticks(range(len(steps)), [str(step) for step in steps])
        panel.set_xlabel("training step")
        panel.grid(axis="y", alpha=0.6)
    axes[0].set_title(r"Top eigenvalue: $\lambda_1(H_\mathrm{o})/\lambda_1(H)$")
    axes[1].set_title(rf"Curvature captured by {k} directions of $H_\mathrm{{o}}$")
    axes[2].set_title(r"Functional part: $\|H_\mathrm{f}\|/\|H\|$")
    axes[2].set(xscale="log", yscale="log", xlabel="loss on the sample")
    axes[2].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[2].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes[2].yaxis.set_minor_formatter(NullFormatter())
    axes[2].grid(alpha=0.6)
    axes[0].legend(loc="lower right")
