"""The page: what is measured is true, what is said follows from it, and what is written is whole."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import evolute as ev
from evolute import zoo
from evolute.errors import MissingExtraError, ReportError
from evolute.report import Analysis, analyse, summary, write
from evolute.report.adaptive import jackknife, without_each
from evolute.report.advice import RULES, advice
from evolute.report.analysis import Adaptive, Blocks, Density, Eigenvalues, Estimate, Matrix, Spectrum, Training
from evolute.report.derived import by_kind, by_layer, limit_of_training, limits, parting, per_parameter, spread, verdict
from evolute.report.figures import FIGURES
from evolute.report.figures.style import bytes_of, inline
from evolute.report.low_rank import LowRank, inner
from evolute.report.merging import merged
from evolute.report.page import page
from evolute.report.samples import batchwise
from evolute.report.words import QUESTIONS, lead
from evolute.studies import all_names, find

TRAINED = {"optimizer": "adamw", "lr": 0.003, "batch": 2, "steps": 3, "losses": [2.5, 2.4, 2.3]}


def tiny() -> ev.Objective:
    data = zoo.addition(train=16, test=1, digits=1)
    model = zoo.GPT(data.vocabulary, data.length, width=4, heads=2, layers=2, seed=0).double()
    return ev.Objective(model, data.batches(2), ev.Loss(*zoo.cross_entropy))


@pytest.fixture(scope="module")
def objective() -> ev.Objective:
    return tiny()


@pytest.fixture(scope="module")
def analysis(objective: ev.Objective) -> Analysis:
    return analyse(objective, name="Tiny <GPT> & co", training=TRAINED, progress=False)


@pytest.fixture(scope="module")
def dense(objective: ev.Objective) -> dict[str, torch.Tensor]:
    H, G = ev.to_dense(ev.Hessian(objective)), ev.to_dense(ev.GaussNewton(objective))
    return {"H": H, "G": G, "F": H - G}


@pytest.fixture(scope="module")
def html(analysis: Analysis) -> str:
    return page([analysis])


# ---------------------------------------------------------------- what is measured


def test_both_ends_are_those_of_the_matrix(analysis: Analysis, dense: dict[str, torch.Tensor]) -> None:
    values = torch.linalg.eigvalsh(dense["H"])
    assert analysis.sharpness is not None and analysis.sharpness.smallest is not None
    assert analysis.sharpness.largest.values[0] == pytest.approx(float(values[-1]), rel=1e-3)
    assert analysis.sharpness.smallest.values[0] == pytest.approx(float(values[0]), rel=1e-3)
    assert analysis.sharpness.outer is not None
    assert analysis.sharpness.outer.values[0] == pytest.approx(float(torch.linalg.eigvalsh(dense["G"])[-1]), rel=1e-3)


def _true_norms(objective: ev.Objective, matrix: torch.Tensor) -> torch.Tensor:
    space = objective.space
    places = [space.resolve(parts).take(torch.arange(float(space.size))).long() for parts in space.groups.values()]
    return torch.stack([torch.stack([matrix[i][:, j].norm() for j in places]) for i in places])


@pytest.mark.parametrize("name", ["H", "G", "F"])
def test_block_norms_are_those_of_the_matrix(
    name: str, analysis: Analysis, objective: ev.Objective, dense: dict[str, torch.Tensor]
) -> None:
    assert analysis.blocks is not None
    found, truth = analysis.blocks[name], _true_norms(objective, dense[name])
    gap = (torch.tensor(found.norms) - truth).abs()
    assert float((gap / (torch.tensor(found.errors) + 1e-3 * truth.max())).median()) < 1.5
    assert found.square.value == pytest.approx(float(dense[name].square().sum()), abs=6 * found.square.error)
    assert found.trace.value == pytest.approx(float(dense[name].trace()), abs=6 * found.trace.error + 1e-9)


def test_inner_product_and_angle(analysis: Analysis, dense: dict[str, torch.Tensor]) -> None:
    assert analysis.blocks is not None
    found, truth = analysis.blocks.inner, float((dense["H"] * dense["G"]).sum())
    assert found.value == pytest.approx(truth, abs=6 * found.error + 1e-9)
    assert -1 <= parting(analysis.blocks).cosine.value <= 1


def test_block_probes_are_unbiased_for_any_low_rank_part() -> None:
    """E over all ±1 probes, in full, of what lies beyond L, and L itself: the true squares."""
    A, U, s = torch.randn(5, 5).double(), torch.randn(5, 2).double(), torch.randn(2).double()
    groups = (torch.tensor([0, 3]), torch.tensor([1, 2, 4]))
    L = LowRank(U, s, groups)
    for j, columns in enumerate(groups):
        V = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * len(columns))
        beyond = torch.stack([(V @ A[rows][:, columns].T).square().sum(-1) for rows in groups], -1)
        found = (beyond - L.row_squares(L.coefficients(V, j))).mean(0) + L.squares()[:, j]
        torch.testing.assert_close(found, torch.stack([A[rows][:, columns].square().sum() for rows in groups]))


def test_low_rank_part_is_what_it_says() -> None:
    U, s, W, t = (
        torch.randn(6, 2).double(),
        torch.randn(2).double(),
        torch.randn(6, 3).double(),
        torch.randn(3).double(),
    )
    groups = (torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5]))
    L, M = LowRank(U, s, groups), LowRank(W, t, groups)
    A, B = U @ s.diag() @ U.T, W @ t.diag() @ W.T
    torch.testing.assert_close(L.squares()[0, 1], A[:2, 2:].square().sum())
    torch.testing.assert_close(L.traces(), torch.stack([A[:2, :2].trace(), A[2:, 2:].trace()]))
    torch.testing.assert_close(inner(L, M), torch.stack([(A * B)[:, :2].sum(), (A * B)[:, 2:].sum()]))


def test_gradient_and_batches(analysis: Analysis, objective: ev.Objective) -> None:
    assert analysis.point.loss == pytest.approx(objective.value())
    assert analysis.point.gradient.value == pytest.approx(float(objective.gradient().norm()), rel=1e-6)
    assert analysis.point.gradient.error > 0
    assert analysis.sharpness is not None and analysis.sharpness.data is not None


def test_adam_limit_is_of_the_preconditioned_matrix(
    analysis: Analysis, objective: ev.Objective, dense: dict[str, torch.Tensor]
) -> None:
    """P = √v + ε, v = ḡ² + Var/b from batches of the size that training had."""
    found = analysis.adaptive
    each = []
    for batch in objective.batches.source:
        one = ev.Objective(objective.model, [batch], objective.loss)
        each.append(one.gradient())
    assert len(each) == 8
    v = objective.gradient().square() + torch.stack(each).var(0)
    scale = (v.sqrt() + 1e-8).rsqrt()
    truth = torch.linalg.eigvalsh(scale[:, None] * dense["H"] * scale)[-1]
    assert found is not None and found.top == pytest.approx(float(truth), rel=1e-2)


def _adam(objective: ev.Objective, batches: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """H and P of some batches, by the definition."""
    some = ev.Objective(objective.model, batches, objective.loss)
    each = torch.stack([ev.Objective(objective.model, [batch], objective.loss).gradient() for batch in batches])
    return ev.to_dense(ev.Hessian(some)), (some.gradient().square() + each.var(0)).sqrt() + 1e-8


def test_adam_limit_has_the_error_of_leaving_out_each_batch(analysis: Analysis, objective: ev.Objective) -> None:
    batches, x = list(objective.batches.source), torch.randn(objective.space.size, dtype=torch.float64)
    parts = [_adam(objective, batches[:i] + batches[i + 1 :]) for i in range(8)]
    direct = torch.stack([(x @ H @ x) / (x.square() * P).sum() for H, P in parts])
    found = without_each(objective, batchwise(objective, x / x.norm()), x, 2.0)
    torch.testing.assert_close(found, direct)
    tops = torch.stack([torch.linalg.eigvalsh(H / P.sqrt() / P.sqrt()[:, None])[-1] for H, P in parts])
    assert analysis.adaptive is not None
    assert analysis.adaptive.data == pytest.approx(jackknife(tops), rel=0.4), "to first order in x"
    assert limits(analysis)[2].step.error / limits(analysis)[2].step.value == pytest.approx(
        analysis.adaptive.data / analysis.adaptive.top
    )


def test_the_same_seed_gives_the_same_analysis_and_nothing_is_changed(
    objective: ev.Objective, analysis: Analysis
) -> None:
    before = {name: tensor.clone() for name, tensor in objective.model.state_dict().items()}
    state = torch.get_rng_state()
    again = analyse(objective, name=analysis.name, training=TRAINED, progress=False)
    strip = {"costs": (), "provenance": analysis.provenance}
    assert dataclasses.replace(again, **strip) == dataclasses.replace(analysis, **strip)
    assert all(torch.equal(tensor, before[name]) for name, tensor in objective.model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in objective.model.parameters())


def test_a_budget_that_is_spent_is_told(objective: ev.Objective) -> None:
    found = analyse(objective, name="x", budget=1e-3, progress=False)
    assert found.sharpness is None and found.blocks is None
    assert any("no time" in note for note in found.notes)
    text = page([found])
    assert "This was not measured" in text and "not everything was finished" in text


def test_a_small_budget_measures_less(objective: ev.Objective) -> None:
    found = analyse(objective, name="x", budget=30.0, progress=False)
    assert found.provenance.seconds < 40


def test_interrupted(objective: ev.Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("evolute.report.measure.probe", stop)
    found = analyse(objective, name="x", progress=False)
    assert found.sharpness is not None and found.spectrum is not None and found.blocks is None
    assert any("was stopped" in note for note in found.notes)
    assert "was stopped" in page([found])


def test_a_model_without_layers() -> None:
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    model = zoo.MLP([4, 5, 3], seed=0)
    found = analyse(ev.Objective(model, [(x, y)], torch.nn.CrossEntropyLoss()), name="MLP", progress=False)
    assert found.adaptive is None  # one batch says nothing about how batches differ
    assert "Embedding" not in page([found])


def test_a_hessian_of_zeros_is_refused() -> None:
    model = torch.nn.Linear(3, 1)
    batches = [(torch.randn(4, 3), None) for _ in range(2)]
    linear = ev.Loss(lambda model, batch: model(batch[0]), lambda output, batch: (output.sum(), len(output)))
    with pytest.raises(ReportError, match="the Hessian is zero here"):
        analyse(ev.Objective(model, batches, linear), name="x", progress=False)


# ---------------------------------------------------------------- what follows


def test_shares_sum_to_one(analysis: Analysis) -> None:
    assert analysis.blocks is not None
    for found in (by_kind(analysis.blocks), by_layer(analysis.blocks)):
        for name in ("of_H", "of_G", "of_F"):
            assert sum(getattr(share, name).value for share in found) == pytest.approx(1)
        assert sum(share.of_parameters for share in found) == pytest.approx(1)


def test_kinds_and_places(analysis: Analysis) -> None:
    assert analysis.blocks is not None
    kinds = {share.name for share in by_kind(analysis.blocks)}
    assert kinds == {"Q", "K", "V", "O", "W₁", "W₂", "Norms", "Embeddings", "Unembedding"}
    assert [share.name for share in by_layer(analysis.blocks)] == ["Embedding", "Layer 0", "Layer 1", "Head"]


def test_merged_groups_keep_the_whole(analysis: Analysis) -> None:
    assert analysis.blocks is not None
    fewer = merged(analysis.blocks, 12)
    assert 1 < len(fewer.groups) <= 12 and sum(fewer.sizes) == sum(analysis.blocks.sizes)
    whole = [sum(x * x for row in blocks.H.norms for x in row) for blocks in (analysis.blocks, fewer)]
    assert whole[0] == pytest.approx(whole[1])


def test_limits(analysis: Analysis) -> None:
    assert analysis.sharpness is not None
    top = analysis.sharpness.largest.values[0]
    descent, heavy, adam = limits(analysis)
    assert descent.step.value == pytest.approx(2 / top)
    assert heavy.step.value == pytest.approx(3.8 / top)
    assert analysis.adaptive is not None and adam.step.value == pytest.approx(38 / analysis.adaptive.top)
    assert limit_of_training(analysis) == adam


# ---------------------------------------------------------------- constructed analyses


def blocks_of(norms: tuple[tuple[float, ...], ...], *, functional: float = 0.0, error: float = 0.0) -> Blocks:
    """Groups of 10 parameters each; F is so much of H in length, at a right angle."""
    count = len(norms)
    names = tuple(f"layers.{i}.mlp.up" for i in range(count))

    def matrix(scale: float) -> Matrix:
        scaled = tuple(tuple(scale * x for x in row) for row in norms)
        errors = tuple(tuple(error * x for x in row) for row in scaled)
        columns = tuple(Estimate(sum(row[j] ** 2 for row in scaled)) for j in range(count))
        square = sum(column.value for column in columns)
        return Matrix(scaled, errors, columns, Estimate(square, 2 * error * square), Estimate(1.0))

    H, G = matrix(1.0), matrix((1 - functional**2) ** 0.5)
    return Blocks(names, (10,) * count, H, G, matrix(functional), Estimate(G.square.value), 4)


def constructed(analysis: Analysis, **changes: Any) -> Analysis:
    """A calm one, with changes: a minimum, well conditioned, layers alike, a quarter of H functional, a small step."""
    assert analysis.sharpness is not None
    ends = dataclasses.replace(
        analysis.sharpness,
        largest=Eigenvalues((2.0, 1.5), (0.0, 0.0), True),
        smallest=Eigenvalues((0.5, 0.6), (0.0, 0.0), True),
        data=0.0,
    )
    line = (0.0, 1.0)
    calm = Spectrum(
        Density(line, line, line, line), *[Estimate(1.0)] * 2, Estimate(0.0), Estimate(3.0), 4.0, "all", 4, 10
    )
    same = ((1.0, 0.1), (0.1, 1.0))
    base: dict[str, Any] = {
        "sharpness": ends,
        "spectrum": calm,
        "blocks": blocks_of(same, functional=0.25),
        "training": Training("sgd", 0.1),
    }
    return dataclasses.replace(analysis, **(base | changes))


def with_ends(analysis: Analysis, low: float, residual: float = 0.0) -> Any:
    sharpness = constructed(analysis).sharpness
    assert sharpness is not None
    return dataclasses.replace(sharpness, smallest=Eigenvalues((low,), (residual,), True))


def with_spectrum(analysis: Analysis, **changes: Any) -> Any:
    spectrum = constructed(analysis).spectrum
    assert spectrum is not None
    return dataclasses.replace(spectrum, **changes)


NEGATIVE = Estimate(0.2, 0.01)
GROWING, FADING = ((1.0, 0.1), (0.1, 9.0)), ((9.0, 0.1), (0.1, 1.0))
CASES: dict[str, Callable[[Analysis], dict[str, Any]]] = {
    "step_too_large": lambda a: {"training": Training("sgd", 3.0)},
    "negative_curvature": lambda a: {
        "sharpness": with_ends(a, -1.0),
        "spectrum": with_spectrum(a, negative=NEGATIVE),
    },
    "ill_conditioned": lambda a: {"spectrum": with_spectrum(a, condition=1e5)},
    "gauss_newton_misses": lambda a: {"blocks": blocks_of(((1.0, 0.1), (0.1, 1.0)), functional=0.5)},
    "gauss_newton_serves": lambda a: {"blocks": blocks_of(((1.0, 0.1), (0.1, 1.0)), functional=0.05)},
    "unlike_layers": lambda a: {"blocks": blocks_of(FADING, functional=0.25)},
}


def rules_of(analysis: Analysis) -> list[str]:
    return [rule.__name__ for rule in RULES if rule(analysis) is not None]


def test_where_all_is_calm_nothing_is_recommended(analysis: Analysis) -> None:
    assert rules_of(constructed(analysis)) == []
    assert "Nothing that was measured calls for a change" in page([constructed(analysis)])


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_speaks_where_its_measurement_says_so(rule: str, analysis: Analysis) -> None:
    found = constructed(analysis, **CASES[rule](analysis))
    assert rules_of(found) == [rule]
    assert all(each.because and each.text for each in advice(found))


def test_a_schedule_that_falls_is_not_asked_for(analysis: Analysis) -> None:
    told = [Training("sgd", 3.0), Training("sgd", 3.0, "warmup_cosine")]
    constant, falling = (advice(constructed(analysis, training=each))[0] for each in told)
    assert constant.title.startswith("Lower the learning rate below about 1.0 ")
    assert falling.title.startswith("Let the learning rate fall below about 1.0 ")
    assert "as warmup_cosine did here" in falling.text and "did here" not in constant.text


@pytest.mark.parametrize(("lr", "told"), [(3.0, "above the 1.00"), (0.1, "below the 1.00"), (1.2, "told apart from")])
def test_the_lead_says_above_or_below_only_if_it_is_known(lr: float, told: str, analysis: Analysis) -> None:
    sharpness = dataclasses.replace(with_ends(analysis, 0.5), data=0.2)
    assert told in lead(constructed(analysis, sharpness=sharpness, training=Training("sgd", lr)))


def test_growth_with_depth_is_also_a_spread(analysis: Analysis) -> None:
    found = constructed(analysis, blocks=blocks_of(GROWING, functional=0.25))
    assert rules_of(found) == ["unlike_layers", "grows_with_depth"]


UNSURE: dict[str, Callable[[Analysis], dict[str, Any]]] = {
    "residual": lambda a: {"sharpness": with_ends(a, -1.0, 1.5), "spectrum": with_spectrum(a, negative=NEGATIVE)},
    "negative": lambda a: {
        "sharpness": with_ends(a, -1.0),
        "spectrum": with_spectrum(a, negative=Estimate(0.05, 0.02)),
    },
    "data": lambda a: {
        "sharpness": dataclasses.replace(with_ends(a, 0.5), data=1.0),
        "training": Training("sgd", 1.5),
    },
    "data, as Adam sees it": lambda a: {
        "adaptive": Adaptive(100.0, 0.0, 20.0, 2.0, 8, True),
        "training": Training("adamw", 0.6),
    },
    "layers": lambda a: {"blocks": blocks_of(((3.5, 0.1), (0.1, 1.0)), functional=0.25, error=0.2)},
    "unknown condition": lambda a: {"spectrum": with_spectrum(a, condition=None)},
    "nothing": lambda a: {"sharpness": None, "spectrum": None, "blocks": None, "training": None},
}


@pytest.mark.parametrize("why", UNSURE)
def test_no_rule_speaks_beyond_its_error(why: str, analysis: Analysis) -> None:
    found = constructed(analysis, **UNSURE[why](analysis))
    assert rules_of(found) == []


def test_every_rule_has_a_case() -> None:
    assert {rule.__name__ for rule in RULES} == {*CASES, "grows_with_depth"}


@pytest.mark.parametrize(
    ("low", "residual", "kind"), [(-1.0, 0.1, "saddle"), (0.5, 0.1, "minimum"), (0.0, 0.1, "flat")]
)
def test_minimum_or_saddle(low: float, residual: float, kind: str, analysis: Analysis) -> None:
    found = constructed(analysis, sharpness=with_ends(analysis, low, residual))
    assert verdict(found) == kind
    words = {"saddle": "Not a minimum", "minimum": "A minimum", "flat": "floor of a valley"}[kind]
    assert words in QUESTIONS[1].answer(found)


def test_what_curves_down_a_little_is_told(analysis: Analysis) -> None:
    found = constructed(analysis, sharpness=with_ends(analysis, -0.001, 1e-5))
    assert verdict(found) == "flat"
    assert "with −0.00100 at the most, 0.05\xa0% of the sharpest upward curvature" in QUESTIONS[1].answer(found)


def test_layers_that_are_alike_do_not_grow(analysis: Analysis) -> None:
    found = constructed(analysis, blocks=blocks_of(((1.0, 0.1), (0.1, 1.04)), functional=0.25))
    assert QUESTIONS[4].answer(found) == "Curvature is about the same in the first layer and in the last."


def test_spread_is_of_typical_entries() -> None:
    blocks = blocks_of(((8.0, 1.0), (1.0, 2.0)))
    assert [e.value for e in per_parameter(blocks, "H")] == [0.8, 0.2]
    found = spread(blocks)
    assert found is not None and found.ratio.value == pytest.approx(4) and found.variation == pytest.approx(0.6)


# ---------------------------------------------------------------- files


def test_what_is_saved_comes_back(analysis: Analysis, tmp_path: Path) -> None:
    path = analysis.save(tmp_path / "new")
    assert Analysis.load(path) == Analysis.load(path.parent) == analysis
    assert json.loads(path.read_text(encoding="utf-8"))["version"] == 2
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_figures_from_the_file_are_identical(analysis: Analysis, html: str, tmp_path: Path) -> None:
    again = Analysis.load(analysis.save(tmp_path))
    for drawing in FIGURES:
        assert bytes_of(drawing.figure([analysis]), "svg") == bytes_of(drawing.figure([again]), "svg"), drawing.name
    assert page([again]) == html


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "foreign": (lambda d: {"something": "else"}, "is no report of evolute"),
    "a list": (lambda d: [1, 2], "is no report of evolute"),
    "version": (lambda d: d | {"version": 99}, "version 99"),
    "field missing": (lambda d: d | {"analysis": {}}, "should have the fields"),
    "wrong type": (lambda d: d | {"analysis": d["analysis"] | {"name": 3}}, "analysis.name should be a str"),
    "not finite": (
        lambda d: d | {"analysis": d["analysis"] | {"point": d["analysis"]["point"] | {"loss": 1e999}}},
        "analysis.point.loss is not finite",
    ),
    "no array": (lambda d: d | {"analysis": d["analysis"] | {"notes": "x"}}, "analysis.notes should be an array"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_foreign_or_damaged_file_is_refused(damage: str, analysis: Analysis, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    path = analysis.save(tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    with pytest.raises(ReportError, match=re.escape(message)):
        Analysis.load(path)


def test_a_file_that_is_cut_or_not_there_is_refused(analysis: Analysis, tmp_path: Path) -> None:
    path = analysis.save(tmp_path)
    path.write_text(path.read_text(encoding="utf-8")[:100], encoding="utf-8")
    with pytest.raises(ReportError, match="damaged"):
        Analysis.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportError, match="damaged"):
        Analysis.load(path)
    with pytest.raises(ReportError, match="cannot read"):
        Analysis.load(tmp_path / "nowhere" / "report.json")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without drawing them."""
    made = {"report.html": b"page", "figures/a.svg": b"figure", "report.json": b"{}"}
    monkeypatch.setattr("evolute.report.writing._made", lambda runs, formats: dict(made))


