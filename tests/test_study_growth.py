"""Growth with the input: exponents that theory knows, norms that the engine knows, verdicts on tables made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evolute as ev
from evolute import studies, zoo
from evolute.errors import StudyError
from evolute.studies import Row
from evolute.studies.executors import processes
from evolute.studies.growth import Growth, judged
from evolute.studies.growth.fits import fitted
from evolute.studies.growth.models import block_norms_by_layer, gpt, normal
from evolute.studies.growth.rates import theory


def small(**changed: Any) -> Growth:
    sizes = {"depths": (1,), "sigmas": (0.01, 0.03, 0.1), "width": 16, "sequences": 4, "repeats": 2}
    return Growth(**{**sizes, **changed})


@pytest.fixture(scope="module")
def result() -> studies.Result:
    plain = small(models=("softmax", "linear", "mlp"), depths=(1, 2), sigmas=(0.01, 0.1), width=12, sequences=2)
    return studies.run("growth", plain, workers=0)


@pytest.fixture(scope="module")
def wide() -> studies.Result:
    """Small and large inputs."""
    wide = small(models=("pre_norm", "linear", "mlp"), sigmas=(0.01, 0.1, 1.0, 10.0), sequences=2)
    return studies.run("growth", wide, workers=0)


def exponents(result: studies.Result, range_: str = "small") -> dict[tuple[Any, ...], float]:
    keys = ("model", "depth", "layer", "part", "block")
    return {tuple(row[key] for key in keys): row["exponent"] for row in result.rows if row["range"] == range_}


def test_growth_finds_the_exponents_of_the_theory(result: studies.Result) -> None:
    """A wrong moment, a lost softmax or a mean in place of a sum would change an integer here."""
    assert result.verdict.answer == "holds" and not result.failed
    told = exponents(result)
    softmax = {"Q": (6, 5), "K": (6, 5), "Q,K": (6, 3), "Q,V": (4, 3), "K,V": (4, 3), "Q,O": (4, 3), "V,O": (2, 1)}
    for where in ((1, 0), (2, 0), (2, 1)):
        for block, (outer, functional) in softmax.items():
            assert told["softmax", *where, "H_o", block] == pytest.approx(outer, abs=0.1)
            assert told["softmax", *where, "H_f", block] == pytest.approx(functional, abs=0.1)
        assert told["softmax", *where, "H", "Q,K"] == pytest.approx(3, abs=0.1)
        assert told["softmax", *where, "H", "V"] == pytest.approx(2, abs=0.1)
    assert told["softmax", 2, 0, "H_f", "V"] == pytest.approx(3, abs=0.1)  # by the attention above
    assert ("softmax", 1, 0, "H_f", "V") not in told and ("softmax", 2, 1, "H_f", "O") not in told  # they are zero
    for depth in (1, 2):
        assert told["linear", depth, 0, "H_o", "Q"] == pytest.approx(2 * 3**depth, abs=1e-6)
        assert told["linear", depth, 0, "H_f", "Q,K"] == pytest.approx(3**depth, abs=1e-2)
        assert told["mlp", depth, 0, "H_o", "W"] == pytest.approx(2, abs=1e-9)


def test_exponents_of_large_inputs_are_those_of_homogeneous_models_and_of_norms(wide: studies.Result) -> None:
    assert abs(exponents(wide)["pre_norm", 1, 0, "H", "Q,K"]) < 0.3
    told = exponents(wide, "large")
    assert told["linear", 1, 0, "H_o", "V"] == pytest.approx(6, abs=1e-6)
    assert told["mlp", 1, 0, "H", "W"] == pytest.approx(2, abs=1e-9)
    assert told["pre_norm", 1, 0, "H_o", "V"] == pytest.approx(-2, abs=0.3)
    assert told["pre_norm", 1, 0, "H_f", "V"] == pytest.approx(-2, abs=0.3)  # H_o is split behind the last norm
    assert told["pre_norm", 1, 0, "H_f", "V,O"] == pytest.approx(-1, abs=0.3)


def test_rows_have_the_keys_that_were_promised(result: studies.Result) -> None:
    keys = ["model", "depth", "layer", "block", "part", "range", "exponent", "ci_low", "ci_high", "theory"]
    assert all([*row] == keys for row in result.rows)
    json.dumps(list(result.rows), allow_nan=False)


def dense(objective: ev.Objective, rows: str, cols: str) -> dict[str, float]:
    parts = {"H": ev.Hessian, "H_o": ev.GaussNewton, "H_f": ev.FunctionalHessian}
    return {part: float(ev.to_dense(kind(objective).block(rows, cols)).norm()) for part, kind in parts.items()}


CELL = {"width": 6, "sequences": 2, "probes": 200, "seed": 3, "sigma": 0.7}


def test_exact_norms_are_those_of_the_engine() -> None:
    cell = {**CELL, "model": "softmax", "depth": 1}
    model, samples = gpt(cell, "none")
    objective = ev.Objective(model, [(samples.x, samples.y)], ev.Loss(*zoo.cross_entropy))
    (found,) = block_norms_by_layer(cell)
    for part, norm in dense(objective, "layers.0.attn.q", "layers.0.attn.v").items():
        assert found["Q,V", part].value == pytest.approx(norm, rel=1e-10) and found["Q,V", part].error == 0


def test_probed_norms_are_those_of_the_engine() -> None:
    """36 entries in a group, 200 probes: some percent."""
    cell = {**CELL, "model": "pre_norm", "depth": 1}
    model, samples = gpt(cell, "pre")
    objective = ev.Objective(model, [(samples.x, samples.y)], ev.Loss(*zoo.cross_entropy))
    (found,) = block_norms_by_layer(cell)
    for part, norm in dense(objective, "layers.0.attn.k", "layers.0.attn.o").items():
        assert abs(found["K,O", part].value - norm) < 4 * found["K,O", part].error < 0.3 * norm


def test_norms_of_the_linear_mlp_are_those_of_the_engine() -> None:
    cell = {**CELL, "model": "mlp", "depth": 3}
    model = zoo.MLP([6] * 4, "identity", bias=False, seed=3).double()
    x, y = normal(cell, 34, 6) * 0.7, normal(cell, 34, 6, more=1)
    objective = ev.Objective(model, [(x, y)], nn.MSELoss())
    for layer, norms in enumerate(block_norms_by_layer(cell)):
        for part, norm in dense(objective, f"layers.{layer}", f"layers.{layer}").items():
            assert norms["W", part].value == pytest.approx(norm, rel=1e-10, abs=1e-14)


def test_embeddings_have_the_size_that_was_asked_for() -> None:
    model, _ = gpt({**CELL, "width": 200, "model": "softmax", "depth": 1}, "none")
    tokens = model.embed(torch.arange(12)) + model.position(torch.arange(12))
    assert tokens.detach().std().item() == pytest.approx(0.7, rel=0.05)


def test_a_fit_leaves_out_repeats_that_are_not_whole() -> None:
    whole = {0: {0.01: 1.0, 0.1: 100.0}, 1: {0.01: 3.0, 0.1: 300.0}}
    fit = fitted("small", {**whole, 2: {0.1: 1.0}, 3: {0.01: 0.0, 0.1: 0.0}})
    assert fit is not None and fit.value == pytest.approx(2) and fit.high == pytest.approx(2)
    assert fitted("small", {**whole, 2: {0.01: 1.0, 0.1: float("inf")}}) == fitted("small", whole)
    assert fitted("mid", whole) is None and fitted("small", {0: whole[0]}) is None


def row(exponent: float, reach: float, model: str = "softmax", **changed: Any) -> Row:
    base = {"model": model, "depth": 1, "layer": 0, "block": "Q", "part": "H_o", "range": "small", "exponent": exponent}
    return {**base, "ci_low": exponent - reach, "ci_high": exponent + reach, "theory": 6.0, **changed}


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        ([row(6.1, 0.1), row(5.8, 0.1)], "holds"),
        ([row(6.1, 0.1), row(6.0, 0.1), row(4.0, 0.1)], "holds in part"),
        ([row(6.1, 0.1), row(4.0, 0.1)], "does not hold here"),
        ([row(6.1, 0.1), row(6.1, 2.0), row(6.1, 2.0)], "undecided"),  # one of three can be told
        ([row(6.1, 2.0)], "undecided"),  # an interval that holds everything says nothing
        ([row(6.1, 0.1, theory=None)], "undecided"),
    ],
)
def test_the_verdict_comes_from_the_rows(rows: list[Row], answer: str) -> None:
    assert judged(rows).answer == answer


def test_the_verdict_says_how_far_and_how_different() -> None:
    said = judged([row(6.0, 0.0), row(2.0, 0.0, block="V", theory=2.0), row(6.25, 0.1, "linear")]).sentence
    assert "3 of 3 exponents agree" in said
    assert "softmax 0.00, linear 0.25" in said and "softmax 4.00, linear 0.00" in said


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"models": ("softmacks",)}, "models: expected some of softmax, linear, pre_norm, mlp, got softmacks"),
        ({"models": ()}, "got none"),
        ({"repeats": 1}, "repeats: expected at least 2"),
        ({"depths": (0,)}, "depths: expected numbers of layers, at least 1"),
        ({"depths": (4,), "models": ("linear",)}, "depths: attention without softmax takes up to 3"),
        ({"sigmas": (0.01, 10.0)}, "two of them in one of the ranges"),
        ({"sigmas": (-1.0, 0.1, 0.2)}, "sizes of 0.001 or more"),
        ({"width": 0}, "width: expected at least 1, got 0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError) as error:
        small(**changed)
    assert message in str(error.value)


def test_theory_has_no_number_where_it_says_nothing() -> None:
    assert theory("softmax", 1, 0, "Q", "H_o", "large") is None
    assert theory("softmax", 1, 0, "V", "H_f", "small") is None
    assert theory("linear", 2, 0, "Q,K", "H", "large") is None and theory("linear", 2, 1, "V", "H", "large") == 18
    assert theory("pre_norm", 1, 0, "Q,K", "H", "large") == -1


def test_growth_is_the_same_in_other_processes(tmp_path: Path) -> None:
    config = small(models=("mlp",), sigmas=(0.01, 0.1))
    with processes(1) as pool:
        there = studies.run("growth", config, executor=pool, out=tmp_path)
    here = studies.run("growth", config, workers=0)
    assert [(r["block"], round(r["exponent"], 9)) for r in there.rows] == [
        (r["block"], round(r["exponent"], 9)) for r in here.rows
    ]


@pytest.mark.parametrize("models", [("softmax", "linear", "mlp"), ("pre_norm", "mlp"), ("mlp",)])
def test_the_figure_comes_from_the_saved_result(
    models: tuple[str, ...], result: studies.Result, tmp_path: Path
) -> None:
    again = studies.Result.load(result.save(tmp_path))
    rows = [row for row in again.rows if row["model"] in models]
    with studies.look():
        picture = studies.find("growth").figure(rows, again.settings)
        picture.savefig(tmp_path / "growth.svg")
    assert len(picture.axes) == 3 and (tmp_path / "growth.svg").stat().st_size > 10_000
    assert "exponent" in picture.axes[0].get_xlabel()
