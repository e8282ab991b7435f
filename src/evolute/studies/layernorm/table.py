"""The table of the study of norms: exponents of the law, and over depth sharpness, curvature by layer, and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from evolute.studies.fits import exponent
from evolute.studies.means import Mean, geometric_mean, mean
from evolute.studies.study import Row
from evolute.studies.tables import by, with_interval

APART = 10.0  # how many times σ is away from √ε, above or below, where a power holds
ROW = {  # (far above √ε, far below)
    "J": (-1.0, 0.0),
    "outer": (-2.0, 0.0),
    "functional": (-2.0, 1.0),
}
EXACT, NATURAL = 0.1, 0.3  # how far an exponent may be from the theory, beside its own interval


def made(rows: Sequence[Row], eps: float) -> list[Row]:
    """Of the rows of all cells."""
    parts = {name: [row for row in rows if row["part"] == name] for name in PARTS}
    return [
        *_row_laws(parts["row"], eps),
        *_block_laws(parts["block"]),
        *_trained_laws(parts["trained"]),
        *_curves(parts["row"]),
        *_points(parts["trained"]),
        *_initial(parts["initial"]),
        *_ratios(parts["initial"]),
        *_profiles(parts["profile"]),
        *_trainings(parts["training"]),
    ]


PARTS = ("row", "block", "trained", "initial", "profile", "training")


# ---- the law


def _law(source: str, norm: str, quantity: str, where: str, found: Mean, theory: float | None, near: float) -> Row:
    start = {"part": "law", "source": source, "norm": norm, "quantity": quantity, "range": where}
    return {**start, **with_interval("exponent", found), "theory": theory, "near": near}


def _fitted(rows: Iterable[Row], quantity: str, inside: Callable[[float], bool]) -> Mean | None:
    """Over the sizes that are inside; None where fewer than two are, or a single repeat has them."""
    series = [{r["sigma"]: r[quantity] for r in group if inside(r["sigma"])} for group in by(rows, "seed").values()]
    sigmas = sorted(set[float]().union(*series))
    return exponent(sigmas, [[s[x] for x in sigmas] for s in series]) if len(sigmas) > 1 < len(series) else None


def _row_laws(rows: Sequence[Row], eps: float) -> Iterable[Row]:
    root = math.sqrt(eps)
    ranges = {"above": lambda sigma: sigma >= APART * root, "below": lambda sigma: sigma <= root / APART}
    for (norm,), group in by(rows, "norm").items():
        for quantity, powers in ROW.items():
            for (where, inside), theory in zip(ranges.items(), powers, strict=True):
                found = _fitted(group, quantity, inside)
                if found is not None:
                    yield _law("row", norm, quantity, where, found, theory, EXACT)


def _block_laws(rows: Sequence[Row]) -> Iterable[Row]:
    for (norm,), group in by(rows, "norm").items():
        for part in ("H_o", "H_f"):
            found = _fitted(group, part, lambda sigma: True)
            if found is not None:
                yield _law("block", norm, part, "above", found, 0.0 if norm == "none" else -2.0, EXACT)


def _trained_laws(rows: Sequence[Row]) -> Iterable[Row]:
    """What a norm passes on of what arrives goes as −2; how much is passed on depends on what arrives, too."""
    for (norm, place), group in by(rows, "norm", "place").items():
        if len(group) > 1:
            for quantity, theory in (("share", -2.0), ("passed", None)):
                found = mean([row[quantity] for row in group])
                yield {**_law("trained", norm, quantity, "natural", found, theory, NATURAL), "place": place}


def _curves(rows: Sequence[Row]) -> Iterable[Row]:
    for (norm, sigma), group in by(rows, "norm", "sigma").items():
        value = sum(row["share"] for row in group) / len(group)
        yield {"part": "curve", "norm": norm, "sigma": sigma, "share": value}


def _points(rows: Sequence[Row]) -> Iterable[Row]:
    """Of the first seed."""
    first = min((row["seed"] for row in rows), default=0)
    for row in rows:
        if row["seed"] == first:
            yield {"part": "points", "norm": row["norm"], "place": row["place"], "points": row["points"]}


# ---- depth


def _initial(rows: Sequence[Row]) -> Iterable[Row]:
    for (gain, norm, depth), group in by(rows, "gain", "norm", "depth").items():
        if len(group) > 1:
            start = {"part": "initial", "gain": gain, "norm": norm, "depth": depth}
            conditioning = geometric_mean([row["conditioning"] for row in group])
            yield {
                **start,
                **with_interval("sharpness", geometric_mean([row["sharpness"] for row in group])),
                "conditioning": conditioning.value,
                "conditioning_low": conditioning.low,
                "conditioning_high": conditioning.high,
            }


def _ratios(rows: Sequence[Row]) -> Iterable[Row]:
    """Sharpness over that of pre-norm, seed by seed."""
    pre = {(row["gain"], row["depth"], row["seed"]): row["sharpness"] for row in rows if row["norm"] == "pre"}
    for (gain, norm, depth), group in by(rows, "gain", "norm", "depth").items():
        ratios = [r["sharpness"] / pre[key] for r in group if (key := (gain, depth, r["seed"])) in pre]
        if norm != "pre" and len(ratios) > 1:
            yield {
                "part": "ratio",
                "gain": gain,
                "norm": norm,
                "depth": depth,
                **with_interval("ratio", geometric_mean(ratios)),
            }


def _profiles(rows: Sequence[Row]) -> Iterable[Row]:
    for (gain, norm, depth, layer), group in by(rows, "gain", "norm", "depth", "layer").items():
        if len(group) > 1:
            start = {"part": "profile", "gain": gain, "norm": norm, "depth": depth, "layer": layer}
            yield {
                **start,
                **with_interval("trace", geometric_mean([row["trace"] for row in group])),
                "variance": geometric_mean([row["variance"] for row in group]).value,
                "apart": geometric_mean([row["apart"] for row in group]).value,
            }


def _trainings(rows: Sequence[Row]) -> Iterable[Row]:
    """Of each seed the least loss over the rates, and whether any of them learnt."""
    for (gain, norm, depth), group in by(rows, "gain", "norm", "depth").items():
        seeds = list(by(group, "seed").values())
        best = [min((row["loss"] for row in runs if row["loss"] is not None), default=None) for runs in seeds]
        finite = [loss for loss in best if loss is not None]
        learnt = [[row["rate"] for row in runs if row["learnt"]] for runs in seeds]
        start = {"part": "training", "gain": gain, "norm": norm, "depth": depth}
        none = {"loss": None, "ci_low": None, "ci_high": None}
        yield {
            **start,
            **(with_interval("loss", mean(finite)) if len(finite) > 1 else none),
            "constant": group[0]["constant"],
            "seeds": len(seeds),
            "learnt": sum(map(bool, learnt)),
            "diverged": sum(loss is None for loss in best),
            "largest_rates": [max(rates) if rates else None for rates in learnt],
        }
