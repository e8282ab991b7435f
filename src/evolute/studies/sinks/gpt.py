"""A small GPT under a sink: both ends of its spectrum, its bulk, and the spectrum of its queries and keys."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch

from evolute.engine.loss import Loss
from evolute.engine.objective import Objective
from evolute.engine.operators import Hessian
from evolute.errors import StudyError
from evolute.krylov import eigsh, spectrum
from evolute.krylov.spectrum_result import Spectrum
from evolute.linop.operator import LinearOperator
from evolute.studies.first_token import shares, with_sink
from evolute.studies.study import Cell, Row
from evolute.studies.subjects import Moment, Subject, at
from evolute.zoo import cross_entropy

ENDS = 10  # eigenvalues at each end that do not count as bulk
POINTS = 96  # of a density that is kept


def measure(cell: Cell) -> list[Row]:
    """Under one sink: untrained, imposed on weights that were trained without it, or trained with it."""
    sink, point = cell["sink"], cell["point"]
    ends = moments(cell["seed"], cell["width"], cell["layers"], cell["steps"], sink if point == "trained" else 0.0)
    model, data = copy.deepcopy(ends[point == "untrained"].model), ends[0].data
    with_sink(model, sink)
    sample = data.train.first(cell["samples"])
    objective = Objective(model, [(sample.x, sample.y)], Loss(*cross_entropy))
    told = {"kind": "gpt", "point": point, "sink": sink, "seed": cell["seed"], "loss": objective.value()}
    layers = shares(model, sample.x)
    return [
        {
            **told,
            "attention": sum(layers) / len(layers),
            "attention_by_layer": layers,
            **curvature(objective, cell["probes"], cell["lanczos"], cell["seed"]),
        }
    ]


@lru_cache(maxsize=4)
def moments(seed: int, width: int, layers: int, steps: int, sink: float) -> tuple[Moment, Moment]:
    """After training under that sink, and before; English, pre-norm, two heads."""
    options = {"sink": sink}
    subject = Subject("gpt_english", width=width, layers=layers, steps=steps, samples=1, seed=seed, options=options)
    return at(subject, steps), at(subject, 0)


# ---- what of the curvature


def curvature(objective: Objective, probes: int, steps: int, seed: int) -> Row:
    """λ_max and λ_min of H, the largest of its value block, and the bulk of H and of its queries and keys alone."""
    H = Hessian(objective)
    attention, values = _named(H, ".attn.q", ".attn.k"), _named(H, ".attn.v")
    ends = eigsh(H, k=1, generator=_numbers(seed), progress=False)
    top_v = eigsh(values, k=1, which="largest", generator=_numbers(seed), progress=False)
    whole = spectrum(H, probes, steps, k=ENDS, generator=_numbers(seed), progress=False)
    pairs = spectrum(attention, probes, steps, k=ENDS, generator=_numbers(seed), progress=False)
    return {
        "top": float(ends.values[-1]),
        "bottom": float(ends.values[0]),
        "residual": float(ends.relative.max()),
        "value": float(top_v.values[-1]),
        **_bulk(whole, "whole"),
        **_bulk(pairs, "bulk"),
        "bulk_top": float(pairs.largest[0]),
        "negative": float(pairs.negative_mass),
        "density": _density(pairs),
    }


def _named(H: LinearOperator, *ends: str) -> LinearOperator:
    """H on the groups whose names end so."""
    names = [name for name in H.space.groups if name.endswith(ends)]
    if not names:
        raise StudyError(f"expected groups with names like 'layers.0{ends[0]}', got {', '.join(H.space.groups)}.")
    return H.restrict(names)


def _numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _bulk(s: Spectrum, name: str) -> Row:
    """The mean |λ| of all but the outermost eigenvalues, and its standard error."""
    outer = min(ENDS, s.n // 8)
    ends = float(s.largest[:outer].abs().sum() + s.smallest[:outer].abs().sum())
    rest, left = s.n - 2 * outer, float(s.nuclear) - ends
    if left <= 0:
        raise StudyError(f"{s.products} products are too few to tell a bulk from its ends; raise lanczos or probes.")
    return {name: left / rest, f"{name}_error": s.nuclear.standard_error / rest}


def _density(s: Spectrum) -> list[list[float]]:
    """Pairs (λ, share of the eigenvalues per unit of λ)."""
    step = max(1, len(s.grid) // POINTS)
    return torch.stack([s.grid, s.density], 1)[::step].tolist()