def test_everything_is_written(analysis: Analysis, tmp_path: Path) -> None:
    html = write(analysis, tmp_path / "out", formats=("svg", "png", "pdf"))
    names = {str(file.relative_to(html.parent)) for file in html.parent.rglob("*") if file.is_file()}
    figures = {f"figures/{drawing.name}.{kind}" for drawing in FIGURES for kind in ("svg", "png", "pdf")}
    assert names == {"report.html", "report.json"} | figures


@pytest.mark.usefixtures("quick")
def test_output_that_is_there_is_kept(analysis: Analysis, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine", encoding="utf-8")
    with pytest.raises(ReportError, match=r"is there already; nothing was written.*--overwrite"):
        write(analysis, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == "mine"
    assert write(analysis, tmp_path, overwrite=True).read_bytes() == b"page"


@pytest.mark.usefixtures("quick")
def test_the_same_again_is_no_conflict(analysis: Analysis, tmp_path: Path) -> None:
    assert write(analysis, tmp_path) == write(analysis, tmp_path)


@pytest.mark.usefixtures("quick")
def test_a_folder_that_is_a_file(analysis: Analysis, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    with pytest.raises(ReportError, match="is a file"):
        write(analysis, tmp_path / "out")


@pytest.mark.parametrize("reason", ["No space left on device", "Read-only file system"])
@pytest.mark.usefixtures("quick")
def test_nothing_half_written_stays(
    reason: str, analysis: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.suffix == ".json":
            raise OSError(28, reason)
        return writing(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ReportError, match=reason):
        write(analysis, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_a_closed_folder(analysis: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", closed)
    monkeypatch.setattr("tempfile.mkstemp", closed)
    with pytest.raises(ReportError, match="Permission denied"):
        write(analysis, tmp_path)
    with pytest.raises(ReportError, match="Permission denied"):
        analysis.save(tmp_path)


@pytest.mark.bad_input
def test_nonsense_is_refused(objective: ev.Objective, analysis: Analysis, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="formats: expected any of svg, png, pdf, got 'gif'"):
        write(analysis, tmp_path, formats=("gif",))
    with pytest.raises(ReportError, match="at least one"):
        write([], tmp_path)
    with pytest.raises(ReportError, match="budget"):
        analyse(objective, name="x", budget=0)
    with pytest.raises(ReportError, match="about: no field 'modle'"):
        analyse(objective, name="x", about={"modle": "y"})
    with pytest.raises(ReportError, match="training: no field 'rate'"):
        analyse(objective, name="x", training={"rate": 1})


def test_without_the_extra_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['matplotlib'] = None\nfrom evolute import report\nimport evolute.report.figures"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert MissingExtraError.__name__ in done.stderr and "pip install 'evolute[report]'" in done.stderr


# ---------------------------------------------------------------- the page

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Checks that every tag is closed, and collects what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_tags_are_balanced_and_ids_are_unique(html: str) -> None:
    ids = [attrs["id"] for _, attrs in Reader(html).tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    targets = re.findall(r'(?:url\(#|href="#)([^)"]+)', html)
    assert set(targets) <= set(ids)


def test_nothing_is_fetched(html: str) -> None:
    assert (
        "http:" not in html and "https:" not in html and "//" not in re.sub(r"<style>.*?</style>", "", html, flags=re.S)
    )
    for tag, attrs in Reader(html).tags:
        assert "src" not in attrs
        assert tag != "link" or attrs["href"] == "data:,"


def test_questions_come_in_order(html: str) -> None:
    asked = [*(question.asked for question in QUESTIONS), "What follows from this?", "How sure is all this?"]
    places = [html.index(each) for each in asked]
    assert places == sorted(places) and len(asked) == 8


def test_each_figure_has_words_and_a_table(html: str) -> None:
    tags = Reader(html).tags
    tables = sum(tag == "details" and attrs.get("class") != "studies" for tag, attrs in tags)
    assert sum(tag == "figure" for tag, _ in tags) == tables == len(FIGURES)
    labels = [attrs["aria-label"] or "" for tag, attrs in tags if attrs.get("role") == "img"]
    assert len(labels) == 2 * len(FIGURES) and all(len(label) > 30 for label in labels)


def test_names_are_escaped(html: str) -> None:
    assert "Tiny &lt;GPT&gt; &amp; co" in html and "<GPT>" not in html


def test_landmarks_and_headings(html: str) -> None:
    tags = [tag for tag, _ in Reader(html).tags]
    assert [tags.count(tag) for tag in ("h1", "main", "nav", "header", "footer")] == [1] * 5
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h\d", tag)]
    assert all(below - above <= 1 for above, below in itertools.pairwise(levels))
    assert 'class="skip" href="#main"' in html and '<html lang="en">' in html


def test_colours_of_figures_follow_the_theme(analysis: Analysis) -> None:
    for drawing in FIGURES:
        left = set(re.findall(r"#[0-9a-f]{6}\b", inline(drawing.figure([analysis]), "x")))
        assert not left, f"{drawing.name}: {left} do not change with the theme"


def test_runs_side_by_side(analysis: Analysis, tmp_path: Path) -> None:
    other = dataclasses.replace(analysis, name="Other")
    html = write([analysis, other], tmp_path, formats=())
    text = html.read_text(encoding="utf-8")
    Reader(text)
    assert "Side by side" in text and text.count("Other") > 10
    assert (tmp_path / "report-1-tiny-gpt-co.json").is_file() and (tmp_path / "report-2-other.json").is_file()


def test_runs_of_which_one_is_not_finished(analysis: Analysis) -> None:
    bare = dataclasses.replace(analysis, name="Bare", sharpness=None, spectrum=None, blocks=None, adaptive=None)
    Reader(page([bare, analysis]))
    Reader(page([analysis, bare]))


def test_summary(analysis: Analysis) -> None:
    lines = summary(analysis).splitlines()
    assert 8 <= len(lines) <= 12 and lines[0].startswith(analysis.name)


# ---------------------------------------------------------------- in a browser

PROBE = """<!doctype html><title>probe</title><body style="margin:0"><pre id="out">not run</pre>
<iframe id="page" style="width:{width}px;height:4000px;border:0"></iframe><script>
const errors = [], frame = document.getElementById("page");
const report = () => {{
  const inside = frame.contentDocument;
  const shown = [...inside.querySelectorAll("figure")].map((figure) => {{
    const seen = [...figure.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().width > 0);
    const box = seen.length === 1 ? seen[0].getBoundingClientRect() : {{ width: 0, height: 0 }};
    return [figure.id, seen.length, Math.round(box.width), Math.round(box.height)];
  }});
  const overflow = inside.documentElement.scrollWidth - inside.documentElement.clientWidth;
  const dark = inside.getElementById("theme");
  dark.click();
  const theme = inside.documentElement.dataset.theme;
  document.getElementById("out").textContent = JSON.stringify({{ errors, shown, overflow, theme }});
}};
frame.onload = () => setTimeout(report, 300);
frame.src = "report.html";
addEventListener("load", () => {{ frame.contentWindow.onerror = (message) => {{ errors.push(String(message)); }}; }});
</script>"""


def chromium() -> str:
    from shutil import which

    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := which(name))), None)
    assert found, "no Chromium on this machine; `make slow` installs it"
    return found


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("several", [False, True])
def test_every_figure_is_visible_and_nothing_fails(
    width: int, several: bool, analysis: Analysis, tmp_path: Path
) -> None:
    runs = [analysis, dataclasses.replace(analysis, name="Other")] if several else [analysis]
    write(runs, tmp_path, formats=())
    (tmp_path / "probe.html").write_text(PROBE.format(width=width), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --allow-file-access-from-files --enable-logging=stderr --v=0"
    command = [chromium(), *flags.split(), "--virtual-time-budget=8000", f"--user-data-dir={tmp_path / 'profile'}"]
    address = (tmp_path / "probe.html").as_uri()
    done = subprocess.run(
        [*command, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True, env={**os.environ}
    )
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    match = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None
    told = json.loads(match[1].replace("&amp;", "&"))
    assert told["errors"] == [] and told["overflow"] == 0 and told["theme"] == "dark"
    assert len(told["shown"]) == len(FIGURES)
    for name, count, wide, high in told["shown"]:
        assert count == 1 and wide > 0.8 * min(width, 900) and high > 60, name


def test_each_question_names_the_studies_that_go_deeper(html: str) -> None:
    named = [name for question in QUESTIONS for name in question.studies]
    assert len(named) >= len(QUESTIONS) and set(named) <= set(all_names())
    for name in named:
        assert f"<code>evolute study {name}</code>" in html
        assert find(name).claim.split()[0] in html
