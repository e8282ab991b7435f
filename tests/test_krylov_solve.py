"""Linear systems: solved, or said why not."""

from pathlib import Path
from typing import Any

import pytest
import torch

import evolute as ev
from evolute.krylov import checkpoint as checkpoints
from families import FAMILIES
from krylov_cases import D, draw, flat, hidden, outliers, plain, pressing_ctrl_c


def _right(n: int = 400) -> torch.Tensor:
    return torch.randn(n, generator=draw(1), dtype=D)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_positive_definite(damping: float, scale: float) -> None:
    op, b = hidden((flat() + 1.1) * scale), _right()
    found = ev.solve(op, b, damping * scale, tol=1e-8)
    assert (found.status, found.indefinite, found.method) == ("converged", False, "conjugate gradients")
    assert float((op @ found.x + damping * scale * found.x - b).norm() / b.norm()) < 2e-8
    assert found.residual < 2e-8
    assert found.products < 200


def test_indefinite_is_said_and_solved() -> None:
    op, b = hidden(flat() + 1e-3), _right()
    found = ev.solve(op, b, tol=1e-6, max_products=1000)
    assert found.indefinite
    assert found.direction is not None
    assert found.curvature is not None
    assert float(found.direction @ (op @ found.direction)) == pytest.approx(found.curvature)
    assert found.curvature < 0
    assert float(found.direction.norm()) == pytest.approx(1)
    assert (found.status, found.method) == ("converged", "minimal residuals")
    assert float((op @ found.x - b).norm() / b.norm()) < 2e-6
    assert "not positive definite" in str(found)


def test_enough_damping_makes_it_definite() -> None:
    assert not ev.solve(hidden(outliers()), _right(), damping=5.0).indefinite
    assert ev.solve(hidden(outliers()), _right(), damping=3.0).indefinite


def test_a_singular_system_without_solution() -> None:
    values = torch.cat([torch.zeros(10), torch.linspace(1, 2, 390)]).to(D)
    found = ev.solve(plain(values), _right(), tol=1e-8)
    assert found.status == "not converged"
    assert found.residual == pytest.approx(float(_right()[:10].norm() / _right().norm()), rel=1e-3)


def test_names_in_names_out() -> None:
    family = next(iter(FAMILIES.values()))()
    objective = ev.Objective(family.model, family.batches, family.loss)
    gradient = objective.space.unflatten(objective.gradient())
    G = ev.GaussNewton(objective)
    found = ev.solve(G, gradient, damping=0.1, tol=1e-8)
    assert isinstance(found.x, dict)
    assert found.x.keys() == gradient.keys()
    rebuilt = G @ found.x
    assert all(torch.allclose(rebuilt[n] + 0.1 * found.x[n], gradient[n], atol=1e-6) for n in gradient)


def test_nothing_is_asked_and_nothing_is_the_answer() -> None:
    found = ev.solve(hidden(flat()), torch.zeros(400, dtype=D))
    assert found.converged
    assert not bool(torch.as_tensor(found.x).any())
    assert ev.solve(plain(torch.zeros(9)), torch.ones(9)).indefinite


def test_ctrl_c_and_too_few_products() -> None:
    assert ev.solve(pressing_ctrl_c(hidden(flat() + 1.1), at=5), _right(), tol=1e-10).status == "interrupted"
    assert ev.solve(hidden(flat() + 1.1), _right(), tol=1e-10, max_products=5).status == "not converged"


@pytest.mark.parametrize(
    ("b", "options", "message"),
    [
        (torch.ones(3), {}, r"b: expected a vector \(400,\) or name → tensor, got \(3,\)"),
        ([1.0], {}, "got list"),
        (_right(), {"tol": 2.0}, "tol: expected"),
        (_right(), {"tol": "fine"}, "tol: expected"),
        (_right(), {"damping": float("nan")}, "damping: expected a finite number δ of H \\+ δI, got nan"),
        (_right(), {"max_products": -1}, "max_products: expected a number, at least 1, got -1"),
        (_right().to(torch.complex128), {}, "b: expected real entries, got torch.complex128"),
    ],
)
def test_what_makes_no_sense(b: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ev.VectorError, match=message):
        ev.solve(hidden(flat()), b, **options)
    with pytest.raises(ev.NonFiniteError, match="b has entries"):
        ev.solve(hidden(flat()), torch.full((400,), torch.nan, dtype=D))


@pytest.mark.parametrize("damping", [1e-3, -0.37])  # conjugate gradients, and minimal residuals
@pytest.mark.parametrize("at", [3, 12])
def test_resuming_gives_the_same_bits(damping: float, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    values = torch.linspace(0.01, 1, 60, dtype=torch.float64)
    op, b, file = hidden(values), torch.ones(60, dtype=torch.float64), tmp_path / "run"
    whole = ev.solve(op, b, damping, tol=1e-9)
    stopped = ev.solve(pressing_ctrl_c(op, at), b, damping, tol=1e-9, checkpoint=file)
    assert stopped.interrupted and stopped.products < whole.products
    resumed = ev.solve(op, b, damping, tol=1e-9, checkpoint=file)
    assert resumed.converged and resumed.products == whole.products
    assert torch.equal(torch.as_tensor(resumed.x), torch.as_tensor(whole.x))
    assert resumed.indefinite == whole.indefinite == (damping < 0)


def test_a_checkpoint_of_another_right_side_is_refused(tmp_path: Path) -> None:
    op, file = hidden(torch.linspace(0.1, 1, 20, dtype=torch.float64)), tmp_path / "run"
    ev.solve(op, torch.ones(20, dtype=torch.float64), checkpoint=file)
    with pytest.raises(ev.CheckpointError, match="belongs to other work: b is"):
        ev.solve(op, 2 * torch.ones(20, dtype=torch.float64), checkpoint=file)
