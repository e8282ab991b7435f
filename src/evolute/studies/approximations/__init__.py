"""What optimisers put in the place of the curvature, beside the true blocks of a Transformer and of an MLP.

Theory: a block of H_o is E[Σ_s,s' g_s g_s'ᵀ ⊗ x_s x_s'ᵀ]. KFAC takes the product of means for the mean of a product,
and drops pairs of tokens (expand) or what tells them apart (reduce); Shampoo takes gradients of the data in place of
those of the model; a diagonal drops all pairs of weights, blocks on the diagonal all pairs of groups. None has H_f.
What that costs is a matter of fact: the distance ‖A − B‖/‖B‖, also with the best factor (√(1 − cos²)), the angle to
the true damped step (|B| + δ)⁻¹ g, and how far the loss falls along (|A| + δ)⁻¹ g, in units of what the true step gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies.approximations.measure import measured
from evolute.studies.approximations.table import made
from evolute.studies.approximations.verdict import judged
from evolute.studies.study import Cell, Config, Row, Study, Verdict
from evolute.studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = ("initialisation", "early", "trained")


@dataclass(frozen=True)
class Approximations(Config):
    """Models of `subjects`, an MLP at half the width; stages of training; samples of the loss; size of mini-batches."""

    models: tuple[str, ...] = ("vit_digits", "gpt_addition", "mlp_digits")
    stages: tuple[str, ...] = ("initialisation", "trained")
    width: int = 8
    heads: int = 2
    layers: int = 1
    steps: int = 400
    lr: float = 0.01
    samples: int = 32
    minibatch: int = 8
    draws: int = 64
    damping: float = 0.1
    dampings: tuple[float, ...] = (0.003, 0.03, 0.3, 3.0)
    repeats: int = 5

    def __post_init__(self) -> None:
        unknown = [stage for stage in self.stages if stage not in STAGES]
        if unknown or not self.stages or not self.models:
            known = f"models by name, and stages of {', '.join(STAGES)}"
            raise StudyError(f"expected {known}; got {', '.join(self.models)} and {', '.join(self.stages)}.")
        if self.repeats < 2:
            raise StudyError(f"repeats: an interval takes two or more, got {self.repeats}.")
        if not 1 <= self.minibatch <= self.samples or self.draws < 1:
            asked = f"{self.draws} mini-batches of {self.minibatch}"
            raise StudyError(f"expected mini-batches of 1 to {self.samples} samples, got {asked}.")
        if not self.dampings or min(self.damping, *self.dampings) <= 0:
            raise StudyError(f"dampings: expected positive numbers, got {self.damping} and {self.dampings}.")
        for model in self.models:
            _subject(self, model, self.seed)


class ApproximationsStudy(Study[Approximations]):
    """One cell per model, stage and seed."""

    name = "approximations"
    claim = (
        "Kronecker factors (KFAC, Shampoo) are nearer to a Transformer's curvature than a diagonal; so are their steps."
    )
    config = Approximations

    def cells(self, config: Approximations) -> Sequence[Cell]:
        more = {"minibatch": config.minibatch, "draws": config.draws, "damping": config.damping}
        return [
            {
                "subject": asdict(_subject(config, model, seed)),
                "stage": stage,
                **more,
                "dampings": list(config.dampings),
            }
            for seed in range(config.seed, config.seed + config.repeats)
            for model in config.models
            for stage in config.stages
        ]

    def measure(self, cell: Cell) -> list[Row]:
        return list(measured(cell))

    def table(self, config: Approximations, rows: Sequence[Row]) -> list[Row]:
        return made(rows)

    def verdict(self, config: Approximations, table: Sequence[Row]) -> Verdict:
        return judged(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.approximations.figure import drawn

        return drawn(table, settings)


def _subject(config: Approximations, model: str, seed: int) -> Subject:
    width = max(1, config.width // 2) if model.startswith("mlp") else config.width
    return Subject(
        model,
        width,
        config.heads,
        config.layers,
        config.steps,
        lr=config.lr,
        samples=config.samples,
        seed=seed,
    )


STUDY = ApproximationsStudy()
