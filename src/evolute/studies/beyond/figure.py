"""The figure of beyond: three findings for each model, before and after training, and the slope of sharpness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evolute.studies.beyond.table import AT_LEAST
from evolute.studies.figures import MARKERS, PALETTE, SERIES, dot, heading, panels
from evolute.studies.over_training import TITLES
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

APART = 0.18  # of two points of one model
SHORT = {
    "gpt_english": "GPT",
    "ssm_english": "state space",
    "rwkv_english": "linear recurrence",
    "vit_digits": "ViT",
    "vit_contrastive": "contrastive",
    "vit_adversarial": "adversarial",
}


def draw(table: Sequence[Row], settings: Mapping[str, Any], limits: Mapping[str, float]) -> Figure:
    """From the saved table alone."""
    made, axes = panels(4, 12.5, 4.2)
    models = [model for model in settings["models"] if any(row["model"] == model for row in table)]
    count = table[0]["count"] if table else 0
    titles = {
        "outliers": ("Few outliers", rf"share of $\|H\|^2$ in {count} eigenvalues"),
        "functional": (r"A small $H_\mathrm{f}$", r"$\|H_\mathrm{f}\|/\|H\|$"),
        "concentrated": ("Curvature in all parts", r"share of $\|H\|^2$ in the largest"),
    }
    for place, (panel, (name, (title, measure))) in enumerate(zip(axes, titles.items(), strict=False)):
        _finding(panel, table, models, name, limits[name])
        panel.set(title=title, xlabel=measure)
        panel.set_yticks(range(len(models)), [TITLES[model] for model in models] if place == 0 else [])
    made.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncols=2, handletextpad=0.1)
    _slopes(axes[3], table, models)
    note = (
        f"Means and 95 % intervals over {settings['repeats']} seeds. Shaded: where a finding holds. Right: change of "
        r"$\ln\lambda_\mathrm{max}$ per relative length of the way of training, all seeds and points."
    )
    heading(made, "Hessians beyond Transformers and labels", note)
    return made


def _finding(axes: Axes, table: Sequence[Row], models: Sequence[str], name: str, limit: float) -> None:
    last = max((row["step"] for row in table), default=0)
    right = 1.2 if name == "functional" else 1.0  # of two matrices that add up, one can be larger than the sum
    axes.axvspan(*((limit, right) if name in AT_LEAST else (0.0, limit)), color=PALETTE["teal"], alpha=0.1, lw=0)
    for row in sorted((row for row in table if row["step"] in (0, last)), key=lambda row: row["step"]):
        trained, place = row["step"] == last, models.index(row["model"])
        more: dict[str, Any] = {} if trained else {"mfc": "white"}
        label = f"step {row['step']}" if place == 0 else None
        shift = APART if trained else -APART
        dot(
            axes,
            row[name],
            row[f"{name}_low"],
            row[f"{name}_high"],
            place + shift,
            series=int(not trained),
            label=label,
            **more,
        )
    axes.set(xlim=(0, right), ylim=(len(models) - 0.4, -0.6))
    axes.grid(axis="x", alpha=0.6)


def _slopes(axes: Axes, table: Sequence[Row], models: Sequence[str]) -> None:
    """By third derivatives, against finite differences."""
    values = [abs(value) for row in table for pair in row["slopes"] for value in pair]
    reach = 1.5 * max(values, default=1.0)
    axes.plot([-reach, reach], [-reach, reach], color=PALETTE["soft"], lw=0.8)
    for series, model in enumerate(models):
        pairs = [pair for row in table if row["model"] == model for pair in row["slopes"]]
        colour, marker = SERIES[series % len(SERIES)], MARKERS[series % len(MARKERS)]
        axes.plot(
            *zip(*pairs, strict=True),
            marker,
            color=colour,
            ms=5,
            alpha=0.8,
            mew=0,
            label=SHORT.get(model, TITLES[model]),
        )
    for scale in (axes.set_xscale, axes.set_yscale):
        scale("symlog", linthresh=1.0)
    ticks = [t for t in (-100, -10, -1, 0, 1, 10, 100) if abs(t) <= reach]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set(title=r"Slope of $\lambda_\mathrm{max}$ along training", xlim=(-reach, reach), ylim=(-reach, reach))
    axes.set(xlabel="by a third derivative", ylabel="by a finite difference")
    axes.legend(fontsize=8, loc="lower right", handletextpad=0.1, borderaxespad=0.1)
