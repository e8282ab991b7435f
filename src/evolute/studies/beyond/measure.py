"""One table of measures for every model and loss: ends, trace, norm, H_f, rank, sign, parts; the slope of sharpness."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from evolute.apps.directional import sharpness_slope
from evolute.engine.groups import groups
from evolute.engine.objective import Objective
from evolute.engine.operators import GaussNewton, Hessian
from evolute.krylov.eigen_search import Which, eigsh
from evolute.krylov.eigenpairs import Eigenpairs
from evolute.krylov.one_pass import spectrum
from evolute.krylov.randomness import normal
from evolute.linop.operator import LinearOperator
from evolute.studies import deflated
from evolute.studies.study import Cell, Row
from evolute.studies.subjects import LABELS, Moment, Subject, moments, task_of

PARTS = ("mixer", "mlp", "norms", "around")  # attention or recurrence; feed-forward; norms; embedding and unembedding
TOL = 1e-4  # of the sharpness: residual over |λ|; 1e-3 of the lowest eigenvalue
NUDGE = 1e-4  # of a finite difference, over the length of the weights
OUTLIERS = 10  # eigenvalues that are to carry most of ‖H‖²
SPAN = 30  # the way that training takes is that of one part in so many of all steps: a single late one is rounding


def measured(cell: Cell) -> Row:
    """Of one model at one point of its training."""
    subject, step = Subject(**cell["subject"]), cell["step"]
    span = max(1, subject.steps // SPAN)
    later = step + span <= subject.steps
    here, there = moments(subject, [step, step + span if later else step - span])
    way = _weights(there) - _weights(here)
    generator = torch.Generator().manual_seed(subject.seed)
    labelled = task_of(subject.name).loss is LABELS.loss
    H = Hessian(here.objective)
    top = _end(H, OUTLIERS, "largest", TOL, generator)
    assert top.vectors is not None
    return {
        "model": subject.name,
        "step": step,
        "seed": subject.seed,
        "parameters": H.shape[0],
        "loss": here.objective.value(),
        "accuracy": here.score().accuracy if labelled else None,
        **ends(H, top, generator),
        "top": top.values.flip(0).tolist(),
        **sums(H, cell["probes"], cell["products"], generator),
        **functional(H, GaussNewton(here.objective), top.vectors, cell["probes"], generator),
        "parts": parts(H, here.model, cell["probes"], generator),
        **slopes(here, there if later else None, top, way if later else -way),
    }


def _weights(moment: Moment) -> Tensor:
    return moment.objective.space.flatten({k: p.detach() for k, p in moment.objective.parameters.items()})


def _end(H: LinearOperator, k: int, which: Which, tol: float, generator: torch.Generator) -> Eigenpairs:
    return eigsh(H, k, which, tol, vectors=True, generator=generator, progress=False)


# ---- of one Hessian


def ends(H: LinearOperator, top: Eigenpairs, generator: torch.Generator) -> Row:
    """Sharpness λ_max, the lowest eigenvalue, and ‖Hv − λv‖ of both."""
    low = _end(H, 1, "smallest", 10 * TOL, generator)
    return {
        "sharpness": float(top.values[-1]),
        "sharpness_residual": float(top.residuals[-1]),
        "lowest": float(low.values[0]),
        "lowest_residual": float(low.residuals[0]),
    }


def sums(H: LinearOperator, probes: int, products: int, generator: torch.Generator) -> Row:
    """Σλ, √Σλ², (Σ|λ|)²/Σλ² and the negative share of Σ|λ|, each with its standard error."""
    found = spectrum(H, probes, products, k=1, generator=generator, progress=False)
    told = {
        "trace": found.trace,
        "frobenius": found.frobenius,
        "rank": found.effective_rank,
        "negative": found.negative_mass,
    }
    errors = {f"{name}_error": each.standard_error for name, each in told.items()}
    return {name: float(each) for name, each in told.items()} | errors


def functional(H: LinearOperator, G: LinearOperator, V: Tensor, probes: int, generator: torch.Generator) -> Row:
    """‖H − G‖_F/‖H‖_F, exact on the span of V, sampled on the rest, with the jackknife's error."""
    Z = deflated.rest(V, probes, generator)
    H_in, H_out, G_in, G_out = H @ V, H @ Z, G @ V, G @ Z
    share, error = deflated.ratio((H_in - G_in, H_out - G_out), (H_in, H_out))
    return {"functional": share, "functional_error": error}


def parts(H: Hessian, model: nn.Module, probes: int, generator: torch.Generator) -> dict[str, float]:
    """‖H_:j‖²/‖H‖² of each part j, from E ‖H v_j‖² over random v_j on it alone."""
    selections = {part: H.space.resolve(names) for part, names in members(model).items()}
    like = torch.empty(0, dtype=H.dtype)
    rows = [each.put(normal(probes, each.size, generator, like)) for each in selections.values()]
    squares = (H @ torch.cat(rows).mT).square().sum(0).view(len(rows), probes).mean(1)
    return dict(zip(selections, (squares / squares.sum()).tolist(), strict=True))


def members(model: nn.Module) -> Mapping[str, list[str]]:
    """Part → names of its groups; the same four parts for attention and for recurrences.

    >>> from evolute.zoo import StateSpace
    >>> found = members(StateSpace(5, 4, seed=0))
    >>> len(found["mixer"]), found["mlp"], found["around"]
    (7, ['layers.0.mlp.up', 'layers.0.mlp.down'], ['embed', 'unembed'])
    """
    out = {part: list[str]() for part in PARTS}
    for name in groups(model):
        out[_part(name)].append(name)
    return out


def _part(group: str) -> str:
    role = group.split(".")[2] if group.startswith("layers.") else group
    if role in ("attn", "mixer"):
        return "mixer"
    return role if role == "mlp" else "norms" if role.startswith("norm") else "around"


# ---- the slope of sharpness along training


def slopes(here: Moment, there: Moment | None, top: Eigenpairs, way: Tensor) -> Row:
    """∂_d λ_max · ‖w‖/λ_max along the way d of training: by a third derivative, and by a finite difference.

    `change` is what the whole way makes of λ_max, relative to it, and `predicted` what the slope says of that; None at
    the end, where d is the way that led there.
    """
    assert top.vectors is not None
    size, length = float(_weights(here).norm()), float(way.norm())
    d, sharpness = way / length, float(top.values[-1])
    slope = sharpness_slope(here.objective, top.vectors[:, -1], d)
    nudge = NUDGE * size
    ahead, behind = (_sharpness_at(here, sign * nudge * d) for sign in (1, -1))
    return {
        "slope": slope * size / sharpness,
        "slope_difference": (ahead - behind) / (2 * nudge) * size / sharpness,
        "way": length / size,
        "predicted": None if there is None else slope * length / sharpness,
        "change": None if there is None else _sharpness(there.objective) / sharpness - 1,
    }


def _sharpness(objective: Objective) -> float:
    generator = torch.Generator().manual_seed(0)
    return float(eigsh(Hessian(objective), 1, "largest", TOL, generator=generator, progress=False).values[-1])


def _sharpness_at(moment: Moment, step: Tensor) -> float:
    """λ_max of the same loss on the same sample, for other weights."""
    model = copy.deepcopy(moment.model)
    with torch.no_grad():
        for p, move in zip(model.parameters(), moment.objective.space.views(step), strict=True):
            p.add_(move)
    return _sharpness(Objective(model, [moment.sample], moment.objective.loss))
