"""What follows from the measurements by arithmetic alone: shares, spread, proportions, the largest stable steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from evolute.report.analysis import Analysis, Blocks, Estimate
from evolute.report.naming import in_order, kind_of, layer_of

BETA = 0.9  # heavy ball's momentum and Adam's β₁ where none is told


def ratio(a: Estimate, b: Estimate) -> Estimate:
    """a/b with errors as if independent.

    >>> ratio(Estimate(1.0, 0.1), Estimate(2.0))
    Estimate(value=0.5, error=0.05)
    """
    value = a.value / b.value if b.value else 0.0
    relative = math.hypot(a.error / a.value if a.value else 0.0, b.error / b.value if b.value else 0.0)
    return Estimate(value, abs(value) * relative)


def root(square: Estimate) -> Estimate:
    """√x, as of a squared norm."""
    value = math.sqrt(max(square.value, 0.0))
    return Estimate(value, square.error / (2 * value) if value else math.sqrt(square.error))


# ---------------------------------------------------------------- the largest stable steps


@dataclass(frozen=True)
class Limit:
    """Above `step` the method leaves the quadratic that the Hessian describes."""

    method: str
    formula: str
    step: Estimate


def limits(analysis: Analysis) -> tuple[Limit, ...]:
    """2/λ_max of gradient descent, 2(1+β)/λ_max of heavy ball, (2+2β₁)/((1−β₁) λ_P) of Adam, as far as measured."""
    sharpness, adaptive = analysis.sharpness, analysis.adaptive
    found: list[Limit] = []
    if sharpness and sharpness.largest.values[0] > 0:
        top = Estimate(sharpness.largest.values[0], sharpness.data or 0.0)
        beta = _momentum(analysis)
        found.append(Limit("Gradient descent", "2 / λ_max", ratio(Estimate(2.0), top)))
        found.append(Limit(f"Heavy ball, β = {beta:g}", "2 (1 + β) / λ_max", ratio(Estimate(2 * (1 + beta)), top)))
    if adaptive and adaptive.top > 0:
        bound = Estimate((2 + 2 * BETA) / (1 - BETA))
        step = ratio(bound, Estimate(adaptive.top, adaptive.data))
        found.append(
            Limit(
                f"Adam, β₁ = {BETA:g}",
                "(2 + 2β₁) / ((1\N{NO-BREAK SPACE}−\N{NO-BREAK SPACE}β₁)\N{NO-BREAK SPACE}λ_P)",
                step,
            )
        )
    return tuple(found)


def limit_of_training(analysis: Analysis) -> Limit | None:
    """The one that holds for the optimiser that was used."""
    name = (analysis.training.optimizer or "") if analysis.training else ""
    wanted = {"sgd": "Gradient", "momentum": "Heavy", "adam": "Adam", "adamw": "Adam"}.get(name.lower())
    if wanted == "Gradient" and analysis.training and analysis.training.momentum:
        wanted = "Heavy"
    return next((limit for limit in limits(analysis) if wanted and limit.method.startswith(wanted)), None)


def _momentum(analysis: Analysis) -> float:
    told = analysis.training.momentum if analysis.training else None
    return BETA if told is None else told


# ---------------------------------------------------------------- shares and spread


@dataclass(frozen=True)
class Share:
    """What a part of the model has of ‖A‖², and of the parameters."""

    name: str
    of_H: Estimate
    of_G: Estimate
    of_F: Estimate
    of_parameters: float


def shares(blocks: Blocks, part: Callable[[str], str]) -> tuple[Share, ...]:
    """Σ_j ‖A_:j‖² / ‖A‖² over the groups j of each part: a block between two parts counts half to each."""
    names, total = [part(group) for group in blocks.groups], sum(blocks.sizes)
    out: list[Share] = []
    for name in in_order(names):
        members = [i for i, each in enumerate(names) if each == name]
        H, G, F = (_share(blocks, matrix, members) for matrix in ("H", "G", "F"))
        out.append(Share(name, H, G, F, sum(blocks.sizes[i] for i in members) / total))
    return tuple(out)


def _share(blocks: Blocks, matrix: str, members: list[int]) -> Estimate:
    """x/(x+y) of the columns x inside and y outside, which were probed independently."""
    columns = blocks[matrix].columns
    x, y = _total([columns[i] for i in members]), _total([c for i, c in enumerate(columns) if i not in members])
    whole = x.value + y.value
    if not whole > 0:
        return Estimate(0.0)
    return Estimate(x.value / whole, math.hypot(y.value * x.error, x.value * y.error) / whole**2)


def _total(estimates: list[Estimate]) -> Estimate:
    return Estimate(sum(e.value for e in estimates), math.sqrt(sum(e.error**2 for e in estimates)))


def by_kind(blocks: Blocks) -> tuple[Share, ...]:
    return shares(blocks, kind_of)


def by_layer(blocks: Blocks) -> tuple[Share, ...]:
    return shares(blocks, layer_of)


def per_parameter(blocks: Blocks, matrix: str) -> tuple[Estimate, ...]:
    """‖A_ii‖ / n_i, the root mean square of the entries of each diagonal block."""
    found = blocks[matrix]
    return tuple(Estimate(found.norms[i][i] / n, found.errors[i][i] / n) for i, n in enumerate(blocks.sizes))


@dataclass(frozen=True)
class Spread:
    """How unlike the groups are: largest over smallest, and standard deviation over mean, of ‖H_ii‖/n_i."""

    ratio: Estimate
    variation: float
    largest: str
    smallest: str


def spread(blocks: Blocks, matrix: str = "H") -> Spread | None:
    """None if fewer than two groups have curvature that is surely there."""
    values = per_parameter(blocks, matrix)
    named = [(v, g) for v, g in zip(values, blocks.groups, strict=True) if v.surely_above(0.0)]
    if len(named) < 2:
        return None
    (small, least), (large, most) = min(named, key=lambda n: n[0].value), max(named, key=lambda n: n[0].value)
    mean = sum(v.value for v, _ in named) / len(named)
    deviation = math.sqrt(sum((v.value - mean) ** 2 for v, _ in named) / len(named))
    return Spread(ratio(large, small), deviation / mean, most, least)


# ---------------------------------------------------------------- Gauss–Newton and depth


@dataclass(frozen=True)
class Parting:
    """H = G + F as three sides of a triangle: lengths, and the cosine of the angle between H and G."""

    H: Estimate
    G: Estimate
    F: Estimate
    cosine: Estimate

    @property
    def outer(self) -> Estimate:
        return ratio(self.G, self.H)

    @property
    def functional(self) -> Estimate:
        return ratio(self.F, self.H)


def parting(blocks: Blocks) -> Parting:
    H, G, F = (root(blocks[name].square) for name in ("H", "G", "F"))
    cosine = ratio(blocks.inner, Estimate(H.value * G.value))
    return Parting(H, G, F, Estimate(max(-1.0, min(1.0, cosine.value)), cosine.error))


@dataclass(frozen=True)
class Station:
    """One stop on the way through the model: ‖A_ll‖ of all that belongs to it, and how many parameters."""

    name: str
    size: int
    H: Estimate
    G: Estimate
    F: Estimate


def stations(blocks: Blocks) -> tuple[Station, ...]:
    """Embedding, layers in order, head."""
    names = [layer_of(group) for group in blocks.groups]
    return tuple(_station(blocks, name, [i for i, n in enumerate(names) if n == name]) for name in in_order(names))


def _station(blocks: Blocks, name: str, members: list[int]) -> Station:
    three = (_within(blocks, matrix, members) for matrix in ("H", "G", "F"))
    return Station(name, sum(blocks.sizes[i] for i in members), *three)


def _within(blocks: Blocks, matrix: str, members: list[int]) -> Estimate:
    """√Σ ‖A_ij‖² over pairs of members."""
    found = blocks[matrix]
    pairs = [(found.norms[i][j], found.errors[i][j]) for i in members for j in members]
    square = sum(norm**2 for norm, _ in pairs)
    return root(Estimate(square, math.sqrt(sum((2 * norm * error) ** 2 for norm, error in pairs))))


def layers_only(found: tuple[Station, ...]) -> tuple[Station, ...]:
    return tuple(station for station in found if "ayer " in station.name)


# ---------------------------------------------------------------- minimum or saddle


def verdict(analysis: Analysis) -> str:
    """'saddle', 'minimum' or 'flat': is there an eigenvalue surely below zero, by more than 0.1 % of the largest?"""
    sharpness = analysis.sharpness
    if sharpness is None or sharpness.smallest is None:
        return "unknown"
    size = max(abs(sharpness.largest.values[0]), abs(sharpness.smallest.values[0]))
    lowest, reach = sharpness.smallest.values[0], sharpness.smallest.residuals[0]
    if lowest + reach < -1e-3 * size:
        return "saddle"
    return "minimum" if lowest - reach > 0 else "flat"
