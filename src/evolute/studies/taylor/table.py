"""What the lines and descents of all seeds say: how far a step may go, and how well each method predicts a descent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from evolute.studies.means import geometric_mean, mean
from evolute.studies.over_training import told
from evolute.studies.study import Row
from evolute.studies.taylor.measure import LENGTHS, METHODS, SEEN

SHARE = 0.1  # of the terms of the model: what its remainder may be, along a step
LEAST, MOST = 1e-12, 1e12  # relative errors: below there is rounding, beyond nothing is told apart
Grouped = Mapping[tuple[Any, ...], list[Row]]


def made(rows: Sequence[Row], times: Sequence[int]) -> list[Row]:
    lines = _grouped(rows, "line", ("model", "step", "direction"))
    descents = _grouped(rows, "descent", ("model", "step", "factor"))
    return [*_reaches(lines), *_remainders(lines), *_errors(descents, times), *_examples(descents)]


def _grouped(rows: Sequence[Row], kind: str, keys: tuple[str, ...]) -> Grouped:
    """Those with two seeds or more."""
    out = dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        if row["kind"] == kind:
            out.setdefault(tuple(row[key] for key in keys), []).append(row)
    return {key: each for key, each in out.items() if len({row["seed"] for row in each}) > 1}


# ---- along directions


def share(row: Row, order: int) -> float:
    """|remainder| of the model of this order over the sum of its terms' sizes."""
    terms = row["terms"][:order]
    return min(max(abs(row["change"] - sum(terms)) / sum(map(abs, terms)), LEAST), MOST)


def reach(rows: Sequence[Row], order: int, most: float = SHARE) -> float:
    """The relative length of the step at which the share passes `most`, between lengths by its logarithm; at most 1."""
    rows = sorted(rows, key=lambda row: row["length"])
    shares = [share(row, order) for row in rows]
    lengths = [row["length"] for row in rows]
    beyond = next((i for i, each in enumerate(shares) if each > most), None)
    if beyond is None:
        return lengths[-1]
    if beyond == 0:
        return lengths[0]
    pair = slice(beyond - 1, beyond + 1)
    return float(np.exp(np.interp(np.log(most), np.log(shares[pair]), np.log(lengths[pair]))))


def _reaches(lines: Grouped) -> Iterator[Row]:
    for (model, step, direction), rows in lines.items():
        for order in (2, 3):
            found = geometric_mean([reach(each, order) for each in _by_seed(rows)])
            yield {
                "kind": "reach", "model": model, "step": step, "direction": direction, "order": order,
                **told("reach", found),
            }  # fmt: skip


def _remainders(lines: Grouped) -> Iterator[Row]:
    """For the figure: the share that is left, at each length."""
    for (model, step, direction), rows in lines.items():
        for length in LENGTHS:
            here = [row for row in rows if row["length"] == length and np.isfinite(row["change"])]
            if len(here) > 1:
                known = {"kind": "share", "model": model, "step": step, "direction": direction, "length": length}
                yield known | {f"order{k}": geometric_mean([share(row, k) for row in here]).value for k in (1, 2, 3)}


def _by_seed(rows: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in rows if row["seed"] == seed] for seed in dict.fromkeys(row["seed"] for row in rows)]


# ---- along descents


def error(row: Row, method: str, t: int) -> float:
    """|predicted − real|/|real| of the change of the loss after t steps."""
    real = row["losses"][t] - row["losses"][0]
    return min(max(abs(row[method][t] - real) / max(abs(real), 1e-300), LEAST), MOST)


def _errors(descents: Grouped, times: Sequence[int]) -> Iterator[Row]:
    """Of each method after so many steps; and how many times larger those of the others are than the model's."""
    for (model, step, factor), rows in descents.items():
        for t in times:
            here = [row for row in rows if len(row["losses"]) > t]
            if t == 0 or len(here) < 2:
                continue
            found = {method: [error(row, method, t) for row in here] for method in METHODS if _fair(method, t)}
            fell = mean([row["losses"][0] - row["losses"][t] for row in here])
            known = {"kind": "error", "model": model, "step": step, "factor": factor, "t": t, **told("fell", fell)}
            for method, values in found.items():
                worse = [a / b for a, b in zip(values, found["quadratic"], strict=True)]
                row = known | {"method": method, **told("error", geometric_mean(values))}
                yield row | told("worse", geometric_mean(worse))


def _fair(method: str, t: int) -> bool:
    """The fitted curve has seen the first losses."""
    return method != "fitted" or t > SEEN


def _examples(descents: Grouped) -> Iterator[Row]:
    """The first seed, to look at; predictions are finite."""
    for (model, step, factor), rows in descents.items():
        known = {"kind": "example", "model": model, "step": step, "factor": factor}
        curves = {method: np.clip(rows[0][method], -MOST, MOST).tolist() for method in METHODS}
        yield known | {"rate": rows[0]["rate"], "losses": rows[0]["losses"]} | curves
