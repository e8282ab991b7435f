"""Operators from and to what others use: dense matrices, functions, SciPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from evolute.errors import VectorError
from evolute.linop.memory import human, require
from evolute.linop.operator import LinearOperator, SymmetricOperator
from evolute.linop.space import Space

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator as ScipyOperator


@dataclass(frozen=True, eq=False, repr=False)
class Dense(SymmetricOperator):
    """A symmetric matrix that is there in full."""

    matrix: Tensor
    on: Space

    @property
    def space(self) -> Space:
        return self.on

    def apply_rows(self, rows: Tensor) -> Tensor:
        return rows @ self.matrix


@dataclass(frozen=True, eq=False, repr=False)
class Matvec(SymmetricOperator):
    """A symmetric operator known by a function v ↦ A v."""

    function: Callable[[Tensor], Tensor]
    on: Space

    @property
    def space(self) -> Space:
        return self.on

    @property
    def preferred_block(self) -> int:
        return 1

    def apply_rows(self, rows: Tensor) -> Tensor:
        return torch.stack([self._one(row) for row in rows]) if len(rows) else rows.clone()

    def _one(self, vector: Tensor) -> Tensor:
        out = self.function(vector.clone())
        if not isinstance(out, Tensor) or out.is_complex():  # pyright: ignore[reportUnnecessaryIsInstance]
            got = out.dtype if isinstance(out, Tensor) else type(out).__name__  # pyright: ignore
            raise VectorError(f"the product must return a tensor of real numbers, got {got}.")
        if tuple(out.shape) != (self.on.size,):
            raise VectorError(f"the product must return shape ({self.on.size},), got {tuple(out.shape)}.")
        return out.detach().to(vector)


def from_dense(matrix: Tensor | np.ndarray[Any, Any], *, space: Space | None = None) -> LinearOperator:
    """A symmetric matrix as an operator.

    >>> from_dense(torch.diag(torch.tensor([1.0, 2.0]))) @ torch.ones(2)
    tensor([1., 2.])
    """
    matrix = _matrix(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.is_floating_point():
        raise VectorError(f"expected a square floating-point matrix, got {tuple(matrix.shape)}, {matrix.dtype}.")
    gap, size = ((matrix - matrix.T).abs().max().item(), matrix.abs().max().item()) if len(matrix) else (0.0, 0.0)
    if not gap <= 1e3 * torch.finfo(matrix.dtype).eps * size:
        raise VectorError(
            f"expected a symmetric matrix, but max|M − Mᵀ| = {gap:.3g} against max|M| = {size:.3g}; "
            "pass (M + M.T) / 2 if the rest is rounding."
        )
    if space is not None and space.size != len(matrix):
        raise VectorError(f"expected a space of {len(matrix)} entries, got one of {space.size}.")
    return Dense(matrix, space or Space({"v": matrix.shape[:1]}, {}, matrix.dtype, matrix.device))


def _matrix(matrix: Any) -> Tensor:
    try:
        return torch.as_tensor(matrix).detach().to_dense()
    except (TypeError, ValueError, RuntimeError) as error:
        raise VectorError(
            f"expected a square floating-point matrix, a tensor or an array, got {type(matrix).__name__}: {error}; "
            "a sparse matrix of SciPy goes through from_matvec(scipy.sparse.linalg.aslinearoperator(M))."
        ) from error


def from_matvec(
    function: Callable[[Tensor], Tensor] | ScipyOperator,
    size: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    space: Space | None = None,
) -> LinearOperator:
    """A symmetric product v ↦ A v, or a SciPy LinearOperator, as an operator.

    >>> from_matvec(lambda v: 2 * v, 3) @ torch.ones(3)
    tensor([2., 2., 2.])
    """
    device = torch.empty(0, device=device).device  # 'cuda' is 'cuda:0', as the vectors say
    if hasattr(function, "matvec"):
        return _from_scipy(function, size, device, space)
    if not callable(function):
        raise VectorError(f"expected a function v ↦ A v or a SciPy LinearOperator, got {type(function).__name__}.")
    if size is None and space is None:
        raise VectorError("from_matvec(function, size): the size is needed; a function does not tell it.")
    on = space or Space({"v": (_size(size),)}, {}, dtype, device)
    return Matvec(function, _fitting(on, size))


def _size(size: object) -> int:
    if not isinstance(size, int) or size < 0:
        raise VectorError(f"from_matvec(function, size): expected the number of entries of v, got {size!r}.")
    return size


def _fitting(space: Space, size: int | None) -> Space:
    if size is not None and space.size != size:
        raise VectorError(f"expected a space of {size} entries, got one of {space.size}.")
    return space


def _from_scipy(op: Any, size: int | None, device: torch.device, space: Space | None) -> LinearOperator:
    rows, cols = op.shape
    if rows != cols:
        raise VectorError(f"expected a square (symmetric) SciPy operator, got shape {op.shape}.")
    if np.issubdtype(op.dtype or np.float64, np.complexfloating):
        raise VectorError(f"expected a SciPy operator of real numbers, got {op.dtype}.")
    dtype = torch.from_numpy(np.empty(0, np.result_type(op.dtype or np.float64, np.float32))).dtype

    def function(vector: Tensor) -> Tensor:
        return torch.as_tensor(op.matvec(vector.cpu().numpy())).to(vector)

    on = _fitting(space or Space({"v": (rows,)}, {}, dtype, device), rows)
    return Matvec(function, _fitting(on, size))


def to_scipy(op: LinearOperator) -> ScipyOperator:
    """NumPy in, NumPy out; bfloat16 goes through float32, which NumPy has."""
    from scipy.sparse.linalg import LinearOperator as ScipyOperator

    outside = torch.float32 if op.dtype in (torch.bfloat16, torch.float16) else op.dtype

    def multiply(which: LinearOperator) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
        def run(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            if np.iscomplexobj(array):
                raise VectorError(f"expected real numbers, got {array.dtype}; multiply v.real and v.imag apart.")
            vectors = torch.as_tensor(np.ascontiguousarray(array)).to(op.device, op.dtype)
            flat = vectors.squeeze(-1) if vectors.ndim == 2 and vectors.shape[1] == 1 else vectors
            return (which @ flat).to("cpu", outside).reshape(-1, *array.shape[1:]).numpy()

        return run

    forward, backward = multiply(op), multiply(op.adjoint())
    products = {"matvec": forward, "matmat": forward, "rmatvec": backward, "rmatmat": backward}
    make: Any = ScipyOperator  # its stubs do not know the keywords of the constructor
    return make(shape=op.shape, dtype=np.dtype(str(outside).removeprefix("torch.")), **products)


@singledispatch
def to_dense(op: object) -> Tensor:
    """The matrix itself: A applied to the identity, in blocks of columns. Refused when it cannot fit."""
    raise VectorError(f"expected an operator, got {type(op).__name__}; see from_dense and from_matvec.")


@to_dense.register
def _(op: LinearOperator) -> Tensor:
    m, n = op.shape
    width = torch.empty((), dtype=op.dtype).element_size()
    block = max(1, min(op.preferred_block, n))
    instead = f"Take a block of at most {human(width * m)} per column: to_dense(H.restrict(groups))."
    require(width * m * (n + block), op.device, f"a dense {m}×{n} matrix", instead)
    out = torch.empty((n, m), dtype=op.dtype, device=op.device)
    for start in range(0, n, block):
        stop = min(start + block, n)
        rows = torch.zeros((stop - start, n), dtype=op.dtype, device=op.device)
        rows[torch.arange(stop - start), torch.arange(start, stop)] = 1
        out[start:stop] = op.apply_rows(rows)
    return out.T


@to_dense.register
def _(op: Dense) -> Tensor:
    return op.matrix.clone()
