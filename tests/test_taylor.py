"""taylor: against the dense Hessian, real gradient descent on a quadratic loss, and finite differences."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evolute as ev
from evolute.apps import directional
from evolute.apps.quadratic_descent import Descent, fallen, walked
from evolute.apps.taylor import Taylor
from evolute.zoo import GPT, addition, cross_entropy

D = torch.float64


def quadratic() -> ev.Objective:
    """Least squares in 12 weights, of full rank: H is constant, and no third derivative."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 6, dtype=D, generator=generator) * torch.logspace(0, -1, 6, dtype=D)
    y = torch.randn(30, 2, dtype=D, generator=generator)
    return ev.Objective(nn.Linear(6, 2, bias=False).double(), [(x, y)], nn.MSELoss())


def curved() -> ev.Objective:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(20, 3, dtype=D)
    return ev.Objective(model, [(x[:7], x[:7, 0].long() % 2), (x[7:], x[7:, 1].long() % 2)], nn.CrossEntropyLoss())


def descended(objective: ev.Objective, rate: float, steps: int) -> list[float]:
    """Real gradient descent, on a copy of the model."""
    model = copy.deepcopy(objective.model)
    data = [batch for _, batch in objective.batches]
    losses = list[float]()
    for _ in range(steps + 1):
        here = ev.Objective(model, data, objective.loss)
        losses.append(here.value())
        with torch.no_grad():
            for p, g in zip(model.parameters(), here.space.views(here.gradient()), strict=True):
                p.sub_(rate * g)
    return losses


# ---------------------------------------------------------------- the trajectory


@pytest.mark.parametrize("factor", [0.1, 1.0, 1.9, 2.1])
def test_descent_on_a_quadratic_is_predicted_to_rounding(factor: float) -> None:
    """Many more steps than products: only a run that is complete, and the right φ, can do that."""
    objective = quadratic()
    found = ev.taylor(objective)
    rate = factor / float(torch.linalg.eigvalsh(ev.to_dense(ev.Hessian(objective)))[-1])
    real = descended(objective, rate, 60)
    assert found.status == "exact" and found.products <= 12
    assert found.trajectory(rate, 60).tolist() == pytest.approx(real, rel=1e-9)
    assert found.change(rate, 60).solver_error < 1e-10 * max(1.0, abs(real[-1]))
    assert found.lines["gradient"].remainder() == pytest.approx(0, abs=1e-14)
    assert abs(found.lines["gradient"].third) < 1e-14


def test_a_short_run_is_exact_for_as_many_steps_and_says_its_error_beyond() -> None:
    objective = quadratic()
    whole, short = ev.taylor(objective), ev.taylor(objective, products=4)
    rate = 0.9 * whole.largest_rate
    assert short.products == 4 and short.status == "converged"
    for t in range(5):
        assert float(short.change(rate, t)) == pytest.approx(float(whole.change(rate, t)), rel=1e-12)
    beyond = abs(float(short.change(rate, 12)) - float(whole.change(rate, 12)))
    assert 1e-9 < beyond < 10 * short.change(rate, 12).solver_error


@pytest.mark.parametrize("steps", [30, 100, 1000])
@pytest.mark.parametrize("nodes", [3, 5, 10])
def test_the_error_holds_the_truth_far_beyond_the_run(nodes: int, steps: int) -> None:
    """Most of g in directions of hardly any curvature, which a short run does not tell apart."""
    generator = torch.Generator().manual_seed(nodes)
    values = torch.exp(3 * torch.randn(120, generator=generator, dtype=torch.float64) - 6)
    g = torch.randn(120, generator=generator, dtype=torch.float64) * values.sqrt()
    T = tridiagonal(values, g, nodes)
    descent = Descent.of(T, float(g @ g), complete=False)
    rate = 1 / float(values.max())
    truth = -float((g.square() * fallen(values, rate, steps)).sum())
    found, error = descent.change(rate, steps)
    assert truth < found < truth + error


def tridiagonal(values: torch.Tensor, g: torch.Tensor, m: int) -> torch.Tensor:
    """QᵀHQ of an orthonormal basis of g, Hg, …: the plain definition."""
    basis = list[torch.Tensor]()
    for k in range(m):
        v = values * basis[-1] if k else g
        for q in [*basis, *basis]:
            v = v - (q @ v) * q
        basis.append(v / v.norm())
    Q = torch.stack(basis, 1)
    return Q.T @ (values[:, None] * Q)


@pytest.mark.parametrize("products", [1, 2, 3])
def test_the_shortest_runs_know_that_they_say_little(products: int) -> None:
    """Three quarters of three products, rounded up, are three: nothing would differ, and the error be none."""
    objective = quadratic()
    whole, short = ev.taylor(objective), ev.taylor(objective, products=products)
    for t in (12, 100):
        off = abs(float(short.change(0.3 * whole.largest_rate, t)) - float(whole.change(0.3 * whole.largest_rate, t)))
        assert 1e-6 < off < short.change(0.3 * whole.largest_rate, t).solver_error


