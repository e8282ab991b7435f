"""The study of norms: exponents that must come out, dense oracles, and a verdict that can go either way."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import hessian, jacrev

from evolute import studies
from evolute.apps.captured import captured, tokens
from evolute.errors import StudyError
from evolute.studies import Row
from evolute.studies.layernorm import LayerNorm
from evolute.studies.layernorm.depth import entropy, initial, model_of, trainings
from evolute.studies.layernorm.rows import norm_options, one_block, one_row
from evolute.studies.layernorm.table import made
from evolute.studies.layernorm.verdict import judged
from evolute.zoo import Block, BlockConfig, digits
from evolute.zoo.seeding import drawn_from

SIGMAS = [1e-5, 1e-4, 0.1, 1.0, 10.0]


def tiny(**changed: Any) -> LayerNorm:
    sizes: dict[str, Any] = {"width": 4, "heads": 1, "samples": 2, "products": 8, "steps": 4, "batch": 8, "repeats": 2}
    few: dict[str, Any] = {"depths": (1, 2), "gains": (1.0,), "rates": (0.001, 0.01), "sigmas": tuple(SIGMAS)}
    return LayerNorm(**{**sizes, **few, **changed})


# ---- the law


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_exponents_of_one_row(norm: str) -> None:
    """An ε outside of the root, a curvature without its second line, 1/σ in place of 1/σ²: another integer each."""
    cells = [
        {"part": "row", "norm": norm, "seed": seed, "width": 6, "sigmas": SIGMAS, "eps": 1e-5} for seed in range(2)
    ]
    table = made([row for cell in cells for row in one_row(cell)], 1e-5)
    found = {(row["quantity"], row["range"]): row["exponent"] for row in table if row["part"] == "law"}
    expected = {("J", "above"): -1, ("outer", "above"): -2, ("functional", "above"): -2}
    expected |= {("J", "below"): 0, ("outer", "below"): 0, ("functional", "below"): 1}
    assert found == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("norm", "expected"), [("none", 0), ("post", -2), ("pre", -2), ("rms", -2)])
def test_a_block_with_a_norm_passes_on_one_over_the_variance(norm: str, expected: float) -> None:
    cells = [
        {"part": "block", "norm": norm, "seed": s, "width": 4, "heads": 1, "sigmas": [1e-4, 1e-3], "eps": 1e-14}
        for s in range(2)
    ]
    table = made([row for cell in cells for row in one_block(cell)], 1e-5)
    for row in table:
        assert row["exponent"] == pytest.approx(expected, abs=0.03) and row["theory"] == expected


def test_what_a_block_passes_on_is_its_dense_hessian() -> None:
    cell = {"part": "block", "norm": "post", "seed": 3, "width": 4, "heads": 1, "sigmas": [0.5], "eps": 1e-5}
    (row,) = one_block(cell)
    with drawn_from(3):
        block = Block(BlockConfig(4, 1, activation="gelu", eps=1e-5, **norm_options("post"))).double().eval()
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(2, 8, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        H = hessian(lambda x: nn.functional.mse_loss(block(x), y))(0.5 * x).view(64, 64)
        J = jacrev(block)(0.5 * x).view(64, 64)
    outer = J.mT @ J * 2 / 64
    assert row["H_o"] == pytest.approx(float(outer.norm())) and row["H_f"] == pytest.approx(float((H - outer).norm()))


def test_trained_rows_follow_the_law_within_their_image() -> None:
    config = tiny(norms=("pre",), width=8, samples=8)
    cell = next(c for c in studies.find("layernorm").cells(config) if c["part"] == "trained")
    rows = studies.find("layernorm").measure({**cell, "steps": 20})
    assert [row["place"] for row in rows][-1] == "norm"
    for row in rows:
        assert row["share"] == pytest.approx(-2, abs=0.4)
    last = rows[-1]  # the mean over tokens sends the same curvature to all of an image
    assert last["passed"] == pytest.approx(last["share"], abs=1e-9)


# ---- depth


def cell_of(**changed: Any) -> dict[str, Any]:
    shape = {"part": "initial", "gain": 1.0, "norm": "pre", "depth": 2, "seed": 0, "width": 4, "heads": 1}
    return {**shape, "samples": 3, "products": 8, **changed}


def test_gain_is_that_of_the_blocks_alone() -> None:
    plain, large = (model_of(cell_of(gain=gain), digits()) for gain in (1.0, 3.0))
    torch.testing.assert_close(large.layers[1].attn.q.weight, 3 * plain.layers[1].attn.q.weight)
    torch.testing.assert_close(large.head.weight, plain.head.weight)
    torch.testing.assert_close(large.layers[0].norm1.weight, plain.layers[0].norm1.weight)


def test_the_curvature_that_arrives_is_that_of_the_dense_matrix() -> None:
    """At the input of the second block, by an oracle that knows nothing of hooks: Jᵀ (diag p − ppᵀ) J."""
    cell, data = cell_of(), digits(seed=0)
    row = [row for row in initial(cell) if row["part"] == "profile"][1]
    model, x = model_of(cell, data).double(), data.train.first(3).x.double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (seen,) = captured(_objective(model, x), {"1": model.layers[1]})
        into = tokens(seen.inputs["1"])
        tail = lambda h: model.head(model.norm(model.layers[1](h[None])).mean(1))[0]  # noqa: E731
        traces = []
        for h in into:
            J, p = jacrev(tail)(h).flatten(1), tail(h).softmax(-1)
            traces.append((J.mT @ (torch.diag(p) - torch.outer(p, p)) @ J).trace())
    assert row["trace"] == pytest.approx(torch.stack(traces).mean().item(), rel=1e-9)
    assert row["variance"] == pytest.approx(float(into.var(-1, correction=0).mean()), rel=1e-9)


def test_sharpness_is_of_the_largest_size_whatever_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    nuclear = SimpleNamespace(estimate=20.0, standard_error=1.0)
    found = SimpleNamespace(largest=torch.tensor([2.0]), smallest=torch.tensor([-5.0]), nuclear=nuclear, n=10)
    monkeypatch.setattr("evolute.studies.layernorm.depth.spectrum", lambda *_, **__: found)
    row = next(initial(cell_of()))
    assert (row["sharpness"], row["lowest"], row["conditioning"]) == (5.0, -5.0, 2.5)


def _objective(model: nn.Module, x: torch.Tensor) -> Any:
    import evolute as ev
    from evolute.zoo import cross_entropy

    return ev.Objective(model, [(x, torch.zeros(len(x), dtype=torch.long))], ev.Loss(*cross_entropy))


def test_a_run_that_diverges_is_a_run_that_has_not_learnt() -> None:
    more = {"part": "training", "rates": [1e-3, 1e30], "optimizer": "sgd", "steps": 3, "batch": 4}
    fine, gone = trainings(cell_of(**more, norm="none"))
    assert fine["loss"] is not None and gone["loss"] is None and not gone["learnt"]
    assert fine["constant"] == pytest.approx(entropy(digits(seed=0).train.y)) == pytest.approx(2.302, abs=2e-3)


# ---- the verdict


def law(exponent: float, theory: float | None = -2.0) -> Row:
    start = {"part": "law", "source": "row", "norm": "layer", "quantity": "outer", "range": "above", "near": 0.1}
    return {**start, "exponent": exponent, "ci_low": exponent, "ci_high": exponent, "theory": theory}


def runs(gain: float, **learnt: int) -> list[Row]:
    start: Row = {"part": "training", "gain": gain, "depth": 12, "seeds": 3}
    return [{**start, "norm": norm, "learnt": count} for norm, count in learnt.items()]


@pytest.mark.parametrize(
    ("table", "answer"),
    [
        ([law(-2.0), *runs(1.0, none=0, post=1, pre=3)], "holds"),
        ([law(-2.0), *runs(1.0, none=3, post=3, pre=3)], "holds in part"),
        ([law(-2.0), *runs(1.0, none=0, pre=3), *runs(2.0, none=2, pre=3)], "holds in part"),
        ([law(-2.0), *runs(1.0, none=0, post=0, pre=2)], "holds in part"),
        ([law(-1.0), *runs(1.0, none=0, post=0, pre=3)], "does not hold here"),
        ([law(-2.0)], "undecided"),
        ([law(-2.0), *runs(1.0, pre=3, rms=3)], "undecided"),
        ([law(-2.0, None), *runs(1.0, none=0, pre=3)], "undecided"),
        ([], "undecided"),
    ],
)
def test_the_verdict_follows_from_the_table(table: list[Row], answer: str) -> None:
    assert judged(table).answer == answer


# ---- all of it


def test_a_tiny_run_and_its_figure_from_the_saved_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evolute.studies.layernorm.TRAINED_STEPS", 5)
    result = studies.run("layernorm", tiny(norms=("none", "rms")), workers=0, out=tmp_path)
    assert not result.failed
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    picture = studies.find("layernorm").figure(again.rows, again.settings)
    assert len(picture.axes) == 4
    assert studies.run("layernorm", tiny(norms=("none", "rms")), workers=0, out=tmp_path).rows == again.rows


@pytest.mark.parametrize("parts", [("training",), ("law",)])
def test_a_model_without_norms_or_without_depths_is_drawn_too(parts: tuple[str, ...], tmp_path: Path) -> None:
    study, row = studies.find("layernorm"), {**runs(1.0, none=1)[0], "constant": 2.3, "loss": 2.0}
    table = [{**row, "ci_low": 1.9, "ci_high": 2.1}] if "training" in parts else [law(-2.0)]
    study.figure(table, asdict(tiny())).savefig(tmp_path / "none.png")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("norms=pre,pots", "norms: expected some of none, post, pre, rms, got pots."),
        ("norms=", "got none of them"),
        ("depths=0", "depths: expected positive numbers"),
        ("sigmas=-1,2", "sigmas: expected positive numbers"),
        ("repeats=1", "repeats: an interval takes two or more, got 1"),
        ("optimizer=adma", "optimizer: expected one of sgd, momentum, adam, adamw, got 'adma'"),
    ],
)
def test_bad_settings_are_named(setting: str, message: str) -> None:
    with pytest.raises(StudyError, match=message):
        studies.configured(LayerNorm, [setting])
