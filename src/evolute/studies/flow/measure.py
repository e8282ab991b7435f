"""Of each block of a model at points of its training: the true curvature, and what is used in its place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evolute.apps.flow import PARTS, BlockFlow, Curvature, flow
from evolute.engine.loss import Loss
from evolute.studies.first_token import attentions, seen, weights
from evolute.studies.study import Cell, Row
from evolute.studies.subjects import Moment, Subject, moments
from evolute.zoo import cross_entropy

PLACES = ("activations", "parameters")
PROXIES = {  # what each is taken to stand for
    "gradient": "parameters",
    "squared": "parameters",
    "activation": "activations",
    "attention": "activations",
}


def measured(cell: Cell) -> list[Row]:
    """Of one training, at all its points: it runs once."""
    subject = Subject(**cell["subject"])
    return [row for moment in moments(subject, cell["steps"]) for row in at_moment(subject, moment, cell["probes"])]


def at_moment(subject: Subject, moment: Moment, probes: int) -> list[Row]:
    """One row for each block."""
    generator = torch.Generator().manual_seed(subject.seed)
    found = flow(moment.model, [moment.sample], Loss(*cross_entropy), probes=probes, generator=generator)
    squared = squared_gradients(moment, [block.name for block in found.blocks])
    deviations = attention_deviations(moment.model, moment.sample[0])
    known = {"model": subject.name, "norm": str(subject.options["norm"]), "depth": subject.layers, "step": moment.step}
    known |= {"seed": subject.seed, "loss": moment.objective.value()}
    return [
        {**known, "layer": layer, **_row(block), "squared": s, "attention": a}
        for layer, (block, s, a) in enumerate(zip(found.blocks, squared, deviations, strict=True))
    ]


def _row(block: BlockFlow) -> Row:
    assert block.parameters is not None and block.residual_share is not None
    curvature = {**_told("activations", block.activations), **_told("parameters", block.parameters)}
    return {
        **curvature,
        "variance": next(iter(block.inverse_variance.values()), math.nan),
        "share": block.residual_share,
        "gradient": block.parameters.gradient,
        "activation": block.activation,
    }


def _told(place: str, curvature: Curvature) -> Row:
    """‖H‖, ‖H_o‖, ‖H_f‖ and tr H, with the error of ‖H‖."""
    norms = {f"{place} {part}": curvature.norm[part].estimate for part in PARTS}
    error = curvature.norm["H"].standard_error
    return norms | {f"{place} error": error, f"{place} trace": curvature.trace["H"].estimate}


# ---- what is used in its place


def squared_gradients(moment: Moment, blocks: Sequence[str]) -> list[float]:
    """Σ_n ‖∇_l ℓ_n‖²/N over samples n, of each block l: what Adam's second moment and the empirical Fisher sum up."""
    x, y = moment.sample
    named = dict(moment.model.named_parameters())
    owned = [[p for name, p in named.items() if name.startswith(f"{block}.")] for block in blocks]
    sums = [0.0] * len(blocks)
    for n in range(len(x)):
        pair = (x[n : n + 1], y[n : n + 1])
        total, terms = cross_entropy.criterion(cross_entropy.forward(moment.model, pair), pair)
        gradients = torch.autograd.grad(total / terms, [p for group in owned for p in group])
        left = iter(gradients)
        for place, group in enumerate(owned):
            sums[place] += sum(float(next(left).square().sum()) for _ in group)
    return [each / len(x) for each in sums]


def attention_deviations(model: nn.Module, x: Tensor) -> list[float]:
    """Standard deviation of the weights of attention in each layer."""
    with torch.no_grad(), seen(model) as inputs:
        model(x)
        pairs = zip(attentions(model), inputs, strict=True)
        return [float(weights(attention, tokens).std()) for attention, tokens in pairs]
