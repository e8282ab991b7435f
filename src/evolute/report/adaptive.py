"""Curvature as Adam sees it: λ_P = λ_max(P^-½ H P^-½), P = √v + ε, and how much of it is the choice of the data.

With w the top eigenvector and x = P^-½ w, λ_P = xᵀHx / xᵀPx, and no change of x changes that to first order. So one
more pass over the batches, along x alone, tells what λ_P would be without each of them, in H and in P.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evolute.engine.objective import Objective
from evolute.linop.convert import from_matvec
from evolute.linop.operator import LinearOperator
from evolute.report import solvers
from evolute.report.analysis import Adaptive
from evolute.report.clock import Stage
from evolute.report.samples import Batchwise, Derivatives, derivatives

EPSILON = 1e-8  # of Adam
FEWEST = 8  # batches for a mean square of gradients that is worth dividing by


def adaptive(
    H: LinearOperator, objective: Objective, batches: Batchwise, batch: float, generator: torch.Generator, stage: Stage
) -> Adaptive:
    """λ_P where v is the mean square of the gradient of `batch` samples, with its jackknife error over the batches."""
    scale = _divisors(batches, batch).rsqrt()
    seen = from_matvec(lambda v: scale * (H @ (scale * v)), space=H.space)
    found = solvers.eigenvalues(stage.watched(seen), 1, "largest", generator)
    error = jackknife(without_each(objective, batches, scale * found.vectors[:, -1].to(scale), batch))
    top, residual = float(found.values[-1]), float(found.residuals[-1])
    return Adaptive(top, residual, error, float(batch), len(batches.terms), found.converged)


def without_each(objective: Objective, batches: Batchwise, x: Tensor, batch: float) -> Tensor:
    """xᵀHx / xᵀPx of all data but one batch, for each of them."""
    along, across, terms = list[float](), list[float](), sum(batches.terms)
    for place, one in enumerate(derivatives(objective, x)):
        along.append(one.curvature)
        across.append(float((x.square() * _divisors(_rest(objective, batches, place, one), batch)).sum()))
    kept = torch.tensor([objective.normaliser(terms) * (1 - t / terms) for t in batches.terms], dtype=torch.float64)
    curvature = torch.tensor(along, dtype=torch.float64)
    return (curvature.sum() - curvature) / kept / torch.tensor(across, dtype=torch.float64)


def jackknife(left: Tensor) -> float:
    """Standard error of a number from its values without each of n parts: √((n−1)/n Σ (x_b − x̄)²).

    >>> x = torch.tensor([1.0, 2.0, 4.0])
    >>> round(jackknife((x.sum() - x) / 2), 4) == round(float(x.std()) / 3**0.5, 4)
    True
    """
    return math.sqrt(float((left - left.mean()).square().sum()) * (len(left) - 1) / len(left))


def _divisors(batches: Batchwise, batch: float) -> Tensor:
    """P = √v + ε."""
    return batches.mean_square(batch).sqrt() + EPSILON


def _rest(objective: Objective, batches: Batchwise, place: int, one: Derivatives) -> Batchwise:
    """All batches but one; what the objective is in the terms that are left."""
    n, terms, g = len(batches.terms), sum(batches.terms), one.gradient / one.terms
    share = 1 - one.terms / terms
    return Batchwise(
        (batches.gradient - one.gradient / objective.normaliser(terms)) / share,
        (n * batches.mean - g) / (n - 1),
        (n * batches.square - g.square()) / (n - 1),
        batches.curvature[:place] + batches.curvature[place + 1 :],
        batches.terms[:place] + batches.terms[place + 1 :],
        batches.samples,
    )
