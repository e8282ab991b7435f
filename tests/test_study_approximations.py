"""The study of approximations: steps and falls that are known, and a verdict that can go either way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evolute as ev
from evolute import studies
from evolute.apps.captured import by_rows, linear_groups
from evolute.apps.curvature_approximations import Diagonal, Full, kfac, kfac_reduce
from evolute.apps.output_factor import cross_entropy_columns
from evolute.errors import StudyError
from evolute.studies import Row
from evolute.studies.approximations import Approximations
from evolute.studies.approximations.table import made
from evolute.studies.approximations.verdict import judged
from evolute.studies.newton_steps import Slope, cosine, damped, errors
from evolute.studies.subjects import Subject, at


def tiny(**changed: Any) -> Approximations:
    sizes: dict[str, Any] = {"width": 4, "steps": 8, "samples": 6, "minibatch": 2, "draws": 4, "repeats": 2}
    few: dict[str, Any] = {"models": ("vit_digits", "mlp_digits"), "dampings": (0.01, 1.0)}
    return Approximations(**{**sizes, **few, **changed})


# ---- steps


def test_damping_goes_by_the_size_of_the_matrix() -> None:
    M, g = torch.diag(torch.tensor([1.0, -4.0])), torch.tensor([1.0, 2.0])
    one, hundred = damped(Full(M), g, 0.1), damped(Full(100 * M), g, 0.1)
    torch.testing.assert_close(one, g / (torch.tensor([1.0, 4.0]) + 0.25))  # (|A| + δ)⁻¹ g, δ = 0.1 · 2.5
    torch.testing.assert_close(hundred * 100, one)


def test_errors_with_and_without_the_size() -> None:
    A, B = torch.diag(torch.tensor([1.0, 1.0])), torch.diag(torch.tensor([2.0, 0.0]))
    error, shape = errors(A, B)
    assert error == pytest.approx(2**0.5 / 2) == shape  # the best factor is 1
    assert errors(5 * A, B)[1] == pytest.approx(shape) and errors(5 * A, B)[0] > 2
    assert errors(-A, A) == (2.0, 1.0)  # no c ≥ 0 helps
    assert cosine(torch.zeros(2), torch.ones(2)) == 0.0


def regression() -> tuple[Slope, torch.Tensor]:
    """A quadratic, and its Hessian row by row."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    data = [(torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in (5, 7)]
    objective = ev.Objective(model, data, nn.MSELoss())
    order = by_rows(model)
    H = ev.to_dense(ev.Hessian(objective))[order][:, order]
    return Slope(objective, objective.space.resolve(["weight", "bias"]), order), H


def test_the_newton_step_of_a_quadratic_reaches_its_minimum() -> None:
    """A wrong order of entries, a wrong sign, a loss of one batch alone: none would arrive."""
    slope, H = regression()
    step = torch.linalg.solve(H, slope.gradient)
    x, y = (torch.cat([batch[i] for _, batch in slope.objective.batches]) for i in range(2))
    one = torch.cat([x, torch.ones(12, 1)], 1).double()
    least = (one @ torch.linalg.lstsq(one, y).solution - y).square().mean()
    assert slope.after(step) == pytest.approx(float(least), rel=1e-10)
    fall, best = slope.decrease([slope.gradient, step], H)
    assert best == 1 and fall == pytest.approx(slope.value - float(least), rel=1e-10)
    assert slope.decrease([-step], H) == (0.0, 0)


def test_a_fall_does_not_move_the_model() -> None:
    slope, H = regression()
    before = slope.objective.value()
    slope.decrease([slope.gradient], H)
    assert slope.objective.value() == before


# ---- what is measured


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    study, config = studies.find("approximations"), tiny(stages=("trained",))
    return [row for cell in study.cells(config)[:2] for row in study.measure(cell)]


def of(rows: list[Row], **wanted: str) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def test_the_true_block_is_no_approximation(rows: list[Row]) -> None:
    for row in of(rows, approximation="true"):
        assert row["error"] == 0.0 and row["shape"] < 1e-12 and row["cosine"] == pytest.approx(1)


def test_what_comes_from_gradients_has_its_own_name() -> None:
    """One mini-batch of all samples: its gradient is that of the loss, and E[g²] the square of that."""
    config = tiny(models=("gpt_addition",), stages=("trained",), minibatch=6, draws=1)
    (cell, *_), group = studies.find("approximations").cells(config), "layers.0.attn.v"
    found = of(studies.find("approximations").measure(cell), group=group, reference="H_o")
    objective = at(Subject(**cell["subject"]), config.steps).objective
    linears = linear_groups(objective.model)
    order = by_rows(linears[group])
    block = ev.to_dense(ev.GaussNewton(objective).restrict([group]))[order][:, order]
    g = objective.space.resolve([group]).take(objective.gradient())[order]
    expected = {
        "moment": torch.diag(g.square()),
        "adam": torch.diag(g.abs()),
        "kfac": kfac(objective, linears, cross_entropy_columns)[group].dense(),
        "kfac_reduce": kfac_reduce(objective, linears, cross_entropy_columns)[group].dense(),
    }
    told = {row["approximation"]: row["error"] for row in found}
    for name, matrix in expected.items():
        assert told[name] == pytest.approx(float((matrix - block).norm() / block.norm()), rel=1e-9)
    assert told["kfac"] != pytest.approx(told["kfac_reduce"], rel=1e-3)


