"""Models at points of their training: the same for the same seed, whatever else is asked for."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from evolute.engine.operators import Hessian
from evolute.errors import StudyError
from evolute.linop.convert import to_dense
from evolute.studies import subjects
from evolute.studies.last_block import last_block
from evolute.studies.subjects import NAMES, Subject, at, installed, moments
from evolute.zoo import MLP, digits, train


def small(name: str = "mlp_digits", **changed: Any) -> Subject:
    sizes: dict[str, Any] = {"width": 4, "layers": 1, "steps": 12, "batch": 16, "samples": 8}
    return Subject(name, **{**sizes, **changed})


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_step_is_the_same_whatever_other_steps_are_asked_for() -> None:
    """A schedule that went by the last step asked for, or a state that is no copy, would differ here."""
    subject = small()
    first, middle, last = moments(subject, [0, 5, 12])
    assert torch.equal(weights(middle.model), weights(at(subject, 5).model))
    assert not torch.equal(weights(middle.model), weights(last.model))
    assert [each.step for each in moments(subject, [12, 0])] == [12, 0]
    assert torch.equal(weights(first.model), weights(MLP([64, 16, 10], seed=0).double()))


def test_the_last_step_is_where_plain_training_ends() -> None:
    subject, data = small(), digits(seed=0)
    model = MLP([64, 16, 10], seed=0)
    train(model, data, steps=12, batch=16, lr=3e-3, schedule="warmup_cosine", seed=0, progress=False)
    assert torch.equal(weights(at(subject, 12).model), weights(model.double()))


def test_the_loss_is_that_of_the_first_training_samples_in_float64() -> None:
    moment = at(small(), 12)
    x, y = moment.data.train.x[:8].double(), moment.data.train.y[:8]
    loss = torch.nn.functional.cross_entropy(moment.model(x), y).item()
    assert moment.objective.value() == pytest.approx(loss, rel=1e-14)
    assert moment.objective.space.dtype == torch.float64
    assert moment.score().loss < at(small(), 0).score().loss


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("fashion")])
def test_every_name_makes_a_model_that_a_seed_decides(name: str) -> None:
    subject = small(name, width=8, samples=2)
    here, again, other = (at(each, 0) for each in (subject, subject, replace(subject, seed=1)))
    assert here.objective.value() == again.objective.value() != other.objective.value()
    assert Subject(**json.loads(json.dumps(asdict(subject)))) == subject


@pytest.mark.skipif(not installed("vit_fashion"), reason="needs the Debian package dataset-fashion-mnist")
def test_fashion_mnist_has_as_many_tokens_as_the_digits() -> None:
    assert at(small("vit_fashion", width=8), 0).model.get_parameter("position.weight").shape == (16, 8)
    assert at(small("vit_digits", width=8), 0).model.get_parameter("position.weight").shape == (16, 8)


def test_options_are_those_of_the_blocks() -> None:
    post, pre = (at(small("vit_digits", width=8, options=options), 0).model for options in ({"norm": "post"}, {}))
    assert weights(post).numel() == weights(pre).numel() - 16  # the last norm belongs to pre-norm


def test_global_random_numbers_and_threads_stay_as_they_were() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    at(small(), 2)
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads


def test_ctrl_c_in_training_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "_train", lambda *_: None)  # what an interrupted training looks like: it returns
    with pytest.raises(KeyboardInterrupt):
        at(small(), 5)


@pytest.mark.parametrize(
    ("name", "options"), [("gpt_english", {}), ("gpt_addition", {}), ("gpt_addition", {"norm": "post"})]
)
def test_the_last_block_of_a_gpt_in_closed_form_is_the_engines(name: str, options: dict[str, str]) -> None:
    """A norm left out, or a mean over tokens that do not count, would show here."""
    moment = at(small(name, width=8, layers=2, samples=2, options=options), 3)
    closed, H = last_block(moment), Hessian(moment.objective)
    assert closed.value == pytest.approx(moment.objective.value(), rel=1e-12)
    here, there = to_dense(closed.block("v", "k")), to_dense(H.block("layers.1.attn.v", "layers.1.attn.k"))
    scale = to_dense(closed.block("v", "v")).norm()
    assert there.norm() > 0 and (here - there).norm() < 1e-12 * scale


def test_only_a_gpt_has_a_last_block_in_closed_form() -> None:
    with pytest.raises(StudyError, match="expected a GPT, whose loss is a sum over tokens; got a ViT"):
        last_block(at(small("vit_digits", width=8), 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Subject("mlp_digit"), "no model 'mlp_digit' to study; did you mean 'mlp_digits'"),
        (lambda: Subject("mlp_digits", options={"norm": "pre"}), "an MLP has no options of a Transformer block"),
        (lambda: at(small(), 13), r"expected steps from 0 to 12, the length of the training, got \[13\]"),
        (lambda: list(moments(small(), [])), "expected steps from 0 to 12"),
        (lambda: at(small(samples=5000), 0), "samples: expected 1 to 1,438 for 'mlp_digits', got 5000"),
    ],
)
def test_what_cannot_be_made_says_why(make: Any, message: str) -> None:
    with pytest.raises(StudyError, match=message):
        make()
