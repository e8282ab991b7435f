"""dynamics: the edge is where a quadratic stops to be stable, numbers are those of the dense Hessian, fair verdicts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evolute import studies
from evolute.engine.groups import groups
from evolute.engine.operators import Hessian
from evolute.errors import StudyError
from evolute.linop.convert import to_dense
from evolute.studies import Row
from evolute.studies.dynamics import STUDY, Dynamics
from evolute.studies.dynamics import measure as dynamics_measure
from evolute.studies.dynamics import table as dynamics_table
from evolute.studies.dynamics.training import SETUPS, states
from evolute.studies.subjects import Moment, Subject, at

TINY = Dynamics(
    width=2, heads=1, layers=1, steps=6, times=(0, 1, 3, 6), samples=6, repeats=2, probes=2, products=6, fraction=0.1
)


@pytest.mark.parametrize("name", list(SETUPS))
def test_the_edge_is_where_a_quadratic_stops_to_be_stable(name: str) -> None:
    """Just below the limit steps on ½ λ w² die out, just above they grow: for Adam with P held fixed."""
    setup, curvature = SETUPS[name], 3.0
    scale = 2.0 if setup.adaptive else 1.0  # P
    for factor, grows in ((0.98, False), (1.02, True)):
        rate = factor * setup.limit * scale / curvature
        w, m, sizes = 1.0, 0.0, list[float]()
        for _ in range(2000):
            g = curvature * w
            if name == "sgd":
                w = w - rate * g
            elif name == "momentum":
                m = 0.9 * m + g
                w = w - rate * m
            else:
                m = 0.9 * m + 0.1 * g
                w = w - rate / scale * m
            sizes.append(abs(w))
        assert (max(sizes[-100:]) > max(sizes[900:1000])) == grows


def moment(samples: int = 6) -> Moment:
    return at(Subject("vit_digits", 2, 1, 1, 6, samples=samples), 0)


def test_a_training_is_what_torch_does() -> None:
    """Full batches by hand, with AdamW's warm-up; the state before a step has the rate of that step."""
    here = moment()
    walk = list(states(here, SETUPS["adamw"], 0.1, [0, 1, 3], 6, 0))
    x, y = here.sample
    model = at(Subject("vit_digits", 2, 1, 1, 6, samples=6), 0).model
    optimizer = torch.optim.AdamW(model.parameters(), 1.0, (0.9, 0.999), 1e-8)
    from evolute.zoo.schedules import warmup_cosine

    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 * warmup_cosine((step + 0.5) / 6)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 0:
            first = {key: value.clone() for key, value in model.state_dict().items()}
    assert [state.step for state in walk] == [0, 1, 3] and walk[0].preconditioner is None
    assert walk[1].rate == pytest.approx(0.1 * warmup_cosine(1.5 / 6))
    last = walk[-1]
    for key, value in model.state_dict().items():
        torch.testing.assert_close(last.model.state_dict()[key], value, rtol=1e-9, atol=1e-12)
    assert not torch.equal(first["head.weight"], model.state_dict()["head.weight"])
    v = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in model.parameters()])
    assert last.preconditioner is not None
    torch.testing.assert_close(last.preconditioner, (v / (1 - 0.999**3)).sqrt() + 1e-8, rtol=1e-6, atol=0)
    unmoved = at(Subject("vit_digits", 2, 1, 1, 6, samples=6), 0).model.state_dict()
    assert all(torch.equal(value, unmoved[key]) for key, value in here.model.state_dict().items())


def test_numbers_are_those_of_the_dense_hessian() -> None:
    subject = Subject("vit_digits", 2, 1, 1, 6, samples=6)
    cell: dict[str, Any] = {"subject": asdict(subject), "setup": "adam", "rate": 0.02, "steps": [0, 2]}
    rows = dynamics_measure.measured({**cell, "batch": 0, "probes": 20, "products": 100})
    walk = states(moment(), SETUPS["adam"], 0.02, [2], 6, 0)
    state = next(walk)
    here = moment()
    from evolute.engine.objective import Objective

    H = to_dense(Hessian(Objective(state.model, [here.sample], here.objective.loss)))
    values, row = torch.linalg.eigvalsh(H), rows[-1]
    assert row["step"] == 2 and rows[0]["edge"] is None
    assert row["sharpness"] == pytest.approx(float(values[-1])) and row["lowest"] == pytest.approx(float(values[0]))
    assert row["trace"] == pytest.approx(float(H.trace()))
    assert row["negative"] == pytest.approx(float(-values.clamp_max(0).sum() / values.abs().sum()))
    assert state.preconditioner is not None
    scale = state.preconditioner.rsqrt()
    top = float(torch.linalg.eigvalsh(scale[:, None] * H * scale)[-1])
    assert row["edge"] == pytest.approx(0.02 * top / 38, rel=1e-3)


def test_shares_of_blocks_are_those_of_the_columns() -> None:
    here = moment()
    H = Hessian(here.objective)
    parts = {name: [name] for name in groups(here.model)}
    found = dynamics_measure.shares(H, parts, torch.Generator().manual_seed(0), 400)
    dense = to_dense(H)
    for name in parts:
        columns = H.space.resolve(name).take(dense)
        assert found[name] == pytest.approx(float(columns.square().sum() / dense.square().sum()), abs=0.03)
    assert sum(found.values()) == pytest.approx(1)


