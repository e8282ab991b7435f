"""Tiles of scores: some heads and query rows, with all keys that they see; what a kernel reads, where it adds results.

Shapes in a tile: h heads of the N, n vectors, r = G t rows, s keys; scores are (h, n, r, s), with n = 1 for what all
vectors share.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from evolute.engine.attention_scores import Five, Rule, Shape, Slot, probabilities, working_dtype

# Measured on two cores with 1 MB of cache each: long matrix products, but little that a causal row cannot see.
ROWS = (64, 128)  # rows in a tile: a quarter of all, within these bounds
TILE = 1 << 19  # scores in a tile, as far as its rows allow: the buffers stay in the cache
ELSEWHERE, TALLER = 16, 4  # times as many scores and rows where a call costs more than a miss: on anything but a CPU
VECTORS = 1 << 18  # scores up to which vectors go together: beyond, rearranging them costs more than more calls


class Spot(NamedTuple):
    """Which scores a tile holds, (h, 1, r, s), and where they start when all tiles are written one after the other."""

    heads: slice
    queries: slice
    keys: int
    shape: tuple[int, int, int, int]
    start: int
    whole: bool

    @property
    def size(self) -> int:
        h, _, r, s = self.shape
        return h * r * s

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.size].view(self.shape)


@lru_cache(maxsize=1024)
def spots(shape: Shape, causal: bool, tile: int, bounds: tuple[int, int] = ROWS) -> tuple[Spot, ...]:
    """All tiles, of about so many scores, in the order in which they are kept."""
    G, T, S = shape.scores[2:]
    low, high = bounds
    rows = min(max(low, T // 4), high) if causal else high
    step = min(T, max(1, min(rows, max(rows // 2, tile // S) // G)))
    width = min(shape.N, max(1, tile // (G * S * step)))
    found, start = list[Spot](), 0
    for head in range(0, shape.N, width):
        for first in range(0, T, step):
            heads, queries = slice(head, min(head + width, shape.N)), slice(first, min(first + step, T))
            keys = min(queries.stop, S) if causal else S
            size = (heads.stop - head, 1, G * (queries.stop - first), keys)
            found.append(Spot(heads, queries, keys, size, start, width >= shape.N and step >= T and keys == S))
            start += found[-1].size
    return tuple(found)


def _working(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.to(working_dtype(x.dtype))


class Work:
    """The factors in groups, q (N, 1, G, T, E) already scaled, k (N, S, E), v (N, S, F), and the buffers of a tile."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Slot, rule: Rule) -> None:
        self.shape, self.rule, self.dtype, self.given = Shape.of(q, k), rule, q.dtype, mask
        scaled = q.new_empty(q.shape, dtype=working_dtype(q.dtype))  # contiguous: in groups it is a view
        self.q = self.rows(torch.mul(_working(q), rule.scale, out=scaled).unsqueeze(0))
        self.k, self.v = (self.columns(each.unsqueeze(0)).squeeze(1) for each in (k, v))
        self.mask = None if mask is None else self.shape.split(mask)
        more, taller = (1, 1) if q.device.type == "cpu" else (ELSEWHERE, TALLER)
        self.spots = spots(self.shape, rule.causal, more * TILE, (taller * ROWS[0], taller * ROWS[1]))
        self.largest = max(spot.size for spot in self.spots)
        self.pool: dict[int, Tensor] = {}

    def rows(self, x: Tensor) -> Tensor:
        """(n, B, H, T, ·) → (N, n, G, T, ·) in the working dtype."""
        return _working(x).reshape(x.shape[0], self.shape.N, self.shape.G, *x.shape[-2:]).transpose(0, 1)

    def columns(self, x: Tensor) -> Tensor:
        """(n, B, J, S, ·) → (N, n, S, ·) in the working dtype."""
        return _working(x).flatten(1, 2).transpose(0, 1)

    def blocks(self, n: int) -> list[slice]:
        """How many of n vectors a tile takes at once."""
        step = max(1, VECTORS // self.largest)
        return [slice(first, min(first + step, n)) for first in range(0, n, step)]

    def buffer(self, number: int, n: int, spot: Spot) -> Tensor:
        """Room for (h, n, r, s), the same at every call."""
        h, _, r, s = spot.shape
        if number not in self.pool or self.pool[number].numel() < h * n * r * s:
            self.pool[number] = self.k.new_empty(n * self.largest)
        return self.pool[number][: h * n * r * s].view(h, n, r, s)

    def weigh(self, spot: Spot, out: Tensor) -> Tensor:
        """P of a tile, written into `out`."""
        q, k = self.q[spot.heads, 0, :, spot.queries].flatten(1, 2), self.k[spot.heads, : spot.keys]
        scores = torch.bmm(q, k.mT, out=self.buffer(1, 1, spot).squeeze(1))
        split = (q.shape[0], self.shape.G, -1, spot.keys)
        mask = None if self.mask is None else self.spread(self.mask, spot)
        probabilities(scores.view(split), mask, spot.queries.start if self.rule.causal else None, out.view(split))
        return out

    def spread(self, mask: Tensor, spot: Spot) -> Tensor:
        """The part of a mask (B|1, J|1, G|1, T|1, S|1) in a tile, to be broadcast to (h, G, t, s)."""
        mask = cut(mask, spot)
        if mask.shape[0] == mask.shape[1] == 1:
            return mask[0]
        return mask.flatten(0, 1)[self.owners(mask, spot)]

    def owners(self, mask: Tensor, spot: Spot) -> Tensor:
        """For each of the heads, which of the (B|1) (J|1) masks is its own."""
        number = torch.arange(spot.heads.start, spot.heads.stop, device=mask.device)
        batch, head = number // self.shape.J * (mask.shape[0] > 1), number % self.shape.J * (mask.shape[1] > 1)
        return batch * mask.shape[1] + head


def cut(mask: Tensor, spot: Spot) -> Tensor:
    """The queries and keys of a tile, of a mask (…, T|1, S|1)."""
    mask = mask if mask.shape[-2] == 1 else mask[..., spot.queries, :]
    return mask if mask.shape[-1] == 1 else mask[..., : spot.keys]


class Tile:
    """P (h, 1, r, s) of one spot, and the parts of larger tensors that belong to it."""

    def __init__(self, work: Work, spot: Spot, P: Tensor) -> None:
        self.work, self.spot, self.P = work, spot, P
        self.dS: Slot = None
        self.q = self.rows(work.q)
        self.k, self.v = (each if spot.whole else each[spot.heads, : spot.keys] for each in (work.k, work.v))

    def rows(self, x: Tensor) -> Tensor:
        """(N, n, G, T, ·) → (h, n, r, ·)."""
        return (x if self.spot.whole else x[self.spot.heads, :, :, self.spot.queries]).flatten(2, 3)

    def keys(self, x: Tensor) -> Tensor:
        """(N, n, S, ·) → (h, n, s, ·)."""
        return x if self.spot.whole else x[self.spot.heads, :, : self.spot.keys]

    def slope(self, u: Tensor, out: Tensor) -> Tensor:
        """P (X − Σ P X) with X = u vᵀ: dS, written into `out`; u (h, n, r, F)."""
        torch.bmm(u.flatten(1, 2), self.v.mT, out=out.flatten(1, 2))
        return centred(out.mul_(self.P), self.P)


def centred(weighted: Tensor, P: Tensor) -> Tensor:
    """P Y ↦ P (Y − Σ P Y), in place."""
    return weighted.addcmul_(P, weighted.sum(-1, keepdim=True), value=-1)


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """Target += left right. Into a slice PyTorch multiplies one matrix after the other, at a few µs for each."""
    if len(target) == 1 or target.is_contiguous():
        target.baddbmm_(left, right)
    else:
        target.add_(torch.bmm(left, right))


class Parts:
    """Results along q, k, v, mask, u for n vectors, None where not wanted; along k and v transposed until the end."""

    def __init__(self, work: Work, n: int, wanted: str) -> None:
        self.work, self.n = work, n
        (N, S, E), F, (G, T) = work.k.shape, work.v.shape[-1], work.q.shape[2:4]
        mask = () if work.mask is None else work.mask.shape
        shapes = ((N, n, G, T, E), (N, n, E, S), (N, n, F, S), (n, *mask), (N, n, G, T, F))
        new = work.k.new_empty, work.k.new_zeros
        self.q, self.k, self.v, self.m, self.u = (
            new[letter in "kvm"](shape) if letter in wanted else None
            for letter, shape in zip("qkvmu", shapes, strict=True)
        )

    def write(self, part: Slot, tile: Tile, rows: Tensor) -> None:
        """Put (h, n, r, ·) in its place along q or u."""
        if part is None:
            return
        target = part if tile.spot.whole else part[tile.spot.heads, :, :, tile.spot.queries]
        target.copy_(rows.view(target.shape))

    def add(self, part: Slot, tile: Tile, rows: Tensor, scores: Tensor) -> None:
        """Add rowsᵀ scores along k or v: rows (h, n, r, ·), scores (h, n or 1, r, s)."""
        if part is None:
            return
        target = part if tile.spot.whole else part[tile.spot.heads, ..., : tile.spot.keys]
        if scores.shape[1] == rows.shape[1]:
            _add_product(target.flatten(0, 1), rows.flatten(0, 1).mT, scores.flatten(0, 1))
        elif scores.shape[1] == 1:
            _add_product(target.flatten(1, 2), rows.mT.flatten(1, 2), scores.squeeze(1))
        else:
            repeated = rows.expand(-1, scores.shape[1], -1, -1)
            _add_product(target.flatten(0, 1), repeated.flatten(0, 1).mT, scores.flatten(0, 1))

    def add_mask(self, part: Slot, tile: Tile, scores: Tensor) -> None:
        """Add (h, n, r, s) along the mask, summed over what the mask shares."""
        if part is None:
            return
        mask = cut(part, tile.spot)
        scores = scores.unflatten(2, (self.work.shape.G, -1)).movedim(1, 0)
        scores = scores.sum_to_size(*scores.shape[:2], *mask.shape[3:])
        mask.flatten(1, 2).index_add_(1, self.work.owners(mask[0], tile.spot), scores)

    def results(self) -> Five:
        """In the shapes and dtypes of what they are along, the n vectors first."""
        scale, m, given = self.work.rule.scale, self.m, self.work.given
        return (
            None if self.q is None else self._queries(self.q.mul_(scale)),
            None if self.k is None else self._keys(self.k),
            None if self.v is None else self._keys(self.v),
            None if m is None or given is None else m.flatten(2, 3).to(given.dtype),
            None if self.u is None else self._queries(self.u),
        )

    def _queries(self, x: Tensor) -> Tensor:
        B, J, G, T, _ = self.work.shape.scores
        return x.transpose(0, 1).reshape(self.n, B, J * G, T, x.shape[-1]).to(self.work.dtype)

    def _keys(self, x: Tensor) -> Tensor:
        x = x.permute(1, 0, 3, 2).to(self.work.dtype).contiguous()
        return x.view(self.n, *self.work.shape.scores[:2], *x.shape[2:])
