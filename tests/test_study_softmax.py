"""Softmax: powers that theory knows, norms against a plain Jacobian, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evolute import studies
from evolute.errors import StudyError
from evolute.studies.softmax import Softmax
from evolute.studies.softmax import blocks as softmax_blocks
from evolute.studies.softmax import rates as softmax_rates
from evolute.studies.softmax.rates import last_layer, theory
from evolute.studies.softmax.table import summary
from evolute.studies.softmax.verdict import judge

TINY: dict[str, Any] = {
    "repeats": 2,
    "depths": (1, 2),
    "features": 4,
    "length": 4,
    "sequences": 2,
    "width": 4,
    "heads": 1,
    "steps": 3,
    "samples": 2,
}


def cell(**changed: Any) -> dict[str, Any]:
    told = {"part": "rates", "kind": "softmax", "wiring": "plain", "depth": 2, "seed": 0}
    return {**told, "sigmas": [0.01, 0.03], "width": 4, "length": 4, "sequences": 2, **changed}


MAPS = {
    "softmax": lambda s: s.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(-1),
    "linear": lambda s: s.tril(),
    "sigmoid": lambda s: s.sigmoid().tril(),
    "relu": lambda s: s.relu().tril(),
}


@pytest.mark.parametrize("kind", list(MAPS))
@pytest.mark.parametrize(("wiring", "depth"), [("plain", 1), ("residual", 2)])
def test_norms_are_those_of_a_plain_jacobian(kind: str, wiring: str, depth: int) -> None:
    """Causal order, residuals, the scale of the scores and the last layer: each would change a norm."""
    setting = cell(kind=kind, wiring=wiring, depth=depth)
    weights = [w.detach() for w in softmax_rates._model(setting).parameters()]
    x, y = (softmax_rates._normal(setting, more) for more in (0, 1))

    def output(last: Tensor) -> Tensor:
        z = 0.7 * x
        for q, k, v in [*zip(*[iter(weights[:-3])] * 3, strict=True), last.view(3, 4, 4)]:
            A = MAPS[kind]((z @ q.T) @ (z @ k.T).mT / 2)
            z = A @ (z @ v.T) + (z if wiring == "residual" else 0.0)
        return z.flatten()

    w = torch.cat([weight.flatten() for weight in weights[-3:]])
    J = torch.func.jacrev(output)(w)
    H = torch.func.hessian(lambda w: (output(w) - y.flatten()).square().mean())(w)
    H_o = 2 / len(J) * J.T @ J
    for part, matrix in (("H_o", H_o), ("H_f", H - H_o)):
        blocks, found = matrix.view(3, 16, 3, 16), last_layer(setting, 0.7)
        for i, a in enumerate("QKV"):
            for j, b in list(enumerate("QKV"))[i:]:
                expected = float(blocks[i, :, j].norm())
                name = a if a == b else f"{a},{b}"
                assert found[name, part] == pytest.approx(expected, rel=1e-9, abs=1e-12 * float(matrix.norm()))


def test_powers_are_those_of_theory() -> None:
    """Without the third moment, without 3^D, or with a softmax too many, an integer would be another."""
    study = studies.find("softmax")
    cells = [each for each in study.cells(Softmax(**{**TINY, "parts": ("rates",)})) if each["seed"] == 0]
    rows = [row for each in cells for row in study.measure(each)]
    table = summary([*rows, *({**row, "seed": 1} for row in rows)])  # the interval of one repeat is not the point here
    assert judge(table).answer == "undecided"  # nothing is said of sizes
    powers = [row for row in table if row["quantity"] == "power"]
    zeros = [row for row in table if row["quantity"] == "zero"]
    assert len(powers) == 20 * 12 - len(zeros) and all(row["value"] == 0 for row in zeros)
    assert all(row["value"] == pytest.approx(row["theory"], abs=0.4) for row in powers)
    told = {(r["kind"], r["wiring"], r["depth"], r["of"], r["block"]): r["value"] for r in powers}
    assert told["softmax", "plain", 1, "H_f", "Q"] == pytest.approx(5, abs=0.05)
    assert told["linear", "plain", 2, "H_o", "V"] == pytest.approx(18, abs=1e-3)
    assert told["linear", "residual", 2, "H_o", "V"] == pytest.approx(6, abs=0.01)
    assert told["softmax", "bidirectional", 2, "H_o", "K"] == pytest.approx(14, abs=0.05)


def test_theory_says_where_blocks_are_zero() -> None:
    assert [theory(kind, "plain", 2, "Q", "H_f") for kind in ("softmax", "linear", "sigmoid", "relu")] == [
        5,
        None,
        7,
        None,
    ]
    assert theory("softmax", "bidirectional", 2, "Q", "H_f") == 11 and theory("softmax", "plain", 1, "V", "H_f") is None
    assert theory("relu", "plain", 3, "Q,V", "H_f") == 27


def test_a_gpt_without_curvature_in_its_scores_has_no_functional_part_on_the_diagonal() -> None:
    sizes = {name: TINY[name] for name in ("width", "heads", "steps", "samples")}
    rows = softmax_blocks.measure(
        {"part": "blocks", "kind": "relu", "seed": 0, "task": "addition", "layers": 1, **sizes}
    )
    norms = {(row["point"], row["of"], row["block"]): row["norm"] for row in rows if "norm" in row}
    for point in ("untrained", "trained"):
        assert all(norms[point, "H_f", letter] == 0 for letter in "QKV")
        assert norms[point, "H", "V"] == pytest.approx(norms[point, "H_o", "V"]) != 0
        assert norms[point, "H_f", "Q,K"] > 0
    scored = {row["point"]: row["loss"] for row in rows if "loss" in row and row["scores"] > 0}
    assert [*scored] == ["untrained", "trained"] and scored["trained"] < scored["untrained"]


def test_all_of_it_is_drawn_from_the_saved_result(tmp_path: Path) -> None:
    config = Softmax(**{**TINY, "kinds": ("softmax", "linear"), "depths": (1,)})
    result = studies.run("softmax", config, workers=0)
    again = studies.Result.load(result.save(tmp_path))
    picture = studies.find("softmax").figure(again.rows, again.settings)
    assert [axes.get_title("left") for axes in picture.axes if axes.get_visible()] == [
        "GPT on English text, before training",
        "Attention alone, small inputs of size σ",
        "GPT on English text, after training",
        "GPT: spread between the blocks",
    ]
    picture.savefig(tmp_path / "figure.svg")
    assert {row["quantity"] for row in again.rows} >= {"power", "zero", "norm", "spread", "spread ratio", "loss"}


def test_a_spread_is_compared_with_softmax_of_the_same_seed() -> None:
    def rows(kind: str, seed: int, q: float, v: float) -> list[dict[str, Any]]:
        told = {"part": "blocks", "task": "english", "kind": kind, "point": "trained", "seed": seed}
        sizes = {"Q": q, "K": 2.0, "V": v, "Q,K": 1.0, "Q,V": 1.0, "K,V": 1.0}
        return [
            {**told, "of": of, "block": block, "norm": x} for of in ("H", "H_o", "H_f") for block, x in sizes.items()
        ]

    softmax = [*rows("softmax", 0, 1.0, 100.0), *rows("softmax", 1, 1.0, 400.0)]
    table = summary([*softmax, *rows("linear", 0, 1.0, 5.0), *rows("linear", 1, 1.0, 20.0)])
    (ratio,) = (row for row in table if row["quantity"] == "spread ratio" and row["of"] == "H_o")
    assert (ratio["value"], ratio["low"], ratio["high"]) == pytest.approx((0.05, 0.05, 0.05))
    spread = {row["kind"]: row["value"] for row in table if row["quantity"] == "spread" and row["of"] == "H_o"}
    assert spread == pytest.approx({"softmax": 200.0, "linear": 10.0})


# ---- what is said of it


def power(value: float, expected: float) -> dict[str, Any]:
    told = {"kind": "linear", "wiring": "plain", "depth": 1, "block": "Q", "of": "H_o", "quantity": "power"}
    return {**told, "value": value, "low": value - 0.01, "high": value + 0.01, "theory": expected}


def smaller(low: float, high: float, kind: str = "linear") -> dict[str, Any]:
    told = {"kind": kind, "task": "english", "point": "trained", "of": "H_o", "quantity": "spread ratio"}
    return {**told, "value": (low + high) / 2, "low": low, "high": high}


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        ([power(6.0, 6.0), smaller(0.1, 0.2), smaller(0.3, 0.9, "relu")], "holds"),
        ([power(6.0, 6.0), smaller(0.1, 0.2), smaller(0.9, 1.9, "sigmoid")], "holds in part"),
        ([power(4.0, 6.0), smaller(0.1, 0.2)], "holds in part"),
        ([power(6.0, 6.0), smaller(0.9, 1.2)], "does not hold here"),
        ([power(6.0, 6.0)], "undecided"),
        ([power(4.0, 6.0)], "does not hold here"),
        ([], "undecided"),
    ],
)
def test_the_verdict_follows_powers_and_spreads(rows: list[dict[str, Any]], answer: str) -> None:
    verdict = judge(rows)
    assert verdict.answer == answer
    if any(row.get("theory") == 6.0 and row["value"] == 4.0 for row in rows):
        assert "0 of 1 powers of σ" in verdict.sentence and "depth 1: 4, by theory 6" in verdict.sentence


def test_a_block_that_is_lost_in_rounding_is_told() -> None:
    told = {"part": "rates", "kind": "linear", "wiring": "plain", "depth": 1, "block": "Q,K", "of": "H_f"}
    rows = [{**told, "seed": seed, "sigma": sigma, "norm": 0.0} for seed in (0, 1) for sigma in (0.01, 0.03)]
    (row,) = summary(rows)
    assert row["quantity"] == "lost" and row["theory"] == 3
    assert "0 of 1 powers of σ" in judge([row]).sentence and "lost in rounding, by theory 3" in judge([row]).sentence


def test_a_block_that_should_be_zero_and_is_not_is_told() -> None:
    row = {**power(0.0, 0.0), "quantity": "zero", "value": 0.5, "of": "H_f", "theory": None}
    assert "H_f(Q) of linear, plain, depth 1: 0.5, by theory no block at all" in judge([row]).sentence


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": ("rate",)}, "parts: expected some of rates, blocks, got rate"),
        ({"kinds": ("softmax", "cosine")}, "kinds: expected some of softmax, linear, sigmoid, relu, got cosine"),
        ({"kinds": ("linear", "relu")}, "expected softmax and others to compare with it"),
        ({"repeats": 1}, "repeats: expected at least 2, for an interval, got 1"),
        ({"sigmas": (0.01, 1.0)}, "sigmas: expected two or more from 0.001 to 0.1"),
        ({"depths": ()}, "depths: expected numbers of layers"),
        ({"tasks": ("digits",)}, "tasks: expected some of addition, english, got digits"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
    ],
)
def test_a_wrong_setting_says_what_is_expected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError) as error:
        Softmax(**settings)
    assert message in str(error.value)
