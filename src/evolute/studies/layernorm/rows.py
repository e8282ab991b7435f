"""What a norm makes of a row with standard deviation σ_x (of RMSNorm: of size σ_x), and ε under the root.

    z = c/s, s = √(σ_x² + ε)         J ~ 1/s,   J G J ~ 1/s²,   Σ_k g_k ∂²z_k ~ σ_x/s³

So far above √ε the powers of σ_x are −1, −2 and −2; far below, where the norm is a linear map, 0, 0 and +1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evolute.apps.captured import Captured, captured, tokens
from evolute.apps.output_factor import cross_entropy_columns
from evolute.calculus import closed_form
from evolute.calculus.normalization import Normalization, layernorm, rmsnorm
from evolute.studies.fits import slope
from evolute.studies.study import Cell, Row
from evolute.studies.subjects import Subject, at
from evolute.zoo import Block, BlockConfig
from evolute.zoo.seeding import drawn_from

SHOWN = 60  # rows of a norm that the figure shows


def norm_options(norm: str) -> dict[str, Any]:
    """'rms' is pre-norm with RMSNorm.

    >>> norm_options("rms"), norm_options("post")
    ({'norm': 'pre', 'norm_kind': 'rms'}, {'norm': 'post', 'norm_kind': 'layer'})
    """
    return {"norm": "pre" if norm == "rms" else norm, "norm_kind": "rms" if norm == "rms" else "layer"}


# ---- one row, any curvature


def one_row(cell: Cell) -> Iterator[Row]:
    """‖J‖₂, ‖J G J‖₂ and ‖Σ_k g_k ∂²z_k‖₂ of one row at each size, for one random G ⪰ 0 and one random g."""
    x, g, half = _drawn(cell)
    G = half @ half.mT
    for sigma in cell["sigmas"]:
        made = _norm(cell["norm"], sigma * x, cell["eps"])
        J = made.jacobian[0]
        outer = J @ G @ J
        sizes = {"J": J, "outer": outer, "functional": made.curvature(g)[0]}
        norms = {name: float(torch.linalg.matrix_norm(M, 2)) for name, M in sizes.items()}
        share = float(outer.trace() / G.trace())
        yield {**{key: cell[key] for key in ("part", "norm", "seed")}, "sigma": sigma, **norms, "share": share}


def _drawn(cell: Cell) -> tuple[Tensor, Tensor, Tensor]:
    """A row of size 1 (standard deviation, or root mean square), a gradient, and a root of a curvature."""
    generator, d = torch.Generator().manual_seed(cell["seed"]), cell["width"]
    x, g, half = (torch.randn(rows, d, generator=generator, dtype=torch.float64) for rows in (1, 1, d))
    c = x if cell["norm"] == "rms" else x - x.mean(-1, keepdim=True)
    return c / c.square().mean().sqrt(), g, half


def _norm(kind: str, x: Tensor, eps: float) -> Normalization:
    return rmsnorm(x, eps=eps) if kind == "rms" else layernorm(x, eps=eps)


# ---- one block, tokens of one size


def one_block(cell: Cell) -> Iterator[Row]:
    """‖∂²ℓ/∂x²‖_F of a block's loss in its tokens of size σ, of both parts, in closed form."""
    config = BlockConfig(cell["width"], cell["heads"], activation="gelu", eps=cell["eps"], **norm_options(cell["norm"]))
    generator = torch.Generator().manual_seed(cell["seed"])
    with drawn_from(cell["seed"]):
        block = Block(config).double().eval()
    x, y = (torch.randn(2, 8, cell["width"], generator=generator, dtype=torch.float64) for _ in range(2))
    for sigma in cell["sigmas"]:
        H = closed_form(block, sigma * x, y)
        norms = {name: float(op.input.per_sequence().norm()) for name, op in (("H_o", H.outer), ("H_f", H.functional))}
        yield {**{key: cell[key] for key in ("part", "norm", "seed")}, "sigma": sigma, **norms}


# ---- rows as they come, in a trained model


def natural_rows(cell: Cell) -> Iterator[Row]:
    """Over the rows of each norm of a trained model: the exponent of tr(J G J)/tr(G), and of tr(J G J), in s."""
    options = norm_options(cell["norm"])
    subject = Subject(
        "vit_digits",
        cell["width"],
        cell["heads"],
        2,
        cell["steps"],
        samples=cell["samples"],
        seed=cell["seed"],
        options=options,
    )
    objective = at(subject, cell["steps"]).objective
    norms = {name: module for name, module in objective.model.named_modules() if isinstance(module, NORMS)}
    for batch in captured(objective, norms):
        arrived, passed = _traces(batch, norms)
        for name, module in norms.items():
            s = _point(module, batch.inputs[name]).sigma.flatten()
            yield _row(cell, name, len(batch.labels), s, arrived[name], passed[name])


NORMS = (nn.LayerNorm, nn.RMSNorm)


def _traces(batch: Captured, norms: Mapping[str, nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """tr(G) at what comes out of each norm and tr(J G J) at what goes in, for each row."""
    points = {name: _point(module, batch.inputs[name]) for name, module in norms.items()}
    arrived = {name: torch.zeros(len(point.z), dtype=point.z.dtype) for name, point in points.items()}
    passed = {name: torch.zeros_like(each) for name, each in arrived.items()}
    for column in cross_entropy_columns(batch.logits, batch.labels):
        for name, g in batch.pull_to_outputs(column).items():
            g = g.flatten(0, 1)
            arrived[name] += g.square().sum(-1)
            passed[name] += points[name].pull(g).square().sum(-1)
    return arrived, passed


def _point(module: nn.Module, x: Tensor) -> Normalization:
    rows = tokens(x).flatten(0, 1)
    if isinstance(module, nn.RMSNorm):
        return rmsnorm(rows, module.weight.detach(), eps=module.eps or torch.finfo(rows.dtype).eps)
    assert isinstance(module, nn.LayerNorm)
    return layernorm(rows, module.weight.detach(), eps=module.eps)


def _row(cell: Cell, place: str, samples: int, s: Tensor, arrived: Tensor, passed: Tensor) -> Row:
    share = passed / arrived
    own = [_within(each, samples) for each in (s, share, passed)]
    return {
        **{key: cell[key] for key in ("part", "norm", "seed")},
        "place": place,
        "share": slope(own[0], own[1]),
        "passed": slope(own[0], own[2]),
        "spread": float(s.max() / s.min()),
        "points": [[float(a), float(b)] for a, b in zip(s[:: _every(s)], share[:: _every(s)], strict=True)],
    }


def _within(x: Tensor, samples: int) -> list[float]:
    """Over its geometric mean in the sample: how sure the model is of a sample is no matter of its rows."""
    logs = x.log().view(samples, -1)
    return (logs - logs.mean(1, keepdim=True)).exp().flatten().tolist()


def _every(rows: Tensor) -> int:
    return max(1, len(rows) // SHOWN)
