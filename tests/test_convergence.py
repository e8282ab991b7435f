"""convergence: runs whose rate, floor and conditioning are known, real descent on a quadratic, bad histories."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evolute as ev
from evolute.apps import decay
from evolute.apps.convergence import Convergence


def noisy(seed: int, rate: float = 0.01, noise: float = 0.05, n: int = 400) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    t = np.arange(n) * 5
    loss = 0.7 + 2 * np.exp(-2 * rate * t / 5) + noise * rng.standard_normal(n)
    norm = 3 * np.exp(-rate * t / 5 + 0.1 * rng.standard_normal(n))
    return {"step": t.tolist(), "loss": loss.tolist(), "grad_norm": norm.tolist()}


def test_intervals_of_rate_and_floor_hold_the_truth() -> None:
    """95 % intervals, so most of 60 runs; with gradient norms, and from the loss alone."""
    held = np.zeros(4)
    for seed in range(60):
        run = noisy(seed)
        found, alone = ev.convergence(run), ev.convergence({"step": run["step"], "loss": run["loss"]})
        assert found.fell and found.gradient_rate and found.floor
        held[0] += found.gradient_rate.low <= 0.002 <= found.gradient_rate.high
        held[1] += found.floor.low <= 0.7 <= found.floor.high
        held[2] += alone.floor is None or alone.floor.low <= 0.7 <= alone.floor.high
        held[3] += alone.fall.value > 0 and abs(found.noise - 0.05) < 0.02
    assert (held >= [54, 54, 54, 56]).all(), held


def test_the_gradient_rate_of_real_descent_is_that_of_the_slowest_direction() -> None:
    """‖g_t‖ ~ (1 − ηλ_min)^t late in the run, L − L_∞ twice as fast; and the target is hit when it was said to be."""
    x = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    w, rate, losses, norms = torch.ones(3, dtype=torch.float64), 0.1, list[float](), list[float]()
    for _ in range(401):
        residual = x @ w
        losses.append(1.0 + 0.5 * float(residual @ residual))
        norms.append(float((x.T @ residual).norm()))
        w = w - rate * x.T @ residual
    found = ev.convergence({"loss": losses[:80], "grad_norm": norms[:80]})
    assert found.gradient_rate and found.floor and found.loss_rate
    assert found.gradient_rate.value == pytest.approx(-math.log(0.9), rel=1e-3)
    assert found.loss_rate.value == pytest.approx(-2 * math.log(0.9), rel=1e-3)
    assert found.floor.value == pytest.approx(1.0, abs=1e-6)
    there = next(t for t, loss in enumerate(losses) if loss <= 1 + 1e-10)
    forecast = found.reaches(1 + 1e-10)
    assert forecast.answer == "will be" and forecast.step and forecast.step.value == pytest.approx(there, abs=2)


def test_answers_about_targets() -> None:
    found = ev.convergence(noisy(1, n=300, noise=0.01))
    assert found.reaches(2.0).answer == "reached"
    later = found.reaches(0.72)
    assert later.answer in ("reached", "will be")
    never = found.reaches(0.5)
    assert never.answer == "not" and "levels off at" in never.why and never.step is None
    early = ev.convergence({key: values[:90] for key, values in noisy(1, n=300, noise=0.01).items()})
    soon = early.reaches(0.8)
    truth = 5 * math.log(2 / 0.1) / 0.02
    assert soon.answer == "will be" and soon.step and soon.step.low <= truth <= soon.step.high
    assert early.floor and early.reaches(early.floor.value).answer == "undecided"
    with pytest.raises(ev.DecisionError, match="target: expected a loss, got nan"):
        early.reaches(math.nan)


def test_what_does_not_fall_is_told_so() -> None:
    rng = np.random.default_rng(0)
    flat = ev.convergence((1 + 0.1 * rng.standard_normal(200)).tolist())
    assert flat.fell is None and flat.reaches(0.5).answer == "not"
    rising = ev.convergence(np.linspace(1, 2, 50).tolist())
    assert rising.fell is False and "did not fall" in str(rising) and rising.reaches(0.5).answer == "not"
    constant = ev.convergence({"loss": [1.5] * 20, "grad_norm": [0.2] * 20})
    assert constant.fell is False and constant.fall.value == 0 and constant.noise == 0
    assert "does not shrink" in constant.reaches(1.0).why
    assert ev.convergence([1.5] * 20).reaches(1.5).answer == "reached"
    straight = ev.convergence(np.linspace(2, 1, 50).tolist())
    assert straight.fell and straight.floor is None and straight.reaches(0.5).answer == "not"


def test_noise_is_told_from_a_fall() -> None:
    """A fall of two standard errors is no fall at the usual level, one of ten is; chance alone errs in 5 % of runs."""
    wrong = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        wrong += ev.convergence((5 + rng.standard_normal(80)).tolist()).fell is not None
    assert 1 <= wrong <= 22
    rng = np.random.default_rng(0)
    assert ev.convergence((5 + rng.standard_normal(80) + np.linspace(6, 0, 80)).tolist()).fell


def test_the_history_of_a_hugging_face_trainer_is_read_as_it_is() -> None:
    plain = [{"step": 10 * i, "loss": 2 / (1 + i), "grad_norm": 1 / (1 + i)} for i in range(20)]
    logged = [{**row, "learning_rate": 1e-3, "epoch": row["step"] / 100} for row in plain]
    evaluated = {"eval_loss": 1.0, "eval_runtime": 0.1, "epoch": 1.0, "step": 100}
    ended = {"train_runtime": 3.0, "train_loss": 0.5, "epoch": 2.0, "step": 190}
    found = ev.convergence([*logged[:11], evaluated, *logged[11:], ended])
    assert str(found) == str(ev.convergence(plain))


def test_conditioning_of_the_top_subspace() -> None:
    n = 40
    rows = [{"step": 10 * i, "loss": 1.0 / (1 + i), "eigenvalues": None} for i in range(n)]
    for i in range(0, n, 4):
        rows[i]["eigenvalues"] = [8.0 * math.exp(0.02 * i), 4.0, -2.0]
    found = ev.convergence(rows)
    assert found.conditioning == pytest.approx(4 * math.exp(0.02 * 36))
    assert found.conditioning_trend and found.conditioning_trend.value == pytest.approx(0.002)
    assert "condition number of the top subspace grows" in str(found)


def test_an_interval_knows_of_correlated_residuals() -> None:
    rng = np.random.default_rng(3)
    x, held = np.arange(300.0), 0
    for _ in range(100):
        rest = np.zeros(300)
        for i in range(1, 300):
            rest[i] = 0.8 * rest[i - 1] + rng.standard_normal()
        found = decay.slope(x, 0.01 * x + rest, 0.95)
        held += found.low <= 0.01 <= found.high
    assert held >= 88  # 58 or so if they counted as independent
    values = rng.standard_normal(4000) * 0.3 + np.linspace(0, 50, 4000)
    assert decay.noise(values)[0] == pytest.approx(0.3, rel=0.05)


def test_it_is_saved_and_comes_back(tmp_path: Path) -> None:
    found = ev.convergence(noisy(0))
    again = Convergence.load(found.save(tmp_path / "run"))
    assert again == found and str(again.reaches(0.71)) == str(found.reaches(0.71))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("history", "error", "message"),
    [
        ([1.0, 0.5], ev.DecisionError, "expected at least 8 losses to tell a trend from noise, got 2"),
        ([], ev.DecisionError, "got 0"),
        (
            [1.0] * 5 + [math.nan] * 9,
            ev.NonFiniteError,
            "the run diverged: the loss at step 5 is nan; it was 1 one record",
        ),
        (
            {"loss": [1.0] * 9, "grad_norm": [1.0] * 8 + [math.inf]},
            ev.NonFiniteError,
            "the gradient norm at step 8 is inf",
        ),
        (
            {"loss": [1.0] * 8, "step": [0, 1, 2, 3, 5, 4, 6, 7]},
            ev.DecisionError,
            "ascending order.* 5 is followed by 4",
        ),
        ({"loss": [1.0] * 8, "step": [0] * 8}, ev.DecisionError, "each once; 0 is followed by 0"),
        ({"loss": [1.0] * 8, "step": [0]}, ev.DecisionError, "expected lists of one length"),
        ({"losses": [1.0] * 8}, ev.DecisionError, "expected 'loss' and any of .* got losses"),
        ([{"loss": 1.0, "acc": 1.0}] * 8, ev.DecisionError, "got loss, acc"),
        ([{"loss": "x"}] * 8, ev.DecisionError, "loss number 0 is 'x', not a number"),
        ({"loss": [1.0] * 8, "grad_norm": [-1.0] * 8}, ev.DecisionError, "a norm is not negative"),
        ({"loss": [1.0] * 8, "eigenvalues": [[1.0]] * 8}, ev.DecisionError, r"two or more; got \[1\]"),
        ({"loss": [1.0] * 8, "eigenvalues": [1.0] * 8}, ev.DecisionError, "expected a list of numbers"),
        ({"loss": 3.0}, ev.DecisionError, "expected a list under 'loss', got 3.0"),
        ({"loss": [1.0] * 8, "step": [*range(7), math.inf]}, ev.DecisionError, "expected finite steps, got inf"),
        ("abc", ev.DecisionError, "got str"),
        (3, ev.DecisionError, "got int"),
    ],
)
def test_bad_histories(history: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ev.convergence(history)
    with pytest.raises(ev.DecisionError, match="level"):
        ev.convergence([1.0] * 9, level=95)
