"""Columns of the loss, pulled back to modules, make up the Gauss–Newton matrix of the engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import evolute as ev
from evolute.apps.captured import Captured, by_rows, captured, linear_groups, sample_gradients
from evolute.apps.output_factor import cross_entropy_columns, label_column, sampled_columns, square_columns
from evolute.studies.subjects import Subject, at


def gradients(batch: Captured, group: str, linear: nn.Linear, column: Tensor) -> Tensor:
    """Of each sample, in the order of the operators: weight, then bias."""
    rows = sample_gradients(batch, {group: linear}, column)[group].flatten(1)
    return rows[:, by_rows(linear).argsort()]


@pytest.mark.parametrize("name", ["gpt_addition", "vit_digits", "mlp_digits"])
def test_all_columns_make_up_the_gauss_newton_matrix(name: str) -> None:
    """A lost bias, a mean in place of a sum over terms, or terms of a sample that mix would be off by whole factors."""
    objective = at(Subject(name, width=4, layers=1, samples=3), 0).objective
    found = linear_groups(objective.model)
    (batch,) = captured(objective, found)
    G = ev.GaussNewton(objective)
    for group in list(found)[:1] + list(found)[-2:]:
        rows = [gradients(batch, group, found[group], c) for c in cross_entropy_columns(batch.logits, batch.labels)]
        made = sum(each.mT @ each for each in rows) / batch.terms
        torch.testing.assert_close(made, ev.to_dense(G.block(group, group)), atol=1e-14, rtol=1e-10)


def test_drawn_labels_have_the_same_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(1, 1, 4, generator=generator).double(), torch.tensor([[2]])
    p = logits.softmax(-1)[0, 0]
    (columns,) = [torch.cat(list(sampled_columns(logits, labels, 20000, generator)))[:, 0]]
    torch.testing.assert_close(columns.mT @ columns, torch.diag(p) - torch.outer(p, p), atol=0.01, rtol=0)


def test_columns_are_those_of_the_loss() -> None:
    logits, labels = torch.randn(2, 3, 5).double().requires_grad_(), torch.tensor([[1, -100, 4], [-100, -100, 0]])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(label_column(logits.detach(), labels), torch.autograd.grad(loss, logits)[0])
    columns = list(cross_entropy_columns(logits.detach(), labels))
    assert len(columns) == 10  # the second term counts in no sample
    assert not any(column[1, 0].any() or column[0, 1].any() for column in columns)


def test_the_columns_of_squares() -> None:
    model = nn.Linear(3, 2).double()
    objective = ev.Objective(model, [(torch.randn(4, 3).double(), torch.randn(4, 2).double())], nn.MSELoss())
    (batch,) = captured(objective, {"": model})
    rows = [gradients(batch, "", model, c) for c in square_columns(batch.logits, batch.labels)]
    made = sum(each.mT @ each for each in rows) / batch.terms
    torch.testing.assert_close(made, ev.to_dense(ev.GaussNewton(objective)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.f = nn.Parameter(torch.ones(2)), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        return h + self.f(h)


def test_inputs_are_pulled_to_by_every_way_from_there() -> None:
    """Of h + f(h) it is I + W, not W alone."""
    model = Residual().double()
    objective = ev.Objective(model, [(torch.ones(1, 2).double(), torch.zeros(1, 2).double())], nn.MSELoss())
    (batch,) = captured(objective, {"f": model.f})
    e = torch.tensor([[[1.0, 0.0]]]).double()
    expected = torch.eye(2).double()[0] + model.f.weight[0].detach()
    torch.testing.assert_close(batch.pull_to_inputs(e)["f"][0, 0], expected)


def test_nothing_of_the_model_is_changed() -> None:
    objective = at(Subject("vit_digits", width=4, layers=1, samples=2), 0).objective
    list(captured(objective, linear_groups(objective.model)))
    assert not any(module._forward_hooks for module in objective.model.modules())
