"""The curves of one trained model: |L_{k+1} − L_k| over k at several radii, as measured, predicted and bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from evolute.apps.order_changes import Orders, random_orders, sizes
from evolute.engine.objective import Objective
from evolute.engine.operators import Hessian
from evolute.engine.sample_losses import sample_losses
from evolute.krylov.eigen_search import eigsh
from evolute.studies.fits import slope
from evolute.studies.sample_taylor import along
from evolute.studies.study import Row
from evolute.studies.subjects import Moment

FIRST = 10  # the least k of a slope: the law is in k + 1
POINTS_OF_CURVE = 24


def measured(moment: Moment, radii: Sequence[float], points: int, orders: int, spheres: int, seed: int) -> list[Row]:
    """A row for each radius."""
    objective, generator = moment.objective, torch.Generator().manual_seed(seed)
    P = objective.space.size
    directions = torch.randn(points, P, generator=generator, dtype=torch.float64)
    here = sample_losses(objective)
    models = [along(objective, direction) for direction in directions]
    order = random_orders(len(here), orders, generator)
    known = largest_curvature(moment, here.sums[0] / here.terms, spheres, generator)
    top = float((here.sums[0] / here.terms).abs().max())
    rows = list[Row]()
    for radius in radii:
        moved = sample_losses(objective, list(radius * directions)) if radius else here
        guess = torch.stack([model.at(radius) for model in models]) if radius else here.sums
        bound = 2 * top + known * radius**2 * float(directions.square().sum(1).mean())
        rows.append(
            {"radius": radius, "loss": float((moved.sums.sum(1) / moved.terms.sum()).mean())}
            | curve(moved.sums, guess, here.terms, order)
            | {"bound": bound, "ascending": ascending(here.sums[0], here.terms)}
        )
    return rows


def curve(sums: Tensor, guess: Tensor, terms: Tensor, order: Tensor) -> Row:
    """Expected changes, the slope of their logarithms, single orders, and the levels (k + 1)·change at the last k."""
    true, predicted = Orders(sums, terms, order), Orders(guess, terms, order)
    at = sizes(len(terms), POINTS_OF_CURVE)
    changes = [true.change(k)[0] for k in at]
    last, later = len(terms) - 1, [k for k in at if k >= FIRST]
    single = torch.stack([steps(sums, terms, each)[:, [k - 1 for k in at]] for each in order]).flatten(0, 1)
    low, high = (single.quantile(share, 0).tolist() for share in (0.1, 0.9))
    mean = sums.sum(1, keepdim=True) / terms.sum()
    spread = (sums / terms - mean).std(1).mean()
    return {
        "sizes": at,
        "changes": changes,
        "low": low,
        "high": high,
        "slope": slope(later, [true.change(k)[0] for k in later]),
        "level": (last + 1) * true.change(last)[0],
        "predicted": (last + 1) * predicted.change(last)[0],
        "deviation": float(spread) * math.sqrt(1 + 1 / last),
    }


def steps(sums: Tensor, terms: Tensor, order: Tensor) -> Tensor:
    """|L_{k+1} − L_k| for k = 1, 2, … of one order, (points, K − 1).

    >>> steps(torch.tensor([[1.0, 3.0, 8.0]]), torch.ones(3), torch.arange(3))  # means 1, 2, 4
    tensor([[1., 2.]])
    """
    means = sums[:, order].cumsum(1) / terms[order].cumsum(0)
    return means.diff(dim=1).abs()


def ascending(sums: Tensor, terms: Tensor) -> float:
    """The slope when samples come from the least loss to the largest: an order that is not random."""
    found = steps(sums[None], terms, (sums / terms).argsort())[0]
    at = [k for k in sizes(len(terms), POINTS_OF_CURVE) if k >= FIRST]
    smooth = [float(found[k // 2 : k].mean()) for k in at]  # of the half before k
    return slope(at, smooth) if min(smooth) > 0 else 0.0


def largest_curvature(moment: Moment, losses: Tensor, count: int, generator: torch.Generator) -> float:
    """The largest ‖H_i‖ over some samples: those of the largest loss, and as many others at random."""
    x, y = moment.sample
    worst = losses.argsort(descending=True)[: (count + 1) // 2]
    others = torch.randperm(len(losses), generator=generator)[: count // 2]
    found = [_norm(Objective(moment.model, [(x[i : i + 1], y[i : i + 1])], moment.objective.loss), generator)
             for i in torch.cat([worst, others]).tolist()]  # fmt: skip
    return max(found)


def _norm(objective: Objective, generator: torch.Generator) -> float:
    ends = eigsh(Hessian(objective), 1, "magnitude", tol=0.05, generator=generator, progress=False)
    return abs(float(ends.values[0]))
