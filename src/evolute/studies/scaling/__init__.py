"""Test loss and curvature of a sweep of trained models over model size N and data size D, and what they foretell.

Every sample is seen once, so D is data as well as training. The test loss is fitted by E + A/N^α + B/D^β, and beside it
by laws with 1/√D, 1/D and without E; sharpness λ_max, trace, effective rank (Σ|λ|)²/Σλ² and the critical batch
tr(HΣ)/gᵀHg by C N^a D^b, and beside it without N, without D, and without both. The largest N and the largest D are held
out: a law is worth what it says of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies.scaling.measure import DATA, RATE, run
from evolute.studies.scaling.table import MEASURES, table_of
from evolute.studies.study import Cell, Config, Row, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENOUGH = 0.8  # of the held-out runs within intervals of 95 %


@dataclass(frozen=True)
class ScalingSettings(Config):
    """The sweep; probes × depth products for each spectrum, folds × fold samples for the gradient noise."""

    model: str = "gpt_english"
    widths: tuple[int, ...] = (4, 8, 16, 32, 64)
    data: tuple[int, ...] = (500, 1000, 2000, 4000, 8000)
    heads: int = 2
    layers: int = 1
    rate: float = RATE
    samples: int = 32
    probes: int = 2
    depth: int = 20
    folds: int = 10
    fold: int = 480
    repeats: int = 2
    bootstrap: int = 200


class ScalingStudy(Study[ScalingSettings]):
    """One cell per width, data size and repeat."""

    name = "scaling"
    claim = "Test loss and curvature follow power laws in model size and data size, which foretell larger runs."
    config = ScalingSettings

    def cells(self, config: ScalingSettings) -> Sequence[Cell]:
        _check(config)
        names = ("model", "heads", "layers", "rate", "samples", "probes", "depth", "folds", "fold")
        fixed = {name: getattr(config, name) for name in names}
        return [
            {"width": width, "D": size, "seed": config.seed + repeat} | fixed
            for width in config.widths
            for size in config.data
            for repeat in range(config.repeats)
        ]

    def measure(self, cell: Cell) -> list[Row]:
        return [run(cell)]

    def table(self, config: ScalingSettings, rows: Sequence[Row]) -> list[Row]:
        return table_of(rows, config.bootstrap)

    def verdict(self, config: ScalingSettings, table: Sequence[Row]) -> Verdict:
        return judged(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.scaling.figure import draw

        return draw(table, settings)


def _check(config: ScalingSettings) -> None:
    if config.model not in DATA:
        raise StudyError(f"model: expected {' or '.join(DATA)}, got {config.model!r}.")
    for name in ("widths", "data"):
        if len(set(getattr(config, name))) < 4:
            got = list(getattr(config, name))
            raise StudyError(f"{name}: expected at least 4 sizes, of which the largest is held out, got {got}.")
    least = {"folds": 3, "fold": 1, "probes": 2, "depth": 1, "samples": 1, "repeats": 1, "bootstrap": 20}
    for name, count in least.items():
        if getattr(config, name) < count:
            raise StudyError(f"{name}: expected {count} or more, got {getattr(config, name)}.")


# ---- what is made of it


def judged(table: Sequence[Row]) -> Verdict:
    """Held-out runs within the intervals of what the other runs foretold."""
    fits = {row["value"]: row for row in table if row["kind"] == "fit"}
    shares = {name: _share(table, name) for name in fits}
    known = {name: share for name, share in shares.items() if share is not None}
    if not known:
        return Verdict("undecided", "no held-out run was measured.")
    good = [name for name, share in known.items() if share >= ENOUGH]
    answer = "holds" if len(good) == len(known) else "holds in part" if good else "does not hold here"
    return Verdict(answer, _sentence(table, fits, known))


def _share(table: Sequence[Row], value: str) -> float | None:
    rows = [row for row in table if row["kind"] == "held" and row["value"] == value]
    return sum(row["low"] <= row["true"] <= row["high"] for row in rows) / len(rows) if rows else None


def _sentence(table: Sequence[Row], fits: Mapping[str, Row], known: Mapping[str, float]) -> str:
    held = ", ".join(f"{MEASURES[name]} {share:.0%}" for name, share in known.items())
    misses = [
        abs(row["true"] / row["predicted"] - 1) for row in table if row["kind"] == "held" and row["value"] == "loss"
    ]
    parts = [f"of the held-out runs (largest N, largest D), within 95 % intervals: {held}"]
    if misses:
        parts.append(
            f"the test loss is foretold to {sum(misses) / len(misses):.1%} on average, {max(misses):.1%} at most"
        )
    parts += [_told(fit) for fit in fits.values()]
    parts += [_needed(row) for row in table if row["kind"] == "target"]
    gone = [row["why"] for row in table if row["kind"] == "left out"]
    parts += [f"{len(gone)} values are left out ({gone[0]}{' …' if len(gone) > 1 else ''})"] if gone else []
    return "; ".join(parts) + "."


def _needed(row: Row) -> str:
    if row["D"] is None:
        return f"a test loss of {row['target']:.3g} is out of reach at N = {row['N']:,}"
    low, high = ("∞" if row[end] is None else f"{row[end]:.3g}" for end in ("low", "high"))
    return f"a test loss of {row['target']:.3g} takes D = {row['D']:.3g} [{low}, {high}] at N = {row['N']:,}"


def _told(fit: Row) -> str:
    constants = [
        f"{name} = {value:.3g} [{fit['intervals'][name][0]:.3g}, {fit['intervals'][name][1]:.3g}]"
        for name, value in fit["constants"].items()
        if name in ("E", "α", "β", "a", "b")
    ]
    best = "" if fit["best"] == fit["law"] else f" (likelier: {fit['best']}, weight {fit['best_weight']:.2f})"
    return f"{MEASURES[fit['value']]}: {', '.join(constants)}{best}"


STUDY = ScalingStudy()
