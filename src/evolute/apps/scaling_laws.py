"""Laws y(N, D) as functions of the logarithms of N and D, with their derivatives; what is fitted is log y.

A `Sum` is E + A/N^α + B/D^β, with or without E, each exponent free or fixed: log y = logsumexp(e, a − αn, b − βd), so
that every constant stays positive, and relative errors of y count, whatever its size. A `Product` is C N^a D^b, linear
in logarithms: for what may as well grow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from evolute.krylov.storage import saveable

Array = NDArray[np.float64]
STEEP = 5.0  # the largest exponent of a sum
FAINT = 30.0  # a term that is exp(−30) of what it could be is none
EXPONENTS = (0.15, 0.35, 0.7, 1.2)  # to start from
NAMES = {"size": ("A", "α", "N"), "data": ("B", "β", "D")}
FRACTIONS = {0.5: "√", 1.0: ""}


@saveable
@dataclass(frozen=True)
class Term:
    """A/N^α for "size", B/D^β for "data"; `exponent` if it is fixed."""

    variable: str
    exponent: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[self.variable][: 1 if self.exponent is not None else 2]

    def __str__(self) -> str:
        factor, exponent, variable = NAMES[self.variable]
        if self.exponent is None:
            return f"{factor}/{variable}^{exponent}"
        known = FRACTIONS.get(self.exponent)
        return f"{factor}/{variable}^{self.exponent:g}" if known is None else f"{factor}/{known}{variable}"


@saveable
@dataclass(frozen=True)
class Sum:
    """E + Σ of terms. Parameters: log E, then the logarithm of the factor and the exponent of each term.

    >>> law = Sum(True, (Term("size"), Term("data", 0.5)))
    >>> print(law, law.names)
    E + A/N^α + B/√D ('E', 'A', 'α', 'B')
    """

    floor: bool
    terms: tuple[Term, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(term.variable for term in self.terms)

    @property
    def names(self) -> tuple[str, ...]:
        return ("E",) * self.floor + tuple(name for term in self.terms for name in term.names)

    def __str__(self) -> str:
        return " + ".join([*["E"] * self.floor, *map(str, self.terms)])

    def log_value(self, theta: Array, logs: Array) -> Array:
        """(…, p), (…, v) → (…)."""
        return np.logaddexp.reduce(self._parts(theta, logs), axis=-1)

    def jacobian(self, theta: Array, logs: Array) -> Array:
        parts = self._parts(theta, logs)
        share = np.exp(parts - np.logaddexp.reduce(parts, axis=-1)[..., None])
        columns = [share[..., 0]] if self.floor else []
        for i, term in enumerate(self.terms):
            columns.append(share[..., self.floor + i])
            if term.exponent is None:
                columns.append(-share[..., self.floor + i] * logs[..., i])
        return np.stack(columns, -1)

    def _parts(self, theta: Array, logs: Array) -> Array:
        """(…, number of terms), in logarithms."""
        parts, at = ([theta[..., 0] + 0 * logs[..., 0]], 1) if self.floor else (list[Array](), 0)
        for i, term in enumerate(self.terms):
            exponent = theta[..., at + 1] if term.exponent is None else term.exponent
            parts.append(theta[..., at] - exponent * logs[..., i])
            at += len(term.names)
        return np.stack(parts, -1)

    def bounds(self, logs: Array, y: Array) -> tuple[list[float], list[float]]:
        """No negative exponent, and no term that is beyond all the data."""
        top, reach = float(y.max()), STEEP * float(np.abs(logs).max(initial=0.0)) + 1
        low, high = ([top - FAINT], [float(y.min())]) if self.floor else (list[float](), list[float]())
        for term in self.terms:
            low, high = [*low, top - FAINT - reach], [*high, top + reach]
            if term.exponent is None:
                low, high = [*low, 0.0], [*high, STEEP]
        return low, high

    def starts(self, logs: Array, y: Array, count: int = 4) -> list[Array]:
        """For exponents on a grid the factors are a linear problem in relative errors; the best of these."""
        tried = list[tuple[float, Array]]()
        for exponents in itertools.product(*[EXPONENTS if t.exponent is None else (t.exponent,) for t in self.terms]):
            columns = [np.ones_like(y)] * self.floor
            columns += [np.exp(-a * logs[:, i]) for i, a in enumerate(exponents)]
            solved: Any = nnls(np.stack(columns, 1) / np.exp(y)[:, None], np.ones_like(y))
            factors, miss = cast("tuple[Array, float]", solved)
            tried.append((float(miss), self._theta(np.log(np.maximum(factors, 1e-6 * factors.max())), exponents)))
        return [theta for _, theta in sorted(tried, key=lambda each: each[0])[:count]]

    def _theta(self, factors: Array, exponents: Sequence[float]) -> Array:
        out = [factors[0]] if self.floor else []
        for term, factor, exponent in zip(self.terms, factors[self.floor :], exponents, strict=True):
            out += [factor] if term.exponent is not None else [factor, exponent]
        return np.asarray(out, float)

    def constants(self, theta: Array) -> Array:
        """As they are written: factors instead of their logarithms."""
        out = theta.copy()
        for i, name in enumerate(self.names):
            if name in "EAB":
                out[..., i] = np.exp(np.minimum(theta[..., i], 700.0))
        return out

    def uncentred(self, theta: Array, centre: Array) -> Array:
        """Of log N − centre → of log N."""
        out, at = theta.copy(), int(self.floor)
        for i, term in enumerate(self.terms):
            out[..., at] += (theta[..., at + 1] if term.exponent is None else term.exponent) * centre[i]
            at += len(term.names)
        return out

    def solve(self, theta: Array, variable: str, log_target: float, logs: Array) -> Array:
        """The log D at which y is the target, for each row of θ; inf where it never is."""
        i = self.variables.index(variable)
        parts = self._parts(theta, logs)
        rest = np.exp(log_target) - np.exp(np.delete(parts, self.floor + i, -1)).sum(-1)
        at = int(self.floor) + sum(len(term.names) for term in self.terms[:i])
        fixed = self.terms[i].exponent
        exponent = theta[..., at + 1] if fixed is None else np.full_like(rest, fixed)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (theta[..., at] - np.log(np.maximum(rest, 0.0))) / exponent
        return np.where((rest > 0) & (exponent > 0), found, np.inf)


@saveable
@dataclass(frozen=True)
class Product:
    """C N^a D^b, with the variables that it has. Parameters: log C, and the exponents.

    >>> print(Product(("size", "data")), Product(()))
    C N^a D^b C
    """

    variables: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return ("C", *({"size": "a", "data": "b"}[each] for each in self.variables))

    def __str__(self) -> str:
        return " ".join(["C", *({"size": "N^a", "data": "D^b"}[each] for each in self.variables)])

    def log_value(self, theta: Array, logs: Array) -> Array:
        return theta[..., 0] + (theta[..., 1:] * logs).sum(-1)

    def jacobian(self, theta: Array, logs: Array) -> Array:
        return np.concatenate([np.ones((*logs.shape[:-1], 1)), logs], -1)

    def bounds(self, logs: Array, y: Array) -> tuple[list[float], list[float]]:
        return [-np.inf] * len(self.names), [np.inf] * len(self.names)

    def starts(self, logs: Array, y: Array, count: int = 1) -> list[Array]:
        solved: Any = np.linalg.lstsq(self.jacobian(np.zeros(len(self.names)), logs), y, rcond=None)
        return [np.asarray(solved[0], float)]

    def constants(self, theta: Array) -> Array:
        out = theta.copy()
        out[..., 0] = np.exp(np.minimum(theta[..., 0], 700.0))
        return out

    def uncentred(self, theta: Array, centre: Array) -> Array:
        out = theta.copy()
        out[..., 0] -= (theta[..., 1:] * centre).sum(-1)
        return out

    def solve(self, theta: Array, variable: str, log_target: float, logs: Array) -> Array:
        i = self.variables.index(variable)
        others = np.delete(theta[..., 1:] * logs, i, -1).sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (log_target - theta[..., 0] - others) / theta[..., 1 + i]
        return np.where(np.isfinite(found), found, np.inf)


Law = Sum | Product


def loss_laws(variables: Sequence[str]) -> list[Law]:
    """E + A/N^α + B/D^β, and what else it could be: 1/√D, 1/D, no floor.

    >>> [str(law) for law in loss_laws(("size", "data"))]
    ['E + A/N^α + B/D^β', 'E + A/N^α + B/√D', 'E + A/N^α + B/D', 'A/N^α + B/D^β']
    """
    free = tuple(Term(each) for each in variables)
    fixed = [(*free[:-1], Term(variables[-1], exponent)) for exponent in (0.5, 1.0)]
    return [Sum(True, free), *(Sum(True, terms) for terms in fixed), Sum(False, free)]


def power_laws(variables: Sequence[str]) -> list[Law]:
    """C N^a D^b, and with less: one of the two, or none.

    >>> [str(law) for law in power_laws(("size", "data"))]
    ['C N^a D^b', 'C N^a', 'C D^b', 'C']
    """
    subsets = [tuple(each) for n in range(len(variables), -1, -1) for each in itertools.combinations(variables, n)]
    return [Product(each) for each in subsets]
