"""The whole spectrum, as far as some hundred products tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from evolute.krylov.results import Quantity, Result
from evolute.krylov.storage import saveable
from evolute.krylov.sums import Function, Sums


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Spectrum(Result):
    """Trace, norms, ends, sign and density of one operator of size n, from one set of products.

    - `trace` Σλ, `frobenius` √Σλ², `nuclear` Σ|λ|.
    - `negative_mass`: the share of Σ|λ| that is negative; `negative_count`: the share of the eigenvalues.
    - `effective_rank`: (Σ|λ|)²/Σλ², how many eigenvalues of one size would have these sums; `stable_rank`: Σλ²/λ_max².
    - `largest`, `smallest`: the ends, outermost first, each within its `…_bounds` of an eigenvalue.
    - `condition`: largest ÷ smallest |λ| on the subspace that `condition_on` names.
    - `density` per unit of λ on `grid`, smoothed, and `band`, its standard error at each point. The grid is even in
      asinh(λ/λ₀): linear near zero and logarithmic far out.
    - `nodes` (M,) and `counts` (P, M): how many eigenvalues each probe sees at each node.
    """

    n: int
    trace: Quantity
    frobenius: Quantity
    nuclear: Quantity
    negative_mass: Quantity
    negative_count: Quantity
    effective_rank: Quantity
    stable_rank: Quantity
    largest: Tensor
    largest_bounds: Tensor
    smallest: Tensor
    smallest_bounds: Tensor
    condition: float
    condition_on: str
    grid: Tensor
    density: Tensor
    band: Tensor
    nodes: Tensor
    counts: Tensor
    settled: int
    orthogonality: float

    def sum_of(self, function: Function) -> Quantity:
        """Σ f(λ), for any f that takes a tensor; smooth ones are more accurate than steps."""
        ones = self.counts
        sums = Sums(self.nodes, ones, ones, self.nodes, ones, self.status == "exact", 0.0)
        return sums.quantity(lambda mean: mean[..., 0], function)

    def __str__(self) -> str:
        lines = {
            "largest": _ends(self.largest, self.largest_bounds),
            "smallest": _ends(self.smallest, self.smallest_bounds),
            "trace": self.trace,
            "Frobenius norm": self.frobenius,
            "nuclear norm": self.nuclear,
            "negative share of Σ|λ|": self.negative_mass,
            "negative eigenvalues": self.negative_count,
            "effective rank": f"{self.effective_rank} of {self.n}",
            "condition number": f"{self.condition:.3g} on {self.condition_on}",
        }
        table = "\n".join(f"{name:<24}{value}" for name, value in lines.items())
        return f"{table}\n[{self._footer()}]"


def _ends(values: Tensor, bounds: Tensor) -> str:
    pairs = list(zip(values.tolist(), bounds.tolist(), strict=True))[:3]
    return ", ".join(f"{value:.5g} (within {bound:.1g})" for value, bound in pairs) + " …"


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Pooled(Quantity):
    """A number of several data subsets: the mean, and how much of its spread is data and how much is probes.

    x_s = μ + (data of subset s) + (probes of run s). `data_spread` is the standard deviation of the second term,
    `probe_error` that of the third in the mean of all subsets. `standard_error` of μ has both in it.
    """

    probe_error: float
    data_spread: float

    def __str__(self) -> str:
        return (
            f"{Quantity.__str__(self)} (probes {self.probe_error:.2g}; one subset to the next {self.data_spread:.2g})"
        )


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Spectra(Result):
    """One spectrum for each data subset, and what they say together."""

    parts: tuple[Spectrum, ...]
    pooled: Mapping[str, Pooled]

    def __str__(self) -> str:
        table = "\n".join(f"{name:<24}{value}" for name, value in self.pooled.items())
        return f"{table}\n[{len(self.parts)} data subsets; {self._footer()}]"
