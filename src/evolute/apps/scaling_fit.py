"""One law through some cells: robust least squares in logarithms, what the residuals leave open, and how it would do
on cells that it has not seen.

Residuals log y − log ŷ enter by Huber's loss, whose corner is at 1.345 of their own robust spread: a cell that is far
off pulls as much as one that is a little off. Other data of the same kind are made from the fitted values and the
residuals, drawn anew and fitted again. These are widened by √(n/(n − p)), and by Student's t over the Gaussian quantile
of 95 %: the spread of few residuals is not known well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.special import ndtri, stdtrit

from evolute.apps.scaling_laws import Array, Law

CORNER = 1.345  # 95 % of the efficiency of least squares on Gaussian residuals
ROUNDING = 1e-9  # residuals below this are none
ROUNDS, MOST = 3, 30  # more than the first only while a wild run is let go, which halves the scale
ROUGH = 1e-5  # where only the spread of many matters


@dataclass(frozen=True, eq=False)
class Fitted:
    """θ on centred logarithms, its residuals, and their spread."""

    law: Law
    theta: Array
    residuals: Array
    scale: float

    @property
    def widened(self) -> Array:
        """As large as residuals would be that had not been fitted, about the middle of those within the corner.

        Their mean would move with a wild run, and every draw with it.
        """
        n, p = len(self.residuals), len(self.theta)
        corner = CORNER * max(self.scale, ROUNDING)
        middle = np.clip(self.residuals, -corner, corner).mean()
        few = float(stdtrit(max(1, n - p), 0.975) / ndtri(0.975))
        return (self.residuals - middle) * math.sqrt(n / max(1, n - p)) * few

    @property
    def aicc(self) -> float:
        """AICc = n log σ̂² + 2q + 2q(q + 1)/(n − q − 1), with q constants, σ one of them."""
        n, q = len(self.residuals), len(self.theta) + 1
        corner = CORNER * max(self.scale, ROUNDING)
        size = np.abs(self.residuals)
        square = np.where(size <= corner, size**2, 2 * corner * size - corner**2)
        return n * math.log(max(float(square.mean()), ROUNDING**2)) + 2 * q + 2 * q * (q + 1) / (n - q - 1)


def fitted(law: Law, logs: Array, y: Array, starts: Sequence[Array] | None = None) -> Fitted:
    """The best of all starts, first by least squares, then by Huber's loss, while its scale falls."""
    tried = [_solve(law, logs, y, start, None) for start in (law.starts(logs, y) if starts is None else starts)]
    theta = min(tried, key=lambda each: float(_residuals(law, each, logs, y) @ _residuals(law, each, logs, y)))
    scale = math.inf
    for turn in range(MOST):
        spread = _spread(_residuals(law, theta, logs, y), len(theta))
        if turn >= ROUNDS and spread > max(scale / 2, ROUNDING):
            break
        scale = spread
        theta = _solve(law, logs, y, theta, scale)
    return Fitted(law, theta, _residuals(law, theta, logs, y), scale)


def bootstrap(fit: Fitted, logs: Array, repeats: int, random: np.random.Generator) -> Array:
    """(repeats, p)."""
    values, noise, out = fit.law.log_value(fit.theta, logs), fit.widened, list[Array]()
    for _ in range(repeats):
        y = values + random.choice(noise, len(values))
        out.append(_solve(fit.law, logs, y, fit.theta, fit.scale, ROUGH))
    return np.stack(out)


def held_out(fit: Fitted, logs: Array, y: Array) -> float:
    """The root mean square of log y − log ŷ, each cell (all its repeats) predicted from the others."""
    cells, at = np.unique(logs, axis=0, return_inverse=True)
    misses = list[Array]()
    for cell in range(len(cells)):
        out = at.reshape(-1) == cell
        theta = _solve(fit.law, logs[~out], y[~out], fit.theta, fit.scale, ROUGH)
        misses.append(_residuals(fit.law, theta, logs[out], y[out]))
    return float(np.sqrt(np.square(np.concatenate(misses)).mean()))


def _residuals(law: Law, theta: Array, logs: Array, y: Array) -> Array:
    return y - law.log_value(theta, logs)


def _spread(residuals: Array, constants: int) -> float:
    n = len(residuals)
    return 1.4826 * float(np.median(np.abs(residuals))) * math.sqrt(n / max(1, n - constants))


def _solve(law: Law, logs: Array, y: Array, start: Array, scale: float | None, tol: float = 1e-9) -> Array:
    """θ from a start; plain least squares without a scale."""
    low, high = (np.asarray(each, float) for each in law.bounds(logs, y))
    inside = np.clip(start, low + 1e-9, high - 1e-9)
    options: dict[str, Any] = {} if scale is None else {"loss": "huber", "f_scale": CORNER * max(scale, ROUNDING)}
    found: Any = least_squares(
        lambda theta: law.log_value(theta, logs) - y,
        inside,
        jac=lambda theta: law.jacobian(theta, logs),  # pyright: ignore[reportArgumentType]
        bounds=(low, high),
        x_scale="jac",
        max_nfev=200,
        xtol=tol,
        ftol=tol,
        gtol=tol,
        **options,
    )
    return np.asarray(found.x, float)
