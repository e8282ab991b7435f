"""Scalar self-attention: its spectrum in closed form against eigenvalues by automatic differentiation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.calculus.scalar_attention import ScalarAttention, scalar_attention
from evolute.verify import oracle
from evolute.verify.statement import Sampler, Statement, register


@dataclass(frozen=True, eq=False)
class Tokens:
    """Scalar tokens, their targets, and the weights."""

    w: tuple[Tensor, Tensor, Tensor]
    x: Tensor
    y: Tensor
    sink: float


def sample(draw: Sampler) -> Tokens:
    """d_K from 1 to 6, L from 2 to 8, with and without an attention sink."""
    d_K, L = draw.integer(1, 6), draw.integer(2, 8)
    w = draw.normal(d_K), draw.normal(d_K), draw.normal()
    return Tokens(w, draw.normal(L), draw.normal(L), draw.choice(0.0, 2.0))


def closed(t: Tokens) -> ScalarAttention:
    return scalar_attention(*t.w, t.x, t.y, sink=t.sink)


def forward(t: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """w_V A x."""
    scores = torch.outer(t.x, t.x) * (q * k).sum() / len(q) ** 0.5
    first = t.sink * (torch.arange(len(t.x)) == 0)
    return v * ((scores + first).softmax(-1) @ t.x)


def hessian(t: Tokens) -> Tensor:
    return oracle.hessian(lambda *w: (forward(t, *w) - t.y).square().mean(), t.w)


def gauss_newton(t: Tokens) -> Tensor:
    J = torch.cat([oracle.jacobian(lambda *w: forward(t, *w), t.w, i) for i in range(3)], 1)
    return 2 / len(t.x) * J.mT @ J


register(
    Statement(
        "Scalar attention · H",
        "H from ℓ_s, ℓ_ss, ℓ_vs, ℓ_vv",
        sample,
        lambda t: closed(t).hessian,
        hessian,
    ),
    Statement(
        "Scalar attention · spectrum of H",
        "±ℓ_s, d_K − 1 times each, and three outliers",
        sample,
        lambda t: closed(t).spectrum.eigenvalues,
        lambda t: torch.linalg.eigvalsh(hessian(t)),
    ),
    Statement(
        "Scalar attention · spectrum of H_o",
        "two outliers and zeros",
        sample,
        lambda t: closed(t).gauss_newton_spectrum.eigenvalues,
        lambda t: torch.linalg.eigvalsh(gauss_newton(t)),
    ),
)
