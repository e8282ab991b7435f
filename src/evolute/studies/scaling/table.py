"""Runs → rows of the result: the runs, fits without the largest, what these say of the largest, data for a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from evolute.apps.scaling import Scaling, fit_power_law, fit_scaling
from evolute.errors import DecisionError
from evolute.studies.study import Row

MEASURES = {
    "loss": "test loss",
    "sharpness": "sharpness",
    "trace": "trace",
    "rank": "effective rank",
    "batch": "critical batch",
}


def table_of(runs: Sequence[Row], repeats: int) -> list[Row]:
    """All of it, as plain rows with a `kind`."""
    out = [{"kind": "run"} | row for row in runs]
    out += [_gone(row, "loss", row["diverged"]) for row in runs if "diverged" in row]
    fine = [row for row in runs if "diverged" not in row]
    for value in MEASURES:
        usable, left_out = positive(fine, value)
        out += left_out
        known, held = parted(usable)
        try:
            found = _fit(known, value, repeats)
        except DecisionError as error:
            out.append({"kind": "left out", "value": value, "why": str(error)})
            continue
        out += [_fit_row(found), *(_held_row(found, row) for row in held)]
        out += _targets(found, known, held) if value == "loss" else []
    return out


def positive(runs: Sequence[Row], value: str) -> tuple[list[Row], list[Row]]:
    """Runs with a number that has a logarithm, and rows on the others."""
    good = [row for row in runs if row[value] is not None and row[value] > 0]
    bad = [_gone(row, value, "not determined" if row[value] is None else f"{row[value]:.3g}") for row in runs
           if row not in good]  # fmt: skip
    return good, bad


def parted(runs: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Without the largest N and the largest D, and these."""
    N, D = max((row["N"] for row in runs), default=0), max((row["D"] for row in runs), default=0)
    held = [row for row in runs if row["N"] == N or row["D"] == D]
    return [row for row in runs if row not in held], held


def _fit(runs: Sequence[Row], value: str, repeats: int) -> Scaling:
    if value == "loss":
        return fit_scaling(runs, repeats=repeats)
    return fit_power_law(runs, value=value, repeats=repeats)


def _fit_row(found: Scaling) -> Row:
    fit, best = found.fit, found.best
    return {
        "kind": "fit",
        "value": found.value,
        "law": str(fit.law),
        "constants": dict(fit.constants),
        "intervals": {name: [_plain(end) for end in ends] for name, ends in fit.intervals.items()},
        "weight": fit.weight,
        "held_out": fit.held_out,
        "best": str(best.law),
        "best_weight": best.weight,
        "laws": [[str(each.law), each.aicc, each.weight, each.held_out] for each in found.fits],
        "at_bound": list(fit.at_bound),
    }


def _held_row(found: Scaling, row: Row) -> Row:
    told = found.predict(size=row["N"], data=row["D"])
    where = {name: row[name] for name in ("N", "D", "seed")}
    return {"kind": "held", "value": found.value, **where, "true": row[found.value], "predicted": told.value} | {
        "low": told.low,
        "high": told.high,
    }


def _targets(found: Scaling, known: Sequence[Row], held: Sequence[Row]) -> list[Row]:
    """The data that the best loss of the known runs takes at the largest N of all."""
    N, target = max(row["N"] for row in [*known, *held]), min(row["loss"] for row in known)
    needed = found.data_for(target, size=N)
    ends: dict[str, Any] = {"D": _plain(needed.value), "low": _plain(needed.low), "high": _plain(needed.high)}
    return [{"kind": "target", "target": target, "N": N} | ends]


def _gone(row: Row, value: str, why: str) -> Row:
    return {"kind": "left out", "value": value, "why": f"{value} at N = {row['N']}, D = {row['D']}: {why}"}


def _plain(x: float) -> float | None:
    """JSON has no infinity."""
    return x if math.isfinite(x) else None
