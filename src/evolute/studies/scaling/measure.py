"""One run of the sweep: a model of N parameters, trained once over D samples, and what is measured of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from evolute.engine.loss import Loss
from evolute.engine.objective import Objective
from evolute.engine.operators import Hessian
from evolute.errors import NonFiniteError, StudyError
from evolute.krylov.eigen_search import eigsh
from evolute.krylov.one_pass import spectrum
from evolute.studies.critical_batch import critical_batch
from evolute.studies.study import Cell, Row
from evolute.zoo import GPT, Dataset, addition, cross_entropy, english, evaluate, train
from evolute.zoo.trained import one_thread

DATA = {"gpt_english": lambda seed: english(32, seed=seed), "gpt_addition": lambda seed: addition(seed=seed)}
BATCH = 32
TESTED = 1000
RATE = 1e-2  # of AdamW at width 16; it goes as 1/√width


def run(cell: Cell) -> Row:
    """Test loss and curvature; a run that diverged has no numbers but says so."""
    data = DATA[cell["model"]](cell["seed"])
    where = {name: cell[name] for name in ("model", "width", "D", "seed")}
    if cell["D"] > len(data.train):
        raise StudyError(f"data: expected up to {len(data.train):,} samples of '{cell['model']}', got {cell['D']:,}.")
    model = GPT(data.vocabulary, data.length, cell["width"], cell["heads"], cell["layers"], seed=cell["seed"])
    where["N"] = sum(parameter.numel() for parameter in model.parameters())
    try:
        with one_thread():
            _train(model, data, cell)
    except NonFiniteError as error:
        return where | {"diverged": str(error)}
    score = evaluate(model, data.test.first(min(TESTED, len(data.test))).batches(250))
    return where | {"loss": score.loss} | curvature(model.double().eval(), data, cell)


def _train(model: nn.Module, data: Dataset, cell: Cell) -> None:
    """Each of the first D samples once."""
    train(
        model,
        data.first(cell["D"]),
        steps=math.ceil(cell["D"] / BATCH),
        batch=BATCH,
        lr=cell["rate"] * (16 / cell["width"]) ** 0.5,
        schedule="warmup_cosine",
        seed=cell["seed"],
        progress=False,
    )


def curvature(model: nn.Module, data: Dataset, cell: Cell) -> Row:
    """Of the Hessian on samples that were not trained on, and of gradients on others still."""
    x, y = data.test.x, data.test.y
    n, generator = cell["samples"], torch.Generator().manual_seed(cell["seed"])
    H = Hessian(Objective(model, [(x[:n], y[:n])], Loss(*cross_entropy)))
    top = eigsh(H, 1, "largest", tol=1e-2, generator=generator, progress=False)
    seen = spectrum(H, cell["probes"], cell["depth"], generator=generator, progress=False)
    return {
        "sharpness": float(top.values[-1]),
        "trace": seen.trace.estimate,
        "trace_error": seen.trace.standard_error,
        "rank": seen.effective_rank.estimate,
        "rank_error": seen.effective_rank.standard_error,
    } | noise(H, model, *unseen(data, cell["D"], n), cell["folds"], cell["fold"])


def unseen(data: Dataset, trained: int, tested: int) -> tuple[Tensor, Tensor]:
    """Samples that were neither trained on nor in H."""
    later, test = slice(trained, None), slice(tested, None)
    x, y = torch.cat([data.train.x[later], data.test.x[test]]), torch.cat([data.train.y[later], data.test.y[test]])
    return x, y


def noise(H: Hessian, model: nn.Module, x: Tensor, y: Tensor, folds: int, fold: int) -> dict[str, Any]:
    """B from curvature and B from gradients alone, each with its error."""
    if len(x) < folds * fold:
        raise StudyError(f"folds: expected {folds} × {fold} samples for the gradient noise, got {len(x)}.")
    parts = [slice(i * fold, (i + 1) * fold) for i in range(folds)]
    G = torch.stack([Objective(model, [(x[p], y[p])], Loss(*cross_entropy)).gradient() for p in parts])
    bent, plain = critical_batch(G @ (H @ G.T), fold), critical_batch(G @ G.T, fold)
    return {
        "batch": bent.value if bent.determined else None,
        "batch_error": bent.error if bent.determined else None,
        "simple": plain.value if plain.determined else None,
        "simple_error": plain.error if plain.determined else None,
    }