def test_the_measure_is_that_of_the_dense_hessian() -> None:
    """−gᵀ φ(H) g with both, where H has negative eigenvalues."""
    objective = curved()
    found = ev.taylor(objective)
    values, U = torch.linalg.eigh(ev.to_dense(ev.Hessian(objective)))
    parts = (U.T @ objective.gradient()).square()
    assert values[0] < 0
    for rate, steps in ((0.1, 1), (0.5, 7), (2.0, 300)):
        power = (1 - rate * values) ** (2 * steps)
        wanted = -(parts * (1 - power) / (2 * values)).sum()
        assert float(found.change(rate, steps)) == pytest.approx(float(wanted), rel=1e-7)
        assert found.gradient_norm(rate, steps) == pytest.approx(float((parts * power).sum().sqrt()), rel=1e-7)
    assert found.best_rate == pytest.approx(float(parts.sum() / (parts * values).sum()))
    assert found.largest_rate == pytest.approx(2 / float(values[-1]), rel=1e-6)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 40])
def test_functions_of_the_eigenvalues_are_sums_without_cancellation(steps: int) -> None:
    x = torch.tensor([0.0, 1e-300, 1e-18, -1e-13, 0.3, 1.0, 1.7, 2.0, 2.2, -0.4], dtype=D)
    plain = [sum(((1 - x) ** k for k in range(n)), torch.zeros_like(x)) for n in (steps, 2 * steps)]
    torch.testing.assert_close(walked(x, 1.0, steps), plain[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fallen(x, 1.0, steps), plain[1] / 2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fallen(x / 0.01, 0.01, steps), 0.01 * plain[1] / 2, rtol=1e-12, atol=1e-12)


def test_what_leaves_float64_is_infinite_with_the_sign_of_what_grows_fastest() -> None:
    def at(top: float, bottom: float) -> float:
        T = torch.tensor([[(top + bottom) / 2, (top - bottom) / 2], [(top - bottom) / 2, (top + bottom) / 2]], dtype=D)
        return Descent.of(T, 1.0, True).change(1.0, 5000)[0]

    assert at(3.0, -0.5) == math.inf
    assert at(2.2, -0.5) == -math.inf
    assert at(3.0, 0.5) == math.inf


# ---------------------------------------------------------------- along steps


def test_lines_are_the_derivatives_of_a_transformer() -> None:
    """Third derivatives through attention, GELU and LayerNorm, against finite differences of Hessian products."""
    data = addition(seed=0).train.first(3)
    model = GPT(12, data.x.shape[1], 4, 2, 1, seed=0).double()
    objective = ev.Objective(model, [(data.x[:2], data.y[:2]), (data.x[2:], data.y[2:])], ev.Loss(*cross_entropy))
    d = torch.randn(objective.space.size, dtype=D, generator=torch.Generator().manual_seed(0)) / 30
    found = ev.taylor(objective, {"d": objective.space.unflatten(d)}, products=3, progress=False).lines["d"]

    def curvature(s: float) -> float:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for p, step in zip(moved.parameters(), objective.space.views(d), strict=True):
                p.add_(s * step)
        here = ev.Objective(moved, [(data.x, data.y)], ev.Loss(*cross_entropy))
        assert directional.loss_at(objective, s * d) == pytest.approx(here.value(), rel=1e-13)
        return float(d @ (ev.Hessian(here) @ d))

    s = 1e-3
    assert found.slope == pytest.approx(float(d @ objective.gradient()), rel=1e-12)
    assert found.curvature == pytest.approx(curvature(0), rel=1e-12)
    assert found.third == pytest.approx((curvature(s) - curvature(-s)) / (2 * s), rel=1e-3)
    assert found.length == pytest.approx(float(d.norm()))


def test_each_order_leaves_the_next_power_of_the_step() -> None:
    objective = curved()
    d = torch.randn(objective.space.size, dtype=D)
    found = ev.taylor(objective, {f"{s}": s * d for s in (0.002, 0.004)}, products=2)
    for order in (1, 2, 3):
        small, large = (found.lines[f"{s}"].remainder(order) for s in (0.002, 0.004))
        assert large / small == pytest.approx(2 ** (order + 1), rel=0.05)
    line = found.lines["0.002"]
    t = line.reach(0.2)
    assert abs(line.change(t, 3) - line.change(t, 2)) == pytest.approx(0.2 * abs(line.change(t, 2) - line.change(t, 1)))


def test_the_walk_of_descent_ends_where_the_model_says() -> None:
    objective = quadratic()
    found = ev.taylor(objective, descents=[(0.3, 25)])
    line = found.lines["25 × 0.3"]
    assert line.change() == pytest.approx(float(found.change(0.3, 25)), rel=1e-10)
    assert line.measured == pytest.approx(descended(objective, 0.3, 25)[-1] - found.loss, rel=1e-10)


# ---------------------------------------------------------------- what is special


def test_at_a_stationary_point_nothing_happens() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    found = ev.taylor(ev.Objective(model, [(torch.eye(2), torch.zeros(2, 1))], nn.MSELoss()), descents=[(0.1, 3)])
    assert found.gradient == 0 and found.trajectory(0.1, 3).tolist() == [0.0] * 4
    assert found.best_rate == found.largest_rate == math.inf and found.gradient_norm(0.1, 5) == 0
    assert found.lines["gradient"].measured == 0 and found.lines["3 × 0.1"].length == 0


def test_a_loss_that_overflows_is_infinitely_far_and_the_model_stays() -> None:
    objective = quadratic()
    before = [p.detach().clone() for p in objective.model.parameters()]
    versions = [p._version for p in objective.model.parameters()]
    H = ev.Hessian(objective)
    H @ torch.ones(12, dtype=D)
    found = ev.taylor(objective, {"far": torch.full((12,), 1e200, dtype=D)}, products=2)
    assert found.lines["far"].measured == math.inf
    assert all(torch.equal(a, b) for a, b in zip(before, objective.model.parameters(), strict=True))
    assert versions == [p._version for p in objective.model.parameters()]
    H @ torch.ones(12, dtype=D)  # the operator still finds its point


def test_recurrent_and_tied_weights_are_moved_too() -> None:
    model = nn.LSTM(2, 3, batch_first=True).double()
    loss = ev.Loss(lambda m, b: m(b)[0], lambda out, b: (out.square().sum(), out.numel()))
    objective = ev.Objective(model, [torch.ones(1, 4, 2, dtype=D)], loss)
    moved = copy.deepcopy(model)
    step = torch.full((objective.space.size,), 0.1, dtype=D)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.1)
    assert directional.loss_at(objective, step) == ev.Objective(moved, [torch.ones(1, 4, 2, dtype=D)], loss).value()
    tied = GPT(5, 3, 4, tied=True, seed=0)
    tokens = torch.tensor([[0, 1, 2]])
    assert directional.loss_at(
        ev.Objective(tied, [(tokens, tokens)], ev.Loss(*cross_entropy)), _minus(tied)
    ) == pytest.approx(math.log(5))
    assert tied.unembed.weight is tied.embed.weight


