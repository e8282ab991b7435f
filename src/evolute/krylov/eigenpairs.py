"""Eigenvalues with what is known about each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.krylov.results import Result
from evolute.krylov.storage import saveable


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Eigenpairs(Result):
    """λ ascending, and ‖Hv − λv‖ for the unit vector v of each: some eigenvalue is no further from λ than that.

    `residuals` are those of the Lanczos recurrence, and what a product taken anew, with a random combination of all the
    vectors that came out, has beyond them; where that is more than rounding, each is taken anew. An interrupted run has
    those of the recurrence alone. `converged` means ‖Hv − λv‖ ≤ tol·|λ|, or ≤ `rounding`, the error of one product,
    where no |λ| is that small. `orthogonality` is max |QᵀQ − I| of the basis, measured in the end. `vectors` are
    columns (n, k), where they were asked for.
    """

    values: Tensor
    residuals: Tensor
    converged: Tensor
    vectors: Tensor | None
    which: str
    tol: float
    rounding: float
    orthogonality: float

    @property
    def relative(self) -> Tensor:
        """‖Hv − λv‖ / |λ|; infinite where λ is exactly 0 and the residual is not."""
        return torch.where(self.residuals > 0, self.residuals / self.values.abs(), 0.0)

    @property
    def largest(self) -> Tensor:
        """The upper end, from the top: all of them, or the upper half of "both"."""
        values = self.values.flip(0)
        return values[: (len(values) + 1) // 2] if self.which == "both" else values

    @property
    def smallest(self) -> Tensor:
        """The lower end, from the bottom: all of them, or the lower half of "both"."""
        return self.values[: (len(self.values) + 1) // 2] if self.which == "both" else self.values

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        marks = ["" if ok else "  not converged" for ok in self.converged.tolist()]
        pairs = zip(self.values.tolist(), self.residuals.tolist(), marks, strict=True)
        lines = [f"{value:>13.6g}  ‖Hv − λv‖ = {residual:.1e}{mark}" for value, residual, mark in pairs]
        return "\n".join(
            [*reversed(lines), f"[{self._footer()}, {int(self.converged.sum())} of {len(self)} converged]"]
        )
