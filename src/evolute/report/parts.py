"""Measurements of one analysis, put into the form in which they are kept."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from evolute.engine.objective import Objective
from evolute.linop.operator import LinearOperator
from evolute.report.analysis import Adaptive, Blocks, Eigenvalues, Estimate, Point, Sharpness, Spectrum
from evolute.report.samples import Batchwise


@dataclass(frozen=True, eq=False)
class Pairs:
    """Eigenpairs of one operator: values ascend, vectors are columns."""

    values: Tensor
    residuals: Tensor
    vectors: Tensor
    converged: bool

    def descending(self) -> Eigenvalues:
        values, residuals = self.values.flip(0).tolist(), self.residuals.flip(0).tolist()
        return Eigenvalues(tuple(values), tuple(residuals), self.converged)


@dataclass(frozen=True, eq=False)
class Parts:
    """What was measured; None where it was not."""

    top: Pairs | None
    outer: Pairs | None
    batches: Batchwise | None
    blocks: Blocks | None
    spectrum: Spectrum | None
    smallest: Eigenvalues | None
    layers: tuple[tuple[str, float], ...]
    adaptive: Adaptive | None

    @property
    def terms(self) -> float:
        return sum(self.batches.terms) if self.batches else 0.0

    def point(self, loss: float, objective: Objective, H: LinearOperator) -> Point:
        gradient = objective.gradient() if self.batches is None else self.batches.gradient
        size = float(gradient.double().norm())
        error = (self.batches.gradient_error if self.batches else None) or 0.0
        unit = gradient / size if size else gradient
        return Point(loss, Estimate(size, error), float(unit.double() @ (H @ unit).double()) if size else None)

    def sharpness(self) -> Sharpness | None:
        if self.top is None:
            return None
        outer = self.outer.descending() if self.outer else None
        data = self.batches.curvature_error if self.batches else None
        return Sharpness(self.top.descending(), self.smallest, outer, data, self.layers)
