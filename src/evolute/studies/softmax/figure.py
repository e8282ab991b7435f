"""Blocks of queries, keys and values side by side for each map of the scores; powers by depth; spreads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evolute.studies.blocks import pair
from evolute.studies.figures import MARKERS, NAMES, PALETTE, SERIES, SMALL, TEXT, bare, heading, panels, ramp
from evolute.studies.softmax.blocks import OWN, POINTS
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = ("H_o", "H_f")
TASKS = ("addition", "english")
SHOWN = 5.0  # decades from pale to deep
STEP = len(OWN) + 0.7  # from one matrix of blocks to the next
CURVES = {  # of the panel of depths: what they are called, and how they are drawn
    ("linear", "plain"): ("identity, no residuals", SERIES[1], "-"),
    ("relu", "plain"): ("ReLU, no residuals", SERIES[2], "--"),
    ("softmax", "bidirectional"): ("softmax, no residuals, no causal order", SERIES[3], "-"),
    ("linear", "residual"): ("identity, residuals", SERIES[1], ":"),
    ("sigmoid", "plain"): ("sigmoid, no residuals", SERIES[5], "--"),
    ("softmax", "plain"): ("softmax, no residuals", SERIES[0], "-."),
}


def draw(table: Sequence[Row]) -> Figure:
    """Blocks on the left, powers and spreads on the right; what the table does not have is left out."""
    norms = [row for row in table if row["quantity"] == "norm" and row["of"] in PARTS]
    norms = [row for row in norms if row["task"] == norms[-1]["task"]]
    powers = [row for row in table if row["quantity"] == "power" and row["of"] == "H_o" and row["block"] == "Q"]
    spreads = [row for row in table if row["quantity"] == "spread" and row["of"] == "H_o"]
    ratios = {"width_ratios": [1.75, 1]} if norms else {}
    made, axes = panels(2 if norms else 1, 11.6 if norms else 5.0, 7.6, rows=2, **ratios)
    right = axes[1::2] if norms else axes
    for panel, point in zip(axes[::2], POINTS, strict=True) if norms else ():
        _blocks(panel, [row for row in norms if row["point"] == point], point)
    for panel, rows, make in zip(right, (powers, spreads), (_powers, _spreads), strict=True):
        make(panel, rows) if rows else panel.set_visible(False)
    note = "Numbers: decades below the largest block of the same model, means over repeats. Bars: 95 % intervals."
    heading(made, "What softmax does to the blocks of queries, keys and values", note if norms else "")
    return made


# ---- blocks as tiles


def _blocks(axes: Axes, rows: Sequence[Row], point: str) -> None:
    """A matrix of blocks for each kind (across) and each part of H (down)."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for across, kind in enumerate(kinds):
        norms = {(row["of"], row["block"]): row["value"] for row in rows if row["kind"] == kind}
        for down, part in enumerate(PARTS):
            _tiles(
                axes,
                {block: norm / max(norms.values()) for (of, block), norm in norms.items() if of == part},
                across,
                down,
            )
        axes.text(across * STEP + 1.5, -0.45, _kind(kind), ha="center", va="bottom", fontsize=TEXT)
    for down, part in enumerate(PARTS):
        axes.text(-0.95, down * STEP + 1.5, NAMES[part], ha="right", va="center", fontsize=TEXT + 2)
    axes.set_xlim(-1.6, len(kinds) * STEP - 0.5)
    axes.set_ylim(2 * STEP - 0.3, -1.0)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    bare(axes, "left", "bottom")
    when = "before training" if point == "untrained" else "after training"
    axes.set_title(f"GPT on {_task(rows[0]['task'])}, {when}", loc="left", fontsize=TEXT + 1)


