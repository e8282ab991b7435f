"""The figure of the study of Taylor models: what a step misses, one descent, and the error of what is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evolute.studies.figures import MARKERS, PALETTE, SERIES, heading, line, panels
from evolute.studies.over_training import TITLES
from evolute.studies.study import Row
from evolute.studies.taylor.measure import DIRECTIONS, SEEN
from evolute.studies.taylor.table import SHARE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"quadratic": "quadratic model", "eigenvalue": "one eigenvalue", "fitted": f"fitted to {SEEN} losses"}
STYLES = {"quadratic": "-", "eigenvalue": "--", "fitted": ":"}
NEAR = 0.2


def drawn(table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
    """From the saved table alone."""
    made, axes = panels(3, 11.5, 4.1)
    _steps(axes[0], [row for row in table if row["kind"] == "share"])
    _example(axes[1], [row for row in table if row["kind"] == "example"])
    _times(axes[2], [row for row in table if row["kind"] == "error"])
    note = (
        f"Left and right: geometric means over {len(settings['models'])} models, {len(settings['points'])} points of "
        f"their training and {settings['repeats']} seeds; bands on the right: from the best case to the worst."
    )
    heading(made, "How far a quadratic model of the loss can be trusted", note)
    return made


def _steps(axes: Axes, rows: Sequence[Row]) -> None:
    for place, direction in enumerate(DIRECTIONS):
        mine = [row for row in rows if row["direction"] == direction]
        lengths = sorted({row["length"] for row in mine})
        options: dict[str, Any] = {"color": SERIES[place], "marker": MARKERS[place], "ms": 4, "lw": 1.6}
        means = [_mean([row["order2"] for row in mine if row["length"] == length]) for length in lengths]
        axes.plot(lengths, means, label=direction, **options)
        cubic = [_mean([row["order3"] for row in mine if row["length"] == length]) for length in lengths]
        axes.plot(lengths, cubic, color=SERIES[place], lw=1.2, ls=":")
    axes.axhline(SHARE, color=PALETTE["soft"], lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="length of the step / length of the weights", ylim=(1e-6, 30))
    axes.set_title(f"Share of a step that is missed (line: {SHARE:.0%})")
    axes.plot([], [], color=PALETTE["soft"], lw=1.2, ls=":", label="with third order")
    axes.legend(loc="lower right")


def _example(axes: Axes, rows: Sequence[Row]) -> None:
    """The middle of what was measured."""
    models, steps, factors = (sorted({row[key] for row in rows}) for key in ("model", "step", "factor"))
    if not rows:
        return
    model = "vit_digits" if "vit_digits" in models else models[0]
    step, factor = steps[len(steps) // 2], factors[len(factors) // 2]
    row = next(row for row in rows if (row["model"], row["step"], row["factor"]) == (model, step, factor))
    real = np.asarray(row["losses"])
    axes.plot(real, color=PALETTE["ink"], lw=2.2, label="real descent")
    for place, (method, name) in enumerate(NAMES.items()):
        predicted = real[0] + np.asarray(row[method])
        axes.plot(predicted[: len(real)], color=SERIES[place], lw=1.6, ls=STYLES[method], label=name)
    axes.set_title(f"{TITLES[model].split(',')[0]} at step {step}, rate {factor:g} · 2/λ$_{{max}}$")
    axes.set(xlabel="steps of gradient descent", ylabel="loss", ylim=(real.min() - 0.35 * np.ptp(real), None))
    axes.legend(loc="best")


def _times(axes: Axes, rows: Sequence[Row]) -> None:
    for place, factor in enumerate(sorted({row["factor"] for row in rows})):
        for method in ("quadratic", "eigenvalue"):
            mine = [row for row in rows if row["factor"] == factor and row["method"] == method]
            times = sorted({row["t"] for row in mine})
            each = [[row["error"] for row in mine if row["t"] == t] for t in times]
            means = [_mean(values) for values in each]
            if method == "quadratic":
                low, high = [min(values) for values in each], [max(values) for values in each]
                line(axes, times, means, low, high, series=place, label=f"rate {factor:g} · 2/λ$_{{max}}$")
            else:
                axes.plot(times, means, color=SERIES[place], lw=1.2, ls="--")
    axes.plot([], [], color=PALETTE["soft"], lw=1.2, ls="--", label="one eigenvalue")
    axes.axhline(NEAR, color=PALETTE["soft"], lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="steps of gradient descent", ylim=(1e-8, 20))
    axes.set_title(f"Relative error of the predicted change (line: {NEAR:.0%})")
    axes.legend(loc="lower right")


def _mean(values: Sequence[float]) -> float:
    """Geometric; nothing where a loss was not finite in all cases."""
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")
