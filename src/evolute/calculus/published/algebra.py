"""vec_r(A B Cᵀ) = (A ⊗ C) vec_r(B): the matrix algebra that the theorems are printed in.

Matrices are dense and rows come first: `vec_r` strings the rows of a matrix together. `K_{m,n}` is the commutation
matrix of Magnus and Neudecker, `K_{m,n} vec_c(A) = vec_c(Aᵀ)` for A ∈ R^{m×n} with *columns* strung together; for rows
that reads `K_{m,n} vec_r(B) = vec_r(Bᵀ)` for B ∈ R^{n×m}.
"""

from functools import reduce

import torch
from torch import Tensor


def eye(n: int) -> Tensor:
    """I_n in float64."""
    return torch.eye(n, dtype=torch.float64)


def vec(A: Tensor) -> Tensor:
    """vec_r(A) as a column."""
    return A.reshape(-1, 1)


def kron(*factors: Tensor) -> Tensor:
    """A ⊗ B ⊗ ….

    >>> kron(torch.ones(2, 3), torch.ones(4, 5), torch.ones(1, 2)).shape
    torch.Size([8, 30])
    """
    return reduce(_kron, factors)


def _kron(A: Tensor, B: Tensor) -> Tensor:
    """By hand: `torch.kron` refuses some transposes of vectors."""
    products = A[:, None, :, None] * B[None, :, None, :]
    return products.reshape(A.shape[0] * B.shape[0], A.shape[1] * B.shape[1])


def commutation(m: int, n: int) -> Tensor:
    """K_{m,n} vec_r(B) = vec_r(Bᵀ) for B ∈ R^{n×m}.

    >>> B = torch.randn(3, 2, dtype=torch.float64)
    >>> torch.equal(commutation(2, 3) @ vec(B), vec(B.T))
    True
    """
    return eye(m * n)[torch.arange(m * n).view(n, m).T.reshape(-1)]


def khatri_rao(*blocks: Tensor) -> Tensor:
    """A * B = [A_i ⊗ B_i]_i, stacked: the row-wise Khatri–Rao product of L blocks, each given as (L, rows, columns).

    >>> khatri_rao(torch.ones(4, 1, 3), torch.ones(4, 2, 5)).shape
    torch.Size([8, 15])
    """
    return torch.cat([kron(*row) for row in zip(*blocks, strict=True)])


def spread(m: int, n: int, p: int, q: int) -> Tensor:
    """vec_r(A ⊗ B) = (I_m ⊗ K_{p,n} ⊗ I_q)(vec_r A ⊗ vec_r B), for A ∈ R^{m×n}, B ∈ R^{p×q}.

    >>> A, B = torch.randn(2, 3, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    >>> torch.equal(spread(2, 3, 4, 5) @ kron(vec(A), vec(B)), vec(kron(A, B)))
    True
    """
    return kron(eye(m), commutation(p, n), eye(q))


def by_left(m: int, n: int, B: Tensor) -> Tensor:
    """∂ vec_r(A ⊗ B)/∂ vec_r(A), A ∈ R^{m×n}."""
    return spread(m, n, B.shape[0], B.shape[1]) @ kron(eye(m * n), vec(B))


def by_right(A: Tensor, p: int, q: int) -> Tensor:
    """∂ vec_r(A ⊗ B)/∂ vec_r(B), B ∈ R^{p×q}."""
    return spread(A.shape[0], A.shape[1], p, q) @ kron(vec(A), eye(p * q))


def norm(A: Tensor) -> float:
    """‖A‖: the largest singular value."""
    return float(torch.linalg.matrix_norm(A.detach(), 2)) if A.numel() else 0.0
