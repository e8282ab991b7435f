"""Approximations of curvature where they are exact, and against loops and dense matrices where they are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import evolute as ev
from evolute.apps.captured import by_rows, captured, linear_groups, tokens
from evolute.apps.curvature_approximations import (
    Approximation,
    Blocks,
    Diagonal,
    Full,
    Kronecker,
    exact_diagonal,
    kfac,
    kfac_reduce,
    nearest_kronecker,
    row_blocks,
    second_moment,
    shampoo,
    square_root,
)
from evolute.apps.output_factor import cross_entropy_columns, square_columns
from evolute.engine.objective import Objective
from evolute.studies.subjects import Subject, at
from evolute.zoo import MLP


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def symmetric(n: int) -> Tensor:
    half = normal(n, n)
    return half + half.mT


def gauss_newton(objective: Objective, group: str, linear: nn.Linear) -> Tensor:
    order = by_rows(linear)
    return ev.to_dense(ev.GaussNewton(objective).block(group, group))[order][:, order]


@pytest.mark.parametrize("bias", [True, False])
def test_kfac_is_exact_in_a_deep_linear_network_under_squared_error(bias: bool) -> None:
    """A wrong order of entries, a bias without its 1, a mean over outputs in place of samples: none would pass."""
    model = MLP([3, 4, 5, 2], "identity", bias=bias).double()
    batches = [(normal(6, 3), normal(6, 2)), (normal(4, 3), normal(4, 2))]
    objective = ev.Objective(model, batches, nn.MSELoss())
    linears = linear_groups(model)
    for make in (kfac, kfac_reduce):
        for group, made in make(objective, linears, square_columns).items():
            torch.testing.assert_close(made.dense(), gauss_newton(objective, group, linears[group]))


class Pooled(nn.Module):
    """Tokens through one linear map, then their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x).mean(1)


def test_reduce_is_exact_where_tokens_are_averaged_and_expand_is_not() -> None:
    model = Pooled().double()
    objective = ev.Objective(model, [(normal(5, 4, 3), normal(5, 2))], nn.MSELoss())
    (group,) = linears = linear_groups(model)
    true = gauss_newton(objective, group, linears[group])
    torch.testing.assert_close(kfac_reduce(objective, linears, square_columns)[group].dense(), true)
    assert (kfac(objective, linears, square_columns)[group].dense() - true).norm() > 0.1 * true.norm()


def test_kfac_of_a_transformer_is_what_loops_over_tokens_give() -> None:
    objective = at(Subject("gpt_addition", width=4, layers=1, samples=2), 0).objective
    linears = {"layers.0.attn.v": linear_groups(objective.model)["layers.0.attn.v"]}
    (name,) = linears
    (batch,) = captured(objective, linears)
    x, n = tokens(batch.inputs[name]), 2 * 17
    A, G, reduced = (torch.zeros(4, 4, dtype=torch.float64) for _ in range(3))
    for b in range(2):
        for s in range(17):
            A += torch.outer(x[b, s], x[b, s]) / n
    for column in cross_entropy_columns(batch.logits, batch.labels):
        g = batch.pull_to_outputs(column)[name]
        for b in range(2):
            reduced += torch.outer(sum(g[b]), sum(g[b])) / batch.terms
            for s in range(17):
                G += torch.outer(g[b, s], g[b, s]) / batch.terms
    torch.testing.assert_close(kfac(objective, linears, cross_entropy_columns)[name].dense(), torch.kron(G, A))
    found = kfac_reduce(objective, linears, cross_entropy_columns)[name]
    torch.testing.assert_close(found.outputs, reduced)
    torch.testing.assert_close(found.inputs, sum(torch.outer(x[b].mean(0), x[b].mean(0)) for b in range(2)) / 2)


def test_no_kronecker_product_is_nearer_than_the_nearest() -> None:
    objective = at(Subject("vit_digits", width=4, layers=1, samples=4), 0).objective
    linears = linear_groups(objective.model)
    for group, made in kfac(objective, linears, cross_entropy_columns).items():
        true = gauss_newton(objective, group, linears[group])
        best = nearest_kronecker(true, linears[group].out_features).dense()
        assert (best - true).norm() <= (made.dense() - true).norm()
        assert torch.linalg.eigvalsh(best).min() > -1e-12 * best.norm()


@pytest.mark.parametrize(("rows", "columns"), [(2, 5), (5, 2)])
def test_the_nearest_kronecker_product_is_the_first_singular_pair(rows: int, columns: int) -> None:
    M = symmetric(rows * columns)
    arranged = M.view(rows, columns, rows, columns).transpose(1, 2).reshape(rows**2, columns**2)
    least = torch.linalg.svdvals(arranged)[1:].norm()
    torch.testing.assert_close((nearest_kronecker(M, rows).dense() - M).norm(), least)


def test_moments_of_gradients() -> None:
    gradients = normal(7, 3, 4)
    flat = gradients.flatten(1)
    torch.testing.assert_close(second_moment(gradients).values, (flat.mT @ flat / 7).diagonal())
    u, v = normal(3), normal(4)
    one = shampoo(torch.outer(u, v)[None])
    torch.testing.assert_close(one.dense(), torch.outer(*2 * [torch.outer(u, v).flatten()]), atol=1e-5, rtol=1e-5)


def test_square_roots() -> None:
    made = shampoo(normal(5, 3, 4))
    root = square_root(made).dense()
    torch.testing.assert_close(root @ root, made.dense())
    values = normal(3).square()
    torch.testing.assert_close(square_root(Diagonal(values)).eigenvalues.square(), values)


def test_pieces_of_the_true_block() -> None:
    M = symmetric(6)
    torch.testing.assert_close(exact_diagonal(M).dense(), torch.diag(M.diagonal()))
    mask = torch.kron(torch.eye(2), torch.ones(3, 3)).double()
    torch.testing.assert_close(row_blocks(M, 2).dense(), M * mask)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Full(symmetric(6)),
        lambda: Diagonal(normal(6)),
        lambda: Kronecker(symmetric(2), symmetric(3)),
        lambda: Blocks([Full(symmetric(4)), Diagonal(normal(2))]),
    ],
)
def test_steps_are_those_of_the_dense_matrix(made: type[Approximation]) -> None:
    approximation, g = made(), normal(6)
    values, V = torch.linalg.eigh(approximation.dense())
    torch.testing.assert_close(approximation.eigenvalues.sort().values, values)
    expected = V @ torch.diag(1 / (values.abs() + 0.1)) @ V.mT @ g
    torch.testing.assert_close(approximation.solve(g, 0.1), expected)


def test_rows_of_a_group() -> None:
    """The gradient of a sample, in the order of rows, is g times (x, 1)."""
    linear = nn.Linear(2, 3).double()
    x, g = normal(2), normal(3)
    found: Iterator[Tensor] = iter(torch.autograd.grad((linear(x) * g).sum(), list(linear.parameters())))
    flat = torch.cat([each.flatten() for each in found])
    torch.testing.assert_close(flat[by_rows(linear)], torch.outer(g, torch.cat([x, torch.ones(1)])).flatten())
