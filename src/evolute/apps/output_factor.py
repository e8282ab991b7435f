"""S with S Sᵀ = ∂²ℓ/∂F²: its columns, pulled back through the model, make up the Gauss–Newton matrix.

    H_o = (1/N) Σ_n J_nᵀ S_n S_nᵀ J_n = (1/N) Σ_c Σ_n (J_nᵀ s_nc)(J_nᵀ s_nc)ᵀ      n sample, c column, N terms

Exact with all columns, which are as many as a sample has outputs. Labels drawn from the model give one random column
in their place, with the same mean. Outputs are (B, T, V): B samples, T terms each, V numbers per term; labels (B, T).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

IGNORED = -100


def cross_entropy_columns(logits: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """√p_c (e_c − p) at one term t, for each t and c: ∂²ℓ/∂F² = diag(p) − p pᵀ = Σ_c p_c (e_c − p)(e_c − p)ᵀ.

    >>> logits, labels = torch.randn(1, 1, 3), torch.tensor([[0]])
    >>> S = torch.cat(list(cross_entropy_columns(logits, labels)))[:, 0]
    >>> p = logits.softmax(-1)[0, 0]
    >>> torch.allclose(S.T @ S, torch.diag(p) - torch.outer(p, p), atol=1e-6)
    True
    """
    p, counted = logits.softmax(-1), labels != IGNORED
    for t in counted.any(0).nonzero().flatten().tolist():
        for c in range(logits.shape[-1]):
            out = torch.zeros_like(logits)
            out[:, t] = -p[:, t]
            out[:, t, c] += 1
            yield _where(counted, out * p[:, t, c].sqrt()[:, None, None])


def square_columns(outputs: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """√2 e_c at one term: the loss (F − y)² of each number has ∂²ℓ/∂F² = 2."""
    del labels
    for t in range(outputs.shape[1]):
        for c in range(outputs.shape[2]):
            out = torch.zeros_like(outputs)
            out[:, t, c] = math.sqrt(2)
            yield out


def sampled_columns(logits: Tensor, labels: Tensor, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
    """(p − e_ŷ)/√draws with labels ŷ ~ p, of cross-entropy: E Σ s sᵀ = diag(p) − p pᵀ, terms independent."""
    p = logits.softmax(-1)
    for _ in range(draws):
        drawn = torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(labels.shape)
        yield label_column(logits, torch.where(labels == IGNORED, IGNORED, drawn)) / math.sqrt(draws)


def label_column(logits: Tensor, labels: Tensor) -> Tensor:
    """∂ℓ/∂F = p − e_y, the gradient of cross-entropy itself."""
    counted = labels != IGNORED
    out = logits.softmax(-1).scatter_add(-1, labels.clamp(min=0)[..., None], -torch.ones_like(logits[..., :1]))
    return _where(counted, out)


def _where(counted: Tensor, column: Tensor) -> Tensor:
    """Zero at terms that do not count."""
    return column * counted[..., None]
