"""How well H_o, the Gauss–Newton matrix, gives the top of the spectrum of H, over training.

H = H_o + H_f, so |λ₁(H) − λ₁(H_o)| ≤ ‖H_f‖ (Weyl), and the angle between their first eigenvectors has a sine of at most
‖H_f v₁‖ over the gap to the next eigenvalue (Davis–Kahan). H_f = Σ_k (∂ℓ/∂F_k) ∂²F_k is a sum over residuals p − y: it
goes away as labels are fitted, and it is zero where the model is linear in its parameters. H_o is positive
semidefinite: whatever is negative in H comes from H_f alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evolute.engine.operators import GaussNewton, Hessian
from evolute.errors import StudyError
from evolute.krylov.eigen_search import eigsh
from evolute.linop.operator import LinearOperator
from evolute.studies import deflated, over_training
from evolute.studies.means import geometric_mean, mean
from evolute.studies.over_training import OverTraining, told
from evolute.studies.study import Cell, Row, Study, Verdict
from evolute.studies.subjects import Moment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEAR = 0.1  # how far the top eigenvalue of H_o, and what its eigenvectors capture of H, may be from 1


@dataclass(frozen=True)
class GaussNewtonSettings(OverTraining):
    """Models, points of their training as fractions of it, and how many eigenvalues are looked at."""

    models: tuple[str, ...] = ("mlp_digits", "vit_digits", "gpt_english")
    points: tuple[float, ...] = (0.0, 0.025, 0.1, 0.25, 1.0)
    repeats: int = 5
    k: int = 5


class GaussNewtonStudy(Study[GaussNewtonSettings]):
    """One cell per model, repeat and point of its training."""

    name = "gauss_newton"
    claim = "The Gauss–Newton matrix gives the top of the Hessian's spectrum, of a Transformer as of an MLP."
    config = GaussNewtonSettings

    def cells(self, config: GaussNewtonSettings) -> Sequence[Cell]:
        if config.k < 1:
            raise StudyError(f"k: expected how many eigenvalues, at least 1, got {config.k}.")
        return over_training.cells(config, k=config.k)

    def measure(self, cell: Cell) -> list[Row]:
        moment, row = over_training.reached(cell)
        return [row | measured(moment, cell["k"], cell["probes"], row["seed"])]

    def table(self, config: GaussNewtonSettings, rows: Sequence[Row]) -> list[Row]:
        """The mean of the repeats at each step of each model, and what each repeat gave."""
        places = over_training.by_place(rows).items()
        return [{"model": model, "step": step, **_summary(here)} for (model, step), here in places]

    def verdict(self, config: GaussNewtonSettings, table: Sequence[Row]) -> Verdict:
        if not table:
            return Verdict("undecided", "no model was measured with two seeds.")
        good, bad = [row for row in table if _agrees(row)], [row for row in table if _differs(row)]
        if len(good) == len(table):
            answer = "holds"
        elif good:
            answer = "holds in part"
        else:
            answer = "does not hold here" if len(bad) > len(table) / 2 else "undecided"
        return Verdict(answer, _sentence(table, len(good), len(bad)))

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        from evolute.studies.gauss_newton.figure import draw

        return draw(table, settings)


# ---- what is measured


def measured(moment: Moment, k: int, probes: int, seed: int) -> Row:
    """The top of H beside that of H_o, the bottom of H, and ‖H_f‖_F/‖H‖_F.

    `overlap` is ‖VᵀV_o‖²/k of the eigenvectors; `captured` is the curvature of H along V_o over the most there is: it
    does not change where neighbours of nearly one eigenvalue change places.
    """
    H, G = Hessian(moment.objective), GaussNewton(moment.objective)
    generator = torch.Generator().manual_seed(seed)
    values, V = _top(H, k, generator)
    outer, V_o = _top(G, k, generator)
    lowest = eigsh(H, 1, "smallest", tol=1e-2, generator=generator, progress=False)
    share, error = _share(H, G, V, probes, generator)
    return {
        "top": values.tolist(),
        "top_outer": outer.tolist(),
        "lowest": float(lowest.values[0]),
        "overlap": float((V.mT @ V_o).square().sum() / V.shape[1]),
        "captured": float((V_o * (H @ V_o)).sum() / values.sum()),
        "share": share,
        "share_error": error,
    }


def _top(op: LinearOperator, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues, from the top, and their eigenvectors as columns."""
    found = eigsh(op, k, "largest", vectors=True, generator=generator, progress=False)
    assert found.vectors is not None
    return found.values.flip(0), found.vectors.flip(1)


def _share(
    H: LinearOperator, G: LinearOperator, V: Tensor, probes: int, generator: torch.Generator
) -> tuple[float, float]:
    """‖H − G‖_F/‖H‖_F, the same vectors for both, with the jackknife's error; exact on the span of V."""
    Z = deflated.rest(V, probes, generator)
    H_in, H_out, G_in, G_out = H @ V, H @ Z, G @ V, G @ Z
    return deflated.ratio((H_in - G_in, H_out - G_out), (H_in, H_out))


# ---- what is made of it


def _summary(rows: Sequence[Row]) -> Row:
    """Means over the repeats."""
    series = {name: [row[name] for row in rows] for name in ("loss", "accuracy", "overlap", "captured", "share")}
    ratios = [row["top_outer"][0] / row["top"][0] for row in rows]
    negative = [-row["lowest"] / row["top"][0] for row in rows]
    return {
        **told("ratio", geometric_mean(ratios)),
        **told("captured", mean(series["captured"])),
        **told("overlap", mean(series["overlap"])),
        **told("share", geometric_mean(series["share"])),
        **told("negative", mean(negative)),
        **told("loss", geometric_mean(series["loss"])),
        "accuracy": mean(series["accuracy"]).value,
        "sharpness": geometric_mean([row["top"][0] for row in rows]).value,
        "share_error": max(row["share_error"] for row in rows),
        "repeats": {"loss": series["loss"], "share": series["share"], "ratio": ratios},
    }


def _agrees(row: Row) -> bool:
    """Both intervals are within `NEAR` of 1."""
    return row["ratio_low"] >= 1 - NEAR and row["ratio_high"] <= 1 + NEAR and row["captured_low"] >= 1 - NEAR


def _differs(row: Row) -> bool:
    """One of them is all outside."""
    return row["ratio_high"] < 1 - NEAR or row["ratio_low"] > 1 + NEAR or row["captured_high"] < 1 - NEAR


def _sentence(table: Sequence[Row], good: int, bad: int) -> str:
    models = [_told_of(model, table) for model in dict.fromkeys(row["model"] for row in table)]
    return (
        f"the top eigenvalue of H_o, and the curvature along its eigenvectors, are those of H to {NEAR:.0%} in {good} "
        f"of {len(table)} cases (model, step), and are not in {bad} (95 % intervals over seeds). λ₁(H_o)/λ₁(H) is "
        f"{'; '.join(models)}."
    )


def _told_of(model: str, table: Sequence[Row]) -> str:
    rows = sorted((row for row in table if row["model"] == model), key=lambda row: row["step"])
    ends = [rows[0], rows[-1]] if len(rows) > 1 else rows
    return f"{model}: " + ", ".join(f"{_interval(row, 'ratio')} at step {row['step']}" for row in ends)


def _interval(row: Row, name: str) -> str:
    return f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"


STUDY = GaussNewtonStudy()
