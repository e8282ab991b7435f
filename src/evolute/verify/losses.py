"""Token losses against automatic differentiation of PyTorch's own: value, gradient and curvature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from evolute.calculus import losses
from evolute.calculus.losses import TokenLoss
from evolute.verify import oracle
from evolute.verify.statement import Sampler, Statement, register


@dataclass(frozen=True, eq=False)
class Problem:
    """A loss at z (n, d), and the same as a function of PyTorch."""

    loss: TokenLoss
    plain: Callable[[Tensor], Tensor]
    z: Tensor
    target: Tensor


def sample_mse(draw: Sampler) -> Problem:
    z, y = _pair(draw)
    return Problem(losses.mse(), lambda z: F.mse_loss(z, y), z, y)


def sample_cross_entropy(draw: Sampler) -> Problem:
    """A vocabulary from 1 to 6, with a bias; up to half of the targets are ignored."""
    z, vocabulary = draw.normal(draw.integer(1, 4), draw.integer(1, 4)), draw.integer(1, 6)
    U, b = draw.normal(z.shape[1], vocabulary), draw.normal(vocabulary)
    labels = [draw.integer(0, vocabulary - 1) for _ in z]
    y = torch.tensor([-100 if i < draw.integer(0, len(z) // 2) else label for i, label in enumerate(labels)])
    return Problem(losses.cross_entropy(U, b), lambda z: F.cross_entropy(z @ U + b, y), z, y)


def sample_token(draw: Sampler) -> Problem:
    """A quartic by formulas."""
    z, y = _pair(draw)
    loss = losses.token(
        lambda z, y: (z - y).pow(4).sum(-1),
        lambda z, y: 4 * (z - y) ** 3,
        lambda z, y: torch.diag_embed(12 * (z - y) ** 2),
    )
    return Problem(loss, lambda z: (z - y).pow(4).sum(-1).mean(), z, y)


def sample_autodiff(draw: Sampler) -> Problem:
    """One that ties all features of a token together."""
    z, y = _pair(draw)
    loss = losses.autodiff(lambda z, y: torch.log1p((z - y).square().sum()))
    return Problem(loss, lambda z: torch.log1p((z - y).square().sum(-1)).mean(), z, y)


def _pair(draw: Sampler) -> tuple[Tensor, Tensor]:
    n, d = draw.integer(1, 4), draw.integer(1, 4)
    return draw.normal(n, d), draw.normal(n, d)


def _closed(p: Problem) -> Tensor:
    """Value, gradient and curvature in one vector."""
    point = p.loss.at(p.z, p.target)
    return torch.cat([point.value[None], point.gradient.flatten(), torch.block_diag(*point.curvature).flatten()])


def _oracle(p: Problem) -> Tensor:
    slope, bend = oracle.jacobian(p.plain, [p.z], 0), oracle.hessian(p.plain, [p.z])
    return torch.cat([p.plain(p.z)[None], slope.flatten(), bend.flatten()])


register(
    Statement("Loss · mse", "g = 2(z − y)/N, G = 2/N I", sample_mse, _closed, _oracle),
    Statement(
        "Loss · cross-entropy",
        "g = U(p − y)/N, G = U(diag p − p pᵀ)Uᵀ/N, N targets that count",
        sample_cross_entropy,
        _closed,
        _oracle,
    ),
    Statement("Loss · token", "by the user's own formulas", sample_token, _closed, _oracle),
    Statement("Loss · autodiff", "by torch.func, token by token", sample_autodiff, _closed, _oracle),
)
