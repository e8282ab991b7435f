"""What this room asks of the Krylov methods, and their answers as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from evolute import krylov
from evolute.linop.operator import LinearOperator
from evolute.report.analysis import Density, Eigenvalues, Estimate, Spectrum
from evolute.report.parts import Pairs

TOLERANCE = 1e-2  # of each eigenvalue: a residual that size is an error of its square
PRODUCTS = 16  # at most, for each eigenvalue that is asked for


def eigenvalues(
    op: LinearOperator, k: int, which: Literal["both", "largest", "smallest"], generator: torch.Generator
) -> Pairs:
    """K at each end that is asked for ("both" is two)."""
    k = max(1, min(k, op.shape[0] // 2))
    limit = PRODUCTS * max(k, 3) * (1 + (which == "both"))
    found = krylov.eigsh(op, k, which, TOLERANCE, generator=generator, vectors=True, max_products=limit, progress=False)
    assert found.vectors is not None
    return Pairs(found.values, found.residuals, found.vectors, bool(found.converged.all()))


def top(op: LinearOperator, generator: torch.Generator) -> tuple[float, float, bool]:
    """λ_max, its residual, and whether it has converged."""
    pairs = eigenvalues(op, 1, "largest", generator)
    return float(pairs.values[-1]), float(pairs.residuals[-1]), pairs.converged


@dataclass(frozen=True)
class Pass:
    """The spectrum, and the two ends that the same products have found."""

    spectrum: Spectrum
    largest: Eigenvalues
    smallest: Eigenvalues


def spectrum(op: LinearOperator, probes: int, steps: int, k: int, generator: torch.Generator) -> Pass:
    found = krylov.spectrum(op, probes, steps, k=k, generator=generator, progress=False)
    low, high = (found.density - found.band).clamp_min(0), found.density + found.band
    ends = [_end(*pair) for pair in ((found.largest, found.largest_bounds), (found.smallest, found.smallest_bounds))]
    told = Spectrum(
        Density(*(_floats(each) for each in (found.grid, found.density, low, high))),
        trace=_estimate(found.trace),
        frobenius=_estimate(found.frobenius),
        negative=_estimate(found.negative_mass),
        effective_rank=_estimate(found.effective_rank),
        condition=found.condition if math.isfinite(found.condition) else None,
        condition_on=found.condition_on,
        probes=probes,
        steps=steps,
    )
    return Pass(told, *ends)


def _end(values: Tensor, bounds: Tensor) -> Eigenvalues:
    settled = bool((bounds <= TOLERANCE * values.abs()).all())
    return Eigenvalues(_floats(values), _floats(bounds), settled)


def _estimate(quantity: krylov.Quantity) -> Estimate:
    return Estimate(quantity.estimate, quantity.standard_error)


def _floats(tensor: Tensor) -> tuple[float, ...]:
    return tuple(tensor.double().tolist())
