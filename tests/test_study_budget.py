"""budget: k* of known losses, others that check it, and a verdict on how often intervals hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evolute import studies
from evolute.engine.sample_losses import SampleLosses
from evolute.errors import StudyError
from evolute.studies import Row
from evolute.studies.budget import STUDY, Budget, measured, moves_at

TINY = Budget(
    models=("mlp_digits",),
    tolerances=(0.03, 0.001),
    width=1,
    layers=1,
    steps=4,
    samples=60,
    known=20,
    splits=3,
    repeats=2,
)


def gaussian(count: int = 3000) -> SampleLosses:
    values = 1 + torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return SampleLosses(values[None], torch.ones(count, dtype=torch.float64))


def test_k_star_of_gaussian_losses_is_the_one_of_theory_and_others_agree() -> None:
    """E|ℓ − L| = √(2/π): within the samples that were used, and far beyond them."""
    for share, count in ((0.02, 39.4), (0.001, 797.4)):
        row = measured(gaussian(), share, known=200, splits=20, seed=0)
        assert row["size"] == pytest.approx(count, rel=0.06) and row["other"] == pytest.approx(count, rel=0.06)
        assert row["low"] < count < row["high"] and row["covered"] >= 0.85
        assert row["moves"] == pytest.approx(1, abs=0.15)
        assert row["accurate"] == pytest.approx(1 / share**2, rel=0.1)


def test_half_the_tolerance_takes_twice_the_samples_but_four_times_for_the_mean() -> None:
    one, other = (measured(gaussian(), share, 200, 10, seed=0) for share in (0.004, 0.002))
    assert other["size"] / one["size"] == pytest.approx(2, rel=0.03)
    assert other["accurate"] / one["accurate"] == pytest.approx(4, rel=1e-9)


def test_the_change_is_measured_from_its_definition() -> None:
    losses = gaussian(400)
    found = moves_at(losses, 20, torch.Generator().manual_seed(1))
    assert found == pytest.approx(math.sqrt(2 / math.pi) * math.sqrt(1 + 1 / 20) / 21, rel=0.35)
    assert moves_at(losses, 400, torch.Generator()) is None


def row(covered: float = 0.95, width: float = 0.03, share: float = 0.01) -> Row:
    known = {"model": "vit_digits", "step": 0, "share": share, "size": 50.0, "other": 51.0, "interval": [40.0, 60.0]}
    return known | {"covered": covered, "covered_high": covered + width, "accurate": 5000.0, "moves": None}


@pytest.mark.parametrize(
    ("table", "answer"),
    [
        ([row(), row(0.91)], "holds"),
        ([row(), row(0.5)], "holds in part"),
        ([row(0.5), row(0.6)], "does not hold here"),
        ([row(0.85, width=0.2)], "undecided"),
        ([], "undecided"),
    ],
)
def test_the_verdict_asks_how_often_intervals_hold(table: list[Row], answer: str) -> None:
    verdict = STUDY.verdict(Budget(), table)
    assert verdict.answer == answer, verdict.sentence


def test_a_run_gives_a_table_and_a_figure(tmp_path: Path) -> None:
    result = studies.run("budget", TINY, workers=0)
    assert not result.failed and len(result.rows) == 4
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    assert len(studies.find("budget").figure(again.rows, again.settings).axes) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"known": 40}, "known: expected at least 10 samples, and as many others to check them; got 40 of 60"),
        ({"tolerances": (0.0,)}, r"tolerances: expected positive shares of the loss, got \[0.0\]"),
        ({"points": (2.0,)}, "points: expected fractions of the training"),
        ({"splits": 1}, "splits: expected 2 or more, got 1"),
        ({"models": ("gpt",)}, "no model 'gpt' to study"),
    ],
)
def test_what_cannot_be_measured_says_why(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        studies.run("budget", replace(TINY, **changed), workers=0)
