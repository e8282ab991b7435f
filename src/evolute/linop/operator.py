"""A linear operator is a space, a product, and its adjoint; everything else is a function of those.

Vectors enter as (n,), (n, k) or name → tensor. Inside they are the *rows* of a (k, n) tensor, each contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from evolute.errors import VectorError
from evolute.linop.space import Select, Space

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator as ScipyOperator


class LinearOperator(ABC):
    """A: ℝⁿ → ℝᵐ, known by its products. Immutable.

    >>> import evolute as ev
    >>> A = ev.from_dense(torch.eye(2) * 3)
    >>> A @ torch.tensor([1.0, 2.0])
    tensor([3., 6.])
    """

    @property
    @abstractmethod
    def row_space(self) -> Space:
        """The space of A v."""

    @property
    @abstractmethod
    def col_space(self) -> Space:
        """The space of v."""

    @abstractmethod
    def apply_rows(self, rows: Tensor) -> Tensor:
        """(k, n) → (k, m): A applied to each row."""

    @abstractmethod
    def adjoint(self) -> LinearOperator:
        """Aᵀ; the operator itself when it is symmetric."""

    @property
    def T(self) -> LinearOperator:
        return self.adjoint()

    @property
    def symmetric(self) -> bool:
        return self.adjoint() is self

    @property
    def space(self) -> Space:
        """The one space of a square operator."""
        return self.col_space

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_space.size, self.col_space.size

    @property
    def dtype(self) -> torch.dtype:
        return self.col_space.dtype

    @property
    def device(self) -> torch.device:
        return self.col_space.device

    @property
    def preferred_block(self) -> int:
        """How many vectors at once are cheapest per vector."""
        return 16

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: LinearOperator) -> LinearOperator: ...
    @overload
    def __matmul__(self, other: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def __matmul__(
        self, other: Tensor | LinearOperator | Mapping[str, Tensor]
    ) -> Tensor | LinearOperator | dict[str, Tensor]:
        if isinstance(other, LinearOperator):
            from evolute.linop.algebra import product

            return product(self, other)
        if isinstance(other, Mapping):
            vector = self.col_space.flatten(other)
            return self.row_space.unflatten(self @ vector)
        self._check(other)
        if other.ndim == 1:
            return self.apply_rows(other.detach()[None])[0]
        return self.apply_rows(other.detach().T.contiguous()).T

    def _check(self, vector: object) -> None:
        n = self.shape[1]
        if not isinstance(vector, Tensor):
            raise VectorError(
                f"expected a tensor ({n},) or ({n}, k), or a mapping of names, got {type(vector).__name__}; "
                "wrap NumPy arrays in torch.from_numpy, or use .to_scipy()."
            )
        if vector.ndim not in (1, 2) or vector.shape[0] != n:
            raise VectorError(f"expected a vector ({n},) or a matrix ({n}, k), got shape {tuple(vector.shape)}.")
        if vector.dtype != self.dtype:
            raise VectorError(f"expected {self.dtype}, got {vector.dtype}; convert with v.to({self.dtype}).")
        if vector.device != self.device:
            raise VectorError(f"expected a vector on {self.device}, got {vector.device}; move it with v.to(H.device).")

    def block(self, rows: Select, cols: Select) -> LinearOperator:
        """A[rows, cols] for any groups, parameters or parts of them."""
        from evolute.linop.algebra import Block

        return Block.of(self, self.row_space.resolve(rows), self.col_space.resolve(cols))

    def restrict(self, groups: Select) -> LinearOperator:
        """The principal block A[groups, groups]; symmetric when A is."""
        return self.block(groups, groups)

    def to_scipy(self) -> ScipyOperator:
        """The same operator for SciPy: NumPy in, NumPy out."""
        from evolute.linop.convert import to_scipy

        return to_scipy(self)

    def __add__(self, other: LinearOperator) -> LinearOperator:
        from evolute.linop.algebra import combine

        return combine((1.0, self), (1.0, _operator(other)))

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        from evolute.linop.algebra import combine

        return combine((1.0, self), (-1.0, _operator(other)))

    def __mul__(self, factor: float) -> LinearOperator:
        from evolute.linop.algebra import combine

        return combine((float(factor), self))

    __rmul__ = __mul__

    def __neg__(self) -> LinearOperator:
        return self * -1.0

    def __repr__(self) -> str:
        m, n = self.shape
        return f"{type(self).__name__}({m}×{n}, {str(self.dtype).removeprefix('torch.')}, {self.device})"


def _operator(other: object) -> LinearOperator:
    if isinstance(other, LinearOperator):
        return other
    raise VectorError(f"expected an operator, got {type(other).__name__}; wrap a symmetric matrix in ev.from_dense(M).")


class SymmetricOperator(LinearOperator):
    """A = Aᵀ on one space."""

    @property
    @abstractmethod
    def space(self) -> Space: ...

    @property
    def row_space(self) -> Space:
        return self.space

    @property
    def col_space(self) -> Space:
        return self.space

    def adjoint(self) -> LinearOperator:
        return self
