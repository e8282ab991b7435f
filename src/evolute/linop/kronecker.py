"""Sums over tokens of Kronecker products, never written out unless asked.

A block of a Hessian has rows that are the entries of one matrix, (r, m) or (m, r), and columns that are those of
another, (c, e) or (e, c). A term ties r and c to one vector each per token, and m and e to a matrix:

    Σ_t row[t, r] · col[t, c] · middle[e, t, m]

Where r stands at the same place in its pair as c in its own, that is A ⊗ B, a *straight* term; where not, a Kronecker
product followed by a commutation matrix, a *crossed* one. Index legend: t token (n of them), k vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from evolute.linop.operator import LinearOperator
from evolute.linop.space import Space

CHUNK = 1 << 19  # entries of one slice of a middle


class Middle(ABC):
    """middle[e, t, m], handed out in slices over e."""

    shape: tuple[int, int, int]

    @abstractmethod
    def part(self, start: int, stop: int) -> Tensor:
        """middle[start:stop], (stop − start, n, m)."""

    def slices(self, width: int) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.shape[0], width):
            yield start, self.part(start, min(start + width, self.shape[0]))


@dataclass(eq=False)
class Full(Middle):
    """All of it at hand."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        e, n, m = self.tensor.shape
        return e, n, m

    def part(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]


