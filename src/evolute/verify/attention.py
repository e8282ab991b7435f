"""Theorems 3.1 and 3.2 against automatic differentiation of F = softmax(X W_Q W_Kᵀ Xᵀ/√d_K) X W_V."""

from collections.abc import Callable

import torch
from torch import Tensor

from evolute.calculus.published import attention, counterexamples, derivatives
from evolute.calculus.published.attention import SelfAttention
from evolute.verify import oracle
from evolute.verify.statement import Sampler, Statement, first_line, register

Weights = tuple[Tensor, Tensor, Tensor]
PLACE = {"Q": 0, "K": 1, "V": 2}


def sample(draw: Sampler) -> SelfAttention:
    """L from 2 to 4, d_V from 2 to 4, d_K from 1 to 4."""
    L, d_V, d_K = draw.integer(2, 4), draw.integer(2, 4), draw.integer(1, 4)
    return with_sizes(draw, L, d_V, d_K)


def with_sizes(draw: Sampler, L: int, d_V: int, d_K: int) -> SelfAttention:
    """Weights of variance 1/d_V: rows of A that are neither flat nor one-hot."""
    W_Q, W_K, W_V = (draw.normal(d_V, columns) / d_V**0.5 for columns in (d_K, d_K, d_V))
    return SelfAttention(draw.normal(L, d_V), W_Q, W_K, W_V, draw.normal(L, d_V))


def weights(a: SelfAttention) -> Weights:
    return a.W_Q, a.W_K, a.W_V


def forward(a: SelfAttention) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(W_Q, W_K, W_V) ↦ F."""

    def F(W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
        scores = (a.X @ W_Q) @ (a.X @ W_K).mT / W_Q.shape[1] ** 0.5
        return scores.softmax(-1) @ (a.X @ W_V)

    return F


def loss(a: SelfAttention) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """‖F − Y‖²/(L d_V)."""
    F = forward(a)
    return lambda *w: torch.nn.functional.mse_loss(F(*w), a.Y)


def outer(a: SelfAttention, i: str, j: str) -> Tensor:
    """Jᵀ (∂²ℓ/∂F²) J, with J by automatic differentiation."""
    J_i, J_j = (oracle.jacobian(forward(a), weights(a), PLACE[each]) for each in (i, j))
    return 2 / a.X.numel() * J_i.mT @ J_j


def functional(a: SelfAttention, i: str, j: str) -> Tensor:
    """∂² Σ_k (∂ℓ/∂F_k) F_k, with ∂ℓ/∂F held fixed."""
    F = forward(a)
    g = 2 / a.X.numel() * (F(*weights(a)) - a.Y)
    return oracle.second(lambda *w: (g * F(*w)).sum(), weights(a), PLACE[i], PLACE[j])


def _pair(pair: str) -> tuple[Statement[SelfAttention], Statement[SelfAttention]]:
    """H_o and H_f of one printed block."""
    i, j = pair
    H_o, H_f = attention.OUTER[pair], attention.FUNCTIONAL[pair]
    return (
        Statement(f"Theorem 3.1 · H_o({i},{j})", first_line(H_o), sample, H_o, lambda a: outer(a, i, j)),
        Statement(f"Theorem 3.2 · H_f({i},{j})", first_line(H_f), sample, H_f, lambda a: functional(a, i, j)),
    )


_pairs = [_pair(pair) for pair in attention.OUTER]
register(*(outer for outer, _ in _pairs), *(functional for _, functional in _pairs))
register(
    Statement(
        "Theorem 3.1 + 3.2 · H",
        "H = H_o + H_f, all nine blocks over W_Q, W_K, W_V",
        sample,
        derivatives.hessian,
        lambda a: oracle.hessian(loss(a), weights(a)),
    ),
    Statement(
        "Theorem 3.1 · H_o(Q,K), as printed",
        "with K_{m,n} of row-wise vec: K_{m,n} vec_r(A) = vec_r(Aᵀ), A ∈ R^{m×n}",
        lambda _: counterexamples.three_by_two(),
        attention.outer_qk_rowwise,
        lambda a: outer(a, "Q", "K"),
        erratum=True,
    ),
    Statement(
        "Theorem 3.2 · H_f(Q,K), as printed",
        "with ⊗ before the product: (Z1 ⊗ I)(S ⊗ I_{d_K})",
        lambda _: counterexamples.three_by_two(),
        attention.functional_qk_tight,
        lambda a: functional(a, "Q", "K"),
        erratum=True,
    ),
)
