"""Spectral sums Σ f(λ), and numbers computed from several of them, with jackknife errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.krylov.quadrature import Reading
from evolute.krylov.results import Quantity

Function = Callable[[Tensor], Tensor]  # f, on a vector of λ
Number = Callable[[Tensor], Tensor]  # (…, sums) → (…), a number of mean sums


@dataclass(frozen=True)
class Sums:
    """Nodes (M,) and, for each of P probes, how many eigenvalues it sees at each (P, M); `exact`: all are known.

    `plain` sets no settled ones apart; `coarse` is the same with fewer steps.
    """

    nodes: Tensor
    counts: Tensor
    plain: Tensor
    coarse: Tensor
    coarse_counts: Tensor
    exact: bool
    rounding: float

    @classmethod
    def of(cls, readings: list[Reading], rounding: float) -> Sums:
        """Several runs beside one another: each probe has weight at the nodes of its own run only."""
        counts, plain, coarse = (
            torch.block_diag(*parts)
            for parts in zip(*((each.counts, each.plain, each.coarse_counts) for each in readings), strict=True)
        )
        nodes, coarse_nodes = (
            torch.cat([each.nodes for each in readings]),
            torch.cat([each.coarse for each in readings]),
        )
        return cls(nodes, counts, plain, coarse_nodes, coarse, False, rounding)

    @classmethod
    def all(cls, values: Tensor, rounding: float) -> Sums:
        """Every eigenvalue, once."""
        ones = torch.ones(1, len(values), dtype=values.dtype)
        return cls(values, ones, ones, values, ones, True, rounding)

    def quantity(self, number: Number, *functions: Function, positive: bool = False) -> Quantity:
        """number(Σ f, Σ g, …), its jackknife error over the probes, and what the length of the run decides."""
        samples = torch.stack([self.counts @ f(self.nodes) for f in functions], 1)  # (P, functions)
        estimate = number(samples.mean(0))
        error = torch.zeros(()) if self.exact else jackknife(samples, number)
        solver = self._solver(number, functions) + self.rounding * self._size(number, functions)
        return Quantity(
            estimate=float(estimate),
            standard_error=float(error),
            samples=0 if self.exact else len(samples),
            solver_error=solver,
            positive=positive,
        )

    def _size(self, number: Number, functions: tuple[Function, ...]) -> float:
        """The number, were nothing to cancel in the sums."""
        return float(number(torch.stack([(self.counts @ f(self.nodes).abs()).mean() for f in functions])).abs())

    def _solver(self, number: Number, functions: tuple[Function, ...]) -> float:
        fine = torch.stack([(self.plain @ f(self.nodes)).mean() for f in functions])
        coarse = torch.stack([(self.coarse_counts @ f(self.coarse)).mean() for f in functions])
        return float((number(fine) - number(coarse)).abs())


def jackknife(samples: Tensor, number: Number) -> Tensor:
    """Standard error of number(mean of the samples): √((P−1)/P Σ (leave one out − their mean)²); (P, k) → ().

    >>> x = torch.tensor([[1.0], [2.0], [4.0]])
    >>> torch.allclose(jackknife(x, lambda mean: mean[..., 0]), x.std() / 3**0.5)
    True
    """
    count = len(samples)
    if count < 2:
        return torch.tensor(torch.inf)
    without = number((samples.sum(0) - samples) / (count - 1))
    return (without - without.mean(0)).square().sum(0).mul((count - 1) / count).sqrt()
