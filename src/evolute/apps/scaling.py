"""Scaling laws: fitted to a table of runs, compared with others, and what they predict."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evolute.apps.scaling_cells import Cells, Columns, Table, cells_of
from evolute.apps.scaling_fit import Fitted, bootstrap, fitted, held_out
from evolute.apps.scaling_laws import Array, Law, loss_laws, power_laws
from evolute.errors import DecisionError
from evolute.krylov.provenance import Provenance, installed_version
from evolute.krylov.storage import load_result, save_result, saveable

LEVEL = 0.95
Laws = Callable[[Sequence[str]], list[Law]]


@saveable
@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A number between `low` and `high` in `level` of all cases, if the law is right; infinite where it is never so."""

    value: float
    low: float
    high: float
    level: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}] ({self.level:.0%})"


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class ScalingFit:
    """One law with its constants.

    - `intervals`: of each constant, 95 %, from resampled residuals.
    - `aicc`: Akaike's criterion for few cells; `weight`: exp(−Δ/2) of it, as a share over all laws that were tried.
    - `held_out`: relative error of a cell, predicted from all the others.
    - `at_bound`: constants that ended where they may not go further, and say nothing.
    """

    law: Law
    constants: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    aicc: float
    weight: float
    held_out: float
    at_bound: tuple[str, ...]
    theta: Tensor
    draws: Tensor
    residuals: Tensor

    def predict(self, *, size: float | None = None, data: float | None = None, level: float = LEVEL) -> Prediction:
        """The y of a new run at (N, D): the interval has the scatter of runs in it."""
        logs, values = self._logs(size, data), self.draws.double().numpy()
        middle = float(self.law.log_value(self.theta.numpy(), logs))
        noise = np.resize(np.random.default_rng(0).permutation(self.residuals.numpy()), len(values))
        low, high = _percentiles(self.law.log_value(values, logs) + noise, level)
        return Prediction(value=math.exp(middle), low=math.exp(low), high=math.exp(high), level=level)

    def data_for(self, target: float, *, size: float | None = None, level: float = LEVEL) -> Prediction:
        """D at which the law is at the target, for models of that size; infinite if it never is."""
        if "data" not in self.law.variables:
            raise DecisionError(f"the law {self.law} has no data size D in it.")
        if not (target > 0 and math.isfinite(target)):
            raise DecisionError(f"target: expected a positive number, got {target!r}.")
        logs, log_target = self._logs(size, 1.0), math.log(target)
        middle = self.law.solve(self.theta.numpy()[None], "data", log_target, logs)[0]
        low, high = _percentiles(self.law.solve(self.draws.numpy(), "data", log_target, logs), level)
        return Prediction(value=_exp(middle), low=_exp(low), high=_exp(high), level=level)

    def _logs(self, size: float | None, data: float | None) -> Array:
        given = {"size": size, "data": data}
        for name in self.law.variables:
            value = given[name]
            if value is None or not (value > 0 and math.isfinite(value)):
                raise DecisionError(f"{name}: expected a positive number for {self.law}, got {value!r}.")
        return np.log(np.asarray([given[name] for name in self.law.variables], float))

    def __str__(self) -> str:
        told = [f"{name} = {self.constants[name]:.4g} [{a:.4g}, {b:.4g}]" for name, (a, b) in self.intervals.items()]
        return f"{self.law}: {', '.join(told)}"


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Scaling:
    """The law that was asked for (`fit`), beside others on the same cells. `left_out`: cells that could not be used."""

    value: str
    fit: ScalingFit
    alternatives: tuple[ScalingFit, ...]
    cells: int
    left_out: tuple[str, ...]
    provenance: Provenance

    @property
    def fits(self) -> tuple[ScalingFit, ...]:
        """All of them, the likeliest first."""
        return tuple(sorted((self.fit, *self.alternatives), key=lambda fit: fit.aicc))

    @property
    def best(self) -> ScalingFit:
        """The lowest AICc."""
        return self.fits[0]

    def predict(self, *, size: float | None = None, data: float | None = None, level: float = LEVEL) -> Prediction:
        """By `fit`."""
        return self.fit.predict(size=size, data=data, level=level)

    def data_for(self, target: float, *, size: float | None = None, level: float = LEVEL) -> Prediction:
        """By `fit`."""
        return self.fit.data_for(target, size=size, level=level)

    def save(self, path: str | Path) -> Path:
        """JSON, with the arrays in a safetensors file beside it."""
        return save_result(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Scaling:
        """What `save` wrote."""
        return load_result(path, cls)

    def __str__(self) -> str:
        head = f"{'law':<22}{'AICc':>9}{'weight':>8}{'held out':>10}"
        table = [f"{f.law!s:<22}{f.aicc:>9.1f}{f.weight:>8.2f}{f.held_out:>10.2%}" for f in self.fits]
        without = [f"left out: {', '.join(self.left_out)}"] if self.left_out else []
        stuck = [f"says nothing, at its bound: {', '.join(self.fit.at_bound)}"] if self.fit.at_bound else []
        return "\n".join([f"{self.value} of {self.cells} runs", str(self.fit), head, *table, *stuck, *without])


def fit_scaling(
    table: Table,
    *,
    value: str = "loss",
    size: str | None = "N",
    data: str | None = "D",
    repeats: int = 200,
    seed: int = 0,
) -> Scaling:
    """Fits y = E + A/N^α + B/D^β by robust least squares of log y, beside 1/√D, 1/D, and no floor E.

    >>> import evolute as ev
    >>> runs = [
    ...     {"N": N, "D": D, "loss": 1 + 8 / N**0.5 + 20 / D**0.6}
    ...     for N in (100, 400, 1600, 6400)
    ...     for D in (500, 2000, 8000)
    ... ]
    >>> found = ev.fit_scaling(runs, repeats=20)
    >>> {name: round(constant, 2) for name, constant in found.fit.constants.items()}
    {'E': 1.0, 'A': 8.0, 'α': 0.5, 'B': 20.0, 'β': 0.6}
    >>> print(found.data_for(1.25, size=6400))
    3480 [3480, 3480] (95%)

    A run that diverged (nan or inf) or has no value is left out and named; runs at the same (N, D) count as repeats.

    Args:
        table: A row for each run: mappings of column to number, or one mapping of column to numbers.
        value: The column to be explained; it has to be positive.
        size: The column of N; None fits E + B/D^β.
        data: The column of D; None fits E + A/N^α.
        repeats: How often residuals are resampled, for the intervals.
        seed: Of the resampling.
    """
    return _scaling(table, Columns(value, size, data), loss_laws, 3, repeats, seed)


def fit_power_law(
    table: Table,
    *,
    value: str,
    size: str | None = "N",
    data: str | None = "D",
    repeats: int = 200,
    seed: int = 0,
) -> Scaling:
    """Fits y = C N^a D^b, for measures that may grow, such as curvature; beside laws without N, D, or both.

    >>> import evolute as ev
    >>> runs = {"N": [1, 10, 100, 10, 1, 100], "sharpness": [2.0, 20, 200, 20, 2, 200]}
    >>> print(ev.fit_power_law(runs, value="sharpness", data=None, repeats=20).fit)
    C N^a: C = 2 [2, 2], a = 1 [1, 1]

    The arguments are those of `fit_scaling`.
    """
    return _scaling(table, Columns(value, size, data), power_laws, 2, repeats, seed)


def _scaling(table: Table, columns: Columns, laws: Laws, least: int, repeats: int, seed: int) -> Scaling:
    if not isinstance(repeats, int) or repeats < 20:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DecisionError(f"repeats: expected at least 20, for intervals, got {repeats!r}.")
    cells = cells_of(table, columns)
    wanted = laws(columns.variables)
    cells.check(wanted[0], least)
    solved = [(law, *_fit(law, cells)) for law in wanted]
    scores = np.array([fit.aicc for _, fit, _ in solved])
    weights = np.exp(-(scores - scores.min()) / 2)
    found = [
        _told(fit, logs, cells.y, centre, float(weight), repeats, seed)
        for (_, fit, (logs, centre)), weight in zip(solved, weights / weights.sum(), strict=True)
    ]
    name = f"{columns.value} of {columns.size or ''} {columns.data or ''}".strip()
    made = Provenance(name, "float64", seed, installed_version(), str(torch.__version__), platform.python_version())
    return Scaling(
        value=columns.value,
        fit=found[0],
        alternatives=tuple(found[1:]),
        cells=len(cells.y),
        left_out=tuple(cells.left_out),
        provenance=made,
    )


def _fit(law: Law, cells: Cells) -> tuple[Fitted, tuple[Array, Array]]:
    """On logarithms that are centred, so that factors and exponents do not trade."""
    logs = cells.of(law.variables)
    centre = logs.mean(0)
    return fitted(law, logs - centre, cells.y), (logs - centre, centre)


def _told(fit: Fitted, logs: Array, y: Array, centre: Array, weight: float, repeats: int, seed: int) -> ScalingFit:
    law = fit.law
    theta = law.uncentred(fit.theta, centre)
    draws = law.uncentred(bootstrap(fit, logs, repeats, np.random.default_rng(seed)), centre)
    values, drawn = law.constants(theta), law.constants(draws)
    return ScalingFit(
        law=law,
        constants=dict(zip(law.names, values.tolist(), strict=True)),
        intervals={name: _percentiles(drawn[:, i], LEVEL) for i, name in enumerate(law.names)},
        aicc=fit.aicc,
        weight=weight,
        held_out=held_out(fit, logs, y),
        at_bound=tuple(_stuck(fit, logs, y)),
        theta=torch.from_numpy(theta),
        draws=torch.from_numpy(draws),
        residuals=torch.from_numpy(fit.widened),
    )


def _stuck(fit: Fitted, logs: Array, y: Array) -> list[str]:
    low, high = fit.law.bounds(logs, y)
    near = [min(t - a, b - t) < 1e-4 for t, a, b in zip(fit.theta.tolist(), low, high, strict=True)]
    return [name for name, stuck in zip(fit.law.names, near, strict=True) if stuck]


def _percentiles(values: Array, level: float) -> tuple[float, float]:
    """Infinite ones count as the largest."""
    if not 0 < level < 1:
        raise DecisionError(f"level: expected a number between 0 and 1, such as 0.95, got {level!r}.")
    ordered = np.sort(values)
    at: Sequence[float] = ((1 - level) / 2, (1 + level) / 2)
    low, high = (float(ordered[round(share * (len(ordered) - 1))]) for share in at)
    return low, high


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
