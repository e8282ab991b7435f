"""flow: rows are those of ev.flow and of plain loops, ranks are ranks, and a proxy that is the truth would pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr

import evolute as ev
from evolute import studies
from evolute.errors import StudyError
from evolute.studies import Row
from evolute.studies.flow import STUDY, FlowSettings
from evolute.studies.flow import measure as flow_measure
from evolute.studies.flow import table as flow_table
from evolute.studies.subjects import Subject, at

TINY = FlowSettings(depths=(3,), points=(0.0, 0.5, 1.0), width=2, heads=1, steps=4, samples=3, probes=2, repeats=2)


def test_rows_are_what_they_say() -> None:
    """Squared gradients from one backward pass for each sample; attention from its weights; curvature of ev.flow."""
    subject = Subject("vit_digits", 4, 2, 2, 4, samples=3, options={"norm": "post"})
    moment = at(subject, 4)
    rows = flow_measure.at_moment(subject, moment, probes=4)
    assert [row["layer"] for row in rows] == [0, 1] and {row["norm"] for row in rows} == {"post"}
    found = ev.flow(moment.model, [moment.sample], ev.Loss(*ev.zoo.cross_entropy), probes=4)
    for row, block in zip(rows, found.blocks, strict=True):
        assert block.parameters
        assert row["parameters H_f"] == pytest.approx(float(block.parameters.norm["H_f"]))
        assert row["activations H"] == pytest.approx(float(block.activations.norm["H"]))
        assert row["gradient"] == pytest.approx(block.parameters.gradient)
    x, y = moment.sample
    squares = torch.zeros(2, dtype=torch.float64)
    for n in range(3):
        moment.model.zero_grad()
        torch.nn.functional.cross_entropy(moment.model(x[n : n + 1]), y[n : n + 1]).backward()
        for i in range(2):
            squares[i] += sum(p.grad.square().sum() for p in moment.model.layers[i].parameters()) / 3
    assert [row["squared"] for row in rows] == pytest.approx(squares.tolist())
    assert all(0 < row["attention"] < 0.5 and 0 < row["share"] <= 1 and row["variance"] > 0 for row in rows)


def rows(proxy: Any, noise: float = 0.0, seeds: int = 3, depth: int = 4) -> list[Row]:
    """Curvature (1 + layer)(1 + step) in both places; `proxy` of it in all of the proxies' places."""
    made = list[Row]()
    generator = torch.Generator().manual_seed(0)
    for seed in range(seeds):
        for step in (0, 10, 20):
            for layer in range(depth):
                truth = (1.0 + layer) * (1.0 + step)
                shaken = proxy(truth) + noise * float(torch.randn(1, generator=generator))
                row: Row = {"model": "vit_digits", "norm": "pre", "depth": depth, "step": step, "layer": layer}
                row |= {"seed": seed, "loss": 1.0, "variance": 1.0, "share": 0.5}
                for place in ("activations", "parameters"):
                    row |= {f"{place} {part}": truth for part in ("H", "H_o", "H_f", "trace")}
                    row[f"{place} error"] = 0.0
                made.append(row | dict.fromkeys(flow_measure.PROXIES, shaken))
    return made


@pytest.mark.parametrize(
    ("proxy", "noise", "answer"),
    [
        (lambda truth: truth**3, 0.0, "holds"),
        (lambda truth: -truth, 0.0, "does not hold here"),
        (lambda truth: 1.0, 0.0, "does not hold here"),
        (lambda truth: 0.0, 1.0, "does not hold here"),
    ],
)
def test_a_proxy_that_is_the_truth_passes_and_noise_does_not(proxy: Any, noise: float, answer: str) -> None:
    assert STUDY.verdict(TINY, STUDY.table(TINY, rows(proxy, noise, seeds=12))).answer == answer


def test_verdicts_in_between() -> None:
    def correlation(low: float, high: float) -> Row:
        known = {"kind": "correlation", "own": True, "proxy": "gradient", "across": "blocks", "norm": "pre", "depth": 6}
        return {**known, "rho": (low + high) / 2, "rho_low": low, "rho_high": high}

    assert STUDY.verdict(TINY, [correlation(0.9, 1), correlation(0, 0.5)]).answer == "holds in part"
    assert STUDY.verdict(TINY, [correlation(0.5, 0.9)]).answer == "undecided"
    assert STUDY.verdict(TINY, []).answer == "undecided"
    two = STUDY.table(TINY, rows(lambda truth: truth, depth=2))
    assert {row["across"] for row in two if row["kind"] == "correlation"} == {"steps"}


def test_ranks_and_profiles() -> None:
    x, y = [3.0, 1.0, 1.0, 7.0, 2.0], [0.1, 0.5, 0.2, 9.0, 0.2]
    assert flow_table.rank_correlation(x, y) == pytest.approx(spearmanr(x, y).statistic)
    assert flow_table.rank_correlation([1.0, 1.0], [1.0, 2.0]) == 0
    profile = [row for row in STUDY.table(TINY, rows(lambda truth: truth)) if row["kind"] == "profile"]
    assert all(row["ratio"] == pytest.approx(0.25) for row in profile)


def test_a_run_gives_a_table_and_a_figure(tmp_path: Path) -> None:
    result = studies.run("flow", TINY, workers=0)
    assert not result.failed and {row["kind"] for row in result.rows} == {"map", "profile", "correlation"}
    assert {row["norm"] for row in result.rows} == {"pre", "post"}
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    picture = studies.find("flow").figure(again.rows, again.settings)
    assert len(picture.axes) == 6 and len(picture.axes[0].texts) == 9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norms": ("layer",)}, "norms: expected some of pre, post, none, got layer"),
        ({"norms": ()}, "got none of them"),
        ({"depths": (0,)}, r"depths: expected numbers of blocks, at least 1, got \(0,\)"),
        ({"points": (2.0,)}, r"points: expected fractions of the training, from 0 to 1, got \[2.0\]"),
        ({"repeats": 1}, "repeats: expected 2 or more, for an interval, got 1"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"model": "mlp_digits"}, "an MLP has no options of a Transformer block"),
        ({"model": "vit"}, "no model 'vit' to study"),
    ],
)
def test_what_cannot_be_measured_says_why(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        studies.run("flow", replace(TINY, **changed), workers=0)
