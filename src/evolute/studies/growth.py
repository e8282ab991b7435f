"""How the blocks of H, H_o and H_f grow with the size σ of the input.

Theory, for softmax attention at small σ, in every layer: ‖H_o‖ goes as σ⁶ for pairs of Q and K, σ⁴ for one of them
with V or O, σ² for V and O; ‖H_f‖ as σ⁵ for Q with Q and K with K, σ³ for Q with K and for either with V or O, σ for V
with O. Without softmax and residuals ‖H_o‖ goes as σ^(2·3^D) in depth D; a linear MLP stays at 2 whatever its depth; a
norm before attention takes the growth away. The exponents are those of `growth_rates`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies.fits import exponent
from evolute.studies.growth_models import MODELS, block_norms_by_layer
from evolute.studies.growth_rates import theory
from evolute.studies.means import Mean
from evolute.studies.study import Cell, Config, Row, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANGES = {"small": (0.0, 0.1), "mid": (0.1, 1.0), "large": (1.0, float("inf"))}  # of σ, both ends in
DEEPEST = {"linear": 3}  # beyond, σ^(2·3^D) leaves float64
NEAR = 0.3  # how far an exponent may be from the theory, beside its own uncertainty
WIDE = 0.5  # half an interval that says nothing


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
        if self.repeats < 2:
            raise StudyError(f"repeats: expected at least 2, for an interval, got {self.repeats}.")
        if not self.depths or min(self.depths) < 1:
            raise StudyError(f"depths: expected numbers of layers, at least 1, got {self.depths}.")
        if self.models == ("linear",) and min(self.depths) > DEEPEST["linear"]:
            raise StudyError(
                f"depths: attention without softmax takes up to {DEEPEST['linear']}, beyond which σ^(2·3^D) leaves "
                f"float64; got {self.depths}."
            )
        if not any(len(sizes(self.sigmas, name)) > 1 for name in RANGES) or min(self.sigmas) < 1e-3:
            raise StudyError(
                "sigmas: expected sizes of 0.001 or more, two of them in one of the ranges up to 0.1, from 0.1 to 1, "
                f"and from 1; got {self.sigmas}."
            )


def sizes(sigmas: Iterable[float], name: str) -> list[float]:
    """Those of a range, in order."""
    low, high = RANGES[name]
    return sorted({sigma for sigma in sigmas if low <= sigma <= high})


class GrowthStudy(Study[Growth]):
    """One cell per model, depth, size and repeat."""

    name = "growth"
    claim = "The blocks of the Hessian grow with the input at different rates, and softmax attention is why."
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
            for key, series in _series(rows).items()
            for name in RANGES
            if (fit := fitted(name, series)) is not None
        ]

    def verdict(self, config: Growth, table: Sequence[Row]) -> Verdict:
        return judged(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.growth_figure import drawn

        return drawn(table)


# ---- what is made of the norms

Key = tuple[str, int, int, str, str]
Series = dict[int, dict[float, float]]  # repeat → σ → norm


def _series(rows: Iterable[Row]) -> dict[Key, Series]:
    """(model, depth, layer, block, part) → its series."""
    out = dict[Key, Series]()
    for row in rows:
        key = (row["model"], row["depth"], row["layer"], row["block"], row["part"])
        out.setdefault(key, {}).setdefault(row["seed"], {})[row["sigma"]] = row["norm"]
    return out


def fitted(name: str, series: Series) -> Mean | None:
    """The exponent in a range; None without two sizes in it, or without two repeats that are whole and not zero.

    >>> fitted("small", {0: {0.01: 1.0, 0.1: 100.0}, 1: {0.01: 2.0, 0.1: 200.0}, 2: {0.01: 5.0}})
    Mean(value=2.0, low=2.0, high=2.0)
    """
    sigmas = sizes({sigma for norms in series.values() for sigma in norms}, name)
    whole = [[norms[sigma] for sigma in sigmas] for norms in series.values() if norms.keys() >= set(sigmas)]
    alive = [norms for norms in whole if min(norms, default=0.0) > 0]
    return exponent(sigmas, alive) if len(sigmas) > 1 and len(alive) > 1 else None


def _row(key: Key, name: str, fit: Mean) -> Row:
    model, depth, layer, block, part = key
    return {
        "model": model,
        "depth": depth,
        "layer": layer,
        "block": block,
        "part": part,
        "range": name,
        "exponent": fit.value,
        "ci_low": fit.low,
        "ci_high": fit.high,
        "theory": theory(*key, name),
    }


# ---- what it says


def agrees(row: Row) -> bool | None:
    """Whether the theory is within NEAR of the interval; None if the interval is too wide to say."""
    if not row["ci_low"] - NEAR <= row["theory"] <= row["ci_high"] + NEAR:
        return False
    return True if (row["ci_high"] - row["ci_low"]) / 2 <= WIDE else None


def judged(table: Sequence[Row]) -> Verdict:
    """How many exponents are those of theory, how far the others are, and how much blocks of one layer differ."""
    told = [row for row in table if row["theory"] is not None]
    answers = [agrees(row) for row in told]
    right, wrong = answers.count(True), answers.count(False)
    if not right and not wrong:
        return Verdict("undecided", "no exponent for which theory has a number was measured well enough.")
    answer = "holds" if not wrong else "holds in part" if wrong < right else "does not hold here"
    parts = [_share(right, len(told), answers.count(None)), _distances(told), _spreads(table)]
    return Verdict(answer, "; ".join(part for part in parts if part) + ".")


def _share(right: int, told: int, unclear: int) -> str:
    rest = f", {unclear} have intervals wider than ±{WIDE}" if unclear else ""
    return f"{right} of {told} exponents agree with theory (within {NEAR} and their intervals){rest}"


def _distances(told: Sequence[Row]) -> str:
    """The farthest of each model."""
    return "farthest from it: " + ", ".join(
        f"{model} {max(abs(row['exponent'] - row['theory']) for row in rows):.2f}" for model, rows in _by_model(told)
    )


def _spreads(table: Sequence[Row]) -> str:
    """How much the exponents of H_o at small σ differ between the blocks of a layer, on average over layers."""
    rows = [row for row in table if row["part"] == "H_o" and row["range"] == "small" and row["model"] != "mlp"]
    said = [f"{model} {spread(each):.2f}" for model, each in _by_model(rows)]
    return f"between the blocks of a layer, exponents of H_o at small σ differ by: {', '.join(said)}" if said else ""


def spread(rows: Sequence[Row]) -> float:
    """The widest difference over the blocks of a layer, averaged over layers."""
    layers = dict[tuple[int, int], list[float]]()
    for row in rows:
        layers.setdefault((row["depth"], row["layer"]), []).append(row["exponent"])
    return sum(max(each) - min(each) for each in layers.values()) / len(layers)


def _by_model(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [
        (model, [row for row in rows if row["model"] == model]) for model in dict.fromkeys(r["model"] for r in rows)
    ]


STUDY = GrowthStudy()
