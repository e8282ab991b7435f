"""The entries of a sum of Kronecker terms: into a matrix, or squared and added up, a slice at a time.

The terms of one pair of matrices have their column vector in common. So they are added up before they meet it, for one
*unit* u of the row matrix after the other, which is one of its m or one of its r:

    block[u, v, e, c] = Σ_t col[t, c] Z_u[t, e, v]        Z_u[t] = Σ_terms own[u, t] ⊙ shared[t]

Tokens at which all `own` of a unit are zero are left out: behind a ReLU that is half of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from evolute.linop import own_block
from evolute.linop.crew import Crew
from evolute.linop.kronecker import CHUNK, Diagonal, Full, Term, inner, outer
from evolute.linop.work import FEW, Factors, Work

SLICE = 1 << 22  # entries of a middle at a time


Where = tuple[slice, slice, slice, slice]


@dataclass(frozen=True, eq=False)
class Chunk:
    """block[where] as (m, r, e, c) of the first term; the units are along the axis `along`."""

    entries: Tensor
    where: Where
    along: int

    @property
    def turned(self) -> Chunk:
        m, r, e, c = self.where
        return Chunk(self.entries.permute(2, 3, 0, 1), (e, c, m, r), self.along + 2)

    def squares(self, *, symmetric: bool) -> Tensor:
        """Σ entries²; of a symmetric block what lies before the units, and so is left out behind them, twice."""
        if not symmetric:
            return self.entries.square().sum()
        other = self.where[self.along + 2]
        before = max(0, min(self.where[self.along].start, other.stop) - other.start)
        size = other.stop - other.start
        twice, once = self.entries.split([before, size - before], dim=self.along + 2)
        return 2 * twice.square().sum() + once.square().sum()


@dataclass(frozen=True, eq=False)
class Place:
    """All terms of one pair of matrices: the rows and columns from `at` on."""

    terms: tuple[Term, ...]

    @property
    def at(self) -> tuple[int, int]:
        return self.terms[0].at

    @property
    def size(self) -> tuple[int, int]:
        return self.terms[0].size

    @property
    def symmetric(self) -> bool:
        """One weight with itself: middle[e, t, m] = middle[m, t, e]."""
        return self.terms[0].row is self.terms[0].col

    @property
    def _dense(self) -> list[Term]:
        """All but those that are diagonal, of which there are few entries."""
        return [self.terms[0], *(term for term in self.terms[1:] if not isinstance(term.middle, Diagonal))]

    def write(self, matrix: Tensor, crew: Crew[Work], *, mirror: bool = False) -> None:
        """The block into its place in a matrix; mirrored, into the transposed place as well."""
        (i, j), (rows, cols), first = self.at, self.size, self.terms[0]
        here = matrix[i : i + rows, j : j + cols]
        if len(self.terms) == 1 and own_block.applies(first):
            crew.run(own_block.tasks(first, here))
            return
        targets = [_four(here, first)]
        if self.symmetric:  # in itself, wherever it lies
            targets.append(_four(here.mT, first))
        elif mirror:
            targets.append(_four(matrix[j : j + cols, i : i + rows].mT, first))
        crew.run(partial(_copied, make, targets) for make in self.chunks())

    def squares(self) -> Tensor:
        """‖block‖²_F, by the cheaper of two ways: Gram matrices over tokens, or the entries."""
        n, vectors = len(self.terms[0].row), self.terms[0].row.shape[1] * self.terms[0].col.shape[1]
        if n > vectors:
            work = Work()
            return torch.stack([make(work).squares(symmetric=self.symmetric) for make in self.chunks()]).sum()
        pairs = combinations_with_replacement(self.terms, 2)
        return torch.stack([inner(a, b) * (1 if a is b else 2) for a, b in pairs]).sum()

    def chunks(self) -> Iterator[Callable[[Work], Chunk]]:
        """The block in slices, still to be computed; of a symmetric one only half."""
        first = self.terms[0]
        if self._better_turned:
            other = Place(tuple(_turned(term) for term in self.terms))
            yield from (lambda work, make=make: make(work).turned for make in other.chunks())
            return
        e, n, m = first.middle.shape
        width = max(1, SLICE // (n * m))
        diagonals = [
            (term, term.middle.values @ outer(term)) for term in self.terms if isinstance(term.middle, Diagonal)
        ]
        diagonals = [pair for pair in diagonals if pair[0] is not first]
        for start in range(0, e, width):
            parts = [term.middle.part(start, min(start + width, e)) for term in self._dense]
            yield from self._along(parts, start, diagonals)

    @property
    def _better_turned(self) -> bool:
        """A single term has its row vector in common as well; the longer one makes Z the smaller."""
        first = self.terms[0]
        return len(self._dense) == 1 and isinstance(first.middle, Full) and first.row.shape[1] > first.col.shape[1]

    def _along(
        self, parts: Sequence[Tensor], start: int, diagonals: Sequence[tuple[Term, Tensor]]
    ) -> Iterator[Callable[[Work], Chunk]]:
        """Some units after the other, of these slices of the middles: e from `start` on."""
        axis, factors, alive = self._units(parts)
        col, units, (_, E, v) = self.terms[0].col, len(factors[0][0]), _sizes(factors[0])
        width = max(1, CHUNK // ((len(col) if alive is None else alive.most) * E * v))
        for u in (slice(begin, min(begin + width, units)) for begin in range(0, units, width)):
            es, cs = E, col.shape[1]
            if self.symmetric:  # the counterparts up to the last of these units
                es, cs = (min(E, u.stop - start), cs) if axis == 0 else (E, u.stop)
            if es > 0:
                rest, ends = slice(0, v), (slice(start, start + es), slice(0, cs))
                where = (u, rest, *ends) if axis == 0 else (rest, u, *ends)
                tokens = None if alive is None else alive.of(u)
                yield partial(self._chunk, factors, col[:, :cs], tokens, u, es, where, axis, diagonals)

    def _chunk(
        self, factors: list[Factors], col: Tensor, tokens: Tensor | None, u: slice, es: int, where: Where, axis: int,
        diagonals: Sequence[tuple[Term, Tensor]], work: Work,
    ) -> Chunk:  # fmt: skip
        out = work.product(factors, col, tokens, u, es)  # (U, c, E, v)
        chunk = Chunk(out.permute(0, 3, 2, 1) if axis == 0 else out.permute(3, 0, 2, 1), where, axis)
        for term, values in diagonals:
            _add_diagonal(chunk, term, self.terms[0], values)
        return chunk

    def _units(self, parts: Sequence[Tensor]) -> tuple[int, list[Factors], Alive | None]:
        """Along m (0) or r (1) of the first term; the factors; and the tokens of each unit, where they are few."""
        usual = int(self.terms[0].row_first)  # in the order of the rows
        for axis in (usual, 1 - usual):
            factors = self._factors(parts, axis)
            tokens = _alive([own for own, _ in factors])
            if tokens is not None:
                return axis, factors, tokens
        return usual, self._factors(parts, usual), None

    def _factors(self, parts: Sequence[Tensor], axis: int) -> list[Factors]:
        """(own (u, n, E or 1, 1), shared (n, E or 1, v)) of each term."""
        out, first = list[Factors](), self.terms[0]
        for term, part in zip(self._dense, parts, strict=True):
            if (axis == 0) == (term.row_first == first.row_first):
                out.append((part.permute(2, 1, 0).contiguous()[..., None], term.row[:, None]))
            else:
                out.append((term.row.mT[..., None, None], part.transpose(0, 1)))
        return out


def _sizes(factors: Factors) -> tuple[int, int, int]:
    """(n, E, v)."""
    own, shared = factors
    n, E, v = torch.broadcast_shapes(own.shape[1:], shared.shape)
    return n, E, v


@dataclass(frozen=True)
class Alive:
    """For each unit the tokens at which any of its factors is not zero, before the others."""

    tokens: Tensor  # (units, n)
    counts: list[int]

    @property
    def most(self) -> int:
        return max(1, *self.counts)

    def of(self, units: slice) -> Tensor:
        """(units, K), filled up with other tokens."""
        return self.tokens[units, : max(1, *self.counts[units])]


def _alive(owns: Sequence[Tensor]) -> Alive | None:
    """None if those tokens are not few."""
    limit = FEW * owns[0].shape[1]
    if any(int((own[:, :, 0, 0] != 0).sum(1).max()) > limit for own in owns):  # the rest need not be looked at
        return None
    alive = torch.stack([(own != 0).flatten(2).any(-1) for own in owns]).any(0)
    found = Alive(alive.to(torch.uint8).argsort(1, descending=True), alive.sum(1).tolist())
    return found if found.most <= limit else None


def _copied(make: Callable[[Work], Chunk], targets: Sequence[Tensor], work: Work) -> None:
    chunk = make(work)
    for target in targets:
        target[chunk.where].copy_(chunk.entries)


def _turned(term: Term) -> Term:
    """The transposed block."""
    middle = Full(term.middle.tensor.permute(2, 1, 0)) if isinstance(term.middle, Full) else term.middle
    return replace(
        term, row=term.col, col=term.row, middle=middle, row_first=term.col_first, col_first=term.row_first,
        at=term.at[::-1],
    )  # fmt: skip


def _add_diagonal(chunk: Chunk, term: Term, first: Term, values: Tensor) -> None:
    """block[m = e, r, e, c] += values[e, (r, c)], for a term whose m is the r of the first one, or whose e is its c."""
    r, c = int(term.row_first == first.row_first), 2 + int(term.col_first == first.col_first)
    m, e = 1 - r, 5 - c
    start = max(chunk.where[m].start, chunk.where[e].start)
    size = min(chunk.where[m].stop, chunk.where[e].stop) - start
    if size > 0:
        part = values[start : start + size].unflatten(1, (term.row.shape[1], -1))[:, chunk.where[r], chunk.where[c]]
        here = chunk.entries.narrow(m, start - chunk.where[m].start, size)
        here.narrow(e, start - chunk.where[e].start, size).diagonal(0, m, e).add_(part.permute(1, 2, 0))


def _four(block: Tensor, term: Term) -> Tensor:
    """(rows, columns) → (m, r, e, c), as a view."""
    r, c = term.row.shape[1], term.col.shape[1]
    rows = block.unflatten(0, (r, -1)).transpose(0, 1) if term.row_first else block.unflatten(0, (-1, r))
    return rows.unflatten(2, (c, -1)).transpose(2, 3) if term.col_first else rows.unflatten(2, (-1, c))


def places(terms: Sequence[Term]) -> list[Place]:
    """The terms, by the pair of matrices that they belong to."""
    by_place = dict[tuple[int, int], list[Term]]()
    for term in terms:
        by_place.setdefault(term.at, []).append(term)
    return [Place(tuple(terms)) for terms in by_place.values()]
