"""A loss beside its Taylor models: along directions, and along real gradient descent."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from evolute.apps.directional import derivatives, loss_at
from evolute.apps.quadratic_descent import fallen
from evolute.apps.taylor import taylor
from evolute.engine.objective import Objective
from evolute.engine.operators import Hessian
from evolute.krylov.eigen_search import eigsh
from evolute.studies.study import Cell, Row
from evolute.studies.subjects import Moment, Subject, moments
from evolute.zoo import cross_entropy

DIRECTIONS = ("gradient", "eigenvector", "update", "random")
METHODS = ("quadratic", "eigenvalue", "fitted")
LENGTHS = tuple(10 ** (power / 2) for power in range(-6, 1))  # of a step, over that of the weights
SEEN = 10  # losses of the real descent that the fitted curve is given


def measured(cell: Cell) -> list[Row]:
    """Of one model at one point of its training."""
    subject, step = Subject(**cell["subject"]), cell["step"]
    neighbour = step + 1 if step < subject.steps else step - 1
    here, there = moments(subject, [step, neighbour])
    update = (_weights(there) - _weights(here)) * (neighbour - step)
    H, known = Hessian(here.objective), {"model": subject.name, "step": step, "seed": subject.seed}
    top = eigsh(H, 1, "largest", vectors=True, progress=False, generator=torch.Generator().manual_seed(subject.seed))
    assert top.vectors is not None
    directions = _directions(here.objective, top.vectors[:, 0], update, subject.seed)
    rows = [known | row for name, d in directions.items() for row in along(here.objective, name, d, _weights(here))]
    sharpness = float(top.values[0])
    return rows + [known | row for row in descents(here, sharpness, cell["factors"], cell["descent"], cell["products"])]


def _weights(moment: Moment) -> Tensor:
    return moment.objective.space.flatten({k: p.detach() for k, p in moment.objective.parameters.items()})


# ---- along directions


def _directions(objective: Objective, v: Tensor, update: Tensor, seed: int) -> Mapping[str, Tensor]:
    """Downhill where there is a choice of sign."""
    g = objective.gradient()
    noise = torch.randn(len(g), generator=torch.Generator().manual_seed(seed), dtype=g.dtype)
    found = {"gradient": -g, "eigenvector": -v * torch.sign(v @ g), "update": update, "random": noise}
    return {name: found[name] for name in DIRECTIONS}


def along(objective: Objective, name: str, direction: Tensor, w: Tensor) -> list[Row]:
    """The change of the loss over steps of `LENGTHS`, and what the models of each order say of it."""
    step = direction * (w.norm() / direction.norm())
    slope, curvature, third = derivatives(objective, step)
    loss = objective.value()
    return [
        {
            "kind": "line",
            "direction": name,
            "length": r,
            "change": loss_at(objective, r * step) - loss,
            "terms": [r * slope, r**2 / 2 * curvature, r**3 / 6 * third],
            "loss": loss,
        }
        for r in LENGTHS
    ]


# ---- along gradient descent


def descents(moment: Moment, sharpness: float, factors: Sequence[float], steps: int, products: int) -> list[Row]:
    """Real losses at rates that are fractions of 2/λ_max, and the change of the loss by each method."""
    found = taylor(moment.objective, products=products, progress=False)
    square, rows = found.gradient**2, list[Row]()
    for factor in factors:
        rate = 2 * factor / sharpness
        real = descended(moment, rate, steps)
        t = range(len(real))
        changes = {
            "quadratic": [found.descent.change(rate, each)[0] for each in t],
            "eigenvalue": [one_eigenvalue(square, sharpness, rate, each) for each in t],
            "fitted": fitted(real),
        }
        rows.append({"kind": "descent", "factor": factor, "rate": rate, "losses": real, **changes})
    return rows


def one_eigenvalue(square: float, sharpness: float, rate: float, steps: int) -> float:
    """−‖g‖² φ(λ_max): as if all of the gradient were along the first eigenvector."""
    return -square * float(fallen(torch.tensor([sharpness], dtype=torch.float64), rate, steps)[0])


def fitted(losses: Sequence[float], seen: int = SEEN) -> list[float]:
    """−A (1 − e^(−ρt)), one curvature, by least squares on the first losses.

    >>> curve = fitted([2.0 - 1.5 * (1 - math.exp(-0.3 * t)) for t in range(30)])
    >>> round(curve[29], 2)
    -1.5
    """
    t = np.arange(len(losses))
    start, change = t[: seen + 1], np.asarray(losses[: seen + 1]) - losses[0]
    shapes = [-np.expm1(-rate * t) for rate in np.geomspace(1e-4, 10, 401)]
    heights = [float((s[: len(start)] @ change) / (s[: len(start)] @ s[: len(start)])) for s in shapes]
    squares = [float(np.square(h * s[: len(start)] - change).sum()) for s, h in zip(shapes, heights, strict=True)]
    best = int(np.argmin(squares))
    return (heights[best] * shapes[best]).tolist()


def descended(moment: Moment, rate: float, steps: int) -> list[float]:
    """The losses of real gradient descent on the sample, on a copy of the model; cut off where they leave float64."""
    model = copy.deepcopy(moment.model)
    parameters, losses = list(model.parameters()), list[float]()
    for _ in range(steps + 1):
        total, terms = cross_entropy.criterion(cross_entropy.forward(model, moment.sample), moment.sample)
        loss = total / terms
        if not math.isfinite(loss.item()):
            break
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, g in zip(parameters, gradients, strict=True):
                parameter.sub_(rate * g)
    return losses
