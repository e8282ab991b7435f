"""What a smooth map is at one point: its value, and how first and second derivatives act.

Index legend, for all of `calculus`: t token (n of them, over the whole batch), k vector; features come last. A value is
(n, p), a tangent (k, n, p): k of them at once, each a direction per token. Maps are token-wise: y_t = f_t(x_t).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class LocalMap(ABC):
    """y_t = f_t(x_t) at a point: `push` is J ẋ, `pull` Jᵀ g, `bend` (Σ_c g_c ∂²y_c) ẋ."""

    value: Tensor  # (n, q)

    @property
    @abstractmethod
    def inputs(self) -> int:
        """p, the number of inputs per token."""

    @abstractmethod
    def push(self, tangent: Tensor) -> Tensor:
        """J ẋ: (k, n, p) → (k, n, q)."""

    @abstractmethod
    def pull(self, g: Tensor) -> Tensor:
        """Jᵀ g: (…, n, q) → (…, n, p)."""

    @abstractmethod
    def bend(self, g: Tensor, tangent: Tensor) -> Tensor:
        """(Σ_c g_c ∂²y_c) ẋ: g (n, q), ẋ (k, n, p) → (k, n, p)."""

    def bend_along(self, g: Tensor, tangent: Tensor, moved: Tensor) -> Tensor:
        """`bend`, for which J ẋ is there already."""
        del moved
        return self.bend(g, tangent)

    @property
    def jacobian(self) -> Tensor:
        """J, (n, q, p)."""
        return self.push(self._basis()).permute(1, 2, 0)

    def curvature(self, g: Tensor) -> Tensor:
        """Σ_c g_c ∂²y_c, (n, p, p): the second derivative, contracted with an upstream gradient (n, q)."""
        return self.bend(g, self._basis()).permute(1, 2, 0)

    def _basis(self) -> Tensor:
        return identity(self.inputs, self.value)


def identity(p: int, like: Tensor) -> Tensor:
    """The p unit tangents of every token: (p, n, p)."""
    return torch.eye(p, dtype=like.dtype, device=like.device)[:, None].expand(p, like.shape[0], p)
