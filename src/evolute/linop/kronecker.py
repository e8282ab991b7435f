"""Sums over tokens of Kronecker products, never written out unless asked.

A block of a Hessian has rows that are the entries of one matrix, (r, m) or (m, r), and columns that are those of
another, (c, e) or (e, c). A term ties r and c to one vector each per token, and m and e to a matrix:

    Σ_t row[t, r] · col[t, c] · middle[e, t, m]

Where r stands at the same place in its pair as c in its own, that is A ⊗ B, a *straight* term; where not, a Kronecker
product followed by a commutation matrix, a *crossed* one. Index legend: t token (n of them), k vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
        return torch.cat([_diagonal_of(part, start) for start, part in parts])

    def _crossed_diagonal(self) -> Tensor:
        """(r, m): here r is e, and c is m: Σ_t row[t, r] middle[r, t, m] col[t, m]."""
        parts = self.middle.slices(_width(self.middle))
        rows = [
            torch.einsum("te,etm,tm->em", self.row[:, start : start + len(part)], part, self.col)
            for start, part in parts
        ]
        return torch.cat(rows)


def _diagonal_of(part: Tensor, start: int) -> Tensor:
    """part[e, :, start + e], (E, n); a copy, since a view would keep all of the slice."""
    return part[:, :, start : start + len(part)].diagonal(dim1=0, dim2=2).mT.clone()


def _pair(flat: Tensor, first: bool, size: int) -> Tensor:
    """(k, entries of a pair) → (k, vector index, matrix index), as a view."""
    return flat.unflatten(-1, (size, -1)) if first else flat.unflatten(-1, (-1, size)).mT


def _width(middle: Middle) -> int:
    _, n, m = middle.shape
    return max(1, CHUNK // max(1, n * m))


def outer(term: Term) -> Tensor:
    """Row ⊗ col per token, (n, r·c)."""
    return (term.row[:, :, None] * term.col[:, None]).flatten(1)


def inner(a: Term, b: Term) -> Tensor:
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
    twice = gram.new_full((term.middle.shape[2],), 2**0.5)
    twice[0] = 1
    for start, part in term.middle.slices(_width(term.middle)):
        for e, left in enumerate(part, start):
            alive = left.any(1).nonzero().flatten()  # behind a ReLU, half of the tokens, so a quarter of the work
            few = left[alive, e:] * twice[: left.shape[1] - e]
            gram[alive[:, None], alive] += few @ few.mT
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
