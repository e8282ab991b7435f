"""What the trainings of all seeds say: means at each step, how near they came to the edge, and whether they stayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from evolute.studies.means import Mean, geometric_mean, mean
from evolute.studies.over_training import told
from evolute.studies.study import Row

LEAST = 1e-12  # for logarithms
LATE = 2 / 3  # of the training: what comes after is late
FACTORS, MEANS = ("loss", "sharpness", "edge"), ("trace", "negative", "lowest")


def made(rows: Sequence[Row]) -> list[Row]:
    setups = list(dict.fromkeys(row["setup"] for row in rows))
    groups = [[row for row in rows if row["setup"] == setup] for setup in setups]
    return [row for group in groups for row in (*_steps(group), *_summary(group))]


def _steps(rows: Sequence[Row]) -> Iterator[Row]:
    """Means over the seeds that got there, if two did."""
    found = [row for row in rows if row["kind"] == "state"]
    for step in sorted({row["step"] for row in found}):
        here = [row for row in found if row["step"] == step]
        if len(here) < 2:
            continue
        out: Row = {"kind": "step", "setup": here[0]["setup"], "step": step, "runs": len(here)}
        for name in FACTORS:
            values = [row[name] for row in here if row[name] is not None]
            out |= told(name, factor(values)) if len(values) > 1 else {}
        for name in MEANS:
            out |= told(name, mean([row[name] for row in here]))
        parts = here[0]["shares"]
        shares = {part: sum(row["shares"][part] for row in here) / len(here) for part in parts}
        errors = {name: max(row[f"{name}_error"] for row in here) for name in ("trace", "negative")}
        yield out | {"shares": shares, "rate": here[0]["rate"], "probes": errors}


def _summary(rows: Sequence[Row]) -> Iterator[Row]:
    """peak: the highest edge; late: its mean over the last third; sharpening: highest over first λ_max."""
    runs = _runs([row for row in rows if row["kind"] == "state"])
    diverged = sorted({row["seed"] for row in rows if row["kind"] == "diverged"})
    whole = [run for seed, run in runs.items() if seed not in diverged]
    known: Row = {"kind": "summary", "setup": rows[0]["setup"], "runs": len(runs), "diverged": len(diverged)}
    if len(runs) < 2:
        yield known
        return
    known |= told("peak", factor([max(edges(run)) for run in runs.values()]))
    known |= told("sharpening", factor([_sharpening(run) for run in runs.values()]))
    if len(whole) > 1:
        known |= told("late", factor([late(run) for run in whole]))
    ends = [sorted(run, key=lambda row: row["step"]) for run in runs.values()]
    known |= told("negative_first", mean([run[0]["negative"] for run in ends]))
    yield known | told("negative_last", mean([run[-1]["negative"] for run in ends]))


def _runs(rows: Sequence[Row]) -> dict[int, list[Row]]:
    out = dict[int, list[Row]]()
    for row in rows:
        out.setdefault(row["seed"], []).append(row)
    return {seed: run for seed, run in out.items() if edges(run)}


def edges(run: Sequence[Row]) -> list[float]:
    """Where there is one."""
    return [row["edge"] for row in run if row["edge"] is not None]


def late(run: Sequence[Row]) -> float:
    """Geometric mean of the edge over the last third of the steps.

    >>> late([{"step": t, "edge": e} for t, e in ((0, 9.0), (70, 0.5), (100, 2.0))])
    1.0
    """
    end = max(row["step"] for row in run)
    values = [row["edge"] for row in run if row["step"] >= LATE * end and row["edge"] is not None]
    return factor(values).value if len(values) > 1 else values[0]


def _sharpening(run: Sequence[Row]) -> float:
    first = min(run, key=lambda row: row["step"])
    return max(row["sharpness"] for row in run) / first["sharpness"]


def factor(values: Sequence[Any]) -> Mean:
    """Geometric mean."""
    return geometric_mean([max(value, LEAST) for value in values])
