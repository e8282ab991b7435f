"""sample_size: the expected change is the mean over all orders, its law is 1/k, and the interval covers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evolute as ev
from evolute.apps.order_changes import Orders, changes, random_orders
from evolute.apps.sample_size import Search
from evolute.engine.sample_losses import SampleLosses, sample_losses


def given(values: Tensor, terms: Tensor | None = None) -> SampleLosses:
    return SampleLosses(values[None].double(), torch.ones(len(values)).double() if terms is None else terms.double())


def rows(count: int, *, fill: int = -100) -> tuple[Tensor, Tensor]:
    """Sequences of 5 tokens in 2 features, with labels of 3 classes, some of them no term."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (count, 5), generator=generator)
    return x, torch.where(torch.rand(count, 5, generator=generator) < 0.4, fill, y)


def token_objective(sizes: list[int]) -> ev.Objective:
    x, y = rows(sum(sizes))
    torch.manual_seed(0)
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    return ev.Objective(nn.Linear(2, 3).double(), batches, ev.Loss(*ev.zoo.cross_entropy))


# ---- one sample after the other


def test_the_change_is_the_mean_over_every_order_there_is() -> None:
    """Unequal numbers of terms: a mean of sample means would give other numbers."""
    sums, terms = torch.tensor([1.0, -2.0, 5.0, 0.5, 3.0]).double(), torch.tensor([1.0, 3.0, 2.0, 5.0, 1.0]).double()
    orders = torch.tensor(list(itertools.permutations(range(5))))
    for k in range(1, 5):
        S, N = sums[orders].cumsum(1), terms[orders].cumsum(1)
        direct = float((S[:, k] / N[:, k] - S[:, k - 1] / N[:, k - 1]).abs().mean())
        assert Orders(sums[None], terms, orders).change(k)[0] == pytest.approx(direct, rel=1e-12)


def test_groups_of_one_order_are_used_each() -> None:
    sums = torch.tensor([0.0, 2.0, 10.0, 14.0, 99.0])
    assert changes(sums, torch.ones(5), 1).tolist() == [1.0, 2.0]  # and 99 has no partner


def test_the_curve_of_gaussian_losses_is_the_one_of_theory() -> None:
    """E|ℓ_{k+1} − L_k| = √(2/π) √(1 + 1/k)."""
    losses = given(torch.randn(20_000, generator=torch.Generator().manual_seed(0)))
    orders = Orders(losses.sums, losses.terms, random_orders(20_000, 4, torch.Generator().manual_seed(1)))
    for k in (1, 2, 10, 300, 19_999):
        theory = math.sqrt(2 / math.pi) * math.sqrt(1 + 1 / k) / (k + 1)
        assert orders.change(k)[0] == pytest.approx(theory, rel=0.015)


def test_the_level_falls_by_a_factor_of_two_at_most_and_never_rises() -> None:
    """Losses of −1, 0 and 1, rarely not 0: (k + 1) d_k goes from 2 d_1 down to d_1, as far as it can."""
    values = torch.zeros(20_000)
    values[:100], values[100:200] = 1.0, -1.0
    losses = given(values)
    orders = Orders(losses.sums, losses.terms, random_orders(20_000, 8, torch.Generator().manual_seed(0)))
    levels = [(k + 1) * orders.change(k)[0] / orders.change(1)[0] for k in (1, 10, 100, 1000, 19_999)]
    assert levels[0] == 2 and levels[1] > 1.85 and levels[-1] == pytest.approx(1, abs=0.1)
    assert levels == sorted(levels, reverse=True)


@pytest.mark.parametrize("tolerance", [0.2, 0.01, 1e-3, 1e-6])
def test_k_star_is_the_first_from_which_all_changes_are_small(tolerance: float) -> None:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(3)).exp()
    search = Search(given(values), tolerance, 0.95, 8, torch.Generator().manual_seed(0))
    size = search.least()
    if search.extrapolated:
        mad = float((values - values.mean()).abs().mean())
        assert tolerance < 1e-4 and size == pytest.approx(mad / tolerance, rel=1e-3)
    else:
        assert search.orders.change(size)[0] < tolerance
        assert size == 1 or search.orders.change(size - 1)[0] >= tolerance


def test_negative_losses_change_nothing_but_the_mean() -> None:
    values = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = [
        Search(given(values + shift), 1e-3, 0.95, 8, torch.Generator().manual_seed(0)).least() for shift in (0.0, -7.0)
    ]
    assert sizes[0] == sizes[1]


