"""Rows made orthonormal, to a basis and to one another: classical Gram–Schmidt, twice.

Q (m, n) basis, W (b, n) new rows, V (r, n) what is new in them: W = C Q + R V, with Q Vᵀ = 0 and V Vᵀ = I.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 14  # entries that are summed up in the precision of the vectors
SAFE = 1e-2  # a Gram matrix with eigenvalues above this is inverted without loss
DEPENDENT = 0.5  # a unit row that shrinks below this when projected again was in the span before ("twice is enough")


@dataclass(frozen=True)
class Split:
    """W = C Q + R V, and the length of the rows of W. C, R and lengths are float64 on the CPU."""

    C: Tensor
    R: Tensor
    V: Tensor
    lengths: Tensor


def split(W: Tensor, Q: Tensor, scale: float) -> Split:
    """C, R and V of W; a row of which less than rounding is new adds none. `scale`: the longest row seen so far.

    >>> Q, W = torch.eye(2, 4), torch.tensor([[1.0, 2.0, 3.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    >>> parts = split(W, Q, 0.0)
    >>> parts.C.tolist(), parts.R.tolist(), parts.V.tolist()
    ([[1.0, 2.0], [0.0, 1.0]], [[3.0], [0.0]], [[0.0, 0.0, 1.0, 0.0]])
    """
    lengths = torch.linalg.vector_norm(W, dim=1).to(torch.float64)
    first = inner(W, Q)
    rest = W.addmm(first.to(W), Q, alpha=-1)
    fast = _together(rest, Q)
    small = torch.cat([lengths[:, None], first, *fast.small], 1).cpu()  # the one round trip
    lengths, C, G, extra, H = small.split([1, len(Q), len(W), len(Q), len(W)], 1)
    unit = _unit(W, float(lengths.max()))
    if unit != 1:
        parts = split(W / unit, Q, scale / unit)
        return Split(parts.C * unit, parts.R * unit, parts.V, parts.lengths * unit)
    longest = max(scale, float(lengths.nan_to_num().max()))
    floor = 8 * torch.finfo(W.dtype).eps * longest
    if _sound(G, H, floor):
        L = _lower(G)
        return Split(C + L @ extra, L @ _lower(H), fast.V, lengths[:, 0])
    return _one_by_one(rest, Q, C.clone(), lengths[:, 0], floor)


def _unit(W: Tensor, longest: float) -> float:
    """1, or the power of two to divide by where squares of such rows, or of their rounding, are zero or infinite."""
    info = torch.finfo(W.dtype)
    if info.tiny**0.5 / info.eps < longest < info.max**0.5 or math.isnan(longest):
        return 1.0
    largest = float(W.abs().max())
    return 2.0 ** math.frexp(largest)[1] if 0 < largest < math.inf else 1.0


@dataclass(frozen=True)
class _Together:
    V: Tensor
    small: tuple[Tensor, Tensor, Tensor]


def _together(W: Tensor, Q: Tensor) -> _Together:
    """All rows at once, by Cholesky factors of their Gram matrices; garbage where they are dependent."""
    G = inner(W, W)
    V = _divided(W, G)
    extra = inner(V, Q)
    V.addmm_(extra.to(V), Q, alpha=-1)
    H = inner(V, V)
    return _Together(_divided(V, H), (G, extra, H))


def _divided(W: Tensor, G: Tensor) -> Tensor:
    """L⁻¹ W with L Lᵀ = G = W Wᵀ; scaled first, so that rows of all lengths are alike."""
    lengths = G.diagonal().sqrt()
    unit, _ = torch.linalg.cholesky_ex(G / torch.outer(lengths, lengths))
    inverse = torch.linalg.solve_triangular(unit, torch.eye(len(G), dtype=G.dtype, device=G.device), upper=False)
    return (inverse / lengths).to(W) @ W


def inner(A: Tensor, B: Tensor) -> Tensor:
    """A Bᵀ in float64, summed up piece by piece: a float32 sum of a million terms is off by 1e-5."""
    total = torch.zeros(len(A), len(B), dtype=torch.float64, device=A.device)
    width = CHUNK if A.device.type == "cpu" else max(1, A.shape[1])  # elsewhere, sums are cut up anyway
    for a, b in zip(A.split(width, 1), B.split(width, 1), strict=True):
        total += a @ b.mT
    return total


def _lower(G: Tensor) -> Tensor:
    lengths = G.diagonal().sqrt()
    return lengths[:, None] * torch.linalg.cholesky(G / torch.outer(lengths, lengths))


def _sound(G: Tensor, H: Tensor, floor: float) -> bool:
    """No row is short, none depends on the others, none shrank when projected again."""
    lengths = G.diagonal().clamp_min(0).sqrt()
    if not (bool(torch.isfinite(H).all()) and float(lengths.min()) > floor):
        return False
    conditions = torch.linalg.eigvalsh(torch.stack([G / torch.outer(lengths, lengths), H]))[:, 0]
    return bool(conditions[0] > SAFE) and bool(conditions[1] > DEPENDENT)


def _one_by_one(rest: Tensor, Q: Tensor, C: Tensor, lengths: Tensor, floor: float) -> Split:
    """Row after row, those that add nothing left out; C is filled in."""
    m, b = len(Q), len(rest)
    new, R = rest.new_empty((0, rest.shape[1])), torch.zeros(b, b, dtype=torch.float64)
    for i, row in enumerate(rest):
        length = float(torch.linalg.vector_norm(row))
        if length <= floor:
            continue
        unit, length, coefficients = _against(row[None], (Q, new), length)
        C[i] += coefficients[:m]
        R[i, : len(new)] = coefficients[m:]
        if length > floor:
            R[i, len(new)] = length
            new = torch.cat([new, unit])
    return Split(C, R[:, : len(new)], new, lengths)


def _against(row: Tensor, bases: tuple[Tensor, Tensor], length: float) -> tuple[Tensor, float, Tensor]:
    """The row is coefficients · bases + length · (the new unit row); length 0 if there is no such row."""
    total = torch.zeros(sum(map(len, bases)), dtype=torch.float64)
    row, shrunk = row / length, 1.0
    for _ in range(3):
        found = [inner(row, basis) for basis in bases]
        for basis, part in zip(bases, found, strict=True):
            row = row - part.to(row) @ basis
        total += length * torch.cat(found, 1)[0].cpu()
        shrunk = float(inner(row, row).sqrt())
        length *= shrunk
        row = row / shrunk if shrunk else row
    return row, length if shrunk > DEPENDENT else 0.0, total
