"""From measurements under sinks to means over repeats: values, ratios to what was there without a sink, and rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evolute.studies.fits import slope
from evolute.studies.means import Mean, geometric_mean, mean
from evolute.studies.study import Row

POSITIVE = ("bulk", "top", "value", "whole", "condition", "loss")  # geometric means
SIGNED = ("attention", "negative", "bottom")
COMPARED = ("bulk", "top", "value", "whole", "condition")
FAR = 6.0  # sinks from which scalar theory has a rate
ROUNDING = 1e-6  # of λ_max: a bulk that is smaller has been trained away
LARGE = 32.0  # norms from which the condition number has one

Series = Mapping[float, Mapping[int, Row]]  # sink (or size) → seed → measurement


def summary(rows: Sequence[Row]) -> list[Row]:
    """The table of the study."""
    table = list[Row]()
    for key, series in _grouped([row for row in rows if row["kind"] != "norms"], "sink").items():
        table += _under_sinks(dict(key), series)
    for key, series in _grouped([row for row in rows if row["kind"] == "norms"], "size").items():
        table += _over_norms(dict(key), series)
    return table + _agreement(rows)


def _grouped(rows: Iterable[Row], axis: str) -> dict[tuple[tuple[str, Any], ...], dict[float, dict[int, Row]]]:
    """By subject, point and size of the first token; a GPT trained without a sink is one trained with sink 0."""
    out = dict[tuple[tuple[str, Any], ...], dict[float, dict[int, Row]]]()
    for row in rows:
        points = [row.get("point") or row.get("way")]
        if row["kind"] == "gpt" and row["point"] == "imposed" and not row["sink"]:
            points.append("trained")
        for point in points:
            subject = row.get("model") or {"gpt": "GPT", "norms": "scalar"}.get(row["kind"], row["kind"])
            key = (("subject", subject), ("point", point), ("first", row.get("first")))
            out.setdefault(key, {}).setdefault(row[axis], {})[row["seed"]] = row
    return out


# ---- sinks


def _under_sinks(key: Row, series: Series) -> list[Row]:
    out = list[Row]()
    for sink in sorted(series):
        told = {**key, "sink": sink}
        for name in (*POSITIVE, *SIGNED):
            out += _made({**told, "quantity": name}, name, [row.get(name) for row in series[sink].values()])
        for name in COMPARED if sink else ():
            out += _made({**told, "quantity": f"{name} ratio"}, "ratio", _ratios(series, sink, name))
    out += _rate(key, series)
    return [_with_theory(row, max(series)) for row in out] + _pictures(key, series)


def _made(told: Row, name: str, values: Sequence[float | None]) -> list[Row]:
    """One row, or none where a value is missing, zero where it should be positive, or alone."""
    known = [value for value in values if value is not None]
    whole = len(known) > 1 and len(known) == len(values)
    if not whole or (name not in SIGNED and name != "rate" and min(known) <= 0):
        return []
    return [_row(told, mean(known) if name in (*SIGNED, "rate") else geometric_mean(known))]


def _row(told: Row, m: Mean) -> Row:
    return {**told, "value": m.value, "low": m.low, "high": m.high, "theory": None}


def _ratios(series: Series, sink: float, name: str) -> list[float | None]:
    """For each repeat, with the sink ÷ without; a scalar bulk that has been trained away has none."""
    out = list[float | None]()
    for seed, row in series[sink].items():
        before, after = series.get(0.0, {}).get(seed, {}).get(name), row.get(name)
        scalar = name == "bulk" and row["kind"] == "scalar"
        vanished = scalar and before is not None and before <= ROUNDING * row["top"]
        out.append(after / before if before and after and not vanished else None)
    return out


def _rate(key: Row, series: Series) -> list[Row]:
    """The slope of log(bulk) over the sink, where the sink is strong, of weights that are not trained under it."""
    far = [sink for sink in sorted(series) if sink >= FAR][-2:]
    if len(far) < 2 or key["point"] == "trained":
        return []
    steps = [
        math.log(series[far[1]][seed]["bulk"] / series[far[0]][seed]["bulk"]) / (far[1] - far[0])
        for seed in series[far[0]]
        if seed in series[far[1]]
    ]
    return _made({**key, "sink": far[1], "quantity": "bulk rate"}, "rate", steps)


def _with_theory(row: Row, strongest: float) -> Row:
    """2 x₁² is where the largest eigenvalue of scalar attention goes, −1 the rate of its bulk."""
    if row["quantity"] == "bulk rate":
        return {**row, "theory": -1.0}
    scalar = row["subject"] == "scalar" and row["point"] == "random" and row["sink"] == strongest >= FAR
    return {**row, "theory": 2 * row["first"] ** 2} if scalar and row["quantity"] == "top" else row


def _pictures(key: Row, series: Series) -> list[Row]:
    """Of the first repeat: the density of the queries and keys, and the attention to the first token in each layer."""
    out = list[Row]()
    for sink in sorted(series):
        first = series[sink][min(series[sink])]
        for quantity, name in (("density", "density"), ("attention by layer", "attention_by_layer")):
            out += [{**key, "sink": sink, "quantity": quantity, "points": first[name]}] if name in first else []
    return out


# ---- norms of query and key


def _over_norms(key: Row, series: Series) -> list[Row]:
    out = list[Row]()
    for size in sorted(series):
        told = {**key, "size": size, "quantity": "condition"}
        out += _made(told, "condition", [row["condition"] for row in series[size].values()])
    return out + _norm_rate(key, series)


def _norm_rate(key: Row, series: Series) -> list[Row]:
    """The exponent of the condition number in ‖w_Q‖ = ‖w_K‖, where these are large."""
    sizes = [size for size in sorted(series) if size >= LARGE]
    seeds = [seed for seed in series[min(series)] if all(series[s].get(seed, {}).get("condition") for s in sizes)]
    if len(sizes) < 2:
        return []
    rates = [slope(sizes, [series[size][seed]["condition"] for size in sizes]) for seed in seeds]
    rows = _made({**key, "quantity": "condition rate"}, "rate", rates)
    return [{**row, "theory": 4.0 if key["point"] == "product" else None} for row in rows]


# ---- formula against automatic differentiation


def _agreement(rows: Sequence[Row]) -> list[Row]:
    scalar = [row for row in rows if row["kind"] == "scalar"]
    if not scalar:
        return []
    told = {"subject": "scalar", "point": "all", "quantity": "formula error", "points": len(scalar)}
    slopes = max(abs(row["bulk"] - row["slope"]) / row["top"] for row in scalar)
    return [
        {**told, "value": max(row["error"] for row in scalar)},
        {**told, "quantity": "slope error", "value": slopes},
    ]
