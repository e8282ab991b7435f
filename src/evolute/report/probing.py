"""Norms of all blocks of H, G and F = H − G at once: probes supported on one group, multiplied by H and by G."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evolute.linop.operator import LinearOperator
from evolute.linop.space import Group
from evolute.report.analysis import MATRICES, Blocks, Estimate, Matrix
from evolute.report.clock import Stage
from evolute.report.low_rank import LowRank, inner

FEWEST = 3  # probes of each group, for a standard error that means something
PER_PASS = 2  # probes of each group before the clock is looked at


@dataclass
class Seen:
    """What the probes of all groups saw beyond L, one entry per probe: (groups of rows, groups of columns)."""

    squares: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in MATRICES})
    traces: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in MATRICES})
    inner: list[Tensor] = field(default_factory=list[Tensor])


@dataclass(frozen=True, eq=False)
class Known:
    """Leading eigenpairs of H and G, and what follows for F."""

    H: LowRank
    G: LowRank
    F: LowRank

    @staticmethod
    def of(H: tuple[Tensor, Tensor], G: tuple[Tensor, Tensor], places: tuple[Tensor, ...]) -> Known:
        """From (U, s) of each."""
        (U, s), (W, t) = ((vectors.double(), values.double()) for vectors, values in (H, G))
        both = LowRank(torch.cat([U, W], 1), torch.cat([s, -t]), places)
        return Known(LowRank(U, s, places), LowRank(W, t, places), both)

    def __getitem__(self, name: str) -> LowRank:
        return {"H": self.H, "G": self.G, "F": self.F}[name]


def probe(
    H: LinearOperator,
    G: LinearOperator,
    groups: Mapping[str, Group],
    known: Callable[[tuple[Tensor, ...]], Known],
    probes: int,
    generator: torch.Generator,
    stage: Stage,
) -> Blocks | None:
    """All the tables; None if there was no time for so few as tell their own error."""
    columns = [_Column(H, G, parts, place) for place, parts in enumerate(groups.values())]
    places = tuple(column.coordinates for column in columns)
    low, seen = known(places), Seen()
    for first in range(0, probes, PER_PASS):
        if not _one_pass(columns, low, min(PER_PASS, probes - first), generator, stage, seen):
            stage.cut = True
            stage.clock.notes.append(f"Time ran out during the block norms: {first} of {probes} probes of each group.")
            break
    return _tables(tuple(groups), low, seen) if len(seen.inner) >= FEWEST else None


@dataclass(frozen=True, eq=False)
class _Column:
    """All rows of H and G, and the columns of one group.

    The whole operators are used: a block of each column is cheaper by half, once it is recorded, but recording it takes
    as long as the few products that are needed.
    """

    H: LinearOperator
    G: LinearOperator
    parts: Group
    place: int

    @property
    def coordinates(self) -> Tensor:
        space = self.H.space
        count = torch.arange(space.size, dtype=torch.float64, device=space.device)
        return space.resolve(self.parts).take(count).long()

    def products(self, V: Tensor) -> tuple[Tensor, Tensor]:
        """(r, n_j) → H v and G v, (r, P) each."""
        rows = self.H.space.resolve(self.parts).put(V)
        return self.H.apply_rows(rows), self.G.apply_rows(rows)


def _one_pass(
    columns: list[_Column], known: Known, count: int, generator: torch.Generator, stage: Stage, seen: Seen
) -> bool:
    """Some probes of every group; False, and nothing kept, when time was up."""
    found: list[dict[str, tuple[Tensor, Tensor]]] = []
    inners: list[Tensor] = []
    for column in columns:
        if stage.clock.over and seen.inner:
            return False
        V = _signs(count, len(known.H.groups[column.place]), generator, column.H)
        HV, GV = column.products(V)
        stage.tick(2 * count)
        pieces, product = _seen(known, column.place, V.double(), HV.double(), GV.double())
        found.append(pieces)
        inners.append(product)
    for name in MATRICES:
        seen.squares[name] += torch.stack([each[name][0] for each in found], -1).unbind()
        seen.traces[name] += torch.stack([each[name][1] for each in found], -1).unbind()
    seen.inner += torch.stack(inners, -1).unbind()
    return True


def _seen(known: Known, j: int, V: Tensor, HV: Tensor, GV: Tensor) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Beyond L: squares and traces of each matrix, and the inner product."""
    products = {"H": HV, "G": GV, "F": HV - GV}
    pieces = {name: _beyond(known[name], AV, V, j) for name, AV in products.items()}
    c, d = known.H.coefficients(V, j), known.G.coefficients(V, j)
    return pieces, (HV * GV).sum(-1) - torch.einsum("ra,ab,rb->r", c, known.H.U.T @ known.G.U, d)


