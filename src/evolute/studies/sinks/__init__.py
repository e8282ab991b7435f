"""What an attention sink, a number b added to every score of the first token, does to the spectrum of the Hessian.

Theory, for scalar attention f = w_V A x: with w_Q·w_K = s the spectrum is ±ℓ_s, d_K − 1 times each, and three outliers.
As b grows, all attention goes to x₁, and the variance of each row of A goes as e⁻ᵇ; so does the bulk |ℓ_s|. The largest
eigenvalue goes to 2x₁²: up or down, as x₁² is above or below the mean square of what was attended to before. |ℓ_s| is
‖∂ℓ/∂w_Q‖/‖w_K‖, so at a minimum there is no bulk. At fixed s the product of the outliers is fixed, too, while their
largest goes as ‖w‖² and their smallest as ‖w‖⁻²: the condition number goes as ‖w‖⁴.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies.sinks import checkpoint, gpt, scalar
from evolute.studies.sinks.table import summary
from evolute.studies.sinks.verdict import judge
from evolute.studies.study import Cell, Config, Row, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("scalar", "norms", "gpt", "checkpoint")
FIRST = 1.0  # |x₁| of weights that are trained


@dataclass(frozen=True)
class Sinks(Config):
    """Sizes of all parts; `model` is the folder of a Hugging Face checkpoint, measured beside whatever `parts` say."""

    parts: tuple[str, ...] = ("scalar", "norms", "gpt")
    sinks: tuple[float, ...] = (0.0, 2.0, 4.0, 8.0, 12.0)
    draws: int = 16
    firsts: tuple[float, ...] = (0.1, 1.0, 3.0)
    d_K: int = 8
    L: int = 16
    sequences: int = 16
    iterations: int = 200
    norms: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
    repeats: int = 5
    width: int = 16
    layers: int = 2
    steps: int = 300
    samples: int = 16
    probes: int = 4
    lanczos: int = 30
    model: str = ""
    length: int = 64
    tokens: str = "tokenizer"
    precision: str = "float64"

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not (self.parts or self.model):
            raise StudyError(f"parts: expected some of {', '.join(PARTS)}, got {', '.join(unknown) or 'none'}.")
        if "checkpoint" in self.parts and not self.model:
            raise StudyError("parts: 'checkpoint' is the one whose folder is given by --set model=DIR; there is none.")
        if len(set(self.sinks)) < 2 or min(self.sinks) != 0.0:
            raise StudyError(f"sinks: expected 0, to compare with, and numbers above it, got {self.sinks}.")
        if len(set(self.norms)) < 2 or min(self.norms) < 1.0:
            raise StudyError(f"norms: expected two or more of at least 1, got {self.norms}.")
        if self.d_K < 3 or self.L < 2:
            raise StudyError(f"expected d_K of at least 3 and L of at least 2, got {self.d_K} and {self.L}.")
        for name in ("draws", "repeats"):
            if getattr(self, name) < 2:
                raise StudyError(f"{name}: expected at least 2, for an interval, got {getattr(self, name)}.")
        for name in ("sequences", "iterations", "width", "layers", "steps", "samples", "probes", "lanczos", "length"):
            if getattr(self, name) < 1:
                raise StudyError(f"{name}: expected at least 1, got {getattr(self, name)}.")


class SinksStudy(Study[Sinks]):
    """One cell per scalar task; one per sink, seed and point of the training of a GPT; one per sink of a checkpoint."""

    name = "sinks"
    claim = "An attention sink shrinks the bulk of the spectrum and stretches its outliers."
    config = Sinks

    def cells(self, config: Sinks) -> Sequence[Cell]:
        make = {"scalar": _scalar, "norms": _norms, "gpt": _gpt, "checkpoint": _checkpoint}
        parts = [part for part in PARTS if part in config.parts or (part == "checkpoint" and config.model)]
        return [cell for part in parts for cell in make[part](config)]

    def measure(self, cell: Cell) -> list[Row]:
        measures = {
            "scalar": scalar.measure,
            "norms": scalar.measure_norms,
            "gpt": gpt.measure,
            "checkpoint": checkpoint.measure,
        }
        return measures[cell["kind"]](cell)

    def table(self, config: Sinks, rows: Sequence[Row]) -> list[Row]:
        return summary(rows)

    def verdict(self, config: Sinks, table: Sequence[Row]) -> Verdict:
        return judge(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.sinks.figure import draw

        return draw(table)


# ---- the cells of each part


def _picked(config: Sinks, *names: str) -> dict[str, Any]:
    values = asdict(config)
    return {name: list(values[name]) if isinstance(values[name], tuple) else values[name] for name in names}


def _scalar(config: Sinks) -> list[Cell]:
    sizes = _picked(config, "sinks", "d_K", "L", "sequences", "iterations")
    points = [("random", first) for first in config.firsts] + [("imposed", FIRST), ("trained", FIRST)]
    return [
        {"kind": "scalar", "point": point, "first": first, "seed": config.seed + i, **sizes}
        for point, first in points
        for i in range(config.draws)
    ]


def _norms(config: Sinks) -> list[Cell]:
    sizes = _picked(config, "norms", "d_K", "L", "sequences")
    return [{"kind": "norms", "first": FIRST, "seed": config.seed + i, **sizes} for i in range(config.draws)]


def _gpt(config: Sinks) -> list[Cell]:
    sizes = _picked(config, "width", "layers", "steps", "samples", "probes", "lanczos")
    return [
        {"kind": "gpt", "point": point, "sink": sink, "seed": config.seed + i, **sizes}
        for i in range(config.repeats)
        for point in ("untrained", "imposed", "trained")
        for sink in config.sinks
        if point != "trained" or sink  # without a sink, it is the same as imposed
    ]


def _checkpoint(config: Sinks) -> list[Cell]:
    sizes = _picked(config, "model", "samples", "length", "tokens", "precision", "probes", "lanczos")
    return [
        {"kind": "checkpoint", "sink": sink, "seed": config.seed + i, **sizes}
        for i in range(config.repeats)
        for sink in config.sinks
    ]


STUDY = SinksStudy()
