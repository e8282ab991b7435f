"""Norms at several sizes → exponents in three ranges, beside those of theory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from evolute.errors import StudyError
from evolute.studies.fits import exponent
from evolute.studies.means import Mean
from evolute.studies.study import Row, Verdict

RANGES = {"small": (0.0, 0.1), "mid": (0.1, 1.0), "large": (1.0, float("inf"))}  # of a size, both ends in
LEAST = 1e-3
NEAR = 0.3  # how far an exponent may be from the theory, beside its own uncertainty
WIDE = 0.5  # half an interval that says nothing

Series = dict[int, dict[float, float]]  # repeat → size → norm


def sizes(known: Iterable[float], name: str) -> list[float]:
    """Those of a range, in order."""
    low, high = RANGES[name]
    return sorted({size for size in known if low <= size <= high})


def check_sizes(name: str, given: Sequence[float]) -> None:
    """Something can be fitted."""
    if not any(len(sizes(given, range_)) > 1 for range_ in RANGES) or min(given) < LEAST:
        raise StudyError(
            f"{name}: expected sizes of {LEAST} or more, two of them in one of the ranges up to 0.1, from 0.1 to 1, "
            f"and from 1; got {given}."
        )


def check_repeats(repeats: int) -> None:
    """There is an interval."""
    if repeats < 2:
        raise StudyError(f"repeats: expected at least 2, for an interval, got {repeats}.")


def series_of(rows: Iterable[Row], keys: Sequence[str], size: str) -> dict[tuple[Any, ...], Series]:
    """Values of the keys → the norms of all repeats at all sizes."""
    out = dict[tuple[Any, ...], Series]()
    for row in rows:
        series = out.setdefault(tuple(row[key] for key in keys), {})
        series.setdefault(row["seed"], {})[row[size]] = row["norm"]
    return out


def fitted(name: str, series: Series) -> Mean | None:
    """The exponent in a range; None without two sizes in it, or two repeats that are whole, finite and not zero.

    >>> fit = fitted("small", {0: {0.01: 1.0, 0.1: 100.0}, 1: {0.01: 2.0, 0.1: 200.0}, 2: {0.01: 5.0}})
    >>> fit and round(fit.value, 12)
    2.0
    """
    within = sizes({size for norms in series.values() for size in norms}, name)
    whole = [[norms[size] for size in within] for norms in series.values() if norms.keys() >= set(within)]
    alive = [norms for norms in whole if norms and all(0 < norm < math.inf for norm in norms)]
    return exponent(within, alive) if len(within) > 1 and len(alive) > 1 else None


# ---- beside theory


def agrees(row: Row) -> bool | None:
    """Whether the theory is within NEAR of the interval; None if the interval is too wide to say."""
    if not row["ci_low"] - NEAR <= row["theory"] <= row["ci_high"] + NEAR:
        return False
    return True if (row["ci_high"] - row["ci_low"]) / 2 <= WIDE else None


def against_theory(table: Sequence[Row], by: str, more: str = "") -> Verdict:
    """How many exponents are those of theory, and how far the farthest is for each value of the column `by`."""
    told = [row for row in table if row["theory"] is not None]
    answers = [agrees(row) for row in told]
    right, wrong = answers.count(True), answers.count(False)
    if right + wrong < answers.count(None) or not told:
        return Verdict("undecided", f"{right + wrong} of {len(told)} exponents of theory were measured well enough.")
    answer = "holds" if not wrong else "holds in part" if wrong < right else "does not hold here"
    parts = [_share(right, len(told), answers.count(None)), _farthest(told, by), more]
    return Verdict(answer, "; ".join(part for part in parts if part) + ".")


def _share(right: int, told: int, unclear: int) -> str:
    rest = f", {unclear} have intervals wider than ±{WIDE}" if unclear else ""
    return f"{right} of {told} exponents agree with theory (within {NEAR} and their intervals){rest}"


def _farthest(told: Sequence[Row], by: str) -> str:
    far = [f"{name} {max(abs(row['exponent'] - row['theory']) for row in rows):.2f}" for name, rows in split(told, by)]
    return f"farthest from it: {', '.join(far)}"


def split(rows: Sequence[Row], by: str) -> list[tuple[Any, list[Row]]]:
    """Value of a column → its rows."""
    values = dict.fromkeys(row[by] for row in rows)
    return [(value, [row for row in rows if row[by] == value]) for value in values]
