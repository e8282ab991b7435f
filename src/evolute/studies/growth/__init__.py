"""How the blocks of H, H_o and H_f grow with the size σ of the input.

Theory, for softmax attention at small σ, in every layer: ‖H_o‖ goes as σ⁶ for pairs of Q and K, σ⁴ for one of them
with V or O, σ² for V and O; ‖H_f‖ as σ⁵ for Q with Q and K with K, σ³ for Q with K and for either with V or O, σ for V
with O. Without softmax and residuals ‖H_o‖ goes as σ^(2·3^D) in depth D; a linear MLP stays at 2 whatever its depth; a
norm before attention takes the growth away. The exponents are those of `growth.rates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies.growth.fits import RANGES, against_theory, check_repeats, check_sizes, fitted, series_of, split
from evolute.studies.growth.models import MODELS, block_norms_by_layer
from evolute.studies.growth.rates import theory
from evolute.studies.means import Mean
from evolute.studies.study import Cell, Config, Row, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEEPEST = {"linear": 3}  # beyond, σ^(2·3^D) leaves float64


@dataclass(frozen=True)
class Growth(Config):
    """Sizes σ of the input, depths and models; attention without softmax takes depths up to 3 of those given."""

    models: tuple[str, ...] = ("softmax", "linear", "pre_norm", "mlp")
    depths: tuple[int, ...] = (1, 2, 3, 4, 5)
    sigmas: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    width: int = 128
    sequences: int = 4
    repeats: int = 4
    probes: int = 1

    def __post_init__(self) -> None:
        unknown = [model for model in self.models if model not in MODELS]
        if unknown or not self.models:
            raise StudyError(f"models: expected some of {', '.join(MODELS)}, got {', '.join(unknown) or 'none'}.")
        for name in ("width", "sequences", "probes"):
            if getattr(self, name) < 1:
                raise StudyError(f"{name}: expected at least 1, got {getattr(self, name)}.")
        check_repeats(self.repeats)
        if not self.depths or min(self.depths) < 1:
            raise StudyError(f"depths: expected numbers of layers, at least 1, got {self.depths}.")
        if self.models == ("linear",) and min(self.depths) > DEEPEST["linear"]:
            raise StudyError(
                f"depths: attention without softmax takes up to {DEEPEST['linear']}, beyond which σ^(2·3^D) leaves "
                f"float64; got {self.depths}."
            )
        check_sizes("sigmas", self.sigmas)


class GrowthStudy(Study[Growth]):
    """One cell per model, depth, size and repeat."""

    name = "growth"
    claim = (
        "The blocks of the Hessian grow with small inputs at rates that theory knows: "
        "different ones with softmax attention, one for all without it or behind a norm."
    )
    config = Growth

    def cells(self, config: Growth) -> Sequence[Cell]:
        fixed = {"width": config.width, "sequences": config.sequences, "probes": config.probes}
        return [
            {"model": model, "depth": depth, "sigma": sigma, "seed": config.seed + repeat, **fixed}
            for model in config.models
            for depth in config.depths
            if depth <= DEEPEST.get(model, depth)
            for repeat in range(config.repeats)
            for sigma in config.sigmas
        ]

    def measure(self, cell: Cell) -> list[Row]:
        where = {key: cell[key] for key in ("model", "depth", "sigma", "seed")}
        return [
            {**where, "layer": layer, "block": block, "part": part, "norm": norm.value}
            for layer, norms in enumerate(block_norms_by_layer(cell))
            for (block, part), norm in norms.items()
        ]

    def table(self, config: Growth, rows: Sequence[Row]) -> list[Row]:
        return [
            _row(key, name, fit)
            for key, series in series_of(rows, KEYS, "sigma").items()
            for name in RANGES
            if (fit := fitted(name, series)) is not None
        ]

    def verdict(self, config: Growth, table: Sequence[Row]) -> Verdict:
        return judged(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.growth.figure import drawn

        return drawn(table)


# ---- what is made of the norms

KEYS = ("model", "depth", "layer", "block", "part")


def _row(key: tuple[Any, ...], name: str, fit: Mean) -> Row:
    model, depth, layer, block, part = key
    return {
        **dict(zip(KEYS, key, strict=True)),
        "range": name,
        "exponent": fit.value,
        "ci_low": fit.low,
        "ci_high": fit.high,
        "theory": theory(model, depth, layer, block, part, name),
    }


def judged(table: Sequence[Row]) -> Verdict:
    """How many exponents are those of theory, how far the others are, and how much blocks of one layer differ."""
    rows = [row for row in table if row["part"] == "H_o" and row["range"] == "small" and row["model"] != "mlp"]
    said = [f"{model} {spread(each):.2f}" for model, each in split(rows, "model")]
    more = f"between the blocks of a layer, exponents of H_o at small σ differ by: {', '.join(said)}" if said else ""
    return against_theory(table, "model", more)


def spread(rows: Sequence[Row]) -> float:
    """The widest difference over the blocks of a layer, averaged over layers."""
    layers = dict[tuple[int, int], list[float]]()
    for row in rows:
        layers.setdefault((row["depth"], row["layer"]), []).append(row["exponent"])
    return sum(max(each) - min(each) for each in layers.values()) / len(layers)


STUDY = GrowthStudy()
