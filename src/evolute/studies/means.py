"""Means of repeats, with Student's interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from evolute.errors import StudyError

LEVEL = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean, and the interval that holds the true one in `LEVEL` of all cases."""

    value: float
    low: float
    high: float


def mean(values: Sequence[float]) -> Mean:
    """x̄ ± t s/√n, of independent repeats.

    >>> print(mean([1.0, 2.0, 3.0]))
    Mean(value=2.0, low=-0.48..., high=4.48...)
    """
    x = np.asarray(values, float)
    n = len(x)
    if n < 2:
        raise StudyError(f"an interval takes two repeats or more, got {n}.")
    reach = float(student.ppf((1 + LEVEL) / 2, n - 1) * x.std(ddof=1) / math.sqrt(n))
    middle = float(x.mean())
    return Mean(middle, middle - reach, middle + reach)


def geometric_mean(values: Sequence[float]) -> Mean:
    """The mean of the logarithms, as a factor again: for what is positive and differs by factors.

    >>> round(geometric_mean([1.0, 100.0]).value, 12)
    10.0
    """
    m = mean(np.log(np.asarray(values, float)).tolist())
    return Mean(math.exp(m.value), math.exp(m.low), math.exp(min(m.high, 700.0)))