# ---------------------------------------------------------------- what is made of it


def state(seed: int, step: int, edge: float | None, setup: str = "sgd", **more: Any) -> Row:
    row: Row = {"kind": "state", "setup": setup, "seed": seed, "step": step, "loss": 1.0, "sharpness": 1.0 + step}
    row |= {"edge": edge, "trace": 1.0, "trace_error": 0.1, "negative": 0.3, "negative_error": 0.01, "lowest": -0.1}
    return row | {"rate": 0.1, "shares": {"Q": 0.4, "rest": 0.6}} | more


def run(edges: tuple[float, ...], setup: str = "sgd") -> list[Row]:
    return [state(seed, 10 * i, e * (1 + 0.01 * seed), setup) for seed in range(3) for i, e in enumerate(edges)]


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        (run((0.3, 0.9, 1.0, 1.0)), "holds"),
        (run((0.3, 1.2, 0.4, 0.2)), "holds in part"),
        (run((0.3, 0.4, 0.4, 0.4)), "does not hold here"),
        (run((0.3, 0.9, 1.0, 1.0)) + run((0.1, 0.9, 0.5, 0.0), "adamw"), "holds"),
        (run((0.3, 0.9, 1.0, 1.0)) + run((0.1, 0.2, 0.1, 0.0), "adamw"), "holds in part"),
        (run((0.3, 0.795, 0.5, 0.5)), "undecided"),
        ([state(0, 0, 0.5)], "undecided"),
    ],
)
def test_the_verdict_asks_for_coming_and_for_staying(rows: list[Row], answer: str) -> None:
    table = STUDY.table(TINY, rows)
    verdict = STUDY.verdict(TINY, table)
    assert verdict.answer == answer, verdict.sentence


def test_where_the_rate_falls_nobody_asks_for_staying() -> None:
    rows = run((0.3, 0.9, 1.0, 1.0)) + run((0.1, 0.9, 0.5, 0.0), "adamw")
    sentence = STUDY.verdict(TINY, STUDY.table(TINY, rows)).sentence
    assert sentence.count("late") == 1 and "2 of 2 optimisers" in sentence and "1 of 1 with a constant rate" in sentence


def test_runs_that_diverged_are_told_and_have_no_late() -> None:
    rows = run((0.5, 1.5, 2.0, 3.0))
    gone = [row for row in rows if not (row["seed"] == 0 and row["step"] > 10)]
    table = dynamics_table.made([*gone, {"kind": "diverged", "setup": "sgd", "seed": 0, "why": "NaN"}])
    (summary,) = (row for row in table if row["kind"] == "summary")
    assert summary["diverged"] == 1 and summary["runs"] == 3
    assert summary["late"] == pytest.approx((6 * 1.01 * 1.02) ** 0.5)
    assert summary["sharpening"] == pytest.approx((11 * 31 * 31) ** (1 / 3))
    assert "1 of 3 runs diverged" in STUDY.verdict(TINY, table).sentence
    assert [row["runs"] for row in table if row["kind"] == "step"] == [3, 3, 2, 2]


def test_a_run_with_one_that_diverges_gives_a_table_and_a_figure(tmp_path: Path) -> None:
    result = studies.run("dynamics", replace(TINY, fraction=1e200, setups=("sgd", "adam")), workers=0)
    assert not result.failed
    summary = {row["setup"]: row for row in result.rows if row["kind"] == "summary"}
    assert summary["sgd"]["diverged"] == 2 and summary["adam"]["diverged"] == 0
    again = studies.Result.load(result.save(tmp_path))
    json.dumps(list(again.rows), allow_nan=False)
    picture = studies.find("dynamics").figure(again.rows, again.settings)
    assert len(picture.axes) == 6


def test_batches_are_drawn_alike() -> None:
    one, other = (
        [
            state.model.state_dict()["head.weight"].clone()
            for state in states(moment(), SETUPS["sgd"], 0.1, [0, 4], 4, 2)
        ]
        for _ in range(2)
    )
    assert torch.equal(one[1], other[1]) and not torch.equal(one[0], one[1])
    assert isinstance(moment().model, nn.Module)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"setups": ("lion",)}, "setups: expected some of sgd, momentum, adam, adamw, got lion"),
        ({"setups": ()}, "got none"),
        ({"fraction": 0.0}, "fraction: expected a positive number, got 0.0"),
        ({"heavy": -1.0}, "heavy: expected a positive number, got -1.0"),
        ({"repeats": 1}, "repeats: expected 2 or more, for an interval, got 1"),
        ({"batch": -1}, "batch: expected 0"),
        ({"times": (0, 1, 50)}, r"times: expected three or more from 0 to 6, got \[0, 1, 50\]"),
        ({"model": "gpt"}, "no model 'gpt' to study"),
    ],
)
def test_what_cannot_be_measured_says_why(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        studies.run("dynamics", replace(TINY, **changed), workers=0)
