"""taylor: remainders go as the next power of the step, the methods are what they are called, the verdict is fair."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evolute import studies
from evolute.engine.operators import Hessian
from evolute.errors import StudyError
from evolute.linop.convert import to_dense
from evolute.studies import Row
from evolute.studies.fits import slope
from evolute.studies.subjects import Subject, at
from evolute.studies.taylor import STUDY, TaylorSettings, horizon
from evolute.studies.taylor import measure as taylor_measure
from evolute.studies.taylor import table as taylor_table
from evolute.studies.taylor.measure import DIRECTIONS

TINY = TaylorSettings(
    models=("mlp_digits",), points=(0.0, 1.0), width=1, layers=1, steps=4, samples=8, repeats=2, descent=11, products=4
)


def cell(**changed: Any) -> dict[str, Any]:
    return {**STUDY.cells(TINY)[0], **changed}


def test_what_each_order_misses_goes_as_the_next_power_of_the_step() -> None:
    rows = [row for row in STUDY.measure(cell()) if row["kind"] == "line"]
    assert {row["direction"] for row in rows} == set(DIRECTIONS)
    for direction in ("gradient", "random"):
        short = [row for row in rows if row["direction"] == direction and row["length"] < 0.004]
        for order in (1, 2, 3):
            missed = [abs(row["change"] - sum(row["terms"][:order])) for row in short]
            assert slope([row["length"] for row in short], missed) == pytest.approx(order + 1, abs=0.45)
    downhill = [row for row in rows if row["direction"] in ("gradient", "eigenvector") and row["length"] < 2e-3]
    assert all(row["terms"][0] < 0 for row in downhill)


def test_methods_are_what_they_are_called() -> None:
    """The quadratic model is that of the dense Hessian, and real descent is what its first step says."""
    moment = at(Subject("mlp_digits", width=1, layers=1, steps=4, samples=8), 4)
    H, g = to_dense(Hessian(moment.objective)), moment.objective.gradient()
    values, U = torch.linalg.eigh(H)
    sharpness, parts = float(values[-1]), (U.T @ g).square()
    (row,) = taylor_measure.descents(moment, sharpness, [0.5], 12, 40)
    rate = row["rate"]
    assert rate == pytest.approx(1 / sharpness)
    for t in (1, 5, 12):
        phi = (1 - (1 - rate * values) ** (2 * t)) / (2 * values)
        phi[values.abs() < 1e-9] = rate * t
        assert row["quadratic"][t] == pytest.approx(-float((parts * phi).sum()), rel=1e-6)
        lone = (1 - (1 - rate * sharpness) ** (2 * t)) / (2 * sharpness)
        assert row["eigenvalue"][t] == pytest.approx(-float(parts.sum()) * lone, rel=1e-9)
    gentle = taylor_measure.descended(moment, 1e-4 / sharpness, 1)
    assert gentle[1] - gentle[0] == pytest.approx(-1e-4 / sharpness * float(g @ g), rel=1e-3)


def test_a_fitted_curve_knows_a_decay_and_nothing_that_it_has_not_seen() -> None:
    losses = [3 - 2 * (1 - math.exp(-0.05 * t)) for t in range(60)]
    later = [*losses[:11], *[9.0] * 49]
    assert taylor_measure.fitted(losses)[59] == pytest.approx(losses[59] - 3, rel=1e-2)
    assert taylor_measure.fitted(losses) == taylor_measure.fitted(later)


def test_the_reach_of_a_step_is_where_a_cubic_says() -> None:
    """ΔL = −s + s²/2 + c s³ misses c s³ of s + s²/2."""
    rows = [
        {"length": s, "change": -s + s**2 / 2 + s**3, "terms": [-s, s**2 / 2, s**3]} for s in taylor_measure.LENGTHS
    ]
    s = 0.3424  # 10 s³ = s + s²/2
    assert taylor_table.reach(rows, 2) == pytest.approx(s, rel=0.05)
    assert taylor_table.reach(rows, 3) == 1.0


def error(t: int = 10, middle: float = 0.1, method: str = "quadratic", **more: Any) -> Row:
    known = {"kind": "error", "model": "vit_digits", "step": 0, "factor": 0.1, "t": t, "method": method}
    bounds = {"error": middle, "error_low": 0.9 * middle, "error_high": 1.1 * middle}
    return {**known, **bounds, "worse": 1.0, "worse_low": 1.0, "worse_high": 1.0, **more}


@pytest.mark.parametrize(
    ("table", "answer"),
    [
        ([error(), error(step=9)], "holds"),
        ([error(), error(middle=0.5)], "holds in part"),
        ([error(middle=0.5), error(middle=3.0)], "does not hold here"),
        ([error(middle=0.2)], "undecided"),
        ([error(t=5)], "undecided"),
        ([], "undecided"),
    ],
)
def test_the_verdict_goes_by_the_model_after_ten_steps(table: list[Row], answer: str) -> None:
    verdict = STUDY.verdict(TaylorSettings(factors=(0.1,)), table)
    assert verdict.answer == answer, verdict.sentence


def test_horizons_and_rivals_are_told() -> None:
    rows = [error(t, middle) for t, middle in ((1, 0.01), (2, 0.1), (5, 0.3), (10, 0.1))]
    assert horizon(rows) == 2 and horizon(rows[:2]) == 2 and horizon(rows[2:]) == 0
    worse = error(10, 0.9, "eigenvalue", worse=9.0, worse_low=5.0, worse_high=15.0)
    nearer = error(50, 0.01, "fitted", worse=0.1, worse_low=0.05, worse_high=0.2)
    sentence = STUDY.verdict(TaylorSettings(factors=(0.1,)), [*rows, worse, nearer]).sentence
    assert "2 to 2 (median 2)" in sentence
    assert "one-eigenvalue rule is further off in 1 of 1 after 10 steps, nearer in 0" in sentence
    assert "the fitted curve is further off in 0 of 1 after 50 steps, nearer in 1" in sentence


def test_a_run_gives_a_table_and_a_figure(tmp_path: Path) -> None:
    result = studies.run("taylor", TINY, workers=0)
    assert not result.failed and {row["kind"] for row in result.rows} == {"reach", "share", "error", "example"}
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    picture = studies.find("taylor").figure(again.rows, again.settings)
    assert len(picture.axes) == 3 and len(picture.axes[1].get_lines()) == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"factors": ()}, r"factors: expected fractions of 2/λ_max, above 0, got \[\]"),
        ({"factors": (-1.0,)}, r"got \[-1.0\]"),
        ({"descent": 5}, "descent: expected more than the 10 steps that the fitted curve is given.* got 5 and 4"),
        ({"steps": 0}, "steps: expected at least 1 step of training, got 0"),
        ({"models": ("vit",)}, "no model 'vit' to study"),
        ({"repeats": 1}, "repeats: expected 2 or more"),
    ],
)
def test_what_cannot_be_measured_says_why(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        studies.run("taylor", replace(TINY, **changed), workers=0)
