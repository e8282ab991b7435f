"""From scores to attention weights, row by row: softmax, or any elementwise function of the scores.

    A = softmax(s)    J = Σ = diag(A) − A Aᵀ    Σ_k g_k ∂²A_k = diag(w) − w Aᵀ − A wᵀ,   w = A ⊙ (g − A·g)
    A = ψ(s)          J = diag(ψ′)              diag(ψ″ ⊙ g)

Entries that a mask takes out have weight zero, and so have all their derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.calculus.activations import Pointwise, named
from evolute.calculus.local import LocalMap


@dataclass(eq=False)
class Softmax(LocalMap):
    """A = softmax(s) along the last axis; any axes before it."""

    value: Tensor

    @property
    def inputs(self) -> int:
        return self.value.shape[-1]

    def push(self, tangent: Tensor) -> Tensor:
        moved = self.value * tangent
        return torch.addcmul(moved, self.value, moved.sum(-1, keepdim=True), value=-1)

    def pull(self, g: Tensor) -> Tensor:
        return self.push(g)

    def bend(self, g: Tensor, tangent: Tensor) -> Tensor:
        return self.bend_along(g, tangent, self.push(tangent))

    def bend_along(self, g: Tensor, tangent: Tensor, moved: Tensor) -> Tensor:
        """Ȧ ⊙ (g − A·g) − A (Ȧ·g), with Ȧ = Σ ṡ already there."""
        del tangent
        pulled = moved * g
        mean = (self.value * g).sum(-1, keepdim=True)
        return pulled - moved * mean - self.value * pulled.sum(-1, keepdim=True)


@dataclass(eq=False)
class Elementwise(Pointwise):
    """A = ψ(s)."""

    def bend_along(self, g: Tensor, tangent: Tensor, moved: Tensor) -> Tensor:
        """ψ″ ⊙ g ⊙ ṡ."""
        del moved
        return self.bend(g, tangent)


Weights = Softmax | Elementwise
KINDS = {"softmax": "softmax", "linear": "identity", "sigmoid": "sigmoid", "relu": "relu"}


def softmax(scores: Tensor) -> Softmax:
    """Attention weights, row by row: A = exp(s)/Σ exp(s), J = diag(A) − A Aᵀ.

    >>> softmax(torch.zeros(1, 2)).jacobian
    tensor([[[ 0.2500, -0.2500],
             [-0.2500,  0.2500]]])
    """
    return Softmax(torch.softmax(scores, -1))


def weights(kind: str, scores: Tensor, kept: Tensor | None = None) -> Weights:
    """The attention weights of scores (…, L, L); `kept` is true where a query may look."""
    if kind == "softmax":
        scores = scores if kept is None else scores.masked_fill(~kept, -torch.inf)
        return Softmax(torch.softmax(scores, -1))
    phi = named(KINDS[kind])
    parts = (phi.value(scores), phi.slope(scores), phi.bend(scores))
    value, slope, second = (part if kept is None else part * kept for part in parts)
    return Elementwise(value, slope, second)