def _signs(count: int, size: int, generator: torch.Generator, op: LinearOperator) -> Tensor:
    draw = torch.randint(0, 2, (count, size), generator=generator, device=generator.device)
    return draw.to(op.device, op.dtype).mul_(2).sub_(1)


def _beyond(L: LowRank, AV: Tensor, V: Tensor, j: int) -> tuple[Tensor, Tensor]:
    """‖(A v)_i‖² − ‖(L v)_i‖² for every i (r, groups), and vᵀ(A v)_j − vᵀ(L v)_j (r,)."""
    c = L.coefficients(V, j)
    squares = torch.stack([AV[:, rows].square().sum(-1) for rows in L.groups], -1) - L.row_squares(c)
    return squares, (V * AV[:, L.groups[j]]).sum(-1) - L.own(V, c, j)


# ---------------------------------------------------------------- from probes to tables


def _tables(names: tuple[str, ...], known: Known, seen: Seen) -> Blocks:
    matrices = {name: _matrix(known[name], seen.squares[name], seen.traces[name]) for name in MATRICES}
    sizes = tuple(len(place) for place in known.H.groups)
    product = _sum(inner(known.H, known.G), torch.stack(seen.inner))
    return Blocks(names, sizes, matrices["H"], matrices["G"], matrices["F"], product, len(seen.inner))


def _matrix(L: LowRank, squares: list[Tensor], traces: list[Tensor]) -> Matrix:
    S = torch.stack(squares)  # (probes, rows, columns)
    exact = L.squares()
    mean, error = exact + S.mean(0), _error(S)
    norms, errors = _norms((mean + mean.T) / 2, _symmetric(error))
    columns = [Estimate(max(float(m), 0.0), float(e)) for m, e in zip(mean.sum(0), _error(S.sum(1)), strict=True)]
    whole, trace = _sum(exact.sum(0), S.sum(1)), _sum(L.traces(), torch.stack(traces))
    return Matrix(_rows(norms), _rows(errors), tuple(columns), whole, trace)


def _sum(exact: Tensor, beyond: Tensor) -> Estimate:
    """Σ_j over groups; (probes, groups), independent of one another."""
    return Estimate(float(exact.sum() + beyond.mean(0).sum()), float(_error(beyond).square().sum().sqrt()))


def _error(samples: Tensor) -> Tensor:
    """The standard error of the mean over the first axis."""
    return samples.std(0) / len(samples) ** 0.5


def _symmetric(error: Tensor) -> Tensor:
    """Of the mean of A_ij and A_ji, which come from different probes; on the diagonal from the same."""
    both = (error.square() + error.T.square()).sqrt() / 2
    return torch.where(torch.eye(len(error), dtype=torch.bool, device=error.device), error, both)


def _norms(squares: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """√x, and its standard error: dx/2√x, at most √dx, where x may be zero."""
    norms = squares.clamp_min(0).sqrt()
    return norms, torch.minimum(errors / (2 * norms).clamp_min(1e-300), errors.sqrt())


def _rows(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.tolist())
