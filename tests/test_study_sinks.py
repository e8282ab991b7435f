"""Sinks: the formula against another Hessian, rates that theory knows, and what is told of a GPT and a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evolute import studies
from evolute.errors import StudyError
from evolute.studies.first_token import attentions, shares, weights, with_sink
from evolute.studies.sinks import Sinks
from evolute.studies.sinks import gpt as sinks_gpt
from evolute.studies.sinks import scalar as sinks_scalar
from evolute.studies.sinks.scalar import Task, draw, measured, numerical, trained
from evolute.studies.sinks.table import summary
from evolute.studies.sinks.verdict import judge
from evolute.zoo import GPT

TINY: dict[str, Any] = {
    "draws": 2,
    "repeats": 2,
    "sinks": (0.0, 8.0, 10.0),
    "firsts": (2.0,),
    "iterations": 40,
    "d_K": 3,
    "L": 5,
    "sequences": 4,
    "norms": (1.0, 64.0, 128.0),
    "width": 4,
    "layers": 1,
    "steps": 5,
    "samples": 2,
    "probes": 2,
    "lanczos": 16,
}


def plain_loss(w: Tensor, task: Task, sink: float) -> Tensor:
    """Written down once more, in loops."""
    d, total = len(task.q), 0.0
    for x, y in zip(task.x, task.y, strict=True):
        for i in range(len(x)):
            scores = [x[i] * x[j] * (w[:d] @ w[d:-1]) / d**0.5 + (sink if j == 0 else 0.0) for j in range(len(x))]
            A = torch.softmax(torch.stack(scores), 0)
            total = total + (w[-1] * (A @ x) - y[i]) ** 2
    return total / task.x.numel()


@pytest.mark.parametrize("sink", [0.0, 3.0])
def test_the_numerical_spectrum_is_that_of_another_hessian(sink: float) -> None:
    """A sink on the wrong token, or weights in another order, would show here."""
    task = draw(1, 2.0, 3, 4, 2)
    w = torch.cat([task.q, task.k, task.q.new_tensor([task.v])])
    gradient, H = numerical(task, sink)
    assert torch.allclose(H, torch.func.hessian(plain_loss)(w, task, sink), atol=1e-12)
    assert torch.allclose(gradient, torch.func.grad(plain_loss)(w, task, sink), atol=1e-12)
    found = measured(task, sink)
    assert found["error"] is not None and found["error"] < 1e-12
    assert found["slope"] == pytest.approx(found["bulk"], rel=1e-9)


def test_a_strong_sink_has_the_rate_and_the_end_of_the_theory() -> None:
    task = draw(3, 0.7, 4, 6, 5)
    near, far = (measured(task, sink) for sink in (14.0, 16.0))
    assert far["bulk"] / near["bulk"] == pytest.approx(torch.e**-2, rel=1e-3)
    assert far["top"] == pytest.approx(2 * 0.7**2, rel=1e-4)
    assert far["attention"] == pytest.approx(1, abs=1e-4)


def test_outliers_have_a_product_that_no_norm_changes() -> None:
    """−ℓ_s (ℓ_s ℓ_vv + 2 s (ℓ_ss ℓ_vv − ℓ_vs²)), which is why the condition number goes as ‖w‖⁴."""
    cell = {"kind": "norms", "first": 1.0, "seed": 0, "d_K": 4, "L": 6, "sequences": 4, "norms": [32.0, 64.0]}
    rows = [row for row in sinks_scalar.measure_norms(cell) if row["way"] == "product"]
    assert rows[1]["condition"] / rows[0]["condition"] == pytest.approx(16, rel=0.05)
    for size in (1.0, 8.0):
        q, k = sinks_scalar._same_product(torch.eye(4, dtype=torch.float64), size)
        assert (float(q @ k), float(q.norm()), float(k.norm())) == pytest.approx((0.5, size, size))
    for scale in (1.0, 3.0):
        task = draw(0, 1.0, 4, 6, 4)
        point = Task(scale * task.q, task.k / scale, task.v, task.x, task.y).closed(0.0)
        d, s = point.total, float(task.q @ task.k)
        product = -d.s * (d.s * d.vv + 2 * s * (d.ss * d.vv - d.vs**2))
        assert float(point.spectrum.outliers.prod()) == pytest.approx(product, rel=1e-9)


def test_at_a_minimum_there_is_no_bulk() -> None:
    task = draw(0, 1.0, 4, 6, 4)
    there = measured(trained(task, 2.0, 500), 2.0)
    assert there["loss"] < measured(task, 2.0)["loss"]
    assert there["bulk"] < 1e-8 * there["top"] and there["condition"] is None


# ---- attention to the first token


def model(**options: Any) -> GPT:
    return GPT(12, 6, 8, 2, 2, seed=0, **options).double()


@pytest.mark.parametrize("causal", [True, False])
def test_weights_of_attention_are_those_of_the_model(causal: bool) -> None:
    gpt = model(causal=causal, sink=1.5)
    attention, x = attentions(gpt)[0], torch.randn(3, 6, 8, dtype=torch.float64)
    v = attention.v(x).unflatten(-1, (2, -1)).transpose(1, 2)
    assert torch.allclose(attention.o((weights(attention, x) @ v).transpose(1, 2).flatten(2)), attention(x), atol=1e-12)


def test_a_sink_takes_the_attention_and_leaves_the_weights() -> None:
    gpt, tokens = model(), torch.arange(6)[None]
    before = [parameter.clone() for parameter in gpt.parameters()]
    plain = shares(gpt, tokens)
    with_sink(gpt, 9.0)
    assert all(high > 0.99 > low for low, high in zip(plain, shares(gpt, tokens), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, gpt.parameters(), strict=True))
    assert not any(attention._forward_pre_hooks for attention in attentions(gpt))
    with pytest.raises(StudyError, match="expected a Transformer of the zoo, got Linear"):
        shares(torch.nn.Linear(2, 2), tokens)


# ---- GPT


def test_the_bulk_of_a_gpt_is_that_of_the_dense_block() -> None:
    cell = {"kind": "gpt", "point": "trained", "sink": 2.0, "seed": 0}
    sizes = {"width": 4, "layers": 1, "steps": 3, "samples": 2, "probes": 4, "lanczos": 16}
    (row,) = sinks_gpt.measure({**cell, **sizes})
    moment = sinks_gpt.moments(0, 4, 1, 3, 2.0)[0]
    x, y = moment.data.train.x[:2], moment.data.train.y[:2]
    names = ["layers.0.attn.q.weight", "layers.0.attn.k.weight"]
    given = dict(moment.model.named_parameters())

    def loss(w: Tensor) -> Tensor:
        new = dict(zip(names, w.view(2, 4, 4), strict=True))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            logits = torch.func.functional_call(moment.model, {**given, **new}, (x,))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    w = torch.cat([given[name].detach().flatten() for name in names])
    values = torch.linalg.eigvalsh(torch.func.hessian(loss)(w)).detach()
    inner = values[4:-4].abs().mean()  # 32 of them: four at each end are no bulk
    assert row["bulk"] == pytest.approx(inner.item(), rel=1e-8) and row["bulk_error"] == 0
    assert row["bulk_top"] == pytest.approx(values[-1].item(), rel=1e-8)


def test_all_of_it_is_drawn_from_the_saved_result(tmp_path: Path) -> None:
    scalar = studies.run("sinks", Sinks(**{**TINY, "parts": ("scalar", "norms")}), workers=0)
    gpt = studies.run("sinks", Sinks(**{**TINY, "parts": ("gpt",), "sinks": (0.0, 10.0)}), workers=0)
    assert not scalar.failed and not gpt.failed
    rates = [row["value"] for row in scalar.rows if row["quantity"] == "bulk rate" and row["point"] == "random"]
    assert rates == pytest.approx([-1.0], abs=0.1)
    ratios = [row for row in gpt.rows if row["quantity"] == "bulk ratio"]
    assert [row["point"] for row in ratios] == ["untrained", "imposed", "trained"]
    assert all(row["value"] < 0.1 for row in ratios)
    rows = studies.Result.load(scalar.save(tmp_path / "a")).rows + studies.Result.load(gpt.save(tmp_path / "b")).rows
    picture = studies.find("sinks").figure(rows, gpt.settings)
    assert len([axes for axes in picture.axes if axes.get_visible()]) == 6
    picture.savefig(tmp_path / "figure.svg")


# ---- what is said of it


def ratio(quantity: str, low: float, high: float, **key: Any) -> dict[str, Any]:
    told = {"subject": "GPT", "point": "trained", "first": None, "sink": 8.0, "theory": None}
    return {**told, **key, "quantity": quantity, "value": (low * high) ** 0.5, "low": low, "high": high}


@pytest.mark.parametrize(
    ("bulk", "top", "answer"),
    [
        ((0.1, 0.2), (2.0, 3.0), "holds"),
        ((0.1, 0.2), (0.9, 3.0), "holds in part"),
        ((0.1, 1.2), (2.0, 3.0), "holds in part"),
        ((0.9, 1.2), (0.5, 1.1), "does not hold here"),
    ],
)
def test_the_verdict_follows_the_intervals(bulk: tuple[float, float], top: tuple[float, float], answer: str) -> None:
    weak = ratio("bulk ratio", 2.0, 3.0, sink=2.0)  # a weaker sink is not what decides
    verdict = judge([weak, ratio("bulk ratio", *bulk), ratio("top ratio", *top)])
    assert verdict.answer == answer and "GPT at b = 8 (trained): bulk of queries and keys ×" in verdict.sentence


def test_a_wrong_formula_or_rate_is_no_success() -> None:
    good = [ratio("bulk ratio", 0.1, 0.2), ratio("top ratio", 2.0, 3.0)]
    wrong = {"subject": "scalar", "point": "all", "quantity": "formula error", "points": 3, "value": 1e-3}
    assert judge([*good, wrong]).answer == "holds in part" and judge([wrong]).answer == "does not hold here"
    assert judge([{**wrong, "value": 1e-14}]).answer == "undecided" and judge([]).answer == "undecided"
    rate = ratio("bulk rate", -2.1, -1.9, subject="scalar", point="random", first=1.0)
    assert judge([*good, {**rate, "theory": -1.0}]).answer == "holds in part"
    assert judge([*good, {**rate, "value": -1.0, "low": -1.05, "high": -0.95, "theory": -1.0}]).answer == "holds"


def test_minima_of_scalar_attention_do_not_decide() -> None:
    minimum = ratio("bulk ratio", 5.0, 6.0, subject="scalar", point="imposed", first=1.0)
    assert judge([minimum, ratio("bulk ratio", 0.1, 0.2), ratio("top ratio", 2.0, 3.0)]).answer == "holds"


def test_a_bulk_that_is_only_rounding_has_no_ratio() -> None:
    def row(seed: int, sink: float, bulk: float) -> dict[str, Any]:
        told = {"kind": "scalar", "point": "imposed", "first": 1.0, "seed": seed, "sink": sink}
        return {**told, "bulk": bulk, "top": 1.0, "slope": bulk, "error": 0.0}

    rows = [row(seed, sink, 1e-13 if sink == 0 else 1e-3) for seed in (0, 1) for sink in (0.0, 4.0)]
    quantities = {made["quantity"] for made in summary(rows)}
    assert "top ratio" in quantities and "bulk" in quantities and "bulk ratio" not in quantities


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": ("scalr",)}, "parts: expected some of scalar, norms, gpt, checkpoint, got scalr"),
        ({"parts": ()}, "got none"),
        ({"parts": ("checkpoint",)}, "--set model=DIR; there is none"),
        ({"sinks": (1.0, 2.0)}, "sinks: expected 0, to compare with"),
        ({"norms": (0.5, 2.0)}, "norms: expected two or more of at least 1"),
        ({"d_K": 2}, "d_K of at least 3"),
        ({"draws": 1}, "draws: expected at least 2, for an interval, got 1"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
    ],
)
def test_a_wrong_setting_says_what_is_expected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError) as error:
        Sinks(**settings)
    assert message in str(error.value)


# ---- checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPT-2 of two layers with random weights, whose tokens are bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_checkpoint_is_measured_beside_its_attention(folder: Path) -> None:
    sizes = {name: TINY[name] for name in ("repeats", "samples", "probes", "lanczos")}
    config = Sinks(parts=("checkpoint",), model=str(folder), length=12, tokens="bytes", sinks=(0.0, 8.0), **sizes)
    result = studies.run("sinks", config, workers=0)
    assert not result.failed and {row["subject"] for row in result.rows} == {"tiny"}
    attention = [row["value"] for row in result.rows if row["quantity"] == "attention"]
    uniform = sum(1 / t for t in range(2, 13)) / 11  # of a query that sees t tokens
    assert attention[0] == pytest.approx(uniform, rel=0.02) and attention[1] > 0.95
    (bulk,) = (row for row in result.rows if row["quantity"] == "bulk ratio")
    assert bulk["high"] < 0.1 and "tiny at b = 8 (imposed): bulk of queries and keys ×" in result.verdict.sentence


def test_what_is_no_checkpoint_is_told(folder: Path, tmp_path: Path) -> None:
    def run(**changed: Any) -> None:
        settings = {"model": str(folder), "length": 12, "tokens": "bytes", "repeats": 2, "samples": 2, **changed}
        studies.run("sinks", Sinks(parts=(), **settings), workers=0)

    with pytest.raises(StudyError, match=r"expected a folder with config\.json"):
        run(model=str(tmp_path / "nothing"))
    with pytest.raises(StudyError, match=r"there is no tokenizer in .*--set tokens=bytes"):
        run(tokens="tokenizer")
    with pytest.raises(StudyError, match="tokens: expected tokenizer or bytes, got 'words'"):
        run(tokens="words")
    with pytest.raises(StudyError, match="precision: expected float64 or float32, got 'half'"):
        run(precision="half")
    with pytest.raises(StudyError, match="does not run on 40 tokens"):
        run(length=40)