def test_the_interval_covers_beyond_the_data_as_within() -> None:
    """Exponential losses: MAD = 2/e, so k* = 2/(e·tolerance)."""
    hits, trials = 0, 200
    for trial in range(trials):
        generator = torch.Generator().manual_seed(trial)
        values = -torch.rand(80, generator=generator, dtype=torch.float64).log()
        search = Search(given(values), 1e-4, 0.95, 4, generator)
        low, high = search.interval(search.least(), generator)
        hits += low <= 2 / math.e / 1e-4 <= high
    assert hits / trials > 0.9


def test_samples_that_are_all_the_same_need_one() -> None:
    search = Search(given(torch.ones(6)), 1e-9, 0.95, 4, torch.Generator().manual_seed(0))
    assert search.least() == 1 and search.interval(1, torch.Generator().manual_seed(0)) == (1, 1)


def test_the_error_of_a_mean_counts_terms() -> None:
    """The delta method against drawing again and again."""
    generator = torch.Generator().manual_seed(0)
    terms = torch.randint(1, 6, (500,), generator=generator).double()
    sums = torch.randn(500, generator=generator).double() + 2 * terms
    drawn = torch.randint(500, (4000, 100), generator=generator)
    truth = float((sums[drawn].sum(1) / terms[drawn].sum(1)).std())
    search = Search(SampleLosses(sums[None], terms), 0.1, 0.95, 4, generator)
    assert search.deviation() / 10 == pytest.approx(truth, rel=0.05)


# ---- of a model


def test_a_sample_is_a_sequence_with_the_tokens_that_count() -> None:
    objective, (x, y) = token_objective([4, 3, 1]), rows(8)
    found = sample_losses(objective)
    for i in range(8):
        logits = objective.model(x[i])
        truth = nn.functional.cross_entropy(logits, y[i], ignore_index=-100, reduction="sum")
        assert float(found.sums[0, i]) == pytest.approx(truth.item(), rel=1e-12)
        assert found.terms[i] == (y[i] != -100).sum()
    assert torch.isclose(found.sums.sum() / found.terms.sum(), torch.tensor(objective.value(), dtype=torch.float64))


def test_batches_do_not_matter() -> None:
    one, other = (ev.sample_size(token_objective(sizes), 0.01) for sizes in ([30], [7, 20, 1, 2]))
    assert (one.size, one.low, one.high) == (other.size, other.low, other.high)
    assert torch.allclose(one.changes, other.changes, rtol=1e-12)


def test_points_around_are_those_of_a_model_that_was_moved() -> None:
    objective, (x, y) = token_objective([6]), rows(6)
    shift = torch.randn(objective.space.size, dtype=torch.float64)
    found = sample_losses(objective, [torch.zeros_like(shift), shift])
    moved = nn.Linear(2, 3).double()
    named = objective.space.unflatten(shift)
    with torch.no_grad():
        moved.weight.copy_(objective.model.weight + named["weight"])  # pyright: ignore
        moved.bias.copy_(objective.model.bias + named["bias"])  # pyright: ignore
    there = sample_losses(ev.Objective(moved, [(x, y)], ev.Loss(*ev.zoo.cross_entropy)))
    assert torch.allclose(found.sums[1], there.sums[0], rtol=1e-12)
    assert torch.allclose(found.sums[0], sample_losses(objective).sums[0], rtol=1e-15)


def test_a_tied_weight_moves_in_both_places() -> None:
    model = ev.zoo.GPT(5, 4, 4, tied=True, seed=0).double()
    batch = (torch.arange(8).view(2, 4) % 5, torch.ones(2, 4, dtype=torch.long))
    objective = ev.Objective(model, [batch], ev.Loss(*ev.zoo.cross_entropy))
    shift = torch.full((objective.space.size,), 0.1, dtype=torch.float64)
    found = sample_losses(objective, [shift])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    assert torch.allclose(found.sums, sample_losses(ev.Objective(model, [batch], objective.loss)).sums)


