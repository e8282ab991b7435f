"""Trace, diagonal and norms of operators whose structure gives them exactly; dispatched on the operator's type."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evolute.errors import VectorError
from evolute.linop.algebra import Combination
from evolute.linop.convert import Dense, to_dense
from evolute.linop.operator import LinearOperator


class NoStructure(VectorError):
    """The operator is known by its products alone: what was asked for can be estimated, or read off its entries."""


@singledispatch
def diagonal(op: object) -> Tensor:
    """The diagonal of a symmetric operator, exact, without its other entries."""
    raise NoStructure(
        f"expected a symmetric operator whose structure gives its diagonal (a closed form, a dense matrix); got {op!r}."
    )


@singledispatch
def squares(op: object) -> Tensor:
    """‖A‖²_F = Σ_ij A_ij², exact, without the entries."""
    raise NoStructure(f"expected an operator whose structure gives its Frobenius norm (a closed form); got {op!r}.")


@diagonal.register
def _(op: Dense) -> Tensor:
    return op.matrix.diagonal().clone()


@diagonal.register
def _(op: Combination) -> Tensor:
    parts = [factor * diagonal(each) for factor, each in op.terms]
    return torch.stack(parts).sum(0)


@squares.register
def _(op: Dense) -> Tensor:
    return op.matrix.square().sum()


SMALL = (
    2048  # up to so many rows or columns, the Gram matrix of a block is the quickest way to its largest singular value
)


def spectral(op: LinearOperator, *, tolerance: float = 1e-10) -> float:
    """‖A‖, the largest singular value: by the Gram matrix where a side is short, else by Lanczos to the tolerance."""
    if not all(op.shape):
        return 0.0
    if min(op.shape) <= SMALL:
        matrix = to_dense(op)
        gram = matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix
        return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt())
    return _by_lanczos(op, tolerance)


def _by_lanczos(op: LinearOperator, tolerance: float) -> float:
    from scipy.sparse import linalg

    eigsh: Any = linalg.eigsh  # its stubs take every tolerance for an int
    start = np.random.default_rng(0).standard_normal(op.shape[1])
    square: Any = (op.adjoint() @ op).to_scipy()
    (largest,) = eigsh(square, k=1, which="LM", tol=tolerance, v0=start, return_eigenvectors=False)
    return float(max(largest, 0.0)) ** 0.5


def trace(op: LinearOperator) -> float:
    """Σ_i A_ii."""
    return float(diagonal(op).sum())


def frobenius(op: LinearOperator) -> float:
    """‖A‖_F."""
    return float(squares(op).clamp_min(0).sqrt())
