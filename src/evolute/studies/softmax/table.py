"""From norms of blocks to powers of σ, sizes, and spreads between blocks, each with its interval over the repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from evolute.studies.fits import slope
from evolute.studies.means import Mean, geometric_mean, mean
from evolute.studies.softmax.blocks import SPREADS, spread
from evolute.studies.softmax.rates import theory
from evolute.studies.study import Row

Key = tuple[Any, ...]
SUBJECT = ("task", "kind", "point")


def summary(rows: Sequence[Row]) -> list[Row]:
    """The table of the study."""
    rates = [row for row in rows if row["part"] == "rates"]
    blocks = [row for row in rows if row["part"] == "blocks"]
    return [*_powers(rates), *_sizes(blocks), *_spreads(blocks), *_scores(blocks)]


def _grouped(rows: Iterable[Row], *names: str) -> dict[Key, list[Row]]:
    out = dict[Key, list[Row]]()
    for row in rows:
        out.setdefault(tuple(row[name] for name in names), []).append(row)
    return out


def _made(quantity: str, m: Mean, **told: Any) -> Row:
    return {**told, "quantity": quantity, "value": m.value, "low": m.low, "high": m.high}


# ---- powers of σ


def _powers(rows: Sequence[Row]) -> list[Row]:
    """The power of each block; how large a block is that should be zero; or that one is lost in rounding."""
    out = list[Row]()
    for key, group in _grouped(rows, "kind", "wiring", "depth", "block", "of").items():
        told = dict(zip(("kind", "wiring", "depth", "block", "of"), key, strict=True))
        expected = theory(*key)
        repeats = [sorted((row["sigma"], row["norm"]) for row in each) for each in _grouped(group, "seed").values()]
        if expected is None:
            out.append({**told, "quantity": "zero", "value": max(row["norm"] for row in group)})
        elif len(repeats) > 1 and all(norm > 0 for each in repeats for _, norm in each):
            powers = [slope(*zip(*each, strict=True)) for each in repeats]
            out.append({**_made("power", mean(powers), **told), "theory": expected})
        elif len(repeats) > 1:
            out.append({**told, "quantity": "lost", "value": 0.0, "theory": expected})
    return out


# ---- sizes and spreads


def _sizes(rows: Sequence[Row]) -> list[Row]:
    """Geometric means of the norms; a block that is zero has the value 0."""
    out = list[Row]()
    for key, group in _grouped((row for row in rows if "norm" in row), "task", "kind", "point", "block", "of").items():
        told = dict(zip(("task", "kind", "point", "block", "of"), key, strict=True))
        norms = [row["norm"] for row in group]
        zero = Mean(0.0, 0.0, max(norms))
        if len(norms) > 1:
            out.append(_made("norm", geometric_mean(norms) if min(norms) > 0 else zero, **told))
    return out


def _spreads(rows: Sequence[Row]) -> list[Row]:
    """Largest ÷ smallest block, and how many times that of softmax with the same seed it is."""
    measured = dict[Key, dict[int, float]]()
    for key, group in _grouped((row for row in rows if "norm" in row), "task", "kind", "point", "of", "seed").items():
        *series, seed = key
        norms = {row["block"]: row["norm"] for row in group}
        measured.setdefault(tuple(series), {})[seed] = spread(norms, SPREADS[series[3]])
    out = list[Row]()
    for (task, kind, point, of), values in measured.items():
        if len(values) < 2:
            continue
        told = {"task": task, "kind": kind, "point": point, "of": of}
        out.append(_made("spread", geometric_mean(list(values.values())), **told))
        plain = measured.get((task, "softmax", point, of), {})
        against = [value / plain[seed] for seed, value in values.items() if seed in plain]
        if kind != "softmax" and len(against) > 1:
            out.append(_made("spread ratio", geometric_mean(against), **told))
    return out


def _scores(rows: Sequence[Row]) -> list[Row]:
    """Loss and accuracy, to see what was trained, and how large the scores are."""
    return [
        _made(quantity, mean([row[quantity] for row in group]), task=task, kind=kind, point=point)
        for (task, kind, point), group in _grouped((row for row in rows if "loss" in row), *SUBJECT).items()
        for quantity in ("loss", "accuracy", "scores")
        if len(group) > 1
    ]
