"""gauss_newton: what is compared is what the dense matrices have, and the two are one where the model is linear."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from evolute import studies
from evolute.errors import StudyError
from evolute.studies import Row, deflated
from evolute.studies.gauss_newton import STUDY, GaussNewtonSettings, measured
from evolute.studies.subjects import Moment, Subject, at

TINY = GaussNewtonSettings(
    models=("mlp_digits", "vit_digits"),
    points=(0.0, 1.0),
    width=2,
    heads=1,
    layers=1,
    steps=4,
    samples=4,
    repeats=2,
    probes=2,
    k=2,
)


def small(**changed: Any) -> Moment:
    sizes: dict[str, Any] = {"width": 1, "layers": 1, "steps": 40, "samples": 12}
    return at(Subject("mlp_digits", **{**sizes, **changed}), 40)


def dense(moment: Moment) -> tuple[Tensor, Tensor]:
    """H by autodiff, and H_o = Jᵀ (diag p − p pᵀ) J / n from the Jacobian of the logits."""
    x, y = moment.sample
    shapes = {name: each.shape for name, each in moment.model.named_parameters()}
    flat = torch.cat([each.detach().flatten() for each in moment.model.parameters()])

    def logits(w: Tensor) -> Tensor:
        pieces = w.split([shape.numel() for shape in shapes.values()])
        named = {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        return functional_call(moment.model, named, (x,))

    H = torch.func.hessian(lambda w: torch.nn.functional.cross_entropy(logits(w), y))(flat)
    J, p = torch.func.jacfwd(logits)(flat), torch.softmax(logits(flat), -1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return H, torch.einsum("nap,nab,nbq->pq", J, inner, J) / len(x)


def test_what_is_compared_is_what_the_dense_matrices_have() -> None:
    """An H_o that misses the softmax, or a share of squares, would differ."""
    moment = small()
    row, (H, G) = measured(moment, 3, 40, seed=0), dense(moment)
    (values, every), (outer, every_o) = torch.linalg.eigh(H), torch.linalg.eigh(G)
    assert row["top"] == pytest.approx(values[-3:].flip(0).tolist(), rel=1e-4)
    assert row["top_outer"] == pytest.approx(outer[-3:].flip(0).tolist(), rel=1e-4)
    assert row["lowest"] == pytest.approx(float(values[0]), rel=1e-2)
    V, V_o = every[:, -3:], every_o[:, -3:]
    assert row["overlap"] == pytest.approx(float((V.mT @ V_o).square().sum() / 3), abs=1e-3)
    assert row["captured"] == pytest.approx(float((V_o.mT @ H @ V_o).trace() / values[-3:].sum()), abs=1e-3)
    assert abs(row["share"] - float((H - G).norm() / H.norm())) < 5 * row["share_error"] < 0.1


def test_the_ratio_is_that_of_the_gauss_newton_matrix_to_the_hessian() -> None:
    same = {"model": "mlp_digits", "step": 0, "loss": 1.0, "accuracy": 0.5, "overlap": 1.0, "captured": 0.9}
    base = {**same, "share": 0.5, "share_error": 0.01, "lowest": -1.0}
    rows = [{**base, "seed": i, "top": [top, 1.0], "top_outer": [top / 2, 1.0]} for i, top in enumerate((4.0, 8.0))]
    (made,) = STUDY.table(TINY, rows)
    assert (made["ratio"], made["negative"]) == pytest.approx((0.5, (1 / 4 + 1 / 8) / 2))


def test_a_linear_model_has_no_functional_part() -> None:
    row = measured(small(layers=0), 3, 4, seed=0)
    assert row["top_outer"] == pytest.approx(row["top"], rel=1e-6)
    assert row["overlap"] == pytest.approx(1, abs=1e-4) and row["captured"] == pytest.approx(1, abs=1e-6)
    assert row["share"] < 1e-12 and row["lowest"] > -1e-9


def test_a_norm_that_is_partly_exact_is_right_in_the_mean_and_honest_about_its_error() -> None:
    generator = torch.Generator().manual_seed(0)
    noise, outlier = torch.randn(40, 40, generator=generator, dtype=torch.float64), torch.eye(40, 1).double()
    A = noise + noise.mT + 30 * outlier @ outlier.mT
    V = torch.linalg.qr(torch.randn(40, 3, generator=generator, dtype=torch.float64)).Q  # no eigenvectors
    found = []
    for _ in range(200):
        Z = deflated.rest(V, 16, generator)
        assert (V.mT @ Z).norm() < 1e-12
        found.append(deflated.frobenius(A @ V, A @ Z))
    z = torch.tensor([(each.value - float(A.norm())) / each.error for each in found])
    assert abs(float(torch.tensor([each.value**2 for each in found]).mean()) / float(A.norm()) ** 2 - 1) < 0.02
    assert (z.abs() < 2.13).double().mean() > 0.85  # Student's 95 % of 16 samples
    assert deflated.frobenius(A @ torch.eye(40, dtype=torch.float64), torch.zeros(40, 2)).error == 0


def row(model: str = "mlp_digits", step: int = 0, ratio: tuple[float, float] = (1, 1), captured: float = 1) -> Row:
    mean = sum(ratio) / 2
    known = {"model": model, "step": step, "ratio": mean, "ratio_low": ratio[0], "ratio_high": ratio[1]}
    return {**known, "captured": captured, "captured_low": captured - 0.01, "captured_high": captured + 0.01}


@pytest.mark.parametrize(
    ("table", "answer"),
    [
        ([row(), row(step=9)], "holds"),
        ([row(ratio=(0.5, 0.6)), row(step=9)], "holds in part"),
        ([row(ratio=(0.5, 0.6)), row(ratio=(1.2, 1.3), step=9)], "does not hold here"),
        ([row(captured=0.5)], "does not hold here"),
        ([row(ratio=(0.5, 1.5))], "undecided"),
        ([], "undecided"),
    ],
)
def test_the_verdict_asks_for_eigenvalue_and_directions(table: list[Row], answer: str) -> None:
    verdict = STUDY.verdict(GaussNewtonSettings(), table)
    assert verdict.answer == answer, verdict.sentence


def test_a_run_gives_every_model_and_step_and_a_figure(tmp_path: Path) -> None:
    result = studies.run("gauss_newton", TINY, workers=0)
    assert not result.failed and [(row["model"], row["step"]) for row in result.rows] == [
        ("mlp_digits", 0),
        ("mlp_digits", 4),
        ("vit_digits", 0),
        ("vit_digits", 4),
    ]
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    picture = studies.find("gauss_newton").figure(again.rows, again.settings)
    assert len(picture.axes) == 3 and len(picture.axes[0].get_legend_handles_labels()[1]) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": 0}, "k: expected how many eigenvalues, at least 1, got 0"),
        ({"repeats": 1}, "repeats: expected 2 or more, for an interval, got 1"),
        ({"points": ()}, r"points: expected fractions of the training, from 0 to 1, got \[\]"),
        ({"models": ("mlp",)}, "no model 'mlp' to study"),
    ],
)
def test_what_cannot_be_compared_says_why(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        studies.run("gauss_newton", replace(TINY, **changed), workers=0)
