"""What is held fixed where a loss has chance or an inner step in it, and that it is the right thing to hold."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from evolute.engine.operators import GaussNewton, Hessian
from evolute.linop.convert import to_dense
from evolute.studies import tasks
from evolute.studies.subjects import Moment, Subject, at
from evolute.zoo import cross_entropy

D = torch.float64


def small(name: str, step: int = 4, seed: int = 0) -> Moment:
    return at(Subject(name, width=2, heads=1, layers=1, steps=4, batch=16, samples=6, seed=seed), step)


def test_an_attack_goes_uphill_and_no_further_than_its_reach() -> None:
    moment = small("vit_adversarial")
    x, y = moment.data.train.x[:6].double(), moment.data.train.y[:6]
    loss = lambda x: torch.nn.functional.cross_entropy(moment.model(x), y)  # noqa: E731
    for steps in (1, 3):
        moved = tasks.attacked(moment.model, (x, y), steps=steps)
        assert loss(moved) > loss(x) + 1e-3
        assert (moved - x).abs().max() == pytest.approx(tasks.REACH)
        assert moved.abs().max() <= 1
    assert torch.equal(moment.sample[0], moved) and torch.equal(moment.sample[1], y)


def test_nothing_is_lost_by_holding_the_attack_fixed() -> None:
    """The gradient of w ↦ L(w; x + δ(w)), δ found anew at every w, has the Hessian with δ fixed as its derivative."""
    moment = small("vit_adversarial")
    x, y = moment.data.train.x[:6].double(), moment.data.train.y[:6]
    d = torch.randn(len(moment.objective.gradient()), dtype=D, generator=torch.Generator().manual_seed(0))

    def slope(step: float) -> Tensor:
        model = copy.deepcopy(moment.model)
        with torch.no_grad():
            for p, move in zip(model.parameters(), moment.objective.space.views(step * d), strict=True):
                p.add_(move)
        loss = torch.nn.functional.cross_entropy(model(tasks.attacked(model, (x, y))), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    product = Hessian(moment.objective) @ d
    assert torch.allclose((slope(1e-6) - slope(-1e-6)) / 2e-6, product, rtol=1e-5, atol=1e-6 * float(product.norm()))


def test_pairs_are_told_from_one_another_by_a_symmetric_loss() -> None:
    z, other = torch.randn(2, 5, 3, dtype=D)
    identity = torch.nn.Identity()
    S = tasks.similarities(identity, (z, other))
    total, terms = tasks.PAIRS.criterion(S, None)
    swapped, _ = tasks.PAIRS.criterion(tasks.similarities(identity, (3 * other, z)), None)
    assert total.item() == pytest.approx(swapped.item()) and int(terms) == 10
    cosine = torch.nn.functional.cosine_similarity(z[:, None], other[None], dim=-1) / tasks.TEMPERATURE
    byhand = -(cosine.log_softmax(1).diagonal() + cosine.log_softmax(0).diagonal()).sum()
    assert total.item() == pytest.approx(byhand.item())


def test_views_are_fixed_by_the_seed_and_differ() -> None:
    one, again, other = small("vit_contrastive"), small("vit_contrastive"), small("vit_contrastive", seed=1)
    assert torch.equal(one.sample[0], again.sample[0]) and not torch.equal(one.sample[0], other.sample[0])
    assert not torch.equal(one.sample[0], one.sample[1])


def test_what_is_left_of_a_contrastive_hessian_without_residuals_is_positive() -> None:
    """The line is drawn at the similarities, in which cross-entropy is convex, as it is not in the embedding."""
    moment = small("vit_contrastive")
    values = torch.linalg.eigvalsh(to_dense(GaussNewton(moment.objective)))
    assert values[0] > -1e-10 * values[-1] and values[-1] > 0
    H = torch.linalg.eigvalsh(to_dense(Hessian(moment.objective)))
    assert H[0] < -1e-6 * H[-1]


def test_training_by_views_and_by_attacks_makes_each_loss_smaller() -> None:
    for name in ("vit_contrastive", "vit_adversarial"):
        subject = Subject(name, width=8, heads=2, layers=1, steps=100, batch=32, samples=32, lr=1e-2)
        assert at(subject, 100).objective.value() < at(subject, 0).objective.value() - 0.1, name


@pytest.mark.parametrize("name", ["ssm_english", "rwkv_english"])
def test_recurrent_models_have_as_many_parameters_as_the_gpt(name: str) -> None:
    shape = {"width": 16, "heads": 2, "layers": 2, "samples": 2}
    counts = [len(at(Subject(each, **shape), 0).objective.gradient()) for each in (name, "gpt_english")]
    assert abs(counts[0] - counts[1]) <= 2 * 16 * 2 / 2


def test_labels_are_as_they_were() -> None:
    moment = small("vit_digits")
    x, y = moment.data.train.x[:6].double(), moment.data.train.y[:6]
    assert torch.equal(moment.sample[0], x) and torch.equal(moment.sample[1], y)
    assert tasks.LABELS.loss is cross_entropy
