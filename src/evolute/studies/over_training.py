"""What studies over training share: the same models at the same points, once for each seed, and their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evolute.errors import StudyError
from evolute.studies.means import Mean
from evolute.studies.study import Cell, Config, Row
from evolute.studies.subjects import Moment, Subject, at


@dataclass(frozen=True)
class OverTraining(Config):
    """Models by name, points of their training as fractions of it, their size, and how often all is repeated."""

    models: tuple[str, ...] = ("vit_digits",)
    points: tuple[float, ...] = (0.0, 1.0)
    width: int = 32
    heads: int = 2
    layers: int = 2
    steps: int = 400
    samples: int = 32
    repeats: int = 3
    probes: int = 8


Place = tuple[str, int]  # model and step
TITLES = {
    "gpt_english": "GPT, English text",
    "gpt_addition": "GPT, addition",
    "vit_digits": "ViT, handwritten digits",
    "vit_fashion": "ViT, Fashion-MNIST",
    "mlp_digits": "MLP, handwritten digits",
    "mlp_fashion": "MLP, Fashion-MNIST",
    "ssm_english": "State space, English text",
    "rwkv_english": "Linear recurrence, English text",
    "vit_contrastive": "ViT, digits, contrastive",
    "vit_adversarial": "ViT, digits, adversarial",
}


def cells(config: OverTraining, **more: Any) -> list[Cell]:
    """One for each model, seed and point; `more` goes into each."""
    _check(config)
    return [
        {"subject": asdict(subject), "step": round(point * subject.steps), "probes": config.probes, **more}
        for subject in _subjects(config)
        for point in config.points
    ]


def reached(cell: Cell) -> tuple[Moment, Row]:
    """The moment of a cell, and what a row says of it: loss on the sample, accuracy on test samples."""
    subject = Subject(**cell["subject"])
    moment = at(subject, cell["step"])
    told = {"model": subject.name, "step": moment.step, "seed": subject.seed}
    return moment, told | {"loss": moment.objective.value(), "accuracy": moment.score().accuracy}


def by_place(rows: Sequence[Row]) -> dict[Place, list[Row]]:
    """(model, step) → its rows; without places that have a single seed left, where others failed."""
    out = dict[Place, list[Row]]()
    for row in rows:
        out.setdefault((row["model"], row["step"]), []).append(row)
    return {place: here for place, here in out.items() if len({row["seed"] for row in here}) > 1}


def told(name: str, mean: Mean) -> Row:
    """A mean and its interval, as fields of a row.

    >>> told("share", Mean(0.5, 0.4, 0.6))
    {'share': 0.5, 'share_low': 0.4, 'share_high': 0.6}
    """
    return {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}


def _check(config: OverTraining) -> None:
    if not config.points or any(not 0 <= point <= 1 for point in config.points):
        raise StudyError(f"points: expected fractions of the training, from 0 to 1, got {list(config.points)}.")
    for name in ("repeats", "probes"):
        if getattr(config, name) < 2:
            raise StudyError(f"{name}: expected 2 or more, for an interval, got {getattr(config, name)}.")


def _subjects(config: OverTraining) -> Iterator[Subject]:
    for model in config.models:
        for repeat in range(config.repeats):
            yield Subject(
                model,
                config.width,
                config.heads,
                config.layers,
                config.steps,
                samples=config.samples,
                seed=config.seed + repeat,
            )