def _minus(model: nn.Module) -> Tensor:
    return -torch.cat([p.detach().flatten() for p in model.parameters()])


def test_it_is_saved_and_comes_back(tmp_path: Path) -> None:
    found = ev.taylor(curved(), descents=[(0.1, 4)])
    again = Taylor.load(found.save(tmp_path / "taylor"))
    assert again.trajectory(0.2, 9).tolist() == found.trajectory(0.2, 9).tolist()
    assert again.lines == dict(found.lines) or str(again) == str(found)
    assert "measured" in str(again) and "from the gradient" in str(again)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda o: ev.taylor(o.model), ev.ModelError, "expected an ev.Objective"),
        (lambda o: ev.taylor(o, products=0), ev.VectorError, "products: expected how many steps of Lanczos"),
        (
            lambda o: ev.taylor(o, {"d": torch.ones(3)}),
            ev.VectorError,
            r"step 'd': expected a tensor \(12,\).* got \(3,\)",
        ),
        (lambda o: ev.taylor(o, {"d": [1.0]}), ev.VectorError, "got list"),
        (lambda o: ev.taylor(o, torch.ones(12)), ev.VectorError, "steps: expected name → step, .* got Tensor"),
        (lambda o: ev.taylor(o, {"gradient": torch.ones(12)}), ev.VectorError, "'gradient' is the name of a step that"),
        (lambda o: ev.taylor(o, descents=(0.1, 3)), ev.VectorError, r"descents: expected pairs .* got 0.1"),
        (lambda o: ev.taylor(o, {"d": torch.full((12,), math.nan)}), ev.NonFiniteError, "step 'd' has entries"),
        (lambda o: ev.taylor(o, descents=[(-1.0, 3)]), ev.VectorError, "rate: expected a positive number, got -1.0"),
        (lambda o: ev.taylor(o).change(0.1, -1), ev.VectorError, "steps: expected how many, at least 0, got -1"),
        (lambda o: ev.taylor(o).lines["gradient"].change(order=4), ev.VectorError, "order: expected 1, 2 or 3"),
    ],
)
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(quadratic())


def test_the_slope_of_an_eigenvalue_is_that_of_the_dense_hessian() -> None:
    """Batches of uneven size; a derivative along the wrong one of the three directions would differ."""
    objective = curved()
    d = torch.randn(len(objective.gradient()), dtype=D)
    V = torch.linalg.eigh(ev.to_dense(ev.Hessian(objective)))[1]

    def spectrum(step: float) -> Tensor:
        model = copy.deepcopy(objective.model)
        with torch.no_grad():
            for p, move in zip(model.parameters(), objective.space.views(step * d), strict=True):
                p.add_(move)
        moved = ev.Objective(model, [batch for _, batch in objective.batches], objective.loss)
        return torch.linalg.eigvalsh(ev.to_dense(ev.Hessian(moved)))

    slopes = (spectrum(1e-5) - spectrum(-1e-5)) / 2e-5
    for place in (0, -1):
        assert directional.sharpness_slope(objective, V[:, place], d) == pytest.approx(float(slopes[place]), rel=1e-5)
