"""Sums, scalings, products and blocks of operators are operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from evolute.errors import VectorError
from evolute.linop.operator import LinearOperator
from evolute.linop.space import Selection, Space


@dataclass(frozen=True, eq=False, repr=False)
class Combination(LinearOperator):
    """Σ_i c_i A_i."""

    terms: tuple[tuple[float, LinearOperator], ...]

    @property
    def row_space(self) -> Space:
        return self.terms[0][1].row_space

    @property
    def col_space(self) -> Space:
        return self.terms[0][1].col_space

    @property
    def preferred_block(self) -> int:
        return min(op.preferred_block for _, op in self.terms)

    def apply_rows(self, rows: Tensor) -> Tensor:
        factor, first = self.terms[0]
        out = first.apply_rows(rows) * factor
        for factor, op in self.terms[1:]:
            out.add_(op.apply_rows(rows), alpha=factor)
        return out

    def adjoint(self) -> LinearOperator:
        if all(op.symmetric for _, op in self.terms):
            return self
        return Combination(tuple((factor, op.adjoint()) for factor, op in self.terms))


@dataclass(frozen=True, eq=False, repr=False)
class Product(LinearOperator):
    """A B: first B, then A."""

    left: LinearOperator
    right: LinearOperator

    @property
    def row_space(self) -> Space:
        return self.left.row_space

    @property
    def col_space(self) -> Space:
        return self.right.col_space

    @property
    def preferred_block(self) -> int:
        return min(self.left.preferred_block, self.right.preferred_block)

    def apply_rows(self, rows: Tensor) -> Tensor:
        return self.left.apply_rows(self.right.apply_rows(rows))

    def adjoint(self) -> LinearOperator:
        return Product(self.right.adjoint(), self.left.adjoint())


@dataclass(frozen=True, eq=False, repr=False)
class Block(LinearOperator):
    """A[rows, cols] = Eᵣᵀ A E_c, with E the embedding of the selected entries."""

    op: LinearOperator
    rows: Selection
    cols: Selection

    @classmethod
    def of(cls, op: LinearOperator, rows: Selection, cols: Selection) -> Self:
        return cls(op, rows, cols)

    @property
    def row_space(self) -> Space:
        return self.rows.space

    @property
    def col_space(self) -> Space:
        return self.cols.space

    @property
    def preferred_block(self) -> int:
        return self.op.preferred_block

    def apply_rows(self, rows: Tensor) -> Tensor:
        return self.rows.take(self.op.apply_rows(self.cols.put(rows)))

    def adjoint(self) -> LinearOperator:
        if self.op.symmetric and self.rows.parts == self.cols.parts:
            return self
        return Block(self.op.adjoint(), self.cols, self.rows)


def combine(*terms: tuple[float, LinearOperator]) -> LinearOperator:
    """Σ c A, nested combinations flattened, shapes checked."""
    flat: list[tuple[float, LinearOperator]] = []
    for factor, op in terms:
        inner = op.terms if isinstance(op, Combination) else ((1.0, op),)
        flat += [(factor * each, part) for each, part in inner]
    for _, op in flat:
        if op.shape != flat[0][1].shape or op.dtype != flat[0][1].dtype:
            raise VectorError(f"cannot add {op!r} to {flat[0][1]!r}: shapes and dtypes must agree.")
    return Combination(tuple(flat))


def product(left: LinearOperator, right: LinearOperator) -> LinearOperator:
    if left.shape[1] != right.shape[0] or left.dtype != right.dtype:
        raise VectorError(f"cannot multiply {left!r} by {right!r}: inner sizes and dtypes must agree.")
    return Product(left, right)
