"""A norm divides by the size of a row, so curvature comes out of it as one over the variance; does that set the depth?

Theory, for z = c/s, s = √(variance + ε): J = (C − zzᵀ/d)/s, and a curvature G with gradient g goes back as
J G J + Σ_k g_k ∂²z_k, both of them ~ 1/s² (the first exactly). In a network it is then argued that small variances
compound over depth, and that the place of the norm (none; after the addition, "post"; before the sublayer, "pre")
decides at which depth the Hessian is too sharp to train. That is measured here: the law on single rows, on whole blocks
and on the rows of a trained model; sharpness and curvature layer by layer before training; and trainings, which have
learnt nothing ("ill-conditioned" here) if at no rate of a ladder the loss gets a tenth below that of a constant
prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evolute.errors import StudyError
from evolute.studies.layernorm.depth import initial, trainings
from evolute.studies.layernorm.rows import natural_rows, one_block, one_row
from evolute.studies.layernorm.table import made
from evolute.studies.layernorm.verdict import judged
from evolute.studies.study import Cell, Config, Row, Study, Verdict
from evolute.zoo.training import OPTIMIZERS

if TYPE_CHECKING:
    from typing import Any

    from matplotlib.figure import Figure

NORMS = ("none", "post", "pre", "rms")


@dataclass(frozen=True)
class LayerNorm(Config):
    """Norms, depths, gains of the first weights, and rates of the trainings; sizes σ of single rows."""

    norms: tuple[str, ...] = NORMS
    depths: tuple[int, ...] = (1, 3, 6, 12)
    gains: tuple[float, ...] = (1.0, 1.732)
    rates: tuple[float, ...] = (0.0005, 0.002, 0.008, 0.03)
    sigmas: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
    optimizer: str = "adam"
    steps: int = 50
    batch: int = 32
    width: int = 16
    heads: int = 2
    samples: int = 16
    products: int = 24
    repeats: int = 5
    eps: float = 1e-5

    def __post_init__(self) -> None:
        unknown = [norm for norm in self.norms if norm not in NORMS]
        if unknown or not self.norms:
            raise StudyError(f"norms: expected some of {', '.join(NORMS)}, got {', '.join(unknown) or 'none of them'}.")
        counts = {"depths": self.depths, "steps": (self.steps,), "products": (self.products - 1,)}
        sizes = {"gains": self.gains, "rates": self.rates, "sigmas": self.sigmas, "eps": (self.eps,)}
        for name, values in {**counts, **sizes}.items():
            if not values or min(values) <= 0:
                raise StudyError(f"{name}: expected positive numbers (products: two or more), got {values}.")
        if self.repeats < 2:
            raise StudyError(f"repeats: an interval takes two or more, got {self.repeats}.")
        if self.optimizer not in OPTIMIZERS:
            raise StudyError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}.")


class LayerNormStudy(Study[LayerNorm]):
    """Cells are one row, one block or one trained model with one norm; or one norm, depth and gain of the weights."""

    name = "layernorm"
    claim = "A norm passes curvature on as one over its row's variance, and its place decides how deep a model trains."
    config = LayerNorm

    def cells(self, config: LayerNorm) -> Sequence[Cell]:
        seeds = range(config.seed, config.seed + config.repeats)
        return [cell for make in (_rows, _depths) for seed in seeds for cell in make(config, seed)]

    def measure(self, cell: Cell) -> list[Row]:
        return list(MEASURES[cell["part"]](cell))

    def table(self, config: LayerNorm, rows: Sequence[Row]) -> list[Row]:
        return made(rows, config.eps)

    def verdict(self, config: LayerNorm, table: Sequence[Row]) -> Verdict:
        return judged(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.layernorm.figure import drawn

        return drawn(table, settings)


BLOCK = {"sigmas": [1e-3, 1e-2, 1e-1], "eps": 1e-12}  # far above √ε and far below what a block adds to its tokens
TRAINED_STEPS = 100  # of the model whose rows are looked at
MEASURES: dict[str, Callable[[Cell], Iterable[Row]]] = {
    "row": one_row,
    "block": one_block,
    "trained": natural_rows,
    "initial": initial,
    "training": trainings,
}


def _rows(config: LayerNorm, seed: int) -> list[Cell]:
    shape = {"seed": seed, "width": config.width, "heads": config.heads}
    kinds = [kind for kind, norms in {"layer": ("post", "pre"), "rms": ("rms",)}.items() if {*norms} & {*config.norms}]
    normed = [norm for norm in config.norms if norm != "none"]
    trained = {"steps": TRAINED_STEPS, "samples": config.samples}
    return [
        *({"part": "row", "norm": kind, **shape, "sigmas": list(config.sigmas), "eps": config.eps} for kind in kinds),
        *({"part": "block", "norm": norm, **shape, **BLOCK} for norm in config.norms),
        *({"part": "trained", "norm": norm, **shape, **trained} for norm in normed),
    ]


def _depths(config: LayerNorm, seed: int) -> list[Cell]:
    shape = {"seed": seed, "width": config.width, "heads": config.heads}
    before = {"samples": config.samples, "products": config.products}
    training = {
        "rates": list(config.rates),
        "optimizer": config.optimizer,
        "steps": config.steps,
        "batch": config.batch,
    }
    return [
        {"part": part, "gain": gain, "norm": norm, "depth": depth, **shape, **more}
        for part, more in {"initial": before, "training": training}.items()
        for gain in config.gains
        for norm in config.norms
        for depth in config.depths
    ]


STUDY = LayerNormStudy()
