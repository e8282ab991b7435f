"""Means of independent samples, and their errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.krylov.results import Estimate
from evolute.krylov.work import Work


def known_exactly(work: Work, value: float, size: float, method: str) -> Estimate:
    """A number that nothing was left to chance for; `size` is that of the terms which were summed up."""
    return Estimate(
        estimate=value,
        standard_error=0.0,
        samples=0,
        solver_error=work.rounding * size,
        products=work.products,
        status="exact",
        method=method,
        provenance=work.provenance(random=False),
    )


@dataclass
class Moments:
    """Mean and sum of squared deviations of many numbers at once, batch after batch (Chan, Golub, LeVeque)."""

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def none(cls, like: Tensor) -> Moments:
        return cls(0, torch.zeros_like(like), torch.zeros_like(like))

    def add(self, rows: Tensor) -> None:
        """(k, n): k more samples of each of n numbers."""
        k, mean = len(rows), rows.mean(0)
        total, shift = self.count + k, mean - self.mean
        self.squares += (rows - mean).square().sum(0) + shift.square() * (self.count * k / total)
        self.mean += shift * (k / total)
        self.count = total

    @property
    def error(self) -> Tensor:
        """Standard error of the mean."""
        if self.count < 2:
            return torch.full_like(self.mean, torch.inf)
        return (self.squares / (self.count * (self.count - 1))).sqrt()
