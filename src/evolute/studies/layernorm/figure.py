"""The figure of the study of norms: the law on the left; to the right, for each gain, sharpness and loss over depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evolute.studies.figures import MARKERS, PALETTE, SERIES, SMALL, heading, line, panels
from evolute.studies.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLACES = {"pre": 0, "post": 1, "rms": 2, "none": 3}  # of the palette
LABELS = {"none": "no norm", "post": "post-norm", "pre": "pre-norm", "rms": "pre-norm, RMS"}


def drawn(table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
    """From the saved table alone."""
    gains = sorted({row["gain"] for row in table if row["part"] in ("initial", "training")})
    made, axes = panels(1 + max(1, len(gains)), 3.4 * (1 + max(1, len(gains))), 6.2, rows=2)
    across = len(axes) // 2
    _law(axes[0], table, settings["eps"])
    _profile(axes[across], table, gains[-1:])
    for place, gain in enumerate(gains):
        _sharpness(axes[1 + place], [r for r in table if r["part"] == "initial" and r["gain"] == gain], gain)
        _losses(axes[across + 1 + place], [r for r in table if r["part"] == "training" and r["gain"] == gain], gain)
    heading(made, "A norm passes curvature on as 1/variance; what depth does is another matter", _note(settings))
    return made


def _note(settings: Mapping[str, Any]) -> str:
    training = f"{settings['optimizer']}, {settings['steps']} steps, the best of {len(settings['rates'])} rates"
    return (
        f"ViT on digits, width {settings['width']}; bands: 95 % over {settings['repeats']} seeds. Gain: factor on the "
        f"weights at first; √3 keeps the size of what passes. Trainings: {training}."
    )


def _law(axes: Axes, table: Sequence[Row], eps: float) -> None:
    for row in table:
        if row["part"] == "points":
            colour = SERIES[PLACES[row["norm"]]]
            x, y = zip(*row["points"], strict=True)
            axes.plot(x, y, ".", color=colour, ms=3, alpha=0.35, rasterized=True)
    curve = sorted((row["sigma"], row["share"]) for row in table if row["part"] == "curve" and row["norm"] == "layer")
    if curve:
        axes.plot(*zip(*curve, strict=True), color=PALETTE["ink"], lw=1.4)
        axes.annotate("one row", curve[len(curve) // 2], xytext=(8, 2), textcoords="offset points", fontsize=SMALL)
    axes.axvline(eps**0.5, color=PALETTE["soft"], lw=0.8, ls=":")
    axes.annotate(
        "√ε",
        (eps**0.5, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -9),
        textcoords="offset points",
        fontsize=SMALL,
    )
    axes.set(xscale="log", yscale="log", xlabel="σ, standard deviation of a row", ylabel="tr(J G J)/tr(G)")
    axes.set_title("What a norm passes on\n(dots: rows of trained models)")


def _profile(axes: Axes, table: Sequence[Row], gains: Sequence[float]) -> None:
    shown = ("pre", "post", "rms")
    rows = [row for row in table if row["part"] == "profile" and row["gain"] in gains and row["norm"] in shown]
    if not rows:
        axes.set_axis_off()  # an empty axis has no logarithms
        return
    deepest = max(row["depth"] for row in rows)
    for norm in shown:
        each = sorted((r for r in rows if r["norm"] == norm and r["depth"] == deepest), key=lambda r: r["layer"])
        _line(axes, norm, [r["layer"] + 1 for r in each], each, "trace")
    axes.set(yscale="log", xlabel="block", ylabel=r"tr $H_\mathrm{o}$ per sample, in its input")
    axes.set_title(f"Curvature that arrives at each block\n(depth {deepest}, {_gain(gains[0])})")


def _sharpness(axes: Axes, rows: Sequence[Row], gain: float) -> None:
    if not rows:
        axes.set_axis_off()
        return
    for norm in PLACES:
        each = sorted((row for row in rows if row["norm"] == norm), key=lambda row: row["depth"])
        _line(axes, norm, [row["depth"] for row in each], each, "sharpness")
    _depths(axes, rows)
    axes.set(yscale="log", ylabel="largest |λ| before training")
    axes.set_title(f"Sharpness, {_gain(gain)}")
    axes.legend(loc="upper left", frameon=False)


def _losses(axes: Axes, rows: Sequence[Row], gain: float) -> None:
    constant = max((row["constant"] for row in rows), default=1.0)
    top = 1.12 * constant
    for norm in PLACES:
        each = sorted((r for r in rows if r["norm"] == norm), key=lambda row: row["depth"])
        inside = [row for row in each if row["loss"] is not None and row["loss"] < top]
        _line(axes, norm, [row["depth"] for row in inside], inside, "loss")
        for row in each:
            if row not in inside:
                _above(axes, norm, row, top)
    axes.axhline(constant, color=PALETTE["soft"], lw=0.8, ls="--")
    axes.annotate(
        "constant prediction",
        (0.02, constant),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=SMALL,
    )
    _depths(axes, rows)
    axes.set(ylabel="loss at the end, best rate", ylim=(None, top))
    axes.set_title(f"What training makes of it, {_gain(gain)}")


def _above(axes: Axes, norm: str, row: Row, top: float) -> None:
    """A loss beyond the panel, as an arrow with its number."""
    colour = SERIES[PLACES[norm]]
    axes.plot(row["depth"], top, "^", color=colour, ms=6, clip_on=False)
    text = "diverged" if row["loss"] is None else f"{row['loss']:.3g}"
    axes.annotate(
        text,
        (row["depth"], top),
        xytext=(-5, -3),
        textcoords="offset points",
        fontsize=SMALL,
        ha="right",
        va="top",
        color=colour,
    )


def _line(axes: Axes, norm: str, x: Sequence[float], rows: Sequence[Row], name: str) -> None:
    place, values = PLACES[norm], [row[name] for row in rows]
    low, high = [row["ci_low"] for row in rows], [row["ci_high"] for row in rows]
    line(axes, x, values, low, high, color=SERIES[place], marker=MARKERS[place], label=LABELS[norm])


def _depths(axes: Axes, rows: Sequence[Row]) -> None:
    depths = sorted({row["depth"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, map(str, depths))
    axes.minorticks_off()
    axes.set_xlabel("depth, blocks")


def _gain(gain: float) -> str:
    return "gain √3" if abs(gain - 3**0.5) < 1e-3 else f"gain {gain:g}"
