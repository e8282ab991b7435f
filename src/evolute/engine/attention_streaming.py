"""Attention, its gradient, and the product with its second derivative, tile by tile: memory of some tiles, not of all.

P and dS of all tiles may be kept by an earlier call; everything else of the size of scores lives in the few buffers of
one tile, written in place. The sums over rows (gk, gv) are held transposed, qᵀ R instead of Rᵀ q, which the matrix
product does about a third faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evolute.engine.attention_scores import Five, Four, Rule, Slot, filled
from evolute.engine.attention_tiles import Parts, Tile, Work, centred


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Slot, rule: Rule) -> Tensor:
    """P v."""
    work = Work(q, k, v, mask, rule)
    parts = Parts(work, 1, "u")
    for spot in work.spots:
        tile = Tile(work, spot, work.weigh(spot, work.buffer(0, 1, spot)))
        parts.write(parts.u, tile, _rows(tile.P, tile.v))
    out = parts.results()[4]
    assert out is not None
    return out[0]


def keep(
    u: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Slot, rule: Rule, wanted: str
) -> tuple[Four, Tensor, Tensor]:
    """What is wanted of gq, gk, gv, gm for one u, and P and dS of all tiles, one tile after the other."""
    work = Work(q, k, v, mask, rule)
    P, dS = (work.k.new_empty(sum(spot.size for spot in work.spots)) for _ in range(2))
    first = _First(work, u.unsqueeze(0), wanted, dS)
    for spot in work.spots:
        tile = Tile(work, spot, work.weigh(spot, spot.of(P)))
        tile.slope(tile.rows(first.u), spot.of(dS))
        first.visit(tile)
    return first.parts.results()[:4], P, dS


def backward(
    u: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Slot,
    rule: Rule,
    wanted: str,
    P: Slot = None,
    dS: Slot = None,
) -> Four:
    """What is wanted of gq, gk, gv, gm for n of u (n, B, H, T, F); P, and for n = 1 also dS, may have been kept."""
    work = Work(q, k, v, mask, rule)
    return _run(work, P, u.shape[0], lambda block: _First(work, u[block], wanted, dS))[:4]


def second_order(
    vectors: Four,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Slot,
    u: Slot,
    rule: Rule,
    wanted: str,
    P: Slot = None,
    dS: Slot = None,
) -> Five:
    """The Hessian of <u, attention> times n vectors (a, b, c, m): its wanted parts along q, k, v, mask, u."""
    work = Work(q, k, v, mask, rule)
    a, b, c, m = filled(vectors, q, k, v)
    row = None if u is None else work.rows(u.unsqueeze(0))

    def some(block: slice) -> _Second:
        return _Second(work, (a[block], b[block], c[block], None if m is None else m[block]), row, wanted, dS)

    return _run(work, P, a.shape[0], some)


def _run(work: Work, P: Slot, n: int, some: Callable[[slice], _First | _Second]) -> Five:
    """All tiles for all vectors: together if P has to be made, else one block of vectors after the other."""
    turns = [work.blocks(n)] if P is None else [[block] for block in work.blocks(n)]
    results: list[Five] = []
    for turn in turns:
        blocks = [some(block) for block in turn]
        for spot in work.spots:
            tile = Tile(work, spot, work.weigh(spot, work.buffer(0, 1, spot)) if P is None else spot.of(P))
            for block in blocks:
                block.visit(tile)
        results += [block.parts.results() for block in blocks]
    return _joined(results)


class _First:
    """gq, gk, gv, gm for a few gradients u at once."""

    def __init__(self, work: Work, u: Tensor, wanted: str, dS: Slot) -> None:
        self.work, self.u, self.dS = work, work.rows(u), dS
        self.parts = Parts(work, u.shape[0], wanted)

    def visit(self, tile: Tile) -> None:
        u, spot = tile.rows(self.u), tile.spot
        dS = spot.of(self.dS) if self.dS is not None else tile.slope(u, self.work.buffer(2, u.shape[1], spot))
        if self.parts.q is not None:
            self.parts.write(self.parts.q, tile, _rows(dS, tile.k))
        self.parts.add(self.parts.k, tile, tile.q, dS)
        self.parts.add(self.parts.v, tile, u, tile.P)
        self.parts.add_mask(self.parts.m, tile, dS)


class _Second:
    """The product with the second derivative for a few vectors at once."""

    def __init__(
        self,
        work: Work,
        vectors: tuple[Tensor, Tensor, Tensor, Slot],
        u: Slot,
        wanted: str,
        dS: Slot,
    ) -> None:
        a, b, c, m = vectors
        self.work, self.u, self.dS = work, u, dS
        self.a, self.b, self.c = work.rows(a) * work.rule.scale, work.columns(b), work.columns(c)
        self.m = None if m is None else work.shape.split(m)
        self.left = torch.cat([self.a, work.q.expand_as(self.a)], -1)
        self.right = torch.cat([work.k.unsqueeze(1).expand_as(self.b), self.b], -1)
        self.n, self.parts = self.a.shape[1], Parts(work, self.a.shape[1], wanted)
        self.curved = any(letter in wanted for letter in "qkm")

    def visit(self, tile: Tile) -> None:
        u = None if self.u is None else tile.rows(self.u)
        E = self._spread(tile)
        e = self._flat(tile, E, u)
        if u is not None and self.curved:
            self._curved(tile, E.sub_(e), u, self._slope(tile, u))

    def _slope(self, tile: Tile, u: Tensor) -> Tensor:
        """The kept dS, or one made once for all vectors."""
        if self.dS is not None:
            return tile.spot.of(self.dS)
        if tile.dS is None:
            tile.dS = tile.slope(u, self.work.buffer(1, 1, tile.spot))
        return tile.dS

    def _spread(self, tile: Tile) -> Tensor:
        """E = s (a kᵀ + q bᵀ) + m."""
        E = self.work.buffer(2, self.n, tile.spot)
        left, right = tile.rows(self.left), tile.keys(self.right)
        torch.bmm(left.flatten(0, 1), right.flatten(0, 1).mT, out=E.flatten(0, 1))
        for i in range(self.n if self.m is not None else 0):
            assert self.m is not None
            E[:, i].unflatten(1, (self.work.shape.G, -1)).add_(self.work.spread(self.m[i], tile.spot))
        return E

    def _flat(self, tile: Tile, E: Tensor, u: Slot) -> Tensor:
        """E = Σ P E; with U = P (E − e), along u: U v + P c and along v: Uᵀ u."""
        U = torch.mul(tile.P, E, out=self.work.buffer(3, self.n, tile.spot))
        e = U.sum(-1, keepdim=True)
        U.addcmul_(tile.P, e, value=-1)
        if self.parts.u is not None:
            self.parts.write(self.parts.u, tile, _rows(U, tile.v, tile.P, tile.keys(self.c)))
        if u is not None:
            self.parts.add(self.parts.v, tile, u, U)
        return e

    def _curved(self, tile: Tile, E: Tensor, u: Tensor, dS: Tensor) -> None:
        """S (R k + dS b), s (Rᵀ q + dSᵀ a) and R = dS E + P (O − r), where E is already without e."""
        O = self.work.buffer(3, self.n, tile.spot)  # noqa: E741 (a letter of the paper)
        torch.bmm(u.expand(-1, self.n, -1, -1).flatten(0, 1), tile.keys(self.c).flatten(0, 1).mT, out=O.flatten(0, 1))
        R = centred(E.mul_(dS).addcmul_(tile.P, O), tile.P)
        if self.parts.q is not None:
            self.parts.write(self.parts.q, tile, _rows(R, tile.k, dS, tile.keys(self.b)))
        self.parts.add(self.parts.k, tile, tile.q, R)
        self.parts.add(self.parts.k, tile, tile.rows(self.a), dS)
        self.parts.add_mask(self.parts.m, tile, R)


def _rows(x: Tensor, y: Tensor, shared: Slot = None, each: Slot = None) -> Tensor:
    """X y + shared each: x (h, n, r, s) with one y (h, s, ·), one matrix (h, 1, r, s) with n of (h, n, s, ·)."""
    product = torch.bmm(x.flatten(1, 2), y)
    if shared is None or each is None:
        return product.unflatten(1, x.shape[1:3])
    if each.shape[1] == 1:
        return product.baddbmm_(shared.squeeze(1), each.squeeze(1)).unsqueeze(1)
    second = torch.bmm(shared.squeeze(1), each.transpose(1, 2).flatten(2))
    return product.unflatten(1, x.shape[1:3]).add_(second.unflatten(2, (each.shape[1], -1)).transpose(1, 2))


def _joined(blocks: Sequence[Five]) -> Five:
    """The blocks of vectors, one after the other."""
    if len(blocks) == 1:
        return blocks[0]
    q, k, v, m, u = (None if parts[0] is None else torch.cat(parts) for parts in zip(*blocks, strict=True))
    return q, k, v, m, u
