"""Dominance: the norms are those of the dense Hessian, and obey the symmetry that theory has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from evolute import studies
from evolute.errors import StudyError
from evolute.studies import Row
from evolute.studies.dominance import NORMS, STUDY, Dominance, measured
from evolute.studies.subjects import Moment, Subject, at

TINY = Dominance(
    models=("gpt_addition",), points=(0.0, 1.0), width=4, heads=1, layers=1, steps=4, samples=2, repeats=2, probes=4
)


def moment(**changed: Any) -> Moment:
    sizes: dict[str, Any] = {"width": 4, "heads": 2, "layers": 2, "steps": 4, "samples": 3}
    return at(Subject("gpt_addition", **{**sizes, **changed}), 3)


def dense_block(moment: Moment, name: str) -> Tensor:
    """∂²L/∂w² of one weight, by autodiff of the whole model."""
    x, y = moment.sample

    def loss(w: Tensor) -> Tensor:
        logits = functional_call(moment.model, {name: w}, (x,)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, y.flatten())

    weight = moment.model.get_parameter(name).detach()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        hessian: Any = torch.func.hessian(loss)(weight)
    return hessian.reshape(weight.numel(), weight.numel()).detach()


WEIGHTS = {"Q": "attn.q", "K": "attn.k", "V": "attn.v", "O": "attn.o", "W1": "mlp.up", "W2": "mlp.down", "N1": "norm1"}


def test_norms_are_those_of_the_dense_blocks() -> None:
    """A group that goes by another's name, or a norm of a whole column of blocks, would not be."""
    here = moment()
    rows = {(row["layer"], row["group"]): row for row in measured(here, 16, seed=0)}
    for layer in (0, 1):
        for letter, name in WEIGHTS.items():
            if letter == "N1":
                continue  # weight and bias together
            row, truth = rows[layer, letter], dense_block(here, f"layers.{layer}.{name}.weight")
            assert row["spectral"] == pytest.approx(float(torch.linalg.eigvalsh(truth).abs().max()), rel=1e-5)
            assert abs(row["frobenius"] - float(truth.norm())) < max(6 * row["frobenius_error"], 1e-9)
            assert row["size"] == len(truth)
    assert all(rows[1, letter]["frobenius_error"] == 0 for letter in WEIGHTS)  # closed form, or small
    assert rows[0, "W1"]["frobenius_error"] > 0 and rows[None, "embed"]["frobenius_error"] > 0
    assert set(rows) >= {(None, "embed.position"), (None, "norm"), (None, "unembed"), (0, "N2")}


def test_scale_handed_from_value_to_output_changes_who_dominates_but_not_relative_to_the_weights() -> None:
    """W_V → 3 W_V, W_O → W_O/3 is the same model: H(V,V)/9, 9 H(O,O), all else as it was."""
    here = moment()
    before, loss = {(r["layer"], r["group"]): r for r in measured(here, 8, seed=0)}, here.objective.value()
    with torch.no_grad():
        here.model.get_parameter("layers.1.attn.v.weight").mul_(3)
        here.model.get_parameter("layers.1.attn.o.weight").div_(3)
    after = {(r["layer"], r["group"]): r for r in measured(here, 8, seed=0)}
    assert here.objective.value() == pytest.approx(loss, rel=1e-12)
    for norm in ("frobenius", "spectral"):
        for letter, factor in {"V": 1 / 9, "O": 9, "Q": 1, "K": 1, "W1": 1}.items():
            assert after[1, letter][norm] == pytest.approx(factor * before[1, letter][norm], rel=1e-5)
    for letter in ("V", "O"):
        relative = [rows[1, letter]["weights"] ** 2 * rows[1, letter]["spectral"] for rows in (before, after)]
        assert relative[1] == pytest.approx(relative[0], rel=1e-5)


def cell_row(**changed: Any) -> Row:
    row = {"model": "vit_digits", "step": 0, "seed": 0, "loss": 1.0, "accuracy": 0.5, "layer": 0, "group": "V"}
    return {**row, "size": 4, "weights": 2.0, "frobenius": 3.0, "spectral": 2.0, "frobenius_error": 0.0, **changed}


def test_layers_make_one_block_diagonal_matrix() -> None:
    layers = [cell_row(), cell_row(layer=1, frobenius=4.0, spectral=5.0, weights=3.0, size=3)]
    rows = [{**row, "seed": seed, "group": group} for row in layers for seed in (0, 1) for group in ("V", "O")]
    found = {row["norm"]: row for row in STUDY.table(Dominance(), rows) if row["group"] == "V"}
    sizes = {"frobenius": 5.0, "spectral": 5.0, "entry": 1.0, "relative": 45.0}
    assert {norm: pytest.approx(found[norm]["value"]) for norm in NORMS} == sizes
    assert all(row["share"] == pytest.approx(0.5) and row["lead"] == pytest.approx(1) for row in found.values())


