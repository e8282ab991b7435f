"""fit_scaling: constants that are known come back, one wild run does not matter, and intervals cover."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import approx_fprime

import evolute as ev
from evolute.apps.scaling_fit import Fitted, fitted
from evolute.apps.scaling_laws import Law, Product, Sum, Term, loss_laws, power_laws

TRUTH = {"E": 0.6, "A": 30.0, "α": 0.55, "B": 60.0, "β": 0.8}
SIZES, DATA = (300, 1000, 3000, 10_000), (100, 300, 1000, 3000)


def law(N: float, D: float) -> float:
    return TRUTH["E"] + TRUTH["A"] / N ** TRUTH["α"] + TRUTH["B"] / D ** TRUTH["β"]


def runs(noise: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [
        {"N": N, "D": D, "loss": law(N, D) * math.exp(noise * random.standard_normal())} for N in SIZES for D in DATA
    ]


@pytest.mark.parametrize("each", [*loss_laws(("size", "data")), *power_laws(("size", "data")), *loss_laws(("data",))])
def test_the_derivative_of_every_law_is_its_own(each: Law) -> None:
    random = np.random.default_rng(0)
    theta, logs = random.uniform(0.2, 1, len(each.names)), random.standard_normal((3, len(each.variables)))
    for i in range(3):
        truth = approx_fprime(theta, lambda t, i=i: each.log_value(t, logs[i]), 1e-7)
        assert each.jacobian(theta, logs)[i] == pytest.approx(truth, abs=1e-5)
    centre = random.standard_normal(len(each.variables))
    moved = each.log_value(each.uncentred(theta, centre), logs + centre)
    assert moved == pytest.approx(each.log_value(theta, logs))


def test_known_constants_come_back() -> None:
    found = ev.fit_scaling(runs(), repeats=20)
    assert dict(found.fit.constants) == pytest.approx(TRUTH, rel=1e-4)
    assert found.best is found.fit and found.fit.weight > 0.99 and found.fit.held_out < 1e-5
    assert found.predict(size=1e5, data=1e4).value == pytest.approx(law(1e5, 1e4), rel=1e-4)
    assert found.data_for(0.9, size=10_000).value == pytest.approx(
        (60 / (0.9 - 0.6 - 30 / 10_000**0.55)) ** (1 / 0.8), rel=1e-3
    )


def test_one_wild_run_among_sixteen_does_not_matter() -> None:
    table = runs(0.01)
    clean = ev.fit_scaling(table, repeats=20).predict(size=30_000, data=10_000).value
    table[5]["loss"] *= 5
    wild = ev.fit_scaling(table, repeats=20).predict(size=30_000, data=10_000).value
    assert wild == pytest.approx(clean, rel=0.04)


@pytest.mark.parametrize("times", [3, 1e9])
def test_intervals_stay_about_the_constants_when_a_run_went_wild(times: float) -> None:
    """Residuals whose mean is taken with the wild one in it would move every interval by a sixteenth of it."""
    table = runs(0.01)
    clean = ev.fit_scaling(table, repeats=40).fit
    table[5]["loss"] *= times
    found = ev.fit_scaling(table, repeats=40)
    for name, (low, high) in found.fit.intervals.items():
        assert low < found.fit.constants[name] < high and low < clean.constants[name] < high
    assert 0.9 * law(30_000, 10_000) < found.predict(size=30_000, data=10_000).low < law(30_000, 10_000)


def test_few_residuals_are_widened_as_students_t() -> None:
    """Of 7 runs and 5 constants 2 are free: √(7/2) for the fit, 4.30 over 1.96 for what is known of their spread."""
    residuals = np.array([-1.0, 1.0, 0.5, -0.5, 0.25, -0.25, 0.0])
    widened = Fitted(loss_laws(("size", "data"))[0], np.zeros(5), residuals, 1.0).widened
    assert widened == pytest.approx(residuals * math.sqrt(7 / 2) * 4.30265 / 1.95996, rel=1e-4)


def test_intervals_of_predictions_and_of_data_cover() -> None:
    held, size, trials = 0, 0, 20
    for seed in range(trials):
        found = ev.fit_scaling(runs(0.03, seed), repeats=40)
        new = law(30_000, 10_000) * math.exp(0.03 * np.random.default_rng(1000 + seed).standard_normal())
        told, needed = found.predict(size=30_000, data=10_000), found.data_for(1.0, size=10_000)
        held += told.low <= new <= told.high
        size += needed.low <= (60 / (0.4 - 30 / 10_000**0.55)) ** (1 / 0.8) <= needed.high
    assert held >= 0.8 * trials and size >= 0.8 * trials


def test_the_law_that_made_the_data_is_the_likeliest() -> None:
    random = np.random.default_rng(0)
    table = [
        {"D": D, "loss": (1 + 5 / D**0.5) * math.exp(0.01 * random.standard_normal())}
        for D in np.geomspace(10, 1e5, 30)
    ]
    found = ev.fit_scaling(table, size=None, repeats=20)
    assert str(found.best.law) == "E + B/√D"
    low, high = found.fit.intervals["β"]
    assert low < 0.5 < high
    without = next(fit for fit in found.fits if str(fit.law) == "B/D^β")
    assert without.weight < 1e-6 and without.held_out > 2 * found.fit.held_out


def test_what_cannot_be_reached_is_infinite() -> None:
    found = ev.fit_scaling(runs(0.01), repeats=40)
    never = found.data_for(0.3, size=1000)
    assert never.value == never.low == never.high == math.inf


def grown(seed: int) -> list[dict[str, float]]:
    random = np.random.default_rng(seed)
    return [
        {"N": N, "D": D, "sharpness": 3 * N**0.7 * math.exp(0.02 * random.standard_normal())}
        for N in SIZES
        for D in DATA
    ]


def test_a_power_law_may_grow_and_knows_what_does_not_matter() -> None:
    found = [ev.fit_power_law(grown(seed), value="sharpness", repeats=20) for seed in range(10)]
    for each in found:
        assert each.fit.constants["a"] == pytest.approx(0.7, abs=0.02) and abs(each.fit.constants["b"]) < 0.02
        assert next(fit for fit in each.fits if str(fit.law) == "C D^b").weight < 1e-6
    assert sum(str(each.best.law) == "C N^a" for each in found) >= 7
    told = [
        ev.fit_power_law(grown(seed), value="sharpness", data=None, repeats=40).predict(size=1e5) for seed in range(10)
    ]
    assert sum(each.low < 3 * 1e5**0.7 < each.high for each in told) >= 8


def test_runs_that_diverged_or_are_missing_are_named() -> None:
    table = runs(0.01)
    table[0]["loss"], table[3]["loss"] = math.nan, math.inf
    del table[7]["loss"]
    found = ev.fit_scaling(table, repeats=20)
    assert found.cells == 13 and found.left_out == (
        "N=300, D=100 (diverged: nan)",
        "N=300, D=3000 (diverged: inf)",
        "N=1000, D=3000 (no value)",
    )
    assert "left out: N=300, D=100 (diverged: nan)" in str(found)


def test_columns_are_as_good_as_rows_and_results_come_back(tmp_path: Path) -> None:
    table = runs(0.01)
    columns = {name: [row[name] for row in table] for name in ("N", "D", "loss")}
    found = ev.fit_scaling(columns, repeats=20)
    assert found.fit.constants == ev.fit_scaling(table, repeats=20).fit.constants
    again = type(found).load(found.save(tmp_path / "fit"))
    assert str(again) == str(found)
    assert again.predict(size=1e5, data=1e5) == found.predict(size=1e5, data=1e5)


def test_a_constant_at_its_bound_is_told() -> None:
    """A floor of zero cannot be told from any other that is small: log E goes as far down as it may."""
    logs = np.linspace(0, 6, 12)[:, None]
    fit = fitted(Sum(True, (Term("data"),)), logs - logs.mean(), 3 - 0.5 * logs[:, 0])
    assert np.exp(fit.theta[0]) < 1e-3
    assert Product(("size",)).solve(np.array([[0.0, 0.0]]), "size", 1.0, np.zeros(1))[0] == np.inf


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ([row for row in runs() if row["N"] == 300], {},
         r"takes 3 or more values of the model size 'N', got 1 \(300\). .* size=None and fit the data size alone"),
        ([{**row, "loss": -1.0} for row in runs()], {}, r"N=300, D=100: 'loss' is -1; it is fitted in logarithms"),
        (runs()[:3] + runs()[4:7] + runs()[8:9], {}, "at least 8 runs with a finite 'loss', got 7"),
        ([{"N": 1, "loss": 1}], {}, "row 0: expected a positive number in column 'D', there are 'N', 'loss'"),
        ([{"N": 1, "D": 0, "loss": 1}], {}, "row 0: expected a positive number in column 'D', got 0.0"),
        ([{"N": 1, "D": "many", "loss": 1}], {}, "row 0: 'D': expected a number, got 'many'"),
        ([(1, 2, 3)], {}, "expected rows that map column to number"),
        ({"N": [1, 2], "D": [1], "loss": [1]}, {}, "expected columns of one length"),
        (runs(), {"repeats": 1}, "repeats: expected at least 20, for intervals, got 1"),
        (runs(), {"size": None, "data": None}, "expected a column of model sizes, of data sizes, or both"),
        ([], {}, "expected rows that map column to number.* got none"),
        (None, {}, "expected rows that map column to number.* got NoneType"),
        ({"N": 1, "D": 2, "loss": 3}, {}, "expected columns of numbers, got int in column 'N'"),
        (runs(), {"value": "los"}, "no run has a number in column 'los'; there are 'N', 'D', 'loss'"),
        ([{**row, "loss": math.nan} for row in runs()], {}, r"all 16 runs are left out: N=300, D=100 \(diverged"),
        ([{**row, "D": 20 * row["N"] ** 1.0, "loss": 1 + i} for i, row in enumerate(runs())], {},
         r"'D' goes with 'N' in all runs.* data=None"),
    ],
)  # fmt: skip
def test_tables_that_say_too_little(table: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ev.DecisionError, match=message):
        ev.fit_scaling(table, **options)


def test_questions_that_a_law_does_not_know() -> None:
    found = ev.fit_scaling(runs(), repeats=20)
    with pytest.raises(ev.DecisionError, match="data: expected a positive number for E"):
        found.predict(size=100)
    with pytest.raises(ev.DecisionError, match=r"target: expected a positive number, got -1"):
        found.data_for(-1, size=100)
    with pytest.raises(ev.DecisionError, match="has no data size D in it"):
        ev.fit_power_law(runs(), value="loss", data=None, repeats=20).data_for(1.0, size=10)
    with pytest.raises(ev.DecisionError, match="level: expected a number between 0 and 1"):
        found.predict(size=100, data=100, level=95)
