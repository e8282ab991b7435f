"""How a loss changes along directions: its first, second and third derivatives, and the loss a step away.

    φ(s) = L(w + s d):   φ′ = g·d,   φ″ = dᵀHd,   φ‴ = ∇³L[d, d, d] = dᵀ (∂_d H) d
    a simple eigenvalue λ of H with unit eigenvector v:   ∂_d λ = vᵀ (∂_d H) v = ∇³L[v, v, d]

Each derivative is the scalar product of a direction with the gradient of the one before: exact, by reverse mode alone.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from evolute.engine.objective import Evaluated, Objective
from evolute.errors import NonFiniteError


def derivatives(objective: Objective, direction: Tensor, order: int = 3) -> tuple[float, ...]:
    """φ′, φ″, … of the objective along one direction, in one pass over the data.

    >>> import evolute as ev
    >>> model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> objective = ev.Objective(model, [(x, 3 * x)], nn.MSELoss())
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(1.0)
    >>> derivatives(objective, torch.tensor([2.0]))  # (1 + 2s − 3)²
    (-8.0, 8.0, 0.0)
    """
    return mixed(objective, [direction] * order)


def mixed(objective: Objective, directions: Sequence[Tensor]) -> tuple[float, ...]:
    """∇L[d₁], ∇²L[d₁, d₂], ∇³L[d₁, d₂, d₃], … of the objective, one pass over the data."""
    sums, terms = [0.0] * len(directions), 0.0
    with objective.running():
        for each in objective.evaluate():
            _, found = of_batch(objective, each, directions)
            sums, terms = [a + b for a, b in zip(sums, found, strict=True)], terms + each.terms
    return tuple(each / objective.normaliser(terms) for each in sums)


def sharpness_slope(objective: Objective, vector: Tensor, direction: Tensor) -> float:
    """∂_d λ = ∇³L[v, v, d]: how fast an eigenvalue of H changes as the weights move, v being its unit eigenvector.

    An error of size r in v is one of about 2 r ‖∂_d H‖ here. Of a multiple eigenvalue there is no such slope.

    >>> import evolute as ev
    >>> model, x = nn.Linear(1, 1, bias=False).double(), torch.ones(1, 1).double()
    >>> cubed = ev.Loss(lambda model, batch: model(batch), lambda output, batch: (output.pow(3).sum(), 1))
    >>> objective, one = ev.Objective(model, [x], cubed), torch.ones(1).double()
    >>> sharpness_slope(objective, one, one)  # w³ has H = 6w
    6.0
    """
    return mixed(objective, [vector, vector, direction])[2]


def of_batch(objective: Objective, each: Evaluated, directions: Sequence[Tensor]) -> tuple[Tensor, tuple[float, ...]]:
    """The flat gradient of the sum of losses of one batch, and the derivatives of that sum along the directions."""
    parameters, order = list(objective.parameters.values()), len(directions)
    slope: Tensor | float = objective.attached(each)
    flat, found = torch.zeros_like(directions[0]), list[float]()
    for place, direction in enumerate(directions):
        views = objective.space.views(direction)
        if not isinstance(slope, Tensor) or not slope.requires_grad:
            found.append(0.0)  # the one before does not depend on the parameters
            continue
        graph = place + 1 < order
        pieces = torch.autograd.grad(slope, parameters, create_graph=graph, allow_unused=True, materialize_grads=True)
        slope = sum((g * v).sum() for g, v in zip(pieces, views, strict=True))
        found.append(float(torch.as_tensor(slope).detach()))
        if place == 0:
            flat = torch.cat([g.detach().reshape(-1).to(direction.dtype) for g in pieces])
    return flat, tuple(found)


def loss_at(objective: Objective, step: Tensor) -> float:
    """L(w + d); infinite where it is not a number. The model itself stays where it is.

    >>> import evolute as ev
    >>> model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> objective = ev.Objective(model, [(x, x)], nn.MSELoss())
    >>> loss_at(objective, 3 - model.weight.detach()[0])
    4.0
    """
    total, terms = 0.0, 0.0
    try:
        with objective.running(), _moved(objective, step), torch.no_grad():
            for each in objective.evaluate():
                total, terms = total + each.total.double().item(), terms + each.terms
    except NonFiniteError:
        return math.inf
    return total / objective.normaliser(terms)


@contextmanager
def _moved(objective: Objective, step: Tensor) -> Generator[None]:
    """Other parameters stand in for those of the model, which are not written to."""
    pieces = zip(objective.parameters.values(), objective.space.views(step), strict=True)
    moved = {id(p): nn.Parameter((p.detach() + d).to(p.dtype), p.requires_grad) for p, d in pieces}
    owners = [
        (module, name, parameter)
        for module in objective.model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in moved
    ]
    try:
        for module, name, parameter in owners:  # by setattr: recurrent layers keep lists of their weights
            setattr(module, name, moved[id(parameter)])
        yield
    finally:
        for module, name, parameter in owners:
            setattr(module, name, parameter)