def test_a_lead_is_over_the_largest_of_the_rivals() -> None:
    norms = {"V": 6.0, "O": 12.0, "Q": 3.0}
    rows = [cell_row(group=group, frobenius=norm) | {"seed": seed} for group, norm in norms.items() for seed in (0, 1)]
    found = {row["group"]: row for row in STUDY.table(Dominance(), rows) if row["norm"] == "frobenius"}
    assert (found["V"]["lead"], found["O"]["lead"]) == pytest.approx((0.5, 4.0))


def table(value: tuple[float, float], key: tuple[float, float], also: tuple[float, float] | None = None) -> list[Row]:
    """Intervals of the lead of V and of K at one step, and of both at another."""
    leads = [("V", 0, value), ("K", 0, key)] + ([("V", 9, also), ("K", 9, also)] if also else [])
    known = {"model": "vit_digits", "norm": "frobenius", "share": 0.2}
    return [
        {**known, "step": step, "group": group, "lead": 1, "lead_low": low, "lead_high": high}
        for group, step, (low, high) in leads
    ]


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        (table((1.1, 2), (1.2, 3)), "holds"),
        (table((1.1, 2), (0.2, 0.9)), "does not hold here"),
        (table((1.1, 2), (0.2, 0.9), (1.5, 2.5)), "holds in part"),
        (table((1.1, 2), (0.2, 5)), "undecided"),
        (table((1.1, 2), (0.9, 5), (0.5, 0.8)), "undecided"),
    ],
)
def test_the_verdict_counts_where_both_are_ahead(rows: list[Row], answer: str) -> None:
    verdict = STUDY.verdict(Dominance(), rows)
    assert verdict.answer == answer, verdict.sentence
    assert f"in {len(rows) // 2} cases" in verdict.sentence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a tiny run has left its cells and its result."""
    folder = tmp_path_factory.mktemp("dominance")
    studies.run("dominance", TINY, workers=0, out=folder).save(folder)
    return folder


def test_without_a_rival_in_the_model_nothing_is_decided() -> None:
    rows = [cell_row(seed=seed, group=group) for seed in (0, 1) for group in ("V", "K")]
    config = Dominance(rivals=("Wg",))
    verdict = STUDY.verdict(config, STUDY.table(config, rows))
    assert verdict.answer == "undecided" and "no model with two seeds has any of Wg" in verdict.sentence


def test_a_run_gives_every_group_by_every_norm_and_a_figure(folder: Path) -> None:
    result = studies.Result.load(folder)
    assert not result.failed and len(result.rows) == 2 * 4 * 12  # steps, norms, groups: 8 in the layer and 4 outside
    shares = [row["share"] for row in result.rows if (row["step"], row["norm"]) == (4, "frobenius")]
    assert sum(shares) == pytest.approx(1)
    json.dumps(list(result.rows), allow_nan=False)
    with studies.look():
        picture = studies.find("dominance").figure(result.rows, result.settings)
    assert [axes.get_title(loc="left") for axes in picture.axes] == ["GPT, addition: share of ‖H‖ in %", ""]


def test_rivals_can_be_chosen_without_measuring_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(STUDY), "measure", lambda *_: pytest.fail("measured again"))
    result = studies.run("dominance", replace(TINY, rivals=("Q",)), workers=0, out=folder)
    assert not result.failed and "larger than all of Q in" in result.verdict.sentence


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rivals": ("Q", "V")}, "rivals: expected some of Q, O, W1, Wg, W2, N1, N2, got V"),
        ({"rivals": ()}, "rivals: expected some of .*, got none"),
        ({"models": ("mlp_digits",)}, "'mlp_digits' has neither Values nor Keys; expected names that begin with vit"),
        ({"models": ("vit_digit",)}, "no model 'vit_digit' to study; did you mean 'vit_digits'"),
        ({"points": (0.0, 2.0)}, r"points: expected fractions of the training, from 0 to 1, got \[0.0, 2.0\]"),
        ({"repeats": 1}, "repeats: expected 2 or more, for an interval, got 1"),
        ({"probes": 1}, "probes: expected 2 or more, for an interval, got 1"),
    ],
)
def test_what_cannot_be_compared_says_why(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        studies.run("dominance", replace(TINY, **changed), workers=0)
