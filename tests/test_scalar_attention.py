"""Scalar self-attention: value, gradient, Hessian and the whole spectrum, against automatic differentiation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

import evolute as ev
from evolute.calculus.scalar_attention import ScalarAttention, Spectrum

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def forward(w: Tensor, x: Tensor, sink: float) -> Tensor:
    """w = (w_Q, w_K, w_V) in one vector."""
    q, k, v = w[: len(w) // 2], w[len(w) // 2 : -1], w[-1]
    scores = (x[..., None] * q) @ (x[..., None] * k).mT / math.sqrt(len(q))
    first = torch.zeros(x.shape[-1], dtype=w.dtype)
    first[0] = sink
    return v * (torch.softmax(scores + first, -1) @ x[..., None])[..., 0]


def parameters(point: ScalarAttention) -> Tensor:
    return torch.cat([point.w_Q, point.w_K, torch.tensor([point.w_V], dtype=point.w_Q.dtype)])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """w_Q, w_K, w_V, x, y, sink; d_K from 1, L from 1, one sequence or several; w_Q = ±w_K and constant x included."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    d_K, L, batch = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.sampled_from([(), (3,), (2, 2)]))
    q, k, v, x, y = (
        torch.randn(shape, dtype=torch.float64, generator=g) for shape in ((d_K,), (d_K,), (), (*batch, L), (*batch, L))
    )
    k = draw(st.sampled_from([k, q, -q, 0 * k]))
    x = draw(st.sampled_from([x, x[..., :1].expand_as(x), x.abs() + 1]))
    return q, k, v, x, y, draw(st.sampled_from([0.0, 2.0, -1.5]))


@given(problems())
def test_value_gradient_and_hessian_are_those_of_autograd(
    problem: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float],
) -> None:
    *inputs, sink = problem
    point = ev.calculus.scalar_attention(*inputs, sink=sink)
    x, y, w = inputs[3], inputs[4], parameters(point)

    def loss(w: Tensor) -> Tensor:
        return (forward(w, x, sink) - y).square().mean()

    assert point.value == pytest.approx(float(loss(w)), rel=1e-12)
    assert torch.allclose(point.gradient, jacobian(loss, w), **TIGHT)
    assert torch.allclose(point.hessian, hessian(loss, w), **TIGHT)


@given(problems())
def test_gauss_newton_is_the_product_of_jacobians(
    problem: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float],
) -> None:
    *inputs, sink = problem
    point = ev.calculus.scalar_attention(*inputs, sink=sink)
    x = inputs[3]
    J = jacobian(lambda w: forward(w, x, sink).reshape(-1), parameters(point))
    assert torch.allclose(point.gauss_newton, 2 * J.T @ J / x.numel(), **TIGHT)


@given(problems())
def test_the_spectrum_is_that_of_the_matrix(problem: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]) -> None:
    *inputs, sink = problem
    point = ev.calculus.scalar_attention(*inputs, sink=sink)
    for spectrum, matrix in (
        (point.spectrum, point.hessian),
        (point.gauss_newton_spectrum, point.gauss_newton),
    ):
        scale = float(matrix.norm()) + 1e-300
        assert len(spectrum.eigenvalues) == len(matrix)
        assert torch.allclose(spectrum.eigenvalues / scale, torch.linalg.eigvalsh(matrix) / scale, atol=1e-12)


@pytest.mark.parametrize("d_K", [1, 2, 3, 7])
def test_the_bulk_comes_d_K_minus_one_times_on_either_side(d_K: int) -> None:
    g = torch.Generator().manual_seed(d_K)
    q, k, x, y = (torch.randn(n, dtype=torch.float64, generator=g) for n in (d_K, d_K, 6, 6))
    point = ev.calculus.scalar_attention(q, k, 1.3, x, y)
    values = torch.linalg.eigvalsh(point.hessian)
    for sign in (1, -1):
        assert (
            int(torch.isclose(values, torch.tensor(sign * point.spectrum.bulk, dtype=torch.float64), rtol=1e-9).sum())
            == d_K - 1
        )
    assert point.spectrum.multiplicity == d_K - 1 and point.spectrum.outliers.shape == (3,)
    assert int((torch.linalg.eigvalsh(point.gauss_newton).abs() > 1e-12).sum()) == 2


