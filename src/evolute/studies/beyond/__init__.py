"""What is known of Transformers' Hessians, asked of other models and of other losses.

Of Transformers trained on labels three things are known. Few outliers: H_o = Jᵀ (diag p − p pᵀ) J has nearly the same
directions from every sample of a class, so some eigenvalues stand apart and carry most of ‖H‖². H_f is small after
training: it is a sum over residuals p − y, which go away as labels are fitted. Curvature is in all parts: mixer,
feed-forward, embeddings. None of it is about attention, or about labels, so it should hold of recurrences and of other
losses; but the residuals of a contrastive or an adversarial loss need not go away: there are always other views, other
moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies import over_training
from evolute.studies.beyond.measure import measured
from evolute.studies.beyond.table import summaries, verdict
from evolute.studies.over_training import OverTraining
from evolute.studies.study import Cell, Row, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class BeyondSettings(OverTraining):
    """Models, points of their training, and when outliers are few, H_f is small, and curvature is in all parts."""

    models: tuple[str, ...] = (
        "gpt_english",
        "ssm_english",
        "rwkv_english",
        "vit_digits",
        "vit_contrastive",
        "vit_adversarial",
    )
    points: tuple[float, ...] = (0.0, 0.1, 1.0)
    width: int = 16
    layers: int = 1
    steps: int = 300
    samples: int = 16
    repeats: int = 5
    probes: int = 4
    products: int = 40
    outliers: float = 0.5
    functional: float = 0.5
    concentrated: float = 0.8


class Beyond(Study[BeyondSettings]):
    """One cell per model, repeat and point of its training."""

    name = "beyond"
    claim = (
        "What is known of Transformers' Hessians (few outliers, a small H_f after training, curvature in all parts) "
        "holds of recurrent blocks, and of contrastive and adversarial losses."
    )
    config = BeyondSettings

    def cells(self, config: BeyondSettings) -> Sequence[Cell]:
        _check(config)
        return over_training.cells(config, products=config.products)

    def measure(self, cell: Cell) -> list[Row]:
        return [measured(cell)]

    def table(self, config: BeyondSettings, rows: Sequence[Row]) -> list[Row]:
        """The mean of the repeats at each step of each model, and over that of the Transformer trained on labels."""
        return summaries(rows)

    def verdict(self, config: BeyondSettings, table: Sequence[Row]) -> Verdict:
        return verdict(table, limits(vars(config)))

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.beyond.figure import draw

        return draw(table, settings, limits(settings))


def limits(settings: Mapping[str, Any]) -> dict[str, float]:
    """Finding → where it begins or ends."""
    return {name: settings[name] for name in ("outliers", "functional", "concentrated")}


def _check(config: BeyondSettings) -> None:
    for name, value in limits(vars(config)).items():
        if not 0 < value < 1:
            raise StudyError(f"{name}: expected a share of the whole, between 0 and 1, got {value}.")
    if config.steps < 1 or config.products < 2:
        raise StudyError(
            f"expected at least 1 step of training and 2 products per probe, got {config.steps} and {config.products}."
        )


STUDY = Beyond()
