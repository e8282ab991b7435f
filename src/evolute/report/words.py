"""The questions of the page, each answered for one run: a plain sentence, the numbers, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evolute.report import facts
from evolute.report.analysis import Analysis, Estimate
from evolute.report.derived import (
    by_kind,
    by_layer,
    layers_only,
    limit_of_training,
    limits,
    parting,
    ratio,
    stations,
    verdict,
)
from evolute.report.numbers import percent, short, times

ALIKE = 1.1  # layers up to this far apart
UNMEASURED = "This was not measured: there was no time for it."


@dataclass(frozen=True)
class Question:
    """One section of the page."""

    key: str
    short: str
    asked: str
    answer: Callable[[Analysis], str]
    facts: Callable[[Analysis], tuple[facts.Fact, ...]]
    meaning: str
    figures: tuple[str, ...]
    studies: tuple[str, ...]  # which go deeper


# ---------------------------------------------------------------- how sharp


def _sharp(run: Analysis) -> str:
    if run.sharpness is None:
        return UNMEASURED
    top, found = run.sharpness.largest.values[0], limits(run)
    if not found:
        return "No direction curves upwards, so curvature sets no limit to the step."
    text = f"The sharpest direction has curvature {short(top)}, so plain gradient descent is stable below a step of "
    text += f"{short(found[0].step.value)}"
    adam = next((each for each in found if each.method.startswith("Adam")), None)
    return f"{text}, and Adam below {short(adam.step.value)}." if adam else f"{text}."


# ---------------------------------------------------------------- minimum or saddle


def _saddle(run: Analysis) -> str:
    kind = verdict(run)
    if run.sharpness is None or run.sharpness.smallest is None:
        return UNMEASURED
    low, high = run.sharpness.smallest.values[0], run.sharpness.largest.values[0]
    if kind == "saddle":
        depth = percent(abs(low) / high) if high > 0 else short(abs(low))
        return (
            f"Not a minimum: there are directions that curve downwards, the steepest with {short(low)}, {depth} of "
            "the sharpest upward one."
        )
    if kind == "minimum":
        return f"A minimum, as far as curvature can tell: the lowest one that was found is {short(low)}."
    if low < 0 < high and low + run.sharpness.smallest.residuals[0] < 0:
        return (
            f"Like the floor of a valley: what curves downwards does so with {short(low)} at the most, "
            f"{percent(abs(low) / high)} of the sharpest upward curvature."
        )
    return "Like the floor of a valley: nothing measurable curves downwards, but many directions are flat."


# ---------------------------------------------------------------- where


def _where(run: Analysis) -> str:
    if run.blocks is None:
        return UNMEASURED
    kinds = sorted(by_kind(run.blocks), key=lambda share: -share.of_H.value)[:2]
    place = max(by_layer(run.blocks), key=lambda share: share.of_H.value)
    first, second = kinds[0], kinds[-1]
    text = f"{first.name} carry" if first.name.endswith("s") else f"{first.name} carries"
    text += f" {percent(first.of_H.value)} of the curvature with {percent(first.of_parameters)} of the parameters"
    text += f", then {second.name} with {percent(second.of_H.value)}" if len(kinds) > 1 else ""
    return f"{text}; of the places in the model, {_lower(place.name)} has the most, {percent(place.of_H.value)}."


def _lower(place: str) -> str:
    return {"Embedding": "the embedding", "Head": "the head"}.get(place, place.replace("Layer", "layer"))


# ---------------------------------------------------------------- spectrum


def _spectrum(run: Analysis) -> str:
    found = run.spectrum
    if found is None:
        return UNMEASURED
    rank = found.effective_rank
    return (
        f"A few sharp directions over a flat rest: the curvature is as if {short(rank.value, 2)} of the "
        f"{run.subject.parameters:,} directions had all of it."
        if rank.value < 0.1 * run.subject.parameters
        else f"Curvature is spread out: about {short(rank.value, 2)} of {run.subject.parameters:,} directions share it."
    )


# ---------------------------------------------------------------- depth


def _depth(run: Analysis) -> str:
    found = layers_only(stations(run.blocks)) if run.blocks else ()
    if run.blocks is None:
        return UNMEASURED
    if len(found) < 2:
        return "There is one layer at most, so there is no way through depth to follow."
    growth = ratio(found[-1].G, found[0].G)
    if growth.surely_above(ALIKE):
        return f"Curvature grows with depth: in the last layer it is {times(growth.value)} that of the first."
    if ratio(found[0].G, found[-1].G).surely_above(ALIKE):
        return f"Curvature fades with depth: in the first layer it is {times(1 / growth.value)} that of the last."
    return "Curvature is about the same in the first layer and in the last."


# ---------------------------------------------------------------- Gauss–Newton


def _newton(run: Analysis) -> str:
    if run.blocks is None:
        return UNMEASURED
    found = parting(run.blocks)
    share, rest = found.outer.value, found.functional.value
    if rest < 0.15:
        return f"Nearly all: Gauss–Newton has {percent(share)} of the norm of H, the functional part {percent(rest)}."
    if rest < 0.6:
        return f"Most of it: Gauss–Newton has {percent(share)} of the norm of H, the functional part {percent(rest)}."
    return f"Only a part: the functional part is {percent(rest)} as large as H itself, Gauss–Newton {percent(share)}."


# ---------------------------------------------------------------- the questions, in order

QUESTIONS = (
    Question(
        "sharpness",
        "Sharpness",
        "How sharp is it, and what step size does that allow?",
        _sharp,
        facts.sharpness,
        "Walking down a valley with steps that are too long, one climbs up the other side higher than one came. How "
        "long is too long is set by the sharpest direction: its curvature is the largest eigenvalue of the Hessian, "
        "λ_max. Momentum nearly doubles the limit. Adam divides every coordinate by the usual size of its gradient, "
        "so its limit comes from the curvature after that division, with the divisors held still.",
        ("step-sizes", "training"),
        ("taylor", "dynamics"),
    ),
    Question(
        "minimum",
        "Minimum or saddle",
        "Is this a minimum or a saddle?",
        _saddle,
        facts.minimum,
        "At a minimum no direction curves downwards. Where some do, the loss can still fall along them, "
        "and the point is a saddle, or on its way. Stems above zero are upward curvature, stems below are downward; "
        "whiskers show how far an eigenvalue may be from where it is drawn.",
        ("eigenvalues",),
        ("gauss_newton", "landscape"),
    ),
    Question(
        "where",
        "Where it is",
        "Where is the curvature?",
        _where,
        facts.where,
        "Each cell says how strongly the gradient of one weight matrix answers to a change of another: the typical "
        "size of an entry of that block of the Hessian. The Hessian is the sum of two parts. H_o, the Gauss–Newton "
        "part, is what would be there if the model were linear in its weights; H_f, the functional part, is what the "
        "model's own bending adds. The spread compares every weight matrix with itself, entry by entry, so size "
        "plays no role.",
        ("blocks", "shares", "spread"),
        ("dominance", "heterogeneity", "softmax"),
    ),
    Question(
        "spectrum",
        "Spectrum",
        "What does the spectrum look like?",
        _spectrum,
        facts.spectrum,
        "The eigenvalues are the curvatures of as many directions as there are parameters. Height says how many lie "
        "where, per power of ten, on an axis that is logarithmic on both sides of zero; orange is negative. Ticks on "
        "top are the outermost ones, found one by one. The band is one standard error, over random probes.",
        ("density",),
        ("sinks",),
    ),
    Question(
        "depth",
        "Depth",
        "How does curvature flow through depth?",
        _depth,
        facts.depth,
        "From the embedding through the layers to the head: the norm of the part of the Hessian that belongs to each "
        "place alone. Where nothing normalises in between, curvature tends to grow from layer to layer.",
        ("depth",),
        ("flow", "layernorm", "growth"),
    ),
    Question(
        "gauss-newton",
        "Gauss–Newton",
        "How much of it is Gauss–Newton?",
        _newton,
        facts.gauss_newton,
        "H = H_o + H_f, drawn as arrows: lengths are Frobenius norms, and the angle is the true one. Many methods "
        "replace H by H_o, which costs less and has no negative part where the loss is convex in the model's outputs. "
        "The shorter H_f is, the better that works; it shrinks as the model fits its data.",
        ("parts",),
        ("gauss_newton", "approximations"),
    ),
)


def lead(run: Analysis) -> str:
    """The whole in two sentences."""
    used, kind = limit_of_training(run), verdict(run)
    found = {"saddle": "still has directions that curve downwards", "minimum": "has only directions that curve upwards"}
    state = found.get(kind, "has hardly a direction that curves downwards")
    text = f"At a loss of {short(run.point.loss)}, this model {state}."
    if used and run.training and run.training.lr:
        text += f" It was trained with steps of up to {run.training.lr:g}, {_beside(run.training.lr, used.step)}."
    return text


def _beside(lr: float, limit: Estimate) -> str:
    """Above or below the largest stable step, if that is known well enough."""
    if limit.surely_below(lr):
        return f"above the {short(limit.value)} that is stable here"
    if limit.surely_above(lr):
        return f"below the {short(limit.value)} that is stable here"
    return f"which is not to be told apart from the {limit} that is stable here"
