"""Trends under noise: means, slopes and exponential decays, with intervals that know of correlated residuals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtri, stdtrit

from evolute.krylov.storage import saveable

Array = NDArray[np.float64]
RATES = 60  # tried for the decay of a loss


@saveable
@dataclass(frozen=True)
class Interval:
    """A value, and where the true one is in so many of all cases as was asked for."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def around(value: float, error: float, freedom: float, level: float) -> Interval:
    """The interval value ± t·error."""
    reach = float(stdtrit(max(freedom, 1.0), (1 + level) / 2)) * error if error else 0.0
    return Interval(value, value - reach, value + reach)


def noise(values: Array) -> tuple[float, float]:
    """Standard deviation about a smooth trend, from second differences, and its degrees of freedom.

    E (x_{i−1} − 2x_i + x_{i+1})² = 6σ²; neighbours share terms, which leaves 18 (n−2)²/(35n−88) of n degrees.

    >>> noise(np.arange(10.0))[0]
    0.0
    """
    n, bends = len(values), np.diff(values, 2)
    return math.sqrt(float(np.square(bends).mean()) / 6), 18 * (n - 2) ** 2 / (35 * n - 88)


def difference(before: Array, after: Array, level: float) -> Interval:
    """Mean before minus mean after."""
    (s, f), (z, g) = noise(before), noise(after)
    error = math.hypot(s / math.sqrt(len(before)), z / math.sqrt(len(after)))
    return around(float(before.mean() - after.mean()), error, min(f, g), level)


def slope(x: Array, y: Array, level: float) -> Interval:
    """dy/dx by least squares; residuals may be correlated from one to the next.

    >>> str(slope(np.arange(5.0), 3 * np.arange(5.0), 0.95))
    '3 [3, 3]'
    """
    a, b = x - x.mean(), y - y.mean()
    value = float((a * b).sum() / (a * a).sum())
    rest = b - value * a
    own, freedom = _independent(rest, 2)
    rounding = 8 * np.finfo(float).eps * float(np.abs(y).max())
    deviation = math.sqrt(float(rest @ rest) / max(len(x) - 2, 1) * len(x) / own)
    error = deviation / math.sqrt(float((a * a).sum())) if deviation > rounding else 0.0
    return around(value, error, freedom, level)


def _independent(rest: Array, fitted: int) -> tuple[float, float]:
    """How many independent residuals these are worth, n (1−ρ)/(1+ρ), and the degrees of freedom that are left."""
    square = float(rest @ rest)
    rho = min(max(float(rest[1:] @ rest[:-1]) / square, 0.0), 0.99) if square > 0 else 0.0
    own = len(rest) * (1 - rho) / (1 + rho)
    return max(own, 1.0), max(own - fitted, 1.0)


@saveable
@dataclass(frozen=True)
class Decay:
    """L(t) = floor + height · e^(−rate (t − last)), one of those that fit; the floor is known within `reach`."""

    rate: float
    floor: float
    reach: float
    height: float


def decays(x: Array, y: Array, level: float) -> tuple[Decay, ...]:
    """The best one first, then all that are as good but for noise (profile of the sum of squares).

    None where no decay is better than a straight line or a constant.
    """
    span = float(x[-1] - x[0])
    rates = np.geomspace(0.2 / span, 40 / span, RATES)
    fits = [_fitted(x, y, rate, level) for rate in rates]
    squares = np.array([float(rest @ rest) for _, rest in fits])
    best = int(squares.argmin())
    straight, _ = _residual(x - x.mean(), y)
    freedom = _independent(fits[best][1], 3)[1]
    bound = 1 + float(fdtri(1, freedom, level)) / freedom
    floor = (64 * np.finfo(float).eps * float(np.abs(y).max())) ** 2 * len(y)
    if best == 0 or fits[best][0].height <= 0 or squares[best] * bound >= max(float(straight @ straight), floor):
        return ()
    close = [i for i in range(RATES) if squares[i] <= squares[best] * bound + floor and fits[i][0].height > 0]
    return (fits[best][0], *(fits[i][0] for i in close if i != best))


def decay_at(x: Array, y: Array, rate: float, level: float) -> Decay:
    """The one of this rate."""
    return _fitted(x, y, rate, level)[0]


def _fitted(x: Array, y: Array, rate: float, level: float) -> tuple[Decay, Array]:
    """Floor and height by least squares, and the residuals."""
    shape = np.exp(-rate * (x - x[-1]))
    shape, scale = shape / shape[0], shape[0]
    rest, height = _residual(shape, y)
    own, freedom = _independent(rest, 2)
    variance = float(rest @ rest) / max(len(x) - 2, 1) * len(x) / own
    across = float(np.square(shape - shape.mean()).sum())
    floor = float(y.mean() - height * shape.mean())
    error = math.sqrt(variance * (1 / len(x) + float(shape.mean()) ** 2 / across))
    reach = float(stdtrit(freedom, (1 + level) / 2)) * error
    return Decay(float(rate), floor, reach, float(height / scale)), rest


def _residual(shape: Array, y: Array) -> tuple[Array, float]:
    """What is left of y − a − b·shape, and b."""
    a, b = shape - shape.mean(), y - y.mean()
    height = float((a * b).sum() / (a * a).sum())
    return b - height * a, height
