"""Where the norms stand, and how deep the model is: curvature before training, and what training makes of it.

The linear maps of the blocks are drawn as PyTorch draws them, Var(W) = 1/(3 · inputs), times a gain: √3 gives each map
outputs of the size of its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from evolute.apps.captured import captured, tokens
from evolute.apps.output_factor import cross_entropy_columns
from evolute.engine.loss import Loss
from evolute.engine.objective import Objective
from evolute.engine.operators import Hessian
from evolute.errors import NonFiniteError
from evolute.krylov.one_pass import spectrum
from evolute.studies.layernorm.rows import norm_options
from evolute.studies.study import Cell, Row
from evolute.zoo import Dataset, ViT, cross_entropy, digits, train

KEYS = ("part", "gain", "norm", "depth", "seed")
LEARNT = 0.9  # of the loss of a constant prediction: above it, a run has learnt nothing to speak of
LAST = 0.1  # of the steps: the loss of a run is the mean over them


def model_of(cell: Cell, data: Dataset) -> ViT:
    """A ViT of this depth, with its norms at this place and its blocks drawn with this gain."""
    options = norm_options(cell["norm"])
    model = ViT(8, 2, 1, data.classes, cell["width"], cell["heads"], cell["depth"], seed=cell["seed"], **options)
    with torch.no_grad():
        for module in model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(cell["gain"])
    return model


# ---- before training


def initial(cell: Cell) -> Iterator[Row]:
    """λ of largest size, λ/mean|λ| with its error, and the curvature that arrives at the input of each block."""
    data = digits(seed=cell["seed"])
    sample = data.train.first(cell["samples"])
    objective = Objective(model_of(cell, data).double(), [(sample.x.double(), sample.y)], Loss(*cross_entropy))
    generator = torch.Generator().manual_seed(cell["seed"])
    found = spectrum(Hessian(objective), probes=2, steps=cell["products"] // 2, generator=generator, progress=False)
    sharpness = max(abs(float(found.largest[0])), abs(float(found.smallest[0])))
    mean = found.nuclear.estimate / found.n
    start = {key: cell[key] for key in KEYS}
    yield {
        **start,
        "sharpness": sharpness,
        "lowest": float(found.smallest[0]),
        "conditioning": sharpness / mean,
        "conditioning_error": sharpness / mean * found.nuclear.standard_error / found.nuclear.estimate,
    }
    for layer, values in enumerate(_profile(objective)):
        yield {**start, "part": "profile", "layer": layer, **values}


def _profile(objective: Objective) -> list[dict[str, float]]:
    """At the input of each block: tr H_o per sample, the mean variance of a row, and how unlike the tokens are."""
    assert isinstance(objective.model, ViT)
    blocks = {str(i): block for i, block in enumerate(objective.model.layers)}
    (batch,) = captured(objective, blocks)
    traces = dict.fromkeys(blocks, 0.0)
    for column in cross_entropy_columns(batch.logits, batch.labels):
        for name, g in batch.pull_to_inputs(column).items():
            traces[name] += float(g.square().sum()) / len(g)
    return [{"trace": traces[name], **_rows(tokens(batch.inputs[name]))} for name in blocks]


def _rows(x: Tensor) -> dict[str, float]:
    """Σ‖x_t − mean_t‖²/Σ‖x_t‖² is 0 for tokens that are all alike."""
    apart = (x - x.mean(1, keepdim=True)).square().sum() / x.square().sum()
    return {"variance": float(x.var(-1, correction=0).mean()), "apart": float(apart)}


# ---- training


def trainings(cell: Cell) -> Iterator[Row]:
    """The loss at the end of a short training at each rate, relative to that of a constant prediction."""
    data = digits(seed=cell["seed"])
    constant = entropy(data.train.y)
    for rate in cell["rates"]:
        losses = _losses(cell, data, rate)
        last = losses[-max(1, round(LAST * cell["steps"])) :]
        finite = len(losses) == cell["steps"]
        loss = sum(last) / len(last) if finite else math.inf
        yield {
            **{key: cell[key] for key in KEYS},
            "rate": rate,
            "loss": loss if finite else None,
            "constant": constant,
            "learnt": loss < LEARNT * constant,
        }


def _losses(cell: Cell, data: Dataset, rate: float) -> Sequence[float]:
    """Of every step; fewer than were asked for if one was not finite."""
    options = {"steps": cell["steps"], "batch": cell["batch"], "optimizer": cell["optimizer"], "seed": cell["seed"]}
    try:
        return train(model_of(cell, data), data, lr=rate, progress=False, **options).losses
    except NonFiniteError:
        return ()


def entropy(labels: Tensor) -> float:
    """−Σ f log f over the frequencies of labels: the least loss of a prediction that does not look at the input.

    >>> round(entropy(torch.tensor([0, 1, 1, 0])), 6)
    0.693147
    """
    f = labels.bincount() / len(labels)
    return float(-(f[f > 0] * f[f > 0].log()).sum())
