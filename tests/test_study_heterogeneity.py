"""Heterogeneity: the Hessian is that of autograd, its ratios are those of theory, verdicts come from tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evolute import studies
from evolute.errors import StudyError
from evolute.studies import Row
from evolute.studies.heterogeneity import STUDY, Heterogeneity, contrasts, judged
from evolute.studies.heterogeneity.measure import (
    dense_hessian,
    image,
    magnitudes,
    measured,
    subject,
    token_size,
    typical,
)

CELL: dict[str, Any] = {"attention": "softmax", "norm": "none", "steps": 0, "seed": 1, "width": 4, "layers": 1}
CELL |= {"digits": 2, "samples": 4, "lr": 3e-3}


@pytest.fixture(scope="module")
def result() -> studies.Result:
    studies.add(STUDY)
    return studies.run("heterogeneity", Heterogeneity(width=4, digits=2, samples=4, steps=3, repeats=2), workers=0)


@pytest.mark.parametrize("changed", [{}, {"attention": "linear", "norm": "pre", "layers": 2}])
def test_the_whole_hessian_is_that_of_autograd(changed: dict[str, Any]) -> None:
    model, data = subject({**CELL, "width": 2, **changed})
    model = model.double()
    H, sizes = dense_hessian(model, data, samples=3)
    names, values = zip(*model.named_parameters(), strict=True)
    lengths = [value.numel() for value in values]
    kept = data.train.y[:3].flatten() != -100

    def loss(flat: Tensor) -> Tensor:
        weights = {n: f.view_as(v) for n, v, f in zip(names, values, flat.split(lengths), strict=True)}
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            logits = torch.func.functional_call(model, weights, (data.train.x[:3],)).flatten(0, 1)
        return nn.functional.cross_entropy(logits[kept], data.train.y[:3].flatten()[kept])

    flat = torch.cat([value.detach().flatten() for value in values])
    expected = torch.autograd.functional.hessian(loss, flat)  # torch.func.hessian is wrong behind a LayerNorm
    assert isinstance(expected, Tensor) and torch.allclose(H, expected, atol=1e-12) and float(expected.norm()) > 0.01
    assert list(sizes)[:4] == ["E", "P", "Q0", "K0"] and list(sizes)[-1] == "U" and sum(sizes.values()) == len(H)


def decades(attention: str, norm: str, sigma: float) -> float:
    """log10 of V,V over Q,Q, root mean squares, with embeddings σ times as large."""
    model, data = subject({**CELL, "attention": attention, "norm": norm, "width": 6})
    model = model.double()
    with torch.no_grad():
        for table in (model.embed, model.position):
            table.weight.mul_(sigma)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-14
    blocks = {row["block"]: row for row in typical(*dense_hessian(model, data, 8))}
    return math.log10(blocks["V0"]["rms"] / blocks["Q0"]["rms"])


def test_ten_times_smaller_tokens_set_blocks_apart_by_three_decades_with_softmax_alone() -> None:
    """σ² over σ⁵, which is H_f of Q with Q; σ⁶ over σ⁶ without softmax; nothing at all behind a norm."""
    assert decades("softmax", "none", 1e-3) - decades("softmax", "none", 1e-2) == pytest.approx(3, abs=0.05)
    assert decades("linear", "none", 1e-3) - decades("linear", "none", 1e-2) == pytest.approx(0, abs=0.05)
    assert decades("softmax", "pre", 1e-4) - decades("softmax", "pre", 1e-3) == pytest.approx(0, abs=0.05)


def test_typical_entries_histograms_and_image_are_those_of_the_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    H = torch.randn(30, 30, generator=generator, dtype=torch.float64) * 1e-3
    H = H + H.mT
    H[:4, 4:10] = H[4:10, :4] = 0
    sizes = {"E": 4, "Q0": 6, "V0": 20}
    rows = {row["block"]: row for row in typical(H, sizes)}
    assert list(rows) == ["E", "E,Q0", "E,V0", "Q0", "Q0,V0", "V0"]
    assert rows["Q0,V0"]["rms"] == pytest.approx(float(H[4:10, 10:].norm()) / 120**0.5)
    assert rows["V0"]["median"] == float(H[10:, 10:].abs().flatten().median())
    assert rows["E,Q0"]["zeros"] == 1 and sum(rows["E,Q0"]["counts"]) == 0 and sum(rows["V0"]["counts"]) == 400
    shown = torch.tensor(magnitudes(image(H, sizes)))  # no group is larger than its pixels: an entry each
    assert shown.shape == (30, 30) and torch.isneginf(shown[:4, 4:10]).all()
    assert torch.allclose(shown[10:, 10:], H[10:, 10:].abs().log10().float(), atol=0.04)


def test_tiles_of_an_image_keep_to_the_groups() -> None:
    H = torch.zeros(300, 300, dtype=torch.float64)
    H[:7, :7], H[7:, 7:] = 1.0, 1e-4
    row = image(H, {"E": 7, "V0": 293})
    a = row["pixels"][0]
    shown = torch.tensor(magnitudes(row))
    assert sum(row["pixels"]) < 130 and a >= 3
    assert torch.allclose(shown[:a, :a], torch.zeros(()), atol=0.04) and torch.allclose(
        shown[a:, a:], torch.tensor(-4.0), atol=0.04
    )
    assert torch.isneginf(shown[:a, a:]).all()


def test_a_tile_is_the_root_mean_square_of_its_entries() -> None:
    """One entry of four: half of it; a mean would be a quarter."""
    H = torch.zeros(240, 240, dtype=torch.float64)
    H[0, 0] = 2e-3
    shown = magnitudes(image(H, {"E": 240}))
    assert len(shown) == 120 and shown[0][0] == pytest.approx(-3, abs=0.04) and shown[0][1] == float("-inf")


def test_the_size_of_tokens_is_that_of_embeddings_and_positions_together() -> None:
    model, data = subject({**CELL, "width": 400})
    assert token_size(model, data, 8) == pytest.approx((2 / 400) ** 0.5, rel=0.05)


def test_training_trains_and_the_same_cell_gives_the_same_rows() -> None:
    cell = {**CELL, "steps": 40}
    before, after, again = (measured({**cell, "steps": steps}) for steps in (0, 40, 40))
    assert after == again and after[0]["loss"] < before[0]["loss"] - 0.05
    assert after[1] != before[1]


# ---- what is made of it


def row(of: str, point: str, decades: float, reach: float, **changed: Any) -> Row:
    base = {"of": of, "point": point, "statistic": "median", "decades": decades}
    return {**base, "ci_low": decades - reach, "ci_high": decades + reach, **changed}


def table(plain: float, linear: float, pre: float, reach: float = 0.1) -> list[Row]:
    softmax = {"kind": "ratio", "attention": "softmax", "norm": "none"}
    return [
        row("V,V / Q,Q", "trained", plain, reach, **softmax),
        row("V,V / Q,Q", "trained", -5.0, reach, **{**softmax, "norm": "pre"}),
        row("without softmax", "trained", linear, reach, kind="contrast"),
        row("with pre-norm", "trained", pre, reach, kind="contrast"),
        row("with pre-norm", "trained", -5.0, reach, kind="contrast", statistic="rms"),
    ]


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        (table(2.0, 1.0, 0.5), "holds"),
        (table(0.05, 1.0, 0.5), "holds in part"),  # a ratio that is not known to be one
        (table(2.0, 1.0, -0.5), "holds in part"),
        (table(-0.5, -0.2, -0.3), "does not hold here"),
        (table(1.0, 0.5, 0.2, reach=3.0), "undecided"),
        ([], "undecided"),
    ],
)
def test_the_verdict_comes_from_the_rows(rows: list[Row], answer: str) -> None:
    assert judged(rows).answer == answer


def test_contrasts_are_differences_of_runs_that_share_a_seed() -> None:
    values = {("softmax", "none"): (1.0, 3.0), ("linear", "none"): (0.5, 2.5), ("softmax", "pre"): (0.0, 1.0)}
    ratios = [
        {"attention": a, "norm": n, "point": "trained", "statistic": "rms", "seed": seed, "decades": value}
        for (a, n), both in values.items()
        for seed, value in enumerate(both)
    ]
    found = {each["of"]: each for each in contrasts(ratios)}
    assert found["without softmax"]["decades"] == 0.5 == found["without softmax"]["ci_low"]
    assert found["with pre-norm"]["decades"] == 1.5 and found["with pre-norm"]["ci_low"] < 0
    one_failed = [each for each in ratios if (each["attention"], each["seed"]) != ("linear", 1)]
    assert [each["of"] for each in contrasts(one_failed)] == ["with pre-norm"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"repeats": 1}, "repeats: expected at least 2"),
        ({"samples": 0}, "samples: expected a positive number, got 0"),
        ({"digits": 1}, "digits: expected numbers of 2 to 9 digits, got 1"),
        ({"lr": -1.0}, "lr: expected a positive number, got -1.0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError) as error:
        Heterogeneity(**changed)
    assert message in str(error.value)


def test_the_figure_comes_from_the_saved_result(result: studies.Result, tmp_path: Path) -> None:
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    assert not result.failed and result.cells == 16
    with studies.look():
        picture = STUDY.figure(again.rows, again.settings)
        picture.savefig(tmp_path / "figure.svg", dpi=160)
    assert len([axes for axes in picture.axes if axes.images]) == 8
    ratio = next(row for row in again.rows if row["kind"] == "ratio" and row["statistic"] == "median")
    assert f"{ratio['decades']:.1f}" in picture.axes[8].get_title(loc="left")
    assert (tmp_path / "figure.svg").stat().st_size < 450_000
