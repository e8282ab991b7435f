"""Lanczos does what its equation says: A Qᵀ = Qᵀ T + Vᵀ B, orthonormal, in blocks of all sizes, after restarts too."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import evolute as ev
from evolute.krylov.lanczos import Lanczos
from evolute.krylov.orthogonal import inner, split
from evolute.krylov.randomness import normal
from evolute.krylov.work import Work
from krylov_cases import D, draw, hidden, outliers, plain


def _started(op: ev.LinearOperator, block: int, capacity: int = 200) -> Lanczos:
    work = Work(op, "test", progress=False)
    lanczos = Lanczos(work, capacity)
    lanczos.add(normal(block, work.n, work.generator, work.like))
    return lanczos


def _defect(lanczos: Lanczos) -> float:
    """‖A Qᵀ − Qᵀ T − Vᵀ B‖ / ‖A Qᵀ‖."""
    image = lanczos.work.op.apply_rows(lanczos.Q)
    T = lanczos.projected[: lanczos.m, : lanczos.m].to(image)
    rest = image - T @ lanczos.Q - lanczos.coupling.mT.to(image) @ lanczos.V
    return float(rest.norm() / image.norm())


def _is_orthonormal(rows: Tensor, within: float) -> bool:
    return bool(((inner(rows, rows) - torch.eye(len(rows), dtype=D)).abs() <= within).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1, 2, 5])
def test_the_defining_equation(block: int, dtype: torch.dtype) -> None:
    lanczos, eps = _started(hidden(outliers(), dtype=dtype), block), torch.finfo(dtype).eps
    for _ in range(60 // block):
        lanczos.step()
    assert _defect(lanczos) < 30 * eps
    assert _is_orthonormal(lanczos.rows[: lanczos.m + lanczos.width], 30 * eps)
    assert lanczos.orthogonality() < 30 * eps


@pytest.mark.parametrize("block", [1, 3])
def test_the_equation_holds_after_restarts(block: int) -> None:
    lanczos = _started(hidden(outliers()), block, capacity=30)
    for _ in range(100):
        if lanczos.full:
            ritz = lanczos.ritz()
            keep = torch.cat([torch.arange(5), torch.arange(lanczos.m - 5, lanczos.m)])
            lanczos.compress(ritz, keep)
            assert _defect(lanczos) < 1e-13
        lanczos.step()
    assert _defect(lanczos) < 1e-13
    assert _is_orthonormal(lanczos.Q, 1e-13)


def test_bounds_are_residuals() -> None:
    lanczos = _started(hidden(outliers()), 2)
    for _ in range(10):
        lanczos.step()
    ritz = lanczos.ritz()
    Y = lanczos.vectors(ritz.coordinates)
    residuals = (lanczos.work.op.apply_rows(Y) - ritz.values[:, None] * Y).norm(dim=1)
    assert torch.allclose(residuals, ritz.bounds, atol=1e-12)


def test_more_random_vectors_may_join_on_the_way() -> None:
    lanczos = _started(hidden(outliers()), 1)
    for _ in range(5):
        lanczos.step()
    lanczos.add(normal(2, 400, draw(9), lanczos.rows))
    for _ in range(10):
        lanczos.step()
    assert (lanczos.m, lanczos.width) == (5 + 10 * 3, 3)
    assert _defect(lanczos) < 1e-13


def test_no_ghosts_past_fifty_steps() -> None:
    """Without reorthogonalisation the top eigenvalue comes back again and again."""
    lanczos = _started(plain(torch.cat([torch.tensor([100.0, 90.0, 80.0]), torch.linspace(0, 1, 997)])), 1)
    for _ in range(150):
        lanczos.step()
    assert torch.allclose(lanczos.ritz().values[-3:], torch.tensor([80.0, 90.0, 100.0], dtype=D))
    assert lanczos.ritz().values[-4] <= 1 + 1e-12


def test_an_invariant_subspace_ends_it() -> None:
    lanczos = _started(plain(torch.tensor([1.0, 2.0, 3.0]).repeat(50)), 2)
    while not lanczos.exhausted:
        lanczos.step()
    assert lanczos.m == 6
    assert torch.allclose(lanczos.ritz().values, torch.tensor([1.0, 1, 2, 2, 3, 3], dtype=D))


@given(st.integers(0, 6), st.integers(1, 5), st.integers(0, 1000), st.sampled_from([1e-12, 1.0, 1e12]))
def test_a_split_adds_up_whatever_the_rows(basis: int, rows: int, seed: int, scale: float) -> None:
    """Dependent rows, zeros, rows of very different lengths, more rows than room."""
    generator, n = draw(seed), 8
    Q = torch.linalg.qr(torch.randn(n, basis, generator=generator, dtype=D)).Q.T.contiguous()
    W = torch.randn(rows, n, generator=generator, dtype=D) * scale
    kinds = torch.randint(0, 4, (rows,), generator=generator).tolist()
    for i, kind in enumerate(kinds):
        W[i] = [W[i], W[i] * 1e-7, W[0] * 2, W[i] * 0][kind]
    parts = split(W, Q, 0.0)
    rebuilt = parts.C @ Q + parts.R @ parts.V
    assert float((rebuilt - W).abs().max()) <= 1e-13 * float(W.abs().max())
    assert _is_orthonormal(torch.cat([Q, parts.V]), 1e-13)
    assert len(parts.V) <= n - basis


def test_sums_of_a_million_float32_are_accurate() -> None:
    row = torch.rand(1, 1 << 20, generator=draw(0))
    exact = float((row.double() ** 2).sum())
    assert abs(float(inner(row, row)) - exact) < 1e-6 * exact
