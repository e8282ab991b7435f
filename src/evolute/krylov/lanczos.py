"""Block Lanczos with every vector kept and orthogonalised twice: A Qᵀ = Qᵀ T + Vᵀ B, with Q Vᵀ = 0.

Q (m, n) orthonormal rows whose products are known, V (b, n) the rows that come next; T (m, m) = Q A Qᵀ is `projected`,
B (b, m) is `coupling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.errors import NonFiniteError
from evolute.krylov.checkpoint import State
from evolute.krylov.orthogonal import inner, split
from evolute.krylov.work import Work
from evolute.linop.memory import available, require

CHUNK = 1 << 16  # entries of n that are turned at once
EXTREME = 1e140  # squares of more, and of rounding beside less than its inverse, are beyond float64


@dataclass(frozen=True)
class Ritz:
    """θ ascending, the coordinates of each vector as a column, and the bound ‖A y − θ y‖ = ‖B s‖ of each."""

    values: Tensor
    coordinates: Tensor
    bounds: Tensor


class Lanczos:
    """A basis that grows by the products of its newest block, and shrinks to what is wanted of it."""

    def __init__(self, work: Work, capacity: int) -> None:
        size = work.like.element_size()
        instead = "Ask for fewer vectors (probes, steps, k, basis=…) or for dtype=torch.float32."
        require(size * capacity * work.n, work.op.device, f"a basis of {capacity} vectors of {work.n}", instead)
        self.work, self.capacity = work, capacity
        self.rows = work.like.new_empty((capacity, work.n))
        self.projected = torch.zeros(capacity, capacity, dtype=torch.float64)
        self.coupling = torch.zeros(0, 0, dtype=torch.float64)
        self.m, self.width = 0, 0
        self.scale = 0.0

    @property
    def Q(self) -> Tensor:
        return self.rows[: self.m]

    @property
    def V(self) -> Tensor:
        return self.rows[self.m : self.m + self.width]

    @property
    def exhausted(self) -> bool:
        """The space that the first vectors span is complete."""
        return self.width == 0

    @property
    def full(self) -> bool:
        """Without room for what the next step adds."""
        return self.m + 2 * self.width > self.capacity

    def add(self, rows: Tensor) -> Tensor:
        """What is new in these rows joins V; returned are their coordinates (k, what joined)."""
        parts = split(rows, self.rows[: self.m + self.width], 0.0)
        new = parts.V[: self.capacity - self.m - self.width]
        self.rows[self.m + self.width : self.m + self.width + len(new)] = new
        self.coupling = torch.cat([self.coupling, torch.zeros(len(new), self.m, dtype=torch.float64)])
        self.width += len(new)
        return parts.R[:, : len(new)]

    def step(self) -> None:
        """V joins Q; what its products have that is new is the next V."""
        before, m = self.m, self.m + self.width
        parts = split(self.work(self.V), self.rows[:m], self.scale)
        self.work.finite(parts.lengths)
        self.scale = max(self.scale, float(parts.lengths.max()))
        if self.scale and not 1 / EXTREME < self.scale < EXTREME:
            raise NonFiniteError(f"a product of {self.work.op!r} has length {self.scale:.0e}: multiply it by a number.")
        self._project(parts.C, before, m)
        room = min(len(parts.V), self.capacity - m)
        self.rows[m : m + room] = parts.V[:room]
        self.coupling = torch.zeros(room, m, dtype=torch.float64)
        self.coupling[:, before:m] = parts.R[:, :room].mT
        self.m, self.width = m, room

    def _project(self, C: Tensor, before: int, m: int) -> None:
        """T is symmetric in exact arithmetic: both halves are what the last products say."""
        self.projected[before:m, :m] = C
        self.projected[:before, before:m] = C[:, :before].mT
        new = self.projected[before:m, before:m]
        new.copy_((new + new.mT) / 2)

    def ritz(self) -> Ritz:
        values, coordinates = torch.linalg.eigh(self.projected[: self.m, : self.m])
        return Ritz(values, coordinates, torch.linalg.vector_norm(self.coupling @ coordinates, dim=0))

    def vectors(self, coordinates: Tensor) -> Tensor:
        """(m, k) coordinates → (k, n) rows."""
        return coordinates.mT.to(self.rows) @ self.Q

    def compress(self, ritz: Ritz, keep: Tensor) -> None:
        """Q becomes the Ritz vectors to keep, in place; V stays what comes next."""
        U = ritz.coordinates[:, keep]
        k, turn = U.shape[1], U.mT.to(self.rows)
        for part in self.rows.split(CHUNK, dim=1):
            part[:k] = turn @ part[: self.m]
        self.rows[k : k + self.width] = self.V.clone()
        self.projected.zero_()
        self.projected[:k, :k] = torch.diag(ritz.values[keep])
        self.scale = max(self.scale, float(ritz.values.abs().max()))
        self.coupling = self.coupling @ U
        self.m = k

    def orthogonality(self, sample: int = 64) -> float:
        """Largest |Q Qᵀ − I|, of all rows against a sample of them."""
        if self.m == 0:
            return 0.0
        rows = torch.linspace(0, self.m - 1, min(sample, self.m)).round().long().unique()
        gram = inner(self.Q[rows.to(self.Q.device)], self.Q).cpu()
        gram[torch.arange(len(rows)), rows] -= 1
        return float(gram.abs().max())

    # ---- on disk

    def state(self) -> State:
        kept = self.rows[: self.m + self.width]
        return State(
            {"rows": kept, "projected": self.projected, "coupling": self.coupling},
            {"m": self.m, "width": self.width, "scale": self.scale},
        )

    def restore(self, state: State) -> None:
        self.m, self.width, self.scale = (state.values[name] for name in ("m", "width", "scale"))
        self.rows[: self.m + self.width] = state.tensors["rows"].to(self.rows)
        self.projected, self.coupling = state.tensors["projected"], state.tensors["coupling"]


def fits(work: Work, wanted: int, least: int) -> int:
    """As many vectors as wanted, fewer where they would take more than a third of the free memory."""
    room = available(work.op.device) // (3 * work.n * work.like.element_size())
    return max(least, min(wanted, room))
