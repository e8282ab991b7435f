"""Which groups of parameters carry the curvature of a Transformer: are they the Values and the Keys?

Theory, for the Gauss–Newton part of one head, with the moments m and M of the tokens under its attention and the
curvature G of what follows: H(V,V) = Σ m mᵀ ⊗ W_O G W_Oᵀ and H(O,O) = Σ W_Vᵀ m mᵀ W_V ⊗ G are mirror images, and so are
H(Q,Q) = Σ x xᵀ ⊗ W_Kᵀ M W_K and H(K,K) = Σ M ⊗ W_Qᵀ x xᵀ W_Q. Where the weights are drawn alike, V and O carry alike,
and Q and K do; and Q and K less than V, where scores move the output little. Moreover W_V → c W_V, W_O → W_O/c leaves
the model as it is, and takes H(V,V) to H(V,V)/c² and H(O,O) to c² H(O,O): which of the two dominates is a matter of
scale, unless changes are taken relative to the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evolute.engine.groups import groups
from evolute.engine.operators import Hessian
from evolute.errors import StudyError
from evolute.krylov.eigen_search import eigsh
from evolute.linop import exact
from evolute.linop.convert import to_dense
from evolute.linop.operator import LinearOperator
from evolute.studies import deflated, over_training
from evolute.studies.blocks import CLOSED, LETTERS, Norm, layers
from evolute.studies.last_block import last_block
from evolute.studies.means import geometric_mean, mean
from evolute.studies.over_training import OverTraining, told
from evolute.studies.study import Answer, Cell, Row, Study, Verdict
from evolute.studies.subjects import Moment
from evolute.zoo import GPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIMED = ("V", "K")
MIRRORED = {"V": "O", "O": "V", "K": "Q", "Q": "K"}
NORMS = ("frobenius", "spectral", "entry", "relative")


@dataclass(frozen=True)
class Dominance(OverTraining):
    """Models, points of their training as fractions of it, and the groups that Value and Key are compared with."""

    models: tuple[str, ...] = ("vit_digits", "vit_fashion", "gpt_english")
    points: tuple[float, ...] = (0.0, 0.05, 0.2, 1.0)
    repeats: int = 4
    rivals: tuple[str, ...] = ("Q", "O", "W1", "W2")


class DominanceStudy(Study[Dominance]):
    """One cell per model, repeat and point of its training."""

    name = "dominance"
    claim = (
        "Value and Key carry more of the curvature than a Transformer's other weights, before training and after it."
    )
    config = Dominance

    def cells(self, config: Dominance) -> Sequence[Cell]:
        _check(config)
        return over_training.cells(config)

    def measure(self, cell: Cell) -> list[Row]:
        moment, known = over_training.reached(cell)
        return [known | row for row in measured(moment, cell["probes"], known["seed"])]

    def table(self, config: Dominance, rows: Sequence[Row]) -> list[Row]:
        """Each group beside its rivals, at each step of each model, by each norm."""
        return [
            {"model": model, "step": step, "norm": norm, **row}
            for (model, step), here in over_training.by_place(rows).items()
            for norm in NORMS
            for row in _compared(here, norm, config)
        ]

    def verdict(self, config: Dominance, table: Sequence[Row]) -> Verdict:
        cases = _cases(table)
        if not cases:
            return Verdict(
                "undecided", f"no model with two seeds has any of {', '.join(config.rivals)} to compare with."
            )
        both = sum(all(_leads(row) for row in case.values()) for case in cases)
        behind = sum(any(_trails(row) for row in case.values()) for case in cases)
        return Verdict(_answer(len(cases), both, behind), _sentence(config, table, cases, both, behind))

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.dominance.figure import draw

        return draw(table, settings)


def _check(config: Dominance) -> None:
    known = [letter for letter in LETTERS.values() if letter not in CLAIMED]
    wrong = [each for each in config.rivals if each not in known]
    if wrong or not config.rivals:
        raise StudyError(f"rivals: expected some of {', '.join(known)}, got {', '.join(wrong) or 'none'}.")
    plain = [model for model in config.models if model.startswith("mlp")]
    if plain:
        raise StudyError(
            f"models: '{plain[0]}' has neither Values nor Keys; expected names that begin with vit or gpt."
        )


# ---- what is measured


def measured(moment: Moment, probes: int, seed: int) -> list[Row]:
    """Of the diagonal block of every group: ‖H_gg‖_F, its largest |λ|, its size, and the length of its weights."""
    H, generator = Hessian(moment.objective), torch.Generator().manual_seed(seed)
    weights = H.space.flatten({name: each.detach() for name, each in moment.objective.parameters.items()})
    closed, rows = _closed(moment), list[Row]()
    for layer, letter, name in _groups(moment):
        block = closed[layer, letter] if (layer, letter) in closed else H.restrict(name)
        top, norm = _norms(block, probes, generator)
        rows.append(
            {
                "layer": layer,
                "group": letter,
                "size": block.shape[0],
                "weights": float(H.space.resolve(name).take(weights).norm()),
                "frobenius": norm.value,
                "frobenius_error": norm.error,
                "spectral": top.value,
                "spectral_error": top.error,
            }
        )
    return rows


def _groups(moment: Moment) -> Iterator[tuple[int | None, str, str]]:
    """(layer, letter, name) of all groups; what is in no layer is called by its name."""
    inside = [(i, letter, name) for i, each in enumerate(layers(moment.model)) for letter, name in each.items()]
    yield from inside
    named = {name for _, _, name in inside}
    yield from ((None, name, name) for name in groups(moment.model) if name not in named)


def _closed(moment: Moment) -> dict[tuple[int | None, str], LinearOperator]:
    """The blocks that have a closed form: those of the last layer, where each token has a loss of its own."""
    found = layers(moment.model)
    if not isinstance(moment.model, GPT):
        return {}
    H = last_block(moment)
    return {
        (len(found) - 1, letter): H.block(CLOSED[letter], CLOSED[letter]) for letter in found[-1] if letter in CLOSED
    }


def _norms(block: LinearOperator, probes: int, generator: torch.Generator) -> tuple[Norm, Norm]:
    """Spectral (its error is the residual) and Frobenius norm; from structure or entries where that is cheap."""
    top = eigsh(block, 1, "magnitude", vectors=True, generator=generator, progress=False)
    spectral = Norm(float(top.values.abs()[0]), float(top.residuals[0]))
    assert top.vectors is not None
    if block.shape[0] <= probes:
        return spectral, Norm(float(to_dense(block).norm()), 0.0)
    try:
        return spectral, Norm(exact.frobenius(block), 0.0)
    except exact.NoStructure:
        outside = deflated.rest(top.vectors, probes, generator)
        return spectral, deflated.frobenius(block @ top.vectors, block @ outside)


# ---- what is made of it


def _size(rows: Sequence[Row], norm: str) -> float:
    """Of one group in all layers, as one block-diagonal matrix."""
    squares = sum(row["frobenius"] ** 2 for row in rows)
    if norm == "frobenius":
        return math.sqrt(squares)
    if norm == "entry":  # root mean square of the entries
        return math.sqrt(squares / sum(row["size"] ** 2 for row in rows))
    if norm == "spectral":
        return max(row["spectral"] for row in rows)
    return max(row["weights"] ** 2 * row["spectral"] for row in rows)  # for a change relative to the weights


def _compared(rows: Sequence[Row], norm: str, config: Dominance) -> Iterator[Row]:
    """Each group: its size, its share of the sum over groups, its lead over the largest of its rivals, its mirror."""
    sizes = _sizes(rows, norm)
    for letter in sizes[0]:
        rivals = [rival for rival in config.rivals if rival in sizes[0] and rival != letter]
        mirror = [other for other in (MIRRORED.get(letter),) if other in sizes[0]]
        yield {
            "group": letter,
            **told("value", geometric_mean([size[letter] for size in sizes])),
            **told("share", mean([size[letter] / sum(size.values()) for size in sizes])),
            **(told("lead", geometric_mean(_over(letter, rivals, sizes))) if rivals else {}),
            **(told("mirror", geometric_mean(_over(letter, mirror, sizes))) if mirror else {}),
            "repeats": len(sizes),
            "loss": mean([row["loss"] for row in rows]).value,
            "accuracy": mean([row["accuracy"] for row in rows]).value,
        }


def _sizes(rows: Sequence[Row], norm: str) -> list[dict[str, float]]:
    """For each seed, group → its size."""
    seeds = dict[int, dict[str, list[Row]]]()
    for row in rows:
        seeds.setdefault(row["seed"], {}).setdefault(row["group"], []).append(row)
    return [{group: _size(each, norm) for group, each in found.items()} for found in seeds.values()]


def _over(letter: str, rivals: Sequence[str], sizes: Sequence[Mapping[str, float]]) -> list[float]:
    """For each seed, how many times the largest of the rivals."""
    return [size[letter] / max(size[rival] for rival in rivals) for size in sizes]


Case = dict[str, Row]  # letter → row, of Value and Key


def _cases(table: Iterable[Row]) -> list[Case]:
    """One for each model, step and norm."""
    found = dict[tuple[str, int, str], Case]()
    for row in table:
        if row["group"] in CLAIMED and "lead" in row:
            found.setdefault((row["model"], row["step"], row["norm"]), {})[row["group"]] = row
    return list(found.values())


def _leads(row: Row) -> bool:
    return bool(row["lead_low"] > 1)


def _trails(row: Row) -> bool:
    return bool(row["lead_high"] < 1)


def _answer(cases: int, both: int, behind: int) -> Answer:
    if both == cases:
        return "holds"
    if both:
        return "holds in part"
    return "does not hold here" if behind > cases / 2 else "undecided"


def _sentence(config: Dominance, table: Sequence[Row], cases: Sequence[Case], both: int, behind: int) -> str:
    counts = [
        f"{letter} leads in {sum(_leads(case[letter]) for case in cases)} "
        f"and is behind in {sum(_trails(case[letter]) for case in cases)}"
        for letter in CLAIMED
    ]
    return (
        f"in {len(cases)} cases (model, step, norm), both are larger than all of {', '.join(config.rivals)} in {both}, "
        f"and one of them is smaller than the largest of these in {behind} (95 % intervals over seeds): "
        f"{', '.join(counts)}; {_strongest(table)}"
    )


def _strongest(table: Sequence[Row]) -> str:
    """The groups that come first by the Frobenius norm, and how often."""
    firsts = dict[str, int]()
    places = dict.fromkeys((row["model"], row["step"]) for row in table)
    for place in places:
        here = [row for row in table if (row["model"], row["step"]) == place and row["norm"] == "frobenius"]
        first = max(here, key=lambda row: row["share"])["group"]
        firsts[first] = firsts.get(first, 0) + 1
    order = ", ".join(f"{group} ({count})" for group, count in sorted(firsts.items(), key=lambda each: -each[1]))
    return f"over {len(places)} (model, step), the largest of all groups by Frobenius norm is {order}."


STUDY = DominanceStudy()
