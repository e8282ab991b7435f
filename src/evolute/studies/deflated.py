"""‖A‖²_F = ‖A V‖² + E ‖A (I − V Vᵀ) z‖²: exact on a subspace that carries much, sampled where little is left.

True of every orthonormal V. With the eigenvectors of outliers in V, what is left to chance is flat, its error small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evolute.studies.blocks import Norm


def rest(V: Tensor, probes: int, generator: torch.Generator) -> Tensor:
    """(I − V Vᵀ) z for normal z, as columns."""
    Z = torch.randn(V.shape[0], probes, generator=generator, dtype=V.dtype)
    return Z - V @ (V.mT @ Z)


def frobenius(inside: Tensor, outside: Tensor) -> Norm:
    """From A V and from A (I − V Vᵀ) Z, columns; the error is that of the mean over the columns of Z.

    >>> A, V = torch.diag(torch.tensor([9.0, 1.0, 1.0, 1.0]).double()), torch.eye(4, 1).double()
    >>> sampled = frobenius(A @ V, A @ rest(V, 400, torch.Generator().manual_seed(0)))
    >>> abs(sampled.value - 84**0.5) < 3 * sampled.error < 0.1
    True
    """
    samples = outside.square().sum(0)
    value = math.sqrt(float(inside.square().sum() + samples.mean()))
    spread = float(samples.std()) / math.sqrt(len(samples)) if len(samples) > 1 else math.inf
    return Norm(value, spread / (2 * value) if value else 0.0)


Images = tuple[Tensor, Tensor]  # of V, and of the rest


def ratio(one: Images, other: Images) -> tuple[float, float]:
    """‖A‖_F/‖B‖_F, from the same vectors for both, and the jackknife's error.

    >>> A, V = torch.eye(4).double(), torch.eye(4, 1).double()
    >>> Z = rest(V, 8, torch.Generator().manual_seed(0))
    >>> value, error = ratio((A @ V, A @ Z), (2 * A @ V, 2 * A @ Z))
    >>> abs(value - 0.5) < 1e-12, error < 1e-12
    (True, True)
    """
    (a, A), (b, B) = ((inside.square().sum(), outside.square().sum(0)) for inside, outside in (one, other))
    n = A.shape[0]
    whole = torch.sqrt((a + A.mean()) / (b + B.mean()))
    without = torch.sqrt((a + (A.sum() - A) / (n - 1)) / (b + (B.sum() - B) / (n - 1)))
    return float(whole), float((without - without.mean()).square().sum().mul((n - 1) / n).sqrt())
