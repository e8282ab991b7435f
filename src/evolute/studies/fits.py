"""Exponents and their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student


@dataclass(frozen=True)
class Exponent:
    """y ∝ x^value, with the interval that holds the mean of the repeats in `level` of all cases."""

    value: float
    low: float
    high: float
    level: float = 0.95


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent of y = c x^a, by least squares of the logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 12)
    2.0
    """
    a, b = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    a = a - a.mean()
    return float((a * b).sum() / (a * a).sum())


def exponent(x: Sequence[float], repeats: Sequence[Sequence[float]], level: float = 0.95) -> Exponent:
    """The mean of the exponents of the repeats, with Student's interval; one repeat has an infinite one.

    >>> fit = exponent([1, 2, 4], [[1, 4, 16], [2, 8, 32]])
    >>> round(fit.value, 12), round(fit.high - fit.low, 12)
    (2.0, 0.0)
    """
    slopes = np.array([slope(x, y) for y in repeats])
    n = len(slopes)
    reach = float(student.ppf((1 + level) / 2, n - 1) * slopes.std(ddof=1) / math.sqrt(n)) if n > 1 else math.inf
    middle = float(slopes.mean())
    return Exponent(middle, middle - reach, middle + reach, level)
