"""landscape: the steps of a mean, the Taylor model of each sample, and the curvature of each, against plain oracles."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

import evolute as ev
from evolute import studies
from evolute.apps.order_changes import random_orders
from evolute.errors import StudyError
from evolute.studies import Row
from evolute.studies.landscape import STUDY, Landscape
from evolute.studies.landscape.measure import ascending, curve, largest_curvature, steps
from evolute.studies.sample_taylor import along
from evolute.studies.subjects import Subject, at

TINY = Landscape(
    models=("vit_digits",),
    trainings=("adamw/constant",),
    radii=(0.0, 0.01),
    width=4,
    heads=1,
    steps=4,
    samples=32,
    points=1,
    orders=4,
    spheres=1,
    repeats=2,
)


def test_each_sample_has_its_own_taylor_model() -> None:
    """Reverse mode twice, of one sample after the other; PyTorch's LayerNorm, differentiated by u, fails here."""
    moment = at(Subject("vit_digits", width=4, heads=1, layers=1, steps=5, samples=3), 5)
    objective, (x, y) = moment.objective, moment.sample
    direction = torch.randn(objective.space.size, dtype=torch.float64)
    found, named = along(objective, direction), {n: p.detach() for n, p in objective.parameters.items()}
    delta = objective.space.unflatten(direction)

    for i in range(3):

        def loss(s: torch.Tensor, i: int = i) -> torch.Tensor:
            moved = {name: named[name] + s * delta[name] for name in named}
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                out = functional_call(moment.model, moved, (x[i : i + 1],))
            return torch.nn.functional.cross_entropy(out, y[i : i + 1])

        zero = torch.zeros((), dtype=torch.float64)
        assert float(found.value[i]) == pytest.approx(float(loss(zero)), rel=1e-12)
        assert float(found.first[i]) == pytest.approx(float(torch.func.grad(loss)(zero)), rel=1e-9)
        assert float(found.second[i]) == pytest.approx(float(torch.func.grad(torch.func.grad(loss))(zero)), rel=1e-8)
    H = ev.Hessian(objective)
    assert float(found.second.mean()) == pytest.approx(float(direction @ (H @ direction)), rel=1e-10)
    assert float(found.at(0.1)[0]) == pytest.approx(
        float(found.value[0] + 0.1 * found.first[0] + 0.005 * found.second[0]), rel=1e-12
    )


def test_tokens_of_a_sequence_are_one_sample() -> None:
    moment = at(Subject("gpt_english", width=4, heads=1, layers=1, steps=1, samples=3), 0)
    found = along(moment.objective, torch.zeros(moment.objective.space.size, dtype=torch.float64))
    assert found.value.shape == (3,) and float(found.value.sum()) / 96 == pytest.approx(moment.objective.value())


def test_the_largest_curvature_of_a_sample_is_that_of_the_dense_hessian() -> None:
    moment = at(Subject("mlp_digits", width=1, layers=1, steps=10, samples=4), 10)
    x, y = moment.sample
    dense = [
        torch.linalg.eigvalsh(ev.to_dense(ev.Hessian(ev.Objective(moment.model, [(a, b)], moment.objective.loss))))
        for a, b in zip(x.split(1), y.split(1), strict=True)
    ]
    truth = max(float(values.abs().max()) for values in dense)
    found = largest_curvature(moment, torch.zeros(4), 8, torch.Generator().manual_seed(0))
    assert found == pytest.approx(truth, rel=0.06)


def test_random_orders_go_as_one_over_k_and_ordered_samples_do_not() -> None:
    """Even from 0 to 1 in order: L_{k+1} − L_k = 1/(2(K − 1)) whatever k."""
    sums, terms = torch.linspace(0, 1, 400).double(), torch.ones(400).double()
    order = random_orders(400, 8, torch.Generator().manual_seed(0))
    row = curve(sums[None], sums[None], terms, order)
    assert row["slope"] == pytest.approx(-1, abs=0.02)
    assert row["level"] == row["predicted"] == pytest.approx(0.25, rel=0.02)  # E|u − 1/2|
    assert row["deviation"] / row["level"] == pytest.approx(2 / math.sqrt(3), rel=0.01)
    assert float(steps(sums[None], terms, torch.arange(400))[0].std()) < 1e-9
    assert ascending(sums, terms) == pytest.approx(0, abs=1e-4)


def row(slope: float = -1.0, width: float = 0.01, ratio: float = 1.0, radius: float = 0.1) -> Row:
    known: Row = {"model": "vit_digits", "training": "adamw/constant", "radius": radius}
    for name, value in {"slope": slope, "ratio": ratio, "loose": 9.0, "spread": 1.2, "ascending": 0.0}.items():
        known |= {name: value, f"{name}_low": value - width, f"{name}_high": value + width}
    return known


@pytest.mark.parametrize(
    ("table", "answer"),
    [
        ([row(), row(radius=0.0)], "holds"),
        ([row(), row(ratio=2.0)], "holds in part"),
        ([row(slope=-0.5), row(slope=-0.6), row()], "does not hold here"),
        ([row(slope=-0.5), row()], "holds in part"),
        ([row(width=0.3)], "undecided"),
        ([], "undecided"),
    ],
)
def test_the_verdict_asks_for_slopes_and_levels(table: list[Row], answer: str) -> None:
    verdict = STUDY.verdict(Landscape(), table)
    assert verdict.answer == answer, verdict.sentence


def test_a_run_gives_a_table_and_a_figure(tmp_path: Path) -> None:
    result = studies.run("landscape", TINY, workers=0)
    assert not result.failed and [row["radius"] for row in result.rows] == [0.0, 0.01]
    assert result.rows[1]["ratio"] == pytest.approx(1, abs=0.05) and result.rows[0]["loose"] > 1
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    assert len(studies.find("landscape").figure(again.rows, again.settings).axes) == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"trainings": ("adamw",)},
            "trainings: expected optimiser/schedule of sgd, momentum, adam, adamw and constant",
        ),
        ({"radii": (-0.1,)}, r"radii: expected 0 or more, got \[-0.1\]"),
        ({"repeats": 1}, "repeats: expected 2 or more, got 1"),
        ({"samples": 8}, "samples: expected 32 or more, got 8"),
        ({"models": ("vit",)}, "no model 'vit' to study"),
    ],
)
def test_what_cannot_be_measured_says_why(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        studies.run("landscape", replace(TINY, **changed), workers=0)
