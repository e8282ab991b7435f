"""S = s q kᵀ + M,  P = softmax(S): the scores that every form of attention here starts from, and how they are grouped.

Letters, here and in the other attention files:

    B batch, H query heads, J key heads, G = H / J query heads that share one key head,
    T queries, S keys, E the size of a head, F the size of a value
    q (B, H, T, E)   k (B, J, S, E)   v (B, J, S, F)   out, u (B, H, T, F)   mask (B|1, H|1, T|1, S|1)
    u        the gradient that arrives at out; gq, gk, gv, gm are the gradients that leave for q, k, v, mask
    a b c m  what meets gq, gk, gv, gm: cotangents, or tangents of q, k, v, mask; n vectors at once on a leading axis
    wanted   the letters of those among q, k, v, m (the mask) and u along which a result is wanted

<u, attention(q, k, v, M)> has one symmetric Hessian; its product with (a, b, c, m) is the only second derivative that
anyone needs, in forward or in reverse mode. For each row of scores, with X = u vᵀ and Σ over the row:

    dS = P (X − Σ P X)       gq = s dS k      gk = s dSᵀ q      gv = Pᵀ u      gm = dS
    E  = s (a kᵀ + q bᵀ) + m      E' = E − Σ P E       U = P E'
    O  = u cᵀ                     r  = Σ dS E + Σ P O  R = dS E' + P (O − r)
    along q: s (R k + dS b)   along k: s (Rᵀ q + dSᵀ a)   along v: Uᵀ u   along M: R   along u: U v + P c

The G query heads of one key head are rows of one longer product, so grouping costs nothing extra: N = B J of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Slot = Tensor | None
Four = tuple[Slot, Slot, Slot, Slot]
Five = tuple[Slot, Slot, Slot, Slot, Slot]


@dataclass(frozen=True)
class Rule:
    """What is not a tensor: causal or not, the scale s, and whether P and dS are kept between products."""

    causal: bool
    scale: float
    keep: bool = False


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention; see the letters above."""

    B: int
    J: int
    G: int
    T: int
    S: int

    @staticmethod
    def of(q: Tensor, k: Tensor) -> Shape:
        return Shape(q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2])

    @property
    def N(self) -> int:
        return self.B * self.J

    @property
    def scores(self) -> tuple[int, int, int, int, int]:
        return self.B, self.J, self.G, self.T, self.S

    def split(self, mask: Tensor) -> Tensor:
        """(…, B|1, H|1, T|1, S|1) → (…, B|1, J|1, G|1, T|1, S|1)."""
        heads = (self.J, self.G) if mask.shape[-3] != 1 else (1, 1)
        return mask.unflatten(-3, heads)


def filled(vectors: Four, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Slot]:
    """a, b, c, m with zeros for a, b or c where there is none."""
    n = next(each.shape[0] for each in vectors if each is not None)
    a, b, c = (
        like.new_zeros(()).expand(n, *like.shape) if each is None else each
        for each, like in zip(vectors, (q, k, v), strict=False)
    )
    return a, b, c, vectors[3]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is added up in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def probabilities(scores: Tensor, mask: Slot, first: int | None, out: Tensor) -> Tensor:
    """P = softmax(scores + mask) into `out`, zero on rows that see no key; `scores` (…, rows, keys) are overwritten.

    Never exp(S − logsumexp): with masks of finfo.min the logarithm of the number of keys is lost in the difference, and
    a row that is masked everywhere would weigh every key by 1. `first` is the number of the first row, if causal.
    """
    if mask is not None:
        _ = scores.add_(mask) if mask.is_floating_point() else scores.masked_fill_(~mask, -torch.inf)
    if first is not None:
        _hide_future(scores, first)
    if mask is None:
        return torch.softmax(scores, -1, out=out)
    blind = scores.amax(-1, keepdim=True) == -torch.inf
    return torch.softmax(scores.masked_fill_(blind, 0.0), -1, out=out).masked_fill_(blind, 0.0)


def _hide_future(scores: Tensor, first: int) -> None:
    """Query first + i sees the keys up to first + i."""
    corner = scores[..., first:]
    if corner.shape[-1]:
        future = torch.ones(corner.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        corner.masked_fill_(future, -torch.inf)
