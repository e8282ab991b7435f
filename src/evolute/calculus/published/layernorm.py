"""LayerNorm, Theorems 2 and 3: LN(X) = P(X) M(X), M the centring, P = diag(1/σ_i), σ_i² = mean(M_i²) + ε.

By the product rule J = (P ⊗ I) G + (I ⊗ Mᵀ) ∂P, with G = ∂M = I_L ⊗ (I − 11ᵀ/d); and H = ∂ vec_r(J)/∂X from ∂²P and ∂P,
since ∂²M = 0.
"""

import torch
from torch import Tensor

from evolute.calculus.published.algebra import by_left, by_right, commutation, eye, khatri_rao, kron


def centred(X: Tensor) -> Tensor:
    """M(X) = X (I − 11ᵀ/d)."""
    return X - X.mean(-1, keepdim=True)


def inverse_deviation(X: Tensor, eps: float = 0.0) -> Tensor:
    """1/σ_i = (mean(M_i²) + ε)^{−1/2}, (L,)."""
    return (centred(X).square().mean(-1) + eps).rsqrt()


def layernorm(X: Tensor, eps: float = 0.0) -> Tensor:
    """LN(X) = P(X) M(X)."""
    return torch.diag(inverse_deviation(X, eps)) @ centred(X)


def d_centred(X: Tensor) -> Tensor:
    """G = ∂M/∂X = I_L ⊗ (I − 11ᵀ/d)."""
    L, d = X.shape
    return kron(eye(L), eye(d) - 1 / d)


def d_scale(X: Tensor, eps: float = 0.0) -> Tensor:
    """∂P/∂X ∈ R^{L² × L d}: the row of P_ii is −M_i/(d σ_i³) at token i, all other rows are zero."""
    L, d = X.shape
    rows = -centred(X) * inverse_deviation(X, eps)[:, None] ** 3 / d
    return _on_the_diagonal(L) @ torch.block_diag(*rows[:, None])


def d2_scale(X: Tensor, eps: float = 0.0) -> Tensor:
    """∂²P/∂X² ∈ R^{L² L d × L d}: at (i,i), ∂²(1/σ) = 3 M Mᵀ/(d² σ⁵) − (I − 11ᵀ/d)/(d σ³) of token i."""
    L, d = X.shape
    M, p = centred(X), inverse_deviation(X, eps)[:, None, None]
    second = 3 * p**5 / d**2 * M[:, :, None] * M[:, None] - p**3 / d * (eye(d) - 1 / d)
    return kron(_on_the_diagonal(L), eye(L * d)) @ _own_token(second)


def jacobian(X: Tensor, eps: float = 0.0) -> Tensor:
    """∂LN/∂X = (P ⊗ I) G + (I_L ⊗ Mᵀ) ∂P.                                        [Theorem 2]"""
    return jacobian_without_scale(X, eps) + kron(eye(len(X)), centred(X).T) @ d_scale(X, eps)


def jacobian_without_scale(X: Tensor, eps: float = 0.0) -> Tensor:
    """(P ⊗ I) G: a secondary text's Jacobian, which takes the deviation for a constant. Wrong: ∂P is left out."""
    return kron(torch.diag(inverse_deviation(X, eps)), eye(X.shape[1])) @ d_centred(X)


def hessian(X: Tensor, eps: float = 0.0) -> Tensor:
    """∂ vec_r(J)/∂X ∈ R^{(L d)² × L d}: (∂P)(∂M), (∂M)(∂P) and (∂²P) M; ∂²M = 0.        [Theorem 3]"""
    (L, d), G, dP = X.shape, d_centred(X), d_scale(X, eps)
    n = L * d
    through_scale = kron(eye(n), G.T) @ by_left(L, L, eye(d)) @ dP
    through_centre = kron(eye(n), dP.T) @ by_right(eye(L), d, L) @ commutation(d, L) @ G
    return through_scale + through_centre + kron(eye(L), centred(X).T, eye(n)) @ d2_scale(X, eps)


def _on_the_diagonal(L: int) -> Tensor:
    """vec_r(diag(p)) = E p."""
    return khatri_rao(eye(L)[:, :, None], eye(L)[:, None])


def _own_token(blocks: Tensor) -> Tensor:
    """(L, d, d) second derivatives of p_i along token i, in rows (i, (t,a)), columns (s,b): zero unless i = t = s."""
    L, d, _ = blocks.shape
    out = torch.zeros(L, L, d, L, d, dtype=blocks.dtype)
    here = torch.arange(L)
    out[here, here, :, here] = blocks
    return out.reshape(L * L * d, L * d)
