"""Learning rates over time, as a factor at each fraction of the way through training."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[float], float]
WARM = 0.1  # the fraction of the way in which a warmup rises


def constant(fraction: float) -> float:
    """1."""
    return 1.0


def cosine(fraction: float) -> float:
    """(1 + cos πp)/2, from 1 down to 0.

    >>> [round(cosine(p), 3) for p in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    return (1 + math.cos(math.pi * fraction)) / 2


def warmup(fraction: float) -> float:
    """Up over the first tenth, then 1.

    >>> warmup(0.05), warmup(0.5)
    (0.5, 1.0)
    """
    return min(1.0, fraction / WARM)


def warmup_cosine(fraction: float) -> float:
    """Up over the first tenth, then (1 + cos πp)/2 over the rest.

    >>> [round(warmup_cosine(p), 3) for p in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    return warmup(fraction) if fraction < WARM else cosine((fraction - WARM) / (1 - WARM))


SCHEDULES: dict[str, Schedule] = {
    "constant": constant,
    "cosine": cosine,
    "warmup": warmup,
    "warmup_cosine": warmup_cosine,
}
