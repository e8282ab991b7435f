"""Growth with the weights: the degrees that theory knows, from a run and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import evolute as ev
from evolute import studies, zoo
from evolute.errors import StudyError
from evolute.studies.growth.models import gpt
from evolute.studies.growth_weights import STUDY, GrowthWeights, theory


def small(**changed: Any) -> GrowthWeights:
    sizes = {"scales": (0.01, 0.1), "width": 8, "sequences": 2, "repeats": 2}
    return GrowthWeights(**{**sizes, **changed})


@pytest.fixture(scope="module")
def result() -> studies.Result:
    return studies.run("growth_weights", small(), workers=0)


def test_blocks_are_of_the_degree_that_theory_says(result: studies.Result) -> None:
    """Written out once more by hand: (Q, K, V, O) of each block."""
    outer = {"Q": "0222", "Q,K": "1122", "Q,V": "0112", "Q,O": "0121", "K": "2022", "V": "0002", "O": "0020"}
    functional = {"Q": "0211", "Q,K": "0011", "Q,V": "0101", "Q,O": "0110", "K": "2011", "V,O": "0000"}
    told = {(row["part"], row["block"], row["scaled"]): row["exponent"] for row in result.rows}
    for part, degrees in (("H_o", outer), ("H_f", functional)):
        for block, expected in degrees.items():
            for weight, degree in zip("QKVO", expected, strict=True):
                assert told[part, block, weight] == pytest.approx(int(degree), abs=0.1), (part, block, weight)
    assert ("H_f", "V", "O") not in told  # it is zero
    assert result.verdict.answer == "holds" and not result.failed


def test_a_cell_scales_the_weight_that_it_names_and_no_other() -> None:
    cell = {"scaled": "K", "scale": 3.0, "seed": 1, "sigma": 0.8, "width": 4, "sequences": 2, "depth": 1}
    found = {(row["block"], row["part"]): row["norm"] for row in STUDY.measure(cell)}
    model, samples = gpt(cell, "none")
    with torch.no_grad():
        model.layers[0].attn.k.weight *= 3
    H = ev.Hessian(ev.Objective(model, [(samples.x, samples.y)], ev.Loss(*zoo.cross_entropy)))
    expected = ev.to_dense(H.block("layers.0.attn.q", "layers.0.attn.v")).norm().item()
    assert found["Q,V", "H"] == pytest.approx(expected, rel=1e-10)


def test_theory_speaks_of_small_weights_alone() -> None:
    assert theory("Q", "H_o", "K", "large") is None and theory("V", "H_f", "O", "small") is None
    assert theory("Q", "H", "K", "small") == 2 and theory("K,V", "H", "O", "small") == 1


@pytest.mark.parametrize(("exponent", "answer"), [(2.0, "holds"), (1.0, "does not hold here")])
def test_the_verdict_comes_from_the_rows(exponent: float, answer: str) -> None:
    row = {"scaled": "K", "block": "Q", "part": "H_o", "range": "small", "exponent": exponent, "theory": 2.0}
    assert STUDY.verdict(small(), [{**row, "ci_low": exponent, "ci_high": exponent}]).answer == answer


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": ("Q", "W1")}, "weights: expected some of Q, K, V, O, got W1"),
        ({"scales": (0.01,)}, "two of them in one of the ranges"),
        ({"repeats": 1}, "repeats: expected at least 2"),
        ({"sigma": 0.0}, "sigma: expected a positive number, got 0.0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError) as error:
        small(**changed)
    assert message in str(error.value)


def test_the_figure_comes_from_the_saved_result(result: studies.Result, tmp_path: Path) -> None:
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    with studies.look():
        picture = STUDY.figure(again.rows, again.settings)
        picture.savefig(tmp_path / "figure.png")
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert len(texts) == 40 and texts[:4] == ["0.0", "2.0", "2.0", "2.0"]  # H_o of Q with Q
    assert [text.get_text() for text in picture.axes[1].texts].count("·") == 8  # H_f of V with V, O with O


def test_an_exponent_that_theory_does_not_say_is_boxed(result: studies.Result) -> None:
    assert not any(axes.patches for axes in STUDY.figure(result.rows, {}).axes)
    first, *rest = result.rows
    assert first["part"] == "H" and rest[0]["part"] == "H_o" and rest[0]["theory"] == 0
    wrong = {**rest[0], "exponent": 1.0, "ci_low": 0.9, "ci_high": 1.1}
    assert len(STUDY.figure([first, wrong, *rest[1:]], {}).axes[0].patches) == 1