@dataclass(eq=False)
class Diagonal(Middle):
    """middle[e, t, m] = values[e, t] where e = m, else zero."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        e, n = self.values.shape
        return e, n, e

    def part(self, start: int, stop: int) -> Tensor:
        out = self.values.new_zeros(stop - start, self.shape[1], self.shape[2])
        here = torch.arange(stop - start, device=out.device)
        out[here, :, here + start] = self.values[start:stop]
        return out


@dataclass(eq=False)
class Lazy(Middle):
    """Computed when asked for, slice by slice."""

    shape: tuple[int, int, int]
    make: Callable[[int, int], Tensor]

    def part(self, start: int, stop: int) -> Tensor:
        return self.make(start, stop)


@dataclass(frozen=True, eq=False)
class Term:
    """Σ_t row[t, r] col[t, c] middle[e, t, m], for the entries from `at` on: (row offset, column offset)."""

    row: Tensor
    col: Tensor
    middle: Middle
    row_first: bool
    col_first: bool
    at: tuple[int, int] = (0, 0)

    @property
    def straight(self) -> bool:
        return self.row_first == self.col_first

    @property
    def size(self) -> tuple[int, int]:
        e, _, m = self.middle.shape
        return self.row.shape[1] * m, self.col.shape[1] * e

    def add_product(self, vectors: Tensor, out: Tensor) -> None:
        """Out += A v for each row v of (k, columns); both of the whole operator."""
        (_, n, m), r = self.middle.shape, self.row.shape[1]
        V = _pair(vectors[:, self.at[1] : self.at[1] + self.size[1]], self.col_first, self.col.shape[1])  # (k, c, e)
        inner = torch.matmul(self.col, V)  # (k, t, e)
        moved = vectors.new_zeros(len(vectors), n, m)
        for start, part in self.middle.slices(_width(self.middle)):
            here = inner[..., start : start + len(part)].transpose(0, 1)  # (t, k, E)
            moved += torch.bmm(here, part.transpose(0, 1)).transpose(0, 1)  # (t, E, m)
        target = _pair(out[:, self.at[0] : self.at[0] + self.size[0]], self.row_first, r)  # (k, r, m)
        target += torch.matmul(self.row.mT, moved)

    def add_adjoint(self, vectors: Tensor, out: Tensor) -> None:
        """Out += Aᵀ u for each row u of (k, rows)."""
        U = _pair(vectors[:, self.at[0] : self.at[0] + self.size[0]], self.row_first, self.row.shape[1])  # (k, r, m)
        inner = torch.matmul(self.row, U).transpose(0, 1)  # (t, k, m)
        target = _pair(out[:, self.at[1] : self.at[1] + self.size[1]], self.col_first, self.col.shape[1])  # (k, c, e)
        for start, part in self.middle.slices(_width(self.middle)):
            moved = torch.bmm(inner, part.permute(1, 2, 0)).transpose(0, 1)  # (k, t, E)
            target[..., start : start + len(part)] += torch.matmul(self.col.mT, moved)

    def diagonal(self) -> Tensor:
        """Of a term whose rows and columns are the same pair, as that pair."""
        both = self._straight_diagonal() if self.straight else self._crossed_diagonal()
        return (both if self.row_first else both.mT).flatten()

    def _straight_diagonal(self) -> Tensor:
        """(r, m): Σ_t row[t, r] col[t, r] middle[m, t, m]."""
        return (self.row * self.col).mT @ self._own().mT

    def _own(self) -> Tensor:
        """middle[m, t, m], (m, t)."""
        if isinstance(self.middle, Diagonal):
            return self.middle.values
        parts = self.middle.slices(_width(self.middle))
        return torch.cat([part[:, :, start : start + len(part)].diagonal(dim1=0, dim2=2).mT for start, part in parts])

    def _crossed_diagonal(self) -> Tensor:
        """(r, m): here r is e, and c is m: Σ_t row[t, r] middle[r, t, m] col[t, m]."""
        parts = self.middle.slices(_width(self.middle))
        rows = [
            torch.einsum("te,etm,tm->em", self.row[:, start : start + len(part)], part, self.col)
            for start, part in parts
        ]
        return torch.cat(rows)


def _pair(flat: Tensor, first: bool, size: int) -> Tensor:
    """(k, entries of a pair) → (k, vector index, matrix index), as a view."""
    return flat.unflatten(-1, (size, -1)) if first else flat.unflatten(-1, (-1, size)).mT


def _width(middle: Middle) -> int:
    _, n, m = middle.shape
    return max(1, CHUNK // max(1, n * m))


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

    def chunks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """The block in slices (m, e), each (E, M, r, c) in the order that the first term gives its rows.

        A slice lives until the next one is asked for. Of a symmetric block only m ≥ the first e of the slice.
        """
        first, (e, n, m) = self.terms[0], self.terms[0].middle.shape
        outer = [_outer(term) for term in self.terms]
        width = max(1, CHUNK // max(1, m * first.row.shape[1] * first.col.shape[1], n * m // 8))
        buffers = [vectors.new_empty(0) for vectors in outer]
        for start in range(0, e, width):
            stop = min(start + width, e)
            below = start if self.symmetric else 0
            yield slice(below, m), slice(start, stop), self._chunk(start, stop, below, outer, buffers)

    def _chunk(self, start: int, stop: int, below: int, outer: Sequence[Tensor], buffers: Sequence[Tensor]) -> Tensor:
        first, out = self.terms[0], None
        for term, vectors, buffer in zip(self.terms, outer, buffers, strict=True):
            turned = term.row_first != first.row_first
            if isinstance(term.middle, Diagonal) and turned and out is not None:
                _add_diagonal(out, term, vectors, start, stop)
                continue
            middle = term.middle.part(start, stop)[..., below:].mT  # (E, M, n)
            buffer.resize_(len(middle), middle.shape[1], vectors.shape[1])
            part = torch.bmm(middle, vectors.expand(len(middle), -1, -1), out=buffer)
            part = part.unflatten(-1, (term.row.shape[1], term.col.shape[1]))
            part = part.transpose(1, 2) if turned else part
            out = part if out is None else out.add_(part)
        assert out is not None
        return out

    def write(self, matrix: Tensor, *, mirror: bool = False) -> None:
        """The block into its place in a matrix; mirrored, into the transposed place as well."""
        (i, j), (rows, cols), first = self.at, self.size, self.terms[0]
        targets = [_four(matrix[i : i + rows, j : j + cols], first)]
        if mirror or self.symmetric:
            targets.append(_four(matrix[j : j + cols, i : i + rows].mT, first))
        for m, e, chunk in self.chunks():
            for target in targets:
                target[m, :, e].copy_(chunk.permute(1, 2, 0, 3))

    def squares(self) -> Tensor:
        """‖block‖²_F, by the cheaper of two ways: Gram matrices over tokens, or the entries."""
        n, vectors = len(self.terms[0].row), self.terms[0].row.shape[1] * self.terms[0].col.shape[1]
        if n > vectors:
            return torch.stack([_squared(m, e, chunk, self.symmetric) for m, e, chunk in self.chunks()]).sum()
        pairs = combinations_with_replacement(self.terms, 2)
        return torch.stack([_inner(a, b) * (1 if a is b else 2) for a, b in pairs]).sum()


def _squared(m: slice, e: slice, chunk: Tensor, symmetric: bool) -> Tensor:
    """Σ chunk²; of a symmetric block what lies beyond the slice of e counts twice."""
    if not symmetric:
        return chunk.square().sum()
    inside = e.stop - m.start
    return chunk[:, :inside].square().sum() + 2 * chunk[:, inside:].square().sum()


def _outer(term: Term) -> Tensor:
    """Row ⊗ col per token, (n, r·c)."""
    return (term.row[:, :, None] * term.col[:, None]).flatten(1)


def _add_diagonal(out: Tensor, term: Term, vectors: Tensor, start: int, stop: int) -> None:
    """out[e, r, m = e, c] += Σ_t values[e, t] row[t, r] col[t, c]: a crossed term that is zero elsewhere."""
    assert isinstance(term.middle, Diagonal)
    here = torch.arange(stop - start, device=out.device)
    part = (term.middle.values[start:stop] @ vectors).unflatten(-1, (term.row.shape[1], term.col.shape[1]))
    out[here, :, here + start] += part


def _four(block: Tensor, term: Term) -> Tensor:
    """(rows, columns) → (m, r, e, c), as a view."""
    r, c = term.row.shape[1], term.col.shape[1]
    rows = block.unflatten(0, (r, -1)).transpose(0, 1) if term.row_first else block.unflatten(0, (-1, r))
    return rows.unflatten(2, (c, -1)).transpose(2, 3) if term.col_first else rows.unflatten(2, (-1, c))


def _inner(a: Term, b: Term) -> Tensor:
    """⟨A, B⟩ of two terms of one place, whose column pairs are read alike."""
    if a.row_first == b.row_first:
        gram = _own_gram(a) if a is b and a.row is a.col else _gram(a, b)
        return ((a.row @ b.row.mT) * (a.col @ b.col.mT) * gram).sum()
    cols, out = a.col @ b.col.mT, a.row.new_zeros(())
    for start, part in a.middle.slices(_width(a.middle)):
        for left, right in zip(part, b.middle.part(start, start + len(part)), strict=True):
            out = out + (cols * (left @ b.row.mT) * (a.row @ right.mT)).sum()  # (t, s) each
    return out


def _gram(a: Term, b: Term) -> Tensor:
    """Σ_em a.middle[e, t, m] b.middle[e, s, m], (t, s)."""
    gram = a.row.new_zeros(len(a.row), len(a.row))
    for start, part in a.middle.slices(_width(a.middle)):
        other = part if a.middle is b.middle else b.middle.part(start, start + len(part))
        for left, right in zip(part, other, strict=True):
            gram.addmm_(left, right.mT)
    return gram


def _own_gram(term: Term) -> Tensor:
    """The same with itself, of a middle that is symmetric in e and m: those with m > e count twice."""
    gram = term.row.new_zeros(len(term.row), len(term.row))
    for start, part in term.middle.slices(_width(term.middle)):
        for e, left in enumerate(part, start):
            gram.addmm_(left[:, e + 1 :], left[:, e + 1 :].mT, alpha=2.0)
            gram.addr_(left[:, e], left[:, e])
    return gram


@dataclass(frozen=True, eq=False)
class Thin:
    """A few rows, or a few columns, that are at hand in full: A[rows, cols] = matrix."""

    matrix: Tensor
    rows: Tensor
    cols: Tensor

    def add_product(self, vectors: Tensor, out: Tensor) -> None:
        out[:, self.rows] += vectors[:, self.cols] @ self.matrix.mT

    def write(self, matrix: Tensor) -> None:
        matrix[self.rows[:, None], self.cols] = self.matrix

    @property
    def turned(self) -> Thin:
        return Thin(self.matrix.mT, self.cols, self.rows)

    def add_diagonal(self, out: Tensor) -> None:
        same = self.rows[:, None] == self.cols
        i, j = same.nonzero(as_tuple=True)
        out[self.rows[i]] += self.matrix[i, j]


@dataclass(frozen=True, eq=False, repr=False)
class KroneckerSum(LinearOperator):
    """A sum of straight and crossed Kronecker terms, of adjoints of such terms, and of thin blocks that are at hand.

    Of a symmetric sum the adjoints are those of the terms off the diagonal.
    """

    terms: tuple[Term, ...]
    adjoints: tuple[Term, ...]
    thin: tuple[Thin, ...]
    rows: Space
    cols: Space
    mirrored: bool = False  # symmetric

    @property
    def row_space(self) -> Space:
        return self.rows

    @property
    def col_space(self) -> Space:
        return self.cols

    def adjoint(self) -> LinearOperator:
        if self.mirrored:
            return self
        return KroneckerSum(self.adjoints, self.terms, tuple(t.turned for t in self.thin), self.cols, self.rows)

    def apply_rows(self, rows: Tensor) -> Tensor:
        out = rows.new_zeros(len(rows), self.rows.size)
        for term in self.terms:
            term.add_product(rows, out)
        for term in self.adjoints:
            term.add_adjoint(rows, out)
        for thin in self.thin:
            thin.add_product(rows, out)
        return out


def places(terms: Sequence[Term]) -> list[Place]:
    """The terms, by the pair of matrices that they belong to."""
    by_place = dict[tuple[int, int], list[Term]]()
    for term in terms:
        by_place.setdefault(term.at, []).append(term)
    return [Place(tuple(terms)) for terms in by_place.values()]
