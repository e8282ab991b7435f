"""scaling: the critical batch of known gradients, fits of known laws, and what is foretold of held-out runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evolute as ev
from evolute import studies
from evolute.errors import NonFiniteError, StudyError
from evolute.studies import Row
from evolute.studies.critical_batch import Batch, critical_batch
from evolute.studies.scaling import STUDY, ScalingSettings
from evolute.studies.scaling import measure as scaling_measure
from evolute.studies.scaling.figure import at
from evolute.studies.scaling.table import parted, table_of
from evolute.zoo import GPT, cross_entropy, english

TINY = ScalingSettings(
    widths=(2, 4, 6, 8),
    data=(32, 64, 96, 128),
    heads=1,
    samples=2,
    depth=2,
    folds=3,
    fold=4,
    repeats=1,
    bootstrap=20,
)


def folds(F: int, m: int, seed: int) -> tuple[torch.Tensor, float]:
    """Fold means of g + noise under a known H, which has a negative eigenvalue, and B = tr(HΣ)/gᵀHg."""
    generator = torch.Generator().manual_seed(seed)
    H = torch.diag(torch.tensor([4.0, 1.0, 0.5, -0.2], dtype=torch.float64))
    g = torch.tensor([0.5, 1.0, -1.0, 0.3], dtype=torch.float64)
    root = torch.tensor([3.0, 1.0, 2.0, 1.0], dtype=torch.float64)  # Σ = diag(root²)
    f = g + root * torch.randn(F, 4, generator=generator, dtype=torch.float64) / m**0.5
    return f @ H @ f.T, float((H.diagonal() * root**2).sum() / (g @ H @ g))


def test_the_critical_batch_is_tr_HΣ_over_gHg() -> None:
    """Without taking the noise out of gᵀHg it would be pulled to the size of a fold."""
    K, truth = folds(4000, 8, 0)
    assert critical_batch(K[:400, :400], 8).value == pytest.approx(truth, rel=0.2)
    found = [critical_batch(folds(16, 64, seed)[0], 64) for seed in range(200)]
    assert np.median([each.value for each in found]) == pytest.approx(truth, rel=0.05)
    inside = sum(abs(each.value - truth) < 2.13 * each.error for each in found)  # Student's 95 % of 15
    assert inside > 0.85 * len(found)


def test_a_gradient_that_is_all_noise_has_no_critical_batch() -> None:
    K = torch.eye(6, dtype=torch.float64) - 0.01
    assert not critical_batch(K, 4).determined and critical_batch(K, 4).value == math.inf
    assert Batch(10.0, 4.9).determined and not Batch(10.0, 5.1).determined


def test_what_is_measured_is_what_dense_matrices_have() -> None:
    data, model = english(32, seed=0), GPT(103, 32, 2, 1, 1, seed=0).double()
    cell = {"seed": 0, "samples": 2, "probes": 2, "depth": 400, "folds": 3, "fold": 5, "D": 13_000}
    found = scaling_measure.curvature(model, data, cell)
    x, y = data.test.x, data.test.y
    H = ev.to_dense(ev.Hessian(ev.Objective(model, [(x[:2], y[:2])], ev.Loss(*cross_entropy))))
    values = torch.linalg.eigvalsh(H)
    assert found["sharpness"] == pytest.approx(float(values[-1]), rel=0.02)
    assert found["trace"] == pytest.approx(float(values.sum()), rel=1e-6)
    assert found["rank"] == pytest.approx(float(values.abs().sum() ** 2 / values.square().sum()), rel=1e-6)
    X, Y = scaling_measure.unseen(data, 13_000, 2)
    assert len(X) == 79 + 1451 and torch.equal(X[0], data.train.x[13_000]) and torch.equal(Y[79], y[2])
    G = torch.stack(
        [ev.Objective(model, [(X[i : i + 5], Y[i : i + 5])], ev.Loss(*cross_entropy)).gradient() for i in (0, 5, 10)]
    )
    plain = critical_batch(G @ G.T, 5)
    assert found["simple"] == (plain.value if plain.determined else None)


def runs(noise: float = 0.01, wild: float = 1.0) -> list[Row]:
    """A sweep whose laws are known; `wild`: the factor by which the held-out sharpness is off."""
    random, out = np.random.default_rng(0), list[Row]()
    for N in (300, 1000, 3000, 10_000, 30_000):
        for D in (100, 300, 1000, 3000, 10_000):
            held = N == 30_000 or D == 10_000
            scatter = np.exp(noise * random.standard_normal(5))
            out.append(
                {"N": N, "D": D, "seed": 0, "width": 1, "model": "gpt_english"}
                | {"loss": float((0.6 + 30 / N**0.55 + 60 / D**0.8) * scatter[0])}
                | {"sharpness": float(2 * N**0.3 * scatter[1] * (wild if held else 1))}
                | {"trace": float(N**0.8 * D**-0.1 * scatter[2]), "rank": float(0.1 * N * scatter[3])}
                | {"batch": float(3 * D**0.5 * scatter[4]), "trace_error": 1.0, "rank_error": 1.0, "batch_error": 1.0}
            )
    return out


def test_laws_come_back_and_foretell_what_was_held_out() -> None:
    table = table_of(runs(), 40)
    fits = {row["value"]: row for row in table if row["kind"] == "fit"}
    assert fits["loss"]["constants"]["α"] == pytest.approx(0.55, abs=0.1)
    assert fits["sharpness"]["constants"]["a"] == pytest.approx(0.3, abs=0.02)
    assert fits["batch"]["constants"]["b"] == pytest.approx(0.5, abs=0.02) and fits["batch"]["best"] == "C D^b"
    verdict = STUDY.verdict(ScalingSettings(), table)
    assert verdict.answer == "holds", verdict.sentence
    known, held = parted(runs())
    assert len(known) == 16 and len(held) == 9
    assert at(fits["loss"], 1000, 1000) == pytest.approx(0.6 + 30 / 1000**0.55 + 60 / 1000**0.8, rel=0.02)
    (target,) = (row for row in table if row["kind"] == "target")
    assert target["N"] == 30_000 and target["low"] <= target["D"] <= target["high"]


def test_a_law_that_is_wrong_beyond_its_runs_is_not_believed() -> None:
    table = table_of(runs(wild=1.5), 20)
    verdict = STUDY.verdict(ScalingSettings(), table)
    assert verdict.answer == "holds in part" and "sharpness 0%" in verdict.sentence
    only = [row for row in table if row.get("value") == "sharpness"]
    assert STUDY.verdict(ScalingSettings(), only).answer == "does not hold here"
    assert STUDY.verdict(ScalingSettings(), []).answer == "undecided"


def test_runs_without_a_number_are_left_out_and_named() -> None:
    table = runs()
    table[3] = {name: table[3][name] for name in ("N", "D", "seed")} | {"diverged": "the loss of step 7 is nan."}
    table[4] |= {"batch": None}
    gone = [row["why"] for row in table_of(table, 20) if row["kind"] == "left out"]
    assert gone == [
        "loss at N = 300, D = 3000: the loss of step 7 is nan.",
        "batch at N = 300, D = 10000: not determined",
    ]


def test_a_run_that_diverges_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise NonFiniteError("the loss of step 2 is nan")

    monkeypatch.setattr(scaling_measure, "_train", fails)
    (row,) = STUDY.measure(STUDY.cells(TINY)[0])
    assert row["diverged"] == "the loss of step 2 is nan" and "loss" not in row


def test_a_run_gives_a_table_and_a_figure(tmp_path: Path) -> None:
    result = studies.run("scaling", TINY, workers=0)
    assert not result.failed and sum(row["kind"] == "run" for row in result.rows) == 16
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    assert len(studies.find("scaling").figure(again.rows, again.settings).axes) == 6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"widths": (4, 8, 16)},
            r"widths: expected at least 4 sizes, of which the largest is held out, got \[4, 8, 16\]",
        ),
        ({"data": (10,)}, "data: expected at least 4 sizes"),
        ({"model": "vit"}, "model: expected gpt_english or gpt_addition, got 'vit'"),
        ({"folds": 1}, "folds: expected 3 or more, got 1"),
        ({"data": (10, 20, 30, 10**6)}, "data: expected up to 13,079 samples of 'gpt_english', got 1,000,000"),
    ],
)
def test_what_cannot_be_swept_says_why(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        STUDY.measure(STUDY.cells(replace(TINY, **changed))[3])
