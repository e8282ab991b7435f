"""How the blocks of H, H_o and H_f grow with the size σ of the input.

Theory, for one layer of softmax attention at small inputs: ‖H_o‖ goes as σ⁶ for pairs of Q and K, σ⁴ for V with one of
them, σ² for V with V; ‖H_f‖ goes as σ⁵ for Q with Q and K with K, σ³ for Q with K and for V with either, and is zero
for V with V. Without softmax and residuals ‖H_o‖ goes as σ^(2·3^D) in depth D; a linear MLP stays at 2 whatever its
depth; a norm before attention takes the growth away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evolute.engine.loss import Loss
from evolute.engine.objective import Objective
from evolute.engine.operators import GaussNewton, Hessian
from evolute.studies.figures import COLOURS, dot, heading, panels
from evolute.studies.fits import Exponent, exponent
from evolute.studies.study import Cell, Config, Row, Study, Verdict
from evolute.zoo import GPT, MLP, AttentionOnly, addition, cross_entropy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = ("H", "H_o", "H_f")
RANGES = {"small": (0.0, 0.1), "mid": (0.1, 1.0), "large": (1.0, float("inf"))}  # of σ, both ends in
SMALL_SOFTMAX = {
    "H_o": {"Q": 6.0, "K": 6.0, "V": 2.0, "Q,K": 6.0, "Q,V": 4.0, "K,V": 4.0},
    "H_f": {"Q": 5.0, "K": 5.0, "Q,K": 3.0, "Q,V": 3.0, "K,V": 3.0},
}
NEAR = 0.3  # how far an exponent may be from the theory, beside its own uncertainty


@dataclass(frozen=True)
class Growth(Config):
    """Sizes σ of the input, depths and models."""

    models: tuple[str, ...] = ("softmax", "linear", "pre_norm", "mlp")
    depths: tuple[int, ...] = (1, 2, 3)
    sigmas: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    width: int = 64
    sequences: int = 8
    repeats: int = 3
    probes: int = 1


class GrowthStudy(Study[Growth]):
    """One cell per model, depth, size and repeat."""

    name = "growth"
    claim = "The blocks of the Hessian grow with the input at different rates, and softmax attention is why."
    config = Growth

    def cells(self, config: Growth) -> Sequence[Cell]:
        sizes = {"width": config.width, "sequences": config.sequences, "probes": config.probes}
        return [
            {"model": model, "depth": depth, "sigma": sigma, "seed": config.seed + repeat, **sizes}
            for model in config.models
            for depth in config.depths
            for repeat in range(config.repeats)
            for sigma in config.sigmas
        ]

    def measure(self, cell: Cell) -> list[Row]:
        objective, layers = _subject(cell)
        norms = _norms(objective, layers, cell["probes"], cell["seed"])
        keys = ("model", "depth", "sigma", "seed")
        return [{**{key: cell[key] for key in keys}, **row} for row in norms]

    def table(self, config: Growth, rows: Sequence[Row]) -> list[Row]:
        out = list[Row]()
        for key, series in _series(rows).items():
            for name, (low, high) in RANGES.items():
                sigmas = [sigma for sigma in sorted(series) if low <= sigma <= high]
                fit = _fitted(sigmas, series)
                if fit is not None:
                    out.append(_row(key, name, fit))
        return out

    def verdict(self, config: Growth, table: Sequence[Row]) -> Verdict:
        told = [row for row in table if row["theory"] is not None]
        if not told:
            return Verdict("undecided", "no range of σ below 0.1 with a theoretical rate was measured.")
        off = [row for row in told if not _agrees(row)]
        share = (
            f"{len(told) - len(off)} of {len(told)} exponents agree with the theory (within {NEAR} and their intervals)"
        )
        if not off:
            return Verdict("holds", f"{share}.")
        worst = max(off, key=lambda row: abs(row["exponent"] - row["theory"]))
        example = (
            f"the farthest is {worst['part']}({worst['block']}) of {worst['model']}, depth {worst['depth']}: "
            f"{worst['exponent']:.2f} instead of {worst['theory']:g}"
        )
        answer = "holds in part" if len(off) < len(told) / 2 else "does not hold here"
        return Verdict(answer, f"{share}; {example}.")

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        rows = [row for row in table if row["range"] == "small" and row["layer"] == 0 and row["part"] != "H"]
        return _dots(rows, "Exponents of the growth at small σ, first layer; rings are the theory")


# ---- what is measured


def _subject(cell: Cell) -> tuple[Objective, list[dict[str, str]]]:
    """A model with inputs of size σ in float64, and for each layer: letter → name of the group."""
    make = {"softmax": _gpt, "pre_norm": _gpt, "linear": _linear_attention, "mlp": _mlp}
    return make[cell["model"]](cell)


def _gpt(cell: Cell) -> tuple[Objective, list[dict[str, str]]]:
    """Digit addition; embeddings drawn with standard deviation σ."""
    norm = "pre" if cell["model"] == "pre_norm" else "none"
    data = addition(train=cell["sequences"], test=1, seed=cell["seed"])
    model = GPT(
        12, data.length, cell["width"], 1, cell["depth"], norm=norm, activation="relu", seed=cell["seed"]
    ).double()
    with torch.no_grad():
        model.position.weight.zero_()
        model.embed.weight.copy_(_normal(cell, *model.embed.weight.shape) * cell["sigma"])
    batches = [(data.train.x, data.train.y)]
    return Objective(model, batches, Loss(*cross_entropy)), _attention_groups(cell["depth"], "QKVO")


def _linear_attention(cell: Cell) -> tuple[Objective, list[dict[str, str]]]:
    """No softmax, no residual, MSE on random sequences of size σ."""
    length = 17
    model = AttentionOnly(cell["width"], 1, cell["depth"], attention="linear", seed=cell["seed"]).double()
    x = _normal(cell, cell["sequences"], length, cell["width"]) * cell["sigma"]
    y = _normal(cell, cell["sequences"], length, cell["width"], more=1)
    return Objective(model, [(x, y)], nn.MSELoss()), _attention_groups(cell["depth"], "QKV")


def _mlp(cell: Cell) -> tuple[Objective, list[dict[str, str]]]:
    """A linear MLP, MSE."""
    width = cell["width"]
    model = MLP([width] * (cell["depth"] + 2), "identity", bias=False, seed=cell["seed"]).double()
    x = _normal(cell, cell["sequences"] * 17, width) * cell["sigma"]
    y = _normal(cell, cell["sequences"] * 17, width, more=1)
    return Objective(model, [(x, y)], nn.MSELoss()), [{"W": f"layers.{i}"} for i in range(cell["depth"] + 1)]


def _normal(cell: Cell, *shape: int, more: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * cell["seed"] + more)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _attention_groups(depth: int, letters: str) -> list[dict[str, str]]:
    return [{letter: f"layers.{i}.attn.{letter.lower()}" for letter in letters} for i in range(depth)]


def _norms(objective: Objective, layers: list[dict[str, str]], probes: int, seed: int) -> Iterator[Row]:
    """‖block‖_F of every pair of groups of a layer, from probes on one of them: E ‖H_ij v‖² = ‖H_ij‖²_F."""
    H, G = Hessian(objective), GaussNewton(objective)
    generator = torch.Generator().manual_seed(seed)
    for layer, groups in enumerate(layers):
        squares = dict[tuple[str, str, str], Tensor]()
        for letter, group in groups.items():
            columns = [(part, op.block(list(groups.values()), group)) for part, op in (("H", H), ("H_o", G))]
            V = torch.randn(columns[0][1].shape[1], probes, generator=generator, dtype=torch.float64)
            products = {part: block @ V for part, block in columns}
            products["H_f"] = products["H"] - products["H_o"]
            sizes = [H.block(other, group).shape[0] for other in groups.values()]
            for part, product in products.items():
                for other, piece in zip(groups, product.split(sizes), strict=True):
                    squares[part, other, letter] = piece.square().sum(0).mean()
        for part, (a, b) in ((part, pair) for part in PARTS for pair in combinations_with_replacement(groups, 2)):
            both = (squares[part, a, b] + squares[part, b, a]) / 2
            yield {"layer": layer, "block": a if a == b else f"{a},{b}", "part": part, "norm": float(both.sqrt())}


# ---- what is made of it

Key = tuple[str, int, int, str, str]


def _series(rows: Iterable[Row]) -> dict[Key, dict[float, list[float]]]:
    """(model, depth, layer, block, part) → σ → norms, one per repeat."""
    out = dict[Key, dict[float, list[float]]]()
    for row in rows:
        key = (row["model"], row["depth"], row["layer"], row["block"], row["part"])
        out.setdefault(key, {}).setdefault(row["sigma"], []).append(row["norm"])
    return out


def _fitted(sigmas: Sequence[float], series: Mapping[float, Sequence[float]]) -> Exponent | None:
    """None where there are fewer than two sizes, or where the block is zero."""
    repeats = list(zip(*(series[sigma] for sigma in sigmas), strict=True)) if len(sigmas) > 1 else []
    alive = [each for each in repeats if min(each) > 0]
    return exponent(sigmas, alive) if alive else None


def _row(key: Key, name: str, fit: Exponent) -> Row:
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
        "theory": _theory(model, depth, layer, block, part) if name == "small" else None,
    }


def _theory(model: str, depth: int, layer: int, block: str, part: str) -> float | None:
    """The rate at small σ, where the theory has one."""
    if model == "mlp":
        return 2.0 if part == "H_o" else None
    if model == "linear":
        return 2.0 * 3**depth if part == "H_o" else None
    if model == "pre_norm":
        return 0.0 if part == "H_o" and layer == 0 else None
    return SMALL_SOFTMAX.get(part, {}).get(block)


def _agrees(row: Row) -> bool:
    low, high = row["ci_low"] - NEAR, row["ci_high"] + NEAR
    return bool(low <= row["theory"] <= high)


# ---- the picture


def _dots(rows: Sequence[Row], title: str) -> Figure:
    """Exponents with their intervals: one panel per model, one line per depth and block."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    most = max((sum(row["model"] == model for row in rows) for model in models), default=1)
    made, axes = panels(max(1, len(models)), 3.1 * max(1, len(models)) + 0.8, 1.2 + 0.17 * most)
    for model, panel in zip(models, axes, strict=False):
        _panel(panel, model, [row for row in rows if row["model"] == model])
    heading(made, title)
    return made


def _panel(axes: Axes, model: str, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        dot(axes, row["exponent"], row["ci_low"], row["ci_high"], place, color=COLOURS[row["part"]], marker="o")
        if row["theory"] is not None:
            axes.plot(row["theory"], place, "o", mfc="none", mec="#111827", ms=8)
    axes.set_yticks(range(len(rows)), [f"depth {row['depth']}  {row['part']}({row['block']})" for row in rows])
    axes.invert_yaxis()
    axes.set_title(model)
    axes.set_xlabel("exponent of σ")
    axes.ticklabel_format(axis="x", useOffset=False)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, (low + high) / 2 - 1), max(high, (low + high) / 2 + 1))


STUDY = GrowthStudy()
