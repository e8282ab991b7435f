"""What is left of the difference between the blocks of queries, keys and values where attention has no softmax.

Theory (`softmax.rates`): with softmax the blocks of H_o go as σ⁶, σ⁴ and σ² in the size of the input, with the scores
themselves they all go as σ⁶. So they do with any map of the scores that vanishes with them; the sigmoid, which does
not, keeps the powers of softmax. Without softmax and residuals the power grows as 3^D in depth, with either not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies.softmax import blocks, rates
from evolute.studies.softmax.rates import FLAT, KINDS
from evolute.studies.softmax.table import summary
from evolute.studies.softmax.verdict import judge
from evolute.studies.study import Cell, Config, Row, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("rates", "blocks")
TASKS = ("addition", "english")
WIRINGS = ("plain", "residual", "bidirectional")
DEEPEST = {"plain": 3, "residual": 8, "bidirectional": 2}  # beyond, powers of σ leave float64 or drown in rounding


@dataclass(frozen=True)
class Softmax(Config):
    """Maps of the scores; sizes of attention alone (`rates`) and of the GPT (`blocks`)."""

    parts: tuple[str, ...] = PARTS
    kinds: tuple[str, ...] = KINDS
    repeats: int = 5
    depths: tuple[int, ...] = (1, 2, 3)
    sigmas: tuple[float, ...] = (0.01, 0.03)
    features: int = 8
    length: int = 6
    sequences: int = 4
    tasks: tuple[str, ...] = TASKS
    width: int = 32
    heads: int = 2
    layers: int = 1
    steps: int = 400
    samples: int = 8

    def __post_init__(self) -> None:
        _known("parts", self.parts, PARTS)
        _known("kinds", self.kinds, KINDS)
        _known("tasks", self.tasks, TASKS)
        if "softmax" not in self.kinds or len(self.kinds) < 2:
            raise StudyError(f"kinds: expected softmax and others to compare with it, got {', '.join(self.kinds)}.")
        if self.repeats < 2:
            raise StudyError(f"repeats: expected at least 2, for an interval, got {self.repeats}.")
        if len(set(self.sigmas)) < 2 or min(self.sigmas) < 1e-3 or max(self.sigmas) > 0.1:
            raise StudyError(f"sigmas: expected two or more from 0.001 to 0.1, got {self.sigmas}.")
        if not self.depths or min(self.depths) < 1:
            raise StudyError(f"depths: expected numbers of layers, at least 1, got {self.depths}.")
        for name in ("features", "length", "sequences", "width", "heads", "layers", "steps", "samples"):
            if getattr(self, name) < 1:
                raise StudyError(f"{name}: expected at least 1, got {getattr(self, name)}.")


def _known(name: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [value for value in values if value not in allowed]
    if unknown or not values:
        raise StudyError(f"{name}: expected some of {', '.join(allowed)}, got {', '.join(unknown) or 'none'}.")


class SoftmaxStudy(Study[Softmax]):
    """One cell per kind, wiring, depth and repeat of attention alone; one per task, kind and repeat of the GPT."""

    name = "softmax"
    claim = "Without softmax, the blocks of queries, keys and values are of one size."
    config = Softmax

    def cells(self, config: Softmax) -> Sequence[Cell]:
        make = {"rates": _rates, "blocks": _blocks}
        return [cell for part in PARTS if part in config.parts for cell in make[part](config)]

    def measure(self, cell: Cell) -> list[Row]:
        return {"rates": rates.measure, "blocks": blocks.measure}[cell["part"]](cell)

    def table(self, config: Softmax, rows: Sequence[Row]) -> list[Row]:
        return summary(rows)

    def verdict(self, config: Softmax, table: Sequence[Row]) -> Verdict:
        return judge(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.softmax.figure import draw

        return draw(table)


def _rates(config: Softmax) -> list[Cell]:
    """All tokens at once only where some weight of attention does not vanish: there the two wirings may differ."""
    sizes = {"sigmas": list(config.sigmas), "width": config.features, "length": config.length}
    return [
        {"part": "rates", "kind": kind, "wiring": wiring, "depth": depth, "seed": config.seed + i, **sizes}
        | {"sequences": config.sequences}
        for kind in config.kinds
        for wiring in WIRINGS
        if wiring != "bidirectional" or kind in FLAT
        for depth in config.depths
        if depth <= DEEPEST[wiring]
        for i in range(config.repeats)
    ]


def _blocks(config: Softmax) -> list[Cell]:
    values = asdict(config)
    sizes = {name: values[name] for name in ("width", "heads", "layers", "steps", "samples")}
    return [
        {"part": "blocks", "task": task, "kind": kind, "seed": config.seed + i, **sizes}
        for task in config.tasks
        for kind in config.kinds
        for i in range(config.repeats)
    ]


STUDY = SoftmaxStudy()
