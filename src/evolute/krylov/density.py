"""A smoothed density of eigenvalues, on a grid that is linear near zero and logarithmic far out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evolute.krylov.sums import Sums, jackknife

POINTS = 512
FINEST = 0.02  # of asinh(λ/λ₀)


def density(sums: Sums, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Grid λ, share of eigenvalues per unit of λ, and its standard error.

    Gaussian in s = asinh(λ/λ₀), as wide as the nodes of one probe are apart. λ₀ is the median |λ|.
    """
    unit = _unit(sums)
    s = torch.asinh(sums.nodes / unit)
    low, high = float(s.min()), float(s.max())
    width = max((high - low) / steps, FINEST)
    grid = torch.linspace(low - 4 * width, high + 4 * width, POINTS, dtype=s.dtype)
    kernel = torch.exp(-((grid - s[:, None]) / width).square() / 2) / (width * math.sqrt(2 * math.pi))
    share = sums.counts / sums.counts.sum(1, keepdim=True)
    each = share @ kernel / (unit * torch.cosh(grid))  # (P, points), ds/dλ = 1/(λ₀ cosh s)
    band = torch.zeros_like(grid) if sums.exact else jackknife(each, lambda mean: mean)
    return unit * torch.sinh(grid), each.mean(0), band.expand_as(grid)


def _unit(sums: Sums) -> float:
    sizes, order = sums.nodes.abs().sort()
    share = sums.counts.mean(0)[order].cumsum(0)
    median = float(sizes[int((share < share[-1] / 2).sum().clamp_max(len(sizes) - 1))])
    return max(median, sums.rounding * float(sizes[-1])) or 1.0
