"""L = U diag(s) Uᵀ, cut along groups: the part of a matrix that is known, so that probes need see only the rest.

For a probe v in the columns of group j the identity E‖(A v)_i‖² − E‖(L v)_i‖² + ‖L_ij‖² = ‖A_ij‖² holds for every L;
with L of the leading eigenpairs of A the scatter of the left side is that of the remainder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """U (P, k), s (k,); `groups` are the coordinates of each group. All float64 from here on."""

    U: Tensor
    s: Tensor
    groups: tuple[Tensor, ...]

    @cached_property
    def gram(self) -> Tensor:
        """K_i = U_iᵀ U_i  (groups, k, k)."""
        return torch.stack([self.U[rows].T @ self.U[rows] for rows in self.groups])

    def squares(self) -> Tensor:
        """‖L_ij‖² = tr(s K_j s K_i)  (groups, groups)."""
        scaled = self.s[:, None] * self.gram  # (groups, k, k)
        return torch.einsum("iab,jba->ij", scaled, scaled)

    def traces(self) -> Tensor:
        """Tr L_jj  (groups,)."""
        return torch.einsum("a,jaa->j", self.s, self.gram)

    def coefficients(self, V: Tensor, j: int) -> Tensor:
        """C with L v = U c, for probes V (r, n_j) in group j  (r, k)."""
        return (V @ self.U[self.groups[j]]) * self.s

    def row_squares(self, c: Tensor) -> Tensor:
        """‖(U c)_i‖²  (r, groups)."""
        return torch.einsum("ra,iab,rb->ri", c, self.gram, c)

    def own(self, V: Tensor, c: Tensor, j: int) -> Tensor:
        """vᵀ(L v)_j  (r,)."""
        return ((V @ self.U[self.groups[j]]) * c).sum(-1)


def inner(L: LowRank, M: LowRank) -> Tensor:
    """⟨L_:j, M_:j⟩ for every group j."""
    weights = L.s[:, None] * (L.U.T @ M.U) * M.s
    return torch.stack([(weights * (L.U[rows].T @ M.U[rows])).sum() for rows in L.groups])
