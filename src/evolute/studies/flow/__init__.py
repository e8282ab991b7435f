"""Curvature through depth and training, and whether the popular proxies for it say where it is.

Theory: with x_l = x_{l−1} + f(x_{l−1}) the Gauss–Newton curvature in the stream goes back through a block as
G_{l−1} = (I+J)ᵀ G_l (I+J), J the Jacobian of f, and H_f adds Σ_k g_k ∂²f_k: it grows towards the input wherever J adds
up. In pre-norm blocks J goes as 1/σ of the stream; post-norm has I + J divided by the σ of the sum. A proxy (gradient
norm, mean squared gradient, size of the activations, spread of the attention) is none of these; what it is worth is
how it ranks blocks, and steps, beside the truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evolute.errors import StudyError
from evolute.studies.flow import measure as flow_measure
from evolute.studies.flow import table as flow_table
from evolute.studies.flow.measure import PROXIES
from evolute.studies.study import Cell, Config, Row, Study, Verdict
from evolute.studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NORMS = ("pre", "post", "none")
GOOD = 0.8  # rank correlation from which a proxy may stand for the truth
NAMES = {
    "gradient": "gradient norm",
    "squared": "squared gradient",
    "activation": "activation norm",
    "attention": "attention deviation",
}


@dataclass(frozen=True)
class FlowSettings(Config):
    """Model, norms and depths; points of training as fractions of it."""

    model: str = "vit_digits"
    norms: tuple[str, ...] = ("pre", "post")
    depths: tuple[int, ...] = (6,)
    points: tuple[float, ...] = (0.0, 0.01, 0.05, 0.2, 1.0)
    width: int = 16
    heads: int = 2
    steps: int = 300
    samples: int = 16
    probes: int = 8
    repeats: int = 6

    def __post_init__(self) -> None:
        unknown = [norm for norm in self.norms if norm not in NORMS]
        if unknown or not self.norms:
            raise StudyError(f"norms: expected some of {', '.join(NORMS)}, got {', '.join(unknown) or 'none of them'}.")
        if not self.depths or min(self.depths) < 1:
            raise StudyError(f"depths: expected numbers of blocks, at least 1, got {self.depths}.")
        if not self.points or any(not 0 <= point <= 1 for point in self.points):
            raise StudyError(f"points: expected fractions of the training, from 0 to 1, got {list(self.points)}.")
        for name in ("repeats", "probes"):
            if getattr(self, name) < 2:
                raise StudyError(f"{name}: expected 2 or more, for an interval, got {getattr(self, name)}.")
        if self.steps < 1:
            raise StudyError(f"steps: expected at least 1, got {self.steps}.")


class FlowStudy(Study[FlowSettings]):
    """One cell per norm, depth and repeat: a training, looked at on its way."""

    name = "flow"
    claim = "The popular proxies for curvature tell in which block of a Transformer it is, and when."
    config = FlowSettings

    def cells(self, config: FlowSettings) -> Sequence[Cell]:
        steps = sorted({round(point * config.steps) for point in config.points})
        return [
            {"subject": asdict(_subject(config, norm, depth, config.seed + i)), "steps": steps, "probes": config.probes}
            for i in range(config.repeats)
            for norm in config.norms
            for depth in config.depths
        ]

    def measure(self, cell: Cell) -> list[Row]:
        return flow_measure.measured(cell)

    def table(self, config: FlowSettings, rows: Sequence[Row]) -> list[Row]:
        return flow_table.made(rows)

    def verdict(self, config: FlowSettings, table: Sequence[Row]) -> Verdict:
        return judged(table)

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.flow.figure import drawn

        return drawn(table, settings)


def _subject(config: FlowSettings, norm: str, depth: int, seed: int) -> Subject:
    return Subject(
        config.model,
        config.width,
        config.heads,
        depth,
        config.steps,
        samples=config.samples,
        seed=seed,
        options={"norm": norm},
    )


# ---- what it says


def judged(table: Sequence[Row]) -> Verdict:
    """Is the rank correlation of each proxy with what it stands for `GOOD`: each norm, over blocks and over steps?"""
    rows = [row for row in table if row["kind"] == "correlation" and row["own"]]
    if not rows:
        return Verdict("undecided", "ranks take three blocks or three steps, and two seeds.")
    good = [row for row in rows if row["rho_low"] >= GOOD]
    bad = [row for row in rows if row["rho_high"] < GOOD]
    if len(good) == len(rows):
        answer = "holds"
    elif good:
        answer = "holds in part"
    else:
        answer = "does not hold here" if len(bad) > len(rows) / 2 else "undecided"
    return Verdict(answer, _sentence(table, rows, len(good), len(bad)))


def _sentence(table: Sequence[Row], rows: Sequence[Row], good: int, bad: int) -> str:
    told = "; ".join(_of_proxy(proxy, [row for row in rows if row["proxy"] == proxy]) for proxy in PROXIES)
    return (
        f"of {len(rows)} rank correlations of a proxy with the curvature that it stands for (norm, depth, over blocks "
        f"or steps), {good} are surely {GOOD:g} or more and {bad} surely less: {told}. {_profile(table)}"
    )


def _of_proxy(proxy: str, rows: Sequence[Row]) -> str:
    parts = list[str]()
    for across in ("blocks", "steps"):
        values = [row["rho"] for row in rows if row["across"] == across]
        if values:
            parts.append(f"{_range(values)} over {across}")
    return f"{NAMES[proxy]} {', '.join(parts)}"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _profile(table: Sequence[Row]) -> str:
    """How curvature in the stream falls from the first block to the last."""
    rows = [row for row in table if row["kind"] == "profile" and row["place"] == "activations"]
    if not rows:
        return ""
    depth, said = max(row["depth"] for row in rows), list[str]()
    for norm in dict.fromkeys(row["norm"] for row in rows):
        here = [row for row in rows if row["norm"] == norm and row["depth"] == depth]
        ends = [min(here, key=lambda row: row["step"]), max(here, key=lambda row: row["step"])]
        told = [f"{r['ratio']:.3g} [{r['ratio_low']:.3g}, {r['ratio_high']:.3g}] at step {r['step']}" for r in ends]
        said.append(f"{norm}-norm {', '.join(dict.fromkeys(told))}")
    return f"Curvature in the stream after the first of {depth} blocks over that after the last: {'; '.join(said)}."


STUDY = FlowStudy()
