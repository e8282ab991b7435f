"""One model at one point: every approximation of every block, beside the block itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evolute.apps.captured import by_rows, captured, linear_groups, sample_gradients
from evolute.apps.curvature_approximations import (
    Approximation,
    Blocks,
    Diagonal,
    Full,
    exact_diagonal,
    kfac,
    kfac_reduce,
    nearest_kronecker,
    row_blocks,
    second_moment,
    shampoo,
    square_root,
)
from evolute.apps.output_factor import cross_entropy_columns, label_column
from evolute.engine.objective import Objective
from evolute.engine.operators import GaussNewton, Hessian
from evolute.linop.convert import to_dense
from evolute.studies.newton_steps import Slope, cosine, damped, errors
from evolute.studies.study import Cell, Row
from evolute.studies.subjects import Subject, at

WHOLE = "whole"  # all linear maps together
REFERENCES = ("H", "H_o")
Made = Mapping[str, Approximation]  # name → approximation


@dataclass(frozen=True, eq=False)
class Truth:
    """H and H_o of all linear maps, each group row by row; a group is a place on the diagonal."""

    blocks: Mapping[str, Tensor]
    places: Mapping[str, slice]
    slope: Slope

    def of(self, reference: str, group: str) -> Tensor:
        """The block of H or H_o."""
        return self.blocks[reference][self.places[group], self.places[group]]

    def step(self, approximation: Approximation, group: str, damping: float) -> Tensor:
        """Of the group, zero elsewhere."""
        place, out = self.places[group], torch.zeros_like(self.slope.gradient)
        out[place] = damped(approximation, self.slope.gradient[place], damping)
        return out

    def fall(self, cell: Cell, group: str, approximation: Approximation) -> tuple[float, float]:
        """How far the loss falls at most, over dampings and lengths, and at which damping."""
        steps = [self.step(approximation, group, damping) for damping in cell["dampings"]]
        decrease, best = self.slope.decrease(steps, self.blocks["H_o"])
        return decrease, cell["dampings"][best]


def measured(cell: Cell) -> Iterator[Row]:
    """Of each linear map, and of all together, where approximations of single maps are blocks on the diagonal."""
    subject = Subject(**cell["subject"])
    objective = at(subject, subject.points[cell["stage"]]).objective
    linears = linear_groups(objective.model)
    truth, learned = _truth(objective, linears), _from_gradients(objective, linears, cell)
    own = {reference: _from_blocks(truth, reference, linears) for reference in REFERENCES}
    for group in (*linears, WHOLE):
        falls = {name: truth.fall(cell, group, each) for name, each in learned[group].items()}
        for reference in REFERENCES:
            falls |= {name: truth.fall(cell, group, each) for name, each in own[reference][group].items()}
            yield from _rows(cell, truth, reference, group, {**own[reference][group], **learned[group]}, falls)


def _together(made: Mapping[str, Made]) -> dict[str, Approximation]:
    """Of all groups: those of single ones, one after the other along the diagonal."""
    return {name: Blocks([each[name] for each in made.values()]) for name in next(iter(made.values()))}


# ---- the truth


def _truth(objective: Objective, linears: Mapping[str, nn.Linear]) -> Truth:
    places, order, start = dict[str, slice](), list[Tensor](), 0
    for group, linear in linears.items():
        rows = by_rows(linear)
        order.append(start + rows)
        places[group], start = slice(start, start + len(rows)), start + len(rows)
    places[WHOLE], together = slice(0, start), torch.cat(order)
    operators = {"H": Hessian(objective), "H_o": GaussNewton(objective)}
    dense = {name: to_dense(op.restrict(list(linears)))[together][:, together] for name, op in operators.items()}
    slope = Slope(objective, objective.space.resolve(list(linears)), together)
    return Truth({name: (each + each.mT) / 2 for name, each in dense.items()}, places, slope)


# ---- what stands in for it


def _from_blocks(truth: Truth, reference: str, linears: Mapping[str, nn.Linear]) -> dict[str, Made]:
    made = {g: _from_block(truth.of(reference, g), linear.out_features) for g, linear in linears.items()}
    together = _together(made)
    return {**made, WHOLE: {**together, "groups": together["true"], "true": Full(truth.of(reference, WHOLE))}}


def _from_block(block: Tensor, rows: int) -> dict[str, Approximation]:
    return {
        "true": Full(block),
        "diagonal": exact_diagonal(block),
        "rows": row_blocks(block, rows),
        "kronecker": nearest_kronecker(block, rows),
    }


def _from_gradients(objective: Objective, linears: Mapping[str, nn.Linear], cell: Cell) -> dict[str, Made]:
    expanded = kfac(objective, linears, cross_entropy_columns)
    reduced = kfac_reduce(objective, linears, cross_entropy_columns)
    gradients, out = _minibatches(objective, linears, cell), dict[str, Made]()
    for group in linears:
        v, product = second_moment(gradients[group]), shampoo(gradients[group])
        learned = {"kfac": expanded[group], "kfac_reduce": reduced[group], "moment": v, "shampoo": product}
        roots = {"adam": square_root(v), "shampoo_root": square_root(product)}
        out[group] = {"gradient": Diagonal(torch.ones_like(v.values)), **learned, **roots}
    return {**out, WHOLE: _together(out)}


def _minibatches(objective: Objective, linears: Mapping[str, nn.Linear], cell: Cell) -> dict[str, Tensor]:
    """Gradients of the mean loss of mini-batches that are drawn from the sample, (draws, o, p)."""
    (batch,) = captured(objective, linears)
    generator = torch.Generator().manual_seed(cell["subject"]["seed"])
    samples, terms = len(batch.labels), (batch.labels >= 0).sum(1).double()
    chosen = torch.stack(
        [torch.randperm(samples, generator=generator)[: cell["minibatch"]] for _ in range(cell["draws"])]
    )
    each = sample_gradients(batch, linears, label_column(batch.logits, batch.labels))
    return {name: g[chosen].sum(1) / terms[chosen].sum(1)[:, None, None] for name, g in each.items()}


# ---- how they compare


def _rows(
    cell: Cell, truth: Truth, reference: str, group: str, made: Made, falls: Mapping[str, tuple[float, float]]
) -> Iterator[Row]:
    subject, block, damping = cell["subject"], truth.of(reference, group), cell["damping"]
    true = truth.step(made["true"], group, damping)
    start = {"model": subject["name"], "stage": cell["stage"], "seed": subject["seed"]}
    for name, approximation in made.items():
        error, shape = errors(approximation.dense(), block)
        yield {
            **start,
            "group": group,
            "reference": reference,
            "approximation": name,
            "error": error,
            "shape": shape,
            "cosine": cosine(truth.step(approximation, group, damping), true),
            "decrease": falls[name][0],
            "damping": falls[name][1],
        }
