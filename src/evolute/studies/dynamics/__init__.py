"""How the Hessian changes along training, from the first step on, and whether it comes to the edge of stability.

Theory: on a quadratic, gradient descent is stable for η λ_max < 2, heavy ball for η λ_max < 2 (1 + β), and Adam for
η λ_max(P^-½ H P^-½) < (2 + 2β₁)/(1 − β₁), P = √v̂ + ε. Observed for full batches: λ_max grows ("progressive
sharpening") until it meets that limit, and hovers about it: beyond, the step overshoots, and the overshoot turns to
flatter places. Cross-entropy has curvature p(1 − p), which goes away as the labels are fitted: then λ_max has to fall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies.dynamics import measure as dynamics_measure
from evolute.studies.dynamics import table as dynamics_table
from evolute.studies.dynamics.training import SETUPS
from evolute.studies.study import Cell, Config, Row, Study, Verdict
from evolute.studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEAR = 0.8  # of the limit: from here on a training is at the edge


@dataclass(frozen=True)
class Dynamics(Config):
    """Model and optimisers; `fraction` of the limit at first for sgd, `heavy` for momentum, `rate` for adam and adamw.

    `times` are the steps that are looked at, as far as there are any; `batch` samples per step, 0 for all.
    """

    model: str = "vit_digits"
    setups: tuple[str, ...] = tuple(SETUPS)
    fraction: float = 0.3
    heavy: float = 0.06
    rate: float = 0.003
    steps: int = 300
    times: tuple[int, ...] = (0, 1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 170, 230, 300)
    batch: int = 0
    width: int = 16
    heads: int = 2
    layers: int = 1
    samples: int = 128
    probes: int = 2
    products: int = 16
    repeats: int = 6

    def __post_init__(self) -> None:
        unknown = [name for name in self.setups if name not in SETUPS]
        if unknown or not self.setups:
            got = ", ".join(unknown) or "none"
            raise StudyError(f"setups: expected some of {', '.join(SETUPS)}, got {got}.")
        for name in ("fraction", "heavy", "rate", "steps"):
            if getattr(self, name) <= 0:
                raise StudyError(f"{name}: expected a positive number, got {getattr(self, name)}.")
        for name in ("repeats", "probes"):
            if getattr(self, name) < 2:
                raise StudyError(f"{name}: expected 2 or more, for an interval, got {getattr(self, name)}.")
        if self.batch < 0 or self.products < 4:
            raise StudyError(
                f"batch: expected 0 (all) or more, and products 4 or more, got {self.batch} and {self.products}."
            )
        if len([time for time in self.times if 0 <= time <= self.steps]) < 3:
            raise StudyError(f"times: expected three or more from 0 to {self.steps}, got {list(self.times)}.")


class DynamicsStudy(Study[Dynamics]):
    """One cell per optimiser and repeat: a training, looked at on its way."""

    name = "dynamics"
    claim = "Training sharpens the loss up to the edge of stability of its optimiser, and keeps it there."
    config = Dynamics

    def cells(self, config: Dynamics) -> Sequence[Cell]:
        steps = sorted({time for time in config.times if 0 <= time <= config.steps})
        more = {"steps": steps, "batch": config.batch, "probes": config.probes, "products": config.products}
        return [
            {"subject": asdict(_subject(config, config.seed + i)), "setup": name, "rate": _rate(config, name), **more}
            for i in range(config.repeats)
            for name in config.setups
        ]

    def measure(self, cell: Cell) -> list[Row]:
        return dynamics_measure.measured(cell)

    def table(self, config: Dynamics, rows: Sequence[Row]) -> list[Row]:
        return dynamics_table.made(rows)

    def verdict(self, config: Dynamics, table: Sequence[Row]) -> Verdict:
        return judged(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.dynamics.figure import drawn

        return drawn(table, settings)


def _subject(config: Dynamics, seed: int) -> Subject:
    sizes = (config.width, config.heads, config.layers, config.steps)
    return Subject(config.model, *sizes, samples=config.samples, seed=seed)


def _rate(config: Dynamics, name: str) -> float:
    """Adam's is a rate; the others' is a fraction of the limit at the first step, which is only known there."""
    if SETUPS[name].adaptive:
        return config.rate
    return config.heavy if name == "momentum" else config.fraction


# ---- what it says


def judged(table: Sequence[Row]) -> Verdict:
    """Does the edge come to `NEAR`, and does it stay there? Of those whose rate falls, only the first is asked."""
    rows = [row for row in table if row["kind"] == "summary" and "peak" in row]
    if not rows:
        return Verdict("undecided", "no optimiser was measured with two seeds.")
    there = [row for row in rows if row["peak_low"] >= NEAR]
    never = [row for row in rows if row["peak_high"] < NEAR]
    constant = [row for row in rows if SETUPS[row["setup"]].schedule == "constant"]
    stay = [row for row in constant if "late" in row and row["late_low"] >= NEAR]
    if len(there) == len(rows) and len(stay) == len(constant):
        answer = "holds"
    elif there:
        answer = "holds in part"
    else:
        answer = "does not hold here" if len(never) > len(rows) / 2 else "undecided"
    return Verdict(answer, _sentence(rows, len(there), len(constant), len(stay)))


def _sentence(rows: Sequence[Row], there: int, constant: int, stay: int) -> str:
    return (
        f"{there} of {len(rows)} optimisers surely come to {NEAR:g} of their limit of stability or beyond, {stay} of "
        f"{constant} with a constant rate surely stay there over the last third. {'; '.join(map(_of_setup, rows))}."
    )


def _of_setup(row: Row) -> str:
    """One optimiser in numbers."""
    constant = SETUPS[row["setup"]].schedule == "constant"
    late = f", late {_interval(row, 'late')}" if constant and "late" in row else ""
    lost = f", {row['diverged']} of {row['runs']} runs diverged" if row["diverged"] else ""
    return (
        f"{row['setup']}: edge at most {_interval(row, 'peak')}{late}, λ_max up to {row['sharpening']:.3g} times the "
        f"first, negative share of Σ|λ| {row['negative_first']:.2f} → {row['negative_last']:.2f}{lost}"
    )


def _interval(row: Row, name: str) -> str:
    return f"{row[name]:.2f} [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"


STUDY = DynamicsStudy()