def test_condition_number_is_that_of_the_eigenvalues() -> None:
    point = ev.calculus.scalar_attention([1.0, 0.5], [0.2, 2.0], 1.5, x=[1.0, -0.3, 2.0], y=[0.0, 1.0, 1.0])
    assert point.spectrum.condition_number == pytest.approx(float(torch.linalg.cond(point.hessian)), rel=1e-10)
    assert point.gauss_newton_spectrum.condition_number == math.inf
    assert Spectrum(0.5, 1, torch.tensor([1.0, 2.0, -4.0])).condition_number == 8
    assert Spectrum(0.5, 0, torch.tensor([1.0, 2.0, -4.0])).condition_number == 4


def test_tokens_that_are_all_alike_leave_the_value_weight_alone() -> None:
    """No variance under any row: queries and keys have no effect to any order."""
    point = ev.calculus.scalar_attention([1.0, 2.0], [3.0, -1.0], 0.7, x=[1.5] * 4, y=[0.0, 1.0, 2.0, 3.0])
    assert point.spectrum.eigenvalues.abs().sort().values.tolist() == pytest.approx([0, 0, 0, 0, 4.5], abs=1e-14)
    assert point.spectrum.condition_number > 1e14


def test_a_sink_shrinks_the_bulk_and_grows_the_outliers() -> None:
    """The more every row looks at the first token, the less variance is left: ℓ_s → 0, ℓ_vv → 2 x₁²."""
    x = torch.tensor([2.0, 0.5, -1.0, -0.5], dtype=torch.float64)
    points = [
        ev.calculus.scalar_attention([0.1, 0.2], [0.2, 0.1], 1.0, x, 0 * x - 1, sink=sink) for sink in (1.0, 3.0, 30.0)
    ]
    bulks = [point.spectrum.bulk for point in points]
    outliers = [float(point.spectrum.outliers.max()) for point in points]
    assert bulks[0] > bulks[1] > bulks[2] and outliers[0] < outliers[1] < outliers[2]
    assert bulks[2] < 1e-10 and outliers[2] == pytest.approx(2 * 2.0**2)


def test_float32_is_computed_as_given() -> None:
    x = torch.tensor([1.0, 2.0])
    point = ev.calculus.scalar_attention([1.0], [1.0], 1.0, x, x)
    assert point.hessian.dtype == torch.float32 and point.spectrum.eigenvalues.dtype == torch.float32


def test_nothing_of_the_caller_is_changed() -> None:
    q = torch.ones(2, dtype=torch.float64, requires_grad=True)
    x = torch.arange(3.0, dtype=torch.float64)
    point = ev.calculus.scalar_attention(q, q, 1.0, x, x, sink=5.0)
    assert not point.hessian.requires_grad and q.grad is None and x.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_K": [1.0]}, r"w_Q and w_K of one shape \(d_K,\), got \(2,\) and \(1,\)"),
        ({"w_Q": [[1.0, 2.0]]}, r"got \(1, 2\)"),
        ({"w_V": [1.0, 2.0]}, r"one number for w_V, got shape \(2,\)"),
        ({"y": [1.0]}, r"x and y of one shape .*got \(3,\) and \(1,\)"),
        ({"x": [], "y": []}, r"x and y of one shape .*\(0,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict[str, list[float]], message: str) -> None:
    given = {"w_Q": [1.0, 2.0], "w_K": [1.0, 2.0], "w_V": 1.0, "x": [1.0, 2.0, 3.0], "y": [1.0, 2.0, 3.0]}
    with pytest.raises(ev.VectorError, match=message):
        ev.calculus.scalar_attention(**(given | change))  # pyright: ignore
