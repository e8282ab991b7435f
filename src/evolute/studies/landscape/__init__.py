"""How the loss at fixed parameters settles as samples are added, at a trained point and around it.

With L_k the mean over the first k samples, L_{k+1}(w) − L_k(w) = (ℓ_{k+1}(w) − L_k(w))/(k + 1), exactly. Over random
orders its expected size d_k is pinned: (k + 1)·d_k never rises and ends at d_1 or above (see `order_changes`), so
1 ≤ (k + 1) d_k/d_1 ≤ 2 for every model and all data, without any curvature. What curvature says is how the level
(k + 1)·d_k → E|ℓ − L| changes as parameters move by δ ~ N(0, σ²I): each ℓ_i becomes ℓ_i + g_i·δ + ½ δᵀH_iδ. Theorem 7
bounds the level by 2 max ℓ + max‖H_i‖ ‖δ‖² near a minimiser of all samples. 1/k may break where orders are not random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies.landscape.measure import FIRST, measured
from evolute.studies.means import geometric_mean, mean
from evolute.studies.over_training import told
from evolute.studies.study import Cell, Config, Row, Study, Verdict
from evolute.studies.subjects import Subject, at
from evolute.zoo.schedules import SCHEDULES
from evolute.zoo.training import OPTIMIZERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES = {"sgd": 0.2, "momentum": 0.05, "adam": 3e-3, "adamw": 3e-3}
NEAR = 0.05  # of the slope −1
RIGHT = 0.1  # of the predicted level, as a share
LEAST = 32  # samples


@dataclass(frozen=True)
class Landscape(Config):
    """Models, how they are trained (optimiser/schedule), radii σ; the large ViT: width=128, heads=4, layers=8."""

    models: tuple[str, ...] = ("vit_digits", "gpt_english")
    trainings: tuple[str, ...] = ("adamw/warmup_cosine", "adamw/constant", "momentum/cosine")
    radii: tuple[float, ...] = (0.0, 0.01, 0.03, 0.1)
    width: int = 16
    heads: int = 2
    layers: int = 1
    steps: int = 300
    samples: int = 384
    points: int = 3
    orders: int = 32
    spheres: int = 6
    repeats: int = 3


class LandscapeStudy(Study[Landscape]):
    """One cell per model, training and repeat."""

    name = "landscape"
    claim = (
        "The loss at a trained point settles as 1/k with k samples, and a second-order model says how fast around it."
    )
    config = Landscape

    def cells(self, config: Landscape) -> Sequence[Cell]:
        _check(config)
        chosen = {"radii": list(config.radii), "points": config.points, "orders": config.orders}
        return [
            {"subject": asdict(_subject(config, model, way, repeat)), "training": way, "spheres": config.spheres}
            | chosen
            for model in config.models
            for way in config.trainings
            for repeat in range(config.repeats)
        ]

    def measure(self, cell: Cell) -> list[Row]:
        subject = Subject(**cell["subject"])
        moment = at(subject, subject.steps)
        known = {"model": subject.name, "training": cell["training"], "seed": subject.seed}
        score = {"accuracy": moment.score().accuracy}
        settings = (cell["radii"], cell["points"], cell["orders"], cell["spheres"])
        return [known | score | row for row in measured(moment, *settings, subject.seed)]

    def table(self, config: Landscape, rows: Sequence[Row]) -> list[Row]:
        groups = dict[tuple[str, str, float], list[Row]]()
        for row in rows:
            groups.setdefault((row["model"], row["training"], row["radius"]), []).append(row)
        names = ("model", "training", "radius")
        return [dict(zip(names, key, strict=True)) | _summary(here) for key, here in groups.items() if len(here) > 1]

    def verdict(self, config: Landscape, table: Sequence[Row]) -> Verdict:
        return judged(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.landscape.figure import draw

        return draw(table, settings)


def _subject(config: Landscape, model: str, way: str, repeat: int) -> Subject:
    optimizer, _, schedule = way.partition("/")
    return Subject(
        model,
        config.width,
        config.heads,
        config.layers,
        config.steps,
        optimizer=optimizer,
        lr=RATES[optimizer],
        schedule=schedule,
        samples=config.samples,
        seed=config.seed + repeat,
    )


def _check(config: Landscape) -> None:
    for way in config.trainings:
        optimizer, _, schedule = way.partition("/")
        if optimizer not in OPTIMIZERS or schedule not in SCHEDULES:
            raise StudyError(
                f"trainings: expected optimiser/schedule of {', '.join(OPTIMIZERS)} and {', '.join(SCHEDULES)}, "
                f"got {way!r}."
            )
    if not config.radii or min(config.radii) < 0:
        raise StudyError(f"radii: expected 0 or more, got {list(config.radii)}.")
    least = {"repeats": 2, "points": 1, "orders": 2, "spheres": 1, "samples": LEAST}
    for name, count in least.items():
        if getattr(config, name) < count:
            raise StudyError(f"{name}: expected {count} or more, got {getattr(config, name)}.")


# ---- what is made of it


def _summary(rows: Sequence[Row]) -> Row:
    """Over the seeds; the curves are those of the first."""
    first = rows[0]
    return {
        **told("slope", mean([row["slope"] for row in rows])),
        **told("ratio", geometric_mean([row["predicted"] / row["level"] for row in rows])),
        **told("loose", geometric_mean([row["bound"] / row["level"] for row in rows])),
        **told("spread", geometric_mean([row["deviation"] / row["level"] for row in rows])),
        **told("ascending", mean([row["ascending"] for row in rows])),
        **told("level", geometric_mean([row["level"] for row in rows])),
        "loss": mean([row["loss"] for row in rows]).value,
        "accuracy": mean([row["accuracy"] for row in rows]).value,
        **{name: first[name] for name in ("sizes", "changes", "low", "high", "bound", "predicted")},
    }


def judged(table: Sequence[Row]) -> Verdict:
    """The slope of every case, then how far the second-order model reaches."""
    if not table:
        return Verdict("undecided", "no model was measured with two seeds.")
    slopes = [row["slope_low"] > -1 - NEAR and row["slope_high"] < -1 + NEAR for row in table]
    away = [row["slope_low"] > -1 + NEAR or row["slope_high"] < -1 - NEAR for row in table]
    moved = [row for row in table if row["radius"] > 0]
    good = [row for row in moved if row["ratio_low"] > 1 - RIGHT and row["ratio_high"] < 1 + RIGHT]
    if sum(away) > len(table) / 2:
        answer = "does not hold here"
    elif all(slopes):
        answer = "holds" if len(good) == len(moved) else "holds in part"
    else:
        answer = "holds in part" if any(slopes) else "undecided"
    return Verdict(answer, _sentence(table, moved, len(good), sum(slopes)))


def _sentence(table: Sequence[Row], moved: Sequence[Row], good: int, slopes: int) -> str:
    low, high = min(row["slope_low"] for row in table), max(row["slope_high"] for row in table)
    parts = [
        f"slopes from k = {FIRST} on are −1 ± {NEAR} in {slopes} of {len(table)} cases (all 95 % intervals in "
        f"[{low:.3f}, {high:.3f}]), which means of any data come near to by themselves",
        *(
            [f"the second-order level is right to {RIGHT:.0%} in {good} of {len(moved)}: {_by_radius(moved)}"]
            * bool(moved)
        ),
        f"Theorem 7's bound is {_range(table, 'loose')} times too large, the standard deviation of the losses "
        f"{_range(table, 'spread')} times",
        f"in order from the least loss to the largest, where nothing asks for 1/k, the slope is {_ordered(table)}",
    ]
    return "; ".join(parts) + "."


def _by_radius(rows: Sequence[Row]) -> str:
    radii = sorted({row["radius"] for row in rows})
    return ", ".join(
        f"σ = {radius:g}: {_range([r for r in rows if r['radius'] == radius], 'ratio')} of the true one"
        for radius in radii
    )


def _ordered(table: Sequence[Row]) -> str:
    models = dict.fromkeys(row["model"] for row in table)
    return ", ".join(f"{_range([r for r in table if r['model'] == model], 'ascending')} ({model})" for model in models)


def _range(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{min(values):.3g} to {max(values):.3g}"


STUDY = LandscapeStudy()
