"""Small examples against the print, one for each statement that is off."""

import torch
from torch import Tensor

from evolute.calculus.published.attention import SelfAttention


def _matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def one_token_that_all_look_at() -> SelfAttention:
    """Two tokens, both attend to the first: ‖A‖² = 2, so ‖A X‖² is nearly 2‖X‖².             [H_o(V,V)]"""
    X = _matrix([1.0], [0.1])
    return SelfAttention(X, _matrix([10.0]), _matrix([10.0]), _matrix([1.0]), torch.zeros_like(X))


def orthogonal_tokens() -> SelfAttention:
    """X = I_2, every weight of norm 1 and every block bound 1/2, yet ‖H‖ = 0.76; Y = F.           [max of blocks]"""
    X, h = torch.eye(2, dtype=torch.float64), 0.5**0.5
    W_Q, W_K, W_V = _matrix([h], [h]), _matrix([h], [-h]), _matrix([h, 0.0], [-h, 0.0])
    a = SelfAttention(X, W_Q, W_K, W_V, 0 * X)
    return SelfAttention(X, W_Q, W_K, W_V, a.F)


def ten_tokens_that_look_at_two(L: int = 12, size: float = 6.0) -> SelfAttention:
    """L − 2 tokens along e₃ attend to (1, ±1, 0): M1 along e₁, M2 along e₂, and ‖X‖² stays 2.       [H_o(V,Q)]"""
    small = [0.0, 0.0, (2 / (L - 2)) ** 0.5]
    X = size * _matrix([1.0, 1.0, 0.0], [1.0, -1.0, 0.0], *[small] * (L - 2))
    W_Q = _matrix([0.0, 0.0], [0.0, 0.0], [1.0, 0.0])
    W_K = _matrix([1.0, 0.0], [0.0, 1.0], [0.0, 0.0])
    return SelfAttention(X, W_Q, W_K, torch.eye(3, dtype=torch.float64), torch.zeros_like(X))


def one_token() -> SelfAttention:
    """L = 1, d_V = 2: A = 1 and H_o(V,V) = x xᵀ ⊗ I, whose Frobenius norm is √2 ‖x‖².          [Frobenius norms]"""
    X = _matrix([1.0, 0.0])
    return SelfAttention(X, _matrix([1.0], [0.0]), _matrix([1.0], [0.0]), torch.eye(2, dtype=torch.float64), 0 * X)


def three_by_two() -> SelfAttention:
    """d_V = 2, d_K = 3: the smallest sizes where K_{2,3} ≠ K_{3,2}.                       [H_o(Q,K), H_f(Q,K)]"""
    X = _matrix([1.0, 0.0], [0.0, 1.0])
    W_Q, W_K = _matrix([1.0, 0.0, 1.0], [0.0, 1.0, 1.0]), _matrix([1.0, 1.0, 0.0], [0.0, 1.0, 1.0])
    return SelfAttention(X, W_Q, W_K, torch.eye(2, dtype=torch.float64), torch.zeros_like(X))


def three_features() -> Tensor:
    """One token (1, 0, −1): LN is (1, 0, −1)·√(3/2) whatever its length, so its derivative along itself is zero."""
    return _matrix([1.0, 0.0, -1.0])
