"""The block, Theorems 4 and 5: Y = LN(X + F), S = ReLU(Y W1) W2 + Y, Z = LN(S).

    H^{(i,j)} = (J_Z ⊗ I_{n_i}) ξ_ij + (I_{L d_V} ⊗ B_iᵀ) H_Z B_j,        B_i = ∂S/∂w_i,   ξ_ij = ∂ vec_r(B_i)/∂w_j

for w_i among W_Q, W_K, W_V, W1, W2. J_Z, H_Z are Theorems 2 and 3 at S. The ReLU is piecewise linear: its second
derivative is zero almost everywhere, and so are ξ(W1,W1) and ∂²S/∂Y² (Lemma 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from evolute.calculus.published import derivatives, layernorm
from evolute.calculus.published.algebra import by_left, by_right, commutation, eye, kron
from evolute.calculus.published.attention import SelfAttention
from evolute.calculus.published.derivatives import exchange

GROUPS = ("Q", "K", "V", "1", "2")


@dataclass(frozen=True, eq=False)
class Block:
    """Post-norm block of one head without biases; the targets of `attention.Y` play no part."""

    attention: SelfAttention
    W1: Tensor
    W2: Tensor
    eps: float = 0.0

    @property
    def f(self) -> int:
        return self.W1.shape[1]

    @cached_property
    def G(self) -> Tensor:
        """X + F(X), the input of the first LayerNorm."""
        return self.attention.X + self.attention.F

    @cached_property
    def y(self) -> Tensor:
        """Y = LN(X + F(X)), (L, d_V)."""
        return layernorm.layernorm(self.G, self.eps)

    @cached_property
    def hidden(self) -> Tensor:
        """ReLU(Y W1), (L, f)."""
        return (self.y @ self.W1).relu()

    @cached_property
    def S(self) -> Tensor:
        """S = ReLU(Y W1) W2 + Y."""
        return self.hidden @ self.W2 + self.y

    @cached_property
    def Z(self) -> Tensor:
        """Z = LN(S)."""
        return layernorm.layernorm(self.S, self.eps)

    @cached_property
    def active(self) -> Tensor:
        """D = diag(vec_r 1[Y W1 > 0]) ∈ R^{L f × L f}."""
        return torch.diag((self.hidden > 0).double().reshape(-1))

    @cached_property
    def up(self) -> Tensor:
        """∂ vec_r ReLU(Y W1)/∂Y = D (I_L ⊗ W1ᵀ)."""
        return self.active @ kron(eye(len(self.y)), self.W1.T)

    @cached_property
    def up_weight(self) -> Tensor:
        """∂ vec_r ReLU(Y W1)/∂W1 = D (Y ⊗ I_f)."""
        return self.active @ kron(self.y, eye(self.f))

    @cached_property
    def down(self) -> Tensor:
        """I_L ⊗ W2ᵀ."""
        return kron(eye(len(self.y)), self.W2.T)

    @cached_property
    def J_Y(self) -> Tensor:
        """∂LN at X + F."""
        return layernorm.jacobian(self.G, self.eps)

    @cached_property
    def J_Z(self) -> Tensor:
        """∂LN at S."""
        return layernorm.jacobian(self.S, self.eps)

    @cached_property
    def H_Y(self) -> Tensor:
        """∂²LN at X + F."""
        return layernorm.hessian(self.G, self.eps)

    @cached_property
    def H_Z(self) -> Tensor:
        """∂²LN at S."""
        return layernorm.hessian(self.S, self.eps)

    def size(self, i: str) -> int:
        """n_i."""
        return self.W1.numel() if i in "12" else derivatives.size(self.attention, i)


# ---------------------------------------------------------------- the two theorems


def hessian_block(b: Block, i: str, j: str) -> Tensor:
    """∂² vec_r Z/∂w_i ∂w_j = (J_Z ⊗ I_{n_i}) ξ_ij + (I ⊗ B_iᵀ) H_Z B_j ∈ R^{L d_V n_i × n_j}.   [Theorem 5]"""
    return chain(b.J_Z, b.H_Z, gradient(b, i), gradient(b, j), second(b, i, j))


def chain(J: Tensor, H: Tensor, B_i: Tensor, B_j: Tensor, xi: Tensor) -> Tensor:
    """(J ⊗ I_{n_i}) ξ_ij + (I_n ⊗ B_iᵀ) H B_j: the second derivative of a composition.              [Theorem 4]"""
    return kron(J, eye(B_i.shape[1])) @ xi + kron(eye(len(J)), B_i.T) @ H @ B_j


def jacobian_block(b: Block, i: str) -> Tensor:
    """∂ vec_r Z/∂w_i = J_Z B_i."""
    return b.J_Z @ gradient(b, i)


# ---------------------------------------------------------------- B_i and ξ_ij


def gradient(b: Block, i: str) -> Tensor:
    """B_i = ∂ vec_r S/∂ vec_r w_i."""
    if i == "1":
        return b.down @ b.up_weight
    if i == "2":
        return kron(b.hidden, eye(len(b.W2.T)))
    return (b.down @ b.up + eye(b.y.numel())) @ by_attention(b, i)


def by_attention(b: Block, i: str) -> Tensor:
    """∂ vec_r Y/∂w_i = J_Y J_i for w_i among W_Q, W_K, W_V."""
    return b.J_Y @ derivatives.jacobian(b.attention, i)


def second(b: Block, i: str, j: str) -> Tensor:
    """ξ_ij = ∂ vec_r(B_i)/∂w_j."""
    if (i in "12") < (j in "12") or (i, j) == ("2", "1"):
        return exchange(second(b, j, i), b.size(j))
    if j not in "12":
        return _feed_forward_attention(b, i, j) if i in "12" else _attention_attention(b, i, j)
    return _both_weights(b) if i != j else torch.zeros(b.y.numel() * b.size(i), b.size(j), dtype=torch.float64)


def _attention_attention(b: Block, i: str, j: str) -> Tensor:
    """(E ⊗ I) ∂²Y/∂w_i∂w_j, with E = ∂S/∂Y and Theorem 4 for Y; ∂²S/∂Y² = 0."""
    a = b.attention
    J_i, J_j, xi = derivatives.jacobian(a, i), derivatives.jacobian(a, j), derivatives.second(a, i, j)
    return kron(b.down @ b.up + eye(b.y.numel()), eye(b.size(i))) @ chain(b.J_Y, b.H_Y, J_i, J_j, xi)


def _feed_forward_attention(b: Block, i: str, j: str) -> Tensor:
    """∂ vec_r((I ⊗ W2ᵀ) D (Y ⊗ I_f)) and ∂ vec_r(ReLU(Y W1) ⊗ I_{d_V}), times ∂Y/∂w_j."""
    L, d = b.y.shape
    if i == "1":
        return kron(b.down @ b.active, eye(b.size("1"))) @ by_left(L, d, eye(b.f)) @ by_attention(b, j)
    return by_left(L, b.f, eye(d)) @ b.up @ by_attention(b, j)


def _both_weights(b: Block) -> Tensor:
    """ξ(W1,W2) = ∂ vec_r((I_L ⊗ W2ᵀ) D (Y ⊗ I_f))/∂W2."""
    L, d = b.y.shape
    by_down = by_right(eye(L), d, b.f) @ commutation(d, b.f)
    return kron(eye(L * d), b.up_weight.T) @ by_down
