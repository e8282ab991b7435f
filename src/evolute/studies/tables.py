"""Rows that belong together, and numbers with their intervals as parts of a row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from evolute.studies.means import Mean
from evolute.studies.study import Row


def by(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Values of the keys → the rows that have them, in the order in which they come.

    >>> by([{"model": "a", "n": 1}, {"model": "b", "n": 2}, {"model": "a", "n": 3}], "model")[("a",)]
    [{'model': 'a', 'n': 1}, {'model': 'a', 'n': 3}]
    """
    out = dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        out.setdefault(tuple(row[key] for key in keys), []).append(row)
    return out


def with_interval(name: str, found: Mean) -> Row:
    """A mean under its name, and the ends of its interval.

    >>> with_interval("loss", Mean(2.0, 1.0, 3.0))
    {'loss': 2.0, 'ci_low': 1.0, 'ci_high': 3.0}
    """
    return {name: found.value, "ci_low": found.low, "ci_high": found.high}
