"""Attention in its tokens against automatic differentiation: kinds, heads, masks, biases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from evolute.calculus.attention import Attention, attention
from evolute.calculus.scores import KINDS
from evolute.verify import oracle
from evolute.verify.statement import Sampler, Statement, register


@dataclass(frozen=True, eq=False)
class Problem:
    """One sequence (L, d), weights stored (out, in), who may not look at whom, and a gradient at the output."""

    x: Tensor
    w: dict[str, Tensor]
    heads: int
    kind: str
    hidden: Tensor
    g: Tensor

    @property
    def point(self) -> Attention:
        return attention(self.x, heads=self.heads, kind=self.kind, mask=self.hidden, **self.w)  # pyright: ignore

    @property
    def d_K(self) -> int:
        return len(self.w["w_q"]) // self.heads


def sample(draw: Sampler) -> Problem:
    """L from 2 to 4 (a single token sees itself alone, and nothing bends), up to two heads, every kind, half causal."""
    L, d, heads, kind = draw.integer(2, 4), draw.integer(1, 4), draw.integer(1, 2), draw.choice(*KINDS)
    d_K, d_V, q = draw.integer(1, 3), draw.integer(1, 3), draw.integer(1, 3)
    sizes = {"q": (heads * d_K, d), "k": (heads * d_K, d), "v": (heads * d_V, d), "o": (q, heads * d_V)}
    w = {f"w_{name}": draw.normal(*size) for name, size in sizes.items()}
    w |= {f"b_{name}": draw.normal(size[0]) for name, size in sizes.items()}
    hidden = torch.ones(L, L).triu(1).bool() & draw.choice(True, False)
    return Problem(draw.normal(L, d), w, heads, kind, hidden, draw.normal(L, q))


def sample_softmax(draw: Sampler) -> Problem:
    """The same, with softmax: rows of A that sum to one."""
    p = sample(draw)
    return Problem(p.x, p.w, p.heads, "softmax", p.hidden, p.g)


def taps(p: Problem, x: Tensor) -> tuple[Tensor, ...]:
    """Q, K, V, (H, L, width)."""
    return tuple(
        F.linear(x, p.w[f"w_{name}"], p.w[f"b_{name}"]).unflatten(-1, (p.heads, -1)).transpose(0, 1) for name in "qkv"
    )


def mixed(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """C = A v, (H, L, d_V)."""
    scores = q @ k.mT / math.sqrt(p.d_K)
    if p.kind == "softmax":
        return scores.masked_fill(p.hidden, -math.inf).softmax(-1) @ v
    maps = {"linear": scores, "sigmoid": scores.sigmoid(), "relu": scores.relu()}
    return maps[p.kind].masked_fill(p.hidden, 0) @ v


def forward(p: Problem, x: Tensor) -> Tensor:
    return F.linear(mixed(p, *taps(p, x)).transpose(0, 1).flatten(1), p.w["w_o"], p.w["b_o"])


def _by_queries(p: Problem) -> Tensor:
    """∂c_t/∂q_t with keys and values held fixed."""
    q, k, v = taps(p, p.x)
    J = oracle.jacobian(lambda q: mixed(p, q, k, v), [q], 0).view(*v.shape, *q.shape)  # (h, t, v, h', t', k)
    return torch.einsum("htvhtk->htvk", J)


def _moved_keys(p: Problem) -> Tensor:
    """∂c_t/∂W_K = J_K ⊗ q_t, (h, t, v, d_K, d)."""
    return torch.einsum("htvi,htk->htvki", p.point.J_K, taps(p, p.x)[0])


def _by_keys(p: Problem) -> Tensor:
    """The same with W_K as a variable; heads do not feel one another's."""
    q, k, v = taps(p, p.x)

    def c(W: Tensor) -> Tensor:
        moved = (p.x @ W.mT).unflatten(-1, (p.heads, -1)).transpose(0, 1)
        return mixed(p, q, k + moved, v)

    J = oracle.jacobian(c, [torch.zeros_like(p.w["w_k"])], 0).view(*v.shape, *(p.heads, p.d_K, p.x.shape[1]))
    return torch.einsum("htvhki->htvki", J)


def _cumulants(p: Problem) -> Tensor:
    """Derivatives of log Σ_s e^{s_ts + θ·x_s} at θ = 0, which knows nothing of moments: (H, L, d + d² + d³)."""
    q, k, _ = taps(p, p.x)
    scores = (q @ k.mT / math.sqrt(p.d_K)).masked_fill(p.hidden, -math.inf).flatten(0, 1)  # (H·L, L)
    zero = torch.zeros(p.x.shape[1], dtype=p.x.dtype)

    def log_sum(theta: Tensor) -> Tensor:
        return torch.logsumexp(scores + p.x @ theta, -1)

    def variance(theta: Tensor) -> Tensor:
        return oracle.differentiable(lambda t: oracle.differentiable(log_sum, t), theta)

    parts = oracle.differentiable(log_sum, zero), variance(zero), oracle.differentiable(variance, zero)
    return torch.cat([part.reshape(len(scores), -1) for part in parts], 1)


def _moments(p: Problem) -> Tensor:
    return torch.cat([each.flatten(2) for each in (p.point.M1, p.point.M2, p.point.M3)], 2).flatten(0, 1)


register(
    Statement(
        "Attention · Jacobian",
        "∂o/∂x: queries, keys and values move; softmax, linear, sigmoid, relu",
        sample,
        lambda p: p.point.jacobian,
        lambda p: oracle.jacobian(lambda x: forward(p, x), [p.x], 0),
    ),
    Statement(
        "Attention · curvature",
        "Σ g ∂²o/∂x²",
        sample,
        lambda p: p.point.curvature(p.g),
        lambda p: oracle.hessian(lambda x: (p.g * forward(p, x)).sum(), [p.x]),
    ),
    Statement("Attention · J_Q", "∂c_t/∂q_t = Vᵀ Σ_t K/√d_K", sample, lambda p: p.point.J_Q, _by_queries),
    Statement("Attention · J_K", "∂c_t/∂W_K = J_K ⊗ q_t, J_K = Vᵀ Σ_t X/√d_K", sample, _moved_keys, _by_keys),
    Statement(
        "Attention · M1, M2, M3",
        "cumulants of the tokens under each row of A",
        sample_softmax,
        _moments,
        _cumulants,
    ),
)
