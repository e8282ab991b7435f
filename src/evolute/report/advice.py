"""What follows from the measurements: one rule per function, silent unless its number says so beyond its error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evolute.report.analysis import Analysis, Estimate
from evolute.report.derived import layers_only, limit_of_training, parting, ratio, stations, verdict
from evolute.report.numbers import percent, short, times

ILL_CONDITIONED = 100.0  # λ_max over the smallest |λ| that is known
UNLIKE = 3.0  # between layers
NEGATIVE = 0.02  # of Σ|λ|
MUCH_FUNCTIONAL, LITTLE_FUNCTIONAL = 0.3, 0.15  # of ‖H‖
FALLING = ("cosine", "linear", "decay", "step", "sqrt")  # in the name of a schedule
ADAPTIVE = ("adam", "adamw", "adagrad", "rmsprop", "lamb", "lion")


@dataclass(frozen=True)
class Advice:
    """What to do, why, and the measurement that it rests on."""

    title: str
    text: str
    because: str


def step_too_large(analysis: Analysis) -> Advice | None:
    """The learning rate was above the largest stable step of the optimiser that was used."""
    limit, lr = limit_of_training(analysis), analysis.training.lr if analysis.training else None
    if limit is None or not lr or not limit.step.surely_below(lr):
        return None
    schedule = (analysis.training.schedule if analysis.training else None) or ""
    falls = any(word in schedule.lower() for word in FALLING)
    return Advice(
        f"{'Let the learning rate fall' if falls else 'Lower the learning rate'} below about "
        f"{short(limit.step.value, 2)} to settle here",
        f"At its highest rate, {lr:g}, {limit.method.partition(',')[0]} cannot come to rest at this point: along the "
        "sharpest direction each step overshoots by more than it corrects. A schedule that falls"
        f"{f', as {schedule} did here,' if falls else ''} lets it settle once it is below.",
        f"{limit.formula} = {limit.step}, and training used {lr:g}.",
    )


def ill_conditioned(analysis: Analysis) -> Advice | None:
    """Curvatures differ by so much that one step size cannot serve them all."""
    condition = analysis.spectrum.condition if analysis.spectrum else None
    if condition is None or condition < ILL_CONDITIONED:
        return None
    used = ((analysis.training.optimizer if analysis.training else None) or "").lower()
    return Advice(
        "Keep the adaptive optimiser" if used in ADAPTIVE else "Use an adaptive optimiser",
        "A step small enough for the sharpest direction hardly moves the flat ones. Optimisers that scale each "
        "parameter by itself (Adam) or whole weight matrices (Shampoo, K-FAC) can take much of that ratio away; "
        "plain gradient descent cannot.",
        f"The curvatures that are known differ by a factor of at least {times(condition).rstrip('×')}.",
    )


def negative_curvature(analysis: Analysis) -> Advice | None:
    """There are directions that curve down, and they carry weight: this is no minimum yet."""
    spectrum = analysis.spectrum
    if verdict(analysis) != "saddle" or spectrum is None or not spectrum.negative.surely_above(NEGATIVE):
        return None
    assert analysis.sharpness is not None and analysis.sharpness.smallest is not None
    return Advice(
        "Not yet at a minimum: momentum, and clipped gradients",
        "Some directions curve downwards, so the loss can still fall without the gradient being large. Momentum "
        "carries training along them; clipping keeps a single step from running away where the surface falls off.",
        f"{percent(spectrum.negative.value, spectrum.negative.error)} of the curvature is negative, "
        f"the lowest eigenvalue is {short(analysis.sharpness.smallest.values[0])}.",
    )


def unlike_layers(analysis: Analysis) -> Advice | None:
    """Per parameter, one layer curves several times more than another."""
    found = layers_only(stations(analysis.blocks)) if analysis.blocks else ()
    if len(found) < 2:
        return None
    values = [(Estimate(s.H.value / s.size, s.H.error / s.size), s.name) for s in found]
    (small, least), (large, most) = min(values, key=lambda v: v[0].value), max(values, key=lambda v: v[0].value)
    apart = ratio(large, small)
    if not apart.surely_above(UNLIKE):
        return None
    return Advice(
        "Give layers their own learning rates",
        f"{most} is sharper than {least}, so a rate that is safe for the one is timid for the other. Scale rates by "
        "layer (LARS, LAMB, layer-wise decay), or use an optimiser that does.",
        f"Per parameter, {most} has {apart} times the curvature of {least}.",
    )


def grows_with_depth(analysis: Analysis) -> Advice | None:
    """The Gauss–Newton part of the last layer is several times that of the first."""
    found = layers_only(stations(analysis.blocks)) if analysis.blocks else ()
    if len(found) < 2:
        return None
    growth = ratio(found[-1].G, found[0].G)
    if not growth.surely_above(UNLIKE):
        return None
    return Advice(
        "Normalise before each sublayer",
        "Curvature grows from layer to layer, as it does where nothing keeps the size of activations in check. "
        "Normalisation in front of attention and feed-forward (pre-norm) removes most of that growth; "
        "where the model has it already, smaller first weights in the deep layers help.",
        f"From the first layer to the last ‖H_o‖ grows by a factor of {growth}.",
    )


def gauss_newton_misses(analysis: Analysis) -> Advice | None:
    """A good part of H is not in G."""
    share = parting(analysis.blocks).functional if analysis.blocks else None
    if share is None or not share.surely_above(MUCH_FUNCTIONAL):
        return None
    return Advice(
        "Do not take Gauss–Newton for the Hessian here",
        "Methods that are built on it (K-FAC, Fisher pruning, most quantisation) do not see a good part of the "
        "curvature at this point. Check their conclusions against the Hessian itself.",
        f"The functional part has {percent(share.value, share.error)} of the norm of H.",
    )


def gauss_newton_serves(analysis: Analysis) -> Advice | None:
    """H is G but for a little."""
    share = parting(analysis.blocks).functional if analysis.blocks else None
    if share is None or not share.surely_below(LITTLE_FUNCTIONAL):
        return None
    return Advice(
        "Gauss–Newton is a good stand-in here",
        "Methods that are built on it (K-FAC, Fisher pruning, most quantisation) see what makes nearly all of the norm "
        "of H at this point, and its products cost less than those with the Hessian. What curves downwards they do not "
        "see.",
        f"The functional part has only {percent(share.value, share.error)} of the norm of H.",
    )


RULES: tuple[Callable[[Analysis], Advice | None], ...] = (
    step_too_large,
    negative_curvature,
    ill_conditioned,
    unlike_layers,
    grows_with_depth,
    gauss_newton_misses,
    gauss_newton_serves,
)


def advice(analysis: Analysis) -> tuple[Advice, ...]:
    """All that the measurements call for, the most pressing first."""
    found = (rule(analysis) for rule in RULES)
    return tuple(each for each in found if each is not None)