def _tiles(axes: Axes, blocks: dict[str, float], across: int, down: int) -> None:
    from matplotlib.patches import Rectangle

    colours, left, top = ramp(), across * STEP, down * STEP
    for i, a in enumerate(OWN):
        for j, b in enumerate(OWN):
            size = blocks[pair(a, b) if i <= j else pair(b, a)]
            decades = math.log10(size) if size > 0 else -math.inf
            shade = 1 - min(SHOWN, -decades) / SHOWN
            colour, ink = (
                (colours(shade), "white" if shade > 0.5 else PALETTE["ink"]) if size else ("white", PALETTE["soft"])
            )
            axes.add_patch(Rectangle((left + j, top + i), 0.96, 0.96, fc=colour, ec=PALETTE["line"], lw=0.6))
            text = f"{abs(decades):.1f}" if size > 0 else "zero"
            axes.text(left + j + 0.48, top + i + 0.5, text, ha="center", va="center", fontsize=SMALL, color=ink)
        axes.text(left - 0.12, top + i + 0.5, a, ha="right", va="center", fontsize=SMALL)
        axes.text(left + i + 0.48, top + 3.02, a, ha="center", va="top", fontsize=SMALL)


def _kind(kind: str) -> str:
    return {"linear": "identity", "relu": "ReLU"}.get(kind, kind)


# ---- powers and spreads


def _powers(axes: Axes, rows: Sequence[Row]) -> None:
    """The power of σ of H_o(Q,Q) in the last layer, by depth."""
    for place, ((kind, wiring), (label, colour, dash)) in enumerate(CURVES.items()):
        here = sorted((r for r in rows if (r["kind"], r["wiring"]) == (kind, wiring)), key=lambda r: r["depth"])
        if here:
            x, y = [row["depth"] for row in here], [row["value"] for row in here]
            axes.plot(x, y, dash, color=colour, marker=MARKERS[place], ms=6, mfc="none", mew=1.4, lw=1.6, label=label)
            bars = [[row["value"] - row["low"] for row in here], [row["high"] - row["value"] for row in here]]
            axes.errorbar(x, y, bars, fmt="none", ecolor=colour, lw=1.2)
    values = sorted({round(row["theory"]) for row in rows})
    axes.set_yscale("log")
    axes.set_yticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_xticks(sorted({row["depth"] for row in rows}))
    axes.set_xlabel("depth")
    axes.set_ylabel(r"power of $\sigma$ in $\|H_\mathrm{o}(Q,Q)\|$")
    axes.set_title("Attention alone, small inputs of size σ", loc="left", fontsize=TEXT + 1)
    axes.grid(axis="y")
    axes.legend(fontsize=SMALL, frameon=False, loc="upper left")


def _spreads(axes: Axes, rows: Sequence[Row]) -> None:
    """Largest ÷ smallest of H_o(Q,Q), H_o(K,K), H_o(V,V), for each task, before training and after."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    series = list(dict.fromkeys((row["task"], row["point"]) for row in rows))
    for row in rows:
        i = series.index((row["task"], row["point"]))
        place = kinds.index(row["kind"]) + 0.17 * (i - (len(series) - 1) / 2)
        _dot(axes, [row["value"]], [place], series[i])
        axes.plot([row["low"], row["high"]], [place, place], color=_colour(series[i]), lw=1.8, alpha=0.7)
    for each in series:
        _dot(axes, [], [], each, f"{_task(each[0])}, {'before' if each[1] == 'untrained' else 'after'}")
    axes.set_xscale("log")
    axes.axvline(1, color=PALETTE["soft"], lw=0.8)
    axes.set_yticks(range(len(kinds)), [_kind(kind) for kind in kinds], fontsize=TEXT)
    axes.invert_yaxis()
    axes.set_xlabel(r"largest ÷ smallest of $\|H_\mathrm{o}\|$ for Q,Q, K,K and V,V")
    axes.set_title("GPT: spread between the blocks", loc="left", fontsize=TEXT + 1)
    axes.grid(axis="x")
    axes.legend(fontsize=SMALL, frameon=False, loc="lower right")


def _dot(axes: Axes, x: list[float], y: list[float], of: tuple[str, str], label: str | None = None) -> None:
    """Filled after training, open before; a colour for each task."""
    task, point = of
    fill = "white" if point == "untrained" else _colour(of)
    axes.plot(x, y, MARKERS[TASKS.index(task)], color=_colour(of), mfc=fill, ms=6, label=label, ls="none", zorder=3)


def _colour(of: tuple[str, str]) -> str:
    return SERIES[TASKS.index(of[0])]


def _task(task: str) -> str:
    return {"english": "English text"}.get(task, task)
