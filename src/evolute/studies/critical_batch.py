"""The batch at which gradient noise costs as much as the step gains: B = tr(HΣ)/gᵀHg, with Σ of a single sample.

A step along the gradient g_B of B samples has E g_BᵀH g_B = gᵀHg + tr(HΣ)/B: below B the noise makes most of what is
lost to curvature, beyond it more samples hardly help. From F folds of m samples each, with gradients f_i and
K_ij = f_iᵀ H f_j: pairs i ≠ j have the mean gᵀHg, without bias, and the diagonal has tr(HΣ)/m on top of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B in samples, and the jackknife's error of it over the folds; not finite where gᵀHg is not above zero."""

    value: float
    error: float

    @property
    def determined(self) -> bool:
        """Larger than twice its error."""
        return math.isfinite(self.value) and math.isfinite(self.error) and self.value > 2 * self.error


def critical_batch(K: Tensor, size: int) -> Batch:
    """From K (F, F) of folds of `size` samples; with K_ij = f_i·f_j it is the simple batch, tr Σ/‖g‖².

    >>> critical_batch(torch.eye(4).double() + 1, 10)  # gᵀHg = 1, tr(HΣ)/10 = 1
    Batch(value=10.0, error=0.0)
    """
    F = len(K)
    whole = _ratio(K, size)
    without = [_ratio(K[kept][:, kept], size) for i in range(F) for kept in [[j for j in range(F) if j != i]]]
    if not math.isfinite(whole) or not all(map(math.isfinite, without)):
        return Batch(whole, math.inf)
    each = torch.tensor(without, dtype=torch.float64)
    return Batch(whole, math.sqrt(float((each - each.mean()).square().sum()) * (F - 1) / F))


def _ratio(K: Tensor, size: int) -> float:
    F = len(K)
    diagonal = float(K.diagonal().mean())
    pairs = (float(K.sum()) - F * diagonal) / (F * (F - 1))
    return size * (diagonal - pairs) / pairs if pairs > 0 else math.inf
