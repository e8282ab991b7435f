"""Short sequences: both derivatives of attention in plain operations, P and dS first.

What does not depend on the vectors is computed from saved tensors only, so that a recording of the product finds constants there.
What remains are the matrix products and three passes over data of the size of the scores. Differentiable itself, in any mode.

Shapes: the R = G T rows of N products, n vectors inside: (N, n, R, ·) and (N, n, S, ·), with n = 1 for what all vectors share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evolute.engine.attention_scores import Five, Four, Rule, Shape, Slot, filled, probabilities, working_dtype


def backward(u: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Slot, rule: Rule, with_mask: bool) -> Four:
    """gq, gk, gv, gm for n gradients u (n, B, H, T, F)."""
    one = _Attention(q, k, v, mask, rule)
    u = one.grouped(u)
    dS = one.slope(u)
    gq, gk, gv = _rows(dS, one.k) * rule.scale, _across(dS, one.q), _columns(one.P.mT, u)
    return one.queries(gq), one.keys(gk), one.keys(gv), one.masked(dS) if with_mask else None


def second_order(
    vectors: Four, q: Tensor, k: Tensor, v: Tensor, mask: Slot, u: Slot, rule: Rule, wanted: Sequence[bool]
) -> Five:
    """The Hessian of <u, attention> times n vectors (a, b, c, m): what is wanted of its parts along q, k, v, mask, u."""
    one = _Attention(q, k, v, mask, rule)
    *abc, m = filled(vectors, q, k, v)
    a, b, c = (one.grouped(each) for each in abc if each is not None)
    a, m = a * rule.scale, None if m is None else one.spread(m)
    Pb, Pc = _columns(one.P, torch.cat([b, c], -1)).split([b.shape[-1], c.shape[-1]], -1)
    E = one.centred(a, b, m, Pb)
    U = one.P * E if wanted[2] or wanted[4] else E
    along_u = one.queries(_rows(U, one.v) + Pc) if wanted[4] else None
    if u is None:
        return None, None, None, None, along_u
    u = one.grouped(u.unsqueeze(0))
    along_v = one.keys(_across(U, u)) if wanted[2] else None
    if not (wanted[0] or wanted[1] or wanted[3]):
        return None, None, along_v, None, along_u
    along_q, along_k, along_m = one.curved(u, (a, b, c, m), E, Pc, wanted)
    return along_q, along_k, along_v, along_m, along_u


class _Attention:
    """P of one attention, with q (already scaled), k and v in groups."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Slot, rule: Rule) -> None:
        self.shape, self.scale, self.dtype = Shape.of(q, k), rule.scale, q.dtype
        self.q, self.k, self.v = (self.grouped(each.unsqueeze(0)) for each in (q, k, v))
        self.q = self.q * rule.scale
        self.one = self.k.new_ones(()).expand(*self.k.shape[:-1], 1)
        self.mask, split = mask, None if mask is None else self.shape.split(mask)
        scores = _outer((self.q, self.k))
        self.P = probabilities(scores.view(self.shape.scores), split, 0 if rule.causal else None).view_as(scores)

    def slope(self, u: Tensor) -> Tensor:
        """dS = P (u vᵀ − Σ P u vᵀ), the row sum being u · out."""
        return self.P * _outer((u, self.v), (-_dot(u, _columns(self.P, self.v)), self.one))

    def centred(self, a: Tensor, b: Tensor, m: Slot, Pb: Tensor) -> Tensor:
        """E − Σ P E, the row sum being a · P k + q · P b + Σ P m."""
        e = _dot(a, _columns(self.P, self.k)) + _dot(self.q, Pb)
        if m is None:
            return _outer((a, self.k), (self.q, b), (-e, self.one))
        return _outer((a, self.k), (self.q, b), (-e - _dot(self.P, m), self.one)) + m

    def curved(
        self, u: Tensor, vectors: tuple[Tensor, Tensor, Tensor, Slot], E: Tensor, Pc: Tensor, wanted: Sequence[bool]
    ) -> tuple[Slot, Slot, Slot]:
        """s (R k + dS b), s (Rᵀ q + dSᵀ a) and R = dS E' + P (O − r)."""
        a, b, c, m = vectors
        dS = self.slope(u)
        dSb = _columns(dS, b)
        r = _dot(a, _columns(dS, self.k)) + _dot(self.q, dSb) + _dot(u, Pc)
        r = r if m is None else r + _dot(dS, m)
        R = torch.addcmul(dS * E, self.P, _outer((u, c), (-r, self.one)))
        along_q = self.queries((_rows(R, self.k) + dSb) * self.scale) if wanted[0] else None
        along_k = self.keys(_across(R, self.q) + _columns(dS.mT, a)) if wanted[1] else None
        return along_q, along_k, self.masked(R) if wanted[3] else None

    def grouped(self, x: Tensor) -> Tensor:
        """(n, B, H, T, ·) → (N, n, G T, ·) and (n, B, J, S, ·) → (N, n, S, ·), in the working dtype."""
        x = x.to(working_dtype(x.dtype))
        return x.reshape(x.shape[0], self.shape.N, -1, x.shape[-1]).transpose(0, 1)

    def queries(self, x: Tensor) -> Tensor:
        """(N, n, G T, ·) → (n, B, H, T, ·) in the dtype of q."""
        heads = self.shape.J * self.shape.G
        return x.transpose(0, 1).reshape(x.shape[1], self.shape.B, heads, self.shape.T, x.shape[-1]).to(self.dtype)

    def keys(self, x: Tensor) -> Tensor:
        """(N, n, S, ·) → (n, B, J, S, ·) in the dtype of q."""
        return x.transpose(0, 1).unflatten(1, (self.shape.B, self.shape.J)).to(self.dtype)

    def spread(self, m: Tensor) -> Tensor:
        """(n, shape of the mask) → (N, n, G T, S)."""
        B, J, G, T, S = self.shape.scores
        m = self.shape.split(m.to(self.P.dtype)).movedim(0, 2).expand(B, J, m.shape[0], G, T, S)
        return m.reshape(B * J, m.shape[2], G * T, S)

    def masked(self, R: Tensor) -> Tensor:
        """(N, n, G T, S) → (n, shape of the mask), summed over what the mask shares."""
        assert self.mask is not None
        B, J, G, T, S = self.shape.scores
        R = R.view(B, J, -1, G, T, S).movedim(2, 0).flatten(2, 3)
        return R.sum_to_size(R.shape[0], *self.mask.shape).to(self.mask.dtype)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _outer(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Σ x yᵀ over the pairs, as one product of their columns side by side: (N, n, R, S)."""
    n = max(each.shape[1] for pair in pairs for each in pair)
    left, right = (torch.cat([_repeated(pair[side], n) for pair in pairs], -1) for side in (0, 1))
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1).mT).unflatten(0, (-1, n))


def _rows(x: Tensor, y: Tensor) -> Tensor:
    """x y for n matrices (N, n, R, S) and one y (N, 1, S, ·): the rows of all are one product."""
    return torch.bmm(x.flatten(1, 2), y.squeeze(1)).unflatten(1, x.shape[1:3])


def _columns(x: Tensor, y: Tensor) -> Tensor:
    """x y for one matrix (N, 1, R, S) and n of y (N, n, S, ·): the columns of all are one product."""
    return torch.bmm(x.squeeze(1), y.transpose(1, 2).flatten(2)).unflatten(2, (-1, y.shape[3])).transpose(1, 2)


def _across(x: Tensor, y: Tensor) -> Tensor:
    """xᵀ y for n matrices (N, n, R, S) and one or n of y (N, n, R, ·)."""
    y = _repeated(y, x.shape[1])
    return torch.bmm(x.flatten(0, 1).mT, y.flatten(0, 1)).unflatten(0, x.shape[:2])


def _repeated(x: Tensor, n: int) -> Tensor:
    return x.expand(-1, n, -1, -1)
