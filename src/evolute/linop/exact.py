"""Trace, diagonal and norms of operators whose structure gives them exactly; dispatched on the operator's type."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from evolute.errors import VectorError
from evolute.linop.algebra import Combination
from evolute.linop.convert import Dense
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


def trace(op: LinearOperator) -> float:
    """Σ_i A_ii."""
    return float(diagonal(op).sum())


def frobenius(op: LinearOperator) -> float:
    """‖A‖_F."""
    return float(squares(op).clamp_min(0).sqrt())
