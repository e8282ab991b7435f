"""What was measured of one model at one point: plain frozen data, all that the figures and the page know.

‖·‖ is the Frobenius norm. H = G + F is the Hessian, its Gauss–Newton part (H_o) and its functional part (H_f).
A part that was not measured is None, or empty, and `notes` say why.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MATRICES = ("H", "G", "F")
SURE = 3.0  # standard errors: with four probes or more, the truth is nearer in about 19 cases of 20 (Student's t)


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error; 0 where nothing was sampled.

    >>> Estimate(1.23456, 0.04).surely_above(1.0)
    True
    """

    value: float
    error: float = 0.0

    def __str__(self) -> str:
        from evolute.report.numbers import with_error

        return with_error(self.value, self.error)

    def surely_above(self, bound: float) -> bool:
        """By so many standard errors that chance is no explanation."""
        return self.value - SURE * self.error > bound

    def surely_below(self, bound: float) -> bool:
        return self.value + SURE * self.error < bound


@dataclass(frozen=True)
class Subject:
    """Which model, on which data."""

    model: str
    data: str
    fingerprint: str
    parameters: int
    terms: float
    batches: int
    dtype: str
    device: str


@dataclass(frozen=True)
class Training:
    """How the model came to be, as far as it is known: the largest rate; losses of the steps, or some of them."""

    optimizer: str | None = None
    lr: float | None = None
    schedule: str | None = None
    momentum: float | None = None
    batch: int | None = None
    steps: int | None = None
    accuracy: float | None = None
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Point:
    """The objective where it was looked at: loss, length of the gradient, and gᵀHg/gᵀg, the curvature along it."""

    loss: float
    gradient: Estimate
    along_gradient: float | None


@dataclass(frozen=True)
class Eigenvalues:
    """Some at one end of a spectrum, the outermost first; each lies within its residual of a true one."""

    values: tuple[float, ...]
    residuals: tuple[float, ...]
    converged: bool


@dataclass(frozen=True)
class Adaptive:
    """λ_max(P^-½ H P^-½), with P = √v + ε as Adam would have it: v the mean square of minibatch gradients.

    `data` is its standard error if other data had been drawn.
    """

    top: float
    residual: float
    data: float
    batch: float
    minibatches: int
    converged: bool


@dataclass(frozen=True)
class Density:
    """Of the eigenvalues of H, on a grid: the mean over probes and how far probes scatter around it (one s.e.)."""

    grid: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Spectrum:
    """What random probes say about all eigenvalues of H at once."""

    density: Density
    trace: Estimate
    frobenius: Estimate
    negative: Estimate
    effective_rank: Estimate
    condition: float | None
    condition_on: str
    probes: int
    steps: int


@dataclass(frozen=True)
class Matrix:
    """One of H, G, F in pieces: ‖A_ij‖ for all pairs of groups, ‖A_:j‖² per group, and of the whole ‖A‖², tr A."""

    norms: tuple[tuple[float, ...], ...]
    errors: tuple[tuple[float, ...], ...]
    columns: tuple[Estimate, ...]
    square: Estimate
    trace: Estimate


@dataclass(frozen=True)
class Blocks:
    """H, G and F in blocks, from the same probes; `inner` is ⟨H, G⟩ = tr(H G)."""

    groups: tuple[str, ...]
    sizes: tuple[int, ...]
    H: Matrix
    G: Matrix
    F: Matrix
    inner: Estimate
    probes: int

    def __getitem__(self, name: str) -> Matrix:
        return {"H": self.H, "G": self.G, "F": self.F}[name]


@dataclass(frozen=True)
class Sharpness:
    """λ_max of H, of G, of the layers alone; `data` is its standard error if other data had been drawn."""

    largest: Eigenvalues
    smallest: Eigenvalues | None
    outer: Eigenvalues | None
    data: float | None
    layers: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Cost:
    """One measurement: what, how many products with H and G, how long, and whether it was finished."""

    what: str
    products: int
    seconds: float
    complete: bool


@dataclass(frozen=True)
class Provenance:
    """What has to be the same for the numbers to be the same."""

    seed: int
    versions: tuple[tuple[str, str], ...]
    threads: int
    seconds: float


@dataclass(frozen=True)
class Analysis:
    """One model at one point, measured."""

    name: str
    subject: Subject
    training: Training | None
    point: Point
    sharpness: Sharpness | None
    adaptive: Adaptive | None
    spectrum: Spectrum | None
    blocks: Blocks | None
    costs: tuple[Cost, ...]
    notes: tuple[str, ...]
    provenance: Provenance

    @property
    def products(self) -> int:
        """With H and with G, all together."""
        return sum(cost.products for cost in self.costs)

    def save(self, folder: str | Path) -> Path:
        """`report.json` in the folder, whole or not at all."""
        from evolute.report.storage import save

        return save(self, Path(folder))

    @staticmethod
    def load(path: str | Path) -> Analysis:
        """From a report.json, or from the folder that it is in."""
        from evolute.report.storage import load

        return load(Path(path))
