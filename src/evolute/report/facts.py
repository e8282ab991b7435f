"""The numbers beside each answer, with their errors and what they are."""

from __future__ import annotations

from dataclasses import dataclass

from evolute.report.analysis import Analysis, Estimate
from evolute.report.derived import layers_only, limits, parting, ratio, spread, stations
from evolute.report.naming import label
from evolute.report.numbers import percent, short, times, with_error


@dataclass(frozen=True)
class Fact:
    """A number with its name, and what it is."""

    name: str
    value: str
    note: str = ""


def sharpness(run: Analysis) -> tuple[Fact, ...]:
    if run.sharpness is None:
        return ()
    largest, data = run.sharpness.largest, run.sharpness.data
    facts = [Fact("Largest eigenvalue λ_max", with_error(largest.values[0], data or 0.0), _data_note(data))]
    facts += [Fact(each.method, str(each.step), f"largest stable step, {each.formula}") for each in limits(run)]
    if run.point.along_gradient is not None:
        facts.append(Fact("Along the gradient", short(run.point.along_gradient), "curvature of the way downhill"))
    return tuple(facts)


def _data_note(data: float | None) -> str:
    return "± how much it would change with other data" if data else "curvature of the sharpest direction"


def minimum(run: Analysis) -> tuple[Fact, ...]:
    facts: list[Fact] = []
    low = run.sharpness.smallest if run.sharpness else None
    if low:
        within = f"within {short(low.residuals[0], 1)} of a true one"
        facts.append(Fact("Lowest eigenvalue λ_min", short(low.values[0]), within))
    if run.spectrum:
        negative = run.spectrum.negative
        facts.append(Fact("Negative curvature", percent(negative.value, negative.error), "share of the sum of |λ|"))
    gradient = run.point.gradient
    note = "± how much it would change with other data" if gradient.error else "length of ∇L"
    facts.append(Fact("Gradient", str(gradient), note))
    return tuple(facts)


def where(run: Analysis) -> tuple[Fact, ...]:
    found = spread(run.blocks) if run.blocks else None
    if run.blocks is None or found is None:
        return ()
    between = f"typical entry of {label(found.largest)} over that of {label(found.smallest)}"
    return (
        Fact("Largest over smallest", _factor(found.ratio), between),
        Fact(
            "Coefficient of variation", short(found.variation), "standard deviation over mean, of the typical entries"
        ),
        Fact(
            "Pairs of groups measured", f"{len(run.blocks.groups) ** 2:,}", f"{run.blocks.probes} probes of each group"
        ),
    )


def _factor(estimate: Estimate) -> str:
    return f"{with_error(estimate.value, estimate.error)}×" if estimate.value < 1e4 else times(estimate.value)


def spectrum(run: Analysis) -> tuple[Fact, ...]:
    found = run.spectrum
    if found is None:
        return ()
    facts = [
        Fact("Trace", str(found.trace), "sum of all eigenvalues"),
        Fact("Frobenius norm", str(found.frobenius), "root of the sum of their squares"),
        Fact("Effective rank", str(found.effective_rank), "(Σ|λ|)² / Σλ²"),
    ]
    if found.condition is not None:
        facts.append(Fact("Condition number", f"at least {short(found.condition, 2)}", found.condition_on))
    return tuple(facts)


def depth(run: Analysis) -> tuple[Fact, ...]:
    facts: list[Fact] = []
    found = layers_only(stations(run.blocks)) if run.blocks else ()
    if len(found) > 1:
        facts.append(Fact("H_o, last over first layer", str(ratio(found[-1].G, found[0].G)), "norms of the blocks"))
        facts.append(Fact("H_f, last over first layer", str(ratio(found[-1].F, found[0].F)), "norms of the blocks"))
    if run.sharpness and run.sharpness.layers:
        name, value = max(run.sharpness.layers, key=lambda layer: layer[1])
        facts.append(Fact("Sharpest layer alone", short(value), f"λ_max of {name}, the rest held still"))
    return tuple(facts)


def gauss_newton(run: Analysis) -> tuple[Fact, ...]:
    if run.blocks is None:
        return ()
    found = parting(run.blocks)
    facts = [
        Fact("‖H_o‖ / ‖H‖", str(found.outer), "Gauss–Newton part"),
        Fact("‖H_f‖ / ‖H‖", str(found.functional), "functional part"),
        Fact("Cosine of H and H_o", str(found.cosine), "1 is the same direction"),
    ]
    if run.sharpness and run.sharpness.outer:
        top = run.sharpness.outer.values[0] / run.sharpness.largest.values[0]
        facts.append(Fact("λ_max(H_o) / λ_max(H)", short(top), "of the sharpest directions"))
    return tuple(facts)
