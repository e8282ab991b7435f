"""How unlike the blocks of the Hessian are: the typical entry of V with V beside that of Q with Q, in powers of ten.

Theory: with tokens of size σ, the entries of H_o go as σ⁶ for Q with Q and σ² for V with V in softmax attention, those
of H_f as σ⁵ and not at all; so their ratio goes as σ⁻³ or faster, and small tokens make it large. Without softmax both
go as σ⁶: the ratio does not depend on σ. A norm before attention makes all tokens of size 1, whatever σ is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies.heterogeneity.measure import measured
from evolute.studies.means import mean
from evolute.studies.study import Cell, Config, Row, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ATTENTIONS, NORMS = ("softmax", "linear"), ("none", "pre")
STATISTICS = ("median", "rms")
SCORES = ("loss", "accuracy", "token_size")
KEYS = ("attention", "norm", "point")
PLAIN = ("softmax", "none")
RATIO, BARE, NORMED = "V,V / Q,Q", "without softmax", "with pre-norm"
SAID = {
    RATIO: "with softmax and no norm",
    BARE: "times what it is without softmax",
    NORMED: "times what it is with pre-norm",
}


@dataclass(frozen=True)
class Heterogeneity(Config):
    """One GPT per kind of attention and norm, before training and after so many steps, on a sample of its data."""

    width: int = 16
    layers: int = 1
    digits: int = 2
    samples: int = 32
    steps: int = 1500
    lr: float = 3e-3
    repeats: int = 4

    def __post_init__(self) -> None:
        for name in ("width", "layers", "digits", "samples", "steps", "lr"):
            if getattr(self, name) <= 0:
                raise StudyError(f"{name}: expected a positive number, got {getattr(self, name)}.")
        if not 2 <= self.digits <= 9:
            raise StudyError(f"digits: expected numbers of 2 to 9 digits, got {self.digits}.")
        if self.repeats < 2:
            raise StudyError(f"repeats: expected at least 2, for an interval, got {self.repeats}.")


class HeterogeneityStudy(Study[Heterogeneity]):
    """One cell per attention, norm, point of training and repeat."""

    name = "heterogeneity"
    claim = "Softmax makes the entries of V,V larger than those of Q,Q; without it, or behind a norm, they are closer."
    config = Heterogeneity

    def cells(self, config: Heterogeneity) -> Sequence[Cell]:
        sizes = {key: getattr(config, key) for key in ("width", "layers", "digits", "samples", "lr")}
        return [
            {"attention": attention, "norm": norm, "steps": steps, "seed": config.seed + repeat, **sizes}
            for repeat in range(config.repeats)
            for steps in (0, config.steps)
            for attention in ATTENTIONS
            for norm in NORMS
        ]

    def measure(self, cell: Cell) -> list[Row]:
        return measured(cell)

    def table(self, config: Heterogeneity, rows: Sequence[Row]) -> list[Row]:
        named = [{**row, "point": "trained" if row["steps"] else "initialisation"} for row in rows]
        ratios = list(_ratios(named))
        return [*_means(ratios), *contrasts(ratios), *_blocks(named), *_images(named), *_scores(named)]

    def verdict(self, config: Heterogeneity, table: Sequence[Row]) -> Verdict:
        return judged(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.heterogeneity.figure import drawn

        return drawn(table)


# ---- ratios of typical entries, in powers of ten


def _ratios(rows: Sequence[Row]) -> Iterator[Row]:
    """log10 of the typical entry of V with V over that of Q with Q, the mean over layers: one per repeat."""
    for run in _grouped([row for row in rows if row["kind"] == "block"], (*KEYS, "seed")):
        known = {row["block"]: row for row in run}
        layers = [block[1:] for block in known if block.startswith("V") and "," not in block]
        for statistic in STATISTICS:
            decades = [_decades(known[f"V{i}"][statistic], known[f"Q{i}"][statistic]) for i in layers]
            where = {key: run[0][key] for key in (*KEYS, "seed")}
            yield {**where, "statistic": statistic, "decades": sum(decades) / len(decades)}


def _decades(value: float, of: float) -> float:
    if value <= 0 or of <= 0:
        raise StudyError("the typical entry of a block is zero: more samples, or a larger width, would say more.")
    return math.log10(value / of)


def _means(ratios: Sequence[Row]) -> Iterator[Row]:
    for run in _grouped(ratios, (*KEYS, "statistic")):
        where = {key: run[0][key] for key in (*KEYS, "statistic")}
        if len(run) > 1:  # training may have failed
            yield {"kind": "ratio", "of": RATIO, **where, **_interval([row["decades"] for row in run])}


def contrasts(ratios: Sequence[Row]) -> Iterator[Row]:
    """How much of a ratio goes away: without softmax, with a norm; from pairs of runs that share a seed."""
    pairs = {BARE: ("linear", "none"), NORMED: ("softmax", "pre")}
    for run in _grouped(ratios, ("point", "statistic")):
        known = {(row["attention"], row["norm"], row["seed"]): row["decades"] for row in run}
        seeds = [seed for attention, norm, seed in known if (attention, norm) == PLAIN]
        for name, other in pairs.items():
            gone = [known[*PLAIN, seed] - known[*other, seed] for seed in seeds if (*other, seed) in known]
            where = {key: run[0][key] for key in ("point", "statistic")}
            if len(gone) > 1:
                yield {"kind": "contrast", "of": name, **where, **_interval(gone)}


def _interval(values: Sequence[float]) -> Row:
    found = mean(values)
    return {"decades": found.value, "ci_low": found.low, "ci_high": found.high}


# ---- what the figure needs


def _blocks(rows: Sequence[Row]) -> Iterator[Row]:
    """Typical entries over all repeats, and histograms of the blocks of the diagonal."""
    for run in _grouped([row for row in rows if row["kind"] == "block"], (*KEYS, "block")):
        where = {key: run[0][key] for key in (*KEYS, "block")}
        middle = {name: sum(row[name] for row in run) / len(run) for name in (*STATISTICS, "zeros")}
        counts = [sum(each) for each in zip(*(row["counts"] for row in run), strict=True)]
        yield {"kind": "block", **where, **middle, **({} if "," in run[0]["block"] else {"counts": counts})}


def _images(rows: Sequence[Row]) -> Iterator[Row]:
    """Of the first repeat."""
    for run in _grouped([row for row in rows if row["kind"] == "image"], KEYS):
        yield {key: run[0][key] for key in ("kind", *KEYS, "groups", "pixels", "levels")}


def _scores(rows: Sequence[Row]) -> Iterator[Row]:
    for run in _grouped([row for row in rows if row["kind"] == "score"], KEYS):
        middle = {name: sum(row[name] for row in run) / len(run) for name in SCORES}
        yield {"kind": "score", **{key: run[0][key] for key in KEYS}, **middle}


def _grouped(rows: Sequence[Row], keys: Sequence[str]) -> Iterator[list[Row]]:
    groups = dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return iter(groups.values())


# ---- what it says


def judged(table: Sequence[Row]) -> Verdict:
    """V,V above Q,Q with softmax and no norm; less so without softmax, and less so with a norm: at each point."""
    told = [row for row in table if row.get("statistic") == "median" and _counts(row)]
    answers = [_positive(row) for row in told]
    if all(answer is None for answer in answers):
        return Verdict("undecided", "no interval of softmax attention without a norm lies on one side of zero.")
    answer = "holds" if all(answers) else "holds in part" if any(answers) else "does not hold here"
    points = dict.fromkeys(row["point"] for row in told)
    return Verdict(
        answer, "; ".join(_said(point, [row for row in told if row["point"] == point]) for point in points) + "."
    )


def _counts(row: Row) -> bool:
    return row["kind"] == "contrast" or (row["kind"] == "ratio" and (row["attention"], row["norm"]) == PLAIN)


def _positive(row: Row) -> bool | None:
    """Whether the interval lies above zero; None if it holds it."""
    return True if row["ci_low"] > 0 else False if row["ci_high"] < 0 else None


def _said(point: str, rows: Sequence[Row]) -> str:
    """Factors, with the power of ten and its interval."""
    factors = [
        f"10^({row['decades']:.2f} ± {(row['ci_high'] - row['ci_low']) / 2:.2f}) {SAID[row['of']]}" for row in rows
    ]
    return f"{point}: the median entry of V,V over that of Q,Q is {', '.join(factors)}"


STUDY = HeterogeneityStudy()
