"""The bounds of Theorems 1 and 6: as printed, and as they hold.

‖·‖ is the spectral norm, ‖W‖ the largest of ‖W_Q‖, ‖W_K‖, ‖W_V‖ (the most generous reading), R = ‖F − Y‖_F and
S = ‖S‖ = √d_V. The print takes ‖A‖ ≤ 1, which no row-stochastic matrix but a doubly stochastic one has; it is at most
√L. It also leaves out that every row's ‖diag(A_i) − A_iᵀA_i‖ ≤ ½, which is what saves the blocks without `M1`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evolute.calculus.published import block, layernorm
from evolute.calculus.published.algebra import norm
from evolute.calculus.published.attention import SelfAttention

Bound = Callable[[SelfAttention], float]


def weight(a: SelfAttention) -> float:
    """‖W‖."""
    return max(norm(a.W_Q), norm(a.W_K), norm(a.W_V))


def residual(a: SelfAttention) -> float:
    """R = ‖F − Y‖_F = ‖R_1‖."""
    return float((a.F - a.Y).norm())


# ---------------------------------------------------------------- Theorem 1, as printed


def outer_vv(a: SelfAttention) -> float:
    """2‖X‖²/(L d_V). Too small: see `outer_vv_corrected`."""
    return a.scale * norm(a.X) ** 2


def outer_vv_frobenius(a: SelfAttention) -> float:
    """2‖X‖²_F/(L d_V): the same with Frobenius norms on both sides. Too small: ⊗ I_{d_V} multiplies them by √d_V."""
    return a.scale * float(a.X.norm()) ** 2


def outer_qq(a: SelfAttention) -> float:
    """2‖W‖⁴‖X‖⁶/(L d_V d_K), for H_o(Q,K) too."""
    return a.scale / a.d_K * weight(a) ** 4 * norm(a.X) ** 6


def outer_vq(a: SelfAttention) -> float:
    """2‖X‖⁴‖W‖²/(L d_V √d_K). Too small for long sequences: see `outer_vq_corrected`."""
    return a.scale / a.d_K**0.5 * norm(a.X) ** 4 * weight(a) ** 2


def functional_vv(a: SelfAttention) -> float:
    """0."""
    return 0.0


def functional_qq(a: SelfAttention) -> float:
    """2R‖W‖³‖X‖⁵/(L d_V d_K)."""
    return a.scale / a.d_K * residual(a) * weight(a) ** 3 * norm(a.X) ** 5


def functional_vq(a: SelfAttention) -> float:
    """2RS‖X‖³‖W‖/(L d_V √d_K), S = √d_V."""
    return a.scale * (a.d_V / a.d_K) ** 0.5 * residual(a) * norm(a.X) ** 3 * weight(a)


def functional_qk(a: SelfAttention) -> float:
    """The sum of both kinds."""
    return functional_qq(a) + functional_vq(a)


# ---------------------------------------------------------------- Theorem 1, as it holds


def outer_vv_corrected(a: SelfAttention) -> float:
    """2‖A‖²‖X‖²/(L d_V) ≤ 2‖X‖²/d_V: M1 = A X."""
    return norm(a.A) ** 2 * outer_vv(a)


def outer_vq_corrected(a: SelfAttention) -> float:
    """‖A‖‖X‖⁴‖W‖²/(L d_V √d_K): ‖M1‖ ≤ ‖A‖‖X‖ and ‖Z1‖ ≤ ‖X‖³/2."""
    return norm(a.A) / 2 * outer_vq(a)


PRINTED_OUTER: dict[str, Bound] = {"VV": outer_vv, "QQ": outer_qq, "VQ": outer_vq, "QK": outer_qq}
CORRECTED_OUTER: dict[str, Bound] = PRINTED_OUTER | {"VV": outer_vv_corrected, "VQ": outer_vq_corrected}
FUNCTIONAL: dict[str, Bound] = {"VV": functional_vv, "QQ": functional_qq, "VQ": functional_vq, "QK": functional_qk}


def first_moment(a: SelfAttention) -> float:
    """‖Z1‖ ≤ ‖X‖³, as printed; half of it holds too."""
    return norm(a.X) ** 3


def block_bounds(a: SelfAttention, outer: dict[str, Bound]) -> Tensor:
    """[b_ij] over Q, K, V: the bounds of H_o(i,j) and H_f(i,j) added; K like Q."""
    pairs = [["QQ", "QK", "VQ"], ["QK", "QQ", "VQ"], ["VQ", "VQ", "VV"]]
    return torch.tensor([[outer[p](a) + FUNCTIONAL[p](a) for p in row] for row in pairs], dtype=torch.float64)


# ---------------------------------------------------------------- the whole, from its blocks


def whole_by_maximum(blocks: Tensor) -> float:
    """‖H‖ ≤ max b_ij, one published form. Wrong for any b: [[1, 1], [1, 1]], of blocks 1 × 1, has norm 2."""
    return float(blocks.max())


def whole_by_count(blocks: Tensor) -> float:
    """‖H‖ ≤ m · max b_ij for m × m blocks, the other published form: 3·max for Q, K, V, 5·max for the block."""
    return len(blocks) * float(blocks.max())


def whole(blocks: Tensor) -> float:
    """‖[b_ij]‖, the spectral norm of the matrix of block bounds: ‖H‖ ≤ ‖[‖H_ij‖]‖ ≤ ‖[b_ij]‖ ≤ m · max b_ij."""
    return norm(blocks)


# ---------------------------------------------------------------- Theorem 6: the block


def layernorm_jacobian(X: Tensor, eps: float = 0.0) -> float:
    """‖∂LN‖ ≤ 1/σ_min."""
    return float(layernorm.inverse_deviation(X, eps).max())


def layernorm_hessian(X: Tensor, eps: float = 0.0) -> float:
    """‖∂²LN‖ ≤ (2 + √(d−1))/(√d σ_min²), of the (L d)² × L d matrix.

    Along v it is −[z (Jv)ᵀ + (Jv) zᵀ + (z·v) J]/(σ d); ‖z‖ ≤ √d, ‖Jv‖ ≤ 1/σ and ‖J‖_F ≤ √(d−1)/σ.
    """
    d = X.shape[1]
    return (2 + (d - 1) ** 0.5) / d**0.5 * layernorm_jacobian(X, eps) ** 2


def block_second(b: block.Block, i: str, j: str) -> float:
    """‖H^{(i,j)}‖ ≤ ‖ξ_ij‖/σ_min + (2 + √(d−1))/√d · ‖B_i‖‖B_j‖/σ_min², σ of S.               [Theorem 6]"""
    B_i, B_j = norm(block.gradient(b, i)), norm(block.gradient(b, j))
    inner = layernorm_jacobian(b.S, b.eps) * norm(block.second(b, i, j))
    return inner + layernorm_hessian(b.S, b.eps) * B_i * B_j


def block_loss(b: block.Block, i: str, j: str) -> float:
    """‖H_ij‖ ≤ 2/(L d_V) (‖B_i‖‖B_j‖/σ_min² + ‖Z − Y‖_F ‖H^{(i,j)}‖), for ℓ = ‖Z − Y‖²_F/(L d_V)."""
    B_i, B_j = norm(block.gradient(b, i)), norm(block.gradient(b, j))
    outer = layernorm_jacobian(b.S, b.eps) ** 2 * B_i * B_j
    return b.attention.scale * (outer + float((b.Z - b.attention.Y).norm()) * block_second(b, i, j))


def block_loss_bounds(b: block.Block) -> Tensor:
    """[b_ij] over W_Q, W_K, W_V, W1, W2."""
    rows = [[block_loss(b, i, j) for j in block.GROUPS] for i in block.GROUPS]
    return torch.tensor(rows, dtype=torch.float64)
