"""How far the second-order model of a loss predicts it: along steps, and over many steps of gradient descent.

Theory: L(w + d) = L + g·d + ½ dᵀHd + ⅙ ∇³L[d,d,d] + …, so what a model of order k misses goes as the (k+1)-th power of
the step. For the quadratic model gradient descent has a closed form, ΔL_t(η) = −gᵀ φ(H) g (`apps.quadratic_descent`):
one Lanczos run from g predicts every rate and number of steps. Beside it: the one-eigenvalue rule, which puts all of
the gradient along the first eigenvector, and a decay with one curvature, fitted to the first losses of the descent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies import over_training
from evolute.studies.over_training import OverTraining
from evolute.studies.study import Cell, Row, Study, Verdict
from evolute.studies.taylor import measure as taylor_measure
from evolute.studies.taylor import table as taylor_table
from evolute.studies.taylor.measure import DIRECTIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
NEAR = 0.2  # how far off a predicted change of the loss may be
AHEAD = 10  # steps of descent that the model is asked for


@dataclass(frozen=True)
class TaylorSettings(OverTraining):
    """Models at points of their training; rates as fractions of 2/λ_max, steps of descent, products for predicting."""

    models: tuple[str, ...] = ("mlp_digits", "vit_digits", "gpt_english")
    points: tuple[float, ...] = (0.0, 0.1, 1.0)
    width: int = 16
    steps: int = 300
    repeats: int = 4
    factors: tuple[float, ...] = (0.01, 0.1, 0.5)
    descent: int = 50
    products: int = 40


class TaylorStudy(Study[TaylorSettings]):
    """One cell per model, repeat and point of its training."""

    name = "taylor"
    claim = "A quadratic model from one Lanczos run predicts what gradient descent does to the loss, for many steps."
    config = TaylorSettings

    def cells(self, config: TaylorSettings) -> Sequence[Cell]:
        _check(config)
        more = {"factors": list(config.factors), "descent": config.descent, "products": config.products}
        return over_training.cells(config, **more)

    def measure(self, cell: Cell) -> list[Row]:
        return taylor_measure.measured(cell)

    def table(self, config: TaylorSettings, rows: Sequence[Row]) -> list[Row]:
        return taylor_table.made(rows, [t for t in TIMES if t <= config.descent])

    def verdict(self, config: TaylorSettings, table: Sequence[Row]) -> Verdict:
        return judged(table, config.factors)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.taylor.figure import drawn

        return drawn(table, settings)


def _check(config: TaylorSettings) -> None:
    if not config.factors or min(config.factors) <= 0:
        raise StudyError(f"factors: expected fractions of 2/λ_max, above 0, got {list(config.factors)}.")
    if config.descent <= taylor_measure.SEEN or config.products < 2:
        raise StudyError(
            f"descent: expected more than the {taylor_measure.SEEN} steps that the fitted curve is given, and products "
            f"two or more; got {config.descent} and {config.products}."
        )
    if config.steps < 1:
        raise StudyError(f"steps: expected at least 1 step of training, got {config.steps}.")


# ---- what it says


def judged(table: Sequence[Row], factors: Sequence[float]) -> Verdict:
    """Is the predicted change right to `NEAR` after `AHEAD` steps, and better than one eigenvalue's?"""
    cases = [row for row in table if row["kind"] == "error" and row["t"] == AHEAD]
    model = [row for row in cases if row["method"] == "quadratic"]
    if not model:
        return Verdict("undecided", f"no descent of {AHEAD} steps was measured with two seeds.")
    good = [row for row in model if row["error_high"] <= NEAR]
    bad = [row for row in model if row["error_low"] > NEAR]
    if len(good) == len(model):
        answer = "holds"
    elif good:
        answer = "holds in part"
    else:
        answer = "does not hold here" if len(bad) > len(model) / 2 else "undecided"
    return Verdict(answer, _sentence(table, model, len(good), len(bad), factors))


def _sentence(table: Sequence[Row], model: Sequence[Row], good: int, bad: int, factors: Sequence[float]) -> str:
    rates = "; ".join(f"at {factor:g} of 2/λ_max {_horizons(table, factor)}" for factor in factors)
    return (
        f"after {AHEAD} steps the change of the loss is predicted to {NEAR:.0%} in {good} of {len(model)} cases "
        f"(model, point, rate), and is not in {bad}. Steps until the error passes {NEAR:.0%}: {rates}. "
        f"{_rivals(table)} {_steps(table)}"
    )


def horizon(rows: Sequence[Row]) -> int:
    """The largest number of steps up to which the error is below `NEAR`, of those that were looked at; 0: none."""
    last = 0
    for row in sorted(rows, key=lambda row: row["t"]):
        if row["error"] > NEAR:
            return last
        last = row["t"]
    return last


def _horizons(table: Sequence[Row], factor: float) -> str:
    cases = dict[tuple[str, int], list[Row]]()
    for row in table:
        if row["kind"] == "error" and row["method"] == "quadratic" and row["factor"] == factor:
            cases.setdefault((row["model"], row["step"]), []).append(row)
    found = sorted(horizon(rows) for rows in cases.values())
    return f"{found[0]} to {found[-1]} (median {found[len(found) // 2]})" if found else "unknown"


def _rivals(table: Sequence[Row]) -> str:
    """How often each of the others is surely further off, or surely nearer, at its last time."""
    said = list[str]()
    for method, name in (("eigenvalue", "The one-eigenvalue rule"), ("fitted", "the fitted curve")):
        rows = [row for row in table if row["kind"] == "error" and row["method"] == method]
        last = max((row["t"] for row in rows), default=0)
        rows = [row for row in rows if row["t"] == (AHEAD if method == "eigenvalue" else last)]
        worse, better = sum(row["worse_low"] > 1 for row in rows), sum(row["worse_high"] < 1 for row in rows)
        when = AHEAD if method == "eigenvalue" else last
        said.append(f"{name} is further off in {worse} of {len(rows)} after {when} steps, nearer in {better}")
    return "; ".join(said) + "."


def _steps(table: Sequence[Row]) -> str:
    """How long a step of each direction may be, over all models and points."""
    said = list[str]()
    for direction in DIRECTIONS:
        rows = [row for row in table if row["kind"] == "reach" and row["direction"] == direction and row["order"] == 2]
        if rows:
            low, high = min(row["reach"] for row in rows), max(row["reach"] for row in rows)
            said.append(f"{direction} {low:.2g} to {high:.2g}")
    share = f"{taylor_table.SHARE:.0%}"
    return f"Length of a step, over that of the weights, at which {share} of it is missed: {', '.join(said)}."


STUDY = TaylorStudy()
