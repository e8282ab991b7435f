"""Four pictures of sinks: scalar spectrum, condition number, GPT, and the density of its queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evolute.studies.figures import PALETTE, SERIES, SMALL, TEXT, heading, line, panels, ramp
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = ("untrained", "imposed", "trained")
WORDS = {"untrained": "untrained", "imposed": "imposed after training", "trained": "trained with it"}
DASHED = (0, (4, 1.5))
START = ({"sink": 0.0, "value": 1.0, "low": 1.0, "high": 1.0},)  # of what is relative to no sink


def draw(table: Sequence[Row]) -> Figure:
    """Scalar attention above, a GPT or a checkpoint below; what the table does not have is left out."""
    makers = {
        _scalar: [row for row in _eigenvalues(table) if row["point"] == "random"],
        _minimum: [row for row in _eigenvalues(table) if row["point"] != "random"],
        _norms: [row for row in table if row["quantity"] == "condition" and "size" in row],
        _bulk: _of_model(table, "bulk ratio", "whole ratio"),
        _ends: _of_model(table, "top ratio", "value ratio"),
        _density: _of_model(table, "density"),
    }
    there = [(make, rows) for make, rows in makers.items() if rows]
    columns = min(3, max(1, len(there)))
    lines = max(1, -(-len(there) // columns))
    made, axes = panels(columns, 4.2 * columns, 3.2 * lines + 0.7, rows=lines)
    for (make, rows), panel in zip(there, axes, strict=False):
        make(panel, rows)
    for panel in axes[len(there) :]:
        panel.set_visible(False)
    heading(
        made, "A sink of strength b on the first token", "Bands and bars: 95 % intervals of the means over repeats."
    )
    return made


def _eigenvalues(table: Sequence[Row]) -> list[Row]:
    return [row for row in table if row["subject"] == "scalar" and row["quantity"] in ("bulk", "top")]


def _of_model(table: Sequence[Row], *quantities: str) -> list[Row]:
    """Of the last subject that is not scalar: a checkpoint, if there is one."""
    rows = [row for row in table if row["subject"] != "scalar" and row["quantity"] in quantities]
    return _of(rows, subject=rows[-1]["subject"]) if rows else []


def _of(rows: Sequence[Row], **key: object) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in key.items())]


def _line(axes: Axes, rows: Sequence[Row], axis: str, series: int, label: str | None, **options: object) -> None:
    rows = sorted(rows, key=lambda row: row[axis])
    columns = ([row[name] for row in rows] for name in (axis, "value", "low", "high"))
    if rows:
        line(axes, *columns, series=series, label=label, **options)


# ---- scalar attention


def _scalar(axes: Axes, rows: Sequence[Row]) -> None:
    """Bulk and λ_max of random weights, by the size of the first token."""
    for i, first in enumerate(sorted({row["first"] for row in rows})):
        _line(axes, _of(rows, quantity="top", first=first), "sink", i, f"$|x_1|$ = {first:g}")
        _line(axes, _of(rows, quantity="bulk", first=first), "sink", i, None, linestyle=DASHED)
    for row in (row for row in rows if row["theory"] is not None):
        axes.plot(row["sink"], row["theory"], "o", mfc="none", mec=PALETTE["ink"], ms=11, zorder=5)
    _labelled(axes, "Scalar attention, random weights", "sink b", "eigenvalue")
    axes.set_yscale("log")
    _two_kinds(axes, r"$\lambda_{\max}$; rings: $2x_1^2$", r"bulk $|\ell_s|$")


def _minimum(axes: Axes, rows: Sequence[Row]) -> None:
    """The same at a minimum, where the bulk is what is left of the gradient."""
    for i, point in enumerate(POINTS):
        _line(axes, _of(rows, quantity="top", point=point), "sink", i, WORDS[point])
        _line(axes, _of(rows, quantity="bulk", point=point), "sink", i, None, linestyle=DASHED)
    _labelled(axes, "Scalar attention, at a minimum", "sink b", "eigenvalue")
    axes.set_yscale("log")
    _two_kinds(axes, r"$\lambda_{\max}$", r"bulk $|\ell_s|$", "center right")


def _norms(axes: Axes, rows: Sequence[Row]) -> None:
    """The condition number over the norm of queries and keys."""
    names = {"product": r"$w_Q\cdot w_K$ fixed", "direction": r"$w_Q\cdot w_K$ grows along"}
    for i, (point, label) in enumerate(names.items()):
        _line(axes, _of(rows, point=point), "size", i, label)
    fixed = sorted(_of(rows, point="product"), key=lambda row: row["size"])[-3:]
    if len(fixed) > 1:
        x = np.array([row["size"] for row in fixed])
        height = fixed[-1]["value"] * 8 * (x / x[-1]) ** 4
        axes.plot(x, height, color=PALETTE["ink"], ls=":", lw=1.4, label=r"$\propto \|w\|^4$")
    sizes = sorted({row["size"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.legend(fontsize=SMALL, frameon=False)
    _labelled(axes, "Scalar attention, no sink", r"$\|w_Q\| = \|w_K\|$", "condition number")


# ---- a GPT, or a checkpoint


def _bulk(axes: Axes, rows: Sequence[Row]) -> None:
    """Mean |λ| without the outermost, of the queries and keys and of all parameters, relative to no sink."""
    _relative(axes, rows, "bulk ratio", "whole ratio")
    axes.set_yscale("log")
    _labelled(axes, f"{_name(rows)}: bulk, mean |λ|", "sink b", "÷ without a sink")
    _two_kinds(axes, "queries and keys", "all parameters")


def _ends(axes: Axes, rows: Sequence[Row]) -> None:
    """λ_max of H and of its value block, relative to no sink."""
    _relative(axes, rows, "top ratio", "value ratio")
    _labelled(axes, f"{_name(rows)}: largest eigenvalue", "sink b", "÷ without a sink")
    _two_kinds(axes, "all parameters", "values", "upper left")


def _relative(axes: Axes, rows: Sequence[Row], solid: str, dashed: str) -> None:
    """Bands for the one quantity, bars for the other: two sets of bands could not be told apart."""
    axes.axhline(1, color=PALETTE["soft"], lw=0.8)
    for i, point in enumerate(POINTS):
        first, second = (
            sorted(_of(rows, quantity=q, point=point), key=lambda row: row["sink"]) for q in (solid, dashed)
        )
        _line(axes, [*(START if first else ()), *first], "sink", i, WORDS[point])
        for row in second:
            place = row["sink"] + 0.12 * (i - 1)
            axes.plot([place, place], [row["low"], row["high"]], color=SERIES[i], lw=1.2, alpha=0.7)
        here = [*(START if second else ()), *second]
        axes.plot([row["sink"] for row in here], [row["value"] for row in here], color=SERIES[i], lw=1.4, ls=DASHED)


def _density(axes: Axes, rows: Sequence[Row]) -> None:
    """Positive eigenvalues upwards, negative ones downwards, by their size; queries and keys, one repeat."""
    rows, colours = _of(rows, point="imposed"), ramp()
    for i, row in enumerate(rows):
        grid, share = np.array(row["points"]).T
        colour = colours(0.3 + 0.7 * i / max(1, len(rows) - 1))
        for sign in (1, -1):
            side = sign * grid > 0
            size, decade = np.abs(grid[side]), sign * share[side] * np.abs(grid[side]) * np.log(10)
            axes.plot(size, decade, color=colour, lw=1.5, label=f"b = {row['sink']:g}" if sign > 0 else None)
    axes.axhline(0, color=PALETTE["soft"], lw=0.8)
    axes.set_xscale("log")
    axes.set_xlim(1e-8, 1e2)
    axes.legend(fontsize=SMALL, frameon=False, loc="upper right")
    _labelled(axes, f"{_name(rows)}: queries and keys, imposed", "|λ|", "share per decade: λ < 0 down, λ > 0 up")


def _name(rows: Sequence[Row]) -> str:
    return str(rows[0]["subject"])


def _labelled(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=TEXT + 1)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y")


def _two_kinds(axes: Axes, solid: str, dashed: str, place: Any = "lower left") -> None:
    """A legend of colours, and below it one of dashes."""
    axes.plot([], [], color=PALETTE["ink"], lw=1.6, label=solid)
    axes.plot([], [], color=PALETTE["ink"], lw=1.6, ls=DASHED, label=dashed)
    axes.legend(fontsize=SMALL, loc=place, frameon=False)
