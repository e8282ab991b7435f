"""What the template fills in for each run: tiles, costs, provenance, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evolute.report.advice import Advice, advice
from evolute.report.analysis import Analysis, Estimate
from evolute.report.derived import limit_of_training, limits, parting, root
from evolute.report.facts import Fact
from evolute.report.numbers import percent, short, with_error
from evolute.report.words import lead

OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "momentum": "SGD with momentum"}
COLOURS = ("blue", "orange", "teal", "violet", "rose")


@dataclass(frozen=True)
class RunView:
    """One run, in words."""

    name: str
    colour: str
    lead: str
    subject: str
    tiles: tuple[Fact, ...]
    advice: tuple[Advice, ...]
    sure: str
    checks: tuple[Fact, ...]
    notes: tuple[str, ...]
    costs: tuple[tuple[str, str, str, str], ...]
    provenance: tuple[Fact, ...]


def view(run: Analysis, place: int) -> RunView:
    return RunView(
        run.name,
        COLOURS[place % len(COLOURS)],
        lead(run),
        _subject(run),
        _tiles(run),
        advice(run),
        _sure(run),
        _checks(run),
        _notes(run),
        _costs(run),
        _provenance(run),
    )


def _subject(run: Analysis) -> str:
    subject, training = run.subject, run.training
    told = [subject.model, f"{subject.parameters:,} parameters", subject.data]
    if training and training.steps:
        told.append(
            f"{training.steps:,} steps"
            + (f" of {OPTIMIZERS.get(training.optimizer, training.optimizer)}" if training.optimizer else "")
        )
    if training and training.accuracy is not None:
        told.append(f"{percent(training.accuracy)} right")
    return " · ".join(each for each in told if each)


def _tiles(run: Analysis) -> tuple[Fact, ...]:
    tiles = [Fact("Loss", short(run.point.loss), f"gradient {short(run.point.gradient.value, 2)}")]
    if run.sharpness:
        data = run.sharpness.data or 0.0
        tiles.append(
            Fact("Sharpness λ_max", with_error(run.sharpness.largest.values[0], data), "largest eigenvalue of H")
        )
    steps = limits(run)
    if steps:
        step = limit_of_training(run) or steps[0]
        error = f"± {short(step.step.error, 1)}, " if step.step.error else ""
        tiles.append(Fact("Largest stable step", short(step.step.value), f"{error}{step.method}"))
    if run.spectrum:
        tiles.append(Fact("Negative curvature", percent(run.spectrum.negative.value), "share of the sum of |λ|"))
    elif run.blocks:
        tiles.append(Fact("Gauss–Newton part", percent(parting(run.blocks).outer.value), "of the norm of H"))
    return tuple(tiles)


# ---------------------------------------------------------------- how sure


def _sure(run: Analysis) -> str:
    unfinished = [cost.what for cost in run.costs if not cost.complete]
    time = _unbroken(duration(run.provenance.seconds))
    text = f"{run.products:,} products in {time}, on {run.subject.terms:,.0f} loss terms"
    if unfinished or run.notes:
        return f"{text}; not everything was finished, see below."
    return f"{text}; what was sampled has its error beside it."


def _unbroken(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _checks(run: Analysis) -> tuple[Fact, ...]:
    if run.blocks is None or run.spectrum is None:
        return ()
    return (
        _check("Trace, twice", run.blocks.H.trace, run.spectrum.trace),
        _check("Frobenius norm, twice", root(run.blocks.H.square), run.spectrum.frobenius),
    )


def _check(name: str, a: Estimate, b: Estimate) -> Fact:
    error = math.hypot(a.error, b.error)
    apart = f", {short(abs(a.value - b.value) / error, 2)} standard errors apart" if error else ""
    return Fact(name, f"{a} and {b}", f"from block probes and from Lanczos, independently{apart}")


def _notes(run: Analysis) -> tuple[str, ...]:
    notes = list(run.notes)
    if run.sharpness:
        for name, end in (("largest", run.sharpness.largest), ("lowest", run.sharpness.smallest)):
            if end is None:
                continue
            loose = sum(r > 1e-2 * abs(v) for v, r in zip(end.values, end.residuals, strict=True))
            if loose:
                notes.append(
                    f"{loose} of the {len(end.values)} {name} eigenvalues have a residual above 1 % of their size; "
                    "their whiskers say how far off they may be."
                )
    if run.adaptive and not run.adaptive.converged:
        notes.append("The limit of Adam has not converged.")
    return tuple(notes)


def _costs(run: Analysis) -> tuple[tuple[str, str, str, str], ...]:
    return tuple(
        (
            cost.what[0].upper() + cost.what[1:],
            f"{cost.products:,}",
            duration(cost.seconds),
            "complete" if cost.complete else "cut short",
        )
        for cost in run.costs
    )


def duration(seconds: float) -> str:
    """As people say it.

    >>> duration(0.4), duration(42.3), duration(200.0)
    ('0.4 s', '42 s', '3 min 20 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _provenance(run: Analysis) -> tuple[Fact, ...]:
    subject, where = run.subject, run.provenance
    told = {
        "Model": subject.model,
        "Data": subject.data,
        "Fingerprint of the data": subject.fingerprint,
        "Batches": f"{subject.batches:,}",
        "Precision": subject.dtype,
        "Device": f"{subject.device}, {where.threads} thread{'s' * (where.threads > 1)}"
        if subject.device == "cpu"
        else subject.device,
        "Seed": str(where.seed),
        "Versions": ", ".join(f"{name} {version}" for name, version in where.versions),
    }
    return tuple(Fact(name, value) for name, value in told.items() if value)


# ---------------------------------------------------------------- side by side


@dataclass(frozen=True)
class Cell:
    """A number, and how it differs from the first run's."""

    value: str
    change: str = ""


@dataclass(frozen=True)
class Row:
    """One number of every run."""

    name: str
    cells: tuple[Cell, ...]


def comparison(runs: Sequence[Analysis]) -> tuple[Row, ...]:
    """The key numbers of all runs, with the factor to the first."""
    if len(runs) < 2:
        return ()
    names = {
        "Loss": lambda r: r.point.loss,
        "Gradient": lambda r: r.point.gradient.value,
        "λ_max": lambda r: r.sharpness and r.sharpness.largest.values[0],
        "λ_min": lambda r: r.sharpness and r.sharpness.smallest and r.sharpness.smallest.values[0],
        "Trace": lambda r: r.spectrum and r.spectrum.trace.value,
        "Frobenius norm": lambda r: r.spectrum and r.spectrum.frobenius.value,
        "Negative curvature": lambda r: r.spectrum and r.spectrum.negative.value,
        "Effective rank": lambda r: r.spectrum and r.spectrum.effective_rank.value,
        "‖H_f‖ / ‖H‖": lambda r: r.blocks and parting(r.blocks).functional.value,
    }
    return tuple(_row(name, [number(run) for run in runs]) for name, number in names.items())


def _row(name: str, values: Sequence[float | None]) -> Row:
    first = values[0]
    cells = [Cell("–" if v is None else (percent(v) if name.startswith("Negative") else short(v))) for v in values]
    if first:
        cells[1:] = [
            Cell(c.value, short(v / first, 2) + "×" if v and v / first > 0 else "")
            for c, v in zip(cells[1:], values[1:], strict=True)
        ]
    return Row(name, tuple(cells))