def test_pieces_of_the_block_come_in_order(rows: list[Row]) -> None:
    """More of the block is nearer to it; and of Kronecker products the nearest is."""
    for reference in ("H", "H_o"):
        groups = {row["group"] for row in rows if row["reference"] == reference}
        for group in groups:
            here = {row["approximation"]: row["error"] for row in of(rows, reference=reference, group=group)}
            assert here["rows"] <= here["diagonal"] + 1e-12
            assert here.get("groups", 0) <= here["rows"] + 1e-12
            if group != "whole":
                assert here["kronecker"] <= min(here["kfac"], here["kfac_reduce"], here["shampoo"]) + 1e-9


def test_the_last_layer_has_no_functional_part(rows: list[Row]) -> None:
    """The logits are linear in it: H = H_o there, and nowhere below in a Transformer."""
    for model, last in (("vit_digits", "head"), ("mlp_digits", "layers.1")):
        both = [of(rows, model=model, group=last, reference=r, approximation="kfac")[0] for r in ("H", "H_o")]
        assert both[0]["error"] == pytest.approx(both[1]["error"], rel=1e-9)
    below = [of(rows, group="layers.0.attn.v", reference=r, approximation="kfac")[0]["error"] for r in ("H", "H_o")]
    assert abs(below[0] - below[1]) > 1e-6


def test_in_an_mlp_a_sample_is_a_token(rows: list[Row]) -> None:
    for group in ("layers.0", "layers.1"):
        expand, reduce = (of(rows, group=group, approximation=n) for n in ("kfac", "kfac_reduce"))
        assert [row["error"] for row in expand] == pytest.approx([row["error"] for row in reduce])


# ---- what is made of it


def test_a_share_is_of_the_true_step_of_the_same_seed() -> None:
    start: Row = {
        "model": "m",
        "stage": "s",
        "group": "g",
        "reference": "H_o",
        "error": 0.0,
        "shape": 0.0,
        "cosine": 1.0,
    }
    falls = {(0, "true"): 2.0, (0, "kfac"): 1.0, (1, "true"): 4.0, (1, "kfac"): 3.0}
    rows = [{**start, "seed": seed, "approximation": name, "decrease": fall} for (seed, name), fall in falls.items()]
    (row,) = of(made(rows), part="mean", approximation="kfac", measure="share")
    assert row["value"] == pytest.approx((0.5 + 0.75) / 2)


def contest(of: str, measure: str, low: float, high: float, model: str = "vit_digits") -> Row:
    start = {"part": "contest", "model": model, "reference": "H_o", "group": "layers.0.attn.q", "of": of}
    return {**start, "measure": measure, "ci_low": low, "ci_high": high}


def contests(shape: tuple[float, float], other: tuple[float, float], model: str = "vit_digits") -> list[Row]:
    pairs = {"shape": shape, "cosine": other, "share": other}
    return [contest(of, measure, *ends, model) for of in ("kfac", "shampoo") for measure, ends in pairs.items()]


@pytest.mark.parametrize(
    ("table", "answer"),
    [
        (contests((-0.3, -0.1), (0.1, 0.2)), "holds"),  # a smaller distance is better, a larger cosine is
        (contests((0.1, 0.3), (0.1, 0.2)), "holds in part"),
        (contests((0.1, 0.3), (-0.2, -0.1)), "does not hold here"),
        (contests((-0.1, 0.1), (-0.1, 0.1)), "undecided"),
        (contests((-0.3, -0.1), (-0.1, 0.1)), "undecided"),  # two of six comparisons tell anything
        (contests((-0.3, -0.1), (0.1, 0.2), "mlp_digits"), "undecided"),
        ([], "undecided"),
    ],
)
def test_the_verdict_follows_from_the_table(table: list[Row], answer: str) -> None:
    assert judged(table).answer == answer


# ---- all of it


def test_a_tiny_run_and_its_figure_from_the_saved_result(tmp_path: Path) -> None:
    config = tiny(models=("mlp_digits",))
    result = studies.run("approximations", config, workers=0, out=tmp_path)
    assert not result.failed and result.verdict.answer == "undecided"
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    assert len(studies.find("approximations").figure(again.rows, again.settings).axes) == 3
    assert studies.run("approximations", config, workers=0, out=tmp_path).rows == again.rows


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("models=vit_digit", "no model 'vit_digit' to study; did you mean 'vit_digits'"),
        ("models=", "expected models by name"),
        ("stages=late", "stages of initialisation, early, trained; got .* and late"),
        ("minibatch=100", "expected mini-batches of 1 to 32 samples, got 64 mini-batches of 100"),
        ("dampings=0", "dampings: expected positive numbers"),
        ("repeats=1", "repeats: an interval takes two or more, got 1"),
    ],
)
def test_bad_settings_are_named(setting: str, message: str) -> None:
    with pytest.raises(StudyError, match=message):
        studies.configured(Approximations, [setting])


def test_a_step_without_curvature_is_the_gradient() -> None:
    g = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(damped(Diagonal(torch.zeros(2)), g, 0.1), g)
