"""beyond: every measure against the dense Hessian, the slope against one that is moved, and a verdict that is fair."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evolute import studies
from evolute.engine.operators import GaussNewton, Hessian
from evolute.errors import StudyError
from evolute.linop.convert import to_dense
from evolute.studies import Row
from evolute.studies.beyond import STUDY, BeyondSettings
from evolute.studies.beyond import measure as beyond_measure
from evolute.studies.beyond import table as beyond_table
from evolute.studies.subjects import Subject, at, moments

NAME = "vit_contrastive"
SMALL: dict[str, Any] = {"width": 4, "heads": 1, "layers": 1, "steps": 4, "samples": 6}
TINY = BeyondSettings(models=("vit_digits", NAME), points=(0.0, 1.0), repeats=2, probes=2, products=10, **SMALL)
LIMITS = {"outliers": 0.5, "functional": 0.5, "concentrated": 0.8}


def test_measures_are_those_of_the_dense_hessian() -> None:
    """Few parameters, and as many products: what is sampled is exact but for the parts and ‖H_f‖, which have errors."""
    cell = {"subject": asdict(Subject(NAME, batch=16, **SMALL)), "step": 4, "probes": 100, "products": 10}
    row, moment = beyond_measure.measured(cell), at(Subject(NAME, batch=16, **SMALL), 4)
    H, G = to_dense(Hessian(moment.objective)), to_dense(GaussNewton(moment.objective))
    values = torch.linalg.eigvalsh(H)
    exact = {
        "sharpness": values[-1],
        "lowest": values[0],
        "trace": values.sum(),
        "frobenius": values.norm(),
        "rank": values.abs().sum() ** 2 / values.square().sum(),
        "negative": -values[values < 0].sum() / values.abs().sum(),
    }
    for name, value in exact.items():
        assert row[name] == pytest.approx(float(value), rel=1e-3), name
    assert row["top"] == pytest.approx(values.flip(0)[:10].tolist(), rel=1e-3)
    assert row["functional"] == pytest.approx(float((H - G).norm() / H.norm()), abs=4 * row["functional_error"] + 1e-6)
    names, shares = beyond_measure.members(moment.model), dict[str, float]()
    space = Hessian(moment.objective).space
    for part, members in names.items():
        chosen = space.resolve(members).put(torch.ones(space.resolve(members).size, dtype=H.dtype)).flatten()
        shares[part] = float((H * chosen).norm() ** 2 / H.norm() ** 2)
    assert sum(shares.values()) == pytest.approx(1)
    for part, share in shares.items():
        assert row["parts"][part] == pytest.approx(share, rel=0.35, abs=0.02), part
    assert row["slope"] == pytest.approx(row["slope_difference"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["vit_adversarial", "ssm_english"])
def test_slopes_are_those_of_a_spectrum_that_moves(name: str) -> None:
    """Exact to third order; a slope along v or along the gradient, or of another eigenvalue, is another number."""
    here, there = moments(Subject(name, batch=16, **{**SMALL, "samples": 2}), [1, 3])
    way = beyond_measure._weights(there) - beyond_measure._weights(here)
    H = Hessian(here.objective)
    top = beyond_measure._end(H, 2, "largest", 1e-5, torch.Generator().manual_seed(0))
    row = beyond_measure.slopes(here, there, top, way)
    assert row["slope"] == pytest.approx(row["slope_difference"], rel=1e-3)
    assert row["slope"] * row["way"] == pytest.approx(row["predicted"])
    later = beyond_measure._sharpness(there.objective)
    assert row["change"] == pytest.approx(later / float(top.values[-1]) - 1)


def row(model: str, step: int = 9, **changed: Any) -> Row:
    changes = changed.pop("changes", [[0.1, 0.2]])
    out: Row = {"model": model, "step": step, "count": 10, "slopes": [[1.0, 1.001]], "changes": changes}
    for name, value in {"outliers": 0.8, "functional": 0.2, "concentrated": 0.5, **changed}.items():
        middle, reach = value if isinstance(value, tuple) else (value, 0.05)
        out |= {name: middle, f"{name}_low": middle - reach, f"{name}_high": middle + reach}
    return out


@pytest.mark.parametrize(
    ("table", "answer"),
    [
        ([row("gpt_english"), row("ssm_english"), row("vit_adversarial")], "holds"),
        ([row("ssm_english"), row("vit_adversarial", functional=0.7)], "holds in part"),
        ([row("rwkv_english", outliers=0.1, functional=0.9)], "holds in part"),
        ([row("rwkv_english", outliers=0.1, functional=0.9, concentrated=0.9)], "does not hold here"),
        ([row("rwkv_english", outliers=(0.5, 0.3), functional=(0.5, 0.3), concentrated=(0.8, 0.1))], "undecided"),
        ([row("ssm_english"), row("ssm_english", 0, outliers=0.1, functional=0.9)], "holds"),
        ([row("gpt_english"), row("vit_digits")], "undecided"),
        ([], "undecided"),
    ],
)
def test_the_verdict_goes_by_trained_models_that_are_no_references(table: list[Row], answer: str) -> None:
    verdict = STUDY.verdict(BeyondSettings(), table)
    assert verdict.answer == answer, verdict.sentence


def test_the_sentence_says_of_whom_a_finding_does_not_hold() -> None:
    table = [row("gpt_english", functional=0.6), row("ssm_english", functional=(0.5, 0.2)), row("rwkv_english")]
    sentence = beyond_table.verdict(table, LIMITS).sentence
    wanted = "no of GPT, English text 0.60 [0.55, 0.65]; undecided of State space, English text 0.50 [0.30, 0.70]"
    assert wanted in sentence
    assert "to 1e-03 in the median" in sentence and "in 3 of 3 cases" in sentence
    alone = beyond_table.verdict([row("ssm_english", changes=())], LIMITS).sentence
    assert alone.endswith("at worst.")


def test_ratios_are_paired_by_seed() -> None:
    """λ_max differs tenfold from seed to seed, and is three times the reference's in each: 3, without a spread."""
    base = {"step": 0, "parameters": 5, "top": [3.0, 1.0], "frobenius": 4.0, "parts": {"mlp": 0.75, "norms": 0.25}}
    base |= dict.fromkeys([*beyond_table.POSITIVE, *beyond_table.ERRORS, "slope", "lowest", "slope_difference"], 1.0)
    base |= {"accuracy": None, "predicted": None, "change": None, "frobenius": 4.0}
    rows = [
        {**base, "model": model, "seed": seed, "sharpness": factor * 10.0**seed}
        for model, factor in (("vit_digits", 1.0), (NAME, 3.0))
        for seed in (0, 1)
    ]
    reference, other = beyond_table.summaries(rows)
    assert reference["over_reference"] == {}
    assert other["over_reference"]["sharpness"] == pytest.approx([3.0, 3.0, 3.0])
    assert other["outliers"] == pytest.approx(10 / 16) and other["concentrated"] == 0.75
    assert other["changes"] == [] and other["count"] == 2


def test_a_run_gives_a_table_and_a_figure(tmp_path: Path) -> None:
    result = studies.run("beyond", replace(TINY, points=(1.0,)), workers=0)
    assert not result.failed and [each["step"] for each in result.rows] == [4, 4]
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    picture = studies.find("beyond").figure(again.rows, again.settings)
    assert len(picture.axes) == 4
    assert [each.get_text() for each in picture.axes[0].get_yticklabels()][1] == "ViT, digits, contrastive"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"functional": 1.5}, "functional: expected a share of the whole, between 0 and 1, got 1.5"),
        ({"steps": 0}, "expected at least 1 step of training and 2 products per probe, got 0 and 10"),
        ({"products": 1}, "got 4 and 1"),
        ({"models": ("ssm",)}, "no model 'ssm' to study"),
        ({"repeats": 1}, "repeats: expected 2 or more"),
    ],
)
def test_what_cannot_be_measured_says_why(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        studies.run("beyond", replace(TINY, **changed), workers=0)
