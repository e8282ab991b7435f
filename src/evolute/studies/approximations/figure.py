"""The figure of the study of approximations: distance and angle of single blocks, and what the steps gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evolute.studies.approximations.table import NAMES, WHOLE
from evolute.studies.figures import MARKERS, PALETTE, SERIES, heading, panels
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODELS = {
    "vit_digits": "ViT, digits",
    "vit_fashion": "ViT, Fashion-MNIST",
    "gpt_addition": "GPT, addition",
    "gpt_english": "GPT, English",
    "mlp_digits": "MLP, digits",
    "mlp_fashion": "MLP, Fashion-MNIST",
}
FILLS: dict[str, dict[str, Any]] = {"initialisation": {"mfc": "white"}, "early": {"fillstyle": "left"}, "trained": {}}


def drawn(table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
    """From the saved table alone; against H_o."""
    rows = [row for row in table if row.get("reference") == "H_o"]
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    made, (shape, angle, gain) = panels(3, 11.0, 5.6, sharey=True)
    single = [row for row in rows if row["part"] == "average"]
    _panel(shape, [row for row in single if row["measure"] == "shape"], models)
    _panel(angle, [row for row in single if row["measure"] == "cosine"], models)
    together = [r for r in rows if r["part"] == "mean" and r["group"] == WHOLE and r["measure"] == "share"]
    _panel(gain, together, models)
    names = list(NAMES.values())[1:]
    shape.set_yticks(range(len(names)), names)
    shape.set_ylim(len(names) - 0.4, -0.6)
    shape.set(
        title="Single blocks: what is wrong\nbut for the size",
        xlabel=r"√(1 − cos²) of $A$ and $H_\mathrm{o}$",
        xlim=(0, 1.02),
    )
    angle.set(title="Single blocks: angle\nto the true damped step", xlabel="cosine", xlim=(0, 1.02))
    gain.set(title="All weights at once:\nfall of the loss", xlabel="in units of the true step's")
    gain.axvline(1.0, color=PALETTE["soft"], lw=0.8, ls="--")
    heading(made, "What optimisers put in the place of the curvature, beside the curvature", _note(settings))
    _legend(made, models, settings["stages"])
    return made


def _note(settings: Mapping[str, Any]) -> str:
    seeds, damping = settings["repeats"], settings["damping"]
    steps = (
        f"Steps (|A| + δ)⁻¹ g: angles at δ = {damping:g} · mean |λ|; falls at the best δ and length that were tried."
    )
    return f"Lines: 95 % over {seeds} seeds. {steps}"


def _panel(axes: Axes, rows: Sequence[Row], models: Sequence[str]) -> None:
    order = list(NAMES)[1:]
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    for row in rows:
        if row["approximation"] in order:
            place = models.index(row["model"]) * len(stages) + stages.index(row["stage"])
            shift = (place - (len(models) * len(stages) - 1) / 2) * 0.8 / (len(models) * len(stages))
            _mark(axes, row, order.index(row["approximation"]) + shift, models.index(row["model"]))
    for between in range(1, len(order)):
        axes.axhline(between - 0.5, color=PALETTE["line"], lw=0.7)
    axes.grid(axis="x")


def _mark(axes: Axes, row: Row, place: float, series: int) -> None:
    colour = SERIES[series % len(SERIES)]
    axes.plot([row["ci_low"], row["ci_high"]], [place, place], color=colour, lw=1.3, alpha=0.6)
    marker = MARKERS[series % len(MARKERS)]
    axes.plot(row["value"], place, marker, color=colour, ms=4.5, mew=1.1, **FILLS[row["stage"]])


def _legend(figure: Figure, models: Sequence[str], stages: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    def handle(colour: str, marker: str, label: str, style: dict[str, Any]) -> Line2D:
        return Line2D([], [], color=colour, marker=marker, ls="", ms=5, label=label, **style)

    handles = [handle(SERIES[i], MARKERS[i], MODELS[model], {}) for i, model in enumerate(models)]
    handles += [handle(PALETTE["soft"], "o", stage, FILLS[stage]) for stage in stages]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
