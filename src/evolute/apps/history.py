"""What was written down during training: step, loss, and where there are any, gradient norms and top eigenvalues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from evolute.errors import DecisionError, NonFiniteError

Array = NDArray[np.float64]
FEWEST = 8  # losses that say something about their noise
KEYS = ("step", "loss", "grad_norm", "eigenvalues")
FORMS = "a list of losses, {'step': […], 'loss': […], 'grad_norm': […]}, or a list of {'step': …, 'loss': …}"


@dataclass(frozen=True, eq=False)
class History:
    """Steps ascending and their losses; (steps, values) of what was not written down at every step."""

    steps: Array
    losses: Array
    gradients: tuple[Array, Array] | None
    conditions: tuple[Array, Array] | None  # largest over smallest |λ| of the top subspace


def read(history: object) -> History:
    """From any of the forms.

    >>> read([{"step": 10 * i, "loss": 1 / (1 + i)} for i in range(8)]).steps.tolist()
    [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]
    """
    rows = _rows(history)
    if len(rows) < FEWEST:
        raise DecisionError(f"history: expected at least {FEWEST} losses to tell a trend from noise, got {len(rows)}.")
    steps = np.array([_number(row.get("step", i), "step", i) for i, row in enumerate(rows)])
    _check_order(steps)
    losses = np.array([_number(row.get("loss"), "loss", i) for i, row in enumerate(rows)])
    _check_finite("loss", steps, losses)
    return History(steps, losses, _gradients(rows, steps), _conditions(rows, steps))


def _rows(history: object) -> list[Mapping[str, Any]]:
    if isinstance(history, Mapping):
        return _from_columns(cast("Mapping[str, Any]", history))
    if isinstance(history, str | bytes) or not isinstance(history, Iterable):
        raise DecisionError(f"history: expected {FORMS}; got {type(history).__name__}.")
    rows = list(cast("Iterable[Any]", history))
    if rows and all(isinstance(row, Mapping) for row in rows):
        rows = _of_trainer(rows) if any("epoch" in row for row in rows) else rows
        for row in rows:
            _check_keys(row)
        return rows
    return [{"loss": value} for value in rows]


def _of_trainer(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`trainer.state.log_history` of Hugging Face: records of training, of evaluation, and of the end."""
    return [{key: row[key] for key in KEYS if key in row} for row in rows if "loss" in row]


def _from_columns(columns: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    _check_keys(columns)
    for key, values in columns.items():
        if values is not None and (isinstance(values, str) or not isinstance(values, Iterable)):
            raise DecisionError(f"history: expected a list under '{key}', got {values!r}.")
    lists: dict[str, list[Any]] = {key: list(values) for key, values in columns.items() if values is not None}
    counts = {key: len(values) for key, values in lists.items()}
    if len(set(counts.values())) > 1:
        raise DecisionError(f"history: expected lists of one length (None where nothing was measured), got {counts}.")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _check_keys(row: Mapping[str, Any]) -> None:
    unknown = [key for key in row if key not in KEYS]
    if unknown or "loss" not in row:
        raise DecisionError(f"history: expected 'loss' and any of step, grad_norm, eigenvalues; got {', '.join(row)}.")


def _number(value: object, what: str, place: int) -> float:
    try:
        return float(cast("Any", value))
    except (TypeError, ValueError) as error:
        raise DecisionError(f"history: {what} number {place} is {value!r}, not a number. Expected {FORMS}.") from error


def _check_order(steps: Array) -> None:
    if not np.isfinite(steps).all():
        raise DecisionError(f"history: expected finite steps, got {steps[~np.isfinite(steps)][0]:g}.")
    wrong = np.flatnonzero(~(np.diff(steps) > 0))
    if len(wrong):
        i = int(wrong[0])
        raise DecisionError(
            f"history: expected steps in ascending order, each once; {steps[i]:g} is followed by {steps[i + 1]:g}. "
            "Sort the records, and take one run at a time."
        )


def _check_finite(what: str, steps: Array, values: Array) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        i = int(bad[0])
        before = f"; it was {values[i - 1]:.4g} one record earlier and {values[0]:.4g} at first" if i else ""
        raise NonFiniteError(
            f"the run diverged: the {what} at step {steps[i]:g} is {values[i]}{before}. Train with a smaller rate; "
            f"what came before can be looked at alone, the first {i} records."
        )


def _gradients(rows: Sequence[Mapping[str, Any]], steps: Array) -> tuple[Array, Array] | None:
    known = [i for i, row in enumerate(rows) if row.get("grad_norm") is not None]
    if not known:
        return None
    values = np.array([_number(rows[i]["grad_norm"], "grad_norm", i) for i in known])
    _check_finite("gradient norm", steps[known], values)
    if values.min() < 0:
        raise DecisionError(f"history: a norm is not negative, got grad_norm {values.min():g}.")
    return steps[known], values


def _conditions(rows: Sequence[Mapping[str, Any]], steps: Array) -> tuple[Array, Array] | None:
    known = [i for i, row in enumerate(rows) if row.get("eigenvalues") is not None]
    if not known:
        return None
    sizes = [np.abs(np.asarray(_eigenvalues(rows[i]["eigenvalues"], i))) for i in known]
    if len({len(each) for each in sizes}) > 1 or len(sizes[0]) < 2:
        counts = sorted({len(each) for each in sizes})
        raise DecisionError(f"history: expected as many top eigenvalues each time, two or more; got {counts}.")
    _check_finite("largest eigenvalue", steps[known], np.array([each.max() for each in sizes]))
    kept = [place for place, each in enumerate(sizes) if each.min() > 0]
    return steps[known][kept], np.array([sizes[place].max() / sizes[place].min() for place in kept])


def _eigenvalues(values: object, place: int) -> list[float]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise DecisionError(f"history: eigenvalues number {place} are {values!r}; expected a list of numbers.")
    return [_number(value, "an eigenvalue of", place) for value in cast("Iterable[Any]", values)]