class Recurrent(nn.Module):
    """Its LSTM keeps a list of its weights beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x)[0][:, -1])


def test_recurrent_weights_move_too() -> None:
    model, batch = Recurrent().double(), (torch.randn(5, 6, 3, dtype=torch.float64), torch.arange(5) % 2)
    objective = ev.Objective(model, [batch], nn.CrossEntropyLoss())
    there = sample_losses(objective, [torch.ones(objective.space.size, dtype=torch.float64)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    assert torch.allclose(there.sums, sample_losses(ev.Objective(model, [batch], nn.CrossEntropyLoss())).sums)


def test_nothing_is_changed_and_it_comes_out_again_the_same(tmp_path: Path) -> None:
    objective = token_objective([10, 10])
    before = [p.clone() for p in objective.model.parameters()]
    versions = [p._version for p in objective.model.parameters()]
    state = torch.get_rng_state()
    found = [ev.sample_size(objective, 0.01, radius=0.3, points=2) for _ in range(2)]
    assert found[0].size == found[1].size and torch.equal(found[0].changes, found[1].changes)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before, objective.model.parameters()))
    assert versions == [p._version for p in objective.model.parameters()] and objective.model.training
    again = type(found[0]).load(found[0].save(tmp_path / "size"))
    assert str(again) == str(found[0]) and torch.equal(again.errors, found[0].errors)
    assert again.data == objective.batches.digest()


def test_what_is_said_of_an_answer_beyond_the_data() -> None:
    found = ev.sample_size(token_objective([20]), 1e-5)
    assert found.extrapolated and found.size > 20 and "beyond the 19 samples there are, by the law 1/k" in str(found)
    assert found.standard_error(found.size) > 10 * found.tolerance


@pytest.mark.parametrize("share", [0.9, 0.5, 0.01])
def test_beyond_the_data_the_last_change_goes_on_as_one_over_k_plus_one(share: float) -> None:
    """d_k = d_{K−1} K/(k + 1), and k* is the first for which it is below the tolerance."""
    objective = token_objective([20])
    K = ev.sample_size(objective, 1e-5).samples
    last = float(ev.sample_size(objective, 1e-5).changes[-1])
    k = ev.sample_size(objective, share * last).size
    assert last * K / (k + 1) < share * last * (1 + 1e-12) and last * K / k >= share * last * (1 - 1e-12)


def test_sequences_without_a_term_are_left_out() -> None:
    x, y = rows(12)
    y[3] = -100
    objective = ev.Objective(nn.Linear(2, 3).double(), [(x, y)], ev.Loss(*ev.zoo.cross_entropy))
    found = ev.sample_size(objective, 0.01)
    assert (found.samples, found.left_out) == (11, 1) and "1 without a term are left out" in str(found)
    assert found.loss == pytest.approx(objective.value(), rel=1e-12)


# ---- what cannot be answered


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance: expected a positive number in units of the loss, got 0.0"),
        ({"tolerance": math.nan}, "tolerance: expected a positive number"),
        ({"tolerance": None}, "tolerance: expected a number, got None"),
        ({"radius": "0.1"}, "radius: expected a number, got '0.1'"),
        ({"level": 95}, "level: expected a number between 0 and 1, such as 0.95, got 95"),
        ({"radius": -1.0}, "radius: expected 0, or the σ of points around w, got -1.0"),
        ({"orders": 0}, "orders: expected a number, at least 1, got 0"),
        ({"points": 1.5}, "points: expected a number, at least 1, got 1.5"),
    ],
)
def test_settings_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ev.DecisionError, match=message):
        ev.sample_size(token_objective([3]), **{"tolerance": 0.1, **options})


def test_one_sample_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(ev.DataError, match="expected two samples or more to compare, got 1"):
        ev.sample_size(token_objective([1]), 0.1)


def test_a_sum_does_not_settle() -> None:
    objective = ev.Objective(nn.Linear(2, 1), [(torch.ones(3, 2), torch.ones(3, 1))], nn.MSELoss(reduction="sum"))
    with pytest.raises(ev.LossError, match="make it with reduction='mean'"):
        ev.sample_size(objective, 0.1)


def test_a_loss_that_is_not_finite_names_its_batch() -> None:
    x = torch.ones(4, 2)
    x[2] = torch.nan
    objective = ev.Objective(nn.Linear(2, 1), [(x, torch.ones(4, 1))], nn.MSELoss())
    with pytest.raises(ev.NonFiniteError, match="the loss of batch 0 is nan: sample 2 first, 1 in all"):
        ev.sample_size(objective, 0.1)


def test_a_loss_that_couples_samples_is_refused() -> None:
    loss = ev.Loss(lambda model, batch: model(batch[0]), lambda out, batch: (out.sum() ** 2, len(out)))
    x = torch.randn(4, 2)
    with pytest.raises(ev.DataError, match="its loss couples samples, or the first axis"):
        ev.sample_size(ev.Objective(nn.Linear(2, 1), [(x, x)], loss), 0.1)
    singles = [(each, each) for each in x.split(1)]
    assert ev.sample_size(ev.Objective(nn.Linear(2, 1), singles, loss), 0.1).samples == 4


def test_outputs_that_no_sample_has_a_share_of_are_refused() -> None:
    loss = ev.Loss(lambda model, batch: model(batch[0])[:3], lambda out, batch: (out.sum(), 4))
    x = torch.randn(4, 2)
    with pytest.raises(ev.DataError, match="batch 0 has 4 samples, but outputs with a first axis of 3"):
        ev.sample_size(ev.Objective(nn.Linear(2, 1), [(x, x)], loss), 0.1)
