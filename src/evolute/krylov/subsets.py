"""Several data subsets: how much of the spread between their numbers is data, and how much is probes.

x_s = μ + d_s + e_s, a one-way random-effects model. The variance of x_s over subsets is τ² + (mean square of the probe
errors); probes are drawn anew for each subset, so the second part is known, and τ² is what is left.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evolute.krylov.results import Quantity
from evolute.krylov.spectrum_result import Pooled, Spectra, Spectrum

SUMS = (
    "trace",
    "frobenius",
    "nuclear",
    "negative_mass",
    "negative_count",
    "effective_rank",
    "stable_rank",
)


def together(parts: list[Spectrum]) -> Spectra:
    """One answer of several."""
    pooled = {name: pool([getattr(part, name) for part in parts]) for name in SUMS}
    pooled |= {
        "largest": pool([_end(part.largest, part.largest_bounds) for part in parts]),
        "smallest": pool([_end(part.smallest, part.smallest_bounds) for part in parts]),
    }
    last = parts[-1]
    return Spectra(
        products=sum(part.products for part in parts),
        status=last.status,
        method=last.method,
        provenance=last.provenance,
        parts=tuple(parts),
        pooled=pooled,
    )


def _end(values: Tensor, bounds: Tensor) -> Quantity:
    """The outermost eigenvalue: its error is the solver's."""
    return Quantity(estimate=float(values[0]), standard_error=0.0, samples=0, solver_error=float(bounds[0]))


def pool(parts: list[Quantity]) -> Pooled:
    """μ, its error from the spread of the parts, and that spread without what probes explain.

    >>> exact = [Quantity(estimate=x, standard_error=0.0, samples=0, solver_error=0.0) for x in (1.0, 2.0, 3.0)]
    >>> pool(exact).data_spread, pool(exact).probe_error
    (1.0, 0.0)
    """
    estimates, errors = _column(parts, lambda x: x.estimate), _column(parts, lambda x: x.standard_error)
    count, probes = len(parts), float(errors.square().mean())
    variance = float(estimates.var()) if count > 1 else float("inf")
    return Pooled(
        estimate=float(estimates.mean()),
        standard_error=(variance / count) ** 0.5,
        samples=count,
        solver_error=float(_column(parts, lambda x: x.solver_error).mean()),
        probe_error=(probes / count) ** 0.5,
        data_spread=max(0.0, variance - probes) ** 0.5,
    )


def _column(parts: list[Quantity], read: Callable[[Quantity], float]) -> Tensor:
    return torch.tensor([read(each) for each in parts], dtype=torch.float64)
