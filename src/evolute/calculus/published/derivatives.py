"""J_i = ∂ vec_r F/∂ vec_r W_i and ξ_ij = ∂ vec_r(J_i)/∂ vec_r W_j of self-attention, for every pair of Q, K, V.

The theorems print four of the nine blocks; the others are made of the same pieces (`M1`, `Z1`, `Z2`, `S`), and
`H(i,j) = 2/(L d_V) (J_iᵀ J_j + R_{n_i} ξ_ij)`.
"""

import torch
from torch import Tensor

from evolute.calculus.published.algebra import eye, kron
from evolute.calculus.published.attention import SelfAttention, by_k, by_q

GROUPS = ("Q", "K", "V")
_SCORES = {"Q": by_q, "K": by_k}


def size(a: SelfAttention, i: str) -> int:
    """n_i, the number of entries of W_i."""
    return a.d_V**2 if i == "V" else a.d_V * a.d_K


def jacobian(a: SelfAttention, i: str) -> Tensor:
    """J_V = M1 ⊗ I;  J_Q = (I_L ⊗ W_Vᵀ) Z1 (I ⊗ W_K)/√d_K;  J_K = (I_L ⊗ W_Vᵀ) Z1 (W_Q ⊗ I) K/√d_K."""
    if i == "V":
        return kron(a.M1, eye(a.d_V))
    return kron(eye(a.L), a.W_V.T) @ a.Z1 @ _SCORES[i](a) / a.d_K**0.5


def second(a: SelfAttention, i: str, j: str) -> Tensor:
    """ξ_ij ∈ R^{L d_V n_i × n_j}."""
    if i == j == "V":
        return torch.zeros(a.L * a.d_V**3, a.d_V**2, dtype=torch.float64)
    if i == "V":
        return kron(eye(a.L), a.S) @ a.Z1 @ _SCORES[j](a) / a.d_K**0.5
    if j == "V":
        return exchange(second(a, j, i), size(a, j))
    bent = kron(eye(a.L), a.W_V.T, _SCORES[i](a).T) @ a.Z2 @ _SCORES[j](a) / a.d_K
    return bent if i == j else bent + _bilinear(a, i)


def _bilinear(a: SelfAttention, i: str) -> Tensor:
    """The scores are bilinear in W_Q and W_K: ((I_L ⊗ W_Vᵀ) Z1 ⊗ I)(S ⊗ I_{d_K})/√d_K, (Q,K); its exchange, (K,Q)."""
    slope = kron(eye(a.L), a.W_V.T) @ a.Z1 / a.d_K**0.5
    qk = kron(slope, eye(a.d_V * a.d_K)) @ kron(a.S, eye(a.d_K))
    return qk if i == "Q" else exchange(qk, a.d_V * a.d_K)


def exchange(xi: Tensor, n_i: int) -> Tensor:
    """ξ_ji from ξ_ij: second derivatives are symmetric, output by output.

    >>> xi = torch.randn(6 * 2, 3)  # 6 outputs, n_i = 2, n_j = 3
    >>> exchange(xi, 2).shape
    torch.Size([18, 2])
    """
    n_j = xi.shape[1]
    return xi.reshape(-1, n_i, n_j).mT.reshape(-1, n_i)


def outer(a: SelfAttention, i: str, j: str) -> Tensor:
    """H_o(i,j) = 2/(L d_V) J_iᵀ J_j."""
    return a.scale * jacobian(a, i).T @ jacobian(a, j)


def functional(a: SelfAttention, i: str, j: str) -> Tensor:
    """H_f(i,j) = 2/(L d_V) R_{n_i} ξ_ij."""
    return a.scale * a.R(size(a, i)) @ second(a, i, j)


def hessian(a: SelfAttention) -> Tensor:
    """H = [H_o(i,j) + H_f(i,j)] over Q, K, V."""
    return torch.cat([torch.cat([outer(a, i, j) + functional(a, i, j) for j in GROUPS], 1) for i in GROUPS])
