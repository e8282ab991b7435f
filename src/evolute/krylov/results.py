"""What an estimator answers: a number with its error, how it was found, and how much that cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from scipy.special import ndtr, ndtri, stdtrit
from torch import Tensor

from evolute.krylov.provenance import Provenance
from evolute.krylov.storage import load_result, save_result, saveable

TIGHT = 1 / (4 * float(ndtr(-math.sqrt(2))))  # c = 3.178…: two fair coins, which reach √2 in one case of four


def quantile(level: float, samples: int) -> float:
    """How many standard errors an interval of this level reaches to either side, with so few samples (Student's t).

    >>> round(quantile(0.95, 8), 3), quantile(0.95, 1)
    (2.365, inf)
    """
    _check(level)
    return float(stdtrit(samples - 1, (1 + level) / 2)) if samples > 1 else math.inf


def symmetric_quantile(level: float, samples: int) -> float:
    """The same, proved, for samples that fall as often above the truth as equally far below it, in whatever shape.

    >>> round(symmetric_quantile(0.99, 64), 3), round(quantile(0.99, 64), 3), symmetric_quantile(0.99, 8)
    (3.153, 2.656, inf)

    Given their sizes, the signs of the deviations y are fair coins, so P(|Σy| > x √Σy²) ≤ 2c P(Z > x) for a Gaussian Z
    (Bentkus and Dzindzalieta 2015); solved for the mean. Eight coins fall alike in more than one case of a hundred: no
    interval of 0.99 can be read from fewer than nine samples.
    """
    _check(level)
    x = -float(ndtri((1 - level) / (2 * TIGHT)))
    return x * math.sqrt((samples - 1) / (samples - x * x)) if samples > x * x else math.inf


def _check(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"expected a level between 0 and 1, such as 0.99, got {level}.")


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Quantity:
    """x ± standard error, from so many independent samples; `solver_error` is what no sampling would take away.

    An exact number has no samples and the standard error 0; what is left is rounding, in `solver_error`. A `positive`
    number, such as a norm, has an interval that is as wide in its logarithm on either side.

    >>> from evolute.krylov.results import Quantity
    >>> print(Quantity(estimate=3.0, standard_error=0.1, samples=8, solver_error=0.0))
    3 ± 0.1
    """

    estimate: float
    standard_error: float
    samples: int
    solver_error: float
    positive: bool = False

    def interval(self, level: float = 0.99) -> tuple[float, float]:
        """Where the truth is, in so many of all cases: Student's t with one sample less."""
        reach, extra = _reach(self.standard_error, level, self.samples), self.solver_error
        if self.positive and self.estimate > 0:
            factor = math.exp(min(reach / self.estimate, 700.0))
            return self.estimate / factor - extra, self.estimate * factor + extra
        return self.estimate - reach - extra, self.estimate + reach + extra

    @property
    def exact(self) -> bool:
        return self.samples == 0 and self.standard_error == 0

    def __float__(self) -> float:
        return self.estimate

    def __str__(self) -> str:
        return f"{self.estimate:.6g} (exact)" if self.exact else f"{self.estimate:.6g} ± {self.standard_error:.2g}"


def _reach(error: float, level: float, samples: int) -> float:
    return quantile(level, samples) * error if error else 0.0


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """What all answers have: how many products they took, how the work ended, and where they come from.

    `status` is "exact", "converged", "not converged", "sampled" or "interrupted".
    """

    products: int
    status: str
    method: str
    provenance: Provenance

    def save(self, path: str | Path) -> Path:
        """JSON, with the arrays in a safetensors file beside it."""
        return save_result(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote."""
        return load_result(path, cls)

    @property
    def interrupted(self) -> bool:
        return self.status == "interrupted"

    def _footer(self) -> str:
        return f"{self.method}: {self.products} products, {self.status}"


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Estimate(Quantity, Result):
    """One number with its standard error."""

    def __str__(self) -> str:
        return f"{super().__str__()}  [{self._footer()}]"


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Estimates(Result):
    """A vector of numbers, each with its standard error, from samples that scatter symmetrically about each of them."""

    estimate: Tensor
    standard_error: Tensor
    samples: int
    solver_error: float

    def interval(self, level: float = 0.99) -> tuple[Tensor, Tensor]:
        """Where each truth is, in at least so many of all cases, whatever the operator: `symmetric_quantile`."""
        reach = self._reach(level) + self.solver_error
        return self.estimate - reach, self.estimate + reach

    def _reach(self, level: float) -> Tensor:
        """Too few samples may agree by chance, so that then even an error of 0 says nothing."""
        wide = symmetric_quantile(level, self.samples) if self.samples else 0.0
        return wide * self.standard_error if math.isfinite(wide) else torch.full_like(self.standard_error, wide)

    def __str__(self) -> str:
        size, error = self.estimate.norm(), self.standard_error.norm()
        return f"{len(self.estimate)} numbers, ‖x‖ = {size:.6g}, ‖error‖ = {error:.2g}  [{self._footer()}]"
