"""A table of block norms, read by names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from evolute.krylov.results import Quantity, Result
from evolute.krylov.storage import saveable


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class BlockNorms(Result):
    """‖H_ij‖_F of all pairs of groups (i down, j across), each with its standard error.

    `table["a", "b"]` is one of them, with its interval. `sizes` are the numbers of entries of the groups. `asymmetry`
    is the largest difference between the estimates of a block and of its transpose, in standard errors: above 5 or so,
    the products are not those of one symmetric operator. In an interrupted run, blocks without samples are NaN.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    norms: Tensor
    standard_errors: Tensor
    samples: Tensor
    asymmetry: float
    rounding: float

    def __getitem__(self, pair: tuple[str, str]) -> Quantity:
        i, j = (self._place(name) for name in pair)
        norm = float(self.norms[i, j])
        return Quantity(
            estimate=norm,
            standard_error=float(self.standard_errors[i, j]),
            samples=int(self.samples[i, j]),
            solver_error=self.rounding * norm,
            positive=True,
        )

    def _place(self, name: str) -> int:
        if name not in self.names:
            raise KeyError(f"no group {name!r} in this table; there are {', '.join(self.names)}.")
        return self.names.index(name)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Name of the row → name of the column → norm."""
        rows = zip(self.names, self.norms.tolist(), strict=True)
        return {name: dict(zip(self.names, row, strict=True)) for name, row in rows}

    def __str__(self) -> str:
        """Each norm with its standard error, where it has one."""
        rows = zip(self.norms.tolist(), self.standard_errors.tolist(), strict=True)
        cells = [[_cell(*pair) for pair in zip(*row, strict=True)] for row in rows]
        left, wide = max(map(len, self.names)), max(8, *map(len, self.names), *(len(c) for row in cells for c in row))
        head = " " * left + "".join(f" {name:>{wide}}" for name in self.names)
        told = zip(self.names, cells, strict=True)
        lines = [f"{name:<{left}}" + "".join(f" {cell:>{wide}}" for cell in row) for name, row in told]
        return "\n".join([head, *lines, f"[{self._footer()}]"])


def _cell(norm: float, error: float) -> str:
    """No error where it is exact, and no number where there was no sample.

    >>> _cell(2.4495, 0.0), _cell(2.4495, 0.0321), _cell(float("nan"), float("inf"))
    ('2.45', '2.45 ± 0.032', '–')
    """
    if math.isnan(norm):
        return "–"
    return f"{norm:.3g} ± {error:.2g}" if error else f"{norm:.3g}"
