"""Blocks of a closed form: a sum of Kronecker terms, with exact entries, trace, diagonal and norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evolute.calculus.taps import Column, Tile
from evolute.linop.algebra import Block
from evolute.linop.convert import to_dense
from evolute.linop.crew import crew
from evolute.linop.exact import diagonal, squares
from evolute.linop.kronecker import KroneckerSum, Term, Thin
from evolute.linop.memory import fresh, human, require
from evolute.linop.operator import LinearOperator
from evolute.linop.places import places
from evolute.linop.space import Selection
from evolute.linop.work import Work

if TYPE_CHECKING:
    from evolute.calculus.closed_form import ClosedForm

LAZY_ABOVE = 1 << 24  # entries of a middle; larger ones are computed slice by slice when they are needed


@dataclass(frozen=True, eq=False, repr=False)
class ClosedBlock(Block):
    """H[rows, cols]; each weight is in it, or out of it, as a whole."""

    op: ClosedForm

    @classmethod
    def of(cls, op: LinearOperator, rows: Selection, cols: Selection) -> Block:  # pyright: ignore
        block = cls(op, rows, cols)  # pyright: ignore[reportArgumentType]
        return block if block._aligned else Block(op, rows, cols)

    @property
    def principal(self) -> bool:
        return self.rows.parts == self.cols.parts

    def adjoint(self) -> LinearOperator:
        return self if self.principal else ClosedBlock(self.op, self.cols, self.rows)

    def apply_rows(self, rows: Tensor) -> Tensor:
        """Of a principal block by a product with all of H, which takes no terms; of any other by its terms."""
        if self.principal:
            return super().apply_rows(rows)
        return self.kronecker.apply_rows(rows)

    @cached_property
    def kronecker(self) -> KroneckerSum:
        """The block as straight and crossed Kronecker terms."""
        found = list(self.columns())
        return KroneckerSum(
            tuple(term for terms, _ in found for term in terms),
            tuple(term for _, adjoints in found for term in adjoints),
            self.thin,
            self.row_space,
            self.col_space,
            self.principal,
        )

    def columns(self) -> Iterator[tuple[list[Term], list[Term]]]:
        """Tap by tap: terms, and terms whose adjoints count; in a principal block the latter mirror the former.

        The last tap comes first: its terms are made soonest, and there are the most entries to write meanwhile.
        """
        taps, wanted = self.op.point.taps, {*self._row_tiles, *self._col_tiles}
        for j, tap in reversed(list(enumerate(taps))):
            if wanted.intersection(tap.tiles):
                rows = [row for row in taps[j:] if wanted.intersection(row.tiles)]
                yield self._of_column(Column(self.op.point.per_token, tap, rows, self.op.split))

    def _of_column(self, column: Column) -> tuple[list[Term], list[Term]]:
        terms, adjoints = list[Term](), list[Term]()
        rows, cols = self._row_tiles, self._col_tiles
        for row, tile, own in column.pairs():
            straight = tile in rows and own in cols
            turned = tile != own and own in rows and tile in cols
            made = list(column.between(row, tile, own, limit=LAZY_ABOVE)) if straight or turned else []
            terms += [replace(term, at=(rows[tile], cols[own])) for term in made if straight]
            adjoints += [replace(term, at=(cols[tile], rows[own])) for term in made if turned]
        return terms, adjoints

    # ---- where things are

    @cached_property
    def _row_tiles(self) -> dict[Tile, int]:
        return _layout(self.op, self.rows) or {}

    @cached_property
    def _col_tiles(self) -> dict[Tile, int]:
        return _layout(self.op, self.cols) or {}

    @property
    def tiles(self) -> tuple[dict[Tile, int], dict[Tile, int]]:
        return self._row_tiles, self._col_tiles

    @cached_property
    def _aligned(self) -> bool:
        return all(_layout(self.op, side) is not None for side in (self.rows, self.cols))

    # ---- the parameters of norms, which reach every token: their few rows and columns are products with unit vectors

    @cached_property
    def thin(self) -> tuple[Thin, ...]:
        rows, cols = (self.of_norms(side) for side in (self.rows, self.cols))
        every = torch.arange(self.rows.size, device=self.device)
        rest = torch.ones(self.cols.size, dtype=torch.bool, device=self.device)
        rest[cols] = False
        left = rest.nonzero().flatten()
        out = [Thin(self._columns(self.cols, self.rows, cols), every, cols)] if len(cols) else []
        if len(rows) and len(left):
            out.append(Thin(self._columns(self.rows, self.cols, rows).mT[:, left], rows, left))
        return tuple(out)

    def of_norms(self, side: Selection) -> Tensor:
        """Which entries of a selection are parameters of norms."""
        mark = torch.zeros(self.op.space.size, dtype=torch.bool, device=self.device)
        for group, (place, _) in self.op.point.places.items():
            mark[place] |= group.startswith("norm")
        return side.take(mark).nonzero().flatten()

    def _columns(self, side: Selection, other: Selection, entries: Tensor) -> Tensor:
        """H[other, entries of side], (size of other, number of entries)."""
        unit = torch.zeros(len(entries), side.size, dtype=self.dtype, device=self.device)
        unit[torch.arange(len(entries), device=self.device), entries] = 1
        return other.take(self.op.apply_rows(side.put(unit))).mT


def _layout(op: ClosedForm, side: Selection) -> dict[Tile, int] | None:
    """Weight → where it begins in the selection; none if a part of a weight is selected without the rest."""
    out, start = dict[Tile, int](), 0
    for part, shape in zip(side.parts, side.shapes.values(), strict=True):
        if not part.whole and part.dim != 0:
            return None
        begin = op.point.offset(part)
        for tile, size in op.point.tile_sizes.items():
            inside = max(0, min(begin + shape.numel(), tile.offset + size) - max(begin, tile.offset))
            if inside not in (0, size):
                return None
            if inside:
                out[tile] = start + tile.offset - begin
        start += shape.numel()
    return out


# ---- what is exact


@to_dense.register
def _(block: ClosedBlock) -> Tensor:
    m, n = block.shape
    width = torch.empty((), dtype=block.dtype).element_size()
    instead = (
        f"Take a smaller block (a column has {human(width * m)}), or its diagonal or norms, which need no entries."
    )
    require(width * m * n, block.device, f"a dense {m}×{n} matrix", instead)
    out = fresh(m, n, block.dtype, block.device)
    with crew(Work, block.device) as threads:
        for terms, adjoints in block.columns():
            for place in places(terms):
                place.write(out, threads, mirror=block.principal and place.at[0] != place.at[1])
            for place in places(adjoints) if not block.principal else []:
                place.write(out.mT, threads)
    for thin in block.thin:
        thin.write(out)
    return out


@diagonal.register
def _(block: ClosedBlock) -> Tensor:
    return _diagonal(block) if block.principal else diagonal.dispatch(object)(block)


def _diagonal(block: ClosedBlock) -> Tensor:
    out = torch.zeros(block.shape[0], dtype=block.dtype, device=block.device)
    for terms, _ in block.columns():
        for term in terms:
            if term.at[0] == term.at[1]:
                out[term.at[0] : term.at[0] + term.size[0]] += term.diagonal()
    for thin in block.thin:
        thin.add_diagonal(out)
    return out


@squares.register
def _(block: ClosedBlock) -> Tensor:
    out = torch.zeros((), dtype=block.dtype, device=block.device)
    for terms, adjoints in block.columns():
        for place in [*places(terms), *places(adjoints)]:
            out = out + place.squares()
    return out + sum((thin.matrix.square().sum() for thin in block.thin), torch.zeros_like(out))
