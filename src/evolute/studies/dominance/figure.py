"""The figure of dominance: the share of each group, and below how far Value and Key are ahead of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evolute.studies.figures import MARKERS, PALETTE, SERIES, SMALL, bare, dot, heading, panels, ramp
from evolute.studies.over_training import TITLES
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

LABELS = {
    "V": "Value",
    "K": "Key",
    "Q": "Query",
    "O": "Output",
    "W1": "MLP up",
    "W2": "MLP down",
    "embed": "embedding",
    "embed.position": "positions",
    "head": "head",
    "unembed": "head",
}
ORDER = ("Value", "Key", "Query", "Output", "MLP up", "MLP down", "embedding", "positions", "head")
NORMS = {"frobenius": "Frobenius", "spectral": "spectral", "entry": "per parameter", "relative": "relative change"}
SHOWN = {"V": 0, "K": 1}  # place in the palette
GAP = 1.2  # between norms, in rows


def draw(table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
    """From the saved table alone."""
    models = list(dict.fromkeys(row["model"] for row in table))
    steps = sorted({row["step"] for row in table})
    tall = 1.1 + 0.17 * len(NORMS) * (len(steps) + GAP)
    made, axes = panels(
        max(1, len(models)), 1.6 + 3.1 * max(1, len(models)), 2.9 + tall, rows=2, height_ratios=[2.5, tall]
    )
    for place, model in enumerate(models):
        here = [row for row in table if row["model"] == model]
        _shares(axes[place], [row for row in here if row["norm"] == "frobenius"], TITLES[model], first=place == 0)
        _leads(axes[len(models) + place], here, settings["rivals"], first=place == 0)
    _same_range(axes[len(models) :])
    note = (
        f"± and bars: 95 % over {settings['repeats']} seeds. Diagonal blocks of H, all layers together; what "
        "is missing to 100 % are norms."
    )
    heading(made, "Who carries the curvature, and whether Value and Key are ahead", note)
    return made


# ---- above


def _shares(axes: Axes, rows: Sequence[Row], title: str, *, first: bool) -> None:
    """Group × step: percent of the sum of the Frobenius norms of all groups."""
    steps, told = sorted({row["step"] for row in rows}), {_label(row): row for row in rows}
    names = [name for name in ORDER if name in told]
    table = [[_at(rows, name, step) for step in steps] for name in names]
    axes.imshow([[row["share"] for row in line] for line in table], cmap=ramp(), vmin=0, vmax=0.6, aspect="auto")
    for y, line in enumerate(table):
        for x, row in enumerate(line):
            reach = (row["share_high"] - row["share_low"]) / 2
            colour = "white" if row["share"] > 0.3 else PALETTE["ink"]
            text = f"{100 * row['share']:.0f} ± {100 * reach:.0f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=SMALL, color=colour)
    axes.set_xticks(range(len(steps)), [str(step) for step in steps])
    axes.set_yticks(range(len(names)), names if first else [])
    axes.set_xlabel("training step")
    axes.set_title(f"{title}: share of ‖H‖ in %" if first else title)
    bare(axes, "left", "bottom")


def _label(row: Row) -> str:
    group = str(row["group"])
    return LABELS.get(group, group)


def _at(rows: Sequence[Row], name: str, step: int) -> Row:
    return next(row for row in rows if _label(row) == name and row["step"] == step)


# ---- below


def _leads(axes: Axes, rows: Sequence[Row], rivals: Sequence[str], *, first: bool) -> None:
    """Norm and step, from the top: Value and Key over the largest of the rivals."""
    steps = sorted({row["step"] for row in rows})
    places = {(norm, step): i * (len(steps) + GAP) + j for i, norm in enumerate(NORMS) for j, step in enumerate(steps)}
    axes.axvline(1, color=PALETTE["ink"], lw=1)
    for letter, series in SHOWN.items():
        for row in rows:
            if row["group"] == letter and "lead" in row:
                place = places[row["norm"], row["step"]] + 0.3 * series - 0.15
                dot(axes, row["lead"], row["lead_low"], row["lead_high"], place, series=series)
    _names(axes, places, first=first)
    axes.set(xscale="log", xlabel=f"times the largest of {', '.join(rivals)}")
    if first:
        axes.legend(handles=_marks(), loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0)


def _names(axes: Axes, places: Mapping[tuple[str, int], float], *, first: bool) -> None:
    axes.set_yticks(list(places.values()), [f"step {step}" for _, step in places] if first else [])
    axes.set_ylim(max(places.values()) + 0.8, -GAP - 0.4)
    for norm, name in NORMS.items():
        top = min(place for (each, _), place in places.items() if each == norm)
        axes.annotate(
            name,
            (0, top - 0.75),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color=PALETTE["soft"],
        )
    axes.grid(axis="x", alpha=0.6)


def _marks() -> list[Line2D]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=SERIES[series], marker=MARKERS[series], lw=0, ms=5, label=LABELS[letter])
        for letter, series in SHOWN.items()
    ]


def _same_range(axes: Sequence[Axes]) -> None:
    low, high = min(each.get_xlim()[0] for each in axes), max(each.get_xlim()[1] for each in axes)
    for each in axes:
        each.set_xlim(max(low, 3e-3), min(high, 30))
