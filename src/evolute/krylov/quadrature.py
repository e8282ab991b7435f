"""Stochastic Lanczos quadrature: what a block of random vectors says about tr f(A), for every f at once.

Vectors v_i of uniform direction are the first block of a Lanczos run. With Ritz pairs (θ_j, y_j), v_i f(A) v_i is
Σ_j (v_i·y_j)² f(θ_j), exact for polynomials of degree 2·steps − 1. Eigenvectors that have settled are no longer left to
chance: each counts as the one eigenvalue that it is, and the rest of v_i is a random vector of the complement.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from evolute.krylov.lanczos import Lanczos

SETTLED = 1e-3  # residual ÷ distance to the neighbours, from which a Ritz vector counts as an eigenvector


@dataclass(frozen=True)
class Reading:
    """One run: `counts[i, j]`: how many eigenvalues probe i sees at node j; `plain` without the settled ones set apart.

    `coarse` and `coarse_counts` are those of the first three quarters of the run: what differs, its length decides.
    """

    nodes: Tensor
    bounds: Tensor
    counts: Tensor
    plain: Tensor
    coarse: Tensor
    coarse_counts: Tensor
    settled: Tensor


def read(lanczos: Lanczos, coordinates: Tensor, n: int, margin: float) -> Reading:
    """`coordinates` (P, b) of the probes in the first b vectors of the basis."""
    ritz = lanczos.ritz()
    weights = _weights(coordinates, ritz.coordinates)
    settled = _settled(ritz.values, ritz.bounds, coordinates.shape[1], margin)
    short = max(coordinates.shape[1], 3 * lanczos.m // 4)
    coarse, U = torch.linalg.eigh(lanczos.projected[:short, :short])
    counts = _counted(weights, settled, n)
    coarse_counts = n * _weights(coordinates, U)
    return Reading(ritz.values, ritz.bounds, counts, n * weights, coarse, coarse_counts, settled)


def _weights(coordinates: Tensor, U: Tensor) -> Tensor:
    """(P, m): (v_i·y_j)² / ‖v_i‖²."""
    b = min(coordinates.shape[1], len(U))
    squares = (coordinates[:, :b] @ U[:b]).square()
    return squares / squares.sum(1, keepdim=True)


def _counted(weights: Tensor, settled: Tensor, n: int) -> Tensor:
    """Settled nodes count 1; a uniform direction of the complement, of dimension n − c, says the rest."""
    rest = weights.masked_fill(settled, 0)
    total = rest.sum(1, keepdim=True)
    if bool((total <= 0).any()):
        return n * weights
    return torch.where(settled, 1.0, (n - int(settled.sum())) * rest / total)


def _settled(values: Tensor, bounds: Tensor, met: int, margin: float) -> Tensor:
    """Well separated, and with fewer copies than there were random vectors: no copy is hidden."""
    settled = torch.zeros(len(values), dtype=torch.bool)
    for start, stop in clusters(values, bounds, margin):
        gaps = [_gap(values, bounds, inside, beyond) for inside, beyond in ((start, start - 1), (stop - 1, stop))]
        if stop - start < met and float(bounds[start:stop].max()) <= SETTLED * min(gaps):
            settled[start:stop] = True
    return settled


def _gap(values: Tensor, bounds: Tensor, inside: int, beyond: int) -> float:
    if not 0 <= beyond < len(values):
        return float("inf")
    return float((values[inside] - values[beyond]).abs() - bounds[beyond])


def clusters(values: Tensor, bounds: Tensor, margin: float) -> list[tuple[int, int]]:
    """Runs [start, stop) of ascending neighbours that cannot be told apart."""
    if len(values) == 0:
        return []
    apart = (values.diff() > bounds[1:] + bounds[:-1] + 2 * margin).nonzero().flatten() + 1
    edges = [0, *apart.tolist(), len(values)]
    return list(pairwise(edges))
