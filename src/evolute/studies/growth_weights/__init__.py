"""How the blocks of H, H_o and H_f grow with the size of each weight of attention.

Theory, for softmax attention Z = A X W_V W_O in a block with a residual: at small scores, ∂Z/∂W_Q is of degree one in
each of W_K, W_V and W_O, ∂Z/∂W_K in each of W_Q, W_V and W_O, ∂Z/∂W_V in W_O and ∂Z/∂W_O in W_V. H_o is a product of
two of them: W_K² W_V² for Q with Q, W_K W_Q W_V² for Q with K, W_K W_V for Q with V, none of the three for V with V,
each times W_O². H_f is ∂ℓ times W_K² W_V for Q with Q, W_V + W_K W_Q W_V for Q with K, W_K for Q with V, each times
W_O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evolute.errors import StudyError
from evolute.studies.blocks import CLOSED, exact_norms
from evolute.studies.growth.fits import RANGES, against_theory, check_repeats, check_sizes, fitted, series_of
from evolute.studies.growth.models import LETTERS, closed_gpt, gpt
from evolute.studies.growth.rates import at_small, ends
from evolute.studies.study import Cell, Config, Row, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST: Mapping[str, frozenset[str]] = {  # the weights that ∂Z is of degree one in
    "Q": frozenset("KVO"),
    "K": frozenset("QVO"),
    "V": frozenset("O"),
    "O": frozenset("V"),
}
SECOND: Mapping[str, str] = {  # those that ∂²Z is, one letter per degree, at small scores; it is zero elsewhere
    "Q": "KKVO",
    "K": "QQVO",
    "Q,K": "VO",
    "Q,V": "KO",
    "Q,O": "KV",
    "K,V": "QO",
    "K,O": "QV",
    "V,O": "",
}


def theory(block: str, part: str, scaled: str, range_: str) -> float | None:
    """The exponent of a weight, where it is small; None elsewhere, and where the block is zero.

    >>> theory("Q,K", "H_o", "V", "small"), theory("Q,K", "H_f", "V", "small"), theory("Q,K", "H_f", "K", "small")
    (2.0, 1.0, 0.0)
    """
    if range_ != "small":
        return None
    outer = sum(scaled in FIRST[letter] for letter in ends(block))
    functional = float(SECOND[block].count(scaled)) if block in SECOND else None
    return at_small(float(outer), functional).get(part)


@dataclass(frozen=True)
class GrowthWeights(Config):
    """Factors of each weight, beside what it is initialised with; σ is the size of the embeddings."""

    weights: tuple[str, ...] = LETTERS
    scales: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    sigma: float = 1.0
    width: int = 64
    sequences: int = 4
    repeats: int = 4

    def __post_init__(self) -> None:
        unknown = [weight for weight in self.weights if weight not in LETTERS]
        if unknown or not self.weights:
            raise StudyError(f"weights: expected some of {', '.join(LETTERS)}, got {', '.join(unknown) or 'none'}.")
        for name in ("width", "sequences", "sigma"):
            if getattr(self, name) <= 0:
                raise StudyError(f"{name}: expected a positive number, got {getattr(self, name)}.")
        check_repeats(self.repeats)
        check_sizes("scales", self.scales)


class GrowthWeightsStudy(Study[GrowthWeights]):
    """One cell per weight, scale and repeat."""

    name = "growth_weights"
    claim = "Each block of the Hessian grows with each small weight of attention at a rate of its own."
    config = GrowthWeights

    def cells(self, config: GrowthWeights) -> Sequence[Cell]:
        fixed = {"sigma": config.sigma, "width": config.width, "sequences": config.sequences, "depth": 1}
        return [
            {"scaled": weight, "scale": scale, "seed": config.seed + repeat, **fixed}
            for weight in config.weights
            for repeat in range(config.repeats)
            for scale in config.scales
        ]

    def measure(self, cell: Cell) -> list[Row]:
        model, samples = gpt(cell, "none")
        with torch.no_grad():
            getattr(model.layers[0].attn, CLOSED[cell["scaled"]]).weight.mul_(cell["scale"])
        norms = exact_norms(closed_gpt(model, samples), {letter: CLOSED[letter] for letter in LETTERS})
        where = {key: cell[key] for key in ("scaled", "scale", "seed")}
        return [{**where, "block": block, "part": part, "norm": norm.value} for (block, part), norm in norms.items()]

    def table(self, config: GrowthWeights, rows: Sequence[Row]) -> list[Row]:
        return [
            {
                **dict(zip(KEYS, key, strict=True)),
                "range": name,
                "exponent": fit.value,
                "ci_low": fit.low,
                "ci_high": fit.high,
                "theory": theory(block, part, scaled, name),
            }
            for key, series in series_of(rows, KEYS, "scale").items()
            for scaled, block, part in [key]
            for name in RANGES
            if (fit := fitted(name, series)) is not None
        ]

    def verdict(self, config: GrowthWeights, table: Sequence[Row]) -> Verdict:
        return against_theory(table, "part")

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.growth_weights.figure import drawn

        return drawn(table)


KEYS = ("scaled", "block", "part")
STUDY = GrowthWeightsStudy()
