"""Taps u = in · W, and the Kronecker terms between any two of them.

A change of W_j by E moves u_j by in_j E. With one unit tangent at u_j after the other, the chain gives ġ_i at every
later tap and the tangent of in_i before it, and the block of the Hessian is, summed over tokens,

    H(W_i, W_j) = in_i ⊗ ġ_i ⊗ in_j   (straight)   +   g_i ⊗ ∂in_i/∂u_j ⊗ in_j   (crossed)

The bias of a tap is a weight whose input is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.calculus.activations import Pointwise
from evolute.calculus.chain import Chain, Split
from evolute.calculus.steps import Gate, Linear, Local
from evolute.linop.kronecker import Diagonal, Full, Lazy, Middle, Term


@dataclass(frozen=True)
class Wire:
    """The features [start, stop) of a wire; all of them, if not said."""

    name: str
    start: int = 0
    stop: int | None = None

    def of(self, wires: dict[str, Tensor]) -> Tensor:
        return wires[self.name][..., self.start : self.stop]


@dataclass(frozen=True)
class Tile:
    """A weight of a tap: from `offset` on in the flat vector, stored (out, in), or (in, out) if not `out_first`.

    Without `source` its input is one: a bias.
    """

    group: str
    offset: int
    source: Wire | None
    out_first: bool = True


@dataclass(frozen=True)
class Tap:
    """u, and the weights that feed it."""

    wire: Wire
    tiles: tuple[Tile, ...]


class Column:
    """What one tap does to all the later ones: tangents and cotangents, slice by slice of its unit tangents."""

    def __init__(self, chain: Chain, tap: Tap, rows: Sequence[Tap], split: Split) -> None:
        self.chain, self.tap, self.split = chain, tap, split
        self.rows = list(rows)
        self._range: tuple[int, int] | None = None

    @property
    def width(self) -> int:
        return self.tap.wire.of(self.chain.values).shape[-1]

    def pairs(self) -> Iterator[tuple[Tap, Tile, Tile]]:
        """Each tile of this tap with every tile of each row; of this tap with itself, each pair once."""
        for row in self.rows:
            for i, tile in enumerate(row.tiles):
                for j, own in enumerate(self.tap.tiles):
                    if row is not self.tap or i >= j:
                        yield row, tile, own

    def between(self, row: Tap, tile: Tile, own: Tile, *, limit: int) -> Iterator[Term]:
        """The straight and the crossed term of two tiles; middles above the limit of entries stay lazy."""
        chain, at = self.chain, (tile.offset, own.offset)
        inputs = input_of(tile, chain)
        col = inputs if tile == own else input_of(own, chain)
        straight = Lazy((self.width, len(col), self._size(row.wire)), lambda a, b: self._cotangent(row.wire, a, b))
        yield Term(inputs, col, _kept(straight, limit), not tile.out_first, not own.out_first, at)
        crossed = None if tile.source is None or not self.split.bends else self._crossed(tile.source)
        if crossed is not None:
            g = row.wire.of(chain.gradients)
            yield Term(g, col, _kept(crossed, limit), tile.out_first, not own.out_first, at)

    def _crossed(self, source: Wire) -> Middle | None:
        """∂in_i/∂u_j: none where in_i does not depend on u_j, diagonal where only elementwise maps lie between."""
        if self.tap.wire.name not in self.chain.upstream[source.name]:
            return None
        whole = self.tap.wire.stop is None and source.stop is None
        slope = slope_between(self.chain, self.tap.wire.name, source.name) if whole else None
        if slope is not None:
            return Diagonal(slope.mT.contiguous())
        tokens = len(source.of(self.chain.values))
        return Lazy((self.width, tokens, self._size(source)), lambda a, b: self._tangent(source, a, b))

    def _size(self, wire: Wire) -> int:
        return wire.of(self.chain.values).shape[-1]

    def _cotangent(self, wire: Wire, start: int, stop: int) -> Tensor:
        self._run(start, stop)
        return self._of(wire, self._cotangents)

    def _tangent(self, wire: Wire, start: int, stop: int) -> Tensor:
        self._run(start, stop)
        return self._of(wire, self._tangents)

    def _of(self, wire: Wire, wires: dict[str, Tensor]) -> Tensor:
        if wire.name not in wires:
            like = wire.of(self.chain.values)
            assert self._range is not None
            return like.new_zeros(self._range[1] - self._range[0], *like.shape)
        return wire.of(wires)

    def _run(self, start: int, stop: int) -> None:
        """Unit tangents start…stop of the tap, through the chain and back; the last slice is remembered."""
        if self._range == (start, stop):
            return
        values = self.chain.values[self.tap.wire.name]
        seed = values.new_zeros(stop - start, *values.shape)
        here = torch.arange(stop - start, device=seed.device)
        seed[here, :, here + self.tap.wire.start + start] = 1
        self._tangents = self.chain.tangents({self.tap.wire.name: seed}, {})
        needed = {row.wire.name for row in self.rows}
        self._cotangents = self.chain.cotangents(self._tangents, {}, self.split, needed)
        self._range = (start, stop)


def input_of(tile: Tile, chain: Chain) -> Tensor:
    """in_t, (n, p)."""
    if tile.source is None:
        return next(iter(chain.gradients.values())).new_ones(len(chain.gradients[chain.out]), 1)
    return tile.source.of(chain.values)


def _kept(middle: Middle, limit: int) -> Middle:
    """In memory, where that is small enough."""
    e, n, m = middle.shape
    return Full(middle.part(0, e)) if isinstance(middle, Lazy) and e * n * m <= limit else middle


def slope_between(chain: Chain, start: str, end: str) -> Tensor | None:
    """The diagonal of ∂end/∂start, (n, p), if only elementwise maps and gates lie between; else none."""
    if start == end:
        return torch.ones_like(chain.values[start])
    if start not in chain.upstream[end]:
        return torch.zeros_like(chain.values[end])
    step = next(step for step in chain.steps if step.writes == end)
    slopes = [slope_between(chain, start, wire) for wire in step.reads]
    if isinstance(step, Gate) and slopes[0] is not None and slopes[1] is not None:
        phi, h = step.values
        return slopes[0] * h + slopes[1] * phi
    if isinstance(step, Local) and isinstance(step.map, Pointwise) and slopes[0] is not None:
        return step.map.slope * slopes[0]
    return None


def linear_source(chain: Chain, group: str) -> Wire:
    """The wire that a linear step reads."""
    return Wire(next(step.reads[0] for step in chain.steps if isinstance(step, Linear) and step.name == group))
