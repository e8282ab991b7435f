"""The whole Hessian of a small GPT, entry by entry, and what is kept of it: typical entries, histograms, an image."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from evolute.engine.loss import Loss
from evolute.engine.objective import Objective
from evolute.engine.operators import Hessian
from evolute.linop.convert import to_dense
from evolute.studies.blocks import LETTERS, pair
from evolute.studies.study import Cell, Row
from evolute.zoo import GPT, Dataset, addition, cross_entropy, evaluate, train

AROUND = {"embed": "E", "embed.position": "P", "norm": "N", "unembed": "U"}
LOW, HIGH = -14.0, 4.0  # powers of ten that are told apart
BINS = 72
LEVELS = 255  # of an image; 0 is an exact zero
PIXELS = 120  # to a side of an image, about


def measured(cell: Cell) -> list[Row]:
    """Everything that is kept of the Hessian of a cell."""
    model, data = subject(cell)
    loss, accuracy = _trained(model, data, cell)
    H, sizes = dense_hessian(model.double(), data, cell["samples"])
    score = {
        "kind": "score",
        "loss": loss,
        "accuracy": accuracy,
        "token_size": token_size(model, data, cell["samples"]),
    }
    found = [score, *typical(H, sizes), image(H, sizes)]
    return [{**{key: cell[key] for key in ("attention", "norm", "steps", "seed")}, **row} for row in found]


# ---- the model


def subject(cell: Cell) -> tuple[GPT, Dataset]:
    """A GPT that is to add, with softmax or without, with norms before its sublayers or without."""
    data = addition(train=8000, test=1000, digits=cell["digits"], seed=cell["seed"])
    shape = (data.vocabulary, data.length, cell["width"], 1, cell["layers"])
    options: Any = {"norm": cell["norm"], "attention": cell["attention"], "activation": "relu"}
    return GPT(*shape, seed=cell["seed"], **options), data


def _trained(model: GPT, data: Dataset, cell: Cell) -> tuple[float, float]:
    """Loss and accuracy on the test samples, after that many steps."""
    if not cell["steps"]:
        score = evaluate(model, data.test.batches(250))
        return score.loss, score.accuracy or 0.0
    how: Any = {"lr": cell["lr"], "schedule": "warmup_cosine", "seed": cell["seed"], "progress": False}
    result = train(model, data, steps=cell["steps"], **how)
    return result.loss, result.accuracy or 0.0


@torch.no_grad()
def token_size(model: GPT, data: Dataset, samples: int) -> float:
    """σ, the root mean square of an entry of the tokens that come into the first layer."""
    x = data.train.x[:samples]
    tokens = model.embed(x) + model.position.weight[: x.shape[1]]
    return float(tokens.double().square().mean().sqrt())


def dense_hessian(model: GPT, data: Dataset, samples: int) -> tuple[Tensor, dict[str, int]]:
    """H in the order of its groups, and how large these are: E, P, then Q, K, … of the first layer as Q0, K0, …."""
    objective = Objective(model, data.first(samples).batches(samples), Loss(*cross_entropy))
    H = Hessian(objective)
    names = list(H.space.groups)
    sizes = {label(name): H.space.resolve(name).size for name in names}
    return to_dense(H.block(names, names)), sizes


def label(group: str) -> str:
    """A letter, and the number of the layer.

    >>> label("layers.1.attn.q"), label("embed.position")
    ('Q1', 'P')
    """
    if not group.startswith("layers."):
        return AROUND[group]
    _, number, role = group.split(".", 2)
    return f"{LETTERS[role]}{number}"


# ---- what is kept of it


def typical(H: Tensor, sizes: dict[str, int]) -> Iterator[Row]:
    """Of each block: median and root mean square of |h|, the share of zeros, and how many there are of each size."""
    rows = list(zip(sizes, H.split(list(sizes.values())), strict=True))
    for i, (a, strip) in enumerate(rows):
        for (b, _), block in list(zip(rows, strip.split(list(sizes.values()), 1), strict=True))[i:]:
            entries = block.abs().flatten()
            yield {
                "kind": "block",
                "block": pair(a, b),
                "median": float(entries.median()),
                "rms": float(entries.square().mean().sqrt()),
                "zeros": float((entries == 0).double().mean()),
                "counts": histogram(entries),
            }


def histogram(entries: Tensor) -> list[int]:
    """Counts per bin of log10, of what is not zero; what lies outside is in the first and the last bin.

    >>> counts = histogram(torch.tensor([1.0, 1.0, 0.0, 1e-30]))
    >>> counts[0], counts[round(BINS * -LOW / (HIGH - LOW))], sum(counts)
    (1, 2, 3)
    """
    logs = entries[entries > 0].double().log10().clamp(LOW, HIGH - 1e-9)
    return torch.histc(logs, BINS, LOW, HIGH).long().tolist()


def image(H: Tensor, sizes: dict[str, int]) -> Row:
    """Root mean squares of tiles that keep to the groups, as levels from 1 (10^LOW) to 255 (10^HIGH), in base 64."""
    pixels = {name: min(size, max(3, round(PIXELS * size / len(H)))) for name, size in sizes.items()}
    cuts = [count + (place < extra) for size, n in zip(sizes.values(), pixels.values(), strict=True)
            for count, extra in [divmod(size, n)] for place in range(n)]  # fmt: skip
    tiles = _means(_means(H.square(), cuts).mT, cuts).mT.sqrt()
    level = (tiles.clamp_min(1e-300).log10() - LOW) / (HIGH - LOW) * (LEVELS - 1) + 1
    levels = torch.where(tiles > 0, level.round().clamp(1, LEVELS), 0).to(torch.uint8)
    text = base64.b64encode(levels.numpy().tobytes()).decode()
    return {"kind": "image", "groups": list(pixels), "pixels": list(pixels.values()), "levels": text}


def _means(H: Tensor, cuts: list[int]) -> Tensor:
    """Over rows, so many at a time."""
    return torch.stack([rows.mean(0) for rows in H.split(cuts)])


def magnitudes(row: Row) -> list[list[float]]:
    """log10 of what an image shows; −inf for exact zeros.

    >>> found = image(torch.tensor([[1e-3, 0.0], [0.0, 10.0]], dtype=torch.float64), {"E": 1, "U": 1})
    >>> [[round(x, 1) for x in line] for line in magnitudes(found)]
    [[-3.0, -inf], [-inf, 1.0]]
    """
    levels, side = base64.b64decode(row["levels"]), sum(row["pixels"])
    values = [LOW + (level - 1) * (HIGH - LOW) / (LEVELS - 1) if level else -math.inf for level in levels]
    return [values[i * side : (i + 1) * side] for i in range(side)]
