"""Theorems 2 and 3 against automatic differentiation of PyTorch's own LayerNorm."""

from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.calculus.published import counterexamples, layernorm
from evolute.verify import oracle
from evolute.verify.statement import Sampler, Statement, first_line, register


@dataclass(frozen=True, eq=False)
class Tokens:
    """Rows of X, and the ε under the root."""

    X: Tensor
    eps: float


def sample(draw: Sampler) -> Tokens:
    """L from 1 to 4; d from 3 (with two features and ε = 0, LN is ±1 and has no derivative to compare); ε from zero."""
    return Tokens(draw.normal(draw.integer(1, 4), draw.integer(3, 6)), draw.choice(0.0, 1e-5, 0.1))


def normalise(X: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(X, X.shape[-1:], eps=eps)


def _jacobian(t: Tokens) -> Tensor:
    return oracle.jacobian(lambda X: normalise(X, t.eps), [t.X], 0)


register(
    Statement(
        "Theorem 2 · LayerNorm Jacobian",
        first_line(layernorm.jacobian),
        sample,
        lambda t: layernorm.jacobian(t.X, t.eps),
        _jacobian,
    ),
    Statement(
        "Theorem 3 · LayerNorm Hessian",
        "H from ∂²P and ∂P; ∂²M = 0",
        sample,
        lambda t: layernorm.hessian(t.X, t.eps),
        lambda t: oracle.second(lambda X: normalise(X, t.eps), [t.X], 0, 0),
    ),
    Statement(
        "Theorem 2 · LayerNorm Jacobian, as printed",
        "(P ⊗ I) G, without ∂P",
        lambda _: Tokens(counterexamples.three_features(), 0.0),
        lambda t: layernorm.jacobian_without_scale(t.X, t.eps),
        _jacobian,
        erratum=True,
    ),
)
