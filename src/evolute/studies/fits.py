"""Exponents and their uncertainty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evolute.studies.means import Mean, mean


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent of y = c x^a, by least squares of the logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 12)
    2.0
    """
    a, b = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    a = a - a.mean()
    return float((a * b).sum() / (a * a).sum())


def exponent(x: Sequence[float], repeats: Sequence[Sequence[float]]) -> Mean:
    """The mean of the exponents of the repeats, with Student's interval.

    >>> fit = exponent([1, 2, 4], [[1, 4, 16], [2, 8, 32]])
    >>> round(fit.value, 12), round(fit.high - fit.low, 12)
    (2.0, 0.0)
    """
    return mean([slope(x, y) for y in repeats])
