"""Self-attention, Theorems 3.1 and 3.2: H = H_o + H_f for F = A X W_V, A = softmax(X W_Q W_Kᵀ Xᵀ/√d_K).

One head, one sequence, ℓ = ‖F − Y‖²_F/(L d_V). X ∈ R^{L×d_V}; W_Q, W_K ∈ R^{d_V×d_K}; W_V ∈ R^{d_V×d_V}. Every function
is one printed formula, term by term. Two readings are needed, and `docs/errata.md` says why: `K_{d_K,d_V}` is the
commutation matrix of Magnus and Neudecker, and ⊗ binds weaker than the matrix product, as in `M1ᵀM1 ⊗ I`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from evolute.calculus.published.algebra import commutation, eye, khatri_rao, kron, vec


@dataclass(frozen=True, eq=False)
class SelfAttention:
    """The quantities that the theorems are made of."""

    X: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    Y: Tensor

    @property
    def L(self) -> int:
        return self.X.shape[0]

    @property
    def d_V(self) -> int:
        return self.X.shape[1]

    @property
    def d_K(self) -> int:
        return self.W_Q.shape[1]

    @cached_property
    def A(self) -> Tensor:
        """A = softmax(X W_Q W_Kᵀ Xᵀ/√d_K), (L, L)."""
        return torch.softmax(self.X @ self.W_Q @ self.W_K.T @ self.X.T / self.d_K**0.5, -1)

    @cached_property
    def F(self) -> Tensor:
        """F = A X W_V, (L, d_V)."""
        return self.A @ self.X @ self.W_V

    @cached_property
    def M1(self) -> Tensor:
        """M1 = A X: the mean of the tokens under each row of A, (L, d_V)."""
        return self.A @ self.X

    @property
    def deviations(self) -> Tensor:
        """X_j − M1_i, (L, L, d_V)."""
        return self.X[None] - self.M1[:, None]

    @cached_property
    def M2(self) -> Tensor:
        """M2 = [Σ_j A_ij (X_j − M1_i)(X_j − M1_i)ᵀ]_i, L blocks d_V × d_V."""
        c = self.deviations
        return torch.einsum("ij,ija,ijb->iab", self.A, c, c)

    @cached_property
    def M3(self) -> Tensor:
        """M3 = [Σ_j A_ij (X_j − M1_i) ⊗ (X_j − M1_i)(X_j − M1_i)ᵀ]_i, L blocks d_V² × d_V."""
        c = self.deviations
        return torch.einsum("ij,ija,ijb,ijc->iabc", self.A, c, c, c).flatten(1, 2)

    @cached_property
    def Z1(self) -> Tensor:
        """Z1 = X * M2 ∈ R^{L d_V × d_V²}."""
        return khatri_rao(self.X[:, None], self.M2)

    @cached_property
    def Z2(self) -> Tensor:
        """Z2 = (I_L ⊗ K_{d_V,d_V} ⊗ I_{d_V})(X * Xᵀ * M3) ∈ R^{L d_V³ × d_V²}; the i-th block of Xᵀ is x_iᵀ."""
        d = self.d_V
        return kron(eye(self.L), commutation(d, d), eye(d)) @ khatri_rao(self.X[:, None], self.X[:, :, None], self.M3)

    @cached_property
    def S(self) -> Tensor:
        """S = (I_{d_V} ⊗ K_{d_V,d_V})(vec_r I_{d_V} ⊗ I_{d_V}) ∈ R^{d_V³ × d_V}."""
        d = self.d_V
        return kron(eye(d), commutation(d, d)) @ kron(vec(eye(d)), eye(d))

    def R(self, m: int) -> Tensor:
        """R_m = vec_r(F − Y)ᵀ ⊗ I_m."""
        return kron(vec(self.F - self.Y).T, eye(m))

    @property
    def scale(self) -> float:
        """2/(L d_V)."""
        return 2 / (self.L * self.d_V)


# What a change of W_Q, and one of W_K, makes of the scores: (I ⊗ W_K) and (W_Q ⊗ I) K.


def by_q(a: SelfAttention) -> Tensor:
    """I_{d_V} ⊗ W_K ∈ R^{d_V² × d_V d_K}."""
    return kron(eye(a.d_V), a.W_K)


def by_k(a: SelfAttention) -> Tensor:
    """(W_Q ⊗ I_{d_V}) K_{d_K,d_V} ∈ R^{d_V² × d_V d_K}."""
    return kron(a.W_Q, eye(a.d_V)) @ commutation(a.d_K, a.d_V)


def _inner(a: SelfAttention) -> Tensor:
    """I_L ⊗ W_V W_Vᵀ."""
    return kron(eye(a.L), a.W_V @ a.W_V.T)


def _weights(a: SelfAttention) -> Tensor:
    """I_L ⊗ W_Vᵀ ⊗ I_{d_V} ⊗ W_Kᵀ."""
    return kron(eye(a.L), a.W_V.T, eye(a.d_V), a.W_K.T)


# ---------------------------------------------------------------- Theorem 3.1: the outer-product Hessian


def outer_vv(a: SelfAttention) -> Tensor:
    """H_o(V,V) = 2/(L d_V) · M1ᵀ M1 ⊗ I_{d_V}."""
    return a.scale * kron(a.M1.T @ a.M1, eye(a.d_V))


def outer_qq(a: SelfAttention) -> Tensor:
    """H_o(Q,Q) = 2/(L d_V d_K) (I ⊗ W_Kᵀ) Z1ᵀ (I_L ⊗ W_V W_Vᵀ) Z1 (I ⊗ W_K)."""
    return a.scale / a.d_K * by_q(a).T @ a.Z1.T @ _inner(a) @ a.Z1 @ by_q(a)


def outer_vq(a: SelfAttention) -> Tensor:
    """H_o(V,Q) = 2/(L d_V √d_K) (M1ᵀ ⊗ W_Vᵀ) Z1 (I ⊗ W_K)."""
    return a.scale / a.d_K**0.5 * kron(a.M1.T, a.W_V.T) @ a.Z1 @ by_q(a)


def outer_qk(a: SelfAttention) -> Tensor:
    """H_o(Q,K) = 2/(L d_V d_K) (I ⊗ W_Kᵀ) Z1ᵀ (I_L ⊗ W_V W_Vᵀ) Z1 (W_Q ⊗ I) K_{d_K,d_V}."""
    return a.scale / a.d_K * by_q(a).T @ a.Z1.T @ _inner(a) @ a.Z1 @ by_k(a)


# ---------------------------------------------------------------- Theorem 3.2: the functional Hessian


def functional_vv(a: SelfAttention) -> Tensor:
    """H_f(V,V) = 0: F is linear in W_V."""
    return torch.zeros(a.d_V**2, a.d_V**2, dtype=torch.float64)


def functional_qq(a: SelfAttention) -> Tensor:
    """H_f(Q,Q) = 2/(L d_V d_K) R_{d_V d_K} (I_L ⊗ W_Vᵀ ⊗ I ⊗ W_Kᵀ) Z2 (I ⊗ W_K)."""
    return a.scale / a.d_K * a.R(a.d_V * a.d_K) @ _weights(a) @ a.Z2 @ by_q(a)


def functional_vq(a: SelfAttention) -> Tensor:
    """H_f(V,Q) = 2/(L d_V √d_K) R_{d_V²} (I_L ⊗ S) Z1 (I ⊗ W_K)."""
    return a.scale / a.d_K**0.5 * a.R(a.d_V**2) @ kron(eye(a.L), a.S) @ a.Z1 @ by_q(a)


def functional_qk(a: SelfAttention) -> Tensor:
    """H_f(Q,K) = 2/(L d_V d_K) R (I_L ⊗ W_Vᵀ ⊗ I ⊗ W_Kᵀ) Z2 (W_Q ⊗ I) K_{d_K,d_V} + the second kind of term."""
    return a.scale / a.d_K * a.R(a.d_V * a.d_K) @ _weights(a) @ a.Z2 @ by_k(a) + functional_qk_second(a)


def functional_qk_second(a: SelfAttention) -> Tensor:
    """The second kind: 2/(L d_V √d_K) [R_{d_V} (I_L ⊗ W_Vᵀ ⊗ I_{d_V}) (Z1 ⊗ I_{d_V}) S] ⊗ I_{d_K}."""
    d = a.d_V
    inside = a.R(d) @ kron(eye(a.L), a.W_V.T, eye(d)) @ kron(a.Z1, eye(d)) @ a.S
    return a.scale / a.d_K**0.5 * kron(inside, eye(a.d_K))


Formula = Callable[[SelfAttention], Tensor]
OUTER: dict[str, Formula] = {"VV": outer_vv, "QQ": outer_qq, "VQ": outer_vq, "QK": outer_qk}
FUNCTIONAL: dict[str, Formula] = {"VV": functional_vv, "QQ": functional_qq, "VQ": functional_vq, "QK": functional_qk}


# ---------------------------------------------------------------- the print, in the readings that fail


def outer_qk_rowwise(a: SelfAttention) -> Tensor:
    """H_o(Q,K) with K_{m,n} vec_r(A) = vec_r(Aᵀ) for A ∈ R^{m×n}: wrong unless d_K = d_V, or one of them is 1."""
    rowwise = commutation(a.d_V, a.d_K)  # K_{d_K,d_V}, if the indices are those of a matrix whose rows are strung
    return a.scale / a.d_K * by_q(a).T @ a.Z1.T @ _inner(a) @ a.Z1 @ kron(a.W_Q, eye(a.d_V)) @ rowwise


def functional_qk_tight(a: SelfAttention) -> Tensor:
    """… (Z1 ⊗ I_{d_V}) (S ⊗ I_{d_K}), ⊗ before the product: the sizes d_V³ and d_V³ d_K fit for d_K = 1 only."""
    d = a.d_V
    first = a.scale / a.d_K * a.R(d * a.d_K) @ _weights(a) @ a.Z2 @ by_k(a)
    left = a.R(d) @ kron(eye(a.L), a.W_V.T, eye(d)) @ kron(a.Z1, eye(d))
    return first + a.scale / a.d_K**0.5 * left @ kron(a.S, eye(a.d_K))
