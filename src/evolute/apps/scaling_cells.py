"""A table of runs as arrays: what can be used, what is left out and why, and whether it is enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from evolute.apps.scaling_laws import Array, Law
from evolute.errors import DecisionError

Table = Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]]
WORDS = {"size": "model size", "data": "data size"}


@dataclass(frozen=True)
class Columns:
    """Names of columns; None for a variable that is not there."""

    value: str
    size: str | None
    data: str | None

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(name for name in ("size", "data") if getattr(self, name) is not None)

    def name(self, variable: str) -> str:
        return cast("str", getattr(self, variable))


@dataclass(frozen=True, eq=False)
class Cells:
    """log y, and the logarithm of each variable, of the runs that can be used."""

    columns: Columns
    y: Array
    logs: Mapping[str, Array]
    left_out: Sequence[str]

    def of(self, variables: Sequence[str]) -> Array:
        """(n, number of variables)."""
        return np.stack([self.logs[each] for each in variables], -1) if variables else np.zeros((len(self.y), 0))

    def check(self, law: Law, least: int) -> None:
        """Enough for every constant of the law."""
        if not len(self.y):
            raise DecisionError(f"all {len(self.left_out)} runs are left out: {'; '.join(self.left_out)}.")
        for variable in law.variables:
            self._check_values(law, variable, least)
        self._check_apart(law)
        constants = len(law.names)
        if len(self.y) < constants + 3:
            without = f" ({'; '.join(self.left_out)} left out)" if self.left_out else ""
            raise DecisionError(
                f"{law} has {constants} constants: expected at least {constants + 3} runs with a finite "
                f"'{self.columns.value}', got {len(self.y)}{without}."
            )

    def _check_values(self, law: Law, variable: str, least: int) -> None:
        values = np.unique(self.logs[variable])
        if len(values) >= least:
            return
        name, other = self.columns.name(variable), {"size": "data", "data": "size"}[variable]
        raise DecisionError(
            f"{law} takes {least} or more values of the {WORDS[variable]} '{name}', got {len(values)}"
            f"{_shown(values)}. Measure others, or leave it out with {variable}=None and fit the {WORDS[other]} alone."
        )

    def _check_apart(self, law: Law) -> None:
        """Along one curve D = c N^p nothing says which of them it was."""
        logs = self.of(law.variables)
        if len(law.variables) == 2 and np.linalg.matrix_rank(logs - logs.mean(0), tol=1e-6) < 2:
            raise DecisionError(
                f"'{self.columns.data}' goes with '{self.columns.size}' in all runs, as one power of it: what either "
                "does cannot be told apart. Measure others, or fit one of them alone with data=None or size=None."
            )


def cells_of(table: Table, columns: Columns) -> Cells:
    """Rows that are whole; the others by name."""
    if not columns.variables:
        raise DecisionError("expected a column of model sizes, of data sizes, or both; got size=None and data=None.")
    used, left_out = list[tuple[float, ...]](), list[str]()
    rows = _rows(table)
    for index, row in enumerate(rows):
        where = [_position(row, columns.name(each), index) for each in columns.variables]
        place = ", ".join(f"{columns.name(v)}={x:g}" for v, x in zip(columns.variables, where, strict=True))
        value = _number(row.get(columns.value), f"{place}: '{columns.value}'")
        if value is None or not math.isfinite(value):
            left_out.append(f"{place} ({'no value' if value is None else f'diverged: {value:g}'})")
        elif value <= 0:
            raise DecisionError(
                f"{place}: '{columns.value}' is {value:g}; it is fitted in logarithms and has to be positive. Of a "
                "negative loss fit what it is above its lowest possible value, or another measure."
            )
        else:
            used.append((value, *where))
    _check_column(rows, columns.value)
    array = np.log(np.asarray(used, float).reshape(len(used), 1 + len(columns.variables)))
    logs = {variable: array[:, 1 + i] for i, variable in enumerate(columns.variables)}
    return Cells(columns, array[:, 0], logs, left_out)


def _rows(table: Table) -> list[Mapping[str, Any]]:
    if isinstance(table, Mapping):
        columns = cast("Mapping[str, Sequence[Any]]", table)
        for name, column in columns.items():
            if not isinstance(column, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DecisionError(f"expected columns of numbers, got {type(column).__name__} in column '{name}'.")
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise DecisionError(f"expected columns of one length, got {lengths}.")
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rows: list[Any] = list(table) if isinstance(table, Iterable) else [table]  # pyright: ignore
    strange = [type(row).__name__ for row in rows if not isinstance(row, Mapping)]
    if strange or not rows:
        raise DecisionError(
            "expected rows that map column to number, such as {'N': 1000, 'D': 5000, 'loss': 2.1}, "
            f"got {strange[0] if strange else 'none'}."
        )
    return rows


def _check_column(rows: Sequence[Mapping[str, Any]], name: str) -> None:
    if all(name not in row for row in rows):
        there = ", ".join(map(repr, rows[0]))
        raise DecisionError(f"no run has a number in column '{name}'; there are {there}.")


def _position(row: Mapping[str, Any], name: str, index: int) -> float:
    value = _number(row.get(name), f"row {index}: '{name}'")
    if value is None or not (value > 0 and math.isfinite(value)):
        has = f"got {value!r}" if name in row else f"there are {', '.join(map(repr, row))}"
        raise DecisionError(f"row {index}: expected a positive number in column '{name}', {has}.")
    return value


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise DecisionError(f"{what}: expected a number, got {value!r}.") from error


def _shown(values: Array) -> str:
    return f" ({', '.join(f'{x:g}' for x in np.exp(values))})" if len(values) else ""
