"""How many samples a tolerance asks for, and whether an answer from few samples is true of others.

k* is the least k from which the expected |L_{k+1} − L_k| stays below a tolerance. As (k + 1)·d_k → E|ℓ − L|, it is
about E|ℓ − L| over the tolerance: half the tolerance, twice the samples. It comes from one pass over some samples
(`ev.sample_size`), with an interval; here others of the same kind say what k* is, and how far the mean moves there.

The mean itself is off by √(Var ℓ/k). For that to be within the tolerance takes Var ℓ/tolerance² samples: far more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evolute.apps.order_changes import random_orders
from evolute.apps.sample_size import Search
from evolute.engine.sample_losses import SampleLosses, sample_losses
from evolute.errors import StudyError
from evolute.studies.landscape.measure import steps
from evolute.studies.means import geometric_mean, mean
from evolute.studies.over_training import told
from evolute.studies.study import Cell, Config, Row, Study, Verdict
from evolute.studies.subjects import Subject, at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVEL = 0.95
SHORT_OF = 0.05  # how far a coverage may be below the level
ORDERS = 8


@dataclass(frozen=True)
class Budget(Config):
    """Models at points of training (fractions); tolerances as shares of the loss; `known` of all samples give k*."""

    models: tuple[str, ...] = ("vit_digits", "gpt_english")
    points: tuple[float, ...] = (0.0, 1.0)
    tolerances: tuple[float, ...] = (0.03, 0.01, 0.003, 0.001)
    width: int = 16
    heads: int = 2
    layers: int = 1
    steps: int = 300
    samples: int = 1400
    known: int = 200
    splits: int = 30
    repeats: int = 4


class BudgetStudy(Study[Budget]):
    """One cell per model, point of its training, and repeat."""

    name = "budget"
    claim = "One pass over some samples says from how many on the landscape stops changing, and it is true of others."
    config = Budget

    def cells(self, config: Budget) -> Sequence[Cell]:
        _check(config)
        chosen = {"tolerances": list(config.tolerances), "known": config.known, "splits": config.splits}
        return [
            {"subject": asdict(subject), "step": round(point * subject.steps)} | chosen
            for model in config.models
            for repeat in range(config.repeats)
            for subject in [_subject(config, model, repeat)]
            for point in config.points
        ]

    def measure(self, cell: Cell) -> list[Row]:
        subject = Subject(**cell["subject"])
        losses = sample_losses(at(subject, cell["step"]).objective)
        where = {"model": subject.name, "step": cell["step"], "seed": subject.seed}
        found = [measured(losses, share, cell["known"], cell["splits"], subject.seed) for share in cell["tolerances"]]
        return [where | row for row in found]

    def table(self, config: Budget, rows: Sequence[Row]) -> list[Row]:
        groups = dict[tuple[str, int, float], list[Row]]()
        for row in rows:
            groups.setdefault((row["model"], row["step"], row["share"]), []).append(row)
        names = ("model", "step", "share")
        return [dict(zip(names, key, strict=True)) | _summary(here) for key, here in groups.items() if len(here) > 1]

    def verdict(self, config: Budget, table: Sequence[Row]) -> Verdict:
        return judged(table, config.known)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.budget.figure import draw

        return draw(table, settings)


def _subject(config: Budget, model: str, repeat: int) -> Subject:
    return Subject(
        model,
        config.width,
        config.heads,
        config.layers,
        config.steps,
        samples=config.samples,
        seed=config.seed + repeat,
    )


def _check(config: Budget) -> None:
    if not config.points or any(not 0 <= point <= 1 for point in config.points):
        raise StudyError(f"points: expected fractions of the training, from 0 to 1, got {list(config.points)}.")
    if not config.tolerances or min(config.tolerances) <= 0:
        raise StudyError(f"tolerances: expected positive shares of the loss, got {list(config.tolerances)}.")
    for name in ("repeats", "splits"):
        if getattr(config, name) < 2:
            raise StudyError(f"{name}: expected 2 or more, got {getattr(config, name)}.")
    if not 10 <= config.known <= config.samples / 2:
        raise StudyError(
            f"known: expected at least 10 samples, and as many others to check them; got {config.known} of "
            f"{config.samples}."
        )


# ---- what is measured


def measured(losses: SampleLosses, share: float, known: int, splits: int, seed: int) -> Row:
    """k* with its interval from some samples, k* of the others, and the mean change of others at k*, split by split."""
    generator = torch.Generator().manual_seed(seed)
    tolerance = share * abs(float(losses.sums.sum() / losses.terms.sum()))
    found = [_split(losses, tolerance, known, generator) for _ in range(splits)]
    sizes, lows, highs, others, moves = (list(column) for column in zip(*found, strict=True))
    covered = [low <= other <= high for low, other, high in zip(lows, others, highs, strict=True)]
    moved = [each for each in moves if each is not None]
    search = Search(losses, tolerance, LEVEL, 2, generator)
    return {
        "share": share,
        "size": _median(sizes),
        "low": _median(lows),
        "high": _median(highs),
        "other": _median(others),
        "covered": sum(covered) / len(covered),
        "moves": sum(moved) / len(moved) / tolerance if moved else None,
        "accurate": (search.deviation() / tolerance) ** 2,
    }


def _split(losses: SampleLosses, tolerance: float, known: int, generator: torch.Generator) -> tuple[Any, ...]:
    order = torch.randperm(len(losses), generator=generator)
    mine, others = (SampleLosses(losses.sums[:, part], losses.terms[part]) for part in (order[:known], order[known:]))
    search = Search(mine, tolerance, LEVEL, ORDERS, generator)
    size = search.least()
    truth = Search(others, tolerance, LEVEL, ORDERS, generator).least()
    return size, *search.interval(size, generator), truth, moves_at(others, size, generator)


def moves_at(losses: SampleLosses, k: int, generator: torch.Generator) -> float | None:
    """|L_{k+1} − L_k| of other samples, averaged over orders, from the definition alone; None if they are too few."""
    if k + 1 > len(losses):
        return None
    orders = random_orders(len(losses), 4 * ORDERS, generator)
    return float(torch.stack([steps(losses.sums, losses.terms, order)[:, k - 1] for order in orders]).mean())


def _median(values: Sequence[int]) -> float:
    return float(Tensor([float(each) for each in values]).median())


# ---- what is made of it


def _summary(rows: Sequence[Row]) -> Row:
    moved = [row["moves"] for row in rows if row["moves"] is not None]
    return {
        **told("size", geometric_mean([row["size"] for row in rows])),
        **told("other", geometric_mean([row["other"] for row in rows])),
        **told("covered", mean([row["covered"] for row in rows])),
        **told("accurate", geometric_mean([row["accurate"] for row in rows])),
        "interval": [geometric_mean([row[end] for row in rows]).value for end in ("low", "high")],
        "moves": sum(moved) / len(moved) if moved else None,
    }


def judged(table: Sequence[Row], known: int) -> Verdict:
    """Intervals hold the k* of other samples about as often as they say."""
    if not table:
        return Verdict("undecided", "no model was measured with two seeds.")
    good = [row for row in table if row["covered"] >= LEVEL - SHORT_OF]
    bad = [row for row in table if row["covered_high"] < LEVEL - SHORT_OF]
    answer = "holds" if len(good) == len(table) else "does not hold here" if len(bad) > len(table) / 2 else "undecided"
    if good and answer != "holds":
        answer = "holds in part"
    return Verdict(answer, _sentence(table, len(good), known))


def _sentence(table: Sequence[Row], good: int, known: int) -> str:
    share = min(table, key=lambda row: abs(math.log(row["share"] / 0.01)))["share"]
    sizes = [_told_of(row) for row in table if row["share"] == share]
    covered = sum(row["covered"] for row in table) / len(table)
    more = [row["accurate"] / row["size"] for row in table]
    moved = [row["moves"] for row in table if row["moves"] is not None]
    checked = (
        f"; at k* the mean of others moves by {min(moved):.2f} to {max(moved):.2f} of the tolerance" if moved else ""
    )
    return (
        f"95 % intervals from {known} samples hold the k* of the others in {covered:.1%} of the splits, and in 90 % or "
        f"more in {good} of {len(table)} cases{checked}; k* for a tolerance of {share:.1%} of the loss is "
        f"{'; '.join(sizes)}. For the mean itself to be that accurate takes {min(more):.3g} to {max(more):.3g} times "
        "as many."
    )


def _told_of(row: Row) -> str:
    low, high = row["interval"]
    return f"{row['model']} at step {row['step']}: {row['size']:.0f} [{low:.0f}, {high:.0f}], others {row['other']:.0f}"


STUDY = BudgetStudy()
