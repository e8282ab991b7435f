"""What the rows of all seeds say: curvature of each block at each step, and how a proxy ranks blocks and steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from scipy.stats import rankdata

from evolute.studies.flow.measure import PLACES, PROXIES
from evolute.studies.means import geometric_mean, mean
from evolute.studies.over_training import told
from evolute.studies.study import Row

KEYS = ("model", "norm", "depth")
MAPPED = (*(f"{place} {part}" for place in PLACES for part in ("H", "H_o", "H_f")), "variance", "share", *PROXIES)


def made(rows: Sequence[Row]) -> list[Row]:
    return [*_maps(rows), *_profiles(rows), *_correlations(rows)]


def _groups(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    out = dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        out.setdefault(tuple(row[key] for key in keys), []).append(row)
    return out


def _several(rows: Sequence[Row]) -> bool:
    return len({row["seed"] for row in rows}) > 1


def _maps(rows: Sequence[Row]) -> Iterator[Row]:
    """Means over the seeds; 0 where something is exactly zero."""
    for key, here in _groups(rows, (*KEYS, "step", "layer")).items():
        if _several(here):
            known = dict(zip((*KEYS, "step", "layer"), key, strict=True))
            series = {name: [row[name] for row in here] for name in MAPPED}
            values = {name: geometric_mean(each).value if min(each) > 0 else 0.0 for name, each in series.items()}
            probes = max(row[f"{place} error"] / row[f"{place} H"] for row in here for place in PLACES)
            yield {
                "kind": "map",
                **known,
                **values,
                "loss": mean([row["loss"] for row in here]).value,
                "probes": probes,
            }


def _profiles(rows: Sequence[Row]) -> Iterator[Row]:
    """First block over last, of the curvature in the stream after it and in its parameters."""
    for key, here in _groups(rows, (*KEYS, "step")).items():
        if not _several(here) or here[0]["depth"] < 2:
            continue
        known = dict(zip((*KEYS, "step"), key, strict=True))
        for place in PLACES:
            ratios = [_first_over_last(run, f"{place} H") for run in _groups(here, ("seed",)).values()]
            yield {"kind": "profile", **known, "place": place, **told("ratio", geometric_mean(ratios))}


def _first_over_last(run: Sequence[Row], name: str) -> float:
    ordered = sorted(run, key=lambda row: row["layer"])
    return ordered[0][name] / ordered[-1][name]


# ---- what a proxy is worth


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks, equal values sharing theirs; 0 where either is constant.

    >>> rank_correlation([1, 2, 3], [10, 100, 1000]), rank_correlation([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    """
    a, b = (rankdata(each) - (len(each) + 1) / 2 for each in (x, y))
    square = float((a * a).sum() * (b * b).sum())
    return float((a * b).sum()) / math.sqrt(square) if square > 0 else 0.0


def _correlations(rows: Sequence[Row]) -> Iterator[Row]:
    """Over "blocks" at one step, over "steps" of one block; means over steps or blocks, and then over the seeds."""
    for key, here in _groups(rows, KEYS).items():
        runs = list(_groups(here, ("seed",)).values())
        for across, fixed in (("blocks", "step"), ("steps", "layer")):
            if len(runs) < 2 or len(next(iter(_groups(runs[0], (fixed,)).values()))) < 3:
                continue  # two values are always in some order
            for proxy, own in PROXIES.items():
                for place in PLACES:
                    each = [_mean_correlation(run, fixed, proxy, f"{place} H") for run in runs]
                    known = {**dict(zip(KEYS, key, strict=True)), "across": across, "proxy": proxy, "place": place}
                    yield {"kind": "correlation", **known, "own": place == own, **told("rho", mean(each))}


def _mean_correlation(run: Sequence[Row], fixed: str, proxy: str, truth: str) -> float:
    groups = _groups(run, (fixed,)).values()
    found = [rank_correlation([row[proxy] for row in each], [row[truth] for row in each]) for each in groups]
    return sum(found) / len(found)
