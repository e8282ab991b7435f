"""Batch by batch: the gradient, and the curvature along one direction; what other data would have changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from evolute.apps.directional import of_batch
from evolute.engine.objective import Objective

FEWEST = 4  # batches that say something about how batches differ


@dataclass(frozen=True, eq=False)
class Batchwise:
    """Of n batches with t_b terms: mean and mean square of their gradients, and vᵀH_b v of each."""

    gradient: Tensor  # (P,) of the objective
    mean: Tensor  # (P,) of the batches, each counted once
    square: Tensor  # (P,)
    curvature: tuple[float, ...]
    terms: tuple[float, ...]
    samples: float

    @property
    def variance(self) -> Tensor:
        """Of the gradient of a batch, per coordinate."""
        n = len(self.terms)
        return (self.square - self.mean.square()).clamp_min(0) * n / max(n - 1, 1)

    def mean_square(self, batch: float) -> Tensor:
        """ḡ² + Var/b: of the gradient of a batch of so many samples, per coordinate."""
        return self.gradient.square() + self.variance * (self.samples / batch)

    @property
    def gradient_error(self) -> float | None:
        """How far the gradient of other data would be from this one."""
        n = len(self.terms)
        return math.sqrt(float(self.variance.sum()) / n) if n >= FEWEST else None

    @property
    def curvature_error(self) -> float | None:
        """Standard error of Σ t_b c_b / Σ t_b over the choice of data."""
        n, total = len(self.terms), sum(self.terms)
        if n < FEWEST:
            return None
        mean = sum(t * c for t, c in zip(self.terms, self.curvature, strict=True)) / total
        scatter = sum((t * (c - mean)) ** 2 for t, c in zip(self.terms, self.curvature, strict=True))
        return math.sqrt(n / (n - 1) * scatter) / total


@dataclass(frozen=True, eq=False)
class Derivatives:
    """Of one batch: ∇ of the sum of its losses, vᵀ∇²v of that sum, how many terms and samples."""

    gradient: Tensor
    curvature: float
    terms: float
    samples: int


def derivatives(objective: Objective, direction: Tensor) -> Iterator[Derivatives]:
    """Of every batch that has terms, one after the other."""
    with objective.running():
        for each in objective.evaluate():
            if each.terms:
                g, (_, along) = of_batch(objective, each, [direction] * 2)
                yield Derivatives(g, along, each.terms, _samples(each.batch))


def batchwise(objective: Objective, direction: Tensor) -> Batchwise:
    """One pass over the data; `direction` has length 1."""
    gradient, mean, square = (torch.zeros_like(direction) for _ in range(3))
    curvature, terms, samples = list[float](), list[float](), list[int]()
    for each in derivatives(objective, direction):
        gradient += each.gradient
        mean += each.gradient / each.terms
        square += (each.gradient / each.terms).square()
        curvature.append(each.curvature / each.terms)
        terms.append(each.terms)
        samples.append(each.samples)
    n, total = len(terms), objective.normaliser(sum(terms))
    return Batchwise(gradient / total, mean / n, square / n, tuple(curvature), tuple(terms), sum(samples) / n)


def _samples(batch: Any) -> int:
    """How many samples: the length of the first tensor."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
