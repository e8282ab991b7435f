"""The table of the study of approximations: means over seeds, and Kronecker factors against diagonals, seed by seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evolute.studies.means import mean
from evolute.studies.study import Row
from evolute.studies.tables import by, with_interval

WHOLE = "whole"
MEASURES = ("error", "shape", "cosine", "share")
NAMES = {
    "true": "true block",
    "groups": "true blocks, by group",
    "rows": "true blocks, by row",
    "kronecker": "nearest Kronecker",
    "kfac": "KFAC, expand",
    "kfac_reduce": "KFAC, reduce",
    "shampoo": "Shampoo",
    "shampoo_root": "Shampoo's root",
    "diagonal": "true diagonal",
    "moment": "E[g²] (Adam's v)",
    "adam": "√E[g²] (Adam)",
    "gradient": "identity (gradient)",
}
CONTESTS = (("kfac", "diagonal"), ("shampoo", "diagonal"))
BETTER = {"shape": -1.0, "cosine": 1.0, "share": 1.0}  # the sign of what is better
KEYS = ("model", "stage", "group", "reference", "approximation")


def made(rows: Sequence[Row]) -> list[Row]:
    """Means over seeds with their intervals, and differences of pairs, seed by seed."""
    told = list(_shared(rows))
    return [*_means(told), *_averages(told), *_contests(told)]


def _shared(rows: Iterable[Row]) -> Iterable[Row]:
    """With `share`: the decrease of the loss over that of the true step of H_o in the same group."""
    rows = list(rows)
    true = {_at(row): row["decrease"] for row in rows if (row["reference"], row["approximation"]) == ("H_o", "true")}
    for row in rows:
        fall = true.get(_at(row), 0.0)
        yield {**row, "share": row["decrease"] / fall if fall > 0 else None}


def _at(row: Row) -> tuple[object, ...]:
    return tuple(row[key] for key in ("model", "stage", "seed", "group"))


def _means(rows: Iterable[Row]) -> Iterable[Row]:
    for key, group in by(rows, *KEYS).items():
        for measure in MEASURES:
            values = [row[measure] for row in group if row[measure] is not None]
            if len(values) > 1:
                found = mean(values)
                start = {"part": "mean", **dict(zip(KEYS, key, strict=True)), "measure": measure}
                yield {**start, **with_interval("value", found)}


def _averages(rows: Iterable[Row]) -> Iterable[Row]:
    """Over the single groups of a model, then over seeds."""
    keys = ("model", "stage", "reference", "approximation")
    for key, group in by((row for row in rows if row["group"] != WHOLE), *keys).items():
        for measure in MEASURES:
            seeds = by((row for row in group if row[measure] is not None), "seed").values()
            if len(seeds) > 1:
                found = mean([sum(row[measure] for row in each) / len(each) for each in seeds])
                start = {"part": "average", **dict(zip(keys, key, strict=True)), "measure": measure}
                yield {**start, **with_interval("value", found)}


def _contests(rows: Iterable[Row]) -> Iterable[Row]:
    for key, group in by(rows, *KEYS[:-1]).items():
        for ours, theirs in CONTESTS:
            for measure in BETTER:
                found = _differences(group, ours, theirs, measure)
                if len(found) > 1:
                    start = {**dict(zip(KEYS[:-1], key, strict=True)), "of": ours, "over": theirs, "measure": measure}
                    yield {"part": "contest", **start, **with_interval("value", mean(found))}


def _differences(rows: Sequence[Row], ours: str, theirs: str, measure: str) -> list[float]:
    values = {(row["approximation"], row["seed"]): row[measure] for row in rows if row[measure] is not None}
    seeds = [seed for name, seed in values if name == ours and (theirs, seed) in values]
    return [values[ours, seed] - values[theirs, seed] for seed in seeds]
