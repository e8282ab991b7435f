"""How many samples it takes until one more hardly changes the loss."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsFloat

import torch
from torch import Tensor

from evolute.apps.order_changes import Orders, random_orders, resampled, sizes
from evolute.engine.objective import Objective
from evolute.engine.sample_losses import SampleLosses, sample_losses
from evolute.errors import DataError, DecisionError, LossError
from evolute.krylov.provenance import Provenance, installed_version
from evolute.krylov.randomness import normal, stream
from evolute.krylov.results import quantile
from evolute.krylov.storage import load_result, save_result, saveable

RESAMPLED = 200  # times, for the interval


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class SampleSize:
    """The least k* with E|L_{k+1} − L_k| < tolerance for all k ≥ k*, at one point w or around it (`radius`).

    - `size` is k*, between `low` and `high` in `level` of all draws of the data.
    - `extrapolated`: k* is beyond the `samples` there are, by the law 1/k; new samples are taken to be like these.
    - `sizes`, `changes`, `errors`: the curve E|L_{k+1} − L_k| at some k, and its error over the random orders.
    - `deviation`: of the loss of a sample; L_k is off by about `deviation`/√k, which is far more than one step of it.
    - `left_out`: samples without a term, such as those with every label masked.
    """

    size: int
    low: int
    high: int
    level: float
    tolerance: float
    extrapolated: bool
    samples: int
    left_out: int
    loss: float
    deviation: float
    radius: float
    points: int
    orders: int
    sizes: Tensor
    changes: Tensor
    errors: Tensor
    data: str
    provenance: Provenance

    def standard_error(self, k: int) -> float:
        """√E(L_k − L)² of a mean over k samples: how far it is from that of all there could be.

        The change from k to k + 1 says nothing of it: 1/k against 1/√k.
        """
        if k < 1:
            raise DecisionError(f"expected a number of samples, at least 1, got {k}.")
        return self.deviation / math.sqrt(k)

    def save(self, path: str | Path) -> Path:
        """JSON, with the arrays in a safetensors file beside it."""
        return save_result(self, path)

    @classmethod
    def load(cls, path: str | Path) -> SampleSize:
        """What `save` wrote."""
        return load_result(path, cls)

    def __str__(self) -> str:
        where = f"within a radius of {self.radius:g} ({self.points} points)" if self.radius else "at this point"
        beyond = f"; beyond the {self.samples:,} samples there are, by the law 1/k" if self.extrapolated else ""
        without = f"; {self.left_out:,} without a term are left out" if self.left_out else ""
        return (
            f"k* = {self.size:,} [{self.low:,}, {self.high:,}] ({self.level:.0%}): from there on one more sample moves "
            f"the loss by less than {self.tolerance:g} on average, {where}{beyond}{without}. "
            f"L_k itself is off by {self.standard_error(self.size):.2g} at k*."
        )


def sample_size(
    objective: Objective,
    tolerance: float,
    *,
    level: float = 0.95,
    radius: float = 0.0,
    points: int = 8,
    orders: int = 32,
    generator: torch.Generator | None = None,
) -> SampleSize:
    """The least k* with E|L_{k+1}(w) − L_k(w)| < tolerance for all k ≥ k*, from one pass over the objective's data.

    >>> import evolute as ev
    >>> x = torch.linspace(-3, 3, 500, dtype=torch.float64)[:, None]
    >>> objective = ev.Objective(torch.nn.Linear(1, 1).double(), [(x, x.sin())], torch.nn.MSELoss())
    >>> found = ev.sample_size(objective, tolerance=0.1 * objective.value())
    >>> found.low <= found.size <= found.high, found.extrapolated
    (True, False)

    L_k is the mean loss (Σ sums / Σ terms) of the first k samples in a random order. The tolerance is in units of the
    loss. It is about the next sample, not about how far L_k is from its limit: see `SampleSize.standard_error`.

    Args:
        objective: Its loss has to be a mean. A sample is an entry along the first axis of a batch.
        tolerance: Positive, such as 0.001 * objective.value().
        level: Of the interval, for other samples of the same kind.
        radius: σ of a cloud N(0, σ²I) of points around w; 0 is w itself.
        points: How many of these, a pass of the model each.
        orders: How many random orders.
        generator: Where orders, points and resamples come from; seed 0 without one.
    """
    _check(objective, tolerance, level, radius, points, orders)
    random = stream(generator)
    zero = torch.zeros(objective.space.size, dtype=objective.space.dtype, device=objective.space.device)
    shifts = [radius * normal(1, len(zero), random, zero)[0] for _ in range(points)] if radius else []
    losses = sample_losses(objective, shifts)
    found = Search(losses, tolerance, level, orders, random)
    return found.result(objective, radius, max(1, len(shifts)), random)


def _check(objective: Objective, tolerance: float, level: float, radius: float, points: int, orders: int) -> None:
    if not isinstance(objective, Objective):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DecisionError(f"expected an ev.Objective, got {type(objective).__name__}.")
    if not objective.loss.mean:
        raise LossError("the objective is a sum, which every sample changes as much; make it with reduction='mean'.")
    for name, value in {"tolerance": tolerance, "level": level, "radius": radius}.items():
        if not isinstance(value, SupportsFloat):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DecisionError(f"{name}: expected a number, got {value!r}.")
    if not (tolerance > 0 and math.isfinite(tolerance)):
        raise DecisionError(f"tolerance: expected a positive number in units of the loss, got {tolerance!r}.")
    if not 0 < level < 1:
        raise DecisionError(f"level: expected a number between 0 and 1, such as 0.95, got {level!r}.")
    if not (radius >= 0 and math.isfinite(radius)):
        raise DecisionError(f"radius: expected 0, or the σ of points around w, got {radius!r}.")
    for name, value in {"points": points, "orders": orders}.items():
        if not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DecisionError(f"{name}: expected a number, at least 1, got {value!r}.")


class Search:
    """k* on the curve of given losses."""

    def __init__(
        self, losses: SampleLosses, tolerance: float, level: float, orders: int, generator: torch.Generator
    ) -> None:
        counted = losses.terms > 0
        self.left_out = int((~counted).sum())
        self.sums, self.terms = losses.sums[:, counted], losses.terms[counted]
        self.tolerance, self.level, self.count = tolerance, level, len(self.terms)
        if self.count < 2:
            without = f" ({self.left_out} more have no term)" if self.left_out else ""
            raise DataError(f"expected two samples or more to compare, got {self.count}{without}.")
        self.orders = Orders(self.sums, self.terms, random_orders(self.count, orders, generator))
        self.sizes = sizes(self.count)

    @property
    def extrapolated(self) -> bool:
        return self.orders.change(self.count - 1)[0] >= self.tolerance

    def least(self) -> int:
        """k*; beyond the data by d_k = d_{K−1} K/(k+1): never too small, where all have one number of terms."""
        if self.extrapolated:
            last = self.orders.change(self.count - 1)[0]
            return math.floor(last * self.count / self.tolerance - 1) + 1
        above = [k for k in self.sizes if self.orders.change(k)[0] >= self.tolerance]
        if not above:
            return 1
        low, high = above[-1], next(k for k in self.sizes if k > above[-1])
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.orders.change(middle)[0] >= self.tolerance else (low, middle)
        return high

    def interval(self, size: int, generator: torch.Generator) -> tuple[int, int]:
        """k* moves as the change does, since the one is inverse to the other; Student's t, in the logarithm."""
        values = torch.tensor(
            resampled(self.sums, self.terms, min(size, self.count - 1), RESAMPLED, generator), dtype=torch.float64
        )
        if not float(values.mean()):
            return size, size
        reach = quantile(self.level, self.count) * float(values.std() / values.mean())
        factor = math.exp(min(reach, 30.0))
        return max(1, math.floor(size / factor)), math.ceil(size * factor)

    def deviation(self) -> float:
        """√E(s − nL)²/E n: the error of L_k is that over √k, whether all samples have one number of terms or not."""
        mean = self.sums.sum(1, keepdim=True) / self.terms.sum()
        rest = (self.sums - self.terms * mean).square().sum(1) / (self.count - 1)
        return float(rest.mean().sqrt() / self.terms.mean())

    def result(self, objective: Objective, radius: float, points: int, generator: torch.Generator) -> SampleSize:
        seed, size = generator.initial_seed(), self.least()
        low, high = self.interval(size, generator)
        curve = torch.tensor([self.orders.change(k) for k in self.sizes], dtype=torch.float64)
        return SampleSize(
            size=size,
            low=low,
            high=high,
            level=self.level,
            tolerance=float(self.tolerance),
            extrapolated=self.extrapolated,
            samples=self.count,
            left_out=self.left_out,
            loss=float(self.sums.sum(1).mean() / self.terms.sum()),
            deviation=self.deviation(),
            radius=float(radius),
            points=points,
            orders=len(self.orders.orders),
            sizes=torch.tensor(self.sizes),
            changes=curve[:, 0],
            errors=curve[:, 1],
            data=objective.batches.digest(),
            provenance=Provenance(
                repr(objective), "float64", seed, installed_version(), str(torch.__version__), platform.python_version()
            ),
        )
