"""A weight with itself in one straight term, Σ_t T_t ⊗ y_t y_tᵀ with T_t symmetric, straight into a matrix.

For one m after the other, a product over tokens gives the rows of m up to its own place on the diagonal,

    block[(m, r), (e, c)] = Σ_t y[t, r] (T[m, t, e] y[t, c])        e ≤ m

with no slice in between; and since T[m, e] y yᵀ = T[e, m] y yᵀ, the same entries are those of the columns of m.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from evolute.linop.kronecker import Full, Term
from evolute.linop.work import FEW, Work


def applies(term: Term) -> bool:
    """Where the vector index runs faster than m, the rows of an m lie together."""
    return term.row is term.col and term.straight and not term.row_first and isinstance(term.middle, Full)


def tasks(term: Term, block: Tensor) -> Iterator[Callable[[Work], None]]:
    """The rows and columns of one m each; those with the most entries first."""
    middle = term.middle
    assert isinstance(middle, Full)
    for m in reversed(range(middle.shape[2])):
        yield partial(_write, middle.tensor[m, :, : m + 1], term.row, block, m)


def _write(own: Tensor, y: Tensor, block: Tensor, m: int, work: Work) -> None:
    """Own: T[m, t, e], (n, m + 1)."""
    p = y.shape[1]
    own, y = _alive(own, y)
    z = torch.mul(own[:, :, None], y[:, None], out=work.room("z", y, (len(y), m + 1, p)))
    rows = block[m * p : (m + 1) * p, : (m + 1) * p]
    torch.mm(y.mT, z.flatten(1), out=rows)
    columns = block[: m * p, m * p : (m + 1) * p].unflatten(0, (m, p))
    columns.copy_(rows[:, : m * p].unflatten(1, (m, p)).transpose(0, 1))


def _alive(own: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Without the tokens that add nothing, where those are many: behind a ReLU, half of them."""
    tokens = own.any(1).nonzero().flatten()
    return (own[tokens], y[tokens]) if len(tokens) <= FEW * len(own) else (own, y)
