"""Axes that span powers of ten on both sides of zero, with ticks as people write them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from evolute.report.numbers import MINUS, short, ten


def power(value: float) -> str:
    """A tick.

    >>> power(1000.0), power(-0.1), power(0.0), power(1.0)
    ('10³', '−10⁻¹', '0', '1')
    """
    if value == 0:
        return "0"
    exponent = round(math.log10(abs(value)))
    text = {0: "1", 1: "10", -1: "10⁻¹"}.get(exponent, ten(exponent))
    return f"{MINUS if value < 0 else ''}{text}"


def log_ticks(axes: Axes, which: str) -> None:
    """Powers of ten, no minor ticks."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10, numticks=7))
    axis.set_minor_locator(NullLocator())
    low, high = axis.get_view_interval()
    if high / low < 30:
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=7))
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value, 1)))
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))


def symmetric(axes: Axes, which: str, threshold: float, low: float, high: float, most: int = 9) -> None:
    """Linear within ±threshold, logarithmic outside."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=threshold, linscale=0.6)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(signed_powers(threshold, low, high, most)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))


def signed_powers(threshold: float, low: float, high: float, most: int) -> list[float]:
    """0 and powers of ten on either side, evenly thinned so that no more than about `most` are left.

    >>> signed_powers(1.0, -5.0, 200.0, 9)
    [-1.0, 0.0, 1.0, 10.0, 100.0]
    """
    first = round(math.log10(threshold))
    up, down = _exponents(first, high), _exponents(first, -low)
    stride = max(1, math.ceil((len(up) + len(down)) / most))
    return [-(10.0**e) for e in reversed(down[::stride])] + [0.0] + [10.0**e for e in up[::stride]]


def _exponents(first: int, high: float) -> list[int]:
    return list(range(first, math.floor(math.log10(high) + 1e-9) + 1)) if high > 0 else []


def threshold_for(values: Iterable[float], decades: int = 4) -> float:
    """A power of ten, so many decades below the largest."""
    largest = max((abs(value) for value in values), default=1.0) or 1.0
    return 10.0 ** (math.floor(math.log10(largest)) - decades + 1)


def positive_range(values: Sequence[float], room: float = 1.6) -> tuple[float, float]:
    """Of the positive ones, with some room on either side."""
    kept = [value for value in values if value > 0] or [1.0]
    return min(kept) / room, max(kept) * room
